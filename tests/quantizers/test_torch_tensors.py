"""The searches and GPTQ on torch tensors: the same grid, the same codes for the same parameters,
the same error.
"""

from __future__ import annotations

import numpy as np
import pytest

import torch
from halfbyte import format_named, quantize
from halfbyte.errors import FormatError
from halfbyte.formats.base import SCALE_DTYPES
from halfbyte.numerics.minifloat import element_table, round_to_element
from halfbyte.quantizers import gptq, mse, weighted_error
from halfbyte.quantizers.fitting import fit, fit_weight
from halfbyte.quantizers.gptq_rounding import inverse_factor
from halfbyte.quantizers.grid import Grid, Params, power_of_two, round_float
from halfbyte.quantizers.groups import group_weights, split_groups
from support.correlated_inputs import problem

CODECS = ("int4:g32", "int3:channel", "int8:g64", "uint4:g64", "affine4:g32", "q4_0", "q4_1", "q8_0", "mxfp4", "nvfp4", "fp4:g32")


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def tensor(x: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(device)


@pytest.mark.parametrize("kind", ["e2m1", "e4m3", "float16", "bfloat16", "float32"])
def test_floats_are_rounded_once(kind):
    """Against every value of the type: the values, their middles, and next to both."""
    if kind in ("e2m1", "e4m3"):
        values = element_table(kind, 4 if kind == "e2m1" else 8)
        values = np.unique(values[np.isfinite(values)])
        middles = (values[1:] + values[:-1]) / 2
        x = np.concatenate([values, middles, np.nextafter(middles, 9e9), np.nextafter(middles, -9e9), [1e9, -1e9]])
        want = element_table(kind, 4 if kind == "e2m1" else 8)[round_to_element(x, kind)]
    else:
        words = np.random.default_rng(0).integers(0, 0xFF000000, 20_000, np.uint32) & 0xFF7FFFFF
        bits = words.view(np.float32).astype(np.float64)
        x = bits[np.isfinite(bits) & (np.abs(bits) < (60_000 if kind == "float16" else 2e38))]
        x = np.concatenate([x, 0.1 * x[:2000], np.ldexp(1.0, -np.arange(10, 30)), [0.0]])
        if kind == "bfloat16":
            # Once: ml_dtypes goes through float32.
            below = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
            above = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000) + np.uint32(0x10000)
            above = above.view(np.float32).astype(np.float64)
            keep = (np.abs(below) <= np.abs(x)) & np.isfinite(above)
            x, below, above = x[keep], below[keep], above[keep]
            even = (below.astype(np.float32).view(np.uint32) >> 16) & 1 == 0
            near, far = np.abs(x - below), np.abs(above - x)
            want = np.where((near < far) | ((near == far) & even), below, above)
        else:
            want = x.astype(SCALE_DTYPES[kind]).astype(np.float64)
    assert np.array_equal(round_float(x.copy(), kind), want)
    for device in devices():
        assert np.array_equal(round_float(tensor(x, device), kind).cpu().numpy(), want)


def test_powers_of_two_are_exact():
    powers = np.arange(-1022, 1024).astype(np.float64)
    want = np.ldexp(1.0, powers.astype(int))
    assert np.array_equal(power_of_two(powers), want)
    for device in devices():
        assert np.array_equal(power_of_two(tensor(powers, device)).cpu().numpy(), want)


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_codes_and_values_for_the_same_parameters(codec):
    """Every multiple of an eighth of a step, middles among them, beyond the ends, both zeros, and
    scales of either sign.
    """
    grid = Grid(format_named(codec))
    x = np.concatenate([np.arange(-300, 300)[None] / 8.0, np.array([[-0.0] * 600]), np.array([[0.0] * 600])])
    for scale in (1.0, 0.25, -1.0, 0.0):
        zero = np.full((3, 1), 5.0) if grid.fmt.zero == "int" else None
        params = Params(np.full((3, 1), scale), zero, np.full((3, 1), 0.75) if grid.fmt.bias else None)
        steps, values = grid.nearest(x, params)
        codes = grid.codes_of(steps, params)
        assert np.array_equal(codes, grid.codes(x, params))
        assert np.array_equal(values, grid.values(codes, params))
        for device in devices():
            there = tensor(x, device)
            steps, its = grid.nearest(there, params.beside(there))
            other = grid.codes_of(steps, params.beside(there))
            assert other.dtype == torch.uint8
            assert np.array_equal(codes, other.cpu().numpy())
            assert np.array_equal(values, its.cpu().numpy())
            assert np.array_equal(values, grid.values(other, params.beside(there)).cpu().numpy())
            assert np.array_equal(values, grid.rounded(there, params.beside(there)).cpu().numpy())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
