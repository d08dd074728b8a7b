"""The optimizers as their users meet them: many workers, real autograd, odd parameters, bad values."""

import copy
import logging
import math
import pickle

import pytest
import torch
from processes import run_processes
from torch import nn

import onebit
from onebit.comm import Comm, Solo
from onebit.kernels import choose


def small_model(seed=0):
    """Embedding, attention-free body, tied shapes of several kinds; the same weights for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return model


BUILD = __import__("threading").Lock()  # nn.Linear draws from the global generator, which threads share


def train(comm: Comm, make, steps=20, model=small_model, after=lambda t, model, opt: None):
    """Train on worker-dependent random data; check replicas after every step; return model and optimizer."""
    with BUILD:
        net = model()
    opt = make(net, comm)
    generator = torch.Generator().manual_seed(100 + comm.rank)
    teacher = torch.linspace(-1, 1, 18).view(6, 3)
    for t in range(steps):
        x = torch.randn(8, 6, generator=generator)
        loss = ((net(x) - x @ teacher) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        check_replicas(comm, net.parameters())
        after(t, net, opt)
    return net, opt, float(loss.detach())


def check_replicas(comm, params):
    mine = b"".join(bytes(p.detach().contiguous().view(-1).view(torch.uint8).tolist()) for p in params if p.numel())
    assert len(set(comm.all_gather_bytes(mine))) == 1


def onebit_lamb(freeze_step=5, **settings):
    settings = {"lr": 0.02, "betas": (0.9, 0.95), **settings}
    return lambda net, comm: onebit.OneBitLamb(net.named_parameters(), freeze_step=freeze_step, comm=comm, **settings)


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "settings",
    [{}, onebit.PAPER, {"bucket_elements": 50}, {"error_feedback": "scaled"}, {"state": "compact"}, {"state": "full"}],
    ids=str,
)
def test_replicas_stay_equal_and_the_loss_falls(n, settings):
    losses = onebit.run_workers(n, lambda comm: train(comm, onebit_lamb(10, **settings), 60)[2])
    before = onebit.run_workers(n, lambda comm: train(comm, onebit_lamb(10, **settings), 1)[2])
    assert sum(losses) < 0.5 * sum(before)


@pytest.mark.parametrize("transport", ["fp32", "bf16"])
def test_warm_up_is_lamb_to_the_bit(transport):
    def baseline(net, comm):
        return onebit.Lamb(net.parameters(), 0.02, betas=(0.9, 0.95), weight_decay=0.1, comm=comm, transport=transport)

    def both(comm):
        make = onebit_lamb(99, weight_decay=0.1, warmup_transport=transport)
        one, opt, _ = train(comm, make, 12)
        other, ref, _ = train(comm, baseline, 12)
        assert torch.equal(flat(one.parameters()), flat(other.parameters()))
        assert opt.payload_bytes == ref.payload_bytes > 0

    onebit.run_workers(3, both)


def test_solo_equals_one_virtual_worker():
    one = onebit.run_workers(1, lambda comm: flat(train(comm, onebit_lamb())[0].parameters()))[0]
    assert torch.equal(one, flat(train(Solo(), onebit_lamb())[0].parameters()))


def test_float64_trains_too():
    def work(comm):
        net, opt, _ = train_double(comm)
        assert all(value.dtype == torch.float64 for state in opt.state.values() for value in state.values())
        return net

    def train_double(comm):
        with BUILD:
            net = small_model().double()
        opt = onebit_lamb()(net, comm)
        for _ in range(10):
            opt.zero_grad()
            (net(torch.ones(2, 6, dtype=torch.float64) * (comm.rank + 1)) ** 2).sum().backward()
            opt.step()
            check_replicas(comm, net.parameters())
        return net, opt, 0

    onebit.run_workers(2, work)


def test_payload_falls_sixteenfold_at_the_switch():
    seen = []

    def work(comm):
        p = nn.Parameter(torch.ones(40_000))
        opt = onebit.OneBitLamb([p], freeze_step=2, warmup_transport="bf16", comm=comm)
        for _ in range(4):
            before = opt.payload_bytes
            p.grad = torch.ones_like(p)
            opt.step()
            seen.append((comm.rank, opt.payload_bytes - before))

    onebit.run_workers(2, work)
    mine = [count for rank, count in seen if rank == 0]
    message = 4 + 4 + 40_000 // 2 // 8  # header, one scale, bits of one chunk
    assert mine == [2 * 40_000, 2 * 40_000, 2 * message, 2 * message]  # 2 (n-1)/n x 2 bytes; (n-1) messages, twice


# -- elements that never had a gradient ---------------------------------------------------------------------


def embedding_run(comm, rows_by_step, settings, rows=8):
    """An embedding of which worker w sees the rows that rows_by_step(t)[w] names; returns the weights per step."""
    p = nn.Parameter(torch.arange(1, rows * 4 + 1).float().view(rows, 4) / 10)
    q = nn.Parameter(torch.ones(5))
    opt = onebit.OneBitLamb([p, q], lr=0.01, betas=(0.9, 0.95), comm=comm, **settings)
    history = [p.detach().clone()]
    generator = torch.Generator().manual_seed(comm.rank)
    for t in range(len(rows_by_step)):
        p.grad = torch.zeros_like(p)
        for row in rows_by_step[t][comm.rank % 2]:
            p.grad[row] = torch.randn(4, generator=generator)
        q.grad = torch.randn(5, generator=generator)
        opt.step()
        check_replicas(comm, [p, q])
        history.append(p.detach().clone())
    return history, opt


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("codec", [onebit.OneBit(), onebit.OneBit(scale="bucket"), onebit.OneBit("block", 8)], ids=str)
def test_unused_rows_stay_exactly_and_move_once_their_token_appears(n, codec):
    """Rows 5-7 are unused; row 6 first appears on one worker long after the switch."""
    plan = [([0, 1, 2], [2, 3, 4])] * 40
    plan[25] = ([0, 6], [1]) if n > 1 else ([0, 6], [0, 6])

    def work(comm):
        history, _ = embedding_run(comm, plan, {"freeze_step": 10, "codec": codec})
        unused = torch.tensor([5, 7])
        for now in history:
            assert torch.equal(now[unused], history[0][unused])
        for now in history[:26]:
            assert torch.equal(now[6], history[0][6])
        assert not torch.equal(history[30][6], history[0][6])
        moved = (history[-1] - history[25]).abs().amax(1)
        assert moved[6] < 2 * moved[:5].max()  # not stepped further than rows that are in use
        for row in range(3):
            assert not torch.equal(history[-1][row], history[11][row])

    onebit.run_workers(n, work)


def test_weight_decay_still_applies_to_unused_rows():
    def work(comm):
        plan = [([0, 1], [1, 2])] * 20
        history, _ = embedding_run(comm, plan, {"freeze_step": 5, "weight_decay": 0.1})
        assert (history[-1][7] < history[0][7]).all()
        torch.testing.assert_close(history[-1][7] / history[0][7], (history[-1][7] / history[0][7])[:1].expand(4))

    onebit.run_workers(2, work)


def test_the_first_gradient_of_a_waking_element_is_not_lost():
    """It waits in the worker error for one step, then takes part."""
    plan = [([0, 1], [1, 2])] * 10
    plan[6] = ([0, 1, 5], [1])

    def work(comm):
        _, opt = embedding_run(comm, plan[:7], {"freeze_step": 5})
        held = opt._exchange.worker_error.view(-1)[20:24].clone()
        return held, opt._exchange.wake_wanted

    (first, wanted), (second, also) = onebit.run_workers(2, work)
    assert wanted
    assert also
    assert first.ne(0).all()
    assert second.eq(0).all()


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_tiny_gradient_wakes_an_element_in_compact_state_too(kernels, monkeypatch):
    """Its held gradient is far below half a unit of its 128 elements' 8 bits; it asks once and is then awake."""
    if kernels == "native" and choose(torch.device("cpu"), torch.float32)[0] != "native":
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv("ONEBIT_KERNELS", kernels)

    def work(comm):
        p = nn.Parameter(torch.ones(64))
        opt = onebit.OneBitLamb([p], lr=0.01, betas=(0.9, 0.95), freeze_step=3, state="compact", comm=comm)
        wishes, sent = [], []
        for t in range(12):
            p.grad = torch.ones(64) * (1 + comm.rank)
            p.grad[20:24] = 0.0 if t < 6 else 1e-6
            before = opt.payload_bytes
            opt.step()
            sent.append(opt.payload_bytes - before)
            wishes.append(opt._exchange is not None and opt._exchange.wake_wanted)
        assert wishes == [False] * 6 + [True] + [False] * 5
        assert sent[7] > sent[8] == sent[11]
        assert opt._exchange.alive is None

    onebit.run_workers(2, work)


