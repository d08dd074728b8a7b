"""States that DeepSpeed's released 1-bit optimizers save, made here where its package is installed, and how it goes on.

Two workers are two threads with a Gloo group between them; `onebit.peer` says what stands in for CuPy and the engine.

    python tests/deepspeed_states.py    # writes tests/cases/deepspeed_*.safetensors again; needs deepspeed 0.19.6
"""

from __future__ import annotations

import importlib
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from onebit import peer

CASES = Path(__file__).parent / "cases"
SHAPES = [(8, 8), (16,), (4, 12)]  # nothing is padded for two workers, all in one buffer or each by itself
WORKERS = 2
FREEZE_STEP = 13  # DeepSpeed's: one dry step and 12 updates
NEXT = 6  # updates after the state was saved
HYPER = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
LAMB_HYPER = {"max_coeff": 2.0, "min_coeff": 0.02, "coeff_beta": 0.8, "factor_max": 3.0, "factor_min": 0.6}
CONFIGS = {
    "lamb": {"optimizer": {"type": "OneBitLamb", "params": {**HYPER, **LAMB_HYPER, "freeze_step": FREEZE_STEP}}},
    "adam": {"optimizer": {"type": "OneBitAdam", "params": {**HYPER, "freeze_step": FREEZE_STEP}}},
}
KINDS = ("lamb", "lamb16", "adam", "adam16")
"""Parameters are in float32, or in 16 bits behind DeepSpeed's wrapper, which makes a vector of each Adam group."""
STEPS = {"warmup": 8, "switch": 13, "compressed": 18}
"""What DeepSpeed's counter says when the state is saved: in the warm-up, right after its end, five updates later."""


class Gloo:
    """What the peer calls of `deepspeed.comm`, for workers that are threads of this process."""

    def __init__(self, workers: int) -> None:
        self._here, store = threading.local(), dist.HashStore()
        self._connect = lambda rank: dist.ProcessGroupGloo(store, rank, workers, timedelta(seconds=60))
        self._size = workers

    def join(self, rank: int) -> None:
        """Make this thread a worker."""
        self._here.rank, self._here.group = rank, self._connect(rank)

    def is_initialized(self) -> bool:
        return True

    def new_group(self, ranks: object) -> None:
        """The one group there is."""

    def get_rank(self, group: object = None) -> int:
        rank: int = self._here.rank
        return rank

    def get_world_size(self, group: object = None) -> int:
        return self._size

    def all_to_all_single(self, received: Tensor, sent: Tensor, group: object = None) -> None:
        self._here.group.alltoall_base(received, sent, [], []).wait()

    def all_gather(self, received: list[Tensor], sent: Tensor, group: object = None) -> None:
        self._here.group.allgather([received], [sent.reshape(received[0].shape)]).wait()


def package(gloo: Gloo) -> dict[str, Any]:
    """The released classes, on this group."""
    cupy = peer.cupy_stand_in()
    accelerator = SimpleNamespace(device_name=lambda index=0: "cpu", empty_cache=lambda: None)
    accelerator.is_available, accelerator.current_device_name = lambda: True, lambda: "cpu"
    with peer._quiet(), peer._imported_as("cupy", cupy):
        names = ["fp16.onebit.lamb", "fp16.onebit.adam", "comm.nccl", "compression.cupy"]
        wrappers = ["fp16.unfused_optimizer", "fp16.fused_optimizer"]
        modules = [importlib.import_module(f"deepspeed.runtime.{name}") for name in [*names, *wrappers]]
    stand_ins = {"cupy": cupy, "dist": gloo, "get_accelerator": lambda: accelerator}
    for module in modules:
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
    return {
        "lamb": modules[0].OnebitLamb,
        "adam": modules[1].OnebitAdam,
        "lamb16": modules[4].FP16_UnfusedOptimizer,
        "adam16": modules[5].FP16_Optimizer,
    }


