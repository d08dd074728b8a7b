"""Speed of the kernels in a whole optimizer step without a network, phase by phase, against a copy of memory."""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import onebit
from onebit.clock import synchronized
from onebit.comm import Comm, Pending, agreed
from onebit.kernels import choose
from onebit.local_variance import Schedule
from onebit.planner_bytes import mean_inside_bytes
from onebit.planner_inputs import Range, Shapes, transformer_shapes
from onebit.planner_methods import LAMB_APPLY, LAMB_UPDATE, LOCAL_APPLY, LOW_RANK, exchange_bytes
from onebit.probe_powersgd import low_rank_step
from onebit.two_level import TwoLevel

log = logging.getLogger("onebit")

MOST_ELEMENTS = 12_000_000  # more than caches hold
DECAY = 0.01  # as most trainings have it; some kernels have more to do then
COPY_BYTES = 8.0  # per element of float32: read and written
PHASES = ("encode", "serve", "commit", "measure", "apply")
WHOLE = ("warmup_step", "int8_step", "int4_step", "local_step", "low_rank_step")


def quartiles(values: list[float]) -> Range:
    """Lower quartile, median and upper quartile; of one value, that value."""
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    return Range(float(low), float(middle), float(high))


def around_the_mean(values: list[float]) -> Range:
    """The mean, and quartiles as far as they lie on its sides: what a step takes that waits its turn on busy cores."""
    mean, found = statistics.fmean(values), quartiles(values)
    return Range(min(found.low, mean), mean, max(found.high, mean))


class Echo(Comm):
    """One worker that hears its own words from n: the work of a step among n workers without a network.

    `marks`: when each collective was begun and waited for, since `marks` was cleared.
    """

    rank = 0

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self.marks: list[tuple[str, float]] = []

    @property
    def size(self) -> int:
        return self._size

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self._size

    def _all_to_all(self, messages: Tensor) -> Pending:
        return self._echo("all_to_all", messages[:1])

    def _all_gather(self, message: Tensor) -> Pending:
        return self._echo("all_gather", message.unsqueeze(0))

    def _all_reduce(self, tensor: Tensor) -> None:
        tensor *= self._size

    def _echo(self, name: str, row: Tensor) -> Pending:
        self._mark(name)
        result = row.repeat(self._size, 1)
        return Pending(result, lambda: self._mark(f"{name} waited for"))

    def _mark(self, name: str) -> None:
        self.marks.append((name, synchronized(self._device)))


