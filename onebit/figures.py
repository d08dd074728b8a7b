"""Figures of training runs: files beside the results, and SVG to put into a page.

A colour means the same optimizer in every figure. In a page it is a CSS variable, --c0 and so on, as are --ink, --grid
and --ground, so that the page decides how they look on a light and on a dark screen.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from onebit.report import finite_or_nan

Array = NDArray[np.float64]
Lines = Sequence[Mapping[str, Any]]  # of a metrics or layers file
Runs = Mapping[str, Sequence[Lines]]  # optimizer -> one file per seed

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, safe for colour-blind
MARKERS = "osD^vP"
DASHES = ("-", "--", "-.")
FAR = 1e3  # times the 90th percentile of a per-layer value, or below the 10th by it, is off the axis
INK, GRID, GROUND = "#24292f", "#d0d7dd", "#fefefe"  # words and lines; grid; behind them
STYLE = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": GRID, "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "font.size": 9, "axes.titlesize": 10,
    "legend.frameon": False, "legend.fontsize": 8,
    "svg.fonttype": "none", "svg.hashsalt": "onebit",
}  # fmt: skip

MARGINS = {"left": 0.16, "right": 0.98, "top": 0.91, "bottom": 0.25}  # fixed: to work them out is most of the time
LEGEND: dict[str, Any] = {"loc": "lower center", "ncols": 4, "columnspacing": 1.2, "handlelength": 1.4}


@dataclass(frozen=True)
class Against:
    """What the loss is drawn against: the key in a line of a metrics file, its label, what 1 on the axis stands for."""

    key: str
    label: str
    unit: float


STEPS = Against("step", "step", 1.0)
BYTES = Against("payload_total", "payload per worker, MB", 1e6)
TIME = Against("seconds", "time of the steps, s", 1.0)


def sends(runs: Runs) -> bool:
    """Whether any run handed bytes to a transport; one worker does not."""
    return any(line.get("payload_total") for seeds in runs.values() for lines in seeds for line in lines)


def switch(seeds: Sequence[Lines], key: str) -> float | None:
    """Where the compressed stage begins, by a key of the metrics: the mean over the seeds, None without a switch."""
    found = [line[key] for lines in seeds for line in lines if "switch_to" in line]
    return float(np.mean(found)) if found else None


def plot(runs: Runs, paths: Sequence[Path]) -> None:
    """Draw loss against steps and against bytes into files.

    Args:
        runs: optimizer -> the lines of its metrics files, one file a seed.
        paths: files to write; the ending says the format.
    """
    with mpl.rc_context(STYLE | {"svg.fonttype": "path"}):
        figure = _figure(11, 4.2)
        figure.set_layout_engine("constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, against in ((left, STEPS), (right, BYTES)):
            handles = _draw_loss(axes, runs, against)
        right.set_ylabel("")
        if len(handles) > 8:  # beside the figure, else it would cover the lines
            figure.legend(handles=handles, loc="outside right upper")
        else:
            left.legend(handles=handles)
        for path in paths:
            figure.savefig(path, dpi=150)


def loss_svg(runs: Runs, against: Against) -> str:
    """Loss against steps, bytes or time, to put into a page."""
    with mpl.rc_context(STYLE):
        columns = 3 if max(map(len, runs)) < 16 else 2
        more_in = 0.18 * max(0, math.ceil((len(runs) + 1) / columns) - 2)  # the legend has room for two lines
        height_in = 3.1 + more_in
        ends = {"top": 1 - 0.09 / height_in, "bottom": (0.9 + more_in) / height_in}
        figure = _figure(4.0, height_in)
        handles = _draw_loss(figure.subplots(gridspec_kw=MARGINS | ends), runs, against)
        figure.legend(handles=handles, **LEGEND | {"ncols": columns})
        return _inline(figure, f"loss-{against.key}", f"Loss against {against.label}")


def _draw_loss(axes: Any, runs: Runs, against: Against) -> list[Any]:
    """Points: held-out; thin: training, smoothed; over seeds their means, and a band of a standard deviation.

    Returns:
        What belongs into the legend.
    """
    handles, marks = [], []
    for index, (name, seeds) in enumerate(runs.items()):
        colour = PALETTE[index % len(PALETTE)]
        where, loss = _by_seed(seeds, "loss", against)
        thin = np.array([smooth([None if np.isnan(x) else x for x in row], 0.8) for row in loss])
        axes.plot(where.mean(0), thin.mean(0), color=colour, lw=0.8, alpha=0.5)
        where, loss = _by_seed(seeds, "eval_loss", against)
        x, mean = where.mean(0), loss.mean(0)
        if len(loss) > 1:
            sd = loss.std(0, ddof=1)
            axes.fill_between(x, mean - sd, mean + sd, color=colour, alpha=0.2, lw=0)
        handles += axes.plot(x, mean, ms=3.5, lw=1.6, label=name, **look(index))
        place = switch(seeds, against.key)
        if place is not None:
            marks.append(axes.axvline(place / against.unit, color=colour, lw=1.2, ls=":", label="switch"))
    if against.key == BYTES.key and sends(runs):
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis, *axes.get_xlim())
    axes.set_xlabel(against.label)
    axes.set_ylabel("loss, nats per masked token")
    return [*handles, *marks[:1]]


def look(index: int) -> dict[str, str]:
    """Colour, marker and dashes of the line at a place; where colours come round, the other two tell lines apart."""
    again = index // len(PALETTE)
    marker, dashes = MARKERS[(index + again) % len(MARKERS)], DASHES[again % len(DASHES)]
    return {"color": PALETTE[index % len(PALETTE)], "marker": marker, "ls": dashes}


def _plain_numbers(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis from low to high without powers; 1, 2 and 5 of each decade where there are decades."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 10 * low else MaxNLocator(5))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _by_seed(seeds: Sequence[Lines], kind: str, against: Against) -> tuple[Array, Array]:
    """Where, and the values of a kind: [seeds, lines] each, nan where a value is not finite."""
    chosen = [[line for line in lines if kind in line] for lines in seeds]
    where = np.array([[line[against.key] / against.unit for line in lines] for lines in chosen], dtype=np.float64)
    return where, np.array([[finite_or_nan(line[kind]) for line in lines] for lines in chosen], dtype=np.float64)


def smooth(values: Sequence[float | None], keep: float) -> list[float]:
    """Running average: each value enters with 1 - keep; the first stands for all before it. None stays out, as nan."""
    out: list[float] = []
    average: float | None = None
    for value in values:
        if value is None:
            out.append(math.nan)
            continue
        average = value if average is None else keep * average + (1 - keep) * value
        out.append(average)
    return out


# -- layers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A per-layer value: its name in layers.jsonl, its heading, the label of its axis, and if that is logarithmic."""

    name: str
    heading: str
    label: str
    log: bool


