"""`onebit plan`: does it pay, by how much, and with which settings? The command's options and the files it writes."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from onebit import planner_sweep
from onebit.errors import ConfigError
from onebit.plan_figures import draw_map, draw_plan
from onebit.plan_report import as_mapping, recipe_text, say, show
from onebit.planner import plan
from onebit.planner_inputs import Model, Network, Number, Range, Run, Setup, Shapes, Work, likely, transformer_shapes
from onebit.planner_overlap import measured_extra_s
from onebit.probe import made_by
from onebit.probe_file import SAME_MODEL, Probed, read_probe
from onebit.together import stdout_kept_clean

NUMBER = "a number, or a range LOW..HIGH or LOW..LIKELY..HIGH"
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def plan_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A number of parameters (336M); a transformers model type, config.json or name that is downloaded "
            "already; or MODULE:FUNCTION, which returns a torch module or a list of shapes. Needed without --probe."
        ),
    ] = None,
    compute_ms: Annotated[
        str | None,
        typer.Option(help=f"Forward and backward of one micro-batch, without communication: {NUMBER}; or --probe."),
    ] = None,
    probe_file: Annotated[
        Path | None, typer.Option("--probe", help="What `onebit probe --json` wrote; options given go over it.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers together; needed, except with --sweep.")] = None,
    machines: Annotated[int | None, typer.Option(help="That they are on, equally many; by default one each.")] = None,
    link_gbit_s: Annotated[
        str | None, typer.Option(help="What a machine sends to others, as measured; needed, except with --sweep.")
    ] = None,
    latency_us: Annotated[str | None, typer.Option(help="Of a message between machines; 50.")] = None,
    message_us: Annotated[
        str | None, typer.Option(help="What each message costs its sender, whatever its size; 5.")
    ] = None,
    local_gbit_s: Annotated[str | None, typer.Option(help="What a worker sends inside its machine; 80.")] = None,
    oversubscription: Annotated[str, typer.Option(help="How many times less all links together carry.")] = "1",
    half_duplex: Annotated[bool, typer.Option("--half-duplex", help="Links send or receive, not both.")] = False,
    all_reduce: Annotated[str, typer.Option(help="ring, or by-machine: inside machines first.")] = "ring",
    two_level: Annotated[
        bool | None,
        typer.Option(
            "--two-level/--one-level",
            help="Compressed between machines only, full precision inside them; by default as the probe, or one level.",
        ),
    ] = None,
    mean_gbit_s: Annotated[
        str | None,
        typer.Option(help="Rate of the mean inside a machine, of two levels, sums included; that of --local-gbit-s."),
    ] = None,
    precision: Annotated[str, typer.Option(help="Of parameters: fp32 or bf16.")] = "fp32",
    micro_batch: Annotated[
        int | None, typer.Option(help="Samples per worker, forward and backward at once; 1.")
    ] = None,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    other_ms: Annotated[str, typer.Option(help="What else a step takes.")] = "0",
    backward_share: Annotated[str | None, typer.Option(help="Of --compute-ms; 0.67.")] = None,
    straggling: Annotated[
        str | None, typer.Option(help="Share by which the slowest worker is later than the mean; 0.")
    ] = None,
    overlap: Annotated[
        str, typer.Option(help="Share of what could run beside other work that does, unless probed.")
    ] = "1",
    overlap_exchange: Annotated[
        bool, typer.Option("--overlap-exchange", help="Exchanges begin during backward: overlap=True of optimizers.")
    ] = False,
    overlap_extra_ms: Annotated[
        str | None,
        typer.Option(help="What such a step takes beyond that, or below 0 less, as `onebit probe --overlap` says; 0."),
    ] = None,
    memory_gbyte_s: Annotated[str | None, typer.Option(help="What the device reads and writes; 500.")] = None,
    kernel_factor: Annotated[
        str | None,
        typer.Option(help=f"1-bit kernels, over their memory traffic: `onebit bench` shows it; {Work.kernel_factor}."),
    ] = None,
    plain_factor: Annotated[str | None, typer.Option(help=f"The same of plain updates; {Work.plain_factor}.")] = None,
    int8_factor: Annotated[
        str | None,
        typer.Option(help=f"The same of 8-bit integers, as `onebit probe` measures it; {Work.int8_factor}."),
    ] = None,
    int4_factor: Annotated[str | None, typer.Option(help=f"The same of 4-bit integers; {Work.int4_factor}.")] = None,
    local_factor: Annotated[str | None, typer.Option(help=f"The same of local variance; {Work.local_factor}.")] = None,
    low_rank_factor: Annotated[
        str | None, typer.Option(help=f"The same of torch's PowerSGD hook; {Work.low_rank_factor}.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the run.")] = 10_000,
    freeze_step: Annotated[str, typer.Option(help="Share of the run before the switch.")] = "0.17",
    price: Annotated[str, typer.Option(help="Of a machine for an hour.")] = "0",
    family: Annotated[str, typer.Option(help="lamb or adam: of which one is recommended.")] = "lamb",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw into this file; its ending says the format.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Write the recommended settings for `onebit train`.")] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="A map: 2 to 4,096 workers, 0.1 to 100 Gbit/s, 0.1 to 100 B parameters.")
    ] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the map's cells; with --sweep.")] = None,
    device_gbyte: Annotated[float, typer.Option(help="Memory of a worker; with --sweep.")] = 80.0,
) -> None:
    """Say beforehand what each method would cost on your machines, and whether compression pays."""
    probed = None if probe_file is None else read_probe(probe_file)
    workers, machines = _places(workers, machines, probed)
    known = {} if probed is None else _known(probed, machines == 1)
    if probed is not None and machines == 1 and probed.workers > 1 and "local_gbit_s" not in known and not local_gbit_s:
        raise ConfigError(
            "--local-gbit-s is not given, and the probe has no rate inside a machine; a plan needs it; give it, or "
            "probe on one machine"
        )
    levels = _levels(two_level, probed, _per_machine(workers, machines))
    needless = "link_gbit_s" in known or machines == 1
    _check_together(sweep, workers, "known" if needless else link_gbit_s, recipe, csv_file)

    def probed_or(name: str, text: str | None, otherwise: Number) -> Number:
        """What was given, or else probed, or else usual."""
        return known.get(name, otherwise) if text is None else amount(text, "--" + name.replace("_", "-"))

    shapes = _shapes(model, probed)
    network = Network(
        workers=2 if workers is None else workers,
        workers_per_machine=_per_machine(workers, machines),
        link_gbit_s=probed_or("link_gbit_s", link_gbit_s, likely(known.get("local_gbit_s", 1.0))),
        latency_us=probed_or("latency_us", latency_us, 50.0),
        message_us=probed_or("message_us", message_us, 5.0),
        local_gbit_s=probed_or("local_gbit_s", local_gbit_s, 80.0),
        local_latency_us=probed_or("local_latency_us", None, 5.0),
        exchange_efficiency=probed_or("exchange_efficiency", None, 1.0),
        oversubscription=amount(oversubscription, "--oversubscription"),
        full_duplex=not half_duplex,
        all_reduce=all_reduce,  # type: ignore[arg-type]  # checked there
        two_level=levels,
        mean_gbit_s=known.get("mean_gbit_s") if mean_gbit_s is None else amount(mean_gbit_s, "--mean-gbit-s"),
    )
    work = Work(
        micro_step_s=_compute_s(compute_ms, known, model, shapes, probed),
        accumulation=accumulation,
        micro_batch=micro_batch if micro_batch is not None else 1 if probed is None else probed.micro_batch,
        other_s=_scaled(amount(other_ms, "--other-ms"), 1e-3),
        backward_share=probed_or("backward_share", backward_share, 0.67),
        straggling=probed_or("straggling", straggling, 0.0),
        overlap=amount(overlap, "--overlap"),
        overlap_exchange=overlap_exchange,
        overlap_extra_s=_extra_s(overlap_extra_ms, overlap_exchange, amount(overlap, "--overlap"), shapes, probed),
        memory_gbyte_s=probed_or("memory_gbyte_s", memory_gbyte_s, 500.0),
        kernel_factor=probed_or("kernel_factor", kernel_factor, Work.kernel_factor),
        plain_factor=probed_or("plain_factor", plain_factor, Work.plain_factor),
        int8_factor=probed_or("int8_factor", int8_factor, Work.int8_factor),
        int4_factor=probed_or("int4_factor", int4_factor, Work.int4_factor),
        local_factor=probed_or("local_factor", local_factor, Work.local_factor),
        low_rank_factor=probed_or("low_rank_factor", low_rank_factor, Work.low_rank_factor),
    )
    run = Run(steps, amount(freeze_step, "--freeze-step"), price_per_machine_hour=amount(price, "--price"))
    setup = Setup(Model(shapes, _width(precision)), network, work, run)
    if sweep:
        _sweep(setup, device_gbyte, as_json, plot, csv_file)
        return
    done = plan(setup, family)
    if recipe is not None:
        _write(recipe, recipe_text(done))
    if plot is not None:
        draw_plan(done, plot)
    if as_json:
        print(json.dumps(as_mapping(done), indent=1))
        return
    show(done)
    for what, path in (("recipe", recipe), ("plot", plot)):
        if path is not None:
            say(f"{what}: {path}")


# -- what was given ----------------------------------------------------------------------------------------------


def _check_together(
    sweep: bool, workers: int | None, link: str | None, recipe: Path | None, csv_file: Path | None
) -> None:
    if not sweep:
        for flag, value in (("--workers", workers), ("--link-gbit-s", link)):
            if value is None:
                raise ConfigError(f"{flag} is not given; a plan needs it; give it, or --sweep for a map")
        if csv_file is not None:
            raise ConfigError(f"--csv is {str(csv_file)!r} without --sweep; it holds the map's cells; add --sweep")
    elif recipe is not None:
        raise ConfigError(f"--recipe is {str(recipe)!r} with --sweep; a map has no one recipe; leave one of them out")


def _places(workers: int | None, machines: int | None, probed: Probed | None) -> tuple[int | None, int | None]:
    """Workers and machines: each as given, or else that of the probe, where it had several workers."""
    if probed is None or probed.workers == 1:
        return workers, machines
    return probed.workers if workers is None else workers, probed.machines if machines is None else machines


def _known(probed: Probed, inside: bool) -> dict[str, Number]:
    """What the probe measured that holds where the workers are; on stderr, what does not."""
    known, strange = probed.measured_where(inside)
    if strange:
        where = "inside one machine" if probed.inside else "between machines"
        names = " and ".join(strange)
        print(
            f"{names}: not taken from the probe, which measured them {where}; the usual values stand", file=sys.stderr
        )
    return known


def _levels(asked: bool | None, probed: Probed | None, per_machine: int) -> bool:
    """Whether there are two levels: as asked, or else as the probe had; on stderr where that says otherwise."""
    had = probed is not None and probed.two_level
    found = had if asked is None else asked
    if found != had and probed is not None and per_machine > 1:
        here, there, flag = ("two levels", "one", " --two-level") if found else ("one level", "two", "")
        print(
            f"the plan has {here} and the probe timed the kernels of {there}; `onebit probe{flag}` times these",
            file=sys.stderr,
        )
    return found


def _extra_s(text: str | None, overlaps: bool, share: Number, shapes: Shapes, probed: Probed | None) -> Number:
    """As given, or else as probed with this model; on stderr where a plan with overlap lacks it."""
    if text is not None:
        if not overlaps:
            raise ConfigError(f"--overlap-extra-ms is {text} without --overlap-exchange; add that, or leave it out")
        return _scaled(amount(text, "--overlap-extra-ms"), 1e-3)
    if not overlaps or probed is None:
        return 0.0
    same = probed.is_of(sum(math.prod(shape) for shape in shapes))
    found = measured_extra_s(probed, share) if same else None
    if found is None:
        print(
            "the plan has overlap and the probe timed no step of its model with it, so that cores count as free for "
            "what runs beside backward; `onebit probe --overlap` times one",
            file=sys.stderr,
        )
    return found or 0.0


def _compute_s(
    text: str | None, known: dict[str, Number], model: str | None, shapes: Shapes, probed: Probed | None
) -> Number:
    if text is not None:
        return _scaled(amount(text, "--compute-ms"), 1e-3)
    count = sum(math.prod(shape) for shape in shapes)
    if probed is not None and not probed.is_of(count):
        raise ConfigError(
            f"--compute-ms is not given, and {model!r} has {count:,} parameters where the model of the probe has "
            f"{probed.parameters:,}; its step says nothing about this model, more than {SAME_MODEL:.0%} away; give "
            "--compute-ms, or probe this model"
        )
    if "micro_step_s" not in known:
        raise ConfigError("--compute-ms is not given; a plan needs it; give it, or --probe with a measured step")
    return known["micro_step_s"]


def _shapes(model: str | None, probed: Probed | None) -> Shapes:
    if model is not None:
        return model_shapes(model)
    if probed is None:
        raise ConfigError("no MODEL is given; a plan needs it; give it, or --probe with a measured one")
    return probed.shapes


def _per_machine(workers: int | None, machines: int | None) -> int:
    if machines is None:
        return 1
    if workers is None:
        raise ConfigError(f"--machines is {machines} without --workers; give both, or neither")
    if machines < 1 or workers % machines:
        raise ConfigError(
            f"--workers is {workers} and --machines is {machines}; workers must be a multiple of machines, at least 1 "
            "each; change one of them, or give both where --probe stands for one"
        )
    return workers // machines


def amount(text: str, flag: str) -> Number:
    """A number or a range."""
    try:
        values = [float(part) for part in text.split("..")]
    except ValueError:
        values = []
    if len(values) not in (1, 2, 3) or not all(map(math.isfinite, values)):
        raise ConfigError(f"{flag} is {text!r}; it must be {NUMBER}; correct the flag")
    if len(values) == 1:
        return values[0]
    if sorted(values) != values:
        raise ConfigError(f"{flag} is {text!r}; the numbers of a range must rise; correct the flag")
    return Range(values[0], (values[0] + values[-1]) / 2 if len(values) == 2 else values[1], values[-1])


def _scaled(value: Number, factor: float) -> Number:
    if isinstance(value, Range):
        return Range(value.low * factor, value.likely * factor, value.high * factor)
    return value * factor


def _width(precision: str) -> int:
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"--precision is {precision!r}; it must be fp32 or bf16; choose one of them")
    return 4 if precision == "fp32" else 2


def model_shapes(text: str) -> Shapes:
    """The layers of what MODEL says.

    Raises:
        ConfigError: it is no number of parameters, no configuration and no function that gives a model.
    """
    if ":" in text and not Path(text).exists():
        return _shapes_of(_called(text), text)
    try:
        count = float(text.rstrip("KMBT").replace("_", "").replace(",", "")) * SUFFIXES.get(text[-1:], 1.0)
    except ValueError:
        return _shapes_of(_configured(text), text)
    if not 1 <= count <= 1e15 or count != round(count):
        raise ConfigError(f"the model has {text} parameters; it must be a whole number from 1 to 1e15, such as 336M")
    return transformer_shapes(round(count))


def _called(text: str) -> Any:
    """What MODULE:FUNCTION returns, without memory for its weights. What it prints goes to stderr."""
    with stdout_kept_clean():
        return made_by(text, torch.device("meta"))


def _configured(text: str) -> Any:
    """A transformers model from a config file, a model type or a name, without memory for its weights."""
    import transformers

    try:
        if text in transformers.CONFIG_MAPPING:
            config = transformers.CONFIG_MAPPING[text]()
        else:
            config = transformers.AutoConfig.from_pretrained(text, local_files_only=True)
        with torch.device("meta"):
            return transformers.AutoModel.from_config(config)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"the model {text!r} cannot be used: {type(error).__name__}: {why}; give a number of parameters such as "
            "336M, a transformers model type, name or config.json, or MODULE:FUNCTION"
        ) from error


def _shapes_of(model: Any, text: str) -> Shapes:
    if isinstance(model, torch.nn.Module):
        return tuple(tuple(p.shape) for p in model.parameters() if p.requires_grad)
    try:
        shapes = tuple(tuple(int(size) for size in shape) for shape in model)
    except TypeError:
        shapes = ((-1,),)
    if any(size < 0 for shape in shapes for size in shape):
        raise ConfigError(
            f"the model {text!r} is {type(model).__name__}; it must be a torch module or a list of shapes"
        )
    return shapes


# -- the map -----------------------------------------------------------------------------------------------------


def _sweep(setup: Setup, device_gbyte: float, as_json: bool, plot: Path | None, csv_file: Path | None) -> None:
    cells = planner_sweep.sweep(setup, device_gbyte)
    rows, lines = planner_sweep.as_rows(cells), planner_sweep.summary(cells)
    if plot is not None:
        draw_map(cells, plot)
    if csv_file is not None:
        try:
            with csv_file.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise _unwritable(csv_file, error) from None
    if as_json:
        print(json.dumps({"summary": lines, "cells": rows}, indent=1))
        return
    for line in lines:
        say(line)
    for what, path in (("map", plot), ("cells", csv_file)):
        if path is not None:
            say(f"{what}: {path}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{str(path)!r} cannot be written: {error.strerror}; give a path in a folder that exists")
