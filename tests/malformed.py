"""Malformed recipes and texts as hypothesis strategies, and the law that holds for all of them.

The law: it works, or it is one OnebitError of one line, within seconds, and nothing has been changed. `Broken` says
which part of it was broken. The functions return "works" or "refused". Checkpoints are in `malformed_checkpoints.py`.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from onebit.comm import Solo
from onebit.errors import OnebitError
from onebit.recipe import Recipe, load, parse, resolve
from onebit.text import prepare

SECONDS = 20
LONGEST_MESSAGE = 6000


class Broken(AssertionError):
    """The law does not hold."""


def outcome(action: Callable[[], Any]) -> str:
    """What became of an action, if the law holds."""
    began = time.monotonic()
    try:
        action()
        said = "works"
    except OnebitError as error:
        text = str(error)
        if not text or "\n" in text or len(text) > LONGEST_MESSAGE:
            raise Broken(f"the message is not one readable line: {text[:500]!r}") from error
        said = "refused"
    except BaseException as error:
        raise Broken(f"{type(error).__name__} instead of one of our errors: {str(error)[:300]}") from error
    if time.monotonic() - began > SECONDS:
        raise Broken(f"it took {time.monotonic() - began:.0f} s")
    return said


# --- trees of plain values --------------------------------------------------------------------------------------------

WORDS = ("", "auto", "nan", "!tensor", "!dict", "!float", "!dtype", "\0", "é́\u202e🂡", "x" * 3000, "../..", "a\nb")
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.sampled_from([2**31, 2**63, 2**64, 10**30, -(10**400)])
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=3),
    max_leaves=5,
)


def _place(draw: st.DrawFn, tree: Any) -> tuple[Any, Any]:
    """A container in a tree, and a key of it; on the way down each branch counts alike, however much hangs on it."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = draw(st.sampled_from(keys))
        if not (isinstance(tree[key], dict | list) and tree[key]) or draw(st.integers(0, 7)) == 0:
            return tree, key
        tree = tree[key]


@st.composite
def mutated(draw: st.DrawFn, tree: Any, values: st.SearchStrategy[Any] = VALUES) -> Any:
    """The tree with one to three changes: a value, a key, something missing, something from another place."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        if not (isinstance(tree, dict | list) and tree):
            return draw(values)
        held, key = _place(draw, tree)
        kind = draw(st.sampled_from(["value", "value", "drop", "move", "move", "rename", "twice", "near", "near"]))
        other, at = _place(draw, tree)
        if kind == "drop":
            del held[key]
        elif kind == "move":
            held[key] = copy.deepcopy(other[at])
        elif kind == "rename" and isinstance(held, dict):
            held[draw(st.sampled_from(WORDS)) + str(key)[1:]] = held.pop(key)
        elif kind == "twice" and isinstance(held, list):
            held.insert(0, held[key])
        elif kind == "near" and isinstance(held[key], int | float) and not isinstance(held[key], bool):
            held[key] = draw(st.sampled_from([-held[key], held[key] + 1, 0, str(held[key]), [held[key]]]))
        else:
            held[key] = draw(values)
    return tree


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with flips, cuts, or something put in."""
    found = bytearray(content)
    kind = draw(st.sampled_from(["flip", "cut", "put in", "twice", "zeros"]))
    at = draw(st.integers(0, max(0, len(found) - 1)))
    if kind == "flip" and found:
        for where in [at, *draw(st.lists(st.integers(0, len(found) - 1), max_size=4))]:
            found[where] ^= 1 << draw(st.integers(0, 7))
    elif kind == "cut":
        del found[at:]
    elif kind == "put in":
        found[at:at] = draw(st.binary(min_size=1, max_size=40))
    elif kind == "twice":
        found += found[at:] or b"x"
    else:
        found[at : at + 64] = bytes(64)
    return bytes(found)


# --- recipes ----------------------------------------------------------------------------------------------------------


