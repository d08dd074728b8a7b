"""`onebit plan`: what it prints and writes, its refusals, and the table of docs/cost_model.md."""

from __future__ import annotations

import csv
import json
import runpy
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomllib
from typer.testing import CliRunner

from onebit import planner_sweep
from onebit.build import check_optimizer
from onebit.commands import app
from onebit.plan_figures import COLOURS
from onebit.plan_report import recipe_text
from onebit.planner import plan
from onebit.planner_inputs import Model, Network, Run, Setup, Work
from onebit.planner_methods import METHODS
from onebit.recipe import load

ROOT = Path(__file__).parent.parent
SLOW = ["--workers", "8", "--machines", "4", "--link-gbit-s", "1", "--compute-ms", "100", "--steps", "1000"]
FAST = ["--workers", "4", "--link-gbit-s", "25", "--compute-ms", "1000", "--latency-us", "5", "--steps", "1000"]


def call(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result


def as_json(*arguments: object) -> Any:
    return json.loads(call(*arguments, "--json").stdout)


def test_the_tables_show_every_method_and_the_advice():
    output = call("100M", *SLOW, "--price", "12").stdout
    for name in METHODS:
        assert output.count(f"│ {name} ") == 3
    assert "100,000,000 parameters, 8 workers on 4 machines" in output
    assert "recommended: " in output


def test_json_holds_times_bytes_memory_and_money():
    found = as_json("100M", *SLOW, "--price", "12")
    assert set(found["methods"]) == set(METHODS)
    row = found["methods"]["onebit-lamb"]
    assert row["total_s"]["likely"] == pytest.approx(1000 * row["step_s"]["likely"])
    assert row["money"]["likely"] == pytest.approx(row["total_s"]["likely"] / 3600 * 4 * 12)
    assert [(kind["name"], kind["steps"]) for kind in row["kinds"]] == [("warm-up", 170), ("1 bit", 830)]
    assert row["payload_bytes"] == sum(kind["steps"] * kind["payload_bytes"] for kind in row["kinds"])
    assert found["setup"]["model"] == {"parameter_bytes": 4, "parameters": 100_000_000, "layers": 194}
    assert found["worth_it"] is True


def test_a_range_given_is_a_range_in_the_answer():
    row = as_json("100M", *SLOW, "--link-gbit-s", "0.5..1..3", "--straggling", "0..0.2")["methods"]["ddp-16bit"]
    assert row["step_s"]["low"] < row["step_s"]["likely"] < row["step_s"]["high"]
    assert as_json("100M", *SLOW, "--link-gbit-s", "1..3")["setup"]["network"]["link_gbit_s"]["likely"] == 2


@pytest.mark.parametrize(
    ("flags", "part", "field", "value"),
    [
        (("--message-us", 7), "network", "message_us", 7.0),
        (("--latency-us", 500), "network", "latency_us", 500.0),
        (("--local-gbit-s", 0.7), "network", "local_gbit_s", 0.7),  # below the link's, so that it matters
        (("--straggling", 0.2), "work", "straggling", 0.2),
        (("--price", 3), "run", "price_per_machine_hour", 3.0),
        (("--oversubscription", 2), "network", "oversubscription", 2.0),
        (("--half-duplex",), "network", "full_duplex", False),
        (("--all-reduce", "by-machine"), "network", "all_reduce", "by-machine"),
        (("--two-level",), "network", "two_level", True),
        (("--two-level", "--mean-gbit-s", 0.1), "network", "mean_gbit_s", 0.1),
        (("--overlap-exchange",), "work", "overlap_exchange", True),
        (("--overlap-exchange", "--overlap-extra-ms", 50), "work", "overlap_extra_s", 0.05),
        (("--overlap-exchange", "--overlap-extra-ms", -0.5), "work", "overlap_extra_s", -0.0005),
        (("--precision", "bf16"), "model", "parameter_bytes", 2),
        (("--micro-batch", 16), "work", "micro_batch", 16),
        (("--accumulation", 4), "work", "accumulation", 4),
        (("--other-ms", 70), "work", "other_s", 0.07),
        (("--backward-share", 0.1), "work", "backward_share", 0.1),
        (("--overlap", 0), "work", "overlap", 0.0),
        (("--memory-gbyte-s", 20), "work", "memory_gbyte_s", 20.0),
        (("--kernel-factor", 3), "work", "kernel_factor", 3.0),
        (("--plain-factor", 3), "work", "plain_factor", 3.0),
        (("--int8-factor", 30), "work", "int8_factor", 30.0),
        (("--int4-factor", 30), "work", "int4_factor", 30.0),
        (("--local-factor", 30), "work", "local_factor", 30.0),
        (("--low-rank-factor", 30), "work", "low_rank_factor", 30.0),
        (("--freeze-step", 0.3), "run", "warmup_share", 0.3),
    ],
)
def test_every_option_reaches_the_model_and_changes_the_answer(flags, part, field, value):
    before, after = as_json("100M", *SLOW), as_json("100M", *SLOW, *flags)
    assert after["setup"][part][field] == (pytest.approx(value) if isinstance(value, float) else value)
    assert before["methods"] != after["methods"]


@pytest.mark.parametrize("family", ["lamb", "adam"])
@pytest.mark.parametrize("flags", [SLOW, FAST], ids=["slow", "fast"])
def test_the_recipe_is_one_that_train_accepts(family, flags, tmp_path):
    path = tmp_path / "recipe.toml"
    found = as_json("100M", *flags, "--family", family, "--recipe", path, "--micro-batch", "16")
    recipe = load(path, {})
    check_optimizer(recipe)
    assert dict(METHODS[found["recommended"]].recipe).get("name", "adamw") == recipe.optimizer.name
    assert (recipe.train.steps, recipe.train.micro_batch) == (1000, 16)
    assert recipe.train.workers == int(flags[1])
    assert found["advice"] in path.read_text()
    assert found["worth_it"] is (flags is SLOW)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.recipe])
