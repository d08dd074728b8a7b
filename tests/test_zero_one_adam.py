"""`ZeroOneAdam`: its schedule, an oracle that follows the formulas, what travels, bad values, and training."""

import copy
import logging
import math
from itertools import pairwise

import pytest
import torch
from test_optim import BUILD, check_replicas, flat, small_model

import onebit
from onebit.comm import ring_all_reduce_bytes
from onebit.layout import FlatLayout
from onebit.zero_one_adam import UpdateKinds as Schedule
from onebit.zero_one_adam import ZeroOneAdam

LOCAL = {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4}
"""Variance steps 1, 2, 3; sync steps 4, 5, 6, 8, 10, 14, 18, ...; all others are local."""


def gradient(shape, t, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * t + rank)
    return torch.randn(shape, generator=generator).to(dtype) + 0.3


def build(comm, shapes=((5, 3), (4,)), dtype=torch.float32, **settings):
    params = [torch.nn.Parameter(torch.full(shape, 0.5 + i, dtype=dtype)) for i, shape in enumerate(shapes)]
    return params, ZeroOneAdam(params, comm=comm, **{"lr": 0.01, **LOCAL, **settings})


def step(opt, params, t, rank, spoil=None):
    for i, p in enumerate(params):
        p.grad = gradient(p.shape, 10 * t + i, rank, p.dtype)
    if spoil is not None:
        params[0].grad.view(-1)[1] = spoil
    opt.step()


# -- the schedule ------------------------------------------------------------------------------------------------------


def test_variance_steps_against_a_list_made_by_hand():
    def steps(last, kappa):
        schedule = Schedule(last, kappa, 1, 1)
        return [t for t in range(1, 61) if schedule.is_variance_step(t)]

    assert steps(60, 3) == [1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 30, 38, 46]
    assert steps(18, 3) == [1, 2, 3, 4, 6, 8, 10, 14, 18]
    assert steps(17, 3) == [1, 2, 3, 4, 6, 8, 10, 14]
    assert steps(60, 1) == [1, 2, 4, 8, 16, 32]
    assert steps(1, 16) == [1]
    assert steps(60, 16) == [*range(1, 18), *range(19, 50, 2), 53, 57]


def test_sync_steps_against_a_list_made_by_hand():
    def steps(first, alpha, most):
        schedule = Schedule(first, 1, alpha, most)
        return [t for t in range(1, 31) if schedule.is_sync_step(t)]

    assert steps(4, 2, 4) == [1, 2, 3, 4, 5, 6, 8, 10, 14, 18, 22, 26, 30]
    assert steps(1, 1, 3) == [1, 2, 4, 7, 10, 13, 16, 19, 22, 25, 28]
    assert steps(3, 3, 2) == [1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30]
    assert steps(5, 3, 1) == list(range(1, 31))
    assert steps(40, 1, 16) == list(range(1, 31))


