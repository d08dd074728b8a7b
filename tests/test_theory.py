"""What the analysis says, on small runs in float64; benchmarks/theory measures it at length (docs/theory.md)."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import onebit
from onebit.codec import OneBit
from onebit.errors import ConfigError
from onebit.exchange import Exchange

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not part of the package

from benchmarks.theory import bounded, identities, rates
from benchmarks.theory.lockstep import CPU, Lockstep

ODD = ((5, 3), (40,), (0,), (7,))
CODECS = [OneBit(), OneBit("bucket"), OneBit("block", 9, "mean")]


# --- the stand-in ---------------------------------------------------------------------------------------------------


def exchanged(comm, lock, codec, inputs, factors):
    """The project's exchange on one worker: outputs of all steps, worker error, server error."""
    bucket = lock.layout.buckets[0]
    exchange = Exchange(lock.layout, codec, comm, torch.float64, CPU)
    outputs = []
    for x, factor in zip(inputs, factors, strict=True):
        mean = exchange.start(bucket, x[comm.rank].clone(), factor)
        mean.serve()
        outputs.append(mean.wait())
        mean.commit()
    return outputs, exchange.worker_error, exchange.server_error


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.scale)
@pytest.mark.parametrize(("shapes", "workers"), [(ODD, 1), (ODD, 3), (rates.SHAPES, 8)])
@pytest.mark.parametrize("scaled", [False, True])
def test_lockstep_has_the_bits_of_the_exchange(shapes, workers, codec, scaled):
    random = torch.Generator().manual_seed(1)
    lock = Lockstep(shapes, workers, codec, runs=2)
    real = torch.zeros(lock.layout.numel, dtype=torch.float64)
    for view in lock.layout.views(real):
        view.fill_(1.0)
    inputs = torch.randn(4, 2, workers, lock.layout.numel, generator=random, dtype=torch.float64) * real
    draws = torch.rand(4, len(shapes), generator=random, dtype=torch.float64) + 0.5
    factors = list(draws) if scaled else [None] * 4
    outputs = [lock.mean(x, factor) for x, factor in zip(inputs, factors, strict=True)]
    for run in range(2):
        results = onebit.run_workers(
            workers, lambda comm, run=run: exchanged(comm, lock, codec, inputs[:, run], factors)
        )
        for mine, theirs in zip(outputs, results[0][0], strict=True):
            assert torch.equal(mine[run], theirs)
        assert torch.equal(lock.worker_error[run], torch.stack([worker for _, worker, _ in results]))
        assert torch.equal(lock.server_error[run], torch.cat([server for _, _, server in results]))


# --- virtual sequences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", identities.HOLD)
def test_virtual_sequence_takes_the_steps_of_exact_gradients(name):
    check, plan = identities.HOLD[name]
    assert check(identities.follow(replace(plan, steps=150))) < 1e-12


@pytest.mark.parametrize("name", identities.FAIL)
def test_other_forms_of_the_virtual_sequence_do_not(name):
    check, plan = identities.FAIL[name]
    assert check(identities.follow(replace(plan, steps=150))) > 0.1


def optimizer_rows(comm, feedback):
    """Compressed steps of `OneBitLamb` on one worker: x_t, m_t, own gradient, worker and server error, x_{t+1}."""
    random = torch.Generator().manual_seed(10 + comm.rank)
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, size, dtype=torch.float64)) for size in (40, 24)]
    opt = onebit.OneBitLamb(weights, 0.02, freeze_step=20, betas=(0.9, 0.99), comm=comm, error_feedback=feedback)
    rows = []
    for t in range(50):
        opt.param_groups[0]["lr"] = 0.02 * (1 - t / 60)
        for w in weights:
            w.grad = w.detach() + torch.randn(w.shape, generator=random, dtype=torch.float64)
        compressed = opt.stage is onebit.Stage.COMPRESSED
        x, g = torch.cat([w.detach() for w in weights]), torch.cat([w.grad for w in weights])
        opt.step()
        if compressed:
            own = opt.state_dict()["onebit"]["errors"]
            errors = own["worker_error"].clone(), own["server_error"].clone()
            rows.append((x, torch.cat(opt.decoded_momentum()), g, *errors, torch.cat([w.detach() for w in weights])))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def optimizer_trajectory(feedback):
    results = onebit.run_workers(2, lambda comm: optimizer_rows(comm, feedback))
    x, m, _, _, _, after = results[0]
    d = torch.stack([worker for _, _, _, worker, _, _ in results]).mean(0)
    d += torch.cat([server for _, _, _, _, server, _ in results], 1)
    g = torch.stack([g for _, _, g, _, _, _ in results]).mean(0)
    return identities.Trajectory(x, m, d, g, gamma=(x - after) / m, beta=0.9, weight_decay=0.0)


