"""What the Triton kernels work on, checked, and how they are launched.

Every check raises LayoutError and names the operand, what it is and what it must be. Tables that seldom change
(addresses, settings) are sent to the device again only when they did.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from onebit.errors import LayoutError
from onebit.kernels import triton_jit as jit
from onebit.kernels.compact import ERROR_GROUP, Int8
from onebit.kernels.plan import Blocks, cut_pieces
from onebit.layout import Bucket

TILE = 2048
SUM_WIDTH = 1024
LIST_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_INTERPRETER = threading.Lock()  # it keeps its state in globals

launched: Callable[[str], None] = lambda name: None  # noqa: E731
"""Called with the name of every kernel that is launched; for tests and benchmarks."""


def version() -> str:
    return str(triton.__version__)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Every launch goes through here. `args` are tensors, numbers and None; `constants` are compiled in."""
    launched(kernel.__name__)
    here = contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)
    with _INTERPRETER if INTERPRETED else contextlib.nullcontext(), here:
        kernel[grid](*args, **constants, enable_fp_fusion=False)


class Table:
    """A small table on the device, sent only when its values are others than last time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0)
        self._there = torch.empty(0)

    def of(self, values: Tensor) -> Tensor:
        """`values`, on the CPU, as a tensor on the device."""
        if values.dtype != self._host.dtype or not torch.equal(values, self._host):
            self._host = values
            pinned = values.pin_memory() if self._device.type == "cuda" else values
            self._there = pinned.to(self._device, non_blocking=True)
        return self._there


class Plan:
    """A bucket as the kernels see it: the tables on its device.

    Args:
        bucket: of a `FlatLayout`.
        blocks: per chunk, as the codec cuts it.
        head_bytes: bytes of a message before its bits.
        message_bytes: bytes of one message, a multiple of 4.
        device: where the bucket lives.
        tile: elements that one program handles, a power of 2 and at least 128.

    Raises:
        LayoutError: as `plan.cut_pieces`.
    """

    def __init__(
        self,
        bucket: Bucket,
        blocks: Blocks,
        head_bytes: int,
        message_bytes: int,
        device: torch.device,
        tile: int = TILE,
    ) -> None:
        table = cut_pieces(bucket, blocks, tile)
        block, layer, in_layer, at, length = table.unbind(1)
        counts = [len(cuts) for cuts in blocks]
        words = [chunk * (message_bytes // 4) + 1 + i for chunk, count in enumerate(counts) for i in range(count)]
        self.bucket, self.device, self.tile = bucket, device, tile
        self.sizes = [a.numel for a in bucket.layers]
        self.places = torch.tensor(words, dtype=torch.int64, device=device)  # of every scale in the messages' words
        self.count = len(table)
        self.per_chunk = -(-bucket.chunk // tile)
        rows = [layer, in_layer, at, length, self.places.to("cpu")[block]]
        self.pieces = torch.stack(rows, dim=1).contiguous().to(device)
        tiles = torch.arange(bucket.workers * self.per_chunk)
        starts = (tiles // self.per_chunk) * bucket.chunk + tiles % self.per_chunk * tile
        self.tiles = _edges(at, torch.cat([starts, torch.tensor([bucket.numel])])).to(device)
        self.block_edges = _edges(block, torch.arange(sum(counts) + 1)).to(device)
        self.layer_edges = _edges(layer, torch.arange(len(self.sizes) + 1)).to(device)
        self.chunk_blocks = [sum(counts[:chunk]) for chunk in range(len(counts) + 1)]
        self.ones = torch.ones(len(self.sizes), device=device)
        self._shape = (bucket.chunk, self.per_chunk)
        self._message = (message_bytes, head_bytes)
        self._tables: dict[str, Table] = {}

    def send(self, name: str, values: Tensor) -> Tensor:
        """A small table of the CPU on the device; one per name is kept."""
        return self._tables.setdefault(name, Table(self.device)).of(values)

    def flat(self, name: str, tensor: Tensor) -> Tensor:
        """One float32 value per element of the bucket."""
        return self.checked(name, tensor, (self.bucket.numel,), torch.float32)

    def variance(self, name: str, tensor: Tensor) -> Tensor:
        """One float32 or bfloat16 value per element; the latter as int16, since the kernels widen and round them."""
        if tensor.dtype is not torch.bfloat16:
            return self.flat(name, tensor)
        return self.checked(name, tensor, (self.bucket.numel,), torch.bfloat16).view(torch.int16)

    def error(self, name: str, error: Tensor | Int8) -> tuple[Tensor, Tensor | None]:
        """A worker error's values, and its scales or None."""
        if isinstance(error, Tensor):
            return self.flat(name, error), None
        shape = (self.bucket.workers, -(-self.bucket.chunk // ERROR_GROUP))
        data = self.checked(f"{name}.data", error.data, (self.bucket.numel,), torch.int8)
        return data, self.checked(f"{name}.scales", error.scales, shape, torch.float32)

    def verdict(self, keep: Tensor | None) -> Tensor | None:
        """Whether a step counts, bool []; None: it does."""
        return None if keep is None else self.checked("keep", keep, (), torch.bool).view(torch.uint8)

    def mask(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """One bit per element of the bucket; None for none."""
        return None if tensor is None else self.checked(name, tensor, (self.bucket.numel // 8,), torch.uint8)

    def per_layer(self, name: str, tensor: Tensor | None) -> Tensor:
        """One float32 value per layer; None stands for 1."""
        return self.ones if tensor is None else self.checked(name, tensor, (len(self.sizes),), torch.float32)

    def messages(self, name: str, tensor: Tensor, rows: int | None = None) -> Tensor:
        """uint8 [rows, message_bytes], one message per chunk."""
        shape = (self.bucket.workers if rows is None else rows, self._message[0])
        return self.checked(name, tensor, shape, torch.uint8)

    def checked(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor, if it is of this shape and dtype, contiguous and on the plan's device."""
        if tuple(tensor.shape) != shape or tensor.dtype is not dtype:
            raise LayoutError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {list(shape)}")
        if tensor.device != self.device:
            raise LayoutError(f"{name} is on {tensor.device}; the kernels work on {self.device}, where the bucket is")
        if not tensor.is_contiguous():
            raise LayoutError(f"{name} has strides {tensor.stride()}; it must be contiguous: call .contiguous()")
        return tensor

    def over_tiles(
        self, kernel: Any, *args: Any, messages: bool = False, counted: bool = False, **constants: Any
    ) -> None:
        """One program per tile of the bucket."""
        tables = [self.pieces, self.tiles, *([self.count] if counted else []), *self._shape]
        tables += self._message if messages else []
        grid = (self.bucket.workers * self.per_chunk,)
        launch(kernel, grid, self.device, *args, *tables, TILE=self.tile, **constants)

    def over_chunk(self, kernel: Any, chunk: int, *args: Any, **constants: Any) -> None:
        """One program per tile of a chunk."""
        tables = (self.pieces, self.tiles, *self._shape, *self._message)
        launch(kernel, (self.per_chunk,), self.device, *args, chunk, *tables, TILE=self.tile, **constants)

    def summed(self, rows: Tensor, edges: Tensor) -> Tensor:
        """float64 [rows, pieces] -> [rows, segments], segment s from piece edges[s] to edges[s + 1]."""
        out = torch.empty(len(rows), len(edges) - 1, dtype=torch.float64, device=self.device)
        if out.numel():
            grid = (len(edges) - 1, len(rows))
            launch(jit.sum_segments, grid, self.device, rows, edges, out, self.count, WIDTH=SUM_WIDTH)
        return out

    def largest(self, values: Tensor, edges: Tensor) -> Tensor:
        """The same for the largest, int32 [1, pieces] -> [segments]; 0 where there is no piece."""
        out = torch.empty(len(edges) - 1, dtype=torch.int32, device=self.device)
        launch(jit.max_segments, (len(out),), self.device, values, edges, out, WIDTH=SUM_WIDTH)
        return out

    def per_piece(self, rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(rows, self.count, dtype=dtype, device=self.device)

    def per_tile(self) -> Tensor:
        return torch.empty(self.bucket.workers * self.per_chunk, dtype=torch.int32, device=self.device)


def _edges(sorted_values: Tensor, bounds: Tensor) -> Tensor:
    """For each bound the index of the first value that is not below it."""
    return torch.searchsorted(sorted_values.contiguous(), bounds)


class TensorList:
    """One tensor per layer of a plan, as the kernels see it.

    Args:
        name: what error messages call it.
        tensors: float32, bfloat16 or float16 each, contiguous; None counts as zeros.

    Raises:
        LayoutError: not one tensor per layer, or one of another size, dtype, device or stride.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor | None], plan: Plan) -> None:
        if len(tensors) != len(plan.sizes):
            raise LayoutError(f"{name} holds {len(tensors)} tensors for {len(plan.sizes)} layers; give one per layer")
        self.tensors = tensors  # alive as long as their addresses are in use
        addresses, types = [], []
        for i, (tensor, size) in enumerate(zip(tensors, plan.sizes, strict=True)):
            if tensor is None:
                addresses.append(0)
                types.append(0)
                continue
            if tensor.dtype not in LIST_TYPES:
                allowed = ", ".join(map(str, LIST_TYPES))
                raise LayoutError(f"{name}[{i}] is {tensor.dtype}; allowed are {allowed}")
            shape = tuple(tensor.shape) if tensor.numel() == size else (size,)
            addresses.append(plan.checked(f"{name}[{i}]", tensor, shape, tensor.dtype).data_ptr())
            types.append(LIST_TYPES[tensor.dtype])
        self.table = plan.send(name, torch.tensor([addresses, types], dtype=torch.int64))
        self.count = len(tensors)

    def touch(self) -> None:
        """Tell autograd that the tensors were changed in place."""
        torch.autograd.graph.increment_version([t for t in self.tensors if t is not None and not t.is_inference()])


def constants_of(plan: Plan, hyper: Tensor) -> Tensor:
    """What the kernels call `hyper`, from float64 [layers, 5] on the CPU: lr, beta1, beta2, eps, weight_decay."""
    _, beta1, beta2, eps, decay = hyper.unbind(1)
    return plan.send("hyper", torch.stack([beta1, 1 - beta1, beta2, 1 - beta2, eps, decay], dim=1).float())


class Signs:
    """A momentum as messages, uint8 [workers, message_bytes], and a mask of what is not zero."""

    def __init__(self, name: str, messages: Tensor, mask: Tensor | None, plan: Plan) -> None:
        self.messages = plan.messages(name, messages)
        self.mask = plan.mask(f"{name}.mask", mask)
