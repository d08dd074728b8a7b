"""The methods of the comparison as whole trainings, for the held-out loss. Imported by loss_worker.py.

Each is made of the same pieces as the rows of rows.py that time it: the same optimizer, the same hook, the same
averages. A training changes its stage after so many steps, where `rows.METHODS` says that a run has two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import onebit
from benchmarks.network.local_steps import DiLoCo
from benchmarks.network.rows import METHODS, bf16_hook
from onebit.comm import Distributed, Solo

LOCAL_STEPS = 8
"""Of PostLocalSGD and DiLoCo, as compare.py's default."""
BETAS, WEIGHT_DECAY = (0.9, 0.98), 0.01  # the demo's recipe


@dataclass
class Run:
    """What a training is made of.

    Attributes:
        model: the same weights on every worker.
        lr: peak learning rate.
        warmup: steps of the first stage.
    """

    model: nn.Module
    lr: float
    warmup: int


@dataclass
class Trained:
    """A training, ready to go.

    Attributes:
        forward: the model, or DDP around it.
        optimizer: whose step follows backward, and whose rates the schedule changes.
        after: what follows that.
    """

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    after: Callable[[], None] = lambda: None


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases and LayerNorm weights, all of one dimension, get no weight decay."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


def adamw(run: Run) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(run.model), lr=run.lr, betas=BETAS, fused=True)


def lamb(run: Run) -> torch.optim.Optimizer:
    """On gradients as they are: whoever computed them has averaged them, or not."""
    return onebit.Lamb(groups(run.model), lr=run.lr, betas=BETAS, comm=Solo())


Update = Callable[[Run], torch.optim.Optimizer]


def ddp(run: Run, state: Any = None, hook: Any = None, update: Update = adamw) -> Trained:
    """DDP; with a hook, so many steps of the bf16 hook and then this one. One bucket, as PowerSGD needs."""
    model = DistributedDataParallel(run.model, gradient_as_bucket_view=True, bucket_cap_mb=10_000)
    if hook is not None:
        model.register_comm_hook(state, after(run.warmup, hook))
    return Trained(model, update(run))


def after(steps: int, hook: Any) -> Any:
    """The bf16 hook for so many steps, then another."""
    done = 0

    def chosen(state: Any, bucket: Any) -> Any:
        nonlocal done
        now = bf16_hook if done < steps else hook
        done += bucket.is_last()
        return now(state if now is hook else None, bucket)

    # DDP looks at the annotations of a hook as objects
    chosen.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    return chosen


def power_sgd(run: Run, rank: int, update: Update = adamw) -> Trained:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return ddp(run, state, powerSGD_hook.powerSGD_hook, update)


