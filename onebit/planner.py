"""The cost model of a training step: how long, how many bytes, how much memory and money each method takes.

docs/cost_model.md has the formulas in the same order and with the same names. Nothing here talks to other workers.

  rate        bytes a second that leave a machine: link / oversubscription, half of it where a link is half-duplex
  all-reduce  `all_reduce_s`, once around the ring or by machine
  exchange    `exchange_s`: all-to-all of n - 1 messages per worker, then all-gather of one message per worker
  a step      `step_time`: its parts, and what of them is hidden behind others
  a run       `cost`: all steps of a method
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from onebit.comm import ring_all_reduce_bytes
from onebit.errors import ConfigError
from onebit.planner_bytes import mean_inside_bytes
from onebit.planner_inputs import Network, Number, Range, Setup, Work, corners, likely, likely_setup
from onebit.planner_methods import DDP_BUCKET_BYTES, METHODS, Method, StepKind, Steps

PLAIN = {"lamb": "lamb-16bit", "adam": "ddp-16bit"}
"""Of each family: 16-bit all-reduce in every step, which the others are compared with."""
WORTH_IT = 0.05
"""Of the 16-bit run's time: what a method must save before it is recommended."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class StepTime:
    """The parts of a step in seconds. `hidden_s` is what runs beside other parts: the step takes the rest. It may be
    below 0 where a probe found that parts take longer beside each other than one after the other."""

    compute_s: float = 0.0
    straggling_s: float = 0.0
    encode_s: float = 0.0
    local_mean_s: float = 0.0
    all_to_all_s: float = 0.0
    server_s: float = 0.0
    all_gather_s: float = 0.0
    all_reduce_s: float = 0.0
    update_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        parts = asdict(self)
        return math.fsum(value for name, value in parts.items() if name != "hidden_s") - self.hidden_s


# -- the network -----------------------------------------------------------------------------------------------


def _value(number: Number) -> float:
    """A number of a set-up without ranges."""
    assert not isinstance(number, Range), "ranges are worked out at their corners"
    return number


def link_bytes_per_s(net: Network) -> float:
    """What a machine sends to others at most, while all do."""
    return _value(net.link_gbit_s) * 1e9 / 8 / _value(net.oversubscription) / (1 if net.full_duplex else 2)


def _local_bytes_per_s(net: Network) -> float:
    return _value(net.local_gbit_s) * 1e9 / 8


def _mean_bytes_per_s(net: Network) -> float:
    return _local_bytes_per_s(net) if net.mean_gbit_s is None else _value(net.mean_gbit_s) * 1e9 / 8


def _hop_s(net: Network, between: bool) -> float:
    """One message of no size, to another machine or inside one."""
    latency = net.latency_us if between else net.local_latency_us
    return (_value(latency) + _value(net.message_us)) * 1e-6


def _moved_s(net: Network, link_bytes: float, local_bytes: float) -> float:
    """Both at once: what leaves a machine, and what a worker sends inside it."""
    return max(link_bytes / link_bytes_per_s(net), local_bytes / _local_bytes_per_s(net))


def all_reduce_s(net: Network, size: int, rounds: int = 1) -> float:
    """Seconds of the all-reduce of `size` bytes per worker, in `rounds` pieces one after the other.

    Bytes are those of a ring; messages that wait for each other are as few as halving and doubling needs, 2 log2 n, so
    that what compression is compared with is not made slower than it need be.
    """
    n, g, m = net.workers, net.workers_per_machine, net.machines
    if net.all_reduce == "ring" or m == 1 or g == 1:
        sent = 2 * (n - 1) / n * size
        moved = _moved_s(net, sent if m > 1 else 0.0, sent if g > 1 else 0.0)
        return moved + rounds * _doublings(n) * _hop_s(net, m > 1)
    inside, between = 2 * (g - 1) / g * size, 2 * (m - 1) / m * size
    hops = _doublings(g) * _hop_s(net, False) + _doublings(m) * _hop_s(net, True)
    return inside / _local_bytes_per_s(net) + between / link_bytes_per_s(net) + rounds * hops


def _doublings(workers: int) -> int:
    """2 log2 n, rounded up."""
    return 2 * (workers - 1).bit_length()


def _for_exchange(net: Network) -> Network:
    """The network as the messages of an exchange find it."""
    share = _value(net.exchange_efficiency)
    if share == 1.0:
        return net
    return replace(net, link_gbit_s=_value(net.link_gbit_s) * share, local_gbit_s=_value(net.local_gbit_s) * share)


