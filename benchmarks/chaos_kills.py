"""Runs of `onebit train` whose processes are killed at random times, compared with undisturbed ones to the bit."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onebit import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from train_runs import RECIPE, Run, begin, losses_of, summary_of

STEPS = 30
FREEZE = 8
LONGEST_S = 300  # of a run with all its kills; longer counts as hanging
OPTIMIZERS = {
    "onebit-lamb": 'name = "onebit-lamb"',
    "onebit-adam": 'name = "onebit-adam"',
    "local-variance-lamb": 'name = "local-variance-lamb"',
    "lamb int8": 'name = "lamb"\nwarmup_transport = "int8"',
}
WHEN = {"starting": 7, "training": 4, "switch": 3, "writing": 5, "end": 1}


@dataclass(frozen=True)
class Kill:
    """phase: what the processes were doing; step: the last one that was logged; lost: steps to be repeated."""

    who: str
    phase: str
    step: int
    lost: int


@dataclass
class Case:
    """One run and what became of it. `fault`: empty if it ended as the undisturbed one."""

    optimizer: str
    workers: int
    asynchronous: bool
    every: int
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0
    difference: float = 0.0
    fault: str = ""


def recipe_for(case: Case, disturbed: bool) -> str:
    """The recipe of a case; the undisturbed run writes no checkpoints."""
    lines = RECIPE.replace("freeze_step = 8", f"freeze_step = {FREEZE}\n{OPTIMIZERS[case.optimizer]}")
    lines = lines.replace("workers = 2", f"workers = {case.workers}").replace("steps = 30", f"steps = {STEPS}")
    every = f"checkpoint_every = {case.every if disturbed else 0}\nrestarts = {1000 if disturbed else 0}"
    every += f"\nasync_checkpoints = {str(case.asynchronous).lower()}"
    return lines.replace("checkpoint_every = 4", every)


class Attack:
    """The kills of one run: who, when, and the run that goes on after each."""

    def __init__(self, case: Case, folder: Path, chance: random.Random) -> None:
        self.case, self._chance = case, chance
        self._recipe = folder / "recipe.toml"
        self._recipe.write_text(recipe_for(case, True))
        self.run = begin(self._recipe, folder / "out")
        self._seen: tuple[list[int], float] = [], 0.0
        self._deadline = time.monotonic() + LONGEST_S

    def over(self) -> bool:
        return self.run.process.poll() is not None or time.monotonic() > self._deadline

    def workers(self) -> list[int]:
        """Those of now; remembers since when."""
        found = self.run.workers()
        if len(found) == self.case.workers and found != self._seen[0]:
            self._seen = found, time.time()
        return found

    def phase(self) -> str:
        """What the workers of now are doing."""
        metrics = self.run.partial / "metrics.jsonl"
        with suppress(OSError):
            if metrics.stat().st_mtime > self._seen[1]:
                step = self.run.step()
                if list((self.run.partial / checkpoint_folder).glob("step-*.partial")):
                    return "writing a checkpoint"
                if step >= STEPS:
                    return "end of the run"
                if step in (FREEZE - 1, FREEZE):
                    return "at the switch"
                return "first stage" if step < FREEZE else "second stage"
        return "end of the run" if self.run.out.exists() else "starting"

    def wait(self, when: str) -> bool:
        """Until a moment of a kind; whether the run is still going on then."""
        while not self.over() and len(self.workers()) < self.case.workers:
            time.sleep(0.01)
        if when == "starting":
            until = time.monotonic() + self._chance.uniform(0, 5)
            while not self.over() and time.monotonic() < until and self.phase() == "starting":
                time.sleep(0.02)
            return not self.over()
        first = {"switch": FREEZE - 1, "end": STEPS}.get(when, self.run.step() + self._chance.randrange(1, 8))
        writing = self.run.partial / checkpoint_folder
        while not self.over():
            self.workers()
            phase = self.phase()
            if phase != "starting" and self.run.step() >= min(first, STEPS):
                break
            if phase != "starting" and when == "writing" and list(writing.glob("step-*.partial")):
                return True
            time.sleep(0.003)
        time.sleep(self._chance.uniform(0, 0.06 if when != "end" else 0.3))
        return not self.over()

    def kill(self, launcher: bool) -> None:
        """One worker, or the launcher, after which the run is resumed by hand."""
        workers, phase = self.workers(), self.phase()
        if not workers:
            return
        which = self._chance.randrange(len(workers))
        before = self.run.step() if phase != "starting" else 0
        try:
            os.kill(self.run.process.pid if launcher else workers[which], signal.SIGKILL)
        except ProcessLookupError:
            return
        if launcher:
            self._resume(workers)
        else:
            while not self.over() and set(self.workers()) & set(workers):
                time.sleep(0.01)
        saved = checkpoint.latest(self.run.partial / checkpoint_folder) or 0
        who = "launcher" if launcher else f"worker {which}"
        self.case.kills.append(Kill(who, phase, before, max(0, before - saved) if before else 0))

    def _resume(self, workers: list[int]) -> None:
        self.run.process.communicate()
        while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < self._deadline:
            time.sleep(0.05)
        self.run = begin(self._recipe, self.run.out, "--resume")


checkpoint_folder = "checkpoints"


class Campaign:
    """Runs one after the other, some at a time, until so many kills or seconds are spent."""

    def __init__(self, kills: int, seconds: float, seed: int, jobs: int) -> None:
        self._kills, self._end, self._seed, self._jobs = kills, time.monotonic() + seconds, seed, jobs
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self._lock = threading.Lock()
        self._folder: Path = Path()
        self.cases: list[Case] = []

    def run(self) -> dict[str, Any]:
        """All of it; the figures."""
        with tempfile.TemporaryDirectory(prefix="onebit-chaos-") as folder:
            self._folder = Path(folder)
            with ThreadPoolExecutor(self._jobs) as pool:
                for found in [pool.submit(self._work, job) for job in range(self._jobs)]:
                    found.result()
        return self.figures()

    def enough(self) -> bool:
        return sum(len(case.kills) for case in list(self.cases)) >= self._kills or time.monotonic() > self._end

    def _work(self, job: int) -> None:
        number = job
        while not self.enough():
            chance = random.Random(f"{self._seed} {number}")
            names = list(OPTIMIZERS)
            case = Case(
                optimizer=names[number % len(names)],
                workers=3 if number % 7 == 6 else 2,
                asynchronous=number // len(names) % 2 == 1,
                every=chance.randrange(2, 6),
            )
            undisturbed = self._undisturbed(case)
            with self._lock:
                self.cases.append(case)
            self._one(case, number, undisturbed, chance)
            number += self._jobs

    def _one(self, case: Case, number: int, undisturbed: Path, chance: random.Random) -> None:
        began = time.monotonic()
        folder = self._folder / f"run-{number}"
        folder.mkdir()
        attack = Attack(case, folder, chance)
        try:
            for _ in range(chance.randrange(8, 17)):
                if self.enough() or not attack.wait(chance.choices(list(WHEN), list(WHEN.values()))[0]):
                    break
                attack.kill(launcher=chance.random() < 0.12)
            said = attack.run.end(timeout_s=LONGEST_S)
            case.fault, case.difference = compare(attack.run, said, undisturbed)
        except Exception as error:
            case.fault = f"{type(error).__name__}: {error}"
        finally:
            attack.run.stop()
        case.seconds = round(time.monotonic() - began, 1)
        fault = case.fault or "ended as the undisturbed run"
        print(f"run {number}: {case.optimizer}, {len(case.kills)} kills, {case.seconds:.0f} s: {fault}", flush=True)

    def _undisturbed(self, case: Case) -> Path:
        """The run to compare with, made once."""
        key = case.optimizer, case.workers
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            out = self._folder / f"undisturbed-{key[0].replace(' ', '-')}-{key[1]}"
            if not out.exists():
                recipe = out.with_suffix(".toml")
                recipe.write_text(recipe_for(case, False))
                said = begin(recipe, out).end()
                if said:
                    raise RuntimeError(said)
        return out

    def figures(self) -> dict[str, Any]:
        """What came of it."""
        kills = [kill for case in self.cases for kill in case.kills]
        ended = [case for case in self.cases if not case.fault]
        return {
            "kills": len(kills),
            "of the launcher": sum(kill.who == "launcher" for kill in kills),
            "by phase": dict(Counter(kill.phase for kill in kills).most_common()),
            "runs": len(self.cases),
            "runs that ended as the undisturbed one": len(ended),
            "steps lost": sum(kill.lost for kill in kills),
            "most steps lost by one kill": max((kill.lost for kill in kills), default=0),
            "steps of all runs": STEPS * len(self.cases),
            "largest difference": max((case.difference for case in self.cases), default=0.0),
            "faults": [f"{case.optimizer}, {case.workers} workers: {case.fault}" for case in self.cases if case.fault],
            "cases": [asdict(case) for case in self.cases],
        }


def compare(run: Run, said: str, undisturbed: Path) -> tuple[str, float]:
    """What is wrong with how a run ended, and the largest difference of a number to the undisturbed one."""
    if run.process.returncode != 0 or said:
        return f"exit status {run.process.returncode}: {said[-600:]!r}", float("nan")
    mine, theirs = losses_of(run.out), losses_of(undisturbed)
    if [step for step, _ in mine] != [step for step, _ in theirs]:
        return f"steps {[step for step, _ in mine]}", float("nan")
    pairs = [(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True)]
    keys = ("eval_loss", "payload_bytes", "skipped_steps", "steps")
    pairs += [(summary_of(run.out)[key], summary_of(undisturbed)[key]) for key in keys]
    largest = max(abs(a - b) for a, b in pairs)
    if (run.out / checkpoint_folder).exists() or run.partial.exists():
        return "something was left behind", largest
    return (f"differs by {largest}" if any(a != b for a, b in pairs) else ""), largest