@pytest.mark.parametrize("settings", [(50, 3, 2, 7), (20, 16, 5, 16), (1, 1, 1, 8)], ids=str)
def test_the_schedule_is_that_of_the_papers_recurrences(settings):
    last, kappa, alpha, most = settings
    schedule, refreshes, syncs = Schedule(*settings), [1], [last]
    for j in range(400):
        refreshes.append(refreshes[-1] + 2 ** min(j // kappa, 20))
        syncs.append(syncs[-1] + min(2 ** min(j // alpha, 20), most))
    for t in range(1, 401):
        assert schedule.is_variance_step(t) == (t in refreshes and t <= last)
        assert schedule.is_sync_step(t) == (t <= last or t in syncs)


# -- the formulas ------------------------------------------------------------------------------------------------------


class Oracle:
    """All workers at once, in float64, one flat vector each: Algorithm 1, an operation after the other."""

    def __init__(self, shapes, n, decays, floor):
        layout = FlatLayout(shapes, n)
        chunk = layout.numel // n
        self.layers = [slice(a.start, a.stop) for a in layout.layers]
        cuts = sorted({0, *(a.stop for a in layout.layers), *range(0, layout.numel + 1, chunk)})
        self.blocks = [slice(a, b) for a, b in pairwise(cuts) if b <= layout.layers[-1].stop]
        self.size = layout.layers[-1].stop
        zeros = torch.zeros(n, self.size, dtype=torch.float64)
        self.m, self.u, self.error = zeros.clone(), zeros.clone(), zeros.clone()
        self.v, self.server = zeros[0].clone(), zeros[0].clone()
        self.decay = torch.cat([self.v[a] + d for a, d in zip(self.layers, decays, strict=True)])
        self.lr_sum, self.floor, self.beta1, self.beta2 = 0.0, floor, 0.9, 0.999

    def start(self, x):
        self.x, self.anchor = x.repeat(len(self.m), 1), x.clone()

    def compress(self, x):
        out = x.clone()
        for block in self.blocks:
            scale = x[block].square().mean().sqrt()
            out[block] = torch.where(x[block] >= 0, scale, -scale)
        return out

    def below(self):
        floors = torch.cat([self.v[a].mean().expand(self.v[a].shape) * self.floor for a in self.layers])
        return torch.maximum(self.v, floors).sqrt() + 1e-8

    def variance_step(self, g, lr):
        mean = g.mean(0)
        self.m = self.beta1 * self.m + (1 - self.beta1) * mean
        self.v = self.beta2 * self.v + (1 - self.beta2) * mean**2
        self.x = self.x - lr * (self.m / self.below() + self.decay * self.x)

    def accumulate(self, g, lr):
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.u = self.u + lr * self.m
        if self.lr_sum == 0:
            self.anchor = self.x[0].clone()
        self.lr_sum += lr

    def local_step(self, g, lr):
        self.accumulate(g, lr)
        self.x = self.x - lr * (self.m / self.below() + self.decay * self.x)

    def sync_step(self, g, lr):
        self.accumulate(g, lr)
        sent = torch.stack([self.compress(u + e) for u, e in zip(self.u, self.error, strict=True)])
        self.error = self.u + self.error - sent
        total = sent.mean(0) + self.server
        ubar = self.compress(total)
        self.server = total - ubar
        self.m = (ubar / self.lr_sum).repeat(len(self.m), 1)
        x = self.anchor - ubar / self.below() - self.decay * self.lr_sum * self.anchor
        self.x, self.u, self.lr_sum = x.repeat(len(self.m), 1), torch.zeros_like(self.u), 0.0


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.1, 0.0)], ids=["plain", "decay"])
def test_it_follows_the_oracle_through_all_kinds_of_steps(n, decays):
    shapes, kinds = [(5, 3), (7,), (2, 9)], {1: "variance", 2: "variance", 3: "variance"}
    kinds |= {t: "sync" if t in (4, 5, 6, 8, 10, 14, 18, 22) else "local" for t in range(4, 23)}
    rate = lambda t: 0.01 * (1 + t % 3)  # noqa: E731
    oracle = Oracle(shapes, n, (decays[0], decays[0], decays[1]), floor=0.3)
    oracle.start(torch.cat([torch.full((math.prod(s),), 0.5 + i).double() for i, s in enumerate(shapes)]))
    history = []
    for t, kind in kinds.items():
        own = [
            torch.cat([gradient(s, 10 * t + i, r, torch.float64).flatten() for i, s in enumerate(shapes)])
            for r in range(n)
        ]
        getattr(oracle, f"{kind}_step")(torch.stack(own), rate(t))
        history.append((kind, oracle.x.clone(), oracle.v.clone(), oracle.m.clone()))

    def work(comm):
        params = [torch.nn.Parameter(torch.full(s, 0.5 + i).double()) for i, s in enumerate(shapes)]
        groups = [{"params": params[:2], "weight_decay": decays[0]}, {"params": params[2:], "weight_decay": decays[1]}]
        opt = ZeroOneAdam(groups, comm=comm, variance_floor=0.3, **LOCAL)
        for t, (kind, x, v, m) in zip(kinds, history, strict=True):
            for group in opt.param_groups:
                group["lr"] = rate(t)
            step(opt, params, t, comm.rank)
            torch.testing.assert_close(flat(params), x[comm.rank], rtol=1e-10, atol=1e-12, msg=f"{t} {kind}")
            for name, expected in (("variance", v), ("momentum", m[comm.rank])):
                found = torch.cat([opt.state[p][name].flatten() for p in params])
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=f"{t} {kind} {name}")
            assert opt.in_sync == (kind != "local")
        total = opt._exchange.total_error()[: oracle.size]
        torch.testing.assert_close(total, oracle.error.mean(0) + oracle.server, rtol=1e-8, atol=1e-12)

    onebit.run_workers(n, work)


def test_the_first_update_is_adams():
    """A variance from the first gradient: every element moves by lr (1 - beta1) / sqrt(1 - beta2), whatever it is."""
    p = torch.nn.Parameter(torch.zeros(4))
    opt = ZeroOneAdam([p], lr=0.01, eps=0.0, variance_floor=0.0)
    p.grad = torch.tensor([1e-3, -1.0, 10.0, 0.0])
    opt.step()
    far = 0.01 * 0.1 / math.sqrt(0.001)
    torch.testing.assert_close(p.detach(), torch.tensor([-far, far, -far, 0.0]), rtol=1e-5, atol=0)


# -- several workers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"bucket_elements": 10, "weight_decay": 0.1, "codec": onebit.OneBit("bucket")}]
)
def test_workers_drift_in_local_steps_and_are_level_at_every_exchange(settings):
    def work(comm):
        params, opt = build(comm, **settings)
        apart = []
        for t in range(1, 27):
            step(opt, params, t, comm.rank)
            if opt.in_sync:
                check_replicas(comm, params)
                check_replicas(comm, [opt.state[p]["momentum"] for p in params])
            else:
                mine = bytes(flat(params).view(torch.uint8).tolist())
                assert len(set(comm.all_gather_bytes(mine))) == 3
                apart.append(t)
            check_replicas(comm, [opt.state[p]["variance"] for p in params])
        return apart

    assert onebit.run_workers(3, work)[0] == [t for t in range(7, 27) if t not in (8, 10, 14, 18, 22, 26)]


