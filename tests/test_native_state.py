"""The native kernels: the same bits for every instruction set and number of threads, compact state, misuse."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onebit.kernels._native", reason="the native kernels are not built")

from native_case import World, codecs, hyper, same, worlds

from onebit.codec import OneBit
from onebit.errors import ConfigError, LayoutError
from onebit.kernels import native
from onebit.kernels.plan import cut_pieces
from onebit.kernels.reference import pack_bits
from onebit.layout import FlatLayout

few = settings(max_examples=25, deadline=None)
BIG = [40_000, 3, 90_001, 0, 20_000]  # enough tiles for two threads


def everything(w: World, dtype: torch.dtype, error: torch.dtype, threads: int) -> list[torch.Tensor]:
    """One pass through every kernel; all that it changed or returned."""
    w.random.manual_seed(w.seed)
    plan, h = w.plan, hyper(len(w.sizes))
    alive, scale, factor = w.mask(), w.per_layer(0.5, 2), w.per_layer(0.5, 2)
    packed = pack_bits(alive)
    grads = native.TensorList("grads", w.split(w.values(), dtype, 1), plan)
    x = native.TensorList("x", w.split(w.values(), dtype, 1), plan)
    momentum = w.signs(w.mask())
    worker_error = native.Int8.zeros(w.bucket) if error is torch.int8 else w.values(scale=0.1).to(error)
    state = torch.float32 if error is torch.float32 else torch.bfloat16
    frozen, fresh = w.positive().to(state), w.positive().to(state)
    shared = {"layer_scale": scale, "threads": threads}
    out: list[torch.Tensor] = []

    for _ in range(2):
        bits = torch.zeros_like(momentum.bits)
        sums, asking = native.worker_encode(
            plan, grads, h, momentum, worker_error, bits, alive=packed, error_factor=factor, **shared
        )
        counts = torch.tensor([length for cuts in w.blocks for _, length in cuts])
        sent = native.Signs(bits, w.scales_of(sums, counts), packed)
        native.worker_commit(plan, grads, h, momentum, worker_error, sent, error_factor=factor, **shared)
        out += [sums, torch.tensor(asking), bits]

    last = w.workers - 1
    blocks = plan.blocks[last]
    messages = torch.randint(0, 256, (3, w.bucket.chunk // 8), dtype=torch.uint8, generator=w.random)
    scales, server_error = torch.rand(3, blocks, generator=w.random), torch.zeros(w.bucket.chunk)
    reply = torch.zeros(w.bucket.chunk // 8, dtype=torch.uint8)
    sums = native.server_encode(plan, last, messages, scales, server_error, reply, alive=packed, threads=threads)
    native.server_commit(
        plan, last, messages, scales, server_error, reply, sums.sqrt().float(), alive=packed, threads=threads
    )
    measured = native.lamb_measure(plan, h, x, sent, momentum, frozen, fresh, step=7, seed=3, **shared)
    native.apply(plan, h, x, sent, frozen, w.per_layer(0.001, 0.1), **shared)
    flat = torch.zeros(w.bucket.numel)
    native.decode(plan, sent, flat, **shared)
    g, m, v = w.values(), w.values(), w.positive()
    warm = native.warmup_measure(plan, h, x, g, m, v, threads=threads)
    native.warmup_apply(plan, h, x, g, m, v, w.per_layer(0.001, 0.1), threads=threads)
    gathered = torch.zeros(w.bucket.numel)
    native.gather(plan, x, gathered, threads=threads)
    squares = native.sum_squares(x.tensors, threads=threads)
    errors = [worker_error.data, worker_error.scales] if isinstance(worker_error, native.Int8) else [worker_error]
    out += [sums, reply, server_error, *measured, fresh, flat, *warm[:3], m, v, gathered, squares, *errors]
    return [*out, *(t for t in x.tensors if t is not None)]


@pytest.fixture
def each_isa():
    used = native.isa()
    yield native.isas()
    native.use_isa(used)


@pytest.mark.parametrize("error", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_depend_on_neither_threads_nor_instruction_set(dtype, error, each_isa):
    w = World(BIG, 2, OneBit(), 5)
    wanted = None
    for name in each_isa:
        native.use_isa(name)
        for threads in (1, 2, 3):
            found = everything(w, dtype, error, threads)
            wanted = wanted or found
            for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                # as integers: a nan or the sign of a zero must not differ either
                assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), (name, threads, i)


def test_calls_from_several_threads_do_not_meet():
    w = World(BIG, 2, OneBit(), 5)
    alone = everything(w, torch.float32, torch.float32, 1)
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(everything, World(BIG, 2, OneBit(), 5), torch.float32, torch.float32, 2) for _ in range(8)]
        for run in runs:
            assert all(same(a, b) for a, b in zip(run.result(), alone, strict=True))


@few
@given(worlds, st.sampled_from([torch.bfloat16, torch.int8]))
def test_a_compact_error_loses_no_more_than_its_rounding(w, kind):
    plan, h = w.plan, hyper(len(w.sizes))
    zero = native.Signs(torch.zeros(w.workers, w.bucket.chunk // 8, dtype=torch.uint8), torch.zeros(sum(plan.blocks)))
    g = w.values()
    listed = native.TensorList("g", w.split(g), plan)
    compact = native.Int8.zeros(w.bucket) if kind is torch.int8 else torch.zeros(w.bucket.numel, dtype=kind)
    exact = torch.zeros(w.bucket.numel)
    sent = w.signs()
    for error in (compact, exact):
        native.worker_commit(plan, listed, h, zero, error, sent)
    if isinstance(compact, native.Int8):
        size = native.Int8.zeros(w.bucket).scales.shape[1] * 128
        padded = torch.zeros(w.workers, size)
        padded[:, : w.bucket.chunk] = exact.view(w.workers, -1)
        groups = padded.view(w.workers, -1, 128)
        assert same(compact.scales, groups.abs().amax(-1) / 127)
        values = torch.zeros(w.workers, size)
        values[:, : w.bucket.chunk] = compact.data.view(w.workers, -1).float()
        lost = groups - values.view_as(groups) * compact.scales[..., None]
        assert bool((lost.abs() <= compact.scales[..., None] * 0.5001).all())
    else:
        assert torch.equal(compact, exact.bfloat16())


def test_random_rounding_is_unbiased_and_equal_wherever_the_element_lies():
    """A bfloat16 fresh variance at beta2 = 0.999 must be able to fall: nearest rounding never lets it."""
    size = 2**14
    h = torch.tensor([[0.1, 0.9, 0.999, 1e-6, 0.0]], dtype=torch.float64)
    w = World([size], 1, OneBit(), 0, tile=2048)
    none = native.Signs(torch.zeros(1, size // 8, dtype=torch.uint8), torch.zeros(1))
    x = native.TensorList("x", [torch.zeros(size)], w.plan)
    fresh, frozen = torch.ones(size, dtype=torch.bfloat16), torch.ones(size)
    steps = 200
    for step in range(steps):
        native.lamb_measure(w.plan, h, x, none, none, frozen, fresh, step=step)
    assert float(fresh.float().mean()) == pytest.approx(0.999**steps, rel=2e-3)

    layout = FlatLayout([(1000,), (3000,)], 1, bucket_elements=1000)
    whole, parts = torch.full((4000,), 1.003, dtype=torch.bfloat16), []
    for bucket in (FlatLayout([(4000,)], 1).buckets[0], *layout.buckets):
        plan = native.Plan(bucket, [[(0, bucket.layers[0].numel)]], 128)
        signs = native.Signs(torch.zeros(1, bucket.numel // 8, dtype=torch.uint8), torch.zeros(1))
        parts.append(whole[: bucket.numel].clone())
        listed = native.TensorList("x", [torch.zeros(bucket.layers[0].numel)], plan)
        native.lamb_measure(plan, h, listed, signs, signs, torch.ones(bucket.numel), parts[-1], step=1, seed=9)
    assert torch.equal(parts[0], torch.cat(parts[1:]))
    assert len(parts[0].unique()) == 2


@few
@given(
    st.integers(0, 2**31), st.sampled_from([0.97, 0.9999, 1.0, 1.0001, 3.0]), st.sampled_from([0.0, 1e-6, 1e-2, 10.0])
)
def test_skipping_quotients_never_misses_the_largest(seed, level, eps):
    """Quotients that crowd closely under the largest one, on both sides of 1."""
    w = World([3000], 1, OneBit(), seed, tile=2048)
    noise = 1 + torch.rand(w.bucket.numel, generator=w.random) * 1e-5
    fresh = w.positive(1.0)
    frozen = fresh * level * noise
    none = native.Signs(torch.zeros(1, w.bucket.numel // 8, dtype=torch.uint8), torch.zeros(1))
    h = torch.tensor([[0.1, 0.9, 1.0, eps, 0.0]], dtype=torch.float64)  # beta2 = 1: the fresh variance stays
    x = native.TensorList("x", [torch.zeros(3000)], w.plan)

    def root(v):
        return v.double().sqrt().float()

    for form, expected in [
        ("sqrt", (root(frozen) + eps) / (root(fresh) + eps)),
        ("variance", frozen / fresh),
    ]:
        largest, _, _ = native.lamb_measure(w.plan, h, x, none, none, frozen, fresh, step=0, form=form)
        assert float(largest) == float(expected.max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_widened_as_torch_does(dtype, each_isa):
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    plan = native.Plan(FlatLayout([(65536,)], 1).buckets[0], [[(0, 65536)]])
    for name in each_isa:
        native.use_isa(name)
        out = torch.zeros(65536)
        native.gather(plan, native.TensorList("x", [patterns], plan), out)
        assert same(out, patterns.float()), name


def test_parameters_are_narrowed_as_torch_does(each_isa):
    bits = torch.randint(-(2**31), 2**31 - 1, (65536,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    deltas = bits.to(torch.int32).view(torch.float32)
    deltas[:4096] = torch.linspace(-2e-7, 2e-7, 4096)  # fp16 denormals
    deltas[4096:8192] = torch.linspace(65000, 66000, 4096)  # around fp16's largest
    plan = native.Plan(FlatLayout([(65536,)], 1).buckets[0], [[(0, 65536)]])
    h = torch.tensor([[0.1, 0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    for name in each_isa:
        native.use_isa(name)
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.zeros(65536, dtype=dtype)
            m, v = torch.zeros(65536), torch.zeros(65536)
            # m = g, v = g * g, u = g / (|g| + 1): then every float in (-1, 1) can be reached; compare with torch
            native.warmup_apply(plan, h, native.TensorList("x", [x], plan), deltas, m, v, torch.ones(1))
            u = m / (v.double().sqrt().float() + 1)
            assert same(x, (-u).to(dtype)), (name, dtype)


@given(st.lists(st.sampled_from([0, 1, 5, 8, 100, 129, 1000]), min_size=1, max_size=6), st.integers(1, 4), codecs)
@few
def test_pieces_cover_every_element_of_every_layer_once(sizes, workers, codec):
    if sum(sizes) == 0:
        return
    w = World(sizes, workers, codec, 0)
    table = cut_pieces(w.bucket, w.blocks, 128)
    seen = torch.zeros(w.bucket.numel, dtype=torch.int64)
    spans = [(c * w.bucket.chunk + a, length) for c, cuts in enumerate(w.blocks) for a, length in cuts]
    for block, layer, layer_at, at, length in table.tolist():
        seen[at : at + length] += 1
        assert at // w.bucket.chunk == (at + length - 1) // w.bucket.chunk
        assert at % w.bucket.chunk // 128 == (at + length - 1) % w.bucket.chunk // 128
        assert w.bucket.layers[layer].start + layer_at == at
        assert layer_at + length <= sizes[layer]
        assert spans[block][0] <= at < at + length <= sum(spans[block])
    assert bool((seen[: sum(sizes)] == 1).all())
    assert bool((seen[sum(sizes) :] == 0).all())


def test_misuse_is_refused_with_the_operand_named():
    w = World([100, 28], 2, OneBit(), 0)
    plan, h = w.plan, hyper(2)
    good = native.TensorList("grads", w.split(w.values()), plan)
    bits, error, signs = torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(128), w.signs()

    def encode(plan=plan, grads=good, h=h, momentum=signs, error=error, bits=bits, **options):
        native.worker_encode(plan, grads, h, momentum, error, bits, **options)

    encode()
    other, nothing = World([100], 1, OneBit(), 0), native.TensorList("x", [None, None], plan)
    for refused, match in [
        (lambda: encode(h=h.float()), "hyper"),
        (lambda: encode(h=h[:1]), "hyper"),
        (lambda: encode(error=error.double()), "error"),
        (lambda: encode(error=torch.zeros(256)[::2]), "contiguous"),
        (lambda: encode(error=torch.zeros(120)), "error"),
        (lambda: encode(error=torch.zeros(128, device="meta")), "CPU"),
        (lambda: encode(error=native.Int8(torch.zeros(128, dtype=torch.int8), torch.zeros(1))), "scales"),
        (lambda: encode(bits=bits[:1]), "rows"),
        (lambda: encode(bits=torch.zeros(8, 2, dtype=torch.uint8).T), "rows"),
        (lambda: encode(bits=torch.zeros(2, 7, dtype=torch.uint8)), "bits"),
        (lambda: encode(alive=torch.zeros(128, dtype=torch.bool)), "alive"),
        (lambda: encode(layer_scale=torch.ones(3)), "layer_scale"),
        (lambda: encode(momentum=native.Signs(signs.bits, signs.scales[:1])), "momentum.scales"),
        (lambda: native.TensorList("grads", [torch.zeros(100)], plan), "one per layer"),
        (lambda: native.TensorList("grads", [torch.zeros(100), torch.zeros(27)], plan), r"grads\[1\]"),
        (lambda: native.TensorList("x", [torch.zeros(10, 10).T[:, :5]]), "contiguous"),
        (lambda: native.TensorList("x", [torch.zeros(4, dtype=torch.float64)]), r"x\[0\] is torch.float64"),
        (
            lambda: native.apply(plan, h, nothing, signs, error, torch.ones(2)),
            "None",
        ),
        (lambda: native.server_encode(plan, 2, bits, torch.ones(2, 1), torch.zeros(64), bits[0]), "chunk is 2"),
        (lambda: native.server_encode(plan, 0, bits[0], torch.ones(2, 1), torch.zeros(64), bits[0]), "received"),
        (lambda: native.Plan(w.bucket, w.blocks, 100), "tile"),
        (lambda: native.Plan(w.bucket, w.blocks[:1]), "one per chunk"),
        (lambda: native.Plan(w.bucket, [[(0, 8)], [(0, 64)]]), "no block"),
    ]:
        with pytest.raises(LayoutError, match=match):
            refused()
    with pytest.raises(ConfigError, match="threads is 0"):
        encode(threads=0)
    with pytest.raises(ValueError, match="1 tensors; the plan has 2"):
        encode(grads=native.TensorList("g", other.split(other.values()), other.plan))


def test_autograd_is_told_of_changes_in_place():
    w = World([64], 1, OneBit(), 0)
    x = torch.nn.Parameter(torch.ones(64))
    version = x._version
    native.apply(w.plan, hyper(1), native.TensorList("x", [x], w.plan), w.signs(), torch.ones(64), torch.ones(1))
    assert x._version > version


@pytest.mark.parametrize("name", ["sse9", "AVX2"])
def test_an_unknown_instruction_set_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        native.use_isa(name)
    done = subprocess.run(
        [sys.executable, "-c", "import onebit.kernels.native"],
        env={**os.environ, "ONEBIT_ISA": name},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "ONEBIT_ISA" in done.stderr


def test_a_lower_instruction_set_can_be_forced():
    done = subprocess.run(
        [sys.executable, "-c", "from onebit.kernels import native; print(native.isa())"],
        env={**os.environ, "ONEBIT_ISA": "portable"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "portable", done.stderr
