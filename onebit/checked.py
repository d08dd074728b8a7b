"""`Checked`: another comm with a checksum on all that travels through it, and `check_replicas`, which compares weights.

A message of all_to_all, all_gather or all_gather_bytes is followed by its CRC-32, 4 bytes, lowest first. Whoever
receives it computes the checksum again. After each collective every worker says in a short statement what it found, so
that all raise the same error at the same place. The sum of an all_reduce is made on the way and cannot carry a
checksum; there the statement is the checksum of the result, which must be the same on all workers.

What is found: every change of up to 32 bits in a row, of any two bits of a message, of any three bits of one below
11 kB; of all other changes, all but one in 2^32. In an all_reduce, whatever made one worker's result another.

What is not found: what was wrong before it was sent; and in an all_reduce a number that was damaged before or while it
was added, so that all workers got the same wrong sum. 16-bit and 32-bit means of gradients travel that way; integers
and single bits do not.

A statement holds its value and the CRC-32 of that in `COPIES` copies, the first intact one of which counts: flips that
the checksum of a message is sure to find leave a statement readable, and a log line says so. A worker that finds no
intact copy raises alone; the others get their error when it is gone, as with any worker that ends.

An error in a step leaves weights and state of Lamb, OneBitLamb, OneBitAdam and ZeroOneAdam as they were before it, but
that a request to wake dead elements is forgotten if the exchange of their mask was hit, until it is made again. The
optimizers with a local variance exchange it after the update where it is due; an error there leaves the update made.

Cost: one more small exchange and one wait per collective, and two passes over the bytes, on the CPU: what lies on an
accelerator is copied to the host, which waits for it. Buckets still overlap, since they are started before the first
is waited for, but for all_reduce.
"""

from __future__ import annotations

import ctypes
import json
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onebit.comm import Comm, Pending
from onebit.errors import CommError, ConfigError, MismatchError

log = logging.getLogger("onebit")

CHECKSUM_BYTES = 4
COPIES = 4  # one more than the flips that a checksum is sure to find
STATEMENT_BYTES = COPIES * (4 + CHECKSUM_BYTES)
WHAT_TO_DO = (
    "memory, a network card or the way between them changes data; look into the logs of these machines, and start "
    "all workers again from the state that was saved last"
)


class Checked(Comm):
    """The workers of another comm, with every message checked: see the top of this file.

    All workers must use it, or none; `wait` is a collective too, called in the same order on all. Results have the same
    bits as those of the comm inside. Counted on top of what it counts, per worker of n: (n - 1) * `CHECKSUM_BYTES` for
    a message, (n - 1) * `STATEMENT_BYTES` for a collective.

    Args:
        comm: the one that moves the bytes; of any kind.

    Raises:
        ConfigError: it is no `Comm`.
        CommError: by `wait` of a Pending, all_reduce and all_gather_bytes, on all workers: something was damaged.
    """

    def __init__(self, comm: Comm) -> None:
        if not isinstance(comm, Comm):
            raise ConfigError(
                f"Checked was given {comm!r}; it takes a comm, such as onebit.comm.Distributed() or that of run_workers"
            )
        self._comm = comm

    def __reduce__(self) -> tuple[Any, ...]:
        return Checked, (self._comm,)

    def beside(self) -> Checked:
        return Checked(self._comm.beside())

    def control(self) -> Checked:
        return Checked(self._comm.control())

    def split(self, groups: Sequence[Sequence[int]]) -> Checked:
        return Checked(self._comm.split(groups))

    @property
    def inner(self) -> Comm:
        """The comm inside."""
        return self._comm

    @property
    def ranks(self) -> list[int]:
        """As of the comm inside; empty if it has none."""
        return getattr(self._comm, "ranks", [])

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        received = self._comm.all_gather_bytes(data + _crc_bytes(data))
        self._judge([_fits(item) for item in received], "all_gather_bytes", None)
        return [item[:-CHECKSUM_BYTES] for item in received]

    def _all_to_all(self, messages: Tensor) -> Pending:
        self.payload_bytes += (self.size - 1) * CHECKSUM_BYTES
        sent = _sealed(messages)
        return _Sealed(self, "all_to_all", sent, self._comm.all_to_all(sent))

    def _all_gather(self, message: Tensor) -> Pending:
        self.payload_bytes += (self.size - 1) * CHECKSUM_BYTES
        sent = _sealed(message.reshape(1, -1)).view(-1)
        return _Sealed(self, "all_gather", sent, self._comm.all_gather(sent))

    def _all_reduce(self, tensor: Tensor) -> None:
        self._comm.all_reduce(tensor)
        found = self._agree(_crc(tensor.detach().reshape(-1).view(torch.uint8).cpu()), tensor.device)
        if len(set(found)) > 1:
            usual = max(found, key=found.count)
            few = [i for i, value in enumerate(found) if value != usual]
            who = "" if found.count(usual) <= len(few) else f" (not what most have: {_workers(few)})"
            raise CommError(
                f"the result of an all_reduce is not the same on all {self.size} workers{who}; {WHAT_TO_DO}"
            )

    def _open(self, received: Tensor, kind: str) -> Tensor:
        """The messages of uint8 [n, bytes + 4] without their checksums, [n, bytes]. A collective."""
        self._judge([_fits(_memory(row)) for row in received.cpu()], kind, received.device)
        return received[:, :-CHECKSUM_BYTES].contiguous()

    def _judge(self, fits: list[bool], kind: str, device: torch.device | None) -> None:
        """Raise the same CommError on all workers unless each of them found that every message fits."""
        found = self._agree(0 if all(fits) else fits.index(False) + 1, device)
        damaged = [(sender - 1, worker) for worker, sender in enumerate(found) if sender]
        if damaged:
            sender, worker = damaged[0]
            more = f" (others found one too: {_workers([w for _, w in damaged[1:]])})" if len(damaged) > 1 else ""
            raise CommError(
                f"worker {worker} of {self.size} received a message of worker {sender} in {kind} that was damaged on "
                f"the way: its checksum does not fit{more}; {WHAT_TO_DO}"
            )

    def _agree(self, value: int, device: torch.device | None) -> list[int]:
        """Every worker's value in [0, 2^32). `device`: where payload lies; None: by control messages."""
        word = value.to_bytes(4, "little")
        statement = (word + _crc_bytes(word)) * COPIES
        if device is None:
            said = self._comm.all_gather_bytes(statement)
        else:
            self.payload_bytes += (self.size - 1) * STATEMENT_BYTES
            mine = torch.tensor(list(statement), dtype=torch.uint8, device=device)
            said = [bytes(row) for row in self._comm.all_gather(mine).wait().tolist()]
        return [self._understand(worker, statement) for worker, statement in enumerate(said)]

    def _understand(self, worker: int, statement: bytes) -> int:
        """The value that a worker's statement holds.

        Raises:
            CommError: no copy in it is intact.
        """
        copies = [statement[i : i + 4 + CHECKSUM_BYTES] for i in range(0, STATEMENT_BYTES, 4 + CHECKSUM_BYTES)]
        intact = [copy for copy in copies if _fits(copy)]
        if not intact:
            raise CommError(
                f"worker {self.rank} of {self.size} cannot read what worker {worker} says of a message: it was damaged "
                f"on the way; {WHAT_TO_DO}"
            )
        if len(intact) < COPIES:
            log.warning(
                "worker %d: a message of worker %d about checksums was damaged on the way and put right: %s",
                *(self.rank, worker, WHAT_TO_DO),
            )
        return int.from_bytes(intact[0][:4], "little")


