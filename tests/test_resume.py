"""Runs of `onebit train` that are broken off: killed, stopped, resumed by hand, by the launcher, with fewer workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_train import CPU, tiny
from train_runs import ONEBIT, RECIPE, Run, begin, losses_of, summary_of

import onebit
from onebit import checkpoint
from onebit.comm import Solo
from onebit.report import Display, Metrics, Output, check_out
from onebit.resume import Step, pack_steps, unpack_steps
from onebit.train import check_virtual, run

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> Path:
    out = recipe.with_name("undisturbed")
    assert begin(recipe, out).end() == ""
    return out


def same_end(out: Path, undisturbed: Path) -> None:
    """The losses of all steps, and of the end, are those of the undisturbed run to the bit."""
    assert losses_of(out) == losses_of(undisturbed)
    mine, theirs = summary_of(out), summary_of(undisturbed)
    assert mine["eval_loss"] == theirs["eval_loss"]
    assert mine["payload_bytes"] == theirs["payload_bytes"]
    assert not (out / "checkpoints").exists()
    assert not out.with_name(out.name + ".partial").exists()


@pytest.mark.parametrize(("at", "which"), [(2, 1), (9, 0), (17, 1)])
def test_a_killed_worker_is_started_again_and_the_run_ends_as_if_nothing_had_been(
    tmp_path: Path, recipe: Path, undisturbed: Path, at: int, which: int
) -> None:
    attempt = begin(recipe, tmp_path / "out")
    assert attempt.wait_until(lambda: attempt.step() >= at)
    attempt.kill(which)
    assert attempt.end() == ""
    assert attempt.killed
    same_end(attempt.out, undisturbed)


def test_a_killed_launcher_s_run_is_resumed_by_hand(tmp_path: Path, recipe: Path, undisturbed: Path) -> None:
    attempt = begin(recipe, tmp_path / "out")
    assert attempt.wait_until(lambda: attempt.step() >= 13)
    workers = attempt.workers()
    attempt.process.kill()
    attempt.process.communicate()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (checkpoint.latest(attempt.partial / "checkpoints") or 0) >= 8
    resumed = begin(recipe, tmp_path / "out", "--resume")
    assert resumed.end() == ""
    same_end(resumed.out, undisturbed)
    again = subprocess.run([*ONEBIT, "train", recipe, "--out", resumed.out, "--resume"], capture_output=True, text=True)
    assert (again.returncode, "is complete" in again.stdout) == (0, True)


def broken_off(recipe: Path, out: Path, at: int) -> Run:
    """A run that was ended after a step, by Ctrl-C."""
    attempt = begin(recipe, out)
    assert attempt.wait_until(lambda: attempt.step() >= at)
    attempt.process.send_signal(signal.SIGINT)
    assert "interrupted" in attempt.end()
    return attempt


def test_another_recipe_or_too_few_workers_are_refused_and_fewer_go_on_if_allowed(tmp_path: Path, recipe: Path) -> None:
    three = tmp_path / "three.toml"
    three.write_text(RECIPE.replace("workers = 2", "workers = 3"))
    attempt = broken_off(three, tmp_path / "out", 13)
    refused = begin(three, attempt.out, "--resume", "--lr", "0.01").end()
    assert "optimizer.lr is 0.01 and was 0.02 when the run was saved" in refused
    few = begin(three, attempt.out, "--resume", "--workers", 2).end()
    assert "2 workers came to go on with a run of 3" in few
    assert "train.min_workers" in few
    resumed = begin(three, attempt.out, "--resume", "--workers", 2, "--min-workers", 2)
    assert resumed.end() == ""
    assert summary_of(resumed.out)["workers"] == 2
    assert [step for step, _ in losses_of(resumed.out)] == list(range(1, 31))
    losses = [loss for _, loss in losses_of(resumed.out)]
    assert sum(losses[-5:]) < sum(losses[8:13])


def test_a_worker_that_hangs_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        RECIPE.replace("timeout_s = 30", "timeout_s = 3\nrestarts = 0").replace("steps = 30", "steps = 3000")
    )
    attempt = begin(recipe, tmp_path / "out")
    assert attempt.wait_until(lambda: attempt.step() >= 5)
    hanging = attempt.workers()[1]
    os.kill(hanging, signal.SIGSTOP)
    time.sleep(9)  # longer than the timeout and the look around; then it can be ended
    with suppress(ProcessLookupError):
        os.kill(hanging, signal.SIGCONT)
    said = attempt.end()
    assert re.search(r"At step \d+: worker \d no longer runs \(last seen at step \d+\)", said), said


def test_a_machine_that_is_lost_leaves_the_run_to_the_others(tmp_path: Path) -> None:
    """Two agents of torch's launcher stand for two machines; the second is killed with its worker."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        RECIPE.replace("steps = 30", "steps = 300").replace("timeout_s = 30", "timeout_s = 5\nmin_workers = 1")
    )
    out = tmp_path / "out"
    agents: list[subprocess.Popen[str]] = []
    meeting = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["--rdzv-id", "lost", "--rdzv-conf", meeting, "--local-addr", "127.0.0.1"]
    command += ["-m", "onebit.train", str(recipe), "--out", str(out)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": _loopback()}
    for _ in range(2):
        agents.append(subprocess.Popen(command, start_new_session=True, **how))
        time.sleep(2)  # the first one hosts the meeting
    try:
        first = Run(out, agents[0])
        assert first.wait_until(lambda: first.step() >= 20)
        _kill_tree(agents[1].pid)
        said, _ = agents[0].communicate(timeout=120)
        assert agents[0].returncode == 0, said[-9000:]
        assert "resumed at step" in said
        assert summary_of(out)["workers"] == 1
        assert summary_of(out)["steps"] == 300
    finally:
        for agent in agents:
            _kill_tree(agent.pid)
            agent.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _loopback() -> dict[str, str]:
    own_stores = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | own_stores


def _kill_tree(pid: int) -> None:
    children: list[int] = []
    with suppress(OSError):
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for one in [pid, *children]:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def test_steps_come_back_as_they_were() -> None:
    steps = [Step("warmup", torch.tensor(1.5, dtype=torch.float64), 0.1, 7, 0.25)]
    steps += [Step("compressed", torch.tensor(float("inf"), dtype=torch.float64), 0.3, 2**40, 0.5)]
    assert unpack_steps(pack_steps(steps), CPU) == steps
    assert unpack_steps(pack_steps([]), CPU) == []


def test_one_process_resumes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny(train__workers=1, train__checkpoint_every=3, train__async_checkpoints=True)
    display = Display(Console(), quiet=True)
    whole = run(recipe, Solo(), CPU, tmp_path / "whole", display)
    real = onebit.job.Job._step

    def stops(self: Any, number: int) -> Any:
        if number == 8:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(onebit.job.Job, "_step", stops)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, Solo(), CPU, tmp_path / "out", display)
    monkeypatch.setattr(onebit.job.Job, "_step", real)
    resumed = run(recipe, Solo(), CPU, tmp_path / "out", display, resume=True)
    assert resumed.eval_loss == whole.eval_loss
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may have died after the end, and all are started again."""
    recipe, display = tiny(train__workers=1, train__checkpoint_every=3), Display(Console(), quiet=True)
    whole = run(recipe, Solo(), CPU, tmp_path / "out", display)
    monkeypatch.setattr(onebit.job.Job, "train", None)  # would fail
    assert run(recipe, Solo(), CPU, tmp_path / "out", display, resume=True) == whole
    with pytest.raises(TypeError):
        run(tiny(train__workers=1, optimizer__lr=0.01), Solo(), CPU, tmp_path / "out", display, resume=True)


def test_a_kill_before_the_results_are_there_leaves_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, display = tiny(train__workers=1, train__checkpoint_every=3), Display(Console(), quiet=True)
    real = Output.publish

    def stops(self: Output) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Output, "publish", stops)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, Solo(), CPU, tmp_path / "out", display)
    monkeypatch.setattr(Output, "publish", real)
    assert checkpoint.latest(tmp_path / "out.partial" / "checkpoints") == 9
    with pytest.raises(onebit.ConfigError, match="holds checkpoints of a run that was broken off; --resume"):
        check_out(tmp_path / "out", False)
    check_out(tmp_path / "out", False, resume=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text("to be replaced by the attempt, which was told --overwrite")
    metrics = tmp_path / "out.partial" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    with Metrics(metrics, 9):
        kept = metrics.read_text().splitlines()  # on disk before anything is added
    assert kept == [line for line in lines if json.loads(line)["step"] <= 9]
    run(recipe, Solo(), CPU, tmp_path / "out", display, resume=True)
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert [step for step, _ in losses_of(tmp_path / "out")] == list(range(1, 13))


def test_virtual_workers_cannot() -> None:
    with pytest.raises(onebit.ConfigError, match="checkpoint_every"):
        check_virtual(tiny(train__checkpoint_every=3))
