"""`onebit doctor`: is compression working, and is everything as the plan assumed?"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from onebit.comm import Comm, all_or_none
from onebit.doctor import AssumedLink, Finding, examine, status_of
from onebit.doctor_run import Assumed, examine_run, summary_in
from onebit.errors import ConfigError
from onebit.interfaces import faults_of, this_host
from onebit.plan_command import amount
from onebit.plan_report import say
from onebit.planner_inputs import Number, Range, likely
from onebit.probe_command import Handed, Timeout
from onebit.probe_file import Probed, read_probe
from onebit.probe_network import from_launcher, machine_name
from onebit.together import check_start, on_workers
from onebit.train import choose_device, end_process


def doctor_command(
    folder: Annotated[
        Path | None, typer.Option(help="Of a finished run of `onebit train`: was compression active?")
    ] = None,
    probe_file: Annotated[
        Path | None, typer.Option("--probe", help="What the plan was made with: a file of `onebit probe --json`.")
    ] = None,
    link_gbit_s: Annotated[str | None, typer.Option(help="What the plan assumed of the link; over --probe.")] = None,
    machines: Annotated[int | None, typer.Option(help="That the run was on; with --folder.")] = None,
    workers: Annotated[int, typer.Option(help="Processes to start on this machine; under torchrun leave it out.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    timeout_s: Timeout = 60.0,
    handed_to: Handed = None,
) -> None:
    """Look for what keeps compression from paying. Exit status: 1 if a line is marked wrong, 2 for bad input, or 0."""
    check_start(workers, timeout_s)
    if machines is not None and folder is None:
        raise ConfigError(
            f"--machines is {machines} without --folder; it says where a run was; add --folder, or leave it out"
        )
    if machines is not None and machines < 1:
        raise ConfigError(f"--machines is {machines}; it must be at least 1; correct the flag")
    probed = None if probe_file is None else read_probe(probe_file)
    link = None if link_gbit_s is None else amount(link_gbit_s, "--link-gbit-s")
    if link is not None and not (link.low if isinstance(link, Range) else link) > 0:
        raise ConfigError(f"--link-gbit-s is {link_gbit_s!r}; it must be above 0; correct the flag")
    if folder is not None:
        summary_in(folder)
    arguments = ["--timeout-s", str(timeout_s)]
    for flag, value in (
        ("--folder", folder),
        ("--probe", probe_file),
        ("--link-gbit-s", link_gbit_s),
        ("--machines", machines),
    ):
        arguments += [] if value is None else [flag, str(value)]

    def work(comm: Comm, device: torch.device, why: str) -> dict[str, Any]:
        found = examine(comm, device, why, _assumed_link(probed, link))
        if folder is not None:
            found += all_or_none(comm, lambda: examine_run(folder, Assumed(probed, link, machines)))
        return {"findings": found, "workers": comm.size}

    def report(result: dict[str, Any]) -> int:
        return _report(result["findings"], as_json)

    if faults := _alone_faults(workers):
        _end(_report(faults, as_json) if from_launcher("LOCAL_RANK", 0) == 0 else status_of(faults))
    if status := on_workers("doctor", arguments, workers, work, report, handed_to, timeout_s):
        raise typer.Exit(status)


def _assumed_link(probed: Probed | None, link: Number | None) -> AssumedLink | None:
    """What the plan had: a rate given by hand goes over the probe."""
    if probed is None:
        return None if link is None else AssumedLink(link)
    if link is not None or probed.workers == 1:
        return AssumedLink(link, shapes=probed.shapes)
    hop = likely(probed.latency_us or 0.0) + (probed.message_us or 0.0)
    return AssumedLink(probed.link_gbit_s, hop, probed.inside, probed.shapes)


def _alone_faults(workers: int) -> list[dict[str, Any]]:
    """What keeps this worker from joining the others at all: then there is nothing to examine together."""
    if workers == 1 and "RANK" not in os.environ:
        return []
    local = choose_device(from_launcher("LOCAL_RANK", 0), from_launcher("LOCAL_WORLD_SIZE", workers))
    backend = "nccl" if local[0].type == "cuda" else "gloo"
    host = this_host(machine_name(), backend)
    if not host.missing:
        return []
    return [
        {**vars(Finding("wrong" if mark == "wrong" else "warning", "interface", finding, None, advice))}
        for mark, finding, advice in faults_of(host, 1)
    ]


def _end(status: int) -> None:
    if "RANK" in os.environ:
        end_process(status)
    raise typer.Exit(status)


def _report(findings: Sequence[dict[str, Any]], as_json: bool) -> int:
    status = status_of(findings)
    if as_json:
        print(json.dumps({"status": status, "findings": list(findings)}, indent=1, allow_nan=False))
        return status
    for finding in findings:
        say(f"{finding['mark']:8}{finding['subject']:12} {finding['finding']}")
        if finding["advice"]:
            say(f"{'':20} -> {finding['advice']}")
    wrong = sum(finding["mark"] == "wrong" for finding in findings)
    warned = sum(finding["mark"] == "warning" for finding in findings)
    say(f"{wrong} wrong, {warned} warning{'s' if warned != 1 else ''}, {len(findings) - wrong - warned} ok")
    return status
