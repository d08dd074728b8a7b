"""`onebit doctor` finds faults that were planted, and finds none where there are none."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from onebit import doctor_command
from onebit.comm import Comm, Pending, Solo
from onebit.commands import app
from onebit.doctor import (
    AssumedLink,
    examine,
    judged_link,
    kernels_of,
    replicas_of,
    status_of,
    transport_of,
    trusted,
    versions_of,
)
from onebit.doctor_run import Assumed, Steps, examine_run, largest_reason, predict, probe_of_another, summary_in
from onebit.errors import ConfigError
from onebit.interfaces import Host, interfaces_here, kind_of
from onebit.planner import StepTime
from onebit.planner_inputs import Range
from onebit.probe_file import Probed
from onebit.recipe import parse
from onebit.report import Display, read_summary
from onebit.train import run_alone, run_virtual
from onebit.virtual import run_workers
from tests.processes import run_processes

CPU = torch.device("cpu")
TINY = {
    "model": {"vocab_size": 300, "hidden_size": 32, "layers": 1, "heads": 2},
    "data": {"sequence_length": 32, "eval_windows": 20},
    "optimizer": {"freeze_step": 10, "lr": 0.01},
    "train": {"steps": 30, "micro_batch": 2, "workers": 2, "log_every": 10, "eval_every": 30},
}
HAS = {"lo": "loopback", "eth0": "wired", "docker0": "container bridge", "wlan0": "Wi-Fi", "wg0": "tunnel"}


def host(name: str, wanted: str, address: str = "10.0.0.1", backend: str = "gloo") -> Host:
    return Host(name, backend, wanted, HAS, address)


# -- interfaces ----------------------------------------------------------------------------------------------------


def faults(*hosts: Host) -> list[tuple[str, str]]:
    machines = len({h.name for h in hosts})
    return [(f.mark, f.finding) for f in transport_of(hosts, machines) if f.subject == "interface"]


def test_loopback_is_right_on_one_machine_and_wrong_on_two():
    assert faults(host("a", "lo"), host("a", "lo")) == []
    found = faults(host("a", "lo"), host("b", "lo"))
    assert [mark for mark, _ in found] == ["wrong", "wrong"]
    assert found[0][1] == "a uses lo, the loopback interface, and workers are on several machines"
    assert len(faults(host("a", "lo"), host("b", "eth0"))) == 1


def test_an_interface_that_is_not_there_is_wrong_and_those_there_are_named():
    ((mark, finding),) = faults(host("a", "eth7"), host("a", "eth7"))
    assert mark == "wrong"
    assert "GLOO_SOCKET_IFNAME is 'eth7', and a has no interface eth7" in finding
    assert "eth0 (wired)" in finding


@pytest.mark.parametrize("name", ["docker0", "wlan0", "wg0"])
def test_interfaces_that_look_slow_are_a_warning(name):
    ((mark, finding),) = faults(host("a", name), host("a", "eth0"))
    assert mark == "warning"
    assert HAS[name] in finding


def test_without_a_name_gloo_takes_the_address_of_the_host():
    assert faults(host("a", "", "127.0.1.1"), host("a", "", "127.0.1.1")) == []
    found = faults(host("a", "", "127.0.1.1"), host("b", "", ""))
    assert [mark for mark, _ in found] == ["wrong", "wrong"]
    assert "resolves to 127.0.1.1" in found[0][1]
    assert "resolves to no address" in found[1][1]
    assert faults(host("a", "", "127.0.1.1", "nccl"), host("b", "", "127.0.1.1", "nccl")) == []


@pytest.mark.parametrize(
    ("wanted", "chosen", "missing"),
    [
        ("eth", ("eth0",), ()),
        ("=eth", (), ("eth",)),
        ("=eth0,lo", ("lo", "eth0"), ()),
        ("^lo,docker", ("eth0", "wlan0", "wg0"), ()),
        ("ib0", (), ("ib0",)),
        ("eth0:9000", ("eth0",), ()),
    ],
)
def test_nccl_names_by_prefix(wanted, chosen, missing):
    found = host("a", wanted, backend="nccl")
    assert (found.chosen, found.missing) == (chosen, missing)


def test_kinds_are_read_from_the_system(tmp_path):
    for name, kind, wireless in (("eth0", 1, False), ("lo", 772, False), ("wlp3s0", 1, True), ("tun9", 65534, False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
        if wireless:
            (tmp_path / name / "wireless").mkdir()
    (tmp_path / "br-1f2e").mkdir()
    (tmp_path / "bonding_masters").write_text("bond0")
    assert interfaces_here(tmp_path) == {
        "br-1f2e": "container bridge", "eth0": "wired", "lo": "loopback", "tun9": "tunnel", "wlp3s0": "Wi-Fi",
    }  # fmt: skip
    assert kind_of("veth12", 1, False) == "container bridge"
    assert "loopback" in interfaces_here().values()


# -- versions, kernels, links ----------------------------------------------------------------------------------------


def test_versions_that_differ_are_found_and_who_has_which():
    here = {"python": "3.11.7", "torch": "2.13.0", "onebit": "0.1.0"}
    assert {f.mark for f in versions_of([here, here])} == {"ok"}
    found = {f.subject: f for f in versions_of([here, here | {"torch": "2.12.1", "python": "3.12.1"}, here])}
    assert found["torch"].mark == "wrong"
    assert found["torch"].finding == "2.13.0 on workers 0, 2, 2.12.1 on worker 1"
    assert found["python"].mark == "warning"
    assert found["onebit"].mark == "ok"


def test_slow_kernels_are_a_warning_and_impossible_ones_wrong():
    assert [f.mark for f in kernels_of([["native", "built"]] * 2)] == ["ok"]
    found = kernels_of([["native", "built"], ["reference", "not built"], ["", "ONEBIT_KERNELS is 'x'"]])
    assert [f.mark for f in found] == ["ok", "warning", "wrong"]
    assert "on worker 1" in found[1].finding


@pytest.mark.parametrize(
    ("rate", "assumed", "marks"),
    [
        (1.0, None, ["ok"]),
        (1.0, AssumedLink(1.1), ["ok"]),
        (1.0, AssumedLink(1.5), ["warning"]),
        (1.0, AssumedLink(2.5), ["wrong"]),
        (1.0, AssumedLink(Range(1.0, 2.5, 3.0)), ["wrong"]),  # the likely one counts
        (1.0, AssumedLink(Range(0.1, 1.2, 9.0)), ["ok"]),
        (1.0, AssumedLink(None), ["warning"]),
        (None, AssumedLink(1.0), ["ok"]),
        (1.0, AssumedLink(1.0, 400.0), ["ok"]),
        (1.0, AssumedLink(1.0, 100.0), ["ok", "warning"]),
    ],
)
def test_a_link_is_judged_by_what_was_assumed(rate, assumed, marks):
    assert [f.mark for f in judged_link("as measured", rate, 500.0, assumed)] == marks


def test_a_link_says_what_it_was_judged_by():
    (found,) = judged_link("as measured", 1.0, 500.0, AssumedLink(Range(0.5, 1.25, 3.0)))
    assert "assumed 1.25 Gbit/s (the likely one of 0.5..3), so it is 80% of that" in found.finding


def test_a_poor_fit_and_sizes_left_out_are_warnings():
    assert trusted(0.19, 0) == []
    assert [f.subject for f in trusted(0.21, 2)] == ["link fit", "link sizes"]
    assert {f.mark for f in trusted(0.21, 2)} == {"warning"}


def test_kernels_that_cannot_be_used_are_a_finding_and_not_the_end(monkeypatch):
    monkeypatch.setenv("ONEBIT_KERNELS", "none-such")
    found = {f["subject"]: f for f in examine(Solo(), CPU, "cpu (for a test)", None)}
    assert found["kernels"]["mark"] == "wrong"
    assert "none-such" in found["kernels"]["finding"]
    assert "replicas" not in found


def test_one_worker_with_something_to_compare_is_a_warning():
    found = json.loads(call("--link-gbit-s", 1, "--json").stdout)["findings"]
    ((mark, finding),) = [(f["mark"], f["finding"]) for f in found if f["subject"] == "link"]
    assert mark == "warning"
    assert "one worker has no link to compare" in finding


# -- replicas --------------------------------------------------------------------------------------------------------


class Tampering(Comm):
    """One worker's view of others, in which a byte of what worker 1 gathers in the compressed stage is another."""

    def __init__(self, inner: Comm) -> None:
        self.inner, self.rank_, self.size_ = inner, inner.rank, inner.size

    @property
    def rank(self) -> int:
        return self.rank_

    @property
    def size(self) -> int:
        return self.size_

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.inner.all_gather_bytes(data)

    def _all_to_all(self, messages: Tensor) -> Pending:
        return self.inner.all_to_all(messages)

    def _all_gather(self, message: Tensor) -> Pending:
        result = self.inner.all_gather(message).wait().clone()
        if self.rank == 1:
            result[0, -8] ^= 0x10
        return Pending(result)

    def _all_reduce(self, tensor: Tensor) -> None:
        self.inner.all_reduce(tensor)


