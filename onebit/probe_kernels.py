"""Speed of the kernels in a whole optimizer step without a network, phase by phase, against a copy of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import onebit
from onebit.comm import Comm, Pending
from onebit.kernels import choose
from onebit.planner_inputs import Range, transformer_shapes
from onebit.planner_methods import ENCODE, LAMB_APPLY, LAMB_UPDATE, SERVER, SERVER_PER_CHUNK

MOST_ELEMENTS = 4_000_000
COPY_BYTES = 8.0  # per element of float32: read and written
PHASES = ("encode", "serve", "commit", "measure", "apply")


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
    """Time compressed and warm-up steps of 1-bit LAMB, and a copy, in turns.

    Args:
        parameters: of the model; at most 4 million are timed.
        workers: whose share of the server's work is this worker's, >= 1.
        budget_s: seconds, of which at least three turns are taken.

    Returns:
        kernels, elements, rounds; copy_gbyte_s, kernel_factor and plain_factor as `Range`s in the terms of
        `planner_inputs.Work`; ns_per_element, the same for each phase: encode (the worker's messages), serve, commit
        (both errors), measure (the refreshed variance and norms), apply, and warmup_step.
    """
    count = min(parameters, MOST_ELEMENTS)
    n = max(2, workers)
    with _unheard():
        stage = _Timed(count, n, device)
        warm = onebit.Lamb(_parameters(count, device), lr=1e-4, comm=Echo(n, device))
        warm.step()
    source, target = torch.rand(count, device=device), torch.zeros(count, device=device)
    phases: dict[str, list[float]] = {name: [] for name in (*PHASES, "step", "copy", "warmup_step")}
    until = time.perf_counter() + budget_s
    turn = 0
    while turn < 4 or (time.perf_counter() < until and turn < 30):
        took = stage.step()
        took["copy"] = _seconds(lambda: target.copy_(source), device)
        took["warmup_step"] = _seconds(warm.step, device)
        for name, seconds in took.items() if turn else ():  # the first turn touches the pages
            phases[name].append(seconds)
        turn += 1
    per_element = {name: quartiles([s / count * 1e9 for s in values]) for name, values in phases.items()}
    compressed = ENCODE + SERVER_PER_CHUNK / n + SERVER + LAMB_APPLY
    floor = [seconds / COPY_BYTES for seconds in phases["copy"]]
    own = [s / compressed / f for s, f in zip(phases["step"], floor, strict=True)]
    plain = [s / LAMB_UPDATE / f for s, f in zip(phases["warmup_step"], floor, strict=True)]
    return {
        "kernels": "{} ({})".format(*choose(device, torch.float32)),
        "elements": count,
        "rounds": turn - 1,
        "copy_gbyte_s": quartiles([COPY_BYTES * count / s / 1e9 for s in phases["copy"]]),
        "kernel_factor": quartiles(own),
        "plain_factor": quartiles(plain),
        "ns_per_element": {name: per_element[name] for name in (*PHASES, "warmup_step")},
    }


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
        self._optimizer = onebit.OneBitLamb(_parameters(count, device), lr=1e-4, freeze_step=1, comm=self._comm)
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