def exchange_s(net: Network, messages: Sequence[int], elements: int) -> tuple[float, float, float]:
    """Seconds of the three phases of all buckets: the mean inside each machine, the all-to-all, the all-gather.

    Args:
        messages: bytes of a message of each bucket.
        elements: of all buckets, for the mean inside the machine, which two levels need.
    """
    n, g, m = net.workers, net.workers_per_machine, net.machines
    net = _for_exchange(net)
    size, rounds = sum(messages), len(messages)
    if net.two_level and g > 1:
        inside = mean_inside_bytes(g, elements) / _mean_bytes_per_s(net) + rounds * (g - 1) * _hop_s(net, False)
        spread = (g - 1) * m * size / _local_bytes_per_s(net) + rounds * (g - 1) * _hop_s(net, False)
        if m == 1:
            return inside, 0.0, spread
        crossing = _moved_s(net, g * (m - 1) * size, 0.0)
        to_all = crossing + rounds * (_value(net.latency_us) + (m - 1) * _value(net.message_us)) * 1e-6
        return inside, to_all, crossing + rounds * (m - 1) * _hop_s(net, True) + spread
    latency = _value(net.latency_us if m > 1 else net.local_latency_us)
    to_all = _moved_s(net, g * (n - g) * size, (g - 1) * size) + rounds * (
        (latency + (n - 1) * _value(net.message_us)) * 1e-6
    )
    around = (n - 1) * size
    gathered = _moved_s(net, around if m > 1 else 0.0, around if g > 1 else 0.0)
    return 0.0, to_all, gathered + rounds * (n - 1) * _hop_s(net, m > 1)


def _as_exchanged(net: Network, kind: StepKind) -> Network:
    return replace(net, two_level=False) if kind.flat and net.two_level else net


def payload_bytes(net: Network, kind: StepKind) -> int:
    """Bytes that one worker hands to the transport in a step of this kind, inside its machine and out, as `Comm` counts
    them."""
    n, g, m = net.workers, net.workers_per_machine, net.machines
    net = _as_exchanged(net, kind)
    reduced = sum(ring_all_reduce_bytes(size, n) for size in kind.reduced_bytes)
    size = sum(kind.messages_bytes)
    if not (net.two_level and g > 1) or not size:
        return reduced + 2 * (n - 1) * size
    return reduced + mean_inside_bytes(g, kind.exchanged_elements) + 2 * (m - 1) * size + (g - 1) * m * size


# -- a step ----------------------------------------------------------------------------------------------------


def step_time(setup: Setup, kind: StepKind) -> StepTime:
    """The parts of a step of one kind. The set-up must have no ranges."""
    net, work = setup.network, setup.work
    trip = setup.model.parameters / (_value(work.memory_gbyte_s) * 1e9)  # seconds for a byte per parameter
    kernels = _value(getattr(work, kind.factor)) * trip
    encode, server = kind.encode_bytes * kernels, kind.server_bytes * kernels
    update = kind.update_bytes * _value(getattr(work, kind.update_factor)) * trip
    update += kind.plain_bytes * _value(work.plain_factor) * trip
    compute = _compute_s(work) if kind.computes else 0.0
    waits = _value(work.straggling) * math.sqrt(kind.since_sync) * compute
    local, to_all, gathered = 0.0, 0.0, 0.0
    if kind.messages_bytes:
        local, to_all, gathered = exchange_s(_as_exchanged(net, kind), kind.messages_bytes, kind.exchanged_elements)
    pieces = [max(1, math.ceil(size / DDP_BUCKET_BYTES)) if kind.ddp else 1 for size in kind.reduced_bytes]
    reduced = sum(all_reduce_s(net, s, k) for s, k in zip(kind.reduced_bytes, pieces, strict=True) if s)
    hidden = _hidden_in_backward(work, reduced, sum(pieces)) if kind.ddp and kind.computes else 0.0
    wire, buckets = local + to_all + gathered, len(kind.messages_bytes)
    if work.overlap_exchange and kind.early and kind.computes:
        hidden += _hidden_in_backward(work, wire, buckets)
        if buckets > 1:  # compute itself is never hidden
            hidden = min(hidden - _value(work.overlap_extra_s), wire + encode + server + update)
    else:
        hidden += _hidden_in_pipeline(work, encode + server, wire, buckets)
    return StepTime(compute, waits, encode, local, to_all, server, gathered, reduced, update, hidden)


def _compute_s(work: Work) -> float:
    return work.accumulation * _value(work.micro_step_s) + _value(work.other_s)