def test_replicas_that_came_apart_are_found():
    good = run_workers(2, lambda comm: replicas_of(comm, CPU))
    assert [f[0].mark for f in good] == ["ok", "ok"]
    bad = run_workers(2, lambda comm: replicas_of(Tampering(comm), CPU))
    assert [f[0].mark for f in bad] == ["wrong", "wrong"]
    assert "on worker 0 and" in bad[0][0].finding
    assert "layer 0" in bad[0][0].finding


def _examined(comm: Comm) -> list[dict[str, Any]]:
    return examine(comm, CPU, "cpu (for a test)", AssumedLink(1e-4, 1e6))


def test_two_sound_workers_have_no_fault():
    first, second = run_processes(2, _examined)
    assert [f["subject"] for f in first] == [f["subject"] for f in second]
    assert {f["mark"] for f in first} <= {"ok", "warning"}  # a warning where kernels were not built
    assert status_of(first) == 0
    link = next(f for f in first if f["subject"] == "link")
    assert link["number"] > 1e-4


# -- a run -----------------------------------------------------------------------------------------------------------


def train(folder: Path, **overrides: Any) -> Path:
    recipe = parse(TINY, {key.replace("__", "."): value for key, value in overrides.items()})
    display = Display(Console(), quiet=True)
    if recipe.train.workers == 1:
        run_alone(recipe, folder, display)
    else:
        run_virtual(recipe, folder, display)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "good", optimizer__warmup_transport="bf16")


