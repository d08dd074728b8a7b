"""Saved and resumed by Hugging Face's Trainer, Accelerate and Lightning themselves, on one process and on two.

Each case trains to the end and saves on the way; a second run, built anew, goes on from that.
"""

from __future__ import annotations

import copy
import glob
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clients import assert_equal_bits, results_of
from processes import run_processes
from test_huggingface import by_trainer, environment
from test_resize import owed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.comm import Comm

missing = [name for name in ("transformers", "accelerate", "lightning") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
WARMUP, STEPS, ROWS = 3, 7, 16
WITHOUT = "errors in it belong to another worker"  # what a worker says that sets its errors to zero
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lamb": ("OneBitLamb", {"freeze_step": WARMUP}),
    "int8": ("OneBitAdam", {"freeze_step": WARMUP, "warmup_transport": "int8", "state": "compact", "lr": 0.002}),
    "local variance": ("LocalVarianceLamb", {"warmup_steps": WARMUP}),
    "0/1": ("ZeroOneAdam", {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4, "lr": 0.002}),
}
CASES = [("lamb", WARMUP - 1), ("lamb", WARMUP + 2), ("int8", WARMUP - 1), ("int8", WARMUP + 2), ("local variance", 5)]
"""An optimizer, and the step that is saved."""
CLIENTS = ("trainer", "lightning", "accelerate")


