"""What a probe wrote, as the inputs of a plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebit.errors import ConfigError
from onebit.planner_inputs import Number, Range, Shapes

FORMAT = "onebit probe 1"


@dataclass(frozen=True)
class Probed:
    """Inputs of a plan as measured; None where the probe could not measure them.

    link_gbit_s, latency_us and message_us are of the network between machines, or, where `inside` says that all
    workers shared one machine, of what joins them there; local_gbit_s and local_latency_us are of that where there were
    several machines with several workers each. Other names are those of `planner_inputs`.
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
    exchange_efficiency: float | None
    local_gbit_s: Number | None
    local_latency_us: float | None
    residual: float | None
    memory_gbyte_s: float
    kernel_factor: Number
    plain_factor: float

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

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
    except ValueError as error:
        raise ConfigError(f"the probe {str(path)!r} is not JSON: {error}; run `onebit probe --json` again") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        what = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ConfigError(
            f"the probe {str(path)!r} is {what!r}, not {FORMAT!r}; give a file that `onebit probe --json` of this "
            "version wrote"
        )
    try:
        return _probed(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a ConfigError is a ValueError
        raise ConfigError(
            f"the probe {str(path)!r} is damaged ({type(error).__name__}: {error}); run `onebit probe --json` again"
        ) from None


def _probed(found: dict[str, Any]) -> Probed:
    step, kernels, network = found["step"], found["kernels"], found["network"]
    workers, machines = int(found["workers"]), int(found["machines"])
    if workers < 1 or machines < 1 or workers % machines:
        raise ValueError(f"{workers} workers on {machines} machines")
    local = None if found["local"] is None else found["local"]["fits"]
    fits = None if network is None else network["fits"]["exchange"]
    whole = None if network is None else network["fits"]["all_reduce"]
    rate = None if whole is None else _over(whole, lambda fit: gbit_s(fit["bytes_per_s"]))
    efficiency = None
    if fits is not None and rate is not None:
        efficiency = min(1.0, gbit_s(fits["median"]["bytes_per_s"]) / rate.likely)
    share = step["backward_share"]
    return Probed(
        workers=workers,
        machines=machines,
        inside=network is None or bool(network["inside"]),
        shapes=tuple(tuple(int(size) for size in shape) for shape in found["model"]["shapes"]),
        micro_batch=int(step["micro_batch"]),
        micro_step_s=_range(step["forward_backward_s"]),
        backward_share=None if share is None else float(share),
        straggling=float(step["straggling"]),
        link_gbit_s=rate,
        latency_us=None if fits is None else _over(fits, lambda fit: 1e6 * float(fit["latency_s"])),
        message_us=None if fits is None else 1e6 * float(fits["median"]["message_s"]),
        exchange_efficiency=efficiency,
        local_gbit_s=None if local is None else gbit_s(local["all_reduce"]["median"]["bytes_per_s"]),
        local_latency_us=None if local is None else 1e6 * float(local["exchange"]["median"]["latency_s"]),
        residual=None if fits is None else float(fits["median"]["residual"]),
        memory_gbyte_s=_range(kernels["copy_gbyte_s"]).likely,
        kernel_factor=_range(kernels["kernel_factor"]),
        plain_factor=_range(kernels["plain_factor"]).likely,
    )


def gbit_s(bytes_per_s: float | None) -> float:
    """A fitted rate in Gbit/s; 100,000 for one that was too fast to be seen."""
    return 1e5 if bytes_per_s is None else float(bytes_per_s) * 8 / 1e9


def _range(value: dict[str, Any]) -> Range:
    return Range(float(value["low"]), float(value["likely"]), float(value["high"]))


def _over(fits: dict[str, Any], value: Callable[[dict[str, Any]], float]) -> Range:
    """The range that the fits of the quartiles span, with that of the medians as likely."""
    values = [value(fits[name]) for name in ("low", "median", "high")]
    return Range(min(values), values[1], max(values))
