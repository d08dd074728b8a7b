"""Do the worker and server errors stay within a multiple of the largest gradient, and up to which multiplier?

The analysis assumes that the errors are bounded by an eps; nothing in the algorithm enforces it. A block x with
rho = ||x||_1 / (sqrt(d) ||x||_2) is sent with squared error ||x||^2 (1 - 2 a rho + a^2) at multiplier a, so one
compression shrinks x only if a < 2 rho; for normal elements rho = sqrt(2 / pi), and a < 1.596. Whether the errors stay
bounded over many steps is measured here, on gradients that do not depend on the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from benchmarks.theory.lockstep import Lockstep
from onebit import codec as codec_module
from onebit.codec import OneBit

SHAPES = ((64,), (512,), (56,), (8,))
WORKERS = 4
BETA = 0.9


def _student(random: torch.Generator, shape: Sequence[int], freedom: int) -> Tensor:
    """Student's t: a normal over the root of a mean of `freedom` squared normals."""
    draws = torch.randn(*shape, freedom + 1, generator=random, dtype=torch.float64)
    return draws[..., 0] / draws[..., 1:].square().mean(-1).sqrt()


def _spikes(random: torch.Generator, shape: Sequence[int]) -> Tensor:
    """Normal, one element in a thousand a thousand times larger: mostly not a contraction (docs/theory.md)."""
    rare = torch.rand(*shape, generator=random, dtype=torch.float64) < 1e-3
    return torch.randn(*shape, generator=random, dtype=torch.float64) * torch.where(rare, 1000.0, 1.0)


GRADIENTS: dict[str, Callable[[torch.Generator, Sequence[int]], Tensor]] = {
    "normal": lambda random, shape: torch.randn(*shape, generator=random, dtype=torch.float64),
    "Student t, 3 degrees": lambda random, shape: _student(random, shape, 3),
    "Student t, 2 degrees": lambda random, shape: _student(random, shape, 2),
    "spikes": _spikes,
}


@dataclass(frozen=True)
class Errors:
    """Norms over a run. `worker`, `server`: the largest error over the largest gradient of any worker and step.

    `growth` is the median of the worker errors' norm in the last quarter over that in the second quarter; 1: steady.
    """

    worker: float
    server: float
    growth: float


def unguarded(multiplier: float) -> OneBit:
    """The codec with a multiplier that it refuses, by moving its limit away while it is made."""
    with mock.patch.object(codec_module, "MAX_MULTIPLIER", float("inf")):
        return OneBit(multiplier=multiplier)


def measure(codec: OneBit, steps: int, seed: int = 0) -> dict[str, Errors]:
    """Momentum of gradients that come from nowhere, exchanged `steps` times; a run for each kind of gradient."""
    random = torch.Generator().manual_seed(seed)
    lock = Lockstep(SHAPES, WORKERS, codec, runs=len(GRADIENTS))
    m = torch.zeros(len(GRADIENTS), 1, lock.layout.numel, dtype=torch.float64)
    largest, worker, server = torch.zeros(3, steps, len(GRADIENTS), dtype=torch.float64)
    for t in range(steps):
        g = torch.stack([draw(random, (WORKERS, lock.layout.numel)) for draw in GRADIENTS.values()])
        m = lock.mean(BETA * m + (1 - BETA) * g).unsqueeze(1)
        largest[t] = g.norm(dim=2).amax(1)
        worker[t] = lock.worker_error.norm(dim=2).amax(1)
        server[t] = lock.server_error.norm(dim=1)
    quarter = steps // 4
    growth = worker[-quarter:].median(0).values / worker[quarter : 2 * quarter].median(0).values
    rows = torch.stack([worker.amax(0) / largest.amax(0), server.amax(0) / largest.amax(0), growth], 1)
    return {kind: Errors(*row) for kind, row in zip(GRADIENTS, rows.tolist(), strict=True)}
