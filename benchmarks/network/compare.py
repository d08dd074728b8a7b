"""Training steps over a limited network: DDP and its hooks, local steps, DeepSpeed's OnebitLamb, ours. Root on Linux.

    python benchmarks/network/compare.py                                   # 2 hosts; 50, 200, 1000 Mbit/s, unlimited
    python benchmarks/network/compare.py --hosts 2,4 --workers 1,2 --mbit 200
    python benchmarks/network/compare.py --model small --rows ddp-bf16,1bit-lamb --rounds 1   # in seconds

For every number of hosts and workers one network is built and all rows are prepared, before it is limited; then at
every rate there are rounds, and in each round a block of steps of every row, back and forth through the list. The
workers are processes with one thread each, on this machine's cores. Wire bytes are those of the hosts' links, headers
included (limited.py). Results go to benchmarks/results/network-DATE.jsonl, one JSON object per line, and as tables to
the output. A row that fails is in both with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not part of the package

from benchmarks.network.fleet import Fleet, RowFailed
from benchmarks.network.limited import Network, Traffic, check_network, obstacle
from benchmarks.network.rows import METHODS, MODELS, ROWS
from benchmarks.network.run import rate
from benchmarks.network.tables import methods, table
from onebit import peer
from onebit.errors import ConfigError, OnebitError

RESULTS = Path(__file__).resolve().parents[1] / "results"
MOST_IN_A_BLOCK = 40
WORKER_BYTES, ROW_BYTES = 400_000_000, 18  # of memory, found by looking: a worker; a row, per parameter


class Measured:
    """What was measured of one row at one rate.

    Attributes:
        seconds, compute, waited: of each step or unit of steps; of its slowest worker, mean over the workers twice.
        steps: how many.
        exchanged: seconds of exchanges, wherever, and of these those beside compute; all workers together.
        payload: bytes, all workers and steps together.
        traffic: of each host, over the steps.
    """

    def __init__(self, hosts: int) -> None:
        self.seconds: list[float] = []
        self.compute: list[float] = []
        self.waited: list[float] = []
        self.steps, self.payload = 0, 0.0
        self.exchanged = [0.0, 0.0]
        self.traffic = [Traffic()] * hosts

    def add(self, answers: Sequence[dict[str, Any]], steps: int, traffic: Sequence[Traffic]) -> None:
        self.seconds += [max(each) for each in zip(*(a["seconds"] for a in answers), strict=True)]
        self.compute += [statistics.fmean(each) for each in zip(*(a["compute"] for a in answers), strict=True)]
        self.waited += [statistics.fmean(each) for each in zip(*(a["waited"] for a in answers), strict=True)]
        self.steps += steps
        self.payload += sum(a["payload"] for a in answers)
        self.exchanged = [old + sum(a["exchanged"][i] for a in answers) for i, old in enumerate(self.exchanged)]
        self.traffic = [old + new for old, new in zip(self.traffic, traffic, strict=True)]


class Session:
    """All rows on one network.

    Args:
        args: of the command line.
        hosts, per_host: how many.

    Attributes:
        failed: why, by row.
        units: steps that belong together, by row.
        elements: of the model.
        now: the row that the workers were last asked about.
    """

    def __init__(self, args: argparse.Namespace, hosts: int, per_host: int) -> None:
        self.args, self.hosts, self.per_host = args, hosts, per_host
        self.options = {
            "model": args.model, "micro_batch": args.micro_batch, "tokens": args.tokens,
            "local_steps": args.local_steps, "patience_s": args.patience,
        }  # fmt: skip
        self.failed: dict[str, str] = {}
        self.units: dict[str, int] = {}
        self.now = ""
        self.elements = 0

    def run(self) -> list[dict[str, Any]]:
        """A record per rate and row.

        Raises:
            OnebitError: the workers did not start.
        """
        found: dict[tuple[float | None, str], Measured] = {}
        with Network(self.hosts) as network:
            left = list(self.args.mbit)
            while left:  # again from the rate that a failure broke off, without the row that failed
                network.limit(None)
                try:
                    with Fleet(network, self.per_host, self.options) as fleet:
                        self.elements = fleet.elements
                        self._check_memory()
                        self._build(fleet)
                        while left:
                            found |= self._at(fleet, network, left[0])
                            left.pop(0)
                except RowFailed as error:
                    if not self._blame(error):
                        raise OnebitError(f"the workers did not start: {error}") from None
        return [self._record(mbit, row, found.get((mbit, row))) for mbit in self.args.mbit for row in self.args.rows]

    def _check_memory(self) -> None:
        """Raise ConfigError rather than let the machine run out of memory."""
        workers, rows = self.hosts * self.per_host, len(self._rows())
        needed = workers * (WORKER_BYTES + rows * self.elements * ROW_BYTES)
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0]) + workers * WORKER_BYTES  # they have started
        if needed > free:
            raise ConfigError(
                f"{rows} rows on {workers} workers need about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; "
                "name fewer --rows or choose --model small"
            )

    def _rows(self) -> list[str]:
        return [row for row in self.args.rows if row not in self.failed]

    def _blame(self, error: RowFailed) -> bool:
        """Whether the failure is a row's; then it is left out from now on."""
        row, self.now = self.now, ""
        if row:
            self.failed[row] = str(error)
            say(f"{row} failed: {error}")
        return bool(row)

    def _ask(self, fleet: Fleet, do: str, row: str, **more: Any) -> list[dict[str, Any]]:
        """As Fleet.ask; nothing if the row failed and the workers can go on."""
        self.now = row
        try:
            return fleet.ask(do, row, **more)
        except RowFailed as error:
            if not error.usable:
                raise
            self._blame(error)
            return []

    def _build(self, fleet: Fleet) -> None:
        for row in self._rows():
            began = time.perf_counter()
            answers = self._ask(fleet, "build", row)
            if answers:
                self.units[row] = answers[0]["unit"]
                if len({answer["weights"] for answer in answers}) > 1:
                    self.failed[row] = "the workers' weights differ after it was prepared"
                say(f"{row} ready after {time.perf_counter() - began:.1f} s")

    def _at(self, fleet: Fleet, network: Network, mbit: float | None) -> dict[tuple[float | None, str], Measured]:
        """All rounds at one rate. The first one has one step of each row and is not counted."""
        network.limit(mbit)
        counts, found = dict(self.units), {row: Measured(self.hosts) for row in self._rows()}
        for turn in range(self.args.rounds + 1):
            say(f"{self.hosts} hosts, {self.per_host} workers each, {speed(mbit)}: round {turn} of {self.args.rounds}")
            for row in self._rows()[:: 1 if turn % 2 else -1]:
                before = network.traffic()
                answers = self._ask(fleet, "steps", row, count=counts[row])
                if not answers:
                    continue
                if turn:
                    moved = [new - old for new, old in zip(network.traffic(), before, strict=True)]
                    found[row].add(answers, counts[row], moved)
                units = self.args.block / (max(a["seconds"][-1] for a in answers) * self.units[row])
                counts[row] = self.units[row] * max(1, min(MOST_IN_A_BLOCK, round(units)))
        for row in self.args.profile:
            if row not in self.failed and (answers := self._ask(fleet, "profile", row, count=counts[row])):
                print(f"\n{row}, {counts[row]} steps of worker 0 at {speed(mbit)}\n{answers[0]['table']}", flush=True)
        return {(mbit, row): measured for row, measured in found.items()}

    def _record(self, mbit: float | None, row: str, measured: Measured | None) -> dict[str, Any]:
        record: dict[str, Any] = {
            "kind": "row", "hosts": self.hosts, "workers_per_host": self.per_host, "mbit": mbit, "row": row,
        }  # fmt: skip
        if measured is None or not measured.steps:
            return {**record, "failed": self.failed.get(row, "not measured")}
        sent = [traffic.sent / measured.steps for traffic in measured.traffic]
        received = [traffic.received / measured.steps for traffic in measured.traffic]
        workers = self.hosts * self.per_host
        samples = self.args.micro_batch * workers
        return {
            **record,
            "steps": measured.steps,
            "step_s": quartiles(measured.seconds),
            "forward_backward_s": quartiles(measured.compute),
            "in_collectives_s": quartiles(measured.waited),
            "exchange_s": measured.exchanged[0] / workers / measured.steps if measured.exchanged[0] else None,
            "hidden_share": max(0.0, measured.exchanged[1] / measured.exchanged[0]) if measured.exchanged[0] else None,
            "samples_per_s": samples / statistics.median(measured.seconds),
            "payload_bytes_per_host_step": measured.payload / measured.steps / self.hosts,
            "wire_sent_per_host_step": sent,
            "wire_received_per_host_step": received,
            "parameters": self.elements,
        }


