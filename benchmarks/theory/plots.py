"""The plots of the studies, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

NAMES = {"exact": "full precision", "adam": "1-bit Adam-like", "lamb": "1-bit LAMB-like"}
MARKS = {"exact": "s", "adam": "o", "lamb": "^"}
METRIC = r"mean over $t$ of $\|\nabla f(x_t)\|_V^2$"


def draw(name: str, study: dict[str, Any], folder: Path) -> None:
    """Draw a study under its name; the virtual sequences and the bounds have no plot."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "onebit"  # the same file for the same numbers
    kind, _, problem = name.partition(", ")
    if kind == "speed-up":
        _save(_speed_up(study, problem), folder / f"speed-up-{problem}")
    elif kind == "compression":
        _save(_compression(study, problem), folder / f"compression-{problem}")
    elif kind == "constant step":
        _save(_constant_step(study), folder / "constant-step")


def _save(figure: Any, stem: Path) -> None:
    figure.tight_layout()
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(stem.with_suffix(".png"), dpi=110)
    plt.close(figure)


def _guide(axes: Any, x: list[float], anchor: tuple[float, float], order: float, label: str) -> None:
    """A line of the given slope in logarithms through a point."""
    ends = np.array([min(x), max(x)])
    axes.plot(ends, anchor[1] * (ends / anchor[0]) ** order, "k:", linewidth=1, label=label)


def _axes(count: int) -> tuple[Any, Any]:
    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, 4.2), squeeze=False)
    for ax in axes[0]:
        ax.set_xscale("log")
        ax.set_yscale("log")
    return figure, axes[0]


def _speed_up(study: dict[str, Any], problem: str) -> Any:
    figure, (left, right) = _axes(2)
    for method in NAMES:
        rows = study[method]["rows"]
        left.plot([r["n"] * r["T"] for r in rows], [np.mean(r["mean"]) for r in rows], MARKS[method], alpha=0.7)
        left.lines[-1].set_label(NAMES[method])
    rows = study["exact"]["rows"]
    products = [r["n"] * r["T"] for r in rows]
    if "predicted" in rows[0]:
        pairs = sorted({(r["n"] * r["T"], r["predicted"]) for r in rows})
        left.plot(*zip(*pairs, strict=True), "k-", linewidth=1, label="predicted, full precision")
    else:
        _guide(left, products, (rows[0]["T"], np.mean(rows[0]["mean"])), -0.5, r"slope $-1/2$")
    left.set(xlabel=r"$nT$", ylabel=METRIC, title=rf"{problem}: $\gamma \propto \sqrt{{n/T}}$")
    left.legend()
    everything = study["adam minus exact"]["rows"]
    for n in sorted({r["n"] for r in everything}):
        excess = [r for r in everything if r["n"] == n]
        right.plot([r["T"] for r in excess], [np.mean(r["mean"]) for r in excess], "o-", label=f"{n} workers")
    _guide(right, [r["T"] for r in everything], (excess[0]["T"], np.mean(excess[0]["mean"])), -1, r"slope $-1$")
    right.set(xlabel=r"$T$", ylabel="1-bit Adam-like minus full precision", title="what the compression adds")
    right.legend()
    return figure


def _compression(study: dict[str, Any], problem: str) -> Any:
    figure, (left, right) = _axes(2)
    labels = {**NAMES, "lamb unscaled": "1-bit LAMB-like, errors unscaled"}
    labels["adam, no feedback"] = "1-bit Adam-like, no error feedback"
    for method, entry in study.items():
        if method not in labels:
            continue
        rate, floor = entry["rate"], entry.get("floor")
        left.plot([r["T"] for r in rate], [np.mean(r["mean"]) for r in rate], "o-", label=labels[method])
        if floor:
            right.plot([r["gamma"] for r in floor], [np.mean(r["tail"]) for r in floor], "o-", label=labels[method])
    first, lowest = study["adam"]["rate"][0], study["adam"]["floor"][0]
    _guide(left, [r["T"] for r in rate], (first["T"], np.mean(first["mean"])), -2 / 3, r"slope $-2/3$")
    _guide(right, [0.02, 0.08], (lowest["gamma"], np.mean(lowest["tail"])), 2, r"slope $2$")
    left.set(xlabel=r"$T$", ylabel=METRIC, title=rf"{problem}, $\sigma = 0$: $\gamma \propto T^{{-1/3}}$")
    right.set(xlabel=r"$\gamma$", ylabel=f"{METRIC}, second half", title=r"what is left at a constant $\gamma$")
    left.legend()
    right.legend()
    return figure


def _constant_step(study: dict[str, Any]) -> Any:
    figure, (axes,) = _axes(1)
    for method in NAMES:
        rows = study[method]["rows"]
        axes.plot([r["n"] for r in rows], [np.mean(r["tail"]) for r in rows], MARKS[method] + "-", label=NAMES[method])
    rows = study["exact"]["rows"]
    _guide(axes, [r["n"] for r in rows], (1, np.mean(rows[0]["tail"])), -1, r"slope $-1$")
    axes.set(xlabel=r"workers $n$", ylabel=f"{METRIC}, second half", title=rf"quadratic, $\gamma = {study['gamma']}$")
    axes.legend()
    return figure
