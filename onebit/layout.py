"""FlatLayout: layers -> buckets -> chunks, and per-layer reductions on flat buffers.

Words (one meaning each):
  layer   one parameter tensor; layer i holds `numel` elements from `start` on in the flat order
  bucket  a contiguous run of whole layers, padded at its end to a multiple of 8 * workers elements
  chunk   the n-th part of a bucket that one worker serves; a multiple of 8 elements
  run     the layers of one parameter group inside one bucket: what one call of an algorithm works on

The flat order is the order of the parameters. Padding is at most 8 * workers - 1 elements per bucket, holds
zero and belongs to no layer. Everything here is plain integers and torch; nothing knows of other processes.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from onebit.errors import LayoutError


@dataclass(frozen=True)
class Layer:
    """One parameter tensor in the flat order. `start` is its first element in the flat buffer."""

    index: int
    shape: tuple[int, ...]
    start: int
    group: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """Whole layers exchanged as one message. Elements [start, stop) of the flat buffer, padding included."""

    index: int
    start: int
    stop: int
    layers: tuple[Layer, ...]
    workers: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def layer_slice(self) -> builtins.slice:
        """Where the layers of this bucket lie in a list or tensor of one value per layer."""
        return slice(self.layers[0].index, self.layers[-1].index + 1)

    @property
    def packed_slice(self) -> builtins.slice:
        """Where this bucket lies in a flat buffer of one bit per element."""
        return slice(self.start // 8, self.stop // 8)

    @property
    def chunk(self) -> int:
        """Elements that one worker serves."""
        return self.numel // self.workers

    @property
    def slice(self) -> builtins.slice:
        return slice(self.start, self.stop)

    @property
    def served_slice(self) -> builtins.slice:
        """Where the chunk that a worker serves lies in what it serves of all buckets."""
        return slice(self.start // self.workers, self.stop // self.workers)

    def pieces(self, chunk: int) -> list[tuple[int, int]]:
        """The parts of layers in a chunk as (start, stop) in the chunk, in order, none empty."""
        first, last = self.start + chunk * self.chunk, self.start + (chunk + 1) * self.chunk
        cuts = [(max(layer.start, first) - first, min(layer.stop, last) - first) for layer in self.layers]
        return [(start, stop) for start, stop in cuts if stop > start]


Combine = Callable[[Tensor, builtins.slice], Tensor]
"""Sums over the shards of layers, float64 [layers], and which layers they are -> sums over the whole layers."""


class Run:
    """The layers of one group inside one bucket, and the per-layer arithmetic on a flat stretch of them.

    Flat arguments are one-dimensional with `numel` elements; per-layer values have shape [layers].
    Reductions accumulate in float64: float32 loses 1 % on 16 M equal values (docs/log.md, 2026-11-29).
    """

    def __init__(self, layers: Sequence[Layer], combine: Combine | None = None) -> None:
        """`combine` makes sums over shards of layers into sums over the layers; norms, means, sizes are theirs then."""
        self.layers = tuple(layers)
        self._combine = combine
        self._sizes: Tensor | None = None
        self.start = self.layers[0].start
        self.stop = self.layers[-1].stop
        self.group = self.layers[0].group
        self.first = self.layers[0].index
        self._lengths = [layer.numel for layer in self.layers]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> builtins.slice:
        """Where this run lies in the flat buffer."""
        return slice(self.start, self.stop)

    @property
    def layer_slice(self) -> builtins.slice:
        """Where this run lies in a tensor of one value per layer."""
        return slice(self.first, self.first + len(self.layers))

    def layers_in(self, bucket: Bucket) -> builtins.slice:
        """Where its layers are among those of its bucket."""
        first = self.first - bucket.layers[0].index
        return slice(first, first + len(self.layers))

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view per layer, in the layer's shape, of a flat stretch of this run."""
        return [flat[a.start - self.start : a.stop - self.start].view(a.shape) for a in self.layers]

    def norms(self, tensors: Tensor | Sequence[Tensor]) -> Tensor:
        """The 2-norm of each layer, [layers], float64. Takes a flat stretch or one tensor per layer."""
        parts = self.views(tensors) if isinstance(tensors, Tensor) else tensors
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
        return norms if self._combine is None else self._combine(norms.square(), self.layer_slice).sqrt()

    def sizes(self, device: torch.device) -> Tensor:
        """Elements of each layer, float64 [layers]; asked of the other shards once."""
        if self._sizes is None:
            sizes = torch.tensor(self._lengths, dtype=torch.float64, device=device)
            self._sizes = sizes if self._combine is None else self._combine(sizes, self.layer_slice)
        return self._sizes

    def maxima(self, flat: Tensor) -> Tensor:
        """The largest element of each layer, [layers], in the dtype of `flat`; an empty layer gives 0."""
        zero = flat.new_zeros(())
        return torch.stack([part.max() if part.numel() else zero for part in self.views(flat)])

    def means(self, flat: Tensor) -> Tensor:
        """The mean of each layer, [layers], float64; an empty layer gives 0."""
        zero = flat.new_zeros((), dtype=torch.float64)
        parts = self.views(flat)
        if self._combine is None:
            return torch.stack([part.mean(dtype=torch.float64) if part.numel() else zero for part in parts])
        sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
        return self._combine(sums, self.layer_slice) / self.sizes(flat.device).clamp(min=1)

    def subtract(self, parameters: Sequence[Tensor], flat: Tensor) -> None:
        """Take each layer's part of a flat stretch away from its parameter, in place."""
        torch._foreach_sub_(list(parameters), self.views(flat))

    def add_scaled(self, flat: Tensor, parameters: Sequence[Tensor], factor: float) -> None:
        """Add `factor` times each parameter to its part of a flat stretch, in place."""
        torch._foreach_add_(self.views(flat), list(parameters), alpha=factor)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat each layer's value over its elements: [layers] -> [numel]."""
        return spread(values, self._lengths)


