"""DistributedDataParallel with `onebit.attach`: two processes on Gloo, beside the plain loop on the same data."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.comm import Comm

WARMUP, STEPS = 4, 9


class Net(nn.Module):
    """A layer that is never used, and one that is used in every other step only."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.never = nn.Linear(5, 5)
        self.always = always

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.always or step % 2 == 0:
            x = x + torch.tanh(self.middle(x))
        return self.last(x)


def build(always: bool, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = Net(always)
    if always:
        del net.never
    return net


def batch(rank: int, step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def make(name: str, model: nn.Module, **more: Any) -> Any:
    if name == "Lamb":
        return onebit.Lamb(model.named_parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.01)
    if name.startswith("Local"):
        return getattr(onebit, name)(model.named_parameters(), lr=0.02, warmup_steps=WARMUP, betas=(0.9, 0.95))
    kind = getattr(onebit, name)
    return kind(model.named_parameters(), lr=0.02, freeze_step=WARMUP, betas=(0.9, 0.95), weight_decay=0.01, **more)


def train(comm: Comm, name: str, ddp: dict[str, Any] | None, accumulate: int, more: dict[str, Any]) -> dict[str, Any]:
    """`ddp`: its arguments; None: the plain loop."""
    always = ddp is None or not ddp.get("find_unused_parameters")
    always = more.pop("always", always)
    model = build(always)
    inner, optimizer = model, make(name, model, **more)
    if ddp is not None:
        model = DistributedDataParallel(model, **ddp)
        onebit.attach(model, optimizer)
    bytes_of, losses, kept = [], [], []
    for step in range(STEPS):
        before = optimizer.payload_bytes
        for part in range(accumulate):
            x, y = batch(comm.rank, step, part)
            if ddp is not None and part < accumulate - 1:
                with model.no_sync():
                    nn.functional.mse_loss(model(x, step), y).backward()
            else:
                loss = nn.functional.mse_loss(model(x, step), y)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bytes_of.append(optimizer.payload_bytes - before)
        losses.append(float(loss.detach()))
        kept.append(torch.cat([p.detach().flatten().clone() for p in inner.parameters()]))
        if step == STEPS - 3 and name.startswith("OneBit"):
            optimizer.refreeze(1)
    return {"bytes": bytes_of, "losses": losses, "params": kept}


CASES = {
    "plain": ({}, 1, {}),
    "rebuilt buckets": ({"bucket_cap_mb": 0.002}, 1, {}),
    "views": ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002}, 1, {}),
    "accumulation": ({}, 3, {}),
    "unused": ({"find_unused_parameters": True}, 2, {}),
    "static graph": ({"static_graph": True}, 1, {}),
    "bf16": ({}, 1, {"warmup_transport": "bf16"}),
    "int8": ({}, 1, {"warmup_transport": "int8"}),
}


def both(comm: Comm, name: str, cases: list[str]) -> dict[str, Any]:
    found = {}
    for case in cases:
        arguments, accumulate, more = CASES[case]
        always = not arguments.get("find_unused_parameters")
        plain = train(comm, name, None, accumulate, {**more, "always": always})
        found[case] = (plain, train(comm, name, arguments, accumulate, {**more, "always": always}))
    return found


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("OneBitLamb", list(CASES)),
        ("OneBitAdam", list(CASES)),
        ("Lamb", ["plain", "accumulation"]),
        ("LocalVarianceLamb", ["plain", "unused"]),
    ],
)
def test_the_trajectory_is_that_of_the_plain_loop_and_bytes_fall(name, cases):
    mine, other = run_processes(2, both, name, cases, timeout_s=120)
    for case in cases:
        plain, ddp = mine[case]
        for step in range(STEPS):
            assert torch.equal(ddp["params"][step], other[case][1]["params"][step]), (case, step)
            close = {"rtol": 0.02, "atol": 2e-3} if case == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(ddp["params"][step], plain["params"][step], **close)
        if not name.startswith("OneBit"):
            continue
        warm, compressed, again = ddp["bytes"][1], ddp["bytes"][WARMUP + 1], ddp["bytes"][STEPS - 2]
        assert warm == again == pytest.approx(plain["bytes"][1], rel=0.01)  # the flat order is padded
        assert compressed == plain["bytes"][WARMUP + 1] < warm / (2 if case == "int8" else 4)