@pytest.mark.parametrize("transport", ["fp32", "bf16"])
def test_what_travels_is_counted_and_is_nothing_in_local_steps(transport):
    n, size = 2, 4096

    def work(comm):
        params, opt = build(comm, ((size,),), warmup_transport=transport)
        sent = []
        for t in range(1, 15):
            before = comm.payload_bytes
            step(opt, params, t, comm.rank)
            sent.append(comm.payload_bytes - before)
        assert opt.payload_bytes == sum(sent)
        return sent

    full = ring_all_reduce_bytes(size * (4 if transport == "fp32" else 2), n)
    bits = 2 * (n - 1) * (4 + 4 + size // n // 8)  # header, a scale, the bits of a chunk; there and back
    assert onebit.run_workers(n, work)[0] == [*[full] * 3, *[bits] * 3, 0, bits, 0, bits, 0, 0, 0, bits]


def test_the_transport_changes_the_variance_and_the_floor_does_not():
    def work(comm, **settings):
        params, opt = build(comm, **settings)
        for t in range(1, 9):
            step(opt, params, t, comm.rank)
        return flat(params), opt.state[params[0]]["variance"].clone()

    (x, v), (y, w), (z, u) = (
        onebit.run_workers(2, lambda comm, s=s: work(comm, **s))[0]
        for s in ({}, {"warmup_transport": "bf16"}, {"variance_floor": 0.9})
    )
    assert not torch.equal(v, w)
    assert torch.equal(v, u)
    assert not torch.equal(x, y)
    assert not torch.equal(x, z)


def test_empty_and_scalar_parameters_and_groups_of_them():
    def work(comm):
        shapes = [(0, 3), (), (4,), (0,)]
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        opt = ZeroOneAdam([{"params": [p]} for p in params], lr=0.01, comm=comm, **LOCAL)
        for t in range(1, 15):
            step(opt, params, t, comm.rank)
        check_replicas(comm, params)
        assert bool((flat(params) != 1).all())

    onebit.run_workers(2, work)


# -- gradients that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("at", [1, 3, 4, 6, 8, 14], ids=lambda at: f"step{at}")
def test_a_bad_gradient_at_an_exchange_is_as_if_the_step_never_was(bad, at):
    """Variance steps 1 and 3; sync steps after none, 1 and 3 local steps."""

    def work(comm, spoil):
        params, opt = build(comm)
        for t in range(1, 20):
            if spoil and t == at:
                before = [p.detach().clone() for p in params]
                step(opt, params, t, comm.rank, bad if comm.rank == 1 else None)
                assert all(map(torch.equal, before, params))
            step(opt, params, t, comm.rank)
        stats = opt.stats()
        assert (stats["step"], stats["skipped_steps"], stats["left_out_gradients"]) == (19, int(spoil), 0)
        return flat(params)

    clean, spoilt = (onebit.run_workers(2, lambda comm, s=s: work(comm, s)) for s in (False, True))
    assert all(map(torch.equal, clean, spoilt))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_bad_gradient_in_a_local_step_counts_as_zero_on_that_worker_alone(bad):
    """Step 11 is local. The other worker does as always, and both are level again at step 14, without a skip."""

    def work(comm, value):
        params, opt = build(comm)
        for t in range(1, 20):
            if comm.rank == 1 and t == 11:
                if value is None:
                    for p in params:
                        p.grad = torch.zeros_like(p)
                    opt.step()
                else:
                    step(opt, params, t, comm.rank, value)
            else:
                step(opt, params, t, comm.rank)
            if opt.in_sync:
                check_replicas(comm, params)
        return flat(params), opt.stats()

    zero, spoilt = (onebit.run_workers(2, lambda comm, v=v: work(comm, v)) for v in (None, bad))
    for (x, _), (y, stats) in zip(zero, spoilt, strict=True):
        assert torch.equal(x, y)
        assert bool(y.isfinite().all())
        assert (stats["step"], stats["skipped_steps"]) == (19, 0)
    assert [stats["left_out_gradients"] for _, stats in spoilt] == [0, 1]


def test_a_run_with_bad_gradients_on_every_other_step_goes_on():
    def work(comm):
        params, opt = build(comm)
        for t in range(1, 60):
            step(
                opt, params, t, comm.rank, (math.nan, 1e18, 1e25)[t % 3] if t % 2 and comm.rank == t % 4 // 2 else None
            )
        assert bool(flat(params).isfinite().all())
        assert opt.stats()["step"] > 30

    onebit.run_workers(2, work)


# -- elements without a gradient ---------------------------------------------------------------------------------------


def dead_run(comm, first, steps=30, row=2, **settings):
    """Row `row` of a table and the whole of another layer have gradients from step `first` on, on worker 0 alone."""
    params, opt = build(comm, ((4, 4), (6,)), **settings)
    start, history = [p.detach().clone() for p in params], []
    for t in range(1, steps + 1):
        for i, p in enumerate(params):
            p.grad = gradient(p.shape, 10 * t + i, comm.rank)
        if t < first or comm.rank:
            params[0].grad[row] = 0
            params[1].grad.zero_()
        params[0].grad[3] = 0
        opt.step()
        if opt.in_sync:
            check_replicas(comm, params)
        history.append([(p.detach() - s) for p, s in zip(params, start, strict=True)])
    return history, opt


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("codec", [onebit.OneBit(), onebit.OneBit("bucket"), onebit.OneBit("block", 8)], ids=str)
def test_dead_elements_stay_exactly_where_they_are_and_wake_after_the_last_variance_step(n, codec):
    def work(comm):
        history, opt = dead_run(comm, first=12, codec=codec)
        for t, (table, other) in enumerate(history, start=1):
            assert bool(table[3].eq(0).all())  # never had one
            if t < 18:  # 14: the worker asks; 18: the next exchange
                assert bool(table[2].eq(0).all())
                assert bool(other.eq(0).all())
            assert bool(table[:2].ne(0).all())
        table, other = history[-1]
        assert bool(table[2].ne(0).all())
        assert bool(other.ne(0).all())
        assert float(table[2].abs().max()) < 3 * float(table[:2].abs().max())
        assert float(other.abs().max()) < 3 * float(table[:2].abs().max())
        variance = opt.state[opt.param_groups[0]["params"][0]]["variance"]
        assert torch.equal(variance[2], variance[2, :1].expand(4))
        torch.testing.assert_close(variance[2].mean(), variance[:2].mean())
        assert bool(variance[3].eq(0).all())

    onebit.run_workers(n, work)


def test_what_sync_steps_have_for_dead_elements_waits_for_the_next_variance_step():
    """Variance steps 1, 2, 3, 5, 7, 11 of a schedule that is not frozen; step 8 is the first with a gradient."""

    def work(comm):
        history, opt = dead_run(comm, first=8, steps=10, var_freeze_step=100)
        assert all(bool(table[2].eq(0).all()) for table, _ in history)
        waiting = opt._exchange.total_error()[8:12].clone()
        assert bool(waiting.ne(0).all())
        history, opt = dead_run(comm, first=8, steps=11, var_freeze_step=100)
        assert bool(history[-1][0][2].ne(0).all())
        assert torch.equal(opt._exchange.total_error()[8:12], waiting)
        history, opt = dead_run(comm, first=8, steps=12, var_freeze_step=100)
        assert not torch.equal(opt._exchange.total_error()[8:12], waiting)

    onebit.run_workers(2, work)


def test_weight_decay_reaches_dead_elements():
    def work(comm):
        history, _ = dead_run(comm, first=99, weight_decay=0.1)
        expected, since = 0.5, 0
        for t in range(1, 31):
            since += 1
            if Schedule(**LOCAL).is_sync_step(t):
                expected, since = expected * (1 - 0.01 * 0.1 * since), 0
        torch.testing.assert_close(history[-1][0][3] + 0.5, torch.full((4,), expected))

    onebit.run_workers(2, work)


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 2, 5, 8, 12, 13, 15, 19])
def test_a_loaded_run_has_the_bits_of_one_that_was_not_interrupted(at):
    """Saved before the first step, among variance steps, at exchanges, inside intervals, and asking to wake (14)."""

    def work(comm):
        def go_on(params, opt, first, last):
            for t in range(first, last):
                opt.param_groups[0]["lr"] = 0.01 / t
                for i, p in enumerate(params):
                    p.grad = gradient(p.shape, 10 * t + i, comm.rank)
                params[0].grad[1] *= t > 12
                if t == 11 and comm.rank:
                    params[0].grad[0] = math.nan
                opt.step()

        params, opt = build(comm)
        go_on(params, opt, 1, at + 1)
        saved, weights = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
        go_on(params, opt, at + 1, 30)
        others, again = build(comm)
        again.load_state_dict(saved)
        with torch.no_grad():
            for p, w in zip(others, weights, strict=True):
                p.copy_(w)
        go_on(others, again, at + 1, 30)
        assert torch.equal(flat(params), flat(others))
        for name in ("worker_error", "server_error"):
            assert torch.equal(getattr(opt._exchange, name), getattr(again._exchange, name))
        for p, q in zip(params, others, strict=True):
            assert opt.state[p].keys() == {"momentum", "variance", "update", "anchor"}
            assert all(torch.equal(opt.state[p][name], again.state[q][name]) for name in opt.state[p])
        mine, theirs = opt.stats(), again.stats()
        apart = {"payload_bytes": 0, "seconds": 0}
        assert {**mine, **apart} == {**theirs, **apart}
        assert mine["left_out_gradients"] == comm.rank

    onebit.run_workers(2, work)


