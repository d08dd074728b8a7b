"""Mixed precision: autocast, gradient scalers on each worker, and 16-bit parameters with float32 master weights."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import small
import torch
from processes import run_processes
from small import MODEL, flat, kinds_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.comm import Comm, Solo

WARMUP, STEPS = 3, 9
INFS = (1, 5)  # steps, counted from 0, at which worker 1 has an inf: one of the warm-up, one after the switch
KINDS = kinds_of(WARMUP, var_update_scaler=1)
HALF = [torch.bfloat16, torch.float16]
kinds = pytest.mark.parametrize("name", KINDS)


make = partial(small.make, KINDS, weight_decay=0.01)


def loss_of(model: nn.Module, rank: int, step: int, cast: torch.dtype | None) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    with torch.autocast("cpu", cast) if cast else contextlib.nullcontext():
        return (model(x).float() - x[:, :3].sin()).square().mean()


def train(
    comm: Comm,
    name: str,
    scaled: bool,
    unscale: bool = False,
    cast: torch.dtype | None = None,
    infs: tuple[int, ...] = (),
    ddp: bool = False,
    refreeze_at: int | None = None,
    reload_at: int | None = None,
    scale: float = 1024.0,
    interval: int = 2,
) -> dict[str, list[Any]]:
    """Train; without a scaler the steps in `infs` are left out instead. Lists with an entry per step."""
    inner = copy.deepcopy(MODEL)
    optimizer, model = make(name, inner.parameters(), comm), DistributedDataParallel(inner) if ddp else inner
    if ddp:
        onebit.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval, enabled=scaled)
    found: dict[str, list[Any]] = {"params": [], "skipped": [], "scale": [], "loss": []}
    for step in range(STEPS):
        if step == refreeze_at:
            optimizer.refreeze(2)
        if step == reload_at:
            saved, optimizer = optimizer.state_dict(), make(name, inner.parameters(), comm)
            model = DistributedDataParallel(inner)
            optimizer.load_state_dict(saved)
            onebit.attach(model, optimizer)
        if scaled or step not in infs:
            loss = loss_of(model, comm.rank, step, cast)
            scaler.scale(loss * float("inf") if step in infs and comm.rank == 1 else loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found["loss"].append(float(loss.detach()))
        found["params"].append(flat(inner.parameters()))
        found["skipped"].append(optimizer.stats()["skipped_steps"])
        found["scale"].append(scaler.get_scale())
    return found


def apart(a: Tensor, b: Tensor) -> float:
    """How far two ends lie from each other, as a share of how far the second is from the start."""
    return float((a - b).norm() / (b - flat(MODEL.parameters())).norm())


def pair(*args: Any, **more: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """What two virtual workers found, after a look at whether they hold the same parameters after every step."""
    mine, other = onebit.run_workers(2, lambda comm: train(comm, *args, **more))
    assert all(map(torch.equal, mine["params"], other["params"]))
    return mine, other


@kinds
def test_autocast_in_bfloat16_is_near_float32(name):
    (low, _), (full, _) = pair(name, False, cast=torch.bfloat16), pair(name, False)
    assert not torch.equal(low["params"][0], full["params"][0])
    assert apart(low["params"][-1], full["params"][-1]) < 0.25
    assert low["loss"][-1] < low["loss"][0]


@kinds
@pytest.mark.parametrize("unscale", [False, True])
def test_an_inf_on_one_worker_skips_the_step_on_all_and_leaves_no_trace(name, unscale):
    mine, other = pair(name, True, unscale, infs=INFS)
    assert mine["skipped"] == other["skipped"] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert torch.equal(mine["params"][0], mine["params"][1])
    assert torch.equal(mine["params"][4], mine["params"][5])
    assert not torch.equal(mine["params"][5], mine["params"][6])
    assert mine["scale"] == [1024, 2048, 2048, 4096, 4096, 8192, 8192, 16384, 16384]  # every worker has its own
    assert other["scale"] == [1024, 512, 512, 1024, 1024, 512, 512, 1024, 1024]
    plain, _ = pair(name, False, infs=INFS)  # powers of 2 change no bit
    assert all(map(torch.equal, mine["params"], plain["params"]))


@kinds
def test_autocast_in_float16_finds_its_scale(name):
    how = {"cast": torch.float16, "interval": 20}  # worker 1 begins where float16 overflows
    mine, other = onebit.run_workers(2, lambda c: train(c, name, True, scale=2.0 ** (20 if c.rank else 10), **how))
    assert all(map(torch.equal, mine["params"], other["params"]))
    skips = tuple(i for i, (a, b) in enumerate(pairwise([0, *mine["skipped"]])) if b > a)
    assert skips[0] == 0
    assert (mine["scale"][-1], other["scale"][-1]) == (2.0**10, 2.0 ** (20 - len(skips)))
    plain, _ = pair(name, False, infs=skips)
    assert apart(mine["params"][-1], plain["params"][-1]) < 0.25


def distributed(comm: Comm) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, again in ("Lamb", None), ("OneBitLamb", 6), ("OneBitAdam", 6):
        plain = train(comm, name, False, infs=INFS, refreeze_at=again)
        how = [{}, {"unscale": True}, {"cast": torch.float16}]
        found[name] = [plain, *(train(comm, name, True, infs=INFS, ddp=True, refreeze_at=again, **h) for h in how)]
    return {**found, "reloaded": train(comm, "OneBitLamb", True, infs=INFS, ddp=True, refreeze_at=6, reload_at=7)}


@pytest.fixture(scope="module")
def over_ddp():
    return run_processes(2, distributed, timeout_s=150)


@pytest.mark.parametrize("name", ["Lamb", "OneBitLamb", "OneBitAdam"])
@pytest.mark.parametrize("case", [1, 2, 3], ids=["scaled", "unscaled", "float16"])
def test_scales_that_came_apart_do_no_harm_under_ddp(over_ddp, name, case):
    mine, other = (found[name][case] for found in over_ddp)
    plain = over_ddp[0][name][0]
    assert all(map(torch.equal, mine["params"], other["params"]))
    assert mine["skipped"] == other["skipped"] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert mine["scale"][1] == other["scale"][1] == 512  # DDP's mean has the inf, so both see it
    assert (mine["scale"][5] == other["scale"][5]) is (name == "Lamb")
    assert apart(mine["params"][-1], plain["params"][-1]) < (0.25 if case == 3 else 1e-4)


def test_scales_that_came_apart_do_no_harm_after_a_load(over_ddp):
    mine, other = (found["reloaded"] for found in over_ddp)
    assert mine["scale"][6] != other["scale"][6]
    assert all(map(torch.equal, mine["params"], other["params"]))


SHAPES = [(16, 24), (24,), ()]


def start(dtypes: list[torch.dtype]) -> list[nn.Parameter]:
    """Parameters whose values are 16-bit numbers, whatever their dtype."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in SHAPES]
    return [nn.Parameter((v * 4).round().div(4).to(t)) for v, t in zip(values, dtypes, strict=True)]


