"""What DeepSpeed's 1-bit optimizers save, as one record per parameter. `deepspeed.py` does something with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebit.errors import ConfigError

log = logging.getLogger("onebit")

ADAM_KEYS = ("step", "exp_avg", "exp_avg_sq")
LAMB_KEYS = (*ADAM_KEYS, "exp_avg_sq_fresh", "lamb_coeff_freeze", "last_factor")
KEYS = {"OnebitLamb": LAMB_KEYS, "OnebitAdam": ADAM_KEYS}
ZERO_KEYS = ("zero_stage", "base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups")
GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")


@dataclass
class Layer:
    """What DeepSpeed saved of one parameter.

    Attributes:
        momentum, variance: in the parameter's shape; the variance is frozen once the run was compressed.
        fresh: the fresh variance, in its shape; None for Adam.
        coeff, factor, scale: the average coefficient, the last factor, the scaling coefficient; None for Adam, `scale`
            also before the first compressed update.
        beta2: of its group.
        weight: the float32 copy of a 16-bit parameter, in its shape; None where none was saved.
    """

    momentum: Tensor
    variance: Tensor
    fresh: Tensor | None
    coeff: float | None
    factor: float | None
    scale: float | None
    beta2: float
    weight: Tensor | None


def unwrap(checkpoint: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Any] | None]:
    """The optimizer's own state dict in a checkpoint, and the float32 copies of 16-bit weights by group, if any."""
    if not isinstance(checkpoint, Mapping):
        raise ConfigError(f"the checkpoint is a {type(checkpoint).__name__}; pass the dict that torch.load returns")
    found: Any = checkpoint
    if "optimizer" in found:
        found = found["optimizer"]
        if found is None:
            raise ConfigError(
                "the checkpoint's entry 'optimizer' is None: ZeRO keeps its state in other files, and DeepSpeed's "
                "1-bit optimizers do not run under ZeRO; pass the mp_rank_00_model_states.pt of a run without ZeRO"
            )
    if not isinstance(found, Mapping):
        raise ConfigError(f"the checkpoint's entry 'optimizer' is a {type(found).__name__}; it must be a dict")
    zero = [key for key in ZERO_KEYS if key in found]
    if zero:
        raise ConfigError(
            f"the state has {', '.join(zero)}: it is a state of ZeRO or of DeepSpeed's bf16 optimizer, cut into flat "
            "shards; pass that of a 1-bit optimizer, which DeepSpeed saves without ZeRO"
        )
    masters = found.get("fp32_groups", found.get("fp32_groups_flat"))
    state = found.get("optimizer_state_dict", found)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise ConfigError(
            f"there is no optimizer state in what was given, whose keys are {_listed(found)}; pass "
            "torch.load('mp_rank_00_model_states.pt') or its entry 'optimizer'"
        )
    return state, masters


def kind_of(state: Mapping[str, Any]) -> str:
    """Which optimizer saved this state: a key of `KEYS`, or else in words."""
    entries = list(state["state"].values())
    if not entries:
        raise ConfigError("the DeepSpeed state is empty: it was saved before the first step; start the run anew")
    keys = set().union(*entries)
    if "onebit" in state:
        return "onebit's own, which optimizer.load_state_dict loads"
    if keys & {"exp_avg_sq_fresh", "lamb_coeff_freeze", "last_factor"}:
        return "OnebitLamb"
    if keys & {"momentum_accumulator", "local_step_interval", "var_interval"}:
        return "DeepSpeed's ZeroOneAdam"
    if "corrected_tensor_size" in keys:
        return "OnebitAdam"
    return f"not of a DeepSpeed 1-bit optimizer (its keys are {_listed(keys)})"


def read_layers(
    state: Mapping[str, Any],
    masters: Sequence[Any] | None,
    kind: str,
    ours: Sequence[Sequence[Tensor]],
    names: Sequence[str],
) -> tuple[list[Layer], list[int]]:
    """What was saved of each parameter, in flat order, and the steps that DeepSpeed counted, of each too.

    Args:
        state, masters: from `unwrap`.
        kind: a key of `KEYS`.
        ours: the parameters of each group.
        names: of all parameters, in flat order.
    """
    theirs = state["param_groups"]
    if len(ours) != len(theirs):
        raise ConfigError(
            f"the DeepSpeed state has {len(theirs)} parameter groups and the optimizer {len(ours)}; build it with the "
            "groups DeepSpeed had"
        )
    layers: list[Layer] = []
    steps = []
    for i, (params, group) in enumerate(zip(ours, theirs, strict=True)):
        missing = [key for key in GROUP_KEYS if key not in group]
        if missing:
            raise ConfigError(
                f"group {i} of the DeepSpeed state lacks {', '.join(missing)}; pass the state as it was saved"
            )
        weights = None if masters is None else _in_group(masters, i)
        entries, weights = _entries(i, group, state["state"], params, weights, kind)
        for j, (p, entry) in enumerate(zip(params, entries, strict=True)):
            steps.append(int(entry["step"]))
            weight = None if weights is None else weights[j]
            layers.append(_layer(names[len(layers)], p, entry, weight, float(group["betas"][1])))
    if min(steps) < 1:
        raise ConfigError(
            f"the DeepSpeed state has step {min(steps)}; DeepSpeed counts from 1; pass it as it was saved"
        )
    return layers, steps


