"""The native kernels against the composition of the readable torch functions: bits equal, state equal, sums near.

The kernels round every multiplication and addition separately; where `lamb.py` leaves that to torch the reference here
spells it out.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onebit.kernels._native", reason="the native kernels are not built")

from native_case import World, dtypes, hyper, near, same, worlds

from onebit import lamb
from onebit.codec import OneBit
from onebit.kernels import native
from onebit.kernels.reference import pack_bits, pack_signs, unpack_bits

BETA1, BETA2 = 0.9, 0.99


def root(v):
    """Rounded correctly, as a processor's square root is; torch's own may be one unit in the last place off."""
    return v.double().sqrt().float()


many = settings(max_examples=30, deadline=None)


def blended(w: World, g, m, scale, error, factor):
    """The worker's input, one operation at a time."""
    x = g * (1 - BETA1) + m * BETA1
    if scale is not None:
        x = x * w.spread(scale)
    return x + (error if factor is None else error * w.spread(factor))


@many
@given(worlds, dtypes, st.integers(0, 1), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_worker_side_equals_codec_and_exchange(w, dtype, offset, flat_momentum, masked, scaled, specials, missing):
    grads = [*w.split(w.values(specials), dtype, offset)]
    if missing:
        grads[0] = None
    alive = w.mask() if masked else None
    momentum = w.values() if flat_momentum else w.signs(w.mask() if masked else None)
    scale, factor = (w.per_layer(0.5, 2), w.per_layer(0.5, 2)) if scaled else (None, None)
    error = w.values(scale=0.1)

    w.bucket_codec.set_alive(alive)
    m = momentum if flat_momentum else w.decoded_with(momentum)
    if scaled and not flat_momentum:
        m = m / w.spread(scale)
    x = blended(w, w.join(grads), m, scale, error, factor)
    x[sum(w.sizes) :] = 0
    expected = w.parse(w.bucket_codec.encode(x), alive)

    plan, h = w.plan, hyper(len(w.sizes))
    listed = native.TensorList("grads", grads, plan)
    packed = None if alive is None else pack_bits(alive)
    bits = torch.zeros_like(expected.bits)
    options = {"layer_scale": scale, "error_factor": factor}
    kept = error.clone()
    sums, asking = native.worker_encode(
        plan, listed, h, momentum, error, bits, alive=packed, kind=w.codec.kind, **options
    )
    assert torch.equal(bits, expected.bits)
    counts = torch.cat(w.bucket_codec.live).clamp(min=1)
    assert near(w.scales_of(sums, counts), expected.scales, 2e-7)
    assert asking == (0 if alive is None else int((x.ne(0) & ~alive).sum()))
    assert torch.equal(error, kept)

    native.worker_commit(plan, listed, h, momentum, error, expected, **options)
    assert same(error, x - w.decoded_with(expected))


@many
@given(worlds, st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_server_side_equals_codec_and_exchange(w, messages, masked, scaled, not_finite):
    chunk = w.seed % w.workers
    alive = w.mask() if masked else None
    w.bucket_codec.set_alive(alive)
    sent = [w.signs() for _ in range(messages)]
    if not_finite and w.plan.blocks[chunk]:
        first = sum(w.plan.blocks[:chunk])
        sent[0].scales[first] = float("inf") if w.seed % 2 else float("nan")
    factor = w.per_layer(0.5, 2) if scaled else None
    rows = slice(chunk * w.bucket.chunk, (chunk + 1) * w.bucket.chunk)
    error = w.values(scale=0.1)[rows].clone()

    received = torch.stack([w.message(s)[chunk] for s in sent])
    total = w.bucket_codec.decode_chunk(received[0], chunk)
    for message in received[1:]:
        total += w.bucket_codec.decode_chunk(message, chunk)
    total /= messages
    served = total + (error if factor is None else error * w.spread(factor)[rows])
    reply = w.bucket_codec.encode_chunk(served, chunk)

    plan, head, size = w.plan, w.bucket_codec.head_bytes, w.bucket.chunk // 8
    view = received[:, head : head + size]
    scales = torch.stack([w.bucket_codec.scales(message, chunk) for message in received])
    packed = None if alive is None else pack_bits(alive)
    bits = torch.zeros(size, dtype=torch.uint8)
    sums = native.server_encode(
        plan, chunk, view, scales, error, bits, alive=packed, error_factor=factor, kind=w.codec.kind
    )
    assert torch.equal(bits, reply[head : head + size])
    expected = w.bucket_codec.scales(reply, chunk)
    assert near(w.scales_of(sums, w.bucket_codec.live[chunk].clamp(min=1)), expected, 2e-7)

    native.server_commit(plan, chunk, view, scales, error, bits, expected, alive=packed, error_factor=factor)
    assert same(error, served - w.bucket_codec.decode_chunk(reply, chunk))


@many
@given(worlds, st.booleans(), st.booleans())
def test_decode_equals_codec(w, masked, scaled):
    alive = w.mask() if masked else None
    w.bucket_codec.set_alive(alive)
    signs = w.signs(alive)
    scale = w.per_layer(0.5, 2) if scaled else None
    out = torch.full((w.bucket.numel,), float("nan"))
    native.decode(w.plan, signs, out, layer_scale=scale)
    expected = w.decoded(signs)
    assert same(out, expected if scale is None else expected / w.spread(scale))


@many
@given(
    worlds,
    dtypes,
    st.integers(0, 1),
    st.sampled_from(["sqrt", "variance"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 1e-8, 1e-3, 1.0]),
    st.sampled_from([1e-2, 1.0, 1e2]),
)
def test_lamb_update_equals_lamb(w, dtype, offset, form, masked, scaled, flat_before, decay, eps, size):
    plan, run, h = w.plan, w.run, hyper(len(w.sizes), decay, eps)
    alive = w.mask() if masked else None
    now = w.signs(alive, size)
    before = w.values() if flat_before else w.signs(w.mask() if masked else None, size)
    scale = w.per_layer(0.5, 2) if scaled else None
    frozen, fresh = w.positive(), w.positive()
    x = w.split(w.values(), dtype, offset)

    def momentum(signs):
        m = w.decoded_with(signs)
        return (m if scale is None else m / w.spread(scale))[: run.numel]

    n = run.numel
    m, m_old, v = momentum(now), before[:n] if flat_before else momentum(before), frozen[:n]
    g = (m - BETA1 * m_old) / (1 - BETA1)
    refreshed = fresh[:n] * BETA2 + (1 - BETA2) * g * g
    refreshed = refreshed if alive is None else torch.where(alive[:n], refreshed, fresh[:n])
    below = root(v) + eps
    variances = torch.where(refreshed > 0, v / refreshed, 1.0)
    quotient = below / (root(refreshed) + eps) if form == "sqrt" else variances
    largest = run.maxima(quotient if alive is None else torch.where(alive[:n], quotient, 0.0))
    u = m / below
    direction = run.norms(u)
    u = u + w.join(x)[:n] * decay if decay else u

    listed = native.TensorList("x", x, plan)
    got = native.lamb_measure(plan, h, listed, now, before, frozen, fresh, step=1, layer_scale=scale, form=form)
    assert same(fresh[:n], refreshed)
    assert same(got[0], largest)
    assert near(got[1].sqrt(), direction if decay else torch.zeros_like(direction), 1e-12)
    assert near(got[2].sqrt(), run.norms(u) if decay else torch.zeros_like(direction), 1e-12)

    step = w.per_layer(1e-3, 1e-1)
    expected = [a.float() - b for a, b in zip(x, run.views(u * run.spread(step)), strict=True)]
    native.apply(plan, h, listed, now, frozen, step.double(), layer_scale=scale)
    for a, b in zip(x, expected, strict=True):
        assert same(a, b.to(dtype))


@many
@given(worlds, dtypes, st.integers(0, 1), st.sampled_from([0.0, 0.01]), st.booleans())
def test_warmup_equals_lamb(w, dtype, offset, decay, specials):
    plan, run, h = w.plan, w.run, hyper(len(w.sizes), decay)
    g, m, v, x = w.values(specials), w.values(), w.positive(), w.split(w.values(), dtype, offset)
    n = run.numel
    m_new = m[:n] * BETA1 + g[:n] * (1 - BETA1)
    v_new = v[:n] * BETA2 + (1 - BETA2) * g[:n] * g[:n]
    u = m_new / (root(v_new) + 1e-6)
    direction = run.norms(u)
    u = u + w.join(x)[:n] * decay if decay else u
    before = m.clone(), v.clone()

    listed = native.TensorList("x", x, plan)
    got = native.warmup_measure(plan, h, listed, g, m, v)
    as_list = native.TensorList("g", w.split(g), plan)  # one tensor per layer, where nothing had to be averaged
    again = native.warmup_measure(plan, h, listed, as_list, m, v)
    assert all(same(one, other) for one, other in zip(got[:3], again[:3], strict=True))
    assert again[3] == bool((g[:n] * g[:n]).isfinite().all())
    assert got[3] == bool((g * g).isfinite().all())  # what the contract asks, `Backend.warmup_measure`
    for sums, norms in zip(got[:3], (direction, run.norms(u), run.norms([a.float() for a in x])), strict=True):
        assert near(sums.sqrt(), norms, 1e-12)
    assert torch.equal(m, before[0])
    assert torch.equal(v, before[1])

    step = w.per_layer(1e-3, 1e-1)
    expected = [a.float() - b for a, b in zip(x, run.views(u * run.spread(step)), strict=True)]
    native.warmup_apply(plan, h, listed, g, m, v, step)
    assert same(m[:n], m_new)
    assert same(v[:n], v_new)
    for a, b in zip(x, expected, strict=True):
        assert same(a, b.to(dtype))


def test_two_operations_are_lamb_py_to_rounding():
    """The reference above against the library's own functions, which may fuse a multiplication with an addition."""
    w = World([300, 17], 1, OneBit(), 0)
    m, g = w.values()[: w.run.numel], w.values()[: w.run.numel]
    assert torch.allclose(lamb.local_momentum(m, g.clone(), BETA1, None), g * (1 - BETA1) + m * BETA1, rtol=1e-5)


@many
@given(worlds, dtypes, st.integers(0, 1), st.booleans())
def test_gather_and_sums_of_squares(w, dtype, offset, specials):
    tensors = w.split(w.values(specials), dtype, offset)
    out = torch.full((w.bucket.numel,), float("nan"))
    native.gather(w.plan, native.TensorList("grads", tensors, w.plan), out)
    assert same(out, w.join(tensors))
    sums = native.sum_squares([*tensors, None])
    assert near(sums[:-1], torch.stack([(t.double() ** 2).sum() for t in tensors]), 1e-12)
    assert sums[-1] == 0
    assert torch.equal(sums[:-1].isfinite(), torch.stack([t.isfinite().all() for t in tensors]))


@many
@given(worlds)
def test_bits_are_those_of_the_reference(w):
    """Through the kernel that packs: the gradient alone, all else zero."""
    g = w.values(specials=True)
    momentum = native.Signs(
        torch.zeros(w.workers, w.bucket.chunk // 8, dtype=torch.uint8), torch.zeros(sum(w.plan.blocks))
    )
    bits = torch.zeros(w.workers, w.bucket.chunk // 8, dtype=torch.uint8)
    h = torch.tensor([[0.1, 0.0, 0.99, 1e-6, 0.0]], dtype=torch.float64).repeat(len(w.sizes), 1)
    zeros = torch.zeros(w.bucket.numel)
    native.worker_encode(w.plan, native.TensorList("g", w.split(g), w.plan), h, momentum, zeros, bits)
    assert torch.equal(bits.flatten(), pack_signs(g))
    assert torch.equal(unpack_bits(bits.flatten()), g >= 0)
