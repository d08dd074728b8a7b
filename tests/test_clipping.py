"""`clip_grad_norm_`: by the norm of the mean in the warm-up, by its estimate after the switch, alike on all workers."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import small
import torch
from processes import run_processes
from small import MODEL, flat, kinds_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.averaging import average_gradients
from onebit.clipping import NormEstimate
from onebit.comm import Comm

WARMUP, STEPS, INF = 4, 10, float("inf")
KINDS = kinds_of(WARMUP, var_update_scaler=1)
BY_MEAN = ("Lamb", "OneBitLamb", "OneBitAdam")
kinds = pytest.mark.parametrize("name", KINDS)


make = partial(small.make, KINDS)


def backward(model: nn.Module, rank: int, step: int, noise: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 6, generator=generator)
    target = x[:, :3].sin() + 1 + noise * torch.randn(16, 3, generator=generator)
    nn.functional.mse_loss(model(x), target).backward()


def mean_norm(comm: Comm, params: Any) -> float:
    """The norm of the mean gradient, found by another way."""
    total = torch.cat([p.grad.flatten().double() for p in params])
    comm.all_reduce(total)
    return float(total.norm()) / comm.size


def train(
    comm: Comm, name: str, clip: Any, bad: tuple[int, float] | None = None, steps: int = STEPS, **more: Any
) -> dict[str, list[Any]]:
    """`clip(optimizer, params)`, a bound, or None. `bad`: at which step worker 1 has which value in a gradient."""
    model = copy.deepcopy(MODEL)
    params = list(model.parameters())
    optimizer = make(name, params, comm, **more)
    found: dict[str, list[Any]] = {"params": [], "norm": [], "true": [], "shrunk": [], "skipped": []}
    for step in range(steps):
        backward(model, comm.rank, step)
        if bad is not None and step == bad[0] and comm.rank == 1:
            params[0].grad[0, 0] = bad[1]
        found["true"].append(mean_norm(comm, params))
        before = flat(p.grad for p in params)
        if callable(clip):
            clip(optimizer, params)
        elif clip is not None:
            found["norm"].append(optimizer.clip_grad_norm_(clip))
        found["shrunk"].append((flat(p.grad for p in params) / before).nanmedian())
        optimizer.step()
        optimizer.zero_grad()
        found["params"].append(flat(params))
        found["skipped"].append(optimizer.stats()["skipped_steps"])
    return found


def both(n: int, *args: Any, **more: Any) -> dict[str, list[Any]]:
    """What worker 0 of n found, after a look at whether all hold the same parameters and norms."""
    mine, *others = onebit.run_workers(n, lambda comm: train(comm, *args, **more))
    for other in others:
        for key in ("params", "norm"):
            assert all(a.equal(b) or not a.isfinite().all() for a, b in zip(mine[key], other[key], strict=True))
    return mine


def by_hand(bound: float) -> Any:
    """Average, clip with torch's function; the optimizer then averages equal gradients."""

    def clip(optimizer: Any, params: list[nn.Parameter]) -> None:
        average_gradients(params, optimizer.comm, "fp32")
        nn.utils.clip_grad_norm_(params, bound)

    return clip


@pytest.mark.parametrize("name", BY_MEAN)
@pytest.mark.parametrize("transport", ["fp32", "bf16"])
def test_in_the_warmup_it_is_averaging_and_torchs_clipping(name, transport):
    setting = {"transport" if name == "Lamb" else "warmup_transport": transport}
    mine = both(2, name, 0.3, steps=WARMUP, **setting)
    loose = transport == "bf16"
    assert [float(n) for n in mine["norm"]] == pytest.approx(mine["true"], rel=0.01 if loose else 1e-6)
    assert min(mine["true"]) > 0.3
    hand, free = both(2, name, by_hand(0.3), steps=WARMUP), both(2, name, None, steps=WARMUP)
    close = {"rtol": 0.05, "atol": 0.01} if loose else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(mine["params"], hand["params"], **close)
    if not loose and name != "OneBitAdam":
        assert (free["params"][-1] - hand["params"][-1]).abs().max() > 3e-4  # clipping does something


