"""When the warm-up ends, what is looked at before, and the way back."""

import logging
import math

import pytest
import torch
from test_optim import check_replicas, flat, train
from torch import nn

import onebit
from onebit.freeze import Settling

MAKERS = {"lamb": onebit.OneBitLamb, "adam": onebit.OneBitAdam}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def built(make, **settings):
    settings = {"lr": 0.02, "betas": (0.9, 0.95), **settings}
    return lambda net, comm: make(net.named_parameters(), comm=comm, **settings)


def feed(opt, params, steps, gradient):
    """Steps with gradients that `gradient(t, shape)` gives."""
    for t in range(steps):
        for p in params:
            p.grad = gradient(t, p.shape)
        opt.step()


# -- when ------------------------------------------------------------------------------------------------------


@makers
@pytest.mark.parametrize(("given", "switch"), [(3, 3), (0.3, 6), (0.01, 1)])
def test_a_number_of_updates_or_a_share_of_the_run(make, given, switch):
    p = nn.Parameter(torch.ones(8))
    opt = make([p], freeze_step=given, total_steps=20)
    assert opt.freeze_step == switch
    feed(opt, [p], switch - 1, lambda t, shape: torch.ones(shape))
    assert opt.stage is onebit.Stage.WARMUP
    feed(opt, [p], 1, lambda t, shape: torch.ones(shape))
    assert opt.stage is onebit.Stage.COMPRESSED
    assert opt.freeze_reason == f"{switch} updates, as was asked"
    assert opt.stats()["freeze_step"] == switch


def norms_of(values):
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def settle(rule, beta2, trace, lr=lambda t: 1.0, total=None):
    """The update with which the rule ends a stage whose corrected norms follow `trace(t)`; None: never."""
    watch = Settling(rule, beta2, total)
    for t in range(1, 2001):
        if watch.wants_norms(t) and watch.settled(t, lr(t), norms_of(trace(t)) * (1 - beta2**t)):
            return t, watch
    return None, watch


def test_a_steady_variance_freezes_after_two_look_backs():
    t, watch = settle(onebit.AutoFreeze(), 0.98, lambda t: [1.0, 3.0])
    assert t == 100
    assert watch.look_back == 50
    assert "1.000 of what it was 50 updates before" in watch.reason


def test_it_freezes_neither_while_the_variance_falls_nor_while_it_rises():
    for drift in (0.998, 1.002):  # 0.905 and 1.105 over 50 updates
        assert settle(onebit.AutoFreeze(), 0.98, lambda t, d=drift: [d**t])[0] is None
    slow = 0.9995  # 0.975
    assert settle(onebit.AutoFreeze(), 0.98, lambda t: [slow**t])[0] == 100


def test_the_first_updates_of_an_average_that_starts_at_zero_do_not_count_as_a_rise():
    watch = Settling(onebit.AutoFreeze(min_steps=1), 0.98, None)
    uncorrected = [t for t in range(1, 61) if watch.wants_norms(t) and watch.settled(t, 1.0, norms_of([1 - 0.98**t]))]
    assert uncorrected == [55, 60]  # the first look at which there is one of 50 updates before


def test_it_waits_for_the_learning_rate():
    t, _ = settle(onebit.AutoFreeze(), 0.98, lambda t: [1.0], lr=lambda t: min(t, 300) / 300)
    assert t == 305


def test_bounds_come_from_the_run_or_the_rule():
    falling = lambda t: [0.99**t]  # noqa: E731
    assert settle(onebit.AutoFreeze(), 0.98, falling, total=1000)[0] == 250
    assert settle(onebit.AutoFreeze(max_steps=77), 0.98, falling)[0] == 77
    assert settle(onebit.AutoFreeze(min_steps=400), 0.98, lambda t: [1.0])[0] == 400
    t, watch = settle(onebit.AutoFreeze(), 0.98, lambda t: [1.0], total=1000)
    assert t == 150
    assert watch.look_back == 50


