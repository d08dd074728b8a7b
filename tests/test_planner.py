"""The cost model: laws, and ties to what the library counts, allocates and moves."""

from __future__ import annotations

import math
import re
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

import onebit
from onebit import bench
from onebit.averaging import average_gradients
from onebit.codec import BucketCodec, OneBit
from onebit.comm import Comm
from onebit.errors import ConfigError, LayoutError
from onebit.planner import (
    METHODS,
    PLAIN,
    StepTime,
    all_reduce_s,
    break_even_gbit_s,
    cost,
    exchange_s,
    payload_bytes,
    plan,
    step_time,
    steps_of,
)
from onebit.planner_bytes import flat_layout, integer_messages, low_rank_elements, one_bit_messages
from onebit.planner_inputs import Model, Network, Range, Run, Setup, Work, corners, transformer_shapes
from onebit.planner_methods import (
    ADAM_APPLY,
    ADAMW_UPDATE,
    ENCODE,
    FOLLOW,
    INPUT,
    LAMB_APPLY,
    LAMB_UPDATE,
    LOCAL_APPLY,
    LOCAL_STEPS,
    LOW_RANK,
    RENEW,
    SERVER,
    SERVER_PER_CHUNK,
    StepKind,
)
from onebit.planner_sweep import sweep
from onebit.quantised import QuantisedCodec
from onebit.two_level import TwoLevel

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
SHAPES = ((40, 24), (24,), (16, 40), (7,), (3, 5, 8))
STEPS = 24
OPTIMIZERS = {
    "lamb-16bit": ("Lamb", {"transport": "bf16"}),
    "onebit-lamb": ("OneBitLamb", {"warmup_transport": "bf16", "freeze_step": 4}),
    "onebit-lamb-paper": ("OneBitLamb", {"warmup_transport": "bf16", "freeze_step": 4, **onebit.PAPER}),
    "onebit-lamb-int8": ("OneBitLamb", {"warmup_transport": "int8", "freeze_step": 4}),
    "onebit-lamb-int4": ("OneBitLamb", {"warmup_transport": "int4", "freeze_step": 4}),
    "local-variance-lamb": ("LocalVarianceLamb", {"warmup_transport": "int4", "warmup_steps": 1}),
    "onebit-adam": ("OneBitAdam", {"warmup_transport": "bf16", "freeze_step": 4}),
    "onebit-adam-int8": ("OneBitAdam", {"warmup_transport": "int8", "freeze_step": 4}),
    "onebit-adam-paper": ("OneBitAdam", {"warmup_transport": "bf16", "freeze_step": 4, **onebit.PAPER}),
    "local-variance-adam": ("LocalVarianceAdam", {"warmup_transport": "int4", "warmup_steps": 1}),
    "zero-one-adam": ("ZeroOneAdam", {"warmup_transport": "bf16", "var_freeze_step": 4}),
}


def setup_of(shapes: Any = SHAPES, workers: int = 8, per_machine: int = 2, link: Any = 1.0, **more: Any) -> Setup:
    net = {k: v for k, v in more.items() if k in Network.__dataclass_fields__}
    work = {k: v for k, v in more.items() if k in Work.__dataclass_fields__}
    run = {k: v for k, v in more.items() if k in Run.__dataclass_fields__}
    return Setup(
        Model(shapes),
        Network(workers, per_machine, link, **net),
        Work(**{"micro_step_s": 0.1, **work}),
        Run(**{"steps": STEPS, **run}),
    )


# -- ties to the library -----------------------------------------------------------------------------------------

sizes = st.one_of(st.integers(0, 9), st.sampled_from([40, 130, 300]))
some_shapes = st.lists(st.lists(sizes, max_size=2).map(tuple), min_size=1, max_size=12).map(tuple)


