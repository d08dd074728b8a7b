"""The Triton kernels, in Triton's interpreter, against the readable back-end: bits and errors equal, the rest near.

The interpreter takes some 50 ms per piece of a bucket, so everything here is small. `test_triton_compile.py` sees that
the same kernels compile for real devices, and benchmarks/gpu.py runs them on one.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from deferred_case import run_deferred
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested")

import triton
import triton.language as tl

import onebit
from onebit import lamb
from onebit.backend import BucketStep, Hypers, Momentum, TorchBackend
from onebit.codec import OneBit
from onebit.comm import Solo
from onebit.errors import ConfigError, LayoutError
from onebit.kernels import choose, pack_bits
from onebit.kernels import triton as kernels
from onebit.kernels import triton_jit_state as jit_state
from onebit.kernels import triton_operands as operands
from onebit.kernels.compact import Int8, round_bf16_random
from onebit.layout import FlatLayout
from onebit.triton_backend import TritonBackend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of inf and nan

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class World:
    """One bucket of layers of these sizes, with both back-ends; every operand comes with awkward values."""

    def __init__(self, sizes, workers, codec, masked=False, decay=0.01, groups=None, tile=128):
        self.sizes, self.workers, self.masked = sizes, workers, masked
        self.layout = FlatLayout([(size,) for size in sizes], workers, groups)
        (self.bucket,) = self.layout.buckets
        self.torch, self.triton = TorchBackend(self.layout, torch.float32, CPU), TritonBackend(self.layout, CPU, tile)
        self.codecs = (self.torch.codec(self.bucket, codec), self.triton.codec(self.bucket, codec))
        self.hypers = Hypers(
            self.layout, [lamb.Hyper(0.1, 0.9, 0.99, 1e-6, decay), lamb.Hyper(0.2, 0.8, 0.95, 1e-3, 0.0)]
        )
        self.random = torch.Generator().manual_seed(sum(sizes) + workers)
        self.alive = None
        self.alive = self.mask() if masked else None
        for one in self.codecs:
            one.set_alive(self.alive)

    def values(self, scale=1.0):
        """[bucket], zero in the padding, some -0.0 among them."""
        flat = torch.randn(self.bucket.numel, generator=self.random) * scale
        flat[torch.rand(flat.shape, generator=self.random) < 0.1] = -0.0
        flat[sum(self.sizes) :] = 0
        return flat

    def mask(self):
        """A mask of momentum: elements that are dead now were so before."""
        alive = torch.rand(self.bucket.numel, generator=self.random) < 0.7
        alive[sum(self.sizes) :] = True
        return alive if self.alive is None else alive & self.alive

    def positive(self):
        flat = torch.exp(2 * torch.randn(self.bucket.numel, generator=self.random))
        flat[sum(self.sizes) :] = 0
        return flat

    def split(self, flat, dtype=torch.float32):
        return [flat[layer.start : layer.stop].to(dtype) for layer in self.bucket.layers]

    def per_layer(self):
        return torch.empty(len(self.sizes)).uniform_(0.5, 2, generator=self.random)

    def step(self, codec, scale=None, number=1, keep=None):
        return BucketStep(codec, self.hypers, scale, number, keep)

    def messages(self):
        """What some worker's codec might have sent."""
        return self.codecs[0].encode(self.values())


def same(a, b):
    """Equal, nan included; 0 and -0 count as equal."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0, 1e38, -1e38), b.nan_to_num(0, 1e38, -1e38))


def near(a, b):
    """torch's own square root may be one unit in the last place off."""
    return torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-6, equal_nan=True)


def same_messages(codec, a, b):
    """All bytes, but for which nan a scale is."""
    scales = same(codec.all_scales(a), codec.all_scales(b))
    return scales and torch.equal(codec.bits(a), codec.bits(b)) and torch.equal(codec.header(a), codec.header(b))


