"""What the switch brought: told once, with the right medians and the right reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert "no faster" in found.sentence
    assert reason.replace("0.1", "100 ms") in found.sentence


def test_the_mapping_has_what_the_sentence_says():
    found = gain(0.2, 0.1, 0.05, 0.05).as_mapping()
    assert found["speed_up"] == pytest.approx(2)
    assert found["before_s"] == 0.2
    assert found["sentence"].startswith("100 ms per step after it, 200 ms before")
