"""Runs of DeepSpeed's 1-bit optimizers go on with ours, from states that the released package saved."""

import copy
import io
import logging
import math
import re
from pathlib import Path

import deepspeed_states
import pytest
import torch
from deepspeed_states import FREEZE_STEP, KINDS, LAMB_HYPER, NEXT, STEPS, WORKERS
from torch import nn

import onebit
from onebit import peer
from onebit.deepspeed import from_deepspeed, settings_from_deepspeed

needs_peer = pytest.mark.skipif(bool(peer.obstacle()), reason=peer.obstacle())
SOURCES = [
    pytest.param(deepspeed_states.recorded, id="recorded"),
    pytest.param(deepspeed_states.run, id="released", marks=needs_peer),
]
COUNT = FREEZE_STEP - 1  # updates in the warm-up
BETA2 = 0.99


def fresh(run, kind, comm=None, dtype=torch.float32, **settings):
    """New parameters with the values of the saved module, and a new optimizer; lr and betas are to be loaded."""
    xs = [nn.Parameter(w.clone().to(dtype)) for w in run["checkpoint"]["module"].values()]
    lamb = kind.startswith("lamb")
    settings = {"freeze_step": COUNT, **onebit.PAPER, **(LAMB_HYPER if lamb else {}), **settings}
    if kind == "adam":  # in float32 DeepSpeed exchanges Adam's tensors one by one
        settings["bucket_elements"] = 1
    return xs, (onebit.OneBitLamb if lamb else onebit.OneBitAdam)(xs, comm=comm, **settings)


def loaded(run, kind, comm=None, dtype=torch.float32, **settings):
    xs, opt = fresh(run, kind, comm, dtype, **settings)
    from_deepspeed(run["checkpoint"], opt)
    return xs, opt


def inner(checkpoint):
    """The state dict of the optimizer itself, which the wrapper for 16 bits has inside."""
    return checkpoint["optimizer"].get("optimizer_state_dict", checkpoint["optimizer"])