WORLDS = {
    "one tile": lambda tile=128: World([5, 3], 1, OneBit(), tile=tile),
    "layers in chunks and tiles": lambda tile=128: World([5, 0, 130, 17], 2, OneBit(), masked=True, tile=tile),
    "one scale": lambda tile=128: World([40, 7, 60], 3, OneBit(scale="bucket"), tile=tile),
    "blocks of means": lambda tile=128: World(
        [33, 9], 1, OneBit(scale="block", block_elements=20, kind="mean"), masked=True, tile=tile
    ),
}
LONG = lambda tile=128: World([300, 9, 290], 2, OneBit(), masked=True, tile=tile)  # noqa: E731  chunks of 304 elements
worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)


@worlds
@pytest.mark.parametrize("flat", [True, False], ids=["numbers", "bits"])
def test_worker_side_equals_the_reference(world, flat):
    w = world()
    g = w.values()
    if flat:
        g[1], g[7] = float("nan"), float("inf")
    grads = w.split(g)
    grads[0] = None if len(grads) > 2 else grads[0]
    mask = pack_bits(w.mask()) if w.masked else None
    momentum = w.values() if flat else Momentum(w.messages(), mask)
    scale, factor = (w.per_layer(), w.per_layer()) if w.workers > 1 else (None, None)
    error = w.values(0.1)
    sent, errors = [], []
    for backend, codec in zip((w.torch, w.triton), w.codecs, strict=True):
        errors.append(error.clone())
        source = backend.source(w.step(codec, scale), grads, momentum, mask if flat else None)
        sent.append(source.encode(codec, errors[-1], factor))
        assert torch.equal(errors[-1], error)
        source.commit(codec, errors[-1], factor, sent[0], None)
    assert same_messages(w.codecs[0], *sent)
    assert same(*errors)


@worlds
def test_server_side_equals_the_reference(world):
    w = world()
    chunk = w.workers - 1
    received = torch.stack([w.messages()[chunk] for _ in range(3)])
    w.codecs[0].header(received)[:] = torch.arange(3.0)
    factor = w.per_layer() if w.workers > 1 else None
    error = w.values(0.1).view(w.workers, -1)[chunk]
    replies, errors = [], []
    for codec in w.codecs:
        errors.append(error.clone())
        replies.append(codec.serve(received, chunk, errors[-1], factor))
        assert torch.equal(errors[-1], error)
        codec.commit_served(received, chunk, errors[-1], factor, replies[0])
    assert torch.equal(*replies)
    assert same(*errors)


@worlds
@pytest.mark.parametrize("form", ["sqrt", "variance"])
def test_update_equals_the_reference(world, form):
    w = world()
    now = Momentum(w.messages(), pack_bits(w.mask()) if w.masked else None)
    before = w.values() if form == "sqrt" else Momentum(w.messages(), now.mask)
    scale = w.per_layer() if w.workers > 1 else None
    frozen, fresh, x, step = w.positive(), w.positive(), w.values(), w.per_layer()
    frozen[0] = 0
    if w.masked:
        frozen[3] = float("nan")
    found = []
    for backend, codec in zip((w.torch, w.triton), w.codecs, strict=True):
        v, parameters = fresh.clone(), w.split(x.clone())
        quotient, norms = backend.measure(w.step(codec, scale), parameters, now, before, frozen, v, form)
        backend.apply(w.step(codec, scale), parameters, now, frozen, step)
        found.append((v, quotient, norms.direction, norms.update, torch.cat(parameters)))
    assert same(found[0][0], found[1][0])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert near(a, b)


def int8_error(w):
    """Of ordinary values, with a group of zeros and one whose values are too small to keep."""
    values = w.values(0.1)
    rows = values.view(w.workers, -1)
    rows[0, 128:256] *= 1e-37
    rows[-1, 256:] = 0
    error = Int8.zeros(w.bucket)
    error.write(values)
    return error


def copy_of(error):
    return Int8(error.data.clone(), error.scales.clone()) if isinstance(error, Int8) else error.clone()


def parts_of(error):
    return (error.data, error.scales) if isinstance(error, Int8) else (error,)


