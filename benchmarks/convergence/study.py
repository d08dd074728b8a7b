"""Train one small BERT with several optimizers and seeds on the same text, and set the held-out losses side by side.

    python benchmarks/convergence/study.py benchmarks/convergence/language.toml --out runs/language

The TOML file is a recipe of `onebit train` with a few more keys: `seeds`, `baseline` (the variant that gaps are taken
to), `task` ("bert", or one of tasks.py) and [variants.NAME] tables, whose keys go over those of [optimizer]. Runs that
--out already holds are not done again. A table and a plot of loss against bytes, frontier.svg, are written there.
Without `data.text` the text is the GNU Collaborative International Dictionary of English, from Debian's package
dict-gcide, fetched by apt-get; it is not kept in the repository. Workers are virtual: threads of this process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tasks
import tomllib
import torch
from rich.console import Console
from rich.table import Table

from onebit.recipe import parse
from onebit.report import Display
from onebit.train import run_virtual


def fetch_text(folder: Path, megabytes: int) -> Path:
    """The first megabytes of the dictionary's entries, in the order of its file."""
    target = folder / f"gcide-{megabytes}mb.txt"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", "dict-gcide"], cwd=scratch, check=True, capture_output=True)
        (package,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package.name, "x"], cwd=scratch, check=True)
        (packed,) = Path(scratch).rglob("gcide.dict.dz")
        with gzip.open(packed) as source:
            source.seek(2**20)  # past the front matter
            words = source.read(megabytes * 2**20).decode("utf-8", errors="ignore")
    target.write_text("\n".join(line.strip() for line in words.splitlines()))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="variants to run; all by default")
    parser.add_argument("--seeds", type=int, nargs="*", help="instead of the file's")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each worker")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    study = tomllib.loads(args.study.read_text())
    task = study.pop("task", "bert")
    seeds, baseline, variants = study.pop("seeds"), study.pop("baseline"), study.pop("variants")
    megabytes = study.pop("megabytes", 4)
    if task in ("bert", "gpt") and "text" not in study.setdefault("data", {}):
        study["data"]["text"] = [str(fetch_text(args.out.parent / "text", megabytes))]
    for seed in args.seeds or seeds:
        for name in args.only or variants:
            result = args.out / f"{name}-{seed}.json"
            if not result.exists():
                result.parent.mkdir(parents=True, exist_ok=True)
                found = run(task, study, variants[name], seed, args.out / "models" / f"{name}-{seed}")
                result.write_text(json.dumps(found))
    rows = collect(args.out, list(variants), baseline)
    (args.out / "table.json").write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1))
    show(rows, baseline)
    draw(rows, baseline, args.out / "frontier.svg")


def run(task: str, study: dict[str, Any], variant: dict[str, Any], seed: int, out: Path) -> dict[str, Any]:
    """One training; what the table and its reader need of it."""
    if task != "bert":
        found = tasks.run(task, study, variant, seed)
        print(f"{out.name}: {found['eval_loss']:.4f} in {found['seconds']:.0f} s", flush=True)
        return found
    given = {f"optimizer.{key}": value for key, value in variant.items()}
    summary = run_virtual(parse(study, {**given, "train.seed": seed}), out, Display(Console(quiet=True), quiet=True))
    print(f"{out.name}: {summary.eval_loss:.4f} in {summary.seconds:.0f} s", flush=True)
    kept = ("eval_loss", "seconds", "share_of_16bit", "parameters", "workers", "steps", "skipped_steps", "versions")
    return {name: getattr(summary, name) for name in kept} | {"recipe": summary.recipe}


def collect(folder: Path, variants: list[str], baseline: str) -> list[dict[str, Any]]:
    """Mean and spread of every variant, and its paired gap to the baseline over the seeds that both have."""
    losses: dict[str, dict[int, float]] = {name: {} for name in variants}
    shares = {}
    for name in variants:
        for path in folder.glob(f"{name}-*.json"):
            if not path.stem.removeprefix(f"{name}-").isdigit():
                continue  # of a variant whose name begins with this one's
            found = json.loads(path.read_text())
            losses[name][found["recipe"]["train"]["seed"]] = found["eval_loss"]
            shares[name] = found["share_of_16bit"]
    rows = []
    for name, by_seed in losses.items():
        if not by_seed:
            continue
        gaps = [loss - losses[baseline][seed] for seed, loss in by_seed.items() if seed in losses[baseline]]
        rows.append(
            {
                "variant": name,
                "losses": dict(sorted(by_seed.items())),
                "mean": statistics.mean(by_seed.values()),
                "spread": statistics.stdev(by_seed.values()) if len(by_seed) > 1 else None,
                "gap": statistics.mean(gaps) if gaps else None,
                "gap_spread": statistics.stdev(gaps) if len(gaps) > 1 else None,
                "share_of_16bit": shares[name],
            }
        )
    return rows


def draw(rows: list[dict[str, Any]], baseline: str, path: Path) -> None:
    """Loss against bytes, one point with its spread per variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        less, spread = 1 / row["share_of_16bit"], row["spread"] or 0.0
        marker = "s" if row["variant"] == baseline else "o"
        axes.errorbar(less, row["mean"], yerr=spread, fmt=marker, capsize=3)
        axes.annotate(row["variant"], (less, row["mean"]), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 4, 8, 16], ["1", "1/2", "1/4", "1/8", "1/16"])
    axes.minorticks_off()
    axes.set_xlabel("payload of the whole run, in parts of a 16-bit all-reduce of every step")
    axes.set_ylabel("held-out loss, mean and standard deviation over seeds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def show(rows: list[dict[str, Any]], baseline: str) -> None:
    table = Table("variant", "held-out loss by seed", "mean", f"gap to {baseline}", "bytes of 16-bit")
    for row in rows:
        gap = "-" if row["gap"] is None else f"{row['gap']:+.4f}"
        gap += "" if row["gap_spread"] is None else f" ± {row['gap_spread']:.4f}"
        by_seed = " ".join(f"{loss:.4f}" for loss in row["losses"].values())
        table.add_row(row["variant"], by_seed, f"{row['mean']:.4f}", gap, f"1/{1 / row['share_of_16bit']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
