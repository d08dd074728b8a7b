"""Means of gradients over the workers, in full precision or as integers: what the warm-up stage exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from onebit.checks import check_in
from onebit.comm import Comm
from onebit.exchange import BucketMean, Exchange, write_error
from onebit.kernels.compact import Int8
from onebit.layout import FlatLayout
from onebit.quantised import Bits, QuantisedCodec
from onebit.sharding import is_sharded, local
from onebit.two_level import build_exchange

FullTransport = Literal["fp32", "bf16"]
Transport = Literal["fp32", "bf16", "int8", "int4"]
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
"""Transports that send integers, with error feedback."""


def mean_over_workers(flat: Tensor, comm: Comm, transport: FullTransport) -> None:
    """Replace a flat buffer by its mean over the workers, in place.

    Args:
        flat: fp32 or fp64, any length.
        transport: "fp32" sends the buffer as it is; "bf16" sends and sums 16-bit values.
    """
    if comm.size > 1:  # by one it would be a trip through memory for nothing
        flat /= comm.size
    if transport == "bf16":
        low = flat.to(torch.bfloat16)
        comm.all_reduce(low)
        flat.copy_(low)
    else:
        comm.all_reduce(flat)


def average_gradients(params: Iterable[Tensor], comm: Comm, transport: Transport = "bf16") -> None:
    """Replace every `.grad` by its mean over the workers, as one buffer. For optimizers that do not average.

    A parameter without a gradient on this worker counts as zero and gets one.

    Args:
        params: the same parameters in the same order on all workers; of DTensors, this process's shards.
        transport: as in `mean_over_workers`.

    Raises:
        ConfigError: another transport.
    """
    check_in("transport", transport, get_args(FullTransport))
    params = list(params)
    wide = torch.float64 if any(p.dtype is torch.float64 for p in params) else torch.float32
    held = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([local(g).reshape(-1).to(wide) for g in held])
    mean_over_workers(flat, comm, "fp32" if transport == "fp32" else "bf16")
    for p, g, part in zip(params, held, torch.split(flat, [local(g).numel() for g in held]), strict=True):
        mean = part.view(local(g).shape).to(p.dtype)
        if is_sharded(g):
            local(g).copy_(mean)
        p.grad = g if is_sharded(g) else mean


class FullMean:
    """The mean of one bucket's gradients in full precision, made at once, in place; nothing else is left to do."""

    def __init__(self, flat: Tensor, comm: Comm, transport: FullTransport) -> None:
        with comm.clock("wire"):
            mean_over_workers(flat, comm, transport)

    def serve(self) -> None:
        """There is no second phase of ours: an all_reduce is both."""

    def arrive(self) -> None:
        """It is there."""


class QuantisedMean:
    """Means of gradients sent as 8- or 4-bit integers, with error feedback on both sides of the usual three phases.

    Attributes:
        exchange: owns the errors, in units of the gradient.
    """

    def __init__(self, layout: FlatLayout, codecs: Sequence[QuantisedCodec], comm: Comm) -> None:
        first = codecs[0]
        self.exchange: Exchange[QuantisedCodec] = build_exchange(layout, comm, first.dtype, first.device, codecs)
        self._under_way: list[BucketMean] = []

    def take(self, means: Sequence[BucketMean], out: Tensor) -> None:
        """Write the means of all buckets, started and served, into `out`, [layout.numel]. Then `commit`, or nothing."""
        for mean in means:
            mean.wait(out[mean.bucket.slice])
        self._under_way = list(means)

    def commit(self, keep: Tensor | None) -> None:
        """Keep what was not sent, if the step counts. `keep`: bool [] where only the device knows."""
        for mean in self._under_way:
            mean.commit(keep)
        self._under_way = []  # messages of this step are of no use in the next

    def hand_over(self, to: Exchange[Any], factor: Tensor) -> None:
        """What was not sent yet becomes the errors of another exchange of the same layout, times `factor`, [numel]."""
        mine, left = to.own_part(factor), self.exchange.worker_error
        sizes = [error.data.numel() if isinstance(error, Int8) else error.numel() for error in to.errors]
        for error, codec, unsent in zip(to.errors, to.own_codecs, torch.split(left * mine, sizes), strict=True):
            write_error(error, unsent, None, codec.alive)
        torch.mul(self.exchange.server_error, to.served_part(factor), out=to.server_error)