def marks(folder: Path, assumed: Assumed = Assumed(None, None, None)) -> dict[str, str]:  # noqa: B008
    return {f["subject"]: f["mark"] for f in examine_run(folder, assumed)}


def test_a_run_whose_compression_was_active(finished):
    found = {f["subject"]: f for f in examine_run(finished, Assumed(None, 0.1, 2))}
    assert list(found)[:4] == ["compression", "bytes", "step time", "speed-up"]
    assert set(found) - {"exchange"} == set(list(found)[:4])
    assert (
        "not measured: latency_us 50, message_us 5, exchange_efficiency 1, memory_gbyte_s 500"
        in (found["speed-up"]["finding"])
    )
    assert found["compression"]["mark"] == found["bytes"]["mark"] == "ok"
    assert found["compression"]["number"] == pytest.approx(2 / 3)
    assert found["bytes"]["number"] == pytest.approx(1 / 16, rel=0.15)
    gain = read_summary(finished).switch_gain
    assert gain is not None
    assert (gain["steps_before"], gain["steps_after"]) == (7, 15)
    assert gain["before_bytes"] > 10 * gain["after_bytes"]
    assert 0 < gain["before_compute_s"] < gain["before_s"]
    assert gain["sentence"] in found["step time"]["finding"]
    assert "predicted" in found["speed-up"]["finding"]
    assert found["speed-up"]["number"] == pytest.approx(gain["speed_up"])


@pytest.mark.parametrize(("steps", "times"), [(12, 1), (30, 0)])
def test_a_run_with_too_few_steps_to_compare_says_so_once(tmp_path, steps, times):
    output = io.StringIO()
    recipe = parse(TINY, {"train.steps": steps, "train.eval_every": steps})
    run_virtual(recipe, tmp_path / "run", Display(Console(file=output, width=300), quiet=False))
    assert output.getvalue().count("the switch: too few steps to compare, 7 before it") == times
    assert (read_summary(tmp_path / "run").switch_gain is None) == bool(times)


