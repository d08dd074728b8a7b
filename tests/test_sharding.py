"""Layers in shards: FSDP2 and tensor parallel over one dimension of a mesh, one bit over the other; 2 x 2 processes.

The same training with 2 whole workers is the yardstick: replica r of it sees the batches of both processes that hold
the shards of replica r.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import onebit
from onebit.comm import Comm, Solo

WARMUP, STEPS = 3, 9
BLOCKS = onebit.OneBit(scale="block", block_elements=8)  # the same blocks, however layers are cut here


def build(odd: bool = False) -> nn.Module:
    torch.manual_seed(0)
    width = 19 if odd else 32
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 16))


def batch(replica: int, part: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + part)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def optimizer_of(name: str, model: nn.Module, **more: Any) -> Any:
    common: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.01}
    if name != "Lamb":
        common |= {"freeze_step": WARMUP, "codec": BLOCKS}
    if name == "OneBitLamb":
        common["growth_max"] = 1.0  # so that it acts
    return getattr(onebit, name)(model.named_parameters(), **{**common, **more})


def steps_of(
    model: nn.Module, optimizer: Any, replica: int, parts: list[int], clip: float | None = None
) -> dict[str, Any]:
    losses, norms, sent = [], [], []
    for step in range(STEPS):
        pairs = [batch(replica, part, step) for part in parts]
        x, y = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        before = optimizer.payload_bytes
        if clip:
            norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        sent.append(optimizer.payload_bytes - before)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == STEPS - 3 and hasattr(optimizer, "refreeze"):
            optimizer.refreeze(1)
    return {"losses": losses, "norms": norms, "sent": sent, "stats": optimizer.stats()}


def whole(name: str, clip: float | None, odd: bool) -> list[dict[str, Any]]:
    """Two virtual workers without shards."""
    models = [build(odd), build(odd)]  # threads share torch's generator

    def work(comm: Comm) -> dict[str, Any]:
        model = models[comm.rank]
        found = steps_of(model, optimizer_of(name, model, comm=comm), comm.rank, [0, 1], clip)
        return {**found, "params": [p.detach().clone() for p in model.parameters()]}

    return onebit.run_workers(2, work)


def sharded(_: Comm, name: str, kind: str, clip: float | None, odd: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, part = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    model = build(odd)
    if kind == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    else:
        parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = optimizer_of(name, model, process_group=mesh["replicate"].get_group())
    found = steps_of(model, optimizer, replica, [part] if kind == "fsdp" else [0, 1], clip)
    held = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {**found, "params": [p.detach().clone() for p in held], "place": (replica, part)}


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
@pytest.mark.parametrize("name", ["Lamb", "OneBitLamb", "OneBitAdam"])
def test_losses_are_those_of_whole_workers_and_bytes_fall(name, kind):
    clip = 0.5 if name == "OneBitLamb" else None
    expected = whole(name, clip, odd=False)
    results = run_processes(4, sharded, name, kind, clip, False, timeout_s=100)
    for found in results:
        replica, part = found["place"]
        for mine, theirs in zip(found["params"], results[0]["params"], strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(found["params"], expected[0]["params"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
        if kind != "fsdp":
            torch.testing.assert_close(found["losses"], expected[replica]["losses"], rtol=1e-5, atol=0)
        elif part == 0:
            pair = [other["losses"] for other in results if other["place"][0] == replica]
            means = [(a + b) / 2 for a, b in zip(*pair, strict=True)]
            torch.testing.assert_close(means, expected[replica]["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(found["norms"], expected[0]["norms"], rtol=1e-3, atol=0)
        if name != "Lamb":
            assert found["sent"][WARMUP + 1] < found["sent"][1] / 3  # a scale for each 8 elements
            assert found["stats"]["stage"] == "compressed"
        if name == "OneBitLamb":
            theirs = expected[0]["stats"]["shortened"]
            assert found["stats"]["shortened"] == pytest.approx(theirs, rel=1e-3, abs=1e-5)
            assert max(theirs.values()) > 0.01


def test_layers_that_do_not_divide_evenly():
    """Shards of 10 and 9 rows; the default codec, whose scales are those of a layer's part in a shard's chunk."""
    expected = whole("Lamb", None, odd=True)
    for found in run_processes(4, sharded, "Lamb", "fsdp", None, True, timeout_s=100):
        for mine, theirs in zip(found["params"], expected[0]["params"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def sequence_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))


def sequence_parallel(_: Comm, name: str, clip: float | None) -> dict[str, Any]:
    """A layer norm on parts of the rows: backward gives its replicated parameters a part of their gradient each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, model = mesh["replicate"].get_local_rank(), sequence_model()
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "1": SequenceParallel(sequence_dim=0),
        "2": ColwiseParallel(input_layouts=Shard(0)),
        "4": RowwiseParallel(),
    }
    parallelize_module(model, mesh["shard"], plan)
    model(batch(replica, 0, 0)[0]).sum().backward()
    partial = model[1].weight.grad.placements[0].is_partial()
    model.zero_grad()
    optimizer = optimizer_of(name, model, process_group=mesh["replicate"].get_group())
    found = steps_of(model, optimizer, replica, [0, 1], clip)
    held = [p.full_tensor() for p in model.parameters()]
    return {**found, "params": held, "mine": model[1].weight.to_local().detach(), "partial": partial}