def test_a_short_run_shortens_the_look_back_and_draws_the_threshold_in():
    watch = Settling(onebit.AutoFreeze(), 0.999, 300)
    assert watch.look_back == 30
    assert watch.threshold == pytest.approx(0.96**0.03)
    drift = 0.96 ** (1 / 1000)  # exactly the drift that 0.96 over 1000 updates allows
    assert settle(onebit.AutoFreeze(), 0.999, lambda t: [(drift * 1.00001) ** t], total=300)[0] == 45
    assert settle(onebit.AutoFreeze(), 0.999, lambda t: [(drift * 0.9999) ** t], total=300)[0] == 75  # the most allowed


def test_the_log_says_what_the_sum_hides():
    _, watch = settle(onebit.AutoFreeze(), 0.98, lambda t: [100.0, 0.98**t, 1.0])
    assert "of 3 layers 1 still move" in watch.reason
    assert "a tenth of them to 0.36 or less" in watch.reason


@makers
def test_auto_freeze_decides_alike_on_all_workers_and_survives_a_checkpoint(make):
    rule = onebit.AutoFreeze(look_back=4, min_steps=6, max_steps=30, threshold=0.5)

    def work(comm):
        _, opt, _ = train(comm, built(make, freeze_step=rule), 35)
        p = nn.Parameter(torch.ones(8))
        whole, cut = (make([p], freeze_step=rule, comm=onebit.comm.Solo()) for _ in range(2))
        feed(whole, [p], 5, lambda t, shape: torch.ones(shape))
        cut.load_state_dict(whole.state_dict())
        feed(cut, [p], 1, lambda t, shape: torch.ones(shape))
        assert cut.freeze_step == 6
        return opt.freeze_step, opt.freeze_reason

    found = set(onebit.run_workers(3, work))
    assert len(found) == 1
    ((step, reason),) = found
    assert 6 <= step <= 30
    assert reason


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p: onebit.OneBitAdam([p], freeze_step=0.2), "total_steps"),
        (lambda p: onebit.OneBitAdam([p], freeze_step=1.5, total_steps=10), "freeze_step is 1.5"),
        (lambda p: onebit.OneBitAdam([p], freeze_step=True), "freeze_step is True"),
        (lambda p: onebit.OneBitAdam([p], freeze_step="auto"), "AutoFreeze"),
        (lambda p: onebit.OneBitAdam([p], total_steps=0), "total_steps is 0"),
        (lambda p: onebit.AutoFreeze(threshold=1.0), "threshold is 1.0"),
        (lambda p: onebit.AutoFreeze(look_back=0), "look_back is 0"),
        (lambda p: onebit.AutoFreeze(min_steps=9, max_steps=8), "must not be larger"),
        (lambda p: onebit.SwitchGuard(settle=0), "settle is 0"),
        (lambda p: onebit.SwitchGuard(max_growth=1.0), "above 1"),
        (lambda p: onebit.OneBitLamb([p]).refreeze(0), "refreeze steps is 0"),
        (lambda p: onebit.OneBitLamb([p]).observe(1.0), "without a guard"),
    ],
)
def test_impossible_settings_are_named(build, words):
    with pytest.raises(onebit.ConfigError, match=words):
        build(nn.Parameter(torch.ones(2)))


# -- back ------------------------------------------------------------------------------------------------------


@makers
@pytest.mark.parametrize(
    "settings", [{"state": "full"}, {"state": "compact"}, onebit.PAPER], ids=["full", "compact", "paper"]
)
@pytest.mark.parametrize("n", [1, 3])
def test_refreeze_goes_back_and_forth_and_still_learns(make, settings, n):
    def work(comm):
        seen = []

        def after(t, net, opt):
            seen.append(opt.stage is onebit.Stage.COMPRESSED)
            if t == 19:
                opt.refreeze(7)

        _, _, loss = train(comm, built(make, freeze_step=10, **settings), 80, after=after)
        assert seen == [False] * 9 + [True] * 11 + [False] * 6 + [True] * 54
        return loss

    first = sum(onebit.run_workers(n, lambda comm: train(comm, built(make, freeze_step=10, **settings), 1)[2]))
    assert sum(onebit.run_workers(n, work)) < 0.5 * first


