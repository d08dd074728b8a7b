"""The Triton kernels launched: typed functions over one bucket, of a fixed number of launches each.

They work where Triton does (CUDA, ROCm, XPU) and, for tests, on the CPU in Triton's interpreter, which
TRITON_INTERPRET=1 chooses when this is imported. Nothing here waits for the device: sums, counts and verdicts stay
tensors on it. `keep`, bool [] or None, is such a verdict: where it is False a kernel changes nothing.

Rounding: `launch` passes enable_fp_fusion=False and the kernels use div_rn and sqrt_rn, so every operation rounds by
itself, as on the CPU; nothing is tuned at run time, so all workers with the same kind of device sum in the same order.
Sums are float64; their order, and with it at times the last bit of a scale, differs from the CPU's.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from onebit.kernels import triton_jit as jit
from onebit.kernels.compact import Int8
from onebit.kernels.triton_operands import (
    INTERPRETED,
    TILE,
    Plan,
    Signs,
    TensorList,
    constants_of,
    version,
)

__all__ = [
    "INTERPRETED",
    "TILE",
    "Plan",
    "Signs",
    "TensorList",
    "Worker",
    "apply",
    "gather",
    "lamb_measure",
    "server_commit",
    "server_encode",
    "version",
    "warmup_apply",
    "warmup_measure",
]


class Worker:
    """The worker's input, (g * (1 - beta1) + m * beta1) * layer_scale, zero where `held` is 0, + error * factor.

    It is never stored: `encode` and `commit` compute it, from operands that must not change in between.
    """

    def __init__(
        self,
        plan: Plan,
        grads: TensorList,
        hyper: Tensor,
        momentum: Signs | Tensor,
        layer_scale: Tensor | None = None,
        held: Tensor | None = None,
    ) -> None:
        self._plan, self._grads = plan, grads
        self._own = (
            *(grads.table, grads.count, constants_of(plan, hyper), *_momentum("momentum", momentum, plan)),
            *(plan.per_layer("layer_scale", layer_scale), plan.mask("held", held)),
        )

    def encode(
        self,
        error: Tensor | Int8,
        factor: Tensor | None,
        alive: Tensor | None,
        messages: Tensor,
        kind: Literal["rms", "mean"],
    ) -> tuple[Tensor, Tensor]:
        """Write the signs into `messages`. Two launches.

        Returns:
            float64 [blocks]: sums of squares, or of magnitudes for kind="mean"; and int64 [], the number of dead
            elements whose input is not zero.
        """
        plan = self._plan
        sizes, asking = plan.per_piece(1), plan.per_tile()
        given = (*plan.error("error", error), plan.per_layer("factor", factor), plan.mask("alive", alive))
        messages = plan.messages("messages", messages)
        absolute = kind == "mean"
        plan.over_tiles(
            jit.worker_encode, *self._own, *given, messages, sizes, asking, messages=True, ABSOLUTE=absolute
        )
        return plan.summed(sizes, plan.block_edges)[0], asking.sum()

    def commit(
        self, error: Tensor | Int8, factor: Tensor | None, alive: Tensor | None, sent: Tensor, keep: Tensor | None
    ) -> None:
        """error = input - decode(sent), in place. One launch."""
        plan = self._plan
        given = (*plan.error("error", error), plan.per_layer("factor", factor), plan.mask("alive", alive))
        after = (plan.messages("sent", sent), plan.verdict(keep))
        plan.over_tiles(jit.worker_commit, *self._own, *given, *after, messages=True)


def server_encode(
    plan: Plan,
    chunk: int,
    received: Tensor,
    error: Tensor,
    factor: Tensor | None,
    alive: Tensor | None,
    reply: Tensor,
    kind: Literal["rms", "mean"],
) -> Tensor:
    """Write the signs of mean + error * factor into `reply`, uint8 [message_bytes]. Two launches.

    Returns:
        float64 [blocks of the chunk]: sums of squares, or of magnitudes for kind="mean".
    """
    sizes = plan.per_piece(1)
    given = _server(plan, received, error, factor, alive, reply)
    plan.over_chunk(jit.server_encode, chunk, *given, sizes, ABSOLUTE=kind == "mean")
    first, last = plan.chunk_blocks[chunk : chunk + 2]
    return plan.summed(sizes, plan.block_edges[first : last + 1])[0]


def server_commit(
    plan: Plan,
    chunk: int,
    received: Tensor,
    error: Tensor,
    factor: Tensor | None,
    alive: Tensor | None,
    reply: Tensor,
    keep: Tensor | None,
) -> None:
    """error = mean + error * factor - decode(reply), in place. One launch."""
    plan.over_chunk(jit.server_commit, chunk, *_server(plan, received, error, factor, alive, reply), plan.verdict(keep))


def _server(
    plan: Plan, received: Tensor, error: Tensor, factor: Tensor | None, alive: Tensor | None, reply: Tensor
) -> tuple[Any, ...]:
    return (
        plan.messages("received", received, len(received)),
        len(received),
        plan.checked("error", error, (plan.bucket.chunk,), torch.float32),
        plan.per_layer("factor", factor),
        plan.mask("alive", alive),
        plan.messages("reply", reply.unsqueeze(0), 1),
    )


def gather(plan: Plan, tensors: TensorList, out: Tensor) -> None:
    """Copy one tensor per layer into out, float32 [bucket], zero in the padding. One launch."""
    plan.over_tiles(jit.gather, tensors.table, tensors.count, plan.flat("out", out))


def lamb_measure(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    now: Signs,
    before: Signs | Tensor,
    layer_scale: Tensor | None,
    v_frozen: Tensor,
    v_fresh: Tensor,
    form: Literal["sqrt", "variance"],
    number: int,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Refresh the variance, in place. Three launches.

    Args:
        v_frozen, v_fresh: [bucket], float32 or bfloat16; the latter is rounded as `round_bf16_random` does with seed 0
            and step `number`.

    Returns:
        [layers] each: the largest quotient (float32), and the sums of squares of m / (sqrt(v_frozen) + eps) and of
        that + weight_decay * x (float64).
    """
    sums, largest = plan.per_piece(2), plan.per_piece(1, torch.int32)
    plan.over_tiles(
        jit.lamb_measure,
        *(x.table, x.count, constants_of(plan, hyper), now.messages, now.mask, *_momentum("before", before, plan)),
        *(plan.per_layer("layer_scale", layer_scale), plan.variance("v_frozen", v_frozen)),
        *(plan.variance("v_fresh", v_fresh), sums, largest),
        *(plan.bucket.start, number, plan.verdict(keep)),
        messages=True,
        counted=True,
        VARIANCE=form == "variance",
    )
    direction, update = plan.summed(sums, plan.layer_edges)
    return plan.largest(largest, plan.layer_edges).view(torch.float32), direction, update