def test_a_recipe_of_any_method_is_accepted_and_names_it(name, tmp_path):
    setup = Setup(Model(((1000, 1000),)), Network(4, 1, 1.0), Work(0.1), Run(400))
    (tmp_path / "recipe.toml").write_text(recipe_text(replace(plan(setup), recommended=name)))
    recipe = load(tmp_path / "recipe.toml", {})
    check_optimizer(recipe)
    expected = dict(METHODS[name].recipe)
    assert {key: getattr(recipe.optimizer, key) for key in expected} == expected
    kinds = dict((kind.name, count) for count, kind in METHODS[name].steps(setup))
    if "warm-up" in kinds:
        assert recipe.freeze_step == kinds["warm-up"]


def test_the_recipe_has_two_levels_and_overlap_where_the_plan_has():
    for levels, overlap in ((False, False), (True, False), (False, True), (True, True)):
        setup = Setup(
            Model(((1000, 1000),)), Network(4, 2, 1.0, two_level=levels), Work(0.1, overlap_exchange=overlap), Run(400)
        )
        for name in ("onebit-lamb", "local-variance-lamb", "zero-one-adam", "lamb-16bit", "ddp-16bit"):
            found = tomllib.loads(recipe_text(replace(plan(setup), recommended=name)))
            compresses = METHODS[name].compresses
            assert found["train"].get("two_levels", False) is (levels and compresses)
            can = compresses and name != "zero-one-adam"
            assert found["optimizer"].get("options", {}).get("overlap", False) is (overlap and can)


def test_it_says_what_the_other_number_of_levels_would_bring():
    shared = ("--workers", 8, "--machines", 2, "--compute-ms", 100, "--steps", 1000, "--link-gbit-s", 0.5)
    shared += ("--local-factor", 100)  # so that one method is recommended, whichever it is
    one, two = (as_json("100M", *shared, flag) for flag in ("--one-level", "--two-level"))
    name = one["recommended"]
    assert two["recommended"] == name
    times = [found["methods"][name]["total_s"]["likely"] for found in (one, two)]
    assert one["levels_gain"] == two["levels_gain"] == pytest.approx(times[0] / times[1])
    gain = one["levels_gain"]
    assert gain > 1.1
    assert f"with two levels (--two-level) it would be {gain:.2f} times as fast" in call("100M", *shared).stdout
    told = call("100M", *shared, "--two-level").stdout
    assert f"with one level (--one-level) it would be {1 / gain:.2f} times as fast" in told
    assert "level" not in call("100M", *shared, "--machines", 8).stdout  # one worker on each


def test_it_says_do_not_bother_with_the_number():
    advice = as_json("100M", *FAST)["advice"]
    assert advice.startswith("do not bother: 16-bit all-reduce is hidden behind backward at 25 Gbit/s: of ")
    assert " ms to a step of 1," in advice


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_plot_is_drawn(ending, tmp_path):
    path = tmp_path / f"plan.{ending}"
    assert f"plot: {path}" in call("100M", *SLOW, "--plot", path).stdout.replace("\n", "")
    assert path.stat().st_size > 5000


def test_a_model_may_be_a_configuration_or_a_function(tmp_path, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "bert",
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "vocab_size": 100,
            }
        )
    )
    (tmp_path / "mine_for_a_plan.py").write_text(
        "import torch\n\ndef model():\n    print('hello')\n    return torch.nn.Linear(10**6, 10**5)\n\n"
        "def shapes():\n    return [(30, 20), (5,)]\n\ndef wrong():\n    return 5\n"
    )
    monkeypatch.chdir(tmp_path)
    parameters = {
        model: as_json(model, *SLOW)["setup"]["model"]["parameters"]
        for model in (str(config), "mine_for_a_plan:model", "mine_for_a_plan:shapes", "336M", "1_000", "bert")
    }
    assert parameters["mine_for_a_plan:model"] == 10**11 + 10**5
    assert parameters["mine_for_a_plan:shapes"] == 605
    assert parameters["336M"] == 336_000_000
    assert parameters["1_000"] == 1000
    assert parameters["bert"] > 10**8
    assert 200_000 < parameters[str(config)] < 250_000
    assert "'mine_for_a_plan:wrong' is int" in call("mine_for_a_plan:wrong", *SLOW, status=2).stderr
    assert "cannot be built" in call("mine_for_a_plan:absent", *SLOW, status=2).stderr