class FlatLayout:
    """Where every element of a list of parameters lies in the flat order.

    Args:
        shapes: one shape per parameter, in order; scalars and empty parameters are fine.
        workers: n >= 1; the padding of a bucket makes it divisible by 8 n.
        groups: the parameter group of each parameter, non-decreasing; all 0 when left out.
        combine: as in `Run`.
        sizes: elements of each parameter as they count for `bucket_elements`; None: those it has. All that hold shards
            of the same layers give the same ones, so that they have the same buckets.
        bucket_elements: close a bucket before a layer would take it past this many elements; None: one bucket.
            A larger layer is a bucket of its own.

    Raises:
        LayoutError: no elements at all, workers < 1, bucket_elements < 1, or groups out of order.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        workers: int,
        groups: Sequence[int] | None = None,
        bucket_elements: int | None = None,
        sizes: Sequence[int] | None = None,
        combine: Combine | None = None,
    ) -> None:
        sizes = [prod(shape) for shape in shapes] if sizes is None else list(sizes)
        groups = [0] * len(shapes) if groups is None else list(groups)
        if workers < 1:
            raise LayoutError(f"workers is {workers}; a layout needs at least 1")
        if bucket_elements is not None and bucket_elements < 1:
            raise LayoutError(f"bucket_elements is {bucket_elements}; it must be at least 1, or None for one bucket")
        if len(groups) != len(shapes) or any(a > b for a, b in pairwise(groups)):
            raise LayoutError(f"groups {groups} must give one non-decreasing number for each of {len(shapes)} shapes")
        if sum(sizes) == 0:
            raise LayoutError("the parameters hold 0 elements together; pass at least one parameter that is not empty")
        self.workers = workers
        self.buckets = _fill_buckets(shapes, groups, workers, bucket_elements, sizes)
        self.layers = tuple(layer for bucket in self.buckets for layer in bucket.layers)
        self.runs = tuple(
            Run([layer for layer in bucket.layers if layer.group == group], combine)
            for bucket in self.buckets
            for group in sorted({layer.group for layer in bucket.layers})
        )
        self.numel = self.buckets[-1].stop

    def runs_in(self, bucket: Bucket) -> list[tuple[Run, slice]]:
        """The runs of a bucket, each with where it lies in a flat stretch of the bucket."""
        return [
            (run, slice(run.start - bucket.start, run.stop - bucket.start))
            for run in self.runs
            if bucket.start <= run.start < bucket.stop
        ]

    def zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of zeros, padding included."""
        return torch.zeros(self.numel, dtype=dtype, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view per layer of a flat buffer, in the layer's shape."""
        return [flat[layer.start : layer.stop].view(layer.shape) for layer in self.layers]

    def gather(self, tensors: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Copy one tensor per layer into a new flat buffer; None counts as zeros."""
        flat = self.zeros(dtype, device)
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return flat


def _fill_buckets(
    shapes: Sequence[Sequence[int]], groups: Sequence[int], workers: int, limit: int | None, sizes: Sequence[int]
) -> tuple[Bucket, ...]:
    """Cut the layers into buckets, in order, each padded to a multiple of 8 * workers, at least one."""
    buckets: list[Bucket] = []
    layers: list[Layer] = []
    start = position = filled = 0

    def close() -> int:
        unit = 8 * workers
        stop = start + max(1, -(-(position - start) // unit)) * unit
        buckets.append(Bucket(len(buckets), start, stop, tuple(layers), workers))
        layers.clear()
        return stop

    for index, (shape, group, size) in enumerate(zip(shapes, groups, sizes, strict=True)):
        if limit is not None and size and filled and filled + size > limit:
            start = position = close()
            filled = 0
        layers.append(Layer(index, tuple(shape), position, group))
        position += prod(shape)
        filled += size
    close()
    return tuple(buckets)


def spread(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeat values[i] lengths[i] times: [k] -> [sum of lengths]."""
    out = values.new_empty(sum(lengths))
    for part, value in zip(torch.split(out, list(lengths)), values.unbind(), strict=True):
        part.fill_(value)
    return out
