"""Runs that DeepSpeed's 1-bit optimizers left behind (OnebitLamb and OnebitAdam, 0.3.16 to 0.19.6) go on with ours.

DeepSpeed itself is not needed. docs/deepspeed.md says how a run moves over, and what is kept and lost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onebit.deepspeed_state import GROUP_KEYS, KEYS, Layer, is_frozen, kind_of, read_layers, unwrap
from onebit.errors import ConfigError
from onebit.lamb import PAPER_FACTOR_MAX
from onebit.onebit_adam import OneBitAdam
from onebit.onebit_lamb import OneBitLamb
from onebit.sharding import is_sharded

log = logging.getLogger("onebit")

SHARED = (*GROUP_KEYS, "freeze_step")
LAMB_ONLY = ("min_coeff", "max_coeff", "coeff_beta", "factor_min", "factor_max", "factor_threshold")
ARGUMENTS = {"OnebitLamb": (*SHARED, *LAMB_ONLY), "OnebitAdam": SHARED}
WITHOUT_EFFECT = ("bias_correction", "eps_inside_sqrt", "max_grad_norm", "cuda_aware", "comm_backend_name", "amsgrad")
"""Settings that DeepSpeed accepts and its 1-bit optimizers do not use, or that say how bytes travel."""


def settings_from_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `OneBitLamb` or `OneBitAdam` that a DeepSpeed configuration asks for.

    Args:
        config: the whole configuration (a checkpoint holds it as "ds_config"), or its entry "optimizer", a dict with
            "type" and "params".

    Returns:
        Those that are given; and always what has another default here: `freeze_step`, one less than DeepSpeed's (by
        default 100000), which counts its dry first step, and for OnebitLamb `factor_max`, by default 4.0, and
        `growth_max`, inf.

    Raises:
        ConfigError: it asks for another optimizer, has a setting that neither knows, or freeze_step is no whole number.
    """
    optimizer = config.get("optimizer", config)
    name = str(optimizer.get("type", "")) if isinstance(optimizer, Mapping) else ""
    kind = next((kind for kind in KEYS if kind.lower() == name.lower()), None)
    if kind is None:
        raise ConfigError(
            f"the configuration's optimizer is {name or 'not named'}; OnebitLamb and OnebitAdam can be taken over; "
            "pass the configuration as a dict, with optimizer.type and optimizer.params"
        )
    params = dict(optimizer.get("params", {}))
    unknown = [key for key in params if key not in ARGUMENTS[kind] and key not in WITHOUT_EFFECT]
    if unknown:
        raise ConfigError(
            f"the configuration sets {', '.join(unknown)} of {kind}; known are "
            f"{', '.join((*ARGUMENTS[kind], *WITHOUT_EFFECT))}; take out what DeepSpeed did not use either"
        )
    dropped = [key for key in params if key in WITHOUT_EFFECT]
    if dropped:
        log.info("without effect in DeepSpeed's %s or not needed here, so not taken over: %s", kind, ", ".join(dropped))
    settings = {key: params[key] for key in ARGUMENTS[kind] if key in params}
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    step = settings.get("freeze_step", 100000)
    if not isinstance(step, int) or isinstance(step, bool):
        raise ConfigError(f"freeze_step is {step!r} in the configuration; it must be a whole number of steps")
    if kind == "OnebitLamb":
        settings.setdefault("factor_max", PAPER_FACTOR_MAX)
        settings["growth_max"] = math.inf  # it has no such bound (DEV-24)
    return {**settings, "freeze_step": max(1, step - 1)}


