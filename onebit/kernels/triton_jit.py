"""The Triton kernels over one bucket; `kernels/triton.py` launches them, native/*.hpp says the same in C++.

A program works on one tile, a run of TILE elements of one chunk, and goes through the tile's pieces (`plan.py`) one
after the other: within a piece layer, block and all constants are the same. The elements of other pieces are masked
off, so memory is read once whatever the number of pieces. Offsets are int64.

Every operation is rounded by itself, in the order of `backend.TorchBackend`: `tl.div_rn` and `tl.sqrt_rn` round
correctly, and `triton.launch` forbids the compiler to fuse a multiplication with an addition.

Shared arguments:
  pieces    int64 [pieces, 5]: layer, offset in the layer, offset in the bucket, length, place of the block's scale
            in the words of the messages
  tiles     int64 [tiles + 1]: the first piece of each tile
  chunk     elements of a chunk; per_chunk: its tiles
  stride    bytes of a message; head: bytes of it before its bits
  hyper     float32 [layers, 6]: beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay
  lists     int64 [2, layers]: addresses of one tensor per layer, and their types
  masks     uint8 [bucket / 8], a bit per element packed as signs are, or None for all 1
  momentum  the messages of all chunks, uint8; where it is not yet signs, `flat` holds it, float32 [bucket], else None
  layer_scale, factor, step: float32 [layers]
  error     float32 [bucket], `error_scales` None; or int8 [bucket] with a scale per 128 elements of a chunk
  frozen, fresh: variances, [bucket]: float32, or bfloat16 as int16
  keep      uint8 [], whether the step counts, or None: it does; where it is 0 nothing is changed, and what else a
            kernel returns means nothing
"""

# No `from __future__ import annotations`: Triton reads the annotations. A name that is not used is not just `_`: in a
# loop Triton wants every name to keep its type.
import triton
import triton.language as tl

from onebit.kernels.triton_jit_state import load_error, load_variance, store_int8, store_variance

F32 = tl.constexpr(1)
BF16 = tl.constexpr(2)
F16 = tl.constexpr(3)


