"""The workers of the comparison, told what to do one order at a time."""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.network.limited import Network
from benchmarks.network.worker import ANSWER
from benchmarks.network.workers import Workers

WORKER = Path(__file__).with_name("worker.py")


class RowFailed(Exception):
    """A row failed on a worker.

    Attributes:
        usable: whether the workers can go on: all of them answered, and alike.
    """

    def __init__(self, reason: str, usable: bool) -> None:
        super().__init__(reason)
        self.usable = usable


class Fleet:
    """Workers that wait for orders, as long as the `with` block lasts.

    Args:
        network: entered, and not limited while the workers start.
        per_host: workers of a host.
        options: what the worker is started with, as its argument in JSON; of these, patience_s is how long an answer
            may take.
        worker: a program that takes orders and answers as worker.py does.
        environment: more variables.

    Attributes:
        elements: of the model.

    Raises:
        RowFailed: entering, the workers did not start.
    """

    def __init__(
        self,
        network: Network,
        per_host: int,
        options: dict[str, Any],
        worker: Path = WORKER,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._patience_s = float(options["patience_s"])
        self._answers: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._last_words: dict[int, str] = {}
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, str(worker), json.dumps(options)]
        self._workers = Workers(network, per_host, command, self._heard, {**quiet, **(environment or {})})
        self.elements = 0

    def __enter__(self) -> Fleet:
        self._workers.__enter__()
        try:
            self.elements = self._collect()[0]["elements"]
        except BaseException:
            self._workers.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.end()

    def ask(self, do: str, row: str, **more: Any) -> list[dict[str, Any]]:
        """The answers of all workers, by rank.

        Raises:
            RowFailed: a worker failed, ended, or did not answer in time.
        """
        for process in self._workers.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"do": do, "row": row, **more}) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                break  # `_collect` says which
        return self._collect()

    def _heard(self, rank: int, line: str) -> None:
        if line.startswith(ANSWER):
            self._answers.put((rank, json.loads(line[len(ANSWER) :])))
        elif line.strip():
            self._last_words[rank] = line.strip()

    def _collect(self) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + self._patience_s
        while len(answers) < self._workers.size:
            try:
                rank, answer = self._answers.get(timeout=0.2)
                answers[rank] = answer
            except queue.Empty:
                self._look(answers, until)
            if any("error" in a for a in answers.values()):
                until = min(until, time.monotonic() + 15)  # the others may wait for that worker
        failed = [answers[rank]["error"] for rank in sorted(answers) if "error" in answers[rank]]
        if failed:
            raise RowFailed(failed[0], usable=len(failed) == self._workers.size)
        return [answers[rank] for rank in range(self._workers.size)]

    def _look(self, answers: dict[int, dict[str, Any]], until: float) -> None:
        """Raise RowFailed if a worker has ended or time is up."""
        failed = [answer["error"] for answer in answers.values() if "error" in answer]
        for rank, process in enumerate(self._workers.processes):
            if rank not in answers and process.poll() is not None:
                said = self._last_words.get(rank, "nothing")
                raise RowFailed(f"worker {rank} ended with status {process.returncode}, saying: {said}", usable=False)
        if time.monotonic() > until:
            missing = sorted(set(range(self._workers.size)) - set(answers))
            reason = failed[0] if failed else f"no answer from worker {missing[0]} in time"
            raise RowFailed(reason, usable=False)