def test_compression_that_never_came_is_wrong_and_says_what_to_set(tmp_path):
    guard = {"guard": {"max_stretch": 1.0001, "postpone_steps": 100}}
    short = {"train__steps": 6, "train__eval_every": 6, "optimizer__freeze_step": 3}
    folder = train(tmp_path / "never", optimizer__options=guard, **short)
    (found,) = examine_run(folder, Assumed(None, None, None))
    assert found["mark"] == "wrong"
    assert "never active in 6 steps of onebit-lamb" in found["finding"]
    assert "a guard may postpone it" in found["finding"]
    assert status_of([found]) == 1


def test_a_switch_beyond_the_end_is_wrong(finished, tmp_path):
    values = json.loads((finished / "summary.json").read_text())
    values |= {"compressed_share_of_16bit": None, "freeze_step": None, "freeze_reason": "", "switch_gain": None}
    values["samples_per_s"].pop("compressed")
    values["recipe"]["optimizer"]["freeze_step"] = 40
    (tmp_path / "summary.json").write_text(json.dumps(values))
    found = json.loads(call("--folder", tmp_path, "--json", status=1).stdout)["findings"][-1]
    assert (found["mark"], found["subject"]) == ("wrong", "compression")
    assert "never active in 30 steps of onebit-lamb: freeze_step is 40" in found["finding"]
    assert "below 30" in found["advice"]


def test_other_optimizers_and_one_worker_are_no_fault_but_a_warning(tmp_path):
    short = {"train__steps": 4, "train__eval_every": 4, "optimizer__freeze_step": 2}
    assert marks(train(tmp_path / "lamb", optimizer__name="lamb", **short)) == {"compression": "warning"}
    assert marks(train(tmp_path / "one", train__workers=1, **short)) == {"compression": "warning"}


def test_an_older_run_has_step_times_from_its_stages(finished, tmp_path):
    values = json.loads((finished / "summary.json").read_text())
    del values["switch_gain"]
    (tmp_path / "summary.json").write_text(json.dumps(values))
    found = {f["subject"]: f["finding"] for f in examine_run(tmp_path, Assumed(None, 0.1, 2))}
    assert "means of the stages" in found["step time"]
    assert "no prediction" in found["speed-up"]


def test_the_prediction_is_of_the_run(finished):
    summary = read_summary(finished)
    slow = predict(summary, 0.01, Assumed(None, 0.01, 2))
    fast = predict(summary, 0.01, Assumed(None, 100.0, 2))
    assert slow is not None
    assert fast is not None
    assert slow[0].compute_s == pytest.approx(0.01)
    assert slow[0].all_reduce_s == pytest.approx(2 * summary.parameters * 8 / 0.01e9, rel=0.05)  # n = 2, bf16
    assert slow[0].total_s / slow[1].total_s > 3 > fast[0].total_s / fast[1].total_s
    assert slow[0].hidden_s == 0  # `onebit train` averages after backward
    wide = replace(
        summary, recipe={**summary.recipe, "optimizer": {**summary.recipe["optimizer"], "warmup_transport": "fp32"}}
    )
    doubled = predict(wide, 0.01, Assumed(None, 0.01, 2))
    assert doubled is not None
    assert doubled[0].all_reduce_s == pytest.approx(2 * slow[0].all_reduce_s, rel=0.02)
    with pytest.raises(ConfigError, match="must be a multiple of machines"):
        predict(summary, 0.01, Assumed(None, 1.0, 3))


@pytest.mark.parametrize("name", ["onebit-lamb", "onebit-adam"])
def test_a_run_with_the_warmup_that_recipes_choose_has_a_prediction(tmp_path, name):
    summary = read_summary(train(tmp_path / "run", optimizer__name=name, train__steps=12, train__eval_every=12))
    assert summary.recipe["optimizer"]["warmup_transport"] == "int8"
    times = predict(summary, 0.01, Assumed(None, 1.0, 2))
    assert times is not None
    for time in times:
        assert time.all_to_all_s > 0
        assert time.all_reduce_s == 0


