"""Figures of the comparison, as SVG: what a step takes, what a whole run gains, loss against seconds.

    python benchmarks/network/plots.py NETWORK.jsonl --to-loss TO-LOSS.jsonl    # of benchmarks/results

Rows of a rate are those of the run that measured most of them there; what it lacks comes from others. The background is
white, so that the figures can be read on a dark page as well.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not part of the package

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.network.rows import METHODS, ROWS
from benchmarks.network.run import rate
from benchmarks.network.tables import methods
from benchmarks.network.times import read_rows, seconds_to
from onebit.errors import ConfigError, OnebitError

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
COMPUTE, WAITING, REST, UNKNOWN = "#4c72b0", "#dd8452", "#8c8c8c", "#c9b38c"
DRAWN = {
    ("ddp-adamw", "DDP, bf16 hook"): ("DDP, bf16 hook, AdamW", "#000000", "-"),
    ("powersgd-4", "DDP, PowerSGD rank 4, bf16 hook before"): ("PowerSGD rank 4, AdamW", "#8c564b", "--"),
    ("powersgd-4-lamb", "DDP, PowerSGD rank 4, bf16 hook before"): ("PowerSGD rank 4, LAMB", "#8c564b", "-"),
    ("post-local-sgd-lamb", "PostLocalSGD, bf16 hook before"): ("PostLocalSGD, LAMB", "#9467bd", "--"),
    ("diloco", "DiLoCo"): ("DiLoCo", "#9467bd", "-"),
    ("1bit-adam", "1-bit Adam, fp32 warm-up"): ("1-bit Adam, fp32 warm-up", "#d62728", "-"),
    ("lamb", "LAMB, bf16"): ("LAMB, bf16", "#17becf", "-"),
    ("1bit-lamb", "1-bit LAMB, fp32 warm-up"): ("1-bit LAMB, fp32 warm-up", "#1f77b4", "--"),
    ("1bit-lamb-int4", "1-bit LAMB, int4 warm-up"): ("1-bit LAMB, int4 warm-up", "#1f77b4", "-"),
    ("local-lamb", "local-variance LAMB, 5 % warm-up"): ("local-variance LAMB", "#2ca02c", "-"),
}
"""In the plot of loss against seconds, training and method: label, colour, line. The others would hide each other."""
LOSS_ABOVE = 1.5  # the highest target, in the plot of loss: before that all curves are alike
Record = dict[str, Any]


def rated(mbit: float | None) -> str:
    return "unlimited" if mbit is None else f"{mbit:g} Mbit/s"


def split(row: Record, compute_s: float | None) -> list[tuple[str, str, float]]:
    """What a row's step is made of: label, colour, seconds; their sum is the step.

    Where the time in collectives is not known (DDP makes them during backward) all beyond compute is one piece.
    """
    total = row["step_s"][1]
    if row["in_collectives_s"] is None:
        own = min(total, compute_s or 0.0)
        return [("forward and backward", COMPUTE, own), ("more, not split (DDP, DeepSpeed)", UNKNOWN, total - own)]
    waited = min(total, row["in_collectives_s"][1])
    own = min(total - waited, row["forward_backward_s"][1])
    rest = total - waited - own
    return [("forward and backward", COMPUTE, own), ("in collectives", WAITING, waited), ("optimizer", REST, rest)]


def steps_figure(rows: Sequence[Record]) -> Figure:
    """Milliseconds of a step, a bar per row and a panel per rate."""
    rates = list(dict.fromkeys(row["mbit"] for row in rows))
    present = {row["row"] for row in rows}
    names = [name for name in ROWS if name in present] + sorted(present - set(ROWS))
    figure = Figure(figsize=(3.0 * len(rates) + 1.6, 0.26 * len(names) + 1.5), layout="constrained")
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    labels: dict[str, Any] = {}
    for panel, mbit in zip(panels, rates, strict=True):
        here = {row["row"]: row for row in rows if row["mbit"] == mbit}
        alone = here.get("compute", {})
        longest = max((row["step_s"][1] for row in here.values() if "failed" not in row), default=1.0)
        for at, name in enumerate(names):
            row = here.get(name)
            if row is None or "failed" in row:
                panel.text(0.01 * longest * 1e3, at, "failed" if row else "not measured", va="center", fontsize=7)
                continue
            left = 0.0
            for label, colour, seconds in split(row, alone.get("step_s", [0, None])[1]):
                bars = panel.barh(at, 1e3 * seconds, left=1e3 * left, color=colour, height=0.72, clip_on=False)
                labels.setdefault(label, bars[0])
                left += seconds
            panel.text(1e3 * (left + 0.015 * longest), at, f"{1e3 * left:.0f}", va="center", fontsize=7)
        panel.set(title=rated(mbit), xlabel="ms per step", xlim=(0, 1.17e3 * longest))
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def speed_up_figure(rows: Sequence[Record]) -> Figure:
    """How many times as fast as DDP's faster 16-bit hook a whole run is, a point per method and rate.

    Raises:
        ConfigError: no rate has such a hook.
    """
    found = [record for record in methods(rows, METHODS) if record.get("speed_up_end_to_end")]
    if not found:
        raise ConfigError("no row of DDP's 16-bit hooks was measured; without it there is nothing to compare with")
    names = [m.name for m in METHODS if any(record["method"] == m.name for record in found)]
    figure = Figure(figsize=(8, 0.3 * len(names) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    rates = list(dict.fromkeys(record["mbit"] for record in found))
    for mark, colour, mbit in zip("osD^v<>", ("#1b4f8a", "#3f8fc5", "#e08a3c", "#b03a2e") * 2, rates, strict=False):
        here = [(r["speed_up_end_to_end"], names.index(r["method"])) for r in found if r["mbit"] == mbit]
        axes.plot(*zip(*here, strict=True), mark, color=colour, label=rated(mbit), alpha=0.85)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    low, high = (f(record["speed_up_end_to_end"] for record in found) for f in (min, max))
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if low / 2 < tick < 2 * high]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="both", linewidth=0.4, alpha=0.5)
    axes.set_xlabel("times as fast as DDP's 16-bit hook, end to end")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(rates), frameon=False, fontsize=9)
    return figure


def loss_figure(records: Sequence[Record]) -> Figure:
    """Held-out loss against seconds, of the first seed; a panel per rate, the targets as dotted lines.

    Raises:
        ConfigError: no method has both a training and times.
    """
    every = [r for r in records if r["kind"] == "time" and "mbit" in r and "failed" not in r and drawn(r) in DRAWN]
    targets = {r["target_of"]: r["targets"][0] for r in every}
    timed = [r for r in every if r["target_of"] == next(iter(targets))]  # the curves are the same for all targets
    if not timed:
        raise ConfigError("no method has both a training and times; give to_loss.py the --timings of compare.py")
    rates = list(dict.fromkeys(record["mbit"] for record in timed))
    figure = Figure(figsize=(2.9 * len(rates) + 0.6, 4.4), layout="constrained")
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    lowest: list[float] = []
    lines: dict[str, Any] = {}
    for panel, mbit in zip(panels, rates, strict=True):
        here = {drawn(record): record for record in timed if record["mbit"] == mbit}
        for which, (label, colour, dash) in DRAWN.items():
            if which not in here:
                continue
            record = here[which]
            curve = first_curve(records, record)
            stages = record["warmup_steps"], record["warmup_step_s"], record["step_s"]
            seconds = [seconds_to(step, *stages) for step, _ in curve]
            (line,) = panel.plot(seconds, [loss for _, loss in curve], dash, color=colour, linewidth=1.3)
            lines.setdefault(label, line)
            lowest.append(min(loss for _, loss in curve))
        for loss in targets.values():
            panel.axhline(loss, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=rated(mbit), xlabel="seconds", xscale="log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(min(lowest) - 0.1, max(targets.values()) + LOSS_ABOVE)
    panels[0].set_ylabel("held-out loss (dotted: the targets)")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def drawn(record: Record) -> tuple[str, str]:
    """The key in DRAWN of a time record."""
    return record["training"], record["method"]


def first_curve(records: Sequence[Record], record: Record) -> list[list[float]]:
    """The curve of a time record's first seed."""
    wanted = record["training"], record["seeds"][0]
    runs = (r for r in records if r["kind"] == "training" and (r["training"], r["seed"]) == wanted)
    curve: list[list[float]] = next(runs)["curve"]
    return curve


