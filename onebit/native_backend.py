"""The work on one bucket in compiled code: `backend.TorchBackend`'s contract for float32 parameters on the CPU.

Nothing of the size of the bucket is allocated but the messages. The worker's input is never stored: encoding and
committing compute it from gradients, momentum bits and error, which stay as they are in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from onebit import lamb
from onebit.backend import BucketStep, Gradient, Hypers, Momentum, TorchBackend, bring_back, contiguous
from onebit.chunk_codec import ChunkCodec
from onebit.codec import BucketCodec, OneBit
from onebit.exchange import Source
from onebit.kernels import native
from onebit.kernels.compact import Int8
from onebit.layout import Bucket, FlatLayout
from onebit.quantised import Bits, QuantisedCodec

CPU = torch.device("cpu")


class NativeCodec(BucketCodec):
    """The codec of one bucket with the kernels' view of it."""

    def __init__(self, bucket: Bucket, codec: OneBit) -> None:
        super().__init__(bucket, codec, torch.float32, CPU)
        self.plan = native.Plan(bucket, [[(a, b - a) for a, b in spans] for spans in self.spans])

    def decode(self, messages: Tensor) -> Tensor:
        return self.decode_into(messages, torch.empty(self.bucket.numel))

    def decode_into(self, messages: Tensor, out: Tensor) -> Tensor:
        native.decode(self.plan, self.signs(messages, self.packed_alive), out)
        return out

    def encode_chunks(self, x: Tensor, chunks: range) -> Tensor:
        """What a server does with a message of zeros, for each chunk."""
        messages = torch.zeros(len(chunks), self.message_bytes, dtype=torch.uint8)
        found = []
        for message, chunk, row in zip(messages, chunks, x.view(len(chunks), -1), strict=True):
            nothing = self._nothing(chunk)
            bits, alive = self.bits(message), self.packed_alive
            found.append(native.server_encode(self.plan, chunk, *nothing, row, bits, alive=alive, kind=self.codec.kind))
        live = [self.live[chunk] for chunk in chunks]
        if self.codec.scale == "bucket":
            scale = self.scale_from(torch.cat(found).sum(), torch.cat(live).sum())
            scales = [scale.expand(len(part)) for part in live]
        else:
            scales = [self.scale_from(sums, count) for sums, count in zip(found, live, strict=True)]
        for message, chunk, scale in zip(messages, chunks, scales, strict=True):
            self.scales(message, chunk).copy_(scale)
        return messages

    def subtract_chunks(self, x: Tensor, messages: Tensor, chunks: range) -> Tensor:
        for message, chunk, row in zip(messages, chunks, x.view(len(chunks), -1), strict=True):
            scales, alive = self.scales(message, chunk).contiguous(), self.packed_alive
            native.server_commit(self.plan, chunk, *self._nothing(chunk), row, self.bits(message), scales, alive=alive)
        return x

    def _nothing(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Bits and scales of one message for a chunk that decodes to zeros."""
        return torch.zeros(1, self.bucket.chunk // 8, dtype=torch.uint8), torch.zeros(1, self.blocks[chunk])

    def serve(self, received: Tensor, chunk: int, error: Tensor, error_factor: Tensor | None) -> Tensor:
        reply = torch.zeros(self.message_bytes, dtype=torch.uint8)
        sums = native.server_encode(
            self.plan,
            chunk,
            self.bits(received),
            self._received_scales(received, chunk),
            error,
            self.bits(reply),
            alive=self.packed_alive,
            error_factor=error_factor,
            kind=self.codec.kind,
        )
        self.scales(reply, chunk).copy_(self.scale_from(sums, self.live[chunk]))
        self.header(reply)[...] = self.header(received).sum()
        return reply

    def commit_served(
        self,
        received: Tensor,
        chunk: int,
        error: Tensor,
        error_factor: Tensor | None,
        reply: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        _here(keep)
        native.server_commit(
            self.plan,
            chunk,
            self.bits(received),
            self._received_scales(received, chunk),
            error,
            self.bits(reply),
            self.scales(reply, chunk).contiguous(),
            alive=self.packed_alive,
            error_factor=error_factor,
        )

    def signs(self, messages: Tensor, packed_mask: Tensor | None) -> native.Signs:
        """The kernels' view of one message per chunk."""
        return native.Signs(self.bits(messages), self.all_scales(messages), packed_mask)

    def _received_scales(self, received: Tensor, chunk: int) -> Tensor:
        return received[:, : self.head_bytes].view(torch.float32)[:, 1 : 1 + self.blocks[chunk]].contiguous()


class NativeQuantisedCodec(QuantisedCodec):
    """The same with compiled conversions."""

    def __init__(self, bucket: Bucket, bits: Bits) -> None:
        super().__init__(bucket, bits, torch.float32, CPU)

    def _quantise(self, x: Tensor, chunk: int, integers: Tensor, scales: Tensor) -> None:
        native.quantise(x, self.starts[chunk], self.levels, integers, scales)

    def _dequantise(self, out: Tensor, chunk: int, integers: Tensor, scales: Tensor, sign: Literal[1, -1]) -> None:
        native.dequantise(out, self.starts[chunk], integers, scales, subtract=sign == -1)


class NativeSource:
    """The worker's part of 1-bit LAMB and 1-bit Adam, computed where it is needed."""

    def __init__(
        self,
        codec: NativeCodec,
        grads: native.TensorList,
        hyper: Tensor,
        momentum: native.Signs | Tensor,
        scale: Tensor | None,
    ) -> None:
        self._input = (codec.plan, grads, hyper, momentum)
        self._scale = scale

    def values(self, codec: ChunkCodec) -> Tensor:
        """What a commit leaves in an error that was zero, after a message of zeros."""
        assert isinstance(codec, NativeCodec)
        values = torch.zeros(codec.bucket.numel)
        nothing = torch.zeros(codec.bucket.workers, codec.message_bytes, dtype=torch.uint8)
        native.worker_commit(*self._input, values, codec.signs(nothing, None), layer_scale=self._scale)
        return values

    def encode(self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None) -> Tensor:
        assert isinstance(codec, NativeCodec)
        messages = torch.zeros(codec.bucket.workers, codec.message_bytes, dtype=torch.uint8)
        sums, asking = native.worker_encode(
            *self._input,
            error,
            codec.bits(messages),
            alive=codec.packed_alive,
            layer_scale=self._scale,
            error_factor=error_factor,
            kind=codec.codec.kind,
        )
        if codec.codec.scale == "bucket":
            scale = codec.scale_from(sums.sum(), torch.cat(codec.live).sum())
            scales = scale.expand(len(sums))
        else:
            scales = codec.scale_from(sums, torch.cat(codec.live))
        for chunk, part in enumerate(torch.split(scales, codec.blocks)):
            codec.scales(messages[chunk], chunk).copy_(part)
        codec.header(messages)[:] = asking
        return messages

    def commit(
        self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None, sent: Tensor, keep: Tensor | None
    ) -> None:
        _here(keep)
        assert isinstance(codec, NativeCodec)
        signs = codec.signs(sent, codec.packed_alive)
        native.worker_commit(*self._input, error, signs, layer_scale=self._scale, error_factor=error_factor)


class NativeBackend:
    """The contract in compiled code; see `backend.Backend`."""

    def __init__(self, layout: FlatLayout) -> None:
        self._torch = _Dense(self, layout)
        whole = OneBit(scale="bucket")  # the warm-up needs no blocks; any cut will do
        self._plans = [NativeCodec(bucket, whole).plan for bucket in layout.buckets]

    def codec(self, bucket: Bucket, codec: OneBit) -> NativeCodec:
        return NativeCodec(bucket, codec)

    def quantised_codec(self, bucket: Bucket, bits: Bits) -> NativeQuantisedCodec:
        return NativeQuantisedCodec(bucket, bits)

    def gather(self, bucket: Bucket, grads: Sequence[Tensor | None], out: Tensor) -> None:
        plan = self._plans[bucket.index]
        native.gather(plan, _listed("gradient", grads, plan), out)

    def warmup_measure(
        self, bucket: Bucket, x: Sequence[Tensor], g: Gradient, m: Tensor, v: Tensor, hypers: Hypers
    ) -> tuple[lamb.Norms, bool]:
        plan = self._plans[bucket.index]
        direction, update, weight, finite = native.warmup_measure(
            plan, hypers.table(bucket), _listed("parameter", x, plan), _gradient(g, plan), m, v
        )
        return lamb.Norms(weight.sqrt(), direction.sqrt(), update.sqrt()), finite

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
        _here(keep)
        plan = self._plans[bucket.index]
        listed = _listed("parameter", x, plan)
        native.warmup_apply(plan, hypers.table(bucket), listed, _gradient(g, plan), m, v, step_size)
        bring_back(listed.tensors, x)

    def source(
        self, step: BucketStep, grads: Sequence[Tensor | None], momentum: Momentum | Tensor, mask: Tensor | None
    ) -> Source:
        if mask is not None:  # a user's mask; `compressed.py` says so in the log
            return self._torch.source(step, grads, momentum, mask)
        codec = _own(step)
        listed = _listed("gradient", grads, codec.plan)
        table = step.hypers.table(codec.bucket)
        return NativeSource(codec, listed, table, _kernel_view(codec, momentum), step.scale)

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
        codec = _own(step)
        largest, direction, update = native.lamb_measure(
            codec.plan,
            step.hypers.table(codec.bucket),
            _listed("parameter", x, codec.plan),
            codec.signs(now.messages, now.mask),
            _kernel_view(codec, before),
            v_frozen,
            v_fresh,
            step=step.number,
            layer_scale=step.scale,
            form=form,
        )
        return largest, lamb.Norms(update, direction.sqrt(), update.sqrt())

    def apply(self, step: BucketStep, x: Sequence[Tensor], now: Momentum, v_frozen: Tensor, step_size: Tensor) -> None:
        codec = _own(step)
        listed = _listed("parameter", x, codec.plan)
        signs, table = codec.signs(now.messages, now.mask), step.hypers.table(codec.bucket)
        native.apply(codec.plan, table, listed, signs, v_frozen, step_size, layer_scale=step.scale)
        bring_back(listed.tensors, x)

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        return native.sum_squares(contiguous(tensors)).sqrt_()


class _Dense(TorchBackend):
    """The torch back-end, for inputs whose values are wanted; gradients are gathered by the kernel."""

    def __init__(self, native_: NativeBackend, layout: FlatLayout) -> None:
        super().__init__(layout, torch.float32, CPU)
        self._native = native_

    def gather(self, bucket: Bucket, grads: Sequence[Tensor | None], out: Tensor) -> None:
        self._native.gather(bucket, grads, out)


def _own(step: BucketStep) -> NativeCodec:
    _here(step.keep)
    assert isinstance(step.codec, NativeCodec)
    return step.codec


def _here(keep: Tensor | None) -> None:
    """On the CPU the verdict on a step is known before anything is changed."""
    if keep is not None:
        raise AssertionError("the native kernels were given a verdict to look at; the host must look at it")


def _gradient(g: Gradient, plan: native.Plan) -> Tensor | native.TensorList:
    return g if isinstance(g, Tensor) else _listed("gradient", g, plan)


def _kernel_view(codec: NativeCodec, momentum: Momentum | Tensor) -> native.Signs | Tensor:
    if isinstance(momentum, Tensor):
        return momentum
    return codec.signs(momentum.messages, momentum.mask)


def _listed(name: str, tensors: Sequence[Tensor | None], plan: native.Plan) -> native.TensorList:
    """The kernels' view of one tensor per layer."""
    return native.TensorList(name, contiguous(tensors), plan)
