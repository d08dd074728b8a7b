"""`onebit bench`: the figures hang together, whatever they are on this machine; the peer's rows are what they say."""

import importlib.metadata
import json
import sys

import numpy
import pytest
import torch
from torch import nn
from torch.utils.dlpack import to_dlpack
from typer.testing import CliRunner

import onebit
from onebit import peer
from onebit.bench import COMPRESSED, FLOORS, bert_large_shapes, measure
from onebit.commands import app


@pytest.fixture
def deepspeed(monkeypatch):
    """Sets the version of deepspeed that seems to be installed; None for none. Nothing of it can be imported."""
    real = importlib.metadata.version

    def seems(version):
        def look_up(name):
            if name != "deepspeed":
                return real(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", look_up)
        monkeypatch.setitem(sys.modules, "deepspeed", None)

    return seems


def test_rows_hang_together_and_threads_are_given_back(deepspeed):
    deepspeed(None)
    before = torch.get_num_threads()
    result = measure(elements=1, threads=[1, 2], rounds=1)
    assert torch.get_num_threads() == before
    assert result["elements"] == sum(torch.Size(shape).numel() for shape in bert_large_shapes(1))
    first, second = result["runs"]
    assert (first["threads"], second["threads"]) == (1, 2)
    for run in first, second:
        rows = run["rows"]
        assert set(FLOORS) < set(rows)
        assert rows["copy"]["floor_ratio"] == pytest.approx(1.0)
        for name, floor in FLOORS.items():
            row = rows[name]
            assert row["gb_per_s"] == pytest.approx(floor / row["ns_per_element"])
            assert row["floor_ratio"] == pytest.approx(rows["copy"]["gb_per_s"] / row["gb_per_s"])
    for name, row in second["rows"].items():
        assert row["scaling"] == pytest.approx(first["rows"][name]["ns_per_element"] / row["ns_per_element"])
        assert "scaling" not in first["rows"][name]
    assert not any("DeepSpeed" in name for name in first["rows"])
    assert "peer_ratio" not in first


def test_each_number_of_threads_is_in_force_while_its_steps_run(deepspeed, monkeypatch):
    deepspeed(None)
    seen = []
    monkeypatch.setattr("onebit.bench._steps", lambda shapes: {"step": lambda: seen.append(torch.get_num_threads())})
    monkeypatch.setattr("onebit.bench.COMPRESSED", "step")
    measure(elements=1, threads=[2, 1], rounds=2)
    assert seen == [2, 1] * 3


def test_the_peers_ratio_is_its_time_over_ours(deepspeed, monkeypatch):
    deepspeed(peer.VERSION)
    times = {"copy": 1.0, COMPRESSED: 2.0, peer.LAMB: 25.0}
    monkeypatch.setattr("onebit.bench._steps", lambda shapes: {})
    monkeypatch.setattr("onebit.bench._interleaved", lambda steps, threads, rounds: {t: times for t in threads})
    result = measure(elements=1, threads=[1], rounds=1)
    assert result["peer"] == ""
    assert result["runs"][0]["peer_ratio"] == 12.5


@pytest.mark.parametrize("changed", [{"elements": 0}, {"threads": [1, 0]}, {"rounds": 0}])
def test_impossible_values_are_named(changed):
    with pytest.raises(onebit.ConfigError, match=f"bench {next(iter(changed))} is 0"):
        measure(**{"elements": 1, "threads": [1], "rounds": 1, **changed})


@pytest.mark.parametrize(("threads", "message"), [("1,x", "whole numbers"), ("2,2", "once"), ("", "whole numbers")])
def test_impossible_threads_are_named(threads, message):
    result = CliRunner().invoke(app, ["bench", "--elements", "1", "--threads", threads])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("version", "line"),
    [(None, "deepspeed is not installed"), ("0.19.7", "deepspeed is 0.19.7, and only 0.19.6")],
)
def test_without_the_peer_there_is_no_row_but_a_line_that_says_what_to_install(deepspeed, version, line):
    deepspeed(version)
    arguments = ["bench", "--elements", "1", "--rounds", "1"]
    shown = CliRunner().invoke(app, arguments).stdout
    assert f"no rows of the peer: {line}" in shown
    assert f"pip install deepspeed=={peer.VERSION}" in shown
    assert "OnebitLamb" not in shown
    result = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert result["peer"].startswith(line)
    assert not any("OnebitLamb" in name for name in result["runs"][0]["rows"])


def test_the_stand_in_for_cupy_packs_as_numpy_does_without_copying():
    cupy = peer.cupy_stand_in()
    signs = torch.tensor([1, 0, 0, 0, 0, 0, 1, 1] + [0] * 7 + [1], dtype=torch.uint8)
    array = cupy.from_dlpack(to_dlpack(signs))
    signs[1] = 1
    assert array[1] == 1
    packed = cupy.packbits(array)
    assert packed.tolist() == [0b11000011, 0b00000001]
    assert [part.tolist() for part in cupy.split(packed, 2)] == [[195], [1]]
    assert numpy.array_equal(cupy.unpackbits(packed), signs.numpy())
    assert cupy.zeros([2, 3], dtype=packed.dtype).tolist() == [[0] * 3] * 2
    cupy.cuda.Device(0).use()
    cupy.cuda.get_current_stream().synchronize()


def test_the_group_of_one_sends_to_itself_and_counts():
    gloo = peer.Gloo()
    received = torch.zeros(1, 8, dtype=torch.uint8)
    gloo.all_to_all_single(received, torch.arange(8, dtype=torch.uint8)[None])
    assert received.tolist() == [list(range(8))]
    scales = [torch.zeros(1)]
    gloo.all_gather(scales, torch.tensor(3.0))  # no dimension: Gloo itself would refuse
    assert scales[0].tolist() == [3.0]
    assert gloo.payload_bytes == 8 + 4


def some_parameters():
    """10^5 elements with gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(300, 320), (4000,)]]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


@pytest.mark.skipif(bool(peer.obstacle()), reason=peer.obstacle())
def test_the_peers_steps_are_compressed_and_change_the_parameters():
    steps = peer.steps(some_parameters, lr=1e-3, weight_decay=0.01)
    assert list(steps) == [peer.LAMB, peer.ADAM]
    for name, step in steps.items():
        params = step.__self__.param_groups[0]["params"]
        before = [p.detach().clone() for p in params]
        step()
        for p, old in zip(params, before, strict=True):
            assert not torch.equal(p, old)
            momentum = step.__self__.state[p]["exp_avg"]
            assert momentum.abs().max() == pytest.approx(momentum.abs().min().item()), name  # one magnitude, two signs
            assert (momentum > 0).any()
            assert (momentum < 0).any()


@pytest.mark.skipif(bool(peer.obstacle()), reason=peer.obstacle())
def test_a_peer_that_does_not_compress_is_refused(monkeypatch):
    kind = type(peer.steps(some_parameters, lr=1e-3)[peer.LAMB].__self__)
    monkeypatch.setattr(kind, "size", property(lambda self: 1, lambda self, value: None), raising=False)  # one worker
    with pytest.raises(onebit.OnebitError, match="sent 0 bytes"):
        peer.steps(some_parameters, lr=1e-3)