def test_user_mask_holds_momentum_at_zero():
    def work(comm, dead_elements):
        p = nn.Parameter(torch.ones(12))
        mask = (torch.arange(12) < 8).float()
        opt = onebit.OneBitLamb(
            [{"params": [p], "exp_avg_mask": mask}], lr=0.1, freeze_step=3, comm=comm, dead_elements=dead_elements
        )
        for t in range(12):
            before = p.detach().clone()
            p.grad = torch.ones(12) * (comm.rank + 1)
            opt.step()
            if t >= 3:
                assert torch.equal(p[8:], before[8:])
                assert not torch.equal(p[:8], before[:8])
        assert opt.state_dict()["param_groups"][0].keys() & {"exp_avg_mask"} == set()

    for dead_elements in ("hold", "exchange"):
        onebit.run_workers(2, lambda comm, d=dead_elements: work(comm, d))


def test_attention_key_bias_stays_small():
    """Its true gradient is zero (softmax does not see it); one bit must not walk it away. A long compressed run."""
    width, steps = 8, 300

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out((q @ k.transpose(-1, -2) / width**0.5).softmax(-1) @ v)

    def work(comm, floor, transport):
        with BUILD:
            torch.manual_seed(3)
            net = Attention()
            nn.init.zeros_(net.qkv.bias)
        how = {"variance_floor": floor, "warmup_transport": transport, "comm": comm}
        opt = onebit.OneBitLamb(net.parameters(), 0.02, 40, (0.9, 0.98), **how)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(steps):
            x = torch.randn(4, 6, width, generator=generator)
            opt.zero_grad()
            ((net(x) - x.roll(1, 1)) ** 2).mean().backward()
            opt.step()
        bias = net.qkv.bias.detach().view(3, width)
        return float(bias[1].norm()), float(bias[[0, 2]].norm())

    for transport in ("fp32", "int8"):
        key, others = onebit.run_workers(4, lambda comm, t=transport: work(comm, 0.01, t))[0]
        assert key < 0.2 * others
    key, others = onebit.run_workers(4, lambda comm: work(comm, 0.0, "int8"))[0]
    assert key < 0.2 * others  # what integers round away is a floor by itself
    bare_key, _ = onebit.run_workers(4, lambda comm: work(comm, 0.0, "fp32"))[0]
    assert bare_key > 5 * key


