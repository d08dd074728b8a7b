"""The compressed mean: exact where one answer is right, conserved always, and the same bits everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import fsum, prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_processes
from torch import Tensor

from onebit.codec import OneBit
from onebit.comm import Comm, Distributed, Pending, Solo
from onebit.errors import ConfigError
from onebit.exchange import Exchange
from onebit.layout import Bucket, FlatLayout
from onebit.virtual import run_workers

LAWS = settings(deadline=None, derandomize=True, database=None, max_examples=20)
CPU = torch.device("cpu")
KINDS = st.sampled_from(["rms", "mean"])
MULTIPLIERS = st.sampled_from([1.0, 0.7, 1.3])
SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 50)), st.tuples(st.integers(1, 9), st.integers(0, 9))),
    min_size=1,
    max_size=5,
).filter(lambda shapes: sum(prod(shape) for shape in shapes) > 0)
ODD = ((5,), (0,), (3, 7), (), (13,))  # 40 elements; odd, empty and scalar layers
ALL_CODECS = [
    OneBit(scale, 8 if scale == "block" else None, kind)
    for scale in ("layer", "block", "bucket")
    for kind in ("rms", "mean")
]


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread():
    """Small tensors gain nothing from two threads, and on a busy machine each call would wait for both."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def codecs(multipliers: st.SearchStrategy[float]) -> st.SearchStrategy[OneBit]:
    return st.one_of(
        st.builds(OneBit, st.sampled_from(["layer", "bucket"]), st.none(), KINDS, multipliers),
        st.builds(OneBit, st.just("block"), st.integers(8, 30), KINDS, multipliers),
    )


# --- a run that can be repeated on any comm -------------------------------------------------------------------------


