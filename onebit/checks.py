"""What is checked before anything happens: settings, parameters, and a fingerprint of both for other workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from onebit.errors import ConfigError

T = TypeVar("T")


def check_in(name: str, value: T, allowed: Sequence[T]) -> T:
    """Return `value` if it is allowed; else raise a ConfigError that lists what is."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")
    return value


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number, at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, at least {least}")


def as_updates(name: str, value: int | float, total_steps: int | None, otherwise: str = "") -> int:
    """A number of updates, >= 1, from a whole number, or from a share of `total_steps` in (0, 1).

    `otherwise`: what else it may be, for the message.

    Raises:
        ConfigError: it is neither, or a share of a run whose length is not known.
    """
    if total_steps is not None:
        check_whole("total_steps", total_steps, 1)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value >= 1 if isinstance(value, int) else 0 < value < 1):
        raise ConfigError(
            f"{name} is {value!r}; it must be a whole number of updates, at least 1, or a share of total_steps between "
            f"0 and 1{otherwise}"
        )
    if isinstance(value, int):
        return value
    if total_steps is None:
        raise ConfigError(f"{name} is {value}, a share of the run; say how long that is: total_steps=...")
    return max(1, round(value * total_steps))


def check_floor(variance_floor: Any) -> float:
    """A variance floor, a share of its layer's mean. ConfigError unless it lies in [0, 1)."""
    if not isinstance(variance_floor, int | float) or not 0 <= variance_floor < 1:
        raise ConfigError(f"variance_floor is {variance_floor!r}; it must lie in [0, 1)")
    return float(variance_floor)


def check_kind(name: str, value: Any, kind: type[T]) -> T:
    """The value, which must be of this class; ConfigError if it is not."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; it must be an onebit.{kind.__name__}(...)")
    return value


def layer_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names that the parameters were given with, in flat order; "parameter 0" and so on without any."""
    named = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    return named or [f"parameter {i}" for i, _ in enumerate(p for g in optimizer.param_groups for p in g["params"])]


def check_group(group: dict[str, Any]) -> None:
    """Raise ConfigError for a setting of a parameter group that cannot be used."""
    if len(set(map(id, group["params"]))) != len(group["params"]):
        raise ConfigError("a parameter occurs twice in a group; it would be stepped twice; pass each parameter once")
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ConfigError(f"{name} is a tensor of shape {tuple(value.shape)}; it must hold one number")
        value = float(value)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} is {value}; it must be finite and at least 0")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ConfigError(f"betas are {betas}; there must be two, each in [0, 1)")
    mask = group.get("exp_avg_mask")
    if mask is None:
        return
    if len(group["params"]) != 1:
        raise ConfigError(
            f"exp_avg_mask is set on a group of {len(group['params'])} parameters; "
            "put each masked parameter into a group of its own"
        )
    if mask.numel() != group["params"][0].numel():
        raise ConfigError(
            f"exp_avg_mask has {mask.numel()} elements, its parameter {group['params'][0].numel()}; they must be equal"
        )


def check_structure(saved: Sequence[Sequence[str]], mine: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError, naming the first difference, unless a saved optimizer had the structure of this one."""
    for theirs, ours in zip_longest(map(tuple, saved), mine, fillvalue=("number of parameters", "another")):
        if theirs != ours:
            was = theirs[1] if theirs[0] == ours[0] else f"absent (there is {theirs[0]}: {theirs[1]})"
            raise ConfigError(
                f"the state dict does not fit: {ours[0]} is {ours[1]} here and was {was} when it was saved; "
                "build the optimizer as it was then, on the same number of workers; for another number of them or of "
                "machines, pass what all of them saved to load_state_dicts, or call fold_errors() before one saves"
            )


def fingerprints(params: Sequence[Tensor], names: Sequence[str]) -> list[tuple[str, str]]:
    """Name -> shape, dtype and a checksum of the values of each parameter, comparable between workers."""
    return [
        (name, f"{tuple(p.shape)} {p.dtype}, checksum {checksum(p)}") for name, p in zip(names, params, strict=True)
    ]


def checksum(tensor: Tensor) -> str:
    """A position-dependent checksum of the bits of a tensor of 16-, 32- or 64-bit floats, as hexadecimal text."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
    total = 0
    for part in torch.split(bits, 2**22):  # parts bound the memory of the 64-bit copies
        weights = torch.arange(1, 2 * part.numel() + 1, 2, dtype=torch.int64, device=part.device)  # odd: no bit is lost
        total = (total * 1000003 + int((part.long() * weights).sum())) % 2**64
    return f"{total:016x}"
