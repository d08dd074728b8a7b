"""State dicts as JSON and named tensors, and back: what can be saved so that loading it can run no code.

JSON has no tuples, tensors, keys other than text, or numbers that are not finite; these are written as a list with a
mark in front: ["!tensor", name], ["!tuple", ...], ["!dict", [key, value], ...], ["!float", "inf"].
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from onebit.errors import ConfigError

MARKS = ("!tensor", "!tuple", "!list", "!dict", "!counter", "!float", "!dtype")


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """What `json.dumps` takes; tensors go into `tensors` under their path, which begins with `name`.

    Raises:
        ConfigError: it holds something that is no number, text, tensor, list, tuple or dict, or a key that is no plain
            value.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ["!float", str(value)]
    if isinstance(value, Tensor):
        again, unique = 0, name
        while unique in tensors:  # keys with dots in them, or 1 and "1", can lead to the same path
            again += 1
            unique = f"{name}#{again}"
        tensors[unique] = value
        return ["!tensor", unique]
    if isinstance(value, torch.dtype):
        return ["!dtype", str(value).removeprefix("torch.")]
    if isinstance(value, list | tuple):
        parts = [pack(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]
        if isinstance(value, tuple):
            return ["!tuple", *parts]
        return ["!list", *parts] if parts and parts[0] in MARKS else parts
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, bool | int | float | str):
                raise _refused(f"{name} has the key {key!r}")
        if all(isinstance(key, str) for key in value) and not isinstance(value, Counter):
            return {key: pack(part, f"{name}.{key}", tensors) for key, part in value.items()}
        pairs = [[key, pack(part, f"{name}.{key}", tensors)] for key, part in value.items()]
        return ["!counter" if isinstance(value, Counter) else "!dict", *pairs]
    raise _refused(f"{name} is a {type(value).__name__}")


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What `pack` was given.

    Raises:
        ConfigError: it names a tensor that is not in `tensors`, or is nothing that `pack` writes.
    """
    if isinstance(value, dict):
        return {key: unpack(part, tensors) for key, part in value.items()}
    if not isinstance(value, list):
        return value
    mark, rest = (value[0], value[1:]) if value and isinstance(value[0], str) and value[0] in MARKS else ("", value)
    if mark in ("", "!list"):
        return [unpack(part, tensors) for part in rest]
    if mark == "!tuple":
        return tuple(unpack(part, tensors) for part in rest)
    try:
        if mark == "!tensor":
            return tensors[rest[0]]
        if mark == "!float":
            return float(rest[0])
        if mark == "!dtype":
            found = getattr(torch, rest[0])
            if not isinstance(found, torch.dtype):
                raise TypeError(found)
            return found
        pairs = {key: unpack(part, tensors) for key, part in rest}
        return Counter(pairs) if mark == "!counter" else pairs
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the saved state holds {value!r}, which means nothing here ({error!r})") from None


def names_in(value: Any) -> list[str]:
    """The names of all tensors in what `pack` returned."""
    if isinstance(value, dict):
        return [name for part in value.values() for name in names_in(part)]
    if not isinstance(value, list):
        return []
    if value and value[0] == "!tensor":
        return [str(name) for name in value[1:]]
    pairs = value and value[0] in ("!dict", "!counter")
    parts = [pair[-1] for pair in value[1:] if isinstance(pair, list) and pair] if pairs else value
    return [name for part in parts for name in names_in(part)]


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, which cannot be saved safely; numbers, text, None, tensors, and lists, tuples, dicts of these can; "
        "take it out of the state that is saved, or turn it into one of these"
    )
