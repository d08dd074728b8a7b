"""How the Triton kernels load and store state that may be compact: `compact.py` in Triton's language, equal to the bit.

Arguments are as in `triton_jit.py`.
"""

# No `from __future__ import annotations`, as there.
import triton
import triton.language as tl

GROUP = tl.constexpr(128)  # compact.ERROR_GROUP


@triton.jit
def load_error(error, scales, row, offset, at, chunk, inside):
    if scales is None:
        return tl.load(error + at, mask=inside, other=0.0)
    else:
        scale = tl.load(scales + row * tl.cdiv(chunk, GROUP) + offset // GROUP, mask=inside, other=0.0)
        return tl.load(error + at, mask=inside, other=0).to(tl.float32) * scale


@triton.jit
def store_int8(error, scales, x, alive, row, offset, chunk, TILE: tl.constexpr):
    """All elements of a tile, as `compact.Int8.write`; a group of 128 never crosses a tile."""
    grouped = tl.reshape(x, (TILE // GROUP, GROUP))
    largest = tl.max(tl.abs(grouped), axis=1)
    small = largest <= 1e-36
    inverse = tl.where(small, 0.0, tl.div_rn(127.0, tl.where(small, 1.0, largest)))
    y = grouped * inverse[:, None]
    y = (y + 12582912.0) - 12582912.0  # to nearest even: 1.5 * 2 ** 23 has no room for fractions
    group = tl.min(offset, axis=0) // GROUP + tl.arange(0, TILE // GROUP)
    in_chunk = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if alive is not None:
        at = row * chunk + in_chunk
        byte = tl.load(alive + at // 8, mask=in_chunk < chunk, other=0xFF).to(tl.int32)
        dead = (byte >> (7 - at % 8).to(tl.int32)) & 1 == 0
        sign = tl.where(grouped > 0, 1.0, tl.where(grouped < 0, -1.0, 0.0))
        y = tl.where(dead & (y == 0), sign, y)
    tl.store(error + row * chunk + in_chunk, y.to(tl.int8), mask=in_chunk < chunk)
    groups = tl.cdiv(chunk, GROUP)
    tl.store(scales + row * groups + group, tl.div_rn(largest, 127.0), mask=group < groups)


@triton.jit
def mix(h):
    """A hash of 32 bits, uint32 (C. Wellons, "lowbias32", public domain)."""
    h = (h ^ (h >> 16)) * tl.full((1,), 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full((1,), 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def load_variance(v, at, inside):
    if v.dtype.element_ty == tl.float32:
        return tl.load(v + at, mask=inside, other=1.0)
    else:
        return (tl.load(v + at, mask=inside, other=1).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_variance(v, x, at, inside, start, number):
    """bfloat16 as `compact.round_bf16_random` with seed 0 rounds; `start`: the bucket's place in the flat order."""
    if v.dtype.element_ty == tl.float32:
        tl.store(v + at, x, mask=inside)
    else:
        key = mix(mix(tl.full((1,), 0x9E3779B9, tl.uint32)))  # seed 0
        step = tl.full((1,), 0, tl.int64) + number
        key = mix(mix(key ^ step.to(tl.uint32)) ^ (step >> 32).to(tl.uint32))
        index = at + start
        noise = mix(index.to(tl.uint32) ^ mix(key ^ (index >> 32).to(tl.uint32))) & 0xFFFF
        bits = x.to(tl.uint32, bitcast=True)
        special = (bits & 0x7F800000) == 0x7F800000  # inf and nan keep their kind
        kind = (bits >> 16) | tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x40, 0).to(tl.uint32)
        tl.store(v + at, tl.where(special, kind, (bits + noise) >> 16).to(tl.int16), mask=inside)
