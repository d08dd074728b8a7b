"""Two levels: full precision inside a machine, bits between machines. On virtual workers, and on Gloo processes."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_processes
from small import MODEL, flat, kinds_of, make
from torch import Tensor

import onebit
from onebit import OneBit
from onebit.backend import BucketStep, Hypers, Momentum, TorchBackend
from onebit.codec import BucketCodec
from onebit.comm import PIECE_BYTES, Comm
from onebit.kernels import pack_bits
from onebit.lamb import Hyper
from onebit.layout import FlatLayout
from onebit.native_backend import NativeBackend, NativeCodec
from onebit.two_level import TwoLevel, TwoLevelExchange, _mean_of_part, build_exchange

CPU = torch.device("cpu")
WARMUP, STEPS = 4, 12
KINDS = kinds_of(WARMUP, local_step_clipper=1)
law = settings(max_examples=40, deadline=None)
machines = st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)])
shapes = st.lists(st.integers(1, 90), min_size=1, max_size=5)
codecs = st.sampled_from(
    [OneBit(), OneBit(scale="bucket"), OneBit(scale="block", block_elements=16), OneBit(kind="mean"), 8, 4]
)


def of(layout: FlatLayout, codec: Any, dtype: torch.dtype = torch.float64) -> list[Any]:
    backend = TorchBackend(layout, dtype, CPU)
    if isinstance(codec, int):
        return [backend.quantised_codec(bucket, codec) for bucket in layout.buckets]
    return [backend.codec(bucket, codec) for bucket in layout.buckets]


def draw(layout: FlatLayout, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x, generator = layout.zeros(dtype, CPU), torch.Generator().manual_seed(seed)
    for view in layout.views(x):
        view.copy_(torch.randn(view.shape, generator=generator, dtype=dtype))
    return x


def average(exchange: Any, x: Tensor, factor: Tensor | None = None) -> Tensor:
    means = [
        exchange.start(b, x[b.slice].clone(), None if factor is None else factor[b.layer_slice])
        for b in exchange.layout.buckets
    ]
    for mean in means:
        mean.serve()
    out = torch.cat([mean.wait() for mean in means])
    for mean in means:
        mean.commit()
    exchange.note_headers([mean.headers for mean in means])
    return out


@law
@given(machines, shapes, codecs, st.integers(0, 10**6), st.booleans())
def test_nothing_is_lost_and_all_hold_the_same_bits(place, sizes, codec, seed, dead):
    h, g = place
    layout = FlatLayout([(size,) for size in sizes], h * g, bucket_elements=100)
    alive = torch.rand(layout.numel, generator=torch.Generator().manual_seed(seed)) < 0.7
    dead = dead and not isinstance(codec, int)

    def work(comm: Comm) -> Tensor:
        exchange = build_exchange(layout, onebit.two_level(g, comm=comm), torch.float64, CPU, of(layout, codec))
        if dead:
            exchange.set_alive(alive)
        sent, given_ = torch.zeros(2, layout.numel, dtype=torch.float64)
        for step in range(4):
            if step == 3:
                exchange.wake()
            x = draw(layout, seed + 10 * step + comm.rank)
            sent, given_ = sent + average(exchange, x), given_ + x
        comm.all_reduce(given_)
        torch.testing.assert_close(sent + exchange.total_error(), given_ / comm.size, rtol=0, atol=1e-11)
        before = exchange.total_error()
        exchange.fold()
        torch.testing.assert_close(exchange.total_error(), before, rtol=0, atol=1e-11)
        return sent

    results = onebit.run_workers(h * g, work)
    assert all(torch.equal(result, results[0]) for result in results)


def test_bytes_between_machines_do_not_grow_with_the_workers_of_one():
    layout_of = {g: FlatLayout([(40_000,)], 2 * g) for g in (1, 2, 4)}

    def work(comm: Comm, g: int) -> tuple[int, int]:
        levels = onebit.two_level(g, comm=comm)
        exchange = build_exchange(layout_of[g], levels, torch.float32, CPU, of(layout_of[g], OneBit(), torch.float32))
        average(exchange, draw(layout_of[g], comm.rank, torch.float32))
        return (levels.across if isinstance(levels, TwoLevel) else comm).payload_bytes, comm.rank // g

    per_machine = {}
    for g in layout_of:
        sent = onebit.run_workers(2 * g, lambda comm, g=g: work(comm, g))
        per_machine[g] = [sum(b for b, machine in sent if machine == m) for m in (0, 1)]
    bits = 40_000 / 8  # 2 (h - 1) / h of the buffer's bits, h = 2
    for g, machines_ in per_machine.items():
        for total in machines_:
            assert bits <= total <= bits * 1.01 + 32 * g


@law
@given(shapes, st.sampled_from([OneBit(), OneBit(scale="bucket"), OneBit(kind="mean")]), st.integers(0, 999))
def test_the_compiled_part_encoder_is_that_of_torch(sizes, codec, seed):
    layout = FlatLayout([(size,) for size in sizes], 4)
    (bucket,) = layout.buckets
    ours, theirs = NativeCodec(bucket, codec), BucketCodec(bucket, codec, torch.float32, CPU)
    x, draws = draw(layout, seed, torch.float32), torch.Generator().manual_seed(seed)
    for alive in (None, torch.rand(bucket.numel, generator=draws) < 0.6):
        for each in (ours, theirs):
            each.set_alive(alive)
        part = x if alive is None else x * alive
        half = part.view(2, -1)[1]
        mine, other = ours.encode_chunks(half, range(2, 4)), theirs.encode_chunks(half, range(2, 4))
        assert torch.equal(ours.bits(mine), theirs.bits(other)) or alive is not None  # a dead element's bit is free
        decoded = [
            codec_.decode_chunk(m, 2 + i) for codec_, ms in ((ours, mine), (theirs, other)) for i, m in enumerate(ms)
        ]
        torch.testing.assert_close(torch.cat(decoded[:2]), torch.cat(decoded[2:]), rtol=1e-6, atol=0)
        left = ours.subtract_chunks(half.clone(), mine, range(2, 4))
        torch.testing.assert_close(left, theirs.subtract_chunks(half.clone(), mine, range(2, 4)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("held", ["numbers", "bits", "some of them"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_input_of_the_mean_inside_a_machine_is_the_reference_ones_to_the_bit(held, scaled):
    layout = FlatLayout([(300,), (41, 7), (5,)], 4, [0, 0, 1])
    (bucket,) = layout.buckets
    hypers = Hypers(layout, [Hyper(0.1, 0.9, 0.99, 1e-6, 0.01), Hyper(0.2, 0.8, 0.95, 1e-3, 0.0)])
    ours, theirs = NativeBackend(layout), TorchBackend(layout, torch.float32, CPU)
    codecs = ours.codec(bucket, OneBit()), theirs.codec(bucket, OneBit())
    grads = [draw(layout, 1, torch.float32)[s.start : s.stop].view(s.shape) for s in layout.layers]
    grads[0][3:5] = torch.tensor([float("inf"), float("nan")])
    momentum: Any = draw(layout, 2, torch.float32)
    if held != "numbers":
        mask = torch.arange(bucket.numel) % 3 != 0
        momentum = Momentum(codecs[1].encode(momentum), pack_bits(mask) if held == "some of them" else None)
    scale = torch.tensor([0.5, 1.5, 3.0]) if scaled else None
    given = [*grads[:2], None]
    for own in grads, given:
        found, expected = (
            backend.source(BucketStep(codec, hypers, scale, 1, None), own, momentum, None).values(codec)
            for backend, codec in zip((ours, theirs), codecs, strict=True)
        )
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(0.0, 1e38, -1e38), expected.nan_to_num(0.0, 1e38, -1e38))
        assert expected.isinf().sum() == expected.isnan().sum() == 1


def mean_of_long_part(comm: Comm) -> bool:
    """Three pieces of a worker's part, over Gloo."""
    x = torch.randn(3, comm.size * (2 * PIECE_BYTES + 8) // 4, generator=torch.Generator().manual_seed(0))
    found = _mean_of_part(x[comm.rank].clone(), comm)
    rows = x.view(3, comm.size, -1)[:, comm.rank]
    return torch.equal(found, (rows[0] + rows[1] + rows[2]) / 3)


def test_the_mean_of_a_long_part_is_put_together_from_its_pieces():
    assert run_processes(3, mean_of_long_part) == [True] * 3


def test_nan_on_one_worker_reaches_all():
    layout = FlatLayout([(50,)], 4)

    def work(comm: Comm) -> bool:
        levels = onebit.two_level(2, comm=comm)
        exchange = build_exchange(layout, levels, torch.float64, CPU, of(layout, OneBit()))
        x = draw(layout, comm.rank)
        if comm.rank == 3:
            x[7] = float("nan")
        mean = exchange.start(layout.buckets[0], x)
        mean.serve()
        mean.gather()
        return bool(mean.usable)

    assert onebit.run_workers(4, work) == [False] * 4


# -- optimizers ------------------------------------------------------------------------------------------------------


class Trained:
    def __init__(self, comm: Comm, g: int, name: str, **more: Any) -> None:
        self.comm, self.model = comm, copy.deepcopy(MODEL)
        levels = onebit.two_level(g, comm=comm)
        self.optimizer = make(KINDS, name, self.model.parameters(), levels, bucket_elements=100, **more)
        self.step_number = 0

    def train(self, steps: int) -> Trained:
        for _ in range(steps):
            draws = torch.Generator().manual_seed(100 * self.step_number + self.comm.rank)
            x = torch.randn(8, 6, generator=draws)
            self.optimizer.zero_grad()
            (self.model(x) - x[:, :3]).square().mean().backward()
            self.optimizer.step()
            self.step_number += 1
        return self

    @property
    def weights(self) -> Tensor:
        return flat(self.model.parameters())


@pytest.mark.parametrize(
    ("name", "more"),
    [(name, {}) for name in KINDS] + [(name, {"overlap": True}) for name in KINDS if name != "ZeroOneAdam"],
)
def test_every_optimizer_trains_and_holds_equal_weights(name, more):
    def work(comm: Comm) -> tuple[Tensor, Any]:
        trained = Trained(comm, 2, name, **more).train(STEPS)
        return trained.weights, trained.optimizer._exchange

    results = onebit.run_workers(4, work)
    for weights, exchange in results:
        assert torch.equal(weights, results[0][0])
        assert torch.isfinite(weights).all()
        assert not torch.equal(weights, flat(MODEL.parameters()))
        assert name == "Lamb" or isinstance(exchange, TwoLevelExchange)


@pytest.mark.parametrize("more", [{}, {"state": "compact", "warmup_transport": "int8"}, {"error_feedback": "scaled"}])
def test_worker_errors_take_a_gth_of_the_memory(more):
    def work(comm: Comm) -> tuple[int, int]:
        exchange = Trained(comm, 2, "OneBitLamb", **more).train(STEPS).optimizer._exchange
        return exchange.worker_error.numel(), exchange.layout.numel

    assert all(2 * own == whole for own, whole in onebit.run_workers(4, work))


@pytest.mark.parametrize("at", [3, 8])
@pytest.mark.parametrize("name", ["OneBitLamb", "LocalVarianceLamb", "ZeroOneAdam"])
@pytest.mark.parametrize("more", [{}, {"state": "compact", "warmup_transport": "int8"}])
def test_saved_and_resumed_to_the_bit(name, more, at):
    if more and name != "OneBitLamb":
        more = {"warmup_transport": "int8"} if name == "LocalVarianceLamb" else {"warmup_transport": "bf16"}

    def work(comm: Comm) -> bool:
        whole = Trained(comm, 2, name, **more).train(STEPS)
        first = Trained(comm, 2, name, **more).train(at)
        second = Trained(comm, 2, name, **more)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        second.step_number = at
        return torch.equal(second.train(STEPS - at).weights, whole.weights)

    assert all(onebit.run_workers(4, work))


@pytest.mark.parametrize(("n", "g"), [(4, 1), (4, 4), (2, 1), (2, 2), (6, 3), (1, 1)])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_another_number_of_workers_or_machines_keeps_what_was_not_sent(n, g, folded, compact):
    more: dict[str, Any] = {"state": "compact"} if compact else {}

    def save(comm: Comm) -> tuple[Any, Tensor, Any, list[Tensor]]:
        trained = Trained(comm, 2, "OneBitLamb", **more).train(8)
        if folded:
            trained.optimizer.fold_errors()
        exchange = trained.optimizer._exchange
        total = exchange.total_error()
        state = copy.deepcopy(trained.optimizer.state_dict())
        return state, total, trained.model.state_dict(), [v.clone() for v in exchange.layout.views(total)]

    saved = onebit.run_workers(4, save)

    def load(comm: Comm) -> tuple[list[Tensor], Tensor]:
        trained = Trained(comm, g, "OneBitLamb", **more)
        trained.model.load_state_dict(saved[0][2])
        states = [copy.deepcopy(state) for state, *_ in saved]
        if folded:
            trained.optimizer.load_state_dict(states[0])
        else:
            trained.optimizer.load_state_dicts(iter(states))
        exchange = trained.optimizer._exchange
        total = [view.clone() for view in exchange.layout.views(exchange.total_error())]
        trained.step_number = 8
        return total, trained.train(3).weights

    # compact errors are rounded to 8 bits once more, by up to half a 127th of the largest of their 128
    room = 0.02 if compact else 1e-6
    results = onebit.run_workers(n, load)
    for total, weights in results:
        torch.testing.assert_close(total, saved[0][3], rtol=room, atol=room * float(saved[0][1].abs().max()))
        assert torch.equal(weights, results[0][1])


# -- who the workers are ---------------------------------------------------------------------------------------------


def test_one_worker_per_machine_is_the_flat_comm():
    assert all(onebit.run_workers(2, lambda comm: onebit.two_level(1, comm=comm) is comm))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"local_size": 3}, "local_size is 3 and there are 4"),
        ({"local_size": 0}, "at least 1"),
        ({}, "LOCAL_WORLD_SIZE"),
    ],
)
def test_wrong_sizes_are_refused(arguments, says, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(onebit.ConfigError, match=says):
        onebit.run_workers(4, lambda comm: onebit.two_level(comm=comm, **arguments))


def test_workers_that_differ_are_named():
    with pytest.raises(onebit.MismatchError, match="local_size is 2 on worker 0 and 1 on worker 1"):
        onebit.run_workers(2, lambda comm: onebit.two_level(2 - comm.rank, comm=comm))


def test_a_mesh_beside_other_arguments_is_refused():
    with pytest.raises(onebit.ConfigError, match="the mesh alone"):
        onebit.two_level(local_size=2, mesh=object())  # type: ignore[arg-type]


def test_the_launcher_says_it(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    sizes = onebit.run_workers(4, lambda comm: (lambda c: (c.inside.size, c.across.size))(onebit.two_level(comm=comm)))
    assert sizes == [(2, 2)] * 4


def on_gloo(comm: Comm) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = init_device_mesh("cpu", (2, 2))
    found: dict[str, Any] = {}
    for how, levels in (("size", onebit.two_level()), ("mesh", onebit.two_level(mesh=mesh))):
        for overlap in (False, True):
            model = copy.deepcopy(MODEL)
            optimizer = make(KINDS, "OneBitLamb", model.parameters(), levels, bucket_elements=100, overlap=overlap)
            for step in range(STEPS):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + comm.rank))
                optimizer.zero_grad()
                (model(x) - x[:, :3]).square().mean().backward()
                optimizer.step()
            found[f"{how} {overlap}"] = flat(model.parameters())
    try:
        onebit.two_level(mesh=init_device_mesh("cpu", (4,)))
    except onebit.ConfigError as error:
        found["wrong mesh"] = str(error)
    return found


