"""Time the optimizers' steps on one worker, network excluded, against the memory traffic that they cannot avoid.

The floor of a step is its bytes per element (`FLOORS`) at the speed of a large float32 copy timed in the same rounds.
Rounds interleave all steps, the copy and the numbers of threads; the figures are medians. Beside ours stand, where
installed, other people's optimizers on the same parameters.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import onebit
from onebit import peer
from onebit.errors import ConfigError

COMPRESSED = "1-bit LAMB, compressed stage"
COMPACT = "1-bit LAMB, compact state"
ADAM = "1-bit Adam, compressed stage"
ADAM_COMPACT = "1-bit Adam, compact state"


def _floor(error: float, variance: float, fresh: bool) -> float:
    """Of a compressed step, given the bytes that an element of the worker error and of a variance takes."""
    worker = 4 + 2 * error + 0.5 + 4 + error  # gradient, error read and written, bits; both again: scales come late
    server = 8 + 0.25  # one worker: the whole buffer
    measured = 3 * variance + 4 if fresh else 0  # fresh read and written, frozen, and parameter for the weight decay
    return worker + server + measured + 8 + variance  # parameter read and written, frozen


FLOORS = {
    "copy": 4.0 + 4,
    COMPRESSED: _floor(4, 4, fresh=True),
    COMPACT: _floor(1 + 4 / 128, 2, fresh=True),
    ADAM: _floor(4, 4, fresh=False),
    ADAM_COMPACT: _floor(1 + 4 / 128, 2, fresh=False),
    # measured: gradient, momentum, variance, parameter; applied: gradient 4, momentum, variance and parameter 8 each
    "LAMB, warm-up stage": 16 + 4 + 3 * 8.0,
}
"""Bytes per element, one worker."""


def bert_large_shapes(elements: int) -> list[tuple[int, ...]]:
    """Layers of BERT-Large, embedding rows first, whole Transformer blocks until there are `elements`."""
    shapes: list[tuple[int, ...]] = [(4096, 1024), (512, 1024), (2, 1024), (1024,), (1024,)]
    block: list[tuple[int, ...]] = [(1024, 1024), (1024,)] * 4 + [(1024,)] * 2
    block += [(4096, 1024), (4096,), (1024, 4096), (1024,), (1024,), (1024,)]
    while sum(torch.Size(shape).numel() for shape in shapes) < elements:
        shapes += block
    return shapes


def measure(elements: int, threads: Sequence[int], rounds: int) -> dict[str, Any]:
    """Time everything that can be timed here.

    Args:
        elements: parameters at least, >= 1.
        threads: of torch, each >= 1; every round times all steps with each of them.
        rounds: >= 1, after one that is not counted.

    Returns:
        elements; rounds; peer, why there are no rows of the peer or "" if there are; and runs, one per number of
        threads: {threads, kernels, rows, and where both are timed peer_ratio}. rows is {name: {ns_per_element, where a
        floor is known gb_per_s and floor_ratio, and after the first run scaling}}; scaling is the first run's time over
        this one's, peer_ratio the peer's compressed LAMB step over ours.

    Raises:
        ConfigError: a value below 1, or no or the same number of threads twice.
        OnebitError: the peer is installed but does not work.
    """
    for name, value in (("elements", elements), ("threads", min(threads, default=0)), ("rounds", rounds)):
        if value < 1:
            raise ConfigError(f"bench {name} is {value}; it must be at least 1")
    if len(set(threads)) < len(threads):
        raise ConfigError(f"bench threads are {list(threads)}; each number may be given once")
    shapes = bert_large_shapes(elements)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    before = torch.get_num_threads()
    try:
        steps = _steps(shapes)
        source, target = torch.rand(count), torch.zeros(count)
        times = _interleaved({"copy": lambda: target.copy_(source), **steps}, threads, rounds)
        runs = [_run(t, times[t], times[threads[0]], count) for t in threads]
    finally:
        torch.set_num_threads(before)
    return {"elements": count, "rounds": rounds, "peer": peer.obstacle(), "runs": runs}


def _run(threads: int, times: dict[str, float], first: dict[str, float], count: int) -> dict[str, Any]:
    """The figures with one number of threads; `first`, the times with the first one."""
    torch.set_num_threads(threads)
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in times.items():
        rows[name] = {"ns_per_element": seconds / count * 1e9}
        if name in FLOORS:
            rows[name]["gb_per_s"] = FLOORS[name] * count / seconds / 1e9
            rows[name]["floor_ratio"] = (seconds / FLOORS[name]) / (times["copy"] / FLOORS["copy"])
        if times is not first:
            rows[name]["scaling"] = first[name] / seconds
    kernels = "{} ({})".format(*onebit.kernels.choose(torch.device("cpu"), torch.float32))
    run: dict[str, Any] = {"threads": threads, "kernels": kernels, "rows": rows}
    if peer.LAMB in times:
        run["peer_ratio"] = times[peer.LAMB] / times[COMPRESSED]
    return run


def _parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
        p.grad[p.grad == 0] = 1e-3  # among millions some are: they would count as elements without a gradient
    return params


def _steps(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """Each optimizer's step, ready to be timed."""
    common: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
    steps: dict[str, Callable[[], object]] = {
        "LAMB, warm-up stage": onebit.Lamb(_parameters(shapes), comm=onebit.comm.Solo(), **common).step,
        **_compressed_steps(shapes, common),
        "torch AdamW, fused": torch.optim.AdamW(_parameters(shapes), fused=True, **common).step,
    }
    if importlib.util.find_spec("pytorch_optimizer") is not None:
        import pytorch_optimizer

        steps["pytorch_optimizer Lamb, foreach"] = pytorch_optimizer.Lamb(
            _parameters(shapes), foreach=True, weight_decouple=False, **common
        ).step
    if not peer.obstacle():
        steps |= peer.steps(lambda: _parameters(shapes), **common)
    return steps


def _compressed_steps(shapes: list[tuple[int, ...]], common: dict[str, Any]) -> dict[str, Callable[[], object]]:
    steps: dict[str, Callable[[], object]] = {}
    makers = ((onebit.OneBitLamb, COMPRESSED, COMPACT), (onebit.OneBitAdam, ADAM, ADAM_COMPACT))
    for make, full, compact in makers:
        settings: list[tuple[str, dict[str, Any]]] = [(full, {"state": "full"}), (compact, {"state": "compact"})]
        for name, state in settings:
            optimizer = make(_parameters(shapes), freeze_step=1, comm=onebit.comm.Solo(), **state, **common)
            for _ in range(2):  # the warm-up, and the last step that holds the momentum as numbers
                optimizer.step()
            steps[name] = optimizer.step
    return steps


def _interleaved(
    steps: dict[str, Callable[[], object]], threads: Sequence[int], rounds: int
) -> dict[int, dict[str, float]]:
    """The median time of each step with each number of threads, in seconds."""
    times: dict[int, dict[str, list[float]]] = {t: {name: [] for name in steps} for t in threads}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            for t in threads:
                torch.set_num_threads(t)
                begin = time.perf_counter()
                step()
                if turn:  # the first round touches the pages
                    times[t][name].append(time.perf_counter() - begin)
    return {t: {name: statistics.median(values) for name, values in of_t.items()} for t, of_t in times.items()}