KINDS = (
    Kind("variance_norm", "Variance norms", "L1 norm of the variance", log=True),
    Kind("coefficient", "Coefficients c", "coefficient c", log=True),
    Kind("ratio", "Ratios r", "ratio r", log=False),
    Kind("momentum_scale", "Momentum scales", "momentum scale s", log=True),
    Kind("compression_error", "Compression error", "‖worker error‖ / ‖momentum‖", log=True),
)


def layer_svgs(records: Mapping[str, Lines], kind: Kind, switches: Mapping[str, float]) -> dict[str, str]:
    """A kind of per-layer value over the steps: a figure for each optimizer that has it, all with the same axes.

    Args:
        records: optimizer -> lines of its layers file; its place decides its colour.
        kind: which value.
        switches: optimizer -> the step at which to mark the switch; not marked for one that is not in it.
    """
    found = {name: _by_layer(lines, kind) for name, lines in records.items()}
    found = {name: (steps, values) for name, (steps, values) in found.items() if values.size}
    if not found:
        return {}
    limits = _limits(np.concatenate([values[np.isfinite(values)] for _, values in found.values()]), kind.log)
    last = max(line["step"] for lines in records.values() for line in lines)
    figures = {}
    for index, name in enumerate(records):
        if name not in found:
            continue
        with mpl.rc_context(STYLE):
            figure = _figure(4.0, 2.9)
            axes = figure.subplots(gridspec_kw=MARGINS)
            _draw_layers(axes, *found[name], PALETTE[index % len(PALETTE)])
            if name in switches:
                axes.axvline(switches[name], color=INK, lw=1.2, ls=":", label="switch")
            axes.set(title=name, xlabel="step", ylabel=kind.label, ylim=limits, xlim=(0, 1.02 * last))
            if kind.log:
                axes.set_yscale("log")
                if limits[1] < 200 * limits[0]:
                    _plain_numbers(axes.yaxis, *limits)
            _count_hidden(axes, found[name][1], limits)
            legend = figure.legend(**LEGEND)
            legend.get_lines()[0].set(alpha=0.8, lw=1)
            figures[name] = _inline(figure, f"{kind.name}-{index}", f"{kind.heading}, {name}, by layer over the steps")
    return figures