@cache
def layout_of(shapes: tuple[tuple[int, ...], ...], workers: int, bucket_elements: int | None) -> FlatLayout:
    return FlatLayout(shapes, workers, bucket_elements=bucket_elements)


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run of several exchanges, and nothing else: equal plans, equal bits."""

    workers: int
    shapes: tuple[tuple[int, ...], ...] = ODD
    codec: OneBit = field(default_factory=OneBit)
    bucket_elements: int | None = None
    dtype: torch.dtype = torch.float32
    steps: int = 4
    seed: int = 0
    dead: float = 0.0  # the share of elements that begin dead
    stir: int = 1_000  # the step from which dead elements get inputs, on one worker at a time
    factors: bool = False
    bad_step: int | None = None  # the step in which the last worker meets a nan

    def layout(self) -> FlatLayout:
        return layout_of(self.shapes, self.workers, self.bucket_elements)

    def _random(self, *labels: int) -> torch.Generator:
        seed = self.seed
        for label in labels:
            seed = (seed * 1_000_003 + label + 1) % 2**62
        return torch.Generator().manual_seed(seed)

    def alive(self) -> Tensor | None:
        """The first mask, bool [layout.numel], or None."""
        if self.dead == 0:
            return None
        draws = torch.rand(self.layout().numel, generator=self._random(0))
        return draws.ge(self.dead) | ~real(self.layout())

    def input(self, rank: int, step: int) -> Tensor:
        """What worker `rank` puts in: normal, each layer with its own magnitude, zero in the padding."""
        layout = self.layout()
        x = torch.randn(layout.numel, generator=self._random(1, rank, step), dtype=self.dtype)
        for i, view in enumerate(layout.views(x)):
            view.mul_(10.0 ** (i % 5 - 2))
        x *= real(layout)
        alive = self.alive()
        if alive is not None:
            stirred = torch.rand(layout.numel, generator=self._random(2, step)).lt(0.3)
            if step < self.stir or rank != step % self.workers:
                stirred.zero_()
            x *= alive | stirred
        if step == self.bad_step and rank == self.workers - 1:
            x[layout.layers[-1].start] = float("nan")
        return x

    def layer_factor(self, step: int) -> Tensor | None:
        """The error factor of a step, one per layer: few bits, so that a product with it is exact in the test."""
        if not self.factors:
            return None
        draws = torch.randint(1, 4, (len(self.layout().layers),), generator=self._random(3, step))
        return (draws / 2 if self.dtype == torch.float32 else 2.0 ** (draws - 2)).to(self.dtype)

    def factor(self, step: int) -> Tensor | None:
        """The same for every element: [layout.numel], 1 in the padding."""
        values, layout = self.layer_factor(step), self.layout()
        if values is None:
            return None
        out = torch.ones(layout.numel, dtype=self.dtype)
        for view, value in zip(layout.views(out), values, strict=True):
            view.fill_(value)
        return out


@dataclass
class Trace:
    """What one worker saw: per step the output, the finite flag, what woke, and both errors afterwards."""

    out: list[Tensor] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    woken: list[Tensor | None] = field(default_factory=list)
    worker_error: list[Tensor] = field(default_factory=list)
    server_error: list[Tensor] = field(default_factory=list)
    payload_bytes: int = 0


def real(layout: FlatLayout) -> Tensor:
    """True in the layers, False in the padding."""
    mask = torch.zeros(layout.numel, dtype=torch.bool)
    for layer in layout.layers:
        mask[layer.start : layer.stop] = True
    return mask


def new_exchange(plan: Plan, comm: Comm) -> Exchange:
    exchange = Exchange(plan.layout(), plan.codec, comm, plan.dtype, CPU)
    exchange.set_alive(plan.alive())
    return exchange


def average(exchange: Exchange, x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, bool]:
    """One step over all buckets, all of them under way at once, as an optimizer does it."""
    means = [
        exchange.start(b, x[b.slice].clone(), None if factor is None else factor[b.layer_slice])
        for b in exchange.layout.buckets
    ]
    for mean in means:
        mean.serve()
    out = torch.cat([mean.wait() for mean in means])
    finite = all(bool(mean.finite) for mean in means)
    if finite:
        for mean in means:
            mean.commit()
        exchange.note_headers([mean.headers for mean in means])
    return out, finite


def simulate(comm: Comm, plan: Plan) -> Trace:
    exchange, trace = new_exchange(plan, comm), Trace()
    before = comm.payload_bytes
    for step in range(plan.steps):
        trace.woken.append(exchange.wake())
        out, finite = average(exchange, plan.input(comm.rank, step), plan.layer_factor(step))
        trace.out.append(out)
        trace.finite.append(finite)
        trace.worker_error.append(exchange.worker_error.clone())
        trace.server_error.append(exchange.server_error.clone())
    trace.payload_bytes = comm.payload_bytes - before
    return trace


@cache
def virtually(plan: Plan) -> tuple[Trace, ...]:
    """The traces of n threads. Plans are run once; the traces are read, never written."""
    return tuple(run_workers(plan.workers, lambda comm: simulate(comm, plan)))


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal to the bit: tells -0.0 from 0.0, and nan equals nan."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_traces(mine: Trace, other: Trace) -> None:
    assert mine.finite == other.finite
    assert mine.payload_bytes == other.payload_bytes
    for name in ("out", "woken", "worker_error", "server_error"):
        pairs = list(zip(getattr(mine, name), getattr(other, name), strict=True))
        assert [step for step, (a, b) in enumerate(pairs) if not same_bits(a, b)] == [], name


def assert_workers_agree(traces: Sequence[Trace]) -> None:
    for other in traces[1:]:
        assert other.finite == traces[0].finite
        for step, (a, b) in enumerate(zip(traces[0].out, other.out, strict=True)):
            assert same_bits(a, b), step
        for step, (a, b) in enumerate(zip(traces[0].woken, other.woken, strict=True)):
            assert same_bits(a, b), step


def served(layout: FlatLayout, parts: list[Tensor]) -> Tensor:
    """Put the workers' server errors together in flat order."""
    flat, at = [], 0
    for bucket in layout.buckets:
        flat += [part[at : at + bucket.chunk] for part in parts]
        at += bucket.chunk
    assert all(len(part) == at for part in parts)
    return torch.cat(flat)


class Logging(Comm):
    """Passes everything on to another comm and writes down each collective."""

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.log: list[tuple[str, int]] = []

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self.log.append(("all_gather_bytes", len(data)))
        return self.inner.all_gather_bytes(data)

    def _all_to_all(self, messages: Tensor) -> Pending:
        self.log.append(("all_to_all", messages.shape[1]))
        return self.inner._all_to_all(messages)

    def _all_gather(self, message: Tensor) -> Pending:
        self.log.append(("all_gather", message.numel()))
        return self.inner._all_gather(message)

    def _all_reduce(self, tensor: Tensor) -> None:
        self.log.append(("all_reduce", tensor.numel()))
        self.inner._all_reduce(tensor)


# --- exact inputs ---------------------------------------------------------------------------------------------------


def exact_input(layout: FlatLayout, seed: int, exponent: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (layout.numel,), generator=generator) * 2.0 - 1
    magnitude = torch.tensor(2.0**exponent, dtype=torch.float64).to(dtype)
    return signs.to(dtype) * magnitude * real(layout)


