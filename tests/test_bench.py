"""`onebit bench`: the figures hang together, whatever they are on this machine."""

import pytest
import torch

import onebit
from onebit.bench import FLOORS, bert_large_shapes, measure


def test_rows_hang_together_and_threads_are_given_back():
    before = torch.get_num_threads()
    result = measure(elements=1, threads=1, rounds=1)
    assert torch.get_num_threads() == before
    rows = result["rows"]
    assert result["elements"] == sum(torch.Size(shape).numel() for shape in bert_large_shapes(1))
    assert set(FLOORS) < set(rows)
    assert rows["copy"]["floor_ratio"] == pytest.approx(1.0)
    for name, floor in FLOORS.items():
        row = rows[name]
        assert row["gb_per_s"] == pytest.approx(floor / row["ns_per_element"])
        assert row["floor_ratio"] == pytest.approx(rows["copy"]["gb_per_s"] / row["gb_per_s"])


@pytest.mark.parametrize("changed", [{"elements": 0}, {"threads": 0}, {"rounds": 0}])
def test_impossible_values_are_named(changed):
    with pytest.raises(onebit.ConfigError, match=f"bench {next(iter(changed))} is 0"):
        measure(**{"elements": 1, "threads": 1, "rounds": 1, **changed})
