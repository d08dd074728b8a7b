"""The Triton kernels on a real GPU: are they right, and how far from the speed of its memory?

    python benchmarks/gpu.py [--elements N] [--repeats N] [--out FOLDER]

First checks, on the device, against the reference on the CPU: whole steps of `OneBitLamb` with full and with compact
state, one of them with a nan. Messages must be equal in every byte but for the last bit of a scale, parameters and
worker errors must be near, and the step with the nan must be skipped. Then times, the network excluded: a
device copy, the steps of `Lamb` and of `OneBitLamb` with Triton's kernels and with torch's, and torch's fused AdamW. A
figure is the median over interleaved repeats, each ended by a wait for the device; GB/s counts the least traffic that a
step needs (the floors of benchmarks/kernels.py), and "ratio" is the time over what the copy would need for it.

Writes JSON to benchmarks/results/. Without a GPU it says so and ends well; TRITON_INTERPRET=1 and --interpreted make
the checks alone on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import onebit
from onebit.backend import Momentum
from onebit.comm import Solo

FLOORS = {"Lamb": 40.0, "full": 48.5, "compact": 34.5625, "AdamW": 28.0}  # bytes per element, float32, one worker


def find_device() -> torch.device | None:
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_available():
            return torch.device(kind, 0)
    return None


def use_kernels(name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns; optimizers choose their kernels in the first step, so it must make one."""
    os.environ["ONEBIT_KERNELS"] = name
    try:
        return make()
    finally:
        del os.environ["ONEBIT_KERNELS"]


def trained(device: torch.device, steps: int, settings: dict[str, Any]) -> tuple[Any, list[Tensor], Tensor]:
    """Steps on odd layers and gradients that do not depend on the parameters: optimizer, messages, and the parameters
    after every step, [steps, elements]."""
    random = torch.Generator().manual_seed(0)
    sizes = [5, 4099, 1, 300]
    params = [nn.Parameter(torch.randn(size, generator=random).to(device)) for size in sizes]
    how = {"freeze_step": 3, "weight_decay": 0.01, "warmup_transport": "fp32", "comm": Solo()}
    opt = onebit.OneBitLamb(params, 0.01, **how, **settings)
    sent, passed = [], []
    for step in range(steps):
        for p in params:
            grad = torch.randn(p.shape, generator=random)
            grad[::7] *= step > 5  # dead elements that wake
            grad[-1:] *= float("nan") if step == 5 else 1.0
            p.grad = grad.to(device)
        opt.step()
        passed.append(torch.cat([p.detach().flatten() for p in params]).cpu())
        if opt.stage is onebit.Stage.COMPRESSED and isinstance(opt._momentum[0], Momentum):
            sent.append(opt._momentum[0].messages.cpu().clone())
    if opt.stats()["skipped_steps"] != 1:
        raise SystemExit(f"{opt.stats()['skipped_steps']} steps were skipped instead of the one with a nan")
    return opt, sent, torch.stack(passed)


def check(device: torch.device, steps: int) -> dict[str, float]:
    """Raise where the kernels and the reference differ; return by how much they may and do."""
    worst = {"scales": 0.0, "parameters": 0.0, "errors": 0.0}
    for settings in ({"state": "full"}, {"state": "compact"}, onebit.PAPER):
        expected = use_kernels("reference", lambda s=settings: trained(torch.device("cpu"), steps, s))
        got = use_kernels("triton", lambda s=settings: trained(device, steps, s))
        codec = expected[0]._exchange.codecs[0]
        for step, (a, b) in enumerate(zip(expected[1], got[1], strict=True)):
            differ = int((codec.bits(a) != codec.bits(b)).sum())
            if differ:
                raise SystemExit(f"compressed step {step}: {differ} bytes of signs differ from the reference")
            expected_scales, scales = codec.all_scales(a), codec.all_scales(b)
            apart = ((scales - expected_scales).abs() / expected_scales.clamp(min=1e-30)).max()
            worst["scales"] = max(worst["scales"], float(apart))
        reach = expected[2].abs().amax(0).clamp(min=1)  # some elements go far and come back
        apart = ((expected[2] - got[2]).abs() / reach).max()
        worst["parameters"] = max(worst["parameters"], float(apart))
        errors = [opt._exchange.worker_error.cpu() for opt in (expected[0], got[0])]
        apart = (errors[0] - errors[1]).abs().max() / errors[0].abs().max()
        worst["errors"] = max(worst["errors"], float(apart))
    if not (worst["scales"] <= 2e-7 and worst["parameters"] <= 1e-5 and worst["errors"] <= 1e-5):
        raise SystemExit(f"too far from the reference: {worst}")
    return worst


