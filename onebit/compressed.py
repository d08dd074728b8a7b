"""What 1-bit LAMB and 1-bit Adam share: the switch, the compressed stage, and the way back.

The averaging is in `exchange.py`, the arithmetic in `lamb.py` and behind `backend.py`; what differs between the two
optimizers, the size of each layer's step, is in `onebit_lamb.py` and `onebit_adam.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit import lamb
from onebit.backend import BucketStep, Hypers, Momentum, chosen, decoded
from onebit.checks import checksum
from onebit.codec import BucketCodec
from onebit.comm import Comm
from onebit.deferred import Deferred
from onebit.errors import ConfigError
from onebit.exchange import BucketMean, OneBitExchange
from onebit.flat import Stage
from onebit.kernels import unpack_bits
from onebit.layout import Bucket, Run
from onebit.overlap import Start
from onebit.resize import Extra, Resize
from onebit.saved import by_layer
from onebit.stages import TwoStages
from onebit.two_level import build_exchange

log = logging.getLogger("onebit")


Measure = tuple[Tensor, lamb.Norms] | None
"""Of the layers of a bucket: what their ratios move to, [layers], and the norms that blend it."""


class OneBitOptimizer(TwoStages):
    """A subclass says how far each layer goes in both stages."""

    sends_momentum = True

    def stats(self) -> dict[str, Any]:
        """As in the warm-up stage, and in the compressed stage the norms of the momentum, of this worker's error and
        of its server error."""
        stats = super().stats()
        if self._exchange is not None:
            momentum = torch.cat([m.flatten() for m in self.decoded_momentum()])
            for name, flat in [
                ("momentum_norm", momentum),
                ("worker_error_norm", self._exchange.worker_error),
                ("server_error_norm", self._exchange.server_error),
            ]:
                stats[name] = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        return stats

    @torch.no_grad()
    def decoded_momentum(self) -> list[Tensor]:
        """The global momentum of each layer, in its shape: a new tensor each, zeros before the first step."""
        if self._layout is None:
            return [torch.zeros_like(p) for p in self._params()]
        if self._exchange is None:
            return [view.clone() for view in self._layout.views(self._flat["momentum"])]
        parts = [
            decoded(codec, self._momentum[bucket.index], self._layer_scale(bucket))
            for bucket, codec in zip(self._layout.buckets, self._exchange.codecs, strict=True)
        ]
        return [view.clone() for view in self._layout.views(torch.cat(parts))]

    # -- what is compared and saved ------------------------------------------------------------------------------

    def _settings(self) -> list[tuple[str, str]]:
        how = self._compression
        named = [*super()._settings(), ("freeze_step", str(how.freeze_step)), ("total_steps", str(how.total_steps))]
        named += [("variance_floor", str(how.variance_floor))]
        for i, group in enumerate(self.param_groups):
            mask = group.get("exp_avg_mask")
            if mask is not None:
                named += [(f"exp_avg_mask of group {i}", f"checksum {checksum((mask != 0).float())}")]
        return named

    def _structure(self) -> list[tuple[str, str]]:
        how = self._compression
        named = [("codec", repr(how.codec)), ("dead_elements", how.dead_elements)]
        named += [("momentum_scales", str(how.momentum_scales)), ("state", how.state)]
        named += [("error feedback", str(how.feedback))]
        return [*super()._structure(), *named]

    def _extra_state(self) -> dict[str, Any]:
        extra = super()._extra_state()
        if self._exchange is not None:
            extra["alive"] = self._exchange.alive
            extra["wake_wanted"] = self._exchange.wake_wanted
            if "momentum" not in self._flat:
                extra["momentum"] = [(m.messages, m.mask) for m in self._momentum if isinstance(m, Momentum)]
        return extra

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        super()._load_extra_state(extra)
        self._exchange = None
        if extra["stage"] != Stage.COMPRESSED.value:
            return
        exchange = self._allocate_compressed()
        self._set_alive(None if extra["alive"] is None else extra["alive"].to(self._device))
        exchange.wake_wanted = extra["wake_wanted"]
        if "momentum" in extra:
            here = [[None if t is None else t.to(self._device) for t in pair] for pair in extra["momentum"]]
            self._keep([Momentum(messages.clone(), mask) for messages, mask in here if messages is not None])
        self._load_errors(exchange, extra, "errors")

    def _resized_extra(self, saved: dict[str, Any], resize: Resize, extras: Iterable[Extra]) -> Extra:
        extra = super()._resized_extra(saved, resize, extras)
        packed = extra.pop("momentum", None)
        if packed is None:
            return extra
        scales = [state["momentum_scale"] for state in by_layer(saved) if "momentum_scale" in state]
        scale = torch.stack(scales).to(self._device) if scales else None
        parts = []
        for bucket, pair in zip(resize.old.buckets, packed, strict=True):
            codec = self._old_codec(bucket, self._compression.codec)
            messages, mask = (None if part is None else part.to(self._device) for part in pair)
            assert messages is not None
            parts.append(decoded(codec, Momentum(messages, mask), None if scale is None else scale[bucket.layer_slice]))
        for state, view in zip(by_layer(saved), resize.old.views(torch.cat(parts)), strict=True):
            state["momentum"] = view
        return extra

    # -- the switch, and back --------------------------------------------------------------------------------------

    def _may_defer(self) -> bool:
        if self._exchange is None:
            return super()._may_defer()
        return super()._may_defer() and "momentum" not in self._flat and not any(self._late)

    def _switch(self) -> None:
        """End the warm-up stage: freeze the variance, allocate the errors, find dead elements. [A1: T_w]"""
        assert self._layout is not None
        how = self._compression
        dead = self._freeze(self._flat["variance"])
        self._end_warmup()
        exchange = self._allocate_compressed()
        if how.momentum_scales:
            self._layerwise["momentum_scale"].copy_(self._momentum_scales())
        self._set_alive(self._initially_alive(dead, self._mask))
        self._take_over_errors(exchange)
        if self.comm.rank == 0:
            alive = exchange.alive
            asleep = 0 if alive is None else int((~alive).sum())
            log.info(
                "compressed stage from update %d on (%s); %d elements never had a gradient",
                self._steps + 1,
                self.freeze_reason,
                asleep,
            )
            if self._mask is not None and self._holds and self._kernels == "native":
                log.info("exp_avg_mask was given: the worker's part runs in torch, which is slower")

    def _take_over_errors(self, exchange: OneBitExchange) -> None:
        """What a quantised warm-up did not send yet goes out with the momentum: (1 - beta1) times those errors."""
        left, hypers, self._quantised = self._quantised, self._hypers(), None
        if left is None or not self._compression.feedback:
            return
        scales = self._layerwise.get("momentum_scale")
        factor = torch.zeros_like(self._flat["momentum"])
        for run in exchange.layout.runs:
            factor[run.slice] = 1 - hypers.of(run).beta1
            if scales is not None:
                factor[run.slice] *= run.spread(scales[run.layer_slice])
        if self._mask is not None:
            factor *= unpack_bits(self._mask)
        left.hand_over(exchange, factor)

    def _leave_compressed(self) -> None:
        """Back to the state of a warm-up stage: the momentum as numbers, with the errors of all workers folded in.

        What was not sent yet, the mean of the worker errors and the server errors, is what the next compressed step
        would have added to its momentum (but for the factor of scaled errors); m + errors / beta1 makes the next
        uncompressed one add it. With beta1 = 0 there is no such momentum, and they are dropped.
        """
        assert self._layout is not None
        exchange = self._exchange
        assert exchange is not None
        left = exchange.total_error()
        momentum = self._layout.zeros(self._dtype, self._device)
        for view, m in zip(self._layout.views(momentum), self.decoded_momentum(), strict=True):
            view.copy_(m)
        hypers, scales = self._hypers(), self._layerwise.get("momentum_scale")
        for run in self._layout.runs:
            beta1, unsent = hypers.of(run).beta1, left[run.slice]
            if scales is not None:
                unsent = unsent / run.spread(scales[run.layer_slice])
            if beta1 > 0:
                momentum[run.slice] += unsent / beta1
            elif self.comm.rank == 0:
                log.warning("beta1 is 0, so the errors of %d layers are dropped, not folded in", len(run.layers))
        variance = self._flat["variance"].to(self._dtype)
        alive = exchange.alive
        if alive is not None:
            # dead elements had the mean of the others there; those that hold something keep it, as those that wake do
            spared = alive | (left != 0) if self._mask is None else alive | (left != 0) | ~unpack_bits(self._mask)
            variance *= spared
        for run in self._layout.runs:  # a layer that just woke has no variance yet
            implied = lamb.implied_variance(momentum[run.slice], variance[run.slice], run, hypers.of(run))
            variance[run.slice] = torch.where(implied > 0, implied, variance[run.slice])
        self._exchange = None
        self._drop(self._flat, "fresh_variance")
        for name in ("ratio", "switch_norm", "start_norm", "momentum_scale", "step_size"):
            self._drop(self._layerwise, name)
        self._add_flat("variance", variance)
        self._add_flat("momentum", momentum)

    def _drop(self, kind: dict[str, Tensor], name: str) -> None:
        """Let go a kind of state, with its views."""
        kind.pop(name, None)
        for p in self._params():
            self.state[p].pop(name, None)

    def _end_warmup(self) -> None:
        """What a subclass does with its own state at the switch, before that of the compressed stage is added."""

    def _weigh(self) -> None:
        super()._weigh()
        if self._compact and self._dtype is not torch.float32:
            self._stepped = None  # it is asked again at the next step
            raise ConfigError(f"state is 'compact' and the parameters are {self._dtype}; it needs torch.float32")

    @property
    def _compact(self) -> bool:
        """Whether errors and variances of the compressed stage are held in fewer bytes."""
        return self._compression.state == "compact"

    def _allocate_compressed(self) -> OneBitExchange:
        """Add the state of the compressed stage, at its neutral values."""
        assert self._layout is not None
        if self._compact:
            self._add_flat("variance", self._flat["variance"].to(torch.bfloat16))
        if self._compression.momentum_scales:
            self._add_layerwise("momentum_scale", 1.0)
        how = self._compression
        codec = how.codec
        codecs = [self._backend.codec(bucket, codec) for bucket in self._layout.buckets]
        self._exchange = build_exchange(
            self._layout, self.comm, self._dtype, self._device, codecs, self._compact, how.feedback
        )
        self._momentum: list[Momentum | Tensor] = [self._flat["momentum"][b.slice] for b in self._layout.buckets]
        self._mask = self._user_mask()
        self._late = [True] * len(self._layout.buckets)  # looked up again after the first update
        return self._exchange

    def _set_alive(self, alive: Tensor | None) -> None:
        assert self._exchange is not None
        self._exchange.set_alive(alive)
        self._note_asleep(alive)

    def _note_asleep(self, alive: Tensor | None) -> None:
        """Which layers have no element that takes part in the exchange; bool [layers]."""
        assert self._layout is not None
        if alive is None:
            self._asleep_here = torch.zeros(len(self._layout.layers), dtype=torch.bool, device=self._device)
        else:
            self._asleep_here = torch.stack([~view.any() for view in self._layout.views(alive)])
        self._asleep = self._asleep_here

    def _layer_scale(self, bucket: Bucket) -> Tensor | None:
        """The momentum scales of a bucket's layers; None where there are none."""
        scales = self._layerwise.get("momentum_scale")
        return None if scales is None else scales[bucket.layer_slice]

    # -- the compressed stage --------------------------------------------------------------------------------------

    def _compressed_step(self, exchange: OneBitExchange) -> None:
        """Worker's part, exchange, everyone's part. Nothing is kept unless all of it was finite on all workers."""
        if exchange.wake() is not None:
            self._late = [True] * len(self._late)
            self._note_asleep(exchange.alive)
        hypers = self._hypers()
        rates = self._rates(hypers)
        steps = self._bucket_steps(exchange, hypers)
        means = self._means_of_buckets(self._compressed_start(exchange, steps, rates))
        gathered = [mean.gather() for mean in means]
        counts, keep = self._verdict(self._agreed([mean.usable for mean in means]), self._may_defer())
        if not counts:
            return
        for mean in means:
            mean.commit(keep)
        self._note_wishes(exchange, [mean.headers for mean in means], keep)
        now = [
            Momentum(self._kept_messages(messages, codec, keep), self._momentum_mask(codec))
            for messages, codec in zip(gathered, exchange.codecs, strict=True)
        ]
        self._update([step.keeping(keep) for step in steps], now, rates)
        self._keep(now)
        if self._watch is not None:
            self._look_out(float(chosen(keep, _norm(exchange, gathered), math.nan)))

    def _bucket_steps(self, exchange: OneBitExchange, hypers: Hypers) -> list[BucketStep]:
        number = self._steps + 1
        return [BucketStep(codec, hypers, self._layer_scale(codec.bucket), number) for codec in exchange.codecs]

    def _compressed_start(self, exchange: OneBitExchange, steps: Sequence[BucketStep], rates: Tensor) -> Start:
        """The worker's part: how the mean of a bucket begins. `rates`: lr of each layer."""
        factor, backend, momentum = self._error_factor(rates), self._backend, list(self._momentum)
        mask = self._mask if self._holds else None

        def start(bucket: Bucket, grads: Sequence[Tensor | None], comm: Comm) -> BucketMean:
            i, held = bucket.index, None if mask is None else mask[bucket.packed_slice]
            source = backend.source(steps[i], grads, momentum[i], held)
            return exchange.start(bucket, source, None if factor is None else factor[bucket.layer_slice], comm)

        return start

    def _coming_start(self) -> Start | None:
        if self._exchange is None:
            return super()._coming_start()
        self._settle()
        if self._exchange.wake_wanted:
            return None
        hypers = self._hypers()
        return self._compressed_start(self._exchange, self._bucket_steps(self._exchange, hypers), self._rates(hypers))

    def _note_wishes(self, exchange: OneBitExchange, headers: list[Tensor], keep: Tensor | None) -> None:
        """Remember whether a dead element asks to wake; with the verdict, where that is still on the device."""
        if keep is None:
            exchange.note_headers(headers)
        elif exchange.some_dead:
            asked = torch.cat(headers).ne(0).any() & keep
            self._pending = Deferred(torch.stack([keep, asked]))

    def _settle(self) -> None:
        pending = self._pending
        super()._settle()
        if pending is not None and self._exchange is not None:
            self._exchange.wake_wanted |= any(pending.read()[1:])

    def _kept_messages(self, messages: Tensor, codec: BucketCodec, keep: Tensor | None) -> Tensor:
        before = self._momentum[codec.bucket.index]
        return chosen(keep, messages, before.messages) if isinstance(before, Momentum) else messages

    def _momentum_mask(self, codec: BucketCodec) -> Tensor | None:
        """Where a bucket's momentum is not zero by decree, a bit per element; None for everywhere."""
        user = None if self._mask is None else self._mask[codec.bucket.packed_slice]
        masks = [mask for mask in (codec.packed_alive, user) if mask is not None]
        return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]

    def _keep(self, momentum: Sequence[Momentum]) -> None:
        """From here on the momentum is bits; the numbers of the warm-up stage are let go."""
        self._momentum = list(momentum)
        self._drop(self._flat, "momentum")

    def _update(self, steps: list[BucketStep], now: list[Momentum], rates: Tensor) -> None:
        """Everyone's part: from the momentum that all hold to the new parameters. `rates`: lr of each layer."""
        for step, momentum in zip(steps, now, strict=True):
            if self._late[step.codec.bucket.index]:
                self._prepare_late_layers(step, momentum)
        measured = [self._measure(step, momentum) for step, momentum in zip(steps, now, strict=True)]
        for step, momentum, found in zip(steps, now, self._measures_of_whole_layers(measured), strict=True):
            bucket = step.codec.bucket
            step_size = self._compressed_step_sizes(step, found, rates[bucket.layer_slice])
            x, v = self._x[bucket.layer_slice], self._flat["variance"][bucket.slice]
            self._backend.apply(step, x, momentum, v, step_size)

    def _measure(self, step: BucketStep, now: Momentum) -> Measure:
        """What the step sizes of a bucket's layers need to know of the coming step."""
        return None

    def _compressed_step_sizes(self, step: BucketStep, measured: Measure, rates: Tensor) -> Tensor:
        """What the directions of a bucket's layers are multiplied by, [layers of the bucket]; `rates`: lr of each."""
        return rates

    def _measures_of_whole_layers(self, measured: list[Measure]) -> list[Measure]:
        """Put together over the shards of the layers, where there are any."""
        found = [pair for pair in measured if pair is not None]
        if self._shards is None or not found:
            return measured
        assert self._layout is not None
        norms = torch.cat([n.stacked() for _, n in found], dim=1)
        squares, largest = self._shards.sums_and_largest(norms.square(), torch.cat([q for q, _ in found]))
        norms, largest = squares.sqrt(), largest.to(self._dtype)
        layers = [bucket.layer_slice for bucket in self._layout.buckets]
        return [(largest[here], lamb.Norms(*norms[:, here])) for here in layers]

    def _agreed(self, usable: list[Tensor]) -> list[Tensor]:
        """Whether the step can be taken, also by the processes that hold the other shards of the layers.

        They also agree on which buckets and layers have elements that have just come alive.
        """
        if self._shards is None:
            return usable
        late = torch.tensor(self._late, dtype=torch.bool, device=self._device)
        flags = torch.cat([~torch.stack(usable), late, ~self._asleep_here])
        sizes = [len(usable), len(late), len(self._asleep_here)]
        unusable, late, awake = torch.split(self._shards.any(flags), sizes)
        self._late, self._asleep = late.tolist(), ~awake
        return [~unusable.any()]

    def _prepare_late_layers(self, step: BucketStep, now: Momentum) -> None:
        """Only while a layer that takes part in the exchange may lack a variance: at the switch, and after a wake."""
        assert self._layout is not None
        bucket, late = step.codec.bucket, False
        m = decoded(step.codec, now, step.scale)
        for run, here in self._layout.runs_in(bucket):
            implied = lamb.implied_variance(m[here], self._flat["variance"][run.slice], run, step.hypers.of(run))
            for name in ("variance", "fresh_variance"):
                if name in self._flat:
                    v = self._flat[name][run.slice]
                    v.copy_(torch.where(implied > 0, implied, v))
            late |= self._prepare_late_run(run, m[here], step.hypers.of(run))
        self._late[bucket.index] = late

    def _prepare_late_run(self, run: Run, m: Tensor, hyper: lamb.Hyper) -> bool:
        """Give late layers what else they need; whether some must be looked at again at the next step."""
        return False

    def _error_factor(self, rates: Tensor) -> Tensor | None:
        """The factor on both errors before they are added: [layers], or None for 1; `rates`: lr of each layer."""
        return None


def _norm(exchange: OneBitExchange, gathered: list[Tensor]) -> Tensor:
    """The 2-norm of a decoded mean, from the messages of all buckets: float64 []."""
    norms = [
        codec.layer_norms(messages, codec.packed_alive)
        for codec, messages in zip(exchange.codecs, gathered, strict=True)
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.cat(norms))
    return norm
