"""How long each method of the comparison takes to a held-out loss: trained here, timed by compare.py. No root needed.

    python benchmarks/network/to_loss.py --timings benchmarks/results/network-DATE.jsonl
    python benchmarks/network/to_loss.py --trained TO-LOSS.jsonl --timings NETWORK.jsonl    # new times, no training

Two processes on this machine train a small GPT with every method of trainings.py, for the same number of steps: first
at a few learning rates with a seed of its own, once per family of methods (trainings.RATES), then with the best rate
and each seed. Held-out loss is recorded against steps. The target is what DDP's AdamW of the same seed has reached at
90 % of its run. Steps to the target times the seconds of a step, of each stage at each rate of compare.py's results,
are seconds to the target. Results go to benchmarks/results/to-loss-DATE.jsonl, one JSON object per line, and as a
table to the output. Exchanges of the variance of local-variance LAMB are in no row's seconds: compare.py times its
steps between them. A method that fails is in both with its reason.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not part of the package

from benchmarks.network.compare import RESULTS, say, surroundings
from benchmarks.network.fleet import Fleet, RowFailed
from benchmarks.network.limited import Network
from benchmarks.network.times import TARGETS_OF, Timings, loss_table, read_rows, read_trained, times
from benchmarks.network.trainings import RATES, TRAININGS
from onebit.errors import ConfigError, OnebitError

WORKER = Path(__file__).with_name("loss_worker.py")
TUNING_SEED = 9
HIDDEN, LAYERS = 128, 3
Record = dict[str, Any]


class Loopback(Network):
    """Hosts that are all this machine, with nothing between them: for workers whose time is not of interest."""

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        return list(command)


class Trainer:
    """Workers that train, started again after a training that ended one of them.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        study = {
            "data": {"sequence_length": args.tokens, "held_out": 0.06} | ({"text": [args.text]} if args.text else {}),
            "train": {"micro_batch": args.micro_batch},
            "model": {"hidden_size": HIDDEN, "layers": LAYERS},
        }
        self._options = {"patience_s": args.patience, "study": study}
        self._fleet: Fleet | None = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def train(self, name: str, lr: float, seed: int) -> Record:
        """The record of a training; with "failed" if it did.

        Raises:
            OnebitError: the workers did not start.
        """
        record: Record = {"kind": "training", "training": name, "lr": lr, "seed": seed}
        fleet = self._fleet or self._start()
        args = self.args
        try:
            answer = fleet.ask("train", name, lr=lr, seed=seed, steps=args.steps, every=args.every)[0]
        except RowFailed as error:
            if not error.usable:
                self._stop()
            say(f"{name}, lr {lr:g}, seed {seed} failed: {error}")
            return {**record, "failed": str(error)}
        say(f"{name}, lr {lr:g}, seed {seed}: {answer['curve'][-1][1]:.4f} after {answer['seconds']:.0f} s")
        return {**record, "parameters": fleet.elements, "steps": args.steps, **answer}

    def _start(self) -> Fleet:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(port)}
        fleet = Fleet(Loopback(2), 1, self._options, WORKER, environment)
        try:
            fleet.__enter__()
        except RowFailed as error:
            raise OnebitError(f"the workers did not start: {error}") from None
        self._fleet = fleet
        return fleet

    def _stop(self) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.__exit__()


