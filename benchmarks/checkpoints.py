"""What a checkpoint costs: how long training waits for it and how long it takes, written at once or beside training.

    python benchmarks/checkpoints.py [--parameters 4000000] [--workers 2] [--times 10]

Gloo processes on this machine, one torch thread each, 1-bit LAMB after its switch, files in the temporary folder.
"""

import argparse
import resource
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

import onebit
from onebit import checkpoint
from onebit.comm import Comm

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from processes import run_processes

WIDTH = 500  # layers are WIDTH x WIDTH


def measure(comm: Comm, folder: str, parameters: int, times: int) -> dict[str, float]:
    """Medians in ms, sizes in MB."""
    layers = torch.nn.ModuleList(
        torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, parameters // WIDTH**2))
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layers.parameters():
            p.normal_(generator=generator)
    optimizer = onebit.OneBitLamb(layers.parameters(), lr=1e-3, freeze_step=2, comm=comm)
    generator.manual_seed(comm.rank)

    def step() -> float:
        for p in layers.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        comm.all_gather_bytes(b"")
        began = time.perf_counter()
        optimizer.step()
        return 1e3 * (time.perf_counter() - began)

    for _ in range(4):
        step()
    found: dict[str, list[float]] = {"a step": [step() for _ in range(times)]}
    given = {"model": layers, "optimizer": optimizer}
    most = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    for asynchronous in (False, True):
        kind = "asynchronous" if asynchronous else "synchronous"
        for number in range(times):
            comm.all_gather_bytes(b"")
            began = time.perf_counter()
            saving = checkpoint.save(folder, number, keep=1, asynchronous=asynchronous, **given)
            found.setdefault(f"{kind}: training waits", []).append(1e3 * (time.perf_counter() - began))
            if asynchronous:
                found.setdefault("a step while it is written", []).append(step())
            saving.wait()
            found.setdefault(f"{kind}: complete after", []).append(1e3 * (time.perf_counter() - began))
        most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    for _ in range(times):
        comm.all_gather_bytes(b"")
        began = time.perf_counter()
        checkpoint.load(folder, **given)
        found.setdefault("load", []).append(1e3 * (time.perf_counter() - began))
    size = sum(file.stat().st_size for file in saving.wait().iterdir()) / 1e6
    memory = [(after - before) * 1024 / 1e6 for before, after in pairwise(most)]
    more = {"MB on disk": size, "MB more, synchronous": memory[0], "MB more still, asynchronous": memory[1]}
    return {name: statistics.median(values) for name, values in found.items()} | more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=4_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = folder, options.parameters, options.times
        results = run_processes(options.workers, measure, *arguments, timeout_s=600)
    for name in results[0]:
        unit = "" if "MB" in name else " ms"
        print(f"{name:32} {max(result[name] for result in results):8.1f}{unit}")


if __name__ == "__main__":
    main()
