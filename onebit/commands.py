"""The commands of `onebit`: train, compare, plan, probe, doctor, bench, info."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from onebit.bench import measure
from onebit.build import check_optimizer
from onebit.compare import compare as compare_optimizers
from onebit.compare import recipes_for
from onebit.doctor_command import doctor_command
from onebit.errors import ConfigError, OnebitError
from onebit.job import versions
from onebit.kernels import choose
from onebit.launch import Interrupted, perform
from onebit.plan_command import plan_command
from onebit.probe_command import probe_command
from onebit.recipe import OPTIMIZERS, Recipe, freeze_flag, load, number, parse, resolve
from onebit.report import SUMMARY, Output, check_out, summary_table
from onebit.text import text_files
from onebit.train import check_virtual, choose_device

app = typer.Typer(
    help="Training over slow networks: optimizers whose workers exchange one bit per parameter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeFile = Annotated[Path | None, typer.Argument(help="TOML file; without it, the built-in small recipe.")]
Text = Annotated[
    list[str] | None, typer.Option(help="UTF-8 files or folders; by default Python's own documentation topics.")
]
Workers = Annotated[int | None, typer.Option(help="Processes to start on this machine.")]
Virtual = Annotated[int | None, typer.Option(help="Workers as threads of this process instead.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps.")]
MicroBatch = Annotated[int | None, typer.Option(help="Windows of text per worker, forward and backward at once.")]
FreezeStep = Annotated[
    str | None,
    typer.Option(
        help="Updates of the warm-up, before the compressed stage; below 1, a share of the run; auto: when the "
        "variance has settled."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of weights, order and masks.")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: none.")]
MinWorkers = Annotated[int | None, typer.Option(help="With how many a run may go on that had more.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last checkpoint of an earlier attempt at --out.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in the output folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show errors only.")]


@app.command()
def train(
    recipe: RecipeFile = None,
    text: Text = None,
    workers: Workers = None,
    virtual: Virtual = None,
    optimizer: Annotated[str | None, typer.Option(help=f"{', '.join(OPTIMIZERS)}; or a variant of the recipe.")] = None,
    steps: Steps = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    freeze_step: FreezeStep = None,
    micro_batch: MicroBatch = None,
    seed: Seed = None,
    checkpoint_every: CheckpointEvery = None,
    min_workers: MinWorkers = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default a new one in runs/.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Pre-train a BERT on text with one optimizer."""
    with _clear_errors():
        own: dict[str, Any] = {"optimizer.name": optimizer, "optimizer.lr": lr}
        own |= {"train.checkpoint_every": checkpoint_every, "train.min_workers": min_workers}
        if resume and out is None:
            raise ConfigError("--resume was given without --out; name the folder of the run that is to go on")
        shared = _overrides(text, workers, virtual, steps, freeze_step, micro_batch, seed)
        chosen = _ready(_recipe(recipe, own | shared), virtual)
        folder = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{chosen.label}"
        if resume and (folder / SUMMARY).is_file() and not Output(folder).folder.exists():
            _say(f"nothing to resume: the run in {folder} is complete")
            return
        again = resume and Output(folder).folder.exists()  # an attempt that was to replace what is there
        check_out(folder, overwrite or again, resume)
        _show_choices([chosen], quiet)
        (summary,) = perform([(chosen, folder)], virtual is not None, quiet, resume)
        if not quiet:
            Console().print(summary_table(summary))
            _say(f"results: {folder}")


@app.command()
def compare(
    recipe: RecipeFile = None,
    optimizers: Annotated[
        str | None,
        typer.Option(
            help=f"Two or more of {', '.join(OPTIMIZERS)} and the recipe's variants, the first to compare with; by "
            "default all variants, or lamb,onebit-lamb without any."
        ),
    ] = None,
    text: Text = None,
    workers: Workers = None,
    virtual: Virtual = None,
    steps: Steps = None,
    lr: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Learning rate of one of them.")] = None,
    freeze_step: FreezeStep = None,
    micro_batch: MicroBatch = None,
    seed: Seed = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help="Several: every optimizer runs with every one of them.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default a new one in runs/.")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train with several optimizers on the same data, seeds and order; end with a table, a plot and a report."""
    with _clear_errors():
        shared = _recipe(recipe, _overrides(text, workers, virtual, steps, freeze_step, micro_batch, seed))
        if optimizers is None:
            names = list(shared.variants) or ["lamb", "onebit-lamb"]
        else:
            names = [name.strip() for name in optimizers.split(",") if name.strip()]
        all_seeds = [shared.train.seed] if seeds is None else _seeds(seeds, seed)
        recipes = [_ready(r, virtual) for r in recipes_for(shared, names, _rates(lr or [], shared), all_seeds)]
        folder = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-compare"
        check_out(folder, overwrite)
        _show_choices(recipes, quiet)
        command = shlex.join(["onebit", *sys.argv[1:]])
        done = compare_optimizers(recipes, folder, virtual is not None, quiet, overwrite, command)
        if not quiet:
            Console().print(done.table())
            for file in done.files:
                _say(f"{'rows' if file.suffix == '.json' else file.stem}: {file}")


@app.command()
def info() -> None:
    """Show versions, devices, transports and kernels, with the reason for each choice."""
    with _clear_errors():
        nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        rows = versions() | {
            "platform": platform.platform(),
            "device": choose_device(0, 1)[1],
            "transports": ", ".join(name for name, there in (("gloo", gloo), ("nccl", nccl)) if there) or "none",
            "threads": f"{torch.get_num_threads()} of torch, {os.cpu_count()} cores",
            "kernels": "{} ({})".format(*choose(choose_device(0, 1)[0], torch.float32)),
        }
        table = Table(title="onebit", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        Console().print(table)


@app.command()
def bench(
    elements: Annotated[int, typer.Option(help="Parameters at least; BERT-Large's layers.")] = 25_000_000,
    threads: Annotated[
        str, typer.Option(help="Threads of torch; 1,2 times both and shows what the second adds.")
    ] = "1",
    rounds: Annotated[int, typer.Option(help="Timed rounds; the figures are medians.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time the optimizers' steps on one worker against the memory traffic that they cannot avoid."""
    with _clear_errors():
        result = measure(elements, _whole_numbers(threads, "--threads"), rounds)
        if as_json:
            print(json.dumps(result, indent=1))
            return
        for run in result["runs"]:
            Console().print(_bench_table(result["elements"], run))
            if "peer_ratio" in run:
                _say(f"1-bit LAMB, compressed stage: {run['peer_ratio']:.1f} times the peer's speed")
        if result["peer"]:
            _say(f"no rows of the peer: {result['peer']}")


