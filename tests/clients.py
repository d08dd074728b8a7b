"""What the tests of Hugging Face and Lightning have in common: two processes that do many jobs in one start."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from processes import run_processes


def results_of(
    jobs: dict[str, Callable[[], Any]], around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> dict[str, Any]:
    """What each job returns, in order, each inside a context; an error names the job."""
    found = {}
    for name, job in jobs.items():
        with around():
            try:
                found[name] = job()
            except Exception as error:
                raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
    return found


def on_two_processes(everything: Callable[..., dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """`everything(comm, port, folder)` on both: one start, since importing the packages is most of the time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_processes(2, everything, port, folder, timeout_s=200)


def assert_equal_bits(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """After each step both workers had the same parameters."""
    for ours, theirs in zip(mine["params"], other["params"], strict=True):
        assert torch.equal(ours, theirs)


def assert_bytes_fall(run: dict[str, Any], sent: Sequence[int], warmup: int) -> None:
    """At the switch; and the parameters have moved."""
    assert 0 < sent[warmup + 1] < sent[warmup - 1] / 4
    assert not torch.equal(run["params"][-1], run["params"][0])


def assert_same_trajectory(run: dict[str, Any], loop: dict[str, Any]) -> None:
    for ours, theirs in zip(run["params"], loop["params"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def assert_same_bytes(sent: Sequence[int], loop: Sequence[int]) -> None:
    """From the second step on; DDP's buckets are not padded, the flat order is."""
    assert sent[1:] == pytest.approx(loop[1:], rel=0.01)
