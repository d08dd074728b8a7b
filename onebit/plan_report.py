"""What `onebit plan` says: tables, JSON, and the recommended settings as a recipe."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple
from typing import Any

from rich.console import Console
from rich.table import Table

from onebit.build import check_optimizer
from onebit.planner import METHODS, PLAIN, Plan
from onebit.planner_inputs import Range, likely
from onebit.planner_methods import warmup_steps
from onebit.recipe import parse


def recipe_text(done: Plan) -> str:
    """The recommended settings as a recipe.

    Raises:
        ConfigError: a recipe cannot say so, such as more workers than it allows.
    """
    setup = done.setup
    optimizer: dict[str, Any] = dict(done.rows[done.recommended].method.recipe)
    optimizer = optimizer or {"name": "adamw", "warmup_transport": "bf16"}
    if optimizer["name"].startswith("onebit-"):
        optimizer["freeze_step"] = warmup_steps(setup, likely(setup.run.warmup_share))
    elif optimizer["name"].startswith("local-"):
        optimizer["freeze_step"] = warmup_steps(setup, likely(setup.run.local_warmup_share))
    elif optimizer["name"] == "zero-one-adam":
        optimizer["options"] = {"var_freeze_step": warmup_steps(setup, likely(setup.run.warmup_share))}
    work, name = setup.work, done.recommended
    train: dict[str, Any] = {
        "steps": setup.run.steps, "micro_batch": work.micro_batch, "accumulation": work.accumulation,
        "workers": setup.network.workers,
    }  # fmt: skip
    if METHODS[name].compresses and setup.network.two_level and setup.network.workers_per_machine > 1:
        train["two_levels"] = True
    begins_early = any(kind.messages_bytes and kind.early for _, kind in METHODS[name].steps(setup))
    if begins_early and work.overlap_exchange:
        optimizer["options"] = {"overlap": True}
    check_optimizer(parse({"optimizer": optimizer, "train": train}, {}))
    lines = [
        "# Written by `onebit plan`. Model, data and learning rate are yours to set: a plan does not know them.",
        f"# {done.advice}",
    ]
    for section, keys in (("optimizer", optimizer), ("train", train)):
        lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    return "\n".join([*lines, ""])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def as_mapping(done: Plan) -> dict[str, Any]:
    """The plan for JSON. A break-even is null with "always" or "not on slow links" beside it where there is none."""
    setup = asdict(done.setup)
    shapes = setup["model"].pop("shapes")
    setup["model"] |= {"parameters": done.setup.model.parameters, "layers": len(shapes)}
    methods = {}
    for name, row in done.rows.items():
        ranges = ("step_s", "samples_per_s", "total_s", "money", "speed_up")
        kinds = [
            {"name": kind, "steps": count, "payload_bytes": size, "step_s": time.total_s, **asdict(time)}
            for kind, count, time, size in row.likely.kinds
        ]
        methods[name] = {key: asdict(getattr(row, key)) for key in ranges} | {
            "parts_s": asdict(row.likely.parts),
            "kinds": kinds,
            "payload_bytes": row.likely.payload_bytes,
            "share_of_16bit": row.likely.share_of_16bit,
            "memory_bytes": row.likely.memory_bytes,
            "break_even_gbit_s": [x if 0 < x < math.inf else None for x in row.break_even_gbit_s],
            "break_even": [_edge(x) for x in row.break_even_gbit_s],
        }
    advice = {
        "recommended": done.recommended, "worth_it": done.worth_it, "advice": done.advice,
        "levels_gain": done.levels_gain,
    }  # fmt: skip
    return {**advice, "setup": setup, "methods": methods}


def _edge(rate: float) -> str:
    return "not on slow links" if rate == 0 else "always" if rate == math.inf else f"{rate:.3g}"


def show(done: Plan) -> None:
    """Print the tables and the advice."""
    net, model = done.setup.network, done.setup.model
    place = f"{model.parameters:,} parameters, {net.workers} workers on {net.machines} machines"
    tables = [
        _table(f"Mean step, ms: {place}", ("compute", "waits", "kernels", "network", "hidden", "step")),
        _table(f"Run of {done.setup.run.steps:,} steps", ("samples/s", "hours", "money", "speed-up")),
        _table("Bytes per worker", ("GB sent", "of 16 bits", "GB held", "pays below, Gbit/s")),
    ]
    for name, row in done.rows.items():
        found, p = row.likely, row.likely.parts
        wire = p.local_mean_s + p.all_to_all_s + p.all_gather_s + p.all_reduce_s
        times = [p.compute_s, p.straggling_s, p.encode_s + p.server_s + p.update_s, wire, p.hidden_s]
        plain = name in PLAIN.values()
        tables[0].add_row(name, *(f"{1e3 * t:.1f}" for t in times), _shown(row.step_s, 1e3))
        hours = _shown(row.total_s, 1 / 3600)
        tables[1].add_row(
            name, _short(row.samples_per_s.likely), hours, _shown(row.money), "-" if plain else _shown(row.speed_up)
        )
        tables[2].add_row(
            name,
            _short(found.payload_bytes / 1e9),
            f"1/{1 / found.share_of_16bit:.1f}",
            _short(found.memory_bytes / 1e9),
            "-" if plain else "..".join(dict.fromkeys(map(_edge, row.break_even_gbit_s))),
        )
    for table in tables:
        Console().print(table)
    say("speed-up and where a method pays: against 16-bit all-reduce of its family, lamb-16bit or ddp-16bit")
    say(done.advice)
    say(f"recommended: {done.recommended}")
    if net.workers_per_machine > 1 and METHODS[done.recommended].compresses:
        other, flag, gain = ("two levels", "--two-level", done.levels_gain)
        if net.two_level:
            other, flag, gain = ("one level", "--one-level", 1 / gain)
        say(f"with {other} ({flag}) it would be {gain:.2f} times as fast")


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _shown(value: Range, factor: float = 1.0) -> str:
    low, middle, high = (_short(x * factor) for x in astuple(value))
    return middle if low == high else f"{middle} ({low}..{high})"


def _short(x: float) -> str:
    return f"{x:.3g}" if x < 999.5 else f"{x:,.0f}"


def say(line: str) -> None:
    """Print a line as it is."""
    Console().print(line, highlight=False, markup=False, soft_wrap=True)