@torch.no_grad()
def from_deepspeed(checkpoint: Mapping[str, Any], optimizer: OneBitLamb | OneBitAdam) -> None:
    """Load what DeepSpeed saved of OnebitLamb or OnebitAdam into a new optimizer, so that the run goes on.

    Momentum, variances, coefficients, last factors, scaling coefficients, float32 copies of 16-bit weights, the groups'
    lr, betas, eps and weight_decay, and the number of updates are taken over. DeepSpeed's step k is update k - 1: its
    first step makes the state and moves nothing, but counts. From `optimizer.freeze_step` updates on the run is in the
    compressed stage. Every worker loads the same file; their number may be another than in DeepSpeed.

    Worker and server errors start at zero: DeepSpeed saves at most those of rank 0, and drops them when it loads.
    The float32 copies become the parameters' values: 16-bit parameters get them as master weights.

    Args:
        checkpoint: `torch.load("mp_rank_00_model_states.pt")`, its entry "optimizer", or the "optimizer_state_dict" in
            that. It is not changed.
        optimizer: new, with the parameters in the groups and order they had in DeepSpeed, and with its freeze_step
            minus 1 (`settings_from_deepspeed`).

    Raises:
        ConfigError: it is no such state, another optimizer's, ZeRO's, or of other parameters; something is missing in
            it; or the optimizer has made updates, holds shards, or uses a rule this state has no start for. Nothing
            has been changed then.
    """
    _check_optimizer(optimizer)
    state, masters = unwrap(checkpoint)
    kind = _check_kind(kind_of(state), optimizer)
    layers, steps = read_layers(state, masters, kind, optimizer._groups(), optimizer._names())
    updates, frozen = max(steps) - 1, is_frozen(layers)
    compressed = updates >= _freeze_at(optimizer)
    if compressed and frozen and getattr(optimizer, "_ratio_form", "sqrt") == "momentum":
        raise ConfigError(
            "ratio is 'momentum' and the DeepSpeed state is compressed; it does not hold the momentum's norm at the "
            "switch; build the optimizer with ratio='sqrt', as DeepSpeed's was"
        )
    silenced = _silence_dead(layers) if optimizer._holds else 0
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(_as_warmup(before, state, layers, updates, compressed and frozen, optimizer))
        if compressed:
            _enter_compressed(optimizer, layers, updates, frozen)
    except Exception:
        optimizer.load_state_dict(before)
        raise
    _set_weights(optimizer, layers)
    if optimizer.comm.rank == 0:
        _report(optimizer, kind, state, steps, frozen, silenced)


def _check_optimizer(optimizer: OneBitLamb | OneBitAdam) -> None:
    if not isinstance(optimizer, OneBitLamb | OneBitAdam):
        raise ConfigError(
            f"the optimizer is {type(optimizer).__name__}; OneBitLamb and OneBitAdam can take over a DeepSpeed state"
        )
    if optimizer._layout is not None or optimizer._steps:
        raise ConfigError(
            f"the optimizer has state already ({optimizer._steps} updates); load a DeepSpeed state into a new one"
        )
    if any(is_sharded(p) for p in optimizer._params()):
        raise ConfigError(
            "parameters are sharded (DTensor) and a DeepSpeed state is of whole ones; build model and optimizer "
            "without shards"
        )
    _freeze_at(optimizer)


def _freeze_at(optimizer: OneBitLamb | OneBitAdam) -> int:
    at = optimizer._compression.freeze_at
    if at is None:
        raise ConfigError(
            "freeze_step is a rule (AutoFreeze), which has not seen this run's past; pass DeepSpeed's freeze_step - 1"
        )
    return at


def _check_kind(found: str, optimizer: OneBitLamb | OneBitAdam) -> str:
    """ConfigError unless this is the counterpart of our optimizer."""
    wanted = "OnebitLamb" if isinstance(optimizer, OneBitLamb) else "OnebitAdam"
    if found != wanted:
        raise ConfigError(
            f"the state is {'of ' if found in KEYS else ''}{found}; {type(optimizer).__name__} goes on from "
            f"DeepSpeed's {wanted}; build the counterpart of the optimizer that saved it"
        )
    return wanted


def _silence_dead(layers: Sequence[Layer]) -> int:
    """Take away what one bit put into elements that never had a gradient (DEV-10); how many there were."""
    silenced = 0
    for layer in layers:
        dead = layer.variance == 0
        silenced += int((dead & (layer.momentum != 0)).sum())
        layer.momentum = torch.where(dead, 0.0, layer.momentum)
        if layer.fresh is not None:
            layer.fresh = torch.where(dead, 0.0, layer.fresh)
    return silenced


