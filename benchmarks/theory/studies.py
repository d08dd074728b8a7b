"""What is run, and the numbers that come out: dictionaries for JSON, for the plots and for docs/theory.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.theory import bounded, identities
from benchmarks.theory.rates import PROBLEMS, Result, Setting, prediction, slopes, trajectory

Json = dict[str, Any]
Cells = list[tuple[Sequence[float], NDArray[np.float64]]]
WORKERS = (1, 2, 4, 8, 16, 32)
STEPS = (500, 1000, 2000, 4000)
WORK = 32_000  # n T is at most this
RUNS = 3
RESOLVED = (4, 8, 16)  # where the difference of two runs under the same noise is above its scatter
LEADING = 0.25  # gamma = LEADING sqrt(n / T): the step size that balances the first two terms of the bound
CUBIC = 0.3  # gamma = CUBIC T^(-1/3): the one that balances descent and compression where there is no noise
SPREAD = 16.0  # of the workers' gradients around their mean, where there is no noise


def virtual_sequences() -> Json:
    return identities.measure()


def boundedness() -> Json:
    """Errors over long runs within the guard, and past it: {multiplier: {gradients: norms}}."""
    plan = {1.0: 12_000, 1.3: 3_000, 1.55: 3_000, 1.6: 3_000, 1.7: 3_000}
    return {
        str(a): {"steps": steps, **{k: asdict(e) for k, e in bounded.measure(bounded.unguarded(a), steps).items()}}
        for a, steps in plan.items()
    }


def _seed(*labels: int) -> int:
    """One seed for each cell of a design, the same for all methods, so that they meet the same noise."""
    seed = 0
    for label in labels:
        seed = (seed * 1_000_003 + label) % 2**31
    return seed


def _row(result: Result, **labels: float) -> Json:
    return {**labels, "mean": result.mean.tolist(), "tail": result.tail.tolist(), "error": result.error.tolist()}


def _slopes(rows: list[Json], variables: Sequence[str], value: str) -> Json:
    """The fitted exponents of one value of the rows in some of their labels."""
    cells: Cells = [([row[v] for v in variables], np.array(row[value])) for row in rows]
    return {name: asdict(slope) for name, slope in zip(variables, slopes(cells), strict=True)}


def speed_up(problem: str) -> Json:
    """The leading term: gamma = LEADING sqrt(n / T), over n and T."""
    study: Json = {"order of the bound": {"n": -0.5, "T": -0.5}}
    for method in ("exact", "adam", "lamb"):
        rows = []
        for n in WORKERS:
            for steps in (steps for steps in STEPS if n * steps <= WORK):
                gamma = LEADING * math.sqrt(n / steps)
                result = trajectory(Setting(problem, method, n), gamma, steps, RUNS, _seed(n, steps))
                rows.append(_row(result, n=n, T=steps, gamma=gamma))
                if problem == "quadratic" and method == "exact":
                    rows[-1]["predicted"] = prediction(n, gamma, steps)
        study[method] = {"rows": rows}
    return fit_speed_up(study)


def fit_speed_up(study: Json) -> Json:
    """Add to the rows of `speed_up` the exponents fitted to them."""
    for method in ("exact", "adam", "lamb"):
        rows = study[method]["rows"]
        late = [row for row in rows if row["T"] >= 1000]
        study[method]["slopes"] = _slopes(rows, ("n", "T"), "mean")
        study[method]["slopes, T >= 1000"] = _slopes(late, ("n", "T"), "mean")
        if method != "exact":
            study[method]["error in n"] = _slopes(late, ("n",), "error")
    pairs = zip(study["adam"]["rows"], study["exact"]["rows"], strict=True)
    excess = [{**a, "mean": (np.array(a["mean"]) - np.array(b["mean"])).tolist()} for a, b in pairs]
    resolved = [row for row in excess if row["n"] in RESOLVED]
    study["adam minus exact"] = {"rows": resolved, "slopes": _slopes(resolved, ("n", "T"), "mean")}
    return study


def constant_step() -> Json:
    """What noise leaves at a constant step size: the bound's L gamma sigma^2 / n, on the quadratic."""
    study: Json = {"order of the bound": {"n": -1.0}, "gamma": 0.02}
    for method in ("exact", "adam", "lamb"):
        results = [(n, trajectory(Setting("quadratic", method, n), 0.02, 1600, RUNS, _seed(n))) for n in WORKERS]
        rows = [_row(result, n=n) for n, result in results]
        study[method] = {"rows": rows, "slopes": _slopes(rows, ("n",), "tail")}
    return study


def compression(problem: str) -> Json:
    """No noise, but workers whose gradients differ: sigma = 0, and what remains is the compression's.

    "floor": what is left at a constant gamma, order gamma^2. "rate": gamma = CUBIC T^(-1/3), order T^(-2/3), with and
    without error feedback. The workers' excess gradients are the same in all cells.
    """
    study: Json = {"order of the bound": {"gamma": 2.0, "T": -2 / 3}}
    for method, feedback in (("adam", True), ("lamb", True), ("lamb unscaled", True), ("adam", False)):
        setting = Setting(problem, method, 8, noise=0.0, spread=SPREAD, feedback=feedback)
        rate = []
        for steps in (250, 500, 1000, 2000):
            gamma = CUBIC * steps ** (-1 / 3)
            rate.append(_row(trajectory(setting, gamma, steps, RUNS, seed=0), T=steps, gamma=gamma))
        entry: Json = {"rate": rate, "mean in T": _slopes(rate, ("T",), "mean")}
        entry["tail in T"] = _slopes(rate, ("T",), "tail")
        if feedback:
            gammas = (0.02, 0.04, 0.08)
            results = [(g, trajectory(setting, g, int(24 / g), RUNS, seed=0)) for g in gammas]
            entry["floor"] = [_row(result, gamma=gamma) for gamma, result in results]
            entry["floor in gamma"] = _slopes(entry["floor"], ("gamma",), "tail")
        study[method if feedback else f"{method}, no feedback"] = entry
    return study


STUDIES: dict[str, Callable[[], Json]] = {
    "virtual sequences": virtual_sequences,
    "boundedness": boundedness,
    "constant step": constant_step,
    **{f"speed-up, {p}": partial(speed_up, p) for p in PROBLEMS},
    **{f"compression, {p}": partial(compression, p) for p in PROBLEMS},
}
