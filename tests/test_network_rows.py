"""benchmarks/network: local steps, trainings to a held-out loss, their seconds, and the figures; none needs root."""

import json
import pydoc_data.topics
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not part of the package

import onebit
from benchmarks.network import plots, times, to_loss, trainings
from benchmarks.network.fleet import RowFailed
from benchmarks.network.local_steps import DiLoCo
from benchmarks.network.rows import METHODS, ROWS
from benchmarks.network.times import Timings, read_rows
from benchmarks.network.trainings import RATES, TRAININGS

PERIOD, OUTER = 3, 4
FIRST = [np.array([[1.0, -2.0]]), np.array([0.5])]


def moves(rank, step):
    """What a local optimizer adds to the two parameters at a step."""
    return [(rank + 1) * step * np.array([[0.01, -0.02]]), np.array([0.03 * (1 - rank) + 0.001 * step])]


def by_hand(lr, momentum):
    """The weights that two workers agree on after each outer step, by Algorithm 1 with PyTorch's Nesterov."""
    agreed, buffer, found = np.concatenate([x.ravel() for x in FIRST]), np.zeros(3), []
    for outer in range(OUTER):
        ends = []
        for rank in range(2):
            x = agreed.copy()
            for step in range(outer * PERIOD, (outer + 1) * PERIOD):
                x = x + np.concatenate([m.ravel() for m in moves(rank, step)])
            ends.append(x)
        d = agreed - (ends[0] + ends[1]) / 2
        buffer = momentum * buffer + d
        agreed = agreed - lr * (d + momentum * buffer)
        found.append(agreed)
    return found


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_diloco_is_nesterov_sgd_on_the_mean_of_what_was_moved(lr, momentum):
    def work(comm):
        parameters = [torch.nn.Parameter(torch.tensor(x, dtype=torch.float32)) for x in FIRST]
        outer = DiLoCo(parameters, comm, PERIOD, lr=lr, momentum=momentum)
        found, sent = [], []
        for step in range(OUTER * PERIOD):
            with torch.no_grad():
                for p, move in zip(parameters, moves(comm.rank, step), strict=True):
                    p += torch.tensor(move, dtype=torch.float32)
            before = comm.payload_bytes
            outer.step()
            sent.append(comm.payload_bytes - before)
            if (step + 1) % PERIOD == 0:
                found.append(torch.cat([p.detach().reshape(-1) for p in parameters]))
        return found, sent

    first, second = onebit.run_workers(2, work)
    for mine, others, expected in zip(first[0], second[0], by_hand(lr, momentum), strict=True):
        assert torch.equal(mine, others)
        np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-5)
    assert first[1] == [0, 0, 12] * OUTER  # three fp32 numbers, of which a ring of two sends each once


def test_diloco_with_lr_one_and_no_momentum_averages_weights():
    def work(comm):
        weight = torch.nn.Parameter(torch.zeros(2))
        outer = DiLoCo([weight], comm, 1, lr=1.0, momentum=0.0)
        weight.data += comm.rank + 1
        outer.step()
        return weight.detach()

    for found in onebit.run_workers(2, work):
        assert found.tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 0}, "period is 0; it must be at least 1"),
        ({"period": 1, "lr": float("nan")}, "lr is nan; it must be above 0"),
        ({"period": 1, "momentum": 1.0}, r"momentum is 1.0; it must be in \[0, 1\)"),
    ],
)
def test_impossible_outer_steps_are_refused(settings, message):
    def work(comm):
        with pytest.raises(onebit.ConfigError, match=message):
            DiLoCo([torch.nn.Parameter(torch.zeros(2))], comm, **settings)

    onebit.run_workers(1, work)


