"""Variants of a recipe: what is chosen, what wins over what, what is refused; and those of recipes/ablations.toml."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optim import check_replicas

import onebit
from onebit.build import build_optimizer, check_optimizer
from onebit.comm import Comm, Solo
from onebit.compare import recipes_for
from onebit.errors import ConfigError
from onebit.recipe import FreezeRule, Recipe, freeze_flag, load, parse, resolve

ABLATIONS = Path(__file__).parent.parent / "recipes" / "ablations.toml"
RAW: dict[str, Any] = {
    "optimizer": {"lr": 0.5, "lr_for": {"adamw": 0.1}, "options": {"variance_floor": 0.1, "state": "full"}},
    "variants": {
        "lamb": {"name": "lamb"},
        "floor.0-a_b": {"options": {"variance_floor": 0.0}, "freeze_step": 30},
        "slow": {"name": "adamw", "lr": 0.01},
        "plain": {},
    },
}


def chosen(name: str, **overrides: Any) -> Recipe:
    return parse(RAW, {key.replace("__", "."): value for key, value in overrides.items()} | {"optimizer.name": name})


def test_a_variant_goes_over_the_optimizer_and_its_options_over_single_ones() -> None:
    one = chosen("floor.0-a_b")
    assert (one.label, one.optimizer.name, one.lr) == ("floor.0-a_b", "onebit-lamb", 0.5)
    assert one.optimizer.options == {"variance_floor": 0.0, "state": "full"}
    assert one.freeze_step == 30
    assert one.variants == {}
    assert chosen("plain").optimizer.options == RAW["optimizer"]["options"]
    assert chosen("slow").lr == 0.01  # not that of lr_for
    assert (chosen("adamw").label, chosen("adamw").lr) == ("adamw", 0.1)
    assert (chosen("lamb").label, chosen("lamb").optimizer.name) == ("lamb", "lamb")
    assert parse(RAW, {}).label == "onebit-lamb"


def test_a_flag_wins_over_a_variant() -> None:
    assert chosen("slow", optimizer__lr=0.7).lr == 0.7
    assert chosen("floor.0-a_b", optimizer__freeze_step=7).freeze_step == 7
    shared = parse(RAW, {"optimizer.freeze_step": 7})
    recipes = recipes_for(
        shared, ["lamb", "floor.0-a_b", "onebit-adam", "slow"], {"slow": 0.9, "onebit-adam": 0.8}, [3]
    )
    assert [(r.label, r.lr, r.freeze_step, r.train.seed) for r in recipes] == [
        ("lamb", 0.5, 7, 3), ("floor.0-a_b", 0.5, 7, 3), ("onebit-adam", 0.8, 7, 3), ("slow", 0.9, 7, 3),
    ]  # fmt: skip


def test_a_chosen_variant_survives_json_and_is_not_chosen_again() -> None:
    for name in RAW["variants"]:
        one = chosen(name, optimizer__eps=0.25)
        assert parse(json.loads(json.dumps(one.model_dump(mode="json"))), {}) == one
        assert resolve(one)[0].label == name
        assert resolve(one)[0].optimizer.eps == 0.25
    given = parse({"variants": {"soft": {"options": {"factor_threshold": float("inf")}}}}, {"optimizer.name": "soft"})
    assert parse(json.loads(json.dumps(given.model_dump(mode="json"))), {}) == given


@pytest.mark.parametrize(
    ("raw", "name", "parts"),
    [
        (RAW, "slo", ["'slo'", "nearest known one is 'slow'", "'plain', 'onebit-lamb'"]),
        ({}, "sgd", ["optimizer.name is 'sgd', not an optimizer", "'adamw'"]),
        (RAW, "", ["optimizer.name is ''"]),
        ({"variants": 3}, None, ["variants is 3", "[variants.NAME]"]),
        ({"variants": {"a": 3}}, None, ["variants.a is 3", "table"]),
        ({"variants": {"a b": {}}}, None, ["'a b'", "letters, digits"]),
        ({"variants": {"..": {}}}, None, ["'..'", "letters, digits"]),
        ({"variants": {"lamb": {}}}, None, ["variants.lamb has the name of an optimizer", "name = 'lamb'"]),
        ({"variants": {"lamb": {"name": "adamw"}}}, None, ["variants.lamb", "name = 'adamw'"]),
        ({"variants": {"a": {"label": "b"}}}, None, ["variants.a.label", "name"]),
        ({"variants": {"a": {"weight_decy": 1}}}, None, ["[variants.a]", "'optimizer.weight_decay'"]),
        ({"variants": {"a": {"name": "sgd"}}}, None, ["[variants.a]", "'sgd'"]),
        ({"variants": {"a": {"freeze_step": 500}}}, None, ["[variants.a]", "beyond the run"]),
        ({"variants": {"a": {"options": 3}}}, None, ["[variants.a]", "optimizer.options is 3"]),
        ({"optimizer": {"label": "../a"}}, None, ["optimizer.label is '../a'"]),
        ({"optimizer": {"name": "a"}, "variants": {"a": {}}}, None, ["optimizer.name is 'a'"]),
    ],
)
def test_an_impossible_variant_is_refused_in_one_line(raw: dict[str, Any], name: str | None, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw, {} if name is None else {"optimizer.name": name})
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("names", "words"), [([], "two or more"), (["slow"], "two or more"), (["slow", "slow"], "two or more different")]
)
def test_a_comparison_needs_two_different_ones(names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipes_for(parse(RAW, {}), names, {}, [0])
    with pytest.raises(ConfigError, match="name of a file"):
        recipes_for(parse({"variants": {"report.html": {}}}, {}), ["lamb", "report.html"], {}, [0])


# -- when a rule decides about the switch ------------------------------------------------------------------------------


def ruled(rule: Any, steps: int = 320, **optimizer: Any) -> Recipe:
    return parse({"optimizer": {"freeze_step": rule, "betas": [0.9, 0.98], **optimizer}, "train": {"steps": steps}}, {})


def test_an_automatic_switch_is_told_in_numbers_and_keeps_them() -> None:
    auto = ruled("auto")
    assert auto.freeze_rule == onebit.AutoFreeze()
    assert auto.freeze_step == 80  # the latest
    resolved, reasons = resolve(auto)
    assert resolved.optimizer.freeze_step == FreezeRule(threshold=0.96, look_back=30, min_steps=48, max_steps=80)
    assert "settled over 30 steps, from step 48 on, with step 80 at the latest" in reasons["optimizer.freeze_step"]
    assert resolve(resolved)[0] == resolved
    assert parse(json.loads(json.dumps(resolved.model_dump(mode="json"))), {}) == resolved
    own = ruled({"threshold": 0.5, "max_steps": 9})
    assert own.freeze_rule == onebit.AutoFreeze(threshold=0.5, max_steps=9)
    assert own.freeze_step == 9
    assert parse({}, {"optimizer.freeze_step": freeze_flag("auto")}).freeze_rule == onebit.AutoFreeze()
    assert ruled(30).freeze_rule == 30
    assert ruled(0.25).freeze_rule == 80


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ("aut", ["optimizer.freeze_step is 'aut'", "'auto'"]),
        ({"treshold": 0.9}, ["'optimizer.freeze_step.treshold'", "'optimizer.freeze_step.threshold'"]),
        ({"threshold": 2.0}, ["optimizer.freeze_step.threshold is 2.0", "below 1"]),
        ({"look_back": 0}, ["optimizer.freeze_step.look_back is 0", "1 or more"]),
        ({"min_steps": 9, "max_steps": 8}, ["min_steps is 9, max_steps 8"]),
        ({"min_steps": 320}, ["freeze_step is 320", "beyond the run"]),
        ({"max_steps": 320}, ["freeze_step is 320", "beyond the run"]),
    ],
)
def test_an_impossible_rule_is_refused_in_one_line(rule: Any, parts: list[str]) -> None:
    for name in ("onebit-lamb", "onebit-adam"):
        with pytest.raises(ConfigError) as caught:
            ruled(rule, name=name)
        assert all(part in str(caught.value) for part in parts), caught.value


# -- the variants of recipes/ablations.toml ----------------------------------------------------------------------------


def small_model() -> torch.nn.Module:
    """One layer is larger than two blocks of 4096 on each of two workers, so that blocks and layers differ."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 129), torch.nn.Tanh(), torch.nn.Linear(129, 129))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def trained(recipe: Recipe, comm: Comm) -> tuple[torch.Tensor, torch.optim.Optimizer, int]:
    """Weights, optimizer and bytes of all steps after 12 steps on random data."""
    model = small_model()
    optimizer, average = build_optimizer(recipe, model, comm)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(12):
        x = torch.randn(8, 8, generator=generator)
        optimizer.zero_grad()
        ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
        if average is not None:
            average()
        optimizer.step()
        check_replicas(comm, model.parameters())
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer, comm.payload_bytes


