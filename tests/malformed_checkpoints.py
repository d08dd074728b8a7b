"""Malformed checkpoints as hypothesis strategies, and the law of `malformed.py` for them."""

from __future__ import annotations

import copy
import json
import tempfile
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from malformed import FILES, VALUES, Broken, damaged, mutated, outcome
from small import MODEL
from test_resize import WARMUP, loss_of, make

from onebit import checkpoint
from onebit.comm import Solo
from onebit.resume import Step, pack_steps, unpack_steps

KINDS = ("content", "content", "content", "header", "header", "tensors", "bytes", "manifest", "other", "foreign")
SAVED = ("OneBitLamb", "OneBitAdam", "ZeroOneAdam", "LocalVarianceLamb", "int8", "compact", "Lamb", "AdamW")


class Memory:
    """What a run remembers, as `onebit train` does."""

    def __init__(self) -> None:
        self.steps = [Step("warmup", torch.tensor(1.5, dtype=torch.float64), 0.1, 7, 0.25)] * 3

    def state_dict(self) -> dict[str, Any]:
        return {"bad": 0, "steps": pack_steps(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = unpack_steps(state["steps"], torch.device("cpu"))


def parts(name: str, steps: int = 0) -> dict[str, Any]:
    """What a checkpoint is made of, after some steps."""
    model = copy.deepcopy(MODEL)
    made = torch.optim.AdamW(model.parameters()) if name == "AdamW" else make(name, model.parameters(), Solo())
    schedule = torch.optim.lr_scheduler.StepLR(made, 3)
    found = {"model": model, "optimizer": made, "scheduler": schedule, "others": {"job": Memory()}}
    for step in range(steps):
        one_step(found, step)
        found["scheduler"].step()
    return found


def one_step(found: dict[str, Any], step: int) -> None:
    found["optimizer"].zero_grad()
    loss_of(found["model"], step, 0, 1).backward()
    found["optimizer"].step()


@cache
def saved(name: str) -> dict[str, bytes]:
    """The files of a good checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(folder, 5, progress={"next": 5, "seen": [1, 2]}, **parts(name, WARMUP + 2)).wait()
        return {found.name: found.read_bytes() for found in path.iterdir()}


def sealed(content: Any) -> bytes:
    """A manifest whose checksum fits, whatever it says."""
    return json.dumps({"content": content, "crc32": zlib.crc32(json.dumps(content).encode())}).encode()


def content_of(files: dict[str, bytes]) -> Any:
    return json.loads(files["checkpoint.json"])["content"]


def resealed(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with sizes and checksums made to fit."""
    content = content_of(files)
    listed = {name: [len(data), zlib.crc32(data)] for name, data in files.items() if name != "checkpoint.json"}
    return {**files, "checkpoint.json": sealed({**content, "files": listed})}


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[str, str, dict[str, bytes], bool]:
    """Whose it is meant to be, what was done to it, its files, whether what it is loaded into has trained."""
    name = draw(st.sampled_from(SAVED))
    files = dict(saved(name))
    data = next(key for key in files if key != "checkpoint.json")
    plain = st.floats(allow_nan=False, allow_infinity=False).map(abs) | VALUES.filter(_plain)
    kind = draw(st.sampled_from(KINDS))
    if kind == "content":
        content = content_of(files)
        held, key = draw(st.sampled_from([({"": content}, ""), *_parts_of(content)]))
        held[key] = draw(mutated(held[key], plain))
        files["checkpoint.json"] = sealed(held.get("", content) if key == "" else content)
    elif kind == "header":
        length = int.from_bytes(files[data][:8], "little")
        header = json.dumps(draw(mutated(json.loads(files[data][8 : 8 + length]), plain))).encode()
        files[data] = len(header).to_bytes(8, "little") + header + files[data][8 + length :]
        files = resealed(files)
    elif kind == "tensors":
        files[data] = draw(damaged(files[data]))
        files = resealed(files)
    elif kind in ("bytes", "manifest"):
        which = data if kind == "bytes" else "checkpoint.json"
        files[which] = draw(damaged(files[which]))
    elif kind == "other":
        other = saved(draw(st.sampled_from(SAVED)))
        files["checkpoint.json" if draw(st.booleans()) else data] = other[draw(st.sampled_from(sorted(other)))]
        files = resealed(files) if draw(st.booleans()) and b"content" in files["checkpoint.json"] else files
    else:
        for _ in range(draw(st.integers(1, 2))):
            files[draw(st.sampled_from(["checkpoint.json", data, "x", "shard-00002-y.safetensors", ".z"]))] = draw(
                FILES
            )
    return name, kind, files, draw(st.booleans())


def _parts_of(content: Any) -> list[tuple[Any, Any]]:
    """Where in a manifest the parts of a run are."""
    own, shared = content["own"][0], content["shared"]
    return [(part, key) for part in (own, shared) for key in part if isinstance(part[key], dict)]


def _plain(value: Any) -> bool:
    """Whether strict JSON can say it."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def state_of(found: dict[str, Any]) -> Any:
    named = (found["model"], found["optimizer"], found["scheduler"], found["others"]["job"])
    return copy.deepcopy([part.state_dict() for part in named]), torch.get_rng_state()


@cache
def good_state(name: str) -> Any:
    """What a good checkpoint gives."""
    found = parts(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-00000005"
        path.mkdir()
        for file, data in saved(name).items():
            (path / file).write_bytes(data)
        checkpoint.load(folder, **found)
    return state_of(found)[0]


def same(a: Any, b: Any) -> bool:
    """To the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.tolist() == b.tolist()
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and type(a) is type(b)


def try_checkpoint(case: tuple[str, str, dict[str, bytes], bool], folder: Path) -> str:
    """A checkpoint is loaded, and a step is made with what it gave."""
    name, kind, files, trained = case
    path = folder / "step-00000005"
    path.mkdir()
    for file, data in files.items():
        (path / file).write_bytes(data)
    found = parts(name, WARMUP + 1 if trained else 0)
    before = state_of(found)
    said = outcome(lambda: checkpoint.load(folder, **found))
    if said == "refused" and not same(before, state_of(found)):
        raise Broken("refused, and yet something has been changed")
    if said == "works" and kind in ("bytes", "manifest", "foreign") and not same(state_of(found)[0], good_state(name)):
        raise Broken("damage went unnoticed")
    if {file.name: file.read_bytes() for file in path.iterdir()} != files:
        raise Broken("the files have been changed")
    outcome(lambda: one_step(found, 9))
    with suppress(ArithmeticError):  # a number may be any number; what a schedule makes of 0 is its own affair
        found["scheduler"].step()
    return said
