"""`FrozenLamb`: LAMB with the frozen variance of 1-bit LAMB and without its compression, for comparisons only.

It tells the two apart: what it loses to LAMB the frozen variance costs, and what 1-bit LAMB loses to it the one bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import Transport
from onebit.checks import check_floor, check_in
from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.flat import DEFAULT_BUCKET_ELEMENTS
from onebit.freeze import AutoFreeze, check_freeze_step
from onebit.layerwise_rate import LayerwiseRate, coefficient_rule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


NEVER = 1e30
"""The variance of a layer that had no gradient when it froze: it stays where it is."""


class FrozenLamb(LayerwiseRate):
    """LAMB whose variance stops moving after `freeze_step` updates; the averages stay in full precision.

    Args:
        params, lr, betas, eps, weight_decay, min_coeff, max_coeff, transport, process_group, comm, bucket_elements: as
            in `onebit.Lamb`.
        freeze_step, total_steps, variance_floor: as in `onebit.OneBitLamb`, but no rule.
        coefficient: "fresh", LAMB's at each step, or "average", that of the warm-up, as basic 1-bit LAMB has it.

    Raises:
        ConfigError: a value outside what is listed there.
        MismatchError: as in `onebit.Lamb`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int | float = 1000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coefficient: Literal["fresh", "average"] = "average",
        variance_floor: float = 0.01,
        transport: Transport = "fp32",
        process_group: ProcessGroup | None = None,
        comm: Comm | None = None,
        bucket_elements: int | None = DEFAULT_BUCKET_ELEMENTS,
        total_steps: int | None = None,
    ) -> None:
        found = check_freeze_step(freeze_step, total_steps)
        if isinstance(found, AutoFreeze):
            raise ConfigError(f"freeze_step is {freeze_step!r}; here it must be a number of updates or a share")
        self._freeze_at = found
        self._floor = check_floor(variance_floor)
        self._averages = check_in("coefficient", coefficient, ("fresh", "average")) == "average"
        self._frozen = False
        self._coeff_rule = coefficient_rule(min_coeff, max_coeff, coeff_beta=0.9)
        super().__init__(params, lr, betas, eps, weight_decay, transport, process_group, comm, bucket_elements)

    def _step(self) -> None:
        super()._step()
        if not self._frozen and self._steps >= self._freeze_at:
            self._settle()
            if self._steps >= self._freeze_at:
                self._freeze()

    def _freeze(self) -> None:
        assert self._layout is not None
        v = self._flat["variance"]
        dead = (v == 0) & (self._flat["momentum"] == 0)
        for run in self._layout.runs:
            here = v[run.slice]
            lamb.freeze_variance(here, dead[run.slice], run, self._floor)
            here[run.spread(run.means(here)) == 0] = NEVER
        self._frozen = True

    def _hyper(self, group: dict[str, Any]) -> lamb.Hyper:
        hyper = super()._hyper(group)
        return replace(hyper, beta2=1.0) if self._frozen else hyper  # v + 0 g g

    def _step_sizes(self, layers: slice, norms: lamb.Norms, rates: Tensor, keep: Tensor | None) -> Tensor:
        if not (self._frozen and self._averages):
            return super()._step_sizes(layers, norms, rates, keep)
        average, weight = (self._layerwise[name][layers] for name in ("coeff_avg", "coeff_weight"))
        return torch.where(weight > 0, average / torch.where(weight > 0, weight, 1.0), 1.0) * rates

    def _settings(self) -> list[tuple[str, str]]:
        named = [("freeze_step", str(self._freeze_at)), ("variance_floor", str(self._floor))]
        return [*super()._settings(), *named, ("coefficient averaged", str(self._averages))]

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "frozen": self._frozen}

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        super()._load_extra_state(extra)
        self._frozen = extra["frozen"]
