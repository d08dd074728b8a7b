"""Layers that are cut into shards over other processes (FSDP2, tensor parallel): what must be known of the whole layer.

Each process works on its shard, and exchanges it with the processes that hold the same shard in other replicas. Norms,
maxima and means of layers are put together over the processes that hold the other shards, in one small message. The
scales of 1-bit messages are not: they are those of the shard (DEV-21).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from onebit.comm import Comm, Distributed
from onebit.errors import ConfigError


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a DTensor; another tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, on one process or more. Asked without importing them, which takes long."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def lay_as_parameters(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Let each gradient lie where its parameter does. In tensor parallel layers it may be a sum nobody has taken yet.

    A collective of the processes that share a layer, where one is laid anew.

    Raises:
        ConfigError: a gradient lies on another mesh.
    """
    for p, name in zip(params, names, strict=True):
        g: Any = p.grad
        if g is None or not (is_sharded(p) and is_sharded(g)):
            continue
        if g.device_mesh != p.device_mesh:  # type: ignore[attr-defined]
            raise ConfigError(f"the gradient of {name} lies on {g.device_mesh}, it on {p.device_mesh}")  # type: ignore[attr-defined]
        if g.placements != p.placements:  # type: ignore[attr-defined]
            p.grad = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]


def even_sizes(params: Sequence[Tensor]) -> list[int]:
    """Elements of the largest shard of each, were they cut evenly: the same on all processes that hold shards."""
    return [-(-p.numel() // _parts(p)) if is_sharded(p) else p.numel() for p in params]


def places(params: Sequence[Tensor]) -> list[tuple[int, str]]:
    """The number of each DTensor and which shard of it this is, in words."""
    return [
        (i, f"{p.device_mesh.get_coordinate()} of {tuple(p.device_mesh.shape)}, {p.placements}")  # type: ignore[attr-defined]
        for i, p in enumerate(params)
        if is_sharded(p)
    ]


class Shards:
    """The processes that hold the shards of this worker's layers.

    Attributes:
        comm: these processes.
    """

    def __init__(self, comm: Comm, copies: Sequence[int], device: torch.device) -> None:
        """copies: of each layer, on how many of these processes each element lies."""
        self.comm = comm
        self._share = 1 / torch.tensor(copies, dtype=torch.float64, device=device)

    def sum(self, values: Tensor, layers: slice = slice(None)) -> Tensor:
        """Per-layer sums over the whole layers, from those over the shards: float64 [..., layers]. A collective."""
        values = values.double() * self._share[layers]
        self.comm.all_reduce(values)
        return values

    def any(self, flags: Tensor) -> Tensor:
        """Logical or of flags over the shards: bool, in the shape of `flags`. A collective."""
        counts = flags.float()
        self.comm.all_reduce(counts)
        return counts > 0

    def sums_and_largest(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """As `sum`, and maxima over the whole layers, in one message: float64 [k, layers], [layers]. A collective."""
        mine = torch.cat([sums.double() * self._share, largest.double().unsqueeze(0)])
        gathered = self.comm.all_gather(mine.flatten().view(torch.uint8)).wait()
        every = gathered.flatten().view(torch.float64).view(self.comm.size, *mine.shape)
        return every[:, :-1].sum(0), every[:, -1].amax(0)


def find_shards(params: Sequence[Tensor], names: Sequence[str], comm: Comm) -> Shards | None:
    """The processes that share the layers; None where no parameter is a DTensor.

    Parameters that are no DTensors count as held in whole by each of them.

    Raises:
        ConfigError: two device meshes, a mesh of more than one dimension, partial values, or `comm` joins processes
            that hold different shards.
    """
    meshes = {p.device_mesh: name for name, p in zip(names, params, strict=True) if is_sharded(p)}  # type: ignore[attr-defined]
    if not meshes:
        return None
    mesh: Any = next(iter(meshes))
    if len(meshes) > 1 or mesh.ndim != 1:
        described = ", ".join(f"{name}: {mesh}" for mesh, name in meshes.items())
        raise ConfigError(
            f"the parameters lie on {described}; they must share one mesh of one dimension: give fully_shard or "
            'parallelize_module a dimension of the mesh, mesh["shard"], and the optimizer the other one, '
            'process_group=mesh["replicate"].get_group()'
        )
    shards = Distributed(mesh.get_group())
    others = set(shards.ranks) & set(getattr(comm, "ranks", []))
    if len(others) > 1:
        raise ConfigError(
            f"processes {sorted(others)} hold different shards of the layers, and the optimizer would average them; "
            'pass the other dimension of the mesh, process_group=mesh["replicate"].get_group()'
        )
    copies = [_copies(p, name) if is_sharded(p) else shards.size for p, name in zip(params, names, strict=True)]
    return Shards(shards, copies, local(params[0]).device)


def _parts(p: Tensor) -> int:
    """Into how many shards a DTensor is cut."""
    placements, mesh = p.placements, p.device_mesh  # type: ignore[attr-defined]
    return prod(mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_shard())


def _copies(p: Tensor, name: str) -> int:
    placements, mesh = p.placements, p.device_mesh  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise ConfigError(f"{name} is placed as {placements}; parameters must be sharded or replicated")
    return prod(mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_replicate())
