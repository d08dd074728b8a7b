"""Loops as people write them: accumulation, closures, schedules, frozen and odd parameters, compiled models, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import small
import torch
from small import flat, kinds_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import onebit
from onebit.comm import Comm, Solo

WARMUP, STEPS = 4, 10
KINDS = kinds_of(WARMUP)
kinds = pytest.mark.parametrize("name", KINDS)
EXACT = {"Lamb": STEPS, "OneBitLamb": WARMUP, "OneBitAdam": WARMUP, "ZeroOneAdam": WARMUP}
"""For how many steps the trajectory is that of one process on the mean of the gradients."""


make = partial(small.make, KINDS, weight_decay=0.01)


def data(rank: int, step: int, width: int = 6) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flatten(1)[:, :3].sin() - 1).square().mean()


def built(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


PLAIN = small.MODEL


class Loop:
    """One worker's model and optimizer; `micro` are the ranks whose data it sees in each step."""

    def __init__(self, comm: Comm, name: str, model: nn.Module, micro: tuple[int, ...], **more: Any) -> None:
        self.model, self.micro = copy.deepcopy(model), micro
        groups = more.pop("groups", lambda model: model.parameters())
        self.optimizer = make(name, groups(self.model), comm, **more)
        self.kept: list[Tensor] = []
        self.bytes: list[int] = []

    def backward(self, step: int, net: Any = None) -> Tensor:
        losses = [loss_of(net or self.model, data(rank, step)) / len(self.micro) for rank in self.micro]
        for loss in losses:
            loss.backward()
        return sum(losses)

    def step(self, step: int, **more: Any) -> None:
        before = self.optimizer.payload_bytes
        self.backward(step, **more)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.note(before)

    def note(self, before: int) -> None:
        self.kept.append(flat(self.model.parameters()))
        self.bytes.append(self.optimizer.payload_bytes - before)


def run(loop: Loop, each: Callable[[Loop, int], Any] = Loop.step) -> Loop:
    for step in range(STEPS):
        each(loop, step)
    return loop


def compare(name: str, model: nn.Module, each: Callable[[Loop, int], Any] = Loop.step, **more: Any) -> Loop:
    """Two workers hold equal bits, move as one process on all data while gradients are averaged, then send less."""
    mine, other = onebit.run_workers(2, lambda comm: run(Loop(comm, name, model, (comm.rank,), **more), each))
    assert all(map(torch.equal, mine.kept, other.kept))
    alone = run(Loop(Solo(), name, model, (0, 1), **more), each)
    for step in range(EXACT.get(name, 0)):
        torch.testing.assert_close(mine.kept[step], alone.kept[step], rtol=1e-3, atol=1e-4)
    assert torch.isfinite(mine.kept[-1]).all()
    assert not torch.equal(mine.kept[-1], mine.kept[-2])
    if name != "Lamb" and mine.kept[0].numel() > 200:
        assert min(mine.bytes[WARMUP:]) < mine.bytes[0] / (2 if name.startswith("Local") else 8)
    return mine


