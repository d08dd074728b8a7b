"""Time the optimizers' steps on one worker, network excluded, against a copy of the same memory.

    python benchmarks/step.py [--elements N] [--threads N] [--repeats N] [--json]

Each figure is the median over interleaved repeats, in nanoseconds per element; "copies" is that time in units of a
float32 copy of the same number of elements, timed in the same run (8 bytes of traffic per element).
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn

import onebit


def bert_shapes(elements: int) -> list[tuple[int, ...]]:
    """BERT-Large's mix of layers, whole blocks until `elements` is reached."""
    width, shapes, total = 1024, [], 0
    block = [(width, width), (width,)] * 4 + [(4 * width, width), (4 * width,), (width, 4 * width)] + [(width,)] * 5
    while total < elements:
        shapes += block
        total += sum(torch.Size(shape).numel() for shape in block)
    return shapes


def measure(elements: int, repeats: int) -> dict[str, dict[str, float]]:
    shapes = bert_shapes(elements)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    generator = torch.Generator().manual_seed(0)

    def parameters() -> list[nn.Parameter]:
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        return params

    source, target = torch.randn(count, generator=generator), torch.empty(count)
    compressed = onebit.OneBitLamb(parameters(), freeze_step=1)
    compressed.step()
    runs = {
        "copy": lambda: target.copy_(source),
        "Lamb": onebit.Lamb(parameters()).step,
        "OneBitLamb, compressed stage": compressed.step,
        "torch.optim.AdamW, fused": torch.optim.AdamW(parameters(), fused=True).step,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        name: {"ns_per_element": median / count * 1e9, "copies": median / medians["copy"]}
        for name, median in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = measure(args.elements, args.repeats)
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{args.elements:,} elements or a little more, {args.threads} thread(s), torch {torch.__version__}")
    for name, row in results.items():
        print(f"{name:32s} {row['ns_per_element']:8.2f} ns/element {row['copies']:8.1f} copies")


if __name__ == "__main__":
    main()
