"""How far is `clip_grad_norm_`'s estimate, after the switch, from the true norm of the mean gradient?

    python benchmarks/clipping.py                                # the GPT of convergence/tasks.py on Python's own text
    python benchmarks/clipping.py --model mlp --optimizer OneBitAdam --lr 0.002

Workers are virtual. After the switch every step's true norm is found beside the estimate, by averaging the gradients
exactly; the optimizer does not see it. Printed for each stretch of steps: by how much the estimate is off, relative to
the true norm (median and largest absolute value; and the median with its sign), and in how many of its steps the two
disagree about clipping at all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import onebit
from onebit.comm import Comm

sys.path.insert(0, str(Path(__file__).parent / "convergence"))
import tasks

ENDS = (50, 100, 200, 400)


def mlp(micro_batch: int) -> tasks.Task:
    """Regression on a fixed random network; every worker draws its own inputs, with noise in what is to be learned."""
    shape = torch.Generator().manual_seed(7)
    first, last = torch.randn(32, 64, generator=shape) / 6, torch.randn(64, 8, generator=shape) / 8

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))

    def batch(worker: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 10**9 + step * 1000 + worker)
        x = torch.randn(micro_batch, 32, generator=generator)
        return x, torch.relu(x @ first) @ last + 0.3 * torch.randn(micro_batch, 8, generator=generator)

    return tasks.Task(build, batch, lambda model, pair: nn.functional.mse_loss(model(pair[0]), pair[1]), [])


def train(comm: Comm, task: tasks.Task, args: argparse.Namespace) -> list[tuple[float, float, float]]:
    """(estimate, true norm, loss) of every step, on worker 0."""
    with tasks._building:
        model = task.build(args.seed)
    kind: Callable[..., onebit.OneBitLamb] = getattr(onebit, args.optimizer)
    how = {"freeze_step": args.freeze, "betas": (0.9, 0.98), "warmup_transport": "fp32"}
    optimizer = kind(model.parameters(), lr=args.lr, comm=comm, **how)
    steps = args.freeze + ENDS[-1]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 30) * (1 - s / steps))
    rows = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(comm.rank, step, args.seed))
        loss.backward()
        mean = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        comm.all_reduce(mean)
        norm = optimizer.clip_grad_norm_(args.max_norm)
        rows.append((float(norm), float(mean.norm()) / comm.size, float(loss.detach())))
        optimizer.step()
        schedule.step()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "mlp"), default="gpt")
    parser.add_argument("--optimizer", choices=("OneBitLamb", "OneBitAdam"), default="OneBitLamb")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--freeze", type=int, default=80, help="updates of the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    study = {"data": {"sequence_length": 64, "held_out": 0.05}, "train": {"micro_batch": args.micro_batch}}
    task = mlp(args.micro_batch) if args.model == "mlp" else tasks.language(study)
    rows = onebit.run_workers(args.workers, lambda comm: train(comm, task, args))[0]
    warm = max(abs(estimate / true - 1) for estimate, true, _ in rows[: args.freeze])
    print(f"warm-up, {args.freeze} steps: largest error {warm:.1e}; loss {rows[0][2]:.3f} -> {rows[-1][2]:.3f}")
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        part = rows[args.freeze + start : args.freeze + end]
        off = [estimate / true - 1 for estimate, true, _ in part]
        split = sum((estimate > args.max_norm) != (true > args.max_norm) for estimate, true, _ in part)
        error = f"median {statistics.median(map(abs, off)):.1%} ({statistics.median(off):+.1%}), "
        error += f"worst {max(off, key=abs):+.1%}; true norm {statistics.median(true for _, true, _ in part):.3g}"
        print(f"steps {start + 1:>3}-{end} after the switch: {error}; clips wrongly {split}/{len(part)}")
    print(f"{time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