def _entries(
    i: int,
    group: Mapping[str, Any],
    saved: Mapping[Any, Any],
    params: Sequence[Tensor],
    weights: list[Tensor] | None,
    kind: str,
) -> tuple[list[Mapping[str, Any]], list[Tensor] | None]:
    """The saved state, and weights, of each parameter of group i."""
    entries: list[Any] = [saved.get(number) for number in group["params"]]
    for j, entry in enumerate(entries):
        if entry is None and kind == "OnebitAdam" and len(entries) == len(params):
            log.info("parameter %d of group %d has no DeepSpeed state: it never had a gradient; it starts anew", j, i)
            entries[j] = {"step": 1, "exp_avg": torch.zeros_like(params[j]), "exp_avg_sq": torch.zeros_like(params[j])}
        else:
            _check_entry(f"parameter {j} of group {i}", entry, kind)
    if kind == "OnebitAdam" and _is_flat(entries, params):
        entries, weights = _cut(i, entries[0], params, weights)
    if len(entries) != len(params) or (weights is not None and len(weights) != len(params)):
        raise ConfigError(
            f"group {i} has {len(entries)} parameters in the DeepSpeed state and {len(params)} here; pass the same "
            "ones in the same order (those with requires_grad=False were not saved by 16-bit runs)"
        )
    return entries, weights


def _check_entry(name: str, entry: Mapping[str, Any] | None, kind: str) -> None:
    missing = list(KEYS[kind]) if entry is None else [key for key in KEYS[kind] if key not in entry]
    if missing:
        raise ConfigError(
            f"{name} of the DeepSpeed state lacks {', '.join(missing)}; {kind} saves {', '.join(KEYS[kind])} of every "
            "parameter that had a gradient; leave parameters without one out of the optimizer"
        )


def _in_group(masters: Sequence[Any], i: int) -> list[Tensor]:
    """The float32 weights of a group: a list of them (16-bit LAMB), or one flat tensor (16-bit Adam)."""
    if i >= len(masters):
        raise ConfigError(f"the DeepSpeed state has float32 weights of {len(masters)} groups, none of group {i}")
    return [masters[i]] if isinstance(masters[i], Tensor) else list(masters[i])


def _is_flat(entries: Sequence[Mapping[str, Any]], params: Sequence[Tensor]) -> bool:
    """Whether a whole group was saved as one vector, as OnebitAdam's wrapper for 16-bit parameters does."""
    if len(entries) != 1 or entries[0]["exp_avg"].dim() != 1:
        return False
    return len(params) != 1 or entries[0]["exp_avg"].shape != params[0].shape


def _cut(
    i: int, entry: Mapping[str, Any], params: Sequence[Tensor], weights: list[Tensor] | None
) -> tuple[list[Mapping[str, Any]], list[Tensor] | None]:
    """The vectors of a flat group as entries, and weights, of its parameters."""
    sizes, numel = [p.numel() for p in params], entry["exp_avg"].numel()
    if sum(sizes) != numel:
        raise ConfigError(
            f"group {i} of the DeepSpeed state is one vector of {numel} elements; the {len(params)} parameters here "
            f"have {sum(sizes)}; pass the same ones in the same order"
        )

    def parts(flat: Tensor) -> list[Tensor]:
        if flat.numel() != numel:
            raise ConfigError(
                f"vectors of group {i} in the DeepSpeed state have {numel} and {flat.numel()} elements; they must be "
                "equal; pass the state as it was saved"
            )
        return [part.view(p.shape) for part, p in zip(torch.split(flat.detach().flatten(), sizes), params, strict=True)]

    cut = {key: parts(entry[key]) for key in ("exp_avg", "exp_avg_sq")}
    entries: list[Mapping[str, Any]] = [
        {**entry, **{key: values[j] for key, values in cut.items()}} for j in range(len(params))
    ]
    return entries, None if weights is None else parts(weights[0])


def _layer(name: str, p: Tensor, entry: Mapping[str, Any], weight: Tensor | None, beta2: float) -> Layer:
    tensors = {"exp_avg": entry["exp_avg"], "exp_avg_sq": entry["exp_avg_sq"]}
    tensors |= {"exp_avg_sq_fresh": entry["exp_avg_sq_fresh"]} if "exp_avg_sq_fresh" in entry else {}
    tensors |= {} if weight is None else {"float32 weight": weight}
    for key, value in tensors.items():
        if not isinstance(value, Tensor) or value.shape != p.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"{name} has shape {tuple(p.shape)}, its {key} in the DeepSpeed state {found}; pass the same "
                "parameters in the same order"
            )
    numbers = [entry.get(key) for key in ("lamb_coeff_freeze", "last_factor", "scaling_coeff")]
    coeff, factor, scale = (None if number is None else float(number) for number in numbers)
    fresh = tensors.get("exp_avg_sq_fresh")
    return Layer(
        entry["exp_avg"].detach().clone(), entry["exp_avg_sq"].detach(), fresh, coeff, factor, scale, beta2, weight
    )


def is_frozen(layers: Sequence[Layer]) -> bool:
    """Whether DeepSpeed had frozen the variance, as far as the state tells: Adam's does not, so True for it."""
    return any(s.fresh is None or s.scale is not None or bool(s.fresh.any()) for s in layers)


def _listed(keys: Any) -> str:
    names = sorted(map(str, keys))
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
