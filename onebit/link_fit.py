"""Latency, cost per message and rate of a link, fitted: time = latency + messages x each + bytes / rate.

How many messages and bytes a collective has is counted as the cost model does (docs/cost_model.md, "The network"), so
that what is fitted here is what `onebit plan` computes with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from onebit.errors import ConfigError

Collective = Literal["all_to_all", "all_gather", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class Terms(NamedTuple):
    """What the time of a collective is made of: waits for a latency, messages one after the other, bytes on the link.

    `link_bytes` leave the machine; where all workers share one, they are what each of them sends.
    """

    latencies: int
    messages: int
    link_bytes: float


class Sample(NamedTuple):
    """A timed collective. Seconds of the slowest worker: lower quartile, median, upper quartile. `weight`: in a fit."""

    terms: Terms
    low_s: float
    median_s: float
    high_s: float
    weight: float = 1.0


@dataclass(frozen=True)
class Fit:
    """Time = latencies x latency_s + messages x message_s + link_bytes / bytes_per_s.

    Attributes:
        latency_s, message_s: >= 0.
        bytes_per_s: > 0; inf where the samples take no longer with more bytes.
        residual: root of the weighted mean square of (fitted - measured) / measured.
        samples: how many.
    """

    latency_s: float
    message_s: float
    bytes_per_s: float
    residual: float
    samples: int

    def seconds(self, terms: Terms) -> float:
        """The time that the fit gives."""
        return terms.latencies * self.latency_s + terms.messages * self.message_s + terms.link_bytes / self.bytes_per_s

    def as_mapping(self) -> dict[str, Any]:
        """For JSON; a rate without bound is None."""
        return asdict(self) | {"bytes_per_s": self.bytes_per_s if math.isfinite(self.bytes_per_s) else None}


def terms_of(collective: Collective, message_bytes: int, at_once: int, workers: int, per_machine: int) -> Terms:
    """The terms of collectives of one size, `at_once` of them under way together.

    Args:
        message_bytes: of a message to one worker; for all_reduce, of the whole buffer.
        at_once: >= 1.
        workers, per_machine: n >= 2, and g of them on each machine; n is a multiple of g.
    """
    n, g = workers, per_machine
    if collective == "all_to_all":
        sent = (n - 1) * message_bytes if n == g else g * (n - g) * message_bytes
        return Terms(1, at_once * (n - 1), float(at_once * sent))
    if collective == "all_gather":
        return Terms(n - 1, at_once * (n - 1), float(at_once * (n - 1) * message_bytes))
    hops = 2 * (n - 1).bit_length()
    return Terms(hops, at_once * hops, at_once * 2 * (n - 1) / n * message_bytes)


def fit_times(samples: Sequence[tuple[Terms, float]], weights: Sequence[float] | None = None) -> Fit:
    """The fit with the least weighted sum of squared relative errors, none of its three numbers negative.

    Errors are relative, so that a sample counts alike whether it took microseconds or seconds. Where messages and
    latencies are in the same proportion in all samples, only their sum is known; it is then latency.

    Args:
        samples: terms and seconds, > 0.
        weights: one for each, > 0; None: 1.

    Raises:
        ConfigError: fewer than two samples, or a time that is not positive and finite.
    """
    if len(samples) < 2:
        raise ConfigError(f"a fit of a link needs at least 2 timed collectives, not {len(samples)}; time more sizes")
    for _, seconds in samples:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"a collective took {seconds} s; a time must be finite and above 0; time it again")
    times = torch.tensor([seconds for _, seconds in samples], dtype=torch.float64)
    rows = torch.tensor([list(terms) for terms, _ in samples], dtype=torch.float64) / times.unsqueeze(1)
    factors = torch.ones(len(times), dtype=torch.float64)
    if weights is not None:
        factors = torch.tensor(weights, dtype=torch.float64).sqrt()
    unit = rows.abs().amax(0).clamp_min(1e-300)
    best = _least_squares(rows / unit * factors.unsqueeze(1), factors)
    factors /= factors.square().sum().sqrt()
    error = float(((rows / unit @ best - 1) * factors).square().sum().sqrt())
    latency, message, per_byte = (best / unit).tolist()
    return Fit(latency, message, 1 / per_byte if per_byte > 0 else math.inf, error, len(samples))


def _least_squares(rows: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
    """x >= 0 with the least |rows x - aim|. Tries every set of numbers that are 0.

    Of equally good ones the first stands: fewer numbers first, latency before messages.
    """
    best, least = torch.zeros(3, dtype=torch.float64), math.inf
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(3), count):
            part = rows[:, list(chosen)]
            if torch.linalg.matrix_rank(part, rtol=1e-9) < count:
                continue
            found = torch.linalg.lstsq(part, aim, driver="gelsd").solution
            error = float((part @ found - aim).square().mean().sqrt())
            if bool((found >= 0).all()) and error < least * (1 - 1e-6) - 1e-12:
                best, least = torch.zeros(3, dtype=torch.float64), error
                best[list(chosen)] = found
    return best


def fit_quartiles(samples: Sequence[Sample]) -> dict[str, Fit]:
    """Fits of the lower quartiles, the medians and the upper quartiles: "low", "median", "high"."""
    weights = [sample.weight for sample in samples]
    return {
        "low": fit_times([(sample.terms, sample.low_s) for sample in samples], weights),
        "median": fit_times([(sample.terms, sample.median_s) for sample in samples], weights),
        "high": fit_times([(sample.terms, sample.high_s) for sample in samples], weights),
    }


__all__ = ["COLLECTIVES", "Collective", "Fit", "Sample", "Terms", "fit_quartiles", "fit_times", "terms_of"]
