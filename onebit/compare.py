"""Run several optimizers on the same data, seed and order, and set them side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebit.errors import ConfigError
from onebit.launch import perform
from onebit.recipe import Recipe, parse
from onebit.report import METRICS, ROWS, Output, check_out, comparison_rows, plot, read_metrics, writing

PLOTS = ("plot.svg", "plot.png")


@dataclass(frozen=True)
class Comparison:
    """What `compare` leaves behind.

    Attributes:
        rows: one a run, as in compare.json.
        files: the JSON file and the plots.
    """

    rows: list[dict[str, Any]]
    files: list[Path]


def recipes_for(recipe: Recipe, optimizers: Sequence[str], lr: Mapping[str, float]) -> list[Recipe]:
    """One recipe for each optimizer, equal but for the optimizer and its learning rate.

    Args:
        recipe: what they share.
        optimizers: names, two or more.
        lr: name -> learning rate, over what the recipe says.
    Raises:
        ConfigError: an unknown or repeated name, fewer than two, or a value that this optimizer cannot have.
    """
    if len(set(optimizers)) < max(2, len(optimizers)):
        raise ConfigError(
            f"--optimizers is {','.join(optimizers)!r}; it must name two or more different ones, such as "
            "lamb,onebit-lamb; correct it"
        )
    if unused := set(lr) - set(optimizers):
        raise ConfigError(f"--lr names {sorted(unused)[0]!r}, which is not among --optimizers; add it there")
    raw = recipe.model_dump(mode="json")
    return [parse(raw, {"optimizer.name": name, "optimizer.lr_for": dict(lr)}) for name in optimizers]


def compare(recipes: Sequence[Recipe], out: Path, virtual: bool, quiet: bool, overwrite: bool) -> Comparison:
    """Do the runs and write compare.json and the plots beside them.

    Args:
        recipes: from `recipes_for`.
        out: folder that appears when all is done; each run has a folder in it.
        virtual: workers are threads of this process.
        quiet: show nothing.
        overwrite: replace an earlier result in `out`.
    Raises:
        OnebitError, Interrupted: as the runs do.
    """
    check_out(out, overwrite)
    output = Output(out)
    output.clear()
    folders: dict[str, Path] = {recipe.optimizer.name: output.folder / recipe.optimizer.name for recipe in recipes}
    summaries = perform(list(zip(recipes, folders.values(), strict=True)), virtual, quiet)
    rows = comparison_rows(summaries)
    lines = {name: read_metrics(folder / METRICS) for name, folder in folders.items()}
    with writing(output.folder):
        output.write_json(ROWS, rows)
        plot(lines, [output.folder / name for name in PLOTS])
        output.publish()
    return Comparison(rows, [out / name for name in (ROWS, *PLOTS)])