PROBED = Probed(
    workers=2, machines=1, inside=True, shapes=((680_016,),), micro_batch=8, micro_step_s=0.01, backward_share=0.6,
    straggling=0.25, link_gbit_s=3.0, latency_us=40.0, message_us=9.0, exchange_efficiency=0.5, local_gbit_s=None,
    local_latency_us=None, residual=0.01, memory_gbyte_s=10.0, kernel_factor=2.0, plain_factor=1.0,
    int8_factor=4.0, int4_factor=5.0, local_factor=2.0, low_rank_factor=5.0, two_level=False,
    mean_gbit_s=None, overlapped_step_s=None, device="cpu", threads=1,
)  # fmt: skip


def speed_up(folder: Path, *assumed: Any) -> str:
    return next(f["finding"] for f in examine_run(folder, Assumed(*assumed)) if f["subject"] == "speed-up")


def test_a_rate_that_nobody_measured_or_gave_predicts_nothing(finished):
    assert "no prediction: the run was between 2 machines, and no rate" in speed_up(finished, PROBED, None, 2)
    between = replace(PROBED, machines=2, inside=False)
    assert "no prediction: the run was inside one machine, and no rate" in speed_up(finished, between, None, 1)
    assert "no prediction" in speed_up(finished, replace(PROBED, link_gbit_s=None), None, None)
    assert "no prediction" in speed_up(finished, replace(PROBED, workers=1, link_gbit_s=None), None, None)
    for assumed in ((PROBED, None, None), (PROBED, 1.0, 2), (None, 1.0, 1), (between, None, None)):
        assert " predicted" in speed_up(finished, *assumed)
    assert "not measured" not in speed_up(finished, PROBED, None, None)


def test_a_rate_that_was_given_is_the_local_one_inside_a_machine(finished):
    summary = read_summary(finished)
    slow, fast = (predict(summary, 0.01, Assumed(None, rate, 1)) for rate in (0.001, 10.0))
    assert slow is not None
    assert fast is not None
    assert slow[0].all_reduce_s > 100 * fast[0].all_reduce_s
    over = predict(summary, 0.01, Assumed(PROBED, 0.001, None))
    assert over is not None
    assert over[0].all_reduce_s == pytest.approx(slow[0].all_reduce_s, rel=0.05)


def test_the_prediction_has_the_levels_and_the_overlap_of_the_run(finished):
    summary = replace(read_summary(finished), parameters=1_000_000)  # several buckets with overlap
    assumed = Assumed(replace(PROBED, two_level=True, mean_gbit_s=2.0), None, 1)
    recipe = summary.recipe
    levels = replace(summary, recipe=recipe | {"train": recipe["train"] | {"two_levels": True}})
    options = recipe["optimizer"].get("options", {}) | {"overlap": True}
    overlap = replace(summary, recipe=recipe | {"optimizer": recipe["optimizer"] | {"options": options}})
    plain, two, hidden = (predict(each, 0.01, assumed) for each in (summary, levels, overlap))
    assert plain is not None
    assert two is not None
    assert hidden is not None
    assert plain[1].local_mean_s == 0
    assert two[1].local_mean_s == pytest.approx(2 * summary.parameters * 8 / 2e9 + 49e-6, rel=0.05)
    assert hidden[1].hidden_s > plain[1].hidden_s == 0
    probed = replace(assumed.probed, shapes=((250_000,),) * 4, overlapped_step_s=0.5)
    timed = predict(overlap, 0.01, replace(assumed, probed=probed))
    assert timed is not None
    assert timed[1].total_s > 0.45
    other = predict(overlap, 0.01, replace(assumed, probed=replace(probed, shapes=((300_000,),) * 4)))
    assert other is not None
    assert other[1].total_s < 0.1


def test_the_probes_straggling_is_predicted(finished):
    found = predict(read_summary(finished), 0.01, Assumed(PROBED, None, None))
    assert found is not None
    assert found[0].straggling_s == pytest.approx(0.25 * found[0].compute_s)


