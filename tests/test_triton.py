"""The Triton kernels, in Triton's interpreter, against the readable back-end: bits and errors equal, the rest near.

The interpreter takes some 50 ms per piece of a bucket, so everything here is small. `test_triton_compile.py` sees that
the same kernels compile for real devices, and benchmarks/gpu.py runs them on one.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested")

import onebit
from onebit import lamb
from onebit.backend import Hypers, Momentum, TorchBackend
from onebit.codec import OneBit
from onebit.comm import Solo
from onebit.errors import ConfigError, LayoutError
from onebit.kernels import choose, pack_bits
from onebit.kernels import triton as kernels
from onebit.kernels import triton_operands as operands
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
    "one tile": lambda: World([5, 3], 1, OneBit()),
    "layers in chunks and tiles": lambda: World([5, 0, 130, 17], 2, OneBit(), masked=True),
    "one scale": lambda: World([40, 7, 60], 3, OneBit(scale="bucket")),
    "blocks of means": lambda: World([33, 9], 1, OneBit(scale="block", block_elements=20, kind="mean"), masked=True),
}
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
        source = backend.source(codec, grads, momentum, w.hypers, scale, mask if flat else None)
        sent.append(source.encode(codec, errors[-1], factor))
        assert torch.equal(errors[-1], error)
        source.commit(codec, errors[-1], factor, sent[0])
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
        quotient, norms = backend.measure(codec, parameters, now, before, frozen, v, w.hypers, scale, form, 1)
        backend.apply(codec, parameters, now, frozen, w.hypers, scale, step)
        found.append((v, quotient, norms.direction, norms.update, torch.cat(parameters)))
    assert same(found[0][0], found[1][0])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert near(a, b)


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
        backend.warmup_apply(w.bucket, parameters, g, m, v, w.hypers, step)
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
    w.triton.apply(w.codecs[1], wide, now, frozen, w.hypers, None, step)
    w.triton.apply(w.codecs[1], mixed, now, frozen, w.hypers, None, step)
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
    return torch.cat([p.detach().flatten() for p in params])


@pytest.mark.parametrize("settings", [{}, onebit.PAPER], ids=["default", "paper"])
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
    assert torch.equal(*got)
    assert torch.allclose(got[0], expected[0], rtol=1e-6, atol=1e-6)


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
    assert (sum(warmup.values()), sum(compressed.values())) == (4, 10)


def test_nothing_is_read_from_the_device(monkeypatch):
    """Reading a value is the operation _local_scalar_dense, on any device."""
    monkeypatch.setattr(operands, "launch", pretend)
    w = World([5, 0, 130, 17], 2, OneBit(), masked=True)
    codec, x, mask = w.codecs[1], w.split(w.values()), pack_bits(w.mask())
    now = Momentum(w.messages(), mask)
    with Operations() as operations:
        w.triton.warmup_measure(w.bucket, x, w.values(), w.values(), w.positive(), w.hypers)
        source = w.triton.source(codec, x, now, w.hypers, None, mask)
        sent = source.encode(codec, w.values(), None)
        reply = codec.serve(sent, 1, torch.zeros(w.bucket.chunk), None)
        codec.commit_served(sent, 1, torch.zeros(w.bucket.chunk), None, reply)
        source.commit(codec, w.values(), None, sent)
        w.triton.measure(codec, x, now, now, w.positive(), w.positive(), w.hypers, None, "sqrt", 1)
        w.triton.apply(codec, x, now, w.positive(), w.hypers, None, w.per_layer())
    assert not any("local_scalar" in name or "nonzero" in name for name in operations.counts)


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
    with pytest.raises(LayoutError, match=r"out is torch\.float32"):
        kernels.gather(plan, kernels.TensorList("x", x, plan), torch.zeros(3))


def test_autograd_is_told_of_changes_in_place():
    w = World([5, 3], 1, OneBit())
    x = w.split(w.values())
    before = x[0]._version
    w.triton.apply(w.codecs[1], x, Momentum(w.messages()), w.positive(), w.hypers, None, w.per_layer())
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
