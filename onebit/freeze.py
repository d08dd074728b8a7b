"""When the warm-up stage ends: after a number of updates, a share of the run, or when the variance has settled.

All that is looked at here is equal on all workers, so they decide alike without a word.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onebit.checks import as_updates, check_whole
from onebit.errors import ConfigError

CHECKS_PER_LOOK_BACK = 10
LEAST_SHARE, MOST_SHARE = 0.15, 0.25  # of the run, where its length is known


@dataclass(frozen=True)
class AutoFreeze:
    """Freeze once the variance has settled: the rule of 1-bit Adam (arXiv 2102.02888), with its threshold.

    Settled means that the L1 norm of the variance, each norm divided by 1 - beta2^t, is within a factor of what it was
    `look_back` updates before, threshold <= now / then <= 1 / threshold, and the learning rate rises no more (DEV-17).

    Args:
        threshold: in (0, 1). For a shorter look-back than 1 / (1 - beta2) it is drawn towards 1 as a steady drift
            would be: threshold ** (look_back * (1 - beta2)).
        look_back: updates, >= 1; None: 1 / (1 - beta2), but at most a tenth of the run where its length is known.
        min_steps, max_steps: updates before which, and with which at the latest, the stage ends: >= 1. None: 0.15 and
            0.25 of the run where its length is known (`total_steps`); else two look-backs, and no limit.

    Raises:
        ConfigError: a value outside what is listed above.
    """

    threshold: float = 0.96
    look_back: int | None = None
    min_steps: int | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, int | float) or not 0 < self.threshold < 1:
            raise ConfigError(f"AutoFreeze threshold is {self.threshold!r}; it must be a number in (0, 1)")
        for name in ("look_back", "min_steps", "max_steps"):
            if getattr(self, name) is not None:
                check_whole(f"AutoFreeze {name}", getattr(self, name), 1)
        if self.min_steps is not None and self.max_steps is not None and self.min_steps > self.max_steps:
            raise ConfigError(
                f"AutoFreeze min_steps is {self.min_steps}, max_steps {self.max_steps}; the first must not be larger"
            )


FreezeStep = int | float | AutoFreeze


def check_freeze_step(freeze_step: FreezeStep, total_steps: int | None) -> int | AutoFreeze:
    """The switch as a number of updates, or as a rule.

    Args:
        freeze_step: updates, >= 1; or a share of `total_steps`, in (0, 1); or a rule.
        total_steps: updates of the whole run; needed for a share.

    Raises:
        ConfigError: it is none of these.
    """
    if not isinstance(freeze_step, AutoFreeze):
        return as_updates("freeze_step", freeze_step, total_steps, ", or AutoFreeze(...)")
    if total_steps is not None:
        check_whole("total_steps", total_steps, 1)
    return freeze_step


class Settling:
    """Watches the variance for an `AutoFreeze`.

    Attributes:
        reason: why the stage ends, once it does.
    """

    def __init__(self, rule: AutoFreeze, beta2: float, total_steps: int | None) -> None:
        full = max(1, round(1 / (1 - beta2)))
        limit = full if total_steps is None else max(1, total_steps // 10)
        look_back = rule.look_back or min(full, limit)
        self._every = max(1, look_back // CHECKS_PER_LOOK_BACK)
        self.look_back = look_back // self._every * self._every
        self.threshold = rule.threshold ** min(1.0, self.look_back * (1 - beta2))
        share = (None, None) if total_steps is None else (LEAST_SHARE * total_steps, MOST_SHARE * total_steps)
        least = 2 * self.look_back if share[0] is None else max(1, round(share[0]))
        self.least = rule.min_steps or least
        self.most = rule.max_steps or (None if share[1] is None else max(self.least, round(share[1])))
        if rule.min_steps is None:
            self.least = min(self.least, self.most or self.least)
        self._beta2 = beta2
        self._norms: deque[tuple[int, list[float]]] = deque(maxlen=self.look_back // self._every + 1)
        self._last_lr = -math.inf
        self.reason = ""

    def wants_norms(self, step: int) -> bool:
        """Whether `settled` must be asked after this update; every tenth of the look-back."""
        return step % self._every == 0 or (self.most is not None and step >= self.most)

    def settled(self, step: int, lr: float, norms: Tensor) -> bool:
        """Whether the stage ends with update `step`.

        Args:
            lr: of this update.
            norms: float64 [layers], the L1 norm of each layer's variance.
        """
        rising, self._last_lr = lr > self._last_lr, lr
        corrected = (norms / (1 - self._beta2**step)).tolist()
        self._norms.append((step, corrected))
        if self.most is not None and step >= self.most:
            self.reason = f"{step} updates, the most that was allowed; {self._view()}"
            return True
        then = self._norms[0]
        if rising or step < self.least or step - then[0] < self.look_back:
            return False
        total = [sum(values) for _, values in (then, self._norms[-1])]
        quotient = total[1] / total[0] if total[0] > 0 else math.nan
        if not self.threshold <= quotient <= 1 / self.threshold:
            return False
        self.reason = (
            f"the variance is {quotient:.3f} of what it was {step - then[0]} updates before, within "
            f"{self.threshold:.3f}; {self._view()}"
        )
        return True

    def _view(self) -> str:
        """What the sum over all layers hides: how their own norms moved."""
        (first, before), (last, now) = self._norms[0], self._norms[-1]
        moved = sorted(b / a for a, b in zip(before, now, strict=True) if a > 0)
        if not moved or first == last:
            return "there is no earlier variance to compare layers with"
        tenth = moved[len(moved) // 10]
        restless = sum(not self.threshold <= q <= 1 / self.threshold for q in moved)
        return (
            f"of {len(moved)} layers {restless} still move by more than that, a tenth of them to {tenth:.2f} or less, "
            f"the largest to {moved[-1]:.2f}"
        )

    def state(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "last_lr": self._last_lr}

    def load(self, state: dict[str, Any]) -> None:
        self._norms.clear()
        self._norms.extend((step, list(norms)) for step, norms in state["norms"])
        self._last_lr = state["last_lr"]
