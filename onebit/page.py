"""The report of a comparison: one HTML file that needs nothing else, neither scripts nor a network."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from onebit.figures import BYTES, KINDS, STEPS, TIME, Lines, Runs, layer_svgs, loss_svg, sends, switch
from onebit.report import Summary, fraction_text, human_bytes
from onebit.seeds import spread_text

TEMPLATE = Path(__file__).with_name("report.html.j2")
NOTES = {
    "variance_norm": "The sum of the variance over the elements of a layer. In the compressed stage the fresh variance "
    "where the optimizer keeps one, which the noise of the compression enters too, else the frozen one. Layers whose "
    "norm is zero have no line.",
    "coefficient": "The factor on the learning rate of a layer.",
    "ratio": "What the coefficient that was frozen at the switch is multiplied with. An optimizer with a fixed ratio "
    "stays at 1.",
    "momentum_scale": "The factor on the momentum of a layer before it shares a 1-bit scale with others; set at the "
    "switch.",
    "compression_error": "What worker 0 has not sent yet, against the momentum that all hold, as 2-norms.",
}


@dataclass(frozen=True)
class Run:
    """One run of a comparison.

    Attributes:
        summary: its outcome.
        metrics: the lines of its metrics file.
        layers: the lines of its layers file but the first; empty where it was not recorded.
    """

    summary: Summary
    metrics: Lines
    layers: Lines


def about(command: str) -> dict[str, str]:
    """What a result depends on apart from recipe and versions: command line, date, machine."""
    return {
        "command": command,
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "platform": platform.platform(),
        "CPU": _cpu_name(),
        "cores": str(os.cpu_count()),
    }


def _cpu_name() -> str:
    """The processor as the system names it."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8", errors="replace").splitlines() if described.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def report_html(runs: Sequence[Run], aggregates: Sequence[Mapping[str, Any]], surroundings: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        runs: all of them; every optimizer with the same seeds.
        aggregates: of their rows, from `seeds.aggregate`.
        surroundings: from `about`.
    """
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.summary.optimizer, []).append(run)
    metrics: Runs = {name: [run.metrics for run in seeds] for name, seeds in by_name.items()}
    switches = _switches(metrics)
    drawn = [STEPS, *([BYTES] if sends(metrics) else []), TIME]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        names=list(by_name),
        summary=runs[0].summary,
        seeds=aggregates[0]["seeds"],
        rows=[_cells(entry) for entry in aggregates],
        switches=sorted(set(switches.values())),
        losses=[loss_svg(metrics, against) for against in drawn],
        sends=sends(metrics),
        layer_count=len(_values(runs[0].layers[-1:], "variance_norm")),
        kinds=_kinds(by_name, switches),
        changes=_changes(by_name, switches),
        settings=_settings(by_name),
        surroundings=surroundings,
    )


def _switches(metrics: Runs) -> dict[str, float]:
    """The step of each optimizer's switch, a mean over seeds; for one without, the first other's. Empty without any."""
    found = {name: switch(seeds, STEPS.key) for name, seeds in metrics.items()}
    first = next((place for place in found.values() if place is not None), None)
    places = {name: first if place is None else place for name, place in found.items()}
    return {name: place for name, place in places.items() if place is not None}


def _cells(entry: Mapping[str, Any]) -> list[str]:
    """The row of one optimizer in the table."""
    return [
        entry["optimizer"],
        spread_text(entry["eval_loss"], 4),
        spread_text(entry["gap"], 4, "+"),
        human_bytes(entry["payload_bytes"]["mean"]),
        fraction_text(entry["share_of_16bit"]),
        fraction_text(entry["compressed_share_of_16bit"]),
        spread_text(entry["seconds"], 1),
    ]


def _kinds(by_name: Mapping[str, Sequence[Run]], switches: Mapping[str, float]) -> list[dict[str, Any]]:
    """Heading, note and figures of each per-layer value that there is, of the first seed."""

    first = {name: seeds[0].layers for name, seeds in by_name.items()}
    found = [(kind, list(layer_svgs(first, kind, switches).values())) for kind in KINDS]
    return [
        {"name": kind.name, "heading": kind.heading, "note": NOTES[kind.name], "figures": svgs}
        for kind, svgs in found
        if svgs
    ]


def _changes(by_name: Mapping[str, Sequence[Run]], switches: Mapping[str, float]) -> list[dict[str, Any]]:
    """Optimizer by optimizer: in which share of the layers, of all seeds, the variance norm fell or rose since."""
    changes = []
    for name, seeds in by_name.items():
        pairs = [pair for run in seeds for pair in _before_and_after(run.layers, switches.get(name))]
        if pairs:
            fell, rose = (sum(test) / len(pairs) for test in ([b < a for a, b in pairs], [b > a for a, b in pairs]))
            quotients = sorted(b / a for a, b in pairs if a > 0)
            middle = quotients[len(quotients) // 2] if quotients else None
            changes.append({"name": name, "fell": fell, "rose": rose, "middle": middle})
    return changes


def _before_and_after(layers: Lines, switch_step: float | None) -> list[tuple[float, float]]:
    """Each layer's variance norm at the switch and at the end; nothing without a switch, or where it is frozen."""
    if switch_step is None:
        return []
    since = [line for line in layers if line["step"] >= switch_step and "variance_norm" in line]
    if len(since) < 2 or since[-1].get("frozen_variance_norm") == since[-1]["variance_norm"]:
        return []
    both = zip(_values(since[:1], "variance_norm"), _values(since[-1:], "variance_norm"), strict=True)
    return [(a, b) for a, b in both if a is not None and b is not None]


def _values(lines: Lines, kind: str) -> list[float | None]:
    """The values of the only line; none without one."""
    return list(lines[0].get(kind, [])) if lines else []


def _settings(by_name: Mapping[str, Sequence[Run]]) -> dict[str, list[tuple[str, list[str]]]]:
    """Every value of the recipes, by section: key, and the value of all, or one for each optimizer that differs."""
    recipes = {name: seeds[0].summary.recipe for name, seeds in by_name.items()}
    seeds = [str(run.summary.recipe["train"]["seed"]) for run in next(iter(by_name.values()))]

    def cells(section: str, key: str) -> list[str]:
        if (section, key) == ("optimizer", "name"):
            named = {label: recipe[section][key] for label, recipe in recipes.items()}
            return [name if label == name else f"{label}: {name}" for label, name in named.items()]
        if (section, key) == ("train", "seed"):
            return [", ".join(seeds)]
        shown = {name: _shown(recipe[section][key]) for name, recipe in recipes.items()}
        if len(set(shown.values())) == 1:
            return [next(iter(shown.values()))]
        return [f"{name}: {value}" for name, value in shown.items()]

    one = next(iter(recipes.values()))
    shown = {
        section: [(key, cells(section, key)) for key in values if key != "label"] for section, values in one.items()
    }
    if froze := [_froze(run, len(seeds) > 1) for runs in by_name.values() for run in runs if run.summary.freeze_step]:
        shown["optimizer"].append(("where it froze, and why", froze))
    return shown


def _froze(run: Run, several: bool) -> str:
    """The update that ended the warm-up stage of a run, and the reason; `several`: there are other seeds."""
    one = run.summary
    seed = f", seed {one.recipe['train']['seed']}" if several else ""
    return f"{one.optimizer}{seed}: after update {one.freeze_step}; {one.freeze_reason}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
