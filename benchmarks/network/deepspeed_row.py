"""DeepSpeed 0.19.6's OnebitLamb on the workers of the default group: `onebit.peer` with more than one worker."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit import peer
from onebit.errors import OnebitError


class World:
    """What the peer calls of `deepspeed.comm`, over the default group.

    Attributes:
        payload_bytes: handed to the group for other workers so far.
    """

    def __init__(self) -> None:
        self.payload_bytes = 0

    def is_initialized(self) -> bool:
        return True

    def new_group(self, ranks: object) -> None:
        """The default group."""

    def get_rank(self, group: object = None) -> int:
        return int(dist.get_rank())

    def get_world_size(self, group: object = None) -> int:
        return int(dist.get_world_size())

    def all_to_all_single(self, received: Tensor, sent: Tensor, group: object = None) -> None:
        self.payload_bytes += sent.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
        dist.all_to_all_single(received, sent)

    def all_gather(self, received: list[Tensor], sent: Tensor, group: object = None) -> None:
        """The peer gathers scales without a dimension into tensors of one element; Gloo wants equal shapes."""
        self.payload_bytes += sent.nbytes * (dist.get_world_size() - 1)
        dist.all_gather(received, sent.reshape(received[0].shape))


def optimizer_and_payload(
    parameters: list[torch.nn.Parameter], lr: float
) -> tuple[Any, Callable[[], int], Callable[[], None]]:
    """The optimizer, before its first step; its payload bytes so far; and a check that it is in its compressed stage.

    Raises:
        OnebitError: deepspeed 0.19.6 is not installed, or (the check) it does not compress.
    """
    if peer.obstacle():
        raise OnebitError(peer.obstacle())
    world = World()
    stand_ins: dict[str, Any] = {
        "cupy": peer.cupy_stand_in(),
        "dist": world,
        "get_accelerator": lambda: SimpleNamespace(device_name=lambda index: "cpu", empty_cache=lambda: None),
    }
    sys.modules["cupy"] = stand_ins["cupy"]
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = ["fp16.onebit.lamb", "comm.nccl", "compression.cupy"]
        modules = [importlib.import_module(f"deepspeed.runtime.{name}") for name in names]
        for module in modules:
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    setattr(module, name, stand_in)
        engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
        optimizer = modules[0].OnebitLamb(parameters, engine, lr=lr, freeze_step=2)

    def ready() -> None:
        if engine.enable_backward_allreduce or world.payload_bytes == 0:
            raise OnebitError("OnebitLamb is not in its compressed stage after four steps; its time would mean nothing")

    return optimizer, lambda: world.payload_bytes, ready
