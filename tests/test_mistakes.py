"""What does not work, kept to show it: no error feedback, a compressed gradient, a compressed update."""

import math

import pytest
import torch
from test_optim import check_replicas, flat, train

import onebit
from onebit.layerwise import layer_stats
from onebit.mistakes import CompressedGradientAdam, CompressedUpdateAdam

MISTAKES = {"gradient": CompressedGradientAdam, "update": CompressedUpdateAdam}
mistakes = pytest.mark.parametrize("make", MISTAKES.values(), ids=MISTAKES)
SEEDS = (0, 1, 2)


def built(make, **settings):
    settings = {"lr": 0.02, "freeze_step": 5, "betas": (0.9, 0.95), **settings}
    return lambda net, comm: make(net.named_parameters(), comm=comm, **settings)


@mistakes
@pytest.mark.parametrize("settings", [{}, {"bucket_elements": 50, "weight_decay": 0.1}], ids=["plain", "buckets"])
def test_replicas_stay_equal_bytes_fall_at_the_switch_and_the_loss_falls(make, settings):
    def work(comm):
        sent = []
        after = lambda t, net, opt: sent.append(opt.payload_bytes)  # noqa: E731
        _, opt, loss = train(comm, built(make, **settings), 40, after=after)
        assert opt.stage is onebit.Stage.COMPRESSED
        assert opt.freeze_reason == "5 updates, as was asked"
        assert (sent[6] - sent[5]) < 0.4 * (sent[4] - sent[3])  # 123 elements: scales and padding weigh much
        assert layer_stats(opt).keys() == {"variance_norm"}
        return loss

    first = onebit.run_workers(3, lambda comm: train(comm, built(make, **settings), 1)[2])
    assert sum(onebit.run_workers(3, work)) < 0.7 * sum(first)


@mistakes
def test_the_warm_up_is_that_of_1_bit_adam(make):
    def last(comm, make):
        return train(comm, built(make, freeze_step=30), 20)[0]

    ours, theirs = (onebit.run_workers(2, lambda c, m=m: last(c, m))[0] for m in (make, onebit.OneBitAdam))
    assert torch.equal(flat(ours.parameters()), flat(theirs.parameters()))


def test_what_each_compresses():
    """Equal magnitudes travel exactly, so one step can be computed by hand."""

    def work(comm, make):
        p = torch.nn.Parameter(torch.ones(16))
        opt = make([p], lr=0.1, freeze_step=1, betas=(0.5, 0.75), eps=0.0, comm=comm)
        for g in (4.0, 8.0):
            p.grad = torch.full((16,), g * (1 + comm.rank))
            opt.step()
        return p.detach(), opt.state[p]["variance"]

    (x, v), (y, w) = onebit.run_workers(2, lambda comm: work(comm, CompressedGradientAdam))
    mean = 0.25 * 6.0**2 * 0.75 + 0.25 * 12.0**2  # of what both sent, 6 and then 12
    for found, expected in ((v, mean), (w, mean), (x, 1 - 0.1 - 0.1 * 7.5 / math.sqrt(mean)), (y, x)):
        torch.testing.assert_close(found, torch.as_tensor(expected).expand(16).float())
    (x, v), (y, w) = onebit.run_workers(2, lambda comm: work(comm, CompressedUpdateAdam))
    own = [0.25 * 6.0**2 * 0.75 + 0.25 * (8.0 * k) ** 2 for k in (1, 2)]  # the first step was averaged
    update = sum((1.5 + 4.0 * k) / math.sqrt(s) for k, s in zip((1, 2), own, strict=True)) / 2
    for found, expected in ((v, own[0]), (w, own[1]), (x, 1 - 0.1 - 0.1 * update), (y, x)):
        torch.testing.assert_close(found, torch.as_tensor(expected).expand(16).float())


