"""`LocalVarianceLamb` and `LocalVarianceAdam`: a short warm-up, then one bit, the variance exchanged now and then."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optim import BUILD, check_replicas, flat, small_model, train

import onebit
from onebit import logarithms
from onebit.comm import ring_all_reduce_bytes
from onebit.layout import FlatLayout
from onebit.optim import FlatOptimizer

MAKES = {"lamb": onebit.LocalVarianceLamb, "adam": onebit.LocalVarianceAdam}
both = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
SYNCS = [1, 2, 3, 4, 5, 7, 9, 11, 13, 17, 21, 25, 29, 37]  # 1, 1, 1, 1, 2, 2, 2, 2, 4, ... apart


def built(make, **given_):
    given_ = {"lr": 0.02, "betas": (0.9, 0.95), "warmup_steps": 1, "warmup_transport": "fp32", **given_}
    return lambda net, comm: make(net.named_parameters(), comm=comm, **given_)


# -- when, and in which form, the variance is exchanged ----------------------------------------------------------


def test_the_schedule():
    schedule = onebit.Schedule()
    at = [1]
    while at[-1] < 37:
        at.append(at[-1] + schedule.interval(len(at)))
    assert at == SYNCS
    assert [onebit.Schedule(2, 3).interval(k) for k in range(1, 9)] == [1, 1, 2, 2, 3, 3, 3, 3]
    assert onebit.Schedule(1, 1000).interval(500) == 1000
    for updates in (1, 2, 6, 7, 40):
        assert schedule.count(1, updates) == sum(t <= updates for t in [*SYNCS, 45])
    assert schedule.count(12, 40) == 1 + 6


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.floats(-30, 30), st.floats(0, 8), st.integers(0, 10**6))
def test_a_logarithm_is_at_most_a_tenth_off_or_far_below_the_largest(size, middle, spread, seed):
    layout = FlatLayout([(size,)], 1)
    (bucket,) = layout.buckets
    generator = torch.Generator().manual_seed(seed)
    exponents = (middle + spread * torch.randn(bucket.numel, generator=generator)).clamp(-37, 37)
    x = 10.0**exponents
    x[size // 2 :: 3] = 0
    found = logarithms.decode(logarithms.encode(x), torch.empty(bucket.chunk))
    near = x > x.max() * 2.0**-63
    assert ((found[near] / x[near]).log2().abs() <= 1 / 8 + 1e-3).all()
    assert torch.equal(found == 0, x == 0)
    assert (found[~near] <= x.max() * 2.0**-62).all()
    again = logarithms.decode(logarithms.encode(found), torch.empty(bucket.chunk))
    assert torch.equal(again, found)


def test_the_mean_of_variances_is_equal_everywhere_and_not_finite_for_all_alike():
    layout = FlatLayout([(10, 30), (7,)], 3, bucket_elements=100)

    def work(comm, bad):
        own = torch.zeros(layout.numel)
        for view in layout.views(own):
            view.fill_(2.0**comm.rank)
        if bad and comm.rank == 1:
            own[5] = bad
        return logarithms.mean_variance(own, layout, comm), comm.payload_bytes

    found = onebit.run_workers(3, lambda comm: work(comm, 0.0))
    assert all(torch.equal(found[0][0], mean) for mean, _ in found)
    assert torch.equal(found[0][0][:300], torch.full((300,), 2.0 * 2**0.25))  # 7 / 3 to the nearest quarter octave
    assert found[0][1] == sum(2 * 2 * (4 + -(-b.chunk // 4) * 4) for b in layout.buckets)
    for bad in (math.nan, math.inf):
        assert all(mean is None for mean, _ in onebit.run_workers(3, lambda comm, bad=bad: work(comm, bad)))


def test_bytes_of_every_step():
    """Two updates of 4-bit gradients; then a bit each way per element; at an exchange of the variance 8 more."""
    n, numel, sent = 4, 4096, []

    def work(comm):
        p = torch.nn.Parameter(torch.ones(numel))
        opt = onebit.LocalVarianceLamb([p], warmup_steps=2, comm=comm)
        for _ in range(40):
            p.grad = torch.randn(numel)
            opt.step()
            if comm.rank == 0:
                sent.append(opt.payload_bytes)

    onebit.run_workers(n, work)
    one_bit = 2 * (n - 1) * (4 + 4 + numel // n // 8)
    logs = 2 * (n - 1) * (4 + numel // n)
    steps = [b - a for a, b in itertools.pairwise([0, *sent])]
    int4 = 2 * (n - 1) * (numel // n // 2 + 2 * (numel // n // 128))
    assert steps == [int4, int4 + logs, *(one_bit + logs * (t in SYNCS) for t in range(3, 41))]
    whole = 40 * ring_all_reduce_bytes(2 * numel, n)
    share = 2 * 0.258 / 40 + 38 / 40 / 16 + (len(SYNCS) - 1) / 40 / 2
    assert sent[-1] / whole == pytest.approx(share, rel=0.025)


@pytest.mark.parametrize("steps", [100, 400, 1600])
def test_bytes_of_a_run_are_those_of_the_formula(steps):
    """To 1 %, and what little it leaves out is headers and fill."""
    n, numel, warmup = 2, 128 * 16 * 16, steps // 20

    def work(comm):
        p = torch.nn.Parameter(torch.ones(numel))
        opt = onebit.LocalVarianceLamb([p], warmup_steps=warmup, comm=comm)
        p.grad = torch.linspace(-1, 1, numel)
        for _ in range(steps):
            opt.step()
        return opt.payload_bytes

    share = onebit.run_workers(n, work)[0] / (steps * ring_all_reduce_bytes(2 * numel, n))
    syncs = onebit.Schedule().count(warmup, steps)
    int4, one_bit, logs = (0.5 + 2 / 128) / 2, 1 / 16, 1 / 2
    assert share == pytest.approx((warmup * int4 + (steps - warmup) * one_bit + syncs * logs) / steps, rel=0.01)


# -- the algorithm -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "settings_",
    [{}, {"bucket_elements": 50, "weight_decay": 0.1}, {"codec": onebit.OneBit(), "warmup_transport": "int4"}],
    ids=["plain", "buckets", "layers"],
)
def test_replicas_stay_equal_and_the_loss_falls(make, n, settings_):
    first = onebit.run_workers(n, lambda comm: train(comm, built(make, **settings_), 1)[2])
    last = onebit.run_workers(n, lambda comm: train(comm, built(make, **settings_), 60)[2])
    assert sum(last) < 0.7 * sum(first)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_gradients_of_one_size_make_it_plain_lamb_and_adamw(bias_correction, n):
    """Compression and variance are exact then, so both must go where the uncompressed optimizers go."""

    def gradient(t, rows):
        signs = torch.where(torch.arange(rows * 8) % 3 == 0, -1.0, 1.0)
        return 0.5 * signs.view(rows, 8)

    def run(make, comm=None, steps=12, **given_):
        p, q = (torch.nn.Parameter(torch.full((rows, 8), 0.3)) for rows in (2, 3))
        groups = [{"params": [p], "weight_decay": 0.1}, {"params": [q], "weight_decay": 0.0}]
        given_ |= {} if comm is None else {"comm": comm, "warmup_steps": 3, "warmup_transport": "fp32"}
        opt = make(groups, lr=0.01, betas=(0.9, 0.98), eps=0.0, **given_)
        for t in range(steps):
            p.grad, q.grad = gradient(t, 2), gradient(t, 3)
            opt.step()
        return flat([p, q])

    lamb = run(onebit.Lamb)
    ours = onebit.run_workers(n, lambda comm: run(onebit.LocalVarianceLamb, comm, trust_gain=1.0))
    assert all(torch.allclose(x, lamb, rtol=1e-5) for x in ours)
    ours = onebit.run_workers(n, lambda comm: run(onebit.LocalVarianceAdam, comm, bias_correction=bias_correction))
    theirs = run(torch.optim.AdamW) if bias_correction else run(onebit.OneBitAdam, freeze_step=100)
    assert all(torch.allclose(x, theirs, rtol=1e-5) for x in ours)


def oracle(x, gradients, lr, beta1, beta2, decay, gain, steps):
    """The algorithm once more for one layer and n workers, in units of the momentum, float64, written from its text.

    gradients(t, i): worker i's at update t. Errors and momentum are kept in momentum units, so a new variance changes
    nothing about them; one RMS scale per worker, one per chunk on the server's side.
    """
    n, size = len(gradients(1)), x.numel()
    chunk = size // n
    own = torch.zeros(n, size, dtype=torch.float64)
    errors, server = torch.zeros_like(own), torch.zeros(size, dtype=torch.float64)
    momentum, v = torch.zeros(size, dtype=torch.float64), None

    def sign_scale(z):
        return torch.where(z >= 0, 1.0, -1.0).double() * z.square().mean().sqrt()

    def quarter_octaves(rows):
        return torch.stack([2 ** ((row.log2() * 4).round() / 4) for row in rows])

    for t in range(1, steps + 1):
        g = torch.stack(gradients(t))
        own = beta2 * own + (1 - beta2) * g**2
        if t == 1:  # LAMB's first step, and the first variance
            momentum = (1 - beta1) * g.mean(0)
            u = momentum / (1 - beta2) ** 0.5 / g.mean(0).abs() + decay * x
            x = x - lr * (x.norm() / u.norm()).clamp(0.01, 10) * u
            v = _mean_log(own / (1 - beta2), n, quarter_octaves)
            v = v.clamp(min=0.01 * v.mean())
            continue
        d = v.sqrt()
        z = (beta1 * momentum + (1 - beta1) * g + errors) / d
        sent = torch.stack([sign_scale(row) for row in z])
        errors = (z - sent) * d
        served = sent.mean(0) + server / d
        out = torch.cat([sign_scale(part) for part in served.split(chunk)])
        server, momentum = (served - out) * d, out * d
        u = out / math.sqrt(1 - beta2**t) + decay * x
        x = x - lr * gain * (x.norm() / u.norm()).clamp(0.01, 10) * u
        if t in SYNCS[1:]:
            v = _mean_log(own / (1 - beta2**t), n, quarter_octaves)
            v = v.clamp(min=0.01 * v.mean())
    return x


def _mean_log(own, n, rounded):
    return torch.cat([rounded(part.mean(0, keepdim=True))[0] for part in rounded(own).split(own.shape[1] // n, dim=1)])


def test_it_is_the_algorithm():
    n, size, steps = 3, 8 * 3 * 4, 30
    start = torch.linspace(-1, 2, size, dtype=torch.float64)

    def gradient(t, rank):
        generator = torch.Generator().manual_seed(100 * t + rank)
        spread = torch.linspace(-2, 0, size, dtype=torch.float64)
        return torch.randn(size, generator=generator, dtype=torch.float64) * 10**spread + 0.01

    def work(comm):
        p = torch.nn.Parameter(start.clone())
        how = {"warmup_steps": 1, "warmup_transport": "fp32", "comm": comm}
        opt = onebit.LocalVarianceLamb([p], lr=0.01, betas=(0.9, 0.98), eps=0.0, weight_decay=0.05, **how)
        for t in range(1, steps + 1):
            p.grad = gradient(t, comm.rank)
            opt.step()
        return p.detach()

    expected = oracle(
        start, lambda t: [gradient(t, i) for i in range(n)], 0.01, 0.9, 0.98, decay=0.05, gain=1.5, steps=steps
    )
    for found in onebit.run_workers(n, work):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_the_gain_is_a_larger_learning_rate_after_the_warm_up():
    def last(lr, gain):
        def after(t, net, opt):
            if t == 2 and gain == 1.0:
                opt.param_groups[0]["lr"] = lr

        make = built(MAKES["lamb"], trust_gain=gain, warmup_steps=3)
        return flat(onebit.run_workers(2, lambda c: train(c, make, 15, after=after)[0])[0].parameters())

    torch.testing.assert_close(last(0.02, 1.5), last(0.03, 1.0), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(last(0.02, 1.5), last(0.02, 1.0), rtol=1e-3)


@both
def test_an_exchange_of_the_variance_changes_neither_momentum_nor_errors(make):
    """In units of the momentum: all three times d."""

    def work(comm):
        seen = []
        with BUILD:
            net = small_model().double()
        opt = built(make)(net, comm)
        generator = torch.Generator().manual_seed(comm.rank)
        sync = opt._sync

        def held():
            d, exchange = opt._flat["denominator"], opt._exchange
            z = torch.cat([opt._numbers(b) for b in exchange.layout.buckets])
            mine = torch.cat([d[b.slice].view(3, -1)[comm.rank] for b in exchange.layout.buckets])
            return [z * d, exchange.worker_error * d, exchange.server_error * mine]

        def watched():
            before, old = held(), opt._flat["denominator"].clone()
            sync()
            seen.append(not torch.equal(old, opt._flat["denominator"]))
            for a, b in zip(before, held(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)

        opt._sync = watched
        for _ in range(10):
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator).double()
            opt.step()
        assert seen == [True] * 6  # after updates 2, 3, 4, 5, 7, 9

    onebit.run_workers(3, work)


# -- what can go wrong -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("when", [0, 1, 5, 6], ids=["warm-up", "exchange", "between", "exchange later"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_bad_gradient_on_one_worker_is_as_if_the_step_never_was(make, when, bad):
    def work(comm, poison):
        with BUILD:
            net = small_model()
        opt = built(make)(net, comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for t in range(12):
            grads = [torch.randn(p.shape, generator=generator) for p in net.parameters()]
            if poison and t == when:
                for p in net.parameters():
                    p.grad = torch.ones_like(p)
                if comm.rank == 1:
                    next(net.parameters()).grad[0, 3] = bad
                opt.step()
            for p, grad in zip(net.parameters(), grads, strict=True):
                p.grad = grad
            opt.step()
            check_replicas(comm, net.parameters())
        assert opt.stats()["skipped_steps"] == int(poison)
        assert opt.stats()["step"] == 12
        return flat(net.parameters()), opt._exchange.worker_error, opt._exchange.server_error, opt._own

    clean, poisoned = (onebit.run_workers(3, lambda c, p=p: work(c, p)) for p in (False, True))
    for ours, theirs in zip(clean, poisoned, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@both
@pytest.mark.parametrize("n", [1, 3])
def test_unused_rows_stay_where_they_are_and_move_after_the_next_exchange(make, n):
    """Row 5 gets its first gradient at update 14; the next exchange belongs to update 17."""

    def work(comm):
        table = torch.nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        start, moved = table.detach().clone(), []
        opt = make([table], lr=0.01, betas=(0.9, 0.95), warmup_steps=2, comm=comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for t in range(1, 31):
            table.grad = torch.randn(8, 8, generator=generator) + 0.5
            table.grad[6:] = 0
            if t < 14 or comm.rank != 0:
                table.grad[5] = 0
            opt.step()
            check_replicas(comm, [table])
            moved.append(not torch.equal(table[5], start[5]))
        assert torch.equal(table[6:], start[6:])
        assert moved == [t > 17 for t in range(1, 31)]
        others = (table[:5] - start[:5]).abs().max()
        assert (table[5] - start[5]).abs().max() < 2 * others

    onebit.run_workers(n, work)


@both
@pytest.mark.parametrize("cut", [0, 2, 3, 4, 8, 9, 12])
def test_a_loaded_state_continues_to_the_bit(make, cut, tmp_path):
    how = {"bucket_elements": 50, "warmup_steps": 3, "warmup_transport": "int4"}

    def gradients(net, t, rank):
        generator = torch.Generator().manual_seed(1000 * t + rank)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        if t < 10:
            next(net.parameters()).grad[0] = 0  # a row that comes alive late

    def work(comm):
        with BUILD:
            net, again = small_model(), small_model(1)
        opt = built(make, **how)(net, comm)
        for t in range(20):
            if t == cut:
                saved = {"model": net.state_dict(), "opt": opt.state_dict()}
                torch.save(saved, tmp_path / f"{comm.rank}.pt")
            gradients(net, t, comm.rank)
            opt.step()
        loaded = torch.load(tmp_path / f"{comm.rank}.pt", weights_only=True)
        again.load_state_dict(loaded["model"])
        other = built(make, **how)(again, comm)
        other.load_state_dict(loaded["opt"])
        for t in range(cut, 20):
            gradients(again, t, comm.rank)
            other.step()
        assert torch.equal(flat(net.parameters()), flat(again.parameters()))
        counted = {"payload_bytes": other.payload_bytes, "seconds": other.stats()["seconds"]}
        assert other.stats() == opt.stats() | counted

    onebit.run_workers(3, work)


@both
def test_the_host_may_learn_the_verdict_late(make, monkeypatch):
    """As on an accelerator: the same bits, a skipped step and an exchange of the variance among them."""
    monkeypatch.setenv("ONEBIT_KERNELS", "reference")

    def work(comm):
        with BUILD:
            net = small_model()
        opt = built(make)(net, comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for t in range(24):
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            if comm.rank == 1 and t in (6, 8, 19):
                next(net.parameters()).grad[0, 3] = math.nan
            opt.step()
        assert opt.stats()["skipped_steps"] == 3
        return flat(net.parameters()), opt._own, opt._exchange.worker_error

    at_once = onebit.run_workers(3, work)
    monkeypatch.setattr(FlatOptimizer, "_may_defer", lambda self: True)
    for ours, theirs in zip(at_once, onebit.run_workers(3, work), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_resync_begins_with_short_intervals_again():
    sent = []

    def after(t, net, opt):
        sent.append(opt.payload_bytes)
        if t == 20:
            opt.resync()

    onebit.run_workers(1, lambda comm: None)
    onebit.run_workers(
        2, lambda comm: train(comm, built(MAKES["lamb"]), 30, after=after if comm.rank == 0 else _resync)
    )
    steps = [b - a for a, b in itertools.pairwise([0, *sent])]
    large = [t for t, step in enumerate(steps, 1) if step > min(steps)]
    assert large == [*SYNCS[:11], 22, 23, 24, 25, 26, 28, 30]


def _resync(t, net, opt):
    if t == 20:
        opt.resync()


def test_native_and_reference_kernels_train_alike(monkeypatch):
    found = {}
    for kernels in ("native", "reference"):
        monkeypatch.setenv("ONEBIT_KERNELS", kernels)
        run = onebit.run_workers(2, lambda c: train(c, built(MAKES["lamb"], weight_decay=0.1), 12)[0])
        found[kernels] = flat(run[0].parameters())
    torch.testing.assert_close(found["native"], found["reference"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "settings_", "words"),
    [
        ("lamb", {"trust_gain": 0.0}, "trust_gain is 0.0"),
        ("lamb", {"trust_gain": math.inf}, "trust_gain is inf"),
        ("lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff"),
        ("adam", {"variance_floor": 1.0}, "variance_floor is 1.0"),
        ("adam", {"bias_correction": 1}, "bias_correction is 1"),
        ("adam", {"warmup_steps": 0}, "warmup_steps is 0"),
        ("lamb", {"warmup_steps": 0.1}, "say how long that is: total_steps"),
        ("lamb", {"warmup_steps": 1.0, "total_steps": 9}, "warmup_steps is 1.0"),
        ("lamb", {"warmup_transport": "int2"}, "transport is 'int2'"),
        ("adam", {"lr": -1.0}, "lr"),
        ("lamb", {"codec": "bucket"}, "codec is 'bucket'; it must be an onebit.OneBit"),
        ("adam", {"schedule": 3}, "schedule is 3; it must be an onebit.Schedule"),
        ("lamb", {"variance_floor": "x"}, "variance_floor is 'x'"),
        ("adam", {"eps": 0.0}, "eps is 0"),
    ],
)
def test_impossible_settings_are_named(make, settings_, words):
    with pytest.raises(onebit.ConfigError, match=words):
        MAKES[make]([torch.nn.Parameter(torch.ones(3))], **settings_)


@pytest.mark.parametrize("given_", [(0, 10), (4, 0), (1.5, 10), (True, 3)])
def test_impossible_schedules_are_named(given_):
    with pytest.raises(onebit.ConfigError, match="it must be a whole number, at least 1"):
        onebit.Schedule(*given_)


@both
def test_masks_are_refused(make):
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(onebit.ConfigError, match="exp_avg_mask is set on a group"):
        make([{"params": [p], "exp_avg_mask": torch.ones(3)}])


@both
@pytest.mark.parametrize("warmup", [1, 3])
def test_gradients_whose_squares_overflow_on_each_worker_but_not_in_the_mean(make, warmup):
    def work(comm):
        p = torch.nn.Parameter(torch.ones(16))
        opt = make([p], lr=1e-3, warmup_steps=warmup, warmup_transport="fp32", comm=comm)
        for t in range(8):
            p.grad = torch.full((16,), 0.1)
            if t == 0:
                p.grad[3] = 3e19 if comm.rank else -3e19
            opt.step()
        assert torch.isfinite(p).all()

    onebit.run_workers(2, work)


@pytest.mark.parametrize("make", [*MAKES.values(), onebit.ZeroOneAdam], ids=lambda make: make.__name__)
def test_a_state_from_before_the_first_step_begins_anew(make):
    p = torch.nn.Parameter(torch.ones(16))
    opt = make([p])
    fresh = opt.state_dict()
    again = []
    for _ in range(2):
        with torch.no_grad():
            p.fill_(1.0)
        for t in range(3):
            p.grad = torch.linspace(-1, 1, 16) + t
            opt.step()
        again.append(p.detach().clone())
        opt.load_state_dict(fresh)
        assert opt.stats()["step"] == 0
        assert opt.stage is onebit.Stage.WARMUP
    assert torch.equal(*again)
