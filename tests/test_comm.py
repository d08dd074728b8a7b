"""Comm: what each collective does and costs, alike for one worker, threads and processes; and who fails how.

Also `checks`: what is looked at before the first collective.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import End, WorkerDied, WorkersTooSlow, end_of_processes, run_processes
from torch import Tensor

from onebit import checks
from onebit.comm import (
    PIECE_BYTES,
    WHOLE_BYTES,
    Comm,
    Distributed,
    Solo,
    check_same,
    default_comm,
    ring_all_reduce_bytes,
)
from onebit.errors import CommError, ConfigError, MismatchError
from onebit.virtual import run_workers
from onebit.weights import Weights

LAWS = settings(deadline=None, derandomize=True, database=None, max_examples=100)


# --- what every comm does -------------------------------------------------------------------------------------------


def conformance(comm: Comm) -> Tensor:
    """Every promise of `Comm`, for one worker of any kind. Returns an all_reduce that depends on the order."""
    n, rank = comm.size, comm.rank
    assert 0 <= rank < n
    assert comm.payload_bytes == 0

    messages = torch.tensor([[rank, j, 7] for j in range(n)], dtype=torch.uint8)
    received = comm.all_to_all(messages).wait()
    assert received.dtype == torch.uint8
    assert received.tolist() == [[i, rank, 7] for i in range(n)]
    assert comm.payload_bytes == (n - 1) * 3

    gathered = comm.all_gather(torch.tensor([rank, 255 - rank, 1, 2, 3], dtype=torch.uint8)).wait()
    assert gathered.dtype == torch.uint8
    assert gathered.tolist() == [[i, 255 - i, 1, 2, 3] for i in range(n)]
    assert comm.payload_bytes == (n - 1) * (3 + 5)

    pending = [comm.all_gather(torch.tensor([rank + at], dtype=torch.uint8)) for at in range(3)]
    assert [p.wait().flatten().tolist() for p in pending] == [[i + at for i in range(n)] for at in range(3)]
    comm.payload_bytes = 0

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        small = torch.full((3, 5), rank + 1).to(dtype)
        comm.all_reduce(small)
        assert small.tolist() == [[n * (n + 1) / 2] * 5] * 3  # in place, the shape kept, exact
    buffers = [15 * size for size in (4, 8, 2, 8)]
    assert comm.payload_bytes == sum(-(-2 * (n - 1) * size // n) for size in buffers)
    scalar = torch.tensor(float(rank))
    comm.all_reduce(scalar)
    assert scalar.item() == n * (n - 1) / 2

    before = comm.payload_bytes
    assert comm.all_gather_bytes(bytes([rank]) * rank) == [bytes([i]) * i for i in range(n)]  # worker 0: empty
    assert comm.all_gather_bytes(b"") == [b""] * n
    assert comm.all_gather_bytes(bytes(range(256)) * 40) == [bytes(range(256)) * 40] * n
    assert comm.payload_bytes == before  # control messages are not counted

    check_same(comm, "settings", [("lr", "0.1"), ("eps", "1e-8")])
    generator = torch.Generator().manual_seed(rank)
    wild = torch.randn(1001, generator=generator) * 10.0 ** torch.arange(1001).remainder(9)
    comm.all_reduce(wild)
    return wild


def assert_sums(wilds: list[Tensor]) -> None:
    """Equal bits on all workers, and the sum to the rounding of n - 1 additions in any order."""
    assert all(torch.equal(wild.view(torch.int32), wilds[0].view(torch.int32)) for wild in wilds)
    parts = [
        torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 10.0 ** torch.arange(1001).remainder(9)
        for rank in range(len(wilds))
    ]
    exact = torch.stack(parts).double().sum(0)
    bound = len(parts) * torch.finfo(torch.float32).eps * torch.stack(parts).double().abs().sum(0)
    assert bool(((wilds[0].double() - exact).abs() <= bound).all())


def test_one_worker_keeps_every_promise_of_comm():
    assert_sums([conformance(Solo())])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_virtual_workers_keep_every_promise_of_comm(n):
    assert_sums(run_workers(n, conformance))


def test_a_message_may_be_overwritten_once_it_was_sent():
    def worker(comm: Comm) -> Any:
        message = torch.full((2, 1), comm.rank, dtype=torch.uint8)
        pending = comm.all_to_all(message)
        message.fill_(99)
        gather = torch.full((1,), comm.rank, dtype=torch.uint8)
        second = comm.all_gather(gather)
        gather.fill_(99)
        return pending.wait().tolist() + second.wait().tolist()

    assert run_workers(2, worker) == [[[0], [1], [0], [1]]] * 2


@pytest.mark.parametrize(
    ("buffer_bytes", "workers", "expected"),
    [(100, 1, 0), (100, 2, 100), (100, 4, 150), (100, 3, 134), (0, 8, 0), (1, 8, 2), (2**40, 8, 7 * 2**38)],
)
def test_a_ring_all_reduce_sends_two_times_n_minus_1_nths_rounded_up(buffer_bytes, workers, expected):
    assert ring_all_reduce_bytes(buffer_bytes, workers) == expected


def test_without_a_process_group_the_default_is_one_worker_and_distributed_says_what_to_do():
    assert isinstance(default_comm(), Solo)
    with pytest.raises(ConfigError, match="init_process_group"):
        Distributed()


# --- virtual workers and their failures -----------------------------------------------------------------------------


def no_worker_is_left(but: tuple[str, ...] = (), within_s: float = 2.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(t.name.startswith("onebit-worker") and t.name not in but for t in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def meet(comm: Comm) -> None:
    comm.all_reduce(torch.ones(4))


COLLECTIVES: dict[str, Callable[[Comm], object]] = {
    "all_to_all": lambda comm: comm.all_to_all(torch.zeros(comm.size, 4, dtype=torch.uint8)).wait(),
    "all_gather": lambda comm: comm.all_gather(torch.zeros(4, dtype=torch.uint8)).wait(),
    "all_reduce": meet,
    "all_gather_bytes": lambda comm: comm.all_gather_bytes(b"x"),
}


def test_results_come_in_order_of_workers_and_the_threads_of_torch_are_given_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert run_workers(5, lambda comm: (comm.rank, comm.size)) == [(i, 5) for i in range(5)]
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            run_workers(3, lambda comm: 1 // 0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n", [0, -1])
def test_fewer_than_one_worker_is_refused(n):
    with pytest.raises(ConfigError, match=f"n = {n}"):
        run_workers(n, lambda comm: None)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("late", [False, True])
def test_a_worker_that_raises_releases_the_others_and_its_error_is_the_one_raised(name, late):
    released = []

    def worker(comm: Comm) -> None:
        meet(comm)
        if comm.rank == 1:
            if late:  # the others wait already
                time.sleep(0.2)
            raise KeyError("the cause")
        if not late:  # the others come when it is gone
            time.sleep(0.2)
        try:
            COLLECTIVES[name](comm)
        except CommError as error:
            released.append((comm.rank, str(error)))
            raise

    began = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        run_workers(3, worker)
    assert time.monotonic() - began < 5
    assert sorted(rank for rank, _ in released) == [0, 2]
    assert all("worker 1 has failed" in text for _, text in released)
    assert no_worker_is_left()


def test_a_worker_that_returns_early_is_a_comm_error_for_whoever_waits():
    def worker(comm: Comm) -> None:
        meet(comm)
        if comm.rank != 2:
            meet(comm)

    with pytest.raises(CommError, match="worker 2 has returned"):
        run_workers(3, worker)
    assert no_worker_is_left()


def test_a_worker_that_returns_after_the_last_collective_disturbs_nobody():
    def worker(comm: Comm) -> int:
        for _ in range(20):
            meet(comm)
        if comm.rank:
            time.sleep(0.05 * comm.rank)
        return comm.rank

    assert run_workers(4, worker) == [0, 1, 2, 3]


@pytest.mark.parametrize("other", ["all_to_all", "all_gather", "all_gather_bytes"])
def test_different_collectives_are_a_mismatch_on_every_worker(other):
    caught = []

    def worker(comm: Comm) -> None:
        try:
            COLLECTIVES[other if comm.rank == 1 else "all_reduce"](comm)
        except MismatchError as error:
            caught.append(str(error))
            raise

    with pytest.raises(MismatchError, match="different collectives"):
        run_workers(3, worker)
    assert len(caught) == 3
    assert all(other in text and "all_reduce" in text for text in caught)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_gather(torch.zeros(4 + comm.rank, dtype=torch.uint8)),
        lambda comm: comm.all_to_all(torch.zeros(2, 4 + comm.rank, dtype=torch.uint8)),
        lambda comm: comm.all_reduce(torch.zeros(4 + comm.rank)),
        lambda comm: comm.all_reduce(torch.zeros(4, dtype=[torch.float32, torch.float64][comm.rank])),
    ],
    ids=["all_gather", "all_to_all", "all_reduce size", "all_reduce dtype"],
)
def test_the_same_collective_on_different_sizes_is_a_mismatch(call):
    with pytest.raises(MismatchError):
        run_workers(2, call)


def test_an_interrupt_of_the_main_thread_releases_all_that_wait():
    seen = threading.Event()

    def worker(comm: Comm) -> None:
        meet(comm)
        if comm.rank == 0:  # busy, not waiting: nobody but the interrupt can release the others
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            seen.wait(10)
        else:
            meet(comm)

    with pytest.raises(KeyboardInterrupt):
        run_workers(3, worker)
    try:
        assert no_worker_is_left(but=("onebit-worker-0",))
    finally:
        seen.set()
    assert no_worker_is_left()


# --- check_same -----------------------------------------------------------------------------------------------------

SETTINGS = [("lr", "0.1"), ("eps", "1e-8"), ("weight_decay", "0.0")]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([*SETTINGS[:1], ("eps", "1e-6"), ("weight_decay", "1")], "eps is 1e-8 on worker 0 and 1e-6 on worker 2"),
        ([*SETTINGS[:1], ("epsilon", "1e-8"), *SETTINGS[2:]], r"eps is 1e-8 .* no such entry \(epsilon\) on worker 2"),
        (SETTINGS[:2], "number of entries is 3 on worker 0 and 2 on worker 2"),
        ([*SETTINGS, ("x", "y")], "number of entries is 3 on worker 0 and 4 on worker 2"),
        ([], "number of entries is 3 on worker 0 and 0 on worker 2"),
        (SETTINGS[::-1], "lr is 0.1 on worker 0 and no such entry"),
    ],
)
def test_check_same_names_the_first_difference_on_every_worker(theirs, words):
    def worker(comm: Comm) -> str:
        try:
            check_same(comm, "optimizer settings", theirs if comm.rank == 2 else SETTINGS)
        except MismatchError as error:
            meet(comm)  # they are still in step
            return str(error)
        return "nothing"

    texts = run_workers(4, worker)
    assert texts == [texts[0]] * 4
    assert texts[0].startswith("optimizer settings differ between workers: ")
    with pytest.raises(MismatchError, match=words):
        raise MismatchError(texts[0])


def test_check_same_is_silent_on_equal_lists_even_with_odd_characters():
    run_workers(3, lambda comm: check_same(comm, "names", [("größe\n", '"1"'), ("", "")]))


# --- processes and their failures -----------------------------------------------------------------------------------


def program_with_a_death(comm: Distributed) -> Any:
    """All promises first. Then worker 1 dies without a word, and the others tell what they saw, after how long."""
    wild = conformance(comm)
    wilds = comm.all_gather_bytes(bytes(wild.view(torch.uint8).tolist()))
    if comm.rank == 1:
        os._exit(9)
    began, seen = time.monotonic(), {}
    for name, call in COLLECTIVES.items():
        try:
            call(comm)
            seen[name] = "nothing"
        except CommError as error:
            seen[name] = str(error)
    return wilds, seen, time.monotonic() - began


@pytest.fixture(scope="module")
def ends() -> list[End]:
    return end_of_processes(3, program_with_a_death, timeout_s=90, grace_s=30)


def test_processes_keep_every_promise_of_comm(ends):
    assert ends[0].error is None, ends[0].trace
    assert_sums([torch.frombuffer(bytearray(data), dtype=torch.float32) for data in ends[0].value[0]])


def test_a_process_that_dies_makes_every_collective_of_the_others_a_comm_error_within_seconds(ends):
    assert ends[1].exitcode == 9
    assert not ends[1].spoke
    for rank in (0, 2):
        assert ends[rank].error is None, ends[rank].trace
        _, seen, seconds = ends[rank].value
        assert list(seen) == list(COLLECTIVES)
        assert all(f"worker {rank} of 3 lost contact" in text for text in seen.values()), seen
        assert seconds < 10
    assert multiprocessing.active_children() == []


def program_that_fails_in_the_end(comm: Distributed) -> None:
    """Settings that differ; then a worker that lives and never comes; then an error on one of them."""
    with pytest.raises(MismatchError, match="seed is 0 on worker 0 and 1 on worker 1"):
        check_same(comm, "settings", [("lr", "0.1"), ("seed", str(comm.rank))])
    hasty = Distributed(dist.new_group([0, 1], timeout=timedelta(seconds=1)))
    comm.all_gather_bytes(b"")
    if comm.rank == 1:
        comm.all_gather_bytes(b"")  # while worker 0 waits in the other group until its time is over
        raise KeyError("the cause")
    with pytest.raises(CommError, match="worker 0 of 2 lost contact"):
        hasty.all_to_all(torch.zeros(2, 4, dtype=torch.uint8)).wait()
    comm.all_gather_bytes(b"")
    meet(comm)  # never returns: worker 1 has failed


def test_processes_that_differ_keep_silent_or_fail_are_told_apart_and_none_is_left():
    with pytest.raises(KeyError, match="the cause") as caught:
        run_processes(2, program_that_fails_in_the_end)
    assert "program_that_fails_in_the_end" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


def program_that_dies_alone(comm: Distributed) -> None:
    os._exit(7)


def test_run_processes_tells_a_death_and_a_lack_of_time_apart():
    with pytest.raises(WorkerDied, match="worker 0 of 1 ended with status 7"):
        run_processes(1, program_that_dies_alone)
    with pytest.raises(WorkersTooSlow, match=r"workers \[0\] of 1"):
        run_processes(1, program_that_dies_alone, timeout_s=0.1)
    assert multiprocessing.active_children() == []


# --- checks ---------------------------------------------------------------------------------------------------------


@LAWS
@given(st.sampled_from([torch.float32, torch.float64]), st.integers(1, 40), st.integers(0, 1000), st.data())
def test_a_checksum_depends_on_every_bit(dtype, count, seed, data):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    bits = 32 if dtype == torch.float32 else 64
    at, bit = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, bits - 1))
    changed = x.clone()
    mask = 1 << bit if bit < bits - 1 else -(1 << bit)
    changed.view(integers)[at] ^= mask
    assert checks.checksum(changed) != checks.checksum(x)
    assert checks.checksum(x.clone()) == checks.checksum(x)


@LAWS
@given(st.integers(2, 50), st.integers(0, 1000), st.data())
def test_a_checksum_depends_on_the_position_of_every_element(count, seed, data):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    a, b = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    swapped = x.clone()
    swapped[a], swapped[b] = x[b], x[a]
    assert checks.checksum(swapped) != checks.checksum(x)


@pytest.mark.parametrize("distance", [65_521, 2 * 65_521, 65_536, 2**22])
def test_a_checksum_depends_on_positions_that_are_far_apart(distance):
    x = torch.randn(distance + 10, generator=torch.Generator().manual_seed(1))
    swapped = x.clone()
    swapped[3], swapped[3 + distance] = x[3 + distance], x[3]
    assert checks.checksum(swapped) != checks.checksum(x)


def test_a_checksum_looks_at_values_not_at_strides_and_tells_the_two_zeros_apart():
    x = torch.arange(12.0).view(3, 4)
    assert checks.checksum(x.t()) == checks.checksum(x.t().contiguous())
    assert checks.checksum(x.t()) != checks.checksum(x)
    assert checks.checksum(torch.tensor(0.0)) != checks.checksum(torch.tensor(-0.0))
    assert checks.checksum(torch.zeros(0)) == checks.checksum(torch.zeros(0, 3))
    assert checks.checksum(torch.nn.Parameter(x)) == checks.checksum(x)


def test_fingerprints_tell_shape_dtype_and_values_by_name():
    a = [torch.ones(2, 3), torch.zeros(4)]
    names = ["weight", "bias"]
    mine = checks.fingerprints(a, names)
    assert [name for name, _ in mine] == names
    assert mine[0][1].startswith("(2, 3) torch.float32, checksum ")
    assert checks.fingerprints([a[0] + 1e-7, a[1]], names)[0] != mine[0]
    assert checks.fingerprints([a[0].view(3, 2), a[1]], names)[0] != mine[0]
    assert checks.fingerprints([a[0], a[1].double()], names)[1] != mine[1]
    assert checks.fingerprints([p.clone() for p in a], names) == mine


@pytest.mark.parametrize(
    ("dtypes", "computes_in"),
    [
        ([torch.float32, torch.float32], torch.float32),
        ([torch.float32, torch.bfloat16, torch.float16], torch.float32),
        ([torch.float16], torch.float32),
        ([torch.float64], torch.float64),
    ],
)
def test_weights_know_what_to_compute_in(dtypes, computes_in):
    weights = Weights([torch.ones(2, dtype=dtype) for dtype in dtypes], [str(dtype) for dtype in dtypes])
    assert (weights.dtype, weights.device) == (computes_in, torch.device("cpu"))
    assert {x.dtype for x in weights.tensors()} == {computes_in}


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        ([torch.float32, torch.float8_e5m2], "second is torch.float8_e5m2; parameters must be torch.float32"),
        ([torch.float16, torch.float64], "second is torch.float64 on cpu, first is torch.float16"),
        ([torch.complex64], "first is torch.complex64"),
        ([torch.float32, torch.float64], "second is torch.float64 on cpu, first is torch.float32 on cpu; all"),
    ],
)
def test_weights_name_the_parameter_that_does_not_fit(dtypes, words):
    params = [torch.ones(2, dtype=dtype) for dtype in dtypes]
    with pytest.raises(ConfigError, match=words):
        Weights(params, ["first", "second"][: len(params)])


def group(**changes: Any) -> dict[str, Any]:
    usual = {"params": [torch.ones(4)], "lr": 0.1, "eps": 1e-8, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    return {**usual, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.0},
        {"lr": torch.tensor(0.1)},
        {"betas": (0.0, 0.0)},
        {"exp_avg_mask": None},
        {"exp_avg_mask": torch.ones(2, 2)},
    ],
    ids=str,
)
def test_check_group_accepts_what_can_be_used(changes):
    checks.check_group(group(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": -0.1}, "lr is -0.1; it must be finite and at least 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"eps": float("inf")}, "eps is inf"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, r"betas are \(-0.1, 0.9\)"),
        ({"betas": (0.9, float("nan"))}, "betas are"),
        ({"betas": (0.9,)}, "there must be two"),
        ({"exp_avg_mask": torch.ones(3)}, "exp_avg_mask has 3 elements, its parameter 4"),
        (
            {"exp_avg_mask": torch.ones(4), "params": [torch.ones(4), torch.ones(4)]},
            "exp_avg_mask is set on a group of 2 parameters",
        ),
    ],
    ids=str,
)
def test_check_group_refuses_what_cannot_be_used_with_its_value(changes, words):
    with pytest.raises(ConfigError, match=words):
        checks.check_group(group(**changes))


def test_check_in_lists_what_is_allowed():
    assert checks.check_in("ratio", "sqrt", ("sqrt", "variance")) == "sqrt"
    with pytest.raises(ConfigError, match="ratio is 'sqr'; allowed are 'sqrt', 'variance'"):
        checks.check_in("ratio", "sqr", ("sqrt", "variance"))


def long_messages(comm: Comm) -> list[bool]:
    """Around the lengths at which messages are cut; two under way at once, as buckets are."""
    same = []
    for size in (WHOLE_BYTES - 1, WHOLE_BYTES, WHOLE_BYTES + 1, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 5):
        before = comm.payload_bytes
        rows = [torch.arange(size, dtype=torch.int64) * (7 + comm.rank) + to for to in range(comm.size)]
        sent = torch.stack(rows).to(torch.uint8)
        pending = comm.all_to_all(sent), comm.all_gather(sent[0])
        again = list(comm.all_to_all(sent).parts())
        expected = torch.arange(size, dtype=torch.int64)
        for source, row in enumerate(pending[0].wait()):
            same.append(torch.equal(row, (expected * (7 + source) + comm.rank).to(torch.uint8)))
        for source, row in enumerate(pending[1].wait()):
            same.append(torch.equal(row, (expected * (7 + source)).to(torch.uint8)))
        expected_parts = [(expected * (7 + source) + comm.rank).to(torch.uint8) for source in range(comm.size)]
        same.append(torch.equal(torch.cat(again, 1), torch.stack(expected_parts)))
        same.append(len(again) == (1 if size <= WHOLE_BYTES else -(-size // PIECE_BYTES)))
        same.append(comm.payload_bytes - before == 3 * (comm.size - 1) * size)
    return same


def test_long_messages_arrive_whole_and_are_counted_as_before():
    for same in run_processes(3, long_messages):
        assert len(same) == 5 * 9
        assert all(same)
