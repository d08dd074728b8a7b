"""Training runs end to end, with virtual workers and alone; tiny models on the default text."""

import copy
import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import BertForMaskedLM, BertTokenizerFast, PreTrainedTokenizerFast

import onebit
from onebit import figures, report
from onebit.build import build_model, lr_factor
from onebit.comm import Comm, Solo
from onebit.errors import ConfigError, MismatchError
from onebit.job import Job
from onebit.recipe import OPTIMIZERS, Recipe, parse, resolve
from onebit.report import Display, Metrics, Output, Summary, check_out, read_metrics, read_summary
from onebit.text import IGNORED, generator, mask_tokens, prepare
from onebit.train import choose_device, run, run_alone, run_virtual

CPU = torch.device("cpu")
TINY = {
    "model": {"vocab_size": 300, "hidden_size": 32, "layers": 1, "heads": 2},
    "data": {"sequence_length": 32, "eval_windows": 40},
    "optimizer": {"freeze_step": 4, "lr": 0.02},
    "train": {"steps": 12, "micro_batch": 4, "workers": 2, "log_every": 1, "eval_every": 6},
}


def tiny(**overrides: Any) -> Recipe:
    """The tiny recipe; `train__steps=3` sets train.steps."""
    return parse(TINY, {key.replace("__", "."): value for key, value in overrides.items()})


def silent() -> Display:
    return Display(Console(), quiet=True)


TIMES = ("seconds", "samples_per_s", "milliseconds")


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    out = tmp_path_factory.mktemp("train") / "out"
    return out, run_virtual(tiny(), out, silent())


def test_a_run_leaves_metrics_summary_and_model(done: tuple[Path, Summary]) -> None:
    out, summary = done
    assert sorted(p.name for p in out.iterdir()) == ["layers.jsonl", "metrics.jsonl", "model", "summary.json"]
    assert not out.with_name("out.partial").exists()
    lines = read_metrics(out / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["stage"] for line in steps] == 4 * ["warmup"] + 8 * ["compressed"]
    assert [line["step"] for line in lines if "eval_loss" in line] == [6, 12]
    assert sum(line["payload_bytes"] for line in steps) == steps[-1]["payload_total"] == summary.payload_bytes
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert read_summary(out) == summary
    assert json.loads((out / "summary.json").read_text())["recipe"]["train"]["workers"] == 2


def test_layers_are_recorded_at_the_switch_and_at_evaluations(done: tuple[Path, Summary], tmp_path: Path) -> None:
    out, _ = done
    head, *records = read_metrics(out / "layers.jsonl")
    names = [name for name, p in build_model(resolve(tiny())[0], 300, CPU).named_parameters() if p.ndim > 1]
    assert head["layers"][: len(names)] == names
    assert [(r["step"], r["stage"]) for r in records] == [(4, "compressed"), (6, "compressed"), (12, "compressed")]
    kinds = {"variance_norm", "frozen_variance_norm", "coefficient", "ratio", "compression_error"}
    for record in records:
        assert record.keys() == kinds | {"step", "stage"}
        assert all(len(record[kind]) == len(head["layers"]) for kind in kinds)
    (switch,) = [line for line in read_metrics(out / "metrics.jsonl") if "switch_to" in line]
    assert (switch["step"], switch["switch_to"]) == (4, "compressed")
    same_averages = {"optimizer__name": "lamb", "optimizer__warmup_transport": "int8"}
    run_virtual(tiny(**same_averages, train__record_layers=True), tmp_path / "lamb", silent())
    _, *uncompressed = read_metrics(tmp_path / "lamb" / "layers.jsonl")
    assert [r["step"] for r in uncompressed] == [4, 6, 12]
    assert uncompressed[0]["coefficient"] == records[0]["coefficient"]
    run_virtual(tiny(train__record_layers=False), tmp_path / "off", silent())
    assert not (tmp_path / "off" / "layers.jsonl").exists()
    same = timeless(read_metrics(tmp_path / "off" / "metrics.jsonl"))
    assert same == timeless(read_metrics(out / "metrics.jsonl"))