def test_a_sweep_writes_a_map_and_its_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(planner_sweep.sweep, "__defaults__", (80.0, (2, 64), (0.1, 10.0, 100.0), (10**8, 10**11)))
    drawn, table = tmp_path / "map.svg", tmp_path / "map.csv"
    output = call("100M", "--compute-ms", "100", "--sweep", "--plot", drawn, "--csv", table).stdout
    assert "computed from the cost model, not measured" in output
    assert drawn.stat().st_size > 5000
    with table.open() as file:
        rows = list(csv.DictReader(file))
    found = as_json("100M", "--compute-ms", "100", "--sweep")
    assert len(rows) == len(found["cells"]) == 12
    assert [row["fastest"] for row in rows] == [cell["fastest"] for cell in found["cells"]]
    assert rows[0]["limit"] == ""
    assert "does not fit" in "".join(found["summary"])
    one = call("100M", "--compute-ms", "100", "--sweep", "--device-gbyte", "4000").stdout
    assert "does not fit" not in one


def test_the_whole_sweep_spans_what_it_says():
    assert (planner_sweep.WORKERS[0], planner_sweep.WORKERS[-1]) == (2, 4096)
    assert (planner_sweep.LINKS_GBIT_S[0], planner_sweep.LINKS_GBIT_S[-1]) == (0.1, 100.0)
    assert (planner_sweep.PARAMETERS[0], planner_sweep.PARAMETERS[-1]) == (10**8, 10**11)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["100M", "--compute-ms", "100", "--link-gbit-s", "1"], "--workers is not given"),
        (["100M", "--compute-ms", "100", "--workers", "2"], "--link-gbit-s is not given"),
        (["100M", *SLOW, "--machines", "3"], "--workers is 8 and --machines is 3"),
        (["100M", *SLOW, "--link-gbit-s", "fast"], "--link-gbit-s is 'fast'; it must be a number, or a range"),
        (["100M", *SLOW, "--link-gbit-s", "3..1"], "the numbers of a range must rise"),
        (["100M", *SLOW, "--link-gbit-s", "0"], "link_gbit_s is 0.0; it must be a finite number above 0"),
        (["100M", *SLOW, "--straggling", "nan"], "--straggling is 'nan'"),
        (["100M", *SLOW, "--precision", "fp8"], "it must be fp32 or bf16"),
        (["100M", *SLOW, "--family", "sgd"], "it must be 'lamb' or 'adam'"),
        (["100M", *SLOW, "--all-reduce", "tree"], "it must be 'ring' or 'by-machine'"),
        (["100M", *SLOW, "--micro-batch", "0"], "micro_batch is 0"),
        (["100M", *SLOW, "--freeze-step", "100"], "warmup_share is 100.0"),
        (["0", *SLOW], "the model has 0 parameters"),
        (["1.5", *SLOW], "it must be a whole number"),
        (["no-such-file.json", *SLOW], "the model 'no-such-file.json' cannot be used"),
        (["100M", *SLOW, "--csv", "x.csv"], "--csv is 'x.csv' without --sweep"),
        (["100M", *SLOW, "--sweep", "--recipe", "x.toml"], "--recipe is 'x.toml' with --sweep"),
        (["100M", *SLOW, "--recipe", "/no/such/folder/x.toml"], "cannot be written"),
        (["100M", *SLOW, "--plot", "x.nothing"], "cannot be drawn"),
        (["100M", *SLOW, "--workers", "8192", "--recipe", "x.toml"], "train.workers is 8192"),
    ],
)
def test_bad_input_ends_with_one_clear_error(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = call(*arguments, status=2).stderr
    assert error.startswith("error: ")
    assert says in error
    assert not (tmp_path / "x.toml").exists()


def test_the_table_of_the_docs_is_the_output_of_its_command():
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "cost_model.py"))
    found = benchmark["checks"]()
    text = (ROOT / "docs" / "cost_model.md").read_text()
    start, end = "<!-- python benchmarks/cost_model.py -->\n", "\n<!-- end -->"
    assert text.split(start)[1].split(end)[0] == benchmark["tables"](found)
    held = [abs(check.error) for check in found if check.role == "held out"]
    assert statistics.median(held) <= 0.15
    assert sum(error > 0.35 for error in held) <= 1  # the row that the docs name
    assert benchmark["verdicts"](found)[1] == []
    assert sum(check.role == "fitted" for check in found) == 4


def test_every_method_has_a_colour_of_its_own_in_maps():
    assert len(set(COLOURS[: len(METHODS)])) == len(METHODS)
