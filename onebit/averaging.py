"""Full-precision means over the workers: what the warm-up stage and uncompressed optimizers exchange."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from onebit.checks import check_in
from onebit.comm import Comm

Transport = Literal["fp32", "bf16"]


def mean_over_workers(flat: Tensor, comm: Comm, transport: Transport) -> None:
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
        params: the same parameters in the same order on all workers.
        transport: as in `mean_over_workers`.
    """
    params = list(params)
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).float() for p in params])
    mean_over_workers(flat, comm, check_in("transport", transport, ("fp32", "bf16")))
    for p, part in zip(params, torch.split(flat, [p.numel() for p in params]), strict=True):
        p.grad = part.view(p.shape).to(p.dtype)
