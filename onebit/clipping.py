"""Clipping by the norm of the mean gradient, also where no worker knows that mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onebit.sharding import local

DECAY = 0.9  # of the averages over steps


class NormEstimate:
    """||mean of g_i||^2 from the mean of ||g_i||^2: what averaging kept of it, while both were known.

    Workers' gradients agree in part only, so their mean is shorter than they are. How much shorter changes slowly;
    it is averaged over the steps in which the mean is there (docs/clipping.md has the measured error).

    Attributes:
        wanted: whether anybody clips, so that squares are worth noting.
    """

    def __init__(self) -> None:
        self._share = self._weight = 0.0  # moving average, and what that of a constant 1 would be
        self.wanted = False
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of this step: own and of the mean
        self._clipped: tuple[Tensor, Tensor] | None = None  # of this step: own before clipping, and the factor

    @property
    def known(self) -> bool:
        return self._weight > 0

    @property
    def kept(self) -> float:
        """The share of the squared norm that averaging keeps, in (0, 1]; 1, which clips most, while unknown."""
        return min(1.0, self._share / self._weight) if self.known else 1.0

    def note(self, of_mean: float, own: float) -> None:
        """Both squares at a step where the mean is known; not finite ones and zeros are left out."""
        if 0 < of_mean < float("inf") and 0 < own < float("inf"):
            self._share = DECAY * self._share + (1 - DECAY) * of_mean / own
            self._weight = DECAY * self._weight + (1 - DECAY)

    def add_part(self, number: tuple[int, int], own: Tensor, of_mean: Tensor) -> None:
        """What a part of this step's gradients had as squared norm before and after averaging, in whatever unit.

        Parts may come in any order and from any thread.
        """
        self._parts[number] = (own, of_mean)

    def take_parts(self) -> tuple[Tensor, Tensor] | None:
        """The sums of the parts so far, which are forgotten; None: there were none. In the order of their numbers."""
        parts, self._parts = self._parts, {}
        if not parts:
            return None
        own, of_mean = zip(*(parts[number] for number in sorted(parts)), strict=True)
        return torch.stack(own).sum(), torch.stack(of_mean).sum()

    def forget(self) -> None:
        """Everything of this step."""
        self._parts, self._clipped = {}, None

    def clipped(self, own: Tensor, factor: Tensor) -> None:
        """Own gradients, whose mean will be known in this step, were clipped by a factor."""
        self._clipped = (own, factor)

    def note_mean(self, square: Callable[[], Tensor]) -> None:
        """Where own gradients were clipped: note what their mean kept. `square` gives the mean's squared norm."""
        if self._clipped is not None:
            own, factor = self._clipped
            self.note(float(square() / factor.square()), float(own))
        self._clipped = None

    def state(self) -> tuple[float, float]:
        return self._share, self._weight

    def load(self, state: Sequence[float]) -> None:
        self._share, self._weight = state


def sum_of_squares(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The squared 2-norm of all of them together: float64 []."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors if t is not None and t.numel()]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def scale_gradients(params: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a factor, [], in place. It is rounded to the gradients' dtype."""
    for p in params:
        if p.grad is not None:
            local(p.grad).mul_(factor.to(p.grad.device, p.grad.dtype))
