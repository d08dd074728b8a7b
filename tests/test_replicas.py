"""Weights of all workers compared during `onebit train`, and its recipe key for checksums."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import CPU, silent, tiny

import onebit
from onebit import job as job_module
from onebit.checked import Checked
from onebit.comm import Comm, Pending, Solo
from onebit.errors import CommError, ConfigError, MismatchError
from onebit.job import Job
from onebit.recipe import Recipe, parse, resolve
from onebit.text import prepare
from onebit.train import run_virtual

RUNS = settings(deadline=None, derandomize=True, database=None, max_examples=15)


def flip(parameter: torch.Tensor, element: int, bit: int) -> None:
    """Change one bit of a float32 parameter, as damaged memory does."""
    values = parameter.data.view(-1)
    element %= values.numel()
    if not values[element]:
        values[element] = 0.5  # of 0 a bit is a number so small that the next step may round it away
    values.view(torch.int32)[element] ^= 1 << bit


CORPUS = functools.cache(lambda: prepare(tiny(), Solo()))


def messages(recipe: Recipe, at: int, worker: int, layer: int, element: int, bit: int) -> tuple[list[str], str, int]:
    """Of each worker, the error of a run in which a bit flips after step `at`; the layer's name; the last step."""
    texts, names, last, corpus = ["", "", ""], [""], [0], CORPUS()

    def work(comm: Comm) -> None:
        job = Job(recipe, comm, CPU, corpus)
        whole_step = job._step

        def step(number: int) -> Any:
            done, last[0] = whole_step(number), number
            if (number, comm.rank) == (at, worker):
                names[0] = job.names[layer % len(job.names)]
                flip(job.parameters[layer % len(job.names)], element, bit)
            return done

        job._step = step  # type: ignore[method-assign]
        with pytest.raises(MismatchError) as caught:
            job.train(None, None)
        texts[comm.rank] = str(caught.value)

    onebit.run_workers(3, work)
    return texts, names[0], last[0]


@RUNS
@given(
    name=st.sampled_from(["lamb", "onebit-lamb", "adamw"]), at=st.integers(1, 10), worker=st.integers(0, 2),
    layer=st.integers(0, 100), element=st.integers(0, 10**6), bit=st.integers(14, 22), every=st.integers(1, 4),
)  # fmt: skip
def test_a_flipped_bit_of_a_weight_is_found_within_check_every_steps(
    name: str, at: int, worker: int, layer: int, element: int, bit: int, every: int
) -> None:
    """High bits of the fraction: a low one may be rounded away, one of the exponent ends runs otherwise."""
    recipe = resolve(tiny(optimizer__name=name, train__check_every=every, train__eval_every=12))[0]
    texts, layer_name, last = messages(recipe, at, worker, layer, element, bit)
    assert len(set(texts)) == 1
    assert at <= last < at + every
    others = ", ".join(str(i) for i in range(3) if i != worker)
    assert f"replicas after step {last} differ between workers: " in texts[0]
    assert f"on worker {worker}" in texts[0]
    assert f"on workers {others}" in texts[0]
    if last == at:
        assert f"differ between workers: {layer_name} is (" in texts[0]
        assert "the first of 1 layers" in texts[0]


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 6, 8, 12]), (1, list(range(1, 13))), (0, [6, 12]), (50, [6, 12])])
def test_weights_are_compared_when_the_recipe_says_and_at_evaluations(
    every: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, corpus = [], CORPUS()

    def note(comm: Comm, what: str, mine: Any) -> None:
        if comm.rank == 0:
            seen.append(what)

    monkeypatch.setattr(job_module, "check_replicas", note)
    recipe = resolve(tiny(train__check_every=every))[0]
    onebit.run_workers(2, lambda comm: Job(recipe, comm, CPU, corpus).train(None, None))
    assert seen == [f"replicas after step {step}" for step in steps]


def test_weights_are_not_compared_while_local_steps_take_them_apart() -> None:
    local = {"local_step_scaler": 1, "local_step_clipper": 4, "var_freeze_step": 3}
    recipe = tiny(optimizer__name="zero-one-adam", optimizer__options=local, train__check_every=1)
    recipe, corpus = resolve(recipe)[0], CORPUS()

    def work(comm: Comm) -> list[int]:
        job = Job(recipe, comm, CPU, corpus)
        job.train(None, None)
        return [step.payload_bytes for step in job._steps]

    for sent in onebit.run_workers(2, work):
        assert len(sent) == 12
        assert 0 in sent  # there were local steps


def test_comparing_is_on_by_default_and_checksums_are_off() -> None:
    assert parse({}, {}).train.check_every == 50
    assert parse({}, {}).train.checksums is False


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("check_every", -1, "train.check_every is -1"),
        ("check_every", 2.5, "train.check_every is 2.5"),
        ("checksums", 1, "train.checksums is 1"),
    ],
)
def test_impossible_values_are_refused(key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({"train": {key: value}}, {})


@pytest.mark.parametrize("name", ["onebit-lamb", "adamw"])
def test_a_run_with_checksums_learns_the_same_and_sends_more(name: str) -> None:
    corpus, results = CORPUS(), []

    def work(comm: Comm) -> tuple[float, list[float], int]:
        job = Job(recipe, comm, CPU, corpus)
        job.train(None, None)
        return job.eval_loss, [step.loss.item() for step in job._steps], job.payload_bytes()

    for checksums in (False, True):
        recipe = resolve(tiny(optimizer__name=name, train__checksums=checksums))[0]
        results.append(onebit.run_workers(2, work))
    for plain, checked in zip(*results, strict=True):
        assert plain[:2] == checked[:2]
        assert plain[2] < checked[2] < 1.02 * plain[2]


def test_a_run_with_checksums_ends_when_a_message_was_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sound = Checked._all_to_all

    def damaged(self: Checked, messages_: torch.Tensor) -> Pending:
        if self.rank == 1:
            calls.append(1)
        pending = sound(self, messages_)
        if self.rank == 1 and len(calls) == 3:
            received = pending._pending.wait()  # type: ignore[attr-defined]
            received[0, 5] ^= 4
            pending._pending = Pending(received)  # type: ignore[attr-defined]
        return pending

    monkeypatch.setattr(Checked, "_all_to_all", damaged)
    with pytest.raises(CommError, match=r"worker 1 of 2 received a message of worker 0 in all_to_all that was damaged"):
        run_virtual(tiny(train__checksums=True), tmp_path / "out", silent())
    assert not (tmp_path / "out").exists()
