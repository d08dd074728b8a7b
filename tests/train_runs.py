"""Runs of `onebit train` in processes of their own, whose workers can be killed: for tests of what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECIPE = """
[model]
vocab_size = 300
hidden_size = 32
layers = 1
heads = 2
[data]
sequence_length = 32
eval_windows = 40
[optimizer]
freeze_step = 8
lr = 0.02
[train]
steps = 30
micro_batch = 4
workers = 2
log_every = 1
eval_every = 30
timeout_s = 30
checkpoint_every = 4
"""
ONEBIT = (sys.executable, "-m", "onebit.cli")


@dataclass
class Run:
    """A run under way."""

    out: Path
    process: subprocess.Popen[str]
    killed: list[str] = field(default_factory=list)

    @property
    def partial(self) -> Path:
        return self.out.with_name(self.out.name + ".partial")

    def workers(self) -> list[int]:
        """Process ids, in the order in which they were started."""
        with suppress(OSError):
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            return sorted(int(pid) for pid in path.read_text().split() if _is_worker(int(pid)))
        return []

    def step(self) -> int:
        """The last step in the metrics."""
        with suppress(OSError):
            lines = (self.partial / "metrics.jsonl").read_text().splitlines()
            for line in reversed(lines):
                with suppress(ValueError):
                    return int(json.loads(line)["step"])
        return 0

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 90) -> bool:
        """Whether it came true before the run ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return True

    def kill(self, which: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one worker, if there is one now."""
        workers = self.workers()
        if workers:
            with suppress(ProcessLookupError):
                os.kill(workers[which % len(workers)], number)
                self.killed.append(f"worker {which % len(workers)} at step {self.step()}")

    def end(self, timeout_s: float = 150) -> str:
        """Wait for its end; what it said, without what Gloo has to say of connections to killed workers."""
        try:
            _, said = self.process.communicate(timeout=timeout_s)
        finally:
            self.stop()
        return "".join(line for line in said.splitlines(keepends=True) if not line.startswith("["))

    def stop(self) -> None:
        if self.process.poll() is None:
            for pid in [*self.workers(), self.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


def _is_worker(pid: int) -> bool:
    with suppress(OSError):
        return b"worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def begin(recipe: Path, out: Path, *flags: object) -> Run:
    """Start a run."""
    command = [*ONEBIT, "train", str(recipe), "--out", str(out), "--quiet", *map(str, flags)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return Run(out, subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))


def summary_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def losses_of(out: Path) -> list[tuple[int, float]]:
    """Step and loss of all lines that have one."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]
