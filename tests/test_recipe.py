"""Recipes: what is refused, in what words, and what automatic choices become."""

import datetime
from pathlib import Path

import pytest
import tomllib
from hypothesis import given
from hypothesis import strategies as st

from onebit.errors import ConfigError
from onebit.recipe import Recipe, known_keys, load, parse, resolve


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"train": {"step": 3}}, ["'train.step'", "'train.steps'"]),
        ({"optimiser": {"lr": 0.1}}, ["'optimiser'", "'optimizer'"]),
        ({"train": {"lr": 0.1}}, ["'train.lr'", "'optimizer.lr'"]),
        ({"steps": 3}, ["'steps'", "'train.steps'"]),
        ({"optimizer": {"lr_for": {"lamp": 0.1}}}, ["optimizer.lr_for", "'lamb'"]),
        ({"train": {"workers": 0}}, ["train.workers is 0", "1 or more"]),
        ({"train": {"steps": 0}}, ["train.steps is 0", "1 or more"]),
        ({"train": {"steps": True}}, ["train.steps is True", "whole number"]),
        ({"train": {"steps": 100}, "optimizer": {"freeze_step": 100}}, ["freeze_step is 100", "beyond the run"]),
        ({"optimizer": {"freeze_step": 0}}, ["freeze_step is 0", "1 or more"]),
        ({"optimizer": {"freeze_step": 1.5}}, ["freeze_step is 1.5", "below 1.0"]),
        ({"optimizer": {"betas": [0.9, 1.0]}}, ["betas is 1.0", "below 1.0"]),
        ({"optimizer": {"betas": [-0.1, 0.9]}}, ["betas is -0.1", "0.0 or more"]),
        ({"optimizer": {"betas": [0.9]}}, ["betas"]),
        ({"optimizer": {"lr": -1}}, ["lr is -1", "above 0"]),
        ({"optimizer": {"lr": float("nan")}}, ["lr is nan"]),
        ({"optimizer": {"lr": "0.1"}}, ["optimizer.lr is '0.1'", "a number"]),
        ({"optimizer": {"lr": True}}, ["optimizer.lr is True", "a number"]),
        ({"optimizer": {"lr_for": {"lamb": "1"}}}, ["optimizer.lr_for is '1'", "a number"]),
        ({"optimizer": {"betas": [0.9, "0.9"]}}, ["optimizer.betas is '0.9'", "a number"]),
        ({"optimizer": {"eps": True}}, ["optimizer.eps is True", "a number"]),
        ({"model": {"dropout": False}}, ["model.dropout is False", "a number"]),
        ({"train": {"timeout_s": "9"}}, ["train.timeout_s is '9'", "a number"]),
        ({"optimizer": {"name": "sgd"}}, ["'sgd'", "'adamw'"]),
        ({"optimizer": {"min_coeff": 3.0, "max_coeff": 2.0}}, ["min_coeff is 3", "max_coeff"]),
        ({"model": {"hidden_size": 100, "heads": 3}}, ["100", "heads is 3"]),
        ({"model": {"max_position_embeddings": 32}}, ["sequence_length is 64", "32"]),
        ({"data": {"text": "a.txt"}}, ["data.text is 'a.txt'", "list"]),
        ({"train": {"lr_warmup": 501}}, ["lr_warmup is 501", "500"]),
        ({"train": 3}, ["train is 3", "section"]),
    ],
)
def test_an_impossible_recipe_is_refused_in_one_line(raw: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw, {})
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


