"""The algorithm's functions: against other people's LAMBs, and case by case against the formulas."""

import math
import re
from pathlib import Path

import pytest
import pytorch_optimizer
import torch
import torch_optimizer
from torch import nn

import onebit
from onebit import lamb
from onebit.layout import FlatLayout

ROOT = Path(__file__).parent.parent
SHAPES = [(6, 5), (5,), (3, 4, 2), ()]


def trajectory(make, steps=100):
    """Parameters after `steps` steps of an optimizer on fixed random gradients."""
    generator = torch.Generator().manual_seed(7)
    xs = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    opt = make(xs)
    for _ in range(steps):
        for x in xs:
            x.grad = torch.randn(x.shape, generator=generator) + 0.1 * x.detach()
        opt.step()
    return xs


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lamb_equals_pytorch_optimizer_in_the_same_dialect(weight_decay):
    def theirs(xs):
        opt = pytorch_optimizer.Lamb(
            xs, lr=0.01, eps=1e-8, weight_decay=weight_decay, weight_decouple=False, adam_debias=True
        )
        opt.clamp = math.inf
        return opt

    def ours(xs):
        return onebit.Lamb(xs, lr=0.01, weight_decay=weight_decay, min_coeff=0.0, max_coeff=math.inf)

    same(trajectory(ours), trajectory(theirs))


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lamb_equals_torch_optimizer_in_the_same_dialect(weight_decay, bias_correction):
    def theirs(xs):
        return torch_optimizer.Lamb(
            xs, lr=0.01, eps=1e-6, weight_decay=weight_decay, clamp_value=1e9, debias=bias_correction
        )

    def ours(xs):
        return onebit.Lamb(
            xs, 0.01, eps=1e-6, weight_decay=weight_decay, min_coeff=0.0, max_coeff=math.inf,
            bias_correction=bias_correction,
        )  # fmt: skip

    same(trajectory(ours), trajectory(theirs))


def test_coefficient_is_clipped_and_is_one_where_a_norm_is_zero():
    rule = lamb.CoeffRule(0.5, 2.0, 0.9)
    x, u = torch.tensor([1.0, 8.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 8.0, 1.0, 0.0])
    coeff, defined = lamb.trust_ratio(x, u, rule)
    assert coeff.tolist() == [1.0, 2.0, 0.5, 1.0, 1.0]
    assert defined.tolist() == [True, True, True, False, False]


def test_momentum_scales_equalise_rms_and_pass_over_silent_layers():
    scales = lamb.momentum_scales(torch.tensor([2.0, 8.0, 0.0, 0.0]), torch.tensor([4.0, 4.0, 9.0, 0.0]))
    assert scales.tolist() == [2.5, 0.625, 1.0, 1.0]  # rms 1 and 4, their mean 2.5


def test_floor_is_a_share_of_the_layers_own_mean():
    run = FlatLayout([(4,), (2,)], 1).runs[0]
    v = torch.tensor([0.0, 1.0, 1.0, 2.0, 0.0, 1e-6])
    lamb.freeze_variance(v, None, run, 0.25)
    assert v.tolist() == pytest.approx([0.25, 1.0, 1.0, 2.0, 1.25e-7, 1e-6])


def test_elements_without_a_gradient_get_the_mean_of_the_others():
    run = FlatLayout([(4,), (2,)], 1).runs[0]
    v = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.0])
    lamb.freeze_variance(v, v == 0, run, 0.01)
    assert v.tolist() == [1.5, 1.0, 1.5, 2.0, 0.0, 0.0]


def moved(form, v_frozen, v_fresh, hyper, rule, ratio, alive=None, shapes=((4,),), share=1.0):
    """refreshed_variance, largest_quotient and next_ratio on layers whose rebuilt gradient is 2 everywhere alive."""
    run = FlatLayout(shapes, 1).runs[0]
    m_old = torch.full((run.numel,), 4.0) if alive is None else 4.0 * alive
    m_new = hyper.beta1 * m_old + (1 - hyper.beta1) * (2.0 if alive is None else 2.0 * alive)
    v_fresh.copy_(lamb.refreshed_variance(m_new, m_old, v_fresh, alive, hyper))
    quotient = lamb.largest_quotient(v_frozen, v_fresh, alive, run, hyper, form)
    update = torch.full_like(quotient, 5.0, dtype=torch.float64)
    return lamb.next_ratio(quotient, ratio, lamb.Norms(update, share * update, update), rule)