@pytest.mark.parametrize("tile", [128, 256])
@pytest.mark.parametrize("world", [*WORLDS.values(), LONG], ids=[*WORLDS, "several groups"])
def test_int8_errors_equal_the_reference_to_the_bit(world, tile):
    w = world(tile)
    grads, momentum = w.split(w.values()), Momentum(w.messages(), pack_bits(w.mask()) if w.masked else None)
    grads[0] *= 1e-5  # a group of tiny errors beside ordinary ones
    factor, before = w.per_layer() if w.workers > 1 else None, int8_error(w)
    sent, errors = [], []
    for backend, codec in zip((w.torch, w.triton), w.codecs, strict=True):
        errors.append(copy_of(before))
        source = backend.source(w.step(codec), grads, momentum, None)
        sent.append(source.encode(codec, errors[-1], factor))
        source.commit(codec, errors[-1], factor, sent[0], None)
    assert same_messages(w.codecs[0], *sent)
    assert torch.equal(errors[0].data, errors[1].data)
    assert torch.equal(errors[0].scales, errors[1].scales)
    assert not torch.equal(errors[0].data, before.data)


def test_errors_too_small_for_a_scale_become_zero():
    w = LONG()
    grads, momentum, error = w.split(w.values() * 1e-38), w.values() * 0, Int8.zeros(w.bucket)
    error.data.fill_(3)
    source = w.triton.source(w.step(w.codecs[1]), grads, momentum, None)
    sent = source.encode(w.codecs[1], error, None)
    source.commit(w.codecs[1], error, None, sent, None)
    assert 0 < error.scales.max() < 1e-36
    assert not error.data[w.alive].any()  # what a dead one holds is kept apart from zero


@pytest.mark.parametrize("number", [1, 2**31 + 5])
@pytest.mark.parametrize("world", [*WORLDS.values(), LONG], ids=[*WORLDS, "several groups"])
def test_bfloat16_variances_equal_the_reference_to_the_bit(world, number):
    w = world()
    now = Momentum(w.messages(), pack_bits(w.mask()) if w.masked else None)
    before = Momentum(w.messages(), now.mask)
    frozen, fresh, x, step = w.positive().bfloat16(), w.positive().bfloat16(), w.values(), w.per_layer()
    fresh[0], fresh[2], fresh[4] = float("inf"), float("nan"), 0
    found = []
    for backend, codec in zip((w.torch, w.triton), w.codecs, strict=True):
        v, parameters = fresh.clone(), w.split(x.clone())
        quotient, norms = backend.measure(w.step(codec, None, number), parameters, now, before, frozen, v, "sqrt")
        backend.apply(w.step(codec, None, number), parameters, now, frozen, step)
        found.append((v.view(torch.int16), quotient, norms.direction, norms.update, torch.cat(parameters)))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], fresh.view(torch.int16))
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        assert near(a, b)


@triton.jit(do_not_specialize=["number"])
def rounded_at(x, out, start, number, TILE: tl.constexpr):
    at = tl.arange(0, TILE).to(tl.int64)
    jit_state.store_variance(out, tl.load(x + at), at, at >= 0, start, number)


