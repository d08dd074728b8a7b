"""Checkpoints of a whole run: model, optimizer, schedule, scaler, position in the data, random states.

    saving = onebit.checkpoint.save("runs/a/checkpoints", step, model=model, optimizer=optimizer, scheduler=scheduler)
    loaded = onebit.checkpoint.load("runs/a/checkpoints", model=model, optimizer=optimizer, scheduler=scheduler)

Every process writes what only it has, such as its errors; what is equal on all is written once, a part by each. The
same number of workers goes on to the bit. Another one goes on from the same weights, momentum, variances and mean of
errors (`load_state_dicts`). A checkpoint appears when it is complete; until then the last one stays what it is. Files
hold numbers and text: nothing in them is run.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebit.checkpoint_files import complete, read_manifest, verify, write
from onebit.checkpoint_state import RESERVED, Before, Saved, Tree, apply, collect, read, whole
from onebit.checks import check_whole
from onebit.comm import Comm, all_or_none, beside_training, check_same, first_says
from onebit.errors import ConfigError
from onebit.optim import innermost
from onebit.packing import pack
from onebit.virtual import Virtual

log = logging.getLogger("onebit")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint said besides the state it put back.

    Attributes:
        step: as it was saved.
        progress: what the caller gave to `save`, such as the position in the data.
        workers: how many processes saved it.
        path: its folder.
    """

    step: int
    progress: Any
    workers: int
    path: Path


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, work: Callable[[], Path], asynchronous: bool) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.reported = False  # whether somebody has waited for it, and heard what went wrong
        self._work, self._thread = work, threading.Thread(target=self._run, name="onebit checkpoint")
        if asynchronous:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except BaseException as error:
            self._error = error

    def wait(self) -> Path:
        """Its folder, once it is complete. Raises what went wrong."""
        if self._thread.ident is not None:
            self._thread.join()
        self.reported = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


_last: dict[Path, Saving] = {}


@torch.no_grad()
def save(
    folder: str | Path,
    step: int,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    others: Mapping[str, Any] | None = None,
    progress: Any = None,
    keep: int = 3,
    asynchronous: bool = False,
) -> Saving:
    """Save a run at a step. A collective of all processes of torch.distributed, or of one process without it.

    Args:
        folder: of the run's checkpoints, the same and shared on all machines; made if need be.
        step: >= 0, names the checkpoint.
        model: its parameters and buffers; a DistributedDataParallel or compiled model counts as what it holds.
        optimizer: of this library or of torch; a wrapper that holds one as its `optimizer` counts as that.
        scheduler, scaler: whatever has state_dict and load_state_dict, of plain values and tensors. Each process's own.
        others: more of the kind, by name.
        progress: plain values, the same on all processes: position in the data and the like.
        keep: how many checkpoints stay, >= 1; older ones are removed.
        asynchronous: copy the state now and write it while training goes on; the next `save` or `load`, and the end of
            the process, wait for it. Needs memory for a copy.

    Returns:
        `wait()` on it gives the checkpoint's folder. Without `asynchronous` it is complete already.

    Raises:
        ConfigError: on all processes: something cannot be saved safely, or not be written.
    """
    folder = Path(folder).resolve()
    comm, group = _side(optimizer)
    all_or_none(comm, lambda: _finish(folder))
    tensors: dict[str, Tensor] = {}

    def everything() -> tuple[Tree, Tree]:
        check_whole("step", step, 0)
        check_whole("keep", keep, 1)
        shared, own = collect(comm.rank, whole(model), innermost(optimizer), _named(scheduler, scaler, others), tensors)
        return {**shared, "progress": pack(progress, "progress", tensors)}, own

    shared, own = all_or_none(comm, lambda: _collected(everything))
    same = [("folder", str(folder)), ("step", str(step)), ("progress", json.dumps(shared["progress"]))]
    check_same(comm, "what is saved", same)
    if asynchronous:
        tensors = {name: value.detach().clone() for name, value in tensors.items()}
    owns = [json.loads(part) for part in comm.all_gather_bytes(json.dumps(own).encode())]
    manifest = {"processes": comm.size, "shared": shared, "own": owns}
    saving = Saving(lambda: write(folder, step, manifest, tensors, comm, group, keep), asynchronous)
    if asynchronous:
        _last[folder] = saving
    else:
        saving.wait()
    return saving


