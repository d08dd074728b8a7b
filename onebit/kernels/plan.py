"""How a bucket is cut for the native kernels: tiles, and pieces (block and layer and tile have them in common).

A tile is a run of elements that one thread handles at a time; its buffers stay in the first-level cache. A piece has
one scale, one layer and one tile, so a kernel's inner loops see constants only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onebit.errors import LayoutError
from onebit.layout import Bucket

TILE = 2048

Blocks = Sequence[Sequence[tuple[int, int]]]
"""Per chunk, the blocks in order, as (start in the chunk, length)."""


def cut_pieces(bucket: Bucket, blocks: Blocks, tile: int = TILE) -> Tensor:
    """The table of pieces of a bucket, in bucket order.

    Args:
        bucket: of a `FlatLayout`.
        blocks: per chunk, as the codec cuts it. Every element of a layer must lie in a block.
        tile: elements of a tile, a multiple of 128.

    Returns:
        int64 [pieces, 5]: block (counted over the bucket), layer (counted from the bucket's first), offset in the
        layer, offset in the bucket, length.

    Raises:
        LayoutError: there is not one list of blocks per chunk, or an element of a layer is in no block.
    """
    if len(blocks) != bucket.workers:
        raise LayoutError(f"{len(blocks)} lists of blocks for {bucket.workers} chunks; give one per chunk")
    spans = torch.tensor(
        [(j * bucket.chunk + start, length) for j, cuts in enumerate(blocks) for start, length in cuts],
        dtype=torch.int64,
    ).view(-1, 2)
    starts = torch.tensor([layer.start - bucket.start for layer in bucket.layers], dtype=torch.int64)
    stops = torch.tensor([layer.stop - bucket.start for layer in bucket.layers], dtype=torch.int64)
    offsets = torch.arange(0, bucket.chunk, tile)
    tiles = (torch.arange(bucket.workers)[:, None] * bucket.chunk + offsets).flatten()
    edges = torch.unique_consecutive(torch.cat([spans[:, 0], spans.sum(1), starts, stops, tiles]).sort().values)
    at, length = edges[:-1], edges[1:] - edges[:-1]
    inside = at < int(stops[-1])
    at, length = at[inside], length[inside]

    block = torch.searchsorted(spans[:, 0].contiguous(), at, right=True) - 1
    # an empty layer starts where another does: take the last that starts here, which is the one with elements
    layer = torch.searchsorted(starts, at, right=True) - 1
    if bool((block < 0).any()) or bool((at + length > spans.sum(1)[block]).any()):
        raise LayoutError("an element of a layer lies in no block; cut the blocks from the same bucket")
    return torch.stack([block, layer, at - starts[layer], at, length], dim=1).contiguous()
