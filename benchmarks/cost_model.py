"""The cost model against what the papers report: predicted, published, error.

    python benchmarks/cost_model.py            # the tables of docs/cost_model.md
    python benchmarks/cost_model.py --json

Sources: [A] 1-bit Adam, arXiv 2102.02888, its profiling table of BERT-Large at sequence length 128; [B] the blog post
that introduced 1-bit Adam, 2020-09-09, whose samples per second are read off its charts, within 5 %; [L] 1-bit LAMB,
arXiv 2104.06069; [Z] 0/1 Adam, arXiv 2202.06009.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, replace

from onebit.planner import METHODS, all_reduce_s, cost, step_time, steps_of
from onebit.planner_inputs import Model, Network, Run, Setup, Work, transformer_shapes

MODEL = Model(transformer_shapes(336_000_000))  # BERT-Large
ADAM, ONE_BIT_ADAM = METHODS["ddp-16bit"], METHODS["onebit-adam-paper"]
LAMB, ONE_BIT_LAMB = METHODS["lamb-16bit"], METHODS["onebit-lamb-paper"]
ZERO_ONE = METHODS["zero-one-adam"]

# published
ETHERNET_GBIT_S = 4.1  # iperf, [A]
INFINIBAND_GBIT_S = 32.0  # near peak, [B]
V100_GBYTE_S = 900.0  # the vendor's figure

# fitted, each on the one row named
PCIE_GBIT_S = 33.64  # [A] Ethernet, 1 machine of 4 GPUs
NVLINK_GBIT_S = 334.6  # [A] InfiniBand, 1 machine of 8 GPUs
KERNEL_FACTOR = 6.155  # [B] Ethernet, 32 GPUs, 1-bit Adam

# seconds of forward and backward, by samples per GPU: [A], Ethernet, 64 GPUs: 70.28 ms for 1, 96.52 ms for 16
PER_SAMPLE_S = (0.09652 - 0.07028) / 15
FIRST_SAMPLE_S = 0.07028
STEP_S = 0.0756  # the column "step" of [A], Ethernet; it is what the optimizer's update takes there

# network, machines, GPUs, samples per GPU and micro-batch, micro-batches, forward, all-reduce, backward, step: ms, [A]
PROFILE = [
    ("Ethernet", 16, 64, 1, 1, 36.65, 2205.86, 33.63, 74.96),
    ("Ethernet", 16, 64, 16, 1, 35.71, 2275.43, 60.81, 75.59),
    ("Ethernet", 16, 64, 16, 4, 137.80, 2259.36, 243.72, 74.92),
    ("Ethernet", 8, 32, 16, 1, 37.91, 2173.35, 60.71, 75.63),
    ("Ethernet", 4, 16, 16, 1, 36.94, 2133.24, 62.82, 76.85),
    ("Ethernet", 2, 8, 16, 1, 34.95, 1897.21, 61.23, 75.26),
    ("Ethernet", 1, 4, 16, 1, 35.99, 239.76, 59.95, 74.21),
    ("InfiniBand", 8, 64, 1, 1, 25.36, 316.18, 23.25, 58.49),
    ("InfiniBand", 8, 64, 16, 1, 32.81, 336.40, 59.99, 57.79),
    ("InfiniBand", 8, 64, 16, 4, 131.04, 339.52, 237.92, 56.91),
    ("InfiniBand", 4, 32, 16, 1, 33.45, 297.28, 56.81, 57.98),
    ("InfiniBand", 2, 16, 16, 1, 32.86, 183.74, 56.49, 58.60),
    ("InfiniBand", 1, 8, 16, 1, 32.74, 28.18, 59.73, 57.29),
]

# network, GPUs, samples per second of Adam and of 1-bit Adam in its compressed stage, [B]
CHART = [
    ("Ethernet", 8, 45, 245),
    ("Ethernet", 16, 88, 450),
    ("Ethernet", 32, 132, 870),
    ("InfiniBand", 8, 290, 425),
    ("InfiniBand", 16, 545, 915),
    ("InfiniBand", 32, 850, 1710),
]


@dataclass(frozen=True)
class Check:
    """One figure. `role`: "held out", or "fitted", when a constant above was set by it, or "not reproduced"."""

    group: str
    what: str
    predicted: float
    published: float
    unit: str
    role: str = "held out"

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def network(kind: str, workers: int, per_machine: int, all_reduce: str) -> Network:
    """One of the clusters; no overlap is counted anywhere, since the papers report all-reduce beside compute."""
    fast = kind == "InfiniBand"
    return Network(
        workers,
        per_machine,
        INFINIBAND_GBIT_S if fast else ETHERNET_GBIT_S,
        latency_us=5.0 if fast else 50.0,
        local_gbit_s=NVLINK_GBIT_S if fast else PCIE_GBIT_S,
        all_reduce="by-machine" if all_reduce == "by-machine" else "ring",
    )


def setup(
    net: Network, samples: int, accumulation: int = 1, steps: int = 1000, warmup: float = 0.15, sequences: float = 1.0
) -> Setup:
    """A run of BERT-Large. `sequences`: how many of 128 tokens a sample is as long as."""
    micro = FIRST_SAMPLE_S + PER_SAMPLE_S * (samples * sequences - 1)
    work = Work(
        micro, accumulation, samples, other_s=STEP_S, overlap=0.0, memory_gbyte_s=V100_GBYTE_S,
        kernel_factor=KERNEL_FACTOR, int8_factor=KERNEL_FACTOR, int4_factor=KERNEL_FACTOR, local_factor=KERNEL_FACTOR,
        low_rank_factor=KERNEL_FACTOR,
    )  # fmt: skip
    return Setup(MODEL, net, work, Run(steps, warmup_share=warmup))


def stage_s(where: Setup, compressed: bool, lamb: bool = False) -> float:
    """Seconds of a step in the compressed stage, or of one in 16 bits.

    The optimizer's update is in the column "step" of the papers' table already.
    """
    method = {(True, True): ONE_BIT_LAMB, (True, False): ONE_BIT_ADAM, (False, True): LAMB}.get(
        (compressed, lamb), ADAM
    )
    kind = steps_of(where, method)[-1][1]
    time = step_time(where, kind)
    return time.total_s - time.update_s


def profile() -> list[Check]:
    """The 13 cluster set-ups: milliseconds of the all-reduce."""
    found = []
    for kind, machines, gpus, samples, accumulation, _, published, _, _ in PROFILE:
        net = network(kind, gpus, gpus // machines, "ring" if kind == "Ethernet" else "by-machine")
        name = f"{kind}, {machines} x {gpus // machines} GPUs, {samples} x {accumulation} samples"
        predicted = all_reduce_s(net, 2 * MODEL.parameters) * 1e3
        role = "fitted" if machines == 1 else "held out"
        found.append(Check("all-reduce in 16 bits [A]", name, predicted, published, "ms", role))
    return found


def chart() -> list[Check]:
    """The samples per second of the blog post: 16 per GPU, 4 GPUs per machine on both networks."""
    found = []
    for kind, gpus, adam, one_bit in CHART:
        where = setup(network(kind, gpus, 4, "ring"), 16)
        for name, published, compressed in (("Adam", adam, False), ("1-bit Adam, compressed stage", one_bit, True)):
            predicted = gpus * 16 / stage_s(where, compressed)
            fitted = kind == "Ethernet" and gpus == 32 and compressed
            what = f"{kind}, {gpus} GPUs, {name}"
            role = "fitted" if fitted else "held out"
            found.append(Check("samples per second [B]", what, predicted, published, "1/s", role))
    return found


def volume() -> list[Check]:
    """Reductions of volume: counted bytes of 16-bit all-reduce over those of the run."""
    net = network("Ethernet", 256, 4, "ring")
    found = []
    for what, method, steps, warmup, published in (
        ("1-bit LAMB, warm-up 1000 of 5993 steps [L]", ONE_BIT_LAMB, 5993, 1000 / 5993, 4.6),
        ("1-bit LAMB, warm-up 107 of 555 steps [L]", ONE_BIT_LAMB, 555, 107 / 555, 4.1),
        ("1-bit Adam, warm-up 15 % [A]", ONE_BIT_ADAM, 1000, 0.15, 5.0),
        ("1-bit Adam, SQuAD, warm-up 25 % [B]", ONE_BIT_ADAM, 1000, 0.25, 3.4),
    ):
        share = cost(setup(net, 16, steps=steps, warmup=warmup), method).share_of_16bit
        found.append(Check("volume", what, 1 / share, published, "x"))
    for_zero = setup(replace(net, workers=128), 16, steps=152_511, warmup=12_500 / 152_511)
    one_bit = cost(setup(replace(net, workers=128), 16, steps=152_511, warmup=23_000 / 152_511), ONE_BIT_ADAM)
    zero = cost(for_zero, ZERO_ONE)
    less = 1 - zero.payload_bytes / one_bit.payload_bytes
    found.append(Check("volume", "0/1 Adam, less than 1-bit Adam [Z]", 100 * less, 87.0, "%"))
    found.append(Check("volume", "0/1 Adam over Adam [Z]", 1 / zero.share_of_16bit, 26.0, "x"))
    local = dict((name, count) for name, count, _, _ in zero.kinds)["local"]
    found.append(Check("volume", "0/1 Adam, fewer rounds [Z]", 100 * local / 152_511, 54.0, "%"))
    return found


def speed() -> list[Check]:
    """How many times as fast a stage or a run is."""
    at_256, at_32 = network("Ethernet", 256, 4, "ring"), network("Ethernet", 32, 4, "ring")
    found = []

    def add(what: str, where: Setup, stage: float | None, whole: tuple[float, float] | None, lamb: bool) -> None:
        ratio = stage_s(where, False, lamb) / stage_s(where, True, lamb)
        if stage is not None:
            found.append(Check("speed-up", f"{what}, compressed stage", ratio, stage, "x"))
        if whole is not None:
            warmup, published = whole
            found.append(Check("speed-up", f"{what}, whole run", 1 / (warmup + (1 - warmup) / ratio), published, "x"))

    add("1-bit LAMB, 256 GPUs, batch 8K [L]", setup(at_256, 32), 4.5, (1000 / 5993, 2.8), True)
    add("1-bit Adam, 256 GPUs, batch 4K [A]", setup(at_256, 16), None, (0.15, 3.3), False)
    add("1-bit Adam, 32 GPUs, Ethernet [B]", setup(at_32, 16), 6.6, (0.15, 3.5), False)
    add("1-bit Adam, 32 GPUs, InfiniBand [B]", setup(network("InfiniBand", 32, 4, "ring"), 16), 2.0, None, False)
    add("SQuAD, 32 GPUs, Ethernet, 3 x 384 tokens [B]", setup(at_32, 3, sequences=3.0), 6.2, (0.25, 2.7), False)
    return found


def minutes() -> list[Check]:
    """BERT-Large on 256 GPUs, Ethernet, [L]: batch 64K for 5993 steps, then 32K with 512 tokens for 555."""

    def run(gbit_s: float, compressed: bool) -> float:
        net = replace(network("Ethernet", 256, 4, "ring"), link_gbit_s=gbit_s)
        total = 0.0
        for steps, warmup, samples, accumulation, sequences in ((5993, 1000, 64, 4, 1.0), (555, 107, 16, 8, 4.0)):
            where = setup(net, samples, accumulation, steps, warmup / steps, sequences)
            full, after = stage_s(where, False, True), stage_s(where, compressed, True)
            total += warmup * full + (steps - warmup) * after
        return total / 60

    found = [
        Check("minutes", "LAMB [L]", run(ETHERNET_GBIT_S, False), 731.0, "min", "not reproduced"),
        Check("minutes", "1-bit LAMB [L]", run(ETHERNET_GBIT_S, True), 351.0, "min", "not reproduced"),
    ]
    ratio = found[0].predicted / found[1].predicted
    found.append(Check("minutes", "LAMB over 1-bit LAMB [L]", ratio, 2.083, "x"))
    low, high = 0.1, ETHERNET_GBIT_S
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if run(middle, False) > 731 else (low, middle)
    found.append(Check("minutes", f"LAMB, at {high:.2f} Gbit/s [L]", run(high, False), 731.0, "min", "fitted"))
    found.append(Check("minutes", f"1-bit LAMB, at {high:.2f} Gbit/s [L]", run(high, True), 351.0, "min"))
    return found


def checks() -> list[Check]:
    """All of them."""
    return [*profile(), *chart(), *volume(), *speed(), *minutes()]


def verdicts(all_checks: list[Check]) -> tuple[int, list[str]]:
    """How many published pairs differ by over 20 %, and those of them in which the model has the other one faster."""
    rates = [c for c in all_checks if c.group.startswith("samples")]
    ratios = [
        (b.what, b.published / a.published, b.predicted / a.predicted)
        for a, b in zip(rates[::2], rates[1::2], strict=True)
    ]
    ratios += [(c.what, c.published, c.predicted) for c in all_checks if c.group == "speed-up"]
    clear = [(what, told, found) for what, told, found in ratios if max(told, 1 / told) > 1.2]
    return len(clear), [what for what, told, found in clear if (told > 1) != (found > 1)]


def other_all_reduce() -> dict[str, float]:
    """The largest error of the table's rows of several machines, had the other kind of all-reduce been chosen."""
    worst = {}
    for kind, machines, gpus, _, _, _, published, _, _ in PROFILE:
        if machines > 1:
            net = network(kind, gpus, gpus // machines, "by-machine" if kind == "Ethernet" else "ring")
            error = all_reduce_s(net, 2 * MODEL.parameters) * 1e3 / published - 1
            worst[kind] = max(worst.get(kind, 0.0), error, key=abs)
    return worst


def tables(all_checks: list[Check]) -> str:
    """Markdown, as it stands in docs/cost_model.md."""
    lines = []
    for group in dict.fromkeys(c.group for c in all_checks):
        lines += [f"| {group} | predicted | published | error | |", "| --- | --- | --- | --- | --- |"]
        lines += [
            f"| {c.what} | {c.predicted:.4g} {c.unit} | {c.published:.6g} {c.unit} "
            f"| {round(100 * c.error):+d} % | {c.role} |"
            for c in all_checks
            if c.group == group
        ]
        lines.append("")
    held = [abs(c.error) for c in all_checks if c.role == "held out"]
    over = [c.what for c in all_checks if c.role == "held out" and abs(c.error) > 0.35]
    missed = [c for c in all_checks if c.role == "not reproduced"]
    whole = [*held, *(abs(c.error) for c in missed)]
    pairs, wrong = verdicts(all_checks)
    others = ", ".join(f"{kind} {error:+.0%}" for kind, error in other_all_reduce().items())
    lines.append(
        f"Held out: {len(held)} figures, median error {statistics.median(held):.1%}, worst {max(held):.1%}; over 35 %: "
        f"{'; '.join(over) or 'none'}. Not reproduced: {'; '.join(c.what for c in missed)}; with them median "
        f"{statistics.median(whole):.1%}, worst {max(whole):.1%}. Wrong verdicts on which is faster, of "
        f"{pairs}: {len(wrong)}. With the other kind of all-reduce the worst row of several machines: {others}."
    )
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    found = checks()
    if parser.parse_args().json:
        print(json.dumps([asdict(c) | {"error": c.error} for c in found], indent=1))
    else:
        print(tables(found))


if __name__ == "__main__":
    main()
