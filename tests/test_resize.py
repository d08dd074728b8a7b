"""Saved state that another number of workers loads, or that one worker saved for all: nothing that counts is lost."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import MODEL, flat, kinds_of
from torch import Tensor, nn

import onebit
from onebit.comm import Comm, Solo
from onebit.layout import FlatLayout
from onebit.resize import Resize

WARMUP = 3
KINDS = kinds_of(WARMUP, var_update_scaler=1) | {
    "int8": {"freeze_step": WARMUP, "warmup_transport": "int8"},
    "compact": {"freeze_step": WARMUP, "state": "compact"},
    "buckets": {"freeze_step": WARMUP, "bucket_elements": 80},
    "shared scale": {"freeze_step": WARMUP, "codec": onebit.OneBit(scale="bucket"), "momentum_scales": True},
}
CLASSES = {"int8": "OneBitLamb", "compact": "OneBitAdam", "buckets": "OneBitLamb", "shared scale": "OneBitLamb"}
SIZES = [(4, 2), (2, 4), (4, 3), (1, 4)]
kinds = pytest.mark.parametrize("name", KINDS)


def make(name: str, params: Any, comm: Comm, **more: Any) -> Any:
    return small.make(
        {CLASSES.get(name, name): KINDS[name]}, CLASSES.get(name, name), params, comm, **({"lr": 0.005} | more)
    )


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> Tensor:
    """The part of a batch of 24 that falls to a worker."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 6, generator=generator)[rank::size]
    return nn.functional.mse_loss(model(x), x[:, :3].sin())


def held_out(model: nn.Module) -> float:
    return float(loss_of(model, 999, 0, 1).detach())


def run(comm: Comm, optimizer: Any, model: nn.Module, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, comm.rank, comm.size).backward()
        optimizer.step()


def owed(optimizer: Any) -> Tensor | None:
    """What has not been sent yet, by layer; a collective."""
    exchange = optimizer._exchange or (optimizer._quantised and optimizer._quantised.exchange)
    return flat(exchange.layout.views(exchange.total_error())) if exchange else None


def view(optimizer: Any) -> dict[str, Any]:
    """What a run goes on from, without the padding; a collective."""
    layout, found = optimizer._layout, {"owed": owed(optimizer)}
    for name, values in optimizer._flat.items():
        if name != "momentum":
            found[name] = flat(layout.views(values.float()))
    if hasattr(optimizer, "decoded_momentum"):
        found["momentum"] = flat(optimizer.decoded_momentum())
    elif hasattr(optimizer, "_numbers") and optimizer._exchange is not None:
        found["momentum"] = flat(layout.views(torch.cat([optimizer._numbers(b) for b in layout.buckets])))
    else:
        found["momentum"] = flat(layout.views(optimizer._flat["momentum"]))
    if optimizer._exchange is not None and optimizer._exchange.alive is not None:
        found["alive"] = flat(layout.views(optimizer._exchange.alive.float()))
    for own in optimizer._own_values():
        total = own.clone()
        optimizer.comm.all_reduce(total)
        found[f"own {len(found)}"] = flat(layout.views(total / optimizer.comm.size))
    return found | {name: values.clone() for name, values in optimizer._layerwise.items()}


def saved_by(n: int, name: str, cut: int, fold: bool = False) -> list[dict[str, Any]]:
    models = [copy.deepcopy(MODEL) for _ in range(n)]

    def work(comm: Comm) -> dict[str, Any]:
        model = models[comm.rank]
        optimizer = make(name, model.parameters(), comm)
        run(comm, optimizer, model, range(cut))
        seen, loss = view(optimizer), held_out(model)
        if fold:
            optimizer.fold_errors()
        state = copy.deepcopy(optimizer.state_dict())
        return {"state": state, "model": copy.deepcopy(model.state_dict()), "seen": seen, "loss": loss}

    return onebit.run_workers(n, work)


def goes_on(
    name: str, n: int, cut: int, saved: list[dict[str, Any]], load: Any, more: int = 12
) -> list[dict[str, Any]]:
    models = [copy.deepcopy(MODEL) for _ in range(n)]

    def work(comm: Comm) -> dict[str, Any]:
        model = models[comm.rank]
        model.load_state_dict(saved[0]["model"])
        optimizer = make(name, model.parameters(), comm)
        load(optimizer)
        seen = view(optimizer)
        run(comm, optimizer, model, range(cut, cut + 20))
        params, stats = flat(model.parameters()), optimizer.stats()
        return {"seen": seen, "loss": held_out(model), "params": params, "stats": stats}

    return onebit.run_workers(n, work)


def same_view(mine: dict[str, Any], theirs: dict[str, Any], loose: bool = False) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        if value is not None:
            close = {"rtol": 0.02, "atol": 2e-3} if loose and key == "owed" else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(mine[key], value, **close, msg=lambda text, key=key: f"{key}: {text}")


@kinds
@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize("cut", [2, WARMUP, WARMUP + 4])
def test_another_number_of_workers_goes_on_from_the_same_state(name, before, after, cut):
    saved = saved_by(before, name, cut)
    states = [item["state"] for item in saved]
    results = goes_on(name, after, cut, saved, lambda optimizer: optimizer.load_state_dicts(iter(states)))
    undisturbed = saved_by(before, name, cut + 20)[0]["loss"]
    for found in results:
        same_view(found["seen"], saved[0]["seen"], loose=name == "compact")
        assert torch.equal(found["params"], results[0]["params"])
        assert found["stats"]["step"] == cut + 20
    assert results[0]["loss"] < 1.3 * undisturbed + 0.02  # the data are the same, the bits are not
    assert results[0]["loss"] < held_out(MODEL)