toml_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.just(datetime.datetime(2026, 1, 1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
some_key = st.sampled_from([key for keys in known_keys().values() for key in keys]) | st.text(max_size=8)
sections = st.dictionaries(some_key, toml_values, max_size=4) | toml_values


@given(st.dictionaries(st.sampled_from(list(known_keys())) | st.text(max_size=8), sections, max_size=4))
def test_any_mapping_is_a_recipe_or_a_config_error(raw: dict[str, object]) -> None:
    try:
        recipe = parse(raw, {})
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        resolved, _ = resolve(recipe)
        assert resolve(resolved)[0] == resolved
        assert 1 <= resolved.lr_warmup_steps + 1 <= resolved.train.steps + 1
        assert not resolved.two_stages or 1 <= resolved.freeze_step < resolved.train.steps


def test_resolving_leaves_no_automatic_value_and_says_why() -> None:
    recipe, reasons = resolve(parse({"train": {"steps": 200}}, {}))
    assert "auto" not in str(recipe.model_dump())
    assert recipe.model.intermediate_size == 512
    assert recipe.optimizer.freeze_step == 34
    assert reasons["optimizer.freeze_step"] == "34: 0.17 of 200 steps"


def test_a_recipe_survives_json_and_back() -> None:
    recipe = parse({"data": {"text": ["a"]}, "optimizer": {"freeze_step": 0.25}}, {})
    assert parse(recipe.model_dump(mode="json"), {}) == recipe


def test_flags_win_over_the_file_and_text_counts_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[train]\nsteps = 7\nseed = 3\n[data]\ntext = ["x.txt"]\n')
    recipe = load(path, {"train.steps": 9})
    assert (recipe.train.steps, recipe.train.seed) == (9, 3)
    assert recipe.data.text == (str(tmp_path / "x.txt"),)
    assert load(path, {"data.text": ["y.txt"]}).data.text == ("y.txt",)


def test_a_learning_rate_from_a_flag_wins_over_that_of_the_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[optimizer]\nlr = 1\nlr_for = {lamb = 0.3, adamw = 0.4}\n")
    for name, own in (("lamb", 0.3), ("adamw", 0.4), ("onebit-lamb", 1)):
        assert load(path, {"optimizer.name": name}).lr == own
        assert load(path, {"optimizer.name": name, "optimizer.lr": 0.01}).lr == 0.01
    assert parse({}, {"optimizer.name": "adamw", "optimizer.lr": 0.01}).lr == 0.01


@pytest.mark.parametrize("content", [None, b"steps = = 3", b"\xff\xfe"])
def test_a_recipe_that_cannot_be_read_names_its_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"r\.toml"):
        load(path, {})


def test_every_recipe_of_the_repository_is_valid() -> None:
    paths = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
    assert paths
    assert all(isinstance(load(path, {}), Recipe) for path in paths)


def test_the_bound_of_the_ratio_that_applies_is_in_the_resolved_recipe():
    for text, bound in [
        ("", 2.0),
        ('[optimizer]\npreset = "paper"', 4.0),
        ('[optimizer]\noptions = {codec = {scale = "bucket"}}', 4.0),
        ("[optimizer]\nfactor_max = 3.0", 3.0),
        ('[optimizer]\nname = "lamb"', 2.0),
    ]:
        found, reasons = resolve(parse(tomllib.loads(text), {}))
        assert found.optimizer.factor_max == bound
        assert ("optimizer.factor_max" in reasons) == ("factor_max" not in text and "lamb" not in text)


def test_the_warmup_is_averaged_in_8_bits_where_one_bit_of_ours_follows():
    for text, transport in [
        ("", "int8"),
        ('name = "onebit-adam"', "int8"),
        ('preset = "paper"', "bf16"),
        ('options = {codec = {scale = "bucket"}}', "bf16"),
        ('name = "adam-1bit-gradient"', "bf16"),
        ('name = "lamb"', "bf16"),
        ('name = "local-variance-lamb"', "int4"),
        ('warmup_transport = "fp32"', "fp32"),
    ]:
        found, reasons = resolve(parse(tomllib.loads(f"[optimizer]\n{text}"), {}))
        assert found.optimizer.warmup_transport == transport
        assert ("optimizer.warmup_transport" in reasons) == (transport != "fp32")
