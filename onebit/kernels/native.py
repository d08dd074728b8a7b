"""The native CPU kernels: typed, checked functions over one bucket. Layer counts never show in the number of calls.

Shared arguments:
  plan          `Plan` of the bucket; [numel] below is its number of elements, padding included, [layers] its layers
  hyper         float64 [layers, 5], contiguous: lr, beta1, beta2, eps, weight_decay of each layer's group
  momentum      `Signs`, or float32 [numel] where it is not yet signs
  layer_scale   float32 [layers], the momentum scale s by which sent values were multiplied, or None
  error_factor  float32 [layers], the factor on the errors before they are added, or None
  threads       None: torch.get_num_threads()

Results do not depend on the number of threads or the instruction set, to the bit. Every function raises LayoutError
for an operand of the wrong shape, dtype, device or stride, and releases the interpreter's lock while it works.
The environment variable ONEBIT_ISA forces one of `isas()`; another value raises ConfigError when this is imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from onebit.errors import ConfigError, LayoutError
from onebit.kernels import _native
from onebit.kernels.operands import Int8, Plan, Signs, TensorList, checked, flat_state, rows_of_bits

__all__ = [
    "Int8",
    "Plan",
    "Signs",
    "TensorList",
    "adam_apply",
    "decode",
    "gather",
    "isa",
    "isas",
    "lamb_apply",
    "lamb_measure",
    "lamb_warmup_apply",
    "lamb_warmup_measure",
    "server_commit",
    "server_encode",
    "sum_squares",
    "use_isa",
    "worker_commit",
    "worker_encode",
]

FLOATS = (torch.float32, torch.bfloat16)
ERRORS = (*FLOATS, torch.int8)
_NO_SIGNS = _native.Signs(0, 0, 0, 0)


def isa() -> str:
    """The instruction set in use: "portable", "avx2" or "avx512"."""
    return _native.isa()


def isas() -> list[str]:
    """Those this processor can run, lowest first. The last is used unless told otherwise."""
    return _native.isas()


def use_isa(name: str) -> None:
    """Use another of `isas()` from now on, in the whole process.

    Raises:
        ConfigError: it is none of them.
    """
    try:
        _native.use_isa(name)
    except ValueError as error:
        raise ConfigError(f"{error}; unset ONEBIT_ISA or set it to one of them") from None


if os.environ.get("ONEBIT_ISA"):
    use_isa(os.environ["ONEBIT_ISA"])


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
        *_momentum("momentum", momentum, plan),
        plan.per_layer("layer_scale", layer_scale),
        flat_state("error", error, plan, ERRORS),
        plan.per_layer("error_factor", error_factor),
        _native.Signs(address, stride, 0, plan.mask("alive", alive)),
        sums.data_ptr(),
        kind == "mean",
        _threads(threads),
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
    """error = input - decode(sent), in place, with the input of `worker_encode` computed anew from the same arguments.

    A bfloat16 error is rounded to nearest (drops at most 2^-9 of the value), `Int8` as it says.
    """
    _native.worker_commit(
        plan.native,
        grads.native,
        plan.hyper(hyper),
        *_momentum("momentum", momentum, plan),
        plan.per_layer("layer_scale", layer_scale),
        flat_state("error", error, plan, ERRORS),
        plan.per_layer("error_factor", error_factor),
        sent.native("sent", plan),
        _threads(threads),
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
    sums = torch.empty(plan.blocks[_chunk(plan, chunk)], dtype=torch.float64)
    _native.server_encode(
        plan.native,
        chunk,
        len(received),
        _received(plan, chunk, received, scales, alive),
        checked("error", error, (plan.bucket.chunk,), (torch.float32,)),
        plan.per_layer("error_factor", error_factor),
        reply,
        sums.data_ptr(),
        kind == "mean",
        _threads(threads),
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
    blocks = (plan.blocks[_chunk(plan, chunk)],)
    _native.server_commit(
        plan.native,
        chunk,
        len(received),
        _received(plan, chunk, received, scales, alive),
        checked("error", error, (plan.bucket.chunk,), (torch.float32,)),
        plan.per_layer("error_factor", error_factor),
        _native.Signs(address, 0, checked("reply_scales", reply_scales, blocks, (torch.float32,)), 0),
        _threads(threads),
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
        _threads(threads),
    )


def gather(plan: Plan, tensors: TensorList, out: Tensor, *, threads: int | None = None) -> None:
    """Copy one tensor per layer into out, float32 [numel]; None counts as zeros, the padding becomes zero."""
    _native.gather(plan.native, tensors.native, plan.flat("out", out), _threads(threads))


def lamb_measure(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    now: Signs,
    before: Signs | Tensor,
    v_frozen: Tensor,
    v_fresh: Tensor,
    *,
    step: int,
    seed: int = 0,
    layer_scale: Tensor | None = None,
    form: Literal["sqrt", "variance"] = "sqrt",
    threads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Refresh the variance, in place, and measure what the ratio needs (`lamb.next_ratio`).

    g = (m - beta1 * m_before) / (1 - beta1); v_fresh = v_fresh * beta2 + (1 - beta2) * g * g where alive.

    Args:
        x: the parameters, one per layer; read only where the weight decay is not 0.
        now, before: the momentum after and before this step's exchange, each with its mask.
        v_frozen: float32 or bfloat16 [numel].
        v_fresh: float32 or bfloat16 [numel]; a bfloat16 one is rounded at random, by (seed, step, index of the
            element in the flat order), so it must not differ between workers.

    Returns:
        [layers] each: the largest quotient (float32; 0 where nothing is alive), and the sums of squares of
        m / (sqrt(v_frozen) + eps) and of that + weight_decay * x (float64; both 0 where the weight decay is 0).
    """
    layers = len(plan.sizes)
    largest = torch.empty(layers)
    direction, update = torch.empty(2, layers, dtype=torch.float64)
    _native.lamb_measure(
        plan.native,
        plan.hyper(hyper),
        x.native,
        now.native("now", plan),
        *_momentum("before", before, plan),
        plan.per_layer("layer_scale", layer_scale),
        flat_state("v_frozen", v_frozen, plan, FLOATS),
        flat_state("v_fresh", v_fresh, plan, FLOATS),
        form == "variance",
        seed,
        step,
        plan.bucket.start,
        largest.data_ptr(),
        direction.data_ptr(),
        update.data_ptr(),
        _threads(threads),
    )
    return largest, direction, update