@settings(LAWS, max_examples=30)
@given(
    st.integers(1, 8),
    SHAPES,
    codecs(st.just(1.0)),
    st.one_of(st.none(), st.integers(1, 60)),
    st.sampled_from([torch.float32, torch.float64]),
    st.lists(st.one_of(st.integers(-149, 120), st.integers(-8, 8)), min_size=1, max_size=3),
)
def test_equal_magnitudes_come_back_exactly_and_leave_no_error(n, shapes, codec, limit, dtype, exponents):
    layout = FlatLayout(shapes, n, bucket_elements=limit)

    def worker(comm: Comm) -> None:
        exchange = Exchange(layout, codec, comm, dtype, CPU)
        for step, exponent in enumerate(exponents):
            x = exact_input(layout, step, exponent, dtype)
            out, finite = average(exchange, x)
            assert finite
            assert torch.equal(out, x)
            assert int(exchange.worker_error.ne(0).sum()) == 0
            assert int(exchange.server_error.ne(0).sum()) == 0

    run_workers(n, worker)


@pytest.mark.parametrize("codec", ALL_CODECS, ids=str)
@pytest.mark.parametrize("n", range(1, 9))
def test_equal_magnitudes_are_exact_for_every_number_of_workers_scale_and_kind(n, codec):
    layout = FlatLayout([(7,), (11, 13), (), (0,), (1, 97)], n, bucket_elements=150)

    def worker(comm: Comm) -> None:
        exchange = Exchange(layout, codec, comm, torch.float32, CPU)
        for step in range(3):
            x = exact_input(layout, step, step - 1, torch.float32)
            out, _ = average(exchange, x)
            assert torch.equal(out, x)
            assert int(exchange.worker_error.ne(0).sum()) + int(exchange.server_error.ne(0).sum()) == 0

    run_workers(n, worker)


def test_layers_of_different_magnitude_are_exact_where_each_has_its_own_scale():
    layout = FlatLayout([(7,), (30,), ()], 3)
    x = layout.gather([torch.full((7,), 0.5), torch.full((30,), -64.0), torch.tensor(4.0)], torch.float32, CPU)

    def worker(comm: Comm, codec: OneBit) -> bool:
        return torch.equal(average(Exchange(layout, codec, comm, torch.float32, CPU), x)[0], x)

    assert run_workers(3, lambda comm: worker(comm, OneBit("layer"))) == [True] * 3
    assert run_workers(3, lambda comm: worker(comm, OneBit("block", 8))) == [True] * 3
    assert run_workers(3, lambda comm: worker(comm, OneBit("bucket"))) == [False] * 3  # shared: cannot be


