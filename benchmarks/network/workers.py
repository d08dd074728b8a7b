"""Processes on the hosts of a limited network, one per worker, which end together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.network.limited import Network
from onebit.errors import ConfigError

MASTER_PORT = 29500  # of host 0, where nobody else is
MOST_WORKERS = 64
END_WITHIN_S = 2.0
_LIBC = ctypes.CDLL(None)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Workers:
    """The same command once per worker, as long as the `with` block lasts.

    Every process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME
    and OMP_NUM_THREADS=1 set, ranks host by host. It leads a session of its own, and dies if this process does.

    Args:
        network: entered.
        per_host: workers of each host, 1 to 64.
        command: program and arguments.
        heard: called with rank and each line that a worker prints, without its end, from a thread per worker.
        environment: more variables.

    Attributes:
        processes: by rank; their stdin is a pipe.

    Raises:
        ConfigError: per_host is outside its range, or the command is empty.
    """

    def __init__(
        self,
        network: Network,
        per_host: int,
        command: Sequence[str],
        heard: Callable[[int, str], object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not 1 <= per_host <= MOST_WORKERS:
            raise ConfigError(f"workers is {per_host}; it must be from 1 to {MOST_WORKERS} per host")
        if not command:
            raise ConfigError("there is no command; give it after --")
        self.network, self.per_host, self._command, self._heard = network, per_host, command, heard
        self._environment = dict(environment or {})
        self.processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._began = 0.0
        self._ended: dict[int, float] = {}

    @property
    def size(self) -> int:
        return self.network.hosts * self.per_host

    def __enter__(self) -> Workers:
        self._began = time.perf_counter()
        try:
            for rank in range(self.size):
                self._start(rank)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, timeout_s: float | None = None) -> int:
        """Until all have ended or one has failed: 0, or the first failure's exit status (128 + the signal).

        Raises:
            TimeoutError: neither happened in time.
        """
        until = None if timeout_s is None else time.perf_counter() + timeout_s
        while True:
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    self._ended.setdefault(rank, time.perf_counter())
                    if process.returncode:
                        return process.returncode if process.returncode > 0 else 128 - process.returncode
            if len(self._ended) == self.size:
                return 0
            if until is not None and time.perf_counter() > until:
                raise TimeoutError(f"{self.size - len(self._ended)} workers still run after {timeout_s:g} s")
            time.sleep(0.02)

    def seconds(self, host: int) -> float:
        """From the start to the end of a host's last worker, or to now while it runs."""
        ranks = range(host * self.per_host, (host + 1) * self.per_host)
        return max(self._ended.get(rank, time.perf_counter()) for rank in ranks) - self._began

    def end(self) -> None:
        """End all that still run, ask first; and read their last lines."""
        for process in self.processes:
            _signal(process, signal.SIGTERM)
        until = time.perf_counter() + END_WITHIN_S
        for rank, process in enumerate(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.perf_counter()))
            self._ended.setdefault(rank, time.perf_counter())
        for process in self.processes:
            _signal(process, signal.SIGKILL)  # to what it started as well
            process.wait()
        for reader in self._readers:
            reader.join(END_WITHIN_S)
        for process in self.processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def _start(self, rank: int) -> None:
        host, local = divmod(rank, self.per_host)
        variables = {
            "RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self.per_host,
            "MASTER_ADDR": self.network.address(0), "MASTER_PORT": MASTER_PORT, "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1,
        }  # fmt: skip
        process = subprocess.Popen(
            self.network.command(host, self._command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **{k: str(v) for k, v in variables.items()}, **self._environment},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.processes.append(process)
        reader = threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, rank: int, lines: Any) -> None:
        with lines:
            for line in lines:
                self._heard(rank, line.rstrip("\n"))


def _die_with_parent() -> None:
    _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """To a worker and all of its session's processes that are left."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
