"""Speed of the kernels in a whole optimizer step without a network, phase by phase, against a copy of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import onebit
from onebit.comm import Comm, Pending
from onebit.kernels import choose
from onebit.local_variance import Schedule
from onebit.planner_inputs import Range, transformer_shapes
from onebit.planner_methods import LAMB_APPLY, LAMB_UPDATE, LOCAL_APPLY, exchange_bytes

MOST_ELEMENTS = 4_000_000
DECAY = 0.01  # as most trainings have it; some kernels have more to do then
COPY_BYTES = 8.0  # per element of float32: read and written
PHASES = ("encode", "serve", "commit", "measure", "apply")
WHOLE = ("warmup_step", "int8_step", "int4_step", "local_step")


def quartiles(values: list[float]) -> Range:
    """Lower quartile, median and upper quartile; of one value, that value."""
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    return Range(float(low), float(middle), float(high))


def synchronized(device: torch.device) -> float:
    """Seconds on the clock, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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


def kernel_speed(parameters: int, workers: int, device: torch.device, budget_s: float) -> dict[str, Any]:
    """Time compressed and warm-up steps of LAMB, 1-bit and with local variance, and a copy, in turns.

    Args:
        parameters: of the model; at most 4 million are timed.
        workers: whose share of the server's work is this worker's, >= 1.
        budget_s: seconds, of which at least three turns are taken.

    Returns:
        kernels, elements, rounds; copy_gbyte_s, and the factors, as `Range`s in the terms of `planner_inputs.Work`;
        ns_per_element, the same for each phase of a compressed step of 1-bit LAMB: encode (the worker's messages),
        serve, commit (both errors), measure (the refreshed variance and norms), apply; and for whole steps: warmup_step
        (fp32), int8_step and int4_step of the warm-up, local_step, between two exchanges of the variance.
    """
    count = min(parameters, MOST_ELEMENTS)
    n = max(2, workers)
    with _unheard():
        stage, steps = _Timed(count, n, device), _whole_steps(count, n, device)
    source, target = torch.rand(count, device=device), torch.zeros(count, device=device)
    phases: dict[str, list[float]] = {name: [] for name in (*PHASES, "step", "copy", *WHOLE)}
    until = time.perf_counter() + budget_s
    turn = 0
    while turn < 4 or (time.perf_counter() < until and turn < 30):
        took = stage.step()
        took["copy"] = _seconds(lambda: target.copy_(source), device)
        took |= {name: _seconds(step, device) for name, step in steps.items()}
        for name, seconds in took.items() if turn else ():  # the first turn touches the pages
            phases[name].append(seconds)
        turn += 1
    per_element = {name: quartiles([s / count * 1e9 for s in values]) for name, values in phases.items()}
    return {
        "kernels": "{} ({})".format(*choose(device, torch.float32)),
        "elements": count,
        "rounds": turn - 1,
        "copy_gbyte_s": quartiles([COPY_BYTES * count / s / 1e9 for s in phases["copy"]]),
        **factors(phases, n),
        "ns_per_element": {name: per_element[name] for name in (*PHASES, *WHOLE)},
    }


def factors(seconds: Mapping[str, list[float]], workers: int) -> dict[str, Range]:
    """Times over those of the memory traffic that the cost model counts for them, at the speed of the copy.

    Args:
        seconds: of "copy", "step" (1-bit LAMB, compressed) and each of `WHOLE`, in the same turns.
        workers: n of the server's share.

    Returns:
        By name of `planner_inputs.Work`. Those of integers are of what a warm-up takes beyond that of fp32, 0 where it
        takes no longer.
    """
    floor = [copy / COPY_BYTES for copy in seconds["copy"]]

    def over(times: list[float], moved: float) -> Range:
        return quartiles([s / moved / f for s, f in zip(times, floor, strict=True)])

    def beyond(bits: int) -> Range:
        pairs = zip(seconds[f"int{bits}_step"], seconds["warmup_step"], strict=True)
        return over([max(0.0, whole - plain) for whole, plain in pairs], sum(exchange_bytes(workers, bits)))

    one_bit = sum(exchange_bytes(workers))
    return {
        "kernel_factor": over(seconds["step"], one_bit + LAMB_APPLY),
        "plain_factor": over(seconds["warmup_step"], LAMB_UPDATE),
        "int8_factor": beyond(8),
        "int4_factor": beyond(4),
        "local_factor": over(seconds["local_step"], one_bit + LOCAL_APPLY),
    }


class _Never(Schedule):
    """No exchange of the variance after that at the end of the warm-up."""

    def interval(self, done: int) -> int:
        return 10**9


def _whole_steps(count: int, workers: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """The steps that are timed as a whole, ready to be timed."""

    def common() -> dict[str, Any]:
        return {"params": _parameters(count, device), "lr": 1e-4, "weight_decay": DECAY, "comm": Echo(workers, device)}

    local = onebit.LocalVarianceLamb(**common(), warmup_steps=1, warmup_transport="fp32", schedule=_Never())
    made: dict[str, Any] = {
        "warmup_step": onebit.Lamb(**common()),
        "int8_step": onebit.Lamb(**common(), transport="int8"),
        "int4_step": onebit.Lamb(**common(), transport="int4"),
        "local_step": local,
    }
    for optimizer in made.values():
        for _ in range(3 if optimizer is local else 1):  # the warm-up, and the last steps with momentum as numbers
            optimizer.step()
    return {name: optimizer.step for name, optimizer in made.items()}


@contextmanager
def _unheard() -> Iterator[None]:
    """Without the library's log, which would rightly say that all workers hold the same gradients."""
    log, before = logging.getLogger("onebit"), logging.getLogger("onebit").level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class _Timed:
    """A compressed step of 1-bit LAMB in its phases, as its collectives and its back-end's calls delimit them."""

    def __init__(self, count: int, workers: int, device: torch.device) -> None:
        self._device, self._comm = device, Echo(workers, device)
        self._optimizer = onebit.OneBitLamb(
            _parameters(count, device), lr=1e-4, freeze_step=1, weight_decay=DECAY, comm=self._comm
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
        """Seconds of each phase and of the whole."""
        self._comm.marks.clear()
        self._spent.update(measure=0.0, apply=0.0)
        began = synchronized(self._device)
        self._optimizer.step()
        ended = synchronized(self._device)
        marks = self._comm.marks
        sent = max(at for name, at in marks if name == "all_to_all")
        replied = max(at for name, at in marks if name == "all_gather")
        rest = ended - replied - sum(self._spent.values())
        return {"encode": sent - began, "serve": replied - sent, "commit": rest, **self._spent, "step": ended - began}


def _parameters(count: int, device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in transformer_shapes(count):
        p = nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
        p.grad = (torch.randn(shape, generator=generator) * 1e-3 + 1e-8).to(device)
        made.append(p)
    return made


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    began = synchronized(device)
    call()
    return synchronized(device) - began
