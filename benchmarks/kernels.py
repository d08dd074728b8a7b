"""Time the native kernels against a copy of memory: python benchmarks/kernels.py --threads 1

For each kernel and each whole step: nanoseconds per element, GB/s, and the ratio to the floor. The floor is the least
memory traffic that the state allows, at the speed of a large `Tensor.copy_` timed in the same rounds (its bytes read
plus its bytes written). Rounds interleave all kernels and the copy; the numbers are medians.

A step's floor counts one trip for the worker's encoding, as if its scales were known at once. "two trips" adds the 8
bytes that reading gradient and error a second time costs where they do not fit in cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebit.codec import BucketCodec, OneBit
from onebit.kernels import native
from onebit.layout import Bucket, FlatLayout

BETAS, EPS, DECAY, LR = (0.9, 0.999), 1e-6, 0.01, 1e-3


def bert_large_shapes(blocks: int) -> list[tuple[int, ...]]:
    """Part of BERT-Large: some of the embedding, and whole Transformer blocks of 12.6 M elements."""
    shapes: list[tuple[int, ...]] = [(8192, 1024), (512, 1024), (2, 1024), (1024,), (1024,)]
    for _ in range(blocks):
        shapes += [(1024, 1024), (1024,)] * 4 + [(1024,), (1024,)]
        shapes += [(4096, 1024), (4096,), (1024, 4096), (1024,), (1024,), (1024,)]
    return shapes


@dataclass
class Case:
    """One bucket with everything a step needs."""

    bucket: Bucket
    plan: native.Plan
    grads: native.TensorList
    x: native.TensorList
    hyper: Tensor
    momentum: native.Signs
    sent: native.Signs
    error: Tensor | native.Int8
    server_error: Tensor
    received: Tensor
    received_scales: Tensor
    reply: Tensor
    reply_scales: Tensor
    v_frozen: Tensor
    v_fresh: Tensor
    step: Tensor
    flat: dict[str, Tensor] = field(default_factory=dict)


def cases(args: argparse.Namespace) -> list[Case]:
    torch.manual_seed(0)
    layout = FlatLayout(bert_large_shapes(args.blocks), args.workers, bucket_elements=2**24)
    codec = OneBit() if not args.block else OneBit(scale="block", block_elements=args.block)
    state = torch.bfloat16 if args.compact else torch.float32
    dtype = getattr(torch, args.dtype)
    found = []
    for bucket in layout.buckets:
        cut = BucketCodec(bucket, codec, torch.float32, torch.device("cpu"))
        plan = native.Plan(bucket, [[(a, b - a) for a, b in spans] for spans in cut.spans], args.tile)
        n, blocks, layers = bucket.workers, sum(plan.blocks), len(plan.sizes)

        def signs(blocks: int = blocks, bucket: Bucket = bucket) -> native.Signs:
            bits = torch.randint(0, 256, (bucket.workers, bucket.chunk // 8), dtype=torch.uint8)
            return native.Signs(bits, (torch.rand(blocks) + 0.5) * 1e-5)

        # variances spread as a layer's are; the rebuilt gradients keep the fresh one near their square
        frozen = torch.exp(torch.randn(bucket.numel)) * 1e-8
        found.append(
            Case(
                bucket,
                plan,
                native.TensorList("grads", [torch.randn(s, dtype=dtype) for s in plan.sizes], plan),
                native.TensorList("x", [torch.randn(s, dtype=dtype) for s in plan.sizes], plan),
                torch.tensor([[LR, *BETAS, EPS, DECAY]], dtype=torch.float64).repeat(layers, 1),
                signs(),
                signs(),
                native.Int8.zeros(bucket) if args.compact else torch.zeros(bucket.numel),
                torch.zeros(bucket.chunk),
                torch.randint(0, 256, (n, bucket.chunk // 8), dtype=torch.uint8),
                torch.rand(n, plan.blocks[0]) + 0.5,
                torch.zeros(bucket.chunk // 8, dtype=torch.uint8),
                torch.ones(plan.blocks[0]),
                frozen.to(state),
                (frozen * torch.exp(0.3 * torch.randn(bucket.numel))).to(state),
                torch.full((layers,), 1e-9),
                {name: torch.rand(bucket.numel) * 1e-3 for name in ("g", "m", "v")},
            )
        )
    return found


def kernels(t: int) -> dict[str, Callable[[Case], object]]:
    """Every kernel as a function of a case, with t threads."""

    return {
        "worker_encode": lambda c: native.worker_encode(
            c.plan, c.grads, c.hyper, c.momentum, c.error, c.sent.bits, threads=t
        ),
        "worker_commit": lambda c: native.worker_commit(
            c.plan, c.grads, c.hyper, c.momentum, c.error, c.sent, threads=t
        ),
        "server_encode": lambda c: native.server_encode(
            c.plan, 0, c.received, c.received_scales, c.server_error, c.reply, threads=t
        ),
        "server_commit": lambda c: native.server_commit(
            c.plan, 0, c.received, c.received_scales, c.server_error, c.reply, c.reply_scales, threads=t
        ),
        "lamb_measure": lambda c: native.lamb_measure(
            c.plan, c.hyper, c.x, c.momentum, c.sent, c.v_frozen, c.v_fresh, step=1, threads=t
        ),
        "apply": lambda c: native.apply(c.plan, c.hyper, c.x, c.momentum, c.v_frozen, c.step, threads=t),
        "warmup_measure": lambda c: native.warmup_measure(
            c.plan, c.hyper, c.x, c.flat["g"], c.flat["m"], c.flat["v"], threads=t
        ),
        "warmup_apply": lambda c: native.warmup_apply(
            c.plan, c.hyper, c.x, c.flat["g"], c.flat["m"], c.flat["v"], c.step, threads=t
        ),
        "decode": lambda c: native.decode(c.plan, c.momentum, c.flat["g"], threads=t),
    }


COMPRESSED = ["worker_encode", "worker_commit", "server_encode", "server_commit"]
STEPS = {
    "1-bit LAMB step": [*COMPRESSED, "lamb_measure", "apply"],
    "1-bit Adam step": [*COMPRESSED, "apply"],
    "warm-up LAMB step": ["warmup_measure", "warmup_apply"],
}


def floors(args: argparse.Namespace) -> dict[str, float]:
    """Bytes per element of the bucket that each kernel cannot avoid, in its state's types."""
    p = 4 if args.dtype == "float32" else 2
    e, v = (1 + 4 / 128, 2) if args.compact else (4, 4)
    n = args.workers
    return {
        "worker_encode": p + e + 0.25,
        "worker_commit": p + 2 * e + 0.25,
        "server_encode": 0.125 + (4 + 0.125) / n,
        "server_commit": 0.125 + (8 + 0.125) / n,
        "lamb_measure": 2 * v + v + p + 0.25,
        "apply": 2 * p + v + 0.125,
        "warmup_measure": 12 + p,
        "warmup_apply": 20 + 2 * p,
        "decode": 4.125,
        "1-bit LAMB step": p + 2 * e + 0.5 + 8 / n + 3 * v + p + 2 * p + v,
        "1-bit Adam step": p + 2 * e + 0.5 + 8 / n + 2 * p + v + 0.125,
        "warm-up LAMB step": 4 + 16 + 3 * p + 8,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="n; the server's messages are made up")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=2, help="Transformer blocks, 12.6 M elements each")
    parser.add_argument("--block", type=int, default=0, help="elements that share a scale; 0: layer in chunk")
    parser.add_argument("--tile", type=int, default=2048)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--compact", action="store_true", help="int8 worker error, bfloat16 variances")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: on a shared machine, one thread")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    rows = cases(args)
    elements = sum(case.bucket.numel for case in rows)
    source, target = torch.rand(elements), torch.zeros(elements)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    named = kernels(args.threads)
    times: dict[str, list[float]] = {name: [] for name in ["copy", *named]}
    for turn in range(args.rounds + 1):
        for name in times:
            begin = clock()
            if name == "copy":
                target.copy_(source)
            else:
                for case in rows:
                    named[name](case)
            if turn:  # the first round touches the pages
                times[name].append(clock() - begin)
    for name, parts in STEPS.items():
        times[name] = [sum(turn) for turn in zip(*(times[part] for part in parts), strict=True)]

    copied = statistics.median(times["copy"])
    speed = 8 * elements / copied
    result = {"copy": {"ns": copied / elements * 1e9, "gb_per_s": speed / 1e9, "bytes": 8.0, "ratio": 1.0}}
    for name, least in floors(args).items():
        taken = statistics.median(times[name])
        result[name] = {
            "ns": taken / elements * 1e9,
            "gb_per_s": least * elements / taken / 1e9,
            "bytes": least,
            "ratio": taken / (least * elements / speed),
        }
        if name in ("1-bit LAMB step", "1-bit Adam step"):
            again = least + floors(args)["worker_encode"] - 0.25
            result[name]["ratio_two_trips"] = taken / (again * elements / speed)
    head = {"isa": native.isa(), "threads": args.threads, "elements": elements, "workers": args.workers}
    if args.json:
        print(json.dumps({**head, "kernels": result}, indent=1))
        return
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    print(f"{'kernel':22} {'ns/element':>10} {'GB/s':>7} {'bytes':>7} {'ratio':>6} {'two trips':>9}")
    for name, row in result.items():
        trips = f"{row['ratio_two_trips']:9.2f}" if "ratio_two_trips" in row else ""
        print(f"{name:22} {row['ns']:10.3f} {row['gb_per_s']:7.1f} {row['bytes']:7.2f} {row['ratio']:6.2f} {trips}")


if __name__ == "__main__":
    main()