def go_on(run, kind, workers=WORKERS, **settings):
    """The parameters after each of the next updates."""

    def work(comm):
        xs, opt = loaded(run, kind, comm, **settings)
        after = []
        for grads in run["grads"]:
            for x, grad in zip(xs, grads[comm.rank % WORKERS], strict=True):
                x.grad = grad.clone().to(x.dtype)
            opt.step()
            after.append([x.detach().clone() for x in xs])
        return after, opt.stage.value, opt.stats()["step"]

    results = onebit.run_workers(workers, work)
    for after, *_ in results[1:]:
        for mine, other in zip(results[0][0], after, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    return results[0]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stage", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_updates_are_deepspeeds(source, kind, stage):
    """Through the switch, and in the compressed stage from zero errors, which DeepSpeed's own load leaves too."""
    run = source(kind, stage)
    after, ends, updates = go_on(run, kind)
    assert len(after) == NEXT
    assert (ends, updates) == ("compressed", STEPS[stage] - 1 + NEXT)
    for t, (mine, theirs) in enumerate(zip(after, run["params"], strict=True)):
        for i, (x, expected) in enumerate(zip(mine, theirs, strict=True)):
            assert (x - expected).abs().max() <= 1e-5 * expected.abs().max(), f"update {t}, parameter {i}"
    moved = [(new - old).norm() / old.norm() for new, old in zip(run["params"][-1], run["weights"], strict=True)]
    assert min(moved) > 1e-3


@needs_peer
@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_states_are_what_the_released_package_saves(kind):
    now, recorded = deepspeed_states.run(kind, "compressed"), deepspeed_states.recorded(kind, "compressed")
    assert now["checkpoint"]["optimizer"].keys() == recorded["checkpoint"]["optimizer"].keys()
    theirs, before = inner(now["checkpoint"]), inner(recorded["checkpoint"])
    assert theirs["param_groups"] == before["param_groups"]
    for number, state in theirs["state"].items():
        assert state.keys() == before["state"][number].keys()
        for key, value in state.items():
            torch.testing.assert_close(value, before["state"][number][key], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("part", ["checkpoint", "wrapper", "state"])
@pytest.mark.parametrize("kind", ["lamb", "adam16"])
def test_every_part_of_a_checkpoint_that_holds_the_state_will_do(kind, part):
    run = deepspeed_states.recorded(kind, "compressed")
    given = run["checkpoint"] if part == "checkpoint" else run["checkpoint"]["optimizer"]
    given = inner(run["checkpoint"]) if part == "state" else given
    before = copy.deepcopy(inner(run["checkpoint"])["state"])
    _, opt = fresh(run, kind)
    from_deepspeed(given, opt)
    _, other = loaded(run, kind)
    torch.testing.assert_close(inner(run["checkpoint"])["state"], before, rtol=0, atol=0)  # it is not changed
    for mine, theirs in zip(opt.state.values(), other.state.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("stage", STEPS)
def test_lambs_state_goes_where_it_belongs(stage):
    run = deepspeed_states.recorded("lamb", stage)
    xs, opt = loaded(run, "lamb")
    group, saved = opt.param_groups[0], inner(run["checkpoint"])["state"]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.01, (0.9, BETA2), 1e-8, 0.01)
    assert opt.stats()["step"] == STEPS[stage] - 1
    assert opt.stage.value == ("warmup" if stage == "warmup" else "compressed")
    assert opt.freeze_step == COUNT
    assert opt.freeze_reason == ("" if stage == "warmup" else f"{COUNT} updates, in DeepSpeed")
    for i, x in enumerate(xs):
        mine, theirs = opt.state[x], saved[i]
        assert torch.equal(mine["momentum"], theirs["exp_avg"])
        assert torch.equal(mine["variance"], theirs["exp_avg_sq"])
        assert float(mine["coeff_avg"]) == pytest.approx(theirs["lamb_coeff_freeze"])
        if stage == "warmup":
            assert float(mine["coeff_weight"]) == pytest.approx(1 - 0.8 ** (STEPS[stage] - 1))
            continue
        assert torch.equal(mine["fresh_variance"], theirs["exp_avg_sq_fresh"])
        assert float(mine["ratio"]) == pytest.approx(theirs["last_factor"])
        assert float(mine["coeff"]) == pytest.approx(theirs["last_factor"] * theirs["lamb_coeff_freeze"])
        if stage == "compressed":
            assert float(mine["momentum_scale"]) == pytest.approx(theirs["scaling_coeff"])
            assert theirs["last_factor"] != 1


def test_adams_bias_correction_knows_when_the_variance_was_frozen():
    _, opt = loaded(deepspeed_states.recorded("adam", "compressed"), "adam", bias_correction=True)
    assert (opt._frozen_at, opt.stats()["step"]) == (COUNT, STEPS["compressed"] - 1)


@pytest.mark.parametrize("kind", ["lamb16", "adam16"])
def test_float32_weights_become_master_weights_of_16_bit_parameters(kind):
    run = deepspeed_states.recorded(kind, "compressed")
    xs, opt = loaded(run, kind, dtype=torch.bfloat16)
    for x, weight in zip(xs, run["weights"], strict=True):
        assert torch.equal(opt.state[x]["master"], weight)
        assert torch.equal(x, weight.bfloat16())
        assert not torch.equal(weight, weight.bfloat16().float())
    xs, _ = loaded(run, kind)
    for x, weight in zip(xs, run["weights"], strict=True):
        assert torch.equal(x, weight)


@pytest.mark.parametrize("settings", [{"codec": onebit.OneBit()}, {"state": "compact"}, {"error_feedback": "scaled"}])
@pytest.mark.parametrize("workers", [1, 3])
def test_other_settings_and_another_number_of_workers_train_on(workers, settings):
    run = deepspeed_states.recorded("lamb", "compressed")
    after, stage, _ = go_on(run, "lamb", workers, **settings)
    assert stage == "compressed"
    for x, start in zip(after[-1], run["weights"], strict=True):
        assert 1e-3 < (x - start).norm() / start.norm() < 0.5


def test_what_was_loaded_can_be_saved_and_refrozen():
    run = deepspeed_states.recorded("lamb", "compressed")
    _, opt = loaded(run, "lamb")
    xs, other = fresh(run, "lamb")
    other.load_state_dict(opt.state_dict())
    for mine, theirs in zip(opt.state.values(), other.state.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    other.refreeze(2)
    assert other.stage is onebit.Stage.WARMUP
    for x, grad in zip(xs, run["grads"][0][0], strict=True):
        x.grad = grad.clone()
    other.step()
    other.step()
    assert other.stage is onebit.Stage.COMPRESSED


def test_the_floor_is_as_if_it_had_been_there_at_the_switch():
    """Elements below it, and the fresh variance with them: less what five updates have forgotten."""
    run = deepspeed_states.recorded("lamb", "compressed")
    saved = inner(run["checkpoint"])["state"][0]
    saved["exp_avg_sq"][0, 0] = 1e-12
    saved["exp_avg_sq_fresh"][0, 0] = 2e-12
    xs, opt = loaded(run, "lamb", variance_floor=0.01)
    mine, floor = opt.state[xs[0]], 0.01 * saved["exp_avg_sq"].mean()
    torch.testing.assert_close(mine["variance"][0, 0], floor)
    torch.testing.assert_close(mine["fresh_variance"][0, 0], floor * BETA2**5)
    assert torch.equal(mine["fresh_variance"][1:], saved["exp_avg_sq_fresh"][1:])


@pytest.mark.parametrize("kind", ["lamb", "adam"])
def test_dead_elements_lose_the_momentum_that_one_bit_gave_them(kind, caplog):
    run = deepspeed_states.recorded(kind, "compressed")
    saved = inner(run["checkpoint"])["state"][0]
    saved["exp_avg_sq"][3:5] = 0
    assert saved["exp_avg"][3:5].ne(0).all()
    xs, opt = loaded(run, kind, dead_elements="hold")
    assert not opt.decoded_momentum()[0][3:5].any()
    assert "16 elements that never had a gradient had momentum" in caplog.text
    before = xs[0].detach().clone()
    opt.param_groups[0]["weight_decay"] = 0.0
    for x, grad in zip(xs, run["grads"][0][0], strict=True):
        x.grad = grad.clone()
    xs[0].grad[3:5] = 0
    opt.step()
    assert torch.equal(xs[0][3:5], before[3:5])
    assert not torch.equal(xs[0][:3], before[:3])
    _, opt = loaded(run, kind)  # as the release has it
    assert torch.equal(opt.decoded_momentum()[0], saved["exp_avg"])


def test_coefficients_that_deepspeed_froze_are_not_corrected_again():
    run = deepspeed_states.recorded("lamb", "compressed")
    xs, opt = loaded(run, "lamb", coeff_bias_correction=True)
    saved = inner(run["checkpoint"])["state"][0]
    assert float(opt.state[xs[0]]["coeff_avg"]) == pytest.approx(saved["lamb_coeff_freeze"])


def test_a_later_freeze_step_is_a_second_warm_up(caplog):
    run = deepspeed_states.recorded("lamb", "compressed")
    xs, opt = loaded(run, "lamb", freeze_step=COUNT + 10)
    assert opt.stage is onebit.Stage.WARMUP
    assert f"it moves again until update {COUNT + 10}" in caplog.text
    assert float(opt.state[xs[0]]["coeff_avg"]) == pytest.approx(
        inner(run["checkpoint"])["state"][0]["lamb_coeff_freeze"]
    )


def test_an_earlier_freeze_step_freezes_now(caplog):
    run = deepspeed_states.recorded("lamb", "warmup")
    xs, opt = loaded(run, "lamb", freeze_step=5, coeff_bias_correction=True)
    assert opt.stage is onebit.Stage.COMPRESSED
    assert opt.freeze_reason == "7 updates, 5 were asked for"
    assert "had not frozen the variance by update 7" in caplog.text
    saved, mine = inner(run["checkpoint"])["state"][0], opt.state[xs[0]]
    assert torch.equal(mine["fresh_variance"], saved["exp_avg_sq"])  # DeepSpeed leaves it at zero
    assert float(mine["coeff_avg"]) == pytest.approx(saved["lamb_coeff_freeze"] / (1 - 0.8**7))


def test_adams_parameters_without_a_gradient_start_anew(caplog):
    run = deepspeed_states.recorded("adam", "compressed")
    inner(run["checkpoint"])["param_groups"][0]["params"].append(3)
    xs = [nn.Parameter(weight.clone()) for weight in (*run["weights"], torch.ones(8))]
    opt = onebit.OneBitAdam(xs, freeze_step=COUNT)
    with caplog.at_level(logging.INFO, "onebit"):
        from_deepspeed(run["checkpoint"], opt)
    assert "parameter 3 of group 0 has no DeepSpeed state" in caplog.text
    assert not opt.decoded_momentum()[3].any()
    assert opt.stats()["step"] == STEPS["compressed"] - 1


def test_the_log_explains_the_count_and_what_is_lost(caplog):
    run = deepspeed_states.recorded("lamb", "compressed")
    inner(run["checkpoint"])["param_groups"][0]["non_freeze"] = True
    inner(run["checkpoint"])["state"][1]["step"] -= 1
    with caplog.at_level(logging.INFO, "onebit"):
        loaded(run, "lamb", max_coeff=5.0)
    for said in [
        "its step 18 is update 17, since its first step moves nothing; compressed stage, switch at update 12",
        "worker and server errors start at zero",
        "max_coeff of group 0 was 2.0 in DeepSpeed and is 5.0 here",
        "group 0 has non_freeze in DeepSpeed",
        "DeepSpeed counted 17 to 18 steps",
    ]:
        assert caplog.text.count(said) == 1, said
    assert "min_coeff" not in caplog.text


def test_a_schedules_first_rate_comes_along():
    run = deepspeed_states.recorded("adam", "warmup")
    inner(run["checkpoint"])["param_groups"][0]["initial_lr"] = 0.5
    _, opt = loaded(run, "adam")
    assert opt.param_groups[0]["initial_lr"] == 0.5


def losses(comm, drop):
    """Of 300 steps of a small regression, the errors dropped after 150 of them or kept; and how large they were."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(0.3 * torch.randn(shape, generator=generator)) for shape in [(64, 32), (8, 64)]]
    teacher = 0.3 * torch.randn(8, 32, generator=generator)
    opt = onebit.OneBitLamb(weights, lr=0.01, freeze_step=60, comm=comm, **onebit.PAPER)
    generator.manual_seed(1 + comm.rank)
    found = []
    for step in range(300):
        x = torch.randn(32, 32, generator=generator)
        loss = (torch.tanh(x @ weights[0].T) @ weights[1].T - x @ teacher.T).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        found.append(loss.item())
        if step == 149:
            share = opt.stats()["worker_error_norm"] / opt.stats()["momentum_norm"]
            for error in (*opt._exchange.errors, opt._exchange.server_error) if drop else ():
                error.zero_()
    return torch.tensor(found), share


def test_errors_dropped_once_set_a_run_back_by_about_ten_updates():
    """They hold 1 / (1 - beta1) gradients' worth, as the momentum does. docs/deepspeed.md cites what is printed."""
    kept, dropped = (onebit.run_workers(4, lambda comm, drop=drop: losses(comm, drop)) for drop in (False, True))
    share, with_them, without = kept[0][1], *(sum(found for found, _ in runs) / 4 for runs in (kept, dropped))
    print(f"norm of worker 0's error over that of the momentum: {share:.2f}")
    assert share > 0.5
    assert torch.equal(with_them[:150], without[:150])
    for a, b in [(165, 200), (200, 250), (250, 300)]:
        now, then, later = with_them[a:b].mean(), with_them[a - 10 : b - 10].mean(), without[a:b].mean()
        print(
            f"steps {a}-{b}: loss {now:.4f} with errors, {later:.4f} without; with errors 10 steps before: {then:.4f}"
        )
        assert now < later < with_them[a - 20 : b - 20].mean()


# -- errors ---------------------------------------------------------------------------------------------------------


def drop(key, number=1):
    return lambda checkpoint: inner(checkpoint)["state"][number].pop(key)


def put(key, value):
    return lambda checkpoint: checkpoint["optimizer"].__setitem__(key, value)


def reshape(key):
    def change(checkpoint):
        state = inner(checkpoint)["state"][0]
        state[key] = state[key].flatten()

    return change


BROKEN = {
    "zero": ("lamb", lambda c: c.update(optimizer=None), "'optimizer' is None: ZeRO"),
    "zero's state": ("lamb", put("zero_stage", 1), "has zero_stage: it is a state of ZeRO"),
    "bf16's state": ("lamb", put("base_optimizer_state", {}), "DeepSpeed's bf16 optimizer"),
    "a list": ("lamb", lambda c: c.update(optimizer=[1]), "entry 'optimizer' is a list"),
    "a module": ("lamb", lambda c: c.pop("optimizer"), "whose keys are ds_config, ds_version, module"),
    "empty": ("lamb", lambda c: inner(c)["state"].clear(), "saved before the first step"),
    "step 0": ("lamb", lambda c: [s.update(step=0) for s in inner(c)["state"].values()], "has step 0"),
    "lacks momentum": ("lamb", drop("exp_avg"), "parameter 1 of group 0 of the DeepSpeed state lacks exp_avg;"),
    "lacks a factor": ("lamb", drop("last_factor"), "lacks last_factor"),
    "lacks variance": ("adam", drop("exp_avg_sq", 0), "lacks exp_avg_sq"),
    "lacks a layer": (
        "lamb",
        lambda c: inner(c)["state"].pop(2),
        "parameter 2 of group 0 of the DeepSpeed state",
    ),
    "lacks lr": ("lamb", lambda c: inner(c)["param_groups"][0].pop("lr"), "group 0 of the DeepSpeed state lacks lr"),
    "bad lr": ("lamb", lambda c: inner(c)["param_groups"][0].update(lr=-1.0), "lr is -1.0"),
    "groups": ("lamb", lambda c: inner(c)["param_groups"].append({}), "has 2 parameter groups and the optimizer 1"),
    "fewer": ("lamb", lambda c: inner(c)["param_groups"][0]["params"].pop(), "has 2 parameters in the DeepSpeed state"),
    "shape": (
        "lamb",
        reshape("exp_avg_sq_fresh"),
        r"shape \(8, 8\), its exp_avg_sq_fresh in the D.* \(64,\)",
    ),
    "no tensor": ("lamb", lambda c: inner(c)["state"][0].update(exp_avg=3), "in the DeepSpeed state int"),
    "weights": ("lamb16", lambda c: c["optimizer"]["fp32_groups"].clear(), "has float32 weights of 0 groups, none of"),
    "weight": ("lamb16", lambda c: c["optimizer"]["fp32_groups"][0].pop(), "has 3 parameters in the DeepSpeed state"),
    "vector": (
        "adam16",
        lambda c: inner(c)["state"][0].update(exp_avg=torch.zeros(127)),
        "is one vector of 127 elements; the 3 parameters here have 128",
    ),
    "vectors": (
        "adam16",
        lambda c: inner(c)["state"][0].update(exp_avg_sq=torch.zeros(127)),
        "vectors of group 0 in the DeepSpeed state have 128 and 127 elements",
    ),
    "0/1": (
        "adam",
        lambda c: inner(c)["state"][0].update(var_interval=1),
        "the state is DeepSpeed's ZeroOneAdam",
    ),
    "torch's": ("adam16", drop("corrected_tensor_size", 0), "not of a DeepSpeed 1-bit optimizer .its keys are exp"),
    "ours": ("lamb", lambda c: inner(c).update(onebit={}), "the state is onebit's own"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_loaded_is_named_and_nothing_is_changed(name):
    kind, change, message = BROKEN[name]
    run = deepspeed_states.recorded(kind, "compressed")
    whole = copy.deepcopy(run["checkpoint"])
    change(run["checkpoint"])
    xs, opt = fresh(run, kind)
    before, groups = [x.detach().clone() for x in xs], copy.deepcopy(opt.state_dict())
    with pytest.raises(onebit.ConfigError, match=message):
        from_deepspeed(run["checkpoint"], opt)
    assert all(torch.equal(x, old) for x, old in zip(xs, before, strict=True))
    assert opt.state_dict() == groups
    from_deepspeed(whole, opt)
    assert opt.stage is onebit.Stage.COMPRESSED


def test_a_load_that_fails_halfway_is_taken_back(monkeypatch):
    run = deepspeed_states.recorded("lamb16", "compressed")
    xs, opt = fresh(run, "lamb16", dtype=torch.bfloat16)
    before, saved = [x.detach().clone() for x in xs], copy.deepcopy(opt.state_dict())

    def fail(self):
        raise MemoryError

    monkeypatch.setattr(type(opt), "_allocate_compressed", fail)
    with pytest.raises(MemoryError):
        from_deepspeed(run["checkpoint"], opt)
    assert opt.state_dict() == saved
    assert opt.freeze_reason == ""
    assert all(torch.equal(x, old) for x, old in zip(xs, before, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze_step": onebit.AutoFreeze()}, "freeze_step is a rule"),
        ({"ratio": "momentum"}, "ratio is 'momentum' and the DeepSpeed state is compressed"),
    ],
)
def test_settings_that_the_state_has_no_start_for_are_refused(settings, message):
    run = deepspeed_states.recorded("lamb", "compressed")
    with pytest.raises(onebit.ConfigError, match=message):
        loaded(run, "lamb", **settings)


def test_only_a_new_optimizer_of_the_same_kind_loads():
    lamb, adam = deepspeed_states.recorded("lamb", "compressed"), deepspeed_states.recorded("adam", "compressed")
    with pytest.raises(onebit.ConfigError, match="the state is of OnebitAdam; OneBitLamb goes on"):
        from_deepspeed(adam["checkpoint"], fresh(lamb, "lamb")[1])
    with pytest.raises(onebit.ConfigError, match="the state is of OnebitLamb; OneBitAdam goes on from"):
        from_deepspeed(lamb["checkpoint"], fresh(adam, "adam")[1])
    _, opt = loaded(lamb, "lamb")
    with pytest.raises(onebit.ConfigError, match="has state already"):
        from_deepspeed(lamb["checkpoint"], opt)
    with pytest.raises(onebit.ConfigError, match="the optimizer is SGD"):
        from_deepspeed(lamb["checkpoint"], torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    xs, opt = fresh(lamb, "lamb")
    xs[1].device_mesh = xs[1].placements = "as of a DTensor"
    with pytest.raises(onebit.ConfigError, match="parameters are sharded"):
        from_deepspeed(lamb["checkpoint"], opt)
    with pytest.raises(onebit.ConfigError, match="the checkpoint is a list"):
        from_deepspeed([lamb["checkpoint"]], fresh(lamb, "lamb")[1])


# -- configurations ---------------------------------------------------------------------------------------------------


def test_a_configuration_becomes_our_arguments(caplog):
    params = {"lr": 0.1, "betas": [0.8, 0.9], "freeze_step": 23000, "factor_max": 5.0, "coeff_beta": 0.7}
    params |= {"cuda_aware": False, "comm_backend_name": "nccl", "bias_correction": False}
    config = {"train_batch_size": 8, "optimizer": {"type": "OneBitLamb", "params": params}}
    with caplog.at_level(logging.INFO, "onebit"):
        found = settings_from_deepspeed(config)
    expected = {"lr": 0.1, "betas": (0.8, 0.9), "freeze_step": 22999, "factor_max": 5.0, "coeff_beta": 0.7}
    expected["growth_max"] = math.inf
    assert found == expected == settings_from_deepspeed(config["optimizer"])
    assert "not taken over: cuda_aware, comm_backend_name, bias_correction" in caplog.text
    onebit.OneBitLamb([nn.Parameter(torch.ones(1))], **found)
    assert settings_from_deepspeed({"type": "onebitadam"}) == {"freeze_step": 99999}
    assert settings_from_deepspeed({"type": "onebitlamb"}) == {
        "freeze_step": 99999, "factor_max": 4.0, "growth_max": math.inf,
    }  # fmt: skip
    assert settings_from_deepspeed({"type": "OneBitAdam", "params": {"freeze_step": 1}}) == {"freeze_step": 1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "Lamb", "params": {}}}, "optimizer is Lamb"),
        ({"train_batch_size": 8}, "optimizer is not named"),
        ({"optimizer": "OneBitLamb"}, "optimizer is not named"),
        ({"type": "OneBitAdam", "params": {"max_coeff": 1.0, "lr": 0.1}}, "sets max_coeff of OnebitAdam"),
        ({"type": "OneBitLamb", "params": {"freeze_step": "100"}}, "freeze_step is '100'"),
    ],
)
def test_other_configurations_are_refused(config, message):
    with pytest.raises(onebit.ConfigError, match=message):
        settings_from_deepspeed(config)


class Net(nn.Module):
    """With the parameters of the recorded runs."""

    def __init__(self):
        super().__init__()
        for i, shape in enumerate(deepspeed_states.SHAPES):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape)))

    def forward(self, x):
        return self.p2 @ (torch.tanh(self.p0 @ x).repeat(2)[:12] + self.p1[:12])


def test_the_documented_example_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "deepspeed.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run = deepspeed_states.recorded("lamb16", "compressed")
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save(run["checkpoint"], buffer)
    Path("mp_rank_00_model_states.pt").write_bytes(buffer.getvalue())
    data = [torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    names = {"build_model": Net, "loader": data}
    exec(compile(example, "docs/deepspeed.md", "exec"), names)
    optimizer = names["optimizer"]
    assert optimizer.stats()["step"] == STEPS["compressed"] - 1 + len(data)
    assert optimizer.stage is onebit.Stage.COMPRESSED
    assert optimizer.freeze_step == COUNT
