"""What a compressed step costs: calls that do not grow with the number of layers, and memory, measured."""

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import onebit
from onebit.kernels import choose

NATIVE = choose(torch.device("cpu"), torch.float32)[0] == "native"
needs_native = pytest.mark.skipif(not NATIVE, reason="the native kernels are not built, or not in use")


class Counting(TorchDispatchMode):
    """Counts torch operations by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(layers, native_calls, stage):
    """The last of the layers never has a gradient, and one is empty: they must cost nothing either."""
    params = [nn.Parameter(torch.randn(24) + 1) for _ in range(layers - 1)] + [nn.Parameter(torch.ones(0))]
    silent = nn.Parameter(torch.ones(24))
    opt = onebit.OneBitLamb(
        [*params, silent], lr=0.01, freeze_step=1 if stage == "compressed" else 99, weight_decay=0.1
    )
    for _ in range(4):
        for p in params:
            p.grad = torch.randn(p.shape)
        if opt.stats()["step"] == 3:
            native_calls.clear()
            with Counting() as counting:
                opt.step()
            return counting.calls, Counter(native_calls)
        opt.step()


@needs_native
@pytest.mark.parametrize("stage", ["warm-up", "compressed"])
def test_calls_of_a_step_do_not_depend_on_the_number_of_layers(stage, monkeypatch):
    from onebit.kernels import native

    native_calls = []
    for name in native.__all__:
        function = getattr(native, name)
        if callable(function) and not isinstance(function, type):

            def counted(*args, _name=name, _function=function, **kwargs):
                native_calls.append(_name)
                return _function(*args, **kwargs)

            monkeypatch.setattr(native, name, counted)
    few, few_native = calls_of_a_step(10, native_calls, stage)
    many, many_native = calls_of_a_step(400, native_calls, stage)
    assert few_native == many_native
    assert sum(few_native.values()) == (2 if stage == "warm-up" else 6)
    assert few == many
    reads = sum(count for name, count in many.items() if "_local_scalar_dense" in name or "item" in name)
    assert reads <= 2  # of CPU memory, per bucket: are its scales finite, does a dead element ask to wake?


MEASURE = """
import gc, sys, torch, onebit
from torch import nn

def resident(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

torch.set_num_threads(1)
make = getattr(onebit, sys.argv[1])
n, layers = 2**22, 16
params = [nn.Parameter(torch.ones(n)) for _ in range(layers)]
for p in params:
    p.grad = torch.rand(n) + 0.1
small = nn.Parameter(torch.ones(8)); small.grad = torch.ones(8)
for _ in range(2):  # what the code itself needs
    make([small], freeze_step=1, **eval(sys.argv[2])).step()
before = resident("RssAnon")
opt = make(params, lr=1e-3, freeze_step=1, **eval(sys.argv[2]))
for _ in range(4):
    opt.step()
peaks = []
for _ in range(3):  # the least of three: the machine's own pages come and go
    open("/proc/self/clear_refs", "w").write("5")  # start the high-water mark anew
    opt.step()
    peaks.append(resident("VmHWM") - resident("RssFile") - before)  # mapped code is nobody's state
storages = {}
for value in gc.get_objects():
    if type(value) in (torch.Tensor, nn.Parameter) and value.numel() > 1000:
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
for p in params + [p.grad for p in params]:
    storages.pop(p.untyped_storage().data_ptr(), None)
print(sum(storages.values()) / (n * layers), min(peaks) / (n * layers))
"""


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("optimizer", "state", "allowed"),
    [
        ("OneBitLamb", "full", 12.4 + 4),
        ("OneBitLamb", "compact", 7 + 4),
        ("OneBitAdam", "full", 8.3 + 4),
        ("OneBitAdam", "compact", 4 + 4),
    ],
)
def test_state_and_temporaries_stay_within_their_bytes_per_element(optimizer, state, allowed):
    """One worker, so the server error is whole: 4 / n = 4."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, optimizer, f"dict(state={state!r})"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is given back at once
    )
    held, peak = map(float, run.stdout.split())
    print(optimizer, state, held, peak)
    assert allowed - 2 < held <= allowed
    assert peak <= allowed + 1.0  # a step may take one byte more