class _Sealed(Pending):
    """A collective of messages with checksums under way."""

    def __init__(self, comm: Checked, kind: str, sent: Tensor, pending: Pending) -> None:
        self._comm, self._kind, self._pending = comm, kind, pending
        self._sent = sent  # nobody else holds it, and it is read until the end

    def wait(self) -> Tensor:
        return self._comm._open(self._pending.wait(), self._kind)


def _sealed(messages: Tensor) -> Tensor:
    """Messages, uint8 [k, bytes], each with its checksum behind it: [k, bytes + 4], new."""
    sums = [list(_crc(row).to_bytes(CHECKSUM_BYTES, "little")) for row in messages.cpu()]
    return torch.cat([messages, torch.tensor(sums, dtype=torch.uint8, device=messages.device)], dim=1)


def _memory(row: Tensor) -> memoryview:
    """The bytes of uint8 [bytes] on the CPU, not copied; valid while the tensor lives."""
    if not row.numel():
        return memoryview(b"")
    row = row.contiguous()
    held = (ctypes.c_ubyte * row.numel()).from_address(row.data_ptr())
    held._tensor = row  # type: ignore[attr-defined]
    return memoryview(held)


def _crc(row: Tensor) -> int:
    return zlib.crc32(_memory(row))


def _crc_bytes(data: bytes | memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")


def _fits(message: bytes | memoryview) -> bool:
    """Whether the last 4 bytes are the checksum of the others."""
    return len(message) >= CHECKSUM_BYTES and _crc_bytes(message[:-CHECKSUM_BYTES]) == bytes(message[-CHECKSUM_BYTES:])


def check_replicas(comm: Comm, what: str, mine: Sequence[tuple[str, str]]) -> None:
    """Raise the same MismatchError on all workers unless the weights that they hold are equal. A collective.

    One control message holds all: were there a second one where the first shows a difference, damage to the first on
    one worker alone would leave the workers in different collectives.

    Args:
        comm: the workers.
        what: the subject of the message, such as "replicas after step 50".
        mine: name and fingerprint of each layer, as `checks.fingerprints` makes them; equally many on all workers.

    Raises:
        MismatchError: names the first layer that differs and which workers hold what.
    """
    texts = comm.all_gather_bytes(json.dumps(mine).encode())
    if all(text == texts[0] for text in texts):
        return
    layers = list(zip(*map(json.loads, texts), strict=True))
    differing = [layer for layer in layers if any(held != layer[0] for held in layer)]
    name, values = differing[0][0][0], [value for _, value in differing[0]]
    holders = {value: [i for i, other in enumerate(values) if other == value] for value in values}
    raise MismatchError(
        f"{what} differ between workers: {name} is "
        + " and ".join(f"{value} on {_workers(which)}" for value, which in holders.items())
        + f", the first of {len(differing)} layers of {len(layers)} that differ; all started equal, so memory or the "
        "network damaged data, or something changed the weights of one worker alone; look into the logs of these "
        "machines, and start again from the state that was saved last (train.checksums = true finds damage on the "
        "network where it happens)"
    )


def _workers(which: Sequence[int]) -> str:
    return f"worker{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"


__all__ = ["CHECKSUM_BYTES", "STATEMENT_BYTES", "Checked", "check_replicas"]
