"""ggml blocks: where every bit lies, by an independent walk; a bijection on random bytes; and what
the layout refuses.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import FormatError, LayoutError, ShapeError, UnsupportedError
from halfbyte.formats import family_of, format_named
from halfbyte.formats.ggml.types import GGML_BY_CODEC, GGML_TYPES, ggml_type
from halfbyte.layouts import LAYOUTS, Header
from halfbyte.layouts.gguf.blocks import ORDERS
from halfbyte.layouts.gguf.layout import _CHUNK, GGUF, dense
from halfbyte.numerics.bits import pack, unpack
from halfbyte.tensor.qtensor import QTensor
from halfbyte.tensor.quantize import quantize
from support.random_tensors import random_tensor

BLOCKS = list(GGML_BY_CODEC.values())
SPLIT = [t for t in BLOCKS if t.name in ORDERS]
NAMES = {"argnames": "kind", "argvalues": BLOCKS, "ids": lambda t: t.name}


def random_rows(kind, lead=(3,), blocks=2, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*lead, blocks * kind.nbytes), dtype=np.uint8)


def bit(block: bytes, at: int) -> int:
    return block[at // 8] >> (at % 8) & 1


def code_by_hand(name: str, block: bytes, j: int) -> int:
    """Code of element j, one element at a time, after the comments of ggml-common.h and the loops
    that read the blocks.
    """
    low = j % 32 < 16
    if name in ("Q4_0", "IQ4_NL", "MXFP4", "Q4_1"):
        byte = block[{"Q4_0": 2, "IQ4_NL": 2, "MXFP4": 1, "Q4_1": 4}[name] + j % 16]
        return byte & 15 if low else byte >> 4
    if name in ("Q5_0", "Q5_1"):
        at = {"Q5_0": 2, "Q5_1": 4}[name]
        byte = block[at + 4 + j % 16]
        return (byte & 15 if low else byte >> 4) | bit(block[at : at + 4], j) << 4
    if name == "Q8_0":
        return (block[2 + j] + 128) % 256
    if name == "NVFP4":
        byte = block[4 + 8 * (j // 16) + j % 8]
        return byte & 15 if j % 16 < 8 else byte >> 4
    if name == "IQ4_XS":
        byte = block[8 + 16 * (j // 32) + j % 16]
        return byte & 15 if low else byte >> 4
    half, quarter, lane = j // 128, j // 32, j % 32
    if name == "Q2_K":
        return block[16 + 32 * half + lane] >> 2 * (quarter % 4) & 3
    if name == "Q3_K":
        two = block[32 + 32 * half + lane] >> 2 * (quarter % 4) & 3
        return two | (block[lane] >> quarter & 1) << 2
    if name in ("Q4_K", "Q5_K"):
        start = 16 if name == "Q4_K" else 48
        byte = block[start + 32 * (j // 64) + lane]
        code = byte & 15 if j % 64 < 32 else byte >> 4
        return code if name == "Q4_K" else code | (block[16 + lane] >> quarter & 1) << 4
    assert name == "Q6_K"
    byte = block[64 * half + 32 * (quarter % 2) + lane]
    four = byte & 15 if quarter % 4 < 2 else byte >> 4
    return four | (block[128 + 32 * half + lane] >> 2 * (quarter % 4) & 3) << 4


def half_at(block: bytes, at: int) -> np.float16:
    return np.frombuffer(block[at : at + 2], np.float16)[0]


def k4(block: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum j of the twelve bytes of Q4_K and Q5_K."""
    q = block[4:16]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def scales_by_hand(name: str, block: bytes) -> dict[str, list]:
    """Every other part of a block, one group at a time."""
    if name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"):
        return {"scales": [half_at(block, 0)]}
    if name in ("Q4_1", "Q5_1"):
        return {"scales": [half_at(block, 0)], "biases": [half_at(block, 2)]}
    if name == "MXFP4":
        return {"scales": [block[0]]}
    if name == "NVFP4":
        return {"scales": list(block[:4])}
    if name == "Q2_K":
        small = {"scales": [b & 15 for b in block[:16]], "mins": [b >> 4 for b in block[:16]]}
        return {**small, "super_scales": [half_at(block, 80)], "super_mins": [half_at(block, 82)]}
    if name == "Q3_K":
        q = block[96:108]
        low = [q[j % 8] >> 4 * (j // 8) & 15 for j in range(16)]
        high = [q[8 + j % 4] >> 2 * (j // 4) & 3 for j in range(16)]
        return {"scales": [a + 16 * b - 32 for a, b in zip(low, high, strict=True)], "super_scales": [half_at(block, 108)]}
    if name in ("Q4_K", "Q5_K"):
        both = [k4(block, j) for j in range(8)]
        small = {"scales": [s for s, _ in both], "mins": [m for _, m in both]}
        return {**small, "super_scales": [half_at(block, 0)], "super_mins": [half_at(block, 2)]}
    if name == "Q6_K":
        return {"scales": list(np.frombuffer(block[192:208], np.int8)), "super_scales": [half_at(block, 208)]}
    assert name == "IQ4_XS"
    high = block[2] | block[3] << 8
    scales = [(block[4 + j // 2] >> 4 * (j % 2) & 15 | (high >> 2 * j & 3) << 4) - 32 for j in range(8)]
    return {"scales": scales, "super_scales": [half_at(block, 0)]}


@pytest.mark.parametrize("kind", SPLIT, ids=lambda t: t.name)
def test_every_bit_lies_where_ggml_reads_it(kind):
    raw = random_rows(kind, (2,), 2, seed=kind.id)
    q = GGUF().unpack({"weight": raw}, {"type": kind.name})
    codes = unpack(q.parts["codes"], q.format.bits, q.shape[1])
    for i in range(2):
        blocks = [raw[i, b * kind.nbytes : (b + 1) * kind.nbytes].tobytes() for b in range(2)]
        assert codes[i].tolist() == [code_by_hand(kind.name, b, j) for b in blocks for j in range(kind.block)]
        by_hand = [scales_by_hand(kind.name, b) for b in blocks]
        assert q.parts.keys() == {"codes", *by_hand[0]}
        for part in by_hand[0]:
            want = np.array([v for block in by_hand for v in block[part]], q.parts[part].dtype)
            assert q.parts[part][i].tobytes() == want.tobytes(), part


@pytest.mark.parametrize(**NAMES)
@given(lead=st.lists(st.integers(0, 3), min_size=1, max_size=2), blocks=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
def test_split_and_join_are_inverse_on_random_bytes(kind, lead, blocks, seed):
    raw = random_rows(kind, tuple(lead), blocks, seed)
    q = GGUF().unpack({"weight": raw}, {"type": kind.name})
    assert q.shape == (*lead, blocks * kind.block)
    assert q.origin == "gguf"
    q.validate()
    back = GGUF().pack(q, {"type": kind.id})
    assert back.keys() == {"weight"}
    assert back["weight"].dtype == np.uint8
    assert np.array_equal(back["weight"], raw)
    assert GGUF().unpack(back, {"type": kind.name}) == q


@pytest.mark.parametrize(**NAMES)
def test_chunks_do_not_show(kind):
    """More blocks than one chunk of the split holds, and a last chunk that is short."""
    raw = random_rows(kind, (3,), _CHUNK // kind.block // 2 + 5)
    q = GGUF().unpack({"weight": raw}, {"type": kind.name})
    assert np.array_equal(GGUF().pack(q, {})["weight"], raw)
    one = GGUF().unpack({"weight": raw[2:]}, {"type": kind.name})
    assert one == q.rows(2, 3)


@pytest.mark.parametrize(**NAMES)
def test_strided_and_sliced_rows(kind):
    raw = random_rows(kind, (6,), 3)
    q = GGUF().unpack({"weight": raw[::2, kind.nbytes :]}, {"type": kind.name})
    assert np.array_equal(GGUF().pack(q, {})["weight"], raw[::2, kind.nbytes :])
    assert np.array_equal(GGUF().pack(q.rows(1, 2), {})["weight"], raw[2:3, kind.nbytes :])
    stack = GGUF().unpack({"weight": raw.reshape(2, 3, -1)}, {"type": kind.name})
    assert np.array_equal(GGUF().pack(stack[1], {})["weight"], raw[3:])
    assert np.array_equal(GGUF().pack(stack.rows(0, 2), {})["weight"], raw.reshape(2, 3, -1)[:, :2])


@pytest.mark.parametrize(**NAMES)
def test_every_code_and_small_scale_can_be_written(kind):
    """The other direction of the bijection: random parts, not random blocks."""
    fmt = format_named(kind.codec).with_(global_op="")
    rng = np.random.default_rng(kind.id)
    shape = (2, 2 * kind.block)
    parts = {}
    for part, spec in family_of(fmt).geometry(fmt, shape).items():
        span = {"u4": (0, 16), "u6": (0, 64), "i6": (-32, 32)}.get(fmt.scale) if part in ("scales", "mins") else None
        if span:
            parts[part] = rng.integers(*span, spec.shape).astype(spec.dtype)
        else:
            raw = rng.integers(0, 256, (*spec.shape[:-1], spec.shape[-1] * spec.dtype.itemsize), dtype=np.uint8)
            parts[part] = raw.view(spec.dtype)
    q = QTensor(fmt, shape, parts, origin="gguf")
    assert GGUF().unpack(GGUF().pack(q, {}), {"type": kind.name}) == q


def has_minimum(kind):
    return kind.codec in ("q4_1", "q5_1", "q2_K", "q4_K", "q5_K")


@pytest.mark.parametrize("scale", [[0.75], [0.75, -3.5]], ids=["matrix", "experts"])
@pytest.mark.parametrize("kind", [t for t in BLOCKS if not has_minimum(t)], ids=lambda t: t.name)
def test_a_factor_a_matrix_multiplies_every_value(kind, scale):
    factor = np.array(scale, np.float32)
    lead = (2, 4) if len(scale) > 1 else (4,)
    raw = random_rows(kind, lead, 1)
    q = GGUF().unpack({"weight": raw, "scale": factor}, {"type": kind.name})
    plain = GGUF().unpack({"weight": raw}, {"type": kind.name})
    assert (q.format.global_op, plain.format.global_op) == ("multiply", "")
    for arithmetic in ("exact", "producer"):
        one = plain.dequantize("float32", arithmetic).reshape(len(scale), 4, -1)  # exact for these types
        with np.errstate(all="ignore"):
            want = (one * factor[:, None, None]).reshape(q.shape)
        assert np.array_equal(q.dequantize("float32", arithmetic), want, equal_nan=True)
    back = GGUF().pack(q, {})
    assert np.array_equal(back["scale"], factor)
    assert np.array_equal(back["weight"], raw)
    headers = {"weight": Header(raw.shape, raw.dtype), "scale": Header(factor.shape, factor.dtype)}
    assert GGUF().describe(headers, {"type": kind.id}) == (q.format, q.shape)


@pytest.mark.parametrize("kind", [t for t in BLOCKS if has_minimum(t)], ids=lambda t: t.name)
def test_a_factor_over_a_minimum_is_not_read(kind):
    with pytest.raises(UnsupportedError, match=rf"a is {kind.name} with a factor, a.scale, over its minimum too"):
        GGUF().unpack({"weight": random_rows(kind), "scale": np.ones(1, np.float32)}, {"type": kind.name}, "a")


def test_case_05_nibbles_are_in_split_order_not_in_pairs():
    """Row 5: codes 0…15, 0…15. GGUF: byte i holds elements i and i + 16; canonical (and gpt-oss):
    elements 2i and 2i + 1.
    """
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)[None]
    canonical = bytes.fromhex("1032547698badcfe" * 2)
    assert pack(codes, 4).tobytes() == canonical
    fmt = format_named("mxfp4")
    q = QTensor(fmt, (1, 32), {"codes": pack(codes, 4), "scales": np.array([[127]], np.uint8)})
    block = GGUF().pack(q, {"type": "MXFP4"})["weight"]
    assert block.tobytes() == bytes([127]) + bytes(0x11 * i for i in range(16))
    back = GGUF().unpack({"weight": block}, {"type": "MXFP4"})
    assert back.parts["codes"].tobytes() == canonical


@pytest.mark.parametrize(
    ("codec", "kind"),
    [("int4:g32", "Q4_0"), ("int5:g32", "Q5_0"), ("int8:g32", "Q8_0"), ("affine4:g32", "Q4_1"), ("affine5:g32", "Q5_1")],
)
def test_formats_of_the_same_structure_are_written_exactly(codec, kind):
    fmt = format_named(codec, scale_dtype="float16")
    rng = np.random.default_rng(3)
    codes = pack(rng.integers(0, 1 << fmt.bits, (4, 64)), fmt.bits)
    halves = {p: rng.standard_normal((4, 2)).astype(np.float16) for p in ("scales", "biases") if p == "scales" or fmt.bias}
    q = QTensor(fmt, (4, 64), {"codes": codes, **halves})
    assert GGUF().config(q) == {"type": kind}
    back = GGUF().unpack(GGUF().pack(q, {}), GGUF().config(q))
    assert np.array_equal(back.dequantize("float64"), q.dequantize("float64"))
    assert back.format == format_named(GGML_TYPES[kind].codec)


def test_nvfp4_is_written_when_its_scales_have_no_sign():
    x = np.random.default_rng(3).standard_normal((2, 3, 128)).astype(np.float32)
    q = quantize(x, "nvfp4")
    out = GGUF().pack(q, {"type": "NVFP4"})
    back = GGUF().unpack(out, {"type": "NVFP4"})
    assert out["scale"].shape == (2,)
    assert np.array_equal(back.dequantize("float32"), q.dequantize("float32"))
    for byte in (0x7F, 0xB8, 0xFF):
        scales = q.parts["scales"].copy()
        scales[1, 2, 3] = byte
        bad = QTensor(q.format, q.shape, {**q.parts, "scales": scales})
        with pytest.raises(LayoutError, match="negative or NaN, and ggml reads scale bytes without a sign; requantize it"):
            GGUF().pack(bad, {})


def test_what_blocks_cannot_hold_is_refused_with_the_reason():
    x = np.random.default_rng(3).standard_normal((4, 96)).astype(np.float32)
    with pytest.raises(LayoutError, match=r"int4:g16.*no ggml block has this structure"):
        GGUF().pack(quantize(x, "int4:g16"), {})
    with pytest.raises(LayoutError, match="rows of 96 values are not whole NVFP4 blocks of 64"):
        GGUF().pack(quantize(x, "nvfp4"), {})
    with pytest.raises(LayoutError, match="those of Q4_0 blocks, not Q4_1; write it as Q4_0"):
        GGUF().pack(quantize(x, "q4_0"), {"type": "Q4_1"})
    q = quantize(x, "int4:g32", scale_dtype="float16")
    ordered = QTensor(q.format, q.shape, {**q.parts, "group_index": np.zeros(96, np.int32)})
    with pytest.raises(LayoutError, match="act-order"):
        GGUF().pack(ordered, {})
    divided = quantize(x[:, :64], "nvfp4", global_scale="divide")
    with pytest.raises(LayoutError, match="a reciprocal would round"):
        GGUF().pack(divided, {})


@pytest.mark.parametrize("word", [t.codec for t in BLOCKS if t.block > 32])
def test_case_39_rows_that_are_not_whole_blocks_are_refused(word):
    """Row 39 on the format's side: k = 32 and 896 under blocks of 256 (or 32 and 96 under 64)."""
    block = GGML_BY_CODEC[word].block
    for k in (32, 896 if block == 256 else 96):
        fmt = format_named(word)
        with pytest.raises(
            ShapeError, match=rf"{word} with rows of {k} values; its blocks hold {block}, so k must be a multiple of"
        ):
            family_of(fmt).geometry(fmt, (4, k))


def test_case_39_a_row_of_bytes_that_is_not_whole_blocks_names_the_tensor():
    for kind, nbytes in (("Q4_K", 18), ("Q6_K", 26), ("Q4_K", 144 * 3 + 72)):
        with pytest.raises(LayoutError, match=r"blk\.0\.attn_q\.weight is cut short or of another type") as e:
            GGUF().describe({"weight": Header((4, nbytes), np.dtype(np.uint8))}, {"type": kind}, "blk.0.attn_q")
        assert f"a {kind} row of {nbytes} bytes; a block of 256 values takes {GGML_TYPES[kind].nbytes} bytes" in str(e.value)


def test_configs_and_arrays_that_do_not_fit():
    raw = np.zeros((2, 18), np.uint8)
    with pytest.raises(LayoutError, match=r'config {} has no ggml type; give {"type": "Q4_K"}'):
        GGUF().unpack({"weight": raw}, {}, "a")
    with pytest.raises(LayoutError, match=r"tensor type 'Q9_K' is not known; known: F32 \(0\), .*; tensor a"):
        GGUF().unpack({"weight": raw}, {"type": "Q9_K"}, "a")
    with pytest.raises(LayoutError, match="a is F16, plain numbers; read it with `dense`"):
        GGUF().unpack({"weight": raw}, {"type": "F16"}, "a")
    for kind, why in (("Q8_1", "makes from activations"), ("Q8_K", "makes from activations"), ("Q1_0", "not read here")):
        with pytest.raises(UnsupportedError, match=rf"a is {kind}, a type .*{why}; read: Q4_0, "):
            GGUF().unpack({"weight": raw}, {"type": kind}, "a")
    with pytest.raises(LayoutError, match=r"a.weight is missing; the module has scale"):
        GGUF().unpack({"scale": raw}, {"type": "Q4_0"}, "a")
    with pytest.raises(LayoutError, match=r"a.weight is int8; allowed: uint8"):
        GGUF().unpack({"weight": raw.view(np.int8)}, {"type": "Q4_0"}, "a")
    with pytest.raises(LayoutError, match=r"a.weight has shape \[18\]; a Q4_0 weight is rows of blocks"):
        GGUF().unpack({"weight": raw[0]}, {"type": "Q4_0"}, "a")
    with pytest.raises(LayoutError, match=r"a.scale has shape \[2\]; wanted \[1\] \(one factor a matrix\)"):
        GGUF().unpack({"weight": raw, "scale": np.ones(2, np.float32)}, {"type": "Q4_0"}, "a")
    with pytest.raises(LayoutError, match=r"a.scale is float16; allowed: float32"):
        GGUF().unpack({"weight": raw, "scale": np.ones(1, np.float16)}, {"type": "Q4_0"}, "a")


@pytest.mark.parametrize("kind", [t for t in GGML_TYPES.values() if t.plain], ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (2, 0), (2, 2, 3)])
def test_plain_types_are_views(kind, shape):
    raw = np.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] * kind.nbytes), dtype=np.uint8)
    values = dense(raw, kind.name)
    assert values.shape == shape
    assert np.shares_memory(values, raw) or not raw.size
    assert dense(values, kind.id) is values
    assert values.tobytes() == raw.tobytes()


def test_plain_types_refuse_blocks_and_odd_bytes():
    with pytest.raises(LayoutError, match="a is Q4_0, blocks; read it with `unpack`"):
        dense(np.zeros((1, 18), np.uint8), "Q4_0", "a")
    with pytest.raises(LayoutError, match=r"a is uint8 \[1, 3\]; F32 is uint8 rows, 4 bytes a value"):
        dense(np.zeros((1, 3), np.uint8), "F32", "a")


def test_types_agree_with_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for kind in GGML_TYPES.values():
        if kind.name == "Q8_1":  # the package counts two float32 where ggml has two float16
            continue
        number = gguf.GGMLQuantizationType[kind.name]
        assert number == kind.id
        assert gguf.GGML_QUANT_SIZES[number] == (kind.block, kind.nbytes)
    assert {t.name for t in gguf.GGMLQuantizationType} <= set(GGML_TYPES)


def test_types_by_name_number_and_case():
    assert ggml_type("q4_k") is ggml_type(12) is GGML_TYPES["Q4_K"]
    with pytest.raises(FormatError, match=r"\[gguf\] tensor type 4 is not known"):
        ggml_type(4)
    assert isinstance(LAYOUTS["gguf"], GGUF)


def test_block_orders_add_up():
    for name, order in ORDERS.items():
        kind, fmt = GGML_TYPES[name], format_named(GGML_TYPES[name].codec)
        assert sum(size for _, size in order.fields) == kind.nbytes
        assert sum(8 * dict(order.fields)[p.field] for p in order.planes) == fmt.bits * kind.block


@pytest.mark.parametrize(
    ("word", "part", "value"),
    [("q4_K", "scales", 64), ("q5_K", "mins", 64), ("q2_K", "scales", 16), ("q3_K", "scales", -33)],
)
def test_small_scales_out_of_range_are_refused_and_do_not_run_into_their_neighbours(word, part, value):
    q = random_tensor(format_named(word), (2, 256), 0)
    q.parts[part][1, 3] = value
    with pytest.raises(LayoutError, match=rf"cannot be written: .*{part} run from .*; \w\d holds "):
        LAYOUTS["gguf"].pack(q, {})
    with pytest.raises(FormatError, match=rf"\[QTensor\] blk: {part} run from"):
        q.validate("blk")
