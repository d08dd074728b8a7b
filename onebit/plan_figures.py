"""Figures of a plan: the parts of each method's step, and the map of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from onebit.errors import ConfigError
from onebit.figures import INK, PALETTE, STYLE
from onebit.planner import Plan, StepTime
from onebit.planner_methods import METHODS
from onebit.planner_sweep import Cell

PARTS = {
    "compute": ("compute_s",),
    "waits for the slowest": ("straggling_s",),
    "kernels": ("encode_s", "server_s", "update_s"),
    "network": ("local_mean_s", "all_to_all_s", "all_gather_s", "all_reduce_s"),
}
COLOURS = (*PALETTE, "#999999", "#332288", "#117733", "#882255", "#ddcc77", "#aa4499", "#44aa99", "#661100", "#6699cc")
"""One for each method, the same in every map."""


def draw_plan(done: Plan, path: Path) -> None:
    """A bar for each method: compute, waits, kernels, and the network's part that nothing hides; lines span the range.

    Raises:
        ConfigError: the file cannot be written, or its ending names no format.
    """
    with mpl.rc_context(STYLE):
        figure = _figure(9, 4.6)
        axes = figure.subplots()
        names = list(done.rows)
        left = [0.0] * len(names)
        for (title, keys), colour in zip(PARTS.items(), PALETTE, strict=False):
            parts = [done.rows[name].likely.parts for name in names]
            widths = [1e3 * _seen_s(p, title, keys) for p in parts]
            label = f"{title}, less what is hidden" if title == "network" else title
            axes.barh(names, widths, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, name in enumerate(names):
            step = done.rows[name].step_s
            axes.plot([1e3 * step.low, 1e3 * step.high], [place, place], color=INK, lw=1.2)
        axes.invert_yaxis()
        axes.set_xlabel("mean step, ms")
        net = done.setup.network
        axes.set_title(f"{done.setup.model.parameters:,} parameters, {net.workers} workers, {net.machines} machines")
        figure.legend(loc="outside lower center", ncols=4)
        _save(figure, path)


def _seen_s(parts: StepTime, title: str, keys: Sequence[str]) -> float:
    """Seconds of a part of a step without what is hidden: of the network first, what is left of it of kernels."""
    whole = math.fsum(getattr(parts, key) for key in keys)
    if title == "network":
        return max(0.0, whole - parts.hidden_s)
    if title == "kernels":
        return whole - max(0.0, parts.hidden_s - math.fsum(getattr(parts, key) for key in PARTS["network"]))
    return whole


def draw_map(cells: Sequence[Cell], path: Path) -> None:
    """Which method is the fastest, of all and of this library's: a panel for each number of parameters.

    Raises:
        ConfigError: as in `draw_plan`.
    """
    sizes = list(dict.fromkeys(c.parameters for c in cells))
    workers = list(dict.fromkeys(c.workers for c in cells))
    rates = sorted({c.link_gbit_s for c in cells})
    names = list(METHODS)
    colours = ListedColormap(COLOURS[: len(names)])
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure = _figure(2.2 * len(sizes) + 1, 5.6)
        panels = figure.subplots(2, len(sizes), sharex=True, sharey=True, squeeze=False)
        for row, (key, title) in enumerate((("fastest", "of all"), ("fastest_here", "of this library"))):
            for axes, size in zip(panels[row], sizes, strict=True):
                found = {
                    (c.workers, c.link_gbit_s): names.index(getattr(c, key)) for c in cells if c.parameters == size
                }
                grid = [[found[n, rate] for n in workers] for rate in rates]
                axes.imshow(grid, origin="lower", aspect="auto", cmap=colours, vmin=-0.5, vmax=len(names) - 0.5)
                axes.set_title(f"{size / 1e9:g} B, {title}")
                axes.set_xticks(range(0, len(workers), 3), [f"{n:,}" for n in workers[::3]])
                axes.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        panels[0][0].set_ylabel("Gbit/s")
        panels[1][0].set_ylabel("Gbit/s")
        panels[1][len(sizes) // 2].set_xlabel("workers (computed, not measured)")
        shown = {getattr(c, key) for c in cells for key in ("fastest", "fastest_here")}
        patches = [Patch(color=COLOURS[i], label=name) for i, name in enumerate(names) if name in shown]
        figure.legend(handles=patches, loc="outside lower center", ncols=5)
        _save(figure, path)


def _figure(width_in: float, height_in: float) -> Any:
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be drawn: {error}; give a path in a folder that exists, ending in .svg, .png or .pdf"
        ) from None
