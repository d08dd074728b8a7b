"""`onebit probe`: fits find what made the times, real runs measure, and a plan takes what was written."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.run import parse_args
from typer.main import get_command
from typer.testing import CliRunner

from onebit.comm import Comm, Solo
from onebit.commands import app
from onebit.doctor_command import doctor_command
from onebit.errors import ConfigError
from onebit.flat import Stage
from onebit.link_fit import COLLECTIVES, Sample, Terms, fit_quartiles, fit_times, terms_of
from onebit.plan_command import model_shapes
from onebit.planner import METHODS, all_reduce_s, exchange_s, step_time
from onebit.planner_inputs import FACTORS, Model, Network, Range, Run, Setup, Work, transformer_shapes
from onebit.planner_methods import LAMB_UPDATE
from onebit.planner_overlap import measured_extra_s
from onebit.probe import probe, subject_of
from onebit.probe_command import probe_command
from onebit.probe_file import read_probe
from onebit.probe_kernels import (
    PHASES,
    WHOLE,
    Echo,
    _whole_step,
    around_the_mean,
    factors,
    kernel_speed,
    quartiles,
    unheard,
)
from onebit.probe_network import BETWEEN, Case, cases_of, machine_names, time_network
from onebit.probe_overlap import time_overlapped
from onebit.probe_powersgd import low_rank_step
from onebit.virtual import run_workers
from tests.processes import run_processes
from tests.test_doctor import PROBED

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
SIZES = (64, 4096, 2**18, 2**22)


def timed(latency: float, message: float, rate: float, workers: int, per_machine: int) -> list[tuple[Terms, float]]:
    found = []
    for name in COLLECTIVES:
        for size in SIZES:
            for at_once in (1, 8):
                terms = terms_of(name, size, at_once, workers, per_machine)
                time = terms.latencies * latency + terms.messages * message + terms.link_bytes / rate
                found.append((terms, time))
    return found


LATENCY, RATE = st.floats(1e-6, 1e-2), st.floats(1e6, 1e11)
PLACES = st.sampled_from([(2, 1), (3, 1), (4, 2), (8, 4), (16, 1)])


@given(LATENCY, LATENCY, RATE, PLACES)
def test_the_fit_recovers_what_made_the_times(latency, message, rate, places):
    samples = timed(latency, message, rate, *places)
    bytes_matter = max(t.link_bytes / rate / seconds for t, seconds in samples)
    assume(bytes_matter > 0.01)  # else the rate cannot be told
    fit = fit_times(samples)
    assert fit.residual < 1e-6
    assert fit.bytes_per_s == pytest.approx(rate, rel=1e-3)
    assert fit.latency_s + fit.message_s == pytest.approx(latency + message, rel=1e-3)
    for terms, seconds in samples:
        assert fit.seconds(terms) == pytest.approx(seconds, rel=1e-5)


@given(LATENCY, RATE, st.lists(st.floats(-0.1, 0.1), min_size=24, max_size=24))
def test_noise_of_a_tenth_moves_the_rate_by_little_more_and_shows_in_the_residual(latency, rate, noise):
    samples = [(t, s * (1 + e)) for (t, s), e in zip(timed(latency, latency / 9, rate, 2, 1), noise, strict=True)]
    assume(max(t.link_bytes / rate / s for t, s in samples) > 0.9)
    fit = fit_times(samples)
    assert fit.residual <= 0.12
    assert min(fit.latency_s, fit.message_s) >= 0
    assert fit.bytes_per_s == pytest.approx(rate, rel=0.25)


@given(LATENCY, RATE)
def test_a_sample_of_little_weight_changes_little(latency, rate):
    samples = timed(latency, 0.0, rate, 2, 1)
    assume(samples[-1][0].link_bytes / rate > 0.5 * samples[-1][1])
    terms = terms_of("all_gather", 2**20, 1, 2, 1)
    quick = (terms, (latency + terms.link_bytes / rate) / 5)  # as if a buffer had taken most of it
    fit = fit_times([*samples, quick], [1.0] * len(samples) + [BETWEEN])
    assert fit.bytes_per_s == pytest.approx(rate, rel=0.05)


def test_times_that_do_not_grow_have_no_rate_and_json_says_so():
    fit = fit_times([(Terms(1, 1, 64.0), 1e-3), (Terms(1, 1, 1e6), 1e-3), (Terms(1, 1, 1e3), 1e-3)])
    assert fit.bytes_per_s == math.inf
    assert fit.as_mapping()["bytes_per_s"] is None
    assert fit.latency_s == pytest.approx(1e-3)


@pytest.mark.parametrize("bad", [[], [(Terms(1, 1, 1.0), 1.0)], [(Terms(1, 1, 1.0), 0.0), (Terms(1, 1, 2.0), 1.0)]])
def test_what_cannot_be_fitted_is_refused(bad):
    with pytest.raises(ConfigError, match=r"at least 2 timed|must be finite and above 0"):
        fit_times(bad)


def test_quartiles_give_a_range_of_rates():
    terms = [Terms(1, 1, 64.0), Terms(1, 1, 1e8)]
    fits = fit_quartiles([Sample(terms[0], 1e-4, 1e-4, 1e-4), Sample(terms[1], 0.5, 1.0, 2.0)])
    rates = [fits[name].bytes_per_s for name in ("low", "median", "high")]
    assert rates == pytest.approx([2e8, 1e8, 5e7], rel=1e-3)
    assert quartiles([3.0]) == Range(3.0, 3.0, 3.0)


@given(PLACES, st.integers(64, 10**7))
def test_terms_are_those_of_the_cost_model(places, size):
    n, g = places
    size = size // n * n
    net = Network(n, g, link_gbit_s=1.0, latency_us=70.0, message_us=11.0, local_gbit_s=1e6)

    def seconds(terms: Terms) -> float:
        return terms.latencies * 70e-6 + terms.messages * 11e-6 + terms.link_bytes / 1.25e8

    _, to_all, gathered = exchange_s(net, [size], 8 * size)
    assert seconds(terms_of("all_to_all", size, 1, n, g)) == pytest.approx(to_all)
    assert seconds(terms_of("all_gather", size, 1, n, g)) == pytest.approx(gathered)
    assert seconds(terms_of("all_reduce", size, 1, n, g)) == pytest.approx(all_reduce_s(net, size))


def test_an_exchange_gets_its_share_of_the_link_and_an_all_reduce_all_of_it():
    net = Network(2, 1, link_gbit_s=1.0, latency_us=0.0, message_us=0.0)
    half = Network(2, 1, link_gbit_s=1.0, latency_us=0.0, message_us=0.0, exchange_efficiency=0.5)
    assert exchange_s(half, [10**6], 8 * 10**6)[1] == pytest.approx(2 * exchange_s(net, [10**6], 8 * 10**6)[1])
    assert all_reduce_s(half, 10**6) == all_reduce_s(net, 10**6)
    with pytest.raises(ConfigError, match=r"exchange_efficiency is 0\.0"):
        Network(2, 1, link_gbit_s=1.0, exchange_efficiency=0.0)


# -- real measurements ---------------------------------------------------------------------------------------------


def _network(comm: Comm) -> dict[str, Any]:
    cases = [Case(name, size, 1) for name in COLLECTIVES for size in (64, 4096, 200_000)]
    found = time_network([*cases, Case("all_to_all", 64, 8)], comm, 2, CPU, 6.0)
    assert json.loads(comm.all_gather_bytes(json.dumps(found["fits"]).encode())[0]) == found["fits"]
    return found


def test_two_processes_time_the_same_collectives():
    first, second = run_processes(2, _network)
    assert first["fits"] == second["fits"]
    assert first["inside"] is True
    assert not first["left_out"]
    for sample in first["samples"]:
        assert 0 < sample["seconds"].low <= sample["seconds"].likely <= sample["seconds"].high < 1
    assert {"all_reduce", "exchange", "all_to_all", "all_gather"} == set(first["fits"])


def _on_two_machines(comm: Comm) -> dict[str, Any]:
    os.environ |= {"RANK": str(comm.rank), "LOCAL_WORLD_SIZE": "2"}
    return probe(None, 1, comm, CPU, 6)


def _two_levels(comm: Comm) -> dict[str, Any]:
    os.environ |= {"RANK": str(comm.rank), "LOCAL_WORLD_SIZE": "2"}
    return probe(None, 1, comm, CPU, 6, two_level=True)


def test_two_levels_are_timed_with_a_real_mean_inside_the_machine(tmp_path):
    found = run_processes(4, _two_levels, timeout_s=120)[0]
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(found))
    probed = read_probe(file)
    assert probed.two_level
    assert probed.mean_gbit_s == found["kernels"]["mean_gbit_s"]["likely"] > 0
    rates = ("--link-gbit-s", 1, "--local-gbit-s", 5)  # on a busy machine they may not be bound
    network = json.loads(call("plan", "--probe", file, *rates, "--json").stdout)["setup"]["network"]
    assert (network["two_level"], network["mean_gbit_s"]) == (True, probed.mean_gbit_s)
    other = call("plan", "--probe", file, *rates, "--one-level", "--json")
    assert not json.loads(other.stdout)["setup"]["network"]["two_level"]
    assert "the plan has one level and the probe timed the kernels of two; `onebit probe` times these" in other.stderr


def test_two_levels_need_several_workers_on_a_machine():
    with pytest.raises(ConfigError, match="--two-level is given, and there is one worker on each machine"):
        probe(None, 1, Solo(), CPU, 6, two_level=True)


def _overlap(comm: Comm) -> dict[str, Any]:
    found = [probe(None, 1, comm, CPU, 6, two_level=levels, overlap=True) for levels in (False, True)]
    return {"flat": found[0], "levels": found[1]}


def test_a_step_with_overlap_is_timed_and_a_plan_of_the_same_place_has_its_length(tmp_path):
    for name, found in run_processes(2, _overlap, timeout_s=180)[0].items():
        assert found["overlap"]["overlapped"]
        assert found["overlap"]["repetitions"] >= 3
        found["network"]["fits"]["all_reduce"]["median"]["bytes_per_s"] = 1e9  # on a busy machine it may not be bound
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(found))
        done = call("plan", "--probe", file, "--overlap-exchange", "--json")
        step_s = json.loads(done.stdout)["methods"]["onebit-lamb"]["kinds"][1]["step_s"]
        compute_s = found["step"]["forward_backward_s"]["likely"] * (1 + found["step"]["straggling"])
        assert step_s == pytest.approx(max(found["overlap"]["step_s"]["likely"], compute_s), rel=1e-6)
        assert "overlap" not in done.stderr
        assert json.loads(call("plan", "--probe", file, "--json").stdout)["setup"]["work"]["overlap_extra_s"] == 0


def test_overlap_needs_several_workers_and_a_plan_says_where_it_was_not_timed(measured, tmp_path):
    with pytest.raises(ConfigError, match="--overlap is given, and one worker exchanges nothing"):
        probe(None, 1, Solo(), CPU, 6, overlap=True)
    file = changed(measured, tmp_path, "overlap", value=None)
    other = ("2M", "--compute-ms", 9, "--probe", measured)  # of another model than the probe's
    for flags in (("--probe", file), other):
        done = call("plan", *flags, "--overlap-exchange", "--json")
        assert "the probe timed no step of its model with it, so that cores count as free" in done.stderr
        assert json.loads(done.stdout)["setup"]["work"]["overlap_extra_s"] == 0
    stderr = call("plan", "--probe", measured, "--overlap-extra-ms", 9, status=2).stderr
    assert "--overlap-extra-ms is 9 without --overlap-exchange" in stderr


PLACES_OF_WORKERS = st.sampled_from([(2, 2), (4, 2), (4, 4), (8, 2), (4, 1)])


@given(
    PLACES_OF_WORKERS,
    st.booleans(),
    st.floats(0.02, 2),
    st.floats(0, 1),
    st.one_of(st.none(), st.floats(0.01, 100)),
    st.sampled_from([((300, 200), (200,)) * 9, ((3000, 200),) * 4]),  # of several buckets
)
def test_the_extra_of_overlap_is_what_makes_the_model_give_the_timed_step(place, levels, step_s, share, rate, shapes):
    workers, machines = place
    probed = replace(
        PROBED, workers=workers, machines=machines, inside=machines == 1, two_level=levels and machines < workers,
        mean_gbit_s=0.5 if levels and machines < workers else None, link_gbit_s=rate, shapes=shapes,
        overlapped_step_s=step_s,
    )  # fmt: skip
    extra = measured_extra_s(probed, share)
    assert extra is not None
    net = Network(
        workers, workers // machines, 1e5, latency_us=probed.latency_us, message_us=probed.message_us,
        exchange_efficiency=probed.exchange_efficiency, two_level=probed.two_level, mean_gbit_s=probed.mean_gbit_s,
    )  # fmt: skip
    if rate is not None:
        net = replace(net, **{"local_gbit_s" if machines == 1 else "link_gbit_s": rate})
    if machines == 1:
        net = replace(net, latency_us=50.0, local_latency_us=probed.latency_us, local_gbit_s=rate or 1e5)
    factors = {name: getattr(probed, name) for name in FACTORS}
    work = Work(
        probed.micro_step_s, backward_share=probed.backward_share, straggling=probed.straggling, overlap=share,
        overlap_exchange=True, overlap_extra_s=extra, memory_gbyte_s=probed.memory_gbyte_s, **factors,
    )  # fmt: skip
    setup = Setup(Model(shapes), net, work, Run(2))
    step = step_time(setup, METHODS["onebit-lamb"].steps(setup)[1][1])
    assert step.total_s == pytest.approx(max(step_s, step.compute_s + step.straggling_s))


def _changed_after_backward(comm: Comm) -> tuple[bool, int]:
    p = nn.Parameter(torch.ones(300))

    def gradients() -> None:
        (p * (comm.rank + 1)).sum().backward()
        assert p.grad is not None
        p.grad.mul_(0.5)

    found = time_overlapped([p], gradients, comm, CPU, 0.1)
    return found["overlapped"], found["repetitions"]


def test_overlap_that_never_begins_early_is_said(caplog):
    with caplog.at_level(logging.WARNING, "onebit"):
        found = run_workers(2, _changed_after_backward)
    assert [early for early, _ in found] == [False, False]
    assert found[0][1] == found[1][1] >= 3
    assert "in some steps no exchange began during backward" in caplog.text


def _sometimes_untouched(comm: Comm) -> dict[str, Any]:
    """Many buckets begin early on worker 0; on worker 1 none does in some steps, in which there was no backward."""
    params, calls = [nn.Parameter(torch.ones(70_000)) for _ in range(6)], [0]

    def gradients() -> None:
        calls[0] += 1
        for p in params:
            p.grad = None
        if comm.rank == 0 or calls[0] % 2:
            sum((p.sum() for p in params), torch.zeros(())).backward()

    return time_overlapped(params, gradients, comm, CPU, 0.1)


def test_one_step_of_one_worker_without_overlap_says_that_it_is_not_what_was_timed(measured, tmp_path):
    assert [found["overlapped"] for found in run_workers(2, _sometimes_untouched)] == [False, False]
    assert read_probe(measured).overlapped_step_s
    assert read_probe(changed(measured, tmp_path, "overlap", "overlapped", value=False)).overlapped_step_s is None


def _kernels_of_two_levels(comm: Comm) -> dict[str, Any]:
    return kernel_speed(((300, 100), (70,)), 4, CPU, 0.2, inside=comm)


def test_workers_that_average_inside_take_the_same_number_of_turns():
    level = logging.getLogger("onebit").level
    first, second = run_workers(2, _kernels_of_two_levels)
    assert logging.getLogger("onebit").level == level  # threads that hush the log at once leave it as it was
    assert not logging.getLogger("onebit").filters
    assert first["rounds"] == second["rounds"]
    for found in (first, second):
        assert found["mean_gbit_s"].low > 0
        assert found["kernel_factor"].likely > 0


def test_workers_of_several_machines_time_both_kinds_of_links(tmp_path):
    found = run_processes(4, _on_two_machines, timeout_s=120)[0]
    assert (found["workers"], found["machines"]) == (4, 2)
    assert (found["network"]["inside"], found["local"]["inside"]) == (False, True)
    assert {sample["messages"] for sample in found["local"]["samples"]} == {1, 2, 8}
    (tmp_path / "probe.json").write_text(json.dumps(found))
    inputs = read_probe(tmp_path / "probe.json").inputs
    assert {"latency_us", "local_latency_us", "message_us"} <= set(inputs)
    for part, name in (("network", "link_gbit_s"), ("local", "local_gbit_s")):
        fits = found[part]["fits"]["all_reduce"]
        bound = fits["median"]["bytes_per_s"] is not None
        assert (name in inputs) == bound  # on a busy machine more bytes may take no more time


def test_machines_with_different_numbers_of_workers_are_refused(monkeypatch):
    def names(comm: Comm) -> list[str]:
        here = "one" if comm.rank else "two"
        return machine_names(Named(comm, here))

    with pytest.raises(ConfigError, match="machines have 1, 2 workers"):
        run_workers(3, names)


class Named(Solo):
    """A worker whose machine has the name it is given."""

    def __init__(self, inner: Comm, name: str) -> None:
        self.inner, self.name = inner, name

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.inner.all_gather_bytes(self.name.encode())


class Slow(Solo):
    """Two workers, the other of which does nothing; a link on which a byte takes 10 us."""

    size = 2

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, data]

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        import time

        time.sleep(tensor.numel() * tensor.element_size() * 1e-5)


def test_sizes_that_would_take_too_long_are_left_out_and_named():
    sizes = (64, 512, 4096, 32768, 262144)
    found = time_network([Case("all_reduce", size, 1) for size in sizes] + [
        Case(name, size, 1) for name in ("all_to_all", "all_gather") for size in (64, 128)
    ], Slow(), 1, CPU, 0.5)  # fmt: skip
    assert [case["size"] for case in found["left_out"]] == [32768, 262144]
    rate = found["fits"]["all_reduce"]["median"]["bytes_per_s"]
    assert rate == pytest.approx(1e5, rel=0.3)  # bytes of a ring of two: as many as the buffer has


def test_cases_end_with_the_messages_that_the_model_has():
    shapes = ((1000, 300), (300,))
    cases = cases_of(shapes, 2)
    assert max(c.size for c in cases if c.collective == "all_reduce") == 2 * 300_300
    assert 300_300 / 16 < max(c.size for c in cases if c.collective == "all_to_all") < 300_300 / 16 + 64
    assert sum(c.at_once > 1 for c in cases) == 1


@pytest.mark.parametrize("shapes", [((1,),), ((3, 5), (5,)), ((40, 40),)])
def test_small_models_have_two_sizes_of_each_collective(shapes):
    for name in COLLECTIVES:
        sizes = {case.size for case in cases_of(shapes, 4) if case.collective == name}
        assert {64, 4096} <= sizes


def test_the_two_smallest_sizes_are_timed_on_any_link():
    sizes = (64, 512, 4096, 4104)
    found = time_network([Case("all_reduce", size, 1) for size in sizes] + [
        Case(name, size, 1) for name in ("all_to_all", "all_gather") for size in (64, 128)
    ], Slow(), 1, CPU, 0.01)  # fmt: skip
    assert [case["size"] for case in found["left_out"]] == [4104]


def test_kernels_are_timed_phase_by_phase():
    found = kernel_speed((*transformer_shapes(50_000), (), (0, 5)), 3, CPU, 0.2)
    assert set(found["ns_per_element"]) == {*PHASES, *WHOLE}
    assert found["elements"] == 50_001
    assert found["rounds"] >= 3
    for value in (*found["ns_per_element"].values(), *(found[name] for name in FACTORS), found["copy_gbyte_s"]):
        assert 0 <= value.low <= value.likely <= value.high  # of integers 0 where one took no longer than fp32
        assert value.likely > 0
    for bits in (8, 4):
        assert found["ns_per_element"][f"int{bits}_step"].likely > found["ns_per_element"]["warmup_step"].likely


def test_where_powersgd_cannot_be_timed_its_factor_is_missing_and_a_plan_takes_the_usual_one(
    measured, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("onebit.probe_kernels.low_rank_step", lambda shapes, device: None)
    with caplog.at_level("WARNING", logger="onebit"):
        found = kernel_speed(((20, 30),), 2, CPU, 0.1)
    assert found["low_rank_factor"] is None
    assert "low_rank_step" not in found["ns_per_element"]
    assert "PowerSGD is not timed: torch's hook cannot run on cpu here" in caplog.text
    file = changed(measured, tmp_path, "kernels", "low_rank_factor", value=None)
    assert json.loads(call("plan", "--probe", file, "--json").stdout)["setup"]["work"]["low_rank_factor"] == (
        Work.low_rank_factor
    )


def test_the_hook_that_is_timed_compresses_to_rank_4():
    """What it leaves in the bucket is of that rank, and what it took out is its error: together the gradient."""
    shapes = ((40, 50), (50,))
    step = low_rank_step(shapes, CPU)
    assert step is not None
    state, bucket = (cell.cell_contents for cell in sorted_cells(step, "state", "bucket"))
    for _ in range(3):
        before = state.error_dict[0].clone()
        assert step() > 0
        assert torch.linalg.matrix_rank(bucket.gradients()[0], rtol=1e-4) == 4
        assert torch.allclose(bucket.buffer() + state.error_dict[0], bucket.given + before, atol=1e-7)
        assert torch.allclose(bucket.gradients()[1], bucket.given[2000:])


def test_a_hook_that_is_let_go_of_does_not_end_the_process():
    """Its group's thread may be the last to hold the group; then it waited for its own end, and the process aborted."""
    code = (
        "import torch; from onebit.probe_powersgd import low_rank_step\n"
        "for _ in range(100): low_rank_step(((30, 40), (7,)), torch.device('cpu'))()\n"
        "print('all of them')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == "all of them\n", run.stderr


@pytest.mark.parametrize("shapes", [((0,), (0, 5)), ((7, 0),)])
def test_a_hook_without_anything_to_do_is_not_timed(shapes):
    assert low_rank_step(shapes, CPU) is None


def test_a_cpu_beside_a_gpu_is_not_timed_since_the_hook_waits_for_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert low_rank_step(((4, 5),), CPU) is None


def sorted_cells(call: Any, *names: str) -> list[Any]:
    return [call.__closure__[call.__code__.co_freevars.index(name)] for name in names]


def test_larger_models_are_timed_by_a_transformer_of_so_many(monkeypatch):
    monkeypatch.setattr("onebit.probe_kernels.MOST_ELEMENTS", 10_000)
    assert kernel_speed(((500, 500),), 2, CPU, 0.1)["elements"] == 10_000


POSITIVE = st.floats(0.01, 100)


@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE, POSITIVE, POSITIVE, st.integers(2, 64), st.floats(0.1, 1000))
def test_factors_are_those_with_which_the_model_gives_the_times(
    one_bit, plain, int8, int4, local, low_rank, workers, rate
):
    """So the bytes that the probe divides by are those that the model multiplies by."""
    work = Work(1.0, memory_gbyte_s=rate, kernel_factor=one_bit, plain_factor=plain, int8_factor=int8,
                int4_factor=int4, local_factor=local, low_rank_factor=low_rank)  # fmt: skip
    setup = Setup(Model(((1000, 1000),)), Network(workers, 1, 1.0), work, Run(100))

    def kernels(method: str, stage: int) -> list[float]:
        time = step_time(setup, METHODS[method].steps(setup)[stage][1])
        return [(time.encode_s + time.server_s + time.update_s) / byte]

    byte = 1e6 / (rate * 1e9)
    low_rank_s = step_time(setup, METHODS["powersgd"].steps(setup)[1][1]).encode_s
    found = factors(
        {
            "warmup_step": [LAMB_UPDATE * plain],
            "step": kernels("onebit-lamb", 1),
            "int8_step": kernels("onebit-lamb-int8", 0),
            "int4_step": kernels("onebit-lamb-int4", 0),
            "local_step": kernels("local-variance-lamb", 1),
            "low_rank_step": [low_rank_s / byte],
        },
        workers,
    )
    expected = {"kernel_factor": one_bit, "plain_factor": plain, "int8_factor": int8, "int4_factor": int4}
    for name, value in (expected | {"local_factor": local, "low_rank_factor": low_rank}).items():
        assert found[name].likely == pytest.approx(value, rel=1e-6, abs=1e-6 * plain), name