def test_on_gloo_it_is_the_same_as_on_virtual_workers():
    virtual = onebit.run_workers(4, lambda comm: Trained(comm, 2, "OneBitLamb").train(STEPS).weights)
    for worker in run_processes(4, on_gloo, timeout_s=120):
        assert "two levels take" in worker.pop("wrong mesh")
        for weights in worker.values():
            torch.testing.assert_close(
                weights, virtual[0], rtol=1e-4, atol=1e-5
            )  # the warm-up's sums have another order
            assert torch.equal(weights, worker["size False"])


def test_errors_folded_after_backward_are_saved_whole():
    """Buckets that begin during that backward change nothing of it."""

    def work(comm: Comm) -> tuple[int, int, bool]:
        trained = Trained(comm, 2, "OneBitLamb", overlap=True).train(8)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(comm.rank))
        trained.optimizer.zero_grad()
        (trained.model(x) - x[:, :3]).square().mean().backward()
        trained.optimizer.fold_errors()
        trained.optimizer._lane.flush()  # what was begun has begun
        extra = trained.optimizer.state_dict()["onebit"]
        layout = trained.optimizer._layout
        trained.optimizer.step()
        return extra["errors"]["worker_error"].numel(), layout.numel, extra["folded"]

    assert all(held == whole and folded for held, whole, folded in onebit.run_workers(4, work))


