"""What the native kernels work on, checked: a wrong address would not raise but crash or corrupt.

Every check raises LayoutError and names the operand, what it is and what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebit.errors import ConfigError, LayoutError
from onebit.kernels import _native
from onebit.kernels.compact import ERROR_GROUP, Int8
from onebit.kernels.plan import TILE, Blocks, cut_pieces
from onebit.layout import Bucket

LIST_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
FLOATS = (torch.float32, torch.bfloat16)
ERRORS = (*FLOATS, torch.int8)
_FLAT_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}


_NO_SIGNS = _native.Signs(0, 0, 0, 0)
_NO_LIST = _native.List([], [])

if _native.ERROR_GROUP != ERROR_GROUP:
    raise ImportError(f"the native kernels were built for int8 groups of {_native.ERROR_GROUP}; install onebit again")


def checked(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> int:
    """The address of a dense CPU tensor of this shape and one of these dtypes."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise LayoutError(f"{name} is {tensor.layout} on {tensor.device}; the native kernels take dense CPU tensors")
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise LayoutError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {allowed} {list(shape)}")
    if not tensor.is_contiguous():
        raise LayoutError(f"{name} has strides {tensor.stride()}; it must be contiguous: call .contiguous()")
    return tensor.data_ptr()


class Plan:
    """A bucket as the kernels see it.

    Attributes:
        bucket: what it was built from.
        blocks: number of blocks of each chunk.
        sizes: number of elements of each layer.

    Raises:
        LayoutError: as `plan.cut_pieces`.
    """

    def __init__(self, bucket: Bucket, blocks: Blocks, tile: int = TILE) -> None:
        table = cut_pieces(bucket, blocks, tile)
        self.bucket = bucket
        self.blocks = [len(cuts) for cuts in blocks]
        self.sizes = [layer.numel for layer in bucket.layers]
        try:
            self.native = _native.Plan(table.data_ptr(), len(table), self.blocks, len(self.sizes), bucket.numel, tile)
        except ValueError as error:
            raise LayoutError(str(error)) from None

    def flat(self, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> int:
        """The address of one value per element of the bucket."""
        return checked(name, tensor, (self.bucket.numel,), dtypes)

    def per_layer(self, name: str, tensor: Tensor | None) -> int:
        """The address of one float32 value per layer; 0 for None."""
        return 0 if tensor is None else checked(name, tensor, (len(self.sizes),), (torch.float32,))

    def mask(self, name: str, tensor: Tensor | None) -> int:
        """The address of one bit per element of the bucket; 0 for None."""
        return 0 if tensor is None else checked(name, tensor, (self.bucket.numel // 8,), (torch.uint8,))

    def hyper(self, tensor: Tensor) -> int:
        return checked("hyper", tensor, (len(self.sizes), 5), (torch.float64,))


class TensorList:
    """One tensor per layer of a plan, checked once and usable in any number of calls.

    Args:
        name: what error messages call it.
        tensors: float32, bfloat16 or float16 each; None counts as zeros.
        plan: gives the sizes; None takes them as they are.

    Raises:
        LayoutError: not one tensor per layer, or one that is not dense, contiguous and on the CPU, of the layer's size.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor | None], plan: Plan | None = None) -> None:
        self.tensors = tensors
        self.sizes = [0 if t is None else t.numel() for t in tensors]
        if plan is not None and len(tensors) != len(plan.sizes):
            raise LayoutError(f"{name} holds {len(tensors)} tensors for {len(plan.sizes)} layers; give one per layer")
        addresses, types = [], []
        for i, tensor in enumerate(tensors):
            if tensor is None:
                addresses.append(0)
                types.append(0)
                continue
            shape = tuple(tensor.shape)
            if plan is not None and self.sizes[i] != plan.sizes[i]:
                shape = (plan.sizes[i],)  # the check below says so
            addresses.append(checked(f"{name}[{i}]", tensor, shape, tuple(LIST_TYPES)))
            types.append(LIST_TYPES[tensor.dtype])
        self.native = _native.List(addresses, types)

    def touch(self) -> None:
        """Tell autograd that the tensors were changed in place."""
        torch.autograd.graph.increment_version([t for t in self.tensors if t is not None and not t.is_inference()])


@dataclass(frozen=True)
class Signs:
    """A bucket as signs and scales.

    Attributes:
        bits: uint8 [workers, chunk / 8]; rows may be part of larger ones, as in a message.
        scales: float32 [blocks], of all chunks in order.
        alive: uint8 [numel / 8], a bit of 0 makes an element zero; None: all alive.
    """

    bits: Tensor
    scales: Tensor
    alive: Tensor | None = None

    def native(self, name: str, plan: Plan) -> _native.Signs:
        scales = checked(f"{name}.scales", self.scales, (sum(plan.blocks),), (torch.float32,))
        bits, stride = rows_of_bits(f"{name}.bits", self.bits, plan.bucket.workers, plan)
        return _native.Signs(bits, stride, scales, plan.mask(f"{name}.alive", self.alive))


def rows_of_bits(name: str, bits: Tensor, rows: int, plan: Plan) -> tuple[int, int]:
    """The address and stride of uint8 [rows, chunk / 8] whose rows are contiguous."""
    if bits.dim() != 2 or bits.stride(1) != 1 or (rows > 1 and bits.stride(0) < bits.shape[1]):
        raise LayoutError(f"{name} has shape {list(bits.shape)} and strides {bits.stride()}; rows must be contiguous")
    checked(f"{name}[0]", bits[0], (plan.bucket.chunk // 8,), (torch.uint8,))
    if bits.shape[0] != rows:
        raise LayoutError(f"{name} has {bits.shape[0]} rows; it must have {rows}")
    return bits.data_ptr(), bits.stride(0)


def flat_state(name: str, state: Tensor | Int8, plan: Plan, dtypes: Sequence[torch.dtype]) -> _native.Flat:
    """State with one value per element of the bucket, in one of these dtypes; int8 comes as `Int8`."""
    if isinstance(state, Tensor):
        floats = [dtype for dtype in dtypes if dtype is not torch.int8]
        return _native.Flat(plan.flat(name, state, floats), _FLAT_TYPES[state.dtype], 0)
    if torch.int8 not in dtypes:
        raise LayoutError(f"{name} is int8; it must be {' or '.join(str(dtype) for dtype in dtypes)}")
    shape = (plan.bucket.workers, -(-plan.bucket.chunk // ERROR_GROUP))
    scales = checked(f"{name}.scales", state.scales, shape, (torch.float32,))
    return _native.Flat(plan.flat(f"{name}.data", state.data, (torch.int8,)), _FLAT_TYPES[torch.int8], scales)


def thread_count(threads: int | None) -> int:
    count = torch.get_num_threads() if threads is None else threads
    if count < 1:
        raise ConfigError(f"threads is {count}; it must be at least 1, or None for torch's number")
    return count


def momentum_operand(name: str, momentum: Signs | Tensor, plan: Plan) -> tuple[_native.Signs, int]:
    if isinstance(momentum, Tensor):
        return _NO_SIGNS, plan.flat(name, momentum)
    return momentum.native(name, plan), 0


def gradient_operand(name: str, gradient: Tensor | TensorList, plan: Plan) -> tuple[int, _native.List]:
    if isinstance(gradient, Tensor):
        return plan.flat(name, gradient), _NO_LIST
    return 0, gradient.native


def checked_chunk(plan: Plan, chunk: int) -> int:
    if not 0 <= chunk < plan.bucket.workers:
        raise LayoutError(f"chunk is {chunk}; the bucket has {plan.bucket.workers} chunks")
    return chunk


def received_signs(plan: Plan, chunk: int, bits: Tensor, scales: Tensor, alive: Tensor | None) -> _native.Signs:
    if bits.dim() != 2 or not len(bits):
        raise LayoutError(f"received has shape {list(bits.shape)}; it must be [messages, {plan.bucket.chunk // 8}]")
    address, stride = rows_of_bits("received", bits, len(bits), plan)
    shape = (len(bits), plan.blocks[checked_chunk(plan, chunk)])
    return _native.Signs(address, stride, checked("scales", scales, shape, (torch.float32,)), plan.mask("alive", alive))


def all_there(name: str, tensors: TensorList) -> TensorList:
    missing = [i for i, tensor in enumerate(tensors.tensors) if tensor is None]
    if missing:
        raise LayoutError(f"{name}[{missing[0]}] is None; every layer needs a parameter to update")
    return tensors