def lamb_apply(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    now: Signs,
    v_frozen: Tensor,
    step: Tensor,
    *,
    layer_scale: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """x -= step * (m / (sqrt(v_frozen) + eps) + weight_decay * x), in place.

    Args:
        step: float32 or float64 [layers], learning rate times coefficient.
    """
    steps = step.to(torch.float32).contiguous()
    _native.lamb_apply(
        plan.native,
        plan.hyper(hyper),
        _all_there("x", x).native,
        now.native("now", plan),
        plan.per_layer("layer_scale", layer_scale),
        flat_state("v_frozen", v_frozen, plan, FLOATS),
        plan.per_layer("step", steps),
        _threads(threads),
    )
    x.touch()


def adam_apply(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    now: Signs,
    v_frozen: Tensor,
    *,
    layer_scale: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """x = x * (1 - lr * weight_decay) - lr * m / (sqrt(v_frozen) + eps), in place."""
    _native.adam_apply(
        plan.native,
        plan.hyper(hyper),
        _all_there("x", x).native,
        now.native("now", plan),
        plan.per_layer("layer_scale", layer_scale),
        flat_state("v_frozen", v_frozen, plan, FLOATS),
        _threads(threads),
    )
    x.touch()


def lamb_warmup_measure(
    plan: Plan, hyper: Tensor, x: TensorList, g: Tensor, m: Tensor, v: Tensor, *, threads: int | None = None
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """What the warm-up's coefficients need. Changes nothing, so that a step can still be skipped.

    Args:
        g, m, v: float32 [numel]: averaged gradient; momentum and variance before this step.

    Returns:
        float64 [layers] each: the sums of squares of m' / (sqrt(v') + eps), of that + weight_decay * x, and of x,
        m' and v' being this step's; and whether g is finite.
    """
    sums = torch.empty(3, len(plan.sizes), dtype=torch.float64)
    finite = _native.warmup_measure(
        plan.native,
        plan.hyper(hyper),
        x.native,
        plan.flat("g", g),
        plan.flat("m", m),
        plan.flat("v", v),
        sums[0].data_ptr(),
        sums[1].data_ptr(),
        sums[2].data_ptr(),
        _threads(threads),
    )
    return sums[0], sums[1], sums[2], finite


def lamb_warmup_apply(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """m = m * beta1 + g * (1 - beta1); v = v * beta2 + (1 - beta2) * g * g; x -= step * u, all in place.

    Args:
        step: float32 or float64 [layers], learning rate times coefficient.
    """
    steps = step.to(torch.float32).contiguous()
    _native.warmup_apply(
        plan.native,
        plan.hyper(hyper),
        _all_there("x", x).native,
        plan.flat("g", g),
        plan.flat("m", m),
        plan.flat("v", v),
        plan.per_layer("step", steps),
        _threads(threads),
    )
    x.touch()


def sum_squares(tensors: Sequence[Tensor | None], *, threads: int | None = None) -> Tensor:
    """The sum of squares of each tensor, float64 [tensors]. Finite exactly where all of its elements are."""
    listed = TensorList("tensors", tensors)
    sums = torch.empty(len(listed.sizes), dtype=torch.float64)
    _native.sum_squares(listed.native, listed.sizes, sums.data_ptr(), _threads(threads))
    return sums


def _threads(threads: int | None) -> int:
    count = torch.get_num_threads() if threads is None else threads
    if count < 1:
        raise ConfigError(f"threads is {count}; it must be at least 1, or None for torch's number")
    return count


def _momentum(name: str, momentum: Signs | Tensor, plan: Plan) -> tuple[_native.Signs, int]:
    if isinstance(momentum, Tensor):
        return _NO_SIGNS, plan.flat(name, momentum)
    return momentum.native(name, plan), 0


def _chunk(plan: Plan, chunk: int) -> int:
    if not 0 <= chunk < plan.bucket.workers:
        raise LayoutError(f"chunk is {chunk}; the bucket has {plan.bucket.workers} chunks")
    return chunk


def _received(plan: Plan, chunk: int, bits: Tensor, scales: Tensor, alive: Tensor | None) -> _native.Signs:
    if bits.dim() != 2 or not len(bits):
        raise LayoutError(f"received has shape {list(bits.shape)}; it must be [messages, {plan.bucket.chunk // 8}]")
    address, stride = rows_of_bits("received", bits, len(bits), plan)
    shape = (len(bits), plan.blocks[_chunk(plan, chunk)])
    return _native.Signs(address, stride, checked("scales", scales, shape, (torch.float32,)), plan.mask("alive", alive))


def _all_there(name: str, tensors: TensorList) -> TensorList:
    missing = [i for i, tensor in enumerate(tensors.tensors) if tensor is None]
    if missing:
        raise LayoutError(f"{name}[{missing[0]}] is None; every layer needs a parameter to update")
    return tensors