@kinds
@pytest.mark.parametrize("cut", [2, WARMUP + 4])
def test_the_same_number_goes_on_as_if_nothing_had_been(name, cut):
    saved = saved_by(3, name, cut)
    states = [item["state"] for item in saved]
    results = goes_on(name, 3, cut, saved, lambda optimizer: optimizer.load_state_dicts(states))
    models = [copy.deepcopy(MODEL) for _ in range(3)]

    def through(comm: Comm) -> Tensor:
        model = models[comm.rank]
        run(comm, make(name, model.parameters(), comm), model, range(cut + 20))
        return flat(model.parameters())

    assert torch.equal(onebit.run_workers(3, through)[0], results[0]["params"])


@kinds
@pytest.mark.parametrize("after", [3, 2, 1])
@pytest.mark.parametrize("cut", [2, WARMUP + 4])
def test_one_worker_s_state_is_enough_once_errors_are_folded(name, after, cut):
    saved = saved_by(3, name, cut, fold=True)
    results = goes_on(name, after, cut, saved, lambda optimizer: optimizer.load_state_dict(saved[0]["state"]))
    for found in results:
        same_view(found["seen"], saved[0]["seen"], loose=name == "compact")
        assert torch.equal(found["params"], results[0]["params"])


@kinds
def test_what_is_not_whole_is_refused_or_said(name, caplog):
    saved = saved_by(2, name, WARMUP + 4)
    with pytest.raises(onebit.ConfigError, match="workers is 1 here and was 2"):
        make(name, copy.deepcopy(MODEL).parameters(), Solo()).load_state_dict(saved[0]["state"])
    if KINDS[name]:
        goes_on(name, 2, WARMUP + 4, saved, lambda optimizer: optimizer.load_state_dict(saved[0]["state"]))
        assert "fold_errors" in caplog.text
    with pytest.raises(onebit.ConfigError, match="pass all workers"):
        onebit.run_workers(2, lambda comm: one_of(comm, name, saved[0]["state"]))


@kinds
def test_what_was_folded_before_a_load_is_not_folded_after_it(name):
    saved = saved_by(2, name, WARMUP + 4)

    def load(optimizer: Any) -> None:
        optimizer.fold_errors()
        optimizer.load_state_dict(saved[optimizer.comm.rank]["state"])
        assert optimizer.state_dict()["onebit"]["folded"] is False

    goes_on(name, 2, WARMUP + 4, saved, load)


def one_of(comm: Comm, name: str, state: dict[str, Any]) -> None:
    optimizer = make(name, copy.deepcopy(MODEL).parameters(), comm)
    if comm.rank == 1:
        optimizer.load_state_dicts([state])


def test_a_state_between_two_exchanges_is_each_worker_s_own():
    def work(comm: Comm) -> dict[str, Any]:
        model = models[comm.rank]
        kind = {"local_step_clipper": 4, "local_step_scaler": 1}
        optimizer = make("ZeroOneAdam", model.parameters(), comm, **kind)
        run(comm, optimizer, model, range(8))
        assert not optimizer.in_sync
        with pytest.raises(onebit.ConfigError, match="after a local step"):
            optimizer.fold_errors()
        return optimizer.state_dict()

    models = [copy.deepcopy(MODEL) for _ in range(2)]
    states = onebit.run_workers(2, work)
    alone = make("ZeroOneAdam", copy.deepcopy(MODEL).parameters(), Solo(), local_step_clipper=4, local_step_scaler=1)
    with pytest.raises(onebit.ConfigError, match="in_sync"):
        alone.load_state_dicts(states)
    assert not alone.state


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    room=st.sampled_from([None, 30]),
    seed=st.integers(0, 2**31),
    whole=st.booleans(),
)
def test_the_mean_of_the_worker_errors_and_the_server_errors_are_conserved(sizes, before, after, room, seed, whole):
    """Exactly for whole numbers; else each mean is the nearest number of float32 to the exact one."""
    shapes, generator = [(size,) for size in sizes], torch.Generator().manual_seed(seed)
    old, new = (FlatLayout(shapes, n, bucket_elements=room) for n in (before, after))

    def draw(numel: int) -> Tensor:
        values = torch.randn(numel, generator=generator) * 10
        return values.round() * 60 if whole else values

    extras = []
    for _ in range(before):
        own = old.zeros(torch.float32, torch.device("cpu"))
        for part in old.views(own):
            part.copy_(draw(part.numel()))
        extras.append({"errors": {"worker_error": own, "server_error": draw(old.numel // before)}})
    found = [Resize(old, new, rank).own(iter(extras), torch.float32)["errors"] for rank in range(after)]

    def served(parts: list[Tensor], layout: FlatLayout) -> list[Tensor]:
        full = torch.zeros(layout.numel)
        for bucket in layout.buckets:
            rows = [part[bucket.served_slice] for part in parts]
            full[bucket.slice] = torch.cat(rows)
        return layout.views(full)

    servers = [[extra["errors"]["server_error"] for extra in extras], [one["server_error"] for one in found]]
    assert all(map(torch.equal, served(servers[0], old), served(servers[1], new)))
    for layer in range(len(shapes)):
        theirs = [old.views(extra["errors"]["worker_error"])[layer].tolist() for extra in extras]
        mine = [new.views(one["worker_error"])[layer].tolist() for one in found]
        assert all(values == mine[0] for values in mine)
        for value, *values in zip(mine[0], *theirs, strict=True):
            exact = sum(map(Fraction, values)) / before
            assert value == torch.tensor(float(exact), dtype=torch.float64).float().item()
            if whole:
                assert sum(Fraction(one) for one in (value,) * after) / after == exact
