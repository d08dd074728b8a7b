"""Run several optimizers on the same data, seeds and order, and set them side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from onebit.errors import ConfigError
from onebit.launch import perform
from onebit.recipe import Recipe, parse
from onebit.report import (
    LAYERS,
    METRICS,
    ROWS,
    Output,
    check_out,
    comparison_rows,
    comparison_table,
    read_layers,
    read_metrics,
    writing,
)
from onebit.seeds import aggregate, spread_table

PLOTS, REPORT = ("plot.svg", "plot.png"), "report.html"


@dataclass(frozen=True)
class Comparison:
    """What `compare` leaves behind.

    Attributes:
        rows: one a run, as in compare.json.
        aggregates: one an optimizer, over its seeds, as in compare.json where there are several.
        files: the JSON file, the plots and the report.
    """

    rows: list[dict[str, Any]]
    aggregates: list[dict[str, Any]]
    files: list[Path]

    def table(self) -> Table:
        """The outcome, to print."""
        several = len(self.rows) > len(self.aggregates)
        return spread_table(self.rows, self.aggregates) if several else comparison_table(self.rows)


def recipes_for(
    recipe: Recipe, optimizers: Sequence[str], lr: Mapping[str, float], seeds: Sequence[int]
) -> list[Recipe]:
    """One recipe for each seed and optimizer, equal but for these and the optimizer's learning rate.

    Args:
        recipe: what they share.
        optimizers: names of optimizers or of variants of the recipe, two or more.
        lr: name -> learning rate, over what the recipe says.
        seeds: one or more, all different.
    Returns:
        Seed by seed, so that a comparison that is broken off has whole seeds.
    Raises:
        ConfigError: an unknown or repeated name, fewer than two, a repeated seed, or a value that this optimizer
            cannot have.
    """
    if len(set(optimizers)) < max(2, len(optimizers)):
        raise ConfigError(
            f"--optimizers is {','.join(optimizers)!r}; it must name two or more different ones, such as "
            "lamb,onebit-lamb, or variants of the recipe; correct it"
        )
    if unused := set(lr) - set(optimizers):
        raise ConfigError(f"--lr names {sorted(unused)[0]!r}, which is not among --optimizers; add it there")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"--seeds is {','.join(map(str, seeds))!r}; it must be one or more different numbers, such as 0,1,2; "
            "correct it"
        )
    if taken := set(optimizers) & {ROWS, *PLOTS, REPORT}:
        raise ConfigError(f"variant {sorted(taken)[0]!r} has the name of a file of the comparison; rename it")
    raw = recipe.model_dump(mode="python")
    rates = {name: {"optimizer.lr": lr[name]} if name in lr else {} for name in optimizers}
    return [
        parse(raw, rates[name] | {"optimizer.name": name, "train.seed": seed}) for seed in seeds for name in optimizers
    ]


def compare(
    recipes: Sequence[Recipe], out: Path, virtual: bool, quiet: bool, overwrite: bool, command: str
) -> Comparison:
    """Do the runs and write compare.json, the plots and the report beside them.

    Args:
        recipes: from `recipes_for`.
        out: folder that appears when all is done; each run has a folder in it.
        virtual: workers are threads of this process.
        quiet: show nothing.
        overwrite: replace an earlier result in `out`.
        command: the command line, for the report.
    Raises:
        OnebitError, Interrupted: as the runs do.
    """
    # slow to import, and only wanted here; before the runs, since a package that is missing must not cost them
    from onebit.figures import plot
    from onebit.page import Run, about, report_html

    check_out(out, overwrite)
    output = Output(out)
    output.clear()
    surroundings = about(command)
    folders = [output.folder / _folder(recipe, recipes) for recipe in recipes]
    summaries = perform(list(zip(recipes, folders, strict=True)), virtual, quiet)
    runs = [
        Run(summary, read_metrics(folder / METRICS), read_layers(folder / LAYERS))
        for summary, folder in zip(summaries, folders, strict=True)
    ]
    rows = comparison_rows(summaries)
    aggregates = aggregate(rows)
    lines = {
        entry["optimizer"]: [r.metrics for r in runs if r.summary.optimizer == entry["optimizer"]]
        for entry in aggregates
    }
    with writing(output.folder):
        output.write_json(ROWS, {"runs": rows, "aggregate": aggregates} if len(rows) > len(aggregates) else rows)
        plot(lines, [output.folder / name for name in PLOTS])
        (output.folder / REPORT).write_text(report_html(runs, aggregates, surroundings), encoding="utf-8")
        output.publish()
    return Comparison(rows, aggregates, [out / name for name in (ROWS, *PLOTS, REPORT)])


def _folder(recipe: Recipe, recipes: Sequence[Recipe]) -> str:
    """The name of a run's folder: its label, and the seed where there are several."""
    several = len({other.train.seed for other in recipes}) > 1
    return f"{recipe.label}-seed{recipe.train.seed}" if several else recipe.label
