"""The compressed optimizers of DeepSpeed 0.19.6, the last release that has any, made ready for `onebit bench`.

They are written for CuPy, NCCL and DeepSpeed's engine. Here they run on the CPU: a module of a few numpy functions
stands in for CuPy, an object for the engine, and a Gloo group of one worker for `deepspeed.comm`. The arithmetic is
theirs. DeepSpeed's modules stay changed, so a process that has called `steps` must not train with DeepSpeed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onebit.errors import OnebitError

VERSION = "0.19.6"
LAMB = f"DeepSpeed {VERSION} OnebitLamb, compressed stage"
ADAM = f"DeepSpeed {VERSION} OnebitAdam, compressed stage"


def obstacle() -> str:
    """Why the peer cannot be timed here, and what to do about it; empty if it can."""
    install = f"to see it: DS_BUILD_OPS=0 pip install deepspeed=={VERSION}"
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return f"deepspeed is not installed; {install}"
    if found != VERSION:
        return f"deepspeed is {found}, and only {VERSION} is known to have these optimizers and to run here; {install}"
    return ""


def steps(parameters: Callable[[], list[nn.Parameter]], **settings: Any) -> dict[str, Callable[[], object]]:
    """The step of each optimizer, which is in its compressed stage and exchanges with itself.

    Args:
        parameters: makes new float32 parameters on the CPU, with gradients that are not zero.
        settings: arguments of both optimizers, such as lr and weight_decay.

    Raises:
        OnebitError: an optimizer did not reach its compressed stage.
    """
    gloo = Gloo()
    stand_ins = {
        "cupy": cupy_stand_in(),
        "dist": gloo,
        "get_accelerator": lambda: SimpleNamespace(device_name=lambda index: "cpu", empty_cache=lambda: None),
    }
    with _quiet(), _imported_as("cupy", stand_ins["cupy"]):
        names = ["fp16.onebit.lamb", "fp16.onebit.adam", "comm.nccl", "compression.cupy"]
        modules = [importlib.import_module(f"deepspeed.runtime.{name}") for name in names]
    for module in modules:
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
    return {
        LAMB: _compressed(modules[0].OnebitLamb, parameters(), gloo, settings),
        ADAM: _compressed(modules[1].OnebitAdam, parameters(), gloo, settings),
    }


def _compressed(
    kind: Callable[..., Any], params: list[nn.Parameter], gloo: Gloo, settings: dict[str, Any]
) -> Callable[[], object]:
    """The step of a new optimizer of this kind, after the switch."""
    engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    with _quiet():
        optimizer = kind(params, engine, freeze_step=2, **settings)
        for _ in range(3):  # a dry pass that counts, the warm-up, and the step that makes the error buffers
            optimizer.step()
        # Alone it would leave its exchange out, which ours does not. It looks at its own `size` for that, and at its
        # back-end's, which stays 1, in the exchange.
        optimizer.size = 2
        before = gloo.payload_bytes
        optimizer.step()
    sent, least = gloo.payload_bytes - before, sum(p.numel() for p in params) // 4
    errors = getattr(optimizer, "worker_errors", None) or [s["worker_error"] for s in optimizer.state.values()]
    if engine.enable_backward_allreduce or sent < least or not all(error.any() for error in errors):
        raise OnebitError(
            f"{kind.__name__} of deepspeed {VERSION} sent {sent} bytes in its fourth step; after its switch it sends "
            f"{least} or more and keeps errors; its time would mean nothing, so uninstall deepspeed to do without it"
        )
    step: Callable[[], object] = optimizer.step
    return step


class Gloo:
    """What the peer calls of `deepspeed.comm`, over a Gloo group of one worker that is nobody else's.

    Attributes:
        payload_bytes: handed to the group so far.
    """

    def __init__(self) -> None:
        self._group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
        self.payload_bytes = 0

    def is_initialized(self) -> bool:
        return True

    def new_group(self, ranks: object) -> None:
        """The one group there is."""

    def get_rank(self, group: object = None) -> int:
        return 0

    def get_world_size(self, group: object = None) -> int:
        return 1

    def all_to_all_single(self, received: Tensor, sent: Tensor, group: object = None) -> None:
        self.payload_bytes += sent.nbytes
        self._group.alltoall_base(received, sent, [], []).wait()

    def all_gather(self, received: list[Tensor], sent: Tensor, group: object = None) -> None:
        """The peer gathers scales without a dimension into tensors of one element; Gloo wants equal shapes."""
        self.payload_bytes += sent.nbytes
        self._group.allgather([received], [sent.reshape(received[0].shape)]).wait()


def cupy_stand_in() -> ModuleType:
    """A module with the part of CuPy that the peer uses, for arrays of numpy in the CPU's memory."""
    import numpy

    def from_dlpack(capsule: Any) -> Any:
        return torch.utils.dlpack.from_dlpack(capsule).numpy()

    module: Any = ModuleType("cupy")
    module.packbits, module.unpackbits = numpy.packbits, numpy.unpackbits
    module.split, module.zeros = numpy.split, numpy.zeros
    module.from_dlpack = from_dlpack
    module.cuda = SimpleNamespace(
        Device=lambda index: SimpleNamespace(use=lambda: None),
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    stand_in: ModuleType = module
    return stand_in


@contextlib.contextmanager
def _imported_as(name: str, module: Any) -> Iterator[None]:
    """`import name` gives this module."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the peer prints goes to the errors' stream; its calls of deprecated signatures are its own affair."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
