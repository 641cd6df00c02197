"""Products of the native core: one-hot activations give the decoded weight, exact mode errs as
float32, int8 mode as its quantizer.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.backends.cpu import native
from halfbyte.errors import ShapeError
from halfbyte.formats import format_named
from halfbyte.numerics.activations import LONGEST_TOKEN_ROW
from halfbyte.tensor.qtensor import QTensor
from support.cpu_weights import (  # noqa: F401
    CPU,
    LISTED,
    SETS,
    act_ordered,
    each_set,
    formats,
    instruction_set,
    needs_native,
    ordinary_tensor,
    unit_of,
)

pytestmark = needs_native
MODES = ("exact", "int8", "int8_token")


def rows_of(fmt, groups: int) -> int:
    """k of a number of groups (super-groups)."""
    return groups * (unit_of(fmt) if unit_of(fmt) > 1 else max(fmt.group_size, 32))


def one_hot_result(q: QTensor, activations: str, m: int) -> np.ndarray:
    """The weight as products with the identity give it, m rows a call."""
    k = q.shape[1]
    eye, prepared = np.eye(k, dtype=np.float32), CPU.prepare(q)
    return np.concatenate([CPU.linear(eye[i : i + m], prepared, None, activations=activations) for i in range(0, k, m)]).T


def check_exact(y: np.ndarray, x: np.ndarray, dense: np.ndarray) -> None:
    """Within 1e-5 of each row's absolute sum per element, and 2e-6 of the true product in relative
    RMS.

    Of fewer than 16 outputs the RMS is compared with that of the absolute sums: a single product
    may cancel, and float32 then has few of its digits right.
    """
    true = x.astype(np.float64) @ dense.astype(np.float64).T
    bound = np.abs(x).astype(np.float64) @ np.abs(dense).astype(np.float64).T
    error = y.astype(np.float64) - true
    assert (np.abs(error) <= 1e-5 * bound + 1e-30).all(), np.abs(error / bound).max()
    rms = np.sqrt(((true if true.size >= 16 else bound) ** 2).mean())
    assert rms == 0 or np.sqrt((error**2).mean()) <= 2e-6 * rms


@each_set
@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("word", LISTED)
def test_case_35_one_hot_activations_return_the_decoded_weight(instruction_set, word, activations):  # noqa: F811
    fmt = format_named(word)
    # 70 rows: four panels, then a tile that overlaps them; m = 1, 7 and 64 take different tiles.
    q = ordinary_tensor(fmt, (70, rows_of(fmt, 2)), 11)
    wanted = q.dequantize("float32")
    for m in (1, 7, 64):
        assert np.array_equal(one_hot_result(q, activations, m), wanted), (word, m)


@each_set
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])  # the set stays for every example
@given(data=st.data())
def test_a_sweep_of_shapes(instruction_set, data):  # noqa: F811
    fmt = data.draw(st.sampled_from(formats()))
    n, m = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 70))
    q = ordinary_tensor(fmt, (n, rows_of(fmt, data.draw(st.integers(1, 3)))), data.draw(st.integers(0, 99)))
    dense, k = q.dequantize("float32"), q.shape[1]
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k)).astype(np.float32)
    prepared = CPU.prepare(q)
    y = CPU.linear(x, prepared, None)
    assert y.shape == (m, n)
    assert y.dtype == np.float32
    if m:
        check_exact(y, x, dense)
        column = int(rng.integers(k))
        hot = np.zeros((m, k), np.float32)
        hot[:, column] = 1
        for activations in MODES:
            got = CPU.linear(hot, prepared, None, activations=activations)
            assert np.array_equal(got, np.broadcast_to(dense[:, column], (m, n))), (fmt, activations)


def quantized(x: np.ndarray, span: int) -> np.ndarray:
    """x as the int8 class rounds it: 8 bits, scale max |x| / 127 a span of inputs, of which the
    last may be short.
    """
    out = np.empty_like(x)
    for start in range(0, x.shape[1], span):
        part = x[:, start : start + span]
        peak = np.abs(part).max(-1, keepdims=True)
        inverse = np.divide(np.float32(127), peak, where=peak > 0, out=np.zeros_like(peak))
        out[:, start : start + span] = np.rint(part * inverse) * (peak / np.float32(127))
    return out


@each_set
@pytest.mark.parametrize("word", LISTED)
def test_int8_activations_err_as_their_quantizer_alone(instruction_set, word):  # noqa: F811
    fmt = format_named(word)
    q = ordinary_tensor(fmt, (40, rows_of(fmt, 6)), 3)
    fields = CPU.prepare(q).data.fields
    integral = fields.get("integral", False)
    dense = q.dequantize("float32")
    x = np.random.default_rng(5).standard_normal((9, q.shape[1])).astype(np.float32)
    y = CPU.linear(x, CPU.prepare(q), None, activations="int8")
    if not integral:
        check_exact(y, x, dense)
        return
    check_exact(y, quantized(x, fields["span"]), dense)
    true = x.astype(np.float64) @ dense.astype(np.float64).T
    assert np.sqrt(((y - true) ** 2).mean() / (true**2).mean()) < 1e-2


@each_set
@pytest.mark.parametrize("word", LISTED)
def test_int8_token_is_the_product_with_the_rounded_rows(instruction_set, word):  # noqa: F811
    """One scale a token where the weight has one a row; every other weight as in int8."""
    fmt = format_named(word)
    q = ordinary_tensor(fmt, (40, rows_of(fmt, 6)), 3)
    prepared, dense = CPU.prepare(q), q.dequantize("float32")
    x = np.random.default_rng(5).standard_normal((37, q.shape[1])).astype(np.float32)
    y = CPU.linear(x, prepared, None, activations="int8_token")
    if prepared.data.fields.get("groups") != 1:
        assert np.array_equal(y, CPU.linear(x, prepared, None, activations="int8"))
    elif prepared.data.fields.get("integral", False):
        check_exact(y, quantized(x, x.shape[1]), dense)
    for m in (1, 2, 3, 5, 16):
        assert np.array_equal(CPU.linear(x[:m], prepared, None, activations="int8_token"), y[:m])


@each_set
@pytest.mark.parametrize("k", [1, 7, 8, 31, 33, 100, 127, 129, 160, 1000, 1032, 2080, 4096])
@pytest.mark.parametrize("word", ["int8:channel", "uint8:channel", "int4:channel"])
def test_int8_token_of_rows_of_any_length(instruction_set, word, k):  # noqa: F811
    q = ordinary_tensor(format_named(word), (33, k), 7)
    prepared, dense = CPU.prepare(q), q.dequantize("float32")
    x = np.random.default_rng(k).standard_normal((21, k)).astype(np.float32)
    check_exact(CPU.linear(x, prepared, None, activations="int8_token"), quantized(x, k), dense)
    assert np.array_equal(one_hot_result(q, "int8_token", k), dense)


@each_set
def test_int8_token_of_the_longest_row_and_of_one_that_is_longer(instruction_set):  # noqa: F811
    """The largest sums of the longest row fit in 32 bits; a longer row takes int8's scales."""
    for k, token in ((LONGEST_TOKEN_ROW, True), (LONGEST_TOKEN_ROW + 1, False)):
        q = ordinary_tensor(format_named("int8:channel"), (2, k), 1)
        q = QTensor(q.format, q.shape, {**q.parts, "codes": np.zeros_like(q.parts["codes"])})  # -128
        prepared, x = CPU.prepare(q), np.full((17, k), -1, np.float32)
        y = CPU.linear(x, prepared, None, activations="int8_token")
        assert np.array_equal(y, CPU.linear(x, prepared, None, activations="int8")) or token
        wanted = 128.0 * k * q.parts["scales"].astype(np.float64).reshape(1, 2)
        assert np.allclose(y, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("word", "span"),
    [
        *((word, 128) for word in ("int4:g32", "uint4:g64", "uint4:g16", "int4:g128", "mxfp4", "nvfp4", "q4_0")),
        *((word, 64) for word in ("affine4:g64", "int8:g64")),
        *((word, 32) for word in ("q4_1", "q4_K", "q5_0", "q8_0", "iq4_nl")),
        ("q6_K", 16),
    ],
)
def test_one_scale_of_the_activations_covers_several_short_groups_where_a_one_hot_row_stays_exact(word, span):
    q = ordinary_tensor(format_named(word), (32, 2048), 7)
    prepared = CPU.prepare(q)
    assert prepared.data.fields["span"] == span
    x = np.random.default_rng(6).standard_normal((16, 2048)).astype(np.float32)
    true = x.astype(np.float64) @ q.dequantize("float64").T
    y = CPU.linear(x, prepared, None, activations="int8")
    assert 3e-3 < np.sqrt(((y - true) ** 2).mean() / (true**2).mean()) < 7e-3


