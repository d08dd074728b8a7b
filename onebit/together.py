"""Run a command's work on its workers: alone, in processes started here, or as one of those that torchrun started."""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from onebit.comm import Comm
from onebit.errors import CommError, ConfigError, OnebitError
from onebit.launch import start
from onebit.train import WAIT_FOR_CAUSE_S, end_process, group

Work = Callable[[Comm, torch.device, str], dict[str, Any]]
"""Given the workers, this worker's device and why it is that one; the result is used of worker 0 only."""


def on_workers(
    command: str,
    arguments: Sequence[str],
    workers: int,
    work: Work,
    report: Callable[[dict[str, Any]], int],
    handed_to: Path | None,
    timeout_s: float,
) -> int:
    """Do `work` on all workers and `report` its result where the user reads it; the exit status.

    A process that torchrun, or `on_workers` itself, started does not return: it ends with that status.

    Args:
        command, arguments: of `onebit`, with which each of the processes started here does the same.
        workers: how many to start, on this machine; 1: none. Under torchrun it must be 1.
        work: what each worker does. A collective.
        report: shows the result and gives the exit status; called on worker 0, or where the processes were started.
        handed_to: a file for the result, given to processes started here.
        timeout_s: within which all workers must come, and how long one waits for another, > 0.

    Raises:
        OnebitError: what a worker raised; fewer than 1 worker; no time; a worker that ended without a result.
    """
    check_start(workers, timeout_s)
    if "RANK" in os.environ:
        if workers > 1 and handed_to is None:
            raise ConfigError(f"--workers is {workers} under a launcher, which has started the workers; leave it out")
        _as_one(work, report, handed_to, timeout_s)
    if workers == 1:
        with group(timeout_s, "--timeout-s") as (comm, device, why):
            with stdout_kept_clean():
                result = work(comm, device, why)
            return report(result)
    with tempfile.TemporaryDirectory(prefix="onebit-") as folder:
        file = Path(folder) / "result.json"
        start("onebit.cli", [command, *arguments, "--handed-to", str(file)], workers, folder)
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise CommError(
                f"the {workers} workers ended without a result, and without an error; look whether the model or its "
                "step ends its process"
            ) from None
        return report(result)


def check_start(workers: int, timeout_s: float) -> None:
    """Raise ConfigError unless there is a worker, and time to wait for others."""
    if workers < 1:
        raise ConfigError(f"--workers is {workers}; it must be at least 1; correct the flag")
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigError(f"--timeout-s is {timeout_s:g}; it must be a finite number above 0; correct the flag")


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send to stderr what is written to stdout meanwhile, also by C code and by child processes."""
    if sys.stdout is None:  # closed by who started this process
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        for stream in (sys.stdout, sys.__stdout__, sys.stderr):
            if stream is not None:
                stream.flush()
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # what C code has written and libc still holds
        os.dup2(kept, 1)
        os.close(kept)


def _as_one(work: Work, report: Callable[[dict[str, Any]], int], handed_to: Path | None, timeout_s: float) -> None:
    """Be one of the workers, to the end of the process."""
    status = 0
    try:
        with group(timeout_s, "--timeout-s") as (comm, device, why):
            with stdout_kept_clean():
                result = work(comm, device, why)
            if comm.rank == 0 and handed_to is not None:
                handed_to.write_text(json.dumps(result), encoding="utf-8")
            elif comm.rank == 0:
                status = report(result)
            if handed_to is None:  # all end alike, so that a launcher's status is that of worker 0
                status = int(comm.all_gather_bytes(str(status).encode())[0])
    except Exception as error:
        if isinstance(error, CommError):
            time.sleep(WAIT_FOR_CAUSE_S)  # the launcher blames who ends first: let that be who caused it
        ErrorHandler().record_exception(error)
        if not isinstance(error, OnebitError):
            traceback.print_exc()
        elif handed_to is None:
            print(f"error: worker {os.environ['RANK']}: {error}", file=sys.stderr)
        end_process(2 if isinstance(error, OnebitError) else 1)
    end_process(status)
