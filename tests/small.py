"""A small network, and the optimizers that tests of loops, precision and clipping train it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import onebit
from onebit.comm import Comm

with torch.random.fork_rng():
    torch.manual_seed(0)
    MODEL = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
"""To be copied; drawn once, since threads share torch's generator."""


def kinds_of(warmup: int, **zero_one: Any) -> dict[str, dict[str, Any]]:
    """By name, the settings with which the warm-up has this many steps. `zero_one`: further ones of 0/1 Adam."""
    return {
        "Lamb": {},
        "OneBitLamb": {"freeze_step": warmup},
        "OneBitAdam": {"freeze_step": warmup},
        "LocalVarianceLamb": {"warmup_steps": warmup},
        "LocalVarianceAdam": {"warmup_steps": warmup},
        "ZeroOneAdam": {"var_freeze_step": warmup, "local_step_clipper": 1, **zero_one},
    }


def make(kinds: dict[str, dict[str, Any]], name: str, params: Any, comm: Comm, **more: Any) -> Any:
    return getattr(onebit, name)(params, **{"lr": 0.02, "betas": (0.9, 0.95), "comm": comm} | kinds[name] | more)


def flat(params: Any) -> Tensor:
    """Their values in one new tensor."""
    return torch.cat([p.detach().flatten().clone() for p in params])
