"""LAMB and 1-bit LAMB (arXiv 2104.06069, Algorithm 1) as functions over tensors.

Each stage is two parts, as the paper writes it: the worker's part before the exchange and everyone's part after it.
They work on one run (`layout.Run`: the layers of one group in one bucket) and know nothing of other workers; the
optimizer (`compressed.py`) calls them around the exchange. Tags [A1: step] name steps of Algorithm 1 and are listed in
docs/paper_map.md (only lines 15-21 are known by number); DEV-n are the departures explained in docs/deviations.md.

  symbol      name           shape      same on all workers   saved   meaning
  x           x              per layer  yes                   model   parameters
  g           g              [numel]    warm-up only          no      gradient: averaged in warm-up, own afterwards
  m           m              [numel]    yes                   yes     momentum
  v           v              [numel]    yes                   yes     variance in warm-up
  v_{T_w}     v_frozen       [numel]    yes                   yes     variance at the switch, the preconditioner
  v (fresh)   v_fresh        [numel]    yes                   yes     variance kept up by the rebuilt gradient
  c           coeff          [layers]   yes                   yes     layerwise coefficient
  c_avg       coeff_avg      [layers]   yes                   yes     moving average of c over the warm-up
  r           ratio          [layers]   yes                   yes     correction of c_avg after the switch
  -           start_norm     [layers]   yes                   yes     norm of m that the growth of updates counts from
  s           scale          [layers]   yes                   yes     momentum scale where layers share a 1-bit scale
  delta       error          [numel]    no                    own     in `exchange.py`, on both sides
  eta, lambda eps, weight_decay
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from onebit.layout import Run

RatioForm = Literal["sqrt", "variance"]
GROWTH_MAX = 3.0  # of a layer's update after the switch (DEV-24)
FACTOR_MAX, PAPER_FACTOR_MAX = 2.0, 4.0  # where factor_max is left out; the latter with the authors' codec (DEV-22)


@dataclass(frozen=True)
class Hyper:
    """What one group sets: `lr` is the step size of this step, learning-rate schedule and bias correction included."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def bias_corrected(hyper: Hyper, updates: int, variance_updates: int) -> Hyper:
    """Adam's bias correction as other numbers in the same formula: m / c1 / (sqrt(v / c2) + eps) is
    sqrt(c2) / c1 * m / (sqrt(v) + eps sqrt(c2)), and weight decay must not be scaled with it.

    Args:
        updates, variance_updates: how many gradients are in the momentum and in the variance, >= 1.
    """
    root = math.sqrt(1 - hyper.beta2**variance_updates)
    factor = root / (1 - hyper.beta1**updates)
    return replace(hyper, lr=hyper.lr * factor, eps=hyper.eps * root, weight_decay=hyper.weight_decay / factor)


@dataclass(frozen=True)
class CoeffRule:
    """How the layerwise coefficient is clipped and averaged: c_min, c_max, beta3 of the paper."""

    min_coeff: float
    max_coeff: float
    coeff_beta: float


@dataclass(frozen=True)
class RatioRule:
    """How the ratio moves: its form, r_min, r_max, r_threshold of the paper."""

    form: RatioForm
    factor_min: float
    factor_max: float
    factor_threshold: float


def trust_ratio(x_norm: Tensor, u_norm: Tensor, rule: CoeffRule) -> tuple[Tensor, Tensor]:
    """LAMB's coefficient ||x|| / ||u||, clipped; 1 where a norm is zero. [A1: coefficient]

    Args:
        x_norm, u_norm: [layers].

    Returns:
        The coefficients, and a bool tensor that says where both norms were positive, [layers] each.
    """
    defined = (x_norm > 0) & (u_norm > 0)
    clipped = (x_norm / torch.where(defined, u_norm, 1)).clamp(rule.min_coeff, rule.max_coeff)
    return torch.where(defined, clipped, 1.0), defined


@dataclass(frozen=True)
class Norms:
    """What the coefficients need of each layer: 2-norms, float64 [layers] each.

    x: of the parameter; in the compressed stage of the momentum, if anything.
    direction: of m / (sqrt(v) + eps). update: of that + weight_decay * x.
    """

    x: Tensor
    direction: Tensor
    update: Tensor

    def stacked(self) -> Tensor:
        """[3, layers]; `Norms(*rows)` is the way back."""
        return torch.stack([self.x, self.direction, self.update])


