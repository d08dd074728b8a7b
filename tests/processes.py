"""Run a function in n Gloo processes of this machine, for tests. No process outlives the call.

`run_processes(n, fn, *args)` returns the results in order of rank, or raises the first error of any worker.
`end_of_processes` is the same without raising: what became of each worker. `fn` and `args` must be picklable, so
`fn` is a function of a module; each worker has one torch thread and a default group on the loopback device.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from onebit.comm import Distributed


@dataclass
class End:
    """What became of one worker: a value, an error with its traceback as text, or only an exit status."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    at: float = float("inf")  # time.time() when it returned or raised
    exitcode: int | None = None  # None: it had to be stopped

    @property
    def spoke(self) -> bool:
        """Whether the worker returned or raised; if not, it died or was stopped."""
        return self.at != float("inf")


class WorkerDied(RuntimeError):
    """A worker ended without a result and without an error."""


class WorkersTooSlow(TimeoutError):
    """Not all workers had ended in time; they were stopped."""


def run_processes(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call `fn(comm, *args)` in n processes, `comm` a `Distributed`; return the results in order of rank.

    Raises:
        the error that came first, with the worker's traceback as its cause; WorkerDied; WorkersTooSlow.
    """
    ends = end_of_processes(n, fn, *args, timeout_s=timeout_s)
    errors = sorted((end for end in ends if end.error is not None), key=lambda end: end.at)
    if errors and errors[0].error is not None:
        raise errors[0].error from RuntimeError(f"in worker {errors[0].rank}:\n{errors[0].trace}")
    for end in ends:
        if not end.spoke and end.exitcode is not None:
            raise WorkerDied(f"worker {end.rank} of {n} ended with status {end.exitcode} and no result")
    slow = [end.rank for end in ends if not end.spoke]
    if slow:
        raise WorkersTooSlow(f"workers {slow} of {n} were still at work after {timeout_s} s")
    return [end.value for end in ends]


def end_of_processes(
    n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60, grace_s: float = 15
) -> list[End]:
    """Like `run_processes`, but return how each worker ended. Once one has failed, the others get `grace_s`."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_work, args=(rank, n, folder, timeout_s, fn, args), daemon=True) for rank in range(n)
        ]
        deadline = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.start()
            while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
                if any(process.exitcode for process in processes):
                    deadline = min(deadline, time.monotonic() + grace_s)
                    grace_s = float("inf")  # once
                time.sleep(0.02)
            codes = [process.exitcode for process in processes]
        finally:
            _stop(processes)
        return [_end(Path(folder), rank, code) for rank, code in enumerate(codes)]


def _stop(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()
            process.close()


def _end(folder: Path, rank: int, exitcode: int | None) -> End:
    file = folder / f"end-{rank}"
    end = pickle.loads(file.read_bytes()) if file.exists() else End(rank)
    end.exitcode = exitcode
    return end


def _work(rank: int, n: int, folder: str, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    end = End(rank)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=timeout_s),
        )
        end.value = fn(Distributed(), *args)
    except BaseException as error:
        end.error, end.trace = error, traceback.format_exc()
    end.at = time.time()
    _write(Path(folder), end)
    if dist.is_initialized():
        if end.error is None:
            with suppress(RuntimeError):  # another worker failed
                dist.barrier()  # so that nobody's connection closes while another still reads from it
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if end.error is None else 1)


def _write(folder: Path, end: End) -> None:
    try:
        data = pickle.dumps(end)
        pickle.loads(data)  # an error whose constructor wants more than a message fails only here
    except Exception:
        end.value, end.error = None, RuntimeError(f"{end.error!r} or {type(end.value)} cannot be pickled")
        data = pickle.dumps(end)
    partial = folder / f"partial-{end.rank}"
    partial.write_bytes(data)
    partial.rename(folder / f"end-{end.rank}")