@pytest.mark.parametrize("name", ["onebit-lamb", "adam-1bit-gradient"])
def test_a_switch_that_a_rule_finds_is_recorded_and_said(name: str, tmp_path: Path) -> None:
    shown = io.StringIO()
    rule = {"threshold": 0.5, "look_back": 2, "min_steps": 3, "max_steps": 8}
    recipe = tiny(optimizer__name=name, optimizer__freeze_step=rule)
    summary = run_virtual(recipe, tmp_path / "out", Display(Console(file=shown), quiet=False))
    assert 3 <= (summary.freeze_step or 0) <= 8
    assert summary == read_summary(tmp_path / "out")
    steps = [line for line in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in line]
    assert [line["stage"] for line in steps].count("warmup") == summary.freeze_step
    records = read_metrics(tmp_path / "out" / "layers.jsonl")[1:]
    assert [record["step"] for record in records] == sorted({summary.freeze_step, 6, 12})
    lines = shown.getvalue().splitlines()
    assert f"step {summary.freeze_step}: the warm-up stage ends ({summary.freeze_reason})" in lines
    assert any(line.startswith("before the switch: relative") for line in lines) == (name == "onebit-lamb")


def test_the_shares_of_16_bit_are_what_was_counted(done: tuple[Path, Summary]) -> None:
    out, summary = done
    whole = 2 * summary.parameters  # two workers: 2 (n - 1) / n = 1, times 2 bytes
    steps = [line for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    compressed = [line["payload_bytes"] for line in steps if line["stage"] == "compressed"]
    assert summary.share_of_16bit == pytest.approx(summary.payload_bytes / (12 * whole))
    assert summary.compressed_share_of_16bit == pytest.approx(sum(compressed) / (8 * whole))
    assert summary.compressed_share_of_16bit < 1 / 12


def test_the_model_loads_and_gives_the_loss_that_was_reported(done: tuple[Path, Summary]) -> None:
    out, summary = done
    model = BertForMaskedLM.from_pretrained(out / "model")
    corpus = prepare(tiny(), Solo())
    with torch.no_grad():
        loss = model(input_ids=corpus.held_out, labels=corpus.held_out_labels).loss
    assert loss.item() == pytest.approx(summary.eval_loss, abs=1e-4)
    for kind in (PreTrainedTokenizerFast, BertTokenizerFast):
        tokenizer = kind.from_pretrained(out / "model")
        ids = tokenizer("The class statement", add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == "the class statement"
        assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 4)
    assert len(tokenizer) == model.config.vocab_size == corpus.vocab_size


def test_the_same_seed_gives_the_same_run_and_another_seed_another(done: tuple[Path, Summary], tmp_path: Path) -> None:
    out, _ = done
    run_virtual(tiny(), tmp_path / "again", silent())
    run_virtual(tiny(train__seed=1), tmp_path / "other", silent())
    first, again, other = (
        timeless(read_metrics(p / "metrics.jsonl")) for p in (out, tmp_path / "again", tmp_path / "other")
    )
    assert first == again
    assert all(a["loss"] != b["loss"] for a, b in zip(first, other, strict=True) if "loss" in a)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_alone(name: str, tmp_path: Path) -> None:
    recipe = tiny(optimizer__name=name, train__steps=20, train__accumulation=2, train__lr_warmup=0)
    summary = run_alone(recipe, tmp_path / "out", silent())
    steps = [line for line in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in line]
    losses = [line["loss"] for line in steps]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.2  # of single batches, so averaged
    assert summary.payload_bytes == 0
    assert summary.share_of_16bit is None
    assert summary.workers == 1
    expected = {"warmup", "compressed"} if recipe.two_stages else {"uncompressed"}
    if name == "zero-one-adam":
        expected = {"warmup"}  # the variance may go on being refreshed
    assert set(summary.samples_per_s) == expected


def test_the_paper_preset_reaches_the_optimizer() -> None:
    default, paper = (
        Job(resolve(tiny(optimizer__preset=preset))[0], Solo(), CPU, prepare(tiny(), Solo())).optimizer
        for preset in ("default", "paper")
    )
    assert default._compression.variance_floor > 0 == paper._compression.variance_floor


def test_weight_decay_spares_biases_and_layer_norms() -> None:
    job = Job(resolve(tiny(optimizer__weight_decay=0.5))[0], Solo(), CPU, prepare(tiny(), Solo()))
    decayed, spared = job.optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)
    assert all(p.ndim == 1 for p in spared["params"])
    assert sum(p.numel() for g in job.optimizer.param_groups for p in g["params"]) == sum(
        p.numel() for p in job.model.parameters()
    )