def test_scales_of_float32_keep_a_scale_of_the_activations_a_group():
    assert CPU.prepare(ordinary_tensor(format_named("int4:g32", scale_dtype="float32"), (16, 256), 7)).data.fields["span"] == 32


@each_set
@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("word", ["uint4:g32", "q4_K", "q6_K", "nvfp4", "nf4:g64", "mxfp8_e4m3", "hqq4:g64"])
def test_a_row_gives_the_same_in_any_batch_and_any_run(instruction_set, word, activations):  # noqa: F811
    q = ordinary_tensor(format_named(word), (130, 512), 8)
    x = np.random.default_rng(1).standard_normal((300, 512)).astype(np.float32)
    prepared = CPU.prepare(q)
    whole = CPU.linear(x, prepared, None, activations=activations)
    assert np.array_equal(whole, CPU.linear(x, prepared, None, activations=activations))
    for start, m in ((0, 1), (1, 2), (5, 3), (7, 4), (11, 9), (250, 50), (299, 1)):
        assert np.array_equal(CPU.linear(x[start : start + m], prepared, None, activations=activations), whole[start : start + m])


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("word", LISTED)
def test_the_schedules_of_every_core_give_the_same_bits(word, activations):
    """Tile shapes, their order and prefetching differ between cores of one instruction set; sums do
    not.
    """
    fmt = format_named(word)
    q = ordinary_tensor(fmt, (150, rows_of(fmt, 3)), 12)
    x, prepared = np.random.default_rng(6).standard_normal((67, q.shape[1])).astype(np.float32), CPU.prepare(q)
    results = {}
    try:
        for core in native().known_cores():
            native().use_core(core)
            results[core] = [CPU.linear(x[:m], prepared, None, activations=activations) for m in (1, 2, 4, 5, 16, 17, 22, 67)]
    finally:
        native().use_core("")
    assert set(results) == {"plain", "intel", "zen5"}
    for core, given_by in results.items():
        for y, same in zip(given_by, results["plain"], strict=True):
            assert np.array_equal(y, same), (core, len(y))