@pytest.mark.parametrize(("name", "clip"), [("OneBitLamb", None), ("OneBitLamb", 0.5), ("Lamb", None)])
def test_gradients_that_are_partial_sums_are_completed(name, clip):
    models = [sequence_model(), sequence_model()]

    def work(comm: Comm) -> list[Tensor]:
        steps_of(models[comm.rank], optimizer_of(name, models[comm.rank], comm=comm), comm.rank, [0, 1], clip)
        return [p.detach() for p in models[comm.rank].parameters()]

    expected = onebit.run_workers(2, work)[0]
    results = run_processes(4, sequence_parallel, name, clip, timeout_s=100)
    for found in results:
        assert found["partial"]  # else this tests nothing
        assert torch.equal(found["mine"], results[0]["mine"])
        for mine, theirs in zip(found["params"], expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def uneven_model() -> nn.Module:
    """Shards of 3 and 2 rows, of 1 and none; with room for 50 elements the first would cut other buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(1, 16))


class Repeat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 16)


def single_row() -> nn.Module:
    """All of it lies on the first process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 1), Repeat())


def uneven(_: Comm, name: str, build_model: Any, room: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, part, model = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank(), build_model()
    fully_shard(model, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    optimizer = optimizer_of(name, model, process_group=group, bucket_elements=room)
    steps_of(model, optimizer, replica, [part], 0.5)
    held = [p.to_local().numel() for p in model.parameters()]
    return {"params": [p.full_tensor().detach() for p in model.parameters()], "numel": sum(held), "sizes": held}


@pytest.mark.parametrize("name", ["Lamb", "OneBitLamb", "OneBitAdam"])
@pytest.mark.parametrize(("build_model", "room"), [(uneven_model, 50), (single_row, 8)])
def test_shards_of_any_sizes_have_the_same_buckets(name, build_model, room):
    models = [build_model(), build_model()]
    more = {"bucket_elements": room} | ({} if name == "Lamb" else {"freeze_step": 100})

    def work(comm: Comm) -> list[Tensor]:
        model = models[comm.rank]
        steps_of(model, optimizer_of(name, model, comm=comm, **more), comm.rank, [0, 1], 0.5)
        return [p.detach() for p in model.parameters()]

    expected = onebit.run_workers(2, work)[0]
    results = run_processes(4, uneven, name, build_model, room, timeout_s=100)
    assert len({found["numel"] for found in results}) == 2
    for found in results:
        assert all(map(torch.equal, found["params"], results[0]["params"]))
        assert all(torch.isfinite(p).all() for p in found["params"])
        if name == "Lamb":  # scales are those of shards, so the compressed stage differs
            for mine, theirs in zip(found["params"], expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def a_frozen_layer(_: Comm, clip: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build()
    model[2].requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = optimizer_of("OneBitLamb", model, process_group=mesh["replicate"].get_group())
    replica, part = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    steps_of(model, optimizer, replica, [part], 0.5 if clip else None)
    return {"params": [p.full_tensor().detach() for p in model.parameters()]}


@pytest.mark.parametrize("clip", [False, True])
def test_frozen_layers_stay_where_they_are(clip):
    results = run_processes(4, a_frozen_layer, clip, timeout_s=100)
    start = [p.detach() for p in build().parameters()]
    for found in results:
        assert all(map(torch.equal, found["params"], results[0]["params"]))
        still = [torch.equal(a, b) for a, b in zip(found["params"], start, strict=True)]
        assert still == [False, False, True, True, False, False]


def other_shards(_: Comm) -> list[str]:
    """Load what the next process saved, what an optimizer of whole layers saved, and one's own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, part, said = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank(), []
    model, whole_model = build(), build()
    fully_shard(model, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    optimizer = optimizer_of("OneBitLamb", model, process_group=group)
    plain = optimizer_of("OneBitLamb", whole_model, process_group=group)
    steps_of(model, optimizer, replica, [part])
    steps_of(whole_model, plain, replica, [0, 1])
    own, gathered = optimizer.state_dict(), [None] * 4
    dist.all_gather_object(gathered, own)
    fresh = optimizer_of("OneBitLamb", model, process_group=group)
    for given in (gathered[dist.get_rank() ^ 1], plain.state_dict(), own):
        try:
            fresh.load_state_dict(given)
            said.append("")
        except onebit.ConfigError as error:
            said.append(str(error))
            assert not fresh.state
    ends = []
    for opt in (optimizer, fresh):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = [p.detach().clone() for p in model.parameters()]
        opt.step()
        ends.append([p.full_tensor().detach().clone() for p in model.parameters()])
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
    return [*said, str(all(map(torch.equal, *ends)))]


def test_only_the_state_of_the_same_shards_is_loaded():
    for other, plain, own, same in run_processes(4, other_shards, timeout_s=100):
        assert "shard of parameter 0 is" in other
        assert "shard of parameter 0 is" in plain
        assert (own, same) == ("", "True")


def swapped_plan(_: Comm) -> tuple[str, bool]:
    """Two layers of one shape, cut along other dimensions when it was saved."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh["replicate"].get_group()

    def make(dims: tuple[int, int]) -> Any:
        torch.manual_seed(0)
        whole_layers = [torch.randn(8, 8) for _ in dims]
        params = [
            nn.Parameter(distribute_tensor(w, mesh["shard"], [Shard(d)]))
            for w, d in zip(whole_layers, dims, strict=True)
        ]
        optimizer = onebit.Lamb(params, process_group=group)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    saved, other = make((0, 1)).state_dict(), make((1, 0))
    before = [values["momentum"].clone() for values in other.state.values()]
    try:
        other.load_state_dict(saved)
        text = ""
    except onebit.ConfigError as error:
        text = str(error)
    after = [values["momentum"] for values in other.state.values()]
    return text, all(map(torch.equal, before, after))


def test_a_state_cut_along_other_dimensions_is_refused():
    for text, unchanged in run_processes(4, swapped_plan, timeout_s=100):
        assert "shard of parameter 0" in text
        assert unchanged


def a_dead_row(_: Comm) -> dict[str, Any]:
    """Rows of an embedding that wake on one shard of one replica only, and a nan on one process only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))
    fully_shard(model, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    optimizer = onebit.OneBitLamb(
        model.parameters(), lr=0.01, freeze_step=WARMUP, weight_decay=0.01, process_group=group
    )
    for step in range(STEPS):
        rows = [0, 1] if step < WARMUP + 2 or dist.get_rank() != 3 else [14, 15]
        loss = model(torch.tensor(rows)).square().sum()
        (loss * (float("nan") if (step, dist.get_rank()) == (5, 1) else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = [p.full_tensor().detach() for p in model.parameters()]
    return {"params": held, "skipped": optimizer.stats()["skipped_steps"]}


def test_waking_rows_and_a_nan_are_agreed_by_all_processes():
    results = run_processes(4, a_dead_row, timeout_s=100)
    before = build_embedding()
    for found in results:
        assert found["skipped"] == 1
        for mine, theirs in zip(found["params"], results[0]["params"], strict=True):
            assert torch.equal(mine, theirs)
            assert torch.isfinite(mine).all()
        assert not torch.equal(found["params"][0][14], before[14] * found["params"][0][12][0] / before[12][0])
        assert not torch.equal(found["params"][0][0], before[0])


def build_embedding() -> Tensor:
    torch.manual_seed(0)
    return nn.Embedding(16, 8).weight.detach()


def refusals(_: Comm) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group, said = mesh["replicate"].get_group(), []

    def says(optimizer: Any) -> None:
        try:
            optimizer.step()
        except onebit.OnebitError as error:
            said.append(str(error))

    model = build()
    fully_shard(model, mesh=mesh["shard"])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    says(onebit.OneBitLamb(model.parameters()))  # the default group joins different shards
    says(onebit.LocalVarianceLamb(model.parameters(), process_group=group))
    says(onebit.OneBitLamb(model.parameters(), process_group=group, guard=onebit.SwitchGuard()))
    says(onebit.OneBitLamb(model.parameters(), process_group=group, ratio="momentum"))
    torch.manual_seed(dist.get_rank() // 2)  # the replicas start apart
    other = nn.Linear(8, 8)
    fully_shard(other, mesh=mesh["shard"])
    says(onebit.OneBitLamb(other.parameters(), process_group=group))
    both = nn.Linear(8, 8)
    fully_shard(both, mesh=mesh)
    says(onebit.OneBitLamb(both.parameters(), process_group=group))
    return said


def test_what_cannot_be_sharded_is_said_on_all_processes():
    parts = ["hold different shards", "LocalVarianceLamb cannot", "a guard", "ratio is 'momentum'", "parameters differ"]
    for said in run_processes(4, refusals, timeout_s=100):
        assert len(said) == 6
        for text, part in zip(said, [*parts, "mesh of one dimension"], strict=True):
            assert part in text


def test_one_process_has_no_shards():
    opt = onebit.Lamb([nn.Parameter(torch.ones(3))], comm=Solo())
    opt.step()
    assert opt._shards is None
