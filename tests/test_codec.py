"""OneBit: the format of a message, which elements share a scale, and how much of a buffer one bit keeps."""

from __future__ import annotations

from math import prod, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebit.codec import BucketCodec, OneBit
from onebit.errors import ConfigError
from onebit.kernels import pack_bits, pack_signs, unpack_bits, unpack_signs
from onebit.layout import Bucket, FlatLayout, spread

LAWS = settings(deadline=None, derandomize=True, database=None, max_examples=100)
CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.float64])
KINDS = st.sampled_from(["rms", "mean"])
CODECS = st.one_of(
    st.builds(OneBit, scale=st.sampled_from(["layer", "bucket"]), kind=KINDS),
    st.builds(OneBit, scale=st.just("block"), block_elements=st.integers(8, 30), kind=KINDS),
)
SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 50)), st.tuples(st.integers(1, 9), st.integers(0, 9))),
    min_size=1,
    max_size=6,
).filter(lambda shapes: sum(prod(shape) for shape in shapes) > 0)
BUCKETS = st.builds(lambda shapes, workers: FlatLayout(shapes, workers).buckets[0], SHAPES, st.integers(1, 8))


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread():
    """Small tensors gain nothing from two threads, and on a busy machine each call would wait for both."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def whole(shapes: list[tuple[int, ...]], workers: int = 1) -> Bucket:
    return FlatLayout(shapes, workers).buckets[0]


def codec_of(bucket: Bucket, codec: OneBit, dtype: torch.dtype = torch.float32) -> BucketCodec:
    return BucketCodec(bucket, codec, dtype, CPU)


def owner(bucket: Bucket) -> Tensor:
    """The layer of each element of a bucket, [bucket]; -1 in the padding."""
    owners = torch.full((bucket.numel,), -1)
    for layer in bucket.layers:
        owners[layer.start - bucket.start : layer.stop - bucket.start] = layer.index
    return owners


def random(bucket: Bucket, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, each layer with a magnitude of its own, zero in the padding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(bucket.numel, generator=generator, dtype=dtype)
    return x * 10.0 ** owner(bucket).remainder(5) * owner(bucket).ge(0)


def block_ids(codec: BucketCodec) -> Tensor:
    """Which block each element decodes from, [bucket], counted from 1 through all chunks; 0: from none."""
    messages = codec.encode(torch.zeros(codec.bucket.numel, dtype=codec.dtype))  # every sign is +
    first = 1
    for chunk, message in enumerate(messages):
        scales = codec.scales(message, chunk)
        scales.copy_(torch.arange(first, first + len(scales)))
        first += len(scales)
    return codec.decode(messages)


# --- bits ---------------------------------------------------------------------------------------------------------


def test_the_first_element_is_the_most_significant_bit():
    x = torch.tensor([1.0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 1])
    assert pack_signs(x).tolist() == [0b10000000, 0b00000011]
    assert pack_signs(x).dtype == torch.uint8


def test_both_zeros_pack_as_1_and_nan_as_0():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([0.0, -0.0, nan, inf, -inf, 1e-45, -1e-45, -nan])
    assert pack_signs(x).tolist() == [0b11010100]


def test_all_256_bytes_unpack_to_their_binary_digits_and_pack_back():
    every = torch.arange(256).to(torch.uint8)
    digits = [[c == "1" for c in f"{value:08b}"] for value in range(256)]
    assert unpack_bits(every).view(256, 8).tolist() == digits
    assert unpack_signs(every, torch.float64).view(256, 8).tolist() == [[2.0 * d - 1 for d in row] for row in digits]
    assert torch.equal(pack_bits(torch.tensor(digits).view(-1)), every)


@LAWS
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from([torch.float32, torch.float64]))
def test_spread_repeats_each_value_as_often_as_it_says(lengths, dtype):
    values = torch.arange(1, len(lengths) + 1).to(dtype)
    out = spread(values, lengths)
    assert out.dtype == dtype
    assert out.tolist() == [float(i) for i, length in enumerate(lengths, start=1) for _ in range(length)]


@LAWS
@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_packing_bits_and_unpacking_them_is_the_identity(rows, octets, data):
    bits = data.draw(st.lists(st.booleans(), min_size=rows * octets * 8, max_size=rows * octets * 8), label="bits")
    flags = torch.tensor(bits, dtype=torch.bool).view(rows, octets * 8)
    packed = pack_bits(flags)
    assert packed.shape == (rows, octets)
    assert torch.equal(unpack_bits(packed), flags)
    for dtype in (torch.float32, torch.float64):
        signs = unpack_signs(packed, dtype)
        assert signs.dtype == dtype
        assert torch.equal(signs, flags.to(dtype) * 2 - 1)
        assert torch.equal(pack_signs(signs), packed)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scale": "tensor"}, "scale is 'tensor'"),
        ({"kind": "max"}, "kind is 'max'"),
        ({"multiplier": 0.0}, "multiplier is 0.0"),
        ({"multiplier": -1.0}, "multiplier is -1.0"),
        ({"multiplier": 1.6}, "multiplier is 1.6"),
        ({"multiplier": float("nan")}, "multiplier is nan"),
        ({"block_elements": 64}, "block_elements is 64 with scale='layer'"),
        ({"scale": "bucket", "block_elements": 64}, "block_elements is 64 with scale='bucket'"),
        ({"scale": "block"}, "block_elements is None with scale='block'"),
        ({"scale": "block", "block_elements": 7}, "block_elements is 7"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_value(arguments, words):
    with pytest.raises(ConfigError, match=words):
        OneBit(**arguments)


# --- blocks and messages ------------------------------------------------------------------------------------------


@LAWS
@given(BUCKETS, CODECS, DTYPES)
def test_blocks_cover_every_real_element_once_and_cross_no_chunk(bucket, settings_, dtype):
    codec = codec_of(bucket, settings_, dtype)
    ids = block_ids(codec)
    real = owner(bucket).ge(0)
    assert torch.equal(ids.ne(0), real)
    # the numbers rise by 0 or 1 from element to element: every block is one unbroken run, all are used
    inside = ids[real].long()
    assert inside[0] == 1
    assert all(step in (0, 1) for step in inside.diff().tolist())
    assert inside[-1] == sum(codec.blocks)
    chunk_of = torch.arange(bucket.numel) // bucket.chunk
    for number in range(1, sum(codec.blocks) + 1):
        assert len(chunk_of[ids == number].unique()) == 1
    assert [len(set(row.tolist()) - {0.0}) for row in ids.view(bucket.workers, -1)] == codec.blocks


@LAWS
@given(BUCKETS, CODECS)
def test_blocks_cross_no_layer_and_are_as_long_as_they_may_be(bucket, settings_):
    ids = block_ids(codec_of(bucket, settings_)).long()
    owners = owner(bucket)
    limit = settings_.block_elements or bucket.numel
    if settings_.scale == "bucket":
        for row in ids.view(bucket.workers, -1):
            assert len(set(row.tolist()) - {0}) <= 1
        return
    for number in ids.unique().tolist():
        if number:
            assert len(owners[ids == number].unique()) == 1
            assert int((ids == number).sum()) <= limit
    chunk_of = torch.arange(bucket.numel) // bucket.chunk
    for at in range(1, int(owners.ge(0).sum())):  # a new block begins only where it must
        begins = bool(ids[at] != ids[at - 1])
        if owners[at] != owners[at - 1] or chunk_of[at] != chunk_of[at - 1]:
            assert begins
        elif begins:
            assert int((ids == ids[at - 1]).sum()) == limit


@LAWS
@given(BUCKETS, CODECS.filter(lambda codec: codec.scale != "bucket"), DTYPES)
def test_encode_measures_exactly_the_block_that_decode_fills(bucket, settings_, dtype):
    codec = codec_of(bucket, settings_, dtype)
    ids = block_ids(codec).long()
    x = torch.where(ids > 0, 2.0 ** (ids % 20), 0.0).to(dtype)
    x[::3] *= -1
    messages = codec.encode(x)
    assert torch.equal(codec.decode(messages), x)
    for chunk, row in enumerate(x.view(bucket.workers, -1)):  # the server side has the same blocks
        assert torch.equal(codec.encode_chunk(row, chunk), messages[chunk])


@pytest.mark.parametrize(
    ("workers", "settings_", "dtype", "blocks", "message_bytes"),
    [  # layers of 5, 21 and 1 elements; [header + scales] items, bits, filled up to whole items
        (1, OneBit(), torch.float32, [3], 4 * (1 + 3) + 4),  # 32 elements in one chunk
        (2, OneBit(), torch.float32, [2, 2], 4 * (1 + 2) + 2 + 2),  # 5 11 | 10 1
        (2, OneBit(), torch.float64, [2, 2], 8 * (1 + 2) + 2 + 6),
        (2, OneBit("bucket"), torch.float32, [1, 1], 4 * (1 + 1) + 2 + 2),
        (2, OneBit("block", 8), torch.float32, [3, 3], 4 * (1 + 3) + 2 + 2),  # 5 8 3 | 8 2 1
        (3, OneBit(), torch.float32, [2, 2, 0], 4 * (1 + 2) + 2 + 2),  # 5 11 | 10 1 | padding
        (8, OneBit(), torch.float32, [2, 1, 1, 2, 0, 0, 0, 0], 4 * (1 + 2) + 1 + 3),  # 5 3 | 8 | 8 | 2 1
        (8, OneBit("bucket"), torch.float32, [1, 1, 1, 1, 0, 0, 0, 0], 4 * (1 + 1) + 1 + 3),
    ],
)
def test_message_bytes_are_as_computed_by_hand(workers, settings_, dtype, blocks, message_bytes):
    bucket = whole([(5,), (0,), (3, 7), ()], workers)
    codec = codec_of(bucket, settings_, dtype)
    assert codec.blocks == blocks
    assert codec.message_bytes == message_bytes
    messages = codec.encode(random(bucket, 1, dtype))
    assert messages.shape == (workers, message_bytes)
    assert messages.dtype == torch.uint8


@LAWS
@given(BUCKETS, CODECS, DTYPES)
def test_a_message_is_a_header_the_scales_the_bits_and_nothing_more(bucket, settings_, dtype):
    codec = codec_of(bucket, settings_, dtype)
    item = torch.empty((), dtype=dtype).element_size()
    least = item * (1 + max(codec.blocks)) + bucket.chunk // 8
    assert least <= codec.message_bytes < least + item
    assert codec.message_bytes % item == 0


def test_the_bytes_of_a_message_are_the_format_that_is_written_down():
    codec = codec_of(whole([(5,), (2,)]), OneBit())
    messages = codec.encode(torch.tensor([2.0, -2, 2, 2, -2, -0.5, 0.5, 0]))
    assert codec.header(messages).tolist() == [0]
    codec.header(messages)[:] = 7
    words = messages[0, :12].view(torch.float32).tolist()
    assert words == [7, 2, 0.5]
    assert messages[0, 12:].tolist() == [0b10110011, 0, 0, 0]


@LAWS
@given(BUCKETS, CODECS, st.integers(0, 1000))
def test_padding_decodes_to_zero_whatever_bits_arrive_for_it(bucket, settings_, seed):
    codec = codec_of(bucket, settings_)
    padding = owner(bucket).lt(0)
    clean = codec.encode(random(bucket, seed))
    dirty = clean.clone()
    head = 4 * (1 + max(codec.blocks))
    bits = unpack_bits(dirty[:, head : head + bucket.chunk // 8]).flatten()
    flipped = (bits ^ padding).view(bucket.workers, -1)
    dirty[:, head : head + bucket.chunk // 8] = pack_bits(flipped)
    assert int(codec.decode(clean)[padding].ne(0).sum()) == 0
    assert torch.equal(codec.decode(dirty), codec.decode(clean))


@LAWS
@given(BUCKETS, CODECS, st.integers(0, 1000), st.sampled_from([0.5, 1.0, 1.25]))
def test_a_scale_is_the_rms_or_mean_of_its_block_times_the_multiplier(bucket, base, seed, multiplier):
    settings_ = OneBit(base.scale, base.block_elements, base.kind, multiplier)
    codec = codec_of(bucket, settings_, torch.float64)
    x = random(bucket, seed, torch.float64)
    ids = block_ids(codec)
    messages = codec.encode(x)
    got = torch.cat([codec.scales(message, chunk) for chunk, message in enumerate(messages)])
    for number, scale in enumerate(got.tolist(), start=1):
        mine = x[owner(bucket).ge(0)] if settings_.scale == "bucket" else x[ids == number]
        rms, mean = sqrt(sum(v * v for v in mine.tolist()) / len(mine)), float(mine.abs().sum()) / len(mine)
        assert scale == pytest.approx(multiplier * (rms if settings_.kind == "rms" else mean), rel=1e-12)
    assert torch.equal(codec.decode(messages).sign()[owner(bucket).ge(0)], x.sign()[owner(bucket).ge(0)])


def test_the_server_side_of_a_shared_scale_has_one_scale_per_chunk():
    bucket = whole([(16,), (11,)], workers=2)
    codec = codec_of(bucket, OneBit("bucket"))
    x = torch.cat([torch.full((16,), 3.0), torch.full((11,), 5.0), torch.zeros(5)])
    shared = sqrt((16 * 9 + 11 * 25) / 27)
    assert [codec.scales(m, j).item() for j, m in enumerate(codec.encode(x))] == [pytest.approx(shared)] * 2
    rows = x.view(2, 16)
    assert [codec.scales(codec.encode_chunk(rows[j], j), j).item() for j in (0, 1)] == [3, 5]


# --- values at the edge -------------------------------------------------------------------------------------------

EDGE_CODECS = [
    OneBit(scale, 8 if scale == "block" else None, kind)
    for scale in ("layer", "block", "bucket")
    for kind in ("rms", "mean")
]


@pytest.mark.parametrize("settings_", EDGE_CODECS, ids=str)
@pytest.mark.parametrize("exponent", [-149, -140, -126, -60, 0, 60, 120])
def test_one_power_of_two_magnitude_is_returned_exactly_even_denormal(settings_, exponent):
    bucket = whole([(13,), (0,), ()], workers=3)
    signs = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1, 1, -1, -1, 1, 1, -1])
    x = torch.zeros(bucket.numel)
    x[:14] = signs * torch.tensor(2.0**exponent, dtype=torch.float64).float()
    codec = codec_of(bucket, settings_)
    assert torch.equal(codec.decode(codec.encode(x)), x)


@pytest.mark.parametrize("settings_", EDGE_CODECS, ids=str)
def test_huge_values_and_all_zeros_have_finite_scales(settings_):
    bucket = whole([(20,)], workers=2)
    codec = codec_of(bucket, settings_)
    x = torch.zeros(bucket.numel)
    assert int(codec.decode(codec.encode(x)).ne(0).sum()) == 0
    x[:20] = 1e20
    decoded = codec.decode(codec.encode(x))
    torch.testing.assert_close(decoded, x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("settings_", EDGE_CODECS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_element_makes_the_scale_of_its_block_and_of_no_other_block_non_finite(settings_, bad):
    bucket = whole([(5,), (21,), (2,)], workers=2)
    codec = codec_of(bucket, settings_)
    ids = block_ids(codec)
    for at in range(28):
        x = random(bucket, at)
        x[at] = bad
        messages = codec.encode(x)
        scales = torch.cat([codec.scales(message, chunk) for chunk, message in enumerate(messages)])
        poisoned = [not ok for ok in torch.isfinite(scales).tolist()]
        if settings_.scale == "bucket":
            assert all(poisoned)
        else:
            assert [i for i, yes in enumerate(poisoned, start=1) if yes] == [int(ids[at])]


# --- dead elements ------------------------------------------------------------------------------------------------


@LAWS
@given(BUCKETS, CODECS, st.integers(0, 1000), st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_dead_elements_decode_to_zero_and_take_no_part_in_a_scale(bucket, settings_, seed, share):
    codec = codec_of(bucket, settings_, torch.float64)
    ids, real = block_ids(codec), owner(bucket).ge(0)
    generator = torch.Generator().manual_seed(seed)
    alive = torch.rand(bucket.numel, generator=generator).lt(share) | ~real
    codec.set_alive(alive)
    x = random(bucket, seed, torch.float64)
    messages = codec.encode(x)  # the dead elements of x are not zero, and yet count for nothing
    assert torch.equal(codec.encode(x * alive), messages)
    for chunk, (row, live_row) in enumerate(
        zip(*[part.view(bucket.workers, -1) for part in (x, x * alive)], strict=True)
    ):
        assert torch.equal(codec.encode_chunk(row, chunk), codec.encode_chunk(live_row, chunk))
    decoded = codec.decode(messages)
    assert int(decoded[~alive].ne(0).sum()) == 0
    got = torch.cat([codec.scales(message, chunk) for chunk, message in enumerate(messages)])
    for number, scale in enumerate(got.tolist(), start=1):
        block = torch.ones_like(real) if settings_.scale == "bucket" else ids == number
        live = x[block & alive & real]
        size = max(1, len(live))
        value = live.abs().sum() / size if settings_.kind == "mean" else (live.square().sum() / size).sqrt()
        assert scale == pytest.approx(float(value), rel=1e-12)


def test_a_block_without_a_live_element_has_scale_zero_and_its_neighbour_is_untouched():
    bucket = whole([(5,), (3,)])
    codec = codec_of(bucket, OneBit())
    alive = torch.tensor([False] * 5 + [True] * 3)
    codec.set_alive(alive)
    messages = codec.encode(torch.tensor([9.0, 9, 9, 9, 9, 2, -2, 2]))
    assert codec.scales(messages[0], 0).tolist() == [0, 2]
    assert codec.decode(messages).tolist() == [0, 0, 0, 0, 0, 2, -2, 2]


@pytest.mark.parametrize("settings_", EDGE_CODECS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("all_dead", [False, True])
def test_a_bad_dead_element_still_makes_a_scale_non_finite(settings_, bad, all_dead):
    codec = codec_of(whole([(16,)]), settings_)
    alive = torch.full((16,), not all_dead)
    alive[3] = False
    codec.set_alive(alive)
    x = torch.ones(16)
    x[3] = bad
    messages = codec.encode(x)
    assert not bool(torch.isfinite(codec.scales(messages[0], 0)).all())
    reply = codec.encode_chunk(x, 0)
    assert not bool(torch.isfinite(codec.scales(reply, 0)).all())


def test_setting_the_mask_again_or_to_none_replaces_the_live_counts():
    bucket = whole([(8,)], workers=1)
    fresh, codec = codec_of(bucket, OneBit()), codec_of(bucket, OneBit())
    x = random(bucket, 3)
    first, second = torch.arange(8) < 3, torch.arange(8) >= 2
    codec.set_alive(first)
    codec.set_alive(second)
    only_second = codec_of(bucket, OneBit())
    only_second.set_alive(second)
    assert torch.equal(codec.encode(x), only_second.encode(x))
    assert not torch.equal(codec.encode(x), fresh.encode(x))
    codec.set_alive(None)
    assert torch.equal(codec.encode(x), fresh.encode(x))


# --- how much is kept: PAPER.md 1.6 -------------------------------------------------------------------------------


def relative_error(shapes: list[tuple[int, ...]], x: Tensor, settings_: OneBit) -> float:
    codec = codec_of(whole(shapes), settings_, x.dtype)
    assert codec.bucket.numel == x.numel()
    error = x - codec.decode(codec.encode(x))
    return float(error.square().sum() / x.square().sum())


@LAWS
@given(st.integers(0, 10_000), st.integers(1, 20), KINDS)
def test_the_relative_error_is_the_closed_form_of_its_kind(seed, octets, kind):
    count = 8 * octets
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator, dtype=torch.float64) ** 3
    l1, l2 = float(x.abs().sum()), float(x.square().sum().sqrt())
    expected = 2 * (1 - l1 / (sqrt(count) * l2)) if kind == "rms" else 1 - l1**2 / (count * l2**2)
    assert relative_error([(count,)], x, OneBit(kind=kind)) == pytest.approx(expected, rel=1e-9)


def million(name: str) -> Tensor:
    count = 1_000_000
    generator = torch.Generator().manual_seed(20260901)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    if name == "gaussian":
        return normal
    if name == "laplace":
        return normal.sign() * torch.empty(count, dtype=torch.float64).exponential_(generator=generator)
    if name == "student t3":
        squares = torch.randn(3, count, generator=generator, dtype=torch.float64).square().sum(0)
        return normal / (squares / 3).sqrt()
    factor = {"halves 10x": (count // 2, 10.0), "1 % 1000x": (count // 100, 1000.0)}[name]
    normal[: factor[0]] *= factor[1]
    return normal


@pytest.mark.parametrize(
    ("name", "rms", "mean", "tolerance"),
    [
        ("gaussian", 0.404, 0.363, 0.003),
        ("laplace", 0.586, 0.500, 0.003),
        ("student t3", 0.736, 0.601, 0.03),  # no fourth moment: the sample's own rms wanders
        ("halves 10x", 0.765, 0.619, 0.003),
        ("1 % 1000x", 1.83, 0.992, 0.01),
    ],
)
def test_the_relative_error_of_a_million_samples_is_the_one_on_record(name, rms, mean, tolerance):
    x = million(name)
    assert relative_error([(1_000_000,)], x, OneBit("bucket", kind="rms")) == pytest.approx(rms, abs=tolerance)
    assert relative_error([(1_000_000,)], x, OneBit("bucket", kind="mean")) == pytest.approx(mean, abs=tolerance)


def test_fusing_layers_1000x_apart_is_no_contraction_unless_each_has_its_own_scale():
    x = million("1 % 1000x")
    shapes = [(10_000,), (990_000,)]
    assert relative_error(shapes, x, OneBit("bucket")) > 1
    assert relative_error(shapes, x, OneBit("layer")) == pytest.approx(0.404, abs=0.01)
    small = x[10_000:]
    codec = codec_of(whole(shapes), OneBit("bucket"), x.dtype)
    lost = small - codec.decode(codec.encode(x))[10_000:]
    assert float(lost.square().sum() / small.square().sum()) > 1000  # the small layer is drowned
