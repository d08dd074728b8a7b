"""FlatLayout: where each element lies, and the per-layer arithmetic of a run against the obvious loop."""

from __future__ import annotations

from itertools import pairwise
from math import prod, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit.errors import LayoutError, OnebitError
from onebit.layout import FlatLayout, Run

LAWS = settings(deadline=None, derandomize=True, database=None, max_examples=100)
CPU = torch.device("cpu")

SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 40)),
        st.tuples(st.integers(1, 9), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=8,
).filter(lambda shapes: sum(prod(shape) for shape in shapes) > 0)


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread():
    """Small tensors gain nothing from two threads, and on a busy machine each call would wait for both."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def layouts(draw: st.DrawFn) -> FlatLayout:
    shapes = draw(SHAPES)
    groups = sorted(draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes))))
    return FlatLayout(
        shapes,
        workers=draw(st.integers(1, 8)),
        groups=groups,
        bucket_elements=draw(st.one_of(st.none(), st.integers(1, 60))),
    )


def filled(layout: FlatLayout, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values in the layers, zero in the padding."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(layer.shape, generator=generator) for layer in layout.layers]
    return layout.gather(tensors, dtype, CPU)


# --- where elements lie -----------------------------------------------------------------------------------------


@LAWS
@given(SHAPES, st.integers(1, 8), st.one_of(st.none(), st.integers(1, 60)))
def test_layers_keep_their_order_and_shape_and_never_overlap(shapes, workers, bucket_elements):
    layout = FlatLayout(shapes, workers, bucket_elements=bucket_elements)
    assert [layer.shape for layer in layout.layers] == [tuple(shape) for shape in shapes]
    assert [layer.index for layer in layout.layers] == list(range(len(shapes)))
    assert all(layer.stop - layer.start == prod(layer.shape) for layer in layout.layers)
    assert all(a.stop <= b.start for a, b in pairwise(layout.layers))


@LAWS
@given(layouts())
def test_buckets_tile_the_flat_buffer_and_hold_whole_layers(layout):
    assert layout.buckets[0].start == 0
    assert layout.buckets[-1].stop == layout.numel
    assert all(a.stop == b.start for a, b in pairwise(layout.buckets))
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    assert tuple(layer for bucket in layout.buckets for layer in bucket.layers) == layout.layers
    for bucket in layout.buckets:
        assert bucket.start == bucket.layers[0].start
        assert all(bucket.start <= layer.start <= layer.stop <= bucket.stop for layer in bucket.layers)
        # no hole between the layers: whatever a bucket holds besides them is at its end
        assert bucket.layers[-1].stop - bucket.start == sum(layer.numel for layer in bucket.layers)


@LAWS
@given(layouts())
def test_padding_is_under_8n_elements_per_bucket_and_chunks_are_whole_bytes(layout):
    for bucket in layout.buckets:
        real = sum(layer.numel for layer in bucket.layers)
        assert real > 0
        assert 0 <= bucket.numel - real < 8 * layout.workers
        assert bucket.chunk * layout.workers == bucket.numel
        assert bucket.chunk % 8 == 0


@LAWS
@given(SHAPES, st.integers(1, 8), st.integers(1, 60))
def test_a_bucket_exceeds_its_limit_only_for_one_large_layer_and_is_filled_greedily(shapes, workers, limit):
    buckets = FlatLayout(shapes, workers, bucket_elements=limit).buckets
    for bucket in buckets:
        sizes = [layer.numel for layer in bucket.layers if layer.numel]
        assert sum(sizes) <= limit or len(sizes) == 1
    for bucket, following in pairwise(buckets):
        first = following.layers[0]
        assert first.numel > 0
        assert sum(layer.numel for layer in bucket.layers) + first.numel > limit


def test_a_small_layout_is_as_computed_by_hand():
    layout = FlatLayout([(5,), (0,), (3, 7), ()], workers=2, bucket_elements=10)
    assert [(b.start, b.stop, b.chunk) for b in layout.buckets] == [(0, 16, 8), (16, 48, 16), (48, 64, 8)]
    assert [(a.start, a.stop) for a in layout.layers] == [(0, 5), (5, 5), (16, 37), (48, 49)]
    assert layout.numel == 64
    assert FlatLayout([(5,), (0,), (3, 7), ()], workers=2).numel == 32
    assert FlatLayout([(5,), (0,), (3, 7), ()], workers=8).numel == 64


@LAWS
@given(layouts())
def test_runs_are_the_layers_of_one_group_in_one_bucket_and_cover_all(layout):
    assert tuple(layer for run in layout.runs for layer in run.layers) == layout.layers
    for run in layout.runs:
        assert {layer.group for layer in run.layers} == {run.group}
        assert any(
            bucket.start <= run.start <= run.stop <= bucket.stop and set(run.layers) <= set(bucket.layers)
            for bucket in layout.buckets
        )
        assert run.numel == sum(layer.numel for layer in run.layers)
        assert list(range(len(layout.layers)))[run.layer_slice] == [layer.index for layer in run.layers]
        assert run.slice == slice(run.start, run.stop)
    keys = [(run.group, next(b.index for b in layout.buckets if run.layers[0] in b.layers)) for run in layout.runs]
    assert len(set(keys)) == len(keys)


@LAWS
@given(layouts(), st.sampled_from([torch.float32, torch.float64]))
def test_gather_then_views_returns_every_tensor_and_leaves_zero_elsewhere(layout, dtype):
    tensors = [
        torch.arange(1, layer.numel + 1, dtype=dtype).view(layer.shape) + 100 * i
        for i, layer in enumerate(layout.layers)
    ]
    flat = layout.gather(tensors, dtype, CPU)
    assert flat.shape == (layout.numel,)
    assert flat.dtype == dtype
    for view, tensor in zip(layout.views(flat), tensors, strict=True):
        assert view.shape == tensor.shape
        assert torch.equal(view, tensor)
    assert int(flat.ne(0).sum()) == sum(layer.numel for layer in layout.layers)


def test_gather_takes_none_as_zeros_and_does_not_alias_its_input():
    layout = FlatLayout([(3,), (2,)], workers=1)
    mine = torch.ones(3)
    flat = layout.gather([mine, None], torch.float32, CPU)
    assert flat.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    flat.fill_(7)
    assert mine.tolist() == [1, 1, 1]


def test_views_write_through_to_the_flat_buffer():
    layout = FlatLayout([(2, 2), (), (3,)], workers=1)
    flat = layout.zeros(torch.float32, CPU)
    for number, view in enumerate(layout.views(flat), start=1):
        view.fill_(number)
    assert flat.tolist() == [1, 1, 1, 1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shapes": [(3,)], "workers": 0}, "workers is 0"),
        ({"shapes": [(3,)], "workers": 2, "bucket_elements": 0}, "bucket_elements is 0"),
        ({"shapes": [(0,), (4, 0)], "workers": 2}, "0 elements"),
        ({"shapes": [], "workers": 2}, "0 elements"),
        ({"shapes": [(3,), (3,)], "workers": 2, "groups": [1, 0]}, "non-decreasing"),
        ({"shapes": [(3,), (3,)], "workers": 2, "groups": [0]}, "each of 2 shapes"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_its_value(arguments, words):
    with pytest.raises(LayoutError, match=words) as caught:
        FlatLayout(**arguments)
    assert isinstance(caught.value, OnebitError)
    assert isinstance(caught.value, ValueError)


# --- the arithmetic of a run --------------------------------------------------------------------------------------


def parts_of(run: Run, flat: torch.Tensor) -> list[torch.Tensor]:
    """Each layer's elements of a flat buffer, one-dimensional, without the code under test."""
    return [flat[layer.start : layer.stop] for layer in run.layers]


