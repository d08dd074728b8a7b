"""The same run twice: the verdict on each step read at once, and one step later, as on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import onebit
from onebit.comm import Comm
from onebit.optim import FlatOptimizer


def plain(value: Any) -> Any:
    """A state dict without tensors, so that == compares every byte."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def trained(comm: Comm, make: Callable[..., FlatOptimizer], sizes: Sequence[int], steps: int, bad: Sequence[int]):
    """All that there is after training, and in which steps the host did not learn the verdict.

    In the steps `bad` the last worker has a nan. An element is dead until step 11.
    """
    random = torch.Generator().manual_seed(comm.rank)
    params = [nn.Parameter(torch.linspace(-1, 1, size)) for size in sizes]
    opt = make(params, comm=comm)
    unseen = []
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=random)
            p.grad[0] *= step >= 11
        if step in bad and comm.rank == comm.size - 1:
            params[-1].grad[1] = float("nan")
        opt.step()
        if opt._pending is not None:
            unseen.append(step)
    state = {"parameters": params, "stats": timeless(opt), "state": opt.state_dict()}
    return plain(state), opt.stats()["skipped_steps"], unseen


def run_deferred(monkeypatch, make, workers=2, sizes=(35, 3, 20), steps=15, bad=(1, 9)):
    """All workers' states of the two runs, and the steps whose verdict came late."""
    found = []
    for defer in (False, True):
        monkeypatch.setattr(FlatOptimizer, "_may_defer", lambda self, defer=defer: defer)
        found.append(onebit.run_workers(workers, lambda comm: trained(comm, make, sizes, steps, bad)))
    at_once, later = found
    assert all(skipped == len(bad) for _, skipped, _ in at_once + later)
    assert not any(unseen for _, _, unseen in at_once)
    return [state for state, _, _ in at_once], [state for state, _, _ in later], later[0][2]


def timeless(opt: Any) -> dict[str, Any]:
    """Its `stats()` but for what the clock has measured."""
    return {key: value for key, value in opt.stats().items() if key != "seconds"}
