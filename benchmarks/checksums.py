"""What checksums cost: time per step with `Checked` and without, and of a comparison of all weights, in turns.

    python benchmarks/checksums.py [--parameters 4000000] [--workers 2] [--steps 40]

Gloo processes on this machine, one torch thread each; gradients are given, so a step is the optimizer's alone.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

import onebit
from onebit.checked import Checked, check_replicas
from onebit.checks import fingerprints
from onebit.comm import Comm

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from processes import run_processes

WIDTH = 500  # layers are WIDTH x WIDTH


def measure(comm: Comm, parameters: int, steps: int) -> dict[str, float]:
    """Medians in ms: a step of each stage with each comm, and the comparison."""
    shapes = max(1, parameters // WIDTH**2) * [(WIDTH, WIDTH)]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    made = {}
    for name, used in (("without", comm), ("with", Checked(comm))):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        optimizer = onebit.OneBitLamb(params, lr=1e-3, freeze_step=steps, warmup_transport="fp32", comm=used)
        made[name] = params, optimizer
    times: dict[str, list[float]] = {}
    generator.manual_seed(comm.rank)
    for step in range(2 * steps):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        for name in sorted(made, reverse=step % 2 == 0):
            params, optimizer = made[name]
            for p, g in zip(params, gradients, strict=True):
                p.grad = g.clone()
            stage = optimizer.stage.value
            comm.all_gather_bytes(b"")  # all begin together
            began = time.perf_counter()
            optimizer.step()
            if step not in (0, steps - 1, steps):  # set-up, the switch, the first step after it
                times.setdefault(f"{stage} {name}", []).append(1e3 * (time.perf_counter() - began))
        params = made["with"][0]
        comm.all_gather_bytes(b"")
        began = time.perf_counter()
        check_replicas(comm, "replicas", fingerprints(params, [f"layer {i}" for i in range(len(params))]))
        times.setdefault("comparison", []).append(1e3 * (time.perf_counter() - began))
    assert all(torch.equal(a, b) for a, b in zip(made["with"][0], made["without"][0], strict=True))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=4_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of each stage")
    options = parser.parse_args()
    results = run_processes(options.workers, measure, options.parameters, options.steps, timeout_s=600)
    for name in results[0]:
        print(f"{name:22} {max(result[name] for result in results):8.2f} ms")


if __name__ == "__main__":
    main()
