"""What an optimizer knows of each layer at this moment. All reads of the optimizers' private state for it are here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def layer_stats(optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """One value per layer of each kind that the optimizer has now, in flat order. Reads from the device; no collective.

    Args:
        optimizer: one of this package, or one of torch that keeps the mean square of gradients as AdamW does.

    Returns:
        Kind -> values; empty before the first step. Kinds that the optimizer does not have are left out.

        variance_norm: L1 norm of the variance; in the compressed stage of the fresh one, else of the frozen one; of a
            local variance the last mean.
            Elements that never had a gradient count as zero, not as what stands in for them (DEV-10).
        frozen_variance_norm: the same of the frozen variance. Compressed stage only, as all that follow but one, and
            only of an optimizer that freezes it.
        coefficient: the last layerwise coefficient c. In both stages.
        ratio: the last ratio r.
        momentum_scale: s, where layers share a 1-bit scale.
        compression_error: 2-norm of this worker's error over that of the momentum; 0 where both are zero. Where the
            momentum is what is sent.
    """
    if "_flat" in vars(optimizer):
        return _of_ours(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    squares = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in params]
    if all(square is None for square in squares):
        return {}
    return {"variance_norm": [0.0 if s is None else float(s.sum(dtype=torch.float64)) for s in squares]}


def _of_ours(optimizer: Any) -> dict[str, list[float]]:
    """`layer_stats` of an optimizer of this package."""
    layout, flat, layerwise = optimizer._layout, optimizer._flat, optimizer._layerwise
    if layout is None:
        return {}
    exchange = getattr(optimizer, "_exchange", None)
    frozen = exchange is not None and optimizer.sends_momentum
    alive = None if exchange is None else exchange.alive

    def sums(kind: str, power: int = 1) -> Tensor:
        values = flat[kind] ** power if alive is None else flat[kind] ** power * alive
        return torch.stack([view.sum(dtype=torch.float64) for view in layout.views(values)])

    if "denominator" in flat:
        found = {"variance_norm": sums("denominator", 2)}
    else:
        found = {"variance_norm": sums("fresh_variance" if "fresh_variance" in flat else "variance")}
    if frozen:
        found["frozen_variance_norm"] = sums("variance")
    for kind, name in (("coefficient", "coeff"), ("ratio", "ratio"), ("momentum_scale", "momentum_scale")):
        if name in layerwise:
            found[kind] = layerwise[name]
    if exchange is not None and frozen:
        momentum = _norms(optimizer.decoded_momentum())
        error = _norms(layout.views(exchange.placed_error())) / layerwise.get("momentum_scale", 1.0)
        found["compression_error"] = torch.where(error > 0, error / momentum, 0.0)
    return {kind: values.tolist() for kind, values in found.items()}


def _norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each, float64."""
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
