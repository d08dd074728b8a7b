"""What a probe wrote, as the inputs of a plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebit.errors import ConfigError
from onebit.planner_inputs import Number, Range, Shapes

FORMAT = "onebit probe 5"
SAME_MODEL = 0.01  # of the parameters: how far a model may be from that of a probe whose step is to stand for it
MOST_GBIT_S = 1e5  # a link faster than that is a fit of noise


@dataclass(frozen=True)
class Probed:
    """Inputs of a plan as measured; None where the probe could not measure them.

    link_gbit_s, latency_us and message_us are of the network between machines, or, where `inside` says that all
    workers shared one machine, of what joins them there; local_gbit_s and local_latency_us are of that where there were
    several machines with several workers each. `two_level`: kernels were timed with two levels, and mean_gbit_s is of
    the mean inside a machine. overlapped_step_s: a whole step of 1-bit LAMB with overlap, of that number of levels.
    Other names are those of `planner_inputs`.
    """

    workers: int
    machines: int
    inside: bool
    shapes: Shapes
    micro_batch: int
    micro_step_s: Number
    backward_share: float | None
    straggling: float
    link_gbit_s: Number | None
    latency_us: Number | None
    message_us: float | None
    exchange_efficiency: Number | None
    local_gbit_s: Number | None
    local_latency_us: float | None
    residual: float | None
    memory_gbyte_s: float
    kernel_factor: Number
    plain_factor: float
    int8_factor: float
    int4_factor: float
    local_factor: float
    low_rank_factor: float | None
    two_level: bool
    mean_gbit_s: float | None
    overlapped_step_s: float | None
    device: str
    threads: int

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def is_of(self, parameters: int) -> bool:
        """Whether the step that was timed may stand for a model of so many parameters: within 1 % of the probe's."""
        return abs(parameters / self.parameters - 1) <= SAME_MODEL

    def measured_where(self, inside: bool) -> tuple[dict[str, Number], list[str]]:
        """`inputs` for workers of one machine, or of several, and the names that do not count there.

        What a message costs and how an exchange's messages fare is known only where it was measured.
        """
        if self.workers == 1 or inside == self.inside:
            return self.inputs, []
        strange: list[str] = [name for name in ("message_us", "exchange_efficiency") if name in self.inputs]
        return {name: value for name, value in self.inputs.items() if name not in strange}, strange

    @property
    def inputs(self) -> dict[str, Number]:
        """By name of `planner_inputs`, what was measured; without what was not."""
        place = "local_" if self.inside else ""
        found = {
            "local_gbit_s": self.local_gbit_s,
            "local_latency_us": self.local_latency_us,
            "micro_step_s": self.micro_step_s,
            "backward_share": self.backward_share,
            "straggling": self.straggling,
            "local_gbit_s" if self.inside else "link_gbit_s": self.link_gbit_s,
            f"{place}latency_us": self.latency_us,
            "message_us": self.message_us,
            "exchange_efficiency": self.exchange_efficiency,
            "memory_gbyte_s": self.memory_gbyte_s,
            "kernel_factor": self.kernel_factor,
            "plain_factor": self.plain_factor,
            "int8_factor": self.int8_factor,
            "int4_factor": self.int4_factor,
            "local_factor": self.local_factor,
            "low_rank_factor": self.low_rank_factor,
            "mean_gbit_s": self.mean_gbit_s,
        }
        return {name: value for name, value in found.items() if value is not None}