def test_trainings_and_methods_name_each_other():
    stands_for = [(name, training.note) for training in TRAININGS.values() for name in training.methods]
    assert len(set(stands_for)) == len(stands_for)  # nothing in the table has its name twice
    assert {name for name, _ in stands_for} <= {method.name for method in METHODS}
    assert all(method in TRAININGS[training].methods for training, method in plots.DRAWN)
    assert {training.family for training in TRAININGS.values()} == set(RATES)
    assert all(TRAININGS[name].family == family for family, (name, _) in RATES.items())
    assert set(times.TARGETS_OF) <= set(TRAININGS)
    assert TRAININGS["1bit-lamb"].warmup(320) == 54
    assert TRAININGS["local-lamb"].warmup(320) == 16
    assert TRAININGS["diloco"].warmup(320) == TRAININGS["ddp-adamw"].warmup(320) == 0


def test_the_hook_changes_after_the_first_stage(monkeypatch):
    called = []
    monkeypatch.setattr(trainings, "bf16_hook", lambda state, bucket: called.append(("bf16", state)))
    hook = trainings.after(2, lambda state, bucket: called.append(("own", state)))
    for _ in range(3):
        for last in (False, True):  # two buckets
            hook("state", SimpleNamespace(is_last=lambda last=last: last))
    assert called == [("bf16", None)] * 4 + [("own", "state")] * 2


CURVE = [[16, 6.0], [32, 5.0], [48, 4.0], [64, 4.5]]


def test_steps_and_seconds_to_a_loss():
    assert times.target(CURVE, 0.75) == 4.0
    assert times.target(CURVE, 0.74) == 5.0
    assert times.target(CURVE, 0.1) == 6.0  # nothing was measured by then
    assert times.steps_to(CURVE, 4.25) == 44
    assert times.steps_to(CURVE, 5.0) == 32
    assert times.steps_to(CURVE, 7.0) == 16
    assert times.steps_to(CURVE, 3.9) is None
    assert times.seconds_to(44, 10, 2.0, 0.5) == 20 + 17
    assert times.seconds_to(4, 10, 2.0, 0.5) == 8
    assert times.seconds_to(44, 0, 2.0, 0.5) == 22


def training(name, seed, curve, warmup=0, **more):
    return {"kind": "training", "training": name, "seed": seed, "lr": 0.1, "curve": curve, "warmup": warmup, **more}


def row(name, mbit, seconds, collectives=None, hosts=2, **more):
    place = {"kind": "row", "hosts": hosts, "workers_per_host": 1, "mbit": mbit, "row": name}
    if "failed" in more:
        return {**place, **more}
    known = {"step_s": [seconds] * 3, "forward_backward_s": [0.1] * 3, "wire_sent_per_host_step": [8, 8]}
    return {**place, **known, "in_collectives_s": collectives and [collectives] * 3, **more}


TRAINED = [
    training("ddp-adamw", 0, [[8, 6.0], [16, 5.0]]),
    training("ddp-adamw", 1, [[8, 6.2], [16, 5.2]]),
    training("1bit-lamb", 0, [[8, 7.0], [16, 5.0]], warmup=3),
    training("1bit-lamb", 1, [[8, 7.2], [16, 6.3]], warmup=3),
    training("1bit-adam", 0, [[8, 6.0], [16, 5.5]], warmup=3),
    training("1bit-adam", 1, [[8, 6.2], [16, 5.6]], warmup=3),
    {"kind": "training", "training": "diloco", "lr": 0.1, "seed": 0, "failed": "Diverged: nan"},
    training("diloco", 1, [[8, 6.2], [16, 5.6]]),
]
TIMED = [
    row("compute", 50.0, 0.1),
    row("ddp-fp32", 50.0, 4.0),
    row("ddp-bf16", 50.0, 2.0),
    row("ddp-fp16", 50.0, 0.0, failed="no such type"),
    row("adam-fp32", 50.0, 4.0, collectives=3.5),
    row("1bit-adam", 50.0, 0.5, collectives=0.3),
    row("lamb-fp32", 50.0, 4.0, collectives=3.5),
    row("1bit-lamb", 50.0, 0.5, collectives=0.3),
    row("diloco", 50.0, 0.5, collectives=0.3),
]


