"""Held-out loss against steps, and seconds of a step, put together: seconds to a held-out loss."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.network.rows import METHODS, Method
from benchmarks.network.trainings import TRAININGS
from onebit.errors import ConfigError

TARGETS_OF = ("ddp-adamw", "lamb")
"""Trainings without compression, whose losses are the targets."""
Record = dict[str, Any]
Curve = Sequence[Sequence[float]]
"""[step, held-out loss], in order."""


def read_rows(paths: Sequence[Path], hosts: int, per_host: int, model: str) -> list[Record]:
    """Records of rows on one network and model, each rate from the run that measured most rows there.

    Rows that it lacks come from the run with the next most, and so on; of runs with equally many the later one counts.
    So most of what is compared was measured side by side.

    Raises:
        ConfigError: there is no such row.
    """
    runs: list[dict[float | None, dict[str, Record]]] = []  # by rate and row
    for path in paths:
        fits = False
        for record in map(json.loads, path.read_text().splitlines()):
            if record["kind"] == "run":
                fits = record["arguments"]["model"] == model
                runs.append({})
            elif record["kind"] == "row" and fits and place(record) == (hosts, per_host):
                runs[-1].setdefault(record["mbit"], {})[record["row"]] = record
    rates = dict.fromkeys(rate for run in runs for rate in run)
    found: list[Record] = []
    for rate in rates:
        merged: dict[str, Record] = {}
        for run in sorted(runs, key=lambda run: len(run.get(rate, {}))):
            merged |= run.get(rate, {})
        found += merged.values()
    if not found:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names}: no row of {hosts} hosts, {per_host} workers each and the model {model!r}")
    return found


class Timings:
    """Median seconds of each row's step at each rate.

    Args:
        rows: of one network and model, as `read_rows` gives them.

    Attributes:
        rates: Mbit/s, None if not limited, in the order in which they were first met.
    """

    def __init__(self, rows: Sequence[Record]) -> None:
        self._rows = {(row["mbit"], row["row"]): row for row in rows}
        self.rates = list(dict.fromkeys(row["mbit"] for row in rows))

    def step(self, rate: float | None, row: str) -> float:
        """Seconds of a row's step.

        Raises:
            KeyError: it was not measured; its text says so, or why it failed.
        """
        found = self._rows.get((rate, row), {"failed": "not measured"})
        if "failed" in found:
            raise KeyError(f"{row}: {found['failed']}")
        seconds: float = found["step_s"][1]
        return seconds


def place(record: Record) -> tuple[int, int]:
    """Hosts and workers per host of compare.py's record."""
    return record["hosts"], record["workers_per_host"]


def target(curve: Curve, share: float) -> float:
    """The loss at this share of a run; of the last evaluation by then, or the first one."""
    reached = [loss for step, loss in curve if step <= share * curve[-1][0]]
    return reached[-1] if reached else curve[0][1]


def steps_to(curve: Curve, loss: float) -> float | None:
    """Steps until the held-out loss is at most `loss`, on straight lines between evaluations; None: never."""
    before: Sequence[float] | None = None
    for step, now in curve:
        if now <= loss:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - now)
        before = step, now
    return None


def seconds_to(steps: float, warmup: int, warmup_s: float, step_s: float) -> float:
    """Seconds of so many steps, the first `warmup` of which take `warmup_s` each and the others `step_s`."""
    first = min(steps, warmup)
    return first * warmup_s + (steps - first) * step_s


def times(trained: Sequence[Record], timings: Timings, share: float, base: str) -> list[Record]:
    """A record per method that was trained, and per rate: seconds to the target, by seed, None where not reached.

    Args:
        trained: records of to_loss.py.
        timings: of compare.py.
        share: of a run of the training `base` with the same seed, whose loss there is the target.
        base: of trainings.TRAININGS.
    """
    runs = [record for record in trained if record["kind"] == "training"]
    bases = {run["seed"]: run["curve"] for run in runs if run["training"] == base and "failed" not in run}
    targets = {seed: target(curve, share) for seed, curve in bases.items()}
    found = []
    for name in (name for name in TRAININGS if any(run["training"] == name for run in runs)):
        mine = [run for run in runs if run["training"] == name]
        for method in (m for m in METHODS if m.name in TRAININGS[name].methods):
            record: Record = {"kind": "time", "target_of": base, "method": method.name, "training": name}
            record["note"] = TRAININGS[name].note
            if reason := _reason(mine, targets, base):
                found.append({**record, "failed": reason})
                continue
            record["seeds"] = [run["seed"] for run in mine]
            record["targets"] = [targets[run["seed"]] for run in mine]
            record["steps"] = [steps_to(run["curve"], targets[run["seed"]]) for run in mine]
            found.append(record)
            found += [_at(record, rate, method, mine[0]["warmup"], timings) for rate in timings.rates]
    return found