def warmup_moments(g: Tensor, m: Tensor, v: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """The next momentum and variance, new tensors; every operation rounded by itself, as faster kernels do it."""
    return (
        m * hyper.beta1 + g * (1 - hyper.beta1),  # [A1: momentum]
        v * hyper.beta2 + g * (1 - hyper.beta2) * g,  # [A1: variance]
    )


def warmup_coefficients(norms: Norms, coeff_avg: Tensor, coeff_weight: Tensor, rule: CoeffRule) -> Tensor:
    """The coefficients of a warm-up step. Changes coeff_avg and coeff_weight in place.

    Args:
        coeff_avg, coeff_weight: [layers]; the weight is what coeff_avg of a constant 1 would be (DEV-5).

    Returns:
        The coefficients, [layers].
    """
    touched = norms.direction > 0
    coeff, defined = trust_ratio(norms.x, norms.update, rule)
    coeff = torch.where(touched, coeff, 0.0)  # a layer that never had a gradient stays where it is (DEV-8)

    beta3 = torch.where(defined & touched, rule.coeff_beta, 1.0)  # [A1: moving average of c] (DEV-12)
    coeff_avg.mul_(beta3).add_((1 - beta3) * coeff)
    coeff_weight.mul_(beta3).add_(1 - beta3)
    return coeff


def freeze_variance(v: Tensor, held: Tensor | None, run: Run, floor: float) -> None:
    """Make v the frozen variance, in place. [A1: T_w]

    Args:
        v: [numel]; clamped from below at `floor` times its layer's mean (DEV-3).
        held: bool [numel], elements without a gradient so far; they get the mean of the others in their layer, which
            is what they will be divided by should they come alive (DEV-10). None: there are none.
    """
    means = run.means(v)
    if floor:
        torch.maximum(v, run.spread((floor * means).to(v.dtype)), out=v)
    if held is not None:
        live = run.means((~held).double())
        v.copy_(torch.where(held, run.spread((means / live.clamp(min=torch.finfo(v.dtype).tiny)).to(v.dtype)), v))


def momentum_scales(m_norms: Tensor, sizes: Tensor) -> Tensor:
    """The factor that gives every layer the same RMS momentum before it shares a 1-bit scale. [A1: momentum scale]

    s_l = mean over layers of rms / rms_l; layers whose momentum is zero count nowhere and get 1 (DEV-7).

    Args:
        m_norms: 2-norm of each layer's momentum at the end of the warm-up, [layers].
        sizes: elements of each layer, [layers].
    """
    rms = m_norms / sizes.clamp(min=1).sqrt()
    used = rms > 0
    united = torch.where(used, rms, 0.0).sum() / used.sum().clamp(min=1)
    return torch.where(used, united / torch.where(used, rms, 1.0), 1.0)


def local_momentum(m: Tensor, g: Tensor, beta1: float, scale: Tensor | None) -> Tensor:
    """The worker's part: what goes into the exchange. [A1: local momentum]

    Args:
        m: the global momentum, [numel].
        g: this worker's gradient, [numel]; used up.
        scale: momentum scales spread over the elements, or None.

    Returns:
        scale * (beta1 * m + (1 - beta1) * g), in the memory of `g`.
    """
    g.mul_(1 - beta1).add_(m * beta1)  # each operation rounded by itself, as faster kernels do it
    return g if scale is None else g.mul_(scale)


def refreshed_variance(m_new: Tensor, m_old: Tensor, v_fresh: Tensor, alive: Tensor | None, hyper: Hyper) -> Tensor:
    """Rebuild the gradient from two momenta and let the fresh variance follow it. Algorithm 1, lines 15-21.

    Args:
        m_new, m_old: global momentum after and before this step's exchange, [numel].
        alive: bool [numel]; dead elements keep their variance. None: all alive.
    """
    g = (m_new - m_old * hyper.beta1).div_(1 - hyper.beta1)  # [A1:15-21 rebuilt gradient]
    refreshed = v_fresh * hyper.beta2 + g * (1 - hyper.beta2) * g  # [A1:15-21 fresh variance]
    return refreshed if alive is None else torch.where(alive, refreshed, v_fresh)


def largest_quotient(
    v_frozen: Tensor, v_fresh: Tensor, alive: Tensor | None, run: Run, hyper: Hyper, form: RatioForm
) -> Tensor:
    """The largest v_frozen / v_fresh of each layer, or of their roots plus eps: [layers]; 0 where nothing is alive."""
    if form == "sqrt":  # [A1:15-21 ratio] as released (DEV-1)
        quotient = (v_frozen.sqrt() + hyper.eps) / (v_fresh.sqrt() + hyper.eps)
    else:  # [A1:15-21 ratio] as printed; 0 / 0 counts as unchanged
        quotient = torch.where(v_fresh > 0, v_frozen / v_fresh, 1.0)
    return run.maxima(quotient if alive is None else torch.where(alive, quotient, 0.0))


def next_ratio(quotient: Tensor, ratio: Tensor, norms: Norms, rule: RatioRule) -> Tensor:
    """Move the ratio towards the quotient. Algorithm 1, lines 15-21.

    Args:
        quotient: of `largest_quotient`, [layers].
        ratio: last step's, [layers].
        norms: of this step's update.

    Returns:
        The new ratio, [layers].
    """
    raw = torch.where(quotient > 0, quotient, ratio)  # a layer that is empty or dead throughout keeps its ratio
    tiny = torch.finfo(torch.float64).tiny
    share = (norms.direction / norms.update.clamp(min=tiny)).clamp(max=1)  # of the momentum in the update
    decayed = norms.update != norms.direction
    raw = torch.where(decayed, raw * share + (1 - share), raw).to(ratio.dtype)  # (DEV-2)
    soft = raw.clamp(ratio * (1 - rule.factor_threshold), ratio * (1 + rule.factor_threshold))  # [A1:15-21 soft clip]
    return soft.clamp(rule.factor_min, rule.factor_max)  # [A1:15-21 hard clip]


def start_norms(m_norms: Tensor, x_norms: Tensor, u_norms: Tensor, coeff_avg: Tensor) -> Tensor:
    """What the growth of a layer's update counts from, as a norm of its momentum (DEV-24).

    It is that of the first momentum after the switch; more where an update with it would be shorter than LAMB's, whose
    length is ||x||, so that a layer that hardly moved just then may still move as LAMB would move it.

    Args:
        m_norms, u_norms: of that momentum and of the direction with it, [layers].
        x_norms, coeff_avg: of the parameters; the average of the coefficients, [layers].

    Returns:
        [layers]; 0 where there was no momentum.
    """
    tiny = torch.finfo(torch.float64).tiny
    return m_norms * (x_norms / (coeff_avg * u_norms).clamp(min=tiny)).clamp(min=1.0).nan_to_num(1.0)


def bounded_ratio(ratio: Tensor, m_norms: Tensor, starts: Tensor, most: float) -> Tensor:
    """The ratio, less where the layer's update would be over `most` times as long as after the switch (DEV-24).

    With a frozen variance an update is as long as its momentum, times ratio and average coefficient.

    Args:
        ratio: of `next_ratio`, [layers].
        m_norms: of this step's momentum, [layers].
        starts: of `start_norms`, [layers]; 0: not known, no bound.
        most: > 0; inf: no bound.
    """
    bound = most * starts / m_norms.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where((starts > 0) & (m_norms > 0), torch.minimum(ratio, bound.to(ratio.dtype)), ratio)


def direction(x: Sequence[Tensor], m: Tensor, v: Tensor, run: Run, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """What a step goes along: m / (sqrt(v) + eps) + weight_decay * x. [A1: update direction]

    Returns:
        The direction, a new tensor [numel], and the norm of its first part, float64 [layers].
    """
    u = m / (v.sqrt() + hyper.eps)
    norm = run.norms(u)
    if hyper.weight_decay:
        run.add_scaled(u, x, hyper.weight_decay)
    return u, norm


def update(x: Sequence[Tensor], u: Tensor, step_size: Tensor, run: Run) -> None:
    """x -= lr * c * u, in place; `u` is used up. `step_size` is lr * c, [layers]. [A1: update]"""
    run.subtract(x, u.mul_(run.spread(step_size.to(u.dtype))))


def implied_variance(m: Tensor, v_frozen: Tensor, run: Run, hyper: Hyper) -> Tensor:
    """The variance of layers that had no gradient in the warm-up, from their first momentum (DEV-8).

    It is the square of the gradient that the momentum implies, rms(m) / (1 - beta1), one value for the layer; equal on
    all workers, so no traffic is needed.

    Returns:
        [numel]; 0 where the layer has a frozen variance, or no momentum.
    """
    implied = (run.norms(m) / run.sizes(m.device).clamp(min=1).sqrt() / (1 - hyper.beta1)) ** 2
    return run.spread(torch.where(run.means(v_frozen) == 0, implied, 0.0).to(m.dtype))


def late_coefficients(
    x: Sequence[Tensor],
    m: Tensor,
    v_frozen: Tensor,
    coeff_avg: Tensor,
    coeff_weight: Tensor,
    run: Run,
    hyper: Hyper,
    rule: CoeffRule,
) -> None:
    """Give layers that had no coefficient at the switch one from their first momentum, in place (DEV-8).

    Such a layer had no gradient in the warm-up, or no weight to compare with.
    """
    late = (coeff_weight == 0) & (run.norms(m) > 0)
    u, _ = direction(x, m, v_frozen, run, hyper)
    coeff, defined = trust_ratio(run.norms(x), run.norms(u), rule)
    coeff_avg.copy_(torch.where(late, coeff, coeff_avg))
    coeff_weight.copy_(torch.where(late & defined, 1.0, coeff_weight))
