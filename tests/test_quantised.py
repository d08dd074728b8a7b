"""The quantised warm-up: integers with a scale per block, error feedback, what becomes of the errors at the switch."""

import itertools
import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optim import BUILD, check_replicas, flat, onebit_lamb, small_model, train

import onebit
from onebit.averaging import QuantisedMean
from onebit.backend import TorchBackend
from onebit.exchange import TensorSource
from onebit.layout import FlatLayout
from onebit.mistakes import CompressedGradientAdam, CompressedUpdateAdam
from onebit.native_backend import NativeQuantisedCodec
from onebit.quantised import BLOCK, QuantisedCodec, round_up_bf16

CPU = torch.device("cpu")
shapes = st.lists(st.integers(0, 3 * BLOCK), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0)
bits = st.sampled_from([8, 4])
law = settings(deadline=None, max_examples=40)


def values(layout, seed, spread=4.0):
    """Elements of very different sizes, some zero; zero in the padding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(layout.numel, generator=generator) * 10 ** (spread * torch.randn(layout.numel, generator=generator))
    x[torch.rand(layout.numel, generator=generator) < 0.1] = 0
    x[sum(layer.numel for layer in layout.layers) :] = 0
    return x


@law
@given(shapes, st.integers(1, 4), bits, st.integers(0, 10**6))
def test_an_element_is_at_most_half_a_scale_off_and_a_scale_is_that_of_its_layer(sizes, n, bits, seed):
    layout = FlatLayout([(size,) for size in sizes], n)
    (bucket,) = layout.buckets
    codec, x = QuantisedCodec(bucket, bits, torch.float32, CPU), values(layout, seed)
    found = codec.decode(codec.encode(x))
    levels = 127 if bits == 8 else 7
    for layer in layout.layers:
        for chunk in range(n):
            first = max(layer.start, chunk * bucket.chunk)
            last = min(layer.stop, (chunk + 1) * bucket.chunk)
            for start in range(first, last, BLOCK):
                here = slice(start, min(start + BLOCK, last))
                scale = float(x[here].abs().max()) / levels * (1 + 2**-7)  # bfloat16 holds 8 bits
                assert ((x[here] - found[here]).abs() <= scale / 2 * (1 + 1e-6)).all()
    assert torch.equal(found[x == 0], torch.zeros(int((x == 0).sum())))


@law
@given(shapes, st.integers(1, 4), bits, st.integers(0, 10**6), st.sampled_from([1.0, 1e-37, 1e30, math.nan, math.inf]))
def test_compiled_conversions_give_the_same_bytes(sizes, n, bits, seed, size):
    layout = FlatLayout([(size,) for size in sizes], n)
    (bucket,) = layout.buckets
    x = values(layout, seed, spread=1.0)
    x[sizes[0] // 2] *= size
    ours, theirs = NativeQuantisedCodec(bucket, bits), QuantisedCodec(bucket, bits, torch.float32, CPU)
    messages = theirs.encode(x)
    assert torch.equal(ours.encode(x), messages)
    torch.testing.assert_close(ours.decode(messages), theirs.decode(messages), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        ours.subtract(x.clone(), messages), theirs.subtract(x.clone(), messages), rtol=0, atol=0, equal_nan=True
    )


def test_scales_are_rounded_up():
    assert round_up_bf16(torch.tensor([0.0, 1.0, 1.0 + 2**-20, math.inf])).tolist() == [0.0, 1.0, 1.0078125, math.inf]
    y = torch.rand(1000)
    up = round_up_bf16(y).float()
    assert (up >= y).all()
    assert (up <= y * (1 + 2**-7)).all()
    assert math.isnan(float(round_up_bf16(torch.tensor([math.nan]))))


@law
@given(shapes, st.integers(1, 4), bits, st.integers(0, 10**6))
def test_nothing_is_lost_over_many_steps(sizes, n, bits, seed):
    layout = FlatLayout([(size,) for size in sizes], n, bucket_elements=300)
    backend = TorchBackend(layout, torch.float64, CPU)

    def work(comm):
        mean = QuantisedMean(layout, [backend.quantised_codec(b, bits) for b in layout.buckets], comm)
        sent, given_ = torch.zeros(2, layout.numel, dtype=torch.float64)
        for t in range(5):
            x = torch.zeros(layout.numel, dtype=torch.float64)
            for view, layer in zip(layout.views(x), layout.layers, strict=True):
                generator = torch.Generator().manual_seed(seed + 1000 * t + 100 * comm.rank + layer.index)
                view.copy_(torch.randn(layer.shape, generator=generator, dtype=torch.float64))
            out = torch.empty_like(x)
            means = [mean.exchange.start(b, TensorSource(x[b.slice].clone())) for b in layout.buckets]
            for under_way in means:
                under_way.serve()
            mean.take(means, out)
            mean.commit(None)
            sent, given_ = sent + out, given_ + x
        comm.all_reduce(given_)
        torch.testing.assert_close(sent + mean.exchange.total_error(), given_ / n, rtol=0, atol=1e-11)
        return sent

    results = onebit.run_workers(n, work)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("transport", ["int8", "int4"])
@pytest.mark.parametrize("make", [onebit.OneBitLamb, onebit.OneBitAdam, onebit.Lamb], ids=lambda make: make.__name__)
def test_it_trains_on_equal_replicas(make, transport):
    given_ = {"lr": 0.02, "betas": (0.9, 0.95), "bucket_elements": 50}
    staged = make is not onebit.Lamb
    given_ |= {"warmup_transport": transport, "freeze_step": 15} if staged else {"transport": transport}
    build = lambda net, comm: make(net.named_parameters(), comm=comm, **given_)  # noqa: E731
    first = onebit.run_workers(3, lambda comm: train(comm, build, 1)[2])
    last = onebit.run_workers(3, lambda comm: train(comm, build, 40)[2])
    assert sum(last) < 0.7 * sum(first)


@pytest.mark.parametrize(("transport", "bits"), [("int8", 8), ("int4", 4)])
def test_bytes_of_the_warm_up(transport, bits):
    """An integer per element, 2 bytes per block of 128, up to 3 of fill per message; both ways."""

    def work(comm):
        p = torch.nn.Parameter(torch.ones(1024 * 4))
        opt = onebit.Lamb([p], transport=transport, comm=comm)
        p.grad = torch.randn(1024 * 4)
        opt.step()
        return opt.payload_bytes

    chunk = 1024 * bits // 8 + 2 * 1024 // BLOCK
    assert onebit.run_workers(4, work) == [2 * 3 * chunk] * 4


@pytest.mark.parametrize("transport", ["int8", "int4"])
def test_at_the_switch_what_was_not_sent_goes_out_with_the_momentum(transport):
    """One quiet compressed step, all gradients zero: momentum and errors hold b1 m + (1 - b1) times the old errors."""

    def work(comm):
        with BUILD:
            net = small_model().double()
        opt = onebit_lamb(6, warmup_transport=transport, momentum_scales=False)(net, comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(5):
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator).double()
            opt.step()
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).double()
        step, kept = opt._switch, {}

        def switch():
            kept["left"], kept["m"] = opt._quantised.exchange.total_error(), opt._flat["momentum"].clone()
            step()

        opt._switch = switch
        opt.step()
        assert opt.stage is onebit.Stage.COMPRESSED
        assert opt._quantised is None
        assert float(kept["left"].abs().max()) > 0
        torch.testing.assert_close(opt._exchange.total_error(), 0.1 * kept["left"], rtol=1e-12, atol=1e-14)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
        now = torch.zeros_like(kept["m"])
        for view, m in zip(opt._layout.views(now), opt.decoded_momentum(), strict=True):
            view.copy_(m)
        expected = 0.9 * kept["m"] + 0.1 * kept["left"]
        torch.testing.assert_close(now + opt._exchange.total_error(), expected, rtol=1e-12, atol=1e-14)

    onebit.run_workers(3, work)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_bad_gradient_in_the_warm_up_is_as_if_the_step_never_was(bad):
    def work(comm, poison):
        with BUILD:
            net = small_model()
        opt = onebit_lamb(8, warmup_transport="int8")(net, comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for t in range(12):
            grads = [torch.randn(p.shape, generator=generator) for p in net.parameters()]
            if poison and t == 4:
                for p in net.parameters():
                    p.grad = torch.ones_like(p)
                if comm.rank == 1:
                    next(net.parameters()).grad[0, 3] = bad
                opt.step()
                check_replicas(comm, net.parameters())
            for p, grad in zip(net.parameters(), grads, strict=True):
                p.grad = grad
            opt.step()
        assert opt.stats()["skipped_steps"] == int(poison)
        return flat(net.parameters()), opt._exchange.worker_error, opt._exchange.server_error

    clean, poisoned = (onebit.run_workers(3, lambda c, p=p: work(c, p)) for p in (False, True))
    for ours, theirs in zip(clean, poisoned, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def state_run(comm, tmp_path, cut, rank=None):
    """Train 10 steps with a save and a load after `cut`; the parameters of both ways."""
    with BUILD:
        net, again = small_model(), small_model(1)

    def gradients(model, t):
        generator = torch.Generator().manual_seed(1000 * t + comm.rank)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)

    opt = onebit_lamb(6, warmup_transport="int8")(net, comm)
    for t in range(10):
        if t == cut:
            torch.save({"model": net.state_dict(), "opt": opt.state_dict()}, tmp_path / f"{comm.rank}.pt")
        gradients(net, t)
        opt.step()
    comm.all_gather_bytes(b"")  # all have saved
    saved = torch.load(tmp_path / f"{comm.rank if rank is None else rank}.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    other = onebit_lamb(6, warmup_transport="int8")(again, comm)
    other.load_state_dict(saved["opt"])
    for t in range(cut, 10):
        gradients(again, t)
        other.step()
        check_replicas(comm, again.parameters())
    return flat(net.parameters()), flat(again.parameters())


@pytest.mark.parametrize("cut", [0, 3, 6, 8])
def test_a_loaded_state_continues_to_the_bit(cut, tmp_path):
    for ours, theirs in onebit.run_workers(3, lambda comm: state_run(comm, tmp_path, cut)):
        assert torch.equal(ours, theirs)


def test_another_workers_errors_are_named_and_left_out(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="onebit"):
        onebit.run_workers(2, lambda comm: state_run(comm, tmp_path, 3, rank=0))
    assert "worker 1 loaded the state that worker 0 saved" in caplog.text


def test_another_transport_is_refused_where_the_state_differs():
    def make(transport):
        p = torch.nn.Parameter(torch.ones(8))
        p.grad = torch.ones(8)
        opt = onebit.Lamb([p], transport=transport)
        opt.step()
        return opt

    with pytest.raises(onebit.ConfigError, match="bits of the warm-up's transport"):
        make("int8").load_state_dict(make("int4").state_dict())
    make("fp32").load_state_dict(make("bf16").state_dict())


def test_back_in_the_warm_up_integers_are_sent_again():
    def work(comm):
        sent = []

        def after(t, net, opt):
            sent.append(opt.payload_bytes)
            if t == 9:
                opt.refreeze(5)

        _, opt, _ = train(comm, onebit_lamb(5, warmup_transport="int8"), 17, after=after)
        assert opt.stage is onebit.Stage.COMPRESSED
        steps = [b - a for a, b in itertools.pairwise(sent)]
        assert steps[2] == steps[10] > steps[6] == steps[15]

    onebit.run_workers(3, work)


def masked(comm, make, **given_):
    """Two layers, one with a mask over half of it; the optimizer one step after the switch."""
    p, q = torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(64))
    mask = (torch.arange(64) % 2 == 0).float()
    groups = [{"params": [p], "exp_avg_mask": mask}, {"params": [q]}]
    opt = make(groups, lr=0.01, freeze_step=3, comm=comm, **given_)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(5):
        p.grad, q.grad = torch.randn(64, generator=generator), torch.randn(64, generator=generator)
        opt.step()
    return opt, mask


def test_masked_elements_stay_out_of_the_exchange():
    def work(comm):
        opt, mask = masked(comm, onebit.OneBitLamb, warmup_transport="int4")
        assert torch.equal(opt._exchange.alive[:64], mask != 0)

    onebit.run_workers(2, work)


def test_without_feedback_nothing_is_carried_over_the_switch():
    def work(comm):
        settings_ = {"error_feedback": "none", "warmup_transport": "int4"}
        _, opt, _ = train(comm, onebit_lamb(5, **settings_), 12)
        assert float(opt._exchange.server_error.abs().max()) == 0
        assert float(opt._exchange.worker_error.abs().max()) == 0

    onebit.run_workers(2, work)


@pytest.mark.parametrize("make", [CompressedGradientAdam, CompressedUpdateAdam], ids=lambda make: make.__name__)
def test_comparisons_do_not_take_over_errors_in_other_units(make, caplog):
    def work(comm):
        p = torch.nn.Parameter(torch.zeros(300))
        opt = make([p], lr=1e-3, freeze_step=3, comm=comm, warmup_transport="int4")
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(8):
            before = p.detach().clone()
            p.grad = 1e5 * torch.randn(300, generator=generator)
            opt.step()
            assert (p.detach() - before).abs().max() < 0.02

    with caplog.at_level(logging.INFO, logger="onebit"):
        onebit.run_workers(2, work)
    assert "drops what its quantised warm-up did not send" in caplog.text


@pytest.mark.parametrize("transport", ["int8", "int4"])
def test_eps_0_is_refused_where_small_gradients_are_zero_at_first(transport):
    with pytest.raises(onebit.ConfigError, match=f"eps is 0 and gradients are sent as {transport}"):
        onebit.Lamb([torch.nn.Parameter(torch.ones(3))], eps=0.0, transport=transport)
    onebit.Lamb([torch.nn.Parameter(torch.ones(3))], eps=0.0, transport="bf16")