def read_probe(path: Path) -> Probed:
    """The inputs in a file that `onebit probe --json` wrote.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the probe {str(path)!r} cannot be read: {error.strerror}; give another file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the probe {str(path)!r} is not JSON: {error}; run `onebit probe --json` again") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        what = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ConfigError(
            f"the probe {str(path)!r} is {what!r}, not {FORMAT!r}; give a file that `onebit probe --json` of this "
            "version wrote"
        )
    try:
        return _probed(found)
    except ConfigError as error:
        raise ConfigError(f"the probe {str(path)!r} is damaged: {error}; run `onebit probe --json` again") from None


def _probed(found: dict[str, Any]) -> Probed:
    workers, machines = whole_in(found, "workers"), whole_in(found, "machines")
    if workers % machines:
        raise ConfigError(f"workers is {workers} and machines is {machines}; it must be a multiple of machines")
    alone = part_of(found, "network") is None
    exchange, whole = ("network", "fits", "exchange"), ("network", "fits", "all_reduce")
    efficiency = None if alone else _over(lambda name: _efficiency(found, name))
    rate = None if alone else _rate(found, whole)
    here = None if part_of(found, "local") is None else ("local", "fits")
    inside = True if alone else part_of(found, "network", "inside")
    if not isinstance(inside, bool):
        raise ConfigError(f"network.inside is {inside!r}; it must be true or false")
    share = part_of(found, "step", "backward_share")
    low_rank, mean = part_of(found, "kernels", "low_rank_factor"), part_of(found, "kernels", "mean_gbit_s")
    timed = part_of(found, "overlap") is not None and part_of(found, "overlap", "overlapped") is True
    device = part_of(found, "device")
    if not isinstance(device, str):
        raise ConfigError(f"device is {device!r}; it must be text")
    return Probed(
        workers=workers,
        machines=machines,
        inside=inside,
        shapes=_shapes(found),
        micro_batch=whole_in(found, "step", "micro_batch"),
        micro_step_s=_range(found, "step", "forward_backward_s"),
        backward_share=None if share is None else number_in(found, "step", "backward_share", most=1.0),
        straggling=number_in(found, "step", "straggling"),
        link_gbit_s=rate,
        latency_us=None if alone else _over(lambda n: 1e6 * number_in(found, *exchange, n, "latency_s")),
        message_us=None if alone else 1e6 * number_in(found, *exchange, "median", "message_s"),
        exchange_efficiency=efficiency,
        local_gbit_s=None if here is None else _likely(_rate(found, (*here, "all_reduce"))),
        local_latency_us=None if here is None else 1e6 * number_in(found, *here, "exchange", "median", "latency_s"),
        residual=None if alone else number_in(found, *exchange, "median", "residual"),
        memory_gbyte_s=_range(found, "kernels", "copy_gbyte_s").likely,
        kernel_factor=_range(found, "kernels", "kernel_factor"),
        plain_factor=_range(found, "kernels", "plain_factor").likely,
        int8_factor=_range(found, "kernels", "int8_factor", above=False).likely,
        int4_factor=_range(found, "kernels", "int4_factor", above=False).likely,
        local_factor=_range(found, "kernels", "local_factor").likely,
        low_rank_factor=None if low_rank is None else _range(found, "kernels", "low_rank_factor").likely,
        two_level=mean is not None,
        mean_gbit_s=None if mean is None else _range(found, "kernels", "mean_gbit_s").likely,
        overlapped_step_s=_range(found, "overlap", "step_s").likely if timed else None,
        device=device,
        threads=whole_in(found, "threads"),
    )


def gbit_s(bytes_per_s: float | None) -> float | None:
    """A fitted rate in Gbit/s; None, not known, for one that was too fast to be seen."""
    rate = None if bytes_per_s is None else bytes_per_s * 8 / 1e9
    return None if rate is None or rate > MOST_GBIT_S else rate


def _likely(value: Range | None) -> float | None:
    return None if value is None else value.likely


def _shapes(found: dict[str, Any]) -> Shapes:
    shapes = part_of(found, "model", "shapes")
    if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes):
        raise ConfigError(f"model.shapes is {type(shapes).__name__}; it must be a list of lists of whole numbers")
    sizes = [size for shape in shapes for size in shape]
    odd = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 0]
    if odd:
        raise ConfigError(f"model.shapes has {odd[0]!r}; it must have whole numbers, at least 0")
    if not sum(math.prod(shape) for shape in shapes):
        raise ConfigError("model.shapes has 0 parameters; it must have at least 1")
    return tuple(tuple(shape) for shape in shapes)


def _rate(found: dict[str, Any], fits: tuple[str, ...]) -> Range | None:
    """Gbit/s of the fits of the quartiles, of those that are bound; None where that of the medians is not."""
    rates = [_gbit_s_in(found, *fits, name) for name in ("low", "median", "high")]
    known = [rate for rate in rates if rate is not None]
    return None if rates[1] is None else Range(min(known), rates[1], max(known))


def _gbit_s_in(found: dict[str, Any], *keys: str) -> float | None:
    held = part_of(found, *keys, "bytes_per_s")
    return None if held is None else gbit_s(number_in(found, *keys, "bytes_per_s", above=True))


def _efficiency(found: dict[str, Any], name: str) -> float:
    """Of the exchange's rate over that of all-reduce, in the fit of one quartile; 1 where either is not bound."""
    exchange, whole = (_gbit_s_in(found, "network", "fits", key, name) for key in ("exchange", "all_reduce"))
    return 1.0 if exchange is None or whole is None else min(1.0, exchange / whole)


def _range(found: dict[str, Any], *keys: str, above: bool = True) -> Range:
    low, middle, high = (number_in(found, *keys, name, above=above) for name in ("low", "likely", "high"))
    if not low <= middle <= high:
        raise ConfigError(f"{'.'.join(keys)} is {low:g}..{middle:g}..{high:g}; its numbers must rise")
    return Range(low, middle, high)


def _over(value: Callable[[str], float]) -> Range:
    """The range that the fits of the quartiles span, with that of the medians as likely."""
    values = [value(name) for name in ("low", "median", "high")]
    return Range(min(values), values[1], max(values))


# -- reading a file that may hold anything ---------------------------------------------------------------------------


def part_of(found: Mapping[str, Any], *keys: str) -> Any:
    """What a JSON object holds under keys, one inside the other.

    Raises:
        ConfigError: a key is missing, or what should hold it is no object; it names the keys.
    """
    value: Any = found
    for count, key in enumerate(keys, 1):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{'.'.join(keys[: count - 1])} is {type(value).__name__}; it must have {key!r}")
        if key not in value:
            raise ConfigError(f"it has no {'.'.join(keys[:count])}")
        value = value[key]
    return value


def number_in(found: Mapping[str, Any], *keys: str, above: bool = False, most: float = math.inf) -> float:
    """A finite number under keys, at least 0, or `above` it, and at most `most`.

    Raises:
        ConfigError: it is something else; it names the keys.
    """
    value = part_of(found, *keys)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # also not nan
    if not usable or value < 0 or (above and not value > 0) or value > most:
        bound = "above 0" if above else "at least 0"
        top = "" if most == math.inf else f" and at most {most:g}"
        shown = repr(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise ConfigError(f"{'.'.join(keys)} is {shown}; it must be a finite number {bound}{top}")
    return float(value)


def whole_in(found: Mapping[str, Any], *keys: str, least: int = 1) -> int:
    """A whole number under keys, at least `least`.

    Raises:
        ConfigError: it is something else; it names the keys.
    """
    value = part_of(found, *keys)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 10**18:
        shown = repr(value) if not isinstance(value, int) or abs(value) < 10**18 else "too large"
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise ConfigError(f"{'.'.join(keys)} is {shown}; it must be a whole number, at least {least}")
    return value
