"""Time the collectives that a model needs, on all links that there are, and fit latency and rate to them."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any, NamedTuple

import torch

from onebit.clock import synchronized
from onebit.comm import Comm, agreed
from onebit.errors import ConfigError
from onebit.flat import DEFAULT_BUCKET_ELEMENTS
from onebit.link_fit import COLLECTIVES, Collective, Sample, fit_quartiles, terms_of
from onebit.planner_bytes import one_bit_messages
from onebit.probe_kernels import quartiles

LEAST_REPEATS, MOST_REPEATS = 3, 30
SMALL = 64  # bytes of a message whose time is all latency
ALWAYS = 4096  # bytes up to which sizes are timed whatever they take: a rate needs two sizes
BETWEEN = 1e-6
"""Weight in a fit of sizes between the smallest and the largest, whose times buffers on the way change: what counts is
what a message costs, and what the messages that the model has take."""
FITTED: dict[str, tuple[Collective, ...]] = {
    "all_reduce": ("all_reduce",),
    "exchange": ("all_to_all", "all_gather"),
    "all_to_all": ("all_to_all",),
    "all_gather": ("all_gather",),
}
POOR_FIT = 0.2  # of a time: a fit whose root mean square error is larger is no good
AT_ONCE = 8  # small messages under way together, to tell latency from what each message costs


class Case(NamedTuple):
    """Collectives to time: `size` bytes of a message to one worker, of all_reduce the whole buffer; `at_once` begun
    before the first is waited for."""

    collective: Collective
    size: int
    at_once: int


def cases_of(shapes: tuple[tuple[int, ...], ...], workers: int) -> list[Case]:
    """The sizes that matter for a model, each collective's from small to large.

    From 64 bytes, of all_to_all also 8 at once, by factors of 8 to the 1-bit message of the model's largest bucket; of
    all_reduce to 2 bytes per parameter; of each to 4096 bytes at least.
    """
    bucket = max(one_bit_messages(shapes, workers, DEFAULT_BUCKET_ELEMENTS, "layer"))
    whole = 2 * sum(torch.Size(shape).numel() for shape in shapes)
    found = []
    for collective in COLLECTIVES:
        largest = max(ALWAYS, whole if collective == "all_reduce" else bucket)
        sizes = [SMALL]
        while sizes[-1] * 8 < largest:
            sizes.append(sizes[-1] * 8)
        sizes.append(largest)
        found += [Case(collective, size, 1) for size in sizes]
        if collective == "all_to_all":
            found.append(Case(collective, SMALL, AT_ONCE))
    return found


def time_network(
    cases: list[Case], comm: Comm, per_machine: int, device: torch.device, budget_s: float
) -> dict[str, Any]:
    """Time collectives in turns and fit them. A collective.

    A size above 4096 bytes is left out when the one before it says that it would take more than a tenth of the time.

    Args:
        cases: as `cases_of` gives them.
        per_machine: workers on each machine.
        budget_s: seconds; each size is timed three times at least.

    Returns:
        samples: a mapping for each size; fits: for each of `FITTED` {"low", "median", "high"}, as `Fit.as_mapping`;
        left_out: sizes that would have taken too long; inside: whether all is one machine.
    """
    began, until = time.perf_counter(), time.perf_counter() + budget_s
    kept: dict[Case, list[float]] = {}
    left_out: list[Case] = []
    piloted: dict[Collective, list[tuple[int, float]]] = {name: [] for name in COLLECTIVES}
    for case in cases:
        pilots = piloted[case.collective]
        if case.size > ALWAYS and _foretold_s(pilots, case.size) > budget_s / 10:
            left_out.append(case)
            continue
        kept[case] = []
        if not pilots:
            _timed(case, comm, device)  # makes connections
        pilots.append((case.size * case.at_once, _timed(case, comm, device)))  # not counted
    turns = 0
    while turns < MOST_REPEATS and not agreed(
        comm,
        turns >= LEAST_REPEATS and time.perf_counter() + (time.perf_counter() - began) / (turns + 1) > until,
    ):
        for case, times in kept.items():
            times.append(_timed(case, comm, device))
        turns += 1
    found = {case: quartiles(times) for case, times in kept.items()}
    terms = {case: terms_of(*case, comm.size, per_machine) for case in kept}
    ends = {edge(c.size for c in kept if c.collective == name) for name in COLLECTIVES for edge in (min, max)}
    samples = {
        case: Sample(terms[case], q.low, q.likely, q.high, 1.0 if case.size in ends else BETWEEN)
        for case, q in found.items()
    }
    fits = {
        name: {
            k: f.as_mapping()
            for k, f in fit_quartiles([s for case, s in samples.items() if case.collective in those]).items()
        }
        for name, those in FITTED.items()
    }
    return {
        "samples": [
            {**case._asdict(), **terms[case]._asdict(), "seconds": q, "repetitions": turns} for case, q in found.items()
        ],
        "fits": fits,
        "left_out": [case._asdict() for case in left_out],
        "inside": per_machine == comm.size,
    }


def _foretold_s(pilots: list[tuple[int, float]], size: int) -> float:
    """What a size will take at least, on the line through the last two sizes; of one, as long as that."""
    if not pilots:
        return 0.0
    (size0, seconds0), (size1, seconds1) = (pilots[-2] if len(pilots) > 1 else pilots[-1]), pilots[-1]
    slope = max(0.0, seconds1 - seconds0) / (size1 - size0) if size1 > size0 else 0.0
    return seconds1 + slope * (size - size1)


def _timed(case: Case, comm: Comm, device: torch.device) -> float:
    """Seconds of the slowest worker. All begin together, up to a latency."""
    n = comm.size
    if case.collective == "all_to_all":
        messages = [torch.zeros(n, case.size, dtype=torch.uint8, device=device) for _ in range(case.at_once)]
    else:
        dtype = torch.bfloat16 if case.collective == "all_reduce" else torch.uint8
        count = case.size // dtype.itemsize
        messages = [torch.zeros(count, dtype=dtype, device=device) for _ in range(case.at_once)]
    comm.all_gather_bytes(b"")
    began = synchronized(device)
    if case.collective == "all_reduce":
        for message in messages:
            comm.all_reduce(message)
    else:
        begin = comm.all_to_all if case.collective == "all_to_all" else comm.all_gather
        for pending in [begin(message) for message in messages]:
            pending.wait()
    mine = struct.pack("d", synchronized(device) - began)
    return max(float(struct.unpack("d", data)[0]) for data in comm.all_gather_bytes(mine))


def machine_name() -> str:
    """The machine that this worker is on, for telling machines apart: the host's name and its place in the launch."""
    here = from_launcher("LOCAL_WORLD_SIZE", 0)
    group = from_launcher("RANK", 0) // here if here else 0
    return f"{socket.gethostname()}/{group}"


def from_launcher(name: str, otherwise: int) -> int:
    """A number that the launcher put into the environment, such as RANK; `otherwise`: where it did not.

    Raises:
        ConfigError: it is no whole number, or below 0.
    """
    text = os.environ.get(name, "")
    if not text:
        return otherwise
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{name} is {text!r} in the environment; it must be a whole number, at least 0; a launcher such as "
            "torchrun sets it: start with one, or unset it"
        )
    return int(text)


def machine_names(comm: Comm) -> list[str]:
    """Of each worker, the machine that it is on; each has the same number of workers. A collective.

    Raises:
        ConfigError: machines have different numbers of workers.
    """
    names = [data.decode() for data in comm.all_gather_bytes(machine_name().encode())]
    counts = sorted({names.count(name) for name in names})
    if len(counts) > 1:
        raise ConfigError(
            f"machines have {', '.join(map(str, counts))} workers; a plan needs the same number on each; start as many "
            "on every machine"
        )
    return names


def of_this_machine(comm: Comm, names: list[str]) -> Comm:
    """The workers of this machine alone. A collective."""
    return comm.split([[rank for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)])