@torch.no_grad()
def load(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    others: Mapping[str, Any] | None = None,
    step: int | None = None,
    check: Callable[[Any, int], None] | None = None,
) -> Loaded:
    """Go on from a checkpoint, the last complete one or that of `step`. A collective, as `save`.

    What is not given is not loaded. With as many processes as saved it, random states are put back too. A copy of
    what it is loaded into is held meanwhile, and put back if something fails in the middle.

    Args:
        check: called with `progress` and the number of processes that saved it before anything is changed; it may
            raise a ConfigError.

    Raises:
        ConfigError: on all processes: there is none, it is damaged or not ours, or does not fit what it is loaded into.
            Nothing has been changed then.
    """
    folder = Path(folder).resolve()
    comm, _ = _side(optimizer)
    all_or_none(comm, lambda: _finish(folder))
    path = _chosen(folder, step, comm)
    manifest = all_or_none(comm, lambda: read_manifest(path))
    all_or_none(comm, lambda: _on_disk(lambda: verify(path, manifest["files"], comm.rank, comm.size), path))
    saved = all_or_none(comm, lambda: _on_disk(lambda: Saved(path, manifest, comm), path))
    given = {"model": whole(model), "optimizer": innermost(optimizer)}
    named = all_or_none(comm, lambda: _named(scheduler, scaler, others))
    progress = all_or_none(comm, lambda: _on_disk(lambda: saved.part(saved.shared["progress"]), path))
    all_or_none(comm, lambda: None if check is None else check(progress, saved.processes))
    plan = all_or_none(comm, lambda: _on_disk(lambda: read(saved, given, named), path))
    before = all_or_none(comm, lambda: _on_disk(lambda: Before(given, named), path))
    try:
        all_or_none(comm, lambda: _on_disk(lambda: apply(saved, given, named, plan), path))
    except BaseException:
        before.put_back()
        raise
    if comm.rank == 0 and saved.processes != comm.size:
        log.info("%d processes go on from what %d saved; random states are new", comm.size, saved.processes)
    return Loaded(saved.step, progress, saved.processes, path)


def _named(scheduler: Any, scaler: Any, others: Mapping[str, Any] | None) -> dict[str, Any]:
    """All that is saved by its state_dict and nothing more, by name."""
    known = {"scheduler": scheduler, "scaler": scaler}
    if taken := sorted((others or {}).keys() & {*known, *RESERVED}):
        raise ConfigError(f"others has {taken[0]!r}, a name that is taken; choose another one")
    return {name: part for name, part in {**known, **(others or {})}.items() if part is not None}


def latest(folder: str | Path) -> int | None:
    """The step of the last complete checkpoint in a folder; None: there is none. No collective."""
    found = complete(Path(folder))
    return found[-1][0] if found else None


def wait(folder: str | Path) -> None:
    """Wait for the checkpoint that is being written into a folder, if there is one; raises what went wrong."""
    _finish(Path(folder).resolve())


def _finish(folder: Path) -> None:
    """Whatever is being written, wherever: all of it talks in one group. `folder`: whose errors are raised here."""
    for place, saving in list(_last.items()):
        del _last[place]
        try:
            if not saving.reported:
                saving.wait()
        except ConfigError as error:
            if place == folder:
                raise
            log.warning("%s", error)


def _side(optimizer: Any) -> tuple[Comm, Any]:
    """Who takes part: all processes, talking in a group of their own on the CPU. Made once."""
    if isinstance(getattr(innermost(optimizer), "comm", None), Virtual):
        raise ConfigError(
            "virtual workers share one process and cannot write checkpoints; keep the state_dict() of each, or use "
            "processes"
        )
    return beside_training()


def _chosen(folder: Path, step: int | None, comm: Comm) -> Path:
    """The checkpoint to load, as process 0 sees it, on all processes."""

    def choose() -> str:
        found = [(at, path) for at, path in complete(folder) if step is None or at == step]
        if not found:
            there = ", ".join(str(at) for at, _ in complete(folder)) or "none"
            which = "" if step is None else f" of step {step}"
            raise ConfigError(f"{str(folder)!r} holds no complete checkpoint{which}; there are: {there}")
        return found[-1][1].name

    return folder / first_says(comm, choose)


def _collected(action: Callable[[], Any]) -> Any:
    """Do it; what somebody's state_dict raises is one ConfigError, so that no other process waits for this one."""
    try:
        return action()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the state cannot be collected: {type(error).__name__}: {error}") from error


def _on_disk(action: Callable[[], Any], path: Path) -> Any:
    """Do it; what the disk or the format makes of it is one ConfigError."""
    try:
        return action()
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except KeyError as error:
        raise ConfigError(f"the checkpoint {str(path)!r} lacks {error}; load another one") from error
    except BaseException as error:  # torch.distributed.checkpoint raises one that is no Exception
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f"{type(error).__name__}: {lines[0][:300] if lines else repr(error)}"
        raise ConfigError(f"the checkpoint {str(path)!r} cannot be loaded: {said}; load another one") from error
