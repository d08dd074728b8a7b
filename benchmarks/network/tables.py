"""Rows of the comparison as whole runs, and as tables in Markdown.

python benchmarks/network/tables.py benchmarks/results/network-DATE.jsonl   # the tables of every run in it
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not part of the package

from benchmarks.network.rows import METHODS, Method

SIXTEEN_BITS = ("ddp-bf16", "ddp-fp16")
Record = dict[str, Any]


def methods(rows: Sequence[Record], known: Sequence[Method]) -> list[Record]:
    """A record for each method and each network and rate whose rows were measured: seconds per step end to end."""
    found = []
    for place in {(r["hosts"], r["workers_per_host"], r["mbit"]): None for r in rows}:
        here = {r["row"]: r for r in rows if (r["hosts"], r["workers_per_host"], r["mbit"]) == place}
        for method in known:
            if method.main not in here or (method.warmup and method.warmup not in here):
                continue
            record = {"kind": "method", **dict(zip(("hosts", "workers_per_host", "mbit"), place, strict=True))}
            record |= {"method": method.name, "warmup": method.warmup, "main": method.main, "share": method.share}
            reasons = [here[r]["failed"] for r in (method.main, method.warmup) if r and "failed" in here[r]]
            found.append({**record, "failed": reasons[0]} if reasons else record | _whole(method, here))
    return found


def _whole(method: Method, here: dict[str, Record]) -> Record:
    """Seconds and wire bytes per step of a whole run, and how they compare with DDP's faster 16-bit hook."""
    main, first = here[method.main], here[method.warmup or method.main]
    share = method.share if method.warmup else 0.0
    base = sixteen_bit(here)
    whole = share * first["step_s"][1] + (1 - share) * main["step_s"][1]
    record: Record = {"warmup_step_s": first["step_s"][1] if method.warmup else None, "step_s": main["step_s"][1]}
    record |= {"end_to_end_step_s": whole, "wire_bytes": wire(main)}
    if base is not None:
        record["sixteen_bit"] = base["row"]
        record["speed_up_of_the_stage"] = base["step_s"][1] / main["step_s"][1]
        record["speed_up_end_to_end"] = base["step_s"][1] / whole
        record["wire_share_of_16_bit"] = wire(main) / wire(base)
    return record


def sixteen_bit(here: dict[str, Record]) -> Record | None:
    """What the others are measured against: the faster of DDP's two 16-bit hooks; None if there is none."""
    found = [here[name] for name in SIXTEEN_BITS if "failed" not in here.get(name, {"failed": ""})]
    return min(found, key=lambda row: float(row["step_s"][1]), default=None)


def wire(row: Record) -> float:
    """Bytes sent per host and step, the mean over the hosts."""
    return statistics.fmean(row["wire_sent_per_host_step"])


def table(rows: Sequence[Record], known: Sequence[Method]) -> str:
    """Two tables of one network at one rate: the rows, and the whole runs."""
    first = rows[0]
    rated = "unlimited" if first["mbit"] is None else f"{first['mbit']:g} Mbit/s"
    lines = [f"\n### {first['hosts']} hosts, {first['workers_per_host']} per host, {rated}\n"]
    head = "step, ms (quartiles) | over compute, ms | in collectives, ms | samples/s"
    lines += [f"| row | {head} | payload, MB | wire, MB | of 16-bit |", "| --- " * 8 + "|"]
    here = {row["row"]: row for row in rows}
    lines += [_row_line(row, here) for row in rows]
    lines += ["", "| run | warm-up step, ms | step, ms | against DDP 16-bit | end to end, ms | against DDP 16-bit |"]
    lines += ["| --- " * 6 + "|"]
    for m in methods(rows, known):
        if "failed" in m:
            lines.append(f"| {m['method']} | failed: {m['failed']} |" + " |" * 4)
            continue
        before = "-" if m["warmup_step_s"] is None else f"{1e3 * m['warmup_step_s']:.0f}"
        stage, whole = (
            f"{m[key]:.2f}x" if key in m else "-" for key in ("speed_up_of_the_stage", "speed_up_end_to_end")
        )
        end = f"{1e3 * m['end_to_end_step_s']:.0f}"
        lines.append(f"| {m['method']} | {before} | {1e3 * m['step_s']:.0f} | {stage} | {end} | {whole} |")
    return "\n".join(lines)


def _row_line(row: Record, here: dict[str, Record]) -> str:
    if "failed" in row:
        return f"| {row['row']} | failed: {row['failed']} |" + " |" * 6
    low, middle, high = (1e3 * value for value in row["step_s"])
    alone, base = here.get("compute", {"failed": ""}), sixteen_bit(here)
    over = "-" if "failed" in alone else f"{middle - 1e3 * alone['step_s'][1]:.0f}"
    waited = "-" if row["in_collectives_s"] is None else f"{1e3 * row['in_collectives_s'][1]:.0f}"
    share = "-" if base is None or not row["payload_bytes_per_host_step"] else _share(wire(row) / wire(base))
    payload = f"{row['payload_bytes_per_host_step'] / 1e6:.2f}"
    return (
        f"| {row['row']} | {middle:.0f} ({low:.0f}-{high:.0f}) | {over} | {waited} | {row['samples_per_s']:.1f} "
        f"| {payload} | {wire(row) / 1e6:.2f} | {share} |"
    )


def _share(ratio: float) -> str:
    return f"1/{1 / ratio:.1f}" if ratio < 0.95 else f"{ratio:.2f}"


def main() -> None:
    for name in sys.argv[1:]:
        run: list[Record] = []
        for record in [*map(json.loads, Path(name).read_text().splitlines()), {"kind": "run"}]:
            if record["kind"] == "run":  # the tables of the run before
                for mbit in dict.fromkeys(row["mbit"] for row in run):
                    print(table([row for row in run if row["mbit"] == mbit], METHODS))
                run = []
            elif record["kind"] == "row":
                run.append(record)


if __name__ == "__main__":
    main()