def test_the_optimizer_with_scaled_errors_takes_the_steps_of_exact_momentum():
    assert identities.parameters(optimizer_trajectory("scaled")) < 1e-11  # gamma comes from a difference of parameters
    assert identities.parameters(optimizer_trajectory("unscaled")) > 0.02


# --- bounded errors -------------------------------------------------------------------------------------------------


def test_errors_stay_below_a_fraction_of_the_largest_gradient():
    for kind, errors in bounded.measure(OneBit(), 500).items():
        assert errors.worker < 0.3, kind
        assert errors.server < 0.3, kind
        assert 0.4 < errors.growth < 1.6, kind


def test_errors_grow_without_bound_past_the_largest_multiplier():
    with pytest.raises(ConfigError, match="multiplier"):
        OneBit(multiplier=1.7)
    long = bounded.measure(bounded.unguarded(1.7), 400)
    for kind in ("normal", "spikes"):
        assert long[kind].growth > 1.2
        assert long[kind].worker > 1.0
    allowed = bounded.measure(OneBit(multiplier=1.3), 200)
    assert max(errors.worker for errors in allowed.values()) < 0.4


# --- rates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "adam", "lamb"])
def test_what_noise_leaves_falls_like_one_over_workers(method):
    cells = []
    for n in (1, 2, 4):
        result = rates.trajectory(rates.Setting("quadratic", method, n), gamma=0.04, steps=500, runs=3, seed=n)
        cells.append(([n], result.tail))
    [slope] = rates.slopes(cells)
    assert -1.25 < slope.value < -0.75


def test_the_harness_agrees_with_the_exact_result_on_the_quadratic():
    result = rates.trajectory(rates.Setting("quadratic", "exact", 2), gamma=0.02, steps=1500, runs=4, seed=0)
    assert result.mean.mean() == pytest.approx(rates.prediction(2, 0.02, 1500), rel=0.1)


def left_without_noise(gamma, feedback=True):
    setting = rates.Setting("quadratic", "adam", 4, noise=0.0, spread=8.0, feedback=feedback)
    return rates.trajectory(setting, gamma, steps=int(16 / gamma), runs=2, seed=0).tail


def test_what_compression_leaves_falls_like_the_square_of_the_step_size():
    [slope] = rates.slopes([([gamma], left_without_noise(gamma)) for gamma in (0.05, 0.1, 0.2)])
    assert 1.7 < slope.value < 2.3


def test_without_error_feedback_the_same_run_does_not_converge():
    start = float((rates.preconditioner() * (rates.curvatures() * rates.START).square()).sum())
    assert left_without_noise(0.05).mean() < 0.2 * start
    assert left_without_noise(0.05, feedback=False).mean() > 10 * start


def test_slopes_finds_the_exponents_of_a_product():
    cells = [([n, t], np.full(3, 5 * n**-0.5 * t**1.5)) for n in (1.0, 2.0, 4.0) for t in (10.0, 100.0)]
    first, second = rates.slopes(cells)
    assert (first.value, second.value) == pytest.approx((-0.5, 1.5))
    assert first.low == pytest.approx(first.high)


def test_a_run_that_diverges_says_so():
    with pytest.raises(FloatingPointError, match="diverged"):
        rates.trajectory(rates.Setting("quadratic", "exact", 1), gamma=1e3, steps=400, runs=1, seed=0)
