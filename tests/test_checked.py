"""Checked: the same bits as without, a few bytes more, and every damaged message an error on all workers."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_processes
from small import MODEL, flat, kinds_of, make
from test_comm import assert_sums, conformance
from torch import Tensor

import onebit
from onebit.checked import CHECKSUM_BYTES, STATEMENT_BYTES, Checked, check_replicas
from onebit.comm import Comm, Distributed, Pending, Solo
from onebit.errors import CommError, ConfigError, MismatchError

LAWS = settings(deadline=None, derandomize=True, database=None, max_examples=300)
TRAININGS = settings(deadline=None, derandomize=True, database=None, max_examples=25)
KINDS = kinds_of(3)


class Flipping(Comm):
    """What Checked is there for: a comm whose collective number `at` changes bits of a message that `worker` receives.

    Args:
        comm: the one that moves the bytes.
        at: which collective since construction; -1: none.
        worker: whose.
        row: which message of those received; where there is but one, that.
        bits: of the message, counted from its lowest, which are flipped; moved to where it has them.
    """

    def __init__(self, comm: Comm, at: int = -1, worker: int = 0, row: int = 0, bits: tuple[int, ...] = ()) -> None:
        self.inside, self.at, self.worker, self.row, self.bits = comm, at, worker, row, bits
        self.kinds: list[str] = []

    rank = property(lambda self: self.inside.rank)
    size = property(lambda self: self.inside.size)

    def _now(self, kind: str) -> bool:
        self.kinds.append(kind)
        return len(self.kinds) - 1 == self.at and self.rank == self.worker

    def _flip(self, message: Tensor) -> None:
        length, first = 8 * message.numel(), min(self.bits)
        span = max(self.bits) - first
        shift = first - first % (length - span) if span < min(32, length) else 0  # what is in a row remains so
        for bit in {(bit - shift) % length for bit in self.bits}:
            message[bit // 8] ^= 1 << bit % 8

    def _later(self, kind: str, pending: Pending) -> Pending:
        if not self._now(kind):
            return pending
        received = pending.wait()
        self._flip(received[self.row % self.size])
        return Pending(received)

    def _all_to_all(self, messages: Tensor) -> Pending:
        return self._later("all_to_all", self.inside.all_to_all(messages))

    def _all_gather(self, message: Tensor) -> Pending:
        return self._later("all_gather", self.inside.all_gather(message))

    def _all_reduce(self, tensor: Tensor) -> None:
        self.inside.all_reduce(tensor)
        if self._now("all_reduce"):
            self._flip(tensor.view(-1).view(torch.uint8))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        received = self.inside.all_gather_bytes(data)
        if self._now("all_gather_bytes"):
            message = torch.tensor(list(received[self.row % self.size]), dtype=torch.uint8)
            self._flip(message)
            received[self.row % self.size] = bytes(message.tolist())
        return received


@st.composite
def damage(draw: st.DrawFn) -> tuple[int, ...]:
    """Bits that a CRC-32 is sure to miss none of: up to three anywhere in a message below 11 kB, or 32 in a row."""
    start = draw(st.integers(0, 2**20))
    if draw(st.booleans()):
        pattern = draw(st.integers(0, 2**31 - 1))
        return tuple(start + i for i in range(32) if (2 * pattern + 1) >> i & 1)
    return (start, *draw(st.lists(st.integers(0, 2**20), max_size=2)))


# --- the same as without ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_collective_gives_what_it_gives_without(n: int) -> None:
    def work(comm: Comm) -> Any:
        generator = torch.Generator().manual_seed(comm.rank)
        checked, found = Checked(comm), []
        for size in (0, 1, 7, 4096):
            rows = torch.randint(0, 256, (comm.size, size), dtype=torch.uint8, generator=generator)
            for one in (comm, checked):
                values = torch.randn(3, size, generator=torch.Generator().manual_seed(size + comm.rank))
                low = values.bfloat16()
                one.all_reduce(values)
                one.all_reduce(low)
                several = [one.all_to_all(rows), one.all_gather(rows[0]), one.all_to_all(rows.flip(0))]
                results = [pending.wait() for pending in several]
                assert all(result.is_contiguous() for result in results)
                found.append([values, low, *results, *map(list, one.all_gather_bytes(bytes(rows[0].tolist())))])
        return found

    for found in onebit.run_workers(n, work):
        for without, with_checksums in zip(found[::2], found[1::2], strict=True):
            for a, b in zip(without, with_checksums, strict=True):
                assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
                assert not isinstance(a, Tensor) or (a.dtype, a.shape) == (b.dtype, b.shape)


class Uncounting(Comm):
    """Through `Checked`, but counting only what its user sends, as `conformance` expects."""

    def __init__(self, comm: Comm) -> None:
        self.checked = Checked(comm)

    rank = property(lambda self: self.checked.rank)
    size = property(lambda self: self.checked.size)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.checked.all_gather_bytes(data)

    def _all_to_all(self, messages: Tensor) -> Pending:
        return self.checked.all_to_all(messages)

    def _all_gather(self, message: Tensor) -> Pending:
        return self.checked.all_gather(message)

    def _all_reduce(self, tensor: Tensor) -> None:
        self.checked.all_reduce(tensor)


def promises(comm: Comm) -> Tensor:
    """For `run_processes` too."""
    return conformance(Uncounting(comm))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_virtual_workers_with_checksums_keep_every_promise_of_comm(n: int) -> None:
    assert_sums(onebit.run_workers(n, promises))


def test_processes_with_checksums_keep_every_promise_of_comm() -> None:
    assert_sums(run_processes(2, promises))


def test_the_bytes_of_checksums_are_counted() -> None:
    def work(comm: Comm) -> None:
        checked = Checked(comm)
        checked.all_to_all(torch.zeros(3, 10, dtype=torch.uint8)).wait()
        assert checked.payload_bytes == comm.payload_bytes == 2 * (10 + CHECKSUM_BYTES + STATEMENT_BYTES)
        checked.all_gather(torch.zeros(10, dtype=torch.uint8)).wait()
        assert checked.payload_bytes == comm.payload_bytes == 4 * (10 + CHECKSUM_BYTES + STATEMENT_BYTES)
        checked.all_reduce(torch.zeros(30))
        last = 4 * 30 * 4 // 3 + 2 * STATEMENT_BYTES
        assert checked.payload_bytes == comm.payload_bytes == 4 * (10 + CHECKSUM_BYTES + STATEMENT_BYTES) + last
        checked.all_gather_bytes(b"not payload")
        assert checked.payload_bytes == comm.payload_bytes == 4 * (10 + CHECKSUM_BYTES + STATEMENT_BYTES) + last

    assert (CHECKSUM_BYTES, STATEMENT_BYTES) == (4, 32)
    onebit.run_workers(3, work)


def trained(comm: Comm, name: str, steps: int = 10, **more: Any) -> tuple[Tensor, Any]:
    model = copy.deepcopy(MODEL)
    optimizer = make(KINDS, name, model.named_parameters(), comm, bucket_elements=100, **more)
    for step in range(steps):
        one_step(model, optimizer, comm, step)
    return flat(model.parameters()), optimizer


def one_step(model: Any, optimizer: Any, comm: Comm, step: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + comm.rank))
    optimizer.zero_grad()
    ((model(x) - x[:, :3]) ** 2).mean().backward()
    optimizer.step()


def with_and_without(comm: Comm, name: str, more: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """For `run_processes` too: the weights of a training without checksums, and of one with."""
    plain, first = trained(comm, name, **more)
    watched = Flipping(comm)
    checked, second = trained(Checked(watched), name, **more)
    to_one, reduced = watched.kinds.count("all_to_all"), watched.kinds.count("all_reduce")
    to_all = (watched.kinds.count("all_gather") - to_one - reduced) // 2  # each collective has a statement
    assert to_one + to_all + reduced > 0
    mine = (to_one + to_all) * (CHECKSUM_BYTES + STATEMENT_BYTES) + reduced * STATEMENT_BYTES
    assert second.payload_bytes - first.payload_bytes == (comm.size - 1) * mine
    return plain, checked


@pytest.mark.parametrize("name", KINDS)
def test_virtual_workers_train_alike_with_checksums_and_count_them(name: str) -> None:
    results = onebit.run_workers(3, lambda comm: with_and_without(comm, name, {}))
    assert all(torch.equal(weights, results[0][0]) for pair in results for weights in pair)


@pytest.mark.parametrize("transport", ["fp32", "int4"])
def test_processes_train_alike_with_checksums_and_count_them(transport: str) -> None:
    results = run_processes(2, with_and_without, "OneBitLamb", {"warmup_transport": transport}, timeout_s=90)
    assert all(torch.equal(weights, results[0][0]) for pair in results for weights in pair)


# --- damage -----------------------------------------------------------------------------------------------------------


def all_four(comm: Comm, size: int) -> list[Any]:
    """One of each collective, the first three started before the first is waited for."""
    generator = torch.Generator().manual_seed(comm.rank)
    rows = torch.randint(0, 256, (comm.size, size), dtype=torch.uint8, generator=generator)
    values = torch.randn(size + 1, generator=generator)
    pending = [comm.all_to_all(rows), comm.all_gather(rows[0])]
    results = [item.wait().tolist() for item in pending]
    comm.all_reduce(values)
    return [*results, values.tolist(), comm.all_gather_bytes(bytes(rows[0].tolist()))]


SENT = ["all_to_all", "all_gather", "all_gather", "all_gather", "all_reduce", "all_gather", *["all_gather_bytes"] * 2]
"""What `Checked` sends for `all_four`."""
STATEMENTS = (2, 3, 5, 7)


@LAWS
@given(
    n=st.integers(2, 4), at=st.integers(0, 7), worker=st.integers(0, 3), row=st.integers(0, 3),
    size=st.integers(0, 3000), bits=damage(),
)  # fmt: skip
def test_damage_to_any_message_is_an_error_on_all_workers_or_is_put_right(
    n: int, at: int, worker: int, row: int, size: int, bits: tuple[int, ...]
) -> None:
    worker, row = worker % n, row % n

    def work(comm: Comm) -> Any:
        flipping = Flipping(comm, at, worker, row, bits)
        right = all_four(comm, size)
        try:
            found = all_four(Checked(flipping), size)
        except CommError as error:
            assert flipping.kinds == SENT[: len(flipping.kinds)]
            return str(error)
        assert flipping.kinds == SENT
        return found == right

    results = onebit.run_workers(n, work)
    assert all(result == results[0] for result in results)
    if at in STATEMENTS:
        assert results[0] is True
    elif SENT[at] == "all_reduce":
        assert f"result of an all_reduce is not the same on all {n} workers" in results[0]
        assert (f"not what most have: worker {worker})" in results[0]) == (n > 2)
    else:
        assert f"worker {worker} of {n} received a message of worker {row} in {SENT[at]} that was dam" in results[0]
        assert "start all workers again" in results[0]


def test_a_statement_that_was_put_right_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Comm) -> None:
        all_four(Checked(Flipping(comm, STATEMENTS[0], 1, 0, (5,))), 10)

    with caplog.at_level(logging.WARNING, logger="onebit"):
        onebit.run_workers(2, work)
    assert len(caplog.records) == 1
    assert "worker 1: a message of worker 0 about checksums was damaged on the way and put right" in caplog.text


def test_a_statement_beyond_repair_ends_the_others_too() -> None:
    def work(comm: Comm) -> str:
        with pytest.raises(CommError) as caught:
            all_four(Checked(Flipping(comm, STATEMENTS[0], 1, 0, tuple(range(0, 256, 8)))), 10)
        comm._meeting.leave(comm.rank, "has failed")  # type: ignore[attr-defined] # as one whose error ends it
        return str(caught.value)

    ends = onebit.run_workers(2, work)
    assert "worker 1 of 2 cannot read what worker 0 says" in ends[1]
    assert "worker 1 has failed" in ends[0]


def test_several_workers_that_found_damage_are_all_named() -> None:
    def work(comm: Comm) -> None:
        Checked(Flipping(comm, 0, comm.rank, 2, (7,))).all_gather(torch.zeros(9, dtype=torch.uint8)).wait()

    with pytest.raises(CommError, match=r"worker 0 of 3 .* worker 2 in all_gather .*too: workers 1, 2"):
        onebit.run_workers(3, work)


def damaged_processes(comm: Comm) -> list[str]:
    """What is raised when each kind of message is damaged, one after the other in one group."""
    texts = []
    for at in (i for i in range(8) if i not in STATEMENTS):
        with pytest.raises(CommError) as caught:
            all_four(Checked(Flipping(comm, at, 1, 0, (100, 101))), 50)
        texts.append(str(caught.value))
    return texts


def test_processes_all_get_the_error_of_the_one_that_found_damage() -> None:
    mine, other = run_processes(2, damaged_processes)
    assert mine == other
    for text, kind in zip(mine, ("all_to_all", "all_gather", "all_reduce", "all_gather_bytes"), strict=True):
        assert kind in text


def state_of(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def damaged_step(comm: Comm, name: str, step: int, at: int, worker: int, bits: tuple[int, ...]) -> Any:
    """Train; damage collective `at` of one step; if that is an error, repeat the step.

    Returns:
        weights and state at the end; the error; of each step, how many collectives it had. With a local variance the
        first is None after an error: a step that exchanges variances too may have changed the weights before.
    """
    flipping, model = Flipping(comm), copy.deepcopy(MODEL)
    checked = Checked(flipping)
    optimizer = make(KINDS, name, model.named_parameters(), checked, bucket_elements=100)
    error, collectives = None, []
    for number in range(9):
        flipping.kinds, before = [], copy.deepcopy((flat(model.parameters()), state_of(optimizer)))
        if number == step:
            flipping.at, flipping.worker, flipping.row, flipping.bits = at, worker, at, bits
        try:
            one_step(model, optimizer, checked, number)
        except CommError as found:
            assert number == step
            if name.startswith("Local"):
                return None, str(found), collectives
            assert same(before, (flat(model.parameters()), state_of(optimizer)))
            error, flipping.at = str(found), -1
            one_step(model, optimizer, checked, number)
        flipping.at = -1
        collectives.append(len(flipping.kinds))
    return (flat(model.parameters()), state_of(optimizer)), error, collectives


@pytest.mark.parametrize("name", KINDS)
def test_damage_during_a_step_is_an_error_on_all_workers_and_changes_nothing(name: str) -> None:
    right = onebit.run_workers(2, lambda comm: damaged_step(comm, name, -1, 0, 0, ()))
    seen = set()

    @TRAININGS
    @given(step=st.integers(1, 8), share=st.floats(0, 0.99), worker=st.integers(0, 1), bits=damage())
    def check(step: int, share: float, worker: int, bits: tuple[int, ...]) -> None:
        at = int(share * right[0][2][step])
        found = onebit.run_workers(2, lambda comm: damaged_step(comm, name, step, at, worker, bits))
        assert found[0][1] == found[1][1]
        if found[0][0] is not None or not name.startswith("Local"):
            assert same([end[0] for end in found], [end[0] for end in right])
        seen.add(found[0][1] is None)

    check()
    assert seen == {True, False}  # statements and messages


# --- an object like other comms ---------------------------------------------------------------------------------------


def test_it_is_copied_and_pickled_like_the_comm_inside() -> None:
    checked = Checked(Solo())
    assert copy.deepcopy(checked) is checked
    again = pickle.loads(pickle.dumps(checked))
    assert isinstance(again, Checked)
    assert isinstance(again._comm, Solo)

    def work(comm: Comm) -> None:
        with pytest.raises(ConfigError, match="virtual workers cannot be pickled"):
            pickle.dumps(Checked(comm))

    onebit.run_workers(2, work)


def pickled(comm: Comm) -> bool:
    again = pickle.loads(pickle.dumps(Checked(comm)))
    return isinstance(again._comm, Distributed) and (again.rank, again.size) == (comm.rank, comm.size)


def test_it_is_pickled_in_a_process_group() -> None:
    assert run_processes(2, pickled) == [True, True]


def test_what_is_no_comm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Checked was given None; it takes a comm"):
        Checked(None)  # type: ignore[arg-type]


# --- replicas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({1: "b"}, "b is old on workers 0, 2 and new on worker 1, the first of 2 layers of 3 that differ"),
        ({0: "c"}, "c is new on worker 0 and old on workers 1, 2, the first of 1 layers of 3"),
        ({0: "c", 2: "a"}, "a is old on workers 0, 1 and new on worker 2, the first of 3 layers of 3"),
    ],
)
def test_the_first_layer_that_differs_is_named_with_who_holds_what(odd: dict[int, str], said: str) -> None:
    def work(comm: Comm) -> str:
        since = odd.get(comm.rank, "z")
        with pytest.raises(MismatchError) as caught:
            check_replicas(comm, "replicas", [(name, "new" if name >= since else "old") for name in "abc"])
        return str(caught.value)

    results = onebit.run_workers(3, work)
    assert len(set(results)) == 1
    assert f"replicas differ between workers: {said}" in results[0]


def test_equal_replicas_pass() -> None:
    onebit.run_workers(3, lambda comm: check_replicas(comm, "replicas", [("a", "x"), ("b", "y")]))
