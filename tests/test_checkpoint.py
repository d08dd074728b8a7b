"""Checkpoints of whole runs: several processes, every stage, another number of workers, kills and damage."""

from __future__ import annotations

import copy
import json
import os
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import end_of_processes, run_processes
from safetensors.torch import load_file
from small import MODEL, flat
from test_resize import KINDS, WARMUP, held_out, loss_of, make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit import checkpoint, checkpoint_files
from onebit.comm import Comm, Solo
from onebit.packing import names_in, pack, unpack

CUTS = (2, WARMUP, WARMUP + 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parts(comm: Comm, name: str, dtype: torch.dtype = torch.float32, ddp: bool = False) -> tuple[Any, Any, Any]:
    model: nn.Module = copy.deepcopy(MODEL).to(dtype)
    optimizer = make(name, model.parameters(), comm)
    if ddp:
        model = DistributedDataParallel(model)
        onebit.attach(model, optimizer)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=200)


def steps(comm: Comm, model: Any, optimizer: Any, schedule: Any, which: range, cast: bool = False) -> None:
    """Batches with noise from the global generator, whose state must come back, too."""
    dtype = next(model.parameters()).dtype
    for step in which:
        generator = torch.Generator().manual_seed(step)
        x = (
            torch.randn(24, 6, generator=generator)[comm.rank :: comm.size]
            + 0.01 * torch.randn(1)
            + random.random() / 99
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            nn.functional.mse_loss(model(x.to(dtype)).float(), x[:, :3].sin()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def broken_off(comm: Comm, folder: str, names: list[str], dtype: str, how: dict[str, bool]) -> list[str]:
    """Runs with a pause, by name and cut, that do not end as those without."""
    wrong = []
    for name in names:
        for cut in CUTS:
            ends = []
            for paused in (True, False):
                random.seed(comm.rank)
                torch.manual_seed(comm.rank)
                run = parts(comm, name, DTYPES[dtype], how.get("ddp", False))
                steps(comm, *run, range(cut), how.get("cast", False))
                if how.get("refreeze") and cut > WARMUP:
                    run[1].refreeze(3)
                if paused:
                    model, optimizer, schedule = run
                    given = {"model": model, "optimizer": optimizer, "scheduler": schedule}
                    place = f"{folder}/{name}-{cut}"
                    asked = checkpoint.save(place, cut, progress={"next": cut}, asynchronous=cut == CUTS[1], **given)
                    steps(comm, *run, range(cut, cut + 2))  # goes on while it is written
                    asked.wait()
                    run = parts(comm, name, DTYPES[dtype], how.get("ddp", False))
                    given = dict(zip(("model", "optimizer", "scheduler"), run, strict=True))
                    loaded = checkpoint.load(place, **given)
                    assert (loaded.step, loaded.progress, loaded.workers) == (cut, {"next": cut}, comm.size)
                steps(comm, *run, range(cut, cut + 8), how.get("cast", False))
                ends.append((flat(run[0].parameters()), run[2].get_last_lr(), torch.rand(1), random.random()))
            same = torch.equal(ends[0][0], ends[1][0]) and ends[0][1:2] == ends[1][1:2] and ends[0][2:] == ends[1][2:]
            wrong += [] if same else [f"{name} at {cut}"]
    return wrong


@pytest.mark.parametrize(
    ("names", "dtype", "how"),
    [
        (list(KINDS), "fp32", {}),
        (["Lamb", "OneBitLamb", "LocalVarianceAdam", "int8"], "bf16", {}),
        (["OneBitLamb", "OneBitAdam"], "fp32", {"cast": True}),
        (["OneBitLamb", "OneBitAdam"], "fp32", {"ddp": True}),
        (["OneBitLamb", "OneBitAdam", "compact"], "fp32", {"refreeze": True}),
    ],
    ids=["fp32", "bf16", "autocast", "ddp", "re-warm-up"],
)
def test_the_same_number_of_processes_goes_on_to_the_bit(tmp_path, names, dtype, how):
    assert run_processes(2, broken_off, str(tmp_path), names, dtype, how, timeout_s=120) == [[], []]


def between_exchanges(comm: Comm, folder: str) -> bool:
    ends = []
    for paused in (True, False):
        model = copy.deepcopy(MODEL)
        local = {"local_step_clipper": 4, "local_step_scaler": 1}
        optimizer = make("ZeroOneAdam", model.parameters(), comm, **local)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        random.seed(0)
        torch.manual_seed(0)
        steps(comm, model, optimizer, schedule, range(8))
        assert not optimizer.in_sync
        if paused:
            checkpoint.save(folder, 8, model=model, optimizer=optimizer, scheduler=schedule)
            model = copy.deepcopy(MODEL)
            optimizer = make("ZeroOneAdam", model.parameters(), comm, **local)
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
            checkpoint.load(folder, model=model, optimizer=optimizer, scheduler=schedule)
        steps(comm, model, optimizer, schedule, range(8, 20))
        ends.append(flat(model.parameters()))
    return torch.equal(*ends)


def test_between_two_exchanges_of_01_adam_each_process_has_its_own_weights(tmp_path):
    assert run_processes(2, between_exchanges, str(tmp_path)) == [True, True]


def write_runs(comm: Comm, folder: str, names: list[str], cut: int) -> list[float]:
    losses = []
    for name in names:
        model, optimizer, schedule = parts(comm, name)
        steps(comm, model, optimizer, schedule, range(cut))
        given = {"model": model, "optimizer": optimizer, "scheduler": schedule}
        checkpoint.save(f"{folder}/{name}", cut, **given)
        steps(comm, model, optimizer, schedule, range(cut, cut + 20))
        losses.append(held_out(model))
    return losses


def read_runs(comm: Comm, folder: str, names: list[str], cut: int) -> list[tuple[float, Any]]:
    found = []
    for name in names:
        model, optimizer, schedule = parts(comm, name)
        loaded = checkpoint.load(f"{folder}/{name}", model=model, optimizer=optimizer, scheduler=schedule)
        assert optimizer.stats()["step"] == loaded.step == cut
        steps(comm, model, optimizer, schedule, range(cut, cut + 20))
        found.append((held_out(model), flat(model.parameters())))
    return found


@pytest.mark.parametrize(("before", "after", "cut"), [(4, 2, 7), (2, 4, 7), (4, 3, 2), (4, 3, 7), (1, 4, 2)])
def test_another_number_of_processes_goes_on_at_the_same_loss(tmp_path, before, after, cut):
    names = ["OneBitLamb", "LocalVarianceLamb", "int8", "compact"]  # of the others see test_resize.py
    undisturbed = run_processes(before, write_runs, str(tmp_path), names, cut, timeout_s=120)[0]
    results = run_processes(after, read_runs, str(tmp_path), names, cut, timeout_s=120)
    for i, name in enumerate(names):
        for found in results:
            assert torch.equal(found[i][1], results[0][i][1]), name
        assert results[0][i][0] < 1.3 * undisturbed[i] + 0.01, name
        assert results[0][i][0] < held_out(MODEL), name


def shards(comm: Comm, folder: str, write: bool) -> Any:
    mesh = init_device_mesh("cpu", (comm.size // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = copy.deepcopy(MODEL)
    fully_shard(model, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    optimizer = onebit.OneBitLamb(model.parameters(), lr=0.01, freeze_step=WARMUP, process_group=group)

    def go(which: range) -> None:
        for step in which:
            loss_of(model, step, comm.rank, comm.size).backward()
            optimizer.step()
            optimizer.zero_grad()

    if write:
        go(range(WARMUP + 4))
        checkpoint.save(folder, 7, model=model, optimizer=optimizer)
    else:
        checkpoint.load(folder, model=model, optimizer=optimizer)
    shard, norm = comm.rank % 2, optimizer.stats()["momentum_norm"]
    go(range(WARMUP + 4, WARMUP + 10))
    return torch.cat([p.full_tensor().flatten().detach() for p in model.parameters()]), shard, norm


def test_shards_come_back_and_replicas_may_be_fewer(tmp_path):
    expected = run_processes(4, shards, str(tmp_path), True, timeout_s=100)
    again = run_processes(4, shards, str(tmp_path), False, timeout_s=100)
    assert all(torch.equal(params, expected[0][0]) for params, _, _ in again)
    fewer = run_processes(2, shards, str(tmp_path), False, timeout_s=100)
    norms = {shard: norm for _, shard, norm in expected}
    for params, shard, norm in fewer:
        assert torch.equal(params, fewer[0][0])
        assert norm == pytest.approx(norms[shard], rel=1e-5)


# -- files ---------------------------------------------------------------------------------------------------------


def trained(steps_done: int = WARMUP + 2, name: str = "OneBitLamb") -> tuple[nn.Module, Any]:
    model = copy.deepcopy(MODEL)
    optimizer = make(name, model.parameters(), Solo())
    for step in range(steps_done):
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_the_last_ones_are_kept_and_a_step_may_be_written_again(tmp_path):
    model, optimizer = trained()
    assert checkpoint.latest(tmp_path) is None
    for step in (10, 20, 30, 5, 30):
        checkpoint.save(tmp_path, step, model=model, optimizer=optimizer, progress=step * 10, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005.1", "step-00000030", "step-00000030.1"]
    assert checkpoint.latest(tmp_path) == 30
    loaded = checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    assert (loaded.path.name, loaded.progress) == ("step-00000030.1", 300)
    assert checkpoint.load(tmp_path, model=model, step=5).progress == 50
    with pytest.raises(onebit.ConfigError, match="of step 7; there are: 30, 5, 30"):
        checkpoint.load(tmp_path, model=model, step=7)
    with pytest.raises(onebit.ConfigError, match="no complete checkpoint"):
        checkpoint.load(tmp_path / "nowhere", model=model)


def test_files_are_safetensors_and_json(tmp_path):
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer).wait()
    (data,) = path.glob("*.safetensors")
    tensors = load_file(data)
    assert torch.equal(tensors["model.0.weight"], model[0].weight)
    assert sorted(p.name for p in path.iterdir()) == ["checkpoint.json", data.name]
    assert unsealed(path)["files"][data.name][0] == data.stat().st_size


def test_torch_s_own_optimizers_and_any_part_alone(tmp_path):
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(tmp_path, 4, model=model, optimizer=optimizer)
    other = copy.deepcopy(MODEL)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    checkpoint.load(tmp_path, optimizer=again)
    assert torch.equal(other[0].weight, MODEL[0].weight)
    checkpoint.load(tmp_path, model=other)
    for net, opt in ((model, optimizer), (other, again)):
        loss_of(net, 9, 0, 1).backward()
        opt.step()
    assert torch.equal(flat(model.parameters()), flat(other.parameters()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(6, 3).t())
        self.empty, self.scalar = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scalar * self.last(self.first(x)) @ self.turned.t() + self.empty.sum()


def test_tied_turned_empty_and_scalar_parameters(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    start = copy.deepcopy(model.state_dict())
    optimizer = onebit.OneBitLamb(model.parameters(), freeze_step=2)
    for step in range(4):
        model(torch.full((2, 6), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(tmp_path, 4, model=model, optimizer=optimizer)
    end = copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    assert same_state(end, model.state_dict())
    assert model.last.weight is model.first.weight


class Odd:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": [lambda: 0]}, {(1, 2): 3}, {"a": {b"x": 1}}, {"a": 1j}])
def test_what_could_run_code_is_not_saved(tmp_path, bad):
    with pytest.raises(onebit.ConfigError, match="cannot be saved safely"):
        checkpoint.save(tmp_path, 1, scheduler=Odd(bad))
    assert list(tmp_path.iterdir()) == []


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([torch.float16, torch.int8]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["!tensor", "!dict", "a"]), inner)
        | st.lists(st.sampled_from(["!tensor", "!list", "!tuple", "b"]), max_size=2)
        | st.dictionaries(st.integers(0, 3), st.integers(), max_size=2).map(Counter)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    back = unpack(json.loads(json.dumps(pack(value, "x", {}), allow_nan=False)), {})
    assert repr(back) == repr(value)  # nan is not equal to itself


def test_what_is_written_after_a_set_back_stays_and_is_the_latest(tmp_path):
    model, optimizer = trained()
    for step in (20, 30, 40):
        checkpoint.save(tmp_path, step, model=model, optimizer=optimizer)
    checkpoint.load(tmp_path, model=model, optimizer=optimizer, step=20)
    assert checkpoint.save(tmp_path, 25, model=model, optimizer=optimizer).wait().is_dir()
    assert checkpoint.latest(tmp_path) == 25
    assert checkpoint.save(tmp_path, 26, model=model, optimizer=optimizer, keep=1).wait().is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000026.1"]


def test_keys_that_lead_to_the_same_name_keep_their_values(tmp_path):
    numbers = [torch.tensor(float(i)) for i in range(6)]
    first = {"w.x": numbers[0], "w": {"x": numbers[1]}, 1: numbers[2], "1": numbers[3]}
    others = {"ema": Odd(first), "ema.w": Odd({"x": numbers[4]}), "model.bn": Odd({"y": numbers[5]})}
    checkpoint.save(tmp_path, 1, others=others)
    again = {name: Odd({key: None for key in odd.state}) for name, odd in others.items()}
    checkpoint.load(tmp_path, others=again)
    for name, odd in others.items():
        assert same_state(odd.state, again[name].state)
    assert names_in(pack({1: 2, "a": {"!tensor": 5, 3: 4}, "b": Counter({"!tensor": 5})}, "x", {})) == []


def test_what_a_kill_left_is_removed_and_does_not_stand_in_the_way(tmp_path):
    model, optimizer = trained()
    for left in ("step-00000005.partial", "step-00000007.partial"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "x").touch()
    for step in (5, 6, 7, 8):
        (tmp_path / f"step-{step - 1:08d}.partial").mkdir(exist_ok=True)
        checkpoint.save(tmp_path, step, model=model, optimizer=optimizer, keep=1)
        assert [p.name for p in tmp_path.iterdir()] == [f"step-{step:08d}"]


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(2, 2), {"scale": torch.ones(1), "name": "a"}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_extra_state_of_a_model_comes_back(tmp_path):
    model, other = Extra(), Extra()
    model.kept = {"scale": torch.full((1,), 7.0), "name": "b"}
    checkpoint.save(tmp_path, 1, model=model)
    checkpoint.load(tmp_path, model=other)
    assert same_state(model.state_dict(), other.state_dict())


def test_a_state_of_another_of_torch_s_optimizers_is_refused(tmp_path):
    model, _ = trained()
    checkpoint.save(tmp_path, 1, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(onebit.ConfigError, match="is a AdamW, this one a SGD"):
        checkpoint.load(tmp_path, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))


def apart(comm: Comm, folder: str) -> list[str]:
    """Each process gives something that the others do not, and none waits for another."""
    model, optimizer, schedule = parts(comm, "OneBitLamb")
    steps(comm, model, optimizer, schedule, range(2))
    mine = f"{folder}/{comm.rank}"
    cases: list[Any] = [
        lambda: checkpoint.save(mine, 1, model=model),
        lambda: checkpoint.save(folder, 1 if comm.rank else -1, model=model),
        lambda: checkpoint.save(folder, 1, others={"odd": Odd({}) if comm.rank else Odd([])}),
        lambda: checkpoint.save(folder, 1, others={"odd": Odd({}) if comm.rank else Raises()}),
    ]
    said = []
    for case in cases:
        try:
            case()
            said.append("")
        except onebit.OnebitError as error:
            said.append(str(error))
    first = checkpoint.save(f"{folder}/a", 1, model=model, optimizer=optimizer, asynchronous=True)
    checkpoint.save(f"{folder}/b", 1, model=model, optimizer=optimizer)
    return [*said, str(first.wait().is_dir())]


class Raises(Odd):
    def __init__(self) -> None:
        super().__init__({})

    def state_dict(self) -> Any:
        raise RuntimeError("consolidate first")


def test_what_goes_wrong_on_one_process_is_said_on_all(tmp_path):
    results = run_processes(2, apart, str(tmp_path), timeout_s=60)
    for said in results:
        for text, part in zip(
            said, ["folder is", "step is -1", "must be a dict", "consolidate first", "True"], strict=True
        ):
            assert part in text


def everything(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def seal(path: Path, content: Any) -> None:
    crc = zlib.crc32(json.dumps(content).encode())
    (path / "checkpoint.json").write_text(json.dumps({"content": content, "crc32": crc}))


def unsealed(path: Path) -> Any:
    return json.loads((path / "checkpoint.json").read_text())["content"]


DAMAGE = {
    "a bit of the tensors": lambda p: flip(next(p.glob("*.safetensors")), 0.7),
    "a bit of the header": lambda p: flip(next(p.glob("*.safetensors")), 0.01),
    "cut short": lambda p: os.truncate(next(p.glob("*.safetensors")), 100),
    "emptied": lambda p: os.truncate(next(p.glob("*.safetensors")), 0),
    "removed": lambda p: next(p.glob("*.safetensors")).unlink(),
    "another file": lambda p: (p / "shard-00009-x.safetensors").write_bytes(b"abc"),
    "manifest cut": lambda p: os.truncate(p / "checkpoint.json", 40),
    "manifest of another": lambda p: (p / "checkpoint.json").write_text('{"format": 99}'),
    "manifest of a later format": lambda p: seal(p, {"format": 99}),
    "manifest a list": lambda p: (p / "checkpoint.json").write_text("[1, 2]"),
    "manifest without parts": lambda p: seal(p, {"format": 1, "files": {}}),
    "manifest with other keys": lambda p: seal(p, {"format": 1, "files": unsealed(p)["files"], "own": [], "shared": 3}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_clear_error_and_changes_nothing(tmp_path, damage):
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer).wait()
    DAMAGE[damage](path)
    other, fresh = trained(2)
    before = everything(other, fresh)
    with pytest.raises(onebit.ConfigError, match="step-00000001"):
        checkpoint.load(tmp_path, model=other, optimizer=fresh)
    assert same_state(before, everything(other, fresh))


@settings(max_examples=100, deadline=None)
@given(at=st.floats(0, 1), kind=st.sampled_from(["flip", "cut"]), manifest=st.booleans())
def test_random_damage(tmp_path_factory, at, kind, manifest):
    model, optimizer = trained()
    path = checkpoint.save(tmp_path_factory.mktemp("c"), 1, model=model, optimizer=optimizer).wait()
    file = path / "checkpoint.json" if manifest else next(path.glob("*.safetensors"))
    if kind == "cut":
        os.truncate(file, int(at * (file.stat().st_size - 1)))
    else:
        flip(file, at)
    other, fresh = trained(2)
    before = everything(other, fresh)
    with pytest.raises(onebit.ConfigError):
        checkpoint.load(path.parent, model=other, optimizer=fresh)
    assert same_state(before, everything(other, fresh))


MISFITS = {
    "another model": (lambda: nn.Linear(6, 3), None, "model that was saved"),
    "another width": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), None, "when it was saved"),
    "another dtype": (lambda: copy.deepcopy(MODEL).double(), None, "when it was saved"),
    "another optimizer": (lambda: copy.deepcopy(MODEL), "OneBitAdam", "optimizer is OneBitAdam here"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, case):
    build, name, text = MISFITS[case]
    model, optimizer = trained()
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    other = build()
    fresh = make(name or "OneBitLamb", other.parameters(), Solo())
    before = everything(other, fresh)
    with pytest.raises(onebit.ConfigError, match=text):
        checkpoint.load(tmp_path, model=other, optimizer=fresh)
    assert same_state(before, everything(other, fresh))


def test_another_schedule_is_refused(tmp_path):
    model, optimizer = trained()
    given = {"model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path, 1, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3), **given)
    with pytest.raises(onebit.ConfigError, match="the scheduler that was saved has"):
        checkpoint.load(tmp_path, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3), **given)


@pytest.mark.parametrize(("key", "value"), [("step", -1), ("step", 1.5), ("keep", 0), ("keep", True)])
def test_wrong_numbers_are_refused(tmp_path, key, value):
    with pytest.raises(onebit.ConfigError, match=key):
        checkpoint.save(tmp_path, **{"step": 1, key: value})


def test_virtual_workers_are_told_what_to_do(tmp_path):
    def work(comm: Comm) -> None:
        checkpoint.save(tmp_path, 1, optimizer=make("Lamb", copy.deepcopy(MODEL).parameters(), comm))

    with pytest.raises(onebit.ConfigError, match="state_dict"):
        onebit.run_workers(2, work)


def no_room(comm: Comm, folder: str) -> list[str]:
    """The disk of process 1 fails, then that of process 0, which writes the manifest."""
    model, optimizer, _ = parts(comm, "OneBitLamb")
    steps(comm, model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), range(3))
    checkpoint.save(folder, 1, model=model, optimizer=optimizer)
    said = []
    for rank, name in ((1, "checksum"), (0, "_write_file")):
        kept = getattr(checkpoint_files, name)
        if comm.rank == rank:
            setattr(checkpoint_files, name, _full)
        try:
            checkpoint.save(folder, 2, model=model, optimizer=optimizer)
        except onebit.ConfigError as error:
            said.append(str(error))
        setattr(checkpoint_files, name, kept)
    checkpoint.load(folder, model=model, optimizer=optimizer, step=1)
    checkpoint.save(folder, 2, model=model, optimizer=optimizer)  # over what was left
    return said


def _full(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_said_on_all_processes(tmp_path):
    results = run_processes(2, no_room, str(tmp_path))
    for said in results:
        assert len(said) == 2
        assert all("No space left" in text for text in said)
    assert checkpoint.latest(tmp_path) == 2
    assert not list(tmp_path.glob("*.partial"))


POINTS = ("before the tensors", "after the tensors", "before the rename", "after the rename", "while removing")


def killed(comm: Comm, folder: str, point: str) -> None:
    """Process 1, or process 0 where only that one works, is gone at some point of the second checkpoint."""
    model, optimizer, schedule = parts(comm, "OneBitLamb")
    steps(comm, model, optimizer, schedule, range(WARMUP + 2))
    checkpoint.save(folder, 1, model=model, optimizer=optimizer, keep=1)
    where = {
        "before the tensors": (1, "_write_tensors", True),
        "after the tensors": (1, "_write_tensors", False),
        "before the rename": (0, "_write_file", True),
        "after the rename": (0, "_flush", True),
        "while removing": (0, "_remove_old", False),
    }
    rank, name, first = where[point]
    if comm.rank == rank:
        real = getattr(checkpoint_files, name)

        def gone(*arguments: Any) -> Any:
            if not first:
                real(*arguments)
            os._exit(9)

        setattr(checkpoint_files, name, gone)
    checkpoint.save(folder, 2, model=model, optimizer=optimizer, keep=1)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_a_complete_checkpoint(tmp_path, point):
    ends = end_of_processes(2, killed, str(tmp_path), point)
    assert 9 in [end.exitcode for end in ends]
    model, optimizer = trained(0)
    expected = 2 if point in ("after the rename", "while removing") else 1
    assert checkpoint.latest(tmp_path) == expected
    assert checkpoint.load(tmp_path, model=model, optimizer=optimizer).step == expected