# -- steps that cannot be taken, layers that are not there -------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("when", [2, 8], ids=["warm-up", "compressed"])
@pytest.mark.parametrize(
    "settings", [{"state": "full"}, {"state": "compact"}, onebit.PAPER], ids=["full", "compact", "paper"]
)
def test_a_bad_gradient_on_one_worker_is_as_if_the_step_never_was(bad, when, settings):
    def work(comm, poison):
        with BUILD:
            net = small_model()
        opt = onebit_lamb(5, **settings)(net, comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for t in range(14):
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            if poison and t == when:
                kept = [p.grad for p in net.parameters()]
                for p in net.parameters():
                    p.grad = torch.ones_like(p)
                if comm.rank == 1:
                    next(net.parameters()).grad[0, 3] = bad
                opt.step()
                for p, grad in zip(net.parameters(), kept, strict=True):
                    p.grad = grad
            opt.step()
        assert opt.stats()["skipped_steps"] == int(poison)
        assert opt.stats()["step"] == 14
        return flat(net.parameters()), opt._exchange.worker_error, opt._exchange.server_error

    clean = onebit.run_workers(3, lambda comm: work(comm, False))
    poisoned = onebit.run_workers(3, lambda comm: work(comm, True))
    for ours, theirs in zip(clean, poisoned, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("settings", [{}, onebit.PAPER], ids=["default", "paper"])
def test_odd_layers_neither_crash_nor_desynchronise(settings):
    """A silent layer, an empty one, a scalar, one with gradients on one worker only, one that starts late."""

    def work(comm):
        named = {
            "silent": torch.ones(7),
            "empty": torch.ones(0, 3),
            "scalar": torch.tensor(2.0),
            "partial": torch.ones(3, 3),
            "late": torch.ones(5),
            "late from zero": torch.zeros(4),
            "busy": torch.ones(11),
        }
        params = {name: nn.Parameter(value.clone()) for name, value in named.items()}
        opt = onebit.OneBitLamb(params.items(), lr=0.01, freeze_step=5, weight_decay=0.01, comm=comm, **settings)
        generator = torch.Generator().manual_seed(comm.rank)
        for t in range(40):
            for name, p in params.items():
                late = name.startswith("late") and t < 20
                absent = name == "partial" and comm.rank != 1
                p.grad = None if name == "silent" or late or absent else torch.randn(p.shape, generator=generator) + 1
            opt.step()
            check_replicas(comm, params.values())
            assert all(torch.isfinite(p).all() for p in params.values())
            if t < 19:
                assert torch.equal(params["late"], torch.ones(5))
        assert torch.equal(params["silent"], torch.ones(7))
        for name in ("scalar", "partial", "late", "late from zero", "busy"):
            assert not torch.equal(params[name].detach(), named[name])
            assert (params[name] - named[name]).abs().max() < 2, name

    onebit.run_workers(2, work)


def test_a_layer_clamped_to_coefficient_one_goes_on_after_the_switch():
    p = nn.Parameter(torch.full((4,), 100.0))
    opt = onebit.OneBitLamb([p], lr=0.01, freeze_step=3, max_coeff=1.0)
    for _ in range(6):
        p.grad = torch.ones(4)
        before = p.detach().clone()
        opt.step()
        assert (p < before).all()


# -- what torch expects ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [3, 5, 9], ids=["warm-up", "switch", "compressed"])
@pytest.mark.parametrize(
    "settings", [{}, onebit.PAPER, {"error_feedback": "scaled"}], ids=["default", "paper", "scaled"]
)
def test_a_loaded_state_dict_continues_to_the_bit(cut, settings, tmp_path):
    def gradients(net, t, rank):
        generator = torch.Generator().manual_seed(1000 * t + rank)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator)

    def work(comm):
        with BUILD:
            net, again = small_model(), small_model(1)
        opt = onebit_lamb(5, **settings)(net, comm)
        for t in range(14):
            if t == cut:
                path = tmp_path / f"{comm.rank}.pt"
                torch.save({"model": net.state_dict(), "opt": opt.state_dict()}, path)
            gradients(net, t, comm.rank)
            opt.step()
        saved = torch.load(path, weights_only=True)
        again.load_state_dict(saved["model"])
        other = onebit_lamb(5, **settings)(again, comm)
        other.load_state_dict(saved["opt"])
        for t in range(cut, 14):
            gradients(again, t, comm.rank)
            other.step()
        assert torch.equal(flat(net.parameters()), flat(again.parameters()))
        assert other.stats()["step"] == opt.stats()["step"]

    onebit.run_workers(3, work)


def test_foreign_states_are_refused_or_named(caplog):
    p = nn.Parameter(torch.ones(3))
    opt = onebit.OneBitLamb([p], freeze_step=1)
    with pytest.raises(onebit.ConfigError, match="another library"):
        opt.load_state_dict(torch.optim.SGD([p]).state_dict())
    with pytest.raises(onebit.ConfigError, match="optimizer is OneBitLamb here and was Lamb"):
        opt.load_state_dict(onebit.Lamb([p]).state_dict())

    def save(comm):
        q = nn.Parameter(torch.ones(30))
        mine = onebit.OneBitLamb([q], freeze_step=1, comm=comm)
        for _ in range(3):
            q.grad = torch.arange(30.0) * (comm.rank + 1)
            mine.step()
        return copy.deepcopy(mine.state_dict())

    states = onebit.run_workers(2, save)
    with pytest.raises(onebit.ConfigError, match="workers is 1 here and was 2"):
        opt.load_state_dict(states[0])

    def load(comm):
        q = nn.Parameter(torch.ones(30))
        mine = onebit.OneBitLamb([q], freeze_step=1, comm=comm)
        mine.load_state_dict(states[0])
        return float(mine._exchange.worker_error.norm())

    with caplog.at_level(logging.WARNING, "onebit"):
        norms = onebit.run_workers(2, load)
    assert norms[0] > 0
    assert norms[1] == 0
    assert "worker 1 loaded the state that worker 0 saved" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"codec": onebit.OneBit("block", 8)}, "codec is"),
        ({"codec": onebit.OneBit("bucket")}, "codec is"),
        ({"ratio": "fixed"}, "ratio.s state is"),
        ({"error_feedback": "scaled"}, "error_feedback scaled is"),
        ({"bucket_elements": 20}, "bucket_elements is"),
        ({"shape": 31}, "shape of parameter 0 is"),
        ({"betas": (0.9, 1.5)}, "betas are"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(settings, words):
    def build(shape=30, **settings):
        x = nn.Parameter(torch.ones(shape))
        opt = onebit.OneBitLamb([x], freeze_step=1, **settings)
        for _ in range(3):
            x.grad = torch.linspace(1, 2, shape)
            opt.step()
        return x, opt

    saved = build()[1].state_dict()
    if "betas" in settings:
        saved["param_groups"][0]["betas"] = settings.pop("betas")
    x, opt = build(**settings)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(onebit.ConfigError, match=words):
        opt.load_state_dict(saved)
    after = opt.state_dict()
    assert str(before) == str(after)
    x.grad = torch.ones_like(x)
    opt.step()


def test_workers_that_load_different_states_are_told():
    def work(comm):
        x = nn.Parameter(torch.ones(4))
        opt = onebit.OneBitLamb([x], freeze_step=5, comm=comm)
        x.grad = torch.ones(4)
        opt.step()
        saved = copy.deepcopy(opt.state_dict())
        saved["state"][0]["variance"] *= 1 + comm.rank
        opt.load_state_dict(saved)
        with pytest.raises(onebit.MismatchError, match="loaded states differ between workers: variance"):
            opt.step()

    onebit.run_workers(2, work)


def test_a_huge_gradient_after_the_switch_is_skipped_and_a_bad_rate_is_named():
    x = nn.Parameter(torch.ones(4))
    opt = onebit.OneBitLamb([x], lr=0.1, freeze_step=2)
    for value in (1.0, 1.0, 1e30, 1.0):
        x.grad = torch.full((4,), value)
        opt.step()
    assert opt.stats()["skipped_steps"] == 1
    assert torch.isfinite(x).all()
    opt.param_groups[0]["lr"] = math.nan
    with pytest.raises(onebit.ConfigError, match="lr is nan after 3 updates"):
        opt.step()


def test_doubled_and_missing_parameters_are_refused():
    x = nn.Parameter(torch.ones(4))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(onebit.ConfigError, match="twice in a group"):
        onebit.Lamb([x, x])
    empty = onebit.Lamb([{"params": []}])
    with pytest.raises(onebit.ConfigError, match="no parameters"):
        empty.step()


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    opt = onebit.Lamb([nn.Parameter(torch.ones(2))])
    with pytest.raises(onebit.ConfigError, match=r"lr is -1\.0"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_a_gradient_whose_square_is_not_finite_is_skipped(kernels, monkeypatch):
    if kernels == "native" and choose(torch.device("cpu"), torch.float32)[0] != "native":
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv("ONEBIT_KERNELS", kernels)
    p = nn.Parameter(torch.ones(4))
    opt = onebit.OneBitLamb([p], lr=0.1, freeze_step=5)
    p.grad = torch.tensor([1.0, 1e23, 1.0, 1.0])
    opt.step()
    assert torch.equal(p.detach(), torch.ones(4))
    assert opt.stats()["skipped_steps"] == 1


def processes_train(comm, settings):
    """For `run_processes`: parameters after the switch, and the replicas equal after every step."""
    net, opt, _ = train(comm, onebit_lamb(5, **settings), 12)
    assert opt.stage is onebit.Stage.COMPRESSED
    return flat(net.parameters())


@pytest.mark.parametrize("settings", [{}, onebit.PAPER], ids=["default", "paper"])
def test_processes_train_like_virtual_workers_to_the_bit(settings):
    """Two workers, so that the warm-up's sums have one order."""
    virtual = onebit.run_workers(2, lambda comm: processes_train(comm, settings))
    real = run_processes(2, processes_train, settings, timeout_s=90)
    assert torch.equal(virtual[0], virtual[1])
    assert torch.equal(real[0], virtual[0])
    assert torch.equal(real[1], virtual[0])


@pytest.mark.parametrize(
    "settings", [{}, onebit.PAPER, {"error_feedback": "scaled"}], ids=["default", "paper", "scaled"]
)
def test_native_and_reference_kernels_train_alike(settings, monkeypatch):
    if choose(torch.device("cpu"), torch.float32)[0] != "native":
        pytest.skip("the native kernels are not built")
    results = []
    for kernels in ("native", "reference"):
        monkeypatch.setenv("ONEBIT_KERNELS", kernels)
        results.append(
            onebit.run_workers(2, lambda comm: flat(train(comm, onebit_lamb(8, **settings), 30)[0].parameters()))
        )
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)


def test_kernels_and_versions_are_among_what_workers_compare():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = onebit.OneBitLamb([{"params": [p], "exp_avg_mask": torch.tensor([1, 0, 1])}])
    opt.step()
    assert {"kernels", "torch version", "onebit version", "device", "dtype", "exp_avg_mask of group 0"} <= set(
        dict(opt._settings())
    )


def test_groups_closure_scheduler_and_late_groups():
    a, b, c = (nn.Parameter(torch.ones(3)) for _ in range(3))
    opt = onebit.OneBitLamb([{"params": [a], "lr": 0.5}, {"params": [b]}], lr=0.1, freeze_step=2)
    opt.add_param_group({"params": [c], "weight_decay": 0.2})
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

    def closure():
        opt.zero_grad()
        loss = (a * b * c).sum()
        loss.backward()
        return loss

    assert float(opt.step(closure).detach()) == 3.0
    schedule.step()
    assert [group["lr"] for group in opt.param_groups] == [0.25, 0.05, 0.05]
    moved = [float((1 - p.detach()).abs().max()) for p in (a, b)]
    assert moved[0] == pytest.approx(5 * moved[1], rel=1e-5)
    with pytest.raises(onebit.ConfigError, match="after the first step"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_lr_may_be_a_tensor():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for x, lr in [(p, 0.1), (q, torch.tensor(0.1, dtype=torch.float64))]:
        opt = onebit.OneBitLamb([x], lr=lr, freeze_step=1)
        for _ in range(3):
            x.grad = torch.ones(3)
            opt.step()
    assert torch.equal(p, q)


def test_non_contiguous_parameters_are_updated_in_place():
    p = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    q = nn.Parameter(torch.arange(12.0).view(3, 4).t().contiguous())
    for x in (p, q):
        opt = onebit.OneBitLamb([x], lr=0.1, freeze_step=2)
        for t in range(5):
            x.grad = torch.arange(12.0).view(4, 3) - 4 + t
            opt.step()
    assert not p.is_contiguous()
    assert torch.equal(p, q)


def test_the_ratio_is_bounded_by_two_or_as_released_where_the_codec_is():
    """Layers' gradients fade after the switch, so that every ratio climbs to its bound (DEV-22)."""
    for settings, bound in [
        ({}, 2.0),
        (onebit.PAPER, 4.0),
        ({"factor_max": 1.5}, 1.5),
        ({**onebit.PAPER, "factor_max": 3.0}, 3.0),
    ]:
        weight = torch.nn.Parameter(torch.ones(64))
        optimizer = onebit.OneBitLamb([weight], lr=1e-4, freeze_step=3, betas=(0.9, 0.5), **settings)
        for step in range(60):
            weight.grad = torch.ones(64) * 0.9**step
            optimizer.step()
        assert optimizer.stats()["ratios"] == pytest.approx({next(iter(optimizer.stats()["ratios"])): bound})


def growing(steps: int = 40, **settings) -> tuple[list[float], onebit.OneBitLamb]:
    """The length of each update of a layer whose gradients become 1.2 times as large with each step after the switch,
    and beside it a layer whose gradients stay."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(32))]
    optimizer = onebit.OneBitLamb(params, **{"lr": 1e-3, "freeze_step": 5} | settings)
    lengths = []
    for step in range(steps):
        params[0].grad = torch.sign(torch.randn(64)) * 1.2 ** max(0, step - 8)
        params[1].grad = torch.sign(torch.randn(32))
        before = params[0].detach().clone()
        optimizer.step()
        lengths.append(float((params[0].detach() - before).norm()))
    return lengths, optimizer


@pytest.mark.parametrize("more", [{}, {"error_feedback": "scaled"}, {"ratio": "fixed"}, dict(onebit.PAPER)])
def test_a_gain_is_another_rate_in_both_stages_to_the_bit(more):
    def lengths(lr: float, gain: float) -> list[float]:
        return growing(weight_decay=0.01, lr=lr, lr_gain=gain, **more)[0]

    assert lengths(2**-6, 0.5) == lengths(2**-7, 1.0)
    assert lengths(2**-6, 0.5)[5:] != lengths(2**-6, 1.0)[5:]


def test_tenfold_is_int4_and_part_of_the_rate():
    p = nn.Parameter(torch.ones(300))
    optimizer = onebit.OneBitLamb([p], lr=0.5, freeze_step=0.17, total_steps=100, **onebit.TENFOLD)
    p.grad = torch.full((300,), 0.1)
    optimizer.step()
    assert dict(optimizer._settings())["lr_gain"] == "0.7"
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer._quantised is not None


@pytest.mark.parametrize("ratio", ["sqrt", "variance", "momentum"])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_updates_grow_no_longer_than_three_times_those_after_the_switch(ratio, decay):
    """LAMB's are lr ||x|| = 0.008 long whatever the gradients (DEV-24)."""
    bound, optimizer = growing(ratio=ratio, weight_decay=decay)
    free, unbounded = growing(ratio=ratio, weight_decay=decay, growth_max=math.inf)
    tight, _ = growing(ratio=ratio, weight_decay=decay, growth_max=1.0)
    first = max(bound[5], 0.008)
    assert bound[:8] == free[:8]
    assert max(free) > 8 * first
    assert max(bound) == pytest.approx(3 * first, rel=0.25)
    assert max(tight[6:]) < 1.3 * first
    shortened = list(optimizer.stats()["shortened"].values())
    assert shortened[0] > 0.5
    assert shortened[1] == 0
    assert set(unbounded.stats()["shortened"].values()) == {0.0}


def test_what_growth_counts_from_is_saved_and_an_older_state_counts_from_where_it_is_loaded():
    _, optimizer = growing(20)
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = growing(7)
    other.load_state_dict(saved)
    assert other.stats()["shortened"] == optimizer.stats()["shortened"]
    starts = [float(state["start_norm"]) for state in optimizer.state.values()]
    assert [float(state["start_norm"]) for state in other.state.values()] == starts
    for state in saved["state"].values():
        del state["start_norm"]
    other.load_state_dict(saved)
    assert [float(state["start_norm"]) for state in other.state.values()] == [0, 0]
    for p in (p for group in other.param_groups for p in group["params"]):
        p.grad = torch.ones(p.shape)
    other.step()
    assert float(other.state[other.param_groups[0]["params"][0]]["start_norm"]) > 2 * starts[0]


def test_the_authors_codec_and_the_basic_form_have_no_bound_on_growth():
    for settings in (onebit.PAPER, {"ratio": "fixed"}):
        lengths, _ = growing(**settings)
        assert max(lengths) > 8 * max(lengths[5], 0.008), settings


def test_a_state_whose_ratios_were_allowed_more_says_that_they_fall(caplog):
    def trained(factor_max: float) -> onebit.OneBitLamb:
        weight = torch.nn.Parameter(torch.ones(64))
        optimizer = onebit.OneBitLamb([weight], lr=1e-4, freeze_step=3, betas=(0.9, 0.5), factor_max=factor_max)
        for step in range(60):
            weight.grad = torch.ones(64) * 0.9**step
            optimizer.step()
        return optimizer

    wide, same, narrow = trained(4.0), trained(4.0), trained(2.0)
    with caplog.at_level(logging.WARNING, "onebit"):
        same.load_state_dict(wide.state_dict())
        assert "above factor_max" not in caplog.text
        narrow.load_state_dict(wide.state_dict())
    assert "1 of 1 layers have a ratio above factor_max, 2, and fall to it at the next step, one from 4" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"freeze_step": 0}, "freeze_step is 0"),
        ({"freeze_step": 2.5}, "whole number"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, r"each in \[0, 1\)"),
        ({"betas": (0.9,)}, "there must be two"),
        ({"eps": -1e-8}, "eps is"),
        ({"weight_decay": -0.1}, "weight_decay is"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff, max_coeff"),
        ({"coeff_beta": 1.0}, "coeff_beta is 1.0"),
        ({"factor_min": 5.0}, "factor_max was left out: give it too"),
        ({"factor_min": 5.0, "factor_max": 4.5}, "factor_min, factor_max are 5.0, 4.5"),
        ({"factor_threshold": 0.0}, "factor_threshold"),
        ({"growth_max": 0.9}, r"growth_max is 0\.9; it must be at least 1"),
        ({"growth_max": math.nan}, "growth_max is nan"),
        ({"lr_gain": 0.0}, r"lr_gain is 0\.0; it must be above 0 and finite"),
        ({"lr_gain": math.inf}, "lr_gain is inf"),
        ({"ratio": "sqr"}, "'sqrt', 'variance', 'momentum', 'fixed'"),
        ({"error_feedback": "off"}, "'unscaled', 'scaled', 'none'"),
        ({"dead_elements": "skip"}, "'hold', 'exchange'"),
        ({"variance_floor": 1.0}, "variance_floor is 1.0"),
        ({"warmup_transport": "fp16"}, "'fp32', 'bf16'"),
        ({"bucket_elements": 0}, "bucket_elements is 0"),
    ],
)
def test_impossible_settings_are_named(settings, words):
    settings = {"freeze_step": 10, **settings}
    with pytest.raises(onebit.ConfigError, match=words):
        onebit.OneBitLamb([nn.Parameter(torch.ones(2))], **settings)