def test_a_state_of_other_structure_is_refused():
    params, opt = build(onebit.comm.Solo())
    for t in range(1, 8):
        step(opt, params, t, 0)
    for settings, words in (
        ({"local_step_clipper": 1}, "local steps"),
        ({"codec": onebit.OneBit("bucket")}, "codec"),
        ({"shapes": ((5, 3), (5,))}, "shape"),
    ):
        _, other = build(onebit.comm.Solo(), **settings)
        with pytest.raises(onebit.ConfigError, match=words):
            other.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("at", [6, 11])
def test_a_later_var_freeze_step_after_a_load_goes_on_with_variance_steps(at):
    """Also when saved inside an interval: the step that would refresh the variance is an exchange then."""

    def work(comm):
        params, opt = build(comm)
        for t in range(1, at + 1):
            step(opt, params, t, comm.rank)
        saved, v = copy.deepcopy(opt.state_dict()), opt.state[params[1]]["variance"].clone()
        others, again = build(comm, var_freeze_step=100, var_update_scaler=100)
        again.load_state_dict(saved)
        with torch.no_grad():
            for p, q in zip(others, params, strict=True):
                p.copy_(q)
        for t in range(at + 1, at + 4):
            step(again, others, t, comm.rank)
            check_replicas(comm, others)
        assert not torch.equal(again.state[others[1]]["variance"], v)
        assert again.stage is onebit.Stage.WARMUP

    onebit.run_workers(2, work)


