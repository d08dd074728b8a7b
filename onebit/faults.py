"""What is wrong with a recipe, as one sentence: pydantic finds it, the words are ours."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onebit.errors import ConfigError

Keys = Mapping[str, Sequence[str]]  # section -> its keys
DEEPEST = 20  # a recipe needs few levels, and very many exhaust Python's stack
LONGEST = 4096  # characters, as many as a path may have
RULE = ("threshold", "look_back", "min_steps", "max_steps")  # the keys of `freeze_step` as a table


def sentence(error: ValidationError, keys: Keys) -> str:
    """The first fault of a pydantic error as one sentence: what, value, allowed, what to do."""
    faults = error.errors(include_url=False)
    unknown = [f for f in faults if f["type"] == "extra_forbidden"]
    if unknown:
        return _unknown_key([str(part) for part in unknown[0]["loc"]], keys)
    inside = [f for f in faults if "FreezeRule" in f["loc"][:-1]]
    if inside:  # it is a table: what the other members of the union say about it is of no use
        faults = [{**f, "loc": (*f["loc"][:2], *f["loc"][3:])} for f in inside[:1]]
    # a union reports each of its members; their locations start alike and end with the member's name
    first = faults[0]
    where = [str(part) for part in first["loc"]]
    key = ".".join(where if inside else where[:2]) if where[0] in keys else where[0]
    allowed = [_allowed(f) for f in faults if [str(p) for p in f["loc"][:2]] == where[:2]]
    value = first["input"]
    shown = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."
    return f"recipe: {key} is {shown}; {' or '.join(dict.fromkeys(allowed))}; correct the recipe or the flag"


_WORDS = {
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be {ge} or more",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be {le} or less",
    "literal_error": "it must be {expected}",
    "int_type": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "string_type": "it must be a string",
    "bool_type": "it must be true or false",
    "tuple_type": "it must be a list",
    "missing": "a value is missing in it",
    "too_long": "it has more values than {max_length}",
    "model_type": "it must be a section",
    "dict_type": "it must be a table",
    "finite_number": "it must be finite",
}


def _allowed(fault: Any) -> str:
    """What pydantic says is allowed, in our words."""
    if fault["type"] == "model_type" and len(fault["loc"]) > 1:
        return "it must be a table"
    template = _WORDS.get(fault["type"])
    if template:
        return template.format(**fault.get("ctx", {}))
    message = str(fault["msg"])
    return message[0].lower() + message[1:]


def _unknown_key(where: list[str], keys: Keys) -> str:
    """The sentence for a key that nobody knows, with the nearest one that somebody does."""
    dotted = [f"{section}.{key}" for section, names in keys.items() for key in names]
    if where[2:3] == ["FreezeRule"]:
        (closest,) = difflib.get_close_matches(where[-1], RULE, 1, 0.0)
        return (
            f"recipe: unknown key {'optimizer.freeze_step.' + where[-1]!r}; the nearest known key is "
            f"'optimizer.freeze_step.{closest}'; the rule knows {', '.join(RULE)}"
        )
    wrong = ".".join(where)
    if len(where) == 1:
        nearest = difflib.get_close_matches(wrong, list(keys), 1, 0.6) or [d for d in dotted if d.endswith("." + wrong)]
        allowed = "a recipe has the sections " + ", ".join(f"[{k}]" for k in keys)
    else:
        near = difflib.get_close_matches(where[-1], keys.get(where[0], ()), 1, 0.5)
        nearest = [f"{where[0]}.{n}" for n in near] or [d for d in dotted if d.endswith("." + where[-1])]
        allowed = f"[{where[0]}] knows " + ", ".join(keys.get(where[0], ()))
    nearest = nearest or difflib.get_close_matches(wrong, dotted, 1, 0.0)
    return f"recipe: unknown key {wrong!r}; the nearest known key is {nearest[0]!r}; {allowed}"


def check_size(raw: dict[str, Any], path: Path) -> None:
    """What TOML may hold and no recipe needs, and what errors could not show: refused before anything looks at it.

    Raises:
        ConfigError: whole numbers beyond 64 bits; very long keys or strings; tables in tables in tables.
    """
    level: list[Any] = [raw]
    for _ in range(DEEPEST):
        keys = [key for held in level if isinstance(held, dict) for key in held]
        level = [part for held in level for part in (held.values() if isinstance(held, dict) else held)]
        if long := [text for text in (*keys, *level) if isinstance(text, str) and len(text) > LONGEST]:
            raise ConfigError(
                f"recipe {str(path)!r} has a key or string of {len(long[0])} characters, {long[0][:20]!r}...; at most "
                f"{LONGEST} are allowed; shorten it"
            )
        if any(isinstance(part, int) and not -(2**63) <= part < 2**63 for part in level):
            raise ConfigError(f"recipe {str(path)!r} has a whole number of more than 64 bits; give a smaller one")
        level = [part for part in level if isinstance(part, dict | list)]
    if level:
        raise ConfigError(
            f"recipe {str(path)!r} has tables or lists that lie more than {DEEPEST} deep in each other; a recipe needs "
            "few; take some out"
        )
