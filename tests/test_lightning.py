"""Lightning's Trainer with DDP: two processes on Gloo, beside plain loops on the same data."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from clients import (
    assert_bytes_fall,
    assert_equal_bits,
    assert_same_bytes,
    assert_same_trajectory,
    on_two_processes,
    results_of,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.comm import Comm

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="not installed: lightning")
WARMUP, STEPS, BATCH = 3, 7, 8
CLIP = 0.2


def own_data() -> Tensor:
    """Of this worker, enough for two batches in each step."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    return torch.randn(2 * STEPS * BATCH, 20, generator=generator)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 20))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(batch), batch.roll(1, dims=1).square())


def make(params: Any, **more: Any) -> Any:
    return onebit.OneBitLamb(params, lr=0.02, freeze_step=WARMUP, betas=(0.9, 0.95), **more)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def own_loop(comm: Comm, accumulate: int, clip: float | None, ddp: bool) -> dict[str, Any]:
    """The same training without Lightning. `ddp`: on DistributedDataParallel, else without it."""
    inner = build()
    optimizer, model = make(inner.named_parameters()), inner
    if ddp:
        model = DistributedDataParallel(inner)
        onebit.attach(model, optimizer)
    kept, sent, norms = [], [0], []
    batches = own_data().split(BATCH)
    for step in range(STEPS):
        for part in range(accumulate):
            if ddp:
                model.require_backward_grad_sync = part == accumulate - 1
            (loss_of(model, batches[step * accumulate + part]) / accumulate).backward()
        if clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad()
        kept.append(flat(inner))
        sent.append(optimizer.payload_bytes)
    return {"params": kept, "sent": sent, "norms": norms}


def by_lightning(
    clip: float | None = None,
    optimizers: Callable[[nn.Module], Any] = lambda model: make(model.named_parameters()),
    automatic: bool = True,
    fits: int = 1,
    ckpt_path: str | None = None,
    save: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from onebit.integrations.lightning import OneBitCallback

    callback = OneBitCallback(max_grad_norm=clip)
    kept, sent, norms = [], [0], []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()
            self.automatic_optimization = automatic

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return optimizers(self.net)

        def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
            if (index + 1) % self.trainer.accumulate_grad_batches == 0:
                kept.append(flat(self.net))
                sent.append(self.trainer.optimizers[0].payload_bytes)
                norms.append(None if callback.grad_norm is None else float(callback.grad_norm))

    off = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
    given: dict[str, Any] = {"max_steps": STEPS, **dict.fromkeys(off, False), **settings}
    module = Module()
    for _ in range(fits):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(cluster_environment=LightningEnvironment()),
            callbacks=[callback],
            use_distributed_sampler=False,  # Lightning's shuffles
            **given,
        )
        loader = torch.utils.data.DataLoader(own_data(), batch_size=BATCH)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        if save is not None:
            trainer.save_checkpoint(save)
    return {"params": kept, "sent": sent, "norms": norms}


