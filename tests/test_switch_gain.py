"""What the switch brought: told once, with the right medians and the right reason."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebit.resume import Step, pack_steps, unpack_steps
from onebit.switch_gain import AFTER, BEFORE, FEWEST, START_UP, Gain, SwitchGain

SECONDS = st.floats(1e-4, 100)


def fed(before: list[float], after: list[float], compute: tuple[float, float] | None = None) -> tuple[SwitchGain, list]:
    watch, said = SwitchGain(), []
    for stage, times in (("warmup", before), ("compressed", after)):
        part = None if compute is None else compute[stage == "compressed"]
        for seconds in times:
            share = None if part is None else part * seconds
            said.append(watch.add(stage, seconds, 1000 if stage == "warmup" else 60, share))
    return watch, [gain for gain in said if gain is not None]


@given(st.lists(SECONDS, max_size=60), st.lists(SECONDS, max_size=60))
def test_it_is_said_once_and_only_with_enough_steps(before, after):
    watch, said = fed(before, after)
    enough = len(before) - START_UP >= FEWEST and len(after) >= AFTER
    assert len(said) == enough
    last = watch.finish()
    assert (last is not None) == (not enough and len(before) - START_UP >= FEWEST and len(after) >= FEWEST)
    assert watch.finish() is None


@given(st.lists(SECONDS, min_size=START_UP + FEWEST, max_size=60), st.lists(SECONDS, min_size=AFTER, max_size=60))
def test_medians_are_of_the_last_warm_up_and_the_first_compressed_steps(before, after):
    _, (gain,) = fed(before, after)
    used = before[START_UP:][-BEFORE:]
    assert (gain.steps_before, gain.steps_after) == (len(used), AFTER)
    for found, times in ((gain.before_s, used), (gain.after_s, after[:AFTER])):
        assert sum(t < found for t in times) * 2 <= len(times) >= 2 * sum(t > found for t in times)
    assert (gain.before_bytes, gain.after_bytes) == (1000, 60)


def test_the_slow_first_steps_of_a_run_do_not_count():
    _, (gain,) = fed([9.0] * START_UP + [0.2] * 10, [0.1] * AFTER)
    assert gain.before_s == 0.2
    assert gain.speed_up == pytest.approx(2.0)
    assert gain.sentence.endswith(": 2.00 times as fast")
    assert "1 kB before" in gain.sentence
    assert "60 B sent" in gain.sentence


def test_going_back_to_the_warm_up_starts_the_count_anew():
    watch, said = fed([0.2] * 10, [0.1] * (AFTER - 1))
    assert not said
    assert watch.add("warmup", 0.2, 1000) is None
    found = [watch.add("compressed", 0.05, 60) for _ in range(AFTER)]
    assert found[:-1] == [None] * (AFTER - 1)
    assert found[-1] is not None
    assert found[-1].after_s == 0.05


def test_other_stages_count_for_nothing():
    watch = SwitchGain()
    assert not any(watch.add("uncompressed", 0.1, 10) for _ in range(100))
    assert watch.finish() is None


def gain(before: float, after: float, c0: float | None, c1: float | None, sent: int = 1000) -> Gain:
    return Gain(20, 15, before, after, c0, c1, sent, sent // 16)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (gain(0.1, 0.1, 0.097, 0.098), "forward and backward are 97% of a step"),
        (gain(0.1, 0.099, 0.02, 0.02), "on this link the bytes saved cost no more time"),
        (gain(0.1, 0.15, 0.02, 0.1), "forward and backward took longer than before, 0.1"),
        (gain(0.1, 0.1, None, None), "how long communication took is not known"),
        (gain(0.1, 0.1, 0.05, 0.05, 0), "one worker has nobody to send to"),
    ],
)
def test_where_nothing_is_gained_the_reason_is_the_largest_one(found, reason):
    assert "within 5%" in found.sentence or "slower" in found.sentence
    assert reason.replace("0.1", "100 ms") in found.sentence


@pytest.mark.parametrize(
    ("after", "words"),
    [(0.0949, "1.05 times as fast"), (0.096, "within 5%, since"), (0.104, "within 5%, since"), (0.106, "slower, 1.06")],
)
def test_faster_level_and_slower_have_words_of_their_own(after, words):
    said = gain(0.1, after, 0.02, 0.02).sentence
    assert words in said
    assert sum(word in said for word in ("times as fast", "within", "slower")) == 1


def test_steps_without_their_compute_are_left_out_where_others_have_it():
    """As after a resume from a checkpoint of an older version."""
    watch = SwitchGain()
    for _ in range(12):
        watch.add("warmup", 9.0, 1000)
    for _ in range(4):
        watch.add("warmup", 0.2, 1000, 0.15)
    found = [watch.add("compressed", 0.1, 60, 0.09) for _ in range(AFTER)][-1]
    assert found is not None
    assert (found.steps_before, found.before_s, found.before_compute_s) == (4, 0.2, 0.15)


def test_with_too_few_known_ones_on_a_side_compute_is_not_told():
    watch = SwitchGain()
    for i in range(12):
        watch.add("warmup", 0.2, 1000, 0.15 if i > 9 else None)
    found = [watch.add("compressed", 0.1, 60, 0.09) for _ in range(AFTER)][-1]
    assert found is not None
    assert (found.before_compute_s, found.after_compute_s, found.steps_before) == (None, None, 9)


STEP = st.tuples(SECONDS, st.one_of(st.none(), st.floats(0, 1)))


@given(st.lists(STEP, min_size=6, max_size=40), st.lists(STEP, min_size=15, max_size=20))
def test_forward_and_backward_are_never_longer_than_the_step(before, after):
    watch = SwitchGain()
    for stage, steps in (("warmup", before), ("compressed", after)):
        for seconds, share in steps:
            watch.add(stage, seconds, 10, None if share is None else share * seconds)
    assert watch.gain is not None
    for whole, part in (
        (watch.gain.before_s, watch.gain.before_compute_s),
        (watch.gain.after_s, watch.gain.after_compute_s),
    ):
        assert part is None or part <= whole
    assert not re.search(r"(^|[ (])-\d", watch.gain.sentence)


def test_too_few_steps_are_said_and_only_where_there_was_a_switch():
    watch, _ = fed([0.2] * 4, [0.1] * 5)
    assert watch.finish() is None
    assert watch.too_few.startswith("too few steps to compare, 1 before it")
    assert fed([0.2] * 10, [0.1] * AFTER)[0].too_few == ""
    assert fed([0.2] * 10, [])[0].too_few == ""


def test_steps_keep_their_compute_in_a_checkpoint_and_older_ones_have_none():
    steps = [Step("warmup", torch.tensor(1.0), 0.1, 5, 0.2, 0.15), Step("warmup", torch.tensor(1.0), 0.1, 5, 0.2)]
    packed = pack_steps(steps)
    assert [step.compute_s for step in unpack_steps(packed, torch.device("cpu"))] == [0.15, None]
    del packed["compute_s"]
    assert [step.compute_s for step in unpack_steps(packed, torch.device("cpu"))] == [None, None]


def test_the_mapping_has_what_the_sentence_says():
    found = gain(0.2, 0.1, 0.05, 0.05).as_mapping()
    assert found["speed_up"] == pytest.approx(2)
    assert found["before_s"] == 0.2
    assert found["sentence"].startswith("100 ms per step after it, 200 ms before")