def test_the_held_out_loss_does_not_depend_on_the_number_of_workers() -> None:
    recipe = resolve(tiny())[0]

    def loss(comm: Comm) -> float:
        return Job(recipe, comm, CPU, prepare(recipe, comm)).evaluate()

    for workers in (2, 3):
        losses = onebit.run_workers(workers, loss)
        assert len(set(losses)) == 1
        assert losses[0] == pytest.approx(loss(Solo()), rel=1e-6)


def test_all_workers_start_from_the_same_weights_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    recipe = resolve(tiny())[0]
    models = onebit.run_workers(3, lambda _: build_model(recipe, 300, CPU))
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), model.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_can_be_repeated_alone_and_is_refused_with_virtual_workers(tmp_path: Path) -> None:
    recipe = tiny(model__dropout=0.1, train__steps=6)
    first, second = (run_alone(recipe, tmp_path / name, silent()).eval_loss for name in "ab")
    assert first == second
    with pytest.raises(ConfigError, match=r"dropout is 0\.1; virtual workers share"):
        run_virtual(recipe, tmp_path / "c", silent())
    assert not (tmp_path / "c").exists()


def test_a_worker_without_a_held_out_window_evaluates_too() -> None:
    recipe = resolve(tiny(data__eval_windows=2, train__steps=5, train__eval_every=5))[0]

    def loss(comm: Comm) -> float:
        job = Job(recipe, comm, CPU, prepare(recipe, comm))
        job.train(None, None)
        return job.eval_loss

    losses = onebit.run_workers(3, loss)
    assert losses[0] == losses[1] == losses[2] < 10


