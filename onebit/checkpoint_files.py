"""The folder of a checkpoint: written beside its place and moved there when complete; every file has its checksum.

    FOLDER/step-00000100/checkpoint.json        what JSON can say, and the checksums of all other files
    FOLDER/step-00000100/shard-00001-...        tensors of the first process, safetensors, and so on
    FOLDER/step-00000090.1/                     written after the run was set back from step 100: the later one
    FOLDER/step-00000200.partial/               not complete: is being written, or its writer was killed

Tensors are written and read by torch.distributed.checkpoint, in the format of safetensors.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebit.comm import Comm, all_or_none, first_says
from onebit.errors import ConfigError
from onebit.sharding import local

log = logging.getLogger("onebit")

MANIFEST = "checkpoint.json"
FORMAT = 1
PARTIAL = ".partial"
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def complete(folder: Path) -> list[tuple[int, Path]]:
    """The steps and folders of all complete checkpoints, in the order in which they were written."""
    return [(step, path) for _, step, path in _complete(folder)]


def _complete(folder: Path) -> list[tuple[int, int, Path]]:
    """The same with how often the run had been set back before."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match[2] or 0), int(match[1]), path))
    return sorted(found)


def write(
    folder: Path, step: int, manifest: dict[str, Any], tensors: dict[str, Tensor], comm: Comm, group: Any, keep: int
) -> Path:
    """Write a checkpoint and remove all but the last `keep`. A collective of all processes.

    Args:
        folder: of all checkpoints of a run, shared by the processes.
        step: names this one.
        manifest: what worker 0 writes beside "format", "step" and "files".
        tensors: this process's; those of the same name on several processes are equal and written once.
        comm: the processes; group: their group for torch.distributed.checkpoint, None where there is one process.
        keep: >= 1.

    Raises:
        ConfigError: on all processes: it cannot be written. Complete checkpoints are as they were.
    """
    partial = folder / f"step-{step:08d}{PARTIAL}"
    all_or_none(comm, (lambda: _make_empty(partial)) if comm.rank == 0 else lambda: None)
    all_or_none(comm, lambda: _check_shared(partial))
    files = all_or_none(comm, lambda: _write_tensors(partial, tensors, comm, group))
    every: dict[str, list[int]] = {}
    for part in comm.all_gather_bytes(json.dumps(files).encode()):
        every |= json.loads(part)
    target = folder / first_says(comm, lambda: _target(folder, step))

    def publish() -> None:
        for name, (size, _) in every.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != size:
                raise OSError(None, f"{name}, which another process wrote, is not there; all need the same disk")
        content = {"format": FORMAT, "step": step, "files": every, **manifest}
        text = json.dumps(content, allow_nan=False)
        _write_file(partial / MANIFEST, json.dumps({"content": content, "crc32": zlib.crc32(text.encode())}).encode())
        partial.rename(target)
        _flush(folder)
        _remove_old(folder, keep)

    all_or_none(comm, (lambda: _guarded(publish, target)) if comm.rank == 0 else lambda: None)
    return target


def _make_empty(partial: Path) -> None:
    def make() -> None:
        for left in [partial, *partial.parent.glob(f"step-*{PARTIAL}")]:
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)

    _guarded(make, partial)


def _check_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise ConfigError(
            f"the checkpoint's folder {str(partial)!r}, which process 0 has made, is not there on this process; all "
            "processes need the same disk under the same path"
        )


