"""What a checkpoint holds of a process, and how it is put back. The files are in `checkpoint_files.py`."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebit.checkpoint_files import Tensors
from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.optim import FlatOptimizer
from onebit.packing import names_in, pack, unpack
from onebit.resize import ERRORS, MEANS
from onebit.sharding import is_sharded

Tree = dict[str, Any]
RESERVED = ("random", "model", "optimizer", "common", "shard", "worker")
"""What a process keeps of its own under these names."""


# -- what there is to save ---------------------------------------------------------------------------------------


def whole(model: nn.Module | None) -> nn.Module | None:
    """The model inside of wrappers that rename its parameters."""
    while model is not None and (held := getattr(model, "_orig_mod", None) or _in_ddp(model)) is not None:
        model = held
    return model


def _in_ddp(model: nn.Module) -> nn.Module | None:
    found = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
    return found if isinstance(found, nn.Module) else None


def collect(
    rank: int, model: nn.Module | None, optimizer: Any, named: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Tree, Tree]:
    """What is equal on all processes, and what is this one's own; tensors go into `tensors`."""
    shared: Tree = {}
    own: Tree = {"random": pack(_random_states(), f"process.{rank}.random", tensors)}
    apart = isinstance(optimizer, FlatOptimizer) and not optimizer.in_sync
    if model is not None:
        state = model.state_dict()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        common = {name: value for name, value in state.items() if name in parameters and not apart}
        rest = {name: value for name, value in state.items() if name not in common}
        shared["model"] = pack(common, "model", tensors)
        own["model"] = pack(rest, f"process.{rank}.model", tensors)
    if isinstance(optimizer, FlatOptimizer):
        shard = _shard(optimizer)
        common, mine = _parts(optimizer.state_dict(), apart)
        kept = pack(common, f"optimizer.{shard}", tensors)
        own |= {"optimizer": pack(mine, f"process.{rank}.optimizer", tensors), "shard": shard}
        own |= {"worker": optimizer.comm.rank, "common": kept if optimizer.comm.rank == 0 else None}
    elif optimizer is not None:
        state = optimizer.state_dict()
        if any(is_sharded(v) for s in state["state"].values() for v in s.values() if isinstance(v, Tensor)):
            raise ConfigError(
                f"{type(optimizer).__name__} holds sharded state (DTensor), which is saved for onebit's optimizers "
                "only; save it with torch.distributed.checkpoint itself"
            )
        shared["optimizer"] = pack({"class": type(optimizer).__name__, "state": state}, "optimizer", tensors)
    for name, part in named.items():
        state = part.state_dict()
        if not isinstance(state, dict):
            raise ConfigError(f"{name}.state_dict() is a {type(state).__name__}; it must be a dict")
        own[name] = pack(state, f"process.{rank}.{name}", tensors)
    return shared, own


def _shard(optimizer: FlatOptimizer) -> int:
    """Which shard of its layers this process holds; 0 where they are whole."""
    sharded = [p for group in optimizer.param_groups for p in group["params"] if is_sharded(p)]
    return int(sharded[0].device_mesh.get_local_rank()) if sharded else 0


def _parts(state: Tree, apart: bool) -> tuple[Tree, Tree]:
    """A state dict of ours in two: what all workers share, and this worker's own. `apart`: all of it is its own."""
    groups = [{key: value for key, value in group.items() if key != "onebit"} for group in state["param_groups"]]
    extra = {key: value for key, value in state["onebit"].items() if key != "rank"}
    whole = {"state": state["state"], "param_groups": groups}
    if apart:
        return {}, {**whole, "onebit": extra}
    mine = {key: extra.pop(key) for key in (*ERRORS, *MEANS) if key in extra}
    return {**whole, "onebit": extra}, {"onebit": mine}


def _random_states() -> Tree:
    """Of Python, numpy where it is used, torch, and this process's accelerator."""
    states: Tree = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Tree) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# -- and to put back -----------------------------------------------------------------------------------------------


class Saved:
    """A checkpoint, as seen from one process."""

    def __init__(self, path: Path, manifest: Tree, comm: Comm) -> None:
        for name, kind in {"step": int, "processes": int, "shared": dict, "own": list}.items():
            if type(manifest.get(name)) is not kind:
                raise _damaged(path, f"{name} is {manifest.get(name)!r:.60}, not of type {kind.__name__}")
        if len(manifest["own"]) != manifest["processes"] or any(type(own) is not dict for own in manifest["own"]):
            raise _damaged(path, f"it does not hold one table for each of {manifest['processes']} processes")
        self.path, self.comm = path, comm
        self.step: int = manifest["step"]
        self.shared: Tree = manifest["shared"]
        self.owns: list[Tree] = manifest["own"]
        self.processes: int = manifest["processes"]
        self.tensors = Tensors(path)
        self.mine = self.owns[comm.rank if self.processes == comm.size else 0]

    def part(self, tree: Any) -> Any:
        """A part of the state, with its tensors."""
        names = names_in(tree)
        if lacking := [name for name in names if name not in self.tensors.shapes]:
            raise ConfigError(f"the checkpoint {str(self.path)!r} lacks the tensor {lacking[0]}; load another one")
        return unpack(tree, self.tensors.read(names))

    def workers(self, shard: int) -> dict[int, Tree]:
        """By rank, what the processes kept that held a shard of the optimizer's layers."""
        found = {own["worker"]: own for own in self.owns if own.get("shard") == shard}
        if not found:
            shards = len({own["shard"] for own in self.owns if "shard" in own})
            raise ConfigError(
                f"the checkpoint {str(self.path)!r} has {shards} shards of an optimizer of ours and none with number "
                f"{shard}; use as many shards as saved it"
            )
        return found

    def optimizer_states(self, shard: int, only: int | None = None) -> Iterator[Tree]:
        """What each worker's `state_dict` was, one after the other; or that of one worker."""
        workers = self.workers(shard)
        common = self.part(workers[0]["common"])
        for rank in sorted(workers) if only is None else [only]:
            mine = self.part(workers[rank]["optimizer"])
            state = {**common, **{key: value for key, value in mine.items() if key != "onebit"}}
            yield {**state, "onebit": {**common.get("onebit", {}), **mine["onebit"], "rank": rank}}


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"the checkpoint {str(path)!r} is not as this library writes one: {what}; load another one")