@given(some_shapes, st.integers(1, 9), st.sampled_from([None, 1, 50, 1000]))
@settings(deadline=None, max_examples=150)
def test_message_sizes_are_those_of_the_codecs(shapes, workers, bucket_elements):
    try:
        buckets = flat_layout(shapes, workers, bucket_elements).buckets
    except LayoutError:
        return
    for scale in ("layer", "bucket"):
        built = [BucketCodec(b, OneBit(scale=scale), torch.float32, CPU).message_bytes for b in buckets]
        assert list(one_bit_messages(shapes, workers, bucket_elements, scale)) == built
    for bits in (8, 4):
        built = [QuantisedCodec(b, bits, torch.float32, CPU).message_bytes for b in buckets]
        assert list(integer_messages(shapes, workers, bucket_elements, bits)) == built


def build(comm: Comm, name: str, shapes: Any, **more: Any) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    kind, options = OPTIMIZERS[name]
    return params, getattr(onebit, kind)(params, lr=1e-3, comm=comm, **{**options, **more})


def feed(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.rand(p.shape, generator=generator) + 0.1  # no element is dead


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_payload_is_what_the_optimizer_counts_to_the_byte(name, workers):
    def run(comm: Comm) -> int:
        params, optimizer = build(comm, name, SHAPES)
        for step in range(STEPS):
            feed(params, 10 * step + comm.rank)
            optimizer.step()
        return int(optimizer.payload_bytes)

    counted = onebit.run_workers(workers, run)
    predicted = cost(setup_of(workers=workers, per_machine=1), METHODS[name]).payload_bytes
    assert counted == [predicted] * workers


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_payload_of_two_levels_is_what_both_levels_count_to_the_byte(name, machines):
    """Two workers on each machine; a worker's own bytes are those between machines and those inside."""

    def run(comm: Comm) -> int:
        levels = onebit.two_level(2, comm=comm)
        assert isinstance(levels, TwoLevel)
        params, optimizer = build(levels, name, SHAPES)
        for step in range(STEPS):
            feed(params, 10 * step + comm.rank)
            optimizer.step()
        return int(optimizer.payload_bytes) + levels.inside.payload_bytes

    counted = onebit.run_workers(2 * machines, run)
    predicted = cost(setup_of(workers=2 * machines, per_machine=2, two_level=True), METHODS[name]).payload_bytes
    assert counted == [predicted] * 2 * machines


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "paper" not in name and name != "zero-one-adam"])
def test_predicted_payload_with_overlap_is_that_of_its_smaller_buckets(name):
    shapes = ((300, 400), (200, 300), (500,))

    def run(comm: Comm) -> int:
        params, optimizer = build(comm, name, shapes, overlap=True)
        for step in range(STEPS):
            feed(params, 10 * step + comm.rank)
            optimizer.step()
        return int(optimizer.payload_bytes)

    def predicted(overlap: bool) -> int:
        return cost(setup_of(shapes, 2, 1, overlap_exchange=overlap), METHODS[name]).payload_bytes

    assert onebit.run_workers(2, run) == [predicted(True)] * 2
    assert (predicted(True) == predicted(False)) == (name == "lamb-16bit")  # which has no messages


@pytest.mark.parametrize(("name", "transport"), [("ddp-16bit", "bf16"), ("ddp-fp32", "fp32")])
def test_predicted_payload_of_plain_averaging_is_what_comm_counts(name, transport):
    def run(comm: Comm) -> int:
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        for step in range(STEPS):
            feed(params, step)
            average_gradients(params, comm, transport)
        return comm.payload_bytes

    assert onebit.run_workers(3, run)[0] == cost(setup_of(workers=3, per_machine=1), METHODS[name]).payload_bytes


def tensors(thing: Any, seen: set[int]) -> dict[int, int]:
    """{address: bytes} of the memory under all tensors that can be reached."""
    if id(thing) in seen or isinstance(thing, Comm | type):
        return {}
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()}
    inner = list(thing.values()) if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    inner = [*inner, *getattr(thing, "__dict__", {}).values()]
    return {address: size for part in inner for address, size in tensors(part, seen).items()}