def save(figure: Figure, path: Path) -> None:
    """As SVG, without comments, indents and decimals beyond the third; the same file for the same numbers."""
    with mpl.rc_context({"svg.hashsalt": "onebit"}):
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
    text = re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
    path.write_text(re.sub(r"(\.\d{3})\d+", r"\1", re.sub(r"\n\s+", "\n", text)))


def drawn_at(rates: Sequence[float | None] | None, records: Sequence[Record]) -> list[Record]:
    """The records of these rates, None for all, in the order of the rates; and those of no rate.

    Raises:
        ConfigError: one of the rates has no record.
    """
    if rates is None:
        return list(records)
    found = [record for record in records if "mbit" not in record]
    for mbit in rates:
        here = [record for record in records if "mbit" in record and record["mbit"] == mbit]
        if not here:
            raise ConfigError(f"nothing was measured at {rated(mbit)}; name other rates with --mbit")
        found += here
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", type=Path, nargs="*", help="results of compare.py")
    parser.add_argument("--to-loss", type=Path, default=None, help="results of to_loss.py")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="per host")
    parser.add_argument("--model", default="base")
    parser.add_argument(
        "--mbit",
        type=lambda text: [rate(part) for part in text.split(",")],
        default=None,
        help="rates that are drawn, with commas between them; all",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder; docs/figures")
    args = parser.parse_args(arguments)
    try:
        if not args.network and args.to_loss is None:
            raise ConfigError("there is nothing to draw; give results of compare.py, or --to-loss")
        for path in [*args.network, *([args.to_loss] if args.to_loss else [])]:
            if not path.is_file():
                raise ConfigError(f"{path} is no file; give JSON lines of compare.py or to_loss.py")
        figures = {}
        if args.network:
            rows = drawn_at(args.mbit, read_rows(args.network, args.hosts, args.workers, args.model))
            figures = {"network-steps": steps_figure(rows), "network-end-to-end": speed_up_figure(rows)}
        if args.to_loss:
            records = list(map(json.loads, args.to_loss.read_text().splitlines()))
            figures["loss-seconds"] = loss_figure(drawn_at(args.mbit, records))
        args.out.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            save(figure, args.out / f"{name}.svg")
            print(f"written to {args.out / name}.svg", file=sys.stderr)
        return 0
    except OnebitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