def post_local_sgd(run: Run, update: Update = adamw) -> Trained:
    """Every worker is a host of its own. Weights are averaged after steps that LOCAL_STEPS divides."""
    alone = dist.new_subgroups(1)[0]
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=0)
    trained = ddp(run, state, post_localSGD_hook.post_localSGD_hook, update)
    first = (run.warmup // LOCAL_STEPS + 1) * LOCAL_STEPS  # the averager counts steps from 0
    averager = PeriodicModelAverager(period=LOCAL_STEPS, warmup_steps=first - 1)
    trained.after = lambda: averager.average_parameters(run.model.parameters())
    return trained


def diloco(run: Run) -> Trained:
    return Trained(run.model, adamw(run), DiLoCo(run.model.parameters(), Distributed(), LOCAL_STEPS).step)


def ours(run: Run, make: Callable[..., Any], stage: str = "", **settings: Any) -> Trained:
    """One of this library's optimizers; `stage` is its name for the length of the first stage, if it has one."""
    if stage:
        settings[stage] = run.warmup
    return Trained(run.model, make(groups(run.model), lr=run.lr, betas=BETAS, comm=Distributed(), **settings))


@dataclass(frozen=True)
class Training:
    """A method that is trained.

    Attributes:
        family: whose learning rate it takes, of RATES.
        build: makes it.
        methods: names in rows.METHODS whose steps it stands for: they differ in how gradients travel, not in what is
            computed of them beyond the rounding to 16 bits.
        note: what sets it apart from another one for the same methods. Those with LAMB are timed with AdamW.
    """

    family: str
    build: Callable[[Run], Trained]
    methods: tuple[str, ...]
    note: str = ""

    def warmup(self, steps: int) -> int:
        """Of so many steps, those of the first stage; 0 if there is one only."""
        method = next(m for m in METHODS if m.name == self.methods[0])
        return round(method.share * steps) if method.warmup else 0


_lamb = partial(ours, make=onebit.OneBitLamb, stage="freeze_step")
_adam = partial(ours, make=onebit.OneBitAdam, stage="freeze_step")
TRAININGS: dict[str, Training] = {
    "ddp-adamw": Training("adam", ddp, ("DDP fp32", "DDP, bf16 hook", "DDP, fp16 hook")),
    "lamb": Training("lamb", partial(ours, make=onebit.Lamb), ("LAMB, fp32", "LAMB, bf16")),
    "diloco": Training("diloco", diloco, ("DiLoCo",)),
    "powersgd-1": Training("adam", partial(power_sgd, rank=1), ("DDP, PowerSGD rank 1, bf16 hook before",)),
    "powersgd-4": Training("adam", partial(power_sgd, rank=4), ("DDP, PowerSGD rank 4, bf16 hook before",)),
    "post-local-sgd": Training("adam", post_local_sgd, ("PostLocalSGD, bf16 hook before",)),
    "powersgd-1-lamb": Training(
        "lamb", partial(power_sgd, rank=1, update=lamb), ("DDP, PowerSGD rank 1, bf16 hook before",), note="with LAMB"
    ),
    "powersgd-4-lamb": Training(
        "lamb", partial(power_sgd, rank=4, update=lamb), ("DDP, PowerSGD rank 4, bf16 hook before",), note="with LAMB"
    ),
    "post-local-sgd-lamb": Training(
        "lamb", partial(post_local_sgd, update=lamb), ("PostLocalSGD, bf16 hook before",), note="with LAMB"
    ),
    "lamb-int4": Training("lamb", partial(ours, make=onebit.Lamb, transport="int4"), ("LAMB, int4",)),
    "1bit-lamb": Training("lamb", partial(_lamb, warmup_transport="fp32"), ("1-bit LAMB, fp32 warm-up",)),
    "1bit-lamb-bf16": Training(
        "lamb",
        partial(_lamb, warmup_transport="bf16"),
        ("1-bit LAMB, bf16 warm-up", "1-bit LAMB, bf16 warm-up, overlap"),
    ),
    "1bit-lamb-int4": Training(
        "lamb",
        partial(_lamb, warmup_transport="int4"),
        ("1-bit LAMB, int4 warm-up", "1-bit LAMB, int4 warm-up, overlap"),
    ),
    "1bit-lamb-paper": Training("lamb", partial(_lamb, **onebit.PAPER), ("1-bit LAMB, PAPER",)),
    "1bit-adam": Training("adam", partial(_adam, warmup_transport="fp32"), ("1-bit Adam, fp32 warm-up",)),
    "1bit-adam-paper": Training("adam", partial(_adam, **onebit.PAPER), ("1-bit Adam, PAPER",)),
    "local-lamb": Training(
        "lamb",
        partial(ours, make=onebit.LocalVarianceLamb, stage="warmup_steps"),
        ("local-variance LAMB, 5 % warm-up",),
    ),
}
RATES: dict[str, tuple[str, tuple[float, ...]]] = {
    "adam": ("ddp-adamw", (0.001, 0.002, 0.004)),
    "lamb": ("lamb", (0.01, 0.02, 0.03)),
    "diloco": ("diloco", (0.000125, 0.00025, 0.0005, 0.001)),
}
"""By family: the training whose held-out loss at the end chooses the rate, and the rates that are tried."""
