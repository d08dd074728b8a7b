"""Bytes of the cost model: what a worker sends and holds, by the formulas with which the library counts and allocates.

Message sizes are those of `codec`, `quantised` and `logarithms`, worked out from the layout without a codec; payload is
counted as `Comm` counts it. tests/test_planner.py holds both to what optimizers count and hold in runs.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Literal

from onebit import logarithms
from onebit.layout import Bucket, FlatLayout
from onebit.planner_inputs import Shapes
from onebit.quantised import BLOCK

WORD = 4
"""Bytes of a scale, a header and an error: state is float32."""


@lru_cache(maxsize=256)
def flat_layout(shapes: Shapes, workers: int, bucket_elements: int | None) -> FlatLayout:
    """The layout that an optimizer of these layers has."""
    return FlatLayout(shapes, workers, bucket_elements=bucket_elements)


@lru_cache(maxsize=1024)
def one_bit_messages(
    shapes: Shapes, workers: int, bucket_elements: int | None, scale: Literal["layer", "bucket"]
) -> tuple[int, ...]:
    """Bytes of a message of each bucket: header, scales, bits, fill (`codec.BucketCodec.message_bytes`)."""
    found = []
    for bucket in flat_layout(shapes, workers, bucket_elements).buckets:
        blocks = 1 if scale == "bucket" else _most_pieces(bucket)
        found.append(_whole_words(WORD * (1 + blocks) + bucket.chunk // 8, WORD))
    return tuple(found)


@lru_cache(maxsize=1024)
def integer_messages(shapes: Shapes, workers: int, bucket_elements: int | None, bits: int) -> tuple[int, ...]:
    """The same for integers of 8 or 4 bits with a 16-bit scale per 128 (`quantised.QuantisedCodec.message_bytes`)."""
    buckets = flat_layout(shapes, workers, bucket_elements).buckets
    return tuple(_whole_words(2 * _most_blocks(b) + b.chunk * bits // 8, 4) for b in buckets)


def logarithm_messages(shapes: Shapes, workers: int, bucket_elements: int | None) -> tuple[int, ...]:
    """The same for variances as 8-bit logarithms."""
    return tuple(logarithms.message_bytes(b.chunk) for b in flat_layout(shapes, workers, bucket_elements).buckets)


def padded(shapes: Shapes, workers: int, bucket_elements: int | None) -> int:
    """Elements of the flat buffer, padding included."""
    return flat_layout(shapes, workers, bucket_elements).numel


def mean_inside_bytes(workers: int, elements: int) -> int:
    """What one of the workers of a machine sends for the mean of a float32 buffer among them, of two levels."""
    return WORD * (workers - 1) * elements // workers


def low_rank_elements(shapes: Shapes, rank: int) -> tuple[int, int]:
    """What PowerSGD sends of one step: elements of the factors P and Q, and elements sent as they are.

    A layer of two or more dimensions is a matrix of shape[0] rows. It is factored where that makes it less than half
    as large, which is torch's rule (`min_compression_rate` 2); all else is sent as it is.
    """
    factors = plain = 0
    for shape in shapes:
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        # torch's rule takes the rank as asked for, and the factors have the rank that the matrix allows
        if len(shape) > 1 and size and (rows + columns) * rank * 2 < size:
            factors += (rows + columns) * min(rank, rows, columns)
        else:
            plain += size
    return factors, plain


def _whole_words(size: int, word: int) -> int:
    return -(-size // word) * word


def _inner_starts(bucket: Bucket) -> Counter[int]:
    """How many layers begin inside each chunk, and not at its first element."""
    starts = [layer.start - bucket.start for layer in bucket.layers if layer.numel]
    return Counter(start // bucket.chunk for start in starts if start % bucket.chunk)


def _most_pieces(bucket: Bucket) -> int:
    """The most parts of layers that a chunk of the bucket has: one more than layers that begin inside it."""
    if not any(layer.numel for layer in bucket.layers):
        return 0
    return 1 + max(_inner_starts(bucket).values(), default=0)


def _most_blocks(bucket: Bucket) -> int:
    """The most blocks of 128 elements that a chunk of the bucket has; a block never crosses a layer."""
    full = (bucket.layers[-1].stop - bucket.start) // bucket.chunk  # chunks before the one with padding
    broken = set(_inner_starts(bucket))
    looked_at = broken | ({full} if full < bucket.workers else set())
    most = max((_blocks_of(bucket, chunk) for chunk in looked_at), default=0)
    in_one_layer = full - sum(chunk < full for chunk in broken)
    return max(most, -(-bucket.chunk // BLOCK)) if in_one_layer else most


def _blocks_of(bucket: Bucket, chunk: int) -> int:
    return sum(-(-(stop - start) // BLOCK) for start, stop in bucket.pieces(chunk))
