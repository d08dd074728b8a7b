"""The two stages of a 1-bit optimizer: when the warm-up stage ends, what is looked at before, and the way back."""

from __future__ import annotations

import logging
import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onebit import lamb
from onebit.checks import check_floor, check_in, check_kind, check_whole
from onebit.codec import OneBit
from onebit.errors import ConfigError
from onebit.exchange import OneBitExchange
from onebit.flat import Stage
from onebit.freeze import AutoFreeze, FreezeStep, Settling, check_freeze_step
from onebit.guard import LayerPreview, SwitchGuard, Watch, preview, sentence
from onebit.kernels import pack_bits, unpack_bits
from onebit.layout import Run
from onebit.optim import FlatOptimizer

log = logging.getLogger("onebit")

DeadElements = Literal["hold", "exchange"]
StateKind = Literal["full", "compact"]


@dataclass(frozen=True)
class Compression:
    """How the compressed stage works: what 1-bit LAMB and 1-bit Adam are both told.

    Raises:
        ConfigError: a value outside what is listed at `OneBitLamb`.
    """

    freeze_step: FreezeStep
    total_steps: int | None
    codec: OneBit
    variance_floor: float
    dead_elements: DeadElements
    momentum_scales: bool
    state: StateKind
    guard: SwitchGuard | None
    feedback: bool = True

    @property
    def freeze(self) -> int | AutoFreeze:
        """`freeze_step` as a number of updates, or as the rule that finds it."""
        return check_freeze_step(self.freeze_step, self.total_steps)

    @property
    def freeze_at(self) -> int | None:
        """The same; None where a rule decides."""
        return None if isinstance(self.freeze, AutoFreeze) else self.freeze

    def __post_init__(self) -> None:
        _ = self.freeze
        if not isinstance(self.momentum_scales, bool):
            raise ConfigError(f"momentum_scales is {self.momentum_scales!r}; it must be True or False")
        check_floor(self.variance_floor)
        check_kind("codec", self.codec, OneBit)
        check_in("dead_elements", self.dead_elements, ("hold", "exchange"))
        check_in("state", self.state, ("full", "compact"))


