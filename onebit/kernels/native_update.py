"""Native kernels that change parameters and variances. Used through `native`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onebit.kernels import _native
from onebit.kernels.operands import (
    FLOATS,
    Plan,
    Signs,
    TensorList,
    all_there,
    flat_state,
    gradient_operand,
    momentum_operand,
    thread_count,
)


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
        *momentum_operand("before", before, plan),
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
        thread_count(threads),
    )
    return largest, direction, update


def apply(
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
    _native.apply(
        plan.native,
        plan.hyper(hyper),
        all_there("x", x).native,
        now.native("now", plan),
        plan.per_layer("layer_scale", layer_scale),
        flat_state("v_frozen", v_frozen, plan, FLOATS),
        plan.per_layer("step", steps),
        thread_count(threads),
    )
    x.touch()


def warmup_measure(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    g: Tensor | TensorList,
    m: Tensor,
    v: Tensor,
    *,
    threads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """What the warm-up's coefficients need. Changes nothing, so that a step can still be skipped.

    Args:
        g: averaged gradient, float32 [numel] or one tensor per layer.
        m, v: float32 [numel]: momentum and variance before this step.

    Returns:
        float64 [layers] each: the sums of squares of m' / (sqrt(v') + eps), of that + weight_decay * x, and of x,
        m' and v' being this step's; and whether the square of g is finite.
    """
    sums = torch.empty(3, len(plan.sizes), dtype=torch.float64)
    finite = _native.warmup_measure(
        plan.native,
        plan.hyper(hyper),
        x.native,
        *gradient_operand("g", g, plan),
        plan.flat("m", m),
        plan.flat("v", v),
        sums[0].data_ptr(),
        sums[1].data_ptr(),
        sums[2].data_ptr(),
        thread_count(threads),
    )
    return sums[0], sums[1], sums[2], finite


def warmup_apply(
    plan: Plan,
    hyper: Tensor,
    x: TensorList,
    g: Tensor | TensorList,
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
        all_there("x", x).native,
        *gradient_operand("g", g, plan),
        plan.flat("m", m),
        plan.flat("v", v),
        plan.per_layer("step", steps),
        thread_count(threads),
    )
    x.touch()