@triton.jit
def tile_of(number, chunk, per_chunk, TILE: tl.constexpr):
    """The chunk of a tile, and where its elements lie in the chunk and in the bucket."""
    row = (number // per_chunk).to(tl.int64)
    offset = (number % per_chunk).to(tl.int64) * TILE + tl.arange(0, TILE)
    return row, offset, row * chunk + offset


@triton.jit
def piece_of(pieces, p, at):
    """Layer of a piece, its elements' offsets in it, which of the tile's elements are in it, place of its scale."""
    row = pieces + 5 * p
    start = tl.load(row + 2)
    inside = (at >= start) & (at < start + tl.load(row + 3))
    return tl.load(row), tl.load(row + 1) + at - start, inside, tl.load(row + 4)


@triton.jit
def pieces_of(tiles, t, keep):
    """The first piece of a tile and the one after its last; none where the step does not count."""
    first, stop = tl.load(tiles + t), tl.load(tiles + t + 1)
    if keep is not None:
        stop = tl.where(tl.load(keep) != 0, stop, first)
    return first, stop


@triton.jit
def scale_of(messages, place):
    return tl.load(messages.to(tl.pointer_type(tl.float32)) + place)


@triton.jit
def load_bits(bits, offset, inside):
    """0 or 1, int32; the first element is in the most significant bit."""
    byte = tl.load(bits + offset // 8, mask=inside, other=0).to(tl.int32)
    return (byte >> (7 - offset % 8).to(tl.int32)) & 1


@triton.jit
def load_signs(bits, offset, inside):
    """+1 and -1."""
    return tl.where(load_bits(bits, offset, inside) != 0, 1.0, -1.0)


@triton.jit
def masked(x, mask, at, inside):
    """x where the mask is 1, x * 0 where it is 0."""
    if mask is None:
        return x
    else:
        return x * load_bits(mask, at, inside).to(tl.float32)


@triton.jit
def store_signs(bits, x, offset, chunk, TILE: tl.constexpr):
    """Pack x >= 0, the only place in the kernels that decides a sign. `bits` is where the chunk's bits start."""
    places = 7 - tl.arange(0, 8)
    ones = tl.reshape((x >= 0).to(tl.int32), (TILE // 8, 8))
    bytes = tl.sum(ones << places[None, :], axis=1)
    where = tl.min(offset, axis=0) // 8 + tl.arange(0, TILE // 8)
    tl.store(bits + where, bytes.to(tl.uint8), mask=where < chunk // 8)


@triton.jit
def load_list(lists, layers, layer, at, inside):
    """Elements of one tensor of a list, as float32; type 0 counts as zeros."""
    address, kind = tl.load(lists + layer), tl.broadcast_to(tl.load(lists + layers + layer), at.shape)
    f32 = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=inside & (kind == F32), other=0.0)
    bf16 = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=inside & (kind == BF16), other=0)
    f16 = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=inside & (kind == F16), other=0.0)
    wide = (bf16.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tl.where(kind == F32, f32, tl.where(kind == BF16, wide, f16.to(tl.float32)))


@triton.jit
def store_list(lists, layers, layer, at, x, inside):
    """The inverse, rounded to nearest even; for bfloat16 spelled out, since Triton's interpreter rounds otherwise."""
    address, kind = tl.load(lists + layer), tl.broadcast_to(tl.load(lists + layers + layer), at.shape)
    bits = x.to(tl.int32, bitcast=True)
    bf16 = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    tl.store(address.to(tl.pointer_type(tl.float32)) + at, x, mask=inside & (kind == F32))
    tl.store(address.to(tl.pointer_type(tl.int16)) + at, bf16.to(tl.int16), mask=inside & (kind == BF16))
    tl.store(address.to(tl.pointer_type(tl.float16)) + at, x.to(tl.float16), mask=inside & (kind == F16))


@triton.jit
def store_size(sizes, p, x, ABSOLUTE: tl.constexpr):
    """The sum of squares or of magnitudes of a piece, in float64; x is zero outside it."""
    wide = x.to(tl.float64)
    tl.store(sizes + p, tl.sum(tl.abs(wide) if ABSOLUTE else wide * wide, axis=0))


@triton.jit
def gather(lists, layers, out, pieces, tiles, chunk, per_chunk, TILE: tl.constexpr):
    t = tl.program_id(0)
    _row, offset, at = tile_of(t, chunk, per_chunk, TILE)
    x = tl.zeros((TILE,), tl.float32)
    for p in range(tl.load(tiles + t), tl.load(tiles + t + 1)):
        layer, in_layer, inside, _place = piece_of(pieces, p, at)
        x = tl.where(inside, load_list(lists, layers, layer, in_layer, inside), x)
    tl.store(out + at, x, mask=offset < chunk)


# -- the worker's side -----------------------------------------------------------------------------------------


@triton.jit
def worker_input(
    p, pieces, row, offset, at, grads, layers, hyper, momentum, momentum_mask, flat, layer_scale, held, error,
    error_scales, factor, chunk, stride, head,
):  # fmt: skip
    """(g * (1 - beta1) + m * beta1) * layer_scale, zero where `held` is 0, + error * factor: of the piece's elements.

    Returns them, which of the tile's elements they are, and the place of their scale.
    """
    layer, in_layer, inside, place = piece_of(pieces, p, at)
    scale = tl.load(layer_scale + layer)
    keep, add = tl.load(hyper + layer * 6), tl.load(hyper + layer * 6 + 1)
    if flat is None:
        signs = masked(load_signs(momentum + row * stride + head, offset, inside), momentum_mask, at, inside)
        m = signs * (tl.div_rn(scale_of(momentum, place), scale) * keep)
    else:
        m = tl.load(flat + at, mask=inside, other=0.0) * keep
    own = (load_list(grads, layers, layer, in_layer, inside) * add + m) * scale
    own = masked(own, held, at, inside)
    old = load_error(error, error_scales, row, offset, at, chunk, inside)
    return own + old * tl.load(factor + layer), inside, place


@triton.jit
def worker_encode(
    grads, layers, hyper, momentum, momentum_mask, flat, layer_scale, held, error, error_scales, factor,
    alive, messages, sizes, asking,
    pieces, tiles, chunk, per_chunk, stride, head, ABSOLUTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the bits into `messages`; sizes: float64 [pieces]; asking: int32 [tiles], dead elements that are not 0."""
    t = tl.program_id(0)
    row, offset, at = tile_of(t, chunk, per_chunk, TILE)
    x = tl.zeros((TILE,), tl.float32)
    asks = tl.zeros((TILE,), tl.int32)
    for p in range(tl.load(tiles + t), tl.load(tiles + t + 1)):
        value, inside, _place = worker_input(
            p, pieces, row, offset, at, grads, layers, hyper, momentum, momentum_mask, flat, layer_scale, held, error,
            error_scales, factor, chunk, stride, head,
        )  # fmt: skip
        if alive is not None:
            dead = load_bits(alive, at, inside) == 0
            asks += (inside & dead & (value != 0)).to(tl.int32)
            value = masked(value, alive, at, inside)
        value = tl.where(inside, value, 0.0)
        store_size(sizes, p, value, ABSOLUTE)
        x = tl.where(inside, value, x)
    store_signs(messages + row * stride + head, x, offset, chunk, TILE)
    tl.store(asking + t, tl.sum(asks, axis=0))


@triton.jit
def worker_commit(
    grads, layers, hyper, momentum, momentum_mask, flat, layer_scale, held, error, error_scales, factor,
    alive, messages, keep,
    pieces, tiles, chunk, per_chunk, stride, head, TILE: tl.constexpr,
):  # fmt: skip
    """error = input - sign * scale, in place."""
    t = tl.program_id(0)
    row, offset, at = tile_of(t, chunk, per_chunk, TILE)
    first, stop = pieces_of(tiles, t, keep)
    x = tl.zeros((TILE,), tl.float32)
    for p in range(first, stop):
        value, inside, place = worker_input(
            p, pieces, row, offset, at, grads, layers, hyper, momentum, momentum_mask, flat, layer_scale, held, error,
            error_scales, factor, chunk, stride, head,
        )  # fmt: skip
        signs = masked(load_signs(messages + row * stride + head, offset, inside), alive, at, inside)
        left = value - signs * scale_of(messages, place)
        if error_scales is None:
            tl.store(error + at, left, mask=inside)
        else:
            x = tl.where(inside, left, x)
    if error_scales is not None:  # noqa: SIM102 - this is decided when compiling
        if first < stop:  # a tile without pieces is padding, whose error stays zero
            store_int8(error, error_scales, x, alive, row, offset, chunk, TILE)


# -- the server's side: one chunk, tiles counted from its first --------------------------------------------------


@triton.jit
def server_mean(
    p, pieces, index, offset, at, received, workers, alive, error, factor, stride, head,
):  # fmt: skip
    """(sum over workers of sign * scale) / n + error * factor: of the piece's elements; then as `worker_input`."""
    layer, _in_layer, inside, place = piece_of(pieces, p, at)
    place -= index * (stride // 4)  # in the first row
    total = masked(load_signs(received + head, offset, inside), alive, at, inside) * scale_of(received, place)
    for w in range(1, workers):
        bits = received + tl.cast(w, tl.int64) * stride
        signs = masked(load_signs(bits + head, offset, inside), alive, at, inside)
        total += signs * scale_of(bits, place)
    mean = tl.div_rn(total, tl.cast(workers, tl.float32))
    return mean + tl.load(error + offset, mask=inside, other=0.0) * tl.load(factor + layer), inside, place


@triton.jit
def server_encode(
    received, workers, error, factor, alive, reply, sizes, index,
    pieces, tiles, chunk, per_chunk, stride, head, ABSOLUTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    t = index * per_chunk + tl.program_id(0)
    _row, offset, at = tile_of(t, chunk, per_chunk, TILE)
    x = tl.zeros((TILE,), tl.float32)
    for p in range(tl.load(tiles + t), tl.load(tiles + t + 1)):
        value, inside, _place = server_mean(
            p, pieces, index, offset, at, received, workers, alive, error, factor, stride, head
        )
        value = tl.where(inside, masked(value, alive, at, inside), 0.0)
        store_size(sizes, p, value, ABSOLUTE)
        x = tl.where(inside, value, x)
    store_signs(reply + head, x, offset, chunk, TILE)


@triton.jit
def server_commit(
    received, workers, error, factor, alive, reply, keep, index,
    pieces, tiles, chunk, per_chunk, stride, head, TILE: tl.constexpr,
):  # fmt: skip
    t = index * per_chunk + tl.program_id(0)
    _row, offset, at = tile_of(t, chunk, per_chunk, TILE)
    first, stop = pieces_of(tiles, t, keep)
    for p in range(first, stop):
        value, inside, place = server_mean(
            p, pieces, index, offset, at, received, workers, alive, error, factor, stride, head
        )
        signs = masked(load_signs(reply + head, offset, inside), alive, at, inside)
        tl.store(error + offset, value - signs * scale_of(reply, place), mask=inside)


# -- everyone's side -----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["number"])
def lamb_measure(
    x, layers, hyper, now, now_mask, before, before_mask, flat, layer_scale, frozen, fresh, sums, largest,
    start, number, keep,
    pieces, tiles, count, chunk, per_chunk, stride, head, VARIANCE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Refresh the variance in place; sums: float64 [2, pieces], direction and update; largest: int32 [pieces]."""
    t = tl.program_id(0)
    row, offset, at = tile_of(t, chunk, per_chunk, TILE)
    first, stop = pieces_of(tiles, t, keep)
    for p in range(first, stop):
        layer, in_layer, inside, place = piece_of(pieces, p, at)
        h = hyper + layer * 6
        beta1, below, beta2, add = tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3)
        eps, decay, scale = tl.load(h + 4), tl.load(h + 5), tl.load(layer_scale + layer)
        signs = masked(load_signs(now + row * stride + head, offset, inside), now_mask, at, inside)
        m = signs * tl.div_rn(scale_of(now, place), scale)
        if flat is None:
            signs = masked(load_signs(before + row * stride + head, offset, inside), before_mask, at, inside)
            m_old = signs * (tl.div_rn(scale_of(before, place), scale) * beta1)
        else:
            m_old = tl.load(flat + at, mask=inside, other=0.0) * beta1

        v = load_variance(fresh, at, inside)
        g = tl.div_rn(m - m_old, below)
        refreshed = v * beta2 + g * add * g
        if now_mask is not None:
            alive = load_bits(now_mask, at, inside) != 0
            refreshed = tl.where(alive, refreshed, v)
        store_variance(fresh, refreshed, at, inside, start, number)

        a = load_variance(frozen, at, inside)
        root = tl.sqrt_rn(a) + eps
        if VARIANCE:
            positive = refreshed > 0
            quotient = tl.where(positive, tl.div_rn(a, tl.where(positive, refreshed, 1.0)), 1.0)
        else:
            quotient = tl.div_rn(root, tl.sqrt_rn(refreshed) + eps)
        if now_mask is not None:
            quotient = tl.where(alive, quotient, 0.0)
        # floats that are not negative are ordered as their bits are, and nan is above them all
        rank = tl.where(inside, quotient.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        tl.store(largest + p, tl.max(rank, axis=0))

        u = tl.where(inside, tl.div_rn(m, root), 0.0)
        store_size(sums, p, u, False)
        decays = tl.broadcast_to(decay, u.shape) != 0.0  # x is not read where the weight decay is 0
        u = tl.where(decays, u + load_list(x, layers, layer, in_layer, inside & decays) * decay, u)
        store_size(sums + count, p, tl.where(inside, u, 0.0), False)


@triton.jit
def apply(
    x, layers, hyper, now, now_mask, layer_scale, frozen, step, keep,
    pieces, tiles, chunk, per_chunk, stride, head, TILE: tl.constexpr,
):  # fmt: skip
    """x -= step * (m / (sqrt(v_frozen) + eps) + weight_decay * x), in place."""
    t = tl.program_id(0)
    row, offset, at = tile_of(t, chunk, per_chunk, TILE)
    first, stop = pieces_of(tiles, t, keep)
    for p in range(first, stop):
        layer, in_layer, inside, place = piece_of(pieces, p, at)
        eps, decay = tl.load(hyper + layer * 6 + 4), tl.load(hyper + layer * 6 + 5)
        signs = masked(load_signs(now + row * stride + head, offset, inside), now_mask, at, inside)
        m = signs * tl.div_rn(scale_of(now, place), tl.load(layer_scale + layer))
        u = tl.div_rn(m, tl.sqrt_rn(load_variance(frozen, at, inside)) + eps)
        parameter = load_list(x, layers, layer, in_layer, inside)
        u = tl.where(decay != 0.0, u + parameter * decay, u)
        store_list(x, layers, layer, in_layer, parameter - u * tl.load(step + layer), inside)


# -- the warm-up stage ---------------------------------------------------------------------------------------------


@triton.jit
def moments(g, m, v, h):
    """The next momentum and variance, and m / (sqrt(v) + eps) of them; h: a row of `hyper`."""
    m_new = m * tl.load(h) + g * tl.load(h + 1)
    v_new = v * tl.load(h + 2) + g * tl.load(h + 3) * g
    return m_new, v_new, tl.div_rn(m_new, tl.sqrt_rn(v_new) + tl.load(h + 4))


@triton.jit
def warmup_measure(
    x, layers, hyper, g, m, v, sums, bad, pieces, tiles, count, chunk, per_chunk, TILE: tl.constexpr,
):  # fmt: skip
    """sums: float64 [3, pieces], squares of direction, update and x; bad: int32 [tiles], 1 if g * g is not finite."""
    t = tl.program_id(0)
    _row, offset, at = tile_of(t, chunk, per_chunk, TILE)
    grad = tl.load(g + at, mask=offset < chunk, other=0.0)
    tl.store(bad + t, tl.max(tl.where(grad * grad < float("inf"), 0, 1), axis=0))
    for p in range(tl.load(tiles + t), tl.load(tiles + t + 1)):
        layer, in_layer, inside, _place = piece_of(pieces, p, at)
        h = hyper + layer * 6
        momentum = tl.load(m + at, mask=inside, other=0.0)
        _m_new, _v_new, u = moments(grad, momentum, tl.load(v + at, mask=inside, other=1.0), h)
        parameter = load_list(x, layers, layer, in_layer, inside)
        decay = tl.load(h + 5)
        store_size(sums, p, tl.where(inside, u, 0.0), False)
        u = tl.where(decay != 0.0, u + parameter * decay, u)
        store_size(sums + count, p, tl.where(inside, u, 0.0), False)
        store_size(sums + 2 * count, p, tl.where(inside, parameter, 0.0), False)


@triton.jit
def warmup_apply(
    x, layers, hyper, g, m, v, step, keep, pieces, tiles, chunk, per_chunk, TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    _row, _offset, at = tile_of(t, chunk, per_chunk, TILE)
    first, stop = pieces_of(tiles, t, keep)
    for p in range(first, stop):
        layer, in_layer, inside, _place = piece_of(pieces, p, at)
        h = hyper + layer * 6
        grad = tl.load(g + at, mask=inside, other=0.0)
        momentum = tl.load(m + at, mask=inside, other=0.0)
        m_new, v_new, u = moments(grad, momentum, tl.load(v + at, mask=inside, other=1.0), h)
        tl.store(m + at, m_new, mask=inside)
        tl.store(v + at, v_new, mask=inside)
        parameter = load_list(x, layers, layer, in_layer, inside)
        decay = tl.load(h + 5)
        u = tl.where(decay != 0.0, u + parameter * decay, u)
        store_list(x, layers, layer, in_layer, parameter - u * tl.load(step + layer), inside)


# -- from pieces to blocks and layers: a fixed order, so that all workers find the same ------------------------------


@triton.jit
def sum_segments(values, edges, out, count, WIDTH: tl.constexpr):
    """out[r, s] = sum of values[r, edges[s] : edges[s + 1]], float64 [rows, count] -> [rows, segments]."""
    s, r = tl.program_id(0), tl.program_id(1)
    stop = tl.load(edges + s + 1)
    total = tl.zeros((WIDTH,), tl.float64)
    for first in range(tl.load(edges + s), stop, WIDTH):
        i = first + tl.arange(0, WIDTH)
        total += tl.load(values + tl.cast(r, tl.int64) * count + i, mask=i < stop, other=0.0)
    tl.store(out + r * tl.num_programs(0) + s, tl.sum(total, axis=0))


@triton.jit
def max_segments(values, edges, out, WIDTH: tl.constexpr):
    """The largest of each segment, int32 [count] -> [segments]; 0 where it is empty."""
    s = tl.program_id(0)
    stop = tl.load(edges + s + 1)
    best = tl.zeros((WIDTH,), tl.int32)
    for first in range(tl.load(edges + s), stop, WIDTH):
        i = first + tl.arange(0, WIDTH)
        best = tl.maximum(best, tl.load(values + i, mask=i < stop, other=0))
    tl.store(out + s, tl.max(best, axis=0))