def _write_tensors(partial: Path, tensors: dict[str, Tensor], comm: Comm, group: Any) -> dict[str, list[int]]:
    """This process's files: name -> size and checksum."""
    writer = dcp().HuggingFaceStorageWriter(str(partial), save_distributed=True)
    whole = _apart(tensors)
    mine = f"shard-{comm.rank + 1:05d}-"
    found: dict[str, list[int]] = {}

    def save() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp().save(whole, storage_writer=writer, process_group=group, no_dist=comm.size == 1)
        for path in sorted(partial.glob(mine + "*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            found[path.name] = [path.stat().st_size, checksum(path)]

    _guarded(save, partial)
    return found


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, contiguous, and copied where two share memory, as tied weights do: safetensors has no word for that."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        place = local(whole).data_ptr()
        found[name] = whole.clone() if place in seen else whole
        seen.add(place)
    return found


def _target(folder: Path, step: int) -> str:
    """The name of a checkpoint: after a run was set back, steps are written again, and what they follow counts less."""
    before = _complete(folder)
    turn, last, _ = before[-1] if before else (0, -1, folder)
    turn += step <= last
    return f"step-{step:08d}" + (f".{turn}" if turn else "")


def _remove_old(folder: Path, keep: int) -> None:
    """What goes wrong here is logged: the new checkpoint is there."""
    for _, path in complete(folder)[:-keep]:
        gone = path.with_name(path.name + PARTIAL)
        try:
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)  # else a kill in the middle would leave what looks complete
            shutil.rmtree(gone)
        except OSError as error:
            log.warning("the old checkpoint %s cannot be removed: %s", path, error.strerror or error)


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make sure that a rename in it lasts."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _guarded(action: Any, where: Path) -> None:
    """Do it; what goes wrong is one ConfigError."""
    try:
        action()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"the checkpoint {str(where)!r} cannot be written: {reason}; free the disk, or choose another folder"
        ) from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch.distributed.checkpoint raises one that is no Exception
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"the checkpoint {str(where)!r} cannot be written: {type(error).__name__}: {lines[-1] if lines else error}"
        ) from error


def read_manifest(path: Path) -> dict[str, Any]:
    """What `write` put into the manifest.

    Raises:
        ConfigError: it cannot be read, or is none of ours.
    """
    try:
        sealed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        content = sealed["content"]
        whole = sealed["crc32"] == zlib.crc32(json.dumps(content, allow_nan=False).encode())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {str(error)[:200]!r}"
        raise ConfigError(f"{str(path / MANIFEST)!r} cannot be read ({why}); load another checkpoint") from None
    if not whole:
        raise ConfigError(f"{str(path / MANIFEST)!r} is damaged: its checksum does not fit; load another checkpoint")
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("files"), dict):
        found = content.get("format") if isinstance(content, dict) else content
        raise ConfigError(
            f"{str(path / MANIFEST)!r} has format {repr(found)[:40]}, or no list of files; {FORMAT} is known here; "
            "load what this library saved"
        )
    return content


def verify(path: Path, files: dict[str, Any], part: int, parts: int) -> None:
    """Raise ConfigError unless the files are there, and every `parts`-th of them has its size and checksum."""
    present = {found.name for found in path.iterdir()} - {MANIFEST}
    if extra := sorted(present - files.keys()):
        raise ConfigError(f"{str(path / extra[0])!r} does not belong to this checkpoint; move it away")
    for i, (name, expected) in enumerate(sorted(files.items())):
        if name not in present:
            raise ConfigError(f"{str(path / name)!r} is missing; load another checkpoint")
        if i % parts == part and [(path / name).stat().st_size, checksum(path / name)] != expected:
            raise ConfigError(
                f"{str(path / name)!r} is damaged: size or checksum are not those of what was written; load another one"
            )


class Tensors:
    """What can be read from a checkpoint.

    Attributes:
        shapes: name -> shape and dtype.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        metadata = dcp().HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        self.shapes = {name: (tuple(item.size), item.properties.dtype) for name, item in metadata.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors on the CPU, in full."""
        wanted = {name: torch.empty(self.shapes[name][0], dtype=self.shapes[name][1]) for name in names}
        return self.read_into(wanted)

    def read_into(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fill tensors; of a DTensor this process's shard, however it was cut when it was saved."""
        if tensors:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader = dcp().HuggingFaceStorageReader(str(self._path))
                dcp().load(tensors, storage_reader=reader, no_dist=True)
        return tensors


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            found = zlib.crc32(block, found)
    return found


def dcp() -> Any:
    """torch.distributed.checkpoint, with what is needed of it.

    Raises:
        ConfigError: safetensors is not installed, or torch is too old.
    """
    try:
        import safetensors.torch  # noqa: F401
        import torch.distributed.checkpoint as found
    except ImportError:
        raise ConfigError(
            "checkpoints are written with safetensors, which is missing: pip install safetensors"
        ) from None
    if not hasattr(found, "HuggingFaceStorageReader"):
        raise ConfigError(
            f"torch is {torch.__version__}, whose torch.distributed.checkpoint writes no safetensors; use torch 2.9 or "
            "newer, or save state_dict() on every worker yourself"
        )
    return found