def _limits(values: Array, log: bool) -> tuple[float, float]:
    """The ends of an axis. On a logarithmic one a few layers far from all others do not press these together."""
    low, high = float(values.min()), float(values.max())
    if not log:
        margin = 0.05 * (high - low) + 0.02 * abs(high)
        return low - margin, high + margin
    tenth, ninetieth = np.percentile(values, [10, 90])
    low, high = max(low, float(tenth) / FAR), min(high, float(ninetieth) * FAR)
    margin = (high / low) ** 0.05 * 1.02
    return low / margin, high * margin


def _count_hidden(axes: Any, values: Array, limits: tuple[float, float]) -> None:
    """Say how many layers go beyond the axis."""
    behind = {"facecolor": GROUND, "edgecolor": "none", "alpha": 0.8, "pad": 1}
    for hidden, where, height in ((values < limits[0], "below", 0.02), (values > limits[1], "above", 0.9)):
        count = int(hidden.any(0).sum())
        if count:
            text = f"{count} layer{'s' if count > 1 else ''} {where} the axis"
            axes.text(0.98, height, text, transform=axes.transAxes, ha="right", fontsize=8, bbox=behind)


def _by_layer(lines: Lines, kind: Kind) -> tuple[Array, Array]:
    """Steps [records] and values [records, layers] of a kind: without layers and records that have none to show.

    nan stands for what is not finite, and on a logarithmic axis for zero.
    """
    chosen = [line for line in lines if kind.name in line]
    steps = np.array([line["step"] for line in chosen], dtype=np.float64)
    values = np.array([[finite_or_nan(x) for x in line[kind.name]] for line in chosen], dtype=np.float64)
    if not chosen:
        return steps, values
    if kind.log:
        values[values <= 0] = np.nan
    shown = np.isfinite(values)
    return steps[shown.any(1)], values[shown.any(1)][:, shown.any(0)]


def _draw_layers(axes: Any, steps: Array, values: Array, colour: str) -> None:
    """A light line for each layer, their median, and the band that holds the middle 80 % of them."""
    low, middle, high = np.nanpercentile(values, [10, 50, 90], axis=1)
    gap = np.full((1, values.shape[1]), np.nan)  # all layers as one broken line: a page of hundreds stays small
    y = np.concatenate([values, gap]).T.ravel()
    x = np.tile(np.append(steps, np.nan), values.shape[1])
    points = {"marker": "o", "ms": 2.5} if len(steps) == 1 else {}
    alpha = 0.4 if values.shape[1] <= 50 else 0.2
    axes.plot(x, y, color=colour, lw=0.6, alpha=alpha, label="one layer", **points)
    axes.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0, label="10 to 90 %")
    axes.plot(steps, middle, color=GROUND, lw=4.5)
    axes.plot(steps, middle, color=colour, lw=2.2, label="median", **points)


# -- files and pages --------------------------------------------------------------------------------------------


def _figure(width_in: float, height_in: float) -> Figure:
    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    return figure


def _inline(figure: Figure, name: str, label: str) -> str:
    """A figure as an SVG element of a page: no header, names of its own, colours as CSS variables.

    Args:
        name: distinguishes it from the other figures of the page.
        label: what is read out in its place.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    for pattern, by in (
        (r"<metadata>.*?</metadata>|<!--.*?-->", ""),
        (r' xmlns(:xlink)?="[^"]*"', ""),
        (r'\bid="', f'id="{name}-'),
        (r"url\(#", f"url(#{name}-"),
        (r'xlink:href="#', f'href="#{name}-'),
        (r"^<svg ", f'<svg role="img" aria-label="{escape(label)}" '),
    ):
        svg = re.sub(pattern, by, svg, flags=re.DOTALL)
    variables = {INK: "--ink", GRID: "--grid", GROUND: "--ground"} | {
        colour: f"--c{i}" for i, colour in enumerate(PALETTE)
    }
    return re.sub("|".join(variables), lambda match: f"var({variables[match[0]]})", svg)
