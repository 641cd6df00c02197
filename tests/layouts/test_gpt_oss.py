"""gpt-oss blocks: random bytes, drawn shapes, nibble orders against GGUF's both ways, E8M0 bytes by
dtype and at their edges.
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
from support.random_tensors import check_return, check_round_trip, random_array, random_tensor

GPT_OSS, GGUF, MLX, MODELOPT, TORCHAO = (LAYOUTS[n] for n in ("gpt-oss", "gguf", "mlx", "modelopt", "torchao"))
E8M0 = ml_dtypes.float8_e8m0fnu


def foreign(rng: np.random.Generator, *rows: int, groups: int, dtype=np.uint8) -> dict[str, np.ndarray]:
    return {"blocks": random_array(rng, np.uint8, *rows, groups, 16), "scales": random_array(rng, dtype, *rows, groups)}


@pytest.mark.parametrize("dtype", [np.uint8, E8M0], ids=["U8", "F8_E8M0"])
@pytest.mark.parametrize("rows", [(6,), (4, 6), (0, 6), (4, 0), (2, 3, 4)], ids=str)
def test_random_bytes_come_back(rows: tuple[int, ...], dtype) -> None:
    for groups in (0, 1, 3):
        q = check_round_trip(GPT_OSS, foreign(np.random.default_rng(1), *rows, groups=groups, dtype=dtype), {})
        assert q.shape == (*rows, 32 * groups)
        assert q.format == format_named("mxfp4")


@given(lead=st.sampled_from([(), (0,), (1,), (3,)]), n=st.integers(0, 6), groups=st.integers(0, 4), seed=st.integers(0, 1 << 16))
def test_drawn_tensors_come_back(lead, n, groups, seed) -> None:
    check_return(GPT_OSS, random_tensor(format_named("mxfp4"), (*lead, n, 32 * groups), seed))


def test_byte_j_of_a_block_holds_elements_2j_and_2j_plus_1_and_rows_stay_interleaved() -> None:
    tensors = foreign(np.random.default_rng(2), 2, 4, groups=2)
    codes = unpack(GPT_OSS.unpack(tensors, {}).parts["codes"], 4, 64)
    for e, r, g, j in np.ndindex(2, 4, 2, 16):
        byte = int(tensors["blocks"][e, r, g, j])
        assert (codes[e, r, 32 * g + 2 * j], codes[e, r, 32 * g + 2 * j + 1]) == (byte & 15, byte >> 4)


def test_case_05_nibble_orders_of_gguf_and_gpt_oss_convert_both_ways() -> None:
    pairwise = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8)  # codes 0..15, 0..15
    split = np.array([17 * i for i in range(16)], np.uint8)  # 00 11 22 .. FF
    q = GPT_OSS.unpack({"blocks": pairwise.reshape(1, 1, 16), "scales": np.array([[120]], np.uint8)}, {})
    assert unpack(q.parts["codes"], 4, 32)[0].tolist() == [*range(16), *range(16)]
    gguf = GGUF.pack(q, {"type": "MXFP4"})
    assert gguf["weight"].tolist() == [[120, *split.tolist()]]
    back = GGUF.unpack(gguf, {"type": "MXFP4"})
    assert back == q
    again = GPT_OSS.pack(back, {})
    assert again["blocks"].reshape(-1).tolist() == pairwise.tolist()
    assert again["scales"].tolist() == [[120]]


def test_case_05_a_stack_of_experts_converts_both_ways_on_random_bytes() -> None:
    tensors = foreign(np.random.default_rng(5), 3, 8, groups=4)
    q = GPT_OSS.unpack(tensors, {})
    through = GGUF.unpack(GGUF.pack(q, {"type": "MXFP4"}), {"type": "MXFP4"})
    assert through == q
    out = GPT_OSS.pack(through, {})
    assert all(np.array_equal(out[s], tensors[s]) for s in tensors)


def one_block(byte: int, code: int, dtype=np.uint8) -> dict[str, np.ndarray]:
    return {
        "blocks": np.full((1, 1, 16), code | code << 4, np.uint8),
        "scales": np.array([[byte]], np.uint8).view(dtype),
    }


@pytest.mark.parametrize("dtype", [np.uint8, E8M0], ids=["U8", "F8_E8M0"])
def test_case_06_scale_bytes_0_and_255(dtype) -> None:
    low = GPT_OSS.unpack(one_block(0, 2, dtype), {})  # code 2 is 1.0
    assert (low.dequantize("float32") == np.float32(5.877471754111438e-39)).all()
    assert (low.dequantize("float32", "producer") == np.float32(5.877471754111438e-39)).all()
    top = GPT_OSS.unpack(one_block(255, 2, dtype), {})
    assert np.isnan(top.dequantize("float32")).all()
    assert np.isposinf(top.dequantize("float32", "producer")).all()  # 1.0 · 2^128
    assert (GPT_OSS.unpack(one_block(255, 1, dtype), {}).dequantize("float32", "producer") == 2.0**127).all()
    assert (GPT_OSS.unpack(one_block(255, 0, dtype), {}).dequantize("float32", "producer") == 0).all()


@pytest.mark.parametrize(
    ("origin", "one", "zero"),
    [("mlx", np.inf, np.nan), ("modelopt", np.inf, np.nan), ("torchao", np.nan, np.nan), ("transformers", np.inf, 0.0)],
)
def test_case_06_what_each_producer_makes_of_byte_255(origin: str, one: float, zero: float) -> None:
    parts = {"codes": np.full((1, 16), 0x02, np.uint8), "scales": np.array([[255]], np.uint8)}  # 1.0, 0.0, 1.0, ...
    q = QTensor(format_named("mxfp4"), (1, 32), parts, origin=origin)
    value = q.dequantize("float32", "producer")[0, :2]
    assert np.array_equal(value, np.array([one, zero], np.float32), equal_nan=True)
    assert np.isnan(q.dequantize("float32")).all()


@pytest.mark.parametrize("dtype", [np.uint8, E8M0], ids=["U8", "F8_E8M0"])
def test_case_07_u8_scales_are_exponents_not_numbers(dtype) -> None:
    scale = np.array([[122]], np.uint8).view(dtype)
    row = np.full((1, 16), 0x22, np.uint8)
    read = {
        "gpt-oss": GPT_OSS.unpack({"blocks": row.reshape(1, 1, 16), "scales": scale}, {}),
        "mlx": MLX.unpack({"weight": row.view(np.uint32), "scales": scale}, {"mode": "mxfp4"}),
        "modelopt": MODELOPT.unpack({"weight": row, "weight_scale": scale}, {}),
        "torchao": TORCHAO.unpack({"weight_qdata": row, "weight_scale": scale}, {}),
    }
    for name, q in read.items():
        for arithmetic in ("exact", "producer"):
            assert (q.dequantize("float32", arithmetic) == 0.03125).all(), name
    assert len({q.parts["codes"].tobytes() for q in read.values()}) == 1


def test_what_does_not_fit_is_refused_with_the_tensors_full_name() -> None:
    good = foreign(np.random.default_rng(0), 2, 3, groups=2)
    with pytest.raises(LayoutError, match=r"experts\.down_proj_scales is missing"):
        GPT_OSS.unpack({"blocks": good["blocks"]}, {}, "experts.down_proj")
    with pytest.raises(LayoutError, match=r"experts.down_proj_blocks has shape \[2, 3, 32\]; wanted \[experts, rows, k/32, 16\]"):
        GPT_OSS.unpack({**good, "blocks": good["blocks"].reshape(2, 3, 32)}, {}, "experts.down_proj")
    with pytest.raises(LayoutError, match=r"experts.down_proj_scales has shape \[2, 3, 1\]; wanted \[2, 3, 2\]"):
        GPT_OSS.unpack({**good, "scales": good["scales"][..., :1]}, {}, "experts.down_proj")
    with pytest.raises(LayoutError, match="holds mxfp4:g32 only"):
        GPT_OSS.pack(random_tensor(format_named("nvfp4"), (2, 32), 0), {})
    with pytest.raises(LayoutError, match="k = 40 is not whole blocks of 32"):
        GPT_OSS.pack(random_tensor(format_named("mxfp4"), (2, 40), 0), {})
