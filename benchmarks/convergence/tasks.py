"""Two small tasks beside the BERT of `onebit train`: a causal language model, and images of digits.

Both learn much in few steps, so that differences between optimizers show early. Workers are threads of this process.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onebit
from onebit.build import build_optimizer, lr_factor
from onebit.comm import Comm, Solo, ring_all_reduce_bytes
from onebit.recipe import Recipe, parse, resolve
from onebit.text import prepare

_building = threading.Lock()


@dataclass(frozen=True)
class Task:
    """`build(seed)` makes the model; `batch(worker, step, seed)` gives its input; both held-out and training loss are
    `loss(model, input)`."""

    build: Callable[[int], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    held_out: list[Any]


def language(study: dict[str, Any]) -> Task:
    """A GPT (3 layers of width 128 unless [model] says otherwise) on the study's text: every token is predicted."""
    model = {"hidden_size": 128, "layers": 3} | study.get("model", {})
    corpus = prepare(parse({"data": study["data"], "model": {"vocab_size": 2000}}, {}), Solo())
    length, per_worker = study["data"]["sequence_length"], study["train"]["micro_batch"]

    def build(seed: int) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(seed)
        shape = {"vocab_size": corpus.vocab_size, "n_positions": length, "n_embd": model["hidden_size"]}
        shape |= {"n_layer": model["layers"], "n_head": 4}
        config = GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return GPT2LMHeadModel(config)

    def batch(worker: int, step: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 10**9 + step * 1000 + worker)
        starts = torch.randint(0, len(corpus.stream) - length, (per_worker,), generator=generator)
        return torch.stack([corpus.stream[s : s + length] for s in starts.tolist()]).long()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    held = corpus.held_out.long()  # its masked tokens are predicted like all others
    held = torch.where(corpus.held_out_labels >= 0, corpus.held_out_labels, held)
    return Task(build, batch, loss, list(torch.split(held, 32)))


def digits(study: dict[str, Any]) -> Task:
    """A small convolutional network on the 1,797 images of digits of scikit-learn (the extra `study`); 400 held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held = order[:-400], order[-400:]
    per_worker = study["train"]["micro_batch"]

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def batch(worker: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 10**9 + step * 1000 + worker)
        chosen = train[torch.randint(0, len(train), (per_worker,), generator=generator)]
        return images[chosen], labels[chosen]

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(pair[0]), pair[1])

    return Task(build, batch, loss, [(images[held], labels[held])])


TASKS = {"gpt": language, "digits": digits}


@functools.cache
def _task(name: str, key: str) -> Task:
    import json

    return TASKS[name](json.loads(key))


def run(name: str, study: dict[str, Any], variant: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train one variant; `study` as in the TOML file, `variant` over its [optimizer] table."""
    import json

    task = _task(name, json.dumps({key: study.get(key, {}) for key in ("data", "model", "train")}))
    given = {f"optimizer.{key}": value for key, value in variant.items()}
    recipe, _ = resolve(parse(study, {**given, "train.seed": seed}))
    began = time.perf_counter()
    found = onebit.run_workers(study["train"]["workers"], lambda comm: _train(task, recipe, comm))
    return {
        **found[0],
        "seconds": time.perf_counter() - began,
        "versions": {"onebit": onebit.__version__, "torch": torch.__version__},
        "recipe": recipe.model_dump(mode="json", exclude={"variants"}),
    }


def _train(task: Task, recipe: Recipe, comm: Comm) -> dict[str, Any]:
    with _building:
        model = task.build(recipe.train.seed)
    steps = recipe.train.steps
    optimizer, average = build_optimizer(recipe, model, comm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(recipe, step))
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(comm.rank, step, recipe.train.seed)).backward()
        if average is not None:
            average()
        optimizer.step()
        schedule.step()
    count = sum(p.numel() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        losses = [float(task.loss(model, part)) for part in task.held_out] if comm.rank == 0 else [0.0]
    whole = steps * ring_all_reduce_bytes(2 * count, comm.size)
    return {
        "eval_loss": sum(losses) / len(losses),
        "share_of_16bit": comm.payload_bytes / whole,
        "parameters": count,
        "freeze_step": getattr(optimizer, "freeze_step", None),
        "freeze_reason": getattr(optimizer, "freeze_reason", ""),
    }
