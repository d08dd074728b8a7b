"""What PyTorch's own tests of optimizers ask, asked of ours: one process, and both stages of the 1-bit ones.

`KNOWN` are the checks of PyTorch's test/test_optim.py, class TestOptimRenewed. `@covers` names those that a test here
stands for, `NOT_APPLICABLE` says why the others have none. The tests without `@covers` are our own additions.
"""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import optim_db

import onebit

(ADAMW,) = (info for info in optim_db if info.optim_cls is torch.optim.AdamW)
FOREIGN = {"maximize", "amsgrad", "foreach", "fused", "capturable"}
"""Flags that ours do not have; see WRONG."""
X = torch.linspace(-1.5, 2, 5)
COVERED: set[str] = set()
at_every_stage = pytest.mark.parametrize("cut", [0, 1, 2, 5])  # steps: none, warm-up, at the switch, compressed


def covers(*checks):
    COVERED.update(f"test_{check}" for check in checks)
    return lambda test: test


@pytest.fixture(params=[onebit.Lamb, onebit.OneBitLamb, onebit.OneBitAdam], ids=lambda kind: kind.__name__)
def make(request):
    """make(params, **settings) builds the optimizer."""
    stages = {} if request.param is onebit.Lamb else {"freeze_step": 2}
    return lambda params, **settings: request.param(params, **stages, **settings)


def parameters(contiguous=True):
    """A weight [10, 5] and a bias [10], always the same."""
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randn(shape, generator=generator)[..., 0] for shape in [(10, 5, 2), (10, 2)]]
    return [nn.Parameter(half.contiguous() if contiguous else half) for half in halves]


def start(make, steps=0, group=list, **settings):
    """An optimizer that has taken some steps, and its parameters; `group` makes groups or names of the parameters."""
    params = parameters()
    opt = make(group(params), **settings)
    run(opt, params, steps)
    return opt, params


def groups(params):
    return [{"params": [p], "lr": lr} for p, lr in zip(params, (0.01, torch.tensor(0.02)), strict=True)]


def named(params):
    return groups(zip(("weight", "bias"), params, strict=True))


def closure_of(opt, params):
    def closure():
        opt.zero_grad()
        loss = ((params[0] @ X + params[1]) ** 2).sum()
        loss.backward()
        return loss

    return closure


def run(opt, params, steps, schedulers=()):
    """Take steps; return the loss before each."""
    losses = []
    for _ in range(steps):
        losses.append(opt.step(closure_of(opt, params)).item())
        for scheduler in schedulers:
            scheduler.step(*losses[-1:] if isinstance(scheduler, ReduceLROnPlateau) else ())
    return losses


