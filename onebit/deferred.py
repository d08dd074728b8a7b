"""Reading what a device computed, and sending it what it needs, without making the host wait for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Deferred:
    """A few flags on their way from a device to the host. `read` waits for nothing that came after them."""

    def __init__(self, flags: Tensor) -> None:
        """flags: bool [k], on any device. Starts the copy."""
        self._event: torch.Event | None = None
        if flags.device.type == "cpu":
            self._host = flags
            return
        self._host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        self._host.copy_(flags, non_blocking=True)
        self._event = torch.Event(flags.device)
        self._event.record(torch.accelerator.current_stream(flags.device))  # of that device, current or not

    def read(self) -> list[bool]:
        if self._event is not None:
            self._event.synchronize()
        return [bool(flag) for flag in self._host.tolist()]


def send(values: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on the device. From memory that is not pinned the host would wait for all before it."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
