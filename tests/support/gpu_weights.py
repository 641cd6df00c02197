"""Weights of random parts, routes and comparisons for the tests of the CUDA kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import torch
from halfbyte import QTensor, format_named
from halfbyte.backends import backend_named
from halfbyte.backends.cuda.weight import refusal
from halfbyte.formats import codec_names, family_of
from halfbyte.numerics.bits import pack

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def cuda():
    backend = backend_named("cuda")
    reason = backend.reason()
    if reason:
        pytest.skip(reason)
    return backend


def random_parts(fmt, shape, rng, wide=False):
    """Random canonical parts whose values are finite. wide: every scale byte that has a value, the
    sign and zero of E4M3 scales among them; else scales near 1 (E8M0) or below 448.
    """
    parts = {}
    for name, (s, dtype) in family_of(fmt).geometry(fmt, shape).items():
        if name == "codes":
            q = rng.integers(0, 1 << fmt.bits, (*shape[:-1], shape[-1]), dtype=np.uint8)
            if fmt.element == "e4m3":
                q[(q & 0x7F) == 0x7F] = 1
            if fmt.element == "e5m2":
                q[(q & 0x7C) == 0x7C] = 1
            parts[name] = pack(q, fmt.bits)
        elif name == "scales" and fmt.scale == "e8m0":
            parts[name] = rng.integers(*((0, 255) if wide else (117, 123)), s, dtype=np.uint8)
        elif name == "scales" and fmt.scale in ("e4m3", "ue4m3"):
            scales = rng.integers(0, 256 if wide else 0x7E, s, dtype=np.uint8)
            parts[name] = np.where((scales & 0x7F) == 0x7F, np.uint8(0), scales).astype(np.uint8)
        elif name == "zeros":
            parts[name] = rng.integers(0, (1 << fmt.bits) + 1, s).astype(dtype)
        elif np.dtype(dtype).kind == "u":
            parts[name] = rng.integers(0, 64 if fmt.scale == "u6" else 16, s).astype(dtype)
        elif np.dtype(dtype).kind == "i":
            parts[name] = rng.integers(-32, 32, s).astype(dtype)
        else:
            parts[name] = (rng.standard_normal(s) * 0.05).astype(dtype)
    return parts


def served():
    """Names of the formats that have a packed CUDA kernel."""
    return [word for word in codec_names() if refusal(format_named(word)) is None]


def unit(fmt):
    """Smallest k that is whole groups and words."""
    return max(fmt.super_size, fmt.group_size, 64 if fmt.scale == "ue4m3" else 8)


def make(word, n, groups, rng, **options):
    fmt = format_named(word, **options)
    k = unit(fmt) * groups
    return QTensor(fmt, (n, k), random_parts(fmt, (n, k), rng))


def same(got, want):
    """Equal by value, NaN where NaN; arrays or tensors of any dtype."""
    got, want = (v.float().cpu().numpy() if hasattr(v, "cpu") else np.asarray(v, np.float32) for v in (got, want))
    np.testing.assert_array_equal(got, want)


def numpy_dtype(name):
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def within(y, x, q, bias, name):
    """`product_within` for a packed weight and the dtype of that name."""
    product_within(y, x, q.dequantize("float64"), bias, DTYPES[name])


def product_within(y, x, w, bias, dtype):
    """y is x · wᵀ + bias up to one rounding of each decoded weight and one of the output to a dtype
    of 16 bits, and float32 sums; per element. bias may be None.
    """
    x64 = x.double().cpu().numpy()
    want = x64 @ w.T + (0 if bias is None else bias.double().cpu().numpy())
    size = np.abs(x64) @ np.abs(w.T)
    u = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    slack = u * size + u * np.abs(want) * 1.01 + 1e-5 * size + (2.0**-24 if dtype == torch.float16 else 0)
    error = np.abs(y.double().cpu().numpy() - want)
    assert error.shape == want.shape
    assert (error <= slack).all(), (w.shape, x.shape, float((error / slack).max()))


def stack(word, shape, rng):
    fmt = format_named(word)
    return QTensor(fmt, shape, random_parts(fmt, shape, rng))


def routing(m, top, seed, experts=6):
    rng = np.random.default_rng(seed)
    index = np.stack([rng.permutation(experts)[:top] for _ in range(m)]) if m else np.zeros((0, top), np.int64)
    share = rng.random((m, top), dtype=np.float32)
    return torch.from_numpy(index).cuda(), torch.from_numpy(share).cuda()


def close(y, want, dtype):
    """Hidden values and results are rounded to x's dtype, each once; everything else is float32."""
    limit = {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    error = np.linalg.norm(y.float().cpu().numpy() - want)
    assert error <= limit * np.linalg.norm(want) + 1e-6, error / np.linalg.norm(want)


def rounds_once(fmt):
    """True where every value is exact in float32, so that kernels round it once whatever the
    output's dtype.
    """
    plain = fmt.scale in ("float16", "bfloat16", "e8m0", "e4m3", "ue4m3") and fmt.element in (
        "uint",
        "int",
        "e2m1",
        "e4m3",
        "e5m2",
    )
    return plain and not (fmt.bias or fmt.minimum or fmt.global_op or fmt.super_size)


def equals_weight(got, q, name, pick=lambda v: v):
    """Decoded values equal the weight's, rounded once to a dtype. Where values need more bits than
    float32 has, the kernels round to float32 first, as `launch.dequantize` documents: then a value
    may be what these two roundings give.
    """
    got, once = got.float().cpu().numpy(), np.asarray(pick(q.dequantize(name)), np.float32)
    if rounds_once(q.format) or name == "float32":
        np.testing.assert_array_equal(got, once)
        return
    with np.errstate(over="ignore"):
        twice = np.asarray(pick(q.dequantize("float32").astype(numpy_dtype(name))), np.float32)
    np.testing.assert_array_equal(got, np.where(got == twice, twice, once))
    assert (once != twice).mean() < 0.01