@makers
@pytest.mark.parametrize("codec", [onebit.OneBit(), onebit.OneBit(scale="bucket")], ids=["layer", "bucket"])
def test_refreeze_loses_nothing_of_what_was_not_sent(make, codec):
    """The sum of all momenta, were it exact from the switch on, is kept: outputs and what is folded in."""
    beta1, steps = 0.8, 15

    def work(comm):
        params = [nn.Parameter(torch.ones(40, dtype=torch.float64)), nn.Parameter(torch.ones(9, dtype=torch.float64))]
        opt = make(params, lr=1e-3, freeze_step=3, betas=(beta1, 0.9), comm=comm, codec=codec)
        generator, shared = torch.Generator().manual_seed(comm.rank), torch.zeros(49, dtype=torch.float64)
        exact = None
        for t in range(3 + steps):
            if t == 3:
                exact = torch.cat(opt.decoded_momentum()).clone()
            before = torch.cat(opt.decoded_momentum())
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            mean = torch.cat([p.grad for p in params]) / comm.size
            comm.all_reduce(mean)
            opt.step()
            if t >= 3:  # sum over steps of output = sum of mean inputs - errors that are left
                shared += beta1 * before + (1 - beta1) * mean - torch.cat(opt.decoded_momentum())
        last = torch.cat(opt.decoded_momentum())
        opt.refreeze(5)
        folded = torch.cat(opt.decoded_momentum())
        torch.testing.assert_close(beta1 * (folded - last), shared, rtol=1e-9, atol=1e-12)
        assert float(shared.norm()) > 0.1 * float(exact.norm())  # else nothing was at stake
        return folded

    results = onebit.run_workers(3, work)
    assert all(torch.equal(results[0], other) for other in results)


def test_the_average_of_the_coefficient_goes_on_after_a_refreeze():
    """A layer whose coefficient is the same throughout has it as its average, however often the stages change."""
    p = nn.Parameter(torch.ones(16))
    opt = onebit.OneBitLamb([p], lr=0.0, freeze_step=3, betas=(0.0, 0.5), max_coeff=0.25)
    for _ in range(3):
        feed(opt, [p], 6, lambda t, shape: torch.ones(shape))
        assert opt.stage is onebit.Stage.COMPRESSED
        assert float(opt.state[p]["coeff_avg"]) == pytest.approx(0.25)
        opt.refreeze(4)


def test_bias_correction_counts_only_the_updates_of_the_variance():
    """A constant gradient is followed at lr in every stage, before and after a refreeze."""
    p = nn.Parameter(torch.zeros(64))
    opt = onebit.OneBitAdam([p], 0.1, 5, (0.9, 0.999), bias_correction=True)
    lengths = []
    for t in range(40):
        p.grad = torch.ones(64)
        before = p.detach().clone()
        opt.step()
        lengths.append(float((p.detach() - before).norm()))
        if t == 14:
            opt.refreeze(10)
    assert lengths == pytest.approx([0.8] * 40, rel=1e-3)


def test_dead_elements_are_dead_again_after_a_refreeze():
    def work(comm):
        p = nn.Parameter(torch.ones(16))
        opt = onebit.OneBitLamb([p], lr=0.01, freeze_step=2, comm=comm)
        half = torch.cat([torch.ones(8), torch.zeros(8)])
        feed(opt, [p], 6, lambda t, shape: half * (1 + comm.rank))
        opt.refreeze(3)
        assert bool((opt.state[p]["variance"][8:] == 0).all())
        feed(opt, [p], 6, lambda t, shape: half * (1 + comm.rank))
        assert opt.stage is onebit.Stage.COMPRESSED
        assert bool((p[8:] == 1).all())
        assert int((~opt._exchange.alive[:16]).sum()) == 8

    onebit.run_workers(2, work)


