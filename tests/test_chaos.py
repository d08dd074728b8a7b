"""The robustness suite in short: a few kills, malformed files, flips; and each fault that the long form has found."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import malformed_checkpoints as made
import pytest
import torch
from malformed import try_recipe
from test_train import tiny

import onebit
from onebit import checkpoint
from onebit.errors import ConfigError
from onebit.recipe import resolve
from onebit.report import METRICS, Metrics
from onebit.resume import Checkpoints
from onebit.text import Corpus

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from chaos import malformed, wrong
from chaos_flips import flips
from chaos_kills import Campaign


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """The suite makes the log quieter."""
    log = logging.getLogger("onebit")
    before = log.level
    yield
    log.setLevel(before)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
def test_killed_runs_end_as_the_undisturbed_one() -> None:
    found = Campaign(kills=3, seconds=150, seed=1, jobs=1).run()
    assert found["faults"] == []
    assert found["kills"] >= 3
    assert found["runs that ended as the undisturbed one"] == found["runs"] >= 1
    assert found["largest difference"] == 0.0


@pytest.mark.filterwarnings("default")  # torch's of what a forged state does to its schedules
def test_what_is_malformed_works_or_is_one_error_that_changes_nothing() -> None:
    found = malformed(150, 90, seed=0)
    assert wrong({"malformed": found}) == []
    for kind, least in (("recipes", 60), ("texts", 30), ("checkpoints", 60)):
        assert found[kind]["tried"] >= least
        assert found[kind]["refused"] > 0
        assert found[kind]["works"] > 0


def test_flips_are_detected_or_put_right() -> None:
    found = flips(50, 60, seed=0)
    assert (found["flips"], found["missed"], found["cases missed"]) == (50, 0, [])
    assert found["detected"] > 0
    assert found["put right"] > 0


# --- what was found: recipes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "data.text = " + "[" * 3000 + "]" * 3000,
        "data.text = " + "{a=" * 2000 + "1" + "}" * 2000,
        "optimizer.options.x = " + "[" * 50 + "]" * 50,
        "a" + ".a" * 5000 + " = 1",
        "train.steps = " + "1" * 5000,
        "train.steps = 0x" + "f" * 5000,
        "optimizer.freeze_step = {'a\\nb' = 3}".replace("'", '"'),
        "x" * 100_000 + " = 1",
        "[variants]\n" + "a" * 100_000 + " = 1",
    ],
    ids=["lists", "tables", "many levels", "dots", "digits", "hexadecimal", "line end in a key", "key", "variant"],
)
def test_a_recipe_beyond_measure_is_one_readable_error(content: str, tmp_path: Path) -> None:
    assert try_recipe(content.encode(), tmp_path) == "refused"


# --- what was found: checkpoints --------------------------------------------------------------------------------------


def _own(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda content: change(content["own"][0])


FORGED: dict[str, Callable[[Any], None]] = {
    "no step": lambda content: content.pop("step"),
    "a step that is text": lambda content: content.update(step="5"),
    "more processes than tables": lambda content: content.update(processes=2),
    "no processes": lambda content: content.update(processes=0, own=[]),
    "shared is a number": lambda content: content.update(shared=3),
    "a long format": lambda content: content.update(format=["x" * 9999]),
    "another tensor as random state": _own(lambda own: own["random"].update(torch=["!tensor", "model.0.weight"])),
    "no random state of Python": _own(lambda own: own["random"].pop("python")),
    "a schedule that counts in words": _own(lambda own: own["scheduler"].update(step_size="three")),
    "a schedule's factor a table": _own(lambda own: own["scheduler"].update(gamma={})),
    "steps that are no tensors": _own(lambda own: own["job"]["steps"].update(loss=[1.0])),
    "a tensor of another name": lambda content: content["shared"]["model"].update({"0.weight": ["!tensor", "none"]}),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_checkpoint_whose_checksums_fit_is_one_error_and_changes_nothing(how: str, tmp_path: Path) -> None:
    files = dict(made.saved("OneBitLamb"))
    content = made.content_of(files)
    FORGED[how](content)
    files["checkpoint.json"] = made.sealed(content)
    for trained in (False, True):
        folder = tmp_path / str(trained)
        folder.mkdir()
        assert made.try_checkpoint(("OneBitLamb", "content", files, trained), folder) == "refused"


def test_what_is_no_text_at_all_is_not_repeated_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "step-00000005"
    path.mkdir()
    (path / "checkpoint.json").write_bytes(b"\xc8" * 20_000)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        checkpoint.load(tmp_path)
    assert len(str(caught.value)) < 500


class Late:
    """Refuses what it is given, after everything before it has been loaded."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen += 1
        if self.seen == 1:
            raise RuntimeError("not today\nnor tomorrow")


@pytest.mark.parametrize("name", made.SAVED)
def test_a_load_that_fails_in_the_middle_puts_everything_back(name: str, tmp_path: Path) -> None:
    found = made.parts(name, 5)
    checkpoint.save(tmp_path, 5, **found | {"others": {"late": Late()}})
    other, twin = made.parts(name, 2), made.parts(name, 2)
    with pytest.raises(ConfigError, match="RuntimeError: not today; load another"):
        checkpoint.load(tmp_path, **other | {"others": {"late": Late()}})
    for step in range(2, 8):
        for one in (other, twin):
            made.one_step(one, step)
            one["scheduler"].step()
    assert made.same(made.state_of(other), made.state_of(twin))


def test_a_run_saved_by_a_version_with_other_settings_is_refused_by_name() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    run = Checkpoints(resolve(tiny())[0], Corpus("{}", 64, empty, empty, empty), Path("out"))
    saved = [list(pair) for pair in run._recipe]
    run._fits({"recipe": saved}, 1, 1)
    with pytest.raises(onebit.ConfigError, match=r"this run has no train\.zeal: it was saved by another version"):
        run._fits({"recipe": [*saved, ["train.zeal", "3"]]}, 1, 1)
    with pytest.raises(onebit.ConfigError, match=r"the run that was saved has no model\.vocab_size"):
        run._fits({"recipe": [pair for pair in saved if pair[0] != "model.vocab_size"]}, 1, 1)


# --- what was found: kills --------------------------------------------------------------------------------------------


def test_the_lines_before_a_resume_survive_a_kill_right_after_it(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    with Metrics(path) as metrics:
        for step in (1, 2, 3):
            metrics.write(step=step)
    resumed = Metrics(path, resumed_at=2)
    lines = path.read_text().splitlines()  # what a process that is killed now leaves
    resumed.write(step=3)
    resumed.__exit__(None, None, None)
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
