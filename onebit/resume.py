"""A run of `onebit train` that is broken off goes on: when it saves, what, and how it takes it up again."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebit import checkpoint
from onebit.comm import Comm, meeting_place
from onebit.errors import CommError, ConfigError
from onebit.recipe import Recipe
from onebit.text import Corpus

FOLDER = "checkpoints"
MAY_CHANGE = (
    *("workers", "min_workers", "timeout_s", "log_every", "check_every", "checksums"),
    *("checkpoint_every", "keep_checkpoints", "async_checkpoints", "restarts"),
)
"""Keys of [train] that do not decide what is learned, or, as the number of workers, are meant to change."""


NOT_KNOWN = -1.0  # for seconds, in files


@dataclass(frozen=True)
class Step:
    """What is remembered of a step: loss is this worker's, payload_bytes and seconds too.

    compute_s: of `seconds`, in forward and backward; None where a checkpoint of an older version did not say.
    """

    stage: str
    loss: Tensor
    lr: float
    payload_bytes: int
    seconds: float
    compute_s: float | None = None


def pack_steps(steps: Sequence[Step]) -> dict[str, Any]:
    """As one tensor for each kind of value."""
    stages = sorted({step.stage for step in steps})
    return {
        "stages": stages,
        "stage": torch.tensor([stages.index(step.stage) for step in steps], dtype=torch.int8),
        "loss": torch.tensor([float(step.loss) for step in steps], dtype=torch.float64),
        "lr": torch.tensor([step.lr for step in steps], dtype=torch.float64),
        "payload_bytes": torch.tensor([step.payload_bytes for step in steps], dtype=torch.int64),
        "seconds": torch.tensor([step.seconds for step in steps], dtype=torch.float64),
        "compute_s": torch.tensor(
            [NOT_KNOWN if step.compute_s is None else step.compute_s for step in steps], dtype=torch.float64
        ),
    }


def unpack_steps(packed: dict[str, Any], device: torch.device) -> list[Step]:
    """What `pack_steps` was given."""
    names = [packed["stages"][i] for i in packed["stage"].tolist()]
    numbers = (packed[key].tolist() for key in ("lr", "payload_bytes", "seconds"))
    losses = packed["loss"].to(device).unbind()
    held = packed["compute_s"].tolist() if "compute_s" in packed else [NOT_KNOWN] * len(names)  # not in older ones
    compute = [None if seconds < 0 else seconds for seconds in held]
    return [Step(*values) for values in zip(names, losses, *numbers, compute, strict=True)]


class Checkpoints:
    """Those of one run, in the folder that it fills."""

    def __init__(self, recipe: Recipe, corpus: Corpus, output: Path) -> None:
        """recipe: resolved."""
        self._train, self.folder = recipe.train, output / FOLDER
        text = hashlib.blake2b(corpus.tokenizer.encode(), digest_size=8)
        text.update(corpus.stream.numpy().tobytes())
        kept = [
            [f"{section}.{key}", str(value)]
            for section, part in recipe
            if section != "variants"
            for key, value in part
            if key != "text" and not (section == "train" and key in MAY_CHANGE)
        ]
        self._recipe = [*kept, ["text", f"checksum {text.hexdigest()}"]]

    def due(self, number: int) -> bool:
        """Whether step `number` is one after which the run is saved; not the last one."""
        every = self._train.checkpoint_every
        return bool(every) and number % every == 0 and number < self._train.steps

    def save(self, number: int, **parts: Any) -> None:
        """After a step. A collective."""
        checkpoint.save(
            self.folder,
            number,
            **parts,
            progress={"recipe": self._recipe},
            keep=self._train.keep_checkpoints,
            asynchronous=self._train.async_checkpoints,
        )

    def load(self, workers: int, **parts: Any) -> int:
        """Put back the last one; returns its step. A collective.

        Raises:
            ConfigError: it is another run's, or that of more workers than may be missing.
        """
        loaded = checkpoint.load(
            self.folder, **parts, check=lambda progress, saved: self._fits(progress, saved, workers)
        )
        return loaded.step

    def _fits(self, progress: Any, saved: int, workers: int) -> None:
        before, here = dict(progress["recipe"]), dict(self._recipe)
        if odd := sorted(before.keys() ^ here.keys()):
            which = "this run" if odd[0] in before else "the run that was saved"
            raise ConfigError(
                f"{which} has no {odd[0]}: it was saved by another version of onebit; resume it with that version, or "
                "start another run"
            )
        for name, now in here.items():
            if (was := before[name]) != now:
                raise ConfigError(
                    f"{name} is {now} and was {was} when the run was saved; resume it with the recipe it was started "
                    "with, or start another run"
                )
        least = self._train.min_workers
        if workers < saved and (least is None or workers < least):
            raise ConfigError(
                f"{workers} workers came to go on with a run of {saved}; "
                + (f"train.min_workers is {least}" if least else "train.min_workers allows no less")
                + "; start as many as before, or lower --min-workers"
            )

    def finish(self) -> None:
        """Wait for what is being written. A collective."""
        checkpoint.wait(self.folder)


BEAT_S = 1.0


class Roll:
    """Who arrived at which step, and who still runs, in the store that the workers met in: to name who is missing."""

    def __init__(self, comm: Comm) -> None:
        self._size, self._rank, self._at = comm.size, comm.rank, 0
        self._store = meeting_place(comm)
        if self._store is not None:
            threading.Thread(target=self._beat, name="onebit roll", daemon=True).start()

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store is gone, and soon this process
            while True:
                count += 1
                self._store.set(f"onebit/beat/{self._rank}", str(count))
                time.sleep(BEAT_S)

    def arrive(self, number: int) -> None:
        """This worker is about to exchange something in step `number`."""
        self._at = number
        if self._store is not None:
            self._store.set(f"onebit/at/{self._rank}", str(number))

    def late(self, error: CommError) -> CommError:
        """The error, with the workers that did not arrive where this one waits, or no longer run."""
        if self._store is None:
            return error
        try:
            beats = self._read("beat")
            time.sleep(3 * BEAT_S)
            still = [rank for rank, (a, b) in enumerate(zip(beats, self._read("beat"), strict=True)) if a == b]
            at = self._read("at")
        except RuntimeError:
            return error
        missing = [f"worker {rank} no longer runs (last seen at step {at[rank]})" for rank in still]
        missing += [
            f"worker {rank} has not arrived (last seen at step {step})"
            for rank, step in enumerate(at)
            if step < self._at and rank not in still
        ]
        return CommError(f"{error}. At step {self._at}: {', '.join(missing)}") if missing else error

    def _read(self, what: str) -> list[int]:
        """A number of each worker; 0 where there is none yet."""
        keys = [f"onebit/{what}/{rank}" for rank in range(self._size)]
        return [int(self._store.get(key)) if self._store.check([key]) else 0 for key in keys]