def bert_shapes(elements: int) -> list[tuple[int, ...]]:
    """BERT-Large's mix of layers, whole blocks until `elements` is reached."""
    width, shapes, total = 1024, [], 0
    block = [(width, width), (width,)] * 4 + [(4 * width, width), (4 * width,), (width, 4 * width)] + [(width,)] * 5
    while total < elements:
        shapes += block
        total += sum(torch.Size(shape).numel() for shape in block)
    return shapes


def measure(device: torch.device, elements: int, repeats: int) -> dict[str, dict[str, float]]:
    shapes = bert_shapes(elements)
    count = sum(torch.Size(shape).numel() for shape in shapes)

    def parameters() -> list[nn.Parameter]:
        params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        return params

    def started(kernels: str, state: Literal["full", "compact"] | None) -> Callable[[], Any]:
        def make() -> Any:
            if state is None:
                opt: Any = onebit.Lamb(parameters())
            else:
                opt = onebit.OneBitLamb(parameters(), freeze_step=1, state=state)
            for _ in range(4):  # past the switch, compiling, and what is looked up only once
                opt.step()
            return opt.step

        return use_kernels(kernels, make)

    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    runs: dict[str, tuple[float, Callable[[], Any]]] = {"copy": (8.0, lambda: target.copy_(source))}
    for kernels in ("triton", "reference"):
        runs[f"Lamb, {kernels}"] = FLOORS["Lamb"], started(kernels, None)
        for state in ("full", "compact"):
            runs[f"OneBitLamb, compressed, {state}, {kernels}"] = FLOORS[state], started(kernels, state)
    runs["torch.optim.AdamW, fused"] = FLOORS["AdamW"], torch.optim.AdamW(parameters(), fused=True).step

    wait = torch.get_device_module(device).synchronize
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 2):
        for name, (_, run) in runs.items():
            wait()
            begin = time.perf_counter()
            run()
            wait()
            times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    speed = 8 * count / medians["copy"]
    return {
        name: {
            "ns_per_element": medians[name] / count * 1e9,
            "gb_per_s": floor * count / medians[name] / 1e9,
            "bytes_per_element": floor,
            "ratio": medians[name] / (floor * count / speed),
        }
        for name, (floor, _) in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--interpreted", action="store_true", help="checks only, on the CPU; needs TRITON_INTERPRET=1")
    args = parser.parse_args()
    if args.interpreted:
        print(f"in the interpreter equal to the reference, up to {check(torch.device('cpu'), 8)}")
        return
    device = find_device()
    if device is None:
        print("no GPU that torch can use was found: nothing was checked or timed")
        return
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    name = torch.get_device_module(device).get_device_name(device)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "onebit": onebit.__version__}
    result = {"commit": commit or "unknown", "device": name, **versions, "elements": args.elements}
    result["differences"] = check(device, 20)
    print(f"{name}: equal to the reference, up to {result['differences']}", flush=True)
    result["timed"] = timed = measure(device, args.elements, args.repeats)
    print(f"{'':44} {'ns/element':>10} {'GB/s':>8} {'ratio':>6}")
    for what, row in timed.items():
        print(f"{what:44} {row['ns_per_element']:10.4f} {row['gb_per_s']:8.0f} {row['ratio']:6.2f}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}_{result['commit']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
