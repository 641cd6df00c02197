"""GPTQ and AWQ on one weight and its Hessian, against slow definitions and against everything
tried.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from halfbyte import format_named, quantize
from halfbyte.errors import FormatError, ShapeError
from halfbyte.quantizers import awq_scales, factored, fold_into_rows, gptq, mse, weighted_error
from halfbyte.quantizers.fitting import fit_weight
from halfbyte.quantizers.gptq_rounding import inverse_factor
from halfbyte.quantizers.grid import Grid, Params, factor_of
from support.correlated_inputs import problem

CODECS = (
    "int4:g32", "int4:channel", "uint4:g64", "affine4:g32", "q4_0", "q4_1", "mxfp4", "nvfp4", "fp4:g32", "int3:g64", "iq4_nl",
    "mxfp8_e4m3",
)  # fmt: skip


def relative(w, q, h) -> float:
    return weighted_error(w, q, h)


@pytest.mark.parametrize("codec", CODECS)
def test_gptq_beats_mse_beats_rtn(codec):
    """On the outputs for calibration-like inputs, for every kind of grid; the margins are those
    that were measured, halved.
    """
    w, h = problem(48, 128)
    rtn, searched = relative(w, quantize(w, codec), h), relative(w, mse(w, codec, np.diag(h)), h)
    passed_on, ordered = relative(w, gptq(w, h, codec), h), relative(w, gptq(w, h, codec, act_order=True), h)
    assert searched <= rtn
    assert passed_on < 0.7 * searched
    assert ordered < 0.7 * searched


def slow(w: np.ndarray, h: np.ndarray, grid: Grid, params: Params, order: np.ndarray, damping: float) -> np.ndarray:
    """The same by definition (optimal brain quantization in a fixed order): invert what is left,
    round one, pass on, repeat.
    """
    n, k = w.shape
    size = k if grid.fmt.group_size == -1 else grid.fmt.group_size
    h = h + damping * np.trace(h) / k * np.eye(k)
    left, w = list(order), w.astype(np.float64).copy()
    codes = np.empty((n, k), np.uint8)
    while left:
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        j = left[0]
        own = params.at((slice(None), j // size))
        codes[:, j] = grid.codes(w[:, j], own)
        e = (w[:, j] - grid.values(codes[:, j], own)) / inverse[0, 0]
        w[:, left] -= np.outer(e, inverse[0])
        left.pop(0)
    return codes


@pytest.mark.parametrize("codec", ["int4:g32", "mxfp4", "nvfp4", "uint4:g32", "affine4:g64"])
def test_the_same_codes_as_by_definition(codec):
    w, h = problem(6, 160, seed=1)  # more than one block of 128
    importance = np.diag(h)
    grid, params = fit_weight(Grid(format_named(codec)), w.astype(np.float64), importance)
    order = np.argsort(-importance, kind="stable")
    codes = slow(w, h, grid, params, order, 0.01)
    assert gptq(w, h, codec, act_order=True) == grid.tensor(codes, params, w.shape)


def test_whole_rows_in_input_order_as_by_definition():
    w, h = problem(5, 150, seed=2)
    grid, params = fit_weight(Grid(format_named("int4:channel")), w.astype(np.float64), np.diag(h))
    codes = slow(w, h, grid, params, np.arange(150), 0.01)
    assert gptq(w, h, "int4:channel") == grid.tensor(codes, params, w.shape)


def test_between_rounding_and_the_best_of_all_codes():
    """Five inputs, 2 bits: all 1024 roundings tried. GPTQ closes more than half of the gap that
    rounding to nearest leaves.
    """
    gaps, left = 0.0, 0.0
    for seed in range(12):
        w, h = problem(1, 5, seed)
        fmt = format_named("int2:channel", scale_dtype="float32")
        q = gptq(w, h, fmt, damping=0)
        grid = Grid(fmt)
        params = grid.params_of(q)
        every = np.array(list(itertools.product(range(4), repeat=5)), np.uint8)
        d = w - grid.values(every, params)
        best = float(((d @ h) * d).sum(-1).min())
        d = w - grid.rounded(w.astype(np.float64), params)
        nearest = float(((d @ h) * d).sum())
        d = w - q.dequantize("float64")
        ours = float(((d @ h) * d).sum())
        assert ours >= best * (1 - 1e-9)
        gaps, left = gaps + nearest - best, left + ours - best
    assert left < 0.5 * gaps


def test_the_factor_is_that_of_the_inverse():
    _, h = problem(1, 40)
    u = inverse_factor(h, 0.0)
    assert np.allclose(u.T @ u @ h, np.eye(40), atol=1e-8)
    assert np.allclose(u, np.triu(u))


def test_independent_inputs_are_rounded_to_nearest():
    """A diagonal Hessian passes nothing on: the codes are those of the fitted grid."""
    w, _ = problem(8, 64)
    h = np.diag(np.random.default_rng(0).uniform(1, 2, 64))
    assert gptq(w, h, "int4:g32") == mse(w, "int4:g32", np.diag(h))


def test_inputs_that_calibration_never_saw():
    w, h = problem(8, 64)
    h[10:20] = h[:, 10:20] = 0
    q = gptq(w, h, "int4:g32")
    assert np.isfinite(q.dequantize()).all()
    assert np.abs(w - q.dequantize())[:, 10:20].max() < 0.1
    none = gptq(w, np.zeros((64, 64)), "int4:g32")
    assert none == mse(w, "int4:g32")


def test_singular_and_tiny_hessians_are_damped():
    w, _ = problem(4, 64)
    one = np.random.default_rng(0).standard_normal((1, 64))
    for scale in (1e-12, 1.0, 1e12):
        q = gptq(w, one.T @ one * scale, "mxfp4")
        assert np.isfinite(q.dequantize()).all()
        assert np.abs(q.dequantize()).max() < 10 * np.abs(w).max()


@pytest.mark.parametrize("k", [1, 16, 50, 129])
def test_short_rows_and_tails(k):
    w, h = problem(3, k)
    q = gptq(w, h, "int4:g32")
    assert q.shape == (3, k)
    assert weighted_error(w, q, h) <= weighted_error(w, quantize(w, "int4:g32"), h) * 1.05


def test_what_does_not_fit():
    w, h = problem(4, 32)
    with pytest.raises(ShapeError, match=r"\[gptq\] weight \[4, 32\] with a Hessian \[32, 31\]; wanted \[n, k\] and \[k, k\]"):
        gptq(w, h[:, :31], "int4:g32")
    with pytest.raises(FormatError, match="the Hessian has NaN or infinite entries"):
        gptq(w, np.where(h > 0, np.nan, h), "int4:g32")
    with pytest.raises(FormatError, match="no grid of one scale a group"):
        gptq(np.zeros((2, 256), np.float32), np.eye(256), "hqq4")


@pytest.mark.parametrize("codec", ["int4:g32", "mxfp4", "nvfp4", "uint4:g32"])
def test_awq_is_never_worse_than_plain_rounding_and_keeps_the_product(codec):
    w, h = problem(32, 64, seed=4)
    v = problem(16, 64, seed=5)[0]
    scales, alpha = awq_scales([w, v], h, lambda x: quantize(x, codec))

    def loss(s: np.ndarray) -> float:
        total = 0.0
        for m in (w, v):
            d = quantize((m * s).astype(np.float32), codec).dequantize("float64") / s - m
            total += float(((d @ h) * d).sum())
        return total

    assert 0 <= alpha <= 1
    assert loss(scales) <= loss(np.ones(64))
    # Folding: (W s)(P / s) is W P again.
    p = np.random.default_rng(0).standard_normal((64, 7))
    assert np.allclose((w * scales) @ fold_into_rows(p, scales), w @ p, rtol=1e-5, atol=1e-6)
    assert fold_into_rows(np.ones(64, np.float16), scales).dtype == np.float16


def test_awq_gains_where_some_inputs_are_large():
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((64, 128)) * 0.02).astype(np.float32)
    size = np.where(np.arange(128) % 32 == 5, 30.0, 1.0)
    x = rng.standard_normal((500, 128)) * size
    h = x.T @ x
    scales, alpha = awq_scales([w], h, lambda m: quantize(m, "int4:g128"))
    assert alpha > 0.2
    scaled = quantize((w * scales).astype(np.float32), "int4:g128").dequantize("float64") / scales - w
    plain = quantize(w, "int4:g128").dequantize("float64") - w
    assert ((scaled @ h) * scaled).sum() < 0.7 * ((plain @ h) * plain).sum()


@pytest.mark.parametrize(
    ("word", "level"), [("nvfp4", "multiply"), ("nvfp4", "divide"), ("nvfp4", "amax"), ("nvfp4_ue4m3", "multiply")]
)
def test_a_tensor_scale_follows_from_the_largest_element_alone(word, level):
    """GPTQ asks the format's own encoder for it with that row only."""
    fmt = format_named(word, global_scale=level)
    for seed in range(20):
        w = problem(30, 64, seed)[0] * np.float32(10.0 ** (seed - 10))
        row = int(np.abs(w).max(axis=1).argmax())
        assert factor_of(quantize(w, fmt)) == factor_of(quantize(w[row : row + 1], fmt))


@pytest.mark.parametrize("codec", ["int4:g32", "nvfp4", "nf4:g64"])
def test_a_hessian_made_ready_serves_all_weights_that_share_it(codec):
    w, h = problem(8, 128)
    for act_order in (False, True):
        ready = factored(h, act_order=act_order)
        for rows in (w[:3], w[3:]):
            assert gptq(rows, ready, codec) == gptq(rows, h, codec, act_order=act_order)
    with pytest.raises(ShapeError, match=r"weight \[8, 64\] with a Hessian \[128, 128\]"):
        gptq(w[:, :64], ready, codec)
