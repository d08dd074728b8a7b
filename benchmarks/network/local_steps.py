"""DiLoCo (arXiv 2311.08105): workers train alone, and every so many steps agree by a step of an outer optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from onebit.averaging import mean_over_workers
from onebit.comm import Comm
from onebit.errors import ConfigError


class DiLoCo:
    """The outer optimizer: Nesterov SGD on what the workers' weights have moved since it was last here, on average.

    With x the weights all workers had after the last outer step, and x_i those of worker i now:

        d = mean over i of (x - x_i);   b <- momentum * b + d;   x <- x - lr * (d + momentum * b);   x_i <- x

    Args:
        parameters: of the model that the local optimizer changes; fp32, equal on all workers when this is made.
        comm: sends d, one all-reduce in fp32.
        period: local steps between outer ones, >= 1.
        lr, momentum: of the outer step; the defaults are the paper's. > 0; in [0, 1).

    Attributes:
        steps: local steps so far.

    Raises:
        ConfigError: a value outside what is listed.
    """

    def __init__(
        self, parameters: Iterable[Tensor], comm: Comm, period: int, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        if period < 1:
            raise ConfigError(f"period is {period}; it must be at least 1")
        if not lr > 0:
            raise ConfigError(f"lr is {lr}; it must be above 0")
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum is {momentum}; it must be in [0, 1)")
        self._parameters, self._comm, self._period = list(parameters), comm, period
        self._agreed = torch.nn.Parameter(self._flat(), requires_grad=False)
        self._outer = torch.optim.SGD([self._agreed], lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.steps = 0

    def step(self) -> None:
        """To be called after each step of the local optimizer; every `period` calls it is an outer step."""
        self.steps += 1
        if self.steps % self._period:
            return
        moved = self._agreed - self._flat()
        mean_over_workers(moved, self._comm, "fp32")
        self._agreed.grad = moved
        self._outer.step()
        self._agreed.grad = None
        with torch.no_grad():
            parts = torch.split(self._agreed, [p.numel() for p in self._parameters])
            for p, part in zip(self._parameters, parts, strict=True):
                p.copy_(part.view_as(p))

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._parameters])
