"""Variants: named tables of a recipe whose keys go over those of [optimizer]. Here they are plain mappings.

[variants.no-feedback]
options = {error_feedback = "none"}
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onebit.errors import ConfigError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"

Tables = dict[str, dict[str, Any]]


def tables(given: Any, optimizers: Sequence[str]) -> Tables:
    """The variants of a recipe, checked as far as one can without knowing the keys; new mappings.

    Raises:
        ConfigError: they are no tables, or a name cannot be used.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"recipe: variants is {given!r}; it must be tables; write [variants.NAME] above their keys")
    for name, table in given.items():
        if not re.fullmatch(NAME, name):
            raise ConfigError(
                f"recipe: a variant is called {name!r}; letters, digits, '.', '_' and '-' are allowed, the first a "
                "letter or a digit; rename it"
            )
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"recipe: variants.{name} is {table!r}; it must be a table of keys of [optimizer]; write "
                f"[variants.{name}] above them"
            )
        if "label" in table:
            raise ConfigError(f"recipe: variants.{name}.label is not allowed; the label is the variant's name")
        if name in optimizers and table.get("name") != name:
            raise ConfigError(
                f"recipe: variants.{name} has the name of an optimizer and name = {table.get('name')!r}; rename the "
                f"variant, or give it name = {name!r}"
            )
    return {name: dict(table) for name, table in given.items()}


def withdraw(variants: Tables, key: str) -> None:
    """Take a key of [optimizer] out of all variants, in place: a flag has set it, and wins over the file."""
    for table in variants.values():
        for name in (key, "lr_for") if key == "lr" else (key,):
            table.pop(name, None)


def select(optimizer: Mapping[str, Any], variants: Tables, name: Any, optimizers: Sequence[str]) -> dict[str, Any]:
    """The [optimizer] of one run.

    Args:
        optimizer: what the variants have in common.
        variants: from `tables`.
        name: of a variant, or else of an optimizer.
        optimizers: their names.
    Raises:
        ConfigError: it is neither; names the nearest known one.
    """
    if name in variants:
        table = variants[name]
        both = {**optimizer, **table, "label": name}
        if "lr" in table and "lr_for" not in table:
            both["lr_for"] = {}  # else the rate that belongs to the optimizer's name would hide the variant's
        if isinstance(table.get("options"), Mapping) and isinstance(optimizer.get("options"), Mapping):
            both["options"] = {**optimizer["options"], **table["options"]}
        return both
    if name in optimizers:
        return {**optimizer, "name": name, "label": ""}
    known = [*variants, *optimizers]
    (near,) = difflib.get_close_matches(str(name), known, 1, 0.0)
    what = "neither an optimizer nor a variant of the recipe" if variants else "not an optimizer"
    raise ConfigError(
        f"optimizer.name is {name!r}, {what}; the nearest known one is {near!r}; "
        f"known are {', '.join(map(repr, dict.fromkeys(known)))}"
    )
