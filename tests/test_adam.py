"""`OneBitAdam`: the authors' recorded run, torch's AdamW in the warm-up, and training on several workers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_optim import BUILD, check_replicas, flat, small_model, train

import onebit

CASE = Path(__file__).parent / "cases" / "adam_2w.safetensors"


def onebit_adam(freeze_step=5, **settings):
    settings = {"lr": 0.02, "betas": (0.9, 0.95), **settings}
    return lambda net, comm: onebit.OneBitAdam(net.named_parameters(), freeze_step=freeze_step, comm=comm, **settings)


def follow(comm, case, meta, **settings):
    """The recorded run's parameters after every step, by ours."""
    (x,) = [torch.nn.Parameter(case.get_tensor(f"init.{i}").clone()) for i in range(len(meta["shapes"]))]
    settings = {"freeze_step": meta["warmup_steps"], **meta["hyper"], **onebit.PAPER, **settings}
    opt = onebit.OneBitAdam([x], comm=comm, **settings)
    for t in range(meta["steps"]):
        x.grad = case.get_tensor(f"grad.{t}.0.{comm.rank}")
        opt.step()
        yield t, x, opt


def test_paper_preset_follows_the_release_at_every_step():
    case = safe_open(CASE, "pt")
    meta = json.loads(case.metadata()["meta"])

    def work(comm):
        for t, x, opt in follow(comm, case, meta):  # noqa: B007
            expected = case.get_tensor(f"param.{t}.0")
            assert (x - expected).abs().max() <= 1e-5 * expected.abs().max(), f"step {t}"
        momentum, variance = case.get_tensor("exp_avg.0"), case.get_tensor("exp_avg_sq.0")
        torch.testing.assert_close(opt.decoded_momentum()[0], momentum, rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(opt.state[x]["variance"], variance, rtol=1e-4, atol=1e-12)

    onebit.run_workers(meta["workers"], work)


@pytest.mark.parametrize(
    "changed",
    [
        {"codec": onebit.OneBit(scale="block", block_elements=64)},
        {"codec": onebit.OneBit(scale="bucket", kind="mean")},
        {"variance_floor": 0.5},
        {"bias_correction": True},
        {"state": "compact"},
        {"warmup_transport": "bf16"},
        {"weight_decay": 0.1},
    ],
    ids=str,
)
def test_every_setting_changes_the_trajectory(changed):
    case = safe_open(CASE, "pt")
    meta = json.loads(case.metadata()["meta"])

    def last(comm, settings):
        *_, (_, x, _) = follow(comm, case, meta, **settings)
        return x.detach().clone()

    plain, other = (onebit.run_workers(meta["workers"], lambda comm, s=s: last(comm, s)) for s in ({}, changed))
    assert (plain[0] - other[0]).norm() > 1e-6 * plain[0].norm()
    assert all(torch.equal(other[0], x) for x in other)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_warm_up_is_adamw(bias_correction, decay):
    """Without bias correction torch's AdamW is the oracle too: its corrections are undone through lr, eps and decay."""
    lr, betas, eps = 0.02, (0.9, 0.95), 1e-6
    ours, theirs = small_model(), small_model()
    opt = onebit.OneBitAdam(
        ours.parameters(), lr, 1000, betas, eps, weight_decay=decay, bias_correction=bias_correction
    )
    ref = torch.optim.AdamW(theirs.parameters(), lr, betas, eps, weight_decay=decay)
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 101):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        if not bias_correction:
            first, second = 1 - betas[0] ** t, (1 - betas[1] ** t) ** 0.5
            ref.param_groups[0] |= {"lr": lr * first / second, "eps": eps / second}
            ref.param_groups[0]["weight_decay"] = decay * second / first
        opt.step()
        ref.step()
    torch.testing.assert_close(flat(ours.parameters()), flat(theirs.parameters()), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    "settings", [{}, onebit.PAPER, {"bucket_elements": 50}, {"bias_correction": True}, {"state": "compact"}], ids=str
)
def test_replicas_stay_equal_and_the_loss_falls(n, settings):
    losses = onebit.run_workers(n, lambda comm: train(comm, onebit_adam(10, **settings), 60)[2])
    before = onebit.run_workers(n, lambda comm: train(comm, onebit_adam(10, **settings), 1)[2])
    assert sum(losses) < 0.5 * sum(before)


def test_bias_correction_does_not_jump_at_the_switch():
    """The variance's correction stays what it was at the switch: a step is as long after it as before."""
    p = torch.nn.Parameter(torch.zeros(64))
    opt = onebit.OneBitAdam([p], lr=0.1, freeze_step=10, betas=(0.9, 0.999), bias_correction=True)
    lengths = []
    for _ in range(20):
        p.grad = torch.ones(64)
        before = p.detach().clone()
        opt.step()
        lengths.append(float((p.detach() - before).norm()))
    assert lengths == pytest.approx([0.8] * 20, rel=1e-3)  # sqrt(64) * lr: a constant gradient is followed exactly


def test_the_frozen_count_survives_a_checkpoint():
    def grown(steps, opt, p):
        for _ in range(steps):
            p.grad = torch.ones(8)
            opt.step()

    def build():
        p = torch.nn.Parameter(torch.zeros(8))
        return p, onebit.OneBitAdam([p], lr=0.1, freeze_step=4, bias_correction=True)

    p, opt = build()
    grown(7, opt, p)
    q, again = build()
    again.load_state_dict(opt.state_dict())
    with torch.no_grad():
        q.copy_(p)
    grown(3, opt, p)
    grown(3, again, q)
    assert torch.equal(p, q)


def test_a_late_layer_starts_with_the_variance_that_its_momentum_implies():
    def work(comm):
        with BUILD:
            early, late = torch.nn.Parameter(torch.ones(16)), torch.nn.Parameter(torch.ones(16))
        opt = onebit.OneBitAdam([early, late], lr=0.01, freeze_step=3, comm=comm)
        for t in range(12):
            early.grad, late.grad = torch.ones(16), torch.full((16,), 2.0 if t >= 6 else 0.0)
            opt.step()
            check_replicas(comm, [early, late])
        assert float(opt.state[late]["variance"].float().mean()) > 0
        moved = 1 - late.detach()
        assert bool((moved > 0).all())
        assert float(moved.max()) < 12 * 0.01 * 11  # no step of a momentum over a variance of zero
        return opt.stats()

    assert onebit.run_workers(2, work)[0]["skipped_steps"] == 0
