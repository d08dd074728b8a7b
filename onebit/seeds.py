"""What several seeds say together: mean, spread, and the gap to the first optimizer, seed by seed."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from onebit.report import finite_or_nan, fraction_text, human_bytes, loss_text

Rows = Sequence[Mapping[str, Any]]


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean, standard deviation (of a sample, n - 1; None for a single value) and n. A nan makes both nan."""
    finite = all(math.isfinite(value) for value in values)
    sd = None if len(values) < 2 else stdev(values) if finite else math.nan
    return {"mean": fmean(values), "sd": sd, "n": len(values)}


def aggregate(rows: Rows) -> list[dict[str, Any]]:
    """One entry per optimizer, in the order of their first rows.

    Args:
        rows: of compare.json, one a run; every optimizer with the same seeds.

    Returns:
        optimizer; seeds; `spread`s of eval_loss, payload_bytes and seconds; the means of share_of_16bit and
        compressed_share_of_16bit, None where there is none; gap: `spread` of the differences of eval_loss to the first
        optimizer's with the same seed, None for the first.
    """
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["optimizer"], {})[row["seed"]] = row
    first = next(iter(by_name.values()))
    return [
        {
            "optimizer": name,
            "seeds": list(seeds),
            "eval_loss": spread([finite_or_nan(row["eval_loss"]) for row in seeds.values()]),
            "gap": None if seeds is first else spread([_gap(row, first[seed]) for seed, row in seeds.items()]),
            "payload_bytes": spread([row["payload_bytes"] for row in seeds.values()]),
            "share_of_16bit": _mean([row["share_of_16bit"] for row in seeds.values()]),
            "compressed_share_of_16bit": _mean([row["compressed_share_of_16bit"] for row in seeds.values()]),
            "seconds": spread([row["seconds"] for row in seeds.values()]),
        }
        for name, seeds in by_name.items()
    ]


def _gap(row: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    return finite_or_nan(row["eval_loss"]) - finite_or_nan(reference["eval_loss"])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def spread_text(values: Mapping[str, Any] | None, digits: int, sign: str = "") -> str:
    """Mean ± standard deviation for people; "-" without values.

    Args:
        values: from `spread`.
        digits: after the point.
        sign: "+" to show the sign of a mean that is positive too.
    """
    if values is None:
        return "-"
    mean, sd = values["mean"], values["sd"]
    if mean is None or not math.isfinite(mean):
        return loss_text(mean, digits)
    return f"{mean:{sign}.{digits}f}" + ("" if sd is None else f" ± {sd:.{digits}f}")


def spread_table(rows: Rows, aggregates: Rows) -> Table:
    """The aggregates of several seeds, to print: under each loss its gap to the first optimizer's."""
    one, first = rows[0], aggregates[0]
    seeds = ", ".join(map(str, first["seeds"]))
    table = Table(
        title=f"{one['workers']} workers, {one['steps']} steps, {one['parameters']:,} parameters, seeds {seeds}",
        caption="mean ± standard deviation over seeds; below it the same of the differences, seed by seed, to "
        f"{first['optimizer']}; payload and shares as for one seed, means; time: mean",
    )
    table.add_column("optimizer", no_wrap=True)
    for heading in ("held-out", "payload", "share", "compressed", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in aggregates:
        gap = "" if entry is first else "\n" + spread_text(entry["gap"], 3, "+")
        table.add_row(
            entry["optimizer"],
            spread_text(entry["eval_loss"], 3) + gap,
            human_bytes(entry["payload_bytes"]["mean"]),
            fraction_text(entry["share_of_16bit"]),
            fraction_text(entry["compressed_share_of_16bit"]),
            f"{entry['seconds']['mean']:.1f} s",
        )
    return table