def test_a_probe_of_something_else_is_a_warning(finished):
    summary = replace(read_summary(finished), parameters=680_000, device="cpu", threads=1)
    assert probe_of_another(summary, PROBED) == []
    (found,) = probe_of_another(replace(summary, parameters=600_000, device="cuda", threads=4), PROBED)
    assert found.mark == "warning"
    for words in ("600,000 in the run", "device cpu, and cuda", "1 threads, and 4"):
        assert words in found.finding
    assert probe_of_another(replace(summary, device=None, threads=None), PROBED) == []  # an older run
    assert marks(finished, Assumed(PROBED, None, None))["probe"] == "warning"
    assert (read_summary(finished).device, bool(read_summary(finished).threads)) == ("cpu", True)


def test_exchange_and_update_are_judged_by_themselves(finished, tmp_path):
    """A run whose ratio is as predicted, and whose exchange takes ten times as long on either side."""
    summary = read_summary(finished)
    predicted = predict(summary, 1e-4, Assumed(None, 0.01, 2))
    assert predicted is not None
    values = json.loads((finished / "summary.json").read_text())
    for factor, wanted in ((1.0, []), (10.0, ["before", "after"])):
        for side, step in zip(("before", "after"), predicted, strict=True):
            whole = 1e-4 + factor * (step.total_s - step.compute_s)
            values["switch_gain"] |= {f"{side}_s": whole, f"{side}_compute_s": 1e-4}
        (tmp_path / "summary.json").write_text(json.dumps(values))
        found = examine_run(tmp_path, Assumed(None, 0.01, 2))
        assert next(f["mark"] for f in found if f["subject"] == "speed-up") == "ok"
        off = [f for f in found if f["subject"] == "exchange"]
        assert [f["mark"] for f in off] == ["warning"] * len(wanted)
        for side, finding in zip(wanted, off, strict=True):
            assert f"waiting {side} the switch took" in finding["finding"]


def test_the_largest_reason_is_the_largest_difference():
    before, after = StepTime(compute_s=0.1, all_reduce_s=0.5), StepTime(compute_s=0.1, all_to_all_s=0.05)
    assert "after the switch took 300 ms, 50" in largest_reason(Steps(0.6, 0.4, 0.1, 0.1), before, after)
    assert "waiting before the switch took 900 ms, 500" in largest_reason(Steps(1.0, 0.2, 0.1, 0.1), before, after)
    assert "backward after the switch took 700 ms" in largest_reason(Steps(0.6, 0.75, 0.1, 0.7), before, after)
    assert "a step took 1,000 ms before" in largest_reason(Steps(1.0, 0.15, None, None), before, after)


# -- the command -----------------------------------------------------------------------------------------------------


def call(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "400"})
    assert result.exit_code == status, result.output
    return result


def test_one_worker_is_examined_alone(finished):
    found = json.loads(call("--folder", finished, "--json").stdout)
    assert found["status"] == 0
    subjects = [f["subject"] for f in found["findings"]]
    assert subjects[:3] == ["python", "torch", "onebit"]
    assert {"kernels", "transport", "replicas", "compression", "bytes"} <= set(subjects)


def test_the_sizes_of_a_probe_are_those_that_are_timed():
    both = doctor_command._assumed_link(PROBED, 2.0)
    assert both == AssumedLink(2.0, shapes=PROBED.shapes)
    assert doctor_command._assumed_link(PROBED, None) == AssumedLink(3.0, 49.0, True, PROBED.shapes)
    assert doctor_command._assumed_link(None, None) is None


def test_two_workers_on_the_command_line():
    output = call("--workers", 2, "--link-gbit-s", 1e-4).stdout
    assert "gloo, 2 workers on 1 machine; " in output
    assert "equal after 8 steps through the switch" in output
    assert output.rstrip().endswith("ok")
    assert "0 wrong" in output


def test_a_link_far_below_the_plan_is_exit_status_1():
    found = json.loads(call("--workers", 2, "--link-gbit-s", 1e6, "--json", status=1).stdout)
    assert [f["subject"] for f in found["findings"] if f["mark"] == "wrong"] == ["link"]


