"""The work on one bucket in Triton kernels: `backend.TorchBackend`'s contract for float32 parameters on an accelerator.

The number of launches depends on buckets, never on layers, and nothing here reads a value from the device: sums,
scales, headers and verdicts are tensors on it. As in `native_backend.py` the worker's input is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from onebit import lamb
from onebit.backend import (
    BucketStep,
    Gradient,
    Hypers,
    Momentum,
    TorchBackend,
    bring_back,
    contiguous,
    flat_gradient,
)
from onebit.chunk_codec import ChunkCodec
from onebit.codec import BucketCodec, OneBit
from onebit.exchange import Source
from onebit.kernels import triton as kernels
from onebit.kernels.compact import Int8
from onebit.layout import Bucket, FlatLayout
from onebit.quantised import Bits, QuantisedCodec


class TritonCodec(BucketCodec):
    """The codec of one bucket with the kernels' view of it."""

    def __init__(self, bucket: Bucket, codec: OneBit, device: torch.device, tile: int = kernels.TILE) -> None:
        super().__init__(bucket, codec, torch.float32, device)
        blocks = [[(a, b - a) for a, b in spans] for spans in self.spans]
        self.plan = kernels.Plan(bucket, blocks, self.head_bytes, self.message_bytes, device, tile)

    def set_alive(self, alive: Tensor | None) -> None:
        super().set_alive(alive)
        self.all_live = torch.cat(self.live)

    def all_scales(self, messages: Tensor) -> Tensor:
        return messages.contiguous().view(torch.float32).view(-1).index_select(0, self.plan.places)

    def put_scales(self, messages: Tensor, scales: Tensor) -> None:
        """Write the scales of all blocks, [blocks of the bucket], into new messages, one per chunk."""
        messages.view(torch.float32).view(-1).index_copy_(0, self.plan.places, scales)

    def serve(self, received: Tensor, chunk: int, error: Tensor, error_factor: Tensor | None) -> Tensor:
        reply = torch.zeros(self.message_bytes, dtype=torch.uint8, device=received.device)
        operands = (received.contiguous(), error, error_factor, self.packed_alive, reply)
        sums = kernels.server_encode(self.plan, chunk, *operands, self.codec.kind)
        self.scales(reply, chunk).copy_(self.scale_from(sums, self.live[chunk]))
        if self.packed_alive is not None:
            self.header(reply).copy_(self.header(received).sum())
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
        operands = (received.contiguous(), error, error_factor, self.packed_alive, reply)
        kernels.server_commit(self.plan, chunk, *operands, keep)


class TritonSource:
    """The worker's part of 1-bit LAMB and 1-bit Adam, computed where it is needed."""

    def __init__(self, worker: kernels.Worker, dense: Callable[[], Source]) -> None:
        """`dense`: makes the source that holds the same values."""
        self._worker, self._dense = worker, dense

    def values(self, codec: ChunkCodec) -> Tensor:
        return self._dense().values(codec)

    def encode(self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None) -> Tensor:
        assert isinstance(codec, TritonCodec)
        shape = (codec.bucket.workers, codec.message_bytes)
        messages = torch.zeros(shape, dtype=torch.uint8, device=codec.device)
        sums, asking = self._worker.encode(error, error_factor, codec.packed_alive, messages, codec.codec.kind)
        if codec.codec.scale == "bucket":
            scales = codec.scale_from(sums.sum(), codec.all_live.sum()).expand(len(sums))
        else:
            scales = codec.scale_from(sums, codec.all_live)
        codec.put_scales(messages, scales)
        if codec.packed_alive is not None:
            codec.header(messages).copy_(asking)
        return messages

    def commit(
        self, codec: ChunkCodec, error: Tensor | Int8, error_factor: Tensor | None, sent: Tensor, keep: Tensor | None
    ) -> None:
        self._worker.commit(error, error_factor, codec.packed_alive, sent, keep)