@LAWS
@given(layouts(), st.integers(0, 1000))
def test_reductions_of_a_run_equal_a_loop_over_its_layers(layout, seed):
    flat = filled(layout, seed)
    for run in layout.runs:
        parts = parts_of(run, flat)
        mine = flat[run.slice]
        norms = torch.tensor([sqrt(sum(v * v for v in part.tolist())) for part in parts], dtype=torch.float64)
        means = torch.tensor([sum(part.tolist()) / max(1, len(part)) for part in parts], dtype=torch.float64)
        torch.testing.assert_close(run.norms(mine), norms, rtol=1e-14, atol=0)
        torch.testing.assert_close(run.means(mine), means, rtol=1e-12, atol=1e-15)
        assert run.maxima(mine).tolist() == [max(part.tolist(), default=0.0) for part in parts]
        assert run.maxima(mine).dtype == torch.float32
        assert torch.equal(run.norms(run.views(mine)), run.norms(mine))


@LAWS
@given(layouts())
def test_spread_gives_each_element_the_value_of_its_layer(layout):
    values = torch.arange(1.0, len(layout.layers) + 1)
    for run in layout.runs:
        spread = run.spread(values[run.layer_slice])
        assert spread.tolist() == [layer.index + 1.0 for layer in run.layers for _ in range(layer.numel)]


def test_maxima_of_negative_layers_are_negative():
    run = FlatLayout([(3,), (0,), (2,)], workers=1).runs[0]
    assert run.maxima(torch.tensor([-3.0, -1.0, -2.0, -5.0, -4.0])).tolist() == [-1, 0, -4]


@LAWS
@given(layouts(), st.integers(0, 1000))
def test_subtract_and_add_scaled_reach_exactly_the_named_layers(layout, seed):
    flat = filled(layout, seed)
    for run in layout.runs:
        parameters = [torch.ones(layer.shape) for layer in run.layers]
        run.subtract(parameters, flat[run.slice])
        for parameter, part in zip(parameters, parts_of(run, flat), strict=True):
            assert torch.equal(parameter.view(-1), 1 - part)
        total = flat.clone()
        run.add_scaled(total[run.slice], [torch.ones(layer.shape) for layer in run.layers], 0.5)
        inside = torch.zeros(layout.numel, dtype=torch.bool)
        inside[run.slice] = True
        assert torch.equal(total[inside], flat[inside] + 0.5)
        assert torch.equal(total[~inside], flat[~inside])


def test_norms_and_means_of_sixteen_million_equal_values_are_exact():
    count = 2**24 + 1  # one more than float32 can count to
    run = FlatLayout([(count,)], workers=1).runs[0]
    ones = torch.ones(count)
    assert run.norms(ones).tolist() == [sqrt(count)]
    assert run.means(ones).tolist() == [1.0]
