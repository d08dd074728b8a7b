"""What the switch to one bit brought, in time and bytes per step; if nothing, why. Said once in a run."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

WARMUP, COMPRESSED = "warmup", "compressed"
START_UP = 3  # first steps of a run, which touch memory and connections for the first time
BEFORE = 20  # of the last warm-up steps, at most
AFTER = 15  # of the first compressed steps
FEWEST = 3  # of either, before anything is said
WORTH_SAYING = 0.05  # of a step: what counts as a gain
MOSTLY = 0.8  # of a step: a share that leaves little for the rest


class Timing(NamedTuple):
    """A step on one worker: seconds; of these in forward and backward, None where not known; payload bytes."""

    seconds: float
    compute_s: float | None
    payload_bytes: int


@dataclass(frozen=True)
class Gain:
    """Medians over `steps_before` warm-up and `steps_after` compressed steps of one worker.

    Attributes:
        before_s, after_s: seconds of a step.
        before_compute_s, after_compute_s: of these in forward and backward; None where not known.
        before_bytes, after_bytes: payload of a step.
    """

    steps_before: int
    steps_after: int
    before_s: float
    after_s: float
    before_compute_s: float | None
    after_compute_s: float | None
    before_bytes: int
    after_bytes: int

    @property
    def speed_up(self) -> float:
        """Step time before over step time after."""
        return self.before_s / self.after_s

    @property
    def sentence(self) -> str:
        """What a user is told: the numbers; whether a step became faster, is within 5 % or became slower; why."""
        said = (
            f"{_ms(self.after_s)} per step after it, {_ms(self.before_s)} before (medians of {self.steps_after} and "
            f"{self.steps_before} steps); {_size(self.after_bytes)} sent per step, {_size(self.before_bytes)} before"
        )
        gained = (self.before_s - self.after_s) / self.before_s
        if gained >= WORTH_SAYING:
            return f"{said}: {self.speed_up:.2f} times as fast"
        if gained > -WORTH_SAYING:
            return f"{said}: about as fast, within {WORTH_SAYING:.0%}, {self.reason}"
        return f"{said}: slower, {1 / self.speed_up:.2f} times as long, {self.reason}"

    @property
    def reason(self) -> str:
        """Why a step became no shorter."""
        if not self.before_bytes:
            return "since one worker has nobody to send to"
        if self.before_compute_s is None or self.after_compute_s is None:
            return "and how long communication took is not known"
        share = self.before_compute_s / self.before_s
        slower = self.after_compute_s - self.before_compute_s
        rest, later = max(0.0, self.before_s - self.before_compute_s), max(0.0, self.after_s - self.after_compute_s)
        if slower >= WORTH_SAYING * self.before_s and slower > later - rest:
            return (
                f"since forward and backward took longer than before, {_ms(self.after_compute_s)} instead of "
                f"{_ms(self.before_compute_s)}; look for other work on this machine, or longer batches"
            )
        if share >= MOSTLY:
            return (
                f"since forward and backward are {share:.0%} of a step; exchange, update and waiting for other workers "
                f"were {_ms(rest)} of it and are {_ms(later)}"
            )
        told = f"since exchange, update and waiting for other workers take {_ms(later)} instead of {_ms(rest)}"
        if later - rest >= WORTH_SAYING * self.before_s:
            return f"{told}: on this link compressing costs more time than the bytes saved"
        return f"{told}: on this link the bytes saved cost no more time than compressing does"

    def as_mapping(self) -> dict[str, Any]:
        """For the summary of a run."""
        return {**asdict(self), "speed_up": self.speed_up, "sentence": self.sentence}


class SwitchGain:
    """Is told of every step of one worker, in order, and gives the gain once: with the 15th step after the switch.

    A run that goes back to the warm-up before that starts the count of compressed steps anew.
    """

    def __init__(self) -> None:
        self.gain: Gain | None = None
        self._seen = 0
        self._before: deque[Timing] = deque(maxlen=BEFORE)
        self._after: list[Timing] = []

    def add(self, stage: str, seconds: float, payload_bytes: int, compute_s: float | None = None) -> Gain | None:
        """One more step.

        Args:
            stage: "warmup" or "compressed"; steps of other stages count for nothing.
            seconds: of the whole step, > 0.
            payload_bytes: that this worker sent.
            compute_s: of `seconds`, in forward and backward.

        Returns:
            The gain, with the step that completes it; else None.
        """
        self._seen += 1
        step = Timing(seconds, compute_s, payload_bytes)
        if self.gain is not None:
            return None
        if stage == WARMUP:
            self._after.clear()
            if self._seen > START_UP:
                self._before.append(step)
        elif stage == COMPRESSED:
            self._after.append(step)
        if len(self._after) < AFTER:
            return None
        return self.finish()

    def finish(self) -> Gain | None:
        """The gain from the steps there are, at the end of a run; None with fewer than 3 on either side, or if given
        before."""
        if self.gain is not None or min(len(self._before), len(self._after)) < FEWEST:
            return None
        before, after = list(self._before), self._after
        known = [[step for step in steps if step.compute_s is not None] for steps in (before, after)]
        both = min(map(len, known)) >= FEWEST  # else forward and backward are not told from the rest
        if both:
            before, after = known
        self.gain = Gain(
            len(before), len(after), _median(before, 0), _median(after, 0),
            _median(before, 1) if both else None, _median(after, 1) if both else None,
            round(_median(before, 2)), round(_median(after, 2)),
        )  # fmt: skip
        return self.gain

    @property
    def too_few(self) -> str:
        """At the end of a run: that its switch left too few steps to compare; empty if not, or without a switch."""
        if self.gain is not None or not self._after:
            return ""
        return (
            f"too few steps to compare, {len(self._before)} before it (without the first {START_UP} of the run) and "
            f"{len(self._after)} after it; {FEWEST} of each are needed"
        )


def _median(steps: list[Timing], field: int) -> float:
    return statistics.median(float(step[field] or 0) for step in steps)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
