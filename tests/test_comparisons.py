"""LAMB with a frozen variance and no compression; the ratio from the momentum's norm; norms from scales alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optim import BUILD, check_replicas, flat, onebit_lamb, small_model, train

import onebit
from onebit.codec import BucketCodec
from onebit.frozen_lamb import FrozenLamb
from onebit.kernels import pack_bits
from onebit.layout import FlatLayout

CODECS = [onebit.OneBit(), onebit.OneBit(scale="bucket"), onebit.OneBit("block", 16)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0),
    st.integers(1, 4),
    st.sampled_from(CODECS),
    st.integers(0, 10**6),
)
def test_norms_of_layers_follow_from_scales(sizes, n, codec, seed):
    layout = FlatLayout([(size,) for size in sizes], n)
    (bucket,) = layout.buckets
    coder = BucketCodec(bucket, codec, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(bucket.numel, dtype=torch.float64)
    for view in layout.views(x):
        view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
    mask = torch.rand(bucket.numel, generator=generator) < 0.7
    mask[sum(sizes) :] = True
    for alive in (None, mask):
        coder.set_alive(alive)
        messages = coder.encode(x if alive is None else x * alive)
        expected = [float(view.norm()) for view in layout.views(coder.decode(messages))]
        found = coder.layer_norms(messages, coder.packed_alive)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    half = torch.arange(bucket.numel) % 2 == 0
    coder.set_alive(None)
    messages = coder.encode(x)
    expected = [float(view.norm()) for view in layout.views(coder.decode(messages) * half)]
    found = coder.layer_norms(messages, pack_bits(half))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_momentum_ratio_is_the_norm_at_the_switch_over_the_norm_now(codec):
    low, high, step = 0.5, 2.0, 0.1

    def work(comm):
        seen = {}

        def after(t, net, opt):
            norms = torch.stack([m.norm() for m in opt.decoded_momentum()])
            if opt.stage is onebit.Stage.WARMUP or "first" not in seen:
                if opt.stage is onebit.Stage.COMPRESSED:
                    seen["first"], seen["ratio"] = norms, torch.ones(len(norms))
                return
            old = seen["ratio"]
            new = (seen["first"] / norms).clamp(old * (1 - step), old * (1 + step)).clamp(low, high)
            torch.testing.assert_close(torch.tensor(list(opt.stats()["ratios"].values())), new, rtol=1e-4, atol=1e-5)
            seen["ratio"] = new

        _, opt, loss = train(comm, onebit_lamb(5, ratio="momentum", codec=codec), 30, after=after)
        state = opt.state[next(iter(opt.state))]
        assert "fresh_variance" not in state
        assert len(set(opt.stats()["ratios"].values())) > 1
        return loss

    first = onebit.run_workers(3, lambda comm: train(comm, onebit_lamb(5, ratio="momentum"), 1)[2])
    assert sum(onebit.run_workers(3, work)) < 0.7 * sum(first)


def test_a_loaded_momentum_ratio_continues_to_the_bit():
    def work(comm):
        with BUILD:
            net, again = small_model(), small_model()

        def step(model, opt, t):
            generator = torch.Generator().manual_seed(1000 * t + comm.rank)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            opt.step()

        opt, other = (onebit_lamb(4, ratio="momentum")(model, comm) for model in (net, again))
        for t in range(8):
            step(net, opt, t)
        again.load_state_dict(net.state_dict())
        other.load_state_dict(opt.state_dict())
        for t in range(8, 12):
            step(net, opt, t)
            step(again, other, t)
        assert torch.equal(flat(net.parameters()), flat(again.parameters()))

    onebit.run_workers(2, work)


def frozen(**given_):
    given_ = {"lr": 0.02, "betas": (0.9, 0.95), "freeze_step": 6, **given_}
    return lambda net, comm: FrozenLamb(net.named_parameters(), comm=comm, **given_)


@pytest.mark.parametrize("coefficient", ["average", "fresh"])
def test_frozen_lamb_is_lamb_until_its_variance_stops(coefficient):
    def lamb(net, comm):
        return onebit.Lamb(net.named_parameters(), lr=0.02, betas=(0.9, 0.95), comm=comm)

    def work(comm):
        seen = []

        def after(t, net, opt):
            state = opt.state[net[0].weight]
            seen.append((state["variance"].clone(), float(opt._steps)))

        net = train(comm, frozen(coefficient=coefficient), 6, after=after)[0]
        theirs = train(comm, lamb, 6)[0]
        assert torch.equal(flat(net.parameters()), flat(theirs.parameters()))
        seen.clear()
        net, opt, loss = train(comm, frozen(coefficient=coefficient), 30, after=after)
        assert all(torch.equal(v, seen[5][0]) for v, _ in seen[5:])
        assert not torch.equal(seen[4][0], seen[5][0])
        check_replicas(comm, net.parameters())
        return loss, opt.payload_bytes

    first = onebit.run_workers(2, lambda comm: train(comm, frozen(), 1)[2])
    last = onebit.run_workers(2, work)
    assert sum(loss for loss, _ in last) < 0.7 * sum(first)
    assert last[0][1] == 30 * 4 * 128  # in full precision throughout: 123 elements and 5 of padding


def test_basic_1_bit_lamb_with_exact_signs_goes_where_frozen_lamb_goes():
    """Gradients of one size per layer travel exactly, so nothing but the frozen variance is left."""

    def run(make, comm=None, **given_):
        p, q = (torch.nn.Parameter(torch.full((size,), 0.3)) for size in (16, 24))
        how = {} if comm is None else {"comm": comm}
        opt = make([p, q], lr=0.01, betas=(0.9, 0.98), eps=0.0, freeze_step=4, **given_, **how)
        for t in range(14):
            p.grad, q.grad = torch.full((16,), 0.5 + t), torch.full((24,), -2.0 * t - 1)
            opt.step()
        return flat([p, q])

    expected = run(FrozenLamb)
    for x in onebit.run_workers(2, lambda comm: run(onebit.OneBitLamb, comm, ratio="fixed")):
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"variance_floor": 1.0}, "variance_floor is 1.0"),
        ({"coefficient": "best"}, "coefficient is 'best'"),
        ({"freeze_step": onebit.AutoFreeze()}, "here it must be a number of updates or a share"),
        ({"freeze_step": 0}, "freeze_step is 0"),
    ],
)
def test_impossible_settings_are_named(given_, words):
    with pytest.raises(onebit.ConfigError, match=words):
        FrozenLamb([torch.nn.Parameter(torch.ones(3))], **given_)


def test_a_layer_without_a_gradient_before_the_freeze_stays_where_it_is():
    p, q = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(8))
    opt = FrozenLamb([p, q], lr=1e-3, freeze_step=2)
    for t in range(6):
        p.grad, q.grad = torch.full((8,), 1.0), torch.full((8,), 0.0 if t < 3 else 1.0)
        opt.step()
    torch.testing.assert_close(q.detach(), torch.ones(8))
    assert not torch.equal(p.detach(), torch.ones(8))


@pytest.mark.parametrize("make", [onebit.OneBitLamb, onebit.OneBitAdam, onebit.ZeroOneAdam], ids=lambda m: m.__name__)
def test_what_is_no_codec_is_named(make):
    with pytest.raises(onebit.ConfigError, match=r"codec is 'bucket'; it must be an onebit\.OneBit"):
        make([torch.nn.Parameter(torch.ones(3))], codec="bucket")


def test_a_state_of_another_dtype_is_refused():
    def stepped(dtype):
        p = torch.nn.Parameter(torch.ones(8, dtype=dtype))
        p.grad = torch.ones_like(p)
        opt = onebit.Lamb([p])
        opt.step()
        return opt

    with pytest.raises(onebit.ConfigError, match="dtype is"):
        stepped(torch.float64).load_state_dict(stepped(torch.float32).state_dict())
