"""The state that n workers saved as that of another number of workers.

What is equal on all workers is laid out anew. Of what is each worker's own only means count: the mean of the worker
errors plus the server errors is what training still owes, so every new worker gets the mean of the worker errors, and
its part of the server errors, which are cut anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from onebit.kernels.compact import Int8
from onebit.layout import FlatLayout

Extra = dict[str, Any]
"""The entry "onebit" of a state dict."""
ERRORS = ("errors", "quantised")
"""Entries that hold the errors of an exchange, see `Exchange.state`."""
MEANS = ("own", "smoothed")
"""Entries, [layout.numel] each, whose mean over the workers counts."""


class Places:
    """Where the errors of `workers` workers lie in each bucket, with `local_size` of them on a machine.

    Machine i's worker j has the rank i * local_size + j, errors of the j-th part of a bucket, and serves the chunk
    j * machines + i (`two_level`). With one worker per machine that is the whole bucket, and the chunk of its rank.
    """

    def __init__(self, workers: int, local_size: int) -> None:
        self.parts, self._machines = local_size, workers // local_size

    def part(self, rank: int) -> int:
        return rank % self.parts

    def chunk(self, rank: int) -> int:
        return self.part(rank) * self._machines + rank // self.parts


class Resize:
    """From the flat order for one number of workers to that for another, and what the worker that serves `chunk` gets.

    Attributes:
        old, new: the layouts, of the same parameters in buckets with the same layers.
    """

    def __init__(self, old: FlatLayout, new: FlatLayout, chunk: int) -> None:
        self.old, self.new, self._chunk = old, new, chunk

    def flat(self, values: Tensor, padding: float = 0.0) -> Tensor:
        """[old.numel] -> [new.numel]."""
        out = torch.full((self.new.numel,), padding, dtype=values.dtype, device=values.device)
        for mine, theirs in zip(self.new.views(out), self.old.views(values), strict=True):
            mine.copy_(theirs)
        return out

    def own(self, extras: Iterable[Extra], dtype: torch.dtype) -> Extra:
        """The entries of `ERRORS` and `MEANS`, from those of all old workers in order, or of one that has folded.

        They are read one after the other. Means are taken in float64 and rounded to `dtype`.
        """
        sums: dict[tuple[str, str], Tensor] = {}
        compact, count = set(), 0
        for worker, extra in enumerate(extras):
            count += 1
            saved = dict(map(tuple, extra.get("structure", ())))
            places = Places(self.old.workers, int(saved.get("workers of a machine", 1)))
            for kind in ERRORS:
                if extra.get(kind) is None:
                    continue
                error = extra[kind]["worker_error"]
                if not isinstance(error, Tensor):
                    compact.add(kind)
                    error = torch.cat([Int8(*pair).read() for pair in error])
                _add(sums, (kind, "worker"), self._whole(error, places, worker))
                _add(sums, (kind, "server"), self._served(extra[kind]["server_error"], places.chunk(worker)))
            for name in MEANS:
                if extra.get(name) is not None:
                    _add(sums, (name, ""), extra[name])
        found: Extra = {name: self.flat(sums[name, ""] / count).to(dtype) for name in MEANS if (name, "") in sums}
        for kind in ERRORS:
            if (kind, "worker") in sums:
                error = self.flat(sums[kind, "worker"] / count).to(dtype)
                server = self._mine(self.flat(sums[kind, "server"])).to(dtype)
                found[kind] = {"worker_error": self._as_int8(error) if kind in compact else error}
                found[kind]["server_error"] = server
        return found

    def _whole(self, error: Tensor, places: Places, worker: int) -> Tensor:
        """A worker's errors where they lie in the flat order, [old.numel]; those of a part, so that the mean over all
        workers is that over the machines."""
        if error.numel() == self.old.numel:  # also after `fold_errors`
            return error
        full = torch.zeros(self.old.numel, dtype=error.dtype, device=error.device)
        sizes = [bucket.numel // places.parts for bucket in self.old.buckets]
        for bucket, part in zip(self.old.buckets, torch.split(error, sizes), strict=True):
            full[bucket.slice].view(places.parts, -1)[places.part(worker)] = part * places.parts
        return full

    def _served(self, server_error: Tensor, chunk: int) -> Tensor:
        """A worker's server errors where they lie in the flat order, [old.numel]."""
        full = torch.zeros(self.old.numel, dtype=server_error.dtype, device=server_error.device)
        for bucket in self.old.buckets:
            full[bucket.slice].view(bucket.workers, -1)[chunk] = server_error[bucket.served_slice]
        return full

    def _mine(self, full: Tensor) -> Tensor:
        """Of [new.numel], what this worker serves: [new.numel / workers]."""
        return torch.cat([full[bucket.slice].view(bucket.workers, -1)[self._chunk] for bucket in self.new.buckets])

    def _as_int8(self, error: Tensor) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for bucket in self.new.buckets:
            held = Int8.zeros(bucket, error.device)
            held.write(error[bucket.slice])
            pairs.append((held.data, held.scales))
        return pairs


def _add(sums: dict[tuple[str, str], Tensor], key: tuple[str, str], values: Tensor) -> None:
    sums[key] = sums[key].add_(values) if key in sums else values.double()
