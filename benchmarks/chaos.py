"""Faults by the hundred: processes that are killed, malformed recipes, texts and checkpoints, bits changed on the wire.

    python benchmarks/chaos.py [--kills 200] [--malformed 1500] [--flips 3000] [--minutes 25] [--json FILE]

Kills: runs of `onebit train` on this machine, each killed several times; all must end with the losses of a run that
nobody disturbed, to the bit. Malformed: each works or is one error that changes nothing (tests/malformed.py). Flips:
each is detected on all workers or put right (`onebit.checked`). With --json the figures go into a file; parts that were
not asked for stay there as they are. Ends with status 1 where anything was not as it should be.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from chaos_flips import flips as flip_bits
from chaos_kills import Campaign
from malformed import Broken, recipes, texts, try_recipe, try_text
from malformed_checkpoints import checkpoints, try_checkpoint

KINDS: dict[str, tuple[Callable[[], Any], Callable[..., str], float]] = {
    "recipes": (recipes, try_recipe, 0.4),
    "texts": (texts, try_text, 0.2),
    "checkpoints": (checkpoints, try_checkpoint, 0.4),
}
"""How each is made, its law, and its share."""


def malformed(count: int, seconds: float, seed: int) -> dict[str, Any]:
    """Try so many, or as many as there is time for; the figures."""
    logging.getLogger("onebit").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for kind, (_, _, share) in KINDS.items():
        found[kind] = _tried(kind, max(1, round(share * count)), time.monotonic() + share * seconds, seed)
    return {"tried": sum(part["tried"] for part in found.values()), **found}


def _tried(kind: str, count: int, until: float, seed: int) -> dict[str, Any]:
    """Of one kind."""
    make, law, _ = KINDS[kind]
    ends: Counter[str] = Counter()
    faults: list[str] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(make())
    def attempt(case: Any) -> None:
        if time.monotonic() > until:
            return
        with tempfile.TemporaryDirectory() as folder:
            try:
                ends[law(case, Path(folder))] += 1
            except Broken as error:
                ends["broken"] += 1
                faults.append(str(error)[:300])

    attempt()
    return {"tried": ends.total(), **{end: ends[end] for end in ("works", "refused", "broken")}, "faults": faults}


def wrong(found: dict[str, Any]) -> list[str]:
    """What was not as it should be."""
    said = [f"a killed run: {fault}" for fault in found.get("kills", {}).get("faults", [])]
    for kind in KINDS:
        said += [f"{kind}: {fault}" for fault in found.get("malformed", {}).get(kind, {}).get("faults", [])]
    return said + [f"a flip was missed: {case}" for case in found.get("flips", {}).get("cases missed", [])]


def main(
    kills: Annotated[int, typer.Option(help="Processes to kill.")] = 200,
    malformed_count: Annotated[int, typer.Option("--malformed", help="Recipes, texts and checkpoints in all.")] = 1500,
    flips: Annotated[int, typer.Option(help="Damaged messages.")] = 3000,
    minutes: Annotated[float, typer.Option(help="For everything; what is not reached is reported as it is.")] = 25,
    seed: Annotated[int, typer.Option(help="Another seed, other faults.")] = 0,
    jobs: Annotated[int, typer.Option(help="Runs at the same time, while processes are killed.")] = 2,
    file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Inject faults and count what becomes of them."""
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * minutes
    found: dict[str, Any] = {}
    if flips:
        found["flips"] = flip_bits(flips, 60 * minutes / 8, seed)
    if malformed_count:
        found["malformed"] = malformed(malformed_count, 60 * minutes / 6, seed)
    if kills:
        found["kills"] = Campaign(kills, end - time.monotonic(), seed, jobs).run()
    found["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "seed": seed}
    if file is not None:
        before = json.loads(file.read_text()) if file.exists() else {}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(before | found, indent=1) + "\n")
    shown = {part: {key: value for key, value in found[part].items() if key != "cases"} for part in found}
    print(json.dumps(shown, indent=1))
    if said := wrong(found):
        print(*said, sep="\n", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