def _as_warmup(
    before: dict[str, Any],
    state: Mapping[str, Any],
    layers: Sequence[Layer],
    updates: int,
    settled: bool,
    optimizer: OneBitLamb | OneBitAdam,
) -> dict[str, Any]:
    """A state dict of ours in the warm-up stage with what that stage holds.

    `settled`: whether the coefficients' average is final, so that the switch must not divide it by its weight (DEV-5).
    """
    groups = []
    for mine, theirs in zip(before["param_groups"], state["param_groups"], strict=True):
        taken = {key: theirs[key] for key in (*GROUP_KEYS, "initial_lr") if key in theirs}
        kept = {key: value for key, value in mine.items() if key != "onebit"}
        groups.append({**kept, **taken, "betas": tuple(theirs["betas"])})
    numbers = [number for group in groups for number in group["params"]]
    entries: dict[int, dict[str, Any]] = {}
    for number, layer in zip(numbers, layers, strict=True):
        entries[number] = {"momentum": layer.momentum, "variance": layer.variance}
        if layer.coeff is not None and isinstance(optimizer, OneBitLamb):
            weight = 1.0 if settled else 1 - optimizer._coeff_rule.coeff_beta**updates
            entries[number]["coeff_avg"] = torch.tensor(layer.coeff)
            entries[number]["coeff_weight"] = torch.tensor(weight if layer.coeff > 0 else 0.0)
    return {"state": entries, "param_groups": groups, "onebit": {**before["onebit"], "steps": updates}}


def _enter_compressed(optimizer: OneBitLamb | OneBitAdam, layers: Sequence[Layer], updates: int, frozen: bool) -> None:
    """The switch, as ours; then what DeepSpeed has made of that state since its own, if it was frozen there."""
    at = _freeze_at(optimizer)
    optimizer.freeze_reason = f"{at} updates, in DeepSpeed" if frozen else f"{updates} updates, {at} were asked for"
    optimizer._switch()
    if optimizer._watch is not None:
        optimizer._watch.switched()
    if not frozen:
        return
    if isinstance(optimizer, OneBitAdam):
        optimizer._frozen_at = at
    for p, layer in zip(optimizer._params(), layers, strict=True):
        state = optimizer.state[p]
        if layer.scale is not None and "momentum_scale" in state:
            state["momentum_scale"].fill_(layer.scale)
        if layer.coeff is None or layer.factor is None or "fresh_variance" not in state:
            continue
        assert layer.fresh is not None
        v = state["variance"].to(optimizer._dtype)  # what the floor added is forgotten like the rest since the switch
        added = (v - layer.variance.to(v)) * layer.beta2 ** (updates - at)
        state["fresh_variance"].copy_(layer.fresh.to(v) + added)
        state["ratio"].fill_(layer.factor)
        state["coeff"].fill_(layer.factor * layer.coeff)


def _set_weights(optimizer: OneBitLamb | OneBitAdam, layers: Sequence[Layer]) -> None:
    """DeepSpeed's float32 weights into our master weights, or into the parameters where those are not in 16 bits."""
    assert optimizer._stepped is not None
    for target, layer in zip(optimizer._stepped.tensors(), layers, strict=True):
        if layer.weight is not None:
            target.copy_(layer.weight)
    optimizer._stepped.push()


def _report(
    optimizer: OneBitLamb | OneBitAdam,
    kind: str,
    state: Mapping[str, Any],
    steps: Sequence[int],
    frozen: bool,
    silenced: int,
) -> None:
    """What was taken over, and what does not go on as it was."""
    updates, at, stage = max(steps) - 1, _freeze_at(optimizer), optimizer.stage.value
    log.info(
        "DeepSpeed %s state loaded: its step %d is update %d, since its first step moves nothing; %s stage, switch at "
        "update %d",
        *(kind, max(steps), updates, stage, at),
    )
    if stage == "compressed":
        log.warning("worker and server errors start at zero, as after a load in DeepSpeed, which does not keep them")
    if kind == "OnebitLamb" and frozen and updates < at:
        log.warning("DeepSpeed had frozen the variance before update %d; it moves again until update %d", updates, at)
    if stage == "compressed" and not frozen:
        log.warning("DeepSpeed had not frozen the variance by update %d; it is frozen now", updates)
    if min(steps) < max(steps):
        log.warning("DeepSpeed counted %d to %d steps, parameter by parameter; the most count", min(steps), max(steps))
    if silenced:
        log.warning("%d elements that never had a gradient had momentum in DeepSpeed; it was set to zero", silenced)
    if isinstance(optimizer, OneBitLamb):
        optimizer._say_what_falls()
    for i, group in enumerate(state["param_groups"]):
        if group.get("non_freeze"):
            log.warning("group %d has non_freeze in DeepSpeed; here its variance is frozen like the others'", i)
        if not isinstance(optimizer, OneBitLamb):
            continue
        rule = optimizer._coeff_rule
        for name, mine in (("min_coeff", rule.min_coeff), ("max_coeff", rule.max_coeff)):
            if name in group and float(group[name]) != mine:
                log.warning("%s of group %d was %s in DeepSpeed and is %s here", name, i, group[name], mine)