def test_opposite_signs_average_to_zero_and_the_whole_input_is_accounted_for():
    layout = FlatLayout([(8,)], 2)

    def worker(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        exchange = Exchange(layout, OneBit(), comm, torch.float32, CPU)
        x = torch.full((16,), 4.0 if comm.rank == 0 else -4.0) * real(layout)
        return average(exchange, x)[0], exchange.worker_error, exchange.server_error

    for result in run_workers(2, worker):
        assert all(int(part.ne(0).sum()) == 0 for part in result)


# --- conservation ---------------------------------------------------------------------------------------------------


def rounding_bound(plan: Plan, traces: Sequence[Trace], step: int) -> Tensor:
    """How far n x (sent + held - put in) may be from 0 after one step, [layout.numel], float64.

    With u half the distance from 1 to the next number, each operation errs by at most u times its result:
    f e, x + f e and input - decoded on every worker; n - 1 additions and a division on the server, where every
    decoded value is at most |x| + |f e| + |new error|; then f s, the addition of it, and served - decoded.
    1.01 covers terms of second order and the last term results that are denormal.
    """
    n, info = plan.workers, torch.finfo(plan.dtype)
    zero = torch.zeros(plan.layout().numel, dtype=torch.float64)
    f = plan.factor(step)
    f = zero + 1 if f is None else f.double()
    x = [plan.input(rank, step).double().abs() for rank in range(n)]
    old = [t.worker_error[step - 1].double().abs() * f if step else zero for t in traces]
    new = [t.worker_error[step].double().abs() for t in traces]
    old_served = served(plan.layout(), [t.server_error[step - 1] for t in traces]).double().abs() * f if step else zero
    new_served = served(plan.layout(), [t.server_error[step] for t in traces]).double().abs()
    workers = sum((a + 2 * e + d for a, e, d in zip(x, old, new, strict=True)), zero)
    decoded = sum((a + e + d for a, e, d in zip(x, old, new, strict=True)), zero)
    server = (n + 1) * decoded + n * (2 * old_served + new_served)
    return 1.01 * info.eps / 2 * (workers + server) + 8 * n * info.smallest_normal * info.eps


def assert_conserved(plan: Plan, traces: Sequence[Trace]) -> None:
    """n sent + held afterwards = put in + f held before, for every step and, without f, for all together."""
    n, layout = plan.workers, plan.layout()
    total_bound = torch.zeros(layout.numel, dtype=torch.float64)
    terms: list[list[float]] = [[] for _ in range(layout.numel)]
    for step in range(plan.steps):
        f = plan.factor(step)
        f = torch.ones(layout.numel, dtype=torch.float64) if f is None else f.double()
        rows = [traces[0].out[step].double()] * n
        rows += [-plan.input(rank, step).double() for rank in range(n)]
        for at, values in enumerate(torch.stack(rows).t().tolist()):
            terms[at] += values
        rows += [t.worker_error[step].double() for t in traces]
        rows += [served(layout, [t.server_error[step] for t in traces]).double()] * n
        if step:
            rows += [-f * t.worker_error[step - 1].double() for t in traces]
            rows += [-f * served(layout, [t.server_error[step - 1] for t in traces]).double()] * n
        bound = rounding_bound(plan, traces, step)
        total_bound += bound
        gap = torch.tensor([abs(fsum(v)) for v in torch.stack(rows).t().tolist()], dtype=torch.float64)
        assert int((gap > bound).sum()) == 0, (step, gap.max(), bound.max())
    if not plan.factors:
        last = [t.worker_error[-1].double() for t in traces]
        last += [served(layout, [t.server_error[-1] for t in traces]).double()] * n
        held = torch.stack(last).t().tolist()
        gap = torch.tensor([abs(fsum(a + b)) for a, b in zip(terms, held, strict=True)], dtype=torch.float64)
        assert int((gap > total_bound).sum()) == 0, (gap.max(), total_bound.max())


@LAWS
@given(
    st.builds(
        Plan,
        workers=st.integers(1, 4),
        shapes=SHAPES.map(tuple),
        codec=codecs(MULTIPLIERS),
        bucket_elements=st.one_of(st.none(), st.integers(1, 60)),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        steps=st.just(8),
        seed=st.integers(0, 10_000),
        dead=st.sampled_from([0.0, 0.3, 0.9]),
        stir=st.integers(1, 6),
        factors=st.booleans(),
    )
)
def test_sent_plus_held_equals_put_in_for_any_layout_codec_and_dead_elements(plan):
    traces = virtually(plan)
    assert all(all(trace.finite) for trace in traces)
    assert_workers_agree(traces)
    assert_conserved(plan, traces)
    padding = ~real(plan.layout())
    for trace in traces:
        assert all(int(out[padding].ne(0).sum()) == 0 for out in trace.out)
        assert all(int(error[padding].ne(0).sum()) == 0 for error in trace.worker_error)
    for step in range(plan.steps):
        assert int(served(plan.layout(), [t.server_error[step] for t in traces])[padding].ne(0).sum()) == 0


@pytest.mark.parametrize(
    ("codec", "dtype"), list(zip(ALL_CODECS, [torch.float32, torch.float64] * 3, strict=True)), ids=str
)
def test_conservation_holds_over_many_steps_with_wake_ups_in_the_middle(codec, dtype):
    plan = Plan(3, codec=codec, dtype=dtype, bucket_elements=20, steps=24, dead=0.4, stir=8)
    traces = virtually(plan)
    woken = [step for step, mask in enumerate(traces[0].woken) if mask is not None and mask.any()]
    assert woken
    assert min(woken) > 8
    assert_workers_agree(traces)
    assert_conserved(plan, traces)


def test_conservation_notices_one_lost_error():
    plan = Plan(2, steps=3)
    traces = run_workers(2, lambda comm: simulate(comm, plan))
    assert_conserved(plan, traces)
    traces[1].worker_error[1][3] *= 1.001
    with pytest.raises(AssertionError):
        assert_conserved(plan, traces)


def test_the_mean_of_many_outputs_approaches_the_mean_of_a_constant_input():
    plan = Plan(3, steps=100)
    layout = plan.layout()
    x = [plan.input(rank, 0) for rank in range(3)]

    def worker(comm: Comm) -> Tensor:
        exchange = new_exchange(plan, comm)
        return sum((average(exchange, x[comm.rank])[0] for _ in range(100)), layout.zeros(torch.float32, CPU)) / 100

    mean = (x[0] + x[1] + x[2]) / 3
    once = virtually(replace(plan, steps=1))[0].out[0]
    many = run_workers(3, worker)[0]
    assert float((many - mean).norm()) < 0.1 * float((once - mean).norm())


# --- the same bits everywhere ---------------------------------------------------------------------------------------

SIZES = (1, 2, 3, 4, 8)


def plans(workers: int) -> list[Plan]:
    """The runs that Solo, threads and processes must agree on to the bit."""
    return [
        Plan(workers, seed=1),
        Plan(workers, seed=2, codec=OneBit("bucket", kind="mean", multiplier=1.3), bucket_elements=10),
        Plan(workers, seed=3, codec=OneBit("block", 8), factors=True),
        Plan(workers, seed=4, codec=OneBit("block", 8, "mean"), dtype=torch.float64, bucket_elements=20),
        Plan(workers, seed=5, dead=0.4, stir=2, steps=8, bad_step=5, bucket_elements=20),
        Plan(workers, seed=6, codec=OneBit("bucket"), shapes=((3,),), dead=0.5, stir=1),  # mostly padding
    ]


def gloo_program(comm: Distributed) -> dict[int, list[Trace]]:
    """The plans of every group that this process is in; the groups are the first 1, 2, 3, 4 and 8 processes."""
    results = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if comm.rank < size:
            member = Distributed(group)
            assert (member.rank, member.size) == (comm.rank, size)
            results[size] = [simulate(member, plan) for plan in plans(size)]
        else:
            with pytest.raises(ConfigError, match="not a member"):
                Distributed(group)
    return results


@pytest.fixture(scope="module")
def gloo() -> list[dict[int, list[Trace]]]:
    return run_processes(8, gloo_program, timeout_s=180)


@pytest.mark.parametrize("n", SIZES)
def test_virtual_workers_match_gloo_processes_bitwise(n, gloo):
    for at, plan in enumerate(plans(n)):
        traces = virtually(plan)
        for rank, trace in enumerate(traces):
            assert_same_traces(trace, gloo[rank][n][at])


@pytest.mark.parametrize("n", SIZES)
def test_all_workers_hold_the_same_bits_after_every_step(n):
    for plan in plans(n):
        traces = virtually(plan)
        assert_workers_agree(traces)
        assert traces[0].finite == [step != plan.bad_step for step in range(plan.steps)]
        if n > 1 and plan.dead == 0:  # and yet they did not hold the same inputs
            assert not same_bits(traces[0].worker_error[-1], traces[1].worker_error[-1])


def test_solo_matches_one_virtual_worker_bitwise():
    for plan in plans(1):
        assert_same_traces(simulate(Solo(), plan), virtually(plan)[0])


def test_a_run_of_virtual_workers_repeats_itself_bitwise():
    plan = plans(3)[4]
    again = run_workers(3, lambda comm: simulate(comm, plan))
    for first, second in zip(virtually(plan), again, strict=True):
        assert_same_traces(first, second)


def test_start_adds_the_error_into_the_given_input():
    layout = Plan(1).layout()
    exchange = Exchange(layout, OneBit(), Solo(), torch.float32, CPU)
    x = Plan(1).input(0, 0)
    given = x.clone()
    exchange.worker_error.fill_(1)
    exchange.start(layout.buckets[0], given)
    assert torch.equal(given, x + 1)


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "codec", "dtype", "limit", "messages"),
    [  # layers of 5, 21 and 1 elements, see test_codec.py for the same numbers taken apart
        (1, OneBit(), torch.float32, None, [20]),
        (2, OneBit(), torch.float32, None, [16]),
        (2, OneBit(), torch.float64, None, [32]),
        (2, OneBit("bucket"), torch.float32, None, [12]),
        (2, OneBit("block", 8), torch.float32, None, [20]),
        (2, OneBit(), torch.float32, 10, [12, 12, 12]),
        (3, OneBit(), torch.float32, None, [16]),
        (8, OneBit(), torch.float32, None, [16]),
    ],
)
def test_two_collectives_per_bucket_and_bytes_as_computed_by_hand(workers, codec, dtype, limit, messages):
    plan = Plan(workers, ((5,), (3, 7), ()), codec, limit, dtype)

    def worker(comm: Comm) -> Logging:
        logging = Logging(comm)
        simulate(logging, plan)
        return logging

    for logging in run_workers(workers, worker):
        step = [("all_to_all", m) for m in messages] + [("all_gather", m) for m in messages]
        assert logging.log == step * plan.steps
        assert logging.payload_bytes == plan.steps * (workers - 1) * 2 * sum(messages)