class TwoStages(FlatOptimizer):
    """A warm-up stage, a compressed stage, and the ways between; what the second one does is in `compressed.py`."""

    compresses = True
    _compression: Compression
    _freeze_at: int | None = None  # the update that ends this warm-up stage, where it is known
    _settling: Settling | None = None  # else the rule at work, from the first step on
    _watch: Watch | None = None
    _freeze_why = "as was asked"  # with a known `_freeze_at`
    freeze_reason: str
    """Why the last warm-up stage ended; empty before it did."""
    switch_outlook: str
    """What `preview_switch` found at the last switch, in a sentence; empty before it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.freeze_reason = self.switch_outlook = ""
        how = self._compression
        self._freeze_at = how.freeze_at
        self._watch = None if how.guard is None else Watch(how.guard)
        super().__init__(*args, **settings)

    @property
    def freeze_step(self) -> int | None:
        """The update with which the warm-up stage ends or ended; None while `AutoFreeze` has not decided."""
        return self._freeze_at

    @property
    def stage(self) -> Stage:
        return Stage.WARMUP if self._exchange is None else Stage.COMPRESSED

    @torch.no_grad()
    def refreeze(self, steps: int) -> None:
        """Go back to the warm-up stage for `steps` updates, >= 1: for a new learning rate, sequence length or data.

        What the errors hold is folded into the momentum, so nothing is lost. In the warm-up stage: it ends `steps`
        updates from now. A collective.

        Raises:
            ConfigError: steps is no whole number, at least 1.
        """
        check_whole("refreeze steps", steps, 1)
        self._settle()
        self._spoil()
        if self._exchange is not None:
            self._leave_compressed()
            self._rewarmed = True
        self._freeze_at, self._freeze_why = self._steps + steps, f"{steps} after a refreeze"
        if self.comm.rank == 0:
            log.info("warm-up stage for %d updates, up to update %d", steps, self._freeze_at)

    @torch.no_grad()
    def preview_switch(self) -> dict[str, LayerPreview]:
        """What the first compressed step would do to each layer if the variance were frozen now: {layer name: ...}.

        On this worker, from its momentum and its own gradients, which must still be there; no traffic. Logged at the
        switch. Empty before the first step and in the compressed stage.
        """
        if self._layout is None or self._exchange is not None:
            return {}
        frozen = self._flat["variance"].clone()
        dead = self._freeze(frozen)
        mask = self._user_mask()
        alive, held = self._initially_alive(dead, mask), None if mask is None else unpack_bits(mask)
        scales = self._momentum_scales() if self._compression.momentum_scales else None
        grads, hypers, found = self._gradients(), self._hypers(), []
        for bucket in self._layout.buckets:
            codec = self._backend.codec(bucket, self._compression.codec)
            codec.set_alive(alive[bucket.slice])
            x = torch.empty(bucket.numel, dtype=self._dtype, device=self._device)
            self._backend.gather(bucket, grads[bucket.layer_slice], x)
            below, spread = torch.ones_like(x), torch.ones_like(x)
            for run, here in self._layout.runs_in(bucket):
                lamb.local_momentum(self._flat["momentum"][run.slice], x[here], hypers.of(run).beta1, None)
                below[here] = frozen[run.slice].sqrt() + hypers.of(run).eps
                if scales is not None:
                    spread[here] = run.spread(scales[run.layer_slice].to(self._dtype))
            if held is not None:
                x *= held[bucket.slice]
            decoded = codec.decode(codec.encode(x * spread)) / spread
            if held is not None:
                decoded *= held[bucket.slice]
            found += preview(x, decoded, below, Run(bucket.layers).norms)
        return dict(zip(self._names(), found, strict=True))

    def observe(self, loss: float) -> None:
        """Tell a `SwitchGuard` this step's loss on this worker; the mean over the workers is watched. A collective.

        Raises:
            ConfigError: there is no guard.
        """
        if self._watch is None:
            raise ConfigError("observe was called without a guard; pass guard=onebit.SwitchGuard(...)")
        losses = [struct.unpack("d", item)[0] for item in self.comm.all_gather_bytes(struct.pack("d", float(loss)))]
        self._watch.observe(sum(losses) / len(losses))

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "freeze_step": self._freeze_at, "freeze_reason": self.freeze_reason}

    def _step(self) -> None:
        if self._exchange is not None:
            self._compressed_step(self._exchange)
            return
        before = self._steps
        self._warmup_step()
        if self._looks_at_switch():
            self._settle()  # the host waits here: was this a step that counts?
            if self._steps > before and self._freeze_due():
                self._averaged = None  # its memory serves the look before the switch
                if not self._postponed():
                    self._switch()
                    if self._watch is not None:
                        self._watch.switched()

    def _looks_at_switch(self) -> bool:
        """Whether this step may be the last of the warm-up stage."""
        if self._freeze_at is not None:
            return self._steps >= self._freeze_at
        if self._settling is None:
            rule = self._compression.freeze_step
            assert isinstance(rule, AutoFreeze)
            self._settling = Settling(rule, float(self.param_groups[0]["betas"][1]), self._compression.total_steps)
        return self._settling.wants_norms(self._steps)

    def _freeze_due(self) -> bool:
        if self._freeze_at is not None:
            self.freeze_reason = f"{self._steps} updates, {self._freeze_why}"
            return True
        assert self._settling is not None
        assert self._layout is not None
        sums = [view.sum(dtype=torch.float64) for view in self._layout.views(self._flat["variance"])]
        lr = float(self.param_groups[0]["lr"])
        whole = torch.stack(sums) if self._shards is None else self._shards.sum(torch.stack(sums))
        if not self._settling.settled(self._steps, lr, whole):
            return False
        self._freeze_at, self.freeze_reason = self._steps, self._settling.reason
        return True

    def _postponed(self) -> bool:
        """Look at what the switch would do, say it, and wait if the guard says so. All workers decide alike."""
        layers = self.preview_switch()
        self.switch_outlook = sentence(layers)
        if self.comm.rank == 0:
            log.info("before the switch: %s", self.switch_outlook)
        if self._watch is None:
            return False
        mine = sorted(layer.stretch for layer in layers.values() if layer.stretch > 0)
        packed = struct.pack("d", mine[len(mine) // 2] if mine else 0.0)
        stretch = max(struct.unpack("d", item)[0] for item in self.comm.all_gather_bytes(packed))
        if not self._watch.postpones(stretch):
            return False
        self._freeze_at = self._steps + self._watch.guard.postpone_steps
        self._freeze_why = f"postponed at {self._steps}"
        if self.comm.rank == 0:
            log.warning(
                "the switch is postponed to update %d: the update of the median layer would be %.1f times too long",
                self._freeze_at,
                stretch,
            )
        return True

    def _look_out(self, momentum_norm: float) -> None:
        """After a compressed update: return to the warm-up stage if the guard sees the run go astray."""
        assert self._watch is not None
        # not finite: a step that did not count, which the host does not know yet
        why = self._watch.alarm(momentum_norm) if math.isfinite(momentum_norm) else ""
        if why:
            if self.comm.rank == 0:
                log.warning("back to the warm-up stage at update %d: %s", self._steps, why)
            self.refreeze(self._watch.guard.rewarm_steps)

    def _freeze(self, v: Tensor) -> Tensor:
        """Make v, [layout.numel], the frozen variance, in place; returns which elements never had a gradient."""
        assert self._layout is not None
        how = self._compression
        dead = (v == 0) & (self._flat["momentum"] == 0)
        for run in self._layout.runs:
            held = dead[run.slice] if self._holds else None
            lamb.freeze_variance(v[run.slice], held, run, how.variance_floor)
        return dead

    def _freeze_rule(self) -> str:
        """What the switch was asked to follow."""
        how = self._compression
        return f"{how.freeze} of {how.total_steps} updates" if how.freeze_at is None else f"update {how.freeze_at}"

    def _check_shards(self) -> None:
        if self._watch is not None:
            raise ConfigError("a guard was given and parameters are sharded (DTensor); it would decide shard by shard")

    def _settings(self) -> list[tuple[str, str]]:
        return [*super()._settings(), ("guard", repr(self._compression.guard))]

    def _extra_state(self) -> dict[str, Any]:
        settling = None if self._settling is None else self._settling.state()
        return {
            **super()._extra_state(),
            "freeze_rule": self._freeze_rule(),
            "freeze_at": self._freeze_at,
            "watch": None if self._watch is None else self._watch.state(),
            "freeze_why": self._freeze_why,
            "freeze_reason": self.freeze_reason,
            "settling": settling,
        }

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        super()._load_extra_state(extra)
        self._settling, self.freeze_reason = None, extra["freeze_reason"]
        if self._watch is not None:
            self._watch = Watch(self._watch.guard)
            if extra["watch"] is not None:
                self._watch.load(extra["watch"])
        planned = extra["freeze_why"] == TwoStages._freeze_why and extra["stage"] == Stage.WARMUP.value
        if planned and extra["freeze_rule"] != self._freeze_rule():
            self._freeze_at = self._compression.freeze_at
            self._freeze_why = TwoStages._freeze_why
            if self.comm.rank == 0:
                log.warning(
                    "the loaded state was to be frozen by %s and this optimizer by %s, which is what counts now",
                    extra["freeze_rule"],
                    self._freeze_rule(),
                )
            return
        self._freeze_at, self._freeze_why = extra["freeze_at"], extra["freeze_why"]
        if extra["settling"] is not None and self._freeze_at is None:
            self._looks_at_switch()
            assert self._settling is not None
            self._settling.load(extra["settling"])

    @property
    def _holds(self) -> bool:
        """Whether elements that never had a gradient stay out of the exchange."""
        return self._compression.dead_elements == "hold"

    def _user_mask(self) -> Tensor | None:
        """The groups' exp_avg_mask, a bit per element: uint8 [layout.numel / 8], or None where no group has one."""
        assert self._layout is not None
        masks = {id(g["params"][0]): g["exp_avg_mask"] for g in self.param_groups if g.get("exp_avg_mask") is not None}
        if not masks:
            return None
        flat = torch.ones(self._layout.numel, dtype=torch.bool, device=self._device)
        for p, view in zip(self._params(), self._layout.views(flat), strict=True):
            if id(p) in masks:
                view.copy_(masks[id(p)].reshape(view.shape) != 0)
        return pack_bits(flat)

    def _initially_alive(self, dead: Tensor, mask: Tensor | None) -> Tensor:
        """Which elements take part in the exchange: bool [layout.numel]; padding counts as alive."""
        assert self._layout is not None
        alive = torch.ones_like(dead)
        for view, out in zip(self._layout.views(dead), self._layout.views(alive), strict=True):
            out.copy_(~view if self._holds else ~view.all())
        return alive if mask is None or not self._holds else alive & unpack_bits(mask)

    def _momentum_scales(self) -> Tensor:
        assert self._layout is not None
        norms = torch.cat([run.norms(self._flat["momentum"][run.slice]) for run in self._layout.runs])
        sizes = torch.cat([run.sizes(self._device) for run in self._layout.runs])
        return lamb.momentum_scales(norms, sizes)

    def _switch(self) -> None:
        raise NotImplementedError

    def _leave_compressed(self) -> None:
        raise NotImplementedError

    def _compressed_step(self, exchange: OneBitExchange) -> None:
        raise NotImplementedError
