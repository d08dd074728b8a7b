"""One worker of to_loss.py: trains what it is told, a line of JSON at a time. Not for the command line.

{"do": "train", "row": NAME, "lr", "seed", "steps", "every"} -> {"curve": [[step, held-out loss], ...], "seconds"}
An answer starts with ANSWER; it is {"error": reason} where the training failed.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not part of the package

import torch
import torch.distributed as dist

from benchmarks.network.worker import answer


class Diverged(Exception):
    """The held-out loss is no number any more."""


class Parted(Exception):
    """The workers' weights differ where they must not."""


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=options["patience_s"]))
    from transformers.utils import logging

    from benchmarks.convergence.tasks import language

    logging.set_verbosity_error()
    task = language(options["study"])
    answer({"elements": sum(p.numel() for p in task.build(0).parameters())})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer(train(task, order))
        except Exception as error:  # whatever a training raises is its result
            answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"})


def train(task: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Train for order["steps"] steps; the learning rate rises over 5 % of them and then falls to 0 in a line.

    Raises:
        Diverged: the held-out loss is not finite, on all workers alike.
        Parted: the workers' weights differ at an evaluation.
    """
    from benchmarks.network.trainings import TRAININGS, Run

    chosen, steps, rank = TRAININGS[order["row"]], order["steps"], dist.get_rank()
    run = Run(task.build(order["seed"]), order["lr"], chosen.warmup(steps))
    trained = chosen.build(run)
    rise = max(1, round(0.05 * steps))
    factor = lambda step: (step + 1) / rise if step < rise else 1 - (step - rise) / (steps - rise)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(trained.optimizer, factor)
    began, curve = time.perf_counter(), []
    for step in range(1, steps + 1):
        trained.optimizer.zero_grad()
        task.loss(trained.forward, task.batch(rank, step, order["seed"])).backward()
        trained.optimizer.step()
        trained.after()
        schedule.step()
        if step % order["every"] == 0 or step == steps:
            curve.append([step, held_out(task, run.model)])
            if not math.isfinite(curve[-1][1]):
                raise Diverged(f"the held-out loss is {curve[-1][1]} after step {step}")
    return {"curve": curve, "seconds": time.perf_counter() - began, "warmup": run.warmup}


def held_out(task: Any, model: torch.nn.Module) -> float:
    """Mean loss over the held-out parts, of which each worker takes its share; the same number on all.

    Raises:
        Parted: the weights differ from worker to worker.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = task.held_out[: len(task.held_out) // size * size] or task.held_out
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
    mine = torch.stack([weights.sum(), -weights.sum()])
    with torch.no_grad():
        losses = [float(task.loss(model, part)) for part in parts[rank::size]]
    total = torch.tensor([sum(losses), float(len(losses))], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    if bool(mine.isfinite().all()) and float(mine.sum()) != 0:
        raise Parted(f"the sums of the workers' weights are {-float(mine[1])} to {float(mine[0])}")
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