def by_scaler(clip: float) -> dict[str, Any]:
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    return by_lightning(clip, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


def sharded() -> None:
    """What the callback meets under a strategy that has no DistributedDataParallel, and needs GPUs."""
    from onebit.integrations.lightning import OneBitCallback

    model = build()
    strategy = SimpleNamespace(model=model)
    optimizers = [make(model.named_parameters())]
    trainer = SimpleNamespace(optimizers=optimizers, world_size=2, strategy=strategy, gradient_clip_val=None)
    OneBitCallback().on_train_start(trainer, model)


def refused() -> dict[str, str]:
    def two(model: nn.Module) -> Any:
        return [make(model[0].named_parameters()), make(model[2].named_parameters())], []

    cases: dict[str, Callable[[], Any]] = {
        "clipping": lambda: by_lightning(1.0, gradient_clip_val=0.5),
        "other": lambda: by_lightning(optimizers=lambda model: torch.optim.AdamW(model.parameters())),
        "two": lambda: by_lightning(optimizers=two, automatic=False),
        "negative": lambda: by_lightning(0.0),
        "sharded": sharded,
    }
    said = {}
    for case, job in cases.items():
        try:
            job()
            said[case] = "nothing"
        except onebit.ConfigError as error:
            said[case] = str(error)
    return said


def resumed(comm: Comm, folder: str, at: int) -> dict[str, Any]:
    first = by_lightning(max_steps=at, save=f"{folder}/{at}.ckpt")
    comm.all_gather_bytes(b"")
    then = by_lightning(ckpt_path=f"{folder}/{at}.ckpt")
    return {"params": first["params"] + then["params"]}


def everything(comm: Comm, port: int, folder: str) -> dict[str, Any]:
    os.environ |= {"LOCAL_RANK": str(comm.rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(comm.size)}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    work: dict[str, Callable[[], Any]] = {
        "loop": lambda: own_loop(comm, 1, None, ddp=False),
        "loop, accumulation and clipping": lambda: own_loop(comm, 2, CLIP, ddp=True),
        "loop, clipping": lambda: own_loop(comm, 1, CLIP, ddp=True),
        "lightning": by_lightning,
        "accumulation and clipping": lambda: by_lightning(CLIP, accumulate_grad_batches=2),
        "bf16": lambda: by_lightning(precision="bf16-mixed"),
        "scaler": lambda: by_scaler(CLIP),
        "own clipping": lambda: by_lightning(gradient_clip_val=CLIP),
        "twice": lambda: by_lightning(fits=2),
        "resumed in the warm-up": lambda: resumed(comm, folder, WARMUP - 1),
        "resumed after the switch": lambda: resumed(comm, folder, WARMUP + 2),
        "refused": refused,
    }
    return results_of(work)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_processes(everything, str(tmp_path_factory.mktemp("shared")))


def bytes_of(run: dict[str, Any]) -> list[int]:
    """Of each step."""
    return [after - before for before, after in pairwise(run["sent"])]


@pytest.mark.parametrize("name", ["lightning", "accumulation and clipping", "bf16", "scaler", "own clipping", "twice"])
def test_bytes_fall_at_the_switch_and_all_workers_end_with_the_same_parameters(runs, name):
    mine, other = runs[0][name], runs[1][name]
    sent = bytes_of(mine)
    assert_bytes_fall(mine, sent, WARMUP)
    assert_equal_bits(mine, other)
    assert len(mine["params"]) == (2 * STEPS if name == "twice" else STEPS)


@pytest.mark.parametrize(
    ("name", "loop"),
    [("lightning", "loop"), ("accumulation and clipping", "loop, accumulation and clipping")],
)
def test_the_trajectory_is_that_of_an_own_loop(runs, name, loop):
    assert_same_trajectory(runs[0][name], runs[0][loop])
    assert_same_bytes(bytes_of(runs[0][name]), bytes_of(runs[0][loop]))


def test_clipping_sees_gradients_without_the_scale_of_a_grad_scaler(runs):
    scaled = runs[0]["scaler"]
    assert scaled["norms"] == runs[1]["scaler"]["norms"]
    assert all(norm > CLIP for norm in scaled["norms"])
    assert scaled["norms"] == pytest.approx(runs[0]["loop, clipping"]["norms"], rel=0.02)  # float16 in the forward pass


def test_a_run_goes_on_from_a_checkpoint(runs):
    for name in ("resumed in the warm-up", "resumed after the switch"):
        mine, other = runs[0][name], runs[1][name]
        assert len(mine["params"]) == STEPS
        assert_equal_bits(mine, other)


def test_what_cannot_work_is_refused_with_what_to_do(runs):
    for said in (run["refused"] for run in runs):
        assert "gradient_clip_val=0.5) and by OneBitCallback(max_grad_norm=1.0); leave grad" in said["clipping"]
        assert "is a AdamW; it must be one of onebit's" in said["other"]
        assert "returned 2 optimizers" in said["two"]
        assert "return one optimizer" in said["two"]
        assert "max_grad_norm is 0.0; it must be above 0" in said["negative"]
        assert "whose model is a Sequential; with 2 workers it must be a Distri" in said["sharded"]
        assert 'Trainer(strategy="ddp")' in said["sharded"]


class Anything:
    """Stands in for a package's Callback."""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delitem(sys.modules, "onebit.integrations.lightning", raising=False)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    return monkeypatch


def test_pytorch_lightning_will_do(fresh):
    package = ModuleType("pytorch_lightning")
    package.Callback = Anything  # type: ignore[attr-defined]
    fresh.setitem(sys.modules, "pytorch_lightning", package)
    module = importlib.import_module("onebit.integrations.lightning")
    assert issubclass(module.OneBitCallback, Anything)
    fresh.delitem(sys.modules, "onebit.integrations.lightning")


def test_a_missing_package_is_named(fresh):
    fresh.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.import_module("onebit.integrations.lightning")