def _hidden_in_backward(work: Work, reduced_s: float, buckets: int) -> float:
    """Of buckets that are reduced or exchanged as they are ready: the last one waits for the end of backward."""
    window = _value(work.backward_share) * _value(work.micro_step_s)
    return _value(work.overlap) * (buckets - 1) / buckets * min(reduced_s, window) if buckets else 0.0


def _hidden_in_pipeline(work: Work, kernels_s: float, wire_s: float, buckets: int) -> float:
    """Of an exchange in buckets: one is encoded or served while another is on the wire."""
    return _value(work.overlap) * (buckets - 1) / buckets * min(kernels_s, wire_s) if buckets else 0.0


# -- a run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What a method costs in a set-up without ranges. `parts`: of the mean step; `kinds`: how many steps, of what."""

    parts: StepTime
    kinds: tuple[tuple[str, int, StepTime, int], ...]
    step_s: float
    samples_per_s: float
    total_s: float
    money: float
    payload_bytes: int
    memory_bytes: float
    share_of_16bit: float


def steps_of(setup: Setup, method: Method) -> Steps:
    """Its kinds of steps, without those that the run does not have."""
    return [(count, kind) for count, kind in method.steps(setup) if count]


def cost(setup: Setup, method: Method, steps: Steps | None = None) -> Cost:
    """Time, bytes, memory and money of a run. The set-up must have no ranges.

    `steps`: what `steps_of` gives, where it is known already; it does not depend on rates and times.
    """
    net, run, work = setup.network, setup.run, setup.work
    steps = steps_of(setup, method) if steps is None else steps
    times = [step_time(setup, kind) for _, kind in steps]
    sent = [payload_bytes(net, kind) for _, kind in steps]
    total = math.fsum(count * t.total_s for (count, _), t in zip(steps, times, strict=True))
    mean = {
        name: math.fsum(count * getattr(t, name) for (count, _), t in zip(steps, times, strict=True)) / run.steps
        for name in asdict(times[0])
    }
    payload = sum(count * size for (count, _), size in zip(steps, sent, strict=True))
    every_step = run.steps * ring_all_reduce_bytes(2 * setup.model.parameters, net.workers)
    samples = run.steps * net.workers * work.accumulation * work.micro_batch
    rows = zip(steps, times, sent, strict=True)
    return Cost(
        parts=StepTime(**mean),
        kinds=tuple((kind.name, count, t, size) for (count, kind), t, size in rows),
        step_s=total / run.steps,
        samples_per_s=samples / total,
        total_s=total,
        money=total / HOUR_S * net.machines * _value(run.price_per_machine_hour),
        payload_bytes=payload,
        memory_bytes=memory_bytes(setup, method),
        share_of_16bit=payload / every_step,
    )


def two_levels_gain(setup: Setup, method: Method) -> float:
    """The time of a run with flat exchanges over that with two-level ones. The set-up must have no ranges."""
    flat, levels = (
        cost(replace(setup, network=replace(setup.network, two_level=two)), method).total_s for two in (False, True)
    )
    return flat / levels


def memory_bytes(setup: Setup, method: Method) -> float:
    """Bytes per worker of parameters, gradients and optimizer state at its fullest; activations are not in it."""
    width = setup.model.parameter_bytes
    master = 4.0 if width == 2 else 0.0
    return setup.model.parameters * (2 * width + master + method.state_bytes(setup).fullest)


def break_even_gbit_s(setup: Setup, method: Method) -> float:
    """The link rate below which a method is faster than its family's 16-bit all-reduce, and above which it is not.

    Returns:
        1e9 bit/s; 0.0 where it is slower on the slowest link tried, 0.001 Gbit/s, whatever it is on faster ones; inf
        where it is not slower at any rate up to 100,000 Gbit/s.
    """
    first, second = steps_of(setup, method), steps_of(setup, METHODS[PLAIN[method.family]])

    def excess(rate: float) -> float:
        there = replace(setup, network=replace(setup.network, link_gbit_s=rate))
        return _total_s(there, first) - _total_s(there, second)

    rates = [10 ** (k / 3) for k in range(-9, 16)]
    signs = [excess(rate) > 0 for rate in rates]
    if not any(signs):
        return math.inf
    if signs[0]:
        return 0.0
    low, high = next((a, b) for a, b, slower in zip(rates, rates[1:], signs[1:], strict=False) if slower)
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return high


def _total_s(setup: Setup, steps: Steps) -> float:
    return math.fsum(count * step_time(setup, kind).total_s for count, kind in steps)