def same(a, b):
    """Whether two nested structures are equal, tensors to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


WRONG = {"lr": [-1.0, math.nan, torch.ones(2)], "betas": [(1.0, 0.0), (0.0, 1.0)], "eps": [-1e-8], "weight_decay": [-1]}
WRONG |= {flag: [True] for flag in ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")}


@covers("errors")
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]], ids=str)
def test_wrong_settings_are_refused(make, name, value):
    with pytest.raises(TypeError if value is True else ValueError, match=rf"\b{name}\b"):
        make(parameters(), **{name: value})


@covers("errors")
@pytest.mark.filterwarnings("ignore:.*duplicate parameters")  # torch's own, before our error
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda p, q: p, TypeError, "iterable of Tensors"),
        (lambda p, q: [p, p], ValueError, "twice in a group"),
        (lambda p, q: [{"params": [p]}, {"params": [p]}], ValueError, "more than one parameter group"),
        (lambda p, q: [("weight", p), q], ValueError, "names are missing"),
        (lambda p, q: [{"params": [p]}, {"params": [("bias", q)]}], ValueError, "with/without names"),
        (lambda p, q: [p, nn.Parameter(q.detach().to("meta"))], ValueError, "device"),
        (lambda p, q: [nn.Parameter(torch.ones(3, dtype=torch.complex64))], ValueError, "complex64"),
    ],
)
def test_wrong_parameters_are_refused(make, wrong, error, words):
    with pytest.raises(error, match=words):
        make(wrong(*parameters())).step()


def test_sparse_gradients_are_refused(make):
    weight, _ = parameters()
    weight.grad = torch.ones(10, 5).to_sparse()
    with pytest.raises(onebit.ConfigError, match="only dense gradients"):
        make([weight]).step()


@covers("optimizer_can_be_printed")
def test_print(make):
    assert all(words in repr(make(groups(parameters()))) for words in ("Parameter Group 1", "lr: 0.01", "betas: (0.9"))


@covers("forloop_goes_right_direction", "param_group_with_lrscheduler_goes_right_direction")
@pytest.mark.parametrize("schedules", [[], [lambda opt: StepLR(opt, 10, 0.9), ReduceLROnPlateau]], ids=["", "sched"])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("group", [list, groups])
@pytest.mark.parametrize("settings", [{}, {"lr": 0.01}, {"weight_decay": 0.1}], ids=str)
def test_the_loss_falls(make, contiguous, schedules, group, settings):
    params = parameters(contiguous)
    opt = make(group(params), **settings)
    losses = run(opt, params, 20, [schedule(opt) for schedule in schedules])
    assert losses[-1] < losses[0]
    assert params[0].is_contiguous() is contiguous


def test_a_quadratic_is_almost_solved(make):
    opt, params = start(make, lr=0.05, betas=(0.9, 0.9))
    losses = run(opt, params, 400, [StepLR(opt, 50, 0.5)])
    assert losses[-1] < 1e-3 * losses[0]


@covers("tensor_lr")
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_lr_may_be_a_tensor_and_change_in_place(make, shape):
    rate = torch.full(shape, 0.01)
    (opt, params), (other, again) = start(make, lr=rate), start(make, lr=float(rate))
    assert run(opt, params, 5) == run(other, again, 5)
    rate.mul_(0.5)
    other.param_groups[0]["lr"] *= 0.5
    assert run(opt, params, 5) == run(other, again, 5)
    assert same(params, again)


@covers("param_groups_lr", "param_groups_weight_decay")
@pytest.mark.parametrize("own", [{"lr": 1e-28}, {"weight_decay": 0.5}, {"betas": (0.5, 0.9)}, {"eps": 0.1}], ids=str)
def test_each_group_has_its_own_settings(make, own):
    ends = []
    for settings in [({}, {}), ({}, own), (own, own)]:
        params = parameters()
        first, second = ({"params": [p], **group} for p, group in zip(params, settings, strict=True))
        opt = make([first])
        opt.add_param_group(second)
        for _ in range(6):  # gradients that do not depend on the parameters, so that no group touches another
            for p in params:
                p.grad = torch.linspace(-1, 1, p.numel()).view_as(p)
            opt.step()
        ends.append(params)
    plain, mixed, other = ends
    assert same(mixed, [plain[0], other[1]])
    assert not any(map(torch.equal, plain, other))
    assert same(other, parameters()) is ("lr" in own)


@covers("step_is_noop_when_params_have_no_grad", "step_is_noop_for_zero_grads")
@pytest.mark.parametrize(("gradient", "decay"), [(None, 0), (None, 0.1), (torch.zeros_like, 0)])
def test_without_gradients_nothing_moves(make, gradient, decay):
    params = parameters()
    opt = make([params[0], params[1].requires_grad_(gradient is not None)], weight_decay=decay)
    for _ in range(4):
        for p in params:
            p.grad = gradient and gradient(p)
        assert opt.step(lambda: 1.0) == 1.0
    assert same(params, parameters())


def test_gradients_need_not_be_contiguous(make):
    (weight, _), (again, _) = parameters(), parameters()
    opt, other = make([weight]), make([again])
    for step in range(5):
        again.grad = torch.linspace(-1, 1 + step, 50).view(10, 5)
        weight.grad = again.grad.t().contiguous().t()
        assert not weight.grad.is_contiguous()
        opt.step()
        other.step()
    assert torch.equal(weight, again)


def test_closures_and_steps_under_no_grad(make):
    (opt, params), (other, again) = start(make), start(make)
    for _ in range(5):
        with torch.no_grad():  # the closure needs gradients all the same
            loss = opt.step(closure_of(opt, params))
        assert torch.equal(loss, closure_of(other, again)())
        assert other.step() is None
    assert same(params, again)
    assert all(p.is_leaf and p.requires_grad for p in params)


@covers("non_empty_state")
@at_every_stage
def test_every_parameter_has_state_after_a_step(make, cut):
    opt, params = start(make, cut)
    assert all(bool(opt.state.get(p)) is (cut > 0) for p in params)
    assert (opt.stage is onebit.Stage.COMPRESSED) is (opt.compresses and cut >= 2)


def test_the_profiler_shows_steps_by_name(make):
    opt, params = start(make)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(opt, params, 3)
    assert {e.key: e.count for e in profile.key_averages()}[f"Optimizer.step#{type(opt).__name__}.step"] == 3


@covers("state_dict_deterministic", "can_load_from_to_named_state_dict", "save_load_equality_with_weights_only")
@pytest.mark.parametrize("target", [groups, named])
@pytest.mark.parametrize("source", [groups, named])
@at_every_stage
def test_a_saved_state_goes_on_alike(make, cut, source, target):
    opt, params = start(make, cut, source)
    opt.param_groups[0]["lr"] = 0.03
    (again, saved), file = copy.deepcopy((params, opt.state_dict())), io.BytesIO()
    torch.save(saved, file)
    given, other = torch.load(io.BytesIO(file.getvalue()), weights_only=True), make(target(again))
    other.load_state_dict(given)
    assert same(given, saved)
    assert run(opt, params, 5) == run(other, again, 5)
    assert same((params, opt.state_dict()["state"]), (again, other.state_dict()["state"]))
    names = [None, None] if source is target is groups else [["weight"], ["bias"]]
    assert [group.get("param_names") for group in other.state_dict()["param_groups"]] == names


@covers("deepcopy_copies_all_public_attrs")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@at_every_stage
def test_a_copy_goes_on_alike_and_on_its_own(make, cut, how):
    opt, params = start(make, cut, named)
    other, again = copy.deepcopy((opt, params)) if how == "deepcopy" else pickle.loads(pickle.dumps((opt, params)))
    public, copied = ({name for name in vars(o) if name[0] != "_"} for o in (opt, other))
    before, losses = copy.deepcopy((opt.state_dict(), params)), run(other, again, 5)
    assert same((opt.state_dict(), params), before)
    assert losses == run(opt, params, 5)
    assert same((opt.state_dict(), params), (other.state_dict(), again))
    assert public == copied


@covers("step_pre_hook", "step_post_hook", "step_all_hooks")
def test_hooks_of_a_step_run_in_order_until_they_are_removed(make):
    opt, params = start(make)
    calls, order = [], [register_optimizer_step_pre_hook, opt.register_step_pre_hook]
    order += [opt.register_step_post_hook, register_optimizer_step_post_hook]
    hooks = [add(lambda *_, i=i: calls.append((i, same(params, parameters())))) for i, add in enumerate(order)]
    run(opt, params, 1)
    for hook in hooks:
        hook.remove()
    run(opt, params, 1)
    assert calls == [(0, True), (1, True), (2, False), (3, False)]
    opt.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 7.0), {}))  # another closure
    assert opt.step() == 7.0


@covers("state_dict_pre_hook", "state_dict_post_hook", "state_dict_pre_post_hook")
def test_hooks_of_state_dict(make):
    opt, _ = start(make, 3)
    plain = opt.state_dict()
    opt.register_state_dict_post_hook(lambda opt, saved: {**saved, "note": saved["state"].pop("note", None)})
    assert same(opt.state_dict(), {**plain, "note": None})
    opt.register_state_dict_pre_hook(lambda opt: opt.state.update(note=1))
    assert same(opt.state_dict(), {**plain, "note": 1})


def test_a_hook_of_state_dict_sees_all_of_it_and_may_replace_it(make):
    opt, _ = start(make, 3)
    keys = sorted(opt.state_dict())
    opt.register_state_dict_post_hook(lambda opt, saved: {"keys": sorted(saved)})
    assert opt.state_dict() == {"keys": keys}


def set_rate(lr):
    return lambda opt, saved: {**saved, "param_groups": [{**group, "lr": lr} for group in saved["param_groups"]]}


@covers("load_state_dict_pre_hook_and_prepend")
def test_hooks_before_a_load_may_replace_the_state(make):
    (opt, _), saved = start(make), start(make, 3)[0].state_dict()
    for lr, prepend, expected in [(0.002, False, 0.002), (0.003, True, 0.002), (0.004, False, 0.004)]:
        opt.register_load_state_dict_pre_hook(set_rate(lr), prepend=prepend)
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["lr"] == expected


@covers("load_state_dict_post_hook", "load_state_dict_pre_post_hook")
def test_hooks_after_a_load_see_what_was_loaded_and_may_add_to_the_state(make):
    (opt, _), saved = start(make), start(make, 3)[0].state_dict()
    opt.register_load_state_dict_pre_hook(set_rate(0.002))
    opt.register_load_state_dict_post_hook(lambda o: o.state.update(seen=(o.param_groups[0]["lr"], o.stats()["step"])))
    opt.load_state_dict(saved)
    assert opt.state["seen"] == (0.002, 3)


# The names that the file has had from PyTorch 2.6 to 2.9, without the prefix "test_".


OWN_INPUTS = [i for i in ADAMW.optim_inputs_func(device="cpu") if not FOREIGN & i.kwargs.keys()]
OWN_ERRORS = [
    e
    for e in ADAMW.optim_error_inputs_func("cpu", torch.float32)
    if not FOREIGN & e.optimizer_error_input.kwargs.keys() and "both Tensors" not in e.error_regex  # ours take both
]


@pytest.mark.parametrize("given", OWN_INPUTS, ids=lambda given: given.desc)
def test_pytorchs_inputs_for_adamw_go_downhill(make, given):
    opt, params = start(make, **given.kwargs)
    losses = run(opt, params, 40)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("wrong", OWN_ERRORS, ids=lambda wrong: wrong.optimizer_error_input.desc)
def test_pytorchs_wrong_inputs_for_adamw_are_refused(make, wrong):
    given = wrong.optimizer_error_input
    params = parameters() if given.params is None else given.params
    with pytest.raises((TypeError, ValueError, onebit.ConfigError)):
        make(params, **given.kwargs)


def test_pytorchs_lists_are_not_empty():
    assert len(OWN_INPUTS) >= 3
    assert len(OWN_ERRORS) >= 6


CHECKS = """
adamw_serialization load_state_dict_post_hook optimizer_can_be_printed state_dict_deterministic state_dict_pre_post_hook
can_load_from_to_named_state_dict deepcopy_copies_all_public_attrs foreach_large_tensor fused_does_not_step_if_foundinf
can_load_older_state_dict complex_2d defaults_changed_to_foreach param_groups_weight_decay state_dict_with_cuda_params
complex fused_large_tensor load_nontensor_step mixed_device_dtype param_groups_lr rosenbrock_sparse state_dict_pre_hook
cpu_load_state_dict errors foreach_matches_forloop fused_cpu_matches_cuda peak_memory_foreach state_dict_post_hook
forloop_goes_right_direction fused_error_on_params_on_meta load_state_dict_pre_post_hook step_is_noop_for_zero_grads
forloop_goes_right_direction_multigpu second_order_optims_return_consistent_types step_is_noop_when_params_have_no_grad
fused_matches_forloop optim_infos_do_not_specify_global_cliquey_kwargs param_group_with_lrscheduler_goes_right_direction
load_state_dict_pre_hook_and_prepend save_load_equality_with_weights_only set_default_dtype_works_with_foreach tensor_lr
non_empty_state step_all_hooks step_post_hook step_pre_hook
"""
KNOWN = tuple(f"test_{check}" for check in CHECKS.split())
REASONS = {
    "its flag does not exist here, see WRONG": "cpu_load_state_dict defaults_changed_to_foreach foreach_large_tensor "
    "foreach_matches_forloop fused_cpu_matches_cuda fused_does_not_step_if_foundinf fused_error_on_params_on_meta "
    "fused_large_tensor fused_matches_forloop peak_memory_foreach set_default_dtype_works_with_foreach",
    "refused: complex parameters, sparse gradients": "complex complex_2d rosenbrock_sparse",
    "all parameters of one optimizer are on one device": "forloop_goes_right_direction_multigpu mixed_device_dtype",
    "needs a GPU": "state_dict_with_cuda_params",
    "about PyTorch's own list of optimizers": "optim_infos_do_not_specify_global_cliquey_kwargs",
    "about states that Adam and AdamW exchange": "adamw_serialization",
    "about flags that groups got in later releases; ours have got none": "can_load_older_state_dict",
    "the number of updates is a plain number, in the entry 'onebit'": "load_nontensor_step",
    "ours are of first order": "second_order_optims_return_consistent_types",
}
NOT_APPLICABLE = {f"test_{check}": reason for reason, checks in REASONS.items() for check in checks.split()}


def test_every_known_check_is_made_or_not_applicable():
    assert sorted([*COVERED, *NOT_APPLICABLE]) == sorted(KNOWN)  # each once