def _toml(value: Any) -> str:
    """A value as TOML has it, or nearly; None has no word there."""
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(str(key))} = {_toml(part)}" for key, part in value.items())
        return "{" + inside + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def toml(tree: Any) -> str:
    """A recipe as TOML."""
    if not isinstance(tree, dict):
        return f"model = {_toml(tree)}\n"
    lines: list[str] = []
    for section, part in sorted(tree.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(part, dict):
            lines.append(f"[{json.dumps(section)}]")
            lines += [f"{json.dumps(str(key))} = {_toml(value)}" for key, value in part.items() if value is not None]
        else:
            lines.append(f"{json.dumps(str(section))} = {_toml(part)}")
    return "\n".join(lines) + "\n"


def _whole_recipe() -> dict[str, Any]:
    raw = Recipe().model_dump(mode="json", exclude_none=True)
    raw["data"]["text"] = ["a.txt"]
    raw["optimizer"]["freeze_step"] = {"threshold": 0.9, "look_back": 3, "min_steps": 4, "max_steps": 50}
    raw["optimizer"]["options"] = {"codec": {"scale": "bucket"}}
    raw["variants"] = {"one": {"lr": 0.1}, "two": {"name": "lamb", "betas": [0.9, 0.99]}}
    return raw


HUGE = st.sampled_from(
    [
        *("1" * 5000, "0x" + "f" * 5000, "-0b" + "1" * 70000, "1e99999", "0.1" + "0" * 9000, "[" * 3000 + "]" * 3000),
        *("{a=" * 2000 + "1" + "}" * 2000, '"' + "é" * 100000 + '"', "nan", "-inf", "0x8000000000000000"),
        *("1979-05-27", "07:32:00", '"\\uD800"', "'''\n'''", "[[[1], 2], {}]"),
    ]
)
KEYS = st.sampled_from(
    [
        "train.steps",
        "optimizer.lr",
        "optimizer.betas",
        "model.heads",
        "variants.a.lr",
        "data.text",
        "optimizer.options.x",
    ]
)
TEXTS_OF_RECIPES = st.sampled_from(
    [
        *("[train]\n[train]\n", "a" + ".a" * 5000 + " = 1", "[" + "a." * 5000 + "a]", "[[train]]\nsteps = 3"),
        *("[variants]\na = 1", "\ufefftrain = 1", "train.steps = 5\r\n", "[variants.'é']\n", "\0", "[]", "= 3"),
        *("[variants.lamb]\nname = 'adamw'", "x" * 100_000 + " = 1", "[variants]\n" + "a" * 100_000 + " = 1"),
    ]
)


@st.composite
def recipes(draw: st.DrawFn) -> bytes:
    """The content of a recipe's file."""
    kind = draw(st.sampled_from(["tree", "tree", "tree", "bytes", "huge", "text", "binary"]))
    if kind == "tree":
        return toml(draw(mutated(_whole_recipe()))).encode()
    if kind == "bytes":
        return draw(damaged(toml(_whole_recipe()).encode()))
    if kind == "huge":
        return f"{draw(KEYS)} = {draw(HUGE)}\n".encode()
    if kind == "text":
        return draw(TEXTS_OF_RECIPES).encode()
    return draw(st.binary(max_size=200))


def try_recipe(content: bytes, folder: Path) -> str:
    """A recipe is read and worked out."""
    path = folder / "recipe.toml"
    path.write_bytes(content)
    found = outcome(lambda: resolve(load(path, {})))
    if sorted(folder.iterdir()) != [path] or path.read_bytes() != content:
        raise Broken("something was written")
    return found


# --- texts ------------------------------------------------------------------------------------------------------------

PROSE = "".join(
    f"The {i}th quick brown fox, {i * i}, jumps over the lazy dog.\n" + "\n" * (i % 40 == 0) for i in range(300)
)
UTF8 = st.sampled_from(
    [
        *(PROSE.encode(), b"\xef\xbb\xbf" + PROSE.encode(), PROSE.replace("\n", "\r\n").encode(), b"word " * 60_000),
        *(
            b"x\n" * 50_000,
            "\U0001f0a1 ".encode() * 5000,
            "a\u0301\u202e\u200b\n\n".encode() * 5000,
            b"\x1b[2J\x07\n" * 900,
        ),
        *("漢字\n".encode() * 5000, b"[MASK] [SEP] [PAD] ##x\n" * 999, "\u2028x\u0085\x0c".encode() * 999),
    ]
)
OTHERS = st.sampled_from(
    [
        *(b"", b"\n \t\n", b"\0" * 999, PROSE.encode("utf-16"), PROSE.encode() + b"\xff", b"\xed\xa0\x80" * 99),
        *("déjà vu\n".encode("latin-1") * 999, b"x" * 300_000, PROSE.encode()[:90], b"\x00\x01PK\x03\x04"),
    ]
)
FILES = (
    UTF8
    | OTHERS
    | st.binary(max_size=300)
    | st.text(max_size=3000).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
NAMES = st.sampled_from(["a.txt", ".hidden", "b\nc", "é", "-x", "d/e/f.txt", "d/.g/h.txt", " ", "x" * 200])
SPECIAL = st.sampled_from(["missing", "", "x" * 300, "a\0b", "loop", "fifo", "empty", ".", "/dev/null", "~", "lone"])


@st.composite
def texts(draw: st.DrawFn) -> tuple[dict[str, bytes], list[str], dict[str, dict[str, Any]]]:
    """Files by name; what the recipe calls its text; its other settings."""
    files = draw(st.dictionaries(NAMES, UTF8 if draw(st.booleans()) else FILES, max_size=3))
    named = draw(st.lists(st.sampled_from(sorted(files)) if files else SPECIAL, min_size=1, max_size=3))
    if draw(st.integers(0, 4)) == 4:
        named.append(draw(SPECIAL))
    settings = {
        "data": {"sequence_length": draw(st.sampled_from([8, 32, 500])), "eval_windows": 8},
        "model": {"vocab_size": draw(st.sampled_from([64, 300, 5000])), "hidden_size": 8, "heads": 2},
    }
    return files, named, settings


def try_text(case: tuple[dict[str, bytes], list[str], dict[str, dict[str, Any]]], folder: Path) -> str:
    """A text is read, split and cut into windows."""
    files, named, settings = case
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    settings["data"]["text"] = [name if name in ("", "/dev/null") else f"{folder}/{name}" for name in named]

    def read() -> None:
        corpus = prepare(parse(settings, {}), Solo())
        length = settings["data"]["sequence_length"]
        if corpus.held_out.shape[1] != length or not len(corpus.held_out) or int(corpus.stream.min()) < 0:
            raise Broken(f"a corpus of {tuple(corpus.held_out.shape)}")
        if max(int(corpus.stream.max()), int(corpus.held_out.max())) >= corpus.vocab_size:
            raise Broken("a token beyond the vocabulary")

    return outcome(read)
