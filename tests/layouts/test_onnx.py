"""MatMulNBits initializers: random bytes, drawn shapes with partial blocks, packed, default and
float zero points, group index.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import LayoutError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.numerics.bits import unpack
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_numbers
from support.layout_tensors import headers
from support.random_tensors import check_return, check_round_trip, finite_tensor, random_array, random_tensor

ONNX = LAYOUTS["onnx"]
BITS = (2, 4, 8)
FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def foreign(
    rng: np.random.Generator, bits: int, n: int, k: int, block: int, zeros: str = "packed", flat: bool = False
) -> tuple[dict, dict]:
    blocks = -(-k // block)
    tensors = {
        f"weight_Q{bits}": random_array(rng, np.uint8, n, blocks, block * bits // 8),
        "weight_scales": random_array(rng, np.float32, n, blocks),
    }
    if zeros == "packed":
        tensors["weight_zero_points"] = random_array(rng, np.uint8, n, -(-blocks * bits // 8))
    elif zeros == "float":
        tensors["weight_zero_points"] = random_array(rng, np.float32, n, blocks)
    if flat:
        tensors = {s: t if s.startswith("weight_Q") else t.reshape(-1) for s, t in tensors.items()}
    return tensors, {"K": k, "N": n, "bits": bits, "block_size": block}


@pytest.mark.parametrize("flat", [False, True], ids=["matrix", "flat"])
@pytest.mark.parametrize("zeros", ["packed", "float", "default"])
@pytest.mark.parametrize("bits", BITS)
def test_random_bytes_come_back_padding_included(bits: int, zeros: str, flat: bool) -> None:
    for n, k, block in ((5, 256, 32), (3, 200, 32), (4, 100, 16), (1, 17, 64), (0, 64, 32), (7, 130, 128)):
        tensors, config = foreign(np.random.default_rng(k), bits, n, k, block, zeros, flat)
        q = check_round_trip(ONNX, tensors, config)
        assert q.shape == (n, k)
        assert q.format.zero == {"packed": "int", "float": "float", "default": "none"}[zeros]
        without = {key: value for key, value in config.items() if key != "K"}  # whole blocks
        assert ONNX.describe(headers(tensors), without).shape == (n, -(-k // block) * block)


@given(
    bits=st.sampled_from(BITS),
    kind=st.sampled_from(["int", "uint", "hqq"]),
    n=st.integers(0, 6),
    k=st.integers(0, 150),
    block=st.sampled_from([16, 32, 128]),
    dtype=st.sampled_from(sorted(FLOATS)),
    act_order=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_tensors_come_back(bits, kind, n, k, block, dtype, act_order, seed) -> None:
    fmt = format_named(f"{kind}{bits}", block, scale_dtype=dtype)
    q = random_tensor(fmt, (n, k), seed)
    if kind == "hqq":  # a short last block keeps its row: onnx has no flat groups
        parts = {p: a for p, a in q.parts.items() if p == "codes"}
        rng = np.random.default_rng(seed)
        parts |= {p: random_array(rng, FLOATS[dtype], n, fmt.groups(k)) for p in ("scales", "zeros")}
        q = QTensor(fmt, (n, k), parts)
    if act_order and k:
        index = np.random.default_rng(seed).integers(0, fmt.groups(k), k).astype(np.int32)
        q = QTensor(fmt, (n, k), {**q.parts, "group_index": index})
    check_return(ONNX, q)


@pytest.mark.parametrize("bits", BITS)
def test_codes_and_zero_points_lie_low_bits_first(bits: int) -> None:
    tensors, config = foreign(np.random.default_rng(1), bits, 3, 90, 32)
    q = ONNX.unpack(tensors, config)
    codes = unpack(q.parts["codes"], bits, 90)
    top, per = (1 << bits) - 1, 8 // bits
    for r, j in np.ndindex(3, 90):
        byte = int(tensors[f"weight_Q{bits}"][r, j // 32, j % 32 // per])
        assert codes[r, j] == byte >> (bits * (j % per)) & top
    for r, g in np.ndindex(3, 3):
        byte = int(tensors["weight_zero_points"][r, g // per])
        assert q.parts["zeros"][r, g] == byte >> (bits * (g % per)) & top


def test_the_default_zero_point_is_the_middle_code() -> None:
    for bits in BITS:
        codes = np.zeros((1, 1, 32 * bits // 8), np.uint8)
        q = ONNX.unpack({f"weight_Q{bits}": codes, "weight_scales": np.ones((1, 1), np.float32)}, {"K": 32})
        assert (q.dequantize() == -(1 << (bits - 1))).all()


@pytest.mark.parametrize("scales", ["float16", "float32"])
def test_float_zero_points_and_the_dtype_of_the_model(scales: str) -> None:
    fmt = format_named("hqq4", 32, scale_dtype=scales)
    q = finite_tensor(fmt, (4, 64), 1, "onnxruntime")
    check_return(ONNX, QTensor(fmt, (4, 64), q.parts))
    code = unpack(q.parts["codes"], 4, 64).astype(np.float32)
    z, s = (np.repeat(q.parts[p].astype(np.float32), 32, 1) for p in ("zeros", "scales"))
    expected = (code * s + -z * s).astype(FLOATS[scales]).astype(np.float32)  # the session multiplies the zero points apart
    assert same_numbers(q.dequantize("float32", "producer"), expected)


def test_what_does_not_fit_is_refused() -> None:
    tensors, config = foreign(np.random.default_rng(0), 4, 3, 64, 32)
    with pytest.raises(LayoutError, match=r"m\.weight_Q4 has shape \[3, 2, 16\]: block_size 32; the node says 64"):
        ONNX.describe(headers(tensors), {**config, "block_size": 64}, "m")
    with pytest.raises(LayoutError, match=r"m\.weight_Q4 has 2 blocks of 32; K = 65 takes 3"):
        ONNX.describe(tensors, {**config, "K": 65}, "m")
    with pytest.raises(LayoutError, match=r"m\.weight_scales has shape \[3, 1\]; wanted \[3, 2\] or \[6\]"):
        ONNX.describe({**tensors, "weight_scales": tensors["weight_scales"][:, :1]}, config, "m")
    with pytest.raises(LayoutError, match="m has weight_scales; wanted one of weight_Q2, weight_Q4, weight_Q8"):
        ONNX.describe({"weight_scales": tensors["weight_scales"]}, config, "m")
    with pytest.raises(LayoutError, match=r"m\.weight_g_idx has 2 at input 0; there are 2 groups"):
        ONNX.unpack({**tensors, "weight_g_idx": np.full(64, 2, np.int32)}, config, "m")
    for fmt, why in (
        (format_named("int3", 32), "of 2, 4 or 8 bits"), (format_named("int4", 48), "a power of two"),
        (format_named("int4", -1), "a power of two"),
        (format_named("nf4", 64), "MatMulNBits holds"), (format_named("int4", 32, rows=4), "MatMulNBits holds"),
    ):  # fmt: skip
        with pytest.raises(LayoutError, match=why):
            ONNX.pack(random_tensor(fmt, (4, 96), 0), {})
    high = random_tensor(format_named("uint4", 32), (2, 32), 0)
    with pytest.raises(LayoutError, match="zero points run from 16 to 16; it stores 0 to 15"):
        ONNX.pack(QTensor(high.format, high.shape, {**high.parts, "zeros": np.full((2, 1), 16, np.int16)}), {})


def test_padding_of_zero_points_is_kept_and_the_usual_one_is_not_noted() -> None:
    tensors, config = foreign(np.random.default_rng(2), 4, 2, 96, 32)
    for padding in (0x0, 0x8):
        tensors["weight_zero_points"] = np.array([[0x21, padding << 4 | 3], [0x54, padding << 4 | 6]], np.uint8)
        q = check_round_trip(ONNX, tensors, config)
        assert q.parts["zeros"].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert ("zero_padding" in q.details) == (padding != 8)
        assert "scales_shape" not in q.details
