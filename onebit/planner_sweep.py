"""Where each method wins, on paper: the cost model over numbers of workers, link rates and parameters.

Everything is computed, nothing measured. Every cell is a run of its own: a Transformer of so many parameters, a compute
time that grows with them, and the workers, machines and kernels of the set-up it starts from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from onebit.errors import ConfigError
from onebit.planner import WORTH_IT, Cost, cost, exchange_s, steps_of, two_levels_gain
from onebit.planner_inputs import Model, Network, Setup, likely, likely_setup, transformer_shapes
from onebit.planner_methods import METHODS, StepKind, Steps

WORKERS = tuple(2**k for k in range(1, 13))
LINKS_GBIT_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
PARAMETERS = tuple(round(x * 1e9) for x in (0.1, 0.3, 1, 3, 10, 30, 100))
TIE = 1 + WORTH_IT
"""A method wins a cell unless an earlier one of `METHODS` takes at most so many times as long."""
SMALL = 0.5
"""Share of the exchange's time that does not depend on bytes from which on its messages count as too small."""


@dataclass(frozen=True)
class Cell:
    """One point of the map.

    Attributes:
        fastest, fastest_here: of all methods, and of this library's, 16-bit all-reduce included.
        speed_up, speed_up_here: their speed over that of 16-bit all-reduce.
        speed_up_two_levels: of fastest_here with a two-level exchange, over itself with a flat one.
        message_bytes: of one worker to another in the 1-bit exchange, all buckets together.
        message_share: of the exchange's time that latency and counts of messages take.
        server_error_bytes: per worker, in the 1-bit exchange.
        memory_bytes: per worker, of 1-bit LAMB; activations not in it.
        limit: what breaks first, "memory", "messages" or "".
    """

    workers: int
    link_gbit_s: float
    parameters: int
    fastest: str
    speed_up: float
    fastest_here: str
    speed_up_here: float
    speed_up_two_levels: float
    message_bytes: int
    message_share: float
    server_error_bytes: float
    memory_bytes: float
    limit: str


def sweep(
    setup: Setup,
    device_gbyte: float = 80.0,
    workers: Sequence[int] = WORKERS,
    links_gbit_s: Sequence[float] = LINKS_GBIT_S,
    parameters: Sequence[int] = PARAMETERS,
) -> list[Cell]:
    """The map.

    Args:
        setup: what does not vary; its parameters tell how much longer larger models compute. Ranges count as likely.
        device_gbyte: memory of a worker, 1e9 bytes, > 0.

    Raises:
        ConfigError: device_gbyte is not above 0.
    """
    if not device_gbyte > 0:
        raise ConfigError(f"device memory is {device_gbyte:g} GB; it must be above 0; give what a worker has")
    base = likely_setup(setup)
    models = [Model(transformer_shapes(count), base.model.parameter_bytes) for count in parameters]
    found = []
    for model in models:
        longer = model.parameters / base.model.parameters
        slowed = likely(base.work.overlap_extra_s) * longer  # backward, by what runs beside it
        work = replace(base.work, micro_step_s=likely(base.work.micro_step_s) * longer, overlap_extra_s=slowed)
        for n in workers:
            there = replace(base, model=model, work=work, network=_network(base.network, n))
            steps = {name: steps_of(there, method) for name, method in METHODS.items()}
            for rate in links_gbit_s:
                net = replace(there.network, link_gbit_s=rate)
                found.append(_cell(replace(there, network=net), steps, device_gbyte))
    return found


def _network(net: Network, workers: int) -> Network:
    """As many workers per machine as before; fewer where there are fewer workers, or they do not divide."""
    per_machine = min(net.workers_per_machine, workers)
    while workers % per_machine:
        per_machine -= 1
    return replace(net, workers=workers, workers_per_machine=per_machine)


def _cell(setup: Setup, steps: Mapping[str, Steps], device_gbyte: float) -> Cell:
    costs = {name: cost(setup, method, steps[name]) for name, method in METHODS.items()}
    base = costs["ddp-16bit"]
    fastest = _winner(costs)
    here = _winner({name: c for name, c in costs.items() if METHODS[name].recipe or name == "ddp-16bit"})
    message, share = _messages(setup.network, steps["onebit-lamb"][-1][1])
    memory = costs["onebit-lamb"].memory_bytes
    too_small = "messages" if share > SMALL and setup.network.machines > 1 else ""
    return Cell(
        workers=setup.network.workers,
        link_gbit_s=likely(setup.network.link_gbit_s),
        parameters=setup.model.parameters,
        fastest=fastest,
        speed_up=base.total_s / costs[fastest].total_s,
        fastest_here=here,
        speed_up_here=base.total_s / costs[here].total_s,
        speed_up_two_levels=two_levels_gain(setup, METHODS[here]),
        message_bytes=message,
        message_share=share,
        server_error_bytes=4 * setup.model.parameters / setup.network.workers,
        memory_bytes=memory,
        limit="memory" if memory > device_gbyte * 1e9 else too_small,
    )


def _winner(costs: dict[str, Cost]) -> str:
    best = min(c.total_s for c in costs.values())
    return next(name for name, c in costs.items() if c.total_s <= best * TIE)


def _messages(net: Network, kind: StepKind) -> tuple[int, float]:
    """Bytes that one worker sends another in a phase, and the share of the exchange's time that is not bytes."""
    instant = replace(net, latency_us=0.0, message_us=0.0, local_latency_us=0.0)
    whole = sum(exchange_s(net, kind.messages_bytes, kind.exchanged_elements))
    moved = sum(exchange_s(instant, kind.messages_bytes, kind.exchanged_elements))
    return sum(kind.messages_bytes), 1 - moved / whole


def summary(cells: Sequence[Cell]) -> list[str]:
    """What the map says, in sentences."""
    lines = ["computed from the cost model, not measured"]
    for title, key in (("of all methods", "fastest"), ("of this library's and 16-bit all-reduce", "fastest_here")):
        names = list(dict.fromkeys(getattr(c, key) for c in cells))
        counts = {name: sum(getattr(c, key) == name for c in cells) for name in names}
        told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
        lines.append(f"fastest {title}, of {len(cells)} cells: {told}")
    for limit, words in (
        ("memory", "the state of 1-bit LAMB does not fit a worker"),
        ("messages", "latency and the number of messages take most of the exchange"),
    ):
        hit = [c for c in cells if c.limit == limit]
        if hit:
            least = min(c.parameters if limit == "memory" else c.workers for c in hit)
            unit = "parameters" if limit == "memory" else "workers"
            lines.append(f"{words}: {len(hit)} cells, from {least:,} {unit} on")
    worst = max(c.server_error_bytes for c in cells)
    lines.append(f"server error per worker: at most {worst / 1e9:.3g} GB, and less with more workers")
    gain = max(cells, key=lambda c: c.speed_up_two_levels)
    if gain.speed_up_two_levels < TIE:
        lines.append("a two-level exchange gains nothing: there is one worker per machine, or their link is faster")
        return lines
    lines.append(
        f"a two-level exchange gains most at {gain.workers} workers, {gain.link_gbit_s:g} Gbit/s, "
        f"{gain.parameters:,} parameters: {gain.fastest_here} {gain.speed_up_two_levels:.2f} times as fast"
    )
    return lines


def as_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For JSON and CSV: one mapping per cell."""
    return [asdict(cell) for cell in cells]


__all__ = ["Cell", "as_rows", "summary", "sweep"]