def test_the_loss_is_the_mean_over_the_masked_tokens_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolve(tiny(train__micro_batch=1, train__accumulation=4, data__mask_probability=0.02))[0]
    job = Job(recipe, Solo(), CPU, prepare(recipe, Solo()))
    before = copy.deepcopy(job.model)
    seen = []

    def spy(*arguments: Any) -> Any:
        seen.append(mask_tokens(*arguments))
        return seen[-1]

    monkeypatch.setattr("onebit.job.mask_tokens", spy)
    monkeypatch.setattr(job.optimizer, "zero_grad", lambda **_: None)
    number = next(n for n in range(1, 20) if not _all_windows_masked(job, n))
    step = job._step(number)
    inputs, labels = seen[-1]
    assert not all((row != IGNORED).any() for row in labels)
    whole = before(input_ids=inputs, labels=labels).loss
    whole.backward()
    assert step.loss.item() == pytest.approx(whole.item(), rel=1e-5)
    for mine, theirs in zip(job.model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def _all_windows_masked(job: Job, number: int) -> bool:
    windows = job._windows.take((number - 1) * 4, 4)
    labels = mask_tokens(windows, generator(0, "mask", 0, number), 0.02, job.corpus.vocab_size)[1]
    return all((row != IGNORED).any() for row in labels)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_workers_that_start_from_different_weights_are_told_the_layer(name: str) -> None:
    recipe = resolve(tiny(optimizer__name=name))[0]

    def work(comm: Comm) -> None:
        job = Job(recipe, comm, CPU, prepare(recipe, comm))
        if comm.rank == 1:
            job.model.bert.embeddings.LayerNorm.weight.data[3] += 1e-6
        job.train(None, None)

    with pytest.raises(
        MismatchError, match=r"parameters differ.*bert\.embeddings\.LayerNorm\.weight is .* on worker 1"
    ):
        onebit.run_workers(2, work)


@pytest.mark.parametrize("name", ["lamb", "onebit-lamb", "adamw"])
def test_replicas_that_come_apart_stop_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_step = Job._step

    def step(job: Job, number: int) -> Any:
        done = whole_step(job, number)
        if (number, job.comm.rank) == (3, 1):
            job.model.bert.embeddings.LayerNorm.weight.data[3] += 0.01
        return done

    monkeypatch.setattr(Job, "_step", step)
    with pytest.raises(MismatchError, match=r"replicas after step 6 differ .*: bert\.embeddings\.LayerNorm\.weight is"):
        run_virtual(tiny(optimizer__name=name), tmp_path / "out", silent())
    assert not (tmp_path / "out").exists()


def test_sixty_steps_send_what_the_papers_ratio_promises(tmp_path: Path) -> None:
    recipe = tiny(
        model__hidden_size=96, optimizer__freeze_step=0.17, train__steps=60, train__micro_batch=1,
        data__sequence_length=16, train__eval_every=60,
    )  # fmt: skip
    summary = run_virtual(recipe, tmp_path / "out", silent())
    assert summary.share_of_16bit <= 1 / 4.4
    assert summary.compressed_share_of_16bit <= 1 / 15


@pytest.mark.parametrize("name", ["lamb", "onebit-lamb", "adamw"])
def test_a_run_that_goes_to_nan_is_stopped_with_the_reason(name: str, tmp_path: Path) -> None:
    recipe = tiny(optimizer__name=name, optimizer__lr=1e30, optimizer__lr_for={}, train__steps=40, train__lr_warmup=0)
    with pytest.raises(ConfigError, match=r"has not been finite for 20 steps.*lower optimizer\.lr"):
        run_virtual(recipe, tmp_path / "out", silent())
    assert not (tmp_path / "out").exists()
    text = (tmp_path / "out.partial" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert any(line.get("loss", 0) is None for line in read_metrics(tmp_path / "out.partial" / "metrics.jsonl"))


def test_numbers_that_are_not_finite_are_null_in_files_and_cope_in_tables_and_plots(
    done: tuple[Path, Summary], tmp_path: Path
) -> None:
    lost = dataclasses.replace(done[1], eval_loss=math.nan)
    output = Output(tmp_path / "out")
    output.create()
    output.write_json("summary.json", dataclasses.asdict(lost))
    with Metrics(output.folder / "metrics.jsonl") as metrics:
        for step, loss in enumerate([math.inf, 2.0, math.nan, 1.0], start=1):
            metrics.write(step=step, stage="compressed", loss=loss, payload_total=step)
        metrics.write(step=4, eval_loss=math.nan, payload_total=4)
    text = (output.folder / "metrics.jsonl").read_text()
    assert [json.loads(line)["loss"] for line in text.splitlines()[:4]] == [None, 2.0, None, 1.0]
    assert not {"NaN", "Infinity"} & {*text.split(), *(output.folder / "summary.json").read_text().split()}
    assert math.isnan(read_summary(output.folder).eval_loss)
    figures.plot({"a": [read_metrics(output.folder / "metrics.jsonl")]}, [tmp_path / "plot.png"])
    rows = report.comparison_rows([lost, done[1], lost])
    assert rows[0]["eval_loss"] is None
    console = Console(width=200, record=True, file=io.StringIO())
    for table in (report.comparison_table(rows), report.comparison_table(rows[1:]), report.summary_table(lost)):
        console.print(table)
    assert console.export_text().count("not finite") == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_one_sentence() -> None:
    message = r"'/dev/full' cannot be written: No space left on device; make room"
    with pytest.raises(ConfigError, match=message), Metrics(Path("/dev/full")) as metrics:
        metrics.write(step=1)


def test_the_reason_for_a_device_is_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert choose_device(0, 2) == (CPU, "cpu (this torch has no NCCL, which 2 GPUs would need to talk to each other)")
    assert choose_device(0, 3) == (CPU, "cpu (3 workers here, only 2 GPUs)")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert choose_device(1, 2)[0] == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(0, 1) == (CPU, "cpu (no CUDA device)")


def test_steps_are_timed_after_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolve(tiny())[0]
    job = Job(recipe, Solo(), CPU, prepare(recipe, Solo()))
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    job._step(1)
    assert waited == []
    job.device = torch.device("cuda", 1)
    assert job._now() > 0
    assert waited == [job.device]


def test_workers_with_different_recipes_are_told_the_first_difference(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        run(tiny(train__micro_batch=4 + comm.rank), comm, CPU, tmp_path / "out", silent())

    with pytest.raises(MismatchError, match=r"train\.micro_batch is 4 on worker 0 and 5 on worker 1"):
        onebit.run_workers(2, work)
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_too_short_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        run_virtual(tiny(data__sequence_length=100_000), tmp_path / "out", silent())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("decay", ["linear", "cosine", "constant"])
def test_the_learning_rate_rises_to_its_peak_and_never_exceeds_it(decay: str) -> None:
    recipe = tiny(train__steps=50, train__lr_warmup=10, train__lr_decay=decay)
    factors = [lr_factor(recipe, step) for step in range(50)]
    assert factors[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert max(factors) == 1
    assert min(factors) > 0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert math.isclose(factors[-1], {"linear": 1 / 40, "cosine": 0.00154, "constant": 1}[decay], rel_tol=0.01)


def test_an_output_folder_with_something_in_it_is_kept_unless_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_out(out, overwrite=False)
    out.mkdir()
    check_out(out, overwrite=False)
    (out / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        check_out(out, overwrite=False)
    with pytest.raises(ConfigError, match=r"holds neither summary\.json nor compare\.json; --overwrite replaces only"):
        check_out(out, overwrite=True)
    (out / "summary.json").write_text("{}")
    check_out(out, overwrite=True)
    output = Output(out)
    output.create()
    assert (out / "mine").exists()
    output.publish()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert list(out.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        check_out(tmp_path / "file", overwrite=True)


def test_what_is_not_ours_is_never_removed(tmp_path):
    kept = tmp_path / "run.partial" / "notes"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(ConfigError, match="is in the way"):
        Output(tmp_path / "run").create()
    assert kept.read_text() == "mine"
    kept.unlink()
    Output(tmp_path / "run").create()
    Output(tmp_path / "run").create()  # in place of the remains of the first


def test_overlap_and_two_levels_in_a_recipe(tmp_path: Path) -> None:
    """Layers are recorded, the bytes of the lane are counted, and the time of a step is split."""
    plain = {"optimizer__options": {"bucket_elements": 4000}, "train__record_layers": True, "train__workers": 2}
    both = {**plain, "optimizer__options": {"bucket_elements": 4000, "overlap": True}}
    for name, settings in (("plain", plain), ("overlap", both)):
        run_virtual(tiny(**settings), tmp_path / name, silent())
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("overlap", "plain"))
    assert timeless(ours) == timeless(theirs)
    split = next(line["milliseconds"] for line in ours if line.get("stage") == "compressed")
    assert split["compute"] > 0
    assert split["encode"] > 0
    assert split["waiting"] > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        run_virtual(tiny(**both, train__two_levels=True), tmp_path / "levels", silent())
    levels = read_metrics(tmp_path / "levels" / "metrics.jsonl")
    assert levels[-1]["eval_loss"] == pytest.approx(ours[-1]["eval_loss"], abs=0.2)
    assert (tmp_path / "levels" / "layers.jsonl").exists()