def test_seconds_are_put_together_of_losses_and_stages():
    records = times.times(TRAINED, Timings(TIMED), 0.9, "ddp-adamw")
    found = {record["method"]: record for record in records if "mbit" in record}
    assert {record["target_of"] for record in records} == {"ddp-adamw"}
    assert found["DDP, bf16 hook"]["targets"] == [6.0, 6.2]
    assert found["DDP, bf16 hook"]["seconds"] == [16, 16]
    assert found["DDP fp32"]["seconds"] == [32, 32]
    assert found["1-bit Adam, fp32 warm-up"]["seconds"] == [3 * 4 + 5 * 0.5] * 2
    lamb = found["1-bit LAMB, fp32 warm-up"]
    assert lamb["steps"] == [12, None]
    assert lamb["seconds"] == [3 * 4 + 9 * 0.5, None]
    assert found["DDP, fp16 hook"]["failed"] == "ddp-fp16: no such type"
    [diloco] = [record for record in records if record["method"] == "DiLoCo"]
    assert diloco["failed"] == "Diverged: nan"
    shown = times.loss_table(TRAINED, records)
    assert "| 1-bit LAMB, fp32 warm-up | 0.1 | 5.000 6.300 | 12 - | not reached with 1 of 2 seeds |" in shown
    assert "| 1-bit Adam, fp32 warm-up | 0.1 | 5.500 5.600 | 8 8 | 14.5 s |" in shown
    assert "| DiLoCo | failed: Diverged: nan |" in shown
    assert "no time: ddp-fp16: no such type" in shown
    assert len({line.count("|") for line in shown.splitlines()}) == 1


def test_without_the_other_there_is_no_target():
    records = times.times(TRAINED[1:], Timings(TIMED), 0.9, "ddp-adamw")
    missing = "there is no target: ddp-adamw was not trained with seed 0, or failed"
    assert {record["failed"] for record in records if record["method"].startswith("1-bit")} == {missing}
    other = times.times(TRAINED, Timings(TIMED), 0.9, "1bit-lamb")
    assert next(record["targets"] for record in other if record["method"] == "DDP fp32") == [7.0, 7.2]


