"""Where the time of steps goes, as the host sees it: on an accelerator, what it takes to start work, not the work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("encode", "wire", "server")
"""Of an exchange: making messages of gradients; waiting for collectives; averaging what is served, compressed anew."""


def synchronized(device: torch.device) -> float:
    """Seconds on the clock, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock:
    """Adds up seconds by phase. For one thread at a time.

    Attributes:
        seconds: since construction.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began