def sent_over_loopback() -> int:
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def wire_bytes(comm: Comm) -> list[int]:
    """What all processes of this machine sent in a step of the warm-up and one of the compressed stage."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2000, 500))
    optimizer = onebit.OneBitLamb(model.parameters(), freeze_step=2)
    onebit.attach(model, optimizer)
    sent = []
    for step in range(5):
        comm.all_gather_bytes(b"")
        before = sent_over_loopback()
        model(torch.randn(4, 2000) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        comm.all_gather_bytes(b"")
        sent.append(sent_over_loopback() - before)
    return [sent[1], sent[3]]


@pytest.mark.skipif(not Path("/proc/self/net/dev").exists(), reason="reads /proc/self/net/dev")
def test_the_wire_itself_carries_less_after_the_switch():
    warm, compressed = run_processes(2, wire_bytes)[0]
    assert warm > 2 * 4 * 1_000_500  # two workers, fp32
    assert compressed < warm / 10


def frozen(comm: Comm, clip: bool) -> dict[str, Any]:
    """A backbone that was frozen before DDP saw it."""
    model = build(always=True)
    model.first.requires_grad_(False)
    optimizer, wrapped = make("OneBitLamb", model), DistributedDataParallel(model)
    onebit.attach(wrapped, optimizer)
    sent = []
    for step in range(STEPS):
        x, y = batch(comm.rank, step, 0)
        nn.functional.mse_loss(wrapped(x, step), y).backward()
        before = optimizer.payload_bytes
        if clip:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        sent.append(optimizer.payload_bytes - before)
        assert model.first.weight.grad is None
        optimizer.zero_grad()
    return {"sent": sent, "params": [p.detach().clone() for p in model.parameters()]}


@pytest.mark.parametrize("clip", [False, True])
def test_nothing_is_sent_for_a_frozen_backbone(clip):
    mine, other = run_processes(2, frozen, clip)
    assert all(map(torch.equal, mine["params"], other["params"]))
    assert torch.equal(mine["params"][0], build(always=True).first.weight)
    assert max(mine["sent"][:WARMUP]) <= 16 + 4 * len(mine["params"])  # numbers that `clip_grad_norm_` and `step` share


def two_models(comm: Comm, attached: bool) -> float:
    """One optimizer for two models; what averaging keeps is that of both."""
    nets = [build(always=True), build(always=True, seed=1)]
    params = [p for net in nets for p in net.parameters()]
    optimizer = onebit.OneBitAdam(params, lr=0.02, freeze_step=99)
    models = [DistributedDataParallel(net) for net in nets] if attached else nets
    if attached:
        for model in models:
            onebit.attach(model, optimizer)
    for step in range(4):
        x, y = batch(comm.rank, step, 0)
        sum(nn.functional.mse_loss(m(x, step), y * (1 + 9 * i)) for i, m in enumerate(models)).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer._estimate.kept


def test_two_models_may_share_an_optimizer():
    plain, ddp = (run_processes(2, two_models, attached) for attached in (False, True))
    assert plain[0] == plain[1]
    assert ddp[0] == ddp[1] == pytest.approx(plain[0], rel=0.1)  # DDP's first step is not counted


def thawed(comm: Comm) -> list[torch.Tensor]:
    """Frozen with a gradient of its own, clipped, unfrozen again before the step."""
    model = build(always=True)
    optimizer, wrapped = make("OneBitAdam", model), DistributedDataParallel(model, find_unused_parameters=True)
    onebit.attach(wrapped, optimizer)
    kept = []
    for step in range(STEPS):
        if step == WARMUP + 2:
            optimizer.refreeze(3)
            stale = model.first.weight.grad.clone()
            model.first.weight.requires_grad_(False)
        x, y = batch(comm.rank, step, 0)
        nn.functional.mse_loss(wrapped(x, step), y).backward()
        if step == WARMUP + 2:
            model.first.weight.grad = stale
            optimizer.clip_grad_norm_(0.5)
            model.first.weight.requires_grad_(True)
        optimizer.step()
        if step != WARMUP + 1:
            optimizer.zero_grad()
        kept.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
    return kept


def test_what_was_unfrozen_after_clipping_is_averaged():
    mine, other = run_processes(2, thawed)
    assert all(map(torch.equal, mine, other))


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def forgotten(comm: Comm, same_data: bool, wrap: bool, attached: bool) -> list[str]:
    records = Records()
    logging.getLogger("onebit").addHandler(records)
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(6, 3)
    if wrap:
        model = DistributedDataParallel(model)
    optimizer = onebit.OneBitAdam(model.parameters(), freeze_step=2)
    if attached:
        onebit.attach(model, optimizer)
    for step in range(4):
        x, y = batch(0 if same_data else comm.rank, step, 0)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [text for text in records.texts if "onebit.attach" in text]


@pytest.mark.parametrize(
    ("same_data", "wrap", "attached", "times"),
    [(False, True, False, 1), (False, True, True, 0), (False, False, False, 0)],
)
def test_a_forgotten_attach_is_said_once(same_data, wrap, attached, times):
    said, others = run_processes(2, forgotten, same_data, wrap, attached)
    assert (len(said), len(others)) == (times, 0)


def refusals(comm: Comm) -> list[str]:
    model = nn.Linear(4, 4)
    ours, early = onebit.OneBitAdam(model.parameters()), onebit.OneBitAdam(model.parameters(), comm=onebit.comm.Solo())
    ddp = DistributedDataParallel(model)
    single = torch.distributed.new_group([comm.rank], use_local_synchronization=True)
    alone = onebit.OneBitAdam(model.parameters(), process_group=single)
    said = []
    cases = [
        (model, ours),
        (ddp, torch.optim.AdamW(model.parameters())),
        (ddp, early),
        (ddp, alone),
        (ddp, ours),
        (ddp, ours),
    ]
    for given in cases:
        try:
            onebit.attach(*given)
            said.append("")
        except onebit.ConfigError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_attached_is_said():
    for said in run_processes(2, refusals):
        for text, part in zip(
            said,
            [
                "a Linear; it takes a Distri",
                "is a AdamW; it must",
                "comm is a Solo",
                "[0, 1] and the",
                "",
                "hook already",
            ],
            strict=True,
        ):
            assert (part in text) if part else not text