def test_checksums_go_inside():
    def inside(comm: Comm) -> Tensor:
        levels = onebit.two_level(2, comm=onebit.Checked(comm))
        model = copy.deepcopy(MODEL)
        optimizer = make(KINDS, "OneBitLamb", model.parameters(), levels, overlap=True)
        for step in range(STEPS):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + comm.rank))
            optimizer.zero_grad()
            (model(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
        return flat(model.parameters())

    def outside(comm: Comm) -> None:
        onebit.OneBitLamb(MODEL.parameters(), comm=onebit.Checked(onebit.two_level(2, comm=comm)))

    results = onebit.run_workers(4, inside)
    assert all(torch.equal(result, results[0]) for result in results)
    with pytest.raises(onebit.ConfigError, match="pass two_level"):
        onebit.run_workers(4, outside)
    with pytest.raises(onebit.ConfigError, match="two levels already"):
        onebit.run_workers(4, lambda comm: onebit.two_level(2, comm=onebit.two_level(2, comm=comm)))


def test_a_launcher_that_speaks_to_one_worker_only_is_an_error_on_all():
    def work(comm: Comm) -> str:
        try:
            onebit.two_level(2 if comm.rank else None, comm=comm)
        except onebit.MismatchError as error:
            return str(error)
        return ""

    os.environ.pop("LOCAL_WORLD_SIZE", None)
    assert all("local_size is not known on worker 0 and 2 on worker 1" in said for said in onebit.run_workers(2, work))


def test_a_flat_state_without_errors_is_loaded_and_another_says_how():
    def work(comm: Comm) -> str:
        plain, levels = Trained(comm, 1, "Lamb").train(3), Trained(comm, 2, "Lamb")
        levels.optimizer.load_state_dict(plain.optimizer.state_dict())
        compressed, levels = Trained(comm, 1, "OneBitLamb").train(8), Trained(comm, 2, "OneBitLamb")
        try:
            levels.optimizer.load_state_dict(compressed.optimizer.state_dict())
        except onebit.ConfigError as error:
            return str(error)
        return ""

    assert all("load_state_dicts" in said for said in onebit.run_workers(4, work))