def apply(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    now: Signs,
    layer_scale: Tensor | None,
    v_frozen: Tensor,
    step: Tensor,
    keep: Tensor | None,
) -> None:
    """x -= step * (m / (sqrt(v_frozen) + eps) + weight_decay * x), in place; step: [layers]. One launch."""
    plan.over_tiles(
        jit.apply,
        *(x.table, x.count, constants_of(plan, hyper), now.messages, now.mask),
        *(plan.per_layer("layer_scale", layer_scale), plan.variance("v_frozen", v_frozen)),
        *(plan.per_layer("step", step.float()), plan.verdict(keep)),
        messages=True,
    )
    x.touch()


def warmup_measure(
    plan: Plan, hyper: Tensor, x: TensorList, g: Tensor, m: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the warm-up's coefficients need. Changes nothing. Two launches.

    Returns:
        float64 [layers] each: the sums of squares of m' / (sqrt(v') + eps), of that + weight_decay * x, and of x,
        m' and v' being this step's; and bool [], whether the square of g is finite.
    """
    sums, bad = plan.per_piece(3), plan.per_tile()
    flat = (plan.flat("g", g), plan.flat("m", m), plan.flat("v", v))
    plan.over_tiles(jit.warmup_measure, x.table, x.count, constants_of(plan, hyper), *flat, sums, bad, counted=True)
    direction, update, weight = plan.summed(sums, plan.layer_edges)
    return direction, update, weight, bad.sum() == 0


def warmup_apply(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    keep: Tensor | None,
) -> None:
    """m = m * beta1 + g * (1 - beta1); v = v * beta2 + (1 - beta2) * g * g; x -= step * u, in place. One launch."""
    flat = (plan.flat("g", g), plan.flat("m", m), plan.flat("v", v))
    after = (plan.per_layer("step", step.float()), plan.verdict(keep))
    plan.over_tiles(jit.warmup_apply, x.table, x.count, constants_of(plan, hyper), *flat, *after)
    x.touch()


def _momentum(name: str, momentum: Signs | Tensor, plan: Plan) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if isinstance(momentum, Tensor):
        return None, None, plan.flat(name, momentum)
    return momentum.messages, momentum.mask, None