def _reason(runs: Sequence[Record], targets: dict[int, float], base: str) -> str:
    for run in runs:
        if "failed" in run:
            return str(run["failed"])
        if run["seed"] not in targets:
            return f"there is no target: {base} was not trained with seed {run['seed']}, or failed"
    return ""


def _at(record: Record, rate: float | None, method: Method, warmup: int, timings: Timings) -> Record:
    """A method's record at one rate."""
    record = {**record, "mbit": rate}
    try:
        step_s = timings.step(rate, method.main)
        warmup_s = timings.step(rate, method.warmup) if method.warmup else step_s
    except KeyError as error:
        return {**record, "failed": error.args[0]}
    known = {"warmup_steps": warmup, "warmup_step_s": warmup_s, "step_s": step_s}
    seconds = [None if steps is None else seconds_to(steps, warmup, warmup_s, step_s) for steps in record["steps"]]
    return {**record, **known, "seconds": seconds}


def mean_if_all(values: Sequence[float | None]) -> float | None:
    """The mean; None if one is missing."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def loss_table(trained: Sequence[Record], records: Sequence[Record]) -> str:
    """In Markdown: learning rate, last loss, steps to the target and seconds at each rate, means over the seeds."""
    rates = list(dict.fromkeys(r["mbit"] for r in records if "mbit" in r))
    names = ["unlimited" if rate is None else f"{rate:g} Mbit/s" for rate in rates]
    lines = ["| " + " | ".join(["run", "lr", "loss at the end, by seed", "steps to the target", *names]) + " |"]
    lines.append("| --- " * (4 + len(rates)) + "|")
    for record in records:
        if "mbit" in record:
            continue
        name = f"{record['method']}, {record['note']}" if record["note"] else record["method"]
        if "failed" in record:
            lines.append(f"| {name} | failed: {record['failed']} |" + " |" * (2 + len(rates)))
            continue
        runs = [r for r in trained if r["kind"] == "training" and r["training"] == record["training"]]
        losses = " ".join(f"{run['curve'][-1][1]:.3f}" for run in runs)
        steps = " ".join("-" if value is None else f"{value:.0f}" for value in record["steps"])
        same = "method", "training"
        at = {r["mbit"]: r for r in records if "mbit" in r and all(r[key] == record[key] for key in same)}
        cells = [_cell(at[rate]) for rate in rates]
        lines.append("| " + " | ".join([name, f"{runs[0]['lr']:g}", losses, steps, *cells]) + " |")
    return "\n".join(lines)


def _cell(record: Record) -> str:
    if "failed" in record:
        return f"no time: {record['failed']}"
    mean = mean_if_all(record["seconds"])
    if mean is not None:
        return f"{mean:.0f} s" if mean >= 100 else f"{mean:.3g} s"
    missing, seeds = sum(value is None for value in record["seconds"]), len(record["seconds"])
    return "not reached" if missing == seeds else f"not reached with {missing} of {seeds} seeds"


def read_trained(paths: Sequence[Path]) -> list[Record]:
    """Records of what to_loss.py trained, in several results; of the same training and seed the last counts.

    Raises:
        ConfigError: there is none.
    """
    found: dict[tuple[Any, ...], Record] = {}
    for record in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        if record["kind"] == "training":
            found["training", record["training"], record["seed"]] = record
        elif record["kind"] == "tuning":
            found["tuning", record["family"], record["lr"]] = record
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: nothing that to_loss.py trained")
    return list(found.values())