@pytest.mark.parametrize("transport", ["int8", "int4"])
def test_measuring_changes_nothing_where_integers_are_sent(transport):
    measured, plain = (both(2, "Lamb", bound, transport=transport) for bound in (INF, None))
    assert all(map(torch.equal, measured["params"], plain["params"]))


def test_integers_give_the_norm_to_what_they_keep():
    mine = both(2, "Lamb", 0.3, transport="int8")
    assert float(mine["norm"][0]) == pytest.approx(mine["true"][0], rel=0.01)
    assert [float(n) for n in mine["norm"]] == pytest.approx(mine["true"], rel=0.05)


@kinds
def test_one_worker_clips_as_torch_does(name):
    def theirs(optimizer: Any, params: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(params, 0.3)

    mine, torchs = both(1, name, 0.3), both(1, name, theirs)
    assert [float(n) for n in mine["norm"]][:WARMUP] == pytest.approx(mine["true"][:WARMUP], rel=1e-6)
    torch.testing.assert_close(mine["params"][:WARMUP], torchs["params"][:WARMUP], rtol=1e-4, atol=1e-5)
    close = [(a - b).abs().mean() < 2e-3 for a, b in zip(mine["params"], torchs["params"], strict=True)]
    assert all(close)


@kinds
def test_after_the_switch_all_workers_shrink_alike_and_near_the_truth(name):
    many = onebit.run_workers(4, lambda comm: train(comm, name, 0.3, steps=40, lr=0.0003))
    for found in many:
        assert torch.equal(torch.stack(found["norm"]), torch.stack(many[0]["norm"]))
        assert torch.equal(found["params"][-1], many[0]["params"][-1])
    late = [i for i in range(WARMUP, 40) if many[0]["norm"][i] > 0.33]
    assert len(late) > 20
    if name != "Lamb":  # else they hold the mean, which is no multiple of their own
        for i in late:
            factors = [float(found["shrunk"][i]) for found in many]
            assert factors == pytest.approx([0.3 / float(many[0]["norm"][i])] * 4, rel=1e-4)
    off = [abs(float(many[0]["norm"][i]) / many[0]["true"][i] - 1) for i in range(WARMUP, 40)]
    assert sorted(off)[len(off) // 2] < (1e-6 if name == "Lamb" else 0.1)
    assert max(off) < (1e-6 if name == "Lamb" else 0.3)


@kinds
def test_measuring_changes_nothing(name):
    measured, plain = both(2, name, INF), both(2, name, None)
    assert all(map(torch.equal, measured["params"], plain["params"]))


@kinds
@pytest.mark.parametrize("value", [float("nan"), INF])
@pytest.mark.parametrize("step", [1, WARMUP + 2])
def test_what_is_not_finite_skips_the_step_on_all_workers(name, value, step):
    mine = both(2, name, 0.3, bad=(step, value))
    assert mine["skipped"] == [0] * step + [1] * (STEPS - step)
    assert not torch.isfinite(mine["norm"][step])
    assert torch.equal(mine["params"][step], mine["params"][step - 1])
    assert all(torch.isfinite(p).all() for p in mine["params"])
    assert all(torch.isfinite(n) for i, n in enumerate(mine["norm"]) if i != step)
    assert not torch.equal(mine["params"][-1], mine["params"][step])


@kinds
@pytest.mark.parametrize("step", [1, WARMUP + 2])
def test_an_error_may_be_asked_for_and_is_raised_on_all_workers(name, step):
    def clip(optimizer: Any, params: list[nn.Parameter]) -> None:
        try:
            optimizer.clip_grad_norm_(0.3, error_if_nonfinite=True)
        except onebit.ConfigError as error:
            raised.append(str(error))
            optimizer.zero_grad()
            for p in params:
                p.grad = torch.zeros_like(p)

    raised: list[str] = []
    mine = both(2, name, clip, bad=(step, INF))
    assert ["error_if_nonfinite" in text for text in raised] == [True, True]
    assert mine["skipped"][-1] == 0


@pytest.mark.parametrize("bound", [0, 0.0, -1.0, float("nan"), -INF])
def test_bounds_that_are_none_are_refused(bound):
    with pytest.raises(onebit.ConfigError, match="max_norm"):
        both(1, "Lamb", bound, steps=1)


def forget(how: str) -> Any:
    def clip(optimizer: Any, params: list[nn.Parameter]) -> None:
        """Clip gradients that no step follows, then come back with those that were there."""
        kept = [p.grad.clone() for p in params]
        optimizer.clip_grad_norm_(1e-3)
        if how == "optimizer":
            optimizer.zero_grad()
        for p, g in zip(params, kept, strict=True):
            p.grad = g

    return clip


def test_gradients_that_come_after_clipping_are_averaged_as_integers_again():
    forgotten, plain = (both(2, "Lamb", clip, transport="int8") for clip in (forget("model"), None))
    for mine, theirs in zip(forgotten["params"], plain["params"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=1e-3)


@kinds
@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_clipping_without_a_step_harms_nothing(name, how):
    forgotten, plain = both(2, name, forget(how)), both(2, name, None)
    assert all(map(torch.equal, forgotten["params"], plain["params"]))


@pytest.mark.parametrize(("name", "start", "times"), [("OneBitLamb", 6, 1), ("OneBitLamb", 0, 0), ("Lamb", 6, 0)])
def test_an_unknown_share_is_said_once(caplog, name, start, times):
    calls: dict[int, int] = {}

    def clip(optimizer: Any, params: list[nn.Parameter]) -> None:
        rank = optimizer.comm.rank
        calls[rank] = calls.get(rank, 0) + 1
        if calls[rank] > start:
            optimizer.clip_grad_norm_(1.0)

    with caplog.at_level(logging.WARNING, "onebit"):
        both(2, name, clip)
    assert sum("was not used in the warm-up" in text for text in caplog.messages) == times


def resumed(comm: Comm, name: str, cut: int) -> tuple[list[float], list[float], bool]:
    model = copy.deepcopy(MODEL)
    optimizer = make(name, model.parameters(), comm)
    other, ours, theirs = model, [], []
    for step in range(STEPS):
        if step == cut:
            other = copy.deepcopy(model)
            again = make(name, other.parameters(), comm)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for net, opt, norms in [(model, optimizer, ours), *([(other, again, theirs)] if step >= cut else [])]:
            backward(net, comm.rank, step)
            norms.append(float(opt.clip_grad_norm_(0.3)))
            opt.step()
            opt.zero_grad()
    return ours[cut:], theirs, torch.equal(flat(model.parameters()), flat(other.parameters()))


@kinds
@pytest.mark.parametrize("cut", [2, WARMUP, WARMUP + 2])
def test_a_saved_state_keeps_the_estimate(name, cut):
    for ours, theirs, equal in onebit.run_workers(2, lambda comm: resumed(comm, name, cut)):
        assert ours == theirs
        assert equal


@kinds
def test_torchs_own_function_may_be_used_too(name):
    mine = both(2, name, lambda optimizer, params: nn.utils.clip_grad_norm_(params, 0.3), steps=20)
    assert mine["skipped"][-1] == 0
    assert not torch.equal(mine["params"][-1], both(2, name, None, steps=20)["params"][-1])


def test_the_estimate_is_not_upset_by_a_way_back():
    def clip(optimizer: Any, params: list[nn.Parameter]) -> None:
        """The last compressed step sees far smaller gradients."""
        taken = optimizer.stats()["step"]
        if optimizer.stage is onebit.Stage.COMPRESSED and taken == WARMUP + 1:
            for p in params:
                p.grad.mul_(1e-4)
        if taken == WARMUP + 2:
            optimizer.refreeze(3)
        optimizer.clip_grad_norm_(0.3)
        shares.append(optimizer._estimate.kept)

    shares: list[float] = []
    both(2, "OneBitLamb", clip)
    assert max(shares) < 0.99


def over_ddp(comm: Comm) -> dict[str, Any]:
    found = {}
    for name in ("Lamb", "OneBitLamb", "OneBitAdam", "LocalVarianceLamb"):
        model = copy.deepcopy(MODEL)
        ddp, optimizer = DistributedDataParallel(model), make(name, model.parameters(), comm)
        onebit.attach(ddp, optimizer)
        params, norms = [], []
        for step in range(STEPS):
            backward(ddp, comm.rank, step)
            norms.append(float(optimizer.clip_grad_norm_(0.3)))
            optimizer.step()
            optimizer.zero_grad()
            params.append(flat(model.parameters()))
        found[name] = (train(comm, name, 0.3), {"params": params, "norm": norms})
    return found


def test_ddp_gives_what_the_plain_loop_gives():
    mine, other = run_processes(2, over_ddp, timeout_s=120)
    for name, (plain, ddp) in mine.items():
        assert all(map(torch.equal, ddp["params"], other[name][1]["params"]))
        assert ddp["norm"] == other[name][1]["norm"]
        known = WARMUP if name.startswith("OneBit") else STEPS  # DDP's first step does not know that squares are wanted
        assert ddp["norm"][:known] == pytest.approx([float(n) for n in plain["norm"]][:known], rel=1e-4), name
        assert ddp["norm"] == pytest.approx([float(n) for n in plain["norm"]], rel=0.1), name
        assert float((ddp["params"][-1] - plain["params"][-1]).abs().mean()) < 0.01


def test_parts_come_in_any_order():
    squares = [torch.tensor(10.0**i, dtype=torch.float64) for i in range(-8, 9)]
    sums = []
    for order in (range(17), reversed(range(17))):
        estimate = NormEstimate()
        for i in order:
            estimate.add_part((0, i), squares[i], squares[i] / 3)
        sums.append(estimate.take_parts())
        assert estimate.take_parts() is None
    assert sums[0] == sums[1]
    assert float(sums[0][0]) == pytest.approx(1.1111111111111111e8)


@kinds
def test_a_frozen_layer_has_no_part_in_it(name):
    """Its old gradient, which is still there, neither counts nor moves anything."""
    ends = []
    for stale in (True, False):

        def work(comm: Comm, stale: bool = stale) -> tuple[list[float], Any, list[Any]]:
            model, norms = copy.deepcopy(MODEL), []
            params = list(model.parameters())
            optimizer = make(name, params, comm)
            for step in range(STEPS):
                backward(model, comm.rank, step)
                if step >= 2:
                    params[0].requires_grad_(False)
                    params[0].grad = torch.full_like(params[0], 1e3 + comm.rank) if stale else None
                norms.append(float(optimizer.clip_grad_norm_(0.3)))
                optimizer.step()
                params[0].requires_grad_(True)
                optimizer.zero_grad()
            return norms, flat(params), [optimizer.state[p].get("momentum") for p in params]

        mine, other = onebit.run_workers(2, work)
        assert mine[0] == other[0]
        assert torch.equal(mine[1], other[1])
        ends.append(mine)
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("change", ["drop", "touch"])
def test_a_gradient_that_one_worker_changed_after_clipping_is_averaged_anew_by_all(change):
    def work(comm: Comm) -> Any:
        model = copy.deepcopy(MODEL)
        params = list(model.parameters())
        optimizer = make("OneBitLamb", params, comm)
        backward(model, comm.rank, 0)
        optimizer.clip_grad_norm_(0.3)
        if comm.rank == 1:
            params[0].grad = None if change == "drop" else params[0].grad * 3
        optimizer.step()
        return flat(params), params[0].grad.clone()

    mine, other = onebit.run_workers(2, work)
    assert torch.equal(mine[0], other[0])
    assert torch.equal(mine[1], other[1])


def test_what_no_step_followed_is_forgotten():
    """With a zero_grad after clipping the next step, not clipped, says nothing of what averaging keeps."""

    def work(comm: Comm) -> float:
        model = copy.deepcopy(MODEL)
        optimizer = make("LocalVarianceLamb", model.parameters(), comm)
        backward(model, comm.rank, 0)
        optimizer.clip_grad_norm_(0.3)
        optimizer.zero_grad()
        backward(model, comm.rank, 1)
        optimizer.step()
        return optimizer._estimate.known

    assert onebit.run_workers(2, work) == [False, False]
