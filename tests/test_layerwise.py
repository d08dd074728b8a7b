"""Per-layer values, against the state that users see."""

import pytest
import torch
from torch import Tensor

import onebit
from onebit.checks import layer_names
from onebit.layerwise import layer_stats

SHAPES = {"wide.weight": (6, 8), "wide.bias": (5,), "small.weight": (3, 4)}


def model() -> dict[str, torch.nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=draws)) for name, shape in SHAPES.items()}


def steps(optimizer: torch.optim.Optimizer, params: dict[str, torch.nn.Parameter], count: int, seed: int = 0) -> None:
    draws = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=draws) * 0.1
        optimizer.step()


def matrices_first(params: dict[str, torch.nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": [(n, p) for n, p in params.items() if p.ndim > 1]},
        {"params": [(n, p) for n, p in params.items() if p.ndim == 1]},
    ]


def sums(tensors: list[Tensor]) -> list[float]:
    return [float(t.double().abs().sum()) for t in tensors]


def test_there_is_nothing_before_the_first_step() -> None:
    params = model()
    for optimizer in (
        onebit.Lamb(params.items()),
        onebit.OneBitLamb(params.items()),
        torch.optim.AdamW(params.items()),
    ):
        assert layer_stats(optimizer) == {}
        assert layer_names(optimizer) == list(SHAPES)
    assert layer_names(onebit.Lamb(params.values())) == ["parameter 0", "parameter 1", "parameter 2"]


def test_lamb_gives_its_variance_and_coefficients_in_flat_order() -> None:
    params = model()
    optimizer = onebit.Lamb(matrices_first(params))
    steps(optimizer, params, 3)
    found = layer_stats(optimizer)
    order = ["wide.weight", "small.weight", "wide.bias"]
    assert layer_names(optimizer) == order
    assert found.keys() == {"variance_norm", "coefficient"}
    assert found["variance_norm"] == pytest.approx(sums([optimizer.state[params[n]]["variance"] for n in order]))
    assert dict(zip(order, found["coefficient"], strict=True)) == optimizer.stats()["coefficients"]


def test_adamw_gives_the_mean_square_of_its_gradients() -> None:
    params = model()
    optimizer = torch.optim.AdamW(params.items())
    params["idle"] = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("idle", params["idle"])]})
    steps(optimizer, {name: params[name] for name in SHAPES}, 2)
    expected = sums([optimizer.state[params[n]]["exp_avg_sq"] for n in SHAPES])
    assert layer_stats(optimizer) == {"variance_norm": pytest.approx([*expected, 0.0])}


@pytest.mark.parametrize("preset", [{}, onebit.PAPER])
def test_one_bit_lamb_gives_all_kinds_from_the_switch_on(preset: dict[str, object]) -> None:
    params = model()
    optimizer = onebit.OneBitLamb(params.items(), freeze_step=3, **preset)
    steps(optimizer, params, 2)
    assert layer_stats(optimizer).keys() == {"variance_norm", "coefficient"}
    steps(optimizer, params, 1)
    at_switch = layer_stats(optimizer)
    assert at_switch["variance_norm"] == at_switch["frozen_variance_norm"]
    assert at_switch["ratio"] == [1.0, 1.0, 1.0]
    assert at_switch["compression_error"] == [0.0, 0.0, 0.0]
    steps(optimizer, params, 4)
    later = layer_stats(optimizer)
    state = [optimizer.state[p] for p in params.values()]
    assert later["frozen_variance_norm"] == at_switch["frozen_variance_norm"]
    assert later["frozen_variance_norm"] == pytest.approx(sums([s["variance"] for s in state]))
    assert later["variance_norm"] == pytest.approx(sums([s["fresh_variance"] for s in state]))
    assert later["variance_norm"] != later["frozen_variance_norm"]
    assert dict(zip(SHAPES, later["ratio"], strict=True)) == optimizer.stats()["ratios"]
    assert ("momentum_scale" in later) == bool(preset)
    scales = [float(s.get("momentum_scale", 1.0)) for s in state]
    if preset:
        assert later["momentum_scale"] == pytest.approx(scales)
        assert len(set(scales)) == 3
    flat = torch.cat([e if isinstance(e, torch.Tensor) else e.read() for e in optimizer._exchange.errors])
    errors = torch.split(flat[: sum(p.numel() for p in params.values())], [p.numel() for p in params.values()])
    expected = [
        float(error.norm() / scale / momentum.norm())  # the error is that of the momentum times its scale
        for error, scale, momentum in zip(errors, scales, optimizer.decoded_momentum(), strict=True)
    ]
    assert later["compression_error"] == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 0.1


def test_a_fixed_ratio_keeps_the_frozen_variance_alone() -> None:
    params = model()
    optimizer = onebit.OneBitLamb(params.items(), freeze_step=2, ratio="fixed")
    steps(optimizer, params, 5)
    found = layer_stats(optimizer)
    assert found["variance_norm"] == found["frozen_variance_norm"]


def test_elements_without_a_gradient_count_as_zero() -> None:
    params = model()
    optimizer = onebit.OneBitLamb(params.items(), freeze_step=2)
    draws = torch.Generator().manual_seed(0)
    for _ in range(4):
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=draws)
        params["wide.weight"].grad[:3] = 0
        params["small.weight"].grad.zero_()
        optimizer.step()
    found, state = layer_stats(optimizer), optimizer.state[params["wide.weight"]]
    assert state["variance"][:3].min() > 0  # what stands in for them
    for kind, name in (("variance_norm", "fresh_variance"), ("frozen_variance_norm", "variance")):
        assert found[kind][0] == pytest.approx(float(state[name][3:].sum()))
        assert found[kind][2] == 0
    assert found["compression_error"][2] == 0