class TritonBackend:
    """The contract in Triton kernels; see `backend.Backend`. `tile`: elements that one program handles."""

    def __init__(self, layout: FlatLayout, device: torch.device, tile: int = kernels.TILE) -> None:
        self._device, self._tile = device, tile
        self._torch = TorchBackend(layout, torch.float32, device)
        whole = OneBit(scale="bucket")  # the warm-up needs no blocks; any cut will do
        self._plans = [self.codec(bucket, whole).plan for bucket in layout.buckets]

    def codec(self, bucket: Bucket, codec: OneBit) -> TritonCodec:
        return TritonCodec(bucket, codec, self._device, self._tile)

    def quantised_codec(self, bucket: Bucket, bits: Bits) -> QuantisedCodec:
        return QuantisedCodec(bucket, bits, torch.float32, self._device)

    def gather(self, bucket: Bucket, grads: Sequence[Tensor | None], out: Tensor) -> None:
        plan = self._plans[bucket.index]
        kernels.gather(plan, _listed("gradient", grads, plan), out)

    def warmup_measure(
        self, bucket: Bucket, x: Sequence[Tensor], g: Gradient, m: Tensor, v: Tensor, hypers: Hypers
    ) -> tuple[lamb.Norms, Tensor]:
        plan = self._plans[bucket.index]
        direction, update, weight, finite = kernels.warmup_measure(
            plan, hypers.table(bucket), _listed("parameter", x, plan), flat_gradient(self, bucket, g, m), m, v
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
        plan = self._plans[bucket.index]
        listed = _listed("parameter", x, plan)
        kernels.warmup_apply(
            plan, hypers.table(bucket), listed, flat_gradient(self, bucket, g, m), m, v, step_size, keep
        )
        bring_back(listed.tensors, x)

    def source(
        self, step: BucketStep, grads: Sequence[Tensor | None], momentum: Momentum | Tensor, mask: Tensor | None
    ) -> Source:
        codec = _own(step)
        plan, table = codec.plan, step.hypers.table(codec.bucket)
        before = _kernel_view("momentum", codec, momentum)
        worker = kernels.Worker(plan, _listed("gradient", grads, plan), table, before, step.scale, mask)
        return TritonSource(worker, partial(self._torch.source, step, grads, momentum, mask))

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
        plan, table = codec.plan, step.hypers.table(codec.bucket)
        momenta = (_signs("now", codec, now), _kernel_view("before", codec, before))
        largest, direction, update = kernels.lamb_measure(
            plan,
            table,
            _listed("parameter", x, plan),
            *momenta,
            step.scale,
            v_frozen,
            v_fresh,
            form,
            step.number,
            step.keep,
        )
        norm = update.sqrt()
        return largest, lamb.Norms(norm, direction.sqrt(), norm)

    def apply(self, step: BucketStep, x: Sequence[Tensor], now: Momentum, v_frozen: Tensor, step_size: Tensor) -> None:
        codec = _own(step)
        listed = _listed("parameter", x, codec.plan)
        table, signs = step.hypers.table(codec.bucket), _signs("now", codec, now)
        kernels.apply(codec.plan, table, listed, signs, step.scale, v_frozen, step_size, step.keep)
        bring_back(listed.tensors, x)

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._torch.norms(tensors)


def _own(step: BucketStep) -> TritonCodec:
    assert isinstance(step.codec, TritonCodec)
    return step.codec


def _signs(name: str, codec: TritonCodec, momentum: Momentum) -> kernels.Signs:
    return kernels.Signs(name, momentum.messages.contiguous(), momentum.mask, codec.plan)


def _kernel_view(name: str, codec: TritonCodec, momentum: Momentum | Tensor) -> kernels.Signs | Tensor:
    return momentum if isinstance(momentum, Tensor) else _signs(name, codec, momentum)


def _listed(name: str, tensors: Sequence[Tensor | None], plan: kernels.Plan) -> kernels.TensorList:
    """The kernels' view of one tensor per layer."""
    return kernels.TensorList(name, contiguous(tensors), plan)