def test_an_unknown_core_is_refused_with_those_known():
    with pytest.raises(ValueError, match="core 'zen9' is unknown; known: plain, intel, zen5"):
        native().use_core("zen9")


@pytest.mark.parametrize("x_dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("s_dtype", ["float32", "float16", "bfloat16"])
def test_case_31_any_activations_with_any_scales(x_dtype, s_dtype):
    q = ordinary_tensor(format_named("uint4:g32", scale_dtype=s_dtype), (33, 96), 2)
    x = np.random.default_rng(2).standard_normal((5, 96)).astype(x_dtype)
    bias = np.random.default_rng(3).standard_normal(33).astype(x_dtype)
    y = CPU.linear(x, CPU.prepare(q), bias)
    assert y.dtype == x.dtype
    wide = CPU.linear(x.astype(np.float32), CPU.prepare(q), bias.astype(np.float32))
    assert np.array_equal(y, wide.astype(x_dtype))


@each_set
@pytest.mark.parametrize("word", ["int4:g32", "uint4:g64", "affine3:g32"])
def test_act_order_products(instruction_set, word):  # noqa: F811
    q = act_ordered(ordinary_tensor(format_named(word), (35, 192), 9), 1)
    x = np.random.default_rng(4).standard_normal((6, 192)).astype(np.float32)
    check_exact(CPU.linear(x, CPU.prepare(q), None), x, q.dequantize("float32"))
    assert np.array_equal(one_hot_result(q, "int8", 64), q.dequantize("float32"))


@each_set
@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_with_nan_or_infinity_spoils_itself_only(instruction_set, activations, value):  # noqa: F811
    q = ordinary_tensor(format_named("q4_0"), (33, 64), 9)
    x = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float32)
    clean = CPU.linear(x, CPU.prepare(q), None, activations=activations)
    x[1, 40] = value
    y = CPU.linear(x, CPU.prepare(q), None, activations=activations)
    assert not np.isfinite(y[1]).any()
    assert np.array_equal(y[[0, 2]], clean[[0, 2]])


@each_set
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1e30])
def test_extreme_activations_in_the_int8_class(instruction_set, magnitude):  # noqa: F811
    q = ordinary_tensor(format_named("q8_0"), (16, 64), 9, scale=1.0)
    x = np.zeros((1, 64), np.float32)
    x[0, 5] = magnitude
    true = q.dequantize("float32")[:, 5].astype(np.float64) * float(x[0, 5])
    y = CPU.linear(x, CPU.prepare(q), None, activations="int8")[0]
    # Half a step of 8 bits, and the rounding of a scale that may be subnormal itself.
    assert (np.abs(y - true) <= np.abs(true) / 254 + 127 * 2.0**-150 * np.abs(q.dequantize("float32")[:, 5])).all()


def test_an_input_that_does_not_fit_is_refused():
    prepared = CPU.prepare(ordinary_tensor(format_named("q4_0"), (8, 64), 9))
    with pytest.raises(ShapeError, match=r"\[linear\] x is float32 \(2, 32\); allowed: \(m, 64\)"):
        CPU.linear(np.zeros((2, 32), np.float32), prepared, None)
    with pytest.raises(ShapeError, match="float64"):
        CPU.linear(np.zeros((2, 64)), prepared, None)
    with pytest.raises(ShapeError, match=r"\[linear\] bias is float32 \(7,\); allowed: 8 elements of float32"):
        CPU.linear(np.zeros((2, 64), np.float32), prepared, np.zeros(7, np.float32))
