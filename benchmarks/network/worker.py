"""One worker of the comparison: does what compare.py tells it, a line of JSON at a time. Not for the command line.

{"do": "build", "row": NAME}              -> {"unit": steps that belong together}
{"do": "steps", "row": NAME, "count": N}  -> {"seconds", "compute", "waited": [per unit, mean of its steps], "payload",
                                              "exchanged": [seconds, of these hidden behind compute]}
{"do": "drop", "row": NAME}               -> {}
{"do": "profile", "row": NAME, "count": N} -> {"table": where the time of N steps goes}
An answer starts with ANSWER; it is {"error": reason} where the row failed.
"""

from __future__ import annotations

import cProfile
import gc
import io
import json
import os
import pstats
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not part of the package

import torch
import torch.distributed as dist

ANSWER = "@ "


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.pop("patience_s")))
    from benchmarks.network.rows import ROWS, Bench, Row, fingerprint

    bench = Bench(per_host=int(os.environ["LOCAL_WORLD_SIZE"]), **options)
    rows: dict[str, Row] = {}
    answer({"elements": bench.elements})
    for line in sys.stdin:
        order = json.loads(line)
        name = order["row"]
        try:
            if order["do"] == "build":
                rows[name] = ROWS[name](bench)
                answer({"unit": rows[name].unit, "weights": fingerprint(list(bench.plain.parameters()))})
            elif order["do"] == "steps":
                answer(steps(rows[name], order["count"]))
            elif order["do"] == "profile":
                answer({"table": profile(rows[name], order["count"])})
            else:
                rows.pop(name, None)
                gc.collect()
                answer({})
        except Exception as error:  # whatever a row raises is its result
            answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"})


def answer(content: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(content), flush=True)


def steps(row: Any, count: int) -> dict[str, Any]:
    """Time `count` steps, a multiple of the row's unit."""
    seconds, compute, waited = [], [], []
    payload = row.payload() if row.payload else 0
    exchanged = row.exchanged() if row.exchanged else (0.0, 0.0)
    dist.barrier()
    for _ in range(count // row.unit):
        began, before = time.perf_counter(), row.waited() if row.waited else 0.0
        computed = sum(row.step() for _ in range(row.unit))
        seconds.append((time.perf_counter() - began) / row.unit)
        compute.append(computed / row.unit)
        if row.waited:
            waited.append((row.waited() - before) / row.unit)
    sent = row.payload() - payload if row.payload else row.payload_per_step * count
    now = row.exchanged() if row.exchanged else (0.0, 0.0)
    spent = [new - old for new, old in zip(now, exchanged, strict=True)]
    return {"seconds": seconds, "compute": compute, "waited": waited, "payload": sent, "exchanged": spent}


def profile(row: Any, count: int) -> str:
    """cProfile's table of `count` steps, by time in the function itself."""
    dist.barrier()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        row.step()
    profiler.disable()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).strip_dirs().sort_stats("tottime").print_stats(25)
    return out.getvalue()


if __name__ == "__main__":
    main()