def make(kind: str, model: nn.Module, notes: dict[str, Any]) -> tuple[Any, Any]:
    """Optimizer and schedule. What is owed after each fold and after each load goes into `notes`."""
    name, settings = KINDS[kind]
    optimizer = getattr(onebit, name)(model.named_parameters(), **({"lr": 0.02, "betas": (0.9, 0.95)} | settings))
    notes |= {"folded": [], "loaded": []}
    fold = optimizer.fold_errors

    def noted() -> None:
        fold()
        notes["folded"].append(owed(optimizer))

    optimizer.fold_errors = noted
    optimizer.register_load_state_dict_post_hook(lambda loaded: notes["loaded"].append(owed(loaded)))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def batch_of(step: int, comm: Comm) -> tuple[Tensor, Tensor]:
    """A worker's part of what all learn from in a step."""
    x = torch.randn(ROWS, 20, generator=torch.Generator().manual_seed(step))[comm.rank :: comm.size]
    return x, x.roll(1, dims=1).square()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 20))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def trainer(comm: Comm, kind: str, folder: str, at: int | None = None, resume: bool = False, **more: Any) -> Any:
    """By Hugging Face's Trainer. `at`: the step to save, if any; `resume`: from what was saved at `at`."""
    notes: dict[str, Any] = {}
    saving = {"save_strategy": "steps", "save_steps": at, "output_dir": folder}
    path = {"resume": f"{folder}/checkpoint-{at}"}
    given: dict[str, Any] = {**(path if resume else saving), "per_device_train_batch_size": 8 // comm.size, **more}
    run = by_trainer(optimizer=lambda model: make(kind, model, notes), **given)
    losses = [log["loss"] for log in run["history"]][-len(run["params"]) :]  # the history holds what was before, too
    return {"params": run["params"], "losses": losses, **notes}


def lightning(
    comm: Comm, kind: str, folder: str, at: int, resume: bool = False, by_hand: bool = False, fold: bool = True
) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from onebit.integrations.lightning import OneBitCallback

    params, losses, notes, file = [], [], {}, f"{folder}/at-{at}.ckpt"

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            x, y = batch_of(self.trainer.global_step, comm)
            loss = nn.functional.mse_loss(self.net(x), y)
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer, schedule = make(kind, self.net, notes)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
            params.append(flat(self.net))
            if by_hand and self.trainer.global_step == at:
                self.trainer.save_checkpoint(file)

    saver = ModelCheckpoint(
        folder, filename="at-{step}", auto_insert_metric_name=False, every_n_train_steps=at, save_top_k=-1
    )
    strategy: Any = DDPStrategy(cluster_environment=LightningEnvironment()) if comm.size > 1 else "auto"
    off = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"], False)
    own = pl.Trainer(
        accelerator="cpu",
        devices=comm.size,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[OneBitCallback(fold_errors=fold), *([] if by_hand or resume else [saver])],
        enable_checkpointing=not (by_hand or resume),
        **off,
    )
    loader = torch.utils.data.DataLoader(torch.zeros(2 * STEPS, 1))
    own.fit(Module(), loader, ckpt_path=file if resume else None)
    return {"params": params, "losses": losses, **notes}


def accelerate(comm: Comm, kind: str, folder: str, at: int, resume: bool = False, fold: bool = True) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    notes: dict[str, Any] = {}
    inner = network()
    ours, schedule = make(kind, inner, notes)
    model, optimizer, schedule = accelerator.prepare(inner, ours, schedule)
    if comm.size > 1:
        assert isinstance(model, DistributedDataParallel)
        onebit.attach(model, optimizer)
    if resume:
        accelerator.load_state(folder)
    params, losses = [], []
    for step in range(at if resume else 0, STEPS):
        x, y = batch_of(step, comm)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        params.append(flat(inner))
        losses.append(float(loss.detach()))
        if not resume and step + 1 == at:
            if fold:
                ours.fold_errors()
            accelerator.save_state(folder)
    return {"params": params, "losses": losses, **notes}


RUNS: dict[str, Callable[..., dict[str, Any]]] = dict(zip(CLIENTS, (trainer, lightning, accelerate), strict=True))


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def surroundings(comm: Comm, port: int) -> Iterator[None]:
    os.environ |= {"NODE_RANK": "0"}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with environment(comm, port):
        yield


def heard(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a job returns, and what onebit warned of meanwhile."""
    handler = Heard()
    logging.getLogger("onebit").addHandler(handler)
    try:
        return {**job(), "said": handler.said}
    finally:
        logging.getLogger("onebit").removeHandler(handler)


def saved_in(folder: str) -> dict[str, bool]:
    """Of each checkpoint of the Trainer in a folder, whether it is complete, by its step."""
    files = glob.glob(f"{folder}/checkpoint-*/optimizer.pt")
    return {Path(f).parent.name[11:]: torch.load(f, weights_only=False)["onebit"]["folded"] for f in sorted(files)}


def other_saves(comm: Comm, shared: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Ways in which the Trainer comes to save."""
    from transformers import TrainerCallback

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 4

    best = {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    ways: dict[str, dict[str, Any]] = {
        "epoch": {"save_strategy": "epoch"},
        "best": {**best, "greater_is_better": False},
        "never better": {**best, "greater_is_better": True},
        "asked for": {"save_strategy": "no", "others": [Asks()], "logging_steps": 99},
        "weights alone": {"save_only_model": True},
        "not wanted": {"fold": False},
    }

    def way(name: str, given: dict[str, Any]) -> dict[str, Any]:
        folder = f"{shared}/way-{name}"
        run = trainer(comm, "lamb", folder, **{"at": 5, **given})
        comm.all_gather_bytes(b"")
        return {**run, "files": saved_in(folder)}

    return {name: lambda name=name, given=given: way(name, given) for name, given in ways.items()}


def everything(comm: Comm, port: int, shared: str) -> dict[str, Any]:
    """What this number of processes saves, and how it goes on from it and from what others saved."""
    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    for client, run in RUNS.items():
        for kind, at in CASES:
            folder = f"{shared}/{client}-{kind}-{at}".replace(" ", "-")
            mine, theirs = f"{folder}-by-{comm.size}", f"{folder}-by-{3 - comm.size}"
            case = f"{client}, {kind}, {at}"
            jobs[f"{case}, through"] = lambda run=run, kind=kind, mine=mine, at=at: run(comm, kind, mine, at)
            jobs[f"{case}, resumed"] = lambda run=run, kind=kind, mine=mine, at=at: run(comm, kind, mine, at, True)
            if Path(theirs).exists():
                again = lambda run=run, kind=kind, theirs=theirs, at=at: run(comm, kind, theirs, at, True)  # noqa: E731
                jobs[f"{case}, resumed from {3 - comm.size}"] = again
    if comm.size == 2:
        jobs |= other_saves(comm, shared)
        jobs["lightning, by hand"] = lambda: lightning(comm, "lamb", f"{shared}/hand", 5, by_hand=True)
        jobs["lightning, by hand, resumed"] = lambda: lightning(comm, "lamb", f"{shared}/hand", 5, True)
        for client in CLIENTS[:2]:
            run, folder = RUNS[client], f"{shared}/{client}-apart"
            jobs[f"{client}, apart"] = lambda run=run, folder=folder: run(comm, "0/1", folder, 1)
            jobs[f"{client}, apart, resumed"] = lambda run=run, folder=folder: run(comm, "0/1", folder, 4, True)
        for client in CLIENTS:
            run, folder = RUNS[client], f"{shared}/{client}-without"
            jobs[f"{client}, without"] = lambda run=run, folder=folder: run(comm, "lamb", folder, 5, fold=False)
            jobs[f"{client}, without, resumed"] = lambda run=run, folder=folder: run(comm, "lamb", folder, 5, True)

    def ready(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        comm.all_gather_bytes(b"")  # what worker 0 saves is there
        return heard(job)

    return results_of(
        {name: lambda job=job: ready(job) for name, job in jobs.items()}, lambda: surroundings(comm, port)
    )


def by_processes(n: int, folder: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_processes(n, everything, port, folder, timeout_s=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def first_by_one(folder: str) -> dict[str, Any]:
    return by_processes(1, folder)[0]


@pytest.fixture(scope="module")
def by_two(folder: str, first_by_one: dict[str, Any]) -> list[dict[str, Any]]:
    return by_processes(2, folder)


@pytest.fixture(scope="module")
def by_one(folder: str, by_two: list[dict[str, Any]]) -> dict[str, Any]:
    return by_processes(1, folder)[0]


cases = pytest.mark.parametrize("case", [f"{client}, {kind}, {at}" for client in CLIENTS for kind, at in CASES])


@cases
def test_a_resumed_run_has_the_bits_of_one_that_went_through(by_two, first_by_one, case):
    at = int(case[-1])
    for run in (*by_two, first_by_one):
        through, resumed = run[f"{case}, through"], run[f"{case}, resumed"]
        assert through["said"] == resumed["said"] == []
        assert [len(resumed["params"]), len(through["params"])] == [STEPS - at, STEPS]
        until = 2 * at  # where the run that goes through may save again
        assert_equal_bits({"params": through["params"][at:until]}, {"params": resumed["params"][: until - at]})
    for name in (f"{case}, through", f"{case}, resumed"):
        assert_equal_bits(by_two[0][name], by_two[1][name])


def same(ours: Tensor | None, theirs: Tensor | None, compact: bool) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        near = 0.02 * float(theirs.abs().max()) if compact else 1e-7
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=near)


@cases
def test_another_number_of_workers_goes_on_from_the_same_errors(first_by_one, by_two, by_one, case):
    at, compact = int(case[-1]), "int8, 5" in case
    (owed_by_two, *_), resumed = by_two[0][f"{case}, through"]["folded"], by_one[f"{case}, resumed from 2"]
    same(resumed["loaded"][-1], owed_by_two, compact)
    if at > WARMUP or "lamb" not in case:
        assert owed_by_two.abs().max() > 0
    for run in by_two:
        assert run[f"{case}, resumed from 1"]["said"] == []
        same(run[f"{case}, resumed from 1"]["loaded"][-1], first_by_one[f"{case}, resumed"]["loaded"][-1], compact)
    assert resumed["said"] == []
    assert_equal_bits(*(run[f"{case}, resumed from 1"] for run in by_two))


def mean_losses(runs: list[dict[str, Any]], steps: int) -> list[float]:
    """Of all workers, in the last steps."""
    return torch.tensor([run["losses"][-steps:] for run in runs]).mean(0).tolist()


@cases
def test_another_number_of_workers_has_much_the_same_losses(by_two, by_one, first_by_one, case):
    steps = STEPS - int(case[-1])
    by_one_now = mean_losses([by_one[f"{case}, resumed from 2"]], steps)
    by_two_now = mean_losses([run[f"{case}, resumed from 1"] for run in by_two], steps)
    through = mean_losses([run[f"{case}, through"] for run in by_two], steps)
    alone = mean_losses([first_by_one[f"{case}, through"]], steps)
    for resumed, whole in ((by_one_now, through), (by_two_now, alone)):
        assert resumed[0] == pytest.approx(whole[0], rel=1e-5)  # before it makes a step
        assert resumed == pytest.approx(whole, rel=0.01)
    assert first_by_one[f"{case}, through"]["folded"] == [] or case.startswith("accelerate")  # one worker's is complete


def test_the_trainer_folds_for_each_save_and_for_nothing_else(by_two):
    for run in by_two:
        saved = {name: run[name]["files"] for name in ("epoch", "best", "never better", "asked for")}
        assert saved["epoch"] == {"7": True}
        assert saved["best"] == {"2": True, "4": True, "6": True, "7": True}
        assert saved["never better"] == {"2": True}
        assert saved["asked for"] == {"4": True}
        assert {name: len(run[name]["folded"]) for name in saved} == {name: len(f) for name, f in saved.items()}
        assert run["weights alone"]["folded"] == run["not wanted"]["folded"] == []
        assert run["not wanted"]["files"] == {"5": False, "7": False}


def test_lightning_folds_for_a_save_by_hand(by_two):
    for run in by_two:
        through, resumed = run["lightning, by hand"], run["lightning, by hand, resumed"]
        assert [len(through["folded"]), resumed["said"]] == [1, []]
        assert_equal_bits({"params": through["params"][5:]}, resumed)


@pytest.mark.parametrize("client", CLIENTS[:2])
def test_after_a_local_step_the_log_says_once_what_the_file_lacks(by_two, client):
    """It is saved after each step: 1, 2, 3 and 5 exchange, 4, 6 and 7 do not."""
    through, resumed = ([run[f"{client}, apart{more}"] for run in by_two] for more in ("", ", resumed"))
    assert [len(run["folded"]) for run in through] == [4, 4]
    assert [len(run["said"]) for run in through] == [1, 0]
    assert "after a local step" in through[0]["said"][0]
    assert "only 2 workers can resume" in through[0]["said"][0]
    assert [len(run["params"]) for run in resumed] == [STEPS - 4] * 2  # from step 4
    assert WITHOUT in resumed[1]["said"][0]


@pytest.mark.parametrize("client", CLIENTS)
def test_without_folding_the_other_workers_lose_their_errors_and_say_so(by_two, client):
    said = [run[f"{client}, without, resumed"]["said"] for run in by_two]
    assert [len(lines) for lines in said] == [0, 1]
    assert WITHOUT in said[1][0]
    assert all(run[f"{client}, without"]["folded"] == [] for run in by_two)


def test_lightning_waits_for_nobody_after_an_error(caplog):
    from onebit.integrations.lightning import OneBitCallback

    def work(comm: Comm) -> bool | None:
        optimizer = onebit.OneBitAdam(network().parameters(), comm=comm)
        callback = OneBitCallback()
        callback._trainer = SimpleNamespace(optimizers=[optimizer], interrupted=True)
        assert copy.copy(callback)._trainer is None
        return optimizer._folded if comm.rank == 1 or callback.state_dict() else None

    assert onebit.run_workers(2, work) == [None, False]
    assert ["lacks theirs, and only 2 workers" in record.getMessage() for record in caplog.records] == [True]