def rebuilt(ratio=1.0, form="sqrt", v_fresh=1.0, share=1.0, **bounds):
    hyper = lamb.Hyper(lr=0.1, beta1=0.5, beta2=0.75, eps=0.0, weight_decay=0.0)
    rule = lamb.RatioRule(form, **{"factor_min": 0.01, "factor_max": 100.0, "factor_threshold": 0.99, **bounds})
    fresh = torch.full((4,), v_fresh)
    result = moved(form, torch.full((4,), 7.0), fresh, hyper, rule, torch.tensor([ratio]), share=share)
    return float(result), fresh


def test_ratio_comes_from_the_rebuilt_gradient():
    ratio, fresh = rebuilt()
    assert fresh.tolist() == [0.75 * 1.0 + 0.25 * 4.0] * 4
    assert ratio == pytest.approx(1.99)  # sqrt(7 / 1.75) = 2, softly clipped at 1.99
    assert rebuilt(form="variance", ratio=3.0)[0] == pytest.approx(4.0)
    assert rebuilt(ratio=3.0)[0] == pytest.approx(2.0)


def test_growth_counts_from_the_first_momentum_or_from_lambs_own_length():
    m, x, u, coeff = (torch.tensor(v, dtype=torch.float64) for v in ([2, 2, 2, 0, 2], [3, 8, 0, 5, 8], [4, 4, 4, 0, 0],
                                                                     [1, 0.5, 1, 1, 1]))  # fmt: skip
    starts = lamb.start_norms(m, x, u, coeff)
    assert starts[:4].tolist() == [2, 2 * 8 / (0.5 * 4), 2, 0]
    assert starts[4] > 1e100  # whatever it moves is less than LAMB's step


def test_the_ratio_is_cut_where_an_update_would_grow_too_long():
    ratio, starts = torch.tensor([2.0, 2.0, 0.5, 2.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    m = torch.tensor([1.0, 6.0, 60.0, 60.0, 0.0])
    assert lamb.bounded_ratio(ratio, m, starts, 3.0).tolist() == pytest.approx([2.0, 0.5, 0.05, 2.0, 2.0])
    assert torch.equal(lamb.bounded_ratio(ratio, m, starts, math.inf), ratio)


def test_ratio_moves_by_at_most_the_threshold_and_stays_in_bounds():
    assert rebuilt(ratio=1.0, factor_threshold=0.1)[0] == pytest.approx(1.1)
    assert rebuilt(ratio=3.0, factor_threshold=0.1)[0] == pytest.approx(2.7)
    assert rebuilt(ratio=1.9, factor_threshold=0.1, factor_max=1.95)[0] == pytest.approx(1.95)
    ratio, steps = 1.0, 0
    while ratio < 4.0:
        ratio, steps = (
            rebuilt(ratio=ratio, factor_threshold=0.1, v_fresh=1e-9, factor_max=4.0, form="variance")[0],
            steps + 1,
        )
        if steps > 50:
            break
    assert steps == 15  # 1.1 ** 15 > 4


def test_weight_decay_damps_the_ratio_by_the_share_of_the_momentum():
    assert rebuilt(ratio=1.5, share=0.5)[0] == pytest.approx(2.0 * 0.5 + 0.5)


def test_dead_elements_have_no_say_in_the_ratio():
    hyper, rule = lamb.Hyper(0.1, 0.5, 0.5, 0.0, 0.0), lamb.RatioRule("variance", 0.1, 9.0, 0.9)
    alive = torch.tensor([True, False, False])
    fresh = torch.tensor([4.0, 4.0, 4.0])
    before = torch.tensor([1.0, 1.3])
    ratio = moved("variance", torch.full((3,), 6.0), fresh, hyper, rule, before, alive, [(2,), (1,)])
    assert fresh.tolist() == [4.0, 4.0, 4.0]
    assert ratio.tolist() == pytest.approx([1.5, 1.3])


def test_every_tag_is_in_the_paper_map_and_the_other_way_round():
    written = set()
    for path in (ROOT / "onebit").rglob("*.py"):
        written |= set(re.findall(r"\[(A1:[^\]]*)\]", path.read_text()))
    listed = set(re.findall(r"`\[(A1:[^\]]*)\]`", (ROOT / "docs" / "paper_map.md").read_text()))
    assert written - {"A1: step"} == listed


def test_every_deviation_named_in_the_code_is_explained_once():
    named = set()
    for path in (ROOT / "onebit").rglob("*.py"):
        named |= set(re.findall(r"DEV-(\d+)", path.read_text()))
    explained = re.findall(r"^## DEV-(\d+)", (ROOT / "docs" / "deviations.md").read_text(), re.M)
    assert sorted(explained, key=int) == [str(i) for i in range(1, len(explained) + 1)]
    assert named == set(explained)
