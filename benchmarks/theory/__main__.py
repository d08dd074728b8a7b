"""Theory as runnable evidence: identities, bounded errors, rates.

    python -m benchmarks.theory [--only NAME ...] [--out FOLDER]

Runs the studies of studies.py on one thread (minutes in all), prints what docs/theory.md quotes, and writes for each a
JSON file (raw numbers, command, versions) and its plot into the folder. `--only` runs some of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onebit
from benchmarks.theory import plots
from benchmarks.theory.studies import STUDIES


def exponents(entry: Any, path: str = "") -> list[str]:
    """Every fitted exponent in a study, one line each."""
    if not isinstance(entry, dict):
        return []
    if set(entry) == {"value", "low", "high"}:
        return [f"  {path}: {entry['value']:+.3f}  95 % [{entry['low']:+.3f}, {entry['high']:+.3f}]"]
    return [line for key, value in entry.items() for line in exponents(value, f"{path} / {key}" if path else key)]


def report(name: str, study: dict[str, Any]) -> None:
    print(f"{name}  ({study['cpu_seconds']:.0f} s of one core)")
    if name == "virtual sequences":
        lines = [f"  {k}: {value:8.1e}  {case}" for k in ("hold", "fail") for case, value in study[k].items()]
    elif name == "boundedness":
        lines = [
            f"  multiplier {a}, {kind}: worker {e['worker']:.3f}, server {e['server']:.3f}, growth {e['growth']:.3f}"
            for a, kinds in study.items()
            if isinstance(kinds, dict)
            for kind, e in kinds.items()
            if isinstance(e, dict)
        ]
    else:
        lines = exponents(study)
    print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Theory as runnable evidence: identities, bounded errors, rates.")
    parser.add_argument("--only", nargs="+", choices=list(STUDIES), default=list(STUDIES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    origin = {
        "command": shlex.join(["python", "-m", "benchmarks.theory", *sys.argv[1:]]),
        "versions": {
            "onebit": onebit.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        begin = time.process_time()
        study = STUDIES[name]()
        study["cpu_seconds"] = round(time.process_time() - begin, 1)
        report(name, study)
        path = args.out / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        path.write_text(json.dumps({**origin, "study": study}, indent=1) + "\n")
        plots.draw(name, study, args.out)


if __name__ == "__main__":
    main()
