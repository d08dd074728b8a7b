"""`onebit probe`: measure what a plan needs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from onebit.comm import Comm
from onebit.errors import ConfigError
from onebit.plan_report import say
from onebit.probe import DEFAULT_S, probe
from onebit.probe_file import read_probe
from onebit.probe_network import POOR_FIT, from_launcher
from onebit.report import human_bytes
from onebit.together import on_workers

Handed = Annotated[Path | None, typer.Option(hidden=True)]  # where worker 0 leaves the result for who started it
Timeout = Annotated[float, typer.Option(help="Seconds within which all workers must come and answer.")]


def probe_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="MODULE:FUNCTION, which returns a torch module and a function that gives a micro-batch's loss; or a "
            "recipe; without it, the built-in small recipe."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes to start on this machine; under torchrun leave it out.")] = 1,
    micro_batch: Annotated[int | None, typer.Option(help="Samples of a micro-batch; by default the recipe's.")] = None,
    seconds: Annotated[float, typer.Option(help="How long it may take, 5 to 600.")] = DEFAULT_S,
    two_level: Annotated[
        bool, typer.Option("--two-level", help="Time kernels that compress between machines only, and the mean inside.")
    ] = False,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Time a step with overlap too, for `onebit plan --overlap-exchange`.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write it into this file, for `onebit plan --probe`; -: print JSON.")
    ] = None,
    timeout_s: Timeout = 60.0,
    handed_to: Handed = None,
) -> None:
    """Measure a training step, the links between the workers and the kernels, in half a minute."""
    if json_file is not None and json_file != Path("-") and from_launcher("RANK", 0) == 0:  # it alone writes
        _check_writable(json_file)
    if micro_batch is not None and micro_batch < 1:
        raise ConfigError(f"--micro-batch is {micro_batch}; it must be at least 1; correct the flag")
    arguments = [*([model] if model else []), "--seconds", str(seconds), "--timeout-s", str(timeout_s)]
    arguments += [flag for flag, given in (("--two-level", two_level), ("--overlap", overlap)) if given]
    arguments += [] if micro_batch is None else ["--micro-batch", str(micro_batch)]

    def work(comm: Comm, device: torch.device, why: str) -> dict[str, Any]:
        return probe(model, micro_batch, comm, device, seconds, two_level, overlap)

    def report(result: dict[str, Any]) -> int:
        _report(result, json_file)
        return 0

    if status := on_workers("probe", arguments, workers, work, report, handed_to, timeout_s):
        raise typer.Exit(status)


def _check_writable(file: Path) -> None:
    """Raise ConfigError unless a file can be written there: before half a minute of measuring."""
    if file.is_dir():
        raise ConfigError(f"--json is {str(file)!r}, which is a folder; give the path of a file")
    if not file.parent.is_dir():
        raise ConfigError(f"--json is {str(file)!r}, and there is no such folder; give a path in a folder that exists")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--json is {str(file)!r}, which may not be written; give a path in a folder of your own")


def _report(result: dict[str, Any], json_file: Path | None) -> None:
    text = json.dumps(result, indent=1)
    if json_file == Path("-"):
        print(text)
        return
    if json_file is not None:
        try:
            json_file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{str(json_file)!r} cannot be written: {error.strerror}; give a path in a folder that exists"
            ) from None
        read_probe(json_file)
    _show(result)
    if json_file is not None:
        say(f"probe: {json_file}")


def _show(result: dict[str, Any]) -> None:
    """Print what was measured: likely values, and quartiles behind them."""
    step, kernels, network = result["step"], result["kernels"], result["network"]
    table = Table(title=f"{result['workers']} workers on {result['machines']} machines, {result['seconds']:.0f} s")
    for heading in ("measured", "value", "of"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    of = f"{result['model']['name']}, {result['model']['parameters']:,} parameters, {step['micro_batch']} samples"
    table.add_row("forward and backward", _quartiles(step["forward_backward_s"], 1e3, "ms"), of)
    if step["backward_share"] is not None:
        table.add_row("share of backward", f"{step['backward_share']:.0%}", f"{step['repetitions']} steps")
    table.add_row("slowest worker later by", f"{step['straggling']:.1%}", "of the mean")
    for name, fit in _fits(network) + [(f"inside: {name}", fit) for name, fit in _fits(result["local"])]:
        rate = "not bound" if fit["bytes_per_s"] is None else f"{fit['bytes_per_s'] * 8e-9:.3g} Gbit/s"
        value = f"{rate}, {fit['latency_s'] * 1e6:.3g} us + {fit['message_s'] * 1e6:.3g} us a message"
        table.add_row(name, value, f"{fit['samples']} sizes; off by {fit['residual']:.0%}")
    for name, ns in kernels["ns_per_element"].items():
        table.add_row(name.replace("_", " "), _quartiles(ns, 1, "ns/element"), "")
    table.add_row("copy of memory", _quartiles(kernels["copy_gbyte_s"], 1, "GB/s"), f"{kernels['elements']:,} floats")
    if kernels["mean_gbit_s"] is not None:
        table.add_row("mean inside a machine", _quartiles(kernels["mean_gbit_s"], 1, "Gbit/s"), "of two levels")
    if result["overlap"] is not None:
        value = _quartiles(result["overlap"]["step_s"], 1e3, "ms")
        table.add_row("step with overlap", value, f"{result['overlap']['repetitions']} steps of 1-bit LAMB")
    Console().print(table)
    say(f"kernels: {kernels['kernels']}")
    if network is None:
        say("one worker: no link was measured; start more with --workers, or with torchrun on several machines")
        return
    if network["left_out"]:
        largest = max(network["left_out"], key=lambda case: case["size"])
        say(
            f"warning: left out, since they would take too long: {len(network['left_out'])} sizes, up to "
            f"{largest['collective']} of {human_bytes(largest['size'])}; a longer --seconds has room for more"
        )
    poor = [name for name in ("all_reduce", "exchange") if network["fits"][name]["median"]["residual"] > POOR_FIT]
    if poor:
        say(
            f"warning: the fit of {' and '.join(poor)} is off by more than {POOR_FIT:.0%}; probe again while nothing "
            "else uses the link and the cores, unless the link lets short bursts through faster"
        )
    if network["fits"]["all_reduce"]["median"]["bytes_per_s"] is None:
        say("warning: more bytes took no more time, so the link's rate is not known; `onebit plan` will ask for it")


def _fits(network: dict[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    if network is None:
        return []
    return [(name, fits["median"]) for name, fits in network["fits"].items()]


def _quartiles(value: dict[str, float], factor: float, unit: str) -> str:
    low, middle, high = (f"{value[key] * factor:.3g}" for key in ("low", "likely", "high"))
    return f"{middle} ({low}..{high}) {unit}".rstrip()