@pytest.mark.parametrize("start", [0, 2**32 - 60, 2**40 + 8])
@pytest.mark.parametrize("number", [1, 2**31, 2**33 + 5])
def test_random_rounding_depends_on_all_bits_of_step_and_place(start, number):
    specials = [0.0, -0.0, 1e-45, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan")]
    x = torch.cat([torch.tensor(specials), torch.randn(120, generator=torch.Generator().manual_seed(1))])
    x.view(torch.int32)[7:9] = torch.tensor([0x7F800001, -1], dtype=torch.int32)  # nan of little and of large payload
    out = torch.zeros(128, dtype=torch.int16)
    rounded_at[(1,)](x, out, start, number, TILE=128)
    assert torch.equal(out, round_bf16_random(x, 0, number, start).view(torch.int16))
    assert not torch.equal(out, round_bf16_random(x, 0, number + 2**32, start).view(torch.int16))
    assert not torch.equal(out, round_bf16_random(x, 0, number, start + 2**32).view(torch.int16))


@pytest.mark.parametrize("compact", [False, True], ids=["full", "compact"])
def test_nothing_changes_where_the_step_does_not_count(compact):
    w = World([40, 130], 2, OneBit(), masked=True)
    codec, now = w.codecs[1], Momentum(w.messages(), pack_bits(w.mask()))
    dtype = torch.bfloat16 if compact else torch.float32
    frozen, steps, g = w.positive().to(dtype), w.per_layer(), w.values()
    worker_error = int8_error(w) if compact else w.values(0.1)
    state = {"m": w.values(), "v": w.positive(), "fresh": w.positive().to(dtype)}
    state |= {"x": w.values(), "warm x": w.values(), "server": w.values(0.1)[: w.bucket.chunk]}
    received = torch.stack([w.messages()[1] for _ in range(2)])

    def after(keep):
        mine, error = {name: values.clone() for name, values in state.items()}, copy_of(worker_error)
        keep, x = None if keep is None else torch.tensor(keep), w.split(mine["x"])
        step = w.step(codec, None, 7, keep)
        w.triton.warmup_apply(w.bucket, w.split(mine["warm x"]), g, mine["m"], mine["v"], w.hypers, steps, keep)
        source = w.triton.source(step, w.split(g), now, None)
        source.commit(codec, error, None, source.encode(codec, error, None), keep)
        reply = codec.serve(received, 1, mine["server"], None)
        codec.commit_served(received, 1, mine["server"], None, reply, keep)
        w.triton.measure(step, x, now, now, frozen, mine["fresh"], "sqrt")
        w.triton.apply(step, x, now, frozen, steps)
        return {**mine, **{f"error {i}": part for i, part in enumerate(parts_of(error))}}

    before = {**state, **{f"error {i}": part for i, part in enumerate(parts_of(worker_error))}}
    counted, kept, dropped = after(None), after(True), after(False)
    for name, values in before.items():
        assert torch.equal(dropped[name], values), name
        assert torch.equal(kept[name], counted[name]), name
        assert not torch.equal(kept[name], values), name


@pytest.mark.parametrize("bad", [None, float("nan"), -float("inf"), 1e20])
def test_warm_up_equals_the_reference(bad):
    w = World([5, 0, 130, 17], 2, OneBit(), groups=[0, 0, 1, 1])
    g, x, step = w.values(), w.values(), w.per_layer()
    if bad is not None:
        g[130] = bad
    state = w.values(), w.positive()
    found = []
    for backend in (w.torch, w.triton):
        parameters, (m, v), out = w.split(x.clone()), (state[0].clone(), state[1].clone()), torch.full_like(g, 7.0)
        backend.gather(w.bucket, [None, *w.split(g)[1:]], out)
        norms, finite = backend.warmup_measure(w.bucket, parameters, g, m, v, w.hypers)
        assert bool(finite) == (bad is None)
        assert torch.equal(m, state[0])
        assert torch.equal(v, state[1])
        backend.warmup_apply(w.bucket, parameters, g, m, v, w.hypers, step, None)
        found.append((m, v, out, norms.x, norms.direction, norms.update, torch.cat(parameters)))
    for a, b in zip(found[0][:3], found[1][:3], strict=True):
        assert same(a, b)
    for a, b in zip(found[0][3:], found[1][3:], strict=True):
        assert near(a, b)


def test_gradients_and_parameters_of_sixteen_bits():
    """Three dtypes in one launch, each layer at an odd address; what is written is rounded as torch rounds."""
    w = World([21, 9, 30], 1, OneBit())
    parts = w.split(w.values())
    mixed = [torch.cat([p[:1], p]).to(d)[1:] for p, d in zip(parts, DTYPES, strict=True)]
    plan, out = w.codecs[1].plan, torch.empty(w.bucket.numel)
    kernels.gather(plan, kernels.TensorList("g", mixed, plan), out)
    assert torch.equal(out[:60], torch.cat([p.float() for p in mixed]))

    frozen, now, step = w.positive(), Momentum(w.messages()), w.per_layer() * 0.1
    wide = [p.float() for p in mixed]
    w.triton.apply(w.step(w.codecs[1]), wide, now, frozen, step)
    w.triton.apply(w.step(w.codecs[1]), mixed, now, frozen, step)
    for a, b in zip(mixed, wide, strict=True):
        assert torch.equal(a, b.to(a.dtype))


def train(comm, settings, seen):
    """12 steps on gradients that do not depend on the parameters: then messages must be equal in every byte."""
    random = torch.Generator().manual_seed(comm.rank)
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (35, 3)]
    params[0].data = params[0].data.view(7, 5).t()  # not contiguous
    opt = onebit.OneBitLamb(params, 0.01, freeze_step=4, betas=(0.9, 0.95), weight_decay=0.01, comm=comm, **settings)
    for step in range(12):
        for p in params:
            p.grad = torch.randn(p.shape, generator=random)
            p.grad.view(-1)[0] *= step > 8  # a dead element that wakes
        if step == 6 and comm.rank == 1:
            params[1].grad[0] = float("nan")
        opt.step()
        if opt._exchange is not None and isinstance(opt._momentum[0], Momentum):
            seen[comm.rank].append(opt._momentum[0].messages.clone())
    assert opt.stats()["skipped_steps"] == 1
    return torch.cat([p.detach().flatten() for p in params]), opt._flat["fresh_variance"]


