"""Weights with a low-rank part or transforms, against Fractions."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.errors import FormatError, HalfbyteError, ShapeError, UnsupportedError
from halfbyte.formats.composite import exact_product, slices
from halfbyte.tensor.concat import concat_rows, take_rows
from halfbyte.tensor.qtensor import QTensor
from halfbyte.tensor.shard import shard_inputs

RNG = np.random.default_rng(3)


def composite(extra: str, n: int = 6, k: int = 32, codec: str = "nvfp4", **parts: np.ndarray) -> QTensor:
    base = hb.quantize(RNG.standard_normal((n, k)).astype(np.float32), codec)
    return QTensor(base.format.with_(extra=extra), base.shape, {**base.parts, **parts})


def base_of(q: QTensor) -> np.ndarray:
    own = {p: a for p, a in q.parts.items() if not p.startswith(("lora", "input_t", "output_t", "transform"))}
    return QTensor(q.format.with_(extra=""), q.shape, own).dequantize("float64")


def fractions(a: np.ndarray) -> list[list[Fraction]]:
    return [[Fraction(float(x)) for x in row] for row in a.astype(np.float64)]


def times(a: list[list[Fraction]], b: list[list[Fraction]]) -> list[list[Fraction]]:
    return [[sum((x * y for x, y in zip(row, column, strict=True)), Fraction(0)) for column in zip(*b, strict=True)] for row in a]


def nearest(got: np.ndarray, exact: list[list[Fraction]]) -> bool:
    """No neighbour of any value is nearer to the exact one."""
    for row, want in zip(got, exact, strict=True):
        for value, fraction in zip(row, want, strict=True):
            error = abs(Fraction(float(value)) - fraction)
            for side in (np.inf, -np.inf):
                other = np.nextafter(value, value.dtype.type(side))
                if abs(Fraction(float(other)) - fraction) < error:
                    return False
    return True


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_low_rank_part_is_added_exactly(dtype):
    a, b = (RNG.standard_normal(s) * 10.0 ** RNG.integers(-6, 3, s) for s in ((5, 32), (6, 5)))
    q = composite("low-rank", lora_a=a.astype(dtype), lora_b=b.astype(dtype))
    product = times(fractions(q.parts["lora_b"]), fractions(q.parts["lora_a"]))
    exact = [[x + y for x, y in zip(r, s, strict=True)] for r, s in zip(fractions(base_of(q)), product, strict=True)]
    for out in ("float32", "float16", "bfloat16"):
        assert nearest(q.dequantize(out), exact)
    assert np.array_equal(q[2:5].dequantize("float32"), q.dequantize("float32")[2:5])
    assert np.array_equal(hb.linear(np.eye(32, dtype=np.float32), q), q.dequantize("float32").T)


@pytest.mark.parametrize(("size", "out_size"), [(32, 0), (4, 0), (16, 3), (8, 6), (0, 2)])
@pytest.mark.parametrize("hadamard", [True, False])
def test_transforms_are_folded_exactly(size, out_size, hadamard):
    parts, norms = {}, [1, 1]
    for at, (name, s) in enumerate((("input_transform", size), ("output_transform", out_size))):
        if s:
            signs = np.where(RNG.random((s, s)) < 0.5, -1.0, 1.0)
            parts[name] = (signs if hadamard else RNG.random((s, s))).astype(np.float32)
            norms[at] = s if hadamard else 1
    q = composite("transform", codec="int4:g16", transform_norms=np.array(norms, np.int32), **parts)
    exact = fractions(base_of(q))
    for name, transposed in (("input_transform", False), ("output_transform", True)):
        if name in parts:
            whole = np.kron(np.eye(q.shape[1 - transposed] // len(parts[name])), parts[name])
            exact = times(fractions(whole.T), exact) if transposed else times(exact, fractions(whole.T))
    norm = norms[0] * norms[1]
    root = Fraction(isqrt(norm * 10**80), 10**40)
    exact = [[x / root for x in row] for row in exact]
    got = q.dequantize("float32")
    assert nearest(got, exact)
    assert np.array_equal(q[1:4].dequantize("float32"), got[1:4])
    assert np.array_equal(hb.linear(np.eye(32, dtype=np.float32), q), got.T)


def test_slices_add_up_and_products_of_slices_are_exact():
    a = RNG.standard_normal((4, 9)) * 10.0 ** RNG.integers(-30, 30, (4, 9))
    cut = slices(a, 11)
    assert [[sum((Fraction(float(c[i, j])) for c in cut), Fraction(0)) for j in range(9)] for i in range(4)] == fractions(a)
    b = RNG.standard_normal((9, 3)).astype(np.float32).astype(np.float64)
    terms = exact_product(a, b)
    got = [[sum((Fraction(float(t[i, j])) for t in terms), Fraction(0)) for j in range(3)] for i in range(4)]
    assert got == times(fractions(a), fractions(b))
    assert np.isnan(exact_product(np.array([[np.nan, 1.0]]), np.ones((2, 1)))[0]).all()
    for one, other in (([[np.inf, 1.0]], [[1.0], [1.0]]), ([[1.0, 1.0]], [[-np.inf], [1.0]])):  # infinite beside finite values
        assert np.isinf(sum(exact_product(np.array(one), np.array(other)))).all()


def test_it_travels_through_halfbytes_own_file(tmp_path):
    q = composite("low-rank", lora_a=np.ones((2, 32), np.float16), lora_b=np.ones((6, 2), np.float16))
    hb.save(tmp_path / "x.safetensors", {"w": q})
    again = hb.load(tmp_path / "x.safetensors")["w"]
    assert again == q
    assert str(again.format) == "nvfp4+low-rank:g16"


def test_what_cannot_be_is_refused():
    a, b = np.ones((2, 32), np.float16), np.ones((6, 2), np.float16)
    q = composite("low-rank", lora_a=a, lora_b=b)
    with pytest.raises(FormatError, match="has lora_a; wanted lora_a, lora_b"):
        composite("low-rank", lora_a=a)
    with pytest.raises(ShapeError, match=r"lora_a \[2, 32\] and lora_b \[6, 3\]; wanted \[r, 32\] and \[6, r\]"):
        composite("low-rank", lora_a=a, lora_b=np.ones((6, 3), np.float16))
    with pytest.raises(ShapeError, match="is int8"):
        composite("low-rank", lora_a=a.astype(np.int8), lora_b=b)
    with pytest.raises(ShapeError, match=r"input_transform is \[5, 5\]; wanted a square whose size divides 32"):
        composite("transform", input_transform=np.ones((5, 5)), transform_norms=np.ones(2, np.int32))
    with pytest.raises(FormatError, match="neither input_transform nor output_transform"):
        composite("transform", transform_norms=np.ones(2, np.int32))
    with pytest.raises(FormatError, match="transform_norms are"):
        composite("transform", input_transform=np.ones((4, 4)), transform_norms=np.zeros(2, np.int32))
    with pytest.raises(ShapeError, match="has parts that all of its rows share"):
        concat_rows([q, q])
    with pytest.raises(ShapeError, match="cannot be reordered"):
        take_rows(q, np.arange(6))
    with pytest.raises(UnsupportedError, match="depends on whole rows and cannot be cut along its inputs"):
        shard_inputs(q, 0, 16)
    with pytest.raises(UnsupportedError, match="decoded only"):
        hb.quantize(np.ones((6, 32), np.float32), q.format)
    with pytest.raises(HalfbyteError, match="only a matrix"):
        QTensor(q.format, (1, 6, 32), {p: x[None] for p, x in q.parts.items()})


def test_a_product_over_many_inner_terms_is_exact():
    """4,096 products of full float64 mantissas: sums of slices that are too wide are rounded."""
    whole = RNG.integers(1 << 52, 1 << 53, 4096)
    a = whole.astype(np.float64)[None]
    terms = exact_product(a, a.T.copy())
    assert sum(int(t[0, 0]) for t in terms) == sum(x * x for x in whole.tolist())


@pytest.mark.parametrize("norm", [3, 96])
def test_the_root_of_a_norm_decides_values_beside_a_midpoint(norm):
    """Values whose quotient by the root lies within float64's rounding of a midpoint of float32."""
    middle = (RNG.integers(1 << 23, 1 << 24, (32, 32)) + 0.5) * 2.0**-24
    beside = middle * np.sqrt(norm)
    unit = np.zeros((32, 32), np.float32)
    np.fill_diagonal(unit, 1)
    base = hb.quantize(unit, "int4:g16")
    parts = {**base.parts, "scales": np.ones_like(base.parts["scales"])}
    parts["codes"] = hb.quantize(unit * 7, "int4:g16").parts["codes"]
    whole = QTensor(base.format, base.shape, parts)
    exact = fractions(whole.dequantize("float64"))
    transforms = {"input_transform": beside, "transform_norms": np.array([norm, 1], np.int32)}
    q = QTensor(base.format.with_(extra="transform"), base.shape, {**parts, **transforms})
    root = Fraction(isqrt(norm * 10**120), 10**60)
    assert nearest(q.dequantize("float32"), [[x / root for x in row] for row in times(exact, fractions(beside.T))])


@pytest.mark.parametrize("extra", ["low-rank", "transform"])
def test_no_rows_and_no_inputs(extra):
    for n, k in ((0, 32), (4, 0), (0, 0)):
        base = hb.quantize(np.zeros((n, k), np.float32), "int4:g16")
        parts = {"lora_a": np.ones((2, k), np.float32), "lora_b": np.ones((n, 2), np.float32)}
        if extra == "transform":
            parts = {"input_transform": np.eye(16, dtype=np.float32), "transform_norms": np.ones(2, np.int32)}
        q = QTensor(base.format.with_(extra=extra), (n, k), {**base.parts, **parts})
        for dtype in ("float32", "float16", "bfloat16"):
            assert q.dequantize(dtype).shape == (n, k)
            assert q[:0].dequantize(dtype).shape == (0, k)
