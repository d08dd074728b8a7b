"""The command line: real processes, real signals, and every refusal in one clear sentence."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onebit import train
from onebit.cli import expand_text
from onebit.commands import app
from onebit.errors import ConfigError
from onebit.report import Output, check_out, read_metrics, read_summary

ONEBIT = [sys.executable, "-m", "onebit.cli"]
RECIPE = """
[model]
vocab_size = 300
hidden_size = 32
layers = 1
heads = 2
[data]
sequence_length = 32
eval_windows = 40
[optimizer]
freeze_step = 4
lr = 0.02
[train]
steps = 10
micro_batch = 4
workers = 2
log_every = 1
eval_every = 10
timeout_s = 30
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(a) for a in arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )


@contextmanager
def running(tmp_path: Path, recipe: Path, training: bool = True) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A long run of two workers that has begun to train, or only to start, and the workers' process ids."""
    arguments = ["train", recipe, "--steps", "100000", "--out", tmp_path / "out", "--quiet"]
    process = subprocess.Popen(
        [*ONEBIT, *map(str, arguments)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    workers: list[int] = []
    try:
        metrics = tmp_path / "out.partial" / "metrics.jsonl"
        deadline = time.monotonic() + 90
        while len(workers) < 2 or (training and not (metrics.exists() and metrics.stat().st_size)):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            workers = [int(pid) for pid in children.read_text().split()]
        assert len(workers) == 2
        yield process, workers
    finally:
        for pid in [process.pid, *workers]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stderr:
            process.stderr.close()


def no_longer_runs(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")


def one_sentence(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


def test_two_processes_do_what_two_virtual_workers_do(tmp_path: Path, recipe: Path) -> None:
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "summary.json").write_text("to be replaced")
    result = call(*ONEBIT, "train", recipe, "--workers", 2, "--out", tmp_path / "processes", "--overwrite")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "held-out loss" in result.stdout
    assert str(tmp_path / "processes") in result.stdout
    arguments = ["train", recipe, "--virtual", 2, "--out", tmp_path / "threads"]
    inside = CliRunner().invoke(app, [str(a) for a in arguments])
    assert inside.exit_code == 0, inside.output
    processes, threads = (read_metrics(tmp_path / out / "metrics.jsonl") for out in ("processes", "threads"))
    for a, b in zip(processes, threads, strict=True):
        for key in ("step", "stage", "payload_bytes", "payload_total", "lr"):
            assert a.get(key) == b.get(key)
        for key in {"loss", "eval_loss"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-3)
    left = sorted(p.name for p in (tmp_path / "processes").iterdir())
    assert left == ["layers.jsonl", "metrics.jsonl", "model", "summary.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["processes", "recipe.toml", "threads"]


def test_torchrun_runs_the_same_program(tmp_path: Path, recipe: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    result = call(*torchrun, "-m", "onebit.train", recipe, "--out", tmp_path / "out", "--steps", 6, "--quiet")
    assert result.returncode == 0, result.stderr
    summary = read_summary(tmp_path / "out")
    assert (summary.workers, summary.steps) == (2, 6)


def test_started_alone_the_program_says_what_the_recipe_says_in_vain(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    recipe.write_text(RECIPE.replace("freeze_step = 4", "lr_for = {onebit-lamb = 0.5}"))
    arguments = [str(recipe), "--out", str(tmp_path / "out"), "--steps", "6", "--lr", "0.01", "--freeze-step", "0.5"]
    assert train.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "train.workers is 2 and not used here: the launcher decides, and started 1" in lines
    assert "optimizer.freeze_step = 3: 0.5 of 6 steps" in lines
    summary = read_summary(tmp_path / "out")
    assert (summary.workers, summary.recipe["optimizer"]["lr"]) == (1, 0.01)


@pytest.mark.parametrize("value", ["soon", "true", "1,5"])
def test_the_program_refuses_a_freeze_step_as_the_command_does(
    recipe: Path, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(train, "end_process", sys.exit)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        train.main([str(recipe), "--freeze-step", value])
    expected = f"error: --freeze-step is {value!r}; it must be a number or auto; correct the flag"
    assert one_sentence(capsys.readouterr().err) == expected


def test_compare_ends_with_a_table_rows_and_plots(tmp_path: Path, recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("[optimizer]\n", '[optimizer]\nwarmup_transport = "bf16"\n'))
    assert "bf16" in recipe.read_text()
    out = tmp_path / "out"
    arguments = ["compare", recipe, "--optimizers", "lamb,onebit-lamb,lamb-basic-1bit,adamw", "--virtual", 2]
    result = CliRunner().invoke(app, [str(a) for a in [*arguments, "--lr", "adamw=0.004", "--out", out]])
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "compare.json").read_text())
    assert [row["optimizer"] for row in rows] == ["lamb", "onebit-lamb", "lamb-basic-1bit", "adamw"]
    assert [row["lr"] for row in rows] == [0.02, 0.02, 0.02, 0.004]
    assert {"eval_loss", "payload_bytes", "share_of_16bit", "compressed_share_of_16bit", "seconds"} <= rows[0].keys()
    assert rows[0]["share_of_16bit"] == pytest.approx(1, rel=0.01)
    assert rows[1]["payload_bytes"] < rows[0]["payload_bytes"] / 2
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "plot.svg").read_text()
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")
    losses = [
        [line["loss"] for line in read_metrics(out / name / "metrics.jsonl") if "loss" in line and line["step"] <= 4]
        for name in ("lamb", "onebit-lamb", "lamb-basic-1bit")
    ]
    assert losses[0] == losses[1] == losses[2]  # same data, seed and order; the warm-up stage is LAMB itself
    assert str(out / "plot.svg") in result.output.replace("\n", "")
    assert not out.with_name("out.partial").exists()


VARIANTS = """
[variants.base]
name = "lamb"
[variants.soft.options]
factor_threshold = inf
[variants.late]
freeze_step = {min_steps = 6, max_steps = 7}
"""


def test_variants_are_compared_under_their_names(tmp_path: Path, recipe: Path) -> None:
    """In processes, so that they also travel as JSON."""
    recipe.write_text(RECIPE + VARIANTS)
    result = CliRunner().invoke(app, ["compare", str(recipe), "--lr", "late=0.004", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["optimizer"] for row in rows] == ["base", "soft", "late"]
    assert [row["lr"] for row in rows] == [0.02, 0.02, 0.004]
    assert [row["freeze_step"] for row in rows][:2] == [None, 4]
    assert rows[2]["freeze_step"] in (6, 7)
    assert rows[1]["freeze_reason"] == "4 updates, as was asked"
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_dir()) == ["base", "late", "soft"]
    assert "late: optimizer.freeze_step = auto: when the variance has settled" in result.output
    assert read_summary(tmp_path / "out" / "soft").recipe["optimizer"]["options"] == {"factor_threshold": "inf"}
    report = (tmp_path / "out" / "report.html").read_text()
    for words in ("base, soft, late", "<span>base: lamb</span>", "late: after update", rows[2]["freeze_reason"]):
        assert words in report, words


def test_a_variant_is_trained_by_its_name_and_flags_win_over_it(tmp_path: Path, recipe: Path) -> None:
    recipe.write_text(RECIPE + VARIANTS)
    arguments = ["train", recipe, "--optimizer", "late", "--freeze-step", 3, "--virtual", 2, "--out", tmp_path / "out"]
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    summary = read_summary(tmp_path / "out")
    assert (summary.optimizer, summary.freeze_step) == ("late", 3)
    assert summary.recipe["optimizer"]["name"] == "onebit-lamb"
    assert "step 3: the warm-up stage ends (3 updates, as was asked)" in result.output
    result = CliRunner().invoke(app, ["compare", str(recipe), "--optimizers", "base,latte"])
    assert result.exit_code == 2
    assert "'latte', neither an optimizer nor a variant" in one_sentence(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "text 'missing.txt' does not exist"),
        (["--workers", "0"], "train.workers is 0; it must be 1 or more"),
        (["--virtual", "0"], "train.workers is 0; it must be 1 or more"),
        (["--workers", "2", "--virtual", "2"], "give one"),
        (["--freeze-step", "10"], "freeze_step is 10, beyond the run"),
        (["--freeze-step", "soon"], "--freeze-step is 'soon'; it must be a number"),
        (["--optimizer", "sgd"], "optimizer.name is 'sgd'"),
        (["--lr", "-1"], "optimizer.lr is -1.0; it must be above 0"),
        (["--steps", "0"], "train.steps is 0"),
        (["--micro-batch", "0"], "train.micro_batch is 0"),
        (["--seed", "-1"], "train.seed is -1"),
    ],
)
def test_train_refuses_impossible_flags_before_it_starts_anything(
    tmp_path: Path, recipe: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["train", str(recipe), *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in one_sentence(result.stderr)
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizers", "lamb"], "two or more"),
        (["--optimizers", "lamb,lamb"], "two or more different"),
        (["--optimizers", "lamb,sgd"], "optimizer.name is 'sgd'"),
        (["--lr", "adamw=0.1"], "not among --optimizers"),
        (["--lr", "0.1"], "NAME=VALUE"),
        (["--lr", "lamb=-1"], "optimizer.lr is -1"),
        (["--lr", "lamp=1"], "NAME=VALUE with NAME one of lamb, onebit-lamb"),
        (["--seeds", "0,0"], "--seeds is '0,0'; it must be one or more different numbers"),
        (["--seeds", "0,one"], "--seeds is '0,one'; it must be whole numbers"),
        (["--seeds", ""], "--seeds is ''; it must be whole numbers"),
        (["--seeds", "0,-1"], "train.seed is -1"),
        (["--seeds", "0,1", "--seed", "0"], "were both given; give one"),
    ],
)
def test_compare_refuses_impossible_flags(tmp_path: Path, recipe: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["compare", str(recipe), *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in one_sentence(result.stderr)
    assert list(tmp_path.iterdir()) == [recipe]


def test_a_recipe_with_an_unknown_key_names_the_nearest_one(tmp_path: Path, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("micro_batch", "micro_bach"))
    result = CliRunner().invoke(app, ["train", str(recipe), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "'train.micro_bach'; the nearest known key is 'train.micro_batch'" in one_sentence(result.stderr)


def test_a_full_output_folder_is_refused(tmp_path: Path, recipe: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(recipe), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty; choose another" in one_sentence(result.stderr)
    result = CliRunner().invoke(app, ["train", str(recipe), "--out", str(tmp_path), "--overwrite"])
    assert result.exit_code == 2
    assert "--overwrite replaces only an empty folder or an earlier result" in one_sentence(result.stderr)
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize("name", [".", "../here/", "a/.."])
def test_output_in_the_folder_one_is_in_keeps_that_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "model").mkdir(parents=True)
    (here / "summary.json").write_text("old")
    (tmp_path / "here.old").mkdir()
    monkeypatch.chdir(here)
    out = Path(name)
    (here / "a").mkdir()
    check_out(out, overwrite=True)
    output = Output(out)
    output.create()
    (output.folder / "summary.json").write_text("new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "here.old", "here.partial"]
    output.publish()
    assert os.listdir() == ["summary.json"]
    assert Path("summary.json").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "here.old"]


def test_output_that_cannot_be_looked_at_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="cannot be used: File name too long"):
        check_out(Path("x" * 5000), overwrite=False)
    with pytest.raises(ConfigError, match="--overwrite replaces only"):
        check_out(Path("/"), overwrite=True)


def test_text_too_short_ends_all_processes_with_one_sentence(tmp_path: Path, recipe: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"word{i} " * 300 for i in range(4)))
    recipe.write_text(RECIPE.replace("sequence_length = 32", "sequence_length = 5000"))
    result = call(*ONEBIT, "train", recipe, "--text", text, "--out", tmp_path / "out", "--quiet")
    assert result.returncode == 2
    sentence = one_sentence(result.stderr)
    assert re.search(r"training part has \d+ tokens, and data.sequence_length 5000 needs at least 4998", sentence)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.toml", "text.txt"]


@needs_proc
def test_a_killed_worker_ends_the_run_with_one_sentence(tmp_path: Path, recipe: Path) -> None:
    with running(tmp_path, recipe) as (process, workers):
        began = time.monotonic()
        os.kill(workers[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=30)
        assert time.monotonic() - began < 10
        assert process.returncode == 2
        sentence = one_sentence(stderr)
        assert re.search(r"error: worker \d of 2 was killed by signal 9 \(SIGKILL\)", sentence)
        assert "out.partial" in sentence
        assert all(no_longer_runs(pid) for pid in workers)
    assert not (tmp_path / "out").exists()


@needs_proc
@pytest.mark.parametrize(("training", "whole_group"), [(True, True), (False, True), (False, False)])
def test_ctrl_c_ends_all_workers_at_once(tmp_path: Path, recipe: Path, training: bool, whole_group: bool) -> None:
    with running(tmp_path, recipe, training) as (process, workers):
        began = time.monotonic()
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert time.monotonic() - began < 5
        assert process.returncode == 130
        assert "interrupted" in one_sentence(stderr)
        assert all(no_longer_runs(pid) for pid in workers)
    assert not (tmp_path / "out").exists()


@needs_proc
def test_workers_do_not_outlive_their_launcher(tmp_path: Path, recipe: Path) -> None:
    with running(tmp_path, recipe, training=False) as (process, workers):
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while not all(no_longer_runs(pid) for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert not (tmp_path / "out").exists()


def test_a_worker_that_never_comes_is_not_waited_for_longer_than_the_timeout(tmp_path: Path, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("timeout_s = 30", "timeout_s = 2"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    result = call(
        sys.executable, "-m", "onebit.train", recipe, "--out", tmp_path / "out",
        **alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_CPP_LOG_LEVEL="FATAL",
    )  # fmt: skip
    assert result.returncode == 2
    assert "not all of the 2 workers came within train.timeout_s, 2 s" in one_sentence(result.stderr)
    assert list(tmp_path.iterdir()) == [recipe]


@needs_proc
def test_ctrl_c_ends_virtual_workers(tmp_path: Path, recipe: Path) -> None:
    arguments = ["train", recipe, "--virtual", 2, "--steps", 100000, "--out", tmp_path / "out", "--quiet"]
    process = subprocess.Popen([*ONEBIT, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "out.partial").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 130
        assert one_sentence(stderr) == "interrupted"
    finally:
        process.kill()
        process.wait()


def test_info_says_what_is_used() -> None:
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    for word in ("torch", "transformers", "kernels", "device", "gloo"):
        assert word in result.stdout


def test_without_the_extras_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['onebit', 'info']; "
        "from onebit.cli import main; main()"
    )  # fmt: skip
    result = call(sys.executable, "-c", code)
    assert result.returncode == 2
    assert "pip install 'onebit[train]'" in one_sentence(result.stderr)


def test_text_takes_several_values() -> None:
    assert expand_text(["train", "r.toml", "--text", "a", "b", "--steps", "3"]) == [
        "train", "r.toml", "--text", "a", "--text", "b", "--steps", "3",
    ]  # fmt: skip
    assert expand_text(["train", "--text", "a", "--text", "b"]) == ["train", "--text", "a", "--text", "b"]