@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_state_is_what_the_optimizer_holds_at_its_fullest_and_between_steps(name, levels):
    shapes, workers = ((2**8, 2**8),), 4 if levels else 2

    def run(comm: Comm) -> list[float]:
        comm = onebit.two_level(2, comm=comm) if levels else comm
        params, optimizer = build(comm, name, shapes, **({"warmup_steps": 3} if name.startswith("local") else {}))
        sizes = []
        for step in range(8):
            feed(params, 10 * step + comm.rank)
            optimizer.step()
            held = tensors(optimizer, set())
            for own in [*params, *(p.grad for p in params)]:
                held.pop(own.untyped_storage().data_ptr(), None)
            sizes.append(sum(held.values()) / 2**16)
        return sizes

    held = onebit.run_workers(workers, run)[0]
    expected = METHODS[name].state_bytes(setup_of(shapes, workers, 2, two_level=levels))
    assert max(held) == pytest.approx(expected.fullest, rel=0.005)
    settled = min(held) if name.startswith("local") else held[-1]  # local variance is exchanged in between
    assert settled == pytest.approx(expected.settled, rel=0.005)


def test_state_is_what_the_docs_say_of_two_workers():
    text = (ROOT / "docs" / "loops.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| float32, with or without"))
    said = re.search(r"nothing \| ([\d.]+), ([\d.]+), ([\d.]+) \|", row)
    assert said is not None
    setup = setup_of(transformer_shapes(10**6), 2, 1)
    settled = [METHODS[name].state_bytes(setup).settled for name in ("lamb-16bit", "onebit-lamb", "onebit-adam")]
    assert [float(x) for x in said.groups()] == [round(x, 1) for x in settled]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 8))
def test_powersgd_factors_what_torch_factors(rows, columns, rank):
    compressed, plain, factors = _should_compress(rows, columns, rank, 2)
    assert low_rank_elements(((rows, columns),), rank) == ((int(factors), 0) if compressed else (0, int(plain)))


def test_kernels_move_the_bytes_that_bench_counts_as_the_floor():
    one_worker = ENCODE + SERVER_PER_CHUNK + SERVER
    assert one_worker + LAMB_APPLY == pytest.approx(bench.FLOORS[bench.COMPRESSED])
    assert one_worker + ADAM_APPLY == pytest.approx(bench.FLOORS[bench.ADAM])
    assert bench.FLOORS["LAMB, warm-up stage"] == LAMB_UPDATE


# -- laws --------------------------------------------------------------------------------------------------------

setups = st.builds(
    setup_of,
    shapes=st.sampled_from([SHAPES, ((4096, 512), (512,), (1000, 700)), transformer_shapes(30_000_000)]),
    workers=st.sampled_from([2, 4, 8, 16, 64]),
    per_machine=st.sampled_from([1, 2]),
    link=st.floats(0.01, 200),
    latency_us=st.floats(0, 200),
    message_us=st.floats(0, 20),
    local_gbit_s=st.floats(5, 3000),
    oversubscription=st.floats(1, 4),
    full_duplex=st.booleans(),
    all_reduce=st.sampled_from(["ring", "by-machine"]),
    two_level=st.booleans(),
    micro_step_s=st.floats(1e-3, 1),
    accumulation=st.integers(1, 4),
    straggling=st.floats(0, 0.5),
    overlap=st.floats(0, 1),
    overlap_exchange=st.booleans(),
    overlap_extra_s=st.floats(-1, 1),
    kernel_factor=st.floats(0, 10),
    plain_factor=st.floats(0, 10),
    int8_factor=st.floats(0, 10),
    int4_factor=st.floats(0, 10),
    local_factor=st.floats(0, 10),
    low_rank_factor=st.floats(0, 10),
    steps=st.sampled_from([2, 24, 500]),
)