@given(POSITIVE, st.integers(2, 8), st.integers(1, 4))
def test_factors_of_two_levels_are_those_with_which_the_model_gives_the_times(factor, inside, machines):
    names = ("kernel_factor", "int8_factor", "int4_factor", "local_factor")
    work = Work(1.0, memory_gbyte_s=1.0, plain_factor=1.0, **dict.fromkeys(names, factor))
    net = Network(inside * machines, inside, 1.0, two_level=True)
    setup = Setup(Model(((1000, 1000),)), net, work, Run(100))

    def kernels(method: str, stage: int) -> list[float]:
        time = step_time(setup, METHODS[method].steps(setup)[stage][1])
        return [(time.encode_s + time.server_s + time.update_s) * 1e3]

    moved = {"step": kernels("onebit-lamb", 1), "int8_step": kernels("onebit-lamb-int8", 0)}
    moved |= {"int4_step": kernels("onebit-lamb-int4", 0), "local_step": kernels("local-variance-lamb", 1)}
    found = factors({"warmup_step": [LAMB_UPDATE], **moved}, inside * machines, inside)
    for name in names:
        assert found[name].likely == pytest.approx(factor, rel=1e-6, abs=1e-6), name


def test_integers_that_take_no_longer_than_fp32_have_the_factor_0_and_not_a_negative_one():
    times = {name: [1.0, 2.0, 3.0] for name in ("step", *WHOLE)} | {"int4_step": [0.5, 1.5, 1.9]}
    assert factors(times, 2)["int4_factor"] == Range(0, 0, 0)


