"""A whole training step whose exchange begins during backward: what it costs depends on cores that are free for it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import onebit
from onebit.clock import synchronized
from onebit.comm import Comm, agreed, all_or_none
from onebit.probe_kernels import DECAY, around_the_mean, unheard

log = logging.getLogger("onebit")

FIRST_STEPS = 5  # the warm-up, the switch, the last with its momentum as numbers; overlap begins at the third
LEAST, MOST = 3, 30
LR = 1e-7  # above 0, so that a step does all that it has to; so small that weights stay what they are


def time_overlapped(
    params: Iterable[nn.Parameter],
    gradients: Callable[[], object],
    comm: Comm,
    device: torch.device,
    budget_s: float,
) -> dict[str, Any]:
    """Time steps of 1-bit LAMB with overlap=True after its switch, on all workers at once. A collective.

    Args:
        params: of the model, those that are trained.
        gradients: runs forward and backward of a micro-batch.
        comm: the workers, of two levels where the exchange is to have them.
        budget_s: seconds; three steps are timed at least.

    Returns:
        step_s, a `Range`: the mean step, and quartiles of the means over workers around it; repetitions; overlapped,
        whether each of them began an exchange during backward, on all workers.
    """
    settings: dict[str, Any] = {"lr": LR, "freeze_step": 1, "weight_decay": DECAY, "comm": comm, "overlap": True}
    optimizer = all_or_none(comm, lambda: onebit.OneBitLamb(params, **settings))

    def step() -> float:
        began = synchronized(device)
        gradients()
        optimizer.step()
        return synchronized(device) - began

    with unheard():
        for _ in range(FIRST_STEPS):
            step()
    until = time.perf_counter() + budget_s
    times: list[float] = []
    early: list[int] = [optimizer.stats()["overlapped"]]
    while agreed(comm, len(times) < LEAST or (time.perf_counter() < until and len(times) < MOST)):
        times.append(step())  # all begin at once, since `stats` takes its time before they agree
        early.append(optimizer.stats()["overlapped"])
    mine = [times, all(before < after for before, after in pairwise(early))]
    everyone = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(mine).encode())]
    overlapped = all(always for _, always in everyone)
    if not overlapped and comm.rank == 0:
        log.warning(
            "overlap was timed, but in some steps no exchange began during backward, so a plan does not use it: does "
            "the function that gives gradients change them after backward, or call backward a varying number of times?"
        )
    return {
        "step_s": around_the_mean([sum(at) / len(at) for at in zip(*(row for row, _ in everyone), strict=True)]),
        "repetitions": len(times),
        "overlapped": overlapped,
    }