def test_a_wrong_interface_is_found_before_the_workers_would_wait_for_each_other(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    output = call("--workers", 2, status=1).stdout
    assert "GLOO_SOCKET_IFNAME is 'eth99'" in output


def test_under_torchrun_loopback_on_two_hosts_is_found(tmp_path):
    """Two agents would be two machines; here each process says that it is alone on its own."""
    processes = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(2):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": 300}
        command = [sys.executable, "-m", "onebit.cli", "doctor"]
        environment = os.environ | {key: str(value) for key, value in variables.items()}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        ends = [(process.communicate(timeout=90)[0], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [status for _, status in ends] == [1, 1]
    assert ends[0][0].count("the loopback interface, and workers are on several machines") == 2
    assert ends[1][0] == ""


@pytest.mark.parametrize(("local", "said"), [(0, 1), (1, 0)])
def test_under_torchrun_one_worker_of_a_machine_tells_of_its_interfaces(local, said):
    variables = {"RANK": local, "WORLD_SIZE": 2, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2}
    variables |= {"GLOO_SOCKET_IFNAME": "eth99", "COLUMNS": 300}
    environment = os.environ | {key: str(value) for key, value in variables.items()}
    command = [sys.executable, "-m", "onebit.cli", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.count("GLOO_SOCKET_IFNAME is 'eth99'") == said


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("summary.json", "{", "is damaged: its summary.json cannot be used"),
        ("summary.json", "[]", "is damaged"),
        ("summary.json", "[" * 100_000, "is damaged"),
        ("summary.json", '{"eval_loss": 1}', "is damaged"),
        ("other.json", "{}", "has no summary.json; give the folder of a finished"),
    ],
)
def test_a_damaged_run_folder_is_one_clear_error(tmp_path, name, text, why):
    (tmp_path / name).write_text(text)
    stderr = call("--folder", tmp_path, status=2).stderr
    assert stderr.startswith("error: the run folder ")
    assert why in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("steps",), 0),
        (("workers",), "2"),
        (("parameters",), 1.5),
        (("payload_bytes",), -1),
        (("compressed_share_of_16bit",), float("nan")),
        (("samples_per_s", "warmup"), 0),
        (("samples_per_s",), 3),
        (("freeze_step",), "late"),
        (("switch_gain", "after_s"), 0),
        (("switch_gain", "before_s"), -1.0),
        (("switch_gain", "before_compute_s"), 1e9),
        (("switch_gain", "sentence"), None),
        (("switch_gain",), []),
        (("recipe", "train", "accumulation"), 0),
        (("recipe", "optimizer", "name"), 1),
        (("recipe", "optimizer", "options"), None),
    ],
)
def test_wrong_types_and_signs_in_a_summary_are_named_with_key_and_folder(finished, tmp_path, keys, value):
    values = json.loads((finished / "summary.json").read_text())
    inner = values
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (tmp_path / "summary.json").write_text(json.dumps(values))
    stderr = call("--folder", tmp_path, status=2).stderr
    assert stderr.startswith(f"error: the run folder {str(tmp_path)!r} is damaged: its summary.json")
    assert ".".join(keys) in stderr
    assert stderr.count("\n") == 1


def test_a_summary_without_a_part_is_damaged(finished, tmp_path):
    values = json.loads((finished / "summary.json").read_text())
    values["recipe"]["optimizer"].pop("name")
    (tmp_path / "summary.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="is damaged"):
        examine_run(tmp_path, Assumed(None, None, None))


def test_a_run_that_has_not_ended_says_where_it_is(tmp_path):
    (tmp_path / "run.partial").mkdir()
    with pytest.raises(ConfigError, match=r"run\.partial.* holds one that has not ended"):
        summary_in(tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--machines", 2], "--machines is 2 without --folder"),
        (["--probe", "nowhere.json"], "cannot be read"),
        (["--link-gbit-s", "fast"], "--link-gbit-s is 'fast'"),
        (["--link-gbit-s", 0], "must be above 0"),
        (["--link-gbit-s", "0..1"], "must be above 0"),
        (["--timeout-s", "inf"], "--timeout-s is inf"),
        (["--machines", 0, "--folder", "nowhere"], "--machines is 0"),
        (["--workers", 0], "--workers is 0"),
        (["--folder", "nowhere"], "has no summary.json"),
    ],
)
def test_bad_input_is_one_clear_error_and_status_2(arguments, why):
    stderr = call(*arguments, status=2).stderr
    assert stderr.startswith("error: ")
    assert why in stderr
    assert stderr.count("\n") == 1
