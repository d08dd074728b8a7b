"""The work on one bucket, behind one contract with several back-ends; here the one in plain torch.

`TorchBackend` puts the functions of `lamb.py` and the codec together, one readable operation after the other, and is
the definition: `native_backend.NativeBackend` and `triton_backend.TritonBackend` must give the same bits and, up to the
order of sums, the same numbers.
A back-end never talks to other workers and never decides anything; `optim.py` and `compressed.py` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from onebit import lamb
from onebit.codec import BucketCodec, OneBit
from onebit.deferred import send
from onebit.exchange import Source, TensorSource
from onebit.kernels import unpack_bits
from onebit.kernels.compact import round_bf16_random
from onebit.layout import Bucket, FlatLayout, Run
from onebit.quantised import Bits, QuantisedCodec

Gradient = Tensor | Sequence[Tensor | None]
"""An averaged gradient: flat, [bucket], or one tensor per layer; None counts as zeros."""


class Hypers:
    """What the groups set at this step, for every run and every layer."""

    def __init__(self, layout: FlatLayout, groups: Sequence[lamb.Hyper]) -> None:
        self._layout = layout
        self._groups = groups

    def of(self, run: Run) -> lamb.Hyper:
        return self._groups[run.group]

    def table(self, bucket: Bucket) -> Tensor:
        """float64 [layers of the bucket, 5]: lr, beta1, beta2, eps, weight_decay."""
        rows = [(h.lr, h.beta1, h.beta2, h.eps, h.weight_decay) for h in self._groups]
        return torch.tensor([rows[layer.group] for layer in bucket.layers], dtype=torch.float64)

    def rates(self, device: torch.device) -> Tensor:
        """The learning rate of each layer, float64 [layers]."""
        rates = [self._groups[layer.group].lr for layer in self._layout.layers]
        return send(torch.tensor(rates, dtype=torch.float64), device)


@dataclass(frozen=True)
class Momentum:
    """A bucket's global momentum: the messages that all workers gathered, so one bit per element and the scales.

    Attributes:
        messages: uint8 [workers, message_bytes].
        mask: uint8 [bucket / 8], a bit per element; where it is 0 the momentum is zero whatever its sign bit says.
            None: there are no such elements.
    """

    messages: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class BucketStep:
    """What the parts of one bucket's compressed step have in common.

    Attributes:
        codec: the bucket's.
        hypers: this step's.
        scale: momentum scales of the bucket's layers, [layers of the bucket]; None where layers have 1-bit scales.
        number: of the update, counted from 1; the random rounding of compact state depends on it.
        keep: bool [], whether the step counts, where only the device knows; nothing changes where it is False. None:
            it counts.
    """

    codec: BucketCodec
    hypers: Hypers
    scale: Tensor | None
    number: int
    keep: Tensor | None = None

    def keeping(self, keep: Tensor | None) -> BucketStep:
        return replace(self, keep=keep)


class Backend(Protocol):
    """The contract. `bucket` is one of the layout's; x and grads hold one tensor per layer of it; flat arguments are
    slices of flat state, [bucket]; per-layer ones are [layers of the bucket]. Frozen and fresh variance may be bfloat16
    where the parameters are float32; the fresh one is rounded at random then (`compact.round_bf16_random`)."""

    def codec(self, bucket: Bucket, codec: OneBit) -> BucketCodec:
        """What encodes and decodes this bucket."""

    def quantised_codec(self, bucket: Bucket, bits: Bits) -> QuantisedCodec:
        """What encodes and decodes this bucket's gradients in a quantised warm-up."""

    def gather(self, bucket: Bucket, grads: Sequence[Tensor | None], out: Tensor) -> None:
        """Copy the gradients into `out`, [bucket], zero in the padding; None counts as zeros."""

    def warmup_measure(
        self, bucket: Bucket, x: Sequence[Tensor], g: Gradient, m: Tensor, v: Tensor, hypers: Hypers
    ) -> tuple[lamb.Norms, bool | Tensor]:
        """The norms of the coming warm-up step, and whether the square of g is finite (bool []). Changes nothing."""

    def warmup_apply(
        self,
        bucket: Bucket,
        x: Sequence[Tensor],
        g: Gradient,
        m: Tensor,
        v: Tensor,
        hypers: Hypers,
        step_size: Tensor,
        keep: Tensor | None,
    ) -> None:
        """Take the warm-up step: m, v, then x -= step_size * u, in place, where `keep`, bool [] or None, is not False.

        g is a flat buffer, or one gradient per layer as autograd left it.
        """

    def source(
        self, step: BucketStep, grads: Sequence[Tensor | None], momentum: Momentum | Tensor, mask: Tensor | None
    ) -> Source:
        """The worker's part: what goes into the exchange. Where `mask`, uint8 [bucket / 8] or None, has a 0 the input
        is zero."""

    def measure(
        self,
        step: BucketStep,
        x: Sequence[Tensor],
        now: Momentum,
        before: Momentum | Tensor,
        v_frozen: Tensor,
        v_fresh: Tensor,
        form: lamb.RatioForm,
    ) -> tuple[Tensor, lamb.Norms]:
        """Refresh the variance, in place; return the largest quotients, [layers], and norms: `direction` and `update`
        equal where the weight decay is 0, `x` of no meaning."""

    def apply(self, step: BucketStep, x: Sequence[Tensor], now: Momentum, v_frozen: Tensor, step_size: Tensor) -> None:
        """x -= step_size * (m / (sqrt(v_frozen) + eps) + weight_decay * x), in place."""

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The 2-norm of each, float64 [tensors]."""


class TorchBackend:
    """The contract in plain torch, for any device and both float32 and float64."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._runs = [layout.runs_in(bucket) for bucket in layout.buckets]

    def codec(self, bucket: Bucket, codec: OneBit) -> BucketCodec:
        return BucketCodec(bucket, codec, self._dtype, self._device)

    def quantised_codec(self, bucket: Bucket, bits: Bits) -> QuantisedCodec:
        return QuantisedCodec(bucket, bits, self._dtype, self._device)

    def gather(self, bucket: Bucket, grads: Sequence[Tensor | None], out: Tensor) -> None:
        out.zero_()
        for layer, grad in zip(bucket.layers, grads, strict=True):
            if grad is not None:
                out[layer.start - bucket.start : layer.stop - bucket.start].view(layer.shape).copy_(grad)

    def warmup_measure(
        self, bucket: Bucket, x: Sequence[Tensor], g: Gradient, m: Tensor, v: Tensor, hypers: Hypers
    ) -> tuple[lamb.Norms, bool | Tensor]:
        norms, g = [], flat_gradient(self, bucket, g, m)
        for run, here, layers in self._parts(bucket):
            m_new, v_new = lamb.warmup_moments(g[here], m[here], v[here], hypers.of(run))
            u, norm = lamb.direction(x[layers], m_new, v_new, run, hypers.of(run))
            norms.append((run.norms(x[layers]), norm, run.norms(u) if hypers.of(run).weight_decay else norm))
        return _joined(norms), torch.isfinite(g * g).all()

    def warmup_apply(
        self,
        bucket: Bucket,
        x: Sequence[Tensor],
        g: Gradient,
        m: Tensor,
        v: Tensor,
        hypers: Hypers,
        step_size: Tensor,
        keep: Tensor | None,
    ) -> None:
        g = flat_gradient(self, bucket, g, m)
        for run, here, layers in self._parts(bucket):
            m_new, v_new = lamb.warmup_moments(g[here], m[here], v[here], hypers.of(run))
            m[here], v[here] = chosen(keep, m_new, m[here]), chosen(keep, v_new, v[here])
            u, _ = lamb.direction(x[layers], m_new, v_new, run, hypers.of(run))
            lamb.update(x[layers], chosen(keep, u, 0.0), chosen(keep, step_size[layers], 0.0), run)

    def source(
        self, step: BucketStep, grads: Sequence[Tensor | None], momentum: Momentum | Tensor, mask: Tensor | None
    ) -> Source:
        bucket = step.codec.bucket
        g = torch.empty(bucket.numel, dtype=self._dtype, device=self._device)
        self.gather(bucket, grads, g)
        m = decoded(step.codec, momentum, step.scale)
        for run, here, layers in self._parts(bucket):
            spread = None if step.scale is None else run.spread(step.scale[layers])
            lamb.local_momentum(m[here], g[here], step.hypers.of(run).beta1, spread)
        return TensorSource(g if mask is None else g.mul_(unpack_bits(mask)))

    def measure(
        self,
        step: BucketStep,
        x: Sequence[Tensor],
        now: Momentum,
        before: Momentum | Tensor,
        v_frozen: Tensor,
        v_fresh: Tensor,
        form: lamb.RatioForm,
    ) -> tuple[Tensor, lamb.Norms]:
        codec = step.codec
        m_new, m_old = decoded(codec, now, step.scale), decoded(codec, before, step.scale)
        quotients, norms = [], []
        mask = None if now.mask is None else unpack_bits(now.mask)
        for run, here, layers in self._parts(codec.bucket):
            hyper, frozen = step.hypers.of(run), v_frozen[here].to(self._dtype)
            u, norm = lamb.direction(x[layers], m_new[here], frozen, run, hyper)
            norms.append((norm, norm, run.norms(u) if hyper.weight_decay else norm))
            alive = None if mask is None else mask[here]
            fresh = lamb.refreshed_variance(m_new[here], m_old[here], v_fresh[here].to(self._dtype), alive, hyper)
            quotients.append(lamb.largest_quotient(frozen, fresh, alive, run, hyper, form))
            if v_fresh.dtype is torch.bfloat16:
                fresh = round_bf16_random(fresh, 0, step.number, run.start)
            v_fresh[here] = chosen(step.keep, fresh, v_fresh[here])
        return torch.cat(quotients), _joined(norms)

    def apply(self, step: BucketStep, x: Sequence[Tensor], now: Momentum, v_frozen: Tensor, step_size: Tensor) -> None:
        m = decoded(step.codec, now, step.scale)
        for run, here, layers in self._parts(step.codec.bucket):
            u, _ = lamb.direction(x[layers], m[here], v_frozen[here].to(self._dtype), run, step.hypers.of(run))
            lamb.update(x[layers], chosen(step.keep, u, 0.0), chosen(step.keep, step_size[layers], 0.0), run)

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors])

    def _parts(self, bucket: Bucket) -> list[tuple[Run, slice, slice]]:
        """The runs of a bucket, with where each lies in the bucket's elements and in its layers."""
        return [(run, here, run.layers_in(bucket)) for run, here in self._runs[bucket.index]]