def test_searched_scales(codec, device):
    """Sums in another order may prefer another of two scales that are as good: the error is the
    same, nearly all codes are.
    """
    w, h = problem(40, 160)
    for importance in (None, np.diag(h)):
        a = mse(w, codec, importance)
        b = mse(tensor(w, device), codec, None if importance is None else tensor(importance, device))
        weights = np.ones(160) if importance is None else importance
        errors = [float((weights * (w - q.dequantize("float64")) ** 2).sum()) for q in (a, b)]
        assert errors[1] == pytest.approx(errors[0], rel=1e-4)
        assert (b.format, b.shape) == (a.format, a.shape)
        assert np.mean(a.dequantize() == b.dequantize()) > 0.95


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_gptq(codec, act_order, device):
    w, h = problem(40, 160)
    a = gptq(w, h, codec, act_order=act_order)
    b = gptq(tensor(w, device), tensor(h, device), codec, act_order=act_order)
    assert (b.format, b.shape) == (a.format, a.shape)
    errors = [weighted_error(w, q, h) for q in (a, b)]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    assert errors[1] < 0.8 * weighted_error(w, quantize(w, codec), h)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", ["int4:g32", "mxfp4", "nvfp4", "uint4:g32", "affine4:g64"])
def test_the_same_walk_under_the_same_parameters(codec, device, monkeypatch):
    """With parameters fitted beforehand and one factor every code is the same."""
    w, h = problem(24, 160, seed=1)
    fitted = fit_weight(Grid(format_named(codec)), w.astype(np.float64), np.diag(h))
    monkeypatch.setattr("halfbyte.quantizers.gptq_rounding.fit_weight", lambda grid, x, i: (fitted[0], fitted[1].beside(x)))
    a = gptq(w, h, codec, act_order=True)
    b = gptq(tensor(w, device), tensor(h, device), codec, act_order=True)
    if device == "cpu":
        assert a == b
    assert np.mean(a.parts["codes"] == b.parts["codes"]) > 0.99


@pytest.mark.parametrize("device", devices())
def test_the_factor_and_its_damping(device):
    _, h = problem(1, 40)
    u = inverse_factor(tensor(h, device), 0.0).cpu().numpy()
    assert np.allclose(u.T @ u @ h, np.eye(40), atol=1e-8)
    one = np.random.default_rng(0).standard_normal((1, 64))
    for scale in (1e-12, 1.0, 1e12):
        q = gptq(tensor(problem(4, 64)[0], device), tensor(one.T @ one * scale, device), "mxfp4")
        assert np.isfinite(q.dequantize()).all()
    dead = problem(8, 64)
    dead[1][10:20] = dead[1][:, 10:20] = 0
    q = gptq(tensor(dead[0], device), tensor(dead[1], device), "int4:g32")
    assert np.abs(dead[0] - q.dequantize())[:, 10:20].max() < 0.1


@pytest.mark.parametrize("shape", [(3, 0), (0, 64), (2, 3, 64), (1, 50)])
def test_shapes(shape):
    x = torch.randn(shape)
    assert mse(x, "int4:g32").shape == shape
    if x.ndim == 2:
        assert gptq(x, torch.eye(shape[1]), "int4:g32").shape == shape


def test_formats_whose_codes_are_looked_up_want_arrays():
    for codec in ("nf4:g64", "mxfp8_e4m3"):
        with pytest.raises(FormatError, match=r"of a Tensor; allowed: int, uint, affine, E2M1. Give a NumPy array"):
            mse(torch.zeros(2, 64), codec)
        with pytest.raises(FormatError, match=r"of a Tensor; allowed: int"):
            gptq(torch.zeros(2, 64), torch.eye(64), codec)
    with pytest.raises(FormatError, match="NaN or infinite"):
        gptq(torch.full((2, 64), torch.nan), torch.eye(64), "int4:g32")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
def test_case_14_constant_tiny_and_zero_groups_are_the_same_on_every_device(codec, device):
    for fill in (9.0, -9.0, 0.0, 1e-30):
        x = np.full((3, 64), fill, np.float32)
        x[1, ::2] = 0
        a, b = mse(x, codec), mse(tensor(x, device), codec)
        assert np.array_equal(a.dequantize(), b.dequantize())
        assert np.isfinite(b.dequantize()).all()


def test_case_23_strided_slices():
    w, h = problem(16, 128)
    x = torch.from_numpy(w)
    for view in (x[:, ::2], x[::3], x[:, 64:], x.T.contiguous().T):
        k = view.shape[1]
        assert mse(view, "int4:g32") == mse(view.contiguous(), "int4:g32")
        assert gptq(view, h[:k, :k], "mxfp4") == gptq(view.contiguous(), h[:k, :k].copy(), "mxfp4")


@pytest.mark.parametrize("codec", CODECS)
def test_a_search_mixes_no_devices(codec):
    """On torch's meta device, where a tensor of the CPU in the middle is an error as on a GPU."""
    grid = Grid(format_named(codec))
    x = torch.empty(40, 256, dtype=torch.float64, device="meta")
    params = fit(grid, split_groups(x, grid.fmt.group_size), group_weights(x, grid.fmt.group_size, x[0]))
    groups = split_groups(x, grid.fmt.group_size)
    nearest, values = grid.nearest(groups, params.at((..., None)))
    assert {t.device.type for t in (params.scale, nearest, values, grid.codes_of(nearest, params.at((..., None))))} == {"meta"}