@mistakes
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_bad_gradient_on_one_worker_is_as_if_the_step_never_was(make, bad):
    def work(comm, spoil):
        p = torch.nn.Parameter(torch.ones(40))
        opt = make([p], lr=0.01, freeze_step=3, comm=comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for t in range(10):
            p.grad = torch.randn(40, generator=generator)
            if spoil and t == 6:
                kept, p.grad = p.grad, torch.full((40,), bad if comm.rank == 1 else 1.0)
                opt.step()
                p.grad = kept
            opt.step()
            check_replicas(comm, [p])
        assert opt.stats()["skipped_steps"] == int(spoil)
        return p.detach()

    clean, spoilt = (onebit.run_workers(2, lambda comm, s=s: work(comm, s)) for s in (False, True))
    assert torch.equal(clean[0], spoilt[0])


@mistakes
def test_they_are_not_saved_and_do_not_go_back(make):
    p = torch.nn.Parameter(torch.ones(8))
    opt = make([p], freeze_step=2)
    for _ in range(3):
        p.grad = torch.ones(8)
        opt.step()
    for call in (opt.state_dict, lambda: opt.load_state_dict({}), lambda: opt.refreeze(3)):
        with pytest.raises(onebit.ConfigError, match=make.__name__):
            call()
    assert not hasattr(onebit, make.__name__)


# -- training ----------------------------------------------------------------------------------------------------------


def noisy_quadratic(make, seed, steps=200, size=64):
    """Half the sum of h x^2 at the end, h from 0.01 to 1, two workers whose gradients have noise of deviation sqrt(h):
    at the start, x = 1, of the size of the gradient where h is 1 and ten times larger where it is 0.01."""

    def work(comm):
        x, h = torch.nn.Parameter(torch.ones(size)), torch.logspace(-2, 0, size)
        opt, generator = make(x, comm), torch.Generator().manual_seed(1000 * seed + comm.rank)
        for t in range(steps):
            opt.param_groups[0]["lr"] = 0.02 * (1 - t / steps)
            x.grad = h * x.detach() + h.sqrt() * torch.randn(size, generator=generator)
            opt.step()
        return float((h * x.detach() ** 2).sum()) / 2

    return onebit.run_workers(2, work)[0]


def quadratics(make, **settings):
    settings = {"freeze_step": 50, "betas": (0.9, 0.99), **settings}
    return [noisy_quadratic(lambda x, comm: make([x], comm=comm, **settings), seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def adam():
    return quadratics(onebit.OneBitAdam)


@mistakes
def test_at_the_same_learning_rate_they_end_worse_than_1_bit_adam(make, adam):
    """For every seed. Not at twice this rate and more, where both are level with it or better: what they lose here is
    the length of their steps."""
    for wrong, right in zip(quadratics(make), adam, strict=True):
        assert wrong > 1.1 * right


def test_without_feedback_1_bit_adam_ends_much_worse(adam):
    for wrong, right in zip(quadratics(onebit.OneBitAdam, error_feedback="none"), adam, strict=True):
        assert wrong > 2 * right


def test_without_feedback_1_bit_lamb_ends_much_worse():
    with_errors, without = (quadratics(onebit.OneBitLamb, error_feedback=kind) for kind in ("unscaled", "none"))
    for wrong, right in zip(without, with_errors, strict=True):
        assert wrong > 1.5 * right


@pytest.mark.parametrize("make", [onebit.OneBitLamb, onebit.OneBitAdam])
@pytest.mark.parametrize("state", ["full", "compact"])
def test_without_feedback_the_optimizers_errors_stay_zero(make, state):
    def work(comm):
        _, opt, _ = train(comm, built(make, error_feedback="none", state=state), 12)
        stats = opt.stats()
        assert stats["worker_error_norm"] == stats["server_error_norm"] == 0
        assert stats["momentum_norm"] > 0
        _, fed, _ = train(comm, built(make, state=state), 12)
        assert fed.stats()["worker_error_norm"] > 0
        with pytest.raises(onebit.ConfigError, match="error feedback"):
            fed.load_state_dict(opt.state_dict())

    onebit.run_workers(2, work)