def feed(params: list[nn.Parameter], rank: int, step: int) -> None:
    """Gradients that are numbers of bfloat16 and of float16."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).mul(16).round().div(16).clamp(-4, 4).to(p.dtype)


def follow(comm: Comm, name: str, dtypes: list[torch.dtype], write: Any = None, **more: Any) -> list[list[Tensor]]:
    params = start(dtypes)
    optimizer, kept = make(name, params, comm, **more), []
    for step in range(STEPS):
        if write is not None and step in (2, 6):
            write(params, step)
        feed(params, comm.rank, step)
        optimizer.step()
        kept.append([p.detach().clone() for p in params])
    return kept


@kinds
@pytest.mark.parametrize("dtype", HALF)
def test_16_bit_parameters_are_those_in_float32_rounded(name, dtype):
    rounded(name, [dtype] * 3)


@kinds
def test_parameters_of_several_dtypes_are_those_in_float32_rounded(name):
    rounded(name, [torch.float32, torch.bfloat16, torch.float16])


def test_16_bit_parameters_go_with_integers():
    rounded("Lamb", [torch.bfloat16] * 3, transport="int8")


def rounded(name: str, dtypes: list[torch.dtype], write: Any = None, **more: Any) -> None:
    mine, other = onebit.run_workers(2, lambda comm: follow(comm, name, dtypes, write, **more))
    full = onebit.run_workers(2, lambda comm: follow(comm, name, [torch.float32] * 3, write, **more))[0]
    for low, theirs, exact in zip(mine, other, full, strict=True):
        for a, b, c, dtype in zip(low, theirs, exact, dtypes, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c.to(dtype))
    assert not torch.equal(mine[0][0], mine[-1][0])


@kinds
@pytest.mark.parametrize("dtype", HALF)
def test_steps_far_below_the_spacing_add_up(name, dtype):
    p = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = make(name, [p], Solo(), lr=1e-5, weight_decay=0.0)
    values = []
    for _ in range(400):
        p.grad = torch.ones_like(p)
        optimizer.step()
        values.append(p[0].item())
    assert values[0] == values[9] == 1.0  # the spacing below 1 is .004 and .0005
    assert 0.9 < values[-1] < 0.9965


def test_small_gradients_survive_the_scale():
    p, grads = nn.Parameter(torch.ones(64, dtype=torch.float16)), torch.linspace(1e-8, 1e-7, 64)
    optimizer, scaler = make("OneBitAdam", [p], Solo()), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for _ in range(2):
        scaler.scale((p.float() * grads).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.testing.assert_close(optimizer.state[p]["momentum"], grads * (1 - 0.9**2), rtol=0.01, atol=0.0)


@kinds
def test_clipping_reads_what_was_unscaled_by_hand_after_a_step_that_was_not(name):
    p, twin = (nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, plain, norms = make(name, [p], Solo()), make(name, [twin], Solo()), []
    for by_hand in (False, True, False, True):
        twin.square().sum().backward()
        scaler.scale(p.square().sum()).backward()
        if by_hand:
            scaler.unscale_(scaled)
            norms.append((float(scaled.clip_grad_norm_(2.0)), float(plain.clip_grad_norm_(2.0))))
        scaler.step(scaled)
        scaler.update()
        plain.step()
        scaled.zero_grad()
        plain.zero_grad()
        assert torch.equal(p, twin)
    assert all(mine == theirs for mine, theirs in norms)
    assert norms[0][0] > 10


def by_the_scale(comm: Comm) -> tuple[str, int, Tensor]:
    """The schedule waits while the scale falls, as many loops have it."""
    model = copy.deepcopy(MODEL)
    optimizer = make("OneBitAdam", model.parameters(), comm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(STEPS):
        loss = loss_of(model, comm.rank, step, None)
        scaler.scale(loss * float("inf") if step in INFS and comm.rank == 1 else loss).backward()
        try:
            scaler.step(optimizer)
        except onebit.MismatchError as error:
            return str(error), step, flat(model.parameters())
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
    return "", STEPS, flat(model.parameters())


def test_schedules_that_came_apart_are_said_before_the_parameters_do():
    (text, step, mine), (other, last, theirs) = onebit.run_workers(2, by_the_scale)
    assert text == other
    assert "learning rates differ" in text
    assert "skipped_steps" in text
    assert step == last == INFS[0] + 1
    assert torch.equal(mine, theirs)


def test_a_rate_that_is_set_right_goes_on_with_the_same_gradients():
    def work(comm: Comm) -> Tensor:
        model = copy.deepcopy(MODEL)
        optimizer = make("OneBitAdam", model.parameters(), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            scaler.scale(loss_of(model, comm.rank, step, None)).backward()
            if wrong and step == 1:
                optimizer.param_groups[0]["lr"] = 0.02 + 0.01 * comm.rank
                with pytest.raises(onebit.MismatchError):
                    scaler.step(optimizer)
                optimizer.param_groups[0]["lr"] = 0.02
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return flat(model.parameters())

    wrong = True
    mended = onebit.run_workers(2, work)
    wrong = False
    assert torch.equal(mended[0], onebit.run_workers(2, work)[0])


def test_two_optimizers_under_one_scaler_are_both_told():
    """The first has the overflow and lowers the scale; the schedule of the second looks at it."""

    def work(comm: Comm) -> list[str]:
        models, said = [copy.deepcopy(MODEL), copy.deepcopy(MODEL)], []
        first, second = (make("OneBitLamb", model.parameters(), comm) for model in models)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for step in range(4):
            loss = loss_of(models[0], comm.rank, step, None) * (float("inf") if (step, comm.rank) == (1, 1) else 1)
            scaler.scale(loss).backward()
            scaler.scale(loss_of(models[1], comm.rank, step, None)).backward()
            before = scaler.get_scale()
            for optimizer in (second, first):
                try:
                    scaler.step(optimizer)
                except onebit.MismatchError as error:
                    return [*said, str(error)]
            scaler.update()
            for optimizer in (first, second):
                optimizer.zero_grad()
            if scaler.get_scale() < before:
                second.param_groups[0]["lr"] *= 0.5
        return said

    said = onebit.run_workers(2, work)
    assert said[0] == said[1]
    assert "learning rates differ" in said[0][0]


def test_local_steps_that_overflowed_on_one_worker_do_not_part_the_rates():
    def work(comm: Comm) -> str:
        model = copy.deepcopy(MODEL)
        optimizer = make("ZeroOneAdam", model.parameters(), comm, local_step_clipper=4, local_step_scaler=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for step in range(20):
            loss = loss_of(model, comm.rank, step, None)
            local = not optimizer.in_sync and comm.rank == 1 and step < 12
            scaler.scale(loss * float("inf") if local else loss).backward()
            before = scaler.get_scale()
            try:
                scaler.step(optimizer)
            except onebit.MismatchError as error:
                return str(error)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() < before:
                optimizer.param_groups[0]["lr"] *= 0.9
        return ""

    said = onebit.run_workers(2, work)
    assert said[0] == said[1]
    assert "learning rates differ" in said[0]


def new_values(params: list[nn.Parameter], step: int) -> dict[str, Tensor]:
    return {str(i): torch.linspace(8, 9, p.numel()).view_as(p).bfloat16() + step for i, p in enumerate(params)}


def write_by_load(params: list[nn.Parameter], step: int) -> None:
    nn.ParameterList(params).load_state_dict(new_values(params, step))


def write_by_data(params: list[nn.Parameter], step: int) -> None:
    for p, value in zip(params, new_values(params, step).values(), strict=True):
        p.data.copy_(value)


@kinds
@pytest.mark.parametrize("write", [write_by_load, write_by_data])
def test_what_others_write_into_parameters_is_taken_over(name, write):
    rounded(name, [torch.bfloat16] * 3, write)


def continued(comm: Comm, name: str, dtype: torch.dtype, cut: int) -> bool:
    params = start([dtype, torch.float32, dtype])
    optimizer = make(name, params, comm)
    for step in range(cut):
        feed(params, comm.rank, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert [saved["state"][i]["master"].dtype for i in (0, 2)] == [torch.float32] * 2
    assert "master" not in saved["state"][1]
    again = [nn.Parameter(p.detach().clone()) for p in params]
    other = make(name, again, comm)
    other.load_state_dict(saved)
    nn.ParameterList(again).load_state_dict(nn.ParameterList(params).state_dict())  # what is there: no master changes
    for step in range(cut, cut + 3):
        for values, opt in ((params, optimizer), (again, other)):
            feed(values, comm.rank, step)
            opt.step()
    masters = [(optimizer.state[params[i]]["master"], other.state[again[i]]["master"]) for i in (0, 2)]
    assert not torch.equal(masters[0][0], params[0].float())
    return all(torch.equal(a, b) for a, b in [*masters, *zip(params, again, strict=True)])


@kinds
@pytest.mark.parametrize(("cut", "dtype"), [(2, HALF[1]), (WARMUP, HALF[0]), (6, HALF[0])])
def test_a_saved_state_keeps_the_master_in_float32(name, dtype, cut):
    assert all(onebit.run_workers(2, lambda comm: continued(comm, name, dtype, cut)))


@kinds
def test_float64_is_kept(name):
    mine, other = onebit.run_workers(2, lambda comm: follow(comm, name, [torch.float64] * 3))
    full = onebit.run_workers(2, lambda comm: follow(comm, name, [torch.float32] * 3))[0]
    assert all(map(torch.equal, mine[-1], other[-1]))
    assert not torch.equal(mine[-1][0], mine[-1][0].float().double())  # not computed in float32
    torch.testing.assert_close([p.float() for p in mine[WARMUP]], full[WARMUP], rtol=0.01, atol=1e-3)


def tensors(thing: Any, seen: set[int]) -> dict[int, int]:
    """{address: bytes} of the memory under all tensors that can be reached."""
    if id(thing) in seen or isinstance(thing, Comm | type):
        return {}
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()}
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    inner = [*inner, *getattr(thing, "__dict__", {}).values()]
    return {address: size for part in inner for address, size in tensors(part, seen).items()}


def held(comm: Comm, name: str, dtype: torch.dtype) -> float:
    """Bytes that the optimizer holds per parameter, beside parameters and gradients."""
    p = nn.Parameter(torch.ones(2**16, dtype=dtype))
    optimizer = make(name, [p], comm)
    for step in range(WARMUP + 3):
        feed([p], comm.rank, step)
        optimizer.step()
    p.grad = None
    return (sum(tensors(optimizer, set()).values()) - p.untyped_storage().nbytes()) / p.numel()


@pytest.mark.parametrize(
    ("name", "per_parameter"),  # momentum, variance, and the mean of the gradients; or two variances, worker error, ...
    [("Lamb", 4 + 4 + 4), ("OneBitLamb", 4 + 4 + 4 + 2 + 1 / 8), ("OneBitAdam", 4 + 4 + 2 + 1 / 8)],
)
def test_a_master_weight_takes_four_bytes_and_nothing_else_grows(name, per_parameter):
    for dtype, more in (torch.float32, 0), (torch.bfloat16, 4):
        found = onebit.run_workers(2, lambda comm, dtype=dtype: held(comm, name, dtype))[0]
        assert found == pytest.approx(per_parameter + more, rel=0.02)