def test_a_factor_is_the_mean_so_that_turns_that_wait_for_a_core_count():
    assert around_the_mean([1.0, 1.0, 1.0, 9.0]) == Range(1, 3, 3)
    assert around_the_mean([2.0, 2.0, 2.0, 2.0]) == Range(2, 2, 2)
    times = {name: [8.0] * 4 for name in ("step", *WHOLE)} | {"low_rank_step": [32.0, 32.0, 32.0, 160.0]}
    low_rank = factors(times, 2)["low_rank_factor"]
    assert low_rank == Range(1, 2, 2)


def test_steps_of_local_variance_are_timed_between_exchanges_of_the_variance():
    with unheard():
        step: Any = _whole_step("local_step", ((2_000,),), Echo(3, CPU), CPU)
        optimizer = step.__self__
        assert optimizer.stage is Stage.COMPRESSED
        due = optimizer.stats()["next_sync"]
        for _ in range(40):
            step()
    assert optimizer.stats()["next_sync"] == due > 1e6


def test_one_worker_measures_its_own_model(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def pair():\n"
        "    m = torch.nn.Linear(300, 40)\n"
        "    x = torch.randn(5, 300)\n"
        "    return m, lambda: m(x).square().sum()\n"
        "def whole():\n"
        "    m = torch.nn.Linear(300, 40)\n"
        "    return m, lambda: m(torch.randn(5, 300)).sum().backward()\n"
        "def empty():\n"
        "    return torch.nn.Linear(3, 4), lambda: None\n"
        "def ends():\n"
        "    raise SystemExit(0)\n"
        "def stops():\n"
        "    return torch.nn.Linear(3, 4), lambda: exit()\n"
        "def alone():\n"
        "    return torch.nn.Linear(3, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = probe("mine:pair", 5, Solo(), CPU, 5)
    assert found["model"] == {"name": "mine:pair", "parameters": 12040, "shapes": [[40, 300], [40]]}
    assert found["network"] is None
    assert 0 < found["step"]["backward_share"] < 1
    assert found["step"]["micro_batch"] == 5
    assert probe("mine:whole", None, Solo(), CPU, 5)["step"]["backward_share"] is None
    with pytest.raises(ConfigError, match="left no gradients"):
        probe("mine:empty", None, Solo(), CPU, 5)
    with pytest.raises(ConfigError, match="a step of 'mine:stops' failed: SystemExit"):
        probe("mine:stops", None, Solo(), CPU, 5)
    with pytest.raises(ConfigError, match="'mine:ends' cannot be built: SystemExit"):
        model_shapes("mine:ends")
    for text, why in (
        ("mine:ends", "SystemExit"),
        ("mine:alone", "must return a torch module and"),
        ("mine:nothing", "has no attribute"),
    ):
        with pytest.raises(ConfigError, match=why):
            subject_of(text, None, CPU)


# -- the command ---------------------------------------------------------------------------------------------------


def call(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A probe of two workers that the command started."""
    file = tmp_path_factory.mktemp("probe") / "probe.json"
    output = call("probe", "--workers", 2, "--seconds", 6, "--overlap", "--json", file).stdout
    assert "all_to_all" in output
    assert "step with overlap" in output
    assert f"probe: {file}" in output
    found = json.loads(file.read_text())
    fit = found["network"]["fits"]["all_reduce"]["median"]
    if fit["bytes_per_s"] is None:  # on a busy machine more bytes may take no more time; here a plan needs a rate
        fit["bytes_per_s"] = 1e9
        file.write_text(json.dumps(found))
    return file


def test_a_plan_takes_what_a_probe_wrote(measured):
    probed = read_probe(measured)
    assert (probed.workers, probed.machines, probed.inside) == (2, 1, True)
    found = json.loads(call("plan", "--probe", measured, "--json").stdout)
    assert found["setup"]["model"]["parameters"] == probed.parameters == 680_016
    assert found["setup"]["work"]["micro_step_s"]["likely"] == probed.micro_step_s.likely
    assert found["setup"]["work"]["kernel_factor"]["low"] == probed.kernel_factor.low
    kernels = json.loads(measured.read_text())["kernels"]
    for name in FACTORS[1:]:
        assert found["setup"]["work"][name] == kernels[name]["likely"]
    assert found["setup"]["network"]["local_gbit_s"]["likely"] == probed.link_gbit_s.likely
    assert found["setup"]["network"]["latency_us"] == 50.0  # not measured: all workers were on one machine
    row = found["methods"]["onebit-lamb"]["step_s"]
    assert row["low"] < row["likely"] < row["high"]


def test_what_is_given_by_hand_goes_over_the_probe(measured):
    given_by_hand = ["--compute-ms", 7, "--workers", 4, "--machines", 2, "--link-gbit-s", 3, "--kernel-factor", 2]
    given_by_hand += ["--int4-factor", 9]
    found = json.loads(call("plan", "1M", "--probe", measured, *given_by_hand, "--json").stdout)["setup"]
    assert found["model"]["parameters"] == 1_000_000
    assert found["work"]["micro_step_s"] == pytest.approx(0.007)
    assert found["work"]["kernel_factor"] == 2
    assert found["work"]["int4_factor"] == 9
    assert (found["network"]["workers"], found["network"]["workers_per_machine"]) == (4, 2)
    assert found["network"]["link_gbit_s"] == 3


def test_a_probe_inside_a_machine_does_not_stand_for_a_link_between_machines(measured):
    between = call("plan", "--probe", measured, "--workers", 4, "--machines", 4, status=2).stderr
    assert "--link-gbit-s is not given" in between
    assert "message_us and exchange_efficiency: not taken from the probe" in between


def test_what_an_exchange_gets_in_one_place_is_not_taken_to_another(measured):
    result = call("plan", "--probe", measured, "--machines", 2, "--link-gbit-s", 1, "--json")
    network = json.loads(result.stdout)["setup"]["network"]
    assert (network["message_us"], network["exchange_efficiency"]) == (5.0, 1.0)
    assert (network["workers"], network["workers_per_machine"]) == (2, 1)
    assert "which measured them inside one machine" in result.stderr


def test_each_place_that_is_not_given_is_the_probes(measured):
    network = json.loads(call("plan", "--probe", measured, "--workers", 4, "--json").stdout)["setup"]["network"]
    assert (network["workers"], network["workers_per_machine"]) == (4, 4)


def changed(file: Path, folder: Path, *keys: object, value: Any) -> Path:
    """A copy of a JSON file with another value under keys."""
    found = json.loads(file.read_text())
    inner = found
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / "changed.json").write_text(json.dumps(found))
    return folder / "changed.json"


def test_a_step_of_another_model_is_not_taken(measured, tmp_path):
    stderr = call("plan", "1M", "--probe", measured, status=2).stderr
    assert "1,000,000 parameters where the model of the probe has 680,016" in stderr
    assert "--compute-ms" in stderr
    call("plan", "683_000", "--probe", measured)  # within 1 %


@pytest.mark.parametrize("all_reduce", [None, 1e12])
def test_a_rate_that_is_not_bound_is_not_known(measured, tmp_path, all_reduce):
    fits = json.loads(measured.read_text())["network"]["fits"]
    for which in ("low", "median", "high"):
        fits["all_reduce"][which]["bytes_per_s"] = None if which == "median" else all_reduce
    file = changed(measured, tmp_path, "network", "fits", value=fits)
    probed = read_probe(file)
    assert probed.link_gbit_s is None
    stderr = call("plan", "--probe", file, status=2).stderr
    assert "--local-gbit-s is not given" in stderr
    call("plan", "--probe", file, "--local-gbit-s", 10)
    between = changed(file, tmp_path, "network", "inside", value=False)
    found = json.loads(between.read_text()) | {"machines": 2}
    between.write_text(json.dumps(found))
    assert "--link-gbit-s is not given" in call("plan", "--probe", between, status=2).stderr


def test_efficiency_is_that_of_each_quartile(measured, tmp_path):
    fits = json.loads(measured.read_text())["network"]["fits"]
    for which, whole, exchange in (("low", 100.0, 50.0), ("median", 80.0, 60.0), ("high", None, 10.0)):
        fits["all_reduce"][which]["bytes_per_s"] = whole
        fits["exchange"][which]["bytes_per_s"] = exchange
    probed = read_probe(changed(measured, tmp_path, "network", "fits", value=fits))
    efficiency = probed.exchange_efficiency
    assert isinstance(efficiency, Range)
    assert (efficiency.low, efficiency.likely, efficiency.high) == pytest.approx((0.5, 0.75, 1.0))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: "[]", "is 'list', not 'onebit probe 5'"),
        (lambda text: text.replace("onebit probe 5", "onebit probe 4"), "is 'onebit probe 4', not 'onebit probe 5'"),
        (lambda text: text.replace('"local_factor"', '"global_factor"'), r"it has no kernels\.local_factor"),
        (lambda text: text.replace('"step"', '"stop"'), "is damaged: it has no step"),
        (lambda text: text.replace('"likely"', '"unlikely"'), r"it has no step\.forward_backward_s\.likely"),
        (lambda text: text.replace('"workers": 2', '"workers": 0'), "workers is 0; it must be a whole number"),
        (lambda text: "[" * 100_000, "is not JSON"),
    ],
)
def test_a_damaged_probe_is_one_clear_error(measured, tmp_path, damage, why):
    file = tmp_path / "damaged.json"
    file.write_text(damage(measured.read_text()))
    with pytest.raises(ConfigError, match=why):
        read_probe(file)
    stderr = call("plan", "--probe", file, status=2).stderr
    assert stderr.startswith("error: the probe ")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("workers",), 2.5),
        (("workers",), True),
        (("threads",), "one"),
        (("device",), 3),
        (("step", "forward_backward_s", "likely"), math.nan),
        (("step", "forward_backward_s", "low"), -1.0),
        (("step", "forward_backward_s", "high"), 0),
        (("step", "straggling"), -0.5),
        (("step", "backward_share"), 1.5),
        (("step", "micro_batch"), 0),
        (("network", "inside"), "no"),
        (("network", "fits", "exchange"), []),
        (("network", "fits", "exchange", "median", "latency_s"), math.inf),
        (("network", "fits", "all_reduce", "low", "bytes_per_s"), 0),
        (("network", "fits", "all_reduce", "low", "bytes_per_s"), "fast"),
        (("kernels", "kernel_factor", "low"), 10**400),
        (("kernels", "int8_factor", "low"), -0.1),
        (("kernels", "int4_factor", "high"), math.nan),
        (("kernels", "local_factor", "likely"), 0),
        (("kernels", "low_rank_factor"), 5.0),
        (("kernels", "low_rank_factor", "low"), -1.0),
        (("overlap", "step_s"), 0.1),
        (("overlap", "step_s", "low"), 0.0),
        (("model", "shapes"), [[-1, 3]]),
        (("model", "shapes"), [[1.5]]),
        (("model", "shapes"), []),
    ],
)
def test_wrong_types_and_signs_are_named_with_key_and_file(measured, tmp_path, keys, value):
    file = changed(measured, tmp_path, *keys, value=value)
    stderr = call("plan", "--probe", file, status=2).stderr
    assert stderr.startswith(f"error: the probe {str(file)!r} is damaged: {'.'.join(keys)}")
    assert stderr.count("\n") == 1


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_no_damage_to_a_probe_gives_another_kind_of_error(measured, place, value):
    data = bytearray(measured.read_bytes())
    data[place % len(data)] = value
    file = measured.with_name("flipped.json")
    file.write_bytes(bytes(data))
    with suppress(ConfigError):
        read_probe(file)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["probe", "--workers", 0], "--workers is 0"),
        (["probe", "--seconds", 1], "--seconds is 1"),
        (["probe", "--micro-batch", 0], "--micro-batch is 0"),
        (["probe", "no:thing"], "cannot be built"),
        (["probe", "--json", "no/such/folder/x.json"], "there is no such folder"),
        (["probe", "--json", "."], "is a folder"),
        (["probe", "--timeout-s", "nan"], "--timeout-s is nan"),
        (["probe", "--timeout-s", 0], "--timeout-s is 0"),
        (["probe", "nothing.toml"], "nothing.toml"),
        (["plan"], "--workers is not given"),
        (["plan", "--workers", 2, "--link-gbit-s", 1, "--compute-ms", 1], "no MODEL is given"),
        (["plan", "1M", "--workers", 2, "--link-gbit-s", 1], "--compute-ms is not given"),
        (["plan", "--probe", "nowhere.json"], "cannot be read"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, why):
    stderr = call(*arguments, status=2).stderr
    assert stderr.startswith("error: ")
    assert why in stderr
    assert stderr.count("\n") == 1


# -- models that do what they should not -----------------------------------------------------------------------------

NOISY = """
import os, sys, torch
def pair():
    m = torch.nn.Linear(300, 40)
    print("from the function")
    def step():
        print("from print")
        sys.__stdout__.write("kept back")
        os.write(1, b"from the descriptor")
        os.system("echo from a child")
        return m(torch.randn(5, 300)).sum()
    return m, step
def leaves():
    return torch.nn.Linear(3, 4), lambda: os._exit(0)
def differs():
    m = torch.nn.Linear(3, 4 + int(os.environ["RANK"]))
    return m, lambda: m(torch.randn(5, 3)).sum()
"""


def started(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "noisy.py").write_text(NOISY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **variables}
    command = [sys.executable, "-m", "onebit.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_model_prints_does_not_get_into_the_json(tmp_path, workers):
    done = started(tmp_path, "probe", "noisy:pair", "--seconds", 5, "--json", "-", "--workers", workers)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["name"] == "noisy:pair"
    for words in ("the function", "print", "the descriptor", "a child"):
        assert f"from {words}" in done.stderr


def test_workers_that_leave_without_a_result_are_one_error(tmp_path):
    done = started(tmp_path, "probe", "noisy:leaves", "--seconds", 5, "--workers", 2)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


def test_workers_with_different_models_are_told_before_anything_is_timed(tmp_path):
    done = started(tmp_path, "probe", "noisy:differs", "--workers", 2)
    assert done.returncode == 2
    assert "models to probe differ between workers: layer 0 is (4, 3) on worker 0 and (5, 3)" in done.stderr


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("LOCAL_WORLD_SIZE", "-1"), ("LOCAL_RANK", "0.5")])
@pytest.mark.parametrize("command", ["probe", "doctor"])
def test_numbers_of_the_launcher_that_are_none_are_one_error(tmp_path, name, value, command):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", name: value}
    done = started(tmp_path, command, MASTER_ADDR="127.0.0.1", MASTER_PORT="1", **variables)
    assert done.returncode == 2
    assert f"{name} is {value!r} in the environment" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [probe_command, doctor_command])
def test_torchrun_hands_on_every_option(command):
    """torchrun takes an option that begins like several of its own for one of them, and ends."""
    names = [name for p in get_command(_only(command)).params for name in p.opts if name.startswith("--")]
    assert len(names) > 5
    for name in names:
        assert parse_args(["-m", "onebit.cli", "x", name, "1"]).training_script_args == ["x", name, "1"]


def _only(command: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return app
