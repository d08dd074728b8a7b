"""The virtual sequences of the analysis, followed along compressed runs in float64.

Indices: worker i has the gradient g_t^i at x_t and sends beta m_{t-1} + (1 - beta) g_t^i; g_t is the mean of the g_t^i;
m_t is what the exchange returned; d_t is mean worker error + server error left after step t; r_t is the factor on both
errors in step t; x_{t+1} = x_t - gamma_t (m_t + weight_decay x_t), with gamma_t elementwise, the coefficient of the
layer and the frozen preconditioner included. All rest on conservation:

  m_t = beta m_{t-1} + (1 - beta) g_t + r_t d_{t-1} - d_t
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.theory.lockstep import Lockstep
from onebit.codec import OneBit

SHAPES = ((5, 3), (40,), (7,))
WORKERS = 4


@dataclass(frozen=True)
class Trajectory:
    """A run of T steps: rows t = 0..T-1 of x_t, m_t, d_t, g_t and gamma_t, each [T, numel]."""

    x: Tensor
    m: Tensor
    d: Tensor
    g: Tensor
    gamma: Tensor
    beta: float
    weight_decay: float


@dataclass(frozen=True)
class Plan:
    """What decides a run.

    Attributes:
        steady: constant step sizes; otherwise a decaying learning rate times coefficients that move by up to 10 % a
            step.
        feedback: r_t = 1, gamma_{t-1} / gamma_t, its inverse, or gamma_{t-2} / gamma_{t-1}.
        step_units: the momentum holds gamma_t g_t, and x_{t+1} = x_t - m_t.
    """

    steady: bool = False
    feedback: str = "ratio"
    weight_decay: float = 0.0
    step_units: bool = False
    codec: OneBit = OneBit()  # noqa: RUF009 -- frozen
    steps: int = 300
    seed: int = 0


def step_sizes(plan: Plan, random: torch.Generator) -> Tensor:
    """The layerwise step sizes of all steps, [steps, layers]."""
    wander = torch.rand(plan.steps, len(SHAPES), generator=random, dtype=torch.float64) * 0.2 - 0.1
    coeff = (wander.log1p().cumsum(0)).sin().exp()  # in [1/e, e]
    decay = 1 - 0.9 * torch.arange(plan.steps, dtype=torch.float64).unsqueeze(1) / plan.steps
    return 0.02 * (coeff[:1].expand_as(coeff) if plan.steady else coeff * decay)


def factor(plan: Plan, rates: Tensor, t: int) -> Tensor | None:
    """r_t, [layers]; None for 1."""
    if plan.feedback == "one" or t == 0:
        return None
    if plan.feedback == "late":
        return rates[t - 2] / rates[t - 1] if t > 1 else None
    ratio = rates[t - 1] / rates[t]
    return ratio if plan.feedback == "ratio" else ratio.reciprocal()


def follow(plan: Plan) -> Trajectory:
    """Run the plan on a quadratic with noisy gradients, each worker with noise of its own."""
    random = torch.Generator().manual_seed(plan.seed)
    lock = Lockstep(SHAPES, WORKERS, plan.codec)
    numel, beta = lock.layout.numel, 0.9
    real = lock.layout.zeros(torch.float64, torch.device("cpu"))
    for view in lock.layout.views(real):
        view.fill_(1.0)
    curvature = torch.rand(numel, generator=random, dtype=torch.float64) + 0.1
    precondition = (torch.randn(numel, generator=random, dtype=torch.float64) / 2).exp() * real
    rates = step_sizes(plan, random)
    x = torch.randn(numel, generator=random, dtype=torch.float64) * real
    m = torch.zeros_like(x)
    rows: list[tuple[Tensor, ...]] = []
    for t in range(plan.steps):
        noise = torch.randn(WORKERS, numel, generator=random, dtype=torch.float64)
        grads = (curvature * x + noise) * real
        gamma = lock.spread(rates[t]) * precondition
        fresh = grads * gamma if plan.step_units else grads
        m = lock.mean((beta * m + (1 - beta) * fresh).unsqueeze(0), factor(plan, rates, t))[0]
        rows.append((x, m, lock.error[0], grads.mean(0), gamma))
        x = x - (m if plan.step_units else gamma * (m + plan.weight_decay * x))
    xs, ms, ds, gs, gammas = (torch.stack(column) for column in zip(*rows, strict=True))
    return Trajectory(xs, ms, ds, gs, gammas, beta, plan.weight_decay)


def deviation(left: Tensor, right: Tensor) -> float:
    """How far two sequences [T, numel] are apart: the largest, over rows, of distance over norm of the right one."""
    return float(((left - right).norm(dim=1) / right.norm(dim=1)).max())


def moves(y: Tensor) -> Tensor:
    return y[1:] - y[:-1]


def constant(run: Trajectory) -> float:
    """y_t = x_t - gamma (m_t + d_t) / (1 - beta): y_{t+1} - y_t = -gamma g_{t+1} - gamma weight_decay x_t."""
    y = run.x - run.gamma * (run.m + run.d) / (1 - run.beta)
    return deviation(moves(y), -run.gamma[1:] * run.g[1:] - run.gamma[:-1] * run.weight_decay * run.x[:-1])


def printed(run: Trajectory) -> float:
    """As printed, y_t = x_t - (gamma_t m_t + gamma_{t-1} d_t) / (1 - beta): y_{t+1} - y_t = -gamma_t g_{t+1}."""
    before = torch.cat([run.gamma[:1], run.gamma[:-1]])
    y = run.x - (run.gamma * run.m + before * run.d) / (1 - run.beta)
    return deviation(moves(y), -run.gamma[:-1] * run.g[1:])


def varying_without_term(run: Trajectory) -> float:
    """y_t = x_t - gamma_t (m_t + d_t) / (1 - beta): y_{t+1} - y_t = -gamma_{t+1} g_{t+1}; a term is missing."""
    y = run.x - run.gamma * (run.m + run.d) / (1 - run.beta)
    return deviation(moves(y), -run.gamma[1:] * run.g[1:])


def varying(run: Trajectory) -> float:
    """The same with the term that exact momentum has too: - beta / (1 - beta) (gamma_{t+1} - gamma_t) m_t."""
    y = run.x - run.gamma * (run.m + run.d) / (1 - run.beta)
    extra = run.beta / (1 - run.beta) * moves(run.gamma) * run.m[:-1]
    return deviation(moves(y), -run.gamma[1:] * run.g[1:] - extra)


def parameters(run: Trajectory) -> float:
    """w_t = x_t - gamma_{t-1} d_{t-1}: w_{t+1} - w_t = -gamma_t (beta m_{t-1} + (1 - beta) g_t)."""
    w = run.x[1:] - run.gamma[:-1] * run.d[:-1]  # w_1, w_2, ...
    return deviation(moves(w), (-run.gamma[1:] * (run.beta * run.m[:-1] + (1 - run.beta) * run.g[1:]))[:-1])


def step_units(run: Trajectory) -> float:
    """Momentum of gamma_t g_t, y_t = x_t - (m_t + d_t) / (1 - beta): y_{t+1} - y_t = -gamma_{t+1} g_{t+1}."""
    y = run.x - (run.m + run.d) / (1 - run.beta)
    return deviation(moves(y), -run.gamma[1:] * run.g[1:])


STEADY = Plan(steady=True)
HOLD: dict[str, tuple[Callable[[Trajectory], float], Plan]] = {
    "constant step": (constant, STEADY),
    "constant step, weight decay": (constant, Plan(steady=True, weight_decay=0.1)),
    "varying step, with the momentum term": (varying, Plan()),
    "parameter level, r = gamma_(t-1) / gamma_t": (parameters, Plan()),
    "momentum in step units, r = 1": (step_units, Plan(feedback="one", step_units=True)),
}
FAIL: dict[str, tuple[Callable[[Trajectory], float], Plan]] = {
    "varying step, as printed": (printed, Plan()),
    "varying step, without the momentum term": (varying_without_term, Plan()),
    "varying step, with the momentum term, r = 1": (varying, Plan(feedback="one")),
    "parameter level, r = 1": (parameters, Plan(feedback="one")),
    "parameter level, r inverted": (parameters, Plan(feedback="inverted")),
    "parameter level, r one step late": (parameters, Plan(feedback="late")),
}


def measure() -> dict[str, dict[str, float]]:
    """The deviation of every identity: {"hold" | "fail": {name: deviation}}."""
    return {
        kind: {name: check(follow(plan)) for name, (check, plan) in table.items()}
        for kind, table in (("hold", HOLD), ("fail", FAIL))
    }


def main() -> None:
    for kind, table in measure().items():
        for name, value in table.items():
            assert math.isfinite(value)
            print(f"{kind}  {value:8.1e}  {name}")


if __name__ == "__main__":
    main()
