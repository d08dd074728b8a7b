"""Does 1-bit LAMB's ratio do what it is for? Rank correlations over layers with the ratio that would be needed.

    python benchmarks/convergence/ratio.py benchmarks/convergence/language.toml --out runs/ratio.json

Along a run of 1-bit LAMB the exact momentum and variance of the averaged gradient are kept beside it. Needed, for a
layer: the ratio with which the compressed step would be as long as LAMB's own. Candidates, all relative to the switch:

  used      what the optimizer used: from the largest element of the rebuilt variance, clipped
  exact     sqrt of the frozen over the exact variance, summed over the layer: unknown to the workers
  gradient  norm of a worker's own gradient, averaged over steps as the variance is and over workers: a number per layer
  momentum  norm of the momentum that all hold
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import study as studies
import tasks
import tomllib
import torch
from torch import Tensor

import onebit
from onebit.build import build_optimizer, lr_factor
from onebit.comm import Comm
from onebit.recipe import parse

EVERY = 25


def ranks(x: Tensor) -> Tensor:
    """Equal values share the mean of their ranks."""
    below, equal = x[None] < x[:, None], x[None] == x[:, None]
    return below.double().sum(1) + (equal.double().sum(1) - 1) / 2


def correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, over layers; nan where one of them is constant."""
    pair = torch.stack([ranks(a), ranks(b)])
    return float(torch.corrcoef(pair)[0, 1])


class Shadow:
    """What exact communication would know, and what is known at the switch."""

    def __init__(self, params: list[Tensor], betas: tuple[float, float]) -> None:
        self.params, self.betas = params, betas
        self.m, self.v = ([torch.zeros_like(p) for p in params] for _ in range(2))
        self.own = torch.zeros(len(params), dtype=torch.float64)  # mean square norm of this worker's gradient
        self.at_switch: tuple[Tensor, Tensor, Tensor] | None = None

    def follow(self, comm: Comm) -> None:
        for p, m, v in zip(self.params, self.m, self.v, strict=True):
            mean = p.grad.clone() / comm.size  # type: ignore[union-attr]
            comm.all_reduce(mean)
            m.mul_(self.betas[0]).add_(mean, alpha=1 - self.betas[0])
            v.mul_(self.betas[1]).addcmul_(mean, mean, value=1 - self.betas[1])
        squares = torch.stack([p.grad.double().square().sum() for p in self.params])  # type: ignore[union-attr]
        self.own = self.own * self.betas[1] + squares * (1 - self.betas[1])

    def candidates(self, opt: onebit.OneBitLamb, comm: Comm) -> dict[str, Tensor]:
        own = self.own / comm.size
        comm.all_reduce(own)
        momentum = torch.stack([m.double().norm() for m in opt.decoded_momentum()])
        exact = torch.stack([v.double().sum() for v in self.v])
        if self.at_switch is None:
            self.at_switch = own, momentum, exact
        first = self.at_switch
        frozen = [opt.state[p]["variance"].float() for p in self.params]
        taken, lamb = [], []
        for m, v, f, compressed in zip(self.m, self.v, frozen, opt.decoded_momentum(), strict=True):
            lamb.append((m / (v.sqrt() + 1e-8)).double().norm())
            taken.append((compressed / (f.sqrt() + 1e-8)).double().norm())
        weight = torch.stack([p.detach().double().norm() for p in self.params])
        coeff = (weight / torch.stack(lamb)).clamp(0.01, 10.0)
        average = torch.stack([opt.state[p]["coeff_avg"].double() for p in self.params])
        return {
            "needed": coeff * torch.stack(lamb) / torch.stack(taken) / average,
            "used": torch.stack([opt.state[p]["ratio"].double() for p in self.params]),
            "exact": (first[2] / exact).sqrt(),
            "gradient": (first[0] / own).sqrt(),
            "momentum": first[1] / momentum,
        }


def work(task: tasks.Task, study: dict[str, Any], seed: int, comm: Comm) -> list[dict[str, Any]]:
    with tasks._building:
        model = task.build(seed)
    steps = study["train"]["steps"]
    recipe = parse({section: study[section] for section in ("data", "optimizer", "train")}, {})
    opt, _ = build_optimizer(recipe, model, comm)
    assert isinstance(opt, onebit.OneBitLamb)
    params = [p for group in opt.param_groups for p in group["params"]]
    shadow, rows = Shadow(params, tuple(study["optimizer"]["betas"])), []
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = recipe.lr * lr_factor(recipe, step)
        opt.zero_grad()
        task.loss(model, task.batch(comm.rank, step, seed)).backward()
        shadow.follow(comm)
        was = opt.stage
        opt.step()
        if opt.stage is onebit.Stage.WARMUP:
            continue
        if was is onebit.Stage.WARMUP or (step + 1) % EVERY == 0:
            found = shadow.candidates(opt, comm)
            needed = found.pop("needed")
            live = torch.isfinite(needed) & (needed > 0)
            rows.append(
                {
                    "step": step + 1,
                    "needed": [float(q) for q in needed[live].quantile(torch.tensor([0.1, 0.5, 0.9]).double())],
                    **{
                        name: {"rank": correlation(x[live], needed[live]), "median": float(x[live].median())}
                        for name, x in found.items()
                    },
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    study = tomllib.loads(args.study.read_text())
    text = studies.fetch_text(args.out.parent / "text", study["megabytes"])
    study["data"].setdefault("text", [str(text)])
    task = tasks.TASKS[study["task"]](study)
    rows = onebit.run_workers(study["train"]["workers"], lambda comm: work(task, study, args.seed, comm))[0]
    args.out.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1))
    for row in rows:
        shown = ", ".join(f"{k} {v['rank']:+.2f} ({v['median']:.2f})" for k, v in row.items() if isinstance(v, dict))
        print(f"step {row['step']}: needed {[round(q, 2) for q in row['needed']]}; {shown}")


if __name__ == "__main__":
    main()