def test_masks_and_parameters_that_cannot_be_used_are_named():
    two = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    with pytest.raises(onebit.ConfigError, match="group of its own"):
        onebit.OneBitLamb([{"params": two, "exp_avg_mask": torch.ones(2)}])
    with pytest.raises(onebit.ConfigError, match="has 3 elements"):
        onebit.OneBitLamb([{"params": two[:1], "exp_avg_mask": torch.ones(3)}])
    eight = nn.Parameter(torch.ones(2, dtype=torch.float8_e5m2))
    with pytest.raises(onebit.ConfigError, match=r"torch\.float8_e5m2; parameters must be"):
        onebit.Lamb([eight]).step()


@pytest.mark.parametrize(
    ("differ", "words"),
    [
        (lambda rank: ([torch.ones(3), torch.ones(2 + rank)], {}), r"parameter 1 is \(2,\)"),
        (lambda rank: ([torch.ones(3), torch.ones(2) + rank], {}), "parameter 1 .*checksum"),
        (
            lambda rank: ([torch.ones(3)], {"lr": 0.1 * (rank + 1)}),
            "lr of group 0 is 0.1 on worker 0 and 0.2 on worker 1",
        ),
        (lambda rank: ([torch.ones(3)], {"freeze_step": 5 + rank}), "freeze_step is 5"),
        (lambda rank: ([torch.ones(3)] * (1 + rank), {}), r"groups is \[1\]"),
    ],
)
def test_workers_that_differ_are_all_told_the_first_difference(differ, words):
    errors = []

    def work(comm):
        tensors, settings = differ(comm.rank)
        params = [nn.Parameter(x.clone()) for x in tensors]
        opt = onebit.OneBitLamb(params, comm=comm, **{"freeze_step": 5, **settings})
        try:
            opt.step()
        except onebit.MismatchError as error:
            errors.append(str(error))

    onebit.run_workers(2, work)
    assert len(errors) == 2
    assert errors[0] == errors[1]
    assert __import__("re").search(words, errors[0]), errors[0]


def test_public_surface_is_sorted_and_complete():
    public = {name for name in vars(onebit) if not name.startswith("_")}
    modules = {name for name in public if type(getattr(onebit, name)).__name__ == "module"}
    assert set(onebit.__all__) == public - modules
    assert list(onebit.__all__) == sorted(
        onebit.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )


def test_codec_settings_survive_pickle():
    codec = onebit.OneBit("block", 64, "mean", 1.3)
    assert pickle.loads(pickle.dumps(codec)) == codec