@given(setups)
@settings(deadline=None, max_examples=60)
def test_a_step_is_its_parts_less_what_is_hidden_and_at_least_its_compute(setup):
    for method in METHODS.values():
        for _, kind in steps_of(setup, method):
            time = step_time(setup, kind)
            assert time.total_s + time.hidden_s == pytest.approx(sum(astuple(time)) - time.hidden_s, rel=1e-9)
            beside = setup.work.overlap_exchange and kind.early and kind.messages_bytes
            assert min(astuple(replace(time, hidden_s=0.0) if beside else time)) >= 0
            assert time.total_s >= (time.compute_s + time.straggling_s) * (1 - 1e-9)


@given(setups, st.floats(1, 100))
@settings(deadline=None, max_examples=60)
def test_a_faster_link_is_never_slower(setup, factor):
    faster = replace(setup, network=replace(setup.network, link_gbit_s=setup.network.link_gbit_s * factor))
    for method in METHODS.values():
        assert cost(faster, method).total_s <= cost(setup, method).total_s * (1 + 1e-12)


LOCAL = {"local-variance-lamb", "local-variance-adam"}
WITH_FACTOR = {
    "kernel_factor": {"zero-one-adam", *(n for n in METHODS if n.startswith("onebit-"))},
    "plain_factor": set(METHODS),
    "int8_factor": {"onebit-lamb-int8", "onebit-adam-int8"},
    "int4_factor": {"onebit-lamb-int4", *LOCAL},
    "local_factor": LOCAL,
    "low_rank_factor": {"powersgd"},
}


@given(setups, st.sampled_from(sorted(WITH_FACTOR)), st.floats(0.1, 10))
@settings(deadline=None, max_examples=60)
def test_slower_kernels_slow_down_the_methods_that_have_them_and_no_others(setup, name, more):
    setup = replace(setup, run=replace(setup.run, steps=500))
    slower = replace(setup, work=replace(setup.work, **{name: getattr(setup.work, name) + more}))
    for method in METHODS.values():
        before, after = cost(setup, method), cost(slower, method)
        if method.name not in WITH_FACTOR[name]:
            assert after == before
            continue
        kernels = [c.parts.encode_s + c.parts.server_s + c.parts.update_s for c in (before, after)]
        assert kernels[0] < kernels[1]
        assert after.total_s >= before.total_s * (1 - 1e-12)


def test_kernels_of_integers_local_variance_and_powersgd_are_timed_by_their_own_factors():
    """By hand: 1e9 parameters and 1e9 byte/s, so that a byte per parameter takes a second; 8 workers."""
    own = {"kernel_factor": 2.0, "plain_factor": 3.0, "int8_factor": 5.0, "int4_factor": 7.0, "local_factor": 11.0,
           "low_rank_factor": 13.0}  # fmt: skip
    setup = setup_of(((10**6, 10**3),), 8, 1, memory_gbyte_s=1.0, **own)

    def parts(name: str, stage: int) -> tuple[float, float, float]:
        time = step_time(setup, steps_of(setup, METHODS[name])[stage][1])
        return time.encode_s, time.server_s, time.update_s

    served = SERVER_PER_CHUNK / 8 + SERVER
    assert parts("onebit-lamb", 1) == pytest.approx((2 * ENCODE, 2 * served, 2 * LAMB_APPLY))
    assert parts("onebit-lamb-int8", 0) == pytest.approx(
        (5 * (ENCODE + 2 * 7 / 8), 5 * (served + 2 * 7 / 8), 3 * LAMB_UPDATE)
    )
    int4 = 7 * (ENCODE + 2 * 3 / 8), 7 * (served + 2 * 3 / 8)
    assert parts("onebit-lamb-int4", 0) == pytest.approx((*int4, 3 * LAMB_UPDATE))
    assert parts("local-variance-lamb", 0) == pytest.approx((*int4, 3 * LAMB_UPDATE + 11 * FOLLOW))
    assert parts("local-variance-lamb", 1) == pytest.approx((11 * ENCODE, 11 * served, 11 * LOCAL_APPLY))
    assert parts("local-variance-lamb", 2) == pytest.approx((11 * ENCODE, 11 * served, 11 * RENEW))
    assert parts("powersgd", 1) == pytest.approx((13 * LOW_RANK, 0.0, 3 * ADAMW_UPDATE))


