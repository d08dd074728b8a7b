"""`OneBitLamb`: warm-up stage, switch, compressed stage.

The arithmetic is in `lamb.py`, the averaging in `exchange.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import Transport
from onebit.backend import Hypers, Momentum
from onebit.checks import check_in, checksum
from onebit.codec import BucketCodec, OneBit
from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.exchange import Exchange
from onebit.kernels import pack_bits, unpack_bits
from onebit.layout import Bucket
from onebit.optim import DEFAULT_BUCKET_ELEMENTS, Lamb, Stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("onebit")

PAPER: dict[str, Any] = {
    "codec": OneBit(scale="bucket"),
    "variance_floor": 0.0,
    "dead_elements": "exchange",
    "coeff_bias_correction": False,
    "bucket_elements": None,
}
"""Keyword arguments that turn an optimizer into the authors' release."""


class OneBitLamb(Lamb):
    """1-bit LAMB (arXiv 2104.06069, Algorithm 1): LAMB whose workers exchange one bit per parameter.

    For `freeze_step` updates it is `Lamb` on averaged gradients, bit for bit (warm-up stage). Then the variance is
    frozen and each step sends the momentum as signs and scales with error feedback (compressed stage); the layerwise
    rate stays adaptive: c = c_avg * ratio, the ratio coming from a gradient rebuilt of consecutive momenta.
    Gradients must not be averaged by anyone else: use it without DDP's averaging.

    `onebit.PAPER` holds the keyword arguments that turn it into the authors' release.

    Args:
        params, lr, betas, eps, weight_decay, min_coeff, max_coeff, process_group, comm: as in `Lamb`. A group may
            hold `exp_avg_mask`, 0 where its single parameter's momentum must stay zero in the compressed stage.
        freeze_step: real updates before the switch, >= 1 (DEV-11).
        coeff_beta: decay of the average of c in the warm-up, [0, 1).
        factor_min, factor_max: hard bounds of the ratio, 0 < min <= max.
        factor_threshold: soft bound, the largest relative change of the ratio in a step, in (0, 1).
        codec: how momentum is sent, `onebit.OneBit(...)`.
        ratio: "sqrt" (of variances, plus eps: as released), "variance" (as printed), or "fixed" (stays 1: the
            basic 1-bit LAMB the paper compares with).
        error_feedback: "unscaled" (as released), or "scaled" by the ratio of the step sizes (as analysed), which
            applies each step's coefficient in the next step (DEV-4).
        variance_floor: the frozen variance is at least this times its layer's mean, in [0, 1); 0: no floor.
        dead_elements: elements that never had a gradient are held ("hold") until a worker sees one, or take part in
            the exchange unless their whole layer is dead ("exchange", as released).
        coeff_bias_correction: divide the average of c at the switch by its weight (DEV-5).
        warmup_transport: how gradients are averaged in the warm-up, "fp32" or "bf16".
        bucket_elements: layers are exchanged in buckets of about this many elements; None: one bucket.

    Raises:
        ConfigError: a value outside what is listed above.
        MismatchError: as in `Lamb`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 1000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        process_group: ProcessGroup | None = None,
        comm: Comm | None = None,
        codec: OneBit | None = None,
        ratio: Literal["sqrt", "variance", "fixed"] = "sqrt",
        error_feedback: Literal["unscaled", "scaled"] = "unscaled",
        variance_floor: float = 0.01,
        dead_elements: Literal["hold", "exchange"] = "hold",
        coeff_bias_correction: bool = True,
        warmup_transport: Transport = "fp32",
        bucket_elements: int | None = DEFAULT_BUCKET_ELEMENTS,
    ) -> None:
        if not 0 <= coeff_beta < 1:
            raise ConfigError(f"coeff_beta is {coeff_beta}; it must lie in [0, 1)")
        if not isinstance(freeze_step, int) or isinstance(freeze_step, bool) or freeze_step < 1:
            raise ConfigError(f"freeze_step is {freeze_step!r}; it must be a whole number of updates, at least 1")
        if not 0 < factor_min <= factor_max:
            raise ConfigError(f"factor_min, factor_max are {factor_min}, {factor_max}; allowed is 0 < min <= max")
        if not 0 < factor_threshold < 1:
            raise ConfigError(f"factor_threshold is {factor_threshold}; it must lie in (0, 1)")
        if not 0 <= variance_floor < 1:
            raise ConfigError(f"variance_floor is {variance_floor}; it must lie in [0, 1)")
        self.freeze_step = freeze_step
        self._codec = OneBit() if codec is None else codec
        self._ratio_form = check_in("ratio", ratio, ("sqrt", "variance", "fixed"))
        self._ratio_bounds = (factor_min, factor_max, factor_threshold)
        self._scaled_error = check_in("error_feedback", error_feedback, ("unscaled", "scaled")) == "scaled"
        self._variance_floor = variance_floor
        self._hold = check_in("dead_elements", dead_elements, ("hold", "exchange")) == "hold"
        self._coeff_bias_correction = coeff_bias_correction
        self._exchange: Exchange | None = None
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
            transport=warmup_transport,
            process_group=process_group,
            comm=comm,
            bucket_elements=bucket_elements,
        )
        self._coeff_rule = lamb.CoeffRule(min_coeff, max_coeff, coeff_beta)

    @property
    def stage(self) -> Stage:
        return Stage.WARMUP if self._exchange is None else Stage.COMPRESSED

    def stats(self) -> dict[str, Any]:
        """As `Lamb.stats`, and in the compressed stage ratios ({layer name: ratio}) and the norms of the momentum,
        of this worker's error and of its server error."""
        stats = super().stats()
        if self._exchange is not None:
            stats["ratios"] = dict(zip(self._names(), self._layerwise["ratio"].tolist(), strict=True))
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
        decoded = [
            self._backend.momentum(codec, self._momentum[bucket.index], self._layer_scale(bucket))
            for bucket, codec in zip(self._layout.buckets, self._exchange.codecs, strict=True)
        ]
        return [view.clone() for view in self._layout.views(torch.cat(decoded))]

    def _settings(self) -> list[tuple[str, str]]:
        named = [*super()._settings(), ("freeze_step", str(self.freeze_step)), ("ratio", self._ratio_form)]
        named += [("ratio bounds", str(self._ratio_bounds)), ("variance_floor", str(self._variance_floor))]
        for i, group in enumerate(self.param_groups):
            mask = group.get("exp_avg_mask")
            if mask is not None:
                named += [(f"exp_avg_mask of group {i}", f"checksum {checksum((mask != 0).float())}")]
        return [*named, ("coeff_bias_correction", str(self._coeff_bias_correction))]

    def _structure(self) -> list[tuple[str, str]]:
        named = [("codec", repr(self._codec)), ("hold dead elements", str(self._hold))]
        named += [("error_feedback scaled", str(self._scaled_error))]
        return [*super()._structure(), *named, ("ratio fixed", str(self._ratio_form == "fixed"))]

    def _extra_state(self) -> dict[str, Any]:
        extra = super()._extra_state()
        if self._exchange is not None:
            extra["worker_error"] = self._exchange.worker_error
            extra["server_error"] = self._exchange.server_error
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
        exchange.set_alive(None if extra["alive"] is None else extra["alive"].to(self._device))
        exchange.wake_wanted = extra["wake_wanted"]
        if "momentum" in extra:
            here = [[None if t is None else t.to(self._device) for t in pair] for pair in extra["momentum"]]
            self._keep([Momentum(messages.clone(), mask) for messages, mask in here if messages is not None])
        if extra["rank"] == self.comm.rank:
            exchange.worker_error.copy_(extra["worker_error"])
            exchange.server_error.copy_(extra["server_error"])
        else:
            log.warning(
                "worker %d loaded the state that worker %d saved: the errors in it belong to another worker and were "
                "set to zero; save and load on every worker to keep them",
                self.comm.rank,
                extra["rank"],
            )

    def _step(self) -> None:
        if self._exchange is not None:
            self._compressed_step(self._exchange)
        elif self._warmup_step() and self._steps >= self.freeze_step:
            self._switch()

    def _switch(self) -> None:
        """End the warm-up stage: freeze the variance, allocate the errors, find dead elements. [A1: T_w]"""
        assert self._layout is not None
        v = self._flat["variance"]
        dead = (v == 0) & (self._flat["momentum"] == 0)
        for run in self._layout.runs:
            lamb.freeze_variance(v[run.slice], dead[run.slice] if self._hold else None, run, self._variance_floor)
        if self._coeff_bias_correction:
            weight = self._layerwise["coeff_weight"]
            self._layerwise["coeff_avg"] /= torch.where(weight > 0, weight, 1.0)
        exchange = self._allocate_compressed()
        if self._ratio_form != "fixed":
            self._flat["fresh_variance"].copy_(v)
        if self._codec.scale == "bucket":
            self._layerwise["momentum_scale"].copy_(self._momentum_scales())
        if self._scaled_error:
            self._layerwise["coeff"].copy_(self._layerwise["coeff_avg"])
        exchange.set_alive(self._initially_alive(dead))
        self._averaged = None
        if self.comm.rank == 0:
            alive = exchange.alive
            asleep = 0 if alive is None else int((~alive).sum())
            log.info("compressed stage from update %d on; %d elements never had a gradient", self._steps + 1, asleep)
            if self._mask is not None and self._hold and self._kernels == "native":
                log.info("exp_avg_mask was given: the worker's part runs in torch, which is slower")

    def _allocate_compressed(self) -> Exchange:
        """Add the state of the compressed stage, at its neutral values."""
        assert self._layout is not None
        if self._ratio_form != "fixed":
            self._add_flat("fresh_variance")
        self._add_layerwise("ratio", 1.0)
        if self._codec.scale == "bucket":
            self._add_layerwise("momentum_scale", 1.0)
        if self._scaled_error:
            self._add_layerwise("step_size", 0.0)
        codecs = [self._backend.codec(bucket, self._codec) for bucket in self._layout.buckets]
        self._exchange = Exchange(self._layout, self._codec, self.comm, self._dtype, self._device, codecs)
        self._momentum: list[Momentum | Tensor] = [self._flat["momentum"][b.slice] for b in self._layout.buckets]
        self._mask = self._user_mask()
        self._late = [True] * len(self._layout.buckets)  # looked up again after the first update
        return self._exchange

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

    def _initially_alive(self, dead: Tensor) -> Tensor:
        """Which elements take part in the exchange: bool [layout.numel]; padding counts as alive."""
        assert self._layout is not None
        alive = torch.ones_like(dead)
        for view, out in zip(self._layout.views(dead), self._layout.views(alive), strict=True):
            out.copy_(~view if self._hold else ~view.all())
        return alive if self._mask is None or not self._hold else alive & unpack_bits(self._mask)

    def _momentum_scales(self) -> Tensor:
        assert self._layout is not None
        norms = torch.cat([run.norms(self._flat["momentum"][run.slice]) for run in self._layout.runs])
        sizes = torch.tensor([layer.numel for layer in self._layout.layers], dtype=torch.float64, device=self._device)
        return lamb.momentum_scales(norms, sizes)

    def _layer_scale(self, bucket: Bucket) -> Tensor | None:
        """The momentum scales of a bucket's layers; None where layers have 1-bit scales of their own."""
        scales = self._layerwise.get("momentum_scale")
        return None if scales is None else scales[bucket.layer_slice]

    def _compressed_step(self, exchange: Exchange) -> None:
        """Worker's part, exchange, everyone's part. Nothing is kept unless all of it was finite on all workers."""
        if exchange.wake() is not None:
            self._late = [True] * len(self._late)
        hypers, grads, factor = self._hypers(), self._gradients(), self._error_factor()
        means = []
        for bucket, codec in zip(exchange.layout.buckets, exchange.codecs, strict=True):
            mask = None if self._mask is None or not self._hold else self._mask[bucket.packed_slice]
            source = self._backend.source(
                codec,
                grads[bucket.layer_slice],
                self._momentum[bucket.index],
                hypers,
                self._layer_scale(bucket),
                mask,
            )
            means.append(exchange.start(bucket, source, None if factor is None else factor[bucket.layer_slice]))
        for mean in means:
            mean.serve()
        gathered = [mean.gather() for mean in means]
        if not all(bool(mean.usable) for mean in means):
            self._skip()
            return
        self._steps += 1
        for mean in means:
            mean.commit()
        exchange.note_headers([mean.headers for mean in means])
        now = [
            Momentum(messages, self._momentum_mask(codec))
            for messages, codec in zip(gathered, exchange.codecs, strict=True)
        ]
        for bucket in exchange.layout.buckets:
            self._update(exchange.codecs[bucket.index], now[bucket.index], hypers)
        self._keep(now)

    def _momentum_mask(self, codec: BucketCodec) -> Tensor | None:
        """Where a bucket's momentum is not zero by decree, a bit per element; None for everywhere."""
        user = None if self._mask is None else self._mask[codec.bucket.packed_slice]
        masks = [mask for mask in (codec.packed_alive, user) if mask is not None]
        return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]

    def _keep(self, momentum: Sequence[Momentum]) -> None:
        """From here on the momentum is bits; the numbers of the warm-up stage are let go."""
        self._momentum = list(momentum)
        self._flat.pop("momentum", None)
        for state in self.state.values():
            state.pop("momentum", None)

    def _update(self, codec: BucketCodec, now: Momentum, hypers: Hypers) -> None:
        """Everyone's part on one bucket: from the momentum that all hold to the new parameters."""
        bucket, scale = codec.bucket, self._layer_scale(codec.bucket)
        x, before = self._params()[bucket.layer_slice], self._momentum[bucket.index]
        v, fresh = self._flat["variance"][bucket.slice], self._flat.get("fresh_variance")
        fresh = None if fresh is None else fresh[bucket.slice]
        layers = {name: values[bucket.layer_slice] for name, values in self._layerwise.items()}
        if self._late[bucket.index]:
            self._prepare_late_layers(codec, now, hypers)
        form: lamb.RatioForm = "variance" if self._ratio_form == "variance" else "sqrt"
        if fresh is not None:
            quotient, norms = self._backend.measure(codec, x, now, before, v, fresh, hypers, scale, form, self._steps)
            layers["ratio"].copy_(lamb.next_ratio(quotient, layers["ratio"], norms, self._ratio_rule(form)))
        coeff = layers["ratio"] * layers["coeff_avg"]  # [A1:15-21 coefficient] (DEV-6)
        rates = hypers.rates(self._device)[bucket.layer_slice]
        step_size = rates * (layers["coeff"] if self._scaled_error else coeff)
        if self._scaled_error:  # it must be known before compression: last step's coefficient (DEV-4)
            layers["step_size"].copy_(step_size)
        layers["coeff"].copy_(coeff)
        self._backend.apply(codec, x, now, v, hypers, scale, step_size)

    def _ratio_rule(self, form: lamb.RatioForm) -> lamb.RatioRule:
        return lamb.RatioRule(form, *self._ratio_bounds)

    def _prepare_late_layers(self, codec: BucketCodec, now: Momentum, hypers: Hypers) -> None:
        assert self._layout is not None
        """Only while a layer that takes part in the exchange has no coefficient: at the switch, and after a wake."""
        m = self._backend.momentum(codec, now, self._layer_scale(codec.bucket))
        for run in self._layout.runs:
            if codec.bucket.start <= run.start < codec.bucket.stop:
                fresh = self._flat.get("fresh_variance")
                lamb.prepare_late_layers(
                    self._params()[run.layer_slice],
                    m[run.start - codec.bucket.start : run.stop - codec.bucket.start],
                    self._flat["variance"][run.slice],
                    None if fresh is None else fresh[run.slice],
                    self._layerwise["coeff_avg"][run.layer_slice],
                    self._layerwise["coeff_weight"][run.layer_slice],
                    run,
                    hypers.of(run),
                    self._coeff_rule,
                )
        waiting = self._layerwise["coeff_weight"][codec.bucket.layer_slice] == 0
        moving = [
            bool((m[a.start - codec.bucket.start : a.stop - codec.bucket.start] != 0).any())
            for a in codec.bucket.layers
        ]
        self._late[codec.bucket.index] = any(w and moves for w, moves in zip(waiting.tolist(), moving, strict=True))

    def _error_factor(self) -> Tensor | None:
        """How the step sizes shrank or grew, the factor on both errors: [layers], or None for 1. (DEV-4)"""
        if not self._scaled_error:
            return None
        before = self._layerwise["step_size"]
        now = (self._hypers().rates(self._device) * self._layerwise["coeff"]).to(self._dtype)
        both = (before > 0) & (now > 0)
        return torch.where(both, before / torch.where(both, now, 1.0), 1.0)