def test_results_are_put_together_anew(tmp_path, capsys):
    first, second, network = (tmp_path / name for name in ("first.jsonl", "second.jsonl", "network.jsonl"))
    again = training("diloco", 0, [[8, 6.0], [16, 5.5]])
    first.write_text("".join(json.dumps(record) + "\n" for record in TRAINED))
    second.write_text(json.dumps(again) + "\n")
    run = {"kind": "run", "arguments": {"model": "base"}}
    network.write_text("".join(json.dumps(record) + "\n" for record in [run, *TIMED]))
    arguments = ["--trained", str(first), str(second), "--timings", str(network), "--out", str(tmp_path / "out")]
    assert to_loss.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "### To the loss of ddp-adamw at 90% of its run" in shown
    assert "| DiLoCo | 0.1 | 5.500 5.600 | 8 8 | 4 s |" in shown
    assert "there is no target: lamb was not trained with seed 0, or failed" in shown
    [path] = (tmp_path / "out").glob("to-loss-*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0]["trained_by"] == [TRAINED[0], again]  # the first line of each, which to_loss.py writes as its run
    assert [record for record in records if record["kind"] == "training" and record["training"] == "diloco"] == [
        again,
        TRAINED[-1],
    ]
    assert to_loss.main(["--trained", str(network)]) == 2
    assert "network.jsonl: nothing that to_loss.py trained" in capsys.readouterr().err


def test_rows_come_from_the_run_with_most_of_them(tmp_path):
    run, other = ({"kind": "run", "arguments": {"model": model}} for model in ("base", "small"))
    lines = [run, row("compute", None, 2.0), row("compute", 50.0, 9.0, hosts=4)]
    lines += [run, row("compute", 50.0, 3.0), row("1bit-lamb", 50.0, 4.0)]
    lines += [run, row("compute", 50.0, 1.0), row("1bit-lamb", 50.0, 1.0, failed="no")]  # as many, and later
    lines += [run, row("diloco", 50.0, 5.0)]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [run, row("compute", 50.0, 6.0), other, row("compute", 50.0, 8.0), row("1bit-lamb", 50.0, 8.0)]
    second.write_text("".join(json.dumps(line) + "\n" for line in lines))
    timings = Timings(read_rows([first, second], 2, 1, "base"))
    assert timings.rates == [None, 50.0]
    assert [timings.step(rate, "compute") for rate in timings.rates] == [2.0, 1.0]
    assert timings.step(50.0, "diloco") == 5.0
    for name, reason in {"1bit-lamb": "no", "ddp-fp32": "not measured"}.items():
        with pytest.raises(KeyError, match=f"{name}: {reason}"):
            timings.step(50.0, name)
    with pytest.raises(onebit.ConfigError, match=r"no row of 3 hosts, 1 workers each and the model 'base'"):
        read_rows([first], 3, 1, "base")


class FakeTrainer:
    """The middle rate is best; DiLoCo's rates all fail, and so does PowerSGD."""

    def __init__(self):
        self.asked = []

    def train(self, name, lr, seed):
        self.asked.append((name, lr, seed))
        if name in ("diloco", "powersgd-1"):
            return {"kind": "training", "training": name, "lr": lr, "seed": seed, "failed": "no"}
        return training(name, seed, [[8, 5 + abs(lr - 0.2)]]) | {"lr": lr}


def test_rates_are_chosen_per_family_and_failures_stay_their_own(capsys):
    trainer = FakeTrainer()
    names = ["ddp-adamw", "powersgd-1", "diloco", "1bit-lamb"]
    tried = {"adam": (0.1, 0.2, 0.3), "lamb": (0.2, 0.3), "diloco": (0.1, 0.2)}
    records = to_loss.train_all(trainer, names, [0, 1], tried)
    tuned = [(r["training"], r["lr"]) for r in records if r["kind"] == "tuning"]
    assert tuned == [
        *(("ddp-adamw", lr) for lr in tried["adam"]),
        *(("diloco", lr) for lr in tried["diloco"]),
        *(("lamb", lr) for lr in tried["lamb"]),
    ]
    assert trainer.asked[len(tuned) :] == [
        (name, 0.2, seed) for seed in (0, 1) for name in ("ddp-adamw", "powersgd-1", "1bit-lamb")
    ]
    trained = [record for record in records if record["kind"] == "training"]
    assert [r["training"] for r in trained if "failed" in r] == ["powersgd-1", "diloco"] * 2
    assert trained[2]["failed"] == "no learning rate of [0.1, 0.2] worked"
    assert "lamb: the best rate 0.2 is the last of those tried" in capsys.readouterr().err


class FakeFleet:
    """Workers that are lost in their first training."""

    elements, started, ended = 10, 0, 0

    def __init__(self, *_):
        FakeFleet.started += 1
        self.number = FakeFleet.started

    def __enter__(self):
        return self

    def __exit__(self, *_):
        FakeFleet.ended += 1

    def ask(self, do, row, **more):
        if self.number == 1:
            raise RowFailed("worker 1 ended with status -6", usable=False)
        return [{"curve": [[8, 5.0]], "seconds": 1.0, "warmup": 0}] * 2


def test_workers_that_are_lost_are_started_again(monkeypatch):
    monkeypatch.setattr(to_loss, "Fleet", FakeFleet)
    monkeypatch.setattr(FakeFleet, "started", 0)
    monkeypatch.setattr(FakeFleet, "ended", 0)
    with to_loss.Trainer(to_loss.parsed([])) as trainer:
        assert trainer.train("powersgd-1", 0.1, 0)["failed"] == "worker 1 ended with status -6"
        assert trainer.train("lamb", 0.1, 0)["curve"] == [[8, 5.0]]
    assert (FakeFleet.started, FakeFleet.ended) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainings", "lamb,lam"], "training 'lam' is unknown; there are ddp-adamw"),
        (["--steps", "0"], "--steps is 0; it must be above 0"),
        (["--every", "12"], "--every is 12; it must be a multiple of 8"),
        (["--lr", "inf"], "--lr is inf; it must be above 0"),
        (["--seeds", "0,9"], "--seeds has 9, with which rates are tuned"),
        (["--share", "1.5"], r"--share is 1.5; it must be in \(0, 1\]"),
        (["--timings", "nowhere.jsonl"], "nowhere.jsonl is no file"),
    ],
)
def test_an_impossible_training_is_refused(arguments, message, capsys):
    assert to_loss.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.timeout(200)