def train_all(
    trainer: Trainer, names: Sequence[str], seeds: Sequence[int], tried: Mapping[str, Sequence[float]]
) -> list[Record]:
    """A record per rate that was tried and per training and seed. A family of which no rate worked fails as a whole.

    Args:
        trainer: of this run.
        names: of trainings.TRAININGS.
        seeds: not TUNING_SEED.
        tried: learning rates by family; one alone is taken as it is.
    """
    found: list[Record] = []
    best: dict[str, float | None] = {}
    for family in dict.fromkeys(TRAININGS[name].family for name in names):
        rates = tried[family]
        losses: dict[float, float] = {}
        for lr in rates if len(rates) > 1 else ():
            record = trainer.train(RATES[family][0], lr, TUNING_SEED)
            found.append({**record, "kind": "tuning", "family": family})
            if "failed" not in record:
                losses[lr] = record["curve"][-1][1]
        best[family] = min(losses, key=lambda lr: losses[lr], default=rates[0] if len(rates) == 1 else None)
        if best[family] in (min(rates), max(rates)) and len(rates) > 1:
            say(f"{family}: the best rate {best[family]:g} is the last of those tried")
    for seed in seeds:
        for name in names:
            chosen = best[TRAININGS[name].family]
            if chosen is None:
                reason = f"no learning rate of {list(tried[TRAININGS[name].family])} worked"
                found.append({"kind": "training", "training": name, "lr": None, "seed": seed, "failed": reason})
            else:
                found.append(trainer.train(name, chosen, seed))
    return found


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: a value outside what is allowed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    integers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--steps", type=int, default=320, help="of each training")
    parser.add_argument("--every", type=int, default=16, help="steps between evaluations, a multiple of 8")
    parser.add_argument("--seeds", type=integers, default=[0, 1], help="with commas between them; 0,1")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of a step and worker")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--text", default="", help="file or folder; the topics of Python's documentation")
    parser.add_argument("--trainings", type=lambda text: text.split(","), default=list(TRAININGS))
    parser.add_argument("--lr", type=float, default=None, help="for all methods, instead of trying some per family")
    parser.add_argument("--share", type=float, default=0.9, help="of a run, whose loss there is the target")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until a training without answer failed")
    parser.add_argument("--timings", type=Path, nargs="*", default=[], help="results of compare.py")
    parser.add_argument("--trained", type=Path, nargs="*", default=[], help="earlier results, which are put together")
    parser.add_argument("--hosts", type=int, default=2, help="in the timings")
    parser.add_argument("--workers", type=int, default=1, help="per host, in the timings")
    parser.add_argument("--model", default="base", help="in the timings")
    parser.add_argument("--out", type=Path, default=None, help="folder; benchmarks/results")
    args = parser.parse_args(arguments)
    for name in args.trainings:
        if name not in TRAININGS:
            raise ConfigError(f"training {name!r} is unknown; there are {', '.join(TRAININGS)}")
    for name in ("steps", "every", "micro_batch", "tokens", "patience", "lr"):
        value = getattr(args, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    for name in ("steps", "every"):
        if getattr(args, name) % 8:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be a multiple of 8, where local steps agree")
    if TUNING_SEED in args.seeds:
        raise ConfigError(f"--seeds has {TUNING_SEED}, with which rates are tuned; choose others")
    if not 0 < args.share <= 1:
        raise ConfigError(f"--share is {args.share}; it must be in (0, 1]")
    for path in [*args.timings, *args.trained]:
        if not path.is_file():
            raise ConfigError(f"{path} is no file; give JSON lines that this benchmark wrote")
    return args


def main(arguments: list[str] | None = None) -> int:
    try:
        args = parsed(arguments)
        rows = read_rows(args.timings, args.hosts, args.workers, args.model) if args.timings else []
        run = surroundings(args)
        if args.trained:
            trained = read_trained(args.trained)
            run["trained_by"] = [json.loads(path.read_text().splitlines()[0]) for path in args.trained]
        else:
            rates = {family: (args.lr,) if args.lr else grid for family, (_, grid) in RATES.items()}
            with Trainer(args) as trainer:
                trained = train_all(trainer, args.trainings, args.seeds, rates)
        records = {base: times(trained, Timings(rows), args.share, base) for base in TARGETS_OF}
        folder = args.out or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"to-loss-{datetime.now(timezone.utc):%Y-%m-%d}.jsonl"
        every = [json.loads(json.dumps(run, default=str)), *trained, *chain(*records.values())]
        path.write_text("".join(json.dumps(record) + "\n" for record in every))
        for base, found in records.items():
            print(
                f"\n### To the loss of {base} at {args.share:.0%} of its run\n\n{loss_table(trained, found)}",
                flush=True,
            )
        say(f"written to {path}")
        return 0
    except OnebitError as error:
        say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