def test_the_state_of_another_worker_loads_without_its_errors(caplog):
    states = {}

    def first(comm):
        params, opt = build(comm)
        for t in range(1, 11):
            step(opt, params, t, comm.rank)
        states[comm.rank] = copy.deepcopy((opt.state_dict(), [p.detach() for p in params]))

    def second(comm):
        params, opt = build(comm)
        state, weights = states[0]
        opt.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for p, w in zip(params, weights, strict=True):
                p.copy_(w)
        assert (opt.stats()["worker_error_norm"] == 0) == (comm.rank == 1)
        for t in range(11, 15):
            step(opt, params, t, comm.rank)
        check_replicas(comm, params)

    onebit.run_workers(2, first)
    with caplog.at_level(logging.WARNING, "onebit"):
        onebit.run_workers(2, second)
    assert "worker 0" in caplog.text


# -- learning rates ----------------------------------------------------------------------------------------------------


def test_where_lr_is_zero_nothing_moves_and_nothing_owed_is_lost():
    """The second group has lr 0 in updates 9 to 15, one interval and more; a shared scale would move it."""

    def work(comm):
        p, q = torch.nn.Parameter(torch.ones(12)), torch.nn.Parameter(torch.ones(9))
        groups = [{"params": [p]}, {"params": [q]}]
        opt = ZeroOneAdam(groups, lr=0.01, comm=comm, codec=onebit.OneBit("bucket"), weight_decay=0.1, **LOCAL)
        for t in range(1, 27):
            opt.param_groups[1]["lr"] = 0.0 if 9 <= t <= 14 else 0.01
            before, owed = q.detach().clone(), None if t < 2 else opt._exchange.total_error()[12:21]
            step(opt, [p, q], t, comm.rank)
            assert torch.equal(before, q) == (9 <= t <= 14)
            if 9 <= t <= 14:
                torch.testing.assert_close(opt._exchange.total_error()[12:21], owed)
            assert bool(opt.state[q]["momentum"].isfinite().all())
        check_replicas(comm, [p, q])

    onebit.run_workers(2, work)


