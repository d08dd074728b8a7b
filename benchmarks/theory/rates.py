"""Runs of 1-bit Adam-like and 1-bit LAMB-like steps on problems with known constants, and the orders fitted to them.

A step, for layer l with frozen preconditioner V = diag(1 / (sqrt(v) + eps)):  x -= gamma c_{l,t} V m_t,  m_t the
compressed mean of beta m_{t-1} + (1 - beta) g_t^i. The methods:

  exact          c = 1, the mean in full precision
  adam           c = 1
  lamb           c differs between layers and moves by up to 5 % a step; both errors are scaled by c_{t-1} / c_t, the
                 form that the analysis treats
  lamb unscaled  the same without that factor, the default and the release (DEV-4)

Measured: (1/T) sum over t of ||grad f(x_t)||_V^2, at the parameters and not at the virtual sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.theory.lockstep import Lockstep
from onebit.codec import OneBit

SHAPES = ((96,), (32,), (64,), (64,))  # 256 elements: no padding up to 32 workers
DIM = 256
BETA = 0.9
START = 0.2
METHODS = ("exact", "adam", "lamb", "lamb unscaled")


@dataclass(frozen=True)
class Problem:
    """A smooth function of DIM variables.

    Attributes:
        gradient: [runs, DIM] -> [runs, DIM].
        smoothness: L, the Lipschitz constant of the gradient.
        start: draws x_0, [runs, DIM].
    """

    name: str
    gradient: Callable[[Tensor], Tensor]
    smoothness: float
    start: Callable[[int, torch.Generator], Tensor]


def curvatures() -> Tensor:
    """Of the quadratic, [DIM]: from 1/4 to 1 in equal ratios, in an order that spreads them over the layers."""
    ladder = torch.logspace(math.log2(0.25), 0, DIM, base=2, dtype=torch.float64)
    return ladder[torch.randperm(DIM, generator=torch.Generator().manual_seed(1))]


def quadratic() -> Problem:
    """1/2 sum h x^2, L = 1, from x_0 = START in every coordinate."""
    h = curvatures()

    def start(runs: int, _: torch.Generator) -> Tensor:
        return torch.full((runs, DIM), START, dtype=torch.float64)

    return Problem("quadratic", lambda x: h * x, 1.0, start)


def rippled() -> Problem:
    """Non-convex: sum over the coordinates of z = Q x, Q a reflection, of z^2 / 40 + 0.95 / 16 (1 - cos 4 z).

    Second derivatives in each z lie in [-0.9, 1], so L = 1; several minima in each z.
    """
    u = torch.nn.functional.normalize(
        torch.randn(DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64), dim=0
    )

    def reflect(x: Tensor) -> Tensor:
        return x - 2 * (x @ u).unsqueeze(1) * u

    def gradient(x: Tensor) -> Tensor:
        z = reflect(x)
        return reflect(z / 20 + 0.95 / 4 * (4 * z).sin())

    def start(runs: int, random: torch.Generator) -> Tensor:
        return reflect(4 * torch.rand(runs, DIM, generator=random, dtype=torch.float64) - 2)

    return Problem("rippled", gradient, 1.0, start)


PROBLEMS = {"quadratic": quadratic, "rippled": rippled}


def preconditioner() -> Tensor:
    """V, [DIM]: frozen, between 1/2 and 2."""
    draws = torch.rand(DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (2 * draws - 1).exp2()


def coefficients(method: str, step: int) -> Tensor:
    """c of this step, [layers]."""
    layers = torch.arange(len(SHAPES), dtype=torch.float64)
    if not method.startswith("lamb"):
        return torch.ones_like(layers)
    level = torch.tensor([0.7, 1.3, 0.9, 1.1], dtype=torch.float64)
    return level * (0.35 * (2 * math.pi * step / 50 + layers).sin()).exp()


@dataclass(frozen=True)
class Setting:
    """What a run is, its step size aside.

    Attributes:
        noise: standard deviation of each element of a worker's gradient (sigma = noise * sqrt(DIM)).
        spread: standard deviation of a constant vector that each worker's gradient has in excess; they sum to zero
            over the workers, so the mean gradient is exact, sigma is 0 and only the compression errs.
        feedback: False drops the errors.
    """

    problem: str
    method: str
    workers: int
    noise: float = 1.0
    spread: float = 0.0
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.problem not in PROBLEMS:
            raise ValueError(f"{self}: the method must be one of {METHODS}, the problem one of {tuple(PROBLEMS)}")


@dataclass(frozen=True)
class Result:
    """One value per run. `mean`: of ||grad f||_V^2 over all steps; `tail`: over the second half; `error`: root mean
    square over the second half of ||mean worker error + server error||."""

    mean: NDArray[np.float64]
    tail: NDArray[np.float64]
    error: NDArray[np.float64]


def trajectory(setting: Setting, gamma: float, steps: int, runs: int, seed: int) -> Result:
    """Run a setting `runs` times from different draws, with a constant gamma.

    Raises:
        FloatingPointError: the gradient is no longer finite.
    """
    problem, n = PROBLEMS[setting.problem](), setting.workers
    random = torch.Generator().manual_seed(seed)
    lock = Lockstep(SHAPES, n, OneBit(), runs, setting.feedback)
    v = preconditioner()
    x = problem.start(runs, random)
    excess = setting.spread * torch.randn(runs, n, DIM, generator=random, dtype=torch.float64)
    excess -= excess.mean(1, keepdim=True)
    m = torch.zeros(runs, DIM, dtype=torch.float64)
    norms, errors = torch.zeros(2, steps, runs, dtype=torch.float64)
    for t in range(steps):
        gradient = problem.gradient(x)
        norms[t] = (v * gradient.square()).sum(1)
        local = gradient.unsqueeze(1) + excess
        if setting.noise:
            local += setting.noise * torch.randn(runs, n, DIM, generator=random, dtype=torch.float64)
        coeff = coefficients(setting.method, t)
        if setting.method == "exact":
            m = BETA * m + (1 - BETA) * local.mean(1)
        else:
            ratio = coefficients("lamb", t - 1) / coeff if setting.method == "lamb" and t else None
            m = lock.mean(BETA * m.unsqueeze(1) + (1 - BETA) * local, ratio)
            errors[t] = lock.error.square().sum(1)
        x = x - gamma * lock.spread(coeff) * v * m
    if not bool(norms.isfinite().all()):
        raise FloatingPointError(f"{setting} with gamma = {gamma} diverged within {steps} steps; use a smaller gamma")
    half = steps // 2
    return Result(norms.mean(0).numpy(), norms[half:].mean(0).numpy(), errors[half:].mean(0).sqrt().numpy())


def prediction(workers: int, gamma: float, steps: int, noise: float = 1.0) -> float:
    """The mean of ||grad f||_V^2 for `exact` on the quadratic, to first order in gamma and after convergence.

    The way down gives (f(x_0) - f*) / (gamma T), the noise gamma / (2 n) sum of V^2 h noise^2.
    """
    h, v = curvatures(), preconditioner()
    start = float((h * START**2).sum() / 2)
    return start / (gamma * steps) + gamma * noise**2 * float((v.square() * h).sum()) / (2 * workers)


@dataclass(frozen=True)
class Slope:
    """An exponent with its 95 % interval by bootstrap over the runs."""

    value: float
    low: float
    high: float


def slopes(cells: Sequence[tuple[Sequence[float], NDArray[np.float64]]], seed: int = 0) -> list[Slope]:
    """The exponents b of value = a * prod_k (variable_k ^ b_k), by least squares in logarithms.

    Args:
        cells: (variables, values of the runs) of each cell of a design; the mean over the runs is what is fitted.

    Raises:
        ValueError: a value is not positive, so no power law.
    """
    if not all(bool((values > 0).all()) for _, values in cells):
        raise ValueError(f"a power law needs positive values, got {cells}; leave such cells out")
    design = np.array([[1.0, *np.log(variables)] for variables, _ in cells])
    random = np.random.default_rng(seed)

    def fit(means: Sequence[float]) -> NDArray[np.float64]:
        solution: NDArray[np.float64] = np.linalg.lstsq(design, np.log(means), rcond=None)[0]
        return solution[1:]

    best = fit([float(values.mean()) for _, values in cells])
    again = np.array([fit([random.choice(values, len(values)).mean() for _, values in cells]) for _ in range(1000)])
    low, high = np.percentile(again, [2.5, 97.5], axis=0)
    return [Slope(*row) for row in np.stack([best, low, high], 1).tolist()]
