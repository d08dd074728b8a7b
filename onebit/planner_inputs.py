"""What the cost model is told: frozen dataclasses with the unit in every name; numbers may be ranges.

A `Range` stands wherever a time, a rate, a share or a price is uncertain. `corners` gives the likely point and every
corner of the box that the ranges span; the extremes of what rises or falls steadily with each of its inputs lie at
corners. Whole numbers (workers, steps, shapes) are never ranges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from onebit.errors import ConfigError

MOST_RANGES = 8
AllReduce = Literal["ring", "by-machine"]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Range:
    """An uncertain number: low <= likely <= high, all finite.

    Raises:
        ConfigError: they are not in that order, or not finite.
    """

    low: float
    likely: float
    high: float

    def __post_init__(self) -> None:
        values = (self.low, self.likely, self.high)
        if not all(map(math.isfinite, values)) or not self.low <= self.likely <= self.high:
            raise ConfigError(
                f"a range is {self.low:g}..{self.likely:g}..{self.high:g}; its numbers must be finite and rise: "
                "low, likely, high"
            )


Number = float | Range


def likely(value: Number) -> float:
    """The likely value of a number or a range."""
    return value.likely if isinstance(value, Range) else value


@dataclass(frozen=True)
class Model:
    """What is trained. `shapes`: one per layer, in the optimizer's order. `parameter_bytes`: 4, or 2 for 16 bits.

    Raises:
        ConfigError: no parameters, or parameter_bytes is neither 4 nor 2.
    """

    shapes: Shapes
    parameter_bytes: int = 4

    def __post_init__(self) -> None:
        if self.parameters < 1:
            raise ConfigError("the model has 0 parameters; a plan needs at least 1; give another model")
        if self.parameter_bytes not in (2, 4):
            raise ConfigError(f"parameter_bytes is {self.parameter_bytes}; it must be 4 (float32) or 2 (16 bits)")

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Network:
    """Workers and what joins them.

    Args:
        workers: n, >= 2, a multiple of workers_per_machine.
        workers_per_machine: g, >= 1; they share their machine's link.
        link_gbit_s: what a machine sends at most to others, as measured, 1e9 bit/s.
        latency_us: of a message between machines; local_latency_us: inside one.
        message_us: what a worker needs for each message that it sends, whatever its size.
        local_gbit_s: what a worker sends at most to others of its machine.
        exchange_efficiency: which part of those two rates the messages of an exchange get, > 0; all-reduce gets all.
            TCP gives less to messages that are shorter than an all-reduce's buffer.
        oversubscription: >= 1; how many times less all machines together get than their links add up to.
        full_duplex: False: a link sends or receives, so both take turns.
        all_reduce: "ring": over all workers, once around. "by-machine": inside machines first, then between them.
        two_level: compressed exchanges average the workers of a machine in full precision first, and go between
            machines only.
        mean_gbit_s: of that mean: what a worker sends for it, 4 (g - 1) / g bytes per parameter, over the time that it
            takes, sums included; None: local_gbit_s.

    Raises:
        ConfigError: a value outside what is listed.
    """

    workers: int
    workers_per_machine: int
    link_gbit_s: Number
    latency_us: Number = 50.0
    message_us: Number = 5.0
    local_gbit_s: Number = 80.0
    local_latency_us: Number = 5.0
    exchange_efficiency: Number = 1.0
    oversubscription: Number = 1.0
    full_duplex: bool = True
    all_reduce: AllReduce = "ring"
    two_level: bool = False
    mean_gbit_s: Number | None = None

    def __post_init__(self) -> None:
        _whole("workers", self.workers, 2)
        _whole("workers_per_machine", self.workers_per_machine, 1)
        if self.workers % self.workers_per_machine:
            raise ConfigError(
                f"workers is {self.workers} and workers_per_machine is {self.workers_per_machine}; the first must be a "
                "multiple of the second; change one of them"
            )
        for name in ("link_gbit_s", "local_gbit_s", "exchange_efficiency"):
            _number(name, getattr(self, name), 0.0, above=True)
        for name in ("latency_us", "message_us", "local_latency_us"):
            _number(name, getattr(self, name), 0.0)
        if self.mean_gbit_s is not None:
            _number("mean_gbit_s", self.mean_gbit_s, 0.0, above=True)
        _number("oversubscription", self.oversubscription, 1.0)
        if self.all_reduce not in get_args(AllReduce):
            raise ConfigError(f"all_reduce is {self.all_reduce!r}; it must be 'ring' or 'by-machine'")

    @property
    def machines(self) -> int:
        return self.workers // self.workers_per_machine


@dataclass(frozen=True)
class Work:
    """What a step computes.

    Args:
        micro_step_s: forward and backward of one micro-batch, without any communication.
        accumulation: micro-batches per step, >= 1.
        micro_batch: samples per worker and micro-batch, >= 1.
        other_s: what else a step takes beside the optimizer's update, such as copies of 16-bit parameters.
        backward_share: of micro_step_s, in [0, 1].
        straggling: by which share the slowest worker's step is longer than the mean one.
        overlap: which share of the communication that could run beside other work does, in [0, 1].
        overlap_exchange: whether the exchange of a bucket begins during backward, as with an optimizer's overlap=True.
        overlap_extra_s: what a step with such an exchange takes beyond what the model gives for it, as measured; below
            0 where it takes less. Where cores are busy with backward, what runs beside it slows it down.
        memory_gbyte_s: what the device reads and writes, 1e9 byte/s.
        kernel_factor: of the kernels that compress to 1 bit, and of the updates that go with them: how many times as
            long as the memory traffic that they cannot avoid.
        plain_factor: the same of plain updates and of conversions to 16 bits and back.
        int8_factor, int4_factor: the same of the kernels of blockwise integers of 8 and of 4 bits.
        local_factor: the same of the steps of local variance, with its update.
        low_rank_factor: the same of what torch's PowerSGD hook computes.

    The defaults of these factors were measured on a CPU, the first two by `onebit bench`, the others by `onebit probe`;
    they also stand for GPUs, where none is known.

    Raises:
        ConfigError: a value outside what is listed.
    """

    micro_step_s: Number
    accumulation: int = 1
    micro_batch: int = 1
    other_s: Number = 0.0
    backward_share: Number = 2 / 3
    straggling: Number = 0.0
    overlap: Number = 1.0
    overlap_exchange: bool = False
    overlap_extra_s: Number = 0.0
    memory_gbyte_s: Number = 500.0
    kernel_factor: Number = 1.4
    plain_factor: Number = 0.8
    int8_factor: Number = 4.3
    int4_factor: Number = 5.7
    local_factor: Number = 2.3
    low_rank_factor: Number = 3.3

    def __post_init__(self) -> None:
        _number("micro_step_s", self.micro_step_s, 0.0, above=True)
        _whole("accumulation", self.accumulation, 1)
        _whole("micro_batch", self.micro_batch, 1)
        for name in ("other_s", "straggling", *FACTORS):
            _number(name, getattr(self, name), 0.0)
        for name in ("backward_share", "overlap"):
            _number(name, getattr(self, name), 0.0, most=1.0)
        _number("memory_gbyte_s", self.memory_gbyte_s, 0.0, above=True)
        _number("overlap_extra_s", self.overlap_extra_s, -math.inf)


@dataclass(frozen=True)
class Run:
    """How long, and for how much. `warmup_share`: of the steps, before the switch; `local_warmup_share`: the same for
    local variance; `price_per_machine_hour`: in any currency.

    Raises:
        ConfigError: a value outside what is possible.
    """

    steps: int
    warmup_share: Number = 0.17
    local_warmup_share: Number = 0.05
    price_per_machine_hour: Number = 0.0

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 2)
        for name in ("warmup_share", "local_warmup_share"):
            _number(name, getattr(self, name), 0.0, above=True, most=1.0)
        _number("price_per_machine_hour", self.price_per_machine_hour, 0.0)


@dataclass(frozen=True)
class Setup:
    """Everything that a plan needs."""

    model: Model
    network: Network
    work: Work
    run: Run


PARTS = ("network", "work", "run")
FACTORS = ("kernel_factor", "plain_factor", "int8_factor", "int4_factor", "local_factor", "low_rank_factor")


def ranges(setup: Setup) -> list[tuple[str, str, Range]]:
    """The uncertain numbers of a set-up: which part, which field, the range."""
    found = []
    for part in PARTS:
        inside = getattr(setup, part)
        found += [(part, f.name, v) for f in fields(inside) if isinstance(v := getattr(inside, f.name), Range)]
    return found


def at(setup: Setup, values: Mapping[tuple[str, str], float]) -> Setup:
    """The set-up with some of its numbers replaced; keys are (part, field)."""
    changes: dict[str, dict[str, float]] = {}
    for (part, name), value in values.items():
        changes.setdefault(part, {})[name] = value
    return replace(setup, **{part: replace(getattr(setup, part), **new) for part, new in changes.items()})


def likely_setup(setup: Setup) -> Setup:
    """The set-up without ranges, each at its likely value."""
    return at(setup, {(part, name): value.likely for part, name, value in ranges(setup)})


def corners(setup: Setup) -> Iterator[Setup]:
    """The likely set-up first, then every combination of lows and highs.

    Raises:
        ConfigError: more than 8 ranges.
    """
    uncertain = ranges(setup)
    if len(uncertain) > MOST_RANGES:
        raise ConfigError(
            f"{len(uncertain)} inputs are ranges; at most {MOST_RANGES} may be; give single numbers for those that "
            "matter least"
        )
    yield likely_setup(setup)
    keys = [(part, name) for part, name, _ in uncertain]
    if uncertain:
        for ends in itertools.product(*((r.low, r.high) for _, _, r in uncertain)):
            yield at(setup, dict(zip(keys, ends, strict=True)))


def transformer_shapes(parameters: int) -> Shapes:
    """Layers of a Transformer with exactly so many parameters, where only their number is known.

    Blocks of 16 layers (4 h^2 attention, 8 h^2 feed-forward, biases, norms) of a width h that is 64 per block, a common
    proportion; what is left over is an embedding of rows of h.
    """
    _whole("parameters", parameters, 1)
    blocks = max(1, round((parameters / 49152) ** (1 / 3)))
    while blocks > 1 and _block(64 * blocks)[1] * blocks > parameters:
        blocks -= 1
    width = 64 * blocks
    layers, size = _block(width)
    shapes: list[tuple[int, ...]] = []
    rest = parameters
    if size * blocks <= parameters:
        shapes = layers * blocks
        rest -= size * blocks
    if rest >= width:
        shapes.insert(0, (rest // width, width))
    if rest % width:
        shapes.append((rest % width,))
    return tuple(shapes)


def _block(h: int) -> tuple[list[tuple[int, ...]], int]:
    layers: list[tuple[int, ...]] = [(h, h), (h,)] * 4 + [(h,)] * 4 + [(4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    return layers, sum(math.prod(shape) for shape in layers)


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, at least {least}")


def _number(name: str, value: Number, least: float, above: bool = False, most: float = math.inf) -> None:
    """Raise ConfigError unless all of a number or range lies in [least, most], or (least, most]."""
    for one in (value.low, value.high) if isinstance(value, Range) else (value,):
        low_enough = one > least if above else one >= least
        if isinstance(one, bool) or not math.isfinite(one) or not low_enough or one > most:
            bound = f"above {least:g}" if above else f"at least {least:g}"
            top = "" if most == math.inf else f" and at most {most:g}"
            raise ConfigError(f"{name} is {one!r}; it must be a finite number {bound}{top}; correct it")