@kinds
def test_accumulated_gradients_are_those_of_the_whole_batch(name):
    def twice(loop: Loop, step: int) -> None:
        before = loop.optimizer.payload_bytes
        for part in (0, 1):
            for rank in loop.micro:
                x = data(rank, step)[4 * part : 4 * part + 4]
                (loss_of(loop.model, x) / 2 / len(loop.micro)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.note(before)

    parts, whole = compare(name, PLAIN, twice), compare(name, PLAIN)
    torch.testing.assert_close(parts.kept[WARMUP - 1], whole.kept[WARMUP - 1], rtol=1e-3, atol=1e-4)
    assert parts.bytes == whole.bytes


@kinds
def test_a_closure_is_the_same_loop(name):
    def with_closure(loop: Loop, step: int) -> None:
        def closure() -> Tensor:
            loop.optimizer.zero_grad()
            return loop.backward(step)

        before = loop.optimizer.payload_bytes
        assert loop.optimizer.step(closure) > 0
        loop.note(before)

    ends = [compare(name, PLAIN, each).kept[-1] for each in (with_closure, Loop.step)]
    assert torch.equal(*ends)


def layerwise(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": 0.02 / (i + 1)} for i, p in enumerate(model.parameters())]


@kinds
@pytest.mark.parametrize("kind", ["lambda", "one cycle"])
def test_schedules_of_each_group_are_rates_set_by_hand(name, kind):
    rates: list[list[tuple[float, Any]]] = []

    def scheduled(loop: Loop, step: int) -> None:
        if step == 0:
            if kind == "lambda":
                factors = [lambda s, k=k: (s + 1) ** (-k / 4) for k in range(4)]
                loop.schedule = LambdaLR(loop.optimizer, factors)
            else:
                loop.schedule = OneCycleLR(loop.optimizer, [0.04, 0.03, 0.02, 0.01], total_steps=STEPS + 1)
        if loop.optimizer.comm.rank == 0 and len(rates) == step:
            rates.append([(group["lr"], group["betas"]) for group in loop.optimizer.param_groups])
        loop.step(step)
        loop.schedule.step()

    def by_hand(loop: Loop, step: int) -> None:
        for group, (lr, betas) in zip(loop.optimizer.param_groups, rates[step], strict=True):
            group["lr"], group["betas"] = lr, betas
        loop.step(step)

    ends = [compare(name, PLAIN, each, groups=layerwise).kept[-1] for each in (scheduled, by_hand)]
    assert torch.equal(*ends)
    assert len({tuple(row) for row in rates}) > STEPS - 2


@kinds
def test_a_rate_may_be_a_tensor_that_changes_in_place(name):
    def halved(loop: Loop, step: int) -> None:
        if step in (2, 6):
            group = loop.optimizer.param_groups[0]
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5
        loop.step(step)

    tensor = lambda model: [{"params": list(model.parameters()), "lr": torch.tensor(0.0625)}]  # noqa: E731
    ends = [compare(name, PLAIN, halved, **more).kept[-1] for more in ({"groups": tensor}, {"lr": 0.0625})]
    assert torch.equal(*ends)


@kinds
@pytest.mark.parametrize(("frozen", "thawed"), [(0, 99), (0, 7), (2, 3), (2, 7), (6, 99), (6, 8)])
def test_frozen_parameters_never_move(name, frozen, thawed):
    def each(loop: Loop, step: int) -> None:
        first = loop.model[0].weight
        if step in (frozen, thawed):
            first.requires_grad_(step == thawed)
        before = first.detach().clone()
        loop.step(step)
        moves.append((step, torch.equal(first, before)))

    moves: list[tuple[int, bool]] = []
    compare(name, PLAIN, each, weight_decay=0.1)
    for step, still in moves:
        if frozen <= step < thawed:
            assert still, step
        elif step != thawed and not (step >= thawed and frozen == 0):  # a layer may wake a step or two later
            assert not still, step
    assert thawed > STEPS or not all(still for step, still in moves if step == STEPS - 1)


class Odd(nn.Module):
    """A layer that is never used, one that is used on some workers in some steps, tied weights, odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(5, 5)
        self.again = nn.Linear(6, 16)
        self.again.weight = self.first.weight
        self.transposed = nn.Parameter(torch.randn(3, 16).t() / 4)
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) + torch.tanh(self.again(x * 0.5))
        if x[0, 0] > 0:  # other workers have other data
            h = h + torch.tanh(self.sometimes(h))
        return self.scale * (h @ self.transposed) + self.empty.sum()


@kinds
def test_unused_tied_empty_scalar_and_transposed_parameters(name):
    model = built(Odd)
    assert not model.transposed.is_contiguous()
    used = {data(rank, step)[0, 0].item() > 0 for rank in (0, 1) for step in range(WARMUP)}
    assert used == {True, False}
    end = compare(name, model).model
    assert torch.equal(end.never.weight, model.never.weight)
    assert end.again.weight is end.first.weight
    assert not end.transposed.is_contiguous()
    for part in ("transposed", "scale"):
        assert not torch.equal(getattr(end, part), getattr(model, part))
    assert not torch.equal(end.sometimes.weight, model.sometimes.weight)


def test_nothing_but_empty_parameters_is_refused():
    with pytest.raises(onebit.OnebitError, match="0 elements together"):
        make("Lamb", [nn.Parameter(torch.zeros(0, 4))], Solo()).step()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).mean((2, 3)))


@kinds
def test_channels_last_is_another_order_in_memory_only(name):
    def each(loop: Loop, step: int) -> None:
        before = loop.optimizer.payload_bytes
        for rank in loop.micro:
            x = data(rank, step, 3 * 36).view(8, 3, 6, 6)
            if loop.model.first.weight.is_contiguous(memory_format=torch.channels_last):
                x = x.contiguous(memory_format=torch.channels_last)
            (loss_of(loop.model, x) / len(loop.micro)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.note(before)

    model = built(Images)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert not other.first.weight.is_contiguous()
    usual, last = compare(name, model, each), compare(name, other, each)
    assert not last.model.first.weight.is_contiguous()
    for step in range(WARMUP):
        torch.testing.assert_close(last.kept[step], usual.kept[step], rtol=1e-3, atol=1e-4)


def test_a_compiled_model_is_the_same_model():
    """One worker: Dynamo's tracing is not for several threads."""
    ends, name = [], "OneBitLamb"
    for backend in (None, "aot_eager"):
        loop = Loop(Solo(), name, PLAIN, (0,))
        net = loop.model if backend is None else torch.compile(loop.model, backend=backend)
        if backend is not None:
            loop.optimizer = make(name, net.named_parameters(), Solo())
            assert next(iter(loop.optimizer.param_groups[0]["param_names"])).startswith("_orig_mod.")
        ends.append(run(loop, lambda loop, step, net=net: loop.step(step, net=net)).kept[-1])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@kinds
def test_groups_may_be_added_until_the_first_step(name):
    def split(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.parameters()
        return [{"params": [first]}, {"params": rest, "lr": 0.01}]

    def each(loop: Loop, step: int) -> None:
        if step == 0 and len(loop.optimizer.param_groups) == 1:
            loop.optimizer.add_param_group(split(loop.model)[1])
        if step in (1, WARMUP + 1):
            with pytest.raises(onebit.ConfigError, match="after the first step"):
                loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        loop.step(step)

    ends = [compare(name, PLAIN, each, groups=g).kept[-1] for g in (split, lambda model: split(model)[:1])]
    assert torch.equal(*ends)


@kinds
@pytest.mark.parametrize("cut", [0, 2, WARMUP, 7])
def test_copies_in_the_middle_go_on_alike(name, cut):
    def worker(comm: Comm) -> tuple[Tensor, Tensor]:
        loop = Loop(comm, name, PLAIN, (comm.rank,))
        for step in range(cut):
            loop.step(step)
        other = copy.deepcopy(loop)
        assert other.optimizer.comm is comm
        for step in range(cut, STEPS):
            loop.step(step)
            other.step(step)
        return loop.kept[-1], other.kept[-1]

    (mine, again), (theirs, _) = onebit.run_workers(2, worker)
    assert torch.equal(mine, again)
    assert torch.equal(mine, theirs)


@kinds
def test_one_worker_s_loop_can_be_pickled(name):
    loop = Loop(Solo(), name, PLAIN, (0,))
    for step in range(WARMUP + 1):
        loop.step(step)
    other = pickle.loads(pickle.dumps(loop))
    for each in (loop, other):
        each.step(WARMUP + 1)
    assert torch.equal(loop.kept[-1], other.kept[-1])


@pytest.mark.parametrize("name", ["OneBitAdam", "LocalVarianceAdam"])
def test_weight_decay_of_a_layer_that_had_a_gradient_goes_on_as_in_adamw(name):
    mine, theirs = (nn.Parameter(torch.full((4,), 2.0)) for _ in range(2))
    adamw = torch.optim.AdamW([theirs], lr=0.01, betas=(0.0, 0.99), weight_decay=0.5)
    more = {"freeze_step": 99} if name == "OneBitAdam" else {"warmup_steps": 99}
    ours = getattr(onebit, name)([mine], lr=0.01, betas=(0.0, 0.99), weight_decay=0.5, bias_correction=True, **more)
    for value in (1.0, 0.0, 0.0):
        mine.grad, theirs.grad = (torch.full((4,), value) for _ in range(2))
        ours.step()
        adamw.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=0)  # one of them takes 4-bit gradients
    assert float(mine[0].detach()) < 1.98