class Before:
    """What is to be loaded into, as it was before: copies, so that a load that fails in the middle changes nothing."""

    def __init__(self, given: Tree, named: dict[str, Any]) -> None:
        self._parts = [part for part in (given["optimizer"], *named.values(), given["model"]) if part is not None]
        self._states = [copy.deepcopy(part.state_dict()) for part in self._parts]
        self._random = _random_states()

    def put_back(self) -> None:
        for part, state in zip(self._parts, self._states, strict=True):
            part.load_state_dict(state)
        _set_random_states(self._random)


def read(saved: Saved, given: Tree, named: dict[str, Any]) -> Tree:
    """Read what is to be loaded, and see that it fits, before anything is changed."""
    plan: Tree = {}
    for name, part in named.items():
        if name not in saved.mine:
            raise ConfigError(f"the checkpoint {str(saved.path)!r} has no {name}; load without one, or save it")
        plan[name] = saved.part(saved.mine[name])
        if plan[name].keys() != (here := part.state_dict()).keys():
            raise ConfigError(f"the {name} that was saved has {sorted(plan[name])}, this one {sorted(here)}")
        if odd := _other_kind(plan[name], here):
            raise ConfigError(f"the {name} that was saved has {odd}; load another checkpoint, or build the same {name}")
    if given["model"] is not None:
        plan["model"] = _read_model(saved, given["model"])
    if given["optimizer"] is not None and not isinstance(given["optimizer"], FlatOptimizer):
        found, mine = saved.part(saved.shared["optimizer"]), type(given["optimizer"]).__name__
        if found["class"] != mine:
            raise ConfigError(f"the optimizer that was saved is a {found['class']}, this one a {mine}")
        plan["optimizer"] = found["state"]
    return plan


def _other_kind(saved: Any, here: Any, where: str = "") -> str:
    """The first value of a part that is of another kind than what it would replace, in words; empty without one.

    None stands for any kind, and of dicts and lists that grow what both have is compared.
    """
    if saved is None or here is None:
        return ""
    if _kind(saved) != _kind(here):
        return f"{where.removeprefix('.')} of type {type(saved).__name__}, and this one {type(here).__name__}"
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(saved, dict):
        pairs = [(key, saved[key], here[key]) for key in saved if key in here]
    elif isinstance(saved, list | tuple):
        pairs = zip(range(len(saved)), saved, here, strict=False)
    return next((odd for key, was, now in pairs if (odd := _other_kind(was, now, f"{where}.{key}"))), "")


def _kind(value: Any) -> Any:
    if isinstance(value, bool):
        return bool
    return next(
        (kind for kind in (int | float, str, Tensor, dict, list | tuple) if isinstance(value, kind)), type(value)
    )


def _read_model(saved: Saved, model: nn.Module) -> Tree:
    """The model's new state dict."""
    packed = {**saved.shared["model"], **saved.mine["model"]}
    here = model.state_dict()
    if packed.keys() != here.keys():
        odd = sorted(packed.keys() ^ here.keys())[0]
        raise ConfigError(f"the model that was saved {'has' if odd in packed else 'lacks'} {odd}; build the same model")
    into: dict[str, Tensor] = {}
    for name, value in here.items():
        for tensor in names_in(packed[name]):
            shape, dtype = saved.tensors.shapes[tensor]
            if packed[name] != ["!tensor", tensor]:  # a tensor in what get_extra_state gave
                into[tensor] = torch.empty(shape, dtype=dtype)
                continue
            if not isinstance(value, Tensor) or (tuple(value.shape), value.dtype) != (shape, dtype):
                what = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"{name} is {what} here and was {shape} {dtype} when it was saved")
            into[tensor] = value.detach().clone().contiguous() if is_sharded(value) else torch.empty(shape, dtype=dtype)
    saved.tensors.read_into(into)
    return {name: unpack(packed[name], into) for name in here}


def apply(saved: Saved, given: Tree, named: dict[str, Any], plan: Tree) -> None:
    """Put everything back; the optimizer first, which refuses what does not fit before it changes anything."""
    optimizer, same = given["optimizer"], saved.processes == saved.comm.size
    if isinstance(optimizer, FlatOptimizer):
        shard = _shard(optimizer)
        workers, rank = saved.workers(shard), optimizer.comm.rank
        mine = next(saved.optimizer_states(shard, rank)) if len(workers) == optimizer.comm.size else None
        if mine is not None and optimizer.same_workers(mine["onebit"]):
            optimizer.load_state_dict(mine)
        else:
            optimizer.load_state_dicts(saved.optimizer_states(shard))
    elif optimizer is not None:
        optimizer.load_state_dict(plan["optimizer"])
    for name, part in named.items():
        part.load_state_dict(plan[name])
    if given["model"] is not None:
        given["model"].load_state_dict(plan["model"])
    if same:
        _set_random_states(saved.part(saved.mine["random"]))