def test_a_large_bucket_costs_a_thirty_second_of_float32_less_only_scales_and_padding():
    plan = Plan(4, ((1000, 100),), steps=1)
    (trace, *_) = virtually(plan)
    ring = 2 * 3 * 4 * 100_000 // 4
    assert trace.payload_bytes == 2 * 3 * (25_000 // 8 + 8 + 3)  # 25 000 / 8 = 3 125, filled up to 3 128
    assert 31.8 < ring / trace.payload_bytes < 32


def test_with_dead_elements_there_is_no_further_collective_until_one_asks_to_wake():
    plan = Plan(2, steps=6, dead=0.5, stir=3, bucket_elements=20)
    layout = plan.layout()
    buckets = len(layout.buckets)

    def worker(comm: Comm) -> list[int]:
        logging = Logging(comm)
        exchange = new_exchange(plan, logging)
        counts = []
        for step in range(plan.steps):
            before, paid = len(logging.log), logging.payload_bytes
            exchange.wake()
            woke = len(logging.log) - before
            assert (logging.payload_bytes - paid) == (sum(b.numel for b in layout.buckets) // 8 if woke else 0)
            counts.append(woke)
            average(exchange, plan.input(comm.rank, step))
        return counts

    assert run_workers(2, worker) == [[0, 0, 0, 0, 2 * buckets, 2 * buckets]] * 2


# --- nothing leaks --------------------------------------------------------------------------------------------------


@LAWS
@given(SHAPES, st.integers(1, 4), codecs(MULTIPLIERS), st.integers(1, 60), st.integers(0, 1000))
def test_a_bucket_gives_the_same_bits_as_if_it_were_alone(shapes, n, codec, limit, seed):
    plan = Plan(n, tuple(shapes), codec, limit, steps=3, seed=seed)
    together = virtually(plan)

    def alone(comm: Comm, bucket: Bucket) -> list[Tensor]:
        layout = FlatLayout([layer.shape for layer in bucket.layers], n)
        exchange = Exchange(layout, codec, comm, plan.dtype, CPU)
        assert layout.numel == bucket.numel
        return [average(exchange, plan.input(comm.rank, step)[bucket.slice])[0] for step in range(plan.steps)]

    for bucket in plan.layout().buckets:
        outs = run_workers(n, lambda comm, bucket=bucket: alone(comm, bucket))
        for step in range(plan.steps):
            assert same_bits(outs[0][step], together[0].out[step][bucket.slice])


@LAWS
@given(SHAPES, st.integers(1, 4), codecs(MULTIPLIERS).filter(lambda c: c.scale != "bucket"), st.data())
def test_a_layer_with_its_own_scales_does_not_feel_its_neighbours(shapes, n, codec, data):
    layout = FlatLayout(shapes, n)
    chosen = data.draw(st.sampled_from([layer for layer in layout.layers if layer.numel]), label="layer")
    own = torch.zeros(layout.numel, dtype=torch.bool)
    own[chosen.start : chosen.stop] = True

    def worker(comm: Comm, rest: float) -> list[Tensor]:
        exchange = Exchange(layout, codec, comm, torch.float32, CPU)
        plan = Plan(n, tuple(shapes))
        factor = torch.where(own, 1.0, rest)
        return [average(exchange, plan.input(comm.rank, step) * factor)[0] for step in range(3)]

    first = run_workers(n, lambda comm: worker(comm, 1.0))[0]
    second = run_workers(n, lambda comm: worker(comm, 1e6))[0]
    for a, b in zip(first, second, strict=True):
        assert same_bits(a[own], b[own])


# --- nan, inf and other edges ---------------------------------------------------------------------------------------


def errors_of(exchange: Exchange) -> tuple[Tensor, Tensor]:
    return exchange.worker_error.clone(), exchange.server_error.clone()


@pytest.mark.parametrize("codec", ALL_CODECS, ids=str)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_one_bad_element_on_one_worker_is_seen_by_all_and_poisons_nothing(codec, n, bad):
    plan = Plan(n, codec=codec, bucket_elements=20)
    places = torch.nonzero(real(plan.layout())).flatten().tolist()[::13]

    def worker(comm: Comm) -> None:
        spared, struck = new_exchange(plan, comm), new_exchange(plan, comm)
        for step in range(2):
            x = plan.input(comm.rank, step)
            for at in places:
                poisoned = x.clone()
                if comm.rank == n - 1:
                    poisoned[at] = bad
                before = errors_of(struck)
                _, finite = average(struck, poisoned)
                assert not finite
                assert all(same_bits(a, b) for a, b in zip(before, errors_of(struck), strict=True))
            assert same_bits(average(spared, x)[0], average(struck, x)[0])
            assert all(same_bits(a, b) for a, b in zip(errors_of(spared), errors_of(struck), strict=True))

    run_workers(n, worker)


@pytest.mark.parametrize("codec", ALL_CODECS, ids=str)
@pytest.mark.parametrize("dead", [0.5, 1.0])
def test_a_nan_on_a_dead_element_is_seen_by_all_and_wakes_nothing(codec, dead):
    plan = Plan(3, codec=codec, dead=dead)
    exists = plan.alive()
    assert exists is not None
    at = int(torch.nonzero(~exists)[-1])

    def worker(comm: Comm) -> None:
        exchange = new_exchange(plan, comm)
        average(exchange, plan.input(comm.rank, 0))
        before = errors_of(exchange)
        x = plan.input(comm.rank, 1)
        if comm.rank == 1:
            x[at] = float("nan")
        _, finite = average(exchange, x)
        assert not finite
        assert all(same_bits(a, b) for a, b in zip(before, errors_of(exchange), strict=True))
        assert exchange.wake() is None
        _, finite = average(exchange, plan.input(comm.rank, 1))
        assert finite

    run_workers(3, worker)


def test_only_the_bucket_with_the_nan_says_so_hence_the_look_at_all_of_them():
    plan = Plan(2, bucket_elements=20)

    def worker(comm: Comm) -> list[bool]:
        exchange = new_exchange(plan, comm)
        x = plan.input(comm.rank, 0)
        if comm.rank == 0:
            x[0] = float("nan")
        means = [exchange.start(bucket, x[bucket.slice].clone()) for bucket in exchange.layout.buckets]
        for mean in means:
            mean.serve()
        for mean in means:
            mean.wait()
        return [bool(mean.finite) for mean in means]

    assert run_workers(2, worker) == [[False, True, True]] * 2


@pytest.mark.parametrize("codec", ALL_CODECS, ids=str)
def test_zeros_denormals_and_huge_values_stay_finite(codec):
    layout = FlatLayout([(21,), (4,)], 3)

    def worker(comm: Comm) -> None:
        exchange = Exchange(layout, codec, comm, torch.float32, CPU)
        zero = layout.zeros(torch.float32, CPU)
        out, finite = average(exchange, zero)
        assert finite
        assert int(out.ne(0).sum()) + int(exchange.worker_error.ne(0).sum()) == 0
        tiny = torch.full((layout.numel,), 3e-42) * real(layout)
        out, finite = average(exchange, tiny)
        assert finite
        assert bool(torch.isfinite(exchange.worker_error).all())
        assert float(out.max()) > 0
        exchange = Exchange(layout, codec, comm, torch.float32, CPU)
        huge = torch.full((layout.numel,), 1e20) * real(layout)
        huge[::2] *= -0.3
        for _ in range(3):
            out, finite = average(exchange, huge)
            assert finite
            assert bool(torch.isfinite(out).all())
            assert bool(torch.isfinite(exchange.worker_error).all())
        assert 1e19 < float(out.abs().max()) < 1e21

    run_workers(3, worker)


# --- dead elements --------------------------------------------------------------------------------------------------


def test_a_dead_element_sends_nothing_keeps_its_input_asks_once_and_wakes_on_all_workers_alike():
    layout = FlatLayout([(12,), (9,)], 2, bucket_elements=12)
    alive = torch.ones(layout.numel, dtype=torch.bool)
    dead = [3, 4, 17, 18]
    alive[dead] = False

    def worker(comm: Comm) -> None:
        exchange = Exchange(layout, OneBit(), comm, torch.float32, CPU)
        exchange.set_alive(alive.clone())
        ones = torch.ones(layout.numel) * real(layout)

        out, _ = average(exchange, ones * alive)
        assert torch.equal(out, ones * alive)  # exact: the dead take no part in a scale
        assert not exchange.wake_wanted
        assert exchange.wake() is None

        x = ones * alive
        if comm.rank == 1:
            x[3], x[17] = 0.25, -8.0
        out, finite = average(exchange, x)
        assert finite
        assert torch.equal(out, ones * alive)
        held = torch.zeros(layout.numel)
        if comm.rank == 1:
            held[3], held[17] = 0.25, -8.0
        assert torch.equal(exchange.worker_error, held)
        assert exchange.wake_wanted

        woken = exchange.wake()
        assert woken is not None
        assert torch.nonzero(woken).flatten().tolist() == [3, 17]
        assert exchange.alive is not None
        assert torch.nonzero(~exchange.alive).flatten().tolist() == [4, 18]
        assert exchange.wake() is None  # once
        out, _ = average(exchange, ones * alive)
        assert torch.nonzero((out == 0) & real(layout)).flatten().tolist() == [4, 18]
        assert not exchange.wake_wanted

    run_workers(2, worker)


def test_when_the_last_dead_element_wakes_there_is_no_mask_any_more():
    layout = FlatLayout([(16,)], 2)
    alive = torch.ones(16, dtype=torch.bool)
    alive[5] = False

    def worker(comm: Comm) -> None:
        exchange, fresh = (Exchange(layout, OneBit(), comm, torch.float32, CPU) for _ in range(2))
        exchange.set_alive(alive.clone())
        average(exchange, torch.ones(16) * (alive | torch.tensor(comm.rank == 0)))
        assert exchange.wake() is not None
        assert exchange.alive is None
        exchange.worker_error.zero_()
        x = Plan(2, ((16,),)).input(comm.rank, 0)
        assert same_bits(average(exchange, x)[0], average(fresh, x)[0])

    run_workers(2, worker)


def test_an_all_true_mask_is_the_same_as_none():
    exchange = Exchange(Plan(1).layout(), OneBit(), Solo(), torch.float32, CPU)
    exchange.set_alive(torch.ones(exchange.layout.numel, dtype=torch.bool))
    assert exchange.alive is None
    assert all(codec.alive is None for codec in exchange.codecs)


@pytest.mark.parametrize("codec", ALL_CODECS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_layer_that_is_dead_throughout_decodes_to_zero_and_can_wake_whole(codec, n):
    layout = FlatLayout([(9,), (6,), (30,)], n)
    alive = torch.ones(layout.numel, dtype=torch.bool)
    alive[9:15] = False

    def worker(comm: Comm) -> None:
        exchange = Exchange(layout, codec, comm, torch.float32, CPU)
        exchange.set_alive(alive.clone())
        x = torch.full((layout.numel,), 2.0) * real(layout)
        out, finite = average(exchange, x * alive)
        assert finite
        assert torch.equal(out, x * alive)
        average(exchange, x)
        woken = exchange.wake()
        assert woken is not None
        assert torch.nonzero(woken).flatten().tolist() == list(range(9, 15))
        assert exchange.alive is None
        out, _ = average(exchange, x * alive)  # the layer's input of last time comes out of the error now
        assert torch.equal(out, x)
        assert int(exchange.worker_error.ne(0).sum()) + int(exchange.server_error.ne(0).sum()) == 0

    run_workers(n, worker)


def test_with_every_element_dead_nothing_is_sent_and_nothing_is_lost():
    plan = Plan(3, dead=1.0)

    def worker(comm: Comm) -> None:
        exchange = new_exchange(plan, comm)
        x = Plan(3).input(comm.rank, 0)
        out, finite = average(exchange, x)
        assert finite
        assert int(out.ne(0).sum()) == 0
        assert torch.equal(exchange.worker_error, x)
        exchange.wake()
        assert exchange.alive is None

    run_workers(3, worker)


def test_a_step_that_was_skipped_does_not_lose_the_wish_to_wake():
    plan = Plan(2, dead=0.5)
    alive = plan.alive()
    assert alive is not None
    at = int(torch.nonzero(~alive)[0])

    def worker(comm: Comm) -> list[int]:
        exchange = new_exchange(plan, comm)
        x = plan.input(comm.rank, 0)
        if comm.rank == 0:
            x[at] = 1.0
        average(exchange, torch.full_like(x, float("nan")))
        assert not exchange.wake_wanted
        average(exchange, x)
        assert exchange.wake_wanted
        average(exchange, torch.full_like(x, float("nan")))
        assert exchange.wake_wanted
        woken = exchange.wake()
        assert woken is not None
        return torch.nonzero(woken).flatten().tolist()

    assert run_workers(2, worker) == [[at]] * 2


def test_the_header_counts_the_dead_elements_that_ask_over_all_workers():
    layout = FlatLayout([(16,)], 2)
    alive = torch.arange(16) >= 4

    def worker(comm: Comm) -> Any:
        exchange = Exchange(layout, OneBit(), comm, torch.float32, CPU)
        exchange.set_alive(alive)
        x = (torch.arange(16) >= (2 if comm.rank else 1)).float()
        x[::2] *= -1
        mean = exchange.start(layout.buckets[0], x)
        mean.serve()
        mean.wait()
        return mean.headers.tolist()

    assert run_workers(2, worker) == [[5, 5]] * 2  # 3 on worker 0 and 2 on worker 1, told by both servers


# --- without error feedback -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_without_feedback_errors_stay_zero_and_the_first_gradient_of_a_dead_element_still_arrives(compact: bool):
    layout = FlatLayout([(24,)], 2)
    alive = torch.ones(layout.numel, dtype=torch.bool)
    alive[[3, 4]] = False

    def worker(comm: Comm) -> None:
        exchange, other = (
            Exchange(layout, OneBit(), comm, torch.float32, CPU, compact=compact, feedback=kept)
            for kept in (False, True)
        )
        exchange.set_alive(alive.clone())
        generator = torch.Generator().manual_seed(comm.rank)
        for t in range(4):
            x = torch.randn(layout.numel, generator=generator) * real(layout)
            x[[3, 4]] = torch.tensor([0.0, 2.0 if t == 1 and comm.rank == 1 else 0.0])
            average(other, x.clone())
            average(exchange, x)
            held = torch.zeros(layout.numel)
            if t == 1 and comm.rank == 1:
                held[4] = 2.0
            assert torch.equal(exchange.worker_error, held)
            assert not exchange.server_error.any()
            woken = exchange.wake()
            assert (woken is not None) == (t == 1)
        assert exchange.alive is not None
        assert torch.nonzero(~exchange.alive).flatten().tolist() == [3]
        assert other.worker_error.norm() > 1
        assert other.server_error.norm() > 0.1

    run_workers(2, worker)
