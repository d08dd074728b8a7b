"""Native kernels of the exchange: both encoders, both commits, and plain conversions. Used through `native`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from onebit.kernels import _native
from onebit.kernels.compact import Int8
from onebit.kernels.operands import (
    ERRORS,
    Plan,
    Signs,
    TensorList,
    checked,
    checked_chunk,
    flat_state,
    momentum_operand,
    received_signs,
    rows_of_bits,
    thread_count,
)


def worker_encode(
    plan: Plan,
    grads: TensorList,
    hyper: Tensor,
    momentum: Signs | Tensor,
    error: Tensor | Int8,
    bits: Tensor,
    *,
    alive: Tensor | None = None,
    layer_scale: Tensor | None = None,
    error_factor: Tensor | None = None,
    kind: Literal["rms", "mean"] = "rms",
    threads: int | None = None,
) -> tuple[Tensor, int]:
    """The signs of input = (g * (1 - beta1) + m * beta1) * layer_scale + error * error_factor, and what scales need.

    Changes `bits`, uint8 [workers, chunk / 8]; the padding's bits become 1. `momentum` has a mask of its own: an
    element that came alive since has momentum zero.

    Args:
        grads: one per layer.
        error: float32 or bfloat16 [numel], or `Int8`.
        alive: uint8 [numel / 8]; an element whose bit is 0 counts as zero (as a product: inf and nan still show).

    Returns:
        float64 [blocks]: sums of squares of the input, or of magnitudes for kind="mean"; and the number of dead
        elements whose input is not zero.
    """
    address, stride = rows_of_bits("bits", bits, plan.bucket.workers, plan)
    sums = torch.empty(sum(plan.blocks), dtype=torch.float64)
    asking = _native.worker_encode(
        plan.native,
        grads.native,
        plan.hyper(hyper),
        *momentum_operand("momentum", momentum, plan),
        plan.per_layer("layer_scale", layer_scale),
        flat_state("error", error, plan, ERRORS),
        plan.per_layer("error_factor", error_factor),
        _native.Signs(address, stride, 0, plan.mask("alive", alive)),
        sums.data_ptr(),
        kind == "mean",
        thread_count(threads),
    )
    return sums, asking


def worker_commit(
    plan: Plan,
    grads: TensorList,
    hyper: Tensor,
    momentum: Signs | Tensor,
    error: Tensor | Int8,
    sent: Signs,
    *,
    layer_scale: Tensor | None = None,
    error_factor: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """error = input - decode(sent), in place, with the input of `worker_encode` computed anew.

    Gradients, momentum and error must be what they were then: keep the old momentum until this has run.

    A bfloat16 error is rounded to nearest (drops at most 2^-9 of the value), `Int8` as it says.
    """
    _native.worker_commit(
        plan.native,
        grads.native,
        plan.hyper(hyper),
        *momentum_operand("momentum", momentum, plan),
        plan.per_layer("layer_scale", layer_scale),
        flat_state("error", error, plan, ERRORS),
        plan.per_layer("error_factor", error_factor),
        sent.native("sent", plan),
        thread_count(threads),
    )


def server_encode(
    plan: Plan,
    chunk: int,
    received: Tensor,
    scales: Tensor,
    error: Tensor,
    bits: Tensor,
    *,
    alive: Tensor | None = None,
    error_factor: Tensor | None = None,
    kind: Literal["rms", "mean"] = "rms",
    threads: int | None = None,
) -> Tensor:
    """The signs of A = mean of the decoded messages + error * error_factor, for the chunk this worker serves.

    Changes `bits`, uint8 [chunk / 8].

    Args:
        received: uint8 [messages, chunk / 8], the bits of each worker's message; rows may be part of larger ones.
        scales: float32 [messages, blocks of the chunk].
        error: float32 [chunk].
        alive: uint8 [numel / 8], of the whole bucket.

    Returns:
        float64 [blocks of the chunk]: sums of squares of A, or of magnitudes for kind="mean".
    """
    reply = _native.Signs(checked("bits", bits, (plan.bucket.chunk // 8,), (torch.uint8,)), 0, 0, 0)
    sums = torch.empty(plan.blocks[checked_chunk(plan, chunk)], dtype=torch.float64)
    _native.server_encode(
        plan.native,
        chunk,
        len(received),
        received_signs(plan, chunk, received, scales, alive),
        checked("error", error, (plan.bucket.chunk,), (torch.float32,)),
        plan.per_layer("error_factor", error_factor),
        reply,
        sums.data_ptr(),
        kind == "mean",
        thread_count(threads),
    )
    return sums


def server_commit(
    plan: Plan,
    chunk: int,
    received: Tensor,
    scales: Tensor,
    error: Tensor,
    bits: Tensor,
    reply_scales: Tensor,
    *,
    alive: Tensor | None = None,
    error_factor: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """error = A - decode(reply), in place, with the A of `server_encode` computed anew.

    Args:
        bits, reply_scales: the reply, uint8 [chunk / 8] and float32 [blocks of the chunk].
    """
    address = checked("bits", bits, (plan.bucket.chunk // 8,), (torch.uint8,))
    blocks = (plan.blocks[checked_chunk(plan, chunk)],)
    _native.server_commit(
        plan.native,
        chunk,
        len(received),
        received_signs(plan, chunk, received, scales, alive),
        checked("error", error, (plan.bucket.chunk,), (torch.float32,)),
        plan.per_layer("error_factor", error_factor),
        _native.Signs(address, 0, checked("reply_scales", reply_scales, blocks, (torch.float32,)), 0),
        thread_count(threads),
    )


def decode(
    plan: Plan, signs: Signs, out: Tensor, *, layer_scale: Tensor | None = None, threads: int | None = None
) -> None:
    """out = sign * scale / layer_scale, float32 [numel]; zero in the padding and where dead."""
    _native.decode(
        plan.native,
        signs.native("signs", plan),
        plan.per_layer("layer_scale", layer_scale),
        plan.flat("out", out),
        thread_count(threads),
    )


def gather(plan: Plan, tensors: TensorList, out: Tensor, *, threads: int | None = None) -> None:
    """Copy one tensor per layer into out, float32 [numel]; None counts as zeros, the padding becomes zero."""
    _native.gather(plan.native, tensors.native, plan.flat("out", out), thread_count(threads))


def sum_squares(tensors: Sequence[Tensor | None], *, threads: int | None = None) -> Tensor:
    """The sum of squares of each tensor, float64 [tensors]. Finite exactly where all of its elements are."""
    listed = TensorList("tensors", tensors)
    sums = torch.empty(len(listed.sizes), dtype=torch.float64)
    _native.sum_squares(listed.native, listed.sizes, sums.data_ptr(), thread_count(threads))
    return sums