@makers
def test_refreeze_in_the_warm_up_moves_the_switch_and_is_saved(make):
    p = nn.Parameter(torch.ones(8))
    opt = make([p], freeze_step=4)
    feed(opt, [p], 3, lambda t, shape: torch.ones(shape))
    opt.refreeze(5)
    assert opt.freeze_step == 8
    again = make([p], freeze_step=4)
    again.load_state_dict(opt.state_dict())
    feed(again, [p], 4, lambda t, shape: torch.ones(shape))
    assert again.stage is onebit.Stage.WARMUP
    feed(again, [p], 1, lambda t, shape: torch.ones(shape))
    assert again.stage is onebit.Stage.COMPRESSED


# -- the look before, and the guard -----------------------------------------------------------------------------


def tiny_variance(t, shape):
    """Half of the elements have a gradient a million times smaller: a bad switch without a floor."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(t))
    g[::2] *= 1e-6
    return g


@makers
@pytest.mark.parametrize("momentum_scales", [True, False])
def test_the_preview_is_what_the_first_compressed_step_does(make, momentum_scales):
    found = []
    for freeze_step in (50, 5):
        p, q = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(16))
        codec = onebit.OneBit(scale="bucket")
        opt = make(
            [("p", p), ("q", q)], 1e-3, freeze_step, (0.9, 0.95), codec=codec, variance_floor=0.0, state="full",
            momentum_scales=momentum_scales,
        )  # fmt: skip
        feed(opt, [p, q], 5, tiny_variance)
        found.append(opt)
    before, after = found
    seen = before.preview_switch()
    momenta = before.decoded_momentum()
    feed(after, after.param_groups[0]["params"], 1, lambda t, shape: tiny_variance(4, shape))
    assert after.preview_switch() == {}
    errors = after._exchange.worker_error[:64], after._exchange.worker_error[64:80]
    for name, m, error, parameter in zip("pq", momenta, errors, after.param_groups[0]["params"], strict=True):
        x = 0.9 * m + 0.1 * tiny_variance(4, m.shape)
        lost = error / after.state[parameter].get("momentum_scale", 1.0)
        below = after.state[parameter]["variance"].sqrt() + 1e-8
        assert seen[name].error == pytest.approx(float(lost.norm() / x.norm()), rel=1e-4)
        assert seen[name].stretch == pytest.approx(float(((x - lost) / below).norm() / (x / below).norm()), rel=1e-4)
        assert seen[name].stretch > 10  # the elements of tiny variance


def test_the_floor_is_seen_in_the_preview_and_the_switch_is_announced(caplog):
    stretch = {}
    for floor in (0.0, 0.01):
        p = nn.Parameter(torch.ones(64))
        opt = onebit.OneBitLamb([("p", p)], 1e-3, 6, (0.9, 0.95), variance_floor=floor)
        with caplog.at_level(logging.INFO, "onebit"):
            feed(opt, [p], 5, tiny_variance)
            stretch[floor] = opt.preview_switch()["p"].stretch
            feed(opt, [p], 1, tiny_variance)
    assert stretch[0.01] < 0.01 * stretch[0.0]
    assert "before the switch: relative compression error" in caplog.text
    assert "times in p" in caplog.text


@makers
def test_a_guard_postpones_a_bad_switch_and_then_gives_in(make, caplog):
    guard = onebit.SwitchGuard(max_stretch=5.0, postpone_steps=3, max_postponements=2)

    def work(comm):
        stages, p = [], nn.Parameter(torch.ones(64))
        opt = make([p], 1e-3, 4, (0.9, 0.95), variance_floor=0.0, guard=guard, comm=comm)
        for t in range(12):
            # only one worker sees the elements of tiny variance; all must wait
            p.grad = tiny_variance(t, p.shape) if comm.rank == 1 else tiny_variance(t, p.shape) * 1e-3
            opt.step()
            stages.append(opt.stage is onebit.Stage.COMPRESSED)
        return stages

    with caplog.at_level(logging.WARNING, "onebit"):
        assert onebit.run_workers(2, work) == [[False] * 9 + [True] * 3] * 2
    assert caplog.text.count("the switch is postponed to update") == 2


@makers
def test_a_guard_goes_back_when_the_momentum_runs_away(make, caplog):
    guard = onebit.SwitchGuard(max_growth=3.0, settle=5, rewarm_steps=4, max_stretch=1e6)

    def work(comm):
        stages, p = [], nn.Parameter(torch.ones(64))
        opt = make([p], 1e-3, 4, (0.9, 0.95), guard=guard, comm=comm)
        for t in range(40):
            p.grad = tiny_variance(t, p.shape) * (1.0 if t < 15 else 30.0)
            opt.step()
            stages.append(opt.stage is onebit.Stage.COMPRESSED)
            check_replicas(comm, [p])
        return stages

    with caplog.at_level(logging.WARNING, "onebit"):
        (first, *others) = onebit.run_workers(2, work)
    assert all(other == first for other in others)
    back = first.index(False, 4)
    assert 15 <= back <= 18
    assert first[back : back + 5] == [False] * 4 + [True]
    assert all(first[back + 4 :])  # max_returns=1
    assert caplog.text.count("back to the warm-up stage at update") == 1


def test_a_guard_goes_back_when_the_loss_runs_away():
    guard = onebit.SwitchGuard(max_growth=2.0, settle=3, rewarm_steps=4, max_stretch=1e6)

    def work(comm):
        p = nn.Parameter(torch.ones(64))
        opt = onebit.OneBitLamb([p], 1e-3, 4, (0.9, 0.95), guard=guard, comm=comm)
        for t in range(20):
            p.grad = tiny_variance(t, p.shape)
            opt.observe((1.0 if t < 12 else 5.0) * (1 + comm.rank))
            opt.step()
            if opt.stage is onebit.Stage.WARMUP and t >= 4:
                return t
        return None

    assert onebit.run_workers(2, work) == [12, 12]  # the mean of 1, 1 and 5 is above 2


def test_without_a_reason_a_guard_does_nothing():
    guard = onebit.SwitchGuard()

    def flat_after(comm, guard):
        return flat(train(comm, built(onebit.OneBitLamb, freeze_step=8, guard=guard), 60)[0].parameters())

    with_guard, without = (onebit.run_workers(2, lambda comm, g=g: flat_after(comm, g)) for g in (guard, None))
    assert torch.equal(with_guard[0], without[0])


# -- what was found by trying to break it -----------------------------------------------------------------------


@makers
@pytest.mark.parametrize("state", ["full", "compact"])
def test_an_element_that_asked_to_wake_is_not_thrown_far_by_a_refreeze(make, state):
    def work(comm):
        p = nn.Parameter(torch.ones(16))
        opt = make([p], lr=0.01, freeze_step=3, betas=(0.9, 0.95), comm=comm, state=state)
        for t in range(10):
            p.grad = torch.ones(16)
            p.grad[8:] = 1.0 if t == 5 else 0.0  # once, and never again: a rare token's row
            opt.step()
            if t == 5:
                opt.refreeze(2)
        assert float((p.detach() - 1).abs().max()) < 0.2
        return opt.stage

    assert onebit.run_workers(2, work) == [onebit.Stage.COMPRESSED] * 2


def test_a_user_mask_costs_no_variance_at_a_refreeze():
    p = nn.Parameter(torch.ones(16))
    mask = torch.cat([torch.ones(8), torch.zeros(8)])
    opt = onebit.OneBitLamb([{"params": [p], "exp_avg_mask": mask}], lr=0.01, freeze_step=3, state="full")
    feed(opt, [p], 5, lambda t, shape: torch.ones(shape))
    before = opt.state[p]["variance"].clone()
    opt.refreeze(2)
    assert torch.equal(opt.state[p]["variance"], before)


def test_the_preview_sees_dead_elements_that_the_paper_preset_exchanges():
    p = nn.Parameter(torch.ones(16))
    half = torch.cat([torch.ones(8), torch.zeros(8)])
    seen = {}
    for name, settings in (("paper", onebit.PAPER), ("default", {})):
        opt = onebit.OneBitAdam([("p", p)], lr=0.01, freeze_step=9, **settings)
        feed(opt, [p], 4, lambda t, shape: half)
        seen[name] = opt.preview_switch()["p"].stretch
    assert seen["paper"] > 1e6
    assert seen["default"] == pytest.approx(1.0, rel=1e-3)


def test_a_loaded_state_follows_the_freeze_step_of_the_optimizer_that_loads_it(caplog):
    p = nn.Parameter(torch.ones(8))
    saved = {rule: onebit.OneBitAdam([p], freeze_step=rule, total_steps=100) for rule in (4, onebit.AutoFreeze())}
    for opt in saved.values():
        feed(opt, [p], 2, lambda t, shape: torch.ones(shape))
    for given in saved.values():
        for rule, expected in ((6, 6), (onebit.AutoFreeze(max_steps=9), None)):
            again = onebit.OneBitAdam([p], freeze_step=rule, total_steps=100)
            caplog.clear()
            again.load_state_dict(given.state_dict())
            assert again.freeze_step == expected
            assert "which is what counts now" in caplog.text
            feed(again, [p], 7, lambda t, shape: torch.ones(shape))
            assert again.stage is onebit.Stage.COMPRESSED


def test_the_least_number_of_updates_that_was_asked_for_is_kept():
    assert settle(onebit.AutoFreeze(min_steps=400), 0.98, lambda t: [1.0], total=1000)[0] == 400


def test_a_guard_compares_losses_of_any_sign_and_is_saved():
    guard = onebit.SwitchGuard(max_growth=2.0, settle=3, max_stretch=1e6)

    def run(opt, p, times, loss):
        for t in times:
            p.grad = tiny_variance(t, p.shape)
            opt.observe(loss)
            opt.step()
        return opt.stage

    def build():
        p = nn.Parameter(torch.ones(64))
        return p, onebit.OneBitLamb([p], 1e-3, 4, (0.9, 0.95), guard=guard)

    p, opt = build()
    assert run(opt, p, range(12), -1.0) is onebit.Stage.COMPRESSED
    q, again = build()
    again.load_state_dict(opt.state_dict())
    assert run(again, q, range(12, 15), 1.5) is onebit.Stage.WARMUP  # it knows the loss before the switch


def test_workers_with_different_guards_are_told():
    def work(comm):
        p = nn.Parameter(torch.ones(8))
        opt = onebit.OneBitLamb([p], freeze_step=4, comm=comm, guard=onebit.SwitchGuard() if comm.rank else None)
        p.grad = torch.ones(8)
        with pytest.raises(onebit.MismatchError, match="guard"):
            opt.step()

    onebit.run_workers(2, work)


def test_a_skipped_step_never_looks_like_a_run_gone_astray(monkeypatch):
    """Where the host learns of the verdict late, the norm of a step that does not count must not be looked at."""
    guard = onebit.SwitchGuard(settle=2, max_stretch=1e6)
    p = nn.Parameter(torch.ones(64))
    opt = onebit.OneBitLamb([p], 1e-3, 3, (0.9, 0.95), guard=guard)
    monkeypatch.setattr(type(opt), "_may_defer", lambda self: self._exchange is not None and not any(self._late))
    monkeypatch.setenv("ONEBIT_KERNELS", "reference")
    for t in range(10):
        p.grad = tiny_variance(t, p.shape) * (1e20 if t == 7 else 1.0)
        opt.step()
    assert opt.stats()["skipped_steps"] == 1
    assert opt.stage is onebit.Stage.COMPRESSED


def test_a_warm_up_state_loads_into_an_optimizer_that_is_further():
    p = nn.Parameter(torch.ones(8))
    early, late = (onebit.OneBitLamb([p], freeze_step=4) for _ in range(2))
    feed(early, [p], 2, lambda t, shape: torch.ones(shape))
    feed(late, [p], 6, lambda t, shape: torch.ones(shape))
    late.load_state_dict(early.state_dict())
    assert late.stage is onebit.Stage.WARMUP
    assert set(late._flat) == {"momentum", "variance"}
    feed(late, [p], 4, lambda t, shape: torch.ones(shape))
    assert late.stage is onebit.Stage.COMPRESSED


@makers
@pytest.mark.parametrize("skipped", [False, True], ids=["asked", "woken by a skipped step"])
@pytest.mark.parametrize("after", [0.0, 1e-4])
def test_a_layer_that_asked_to_wake_is_not_thrown_far_by_a_refreeze(make, skipped, after):
    p, q = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
    opt = make([p, q], lr=1e-3, freeze_step=3)

    def step(a, b):
        p.grad, q.grad = torch.full((16,), a), torch.full((16,), b)
        opt.step()

    for _ in range(5):
        step(0.1, 0.0)
    step(0.1, 0.1)
    if skipped:
        step(math.nan, 0.0)
    opt.refreeze(4)
    before = q.detach().clone()
    step(0.1, after)
    assert 0 < float((q.detach() - before).abs().max()) < 0.1


def test_the_loss_of_a_skipped_step_is_no_measure():
    guard = onebit.SwitchGuard(settle=3, max_stretch=1e6)
    p = nn.Parameter(torch.ones(64))
    opt = onebit.OneBitLamb([p], 1e-3, 6, (0.9, 0.95), guard=guard)
    for t in range(20):
        p.grad = tiny_variance(t, p.shape)
        opt.observe(math.nan if t in (4, 12) else 1.0)
        opt.step()
    assert opt.stage is onebit.Stage.COMPRESSED


@makers
def test_a_refreeze_under_way_survives_another_plan_for_the_run(make):
    p = nn.Parameter(torch.ones(8))
    opt = make([p], freeze_step=4, total_steps=100)
    feed(opt, [p], 6, lambda t, shape: torch.ones(shape))
    opt.refreeze(20)
    feed(opt, [p], 2, lambda t, shape: torch.ones(shape))
    for settings in ({"freeze_step": 4, "total_steps": 200}, {"freeze_step": onebit.AutoFreeze()}):
        again = make([p], **settings)
        again.load_state_dict(opt.state_dict())
        assert again.freeze_step == 26
        feed(again, [p], 18, lambda t, shape: torch.ones(shape))
        assert again.stage is onebit.Stage.COMPRESSED


def test_what_the_optimizer_did_before_a_load_does_not_matter():
    p = nn.Parameter(torch.ones(8))
    used, saved = (
        onebit.OneBitAdam([p], freeze_step=onebit.AutoFreeze(max_steps=5)),
        onebit.OneBitAdam([p], freeze_step=50),
    )
    feed(used, [p], 7, lambda t, shape: torch.ones(shape))
    assert used.freeze_step == 5
    feed(saved, [p], 2, lambda t, shape: torch.ones(shape))
    used.load_state_dict(saved.state_dict())
    assert used.freeze_step is None


@makers
def test_compact_state_of_doubles_is_refused_before_anything_happens(make):
    p = nn.Parameter(torch.ones(8, dtype=torch.float64))
    opt = make([p], freeze_step=2, state="compact")
    p.grad = torch.ones_like(p)
    with pytest.raises(onebit.ConfigError, match="state is 'compact'"):
        opt.step()
    assert bool((p == 1).all())


def test_errors_that_cannot_be_folded_in_are_reported(caplog):
    p = nn.Parameter(torch.ones(64))
    opt = onebit.OneBitLamb([p], 1e-3, 2, (0.0, 0.9))
    feed(opt, [p], 6, tiny_variance)
    opt.refreeze(3)
    assert "beta1 is 0, so the errors of 1 layers are dropped" in caplog.text