def quartiles(values: Sequence[float]) -> list[float] | None:
    """Lower quartile, median, upper quartile; None of nothing."""
    if not values:
        return None
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def speed(mbit: float | None) -> str:
    return "unlimited" if mbit is None else f"{mbit:g} Mbit/s"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def surroundings(args: argparse.Namespace) -> dict[str, Any]:
    """What a result depends on."""
    versions = {name: metadata.version(name) for name in ("onebit", "torch", "transformers")}
    if not peer.obstacle():
        versions["deepspeed"] = peer.VERSION
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return {
        "kind": "run",
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu.partition(":")[2].strip(),
        "kernel": platform.release(),
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
    }


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: a value outside what is allowed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--hosts", type=numbers, default=[2], help="numbers with commas between them; 2")
    parser.add_argument("--workers", type=numbers, default=[1], help="per host, with commas between them; 1")
    parser.add_argument(
        "--mbit", type=lambda text: [rate(part) for part in text.split(",")], default=[50.0, 200.0, 1000.0, None],
        help="rates with commas between them, Mbit/s or unlimited; 50,200,1000,unlimited",
    )  # fmt: skip
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="base",
        help="BERTs: base of 10.4 M parameters, deep of 11.2 M in small layers",
    )
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences of a step and worker")
    parser.add_argument("--tokens", type=int, default=32, help="of a sequence")
    parser.add_argument("--local-steps", type=int, default=8, help="of PostLocalSGD and DiLoCo between averages")
    parser.add_argument("--rounds", type=int, default=3, help="at each rate, after one that is not counted")
    parser.add_argument("--block", type=float, default=2.0, help="seconds of a row in a round, at least one step")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until a row without answer has failed")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=None, help=",".join(ROWS))
    parser.add_argument(
        "--profile",
        type=lambda text: text.split(","),
        default=[],
        help="rows whose functions are timed, after the rounds",
    )
    parser.add_argument("--out", type=Path, default=None, help="folder; benchmarks/results")
    args = parser.parse_args(arguments)
    if args.rows is None:
        args.rows = [row for row in ROWS if "two-level" not in row or min(args.workers) > 1]
    for row in [*args.rows, *args.profile]:
        if row not in ROWS:
            raise ConfigError(f"row {row!r} is unknown; there are {', '.join(ROWS)}")
    if missing := [row for row in args.profile if row not in args.rows]:
        raise ConfigError(f"--profile has {missing[0]!r}, which is not among --rows; name it there too")
    for name in ("micro_batch", "tokens", "local_steps", "rounds", "block", "patience"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    for hosts in args.hosts:
        for mbit in args.mbit:
            check_network(hosts, mbit)
    if min(args.workers) < 1:
        raise ConfigError(f"--workers is {min(args.workers)}; it must be at least 1")
    if "compute" not in args.rows:
        args.rows.insert(0, "compute")
    return args


def main(arguments: list[str] | None = None) -> int:
    try:
        args = parsed(arguments)
        if obstacle():
            raise OnebitError(obstacle())
        if "deepspeed-lamb" in args.rows and peer.obstacle():
            say(f"no row of DeepSpeed: {peer.obstacle()}")
            args.rows.remove("deepspeed-lamb")
        folder = args.out or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"network-{datetime.now(timezone.utc):%Y-%m-%d}.jsonl"
        run = json.dumps(surroundings(args), default=str)
        for hosts in args.hosts:
            for per_host in args.workers:
                rows = Session(args, hosts, per_host).run()
                with path.open("a") as file:
                    for record in [json.loads(run), *rows, *methods(rows, METHODS)]:
                        file.write(json.dumps(record) + "\n")
                for mbit in args.mbit:
                    print(table([row for row in rows if row["mbit"] == mbit], METHODS), flush=True)
        say(f"written to {path}")
        return 0
    except OnebitError as error:
        say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
