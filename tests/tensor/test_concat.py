"""Concatenation and stacking keep every value, and refuse weights that are incompatible."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor, format_named, quantize
from halfbyte.errors import ShapeError
from halfbyte.tensor.concat import concat_rows, incompatibility, moved_units, stack, take_inputs, take_rows

CODECS = ["mxfp4", "int4:g32", "uint3:g32", "affine4:g32", "q4_K", "fp8_e4m3:g32", "int8:channel"]


def weight(codec: str, n: int = 4, k: int = 256, seed: int = 0, lead: tuple[int, ...] = (), **options) -> QTensor:
    x = np.random.default_rng(seed).standard_normal((*lead, n, k)).astype(np.float32)
    return quantize(x, codec, **options)


def with_parts(q: QTensor, **changes) -> QTensor:
    return QTensor(q.format, q.shape, {**q.parts, **changes}, origin=q.origin, details=q.details)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_rows_follow_each_other(codec, lead):
    pieces = [weight(codec, n, seed=n, lead=lead) for n in (4, 1, 7)]
    whole = concat_rows(pieces)
    assert whole.shape == (*lead, 12, 256)
    np.testing.assert_array_equal(whole.dequantize(), np.concatenate([p.dequantize() for p in pieces], axis=-2))


@pytest.mark.parametrize("codec", [*CODECS, "nvfp4"])
def test_a_stack_has_the_matrices_in_order(codec):
    pieces = [weight(codec, seed=s) for s in range(3)]
    whole = stack(pieces)
    assert whole.shape == (3, 4, 256)
    for e, piece in enumerate(pieces):
        assert whole[e].identical(piece)


def test_a_shared_global_scale_is_kept():
    q = weight("nvfp4", 6)
    whole = concat_rows([q[:2], q[2:]])
    assert whole.identical(q)
    assert whole.parts["global_scale"].shape == ()


def test_a_shared_group_index_is_kept():
    index = np.random.default_rng(1).permutation(np.repeat(np.arange(8, dtype=np.int32), 32))
    pieces = [with_parts(weight("int4:g32", seed=s), group_index=index) for s in range(2)]
    for whole in (concat_rows(pieces), stack(pieces)):
        assert np.array_equal(whole.parts["group_index"], index)
    np.testing.assert_array_equal(stack(pieces).dequantize(), np.stack([p.dequantize() for p in pieces]))


INDEX = np.repeat(np.arange(8, dtype=np.int32), 32)
REFUSED = [
    ([weight("int4:g32"), weight("int4:g64")], False, "their formats differ: int4:g32 and int4:g64"),
    ([weight("mxfp4"), weight("mxfp4", k=128)], False, "their shapes differ"),
    ([weight("mxfp4"), weight("mxfp4", lead=(2,))], False, "their shapes differ"),
    ([weight("mxfp4"), weight("mxfp4", n=5)], True, "their shapes differ"),
    ([weight("nvfp4", seed=0), weight("nvfp4", seed=1)], False, "each has a global scale of its own"),
    ([weight("int4:g32"), with_parts(weight("int4:g32"), group_index=INDEX)], False, "each has a group index of its own"),
    ([with_parts(weight("int4:g32"), group_index=i) for i in (INDEX, INDEX[::-1].copy())], True, "each has a group index"),
    ([weight("hqq4:g64", axis=0)] * 2, False, "run over the flattened matrix"),
    ([weight("nf4", nested=True)] * 2, False, "run over the flattened matrix"),
    ([weight("int4:g32", rows=2)[1:3]] * 2, False, "depend on its position"),
    ([weight("int4:g32", n=3, rows=2), weight("int4:g32", n=4, rows=2)], False, "tiles of 2 rows would straddle"),
    ([weight("int4:g32", rows=-1)] * 2, False, "tiles of -1 rows would straddle"),
]


@pytest.mark.parametrize(("weights", "stacked", "reason"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(weights, stacked, reason):
    assert reason in incompatibility(weights, stacked)
    with pytest.raises(ShapeError, match=r"2 weights cannot be joined: "):
        (stack if stacked else concat_rows)(weights)


def test_none_at_all_is_refused():
    with pytest.raises(ShapeError, match=r"\[stack\] 0 weights cannot be joined: the list is empty"):
        stack([])


def test_whole_tiles_are_concatenated_and_stacked():
    pieces = [weight("int4:g32", n=4, rows=2, seed=0), weight("int4:g32", n=3, rows=2, seed=1)]
    np.testing.assert_array_equal(concat_rows(pieces).dequantize(), np.concatenate([p.dequantize() for p in pieces]))
    stacked = [pieces[1], weight("int4:g32", n=3, rows=2, seed=2)]
    np.testing.assert_array_equal(stack(stacked).dequantize(), np.stack([p.dequantize() for p in stacked]))


def test_origin_and_details_are_those_in_common():
    a, b = weight("mxfp4", seed=0), weight("mxfp4", seed=1)
    a = QTensor(a.format, a.shape, a.parts, origin="mlx", details={"dtype": "float16", "pad": 1})
    b = QTensor(b.format, b.shape, b.parts, origin="mlx", details={"dtype": "float16", "pad": 2})
    for whole in (concat_rows([a, b]), stack([a, b])):
        assert (whole.origin, dict(whole.details)) == ("mlx", {"dtype": "float16"})
    other = QTensor(b.format, b.shape, b.parts, origin="modelopt")
    assert concat_rows([a, other]).origin == ""


@pytest.mark.parametrize("codec", [*CODECS, "nvfp4"])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_rows_in_another_order(codec, lead):
    q, index = weight(codec, n=5, lead=lead), np.array([4, 0, 0, 2])
    taken = take_rows(q, index)
    assert taken.shape == (*lead, 4, 256)
    np.testing.assert_array_equal(taken.dequantize(), q.dequantize()[..., index, :])


@pytest.mark.parametrize("q", [weight("int4:g32", rows=2), weight("nf4", nested=True), weight("hqq4:g64", axis=0)])
def test_rows_that_share_scales_are_not_reordered(q):
    with pytest.raises(ShapeError, match="rows share its scales"):
        take_rows(q, np.array([1, 0]))


@pytest.mark.parametrize(
    ("codec", "unit"), [(c, 32) for c in CODECS[:4]] + [("q4_K", 256), ("q6_K", 256), ("q8_0", 32), ("nvfp4", 16), ("q3_K", 256)]
)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_whole_groups_of_inputs_in_another_order(codec, unit, lead):
    q = weight(codec, k=1024, lead=lead)
    order = np.arange(1024).reshape(-1, unit)[::-1].reshape(-1)
    np.testing.assert_array_equal(moved_units(order, q.format), np.arange(1024 // unit)[::-1])
    taken = take_inputs(q, order)
    np.testing.assert_array_equal(taken.dequantize(), q.dequantize()[..., order])
    assert take_inputs(taken, order).identical(q)


@pytest.mark.parametrize(
    ("codec", "order"),
    [
        ("q4_K", np.arange(512).reshape(-1, 128)[::-1].reshape(-1)),
        ("q8_0", np.roll(np.arange(512), 8)),
        ("q8_0", np.arange(512).reshape(-1, 32)[:, ::-1].reshape(-1)),
        ("int8:channel", np.arange(512)),
    ],
)
def test_an_order_that_divides_a_group_is_refused(codec, order):
    q = weight(codec, k=512)
    assert moved_units(order, q.format) is None
    with pytest.raises(ShapeError, match="moved by whole groups"):
        take_inputs(q, order)


def test_formats_of_the_examples():
    assert format_named("int4:g32", rows=2).grouping == "block"
