"""Look whether everything that compression rests on is as it should be: a list of findings, each with what to do."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

import onebit
from onebit.checked import check_replicas
from onebit.checks import fingerprints
from onebit.comm import Comm, Distributed
from onebit.errors import MismatchError, OnebitError
from onebit.interfaces import Host, faults_of, seen, this_host
from onebit.kernels import choose
from onebit.planner_inputs import Number, Range, Shapes, likely
from onebit.probe_file import gbit_s
from onebit.probe_network import POOR_FIT, Case, cases_of, machine_name, time_network

Mark = Literal["ok", "warning", "wrong"]
TIGHT, LOOSE = 0.8, 0.5  # measured over likely assumed rate: below the first a warning, below the second wrong
LINK_S = 4.0
LINK_CASES = [
    *(Case("all_to_all", size, 1) for size in (64, 4096, 65536, 2**20, 2**23)),
    Case("all_to_all", 64, 8),
    *(Case("all_gather", size, 1) for size in (64, 65536, 2**20, 2**23)),
    *(Case("all_reduce", size, 1) for size in (64, 65536, 2**20, 2**23)),
]


@dataclass(frozen=True)
class Finding:
    """A line of the doctor's. `subject`: what was looked at; `number`: of the finding, None where it has none;
    `advice`: what to do, empty where there is nothing."""

    mark: Mark
    subject: str
    finding: str
    number: float | None = None
    advice: str = ""


@dataclass(frozen=True)
class AssumedLink:
    """What a plan had: Gbit/s, None where the probe could not tell it, and microseconds of a message of no size, where
    known. `inside`: it was measured inside one machine; None: wherever the workers are. `shapes`: of the probe's model,
    whose sizes are then timed; None: usual ones."""

    gbit_s: Number | None
    hop_us: float | None = None
    inside: bool | None = None
    shapes: Shapes | None = None


def examine(comm: Comm, device: torch.device, why: str, assumed: AssumedLink | None) -> list[dict[str, Any]]:
    """All findings about the workers. A collective.

    Args:
        comm, device, why: the workers; where this one computes, and why there.
        assumed: what the plan was made with; None: nothing to compare with.

    Returns:
        Findings as mappings, equal on all workers.
    """
    here = {
        "python": platform.python_version(), "torch": torch.__version__, "onebit": onebit.__version__,
        "kernels": kernels_here(device), "host": asdict(host_here(comm, device)),
    }  # fmt: skip
    everyone = [json.loads(data) for data in comm.all_gather_bytes(json.dumps(here).encode())]
    hosts = [Host(**one["host"]) for one in everyone]
    machines = len({host.name for host in hosts})
    found = [*versions_of(everyone), Finding("ok", "device", why), *kernels_of([one["kernels"] for one in everyone])]
    found += transport_of(hosts, machines)
    found += link_of(comm, device, machines, assumed)
    if all(one["kernels"][0] for one in everyone):  # else no optimizer can be made
        found += replicas_of(comm, device)
    return [asdict(finding) for finding in found]


def host_here(comm: Comm, device: torch.device) -> Host:
    """The machine of this worker."""
    backend = comm.backend if isinstance(comm, Distributed) else "gloo"
    return this_host(machine_name(), backend if backend in ("gloo", "nccl") else "gloo")


def kernels_here(device: torch.device) -> list[str]:
    """Kernels and why; or "", and what is wrong."""
    try:
        return list(choose(device, torch.float32))
    except OnebitError as error:
        return ["", str(error)]


def versions_of(everyone: Sequence[dict[str, Any]]) -> list[Finding]:
    """Versions, and whether all workers have the same."""
    found = []
    for name in ("python", "torch", "onebit"):
        held = [one[name] for one in everyone]
        if len(set(held)) == 1:
            found.append(Finding("ok", name, f"{held[0]} on all {len(held)} workers" if len(held) > 1 else held[0]))
            continue
        who = ", ".join(f"{version} on {_ranks(held, version)}" for version in dict.fromkeys(held))
        mark: Mark = "warning" if name == "python" else "wrong"
        found.append(Finding(mark, name, who, float(len(set(held))), f"install one {name} on all machines"))
    return found


def kernels_of(held: Sequence[Sequence[str]]) -> list[Finding]:
    """The kernels in use, and whether they are the fast ones on all workers."""
    found = []
    for name, why in dict.fromkeys(map(tuple, held)):
        who = "" if len(held) == 1 else f" on {_ranks(held, [name, why])}"
        if not name:
            found.append(
                Finding(
                    "wrong", "kernels", f"none can be used{who}, so replicas were not examined: {why}", None,
                    "correct or unset ONEBIT_KERNELS",
                )
            )  # fmt: skip
        elif name == "reference":
            slow = "install a C++ compiler and install onebit again, or unset ONEBIT_KERNELS; `onebit bench` shows what"
            found.append(Finding("warning", "kernels", f"reference, slow{who}: {why}", None, f"{slow} it costs"))
        else:
            found.append(Finding("ok", "kernels", f"{name}{who}: {why}"))
    return found


def _ranks(held: Sequence[Any], value: Any) -> str:
    which = [str(rank) for rank, one in enumerate(held) if list(one) == list(value)]
    return f"worker{'s' if len(which) > 1 else ''} {', '.join(which)}"


def transport_of(hosts: Sequence[Host], machines: int) -> list[Finding]:
    """What carries the messages, and interfaces that look wrong."""
    if len(hosts) == 1:
        return [Finding("ok", "transport", "one worker: nothing is sent", None, "start more, to have links examined")]
    what = f"{hosts[0].backend}, {len(hosts)} workers on {machines} machine{'s' if machines > 1 else ''}; {seen(hosts)}"
    found = [Finding("ok", "transport", what, float(machines))]
    said = dict.fromkeys(fault for host in hosts for fault in faults_of(host, machines))
    for mark, finding, advice in said:
        found.append(Finding("wrong" if mark == "wrong" else "warning", "interface", finding, None, advice))
    return found


def link_of(comm: Comm, device: torch.device, machines: int, assumed: AssumedLink | None) -> list[Finding]:
    """The link as measured now, against what a plan assumed. A collective."""
    if comm.size == 1:
        if assumed is None:
            return []
        told = "one worker has no link to compare with what the plan assumed"
        return [Finding("warning", "link", told, None, "start more with --workers, or with torchrun on all machines")]
    per_machine = -(-comm.size // machines)
    probed = None if assumed is None else assumed.shapes
    cases = LINK_CASES if probed is None else cases_of(probed, comm.size)
    network = time_network(cases, comm, per_machine, device, LINK_S)
    fit, small = network["fits"]["all_reduce"]["median"], network["fits"]["exchange"]["median"]
    rate = gbit_s(fit["bytes_per_s"])
    hop_us = 1e6 * (small["latency_s"] + small["message_s"])
    where = "between machines" if machines > 1 else "inside the machine"
    fast = "a rate too high to be seen" if rate is None else f"{rate:.3g} Gbit/s"
    told = f"{fast} and {hop_us:.3g} us a message {where}, fit off by {fit['residual']:.0%}"
    doubts = trusted(fit["residual"], len(network["left_out"]))
    if assumed is not None and assumed.inside is not None and assumed.inside != (machines == 1):
        other = "inside one machine" if assumed.inside else "between machines"
        told = f"{told}; the probe was {other}, so there is nothing to compare"
        advice = "probe and examine with workers in the same places"
        return [Finding("warning", "link", told, rate, advice), *doubts]
    return [*judged_link(told, rate, hop_us, assumed), *doubts]


def trusted(residual: float, left_out: int) -> list[Finding]:
    """What makes a measured rate doubtful: a fit off by more than 20 %, or sizes that were left out."""
    found = []
    if residual > POOR_FIT:
        told = f"off by {residual:.0%}, so the rate above is a rough one"
        again = "examine again while nothing else uses the link and the cores"
        found.append(Finding("warning", "link fit", told, residual, again))
    if left_out:
        told = f"{left_out} sizes left out, since they would take too long: the rate is of shorter messages"
        found.append(Finding("warning", "link sizes", told, float(left_out), "a probe with --seconds has more time"))
    return found


def judged_link(told: str, rate: float | None, hop_us: float, assumed: AssumedLink | None) -> list[Finding]:
    """The finding on a link that has `rate` Gbit/s, None for one too fast to be seen, and takes `hop_us` for a message
    of no size. The rate is judged by the likely one that was assumed.

    Args:
        told: the measurement in words.
        assumed: what the plan had, or None.
    """
    if assumed is None:
        return [Finding("ok", "link", f"{told}; nothing to compare it with", rate, "give --probe or --link-gbit-s")]
    redo = "make the plan again with `onebit probe` and `onebit plan --probe`; look for other traffic and interfaces"
    found = []
    if assumed.gbit_s is None:
        told = f"{told}; the probe could not tell a rate, so there is none to compare with"
        found.append(Finding("warning", "link", told, rate, "probe for longer, --seconds, or give --link-gbit-s"))
    elif rate is None:
        found.append(Finding("ok", "link", f"{told}; the plan assumed {in_gbit_s(assumed.gbit_s)}"))
    else:
        share = rate / likely(assumed.gbit_s)
        told = f"{told}; the plan assumed {in_gbit_s(assumed.gbit_s)}, so it is {share:.0%} of that"
        mark: Mark = "wrong" if share < LOOSE else "warning" if share < TIGHT else "ok"
        found.append(Finding(mark, "link", told, rate, "" if mark == "ok" else redo))
    if assumed.hop_us is not None and hop_us > 2 * assumed.hop_us + 50:
        slow = f"{hop_us:.0f} us a message, {assumed.hop_us:.0f} us assumed"
        found.append(Finding("warning", "latency", slow, hop_us, redo))
    return found


def in_gbit_s(value: Number) -> str:
    """The rate that counts, and the range around it where there is one."""
    told = f"{likely(value):.3g} Gbit/s"
    return f"{told} (the likely one of {value.low:.3g}..{value.high:.3g})" if isinstance(value, Range) else told


def replicas_of(comm: Comm, device: torch.device) -> list[Finding]:
    """Whether weights are equal on all workers after a few steps of 1-bit LAMB, through the switch. A collective."""
    made = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=made).to(device)) for shape in ((300, 40), (40,), (7, 9))]
    optimizer = onebit.OneBitLamb(parameters, lr=0.01, freeze_step=3, comm=comm)
    draws, began, steps = torch.Generator().manual_seed(1 + comm.rank), time.perf_counter(), 8
    failure = ""
    try:
        for _ in range(steps):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=draws).to(device)
            optimizer.step()
        check_replicas(comm, "weights", fingerprints(parameters, [f"layer {i}" for i in range(len(parameters))]))
    except MismatchError as error:
        failure = str(error)
    if failure:
        return [Finding("wrong", "replicas", failure, None, "check memory and network; recipe key train.checksums")]
    stage, sent = optimizer.stage.value, optimizer.payload_bytes
    told = f"equal after {steps} steps through the switch, {sent:,} bytes sent by each worker"
    if stage != "compressed":
        return [Finding("wrong", "replicas", f"after {steps} steps still in the {stage} stage", None, "report it")]
    if comm.size == 1:
        told = f"{steps} steps through the switch worked; one worker has no replica to compare with"
    return [Finding("ok", "replicas", told, time.perf_counter() - began)]


def status_of(findings: Sequence[dict[str, Any]]) -> int:
    """The exit status: 1 if something is wrong, else 0; warnings do not count."""
    return int(any(finding["mark"] == "wrong" for finding in findings))
