"""A look before the leap: what compression would do to each layer at the switch, and when to hold back or return."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebit.checks import check_whole
from onebit.errors import ConfigError

NormsOf = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerPreview:
    """What the first compressed step would do to one layer, on this worker, its error still being zero.

    Attributes:
        error: ||C(x) - x|| / ||x||, x being this worker's momentum; 0 where it is zero.
        stretch: ||C(x) / (sqrt(v) + eps)|| / ||x / (sqrt(v) + eps)||, v being what would be frozen: how many times too
            long the update would be. Large where elements of tiny variance get their block's scale.
    """

    error: float
    stretch: float


def preview(x: Tensor, decoded: Tensor, below: Tensor, norms: NormsOf) -> list[LayerPreview]:
    """From the input, what is decoded of it, and sqrt(v) + eps: flat, and `norms` gives each layer's 2-norm."""
    size, lost = norms(x), norms(decoded - x)
    exact, taken = norms(x / below), norms(decoded / below)
    columns = (torch.where(whole > 0, part / whole, 0.0).tolist() for part, whole in ((lost, size), (taken, exact)))
    return [LayerPreview(error, stretch) for error, stretch in zip(*columns, strict=True)]


def sentence(layers: dict[str, LayerPreview]) -> str:
    """The previews of all layers for the log."""
    live = {name: layer for name, layer in layers.items() if layer.stretch > 0}
    if not live:
        return "no layer has a momentum"
    worst = max(live, key=lambda name: live[name].stretch)
    error = statistics.median(layer.error for layer in live.values())
    stretch = statistics.median(layer.stretch for layer in live.values())
    return (
        f"relative compression error {error:.2f} in the median layer; updates would be {stretch:.1f} times too long in "
        f"the median layer and {live[worst].stretch:.1f} times in {worst}"
    )


@dataclass(frozen=True)
class SwitchGuard:
    """Postpones a switch that looks bad, and returns to the warm-up stage when one turns out bad. Always says so.

    Args:
        max_stretch: postpone while on any worker the median layer's update would be more than this many times too long.
        postpone_steps: updates until the next look, >= 1.
        max_postponements: after these the switch comes whatever it looks like, >= 0.
        max_growth: return when the norm of the averaged momentum is this many times its largest in the first `settle`
            compressed updates, or when the loss given to `observe` is this many times its mean before the switch; > 1.
        settle: compressed updates that set the measure, >= 1.
        rewarm_steps: updates of the warm-up stage after a return, >= 1.
        max_returns: >= 0.

    Raises:
        ConfigError: a value outside what is listed above.
    """

    max_stretch: float = 20.0
    postpone_steps: int = 50
    max_postponements: int = 3
    max_growth: float = 3.0
    settle: int = 20
    rewarm_steps: int = 100
    max_returns: int = 1

    def __post_init__(self) -> None:
        for name in ("postpone_steps", "settle", "rewarm_steps"):
            check_whole(f"SwitchGuard {name}", getattr(self, name), 1)
        for name in ("max_postponements", "max_returns"):
            check_whole(f"SwitchGuard {name}", getattr(self, name), 0)
        for name in ("max_stretch", "max_growth"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 1:
                raise ConfigError(f"SwitchGuard {name} is {value!r}; it must be a number above 1")


class Watch:
    """What a `SwitchGuard` remembers during a run. All that it is told is equal on all workers."""

    def __init__(self, guard: SwitchGuard) -> None:
        self.guard = guard
        self.postponements = self.returns = 0
        self._losses: deque[float] = deque(maxlen=guard.settle)
        self.switched()

    def switched(self) -> None:
        """A compressed stage begins."""
        self._loss_before = statistics.mean(self._losses) if self._losses else math.inf
        self._losses.clear()
        self._largest, self._seen = 0.0, 0

    def postpones(self, stretch: float) -> bool:
        """Whether to wait with the switch, given the largest median stretch of any worker."""
        if stretch <= self.guard.max_stretch or self.postponements >= self.guard.max_postponements:
            return False
        self.postponements += 1
        return True

    def _rise(self) -> float:
        return statistics.mean(self._losses) - self._loss_before

    def state(self) -> dict[str, Any]:
        kept = ("postponements", "returns", "_loss_before", "_largest", "_seen")
        return {"losses": list(self._losses), **{name: getattr(self, name) for name in kept}}

    def load(self, state: dict[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(state["losses"])
        for name, value in state.items():
            if name != "losses":
                setattr(self, name, value)

    def observe(self, loss: float) -> None:
        """The mean loss over the workers. One that is not finite is that of a skipped step, and says nothing."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def alarm(self, momentum_norm: float) -> str:
        """Why to return to the warm-up stage, after a compressed update; empty: no need."""
        self._seen += 1
        if self._seen <= self.guard.settle:
            self._largest = max(self._largest, momentum_norm)
            return ""
        if self.returns >= self.guard.max_returns:
            return ""
        limit = self.guard.max_growth
        if momentum_norm > limit * self._largest > 0:
            why = f"the norm of the momentum is {momentum_norm:.3g}, after at most {self._largest:.3g} before"
        elif len(self._losses) == self.guard.settle and self._rise() > (limit - 1) * abs(self._loss_before) > 0:
            why = f"the loss is {statistics.mean(self._losses):.3g}, after {self._loss_before:.3g} before the switch"
        else:
            return ""
        self.returns += 1
        return why
