"""Start the workers of a run as processes of this machine, and see to it that they all end together.

torch's elastic launcher does the starting and the ending; here is what it is told, and one sentence for the user
when a worker fails. Workers on several machines are started by `torchrun -m onebit.train` instead.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from onebit import errors
from onebit.errors import CommError, OnebitError
from onebit.recipe import Recipe
from onebit.report import Display, Output, Summary, read_summary
from onebit.train import run_alone, run_virtual

WORKER = Path(__file__).with_name("worker.py")
END_WITHIN_S = 2


class Interrupted(Exception):
    """The launcher got a signal; all workers have been ended.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.signal = number


def launch(
    runs: Sequence[tuple[Recipe, Path]], workers: int, quiet: bool, resume: bool = False, restarts: int = 0
) -> None:
    """Do the runs one after the other, with the same processes.

    Args:
        runs: recipe and output folder of each.
        workers: number of processes.
        quiet: show nothing.
        resume: go on from the last checkpoints of an earlier attempt.
        restarts: how often all workers are started again when one has failed.
    Raises:
        OnebitError: what a worker raised, or CommError when one died. All workers have ended by then.
        Interrupted: Ctrl-C or a request to end. All workers have ended by then.
    """
    with tempfile.TemporaryDirectory(prefix="onebit-") as folder:
        plan = Path(folder) / "runs.json"
        plan.write_text(json.dumps([{"recipe": r.model_dump(mode="json"), "out": str(o.resolve())} for r, o in runs]))
        arguments = ["--runs", str(plan), *(["--quiet"] if quiet else []), *(["--resume"] if resume else [])]
        start("onebit.train", arguments, workers, folder, restarts, [Output(o).folder for _, o in runs])


def start(
    program: str, arguments: Sequence[str], workers: int, folder: str, restarts: int = 0, remains: Sequence[Path] = ()
) -> None:
    """Call `main` of a module in so many processes, and wait until all have ended.

    Args:
        program: name of the module.
        arguments: what its `main` finds in sys.argv.
        workers, restarts: as in `launch`.
        folder: for what the launcher itself writes.
        remains: folders that may hold what was written; those that exist are named when a worker dies.
    Raises:
        OnebitError, Interrupted: as `launch`.
    """
    with _environment(), _interrupt_blocked_in_workers():
        try:
            run = elastic_launch(_config(workers, folder, restarts), sys.executable)
            run(str(WORKER), str(os.getpid()), program, *arguments)
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from None
        except ChildFailedError as error:
            raise _cause(error.failures, workers, [folder for folder in remains if folder.exists()]) from None


def _config(workers: int, folder: str, restarts: int) -> LaunchConfig:
    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": workers,
        "run_id": "onebit",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",  # 0: any free port
        "local_addr": "127.0.0.1",
        "max_restarts": restarts,
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs(log_dir=folder),
        "shutdown_timeout": END_WITHIN_S,
    }
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in settings.items() if name in known})


@contextmanager
def _environment() -> Iterator[None]:
    """What the workers inherit, and a launcher that leaves the talking to us."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    package = str(Path(__file__).resolve().parent.parent)  # importable by the workers however we were found
    wanted = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else workers started again read the addresses of the first ones
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
    } | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})
    before = dict(os.environ)
    for name, value in wanted.items():
        if name == "PYTHONPATH":
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _interrupt_blocked_in_workers() -> Iterator[None]:
    """Start processes with SIGINT blocked (see `worker`), and still hear it here: another thread takes it in."""
    done = threading.Event()
    listener = threading.Thread(target=done.wait, daemon=True)
    listener.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()
        listener.join()


def _cause(failures: dict[int, Any], workers: int, remains: Sequence[Path]) -> Exception:
    """The exception for the failure that caused the others."""
    rank, failure = min(failures.items(), key=lambda item: (_guilt(item[1]), item[1].timestamp))
    kind, text = _recorded(failure)
    if failure.exitcode == -signal.SIGINT:
        return Interrupted(signal.SIGINT)
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, OnebitError):
        return known(text)
    if failure.exitcode == -signal.SIGKILL and failure.timestamp - min(f.timestamp for f in failures.values()) > 5:
        how = "no longer answered, not even the request to end"
    elif failure.exitcode < 0:
        how = f"was killed by signal {-failure.exitcode} ({signal.Signals(-failure.exitcode).name})"
    else:
        how = f"ended with exit status {failure.exitcode}" + (f" ({kind}: {text})" if kind else "")
    left = f"what was written is in {str(remains[-1])!r}; " if remains else ""
    return CommError(f"worker {rank} of {workers} {how}; the other workers were ended; {left}start again")


def _guilt(failure: Any) -> int:
    """Sort key: who failed by itself comes before who noticed, and that before whom the launcher ended."""
    kind, _ = _recorded(failure)
    if kind == "CommError":
        return 1
    return 2 if failure.exitcode == -signal.SIGTERM and not kind else 0


def _recorded(failure: Any) -> tuple[str, str]:
    """Class and message of the exception that a worker left in its error file; empty without one."""
    message = failure.message
    if not isinstance(message, dict):
        return "", ""
    kind, _, text = str(message.get("message", "")).partition(": ")
    return kind, text


def perform(runs: Sequence[tuple[Recipe, Path]], virtual: bool, quiet: bool, resume: bool = False) -> list[Summary]:
    """Do the runs one after the other, each with its recipe's workers: in processes, or within this one.

    Args:
        runs: recipe and output folder of each; all with the same number of workers.
        virtual: workers are threads of this process. A single worker needs no process of its own either.
        quiet: show nothing.
        resume: of a single run: go on from the last checkpoint of an earlier attempt.
    Raises:
        OnebitError, Interrupted: as `launch`, or raised by the run itself.
    """
    workers = runs[0][0].train.workers
    if workers == 1 or virtual:
        display = Display(Console(), quiet)
        return [run_virtual(r, out, display) if virtual else run_alone(r, out, display, resume) for r, out in runs]
    train = runs[0][0].train
    restarts = (3 if train.checkpoint_every else 0) if train.restarts == "auto" else train.restarts
    launch(runs, workers, quiet, resume, restarts if len(runs) == 1 else 0)
    return [read_summary(out) for _, out in runs]