def test_lr_zero_throughout_moves_nothing():
    params, opt = build(onebit.comm.Solo(), lr=0.0, weight_decay=0.1)
    before = flat(params)
    for t in range(1, 30):
        step(opt, params, t, 0)
    assert torch.equal(flat(params), before)
    opt.param_groups[0]["lr"] = 0.01
    for t in range(30, 40):
        step(opt, params, t, 0)
    assert bool((flat(params) != before).all())
    assert bool(flat(params).isfinite().all())


def test_lr_may_be_scheduled_by_torch():
    params, opt = build(onebit.comm.Solo())
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: max(0.0, 1 - t / 20))
    for t in range(1, 31):  # lr is 0 from step 21 on; step 22 delivers what 19 and 20 accumulated
        before = flat(params)
        step(opt, params, t, 0)
        schedule.step()
        assert torch.equal(flat(params), before) == (t == 21 or t > 22), t
    assert bool(flat(params).isfinite().all())


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({name: value}, [name, repr(value), "at least 1"]) for name in LOCAL for value in (0, -1, 1.5, True, "x")),
        ({"variance_floor": 1.0}, ["variance_floor", "1.0", "[0, 1)"]),
        ({"variance_floor": -0.1}, ["variance_floor", "-0.1"]),
        ({"warmup_transport": "fp8"}, ["warmup_transport", "'fp8'", "'fp32', 'bf16'"]),
        ({"codec": "sign"}, ["codec", "'sign'", "OneBit"]),
        ({"lr": -1.0}, ["lr", "-1.0"]),
        ({"betas": (0.9, 1.0)}, ["betas", "1.0"]),
        ({"eps": math.nan}, ["eps", "nan"]),
        ({"weight_decay": -0.1}, ["weight_decay", "-0.1"]),
        ({"bucket_elements": 0}, ["bucket_elements", "0"]),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_allowed(settings, words):
    with pytest.raises(onebit.ConfigError) as caught:
        build(onebit.comm.Solo(), **settings)
    assert all(word in str(caught.value) for word in words)


