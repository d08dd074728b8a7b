"""Hugging Face's Trainer and Accelerate: two processes on Gloo, beside plain loops on the same data."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
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
from onebit.comm import Comm, Solo

missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
WARMUP, STEPS, BATCH, LENGTH = 3, 7, 4, 16
CLIP = 0.2


@contextmanager
def environment(comm: Comm, port: int) -> Iterator[None]:
    """What torchrun would have set, and no knowledge of an earlier Trainer's settings."""
    from accelerate.state import AcceleratorState, GradientState

    os.environ |= {"RANK": str(comm.rank), "LOCAL_RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(comm.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield


def tokens() -> list[dict[str, Tensor]]:
    """Texts. The first token is nobody's label: Trainers differ in whether they count it when they divide the loss."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 50, (2 * 2 * STEPS * BATCH, LENGTH), generator=generator)
    labels = torch.cat([torch.full_like(rows[:, :1], -100), rows[:, 1:]], dim=1)
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    still = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **still))


def make(model: nn.Module, **more: Any) -> tuple[Any, Any]:
    optimizer = onebit.OneBitLamb(model.named_parameters(), lr=0.02, freeze_step=WARMUP, betas=(0.9, 0.95), **more)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def own_loop(comm: Comm, accumulate: int, clip: float | None, ddp: bool, by_items: bool) -> dict[str, Any]:
    """The same training without Hugging Face.

    The gradient of GPT-2's key biases is zero but for rounding, and one bit takes the sign of that. So the loss is
    divided where the other side divides it.

    Args:
        ddp: on DistributedDataParallel, else without it.
        by_items: divide the loss by the tokens of all workers, as the Trainer does; else as Accelerate does.
    """
    data, inner = tokens(), gpt()
    optimizer, schedule = make(inner)
    model: nn.Module = inner
    if ddp:
        model = DistributedDataParallel(inner)
        onebit.attach(model, optimizer)
    kept, sent = [], [0]
    for step in range(STEPS):
        for part in range(accumulate):
            start = BATCH * ((step * accumulate + part) * comm.size + comm.rank)
            batch = torch.utils.data.default_collate(data[start : start + BATCH])
            if ddp:
                model.require_backward_grad_sync = part == accumulate - 1
            if by_items:
                items = torch.tensor(comm.size * accumulate * BATCH * (LENGTH - 1))
                loss = model(**batch, num_items_in_batch=items).loss * comm.size
            else:
                loss = model(**batch).loss / accumulate
            loss.backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        kept.append(flat(inner))
        sent.append(optimizer.payload_bytes)
    return {"params": kept, "sent": sent}


def by_trainer(
    clip: float | None = None,
    optimizer: Callable[[nn.Module], Any] = make,
    kind: dict[str, Any] | None = None,
    again: bool = False,
    others: Sequence[Any] = (),
    fold: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """The training by the Trainer.

    Args:
        kind: its optimizer_cls_and_kwargs, instead of an optimizer.
        others: callbacks behind ours.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from onebit.integrations.huggingface import OneBitCallback

    kept, logged = [], []

    class Recorder(TrainerCallback):
        """Stands before ours, as the reporters of `report_to` do."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            kept.append(flat(model))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            logged.append(dict(logs))

    settings = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "max_grad_norm": 0}
    settings |= {"disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": BATCH}
    settings |= {"train_sampling_strategy": "sequential", "dataloader_drop_last": True}
    resume = arguments.pop("resume", None)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**{"output_dir": folder, **settings, **arguments})
        model = gpt()
        given: dict[str, Any] = {"optimizer_cls_and_kwargs": (onebit.OneBitLamb, kind)}
        if kind is None:
            given = {"optimizers": optimizer(model)}
        callbacks = [Recorder(), OneBitCallback(max_grad_norm=clip, fold_errors=fold), *others]
        given |= {"train_dataset": tokens(), "eval_dataset": tokens()[: 4 * BATCH]}
        trainer = Trainer(model, args, callbacks=callbacks, **given)
        for _ in range(1 + again):
            trainer.train(resume_from_checkpoint=resume)
    history = [log for log in trainer.state.log_history if "loss" in log]
    return {"params": kept, "logged": [log for log in logged if "loss" in log], "history": history}


def by_accelerate(accumulate: int) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, step_scheduler_with_optimizer=False)
    inner = gpt()
    ours, schedule = make(inner)
    loader = torch.utils.data.DataLoader(tokens(), batch_size=BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(inner, ours, loader, schedule)
    onebit.attach(model, optimizer)
    kept, sent = [], [0]
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            kept.append(flat(inner))
            sent.append(ours.payload_bytes)
        if len(kept) == STEPS:
            break
    return {"params": kept, "sent": sent}


def resumed(comm: Comm, shared: str, at: int) -> dict[str, Any]:
    """To step `at`, saved there by the Trainer; then a new Trainer from that folder to the end."""
    folder = f"{shared}/{at}"
    first = by_trainer(output_dir=folder, save_strategy="steps", save_steps=at, max_steps=at)
    comm.all_gather_bytes(b"")
    then = by_trainer(resume=f"{folder}/checkpoint-{at}")
    return {"params": first["params"] + then["params"], "history": first["history"] + then["history"]}


def refused() -> dict[str, str]:
    cases: dict[str, dict[str, Any]] = {
        "twice": {"clip": 1.0, "max_grad_norm": 0.5},
        "other": {"optimizer": lambda model: (torch.optim.AdamW(model.parameters()), None)},
        "early": {"optimizer": lambda model: make(model, comm=Solo())},
        "negative": {"clip": -1.0},
    }
    said = {}
    for case, given in cases.items():
        try:
            by_trainer(**given)
            said[case] = "nothing"
        except onebit.ConfigError as error:
            said[case] = str(error)
    return said


def everything(comm: Comm, port: int, shared: str) -> dict[str, Any]:
    work: dict[str, Callable[[], Any]] = {
        "loop": lambda: own_loop(comm, 1, None, ddp=False, by_items=False),
        "loop by items": lambda: own_loop(comm, 1, None, ddp=False, by_items=True),
        "loop, accumulation": lambda: own_loop(comm, 2, None, ddp=False, by_items=False),
        "loop by items, accumulation and clipping": lambda: own_loop(comm, 2, CLIP, ddp=True, by_items=True),
        "trainer": by_trainer,
        "trainer, accumulation and clipping": lambda: by_trainer(CLIP, gradient_accumulation_steps=2),
        "trainer, bf16": lambda: by_trainer(bf16=True),
        "trainer, optimizer by class": lambda: by_trainer(kind={"freeze_step": WARMUP}, again=True),
        "trainer, own clipping": lambda: by_trainer(max_grad_norm=CLIP),
        "resumed in the warm-up": lambda: resumed(comm, shared, WARMUP - 1),
        "resumed after the switch": lambda: resumed(comm, shared, WARMUP + 2),
        "accelerate": lambda: by_accelerate(1),
        "accelerate, accumulation": lambda: by_accelerate(2),
        "refused": refused,
    }
    return results_of(work, lambda: environment(comm, port))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_processes(everything, str(tmp_path_factory.mktemp("shared")))


def bytes_of(run: dict[str, Any]) -> list[int]:
    """Of each step."""
    sent = run["sent"] if "sent" in run else [0] + [log["onebit/payload_bytes"] for log in run["logged"]]
    return [after - before for before, after in pairwise(sent)]


@pytest.mark.parametrize(
    "name",
    [
        "trainer",
        "trainer, accumulation and clipping",
        "trainer, bf16",
        "trainer, optimizer by class",
        "trainer, own clipping",
        "accelerate",
        "accelerate, accumulation",
    ],
)
def test_bytes_fall_at_the_switch_and_all_workers_end_with_the_same_parameters(runs, name):
    mine, other = runs[0][name], runs[1][name]
    sent = bytes_of(mine)
    assert_bytes_fall(mine, sent, WARMUP)
    assert len(mine["params"]) >= STEPS
    assert_equal_bits(mine, other)


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("trainer", "loop by items"),
        ("trainer, accumulation and clipping", "loop by items, accumulation and clipping"),
        ("accelerate", "loop"),
        ("accelerate, accumulation", "loop, accumulation"),
    ],
)
def test_the_trajectory_is_that_of_an_own_loop(runs, name, loop):
    assert_same_trajectory(runs[0][name], runs[0][loop])
    assert_same_bytes(bytes_of(runs[0][name]), bytes_of(runs[0][loop]))


def test_the_logs_have_stage_and_bytes_before_other_callbacks_see_them(runs):
    run = runs[0]["trainer, accumulation and clipping"]
    for seen, kept in zip(run["logged"], run["history"], strict=True):
        assert {key: kept[key] for key in seen} == seen
    assert [log["onebit/stage"] for log in run["logged"]] == [float(step >= WARMUP) for step in range(1, STEPS + 1)]
    norms = [log["onebit/grad_norm"] for log in run["logged"]]
    assert norms == [log["onebit/grad_norm"] for log in runs[1]["trainer, accumulation and clipping"]["logged"]]
    assert all(norm > CLIP for norm in norms)  # so that the comparison with the own loop was one of clipping
    own = [log["grad_norm"] for log in run["logged"]]
    assert own[:WARMUP] == pytest.approx(norms[:WARMUP], rel=1e-4)  # of the mean
    assert "onebit/grad_norm" not in runs[0]["trainer"]["logged"][0]


def test_a_run_goes_on_from_a_checkpoint_of_the_trainer(runs):
    for name in ("resumed in the warm-up", "resumed after the switch"):
        mine, other = runs[0][name], runs[1][name]
        assert len(mine["params"]) == STEPS
        assert_equal_bits(mine, other)
    through = runs[0]["trainer"]["params"]
    torch.testing.assert_close(runs[0]["resumed in the warm-up"]["params"][-1], through[-1], rtol=0, atol=0)


def test_what_cannot_work_is_refused_with_what_to_do(runs):
    for said in (run["refused"] for run in runs):
        assert "0.5, and by OneBitCallback's, 1.0; set TrainingArguments(max_grad_norm=0)" in said["twice"]
        assert "is a AdamW; it must be one of onebit's" in said["other"]
        assert "for one worker, but TrainingArguments.world_size is 2; build the optimizer after" in said["early"]
        assert "max_grad_norm is -1.0; it must be above 0" in said["negative"]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "onebit.integrations.huggingface", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'transformers\[torch\]'"):
        importlib.import_module("onebit.integrations.huggingface")


def test_a_trainer_that_cannot_be_found_is_said():
    from onebit.integrations.huggingface import _trainer_of

    with pytest.raises(onebit.ConfigError, match=r"gc\.unfreeze"):
        _trainer_of(SimpleNamespace())
