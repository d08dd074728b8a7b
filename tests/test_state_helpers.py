"""torch.distributed.checkpoint.state_dict's helpers: they step an empty optimizer, and keep only what they know."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from processes import run_processes
from small import MODEL, flat, kinds_of
from test_resize import WARMUP, make, run
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import onebit
from onebit.comm import Comm, Solo

KINDS = kinds_of(WARMUP)
kinds = pytest.mark.parametrize("name", KINDS)


@kinds
def test_the_step_that_lays_out_the_state_does_not_count(name):
    models = [copy.deepcopy(MODEL) for _ in range(4)]

    def work(comm: Comm, rehearsed: bool) -> tuple[Any, Any]:
        model = models[2 * rehearsed + comm.rank]
        optimizer = make(name, model.parameters(), comm)
        if rehearsed:
            get_optimizer_state_dict(model, optimizer)
            assert optimizer.state
            assert optimizer.stats()["step"] == 0
            assert all(p.grad is None for p in model.parameters())
        run(comm, optimizer, model, range(WARMUP + 4))
        return flat(model.parameters()), optimizer.stats()["step"]

    with_it, without = (onebit.run_workers(2, partial(work, rehearsed=flag))[0] for flag in (True, False))
    assert torch.equal(with_it[0], without[0])
    assert with_it[1] == WARMUP + 4


@kinds
def test_a_first_step_at_rate_zero_with_gradients_counts(name):
    model = copy.deepcopy(MODEL)
    optimizer = make(name, model.parameters(), Solo(), lr=0.0)
    run(Solo(), optimizer, model, range(1))
    assert optimizer.stats()["step"] == 1


@kinds
def test_one_worker_with_a_gradient_makes_it_count_for_all(name):
    def work(comm: Comm) -> int:
        model = models[comm.rank]
        optimizer = make(name, model.parameters(), comm, lr=0.0)
        for p in model.parameters():
            p.grad = torch.full_like(p, float(comm.rank))
        optimizer.step()
        return optimizer.stats()["step"]

    models = [copy.deepcopy(MODEL) for _ in range(3)]
    assert onebit.run_workers(3, work) == [1, 1, 1]


@kinds
@pytest.mark.parametrize("cut", [0, 2, WARMUP, WARMUP + 4])
def test_what_they_get_and_set_goes_on_alike(name, cut):
    model = copy.deepcopy(MODEL)
    optimizer = make(name, model.parameters(), Solo())
    run(Solo(), optimizer, model, range(cut))
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = copy.deepcopy(model)
    again = make(name, other.parameters(), Solo())
    set_optimizer_state_dict(other, again, saved)
    for net, opt in ((model, optimizer), (other, again)):
        run(Solo(), opt, net, range(cut, cut + 6))
    assert torch.equal(flat(model.parameters()), flat(other.parameters()))


@kinds
def test_what_was_flattened_is_refused_with_nothing_changed(name):
    model = copy.deepcopy(MODEL)
    optimizer = make(name, model.parameters(), Solo())
    run(Solo(), optimizer, model, range(WARMUP + 2))
    optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(onebit.ConfigError, match="flattened"):
        set_optimizer_state_dict(model, optimizer, saved, options=options)
    after = optimizer.state_dict()
    assert before["onebit"]["steps"] == after["onebit"]["steps"]
    for values, others in zip(before["state"].values(), after["state"].values(), strict=True):
        assert all(torch.equal(values[key], others[key]) for key in values)


def on_processes(comm: Comm) -> list[bool]:
    found = []
    for cut in (2, WARMUP + 3):
        model = copy.deepcopy(MODEL)
        optimizer = make("OneBitLamb", model.parameters(), comm)
        run(comm, optimizer, model, range(cut))
        optimizer.zero_grad()
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        other = copy.deepcopy(model)
        again = make("OneBitLamb", other.parameters(), comm)
        set_optimizer_state_dict(other, again, saved)
        for net, opt in ((model, optimizer), (other, again)):
            run(comm, opt, net, range(cut, cut + 4))
        found.append(torch.equal(flat(model.parameters()), flat(other.parameters())))
    return found


def test_on_two_processes():
    assert run_processes(2, on_processes) == [[True, True]] * 2