class Stand:
    """A place among n workers that are not there, but for those of this machine where there are two levels.

    Args:
        workers: n, >= 2.
        inside: the workers of this machine, who really average, for two levels; None: one level.

    Attributes:
        comm: for an optimizer. echo: marks what crosses to other machines.
    """

    def __init__(self, workers: int, device: torch.device, inside: Comm | None) -> None:
        whole = self.echo = Echo(workers, device)
        self.comm: Comm = whole
        if inside is not None:
            self.echo = Echo(workers // inside.size, device)
            self.comm = TwoLevel(whole, inside, self.echo)

    def timed(self, call: Callable[[], object], device: torch.device) -> tuple[float, float]:
        """Seconds of a call without those of the mean inside the machine; and those."""
        before = self.comm.clock.seconds["wire"]
        seconds = _seconds(call, device)
        inside = self.comm.clock.seconds["wire"] - before if isinstance(self.comm, TwoLevel) else 0.0
        return seconds - inside, inside


def kernel_speed(
    shapes: Shapes, workers: int, device: torch.device, budget_s: float, inside: Comm | None = None
) -> dict[str, Any]:
    """Time steps of LAMB, 1-bit, warm-up and with local variance, and PowerSGD's hook, each in turns with a copy.

    A collective of `inside` where that is given.

    Args:
        shapes: of the model's layers; where they have more than 12 million elements together, those of a Transformer of
            so many stand for it.
        workers: whose share of the server's work is this worker's, >= 1.
        budget_s: seconds; at least three turns of each are taken.
        inside: the workers of this machine, two or more: steps of two levels, whose mean inside is real. None: one.

    Returns:
        kernels, elements, rounds; copy_gbyte_s, and the factors, as `Range`s in the terms of `planner_inputs.Work`,
        that of PowerSGD None where its hook cannot be run (`low_rank_step`); mean_gbit_s, of the mean inside a machine
        in a step of 1-bit LAMB, as `planner_inputs.Network` has it, None for one level; ns_per_element, the same for
        each phase of a compressed step of 1-bit LAMB: encode (the worker's messages), serve, commit (both errors),
        measure (the refreshed variance and norms), apply; and for whole steps: warmup_step (fp32), int8_step and
        int4_step of the warm-up, local_step, between two exchanges of the variance, low_rank_step.
    """
    if sum(math.prod(shape) for shape in shapes) > MOST_ELEMENTS:
        shapes = transformer_shapes(MOST_ELEMENTS)
    count = sum(math.prod(shape) for shape in shapes)
    n = max(2, workers)
    source, target = torch.rand(count, device=device), torch.zeros(count, device=device)
    phases: dict[str, list[float]] = {}  # seconds
    copies: list[float] = []
    stand = Stand(n, device, inside)
    means: list[float] = []  # seconds of the mean inside a machine
    makers = _makers(shapes, stand, device)
    step: Timed | None = None
    for make in makers:
        step = None
        gc.collect()  # so that the state of one at a time is held
        with unheard():
            step = make()
        if step is None:
            log.warning("PowerSGD is not timed: torch's hook cannot run on %s here", device.type)
        until = time.perf_counter() + budget_s / len(makers)
        turn = 0
        while step is not None and _again(turn, until, inside):
            took, copy = step(), _seconds(lambda: target.copy_(source), device)
            means += [took.pop("inside")] if turn and "step" in took else []
            copies += [copy] if turn else []  # the first turn touches the pages
            for name, seconds in took.items() if turn else ():
                phases.setdefault(name, []).append(seconds)
            turn += 1
    usual = statistics.median(copies)
    moved = {name: [COPY_BYTES * s / usual for s in found] for name, found in phases.items()}
    return {
        "kernels": "{} ({})".format(*choose(device, torch.float32)),
        "elements": count,
        "rounds": min(map(len, phases.values())),
        "copy_gbyte_s": quartiles([COPY_BYTES * count / s / 1e9 for s in copies]),
        **factors(moved, n, 1 if inside is None else inside.size),
        "mean_gbit_s": None if inside is None else _rates(mean_inside_bytes(inside.size, count), means),
        "ns_per_element": {
            name: quartiles([s / count * 1e9 for s in phases[name]]) for name in (*PHASES, *WHOLE) if name in phases
        },
    }


def _again(turn: int, until: float, inside: Comm | None) -> bool:
    """Whether to time once more; the workers of `inside` agree."""
    mine = turn < 4 or (time.perf_counter() < until and turn < 30)
    return mine if inside is None else agreed(inside, mine)


def _rates(sent: int, seconds: list[float]) -> Range:
    """Gbit/s at which so many bytes are sent."""
    took = around_the_mean(seconds)
    return Range(*(sent * 8e-9 / max(each, 1e-9) for each in (took.high, took.likely, took.low)))


def factors(moved: Mapping[str, list[float]], workers: int, inside: int = 1) -> dict[str, Range | None]:
    """Times over those of the memory traffic that the cost model counts for them.

    Args:
        moved: bytes per element that a copy moves in the time of a "step" (1-bit LAMB, compressed), and of each of
            `WHOLE`; "low_rank_step" may be missing.
        workers: n of the server's share.
        inside: workers of a machine that average first; times are without that mean.

    Returns:
        By name of `planner_inputs.Work`; None for what is missing. Those of integers are of what a warm-up takes beyond
        the mean of one in fp32, 0 where it takes no longer.
    """

    def over(name: str, counted: float, less: float = 0.0) -> Range:
        return around_the_mean([max(0.0, each - less) / counted for each in moved[name]])

    plain = statistics.fmean(moved["warmup_step"])
    one_bit, int8, int4 = (sum(exchange_bytes(workers, bits, inside)) for bits in (1, 8, 4))
    return {
        "kernel_factor": over("step", one_bit + LAMB_APPLY),
        "plain_factor": over("warmup_step", LAMB_UPDATE),
        "int8_factor": over("int8_step", int8, plain),
        "int4_factor": over("int4_step", int4, plain),
        "local_factor": over("local_step", one_bit + LOCAL_APPLY),
        "low_rank_factor": over("low_rank_step", LOW_RANK) if "low_rank_step" in moved else None,
    }


class _Never(Schedule):
    """No exchange of the variance after that at the end of the warm-up."""

    def interval(self, done: int) -> int:
        return 10**9


Timed = Callable[[], dict[str, float]]


def _makers(shapes: Shapes, stand: Stand, device: torch.device) -> list[Callable[[], Timed | None]]:
    """Of each step that is timed: a function that makes it ready, and returns one that takes it and gives seconds."""

    def whole(name: str) -> Timed:
        step = _whole_step(name, shapes, stand.comm, device)
        return lambda: {name: stand.timed(step, device)[0]}

    def low_rank() -> Timed | None:
        step = low_rank_step(shapes, device)
        return None if step is None else lambda: {"low_rank_step": step()}

    ours = [partial(whole, name) for name in WHOLE if name != "low_rank_step"]
    return [lambda: _Phases(shapes, stand, device).step, *ours, low_rank]


def _whole_step(name: str, shapes: Shapes, comm: Comm, device: torch.device) -> Callable[[], object]:
    """One of `WHOLE`, ready to be timed."""
    common: dict[str, Any] = {
        "params": _parameters(shapes, device), "lr": 1e-4, "weight_decay": DECAY, "comm": comm
    }  # fmt: skip
    made: Any
    if name == "local_step":
        made = onebit.LocalVarianceLamb(**common, warmup_steps=1, warmup_transport="fp32", schedule=_Never())
    else:
        transport: Any = {"warmup_step": "fp32", "int8_step": "int8", "int4_step": "int4"}[name]
        made = onebit.Lamb(**common, transport=transport)
    for _ in range(3 if name == "local_step" else 1):  # the warm-up, and the last steps with momentum as numbers
        made.step()
    step: Callable[[], object] = made.step
    return step


@contextmanager
def unheard() -> Iterator[None]:
    """Without the library's log, which would rightly say that all workers hold the same gradients."""

    def errors_only(record: logging.LogRecord) -> bool:  # of each call its own, since workers may be threads
        return record.levelno >= logging.ERROR

    log.addFilter(errors_only)
    try:
        yield
    finally:
        log.removeFilter(errors_only)


class _Phases:
    """A compressed step of 1-bit LAMB in its phases, as its collectives and its back-end's calls delimit them."""

    def __init__(self, shapes: Shapes, stand: Stand, device: torch.device) -> None:
        self._device, self._stand = device, stand
        self._optimizer = onebit.OneBitLamb(
            _parameters(shapes, device), lr=1e-4, freeze_step=1, weight_decay=DECAY, comm=stand.comm
        )
        for _ in range(3):  # the warm-up, the switch, the last step that holds the momentum as numbers
            self._optimizer.step()
        self._spent = {"measure": 0.0, "apply": 0.0}
        backend: Any = self._optimizer._backend
        for name in self._spent:
            setattr(backend, name, self._watched(name, getattr(backend, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = synchronized(self._device)
            result = call(*args, **kwargs)
            self._spent[name] += synchronized(self._device) - began
            return result

        return timed

    def step(self) -> dict[str, float]:
        """Seconds of each phase and of the whole, without those of the mean inside a machine, and of that."""
        marks = self._stand.echo.marks
        marks.clear()
        self._spent.update(measure=0.0, apply=0.0)
        began = synchronized(self._device)
        step, inside = self._stand.timed(self._optimizer.step, self._device)
        ended = began + step + inside
        sent = max(at for name, at in marks if name == "all_to_all")
        replied = max(at for name, at in marks if name == "all_gather")
        rest = ended - replied - sum(self._spent.values())
        encode = max(0.0, sent - began - inside)  # nearly all of it is before the messages
        return {
            "encode": encode,
            "serve": replied - sent,
            "commit": rest,
            **self._spent,
            "step": step,
            "inside": inside,
        }


def _parameters(shapes: Shapes, device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        p = nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
        p.grad = (torch.randn(shape, generator=generator) * 1e-3 + 1e-8).to(device)
        made.append(p)
    return made


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    began = synchronized(device)
    call()
    return synchronized(device) - began