@pytest.mark.parametrize(
    "settings",
    [{"state": "full"}, {**onebit.PAPER, "state": "full"}, {"state": "compact", "bucket_elements": 35}],
    ids=["full", "paper", "compact"],
)
def test_twelve_steps_send_the_same_bytes_as_the_reference(settings, monkeypatch):
    found = {}
    for name in ("reference", "triton"):
        monkeypatch.setenv("ONEBIT_KERNELS", name)
        seen = [[], []]
        found[name] = (onebit.run_workers(2, lambda comm, s=seen: train(comm, settings, s)), seen)
    (expected, sent), (got, sent_too) = found["reference"], found["triton"]
    assert len(sent[0]) >= 7
    for a, b in zip(sent[0] + sent[1], sent_too[0] + sent_too[1], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(got[0][0], got[1][0])
    assert torch.allclose(got[0][0], expected[0][0], rtol=1e-6, atol=1e-6)
    assert same(got[0][1], expected[0][1])


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def pretend(kernel, grid, device, *args, **constants):
    """Launch nothing; sums become 1, counts 0."""
    operands.launched(kernel.__name__)
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int32:
            tensor.zero_()
    if kernel.__name__ == "sum_segments":
        args[2].fill_(1)


def work_of_steps(layers):
    """Kernels launched, and torch's operations, in a step of each stage."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(layers)]
    opt = onebit.OneBitLamb(params, freeze_step=3, comm=Solo())
    counted = []
    for _ in range(6):
        for p in params:
            p.grad = torch.ones(3)
        names: Counter[str] = Counter()
        operands.launched = lambda name, names=names: names.update([name])
        with Operations() as operations:
            opt.step()
        counted.append((names, operations.counts))
    assert opt.stage is onebit.Stage.COMPRESSED
    return counted[1], counted[5]  # not those in which something is laid out


def test_work_of_a_step_does_not_grow_with_layers(monkeypatch):
    monkeypatch.setenv("ONEBIT_KERNELS", "triton")
    monkeypatch.setattr(operands, "launch", pretend)
    monkeypatch.setattr(operands, "launched", lambda name: None)
    few = work_of_steps(10)
    assert few == work_of_steps(60)
    (warmup, _), (compressed, _) = few
    assert (sum(warmup.values()), sum(compressed.values())) == (5, 10)  # one worker: gradients are gathered twice


@pytest.mark.parametrize("compact", [False, True], ids=["full", "compact"])
def test_nothing_is_read_from_the_device(compact, monkeypatch):
    """Reading a value is the operation _local_scalar_dense, on any device."""
    monkeypatch.setattr(operands, "launch", pretend)
    w = World([5, 0, 130, 17], 2, OneBit(), masked=True)
    codec, x, mask = w.codecs[1], w.split(w.values()), pack_bits(w.mask())
    now, keep = Momentum(w.messages(), mask), torch.tensor(True)
    error = int8_error(w) if compact else w.values()
    v = w.positive().to(torch.bfloat16 if compact else torch.float32)
    step = w.step(codec, None, 1, keep)
    with Operations() as operations:
        w.triton.warmup_measure(w.bucket, x, w.split(w.values()), w.values(), w.positive(), w.hypers)
        w.triton.warmup_apply(w.bucket, x, w.values(), w.values(), w.positive(), w.hypers, w.per_layer(), keep)
        source = w.triton.source(step, x, now, mask)
        sent = source.encode(codec, error, None)
        reply = codec.serve(sent, 1, torch.zeros(w.bucket.chunk), None)
        codec.commit_served(sent, 1, torch.zeros(w.bucket.chunk), None, reply, keep)
        source.commit(codec, error, None, sent, keep)
        w.triton.measure(step, x, now, now, v, v, "sqrt")
        w.triton.apply(step, x, now, v, w.per_layer())
    assert not any("local_scalar" in name or "nonzero" in name for name in operations.counts)


@pytest.mark.parametrize("state", ["full", "compact"])
def test_a_late_verdict_leads_to_the_same_run(state, monkeypatch):
    monkeypatch.setenv("ONEBIT_KERNELS", "triton")
    make = partial(onebit.OneBitLamb, freeze_step=3, state=state, weight_decay=0.1)
    at_once, later, unseen = run_deferred(monkeypatch, make, 1, (35, 3), 10, (1, 7))
    assert at_once == later
    assert {1, 7, 8} <= set(unseen)


def test_misuse_is_refused_with_the_operand_named():
    w = World([5, 3], 1, OneBit())
    plan, x = w.codecs[1].plan, w.split(w.values())
    for tensors, words in [
        (x[:1], "x holds 1 tensors for 2 layers"),
        ([x[0], x[0]], r"x\[1\] is torch.float32 \[5\]; it must be torch.float32 \[3\]"),
        ([x[0], x[1].double()], r"x\[1\] is torch.float64; allowed are"),
        ([x[0], torch.zeros(6)[::2]], r"x\[1\] has strides \(2,\); it must be contiguous"),
        ([x[0], torch.zeros(3, device="meta")], r"x\[1\] is on meta"),
    ]:
        with pytest.raises(LayoutError, match=words):
            kernels.TensorList("x", tensors, plan)
    error = Int8(torch.zeros(8, dtype=torch.int8), torch.zeros(1))
    for call, words in [
        (lambda: plan.error("error", error), r"error.scales is torch.float32 \[1\]; .* \[1, 1\]"),
        (lambda: plan.variance("v", torch.zeros(8).half()), r"v is torch.float16 \[8\]; it must be torch.float32"),
        (
            lambda: plan.verdict(torch.ones(1, dtype=torch.bool)),
            r"keep is torch.bool \[1\]; it must be .* \[\]",
        ),
    ]:
        with pytest.raises(LayoutError, match=words):
            call()
    with pytest.raises(LayoutError, match=r"out is torch\.float32"):
        kernels.gather(plan, kernels.TensorList("x", x, plan), torch.zeros(3))


def test_autograd_is_told_of_changes_in_place():
    w = World([5, 3], 1, OneBit())
    x = w.split(w.values())
    before = x[0]._version
    w.triton.apply(w.step(w.codecs[1]), x, Momentum(w.messages()), w.positive(), w.per_layer())
    assert x[0]._version > before


def test_who_gets_triton(monkeypatch):
    monkeypatch.delenv("ONEBIT_KERNELS", raising=False)
    assert choose(torch.device("cuda", 0), torch.float32)[0] == "triton"
    assert choose(torch.device("xpu", 0), torch.float32)[0] == "triton"
    assert choose(CPU, torch.float32)[0] != "triton"
    assert choose(torch.device("cuda", 0), torch.float64) == (
        "reference",
        "Triton ones work on torch.float32, the parameters are torch.float64",
    )
    monkeypatch.setenv("ONEBIT_KERNELS", "triton")
    name, reason = choose(CPU, torch.float32)
    assert (name, "interpreter" in reason) == ("triton", True)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="Triton ones work on cuda and xpu, the parameters are on cpu"):
        choose(CPU, torch.float32)
    monkeypatch.setenv("ONEBIT_KERNELS", "cuda")
    with pytest.raises(ConfigError, match="allowed are 'reference', 'native' and 'triton'"):
        choose(CPU, torch.float32)