class Peer:
    """One worker's released optimizer, as DeepSpeed's engine builds it for float32 or bfloat16 parameters."""

    def __init__(self, classes: dict[str, Any], kind: str, decay: float) -> None:
        generator = torch.Generator().manual_seed(1)
        dtype = torch.bfloat16 if kind.endswith("16") else torch.float32
        self.params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        groups = [{"params": self.params, "weight_decay": decay}]
        self.engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
        hyper = {**HYPER, **LAMB_HYPER} if kind.startswith("lamb") else HYPER
        self.inner = classes[kind[:4]](groups, self.engine, freeze_step=FREEZE_STEP, **hyper)
        self.saved = self.inner if kind == kind[:4] else self._wrapped(classes[kind])
        self.kind = kind

    def _wrapped(self, wrapper: Any) -> Any:
        """As for bfloat16: the overflow checks of float16 need the engine's groups of processes."""
        return wrapper(self.inner, deepspeed=self.engine, low_precision_dtype=torch.bfloat16, static_loss_scale=1.0)

    def step(self, grads: list[Tensor]) -> None:
        """One of DeepSpeed's steps; with float32 parameters the first is the dry one."""
        targets = [p for group in self.inner.param_groups for p in group["params"]]
        flat = len(targets) != len(grads) or targets[0].shape != grads[0].shape
        values = [torch.cat([g.flatten() for g in grads])] if flat else grads
        for target, grad in zip(targets, values, strict=True):
            target.grad = grad.clone()
        self.inner.step()

    def errors(self) -> list[Tensor]:
        """The worker errors."""
        if self.kind.startswith("lamb"):
            return list(self.inner.worker_errors)
        return [self.inner.state[p]["worker_error"] for group in self.inner.param_groups for p in group["params"]]

    def weights(self) -> list[Tensor]:
        """In float32, in the shapes of the parameters."""
        flat = torch.cat([p.detach().flatten() for group in self.inner.param_groups for p in group["params"]])
        parts = torch.split(flat, [p.numel() for p in self.params])
        return [part.view(p.shape).clone() for part, p in zip(parts, self.params, strict=True)]


def gradients(step: int, rank: int, shapes: list[torch.Size]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [(1 + i) * torch.randn(shape, generator=generator) + 0.3 for i, shape in enumerate(shapes)]


def run(kind: str, stage: str, decay: float = 0.01) -> dict[str, Any]:
    """Train until the state is saved, let DeepSpeed load it again if it is compressed, and go on for `NEXT` updates.

    Returns:
        checkpoint, as torch.load gives it; weights at that time; grads[t][worker][i], params[t][i] of the next updates.
    """
    gloo = Gloo(WORKERS)
    classes = package(gloo)

    def work(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        gloo.join(rank)
        worker = Peer(classes, kind, decay)
        shapes = [p.shape for p in worker.params]
        first = 2 if kind.endswith("16") else 1  # behind the wrapper the dry step is made at construction
        grads = {t: [gradients(t, w, shapes) for w in range(WORKERS)] for t in range(STEPS[stage] + 1 + NEXT)}

        def step(t: int) -> None:
            mean = [sum(pair) / WORKERS for pair in zip(*grads[t], strict=True)]
            worker.step(mean if worker.engine.enable_backward_allreduce else grads[t][rank])

        for t in range(first, STEPS[stage] + 1):
            step(t)
        if stage == "compressed":
            assert all(error.any() for error in worker.errors())
        module = {f"p{i}": p.detach() for i, p in enumerate(worker.params)}
        buffer = io.BytesIO()
        held = {"module": module, "optimizer": worker.saved.state_dict(), "ds_config": CONFIGS[kind[:4]]}
        torch.save({**held, "ds_version": peer.VERSION}, buffer)
        checkpoint = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        start = worker.weights()
        if stage == "compressed":  # its own load drops the errors, too; in the warm-up it would drop coefficients
            inner = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)["optimizer"]
            worker.inner.load_state_dict(inner.get("optimizer_state_dict", inner))
        later = list(range(STEPS[stage] + 1, STEPS[stage] + 1 + NEXT))
        params = []
        for t in later:
            step(t)
            params.append(worker.weights())
        return {"checkpoint": checkpoint, "weights": start, "grads": [grads[t] for t in later], "params": params}

    with peer._quiet(), ThreadPoolExecutor(WORKERS) as pool:
        results = [future.result() for future in [pool.submit(work, rank) for rank in range(WORKERS)]]
    for mine, other in zip(results[0]["params"], results[1]["params"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    return results[0]


def record(kind: str, stage: str) -> None:
    """Write a run to tests/cases: its tensors by name, and the rest of its checkpoint as JSON with their names."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value.detach().clone().contiguous()
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[key, plain(v, f"{name}.{key}")] for key, v in value.items()]}
        if isinstance(value, list | tuple):
            return {"list": [plain(v, f"{name}.{i}") for i, v in enumerate(value)], "tuple": isinstance(value, tuple)}
        return value

    meta = {"run": json.dumps(plain(run(kind, stage), "run"))}
    save_file(tensors, CASES / f"deepspeed_{kind}_{stage}.safetensors", metadata=meta)


def recorded(kind: str, stage: str) -> dict[str, Any]:
    """What `run` returned when it was recorded."""
    with safe_open(CASES / f"deepspeed_{kind}_{stage}.safetensors", "pt") as file:

        def whole(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            if "tensor" in value:
                return file.get_tensor(value["tensor"])
            if "dict" in value:
                return {key: whole(v) for key, v in value["dict"]}
            parts = [whole(v) for v in value["list"]]
            return tuple(parts) if value["tuple"] else parts

        result: dict[str, Any] = whole(json.loads(file.metadata()["run"]))
        return result


if __name__ == "__main__":
    for kind in KINDS:
        for stage in STEPS:
            record(kind, stage)