def test_two_processes_train_and_a_divergence_is_said(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(pydoc_data.topics.topics.values())[:150_000])
    names = ["ddp-adamw", "post-local-sgd", "powersgd-1", "powersgd-4-lamb", "diloco", "1bit-lamb"]
    args = to_loss.parsed(["--steps", "16", "--every", "8", "--text", str(text), "--patience", "100"])
    with to_loss.Trainer(args) as trainer:
        lost = trainer.train("ddp-adamw", 1e30, 0)
        found = {name: trainer.train(name, 0.01 if "lamb" in name else 0.002, 0) for name in names}
        again = trainer.train("1bit-lamb", 0.01, 0)
    assert lost["failed"].startswith("Diverged: the held-out loss is nan after step 8")
    assert {name for name, record in found.items() if "failed" in record} == set()
    for record in found.values():
        assert [step for step, _ in record["curve"]] == [8, 16]
        assert record["curve"][1][1] < record["curve"][0][1] < 8
    assert len({record["curve"][1][1] for record in found.values()}) == len(names)
    assert again["curve"] == found["1bit-lamb"]["curve"]
    assert found["1bit-lamb"]["warmup"] == found["powersgd-1"]["warmup"] == 3


def test_pieces_of_a_step_add_up_to_it():
    for record in TIMED:
        if "failed" not in record:
            assert sum(seconds for _, _, seconds in plots.split(record, 0.1)) == pytest.approx(record["step_s"][1])
    named = {label: seconds for label, _, seconds in plots.split(row("1bit-lamb", 50.0, 0.5, collectives=0.3), 0.1)}
    assert named == pytest.approx({"forward and backward": 0.1, "in collectives": 0.3, "optimizer": 0.1})


def test_figures_come_out_small_and_with_what_failed(tmp_path):
    rows = [row(name, mbit, 0.2 + 0.1 * at) for mbit in (50.0, 200.0, 1000.0, None) for at, name in enumerate(ROWS)]
    rows[4] = row(rows[4]["row"], 50.0, 0.0, failed="no")
    network, losses = tmp_path / "network.jsonl", tmp_path / "to-loss.jsonl"
    run = {"kind": "run", "arguments": {"model": "base"}}
    network.write_text("".join(json.dumps(record) + "\n" for record in [run, *rows]))
    records = [*TRAINED, *times.times(TRAINED, Timings(TIMED), 0.9, "ddp-adamw")]
    losses.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert plots.main([str(network), "--to-loss", str(losses), "--out", str(tmp_path / "figures")]) == 0
    made = {path.name: path for path in (tmp_path / "figures").iterdir()}
    assert set(made) == {"network-steps.svg", "network-end-to-end.svg", "loss-seconds.svg"}
    for path in made.values():
        text = path.read_text()
        assert text.startswith("<?xml")
        assert text.rstrip().endswith("</svg>")
        assert 5_000 < len(text) < 200_000
    texts = [text.get_text() for panel in plots.steps_figure(rows).axes for text in panel.texts]
    assert texts.count("failed") == 1
    assert len(texts) == len(rows)
    panel = plots.loss_figure(records).axes[0]
    drawn = {line.get_color(): line.get_xydata().tolist() for line in panel.lines if line.get_linestyle() != ":"}
    assert drawn["#d62728"] == [[3 * 4 + 5 * 0.5, 6.0], [3 * 4 + 13 * 0.5, 5.5]]  # 1-bit Adam: seconds, loss


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to draw"),
        (["nowhere.jsonl"], "nowhere.jsonl is no file"),
    ],
)
def test_nothing_to_draw_is_said(arguments, message, capsys):
    assert plots.main(arguments) == 2
    assert message in capsys.readouterr().err
