"""Verdicts that the host learns a step late lead to the same run, and no step reads a value from the device."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from deferred_case import run_deferred
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import onebit
from onebit.comm import Solo
from onebit.deferred import Deferred
from onebit.kernels.compact import Int8
from onebit.layout import FlatLayout
from onebit.optim import FlatOptimizer

LATE = {
    "lamb": partial(onebit.Lamb, bias_correction=True, weight_decay=0.1),
    "full": partial(onebit.OneBitLamb, freeze_step=4, state="full", weight_decay=0.1),
    "compact": partial(onebit.OneBitLamb, freeze_step=4, state="compact", bucket_elements=36),
    "scaled": partial(onebit.OneBitLamb, freeze_step=4, state="full", error_feedback="scaled"),
    "paper": partial(onebit.OneBitLamb, freeze_step=4, **onebit.PAPER),
    "adam": partial(onebit.OneBitAdam, freeze_step=4, state="full", bias_correction=True, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    monkeypatch.setenv("ONEBIT_KERNELS", "reference")


# In the first schedule step 4 would end the warm-up and step 6 would be the first compressed one; the element that
# is dead wakes in step 12, as asked for in step 11.
@pytest.mark.parametrize("bad", [(1, 4, 6, 9, 10), (11,), (12,), (14,)], ids=str)
@pytest.mark.parametrize("make", LATE.values(), ids=LATE)
def test_a_late_verdict_leads_to_the_same_run(make, bad, monkeypatch):
    at_once, later, unseen = run_deferred(monkeypatch, make, bad=bad)
    assert at_once == later
    assert len(unseen) >= 8
    assert set(unseen) & set(bad) or bad == (12,)  # what wakes has no variance yet: that verdict is read at once


def test_an_int8_error_that_is_not_replaced_keeps_every_bit():
    """Among them a scale whose values are all too small to keep."""
    (bucket,) = FlatLayout([(300,)], 1).buckets
    error, values = Int8.zeros(bucket), torch.linspace(-1, 1, bucket.numel)
    values[:128] *= 1e-37
    error.write(values, torch.tensor(True))
    assert error.scales.gt(0).all()
    kept = Int8(error.data.clone(), error.scales.clone())
    kept.write(torch.full((bucket.numel,), float("nan")), torch.tensor(False))
    assert torch.equal(kept.data, error.data)
    assert torch.equal(kept.scales, error.scales)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [10, 400])
@pytest.mark.parametrize("make", LATE.values(), ids=LATE)
def test_a_step_reads_nothing_from_the_device(make, layers, monkeypatch):
    """Reading a value is the operation _local_scalar_dense, on any device; the last step's flags are read apart."""
    monkeypatch.setattr(FlatOptimizer, "_may_defer", lambda self: True)
    flags = []

    def read(self):
        with torch.utils._python_dispatch._disable_current_modes():
            flags.append(self._host.tolist())
        return [bool(flag) for flag in flags[-1]]

    monkeypatch.setattr(Deferred, "read", read)
    params = [nn.Parameter(torch.ones(3) * (i + 1)) for i in range(layers)]
    opt = make(params, comm=Solo())
    for step in range(9):
        for p in params:
            p.grad = torch.ones(3) * (step + 1)
        flags.clear()
        with Operations() as operations:
            opt.step()
        if step in (7, 8):  # past the switch, and what is looked up once
            assert not [name for name in operations.counts if "local_scalar" in name or "nonzero" in name]
            assert operations.counts["aten.mul.Tensor"] > 0
            assert flags
            assert all(flag == [True] for flag in flags)
    assert opt.stats()["step"] == 9
