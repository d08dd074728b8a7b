"""Clipping by the norm of the mean gradient, also where no worker knows that mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onebit.sharding import local

DECAY = 0.9  # of the averages over steps


class NormEstimate:
    """||mean of g_i||^2 from the mean of ||g_i||^2: what averaging kept of it, while both were known.

    Workers' gradients agree in part only, so their mean is shorter than they are. How much shorter changes slowly;
    it is averaged over the steps in which the mean is there (docs/clipping.md has the measured error).
    """

    def __init__(self) -> None:
        self._of_mean = self._own = 0.0  # moving averages

    @property
    def known(self) -> bool:
        return self._own > 0

    @property
    def kept(self) -> float:
        """The share of the squared norm that averaging keeps, in (0, 1]; 1, which clips most, while unknown."""
        return min(1.0, self._of_mean / self._own) if self.known else 1.0

    def note(self, of_mean: float, own: float) -> None:
        """Both squares at a step where the mean is known; not finite ones and zeros are left out."""
        if 0 < of_mean < float("inf") and 0 < own < float("inf"):
            self._of_mean = DECAY * self._of_mean + (1 - DECAY) * of_mean / own
            self._own = DECAY * self._own + (1 - DECAY)

    def state(self) -> tuple[float, float]:
        return self._of_mean, self._own

    def load(self, state: Sequence[float]) -> None:
        self._of_mean, self._own = state


def sum_of_squares(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The squared 2-norm of all of them together: float64 []."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors if t is not None and t.numel()]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def scale_gradients(params: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a factor, [], in place. It is rounded to the gradients' dtype."""
    for p in params:
        if p.grad is not None:
            local(p.grad).mul_(factor.to(p.grad.device, p.grad.dtype))