@contextmanager
def _clear_errors() -> Iterator[None]:
    """One sentence instead of a traceback for what goes wrong on purpose."""
    try:
        yield
    except OnebitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except Interrupted as error:
        _leave(f"interrupted by signal {error.signal}; all workers have ended", 128 + error.signal)
    except KeyboardInterrupt:
        _leave("interrupted", 130)


app.command("plan")(_clear_errors()(plan_command))
app.command("probe")(_clear_errors()(probe_command))
app.command("doctor")(_clear_errors()(doctor_command))


def _leave(message: str, status: int) -> None:
    """End now, also with virtual workers still computing."""
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _overrides(
    text: list[str] | None,
    workers: int | None,
    virtual: int | None,
    steps: int | None,
    freeze_step: str | None,
    micro_batch: int | None,
    seed: int | None,
) -> dict[str, Any]:
    """What the flags say, by key of the recipe; None where a flag was not given."""
    if workers is not None and virtual is not None:
        raise ConfigError(
            f"--workers {workers} and --virtual {virtual} were both given; workers are processes or threads; give one"
        )
    return {
        "data.text": text or None,
        "train.workers": workers if virtual is None else virtual,
        "train.steps": steps,
        "optimizer.freeze_step": None if freeze_step is None else freeze_flag(freeze_step),
        "train.micro_batch": micro_batch,
        "train.seed": seed,
    }


def _rates(pairs: list[str], recipe: Recipe) -> dict[str, float]:
    """NAME=VALUE pairs as a mapping; NAME is an optimizer or a variant of the recipe."""
    known = list(dict.fromkeys([*recipe.variants, *OPTIMIZERS]))
    rates: dict[str, float] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"--lr is {pair!r}; it must be NAME=VALUE with NAME one of {', '.join(known)}")
        rates[name] = float(number(value, f"--lr {name}"))
    return rates


def _seeds(text: str, seed: int | None) -> list[int]:
    """The numbers of --seeds."""
    if seed is not None:
        raise ConfigError(f"--seeds {text} and --seed {seed} were both given; give one")
    return _whole_numbers(text, "--seeds")


def _whole_numbers(text: str, flag: str) -> list[int]:
    """`1,2` as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; it must be whole numbers with commas between them, as in 1,2") from None


def _bench_table(elements: int, run: dict[str, Any]) -> Table:
    """The times of one number of threads."""
    columns = {"ns/element": "ns_per_element", "GB/s of the floor": "gb_per_s", "times the floor": "floor_ratio"}
    if "scaling" in run["rows"]["copy"]:
        columns["speed-up"] = "scaling"
    table = Table(title=f"{elements:,} elements, {run['threads']} thread(s); kernels: {run['kernels']}")
    table.add_column("step")
    for title in columns:
        table.add_column(title, justify="right")
    for name, row in run["rows"].items():
        table.add_row(name, *(f"{row[key]:.2f}" if key in row else "-" for key in columns.values()))
    return table


def _recipe(path: Path | None, overrides: dict[str, Any]) -> Recipe:
    given = {key: value for key, value in overrides.items() if value is not None}
    return load(path, given) if path else parse({}, given)


def _ready(recipe: Recipe, virtual: int | None) -> Recipe:
    """The recipe, after what can be checked before any worker starts."""
    if virtual is not None:
        check_virtual(recipe)
    check_optimizer(recipe)
    text_files(recipe.data.text)
    return recipe


def _show_choices(recipes: list[Recipe], quiet: bool) -> None:
    """Print every automatic choice with its reason, and with the runs that it is for where it is not for all."""
    if quiet:
        return
    chosen: dict[str, list[str]] = {}
    for recipe in recipes:
        for key, why in resolve(recipe)[1].items():
            chosen.setdefault(f"{key} = {why}", []).append(recipe.label)
    for line, labels in chosen.items():
        _say(line if len(labels) == len(recipes) else f"{', '.join(dict.fromkeys(labels))}: {line}")


def _say(line: str) -> None:
    Console().print(line, highlight=False, markup=False, soft_wrap=True)
