"""Random bits changed on the wire under `Checked`, in single collectives and in the middle of training."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import onebit
from onebit.checked import Checked
from onebit.comm import Comm
from onebit.errors import CommError

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from test_checked import KINDS, SENT, Flipping, all_four, damaged_step, same

FORMS = ("1 bit", "2 or 3 bits", "up to 32 bits in a row", "many bits")
TRAINING_EVERY = 10  # of so many flips one is in the middle of training


def bits_of(form: str, chance: random.Random) -> tuple[int, ...]:
    """Which bits of a message are changed."""
    start = chance.randrange(2**20)
    if form == "1 bit":
        return (start,)
    if form == "2 or 3 bits":
        return (start, *(chance.randrange(2**20) for _ in range(chance.randrange(1, 3))))
    if form == "up to 32 bits in a row":
        pattern = chance.randrange(2**31)
        return tuple(start + i for i in range(32) if (2 * pattern + 1) >> i & 1)
    return tuple(start + chance.randrange(2**14) for _ in range(chance.randrange(4, 400)))


def in_a_collective(chance: random.Random, form: str) -> tuple[str, str]:
    """What became of one flip, and in what it was. "many bits" only in messages: statements promise no more."""
    n, size, bits = chance.randrange(2, 5), chance.randrange(3000), bits_of(form, chance)
    messages = [i for i in range(len(SENT)) if form != "many bits" or i in (0, 1, 4, 6)]
    at, worker, row = chance.choice(messages), chance.randrange(n), chance.randrange(n)

    def work(comm: Comm) -> str:
        flipping = Flipping(comm, at, worker, row, bits)
        right = all_four(comm, size)
        try:
            return "put right" if all_four(Checked(flipping), size) == right else "missed"
        except CommError as error:
            return str(error)

    return _verdict(onebit.run_workers(n, work)), SENT[at]


def in_training(chance: random.Random, form: str, name: str, right: Any) -> tuple[str, str]:
    """The same in one step of a training with two workers, which is then repeated."""
    step, bits, worker = chance.randrange(1, 9), bits_of(form, chance), chance.randrange(2)
    at = chance.randrange(right[0][2][step])
    found = onebit.run_workers(2, lambda comm: damaged_step(comm, name, step, at, worker, bits))
    ends = [end[0] for end in found]
    ends_right = all(end is None for end in ends) or same(ends, [end[0] for end in right])
    verdict = _verdict(["put right" if end[1] is None else end[1] for end in found])
    return verdict if ends_right else "missed", f"a step of {name}"


def _verdict(said: list[str]) -> str:
    """All workers must say the same."""
    if len(set(said)) > 1 or "missed" in said:
        return "missed"
    return "put right" if said[0] == "put right" else "detected"


def flips(count: int, seconds: float, seed: int) -> dict[str, Any]:
    """So many of them, or as many as there is time for; the figures."""
    logging.getLogger("onebit").setLevel(logging.ERROR)  # each flip that is put right is one line
    end, found, places, missed = time.monotonic() + seconds, Counter[str](), Counter[str](), []
    right = {name: onebit.run_workers(2, lambda comm, n=name: damaged_step(comm, n, -1, 0, 0, ())) for name in KINDS}
    for number in range(count):
        if time.monotonic() > end:
            break
        chance = random.Random(f"{seed} {number}")
        if number % TRAINING_EVERY:
            form = chance.choice(FORMS)
            verdict, place = in_a_collective(chance, form)
        else:
            name, form = chance.choice(list(KINDS)), chance.choice(FORMS[:3])
            verdict, place = in_training(chance, form, name, right[name])
        found[verdict] += 1
        places[place] += 1
        if verdict == "missed":
            missed.append({"number": number, "form": form, "in": place})
    return {
        "flips": found.total(),
        **{verdict: found[verdict] for verdict in ("detected", "put right", "missed")},
        "in": dict(places.most_common()),
        "cases missed": missed,
    }
