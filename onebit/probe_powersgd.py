"""What torch's PowerSGD hook takes of a worker's own time, for a plan that compares with it: the hook itself, alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.clock import synchronized
from onebit.planner_inputs import Shapes
from onebit.planner_methods import RANK

_KEPT: list[Any] = []
"""Groups, to the end of the process: callbacks of the hook hold a group and run in its own thread, which must not be
the last to let go of it, or it would wait for its own end."""
FIRST_STEPS = 4  # two with whole gradients, the least that torch allows; two in which buffers are made


class _Bucket:
    """What the hook reads of a bucket of DDP: gradients in one buffer, and views of it by layer."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        draws = torch.Generator().manual_seed(0)
        self.given = (torch.randn(sum(sizes), generator=draws) * 1e-3).to(device)
        self._buffer = self.given.clone()
        self._views = [part.view(shape) for part, shape in zip(torch.split(self._buffer, sizes), shapes, strict=True)]

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._views

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def low_rank_step(shapes: Shapes, device: torch.device) -> Callable[[], float] | None:
    """A step of PowerSGD of rank 4 (`planner_methods.RANK`) in a group of one worker.

    Args:
        shapes: of the layers, float32, in one bucket; numbers count as vectors of one, empty layers not at all.
        device: where they lie.

    Returns:
        A function that runs the hook once and returns its seconds; None where there is nothing to run, where torch was
        built without what it needs, and for a CPU beside a GPU, whose device the hook would wait for.
    """
    shapes = tuple(shape or (1,) for shape in shapes if math.prod(shape))
    if not shapes or (device.type == "cpu" and torch.cuda.is_available()):
        return None
    group = _group_of_one(device)
    if group is None:
        return None
    _KEPT.append(group)
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks  # not in every build

    state = hooks.PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    bucket: Any = _Bucket(shapes, device)

    def step() -> float:
        bucket.buffer().copy_(bucket.given)
        began = synchronized(device)
        hooks.powerSGD_hook(state, bucket).wait()
        return synchronized(device) - began

    for _ in range(FIRST_STEPS):
        step()
    return step


def _group_of_one(device: torch.device) -> Any:
    """A process group of this worker alone, which no other knows of; None where there is none for the device."""
    if not dist.is_available():
        return None
    store, patience = dist.HashStore(), timedelta(seconds=60)
    if device.type == "cpu" and dist.is_gloo_available():
        return dist.ProcessGroupGloo(store, 0, 1, patience)
    if device.type == "cuda" and dist.is_nccl_available():
        return dist.ProcessGroupNCCL(store, 0, 1, dist.ProcessGroupNCCL.Options())
    return None