def test_masks_are_refused_and_so_are_workers_of_other_schedules():
    p = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(onebit.ConfigError, match="exp_avg_mask"):
        ZeroOneAdam([{"params": [p], "exp_avg_mask": torch.ones(4)}])

    def work(comm):
        params, opt = build(comm, local_step_scaler=2 + comm.rank)
        step(opt, params, 1, comm.rank)

    with pytest.raises(onebit.MismatchError, match="local_step_scaler"):
        onebit.run_workers(2, work)


def test_stats_and_stage():
    params, opt = build(onebit.comm.Solo())
    assert opt.stats()["left_out_gradients"] == 0
    stages, local = [], []
    for t in range(1, 11):
        step(opt, params, t, 0)
        stages.append(opt.stage is onebit.Stage.COMPRESSED)
        local.append(opt.stats()["local_steps"])
    assert stages == [False] * 3 + [True] * 7
    assert local == [0] * 6 + [1, 0, 1, 0]
    assert opt.stats()["worker_error_norm"] > 0
    _, without = build(onebit.comm.Solo(), local_step_clipper=1)
    step(without, without.param_groups[0]["params"], 1, 0)
    assert all(state.keys() == {"momentum", "variance"} for state in without.state.values())


# -- training ----------------------------------------------------------------------------------------------------------


def regression(make, steps=200, n=2):
    """The loss on unseen data of a small network after training on noisy data, of another kind on each worker."""

    def work(comm):
        with BUILD:
            net = small_model()
        opt, generator = make(net, comm), torch.Generator().manual_seed(comm.rank)
        teacher = torch.linspace(-1, 1, 18).view(6, 3)
        for t in range(steps):
            opt.param_groups[0]["lr"] = 0.01 * (1 - t / steps)
            x = torch.randn(16, 6, generator=generator)
            target = (x @ teacher).tanh() + 0.1 * torch.randn(16, 3, generator=generator)
            opt.zero_grad()
            ((net(x) - target) ** 2).mean().backward()
            opt.step()
        x = torch.randn(500, 6, generator=torch.Generator().manual_seed(99))
        return float(((net(x) - (x @ teacher).tanh()) ** 2).mean().detach())

    return onebit.run_workers(n, work)[0]


@pytest.fixture(scope="module")
def adamw():
    def make(net, comm):
        return onebit.OneBitAdam(net.parameters(), lr=0.01, freeze_step=10_000, betas=(0.9, 0.99), comm=comm)

    return regression(make)


@pytest.mark.parametrize(
    "settings",
    [
        {"var_freeze_step": 400},
        {"var_freeze_step": 60, "local_step_clipper": 1},
        {"var_freeze_step": 60, "local_step_scaler": 20, "local_step_clipper": 4},
        {"var_freeze_step": 60, "local_step_scaler": 4, "local_step_clipper": 16, "codec": onebit.OneBit("bucket")},
    ],
    ids=str,
)
def test_it_ends_about_where_adamw_does(settings, adamw):
    def make(net, comm):
        return ZeroOneAdam(net.parameters(), lr=0.01, betas=(0.9, 0.99), comm=comm, **settings)

    assert regression(make) < 1.4 * adamw