def test_every_ablation_builds_trains_and_differs_from_the_others() -> None:
    shared = load(ABLATIONS, {"train.steps": 20})
    recipes = recipes_for(shared, list(shared.variants), {}, [0])
    assert len(recipes) == 22
    assert recipes[0].label == "lamb"
    weights, sent = {}, {}
    for recipe in recipes:
        check_optimizer(recipe)
        workers = onebit.run_workers(2, lambda comm, r=recipe: trained(r, comm))
        weights[recipe.label], optimizer, sent[recipe.label] = workers[0]
        if recipe.two_stages:
            assert optimizer.stage is onebit.Stage.COMPRESSED, recipe.label  # type: ignore[attr-defined]
            assert recipe.label == "local-variance" or 3 <= optimizer.freeze_step <= 5  # type: ignore[attr-defined]
        assert torch.isfinite(weights[recipe.label]).all()
    names = list(weights)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert not torch.equal(weights[a], weights[b]), (a, b)
    full = sent["lamb"]
    in_full = ("lamb", "adamw", "exact", "zero-one-adam")  # the last one for so few steps
    assert all(bytes_ < 0.5 * full for name, bytes_ in sent.items() if name not in in_full)


def test_options_that_an_optimizer_does_not_know_are_refused_before_a_run() -> None:
    recipe = parse({"variants": {"a": {"name": "lamb", "options": {"ratio": "fixed"}}}}, {"optimizer.name": "a"})
    with pytest.raises(ConfigError, match="'ratio', which Lamb does not know"):
        check_optimizer(recipe)
    with pytest.raises(ConfigError, match="variance_floor"):
        check_optimizer(parse({"optimizer": {"options": {"variance_floor": 2}}}, {}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 5.0}, "optimizer.lr"),
        ({"freeze_step": 2}, "optimizer.freeze_step"),
        ({"guard": {"patience": 3}}, "SwitchGuard"),
        ({"guard": 3}, "must be a table"),
        ({"codec": "layer"}, "must be a table"),
        ({"codec": {"size": 3}}, "OneBit"),
    ],
)
def test_options_that_cannot_be_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        check_optimizer(parse({"optimizer": {"options": options}}, {}))


def test_a_guard_is_a_table_of_options():
    optimizer, _ = build_optimizer(
        parse({"optimizer": {"options": {"guard": {"settle": 7}}}}, {}), torch.nn.Linear(2, 2), Solo()
    )
    assert optimizer._watch.guard.settle == 7