def chosen(keep: Tensor | None, new: Tensor, old: Tensor | float) -> Tensor:
    """`new` where the step counts, else `old`. `keep`: bool [], or None, which stands for True."""
    return new if keep is None else torch.where(keep, new, old)


def flat_gradient(backend: Backend, bucket: Bucket, g: Gradient, like: Tensor) -> Tensor:
    """A gradient as one flat buffer, [bucket], in dtype and on the device of `like`."""
    if isinstance(g, Tensor):
        return g
    flat = like.new_empty(bucket.numel)
    backend.gather(bucket, g, flat)
    return flat


def contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors as kernels take them: those that are not contiguous are copied."""
    return [t if t is None or t.is_contiguous() else t.detach().contiguous() for t in tensors]


def bring_back(changed: Sequence[Tensor | None], x: Sequence[Tensor]) -> None:
    """Bring what changed in the copies that `contiguous` made of parameters back to them."""
    for copy, parameter in zip(changed, x, strict=True):
        if copy is not None and not parameter.is_contiguous():
            parameter.copy_(copy)


def decoded(codec: BucketCodec, momentum: Momentum | Tensor, scale: Tensor | None) -> Tensor:
    """A bucket's momentum as numbers, [bucket]; a tensor is returned as it is."""
    if isinstance(momentum, Tensor):
        return momentum
    m = codec.decode(momentum.messages)
    if scale is not None:
        m /= codec.spread_layers(scale, 1.0)
    return m if momentum.mask is None else m.mul_(unpack_bits(momentum.mask))


def _joined(norms: list[tuple[Any, ...]]) -> lamb.Norms:
    return lamb.Norms(*(torch.cat(parts) for parts in zip(*norms, strict=True)))