@given(st.sampled_from([2, 4, 8, 16, 32]), st.integers(1, 40), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_twice_the_workers_never_send_fewer_bytes_each(workers, rows, layers):
    shapes = ((8 * 64, rows),) * layers  # buckets need no padding, so that chunks are halved exactly
    for method in METHODS.values():
        few, many = (cost(setup_of(shapes, n, 1), method).payload_bytes for n in (workers, 2 * workers))
        assert few <= many


@given(setups)
@settings(deadline=None, max_examples=40)
def test_at_the_break_even_rate_both_take_equally_long(setup):
    for name, method in METHODS.items():
        rate = break_even_gbit_s(setup, method)
        if name in PLAIN.values() or rate in (0.0, math.inf):
            continue
        there = replace(setup, network=replace(setup.network, link_gbit_s=rate))
        base = METHODS[PLAIN[method.family]]
        assert cost(there, method).total_s == pytest.approx(cost(there, base).total_s, rel=1e-6)
        slow = replace(setup, network=replace(setup.network, link_gbit_s=1e-3))
        assert cost(slow, method).total_s <= cost(slow, base).total_s


@pytest.mark.parametrize("name", sorted({*METHODS} - {"ddp-fp32", "local-steps", *PLAIN.values()}))
def test_some_break_even_is_finite_and_lies_between_faster_and_slower(name):
    setup = setup_of(transformer_shapes(30_000_000), 8, 1, micro_step_s=0.5, latency_us=5.0, steps=1000)
    rate = break_even_gbit_s(setup, METHODS[name])
    assert 0.1 < rate < 1000
    for factor, faster in ((0.9, True), (1.1, False)):
        there = replace(setup, network=replace(setup.network, link_gbit_s=rate * factor))
        ratio = cost(there, METHODS[name]).total_s / cost(there, METHODS[PLAIN[METHODS[name].family]]).total_s
        assert (ratio < 1) is faster


def test_without_latency_and_with_endless_bandwidth_only_compute_and_kernels_are_left():
    setup = setup_of(link=1e15, local_gbit_s=1e15, latency_us=0.0, message_us=0.0, local_latency_us=0.0, straggling=0.0)
    for method in METHODS.values():
        for _, kind in steps_of(setup, method):
            time = step_time(setup, kind)
            kernels = time.encode_s + time.server_s + time.update_s
            assert time.total_s == pytest.approx(time.compute_s + kernels, rel=1e-6)


@given(setups)
@settings(deadline=None, max_examples=30)
def test_oversubscription_and_half_duplex_are_slower_links(setup):
    net = replace(setup.network, full_duplex=False, oversubscription=3.0)
    plain = replace(net, full_duplex=True, oversubscription=1.0, link_gbit_s=net.link_gbit_s / 6)
    for method in METHODS.values():
        two = [cost(replace(setup, network=n), method).total_s for n in (net, plain)]
        assert two[0] == pytest.approx(two[1], rel=1e-12)


def test_the_link_of_a_machine_carries_what_all_its_workers_send_others():
    """By hand: 8 workers, 2 per machine; messages of 1,000 bytes; a link of 8e9 bit/s moves 1e9 byte/s."""
    net = Network(8, 2, 8.0, latency_us=0.0, message_us=0.0, local_gbit_s=1e9)
    inside, to_all, gathered = exchange_s(net, (1000,), 64_000)
    assert inside == 0
    assert to_all == pytest.approx(2 * 6 * 1000 / 1e9)  # g (n - g) messages
    assert gathered == pytest.approx(7 * 1000 / 1e9)  # n - 1 go by, once
    assert all_reduce_s(net, 64_000) == pytest.approx(2 * 7 / 8 * 64_000 / 1e9)
    by_machine = replace(net, all_reduce="by-machine", local_latency_us=0.0)
    assert all_reduce_s(by_machine, 64_000) == pytest.approx(2 * 3 / 4 * 64_000 / 1e9, rel=1e-4)
    _, to_all, gathered = exchange_s(replace(net, two_level=True, local_latency_us=0.0), (1000,), 64_000)
    assert to_all == pytest.approx(2 * 3 * 1000 / 1e9)  # g (m - 1) messages
    assert gathered == pytest.approx(2 * 3 * 1000 / 1e9, rel=1e-4)


def test_two_levels_are_counted_inside_and_between_machines():
    """By hand: 64,000 elements, 8 workers; messages of 1,000 bytes."""
    kind = StepKind("1 bit", messages_bytes=(1000,), exchanged_elements=64_000)
    net = Network(8, 2, 1.0, two_level=True)
    assert payload_bytes(net, kind) == 4 * 64_000 // 2 + 2 * 3 * 1000 + 4 * 1000  # mean; between; what others got
    assert payload_bytes(replace(net, two_level=False), kind) == 2 * 7 * 1000
    assert payload_bytes(replace(net, workers_per_machine=8), kind) == 4 * 7 * 64_000 // 8 + 7 * 1000  # one machine
    quick = replace(net, latency_us=0.0, message_us=0.0, local_latency_us=0.0, local_gbit_s=16.0, mean_gbit_s=4.0)
    inside, to_all, gathered = exchange_s(quick, (1000,), 64_000)
    assert inside == pytest.approx(2 * 64_000 / 0.5e9)
    assert to_all == pytest.approx(2 * 3 * 1000 / 0.125e9)
    assert gathered == pytest.approx(2 * 3 * 1000 / 0.125e9 + 4 * 1000 / 2e9)
    assert exchange_s(replace(quick, mean_gbit_s=None), (1000,), 64_000)[0] == pytest.approx(2 * 64_000 / 2e9)


def test_with_two_levels_each_worker_encodes_its_part():
    setup = setup_of(((10**6, 10**3),), 8, 2, memory_gbyte_s=1.0, kernel_factor=1.0, two_level=True)
    kind = steps_of(setup, METHODS["onebit-lamb"])[1][1]
    assert kind.encode_bytes == INPUT + ENCODE / 2
    assert step_time(setup, kind).encode_s == pytest.approx(INPUT + ENCODE / 2)


def test_an_exchange_that_begins_early_is_hidden_behind_backward_but_for_its_last_bucket():
    shapes = ((2**20,),) * 12  # a bucket each
    calm = {"link": 0.1, "latency_us": 0.0, "message_us": 0.0, "kernel_factor": 0.0}
    late, early, half = (
        setup_of(shapes, 2, 1, overlap_exchange=on, overlap=share, **calm)
        for on, share in ((False, 1.0), (True, 1.0), (True, 0.5))
    )

    def stage(setup: Setup, name: str = "onebit-lamb") -> StepTime:
        return step_time(setup, steps_of(setup, METHODS[name])[1][1])

    assert len(steps_of(early, METHODS["onebit-lamb"])[1][1].messages_bytes) == 12
    wire = stage(early).all_to_all_s + stage(early).all_gather_s
    window = 0.1 * Work.backward_share
    assert wire > window  # so that backward's time counts
    assert stage(late).hidden_s == 0
    assert stage(early).hidden_s == pytest.approx(11 / 12 * window)
    assert stage(half).hidden_s == pytest.approx(11 / 12 * window / 2)
    assert stage(early, "zero-one-adam") == stage(late, "zero-one-adam")  # which cannot


def test_latency_and_the_number_of_messages_count():
    net = Network(64, 1, 1e12, latency_us=50.0, message_us=5.0, local_gbit_s=1e12)
    _, to_all, gathered = exchange_s(net, (10, 10), 64)
    assert to_all == pytest.approx(2 * (50 + 63 * 5) * 1e-6, rel=1e-6)
    assert gathered == pytest.approx(2 * 63 * 55 * 1e-6, rel=1e-6)
    assert all_reduce_s(net, 10, 3) == pytest.approx(3 * 2 * 6 * 55e-6, rel=1e-6)


def test_all_reduce_in_32_bits_does_not_pay_on_slow_links_and_local_steps_always_do():
    setup = setup_of(transformer_shapes(30_000_000), 8, 1)
    assert break_even_gbit_s(setup, METHODS["ddp-fp32"]) == 0
    assert break_even_gbit_s(setup, METHODS["local-steps"]) == math.inf


def test_a_flat_exchange_does_not_pay_where_very_many_workers_share_a_slow_link():
    """g + 1 times N / 8 bytes pass each link, beside 4 N of 16-bit all-reduce: more from g = 32 on."""
    shapes = transformer_shapes(300_000_000)
    flat, levels = (
        break_even_gbit_s(setup_of(shapes, 512, 64, two_level=two), METHODS["onebit-lamb-paper"])
        for two in (False, True)
    )
    assert flat == 0
    assert levels > 1


def test_two_levels_cost_what_one_does_where_a_machine_has_one_worker():
    for method in METHODS.values():
        flat, levels = (cost(setup_of(per_machine=1, two_level=two), method) for two in (False, True))
        assert flat == levels


def test_two_levels_send_less_between_machines_and_more_inside():
    shapes = transformer_shapes(30_000_000)
    slow, fast = ({"local_gbit_s": rate} for rate in (1.0, 1e4))
    for net, wins in ((fast, True), (slow, False)):
        flat, levels = (
            cost(setup_of(shapes, 64, 8, link=1.0, two_level=two, **net), METHODS["onebit-lamb"]).total_s
            for two in (False, True)
        )
        assert (levels < flat) is wins


def test_local_steps_wait_less_for_the_slowest():
    setup = setup_of(straggling=0.2, steps=LOCAL_STEPS)
    waits = {name: cost(setup, METHODS[name]).parts.straggling_s for name in ("ddp-16bit", "local-steps")}
    assert waits["ddp-16bit"] == pytest.approx(0.2 * 0.1)
    assert waits["local-steps"] == pytest.approx(0.2 * 0.1 / math.sqrt(LOCAL_STEPS))


def test_all_reduce_hides_behind_the_last_backward_but_for_its_last_bucket():
    shapes = ((2**20, 100),)  # 200 MiB as 16 bits, 8 buckets
    hidden = [
        cost(setup_of(shapes, 2, 1, link, accumulation=2), METHODS["ddp-16bit"]).parts.hidden_s for link in (0.1, 1e3)
    ]
    assert hidden[0] == pytest.approx(7 / 8 * 2 / 3 * 0.1)  # all of backward
    parts = cost(setup_of(shapes, 2, 1, 1e3), METHODS["ddp-16bit"]).parts
    assert hidden[1] == pytest.approx(7 / 8 * parts.all_reduce_s)


# -- ranges, advice, sweep, mistakes -----------------------------------------------------------------------------


def test_ranges_hold_the_likely_value_and_widen_with_their_inputs():
    sure = plan(setup_of(transformer_shapes(30_000_000)))
    ranged = {"micro_step_s": Range(0.08, 0.1, 0.15), "straggling": Range(0, 0, 0.2)}
    unsure = plan(setup_of(transformer_shapes(30_000_000), link=Range(0.5, 1.0, 3.0), **ranged))
    for name, row in unsure.rows.items():
        for key in ("step_s", "samples_per_s", "total_s", "money", "speed_up"):
            value, plain = getattr(row, key), getattr(sure.rows[name], key)
            assert plain.low == plain.likely == plain.high == value.likely
            assert value.low <= value.likely <= value.high
        assert row.step_s.low < row.step_s.likely < row.step_s.high
        low, likely, high = row.break_even_gbit_s
        assert low <= likely <= high
    assert len(list(corners(unsure.setup))) == 1 + 2**3


def test_money_is_machines_times_hours_times_price():
    found = cost(setup_of(workers=8, per_machine=2, price_per_machine_hour=3.0), METHODS["ddp-16bit"])
    assert found.money == pytest.approx(found.total_s / 3600 * 4 * 3.0)


def test_it_says_do_not_bother_where_all_reduce_is_hidden_and_the_contrary_where_it_is_not():
    shapes = transformer_shapes(100_000_000)
    fast = plan(setup_of(shapes, 4, 1, 25.0, micro_step_s=1.0, latency_us=5.0, steps=1000))
    assert not fast.worth_it
    assert fast.recommended == "lamb-16bit"
    assert fast.advice.startswith("do not bother: 16-bit all-reduce is hidden behind backward at 25 Gbit/s")
    slow = plan(setup_of(shapes, 4, 1, 0.5, micro_step_s=0.2, steps=1000), "adam")
    assert slow.worth_it
    assert METHODS[slow.recommended].family == "adam"
    assert slow.rows[slow.recommended].speed_up.likely > 2


@given(st.integers(1, 10**11))
def test_a_transformer_of_any_size_has_exactly_so_many_parameters(count):
    assert Model(transformer_shapes(count)).parameters == count


def test_a_sweep_names_what_breaks_first():
    base = setup_of(transformer_shapes(100_000_000), 8, 4)
    cells = sweep(base, 80.0, workers=(2, 64, 4096), links_gbit_s=(0.1, 100.0), parameters=(10**8, 10**11))
    assert len(cells) == 12
    assert {c.limit for c in cells if c.parameters == 10**11} == {"memory"}
    far = next(c for c in cells if c.workers == 4096 and c.link_gbit_s == 100 and c.parameters == 10**8)
    assert far.limit == "messages"
    assert next(c for c in cells if c.workers == 2 and c.link_gbit_s == 0.1).limit == ""
    for cell in cells:
        assert cell.server_error_bytes == 4 * cell.parameters / cell.workers
        assert cell.message_bytes == pytest.approx(cell.parameters / 8 / cell.workers, rel=0.1)
        assert cell.fastest in METHODS
        assert cell.speed_up >= cell.speed_up_here / 1.05 > 0
    assert max(c.speed_up_two_levels for c in cells) > 1.2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Range(2, 1, 3), "must be finite and rise"),
        (lambda: setup_of(shapes=((0,),)), "0 parameters"),
        (lambda: setup_of(workers=1, per_machine=1), "workers is 1; it must be a whole number, at least 2"),
        (lambda: setup_of(workers=8, per_machine=3), "must be a multiple of the second"),
        (lambda: setup_of(link=0.0), "link_gbit_s is 0.0; it must be a finite number above 0"),
        (lambda: setup_of(link=Range(-1, 1, 2)), "link_gbit_s is -1"),
        (lambda: setup_of(oversubscription=0.5), "at least 1"),
        (lambda: setup_of(overlap=1.5), "at most 1"),
        (lambda: setup_of(int8_factor=-1.0), "int8_factor is -1.0; it must be a finite number at least 0"),
        (lambda: setup_of(int4_factor=math.inf), "int4_factor is inf"),
        (lambda: setup_of(local_factor=Range(-1, 1, 2)), "local_factor is -1"),
        (lambda: setup_of(micro_step_s=math.nan), "micro_step_s is nan"),
        (lambda: setup_of(all_reduce="tree"), "'ring' or 'by-machine'"),
        (lambda: setup_of(steps=1), "steps is 1"),
        (lambda: Model(SHAPES, 3), "parameter_bytes is 3"),
        (lambda: plan(setup_of(), "sgd"), "must be 'lamb' or 'adam'"),
        (lambda: sweep(setup_of(), 0.0), "device memory is 0 GB"),
    ],
)
def test_bad_input_gets_one_clear_error(make, says):
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)


def test_too_many_ranges_are_refused():
    names = ("latency_us", "message_us", "local_gbit_s", "local_latency_us", "oversubscription", "kernel_factor")
    setup = setup_of(link=Range(1, 2, 3), **{n: Range(1, 2, 3) for n in (*names, "straggling", "micro_step_s")})
    with pytest.raises(ConfigError, match="9 inputs are ranges; at most 8"):
        plan(setup)