# -- the plan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A method in a plan: the likely cost, and what is uncertain as ranges.

    `speed_up`: over the 16-bit run of its family. `break_even_gbit_s`: least, likely, most.
    """

    method: Method
    likely: Cost
    step_s: Range
    samples_per_s: Range
    total_s: Range
    money: Range
    speed_up: Range
    break_even_gbit_s: tuple[float, float, float]


@dataclass(frozen=True)
class Plan:
    """All methods; `advice` in a sentence; `recommended`: the method to take, of this library and the family asked.

    `levels_gain`: of that method, the time with one level over that with two.
    """

    setup: Setup
    rows: dict[str, Row]
    recommended: str
    advice: str
    worth_it: bool
    levels_gain: float


def plan(setup: Setup, family: str = "lamb") -> Plan:
    """Compare all methods.

    Args:
        setup: numbers or ranges.
        family: "lamb" or "adam", of which one is recommended.

    Raises:
        ConfigError: another family, or too many ranges.
    """
    if family not in ("lamb", "adam"):
        raise ConfigError(f"family is {family!r}; it must be 'lamb' or 'adam'")
    places = list(corners(setup))
    found = {name: [cost(place, method) for place in places] for name, method in METHODS.items()}
    edges = {name: [break_even_gbit_s(p, m) for p in _without_link_ends(setup)] for name, m in METHODS.items()}
    rows = {n: _row(METHODS[n], costs, found[PLAIN[METHODS[n].family]], edges[n]) for n, costs in found.items()}
    recommended, worth_it, advice = _advise(likely_setup(setup), rows, family)
    gain = two_levels_gain(likely_setup(setup), METHODS[recommended])
    return Plan(setup, rows, recommended, advice, worth_it, gain)


def _without_link_ends(setup: Setup) -> list[Setup]:
    """The corners, but for the link's rate, which a break-even does not depend on."""
    rate = likely(setup.network.link_gbit_s)
    return list(corners(replace(setup, network=replace(setup.network, link_gbit_s=rate))))


def _row(method: Method, costs: list[Cost], base: list[Cost], edges: list[float]) -> Row:
    def spread(values: list[float]) -> Range:
        return Range(min(values), values[0], max(values))

    return Row(
        method=method,
        likely=costs[0],
        step_s=spread([c.step_s for c in costs]),
        samples_per_s=spread([c.samples_per_s for c in costs]),
        total_s=spread([c.total_s for c in costs]),
        money=spread([c.money for c in costs]),
        speed_up=spread([b.total_s / c.total_s for b, c in zip(base, costs, strict=True)]),
        break_even_gbit_s=(min(edges), edges[0], max(edges)),
    )


CAUTION = {
    "lamb": ("onebit-lamb", "onebit-lamb-int8", "onebit-lamb-int4", "local-variance-lamb"),
    "adam": ("onebit-adam", "onebit-adam-int8", "zero-one-adam"),
}
"""What may be recommended, the best tried first: a later one must save a further `WORTH_IT`. Local-variance Adam is
not among them, since it did not hold the loss where it was tried (docs/log.md)."""


def _advise(setup: Setup, rows: dict[str, Row], family: str) -> tuple[str, bool, str]:
    base = rows[PLAIN[family]].likely
    best = CAUTION[family][0]
    for name in CAUTION[family][1:]:
        if rows[name].likely.total_s < rows[best].likely.total_s * (1 - WORTH_IT):
            best = name
    saved = 1 - rows[best].likely.total_s / base.total_s
    parts, rate = base.parts, likely(setup.network.link_gbit_s)
    wait = parts.all_reduce_s - parts.hidden_s
    how = f"adds {_ms(wait)} to a step of {_ms(base.step_s)}"
    if parts.hidden_s and wait < WORTH_IT * base.step_s:
        told = f"16-bit all-reduce is hidden behind backward at {rate:g} Gbit/s: of {_ms(parts.all_reduce_s)} it {how}"
    else:
        told = f"16-bit all-reduce at {rate:g} Gbit/s {how}, beside {_ms(parts.hidden_s)} hidden behind backward"
    if saved < WORTH_IT:
        end = f"would save {saved:.1%}" if saved > 0 else f"would take {-saved:.1%} longer"
        return PLAIN[family], False, f"do not bother: {told}; {best} {end}, and below {WORTH_IT:.0%} it does not pay"
    low, high = rows[best].speed_up.low, rows[best].speed_up.high
    factor = f"{base.total_s / rows[best].likely.total_s:.2f}"
    more = f" ({low:.2f} to {high:.2f} with the ranges given)" if high > low else ""
    return best, True, f"{best} is {factor} times as fast{more}: {told}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


__all__ = ["METHODS", "PLAIN", "Cost", "Plan", "Row", "StepTime", "break_even_gbit_s", "cost", "plan", "step_time"]
