"""The native core's order of a weight is a bijection, and its decoder gives the exact values, bit
for bit.
"""

from __future__ import annotations

import copy
import mmap
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.backends import Prepared
from halfbyte.backends.cpu.pack import HUGE_PAGE, PackedWeight, address, pack_pieces
from halfbyte.errors import FormatError, ShapeError
from halfbyte.formats import format_named
from halfbyte.tensor.qtensor import QTensor
from support.cpu_weights import (  # noqa: F401
    CPU,
    act_ordered,
    each_set,
    formats,
    instruction_set,
    needs_native,
    optional_index,
    ordinary_tensor,
    unit_of,
)
from support.random_tensors import random_tensor

pytestmark = needs_native
FORMATS = formats()


def unpacked(prepared: Prepared) -> QTensor:
    """The canonical weight by the inverse that production uses."""
    parts = CPU.canonical(prepared)
    assert parts is not None
    return QTensor(prepared.format, prepared.shape, parts)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal by value, NaN equal to NaN."""
    return np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_bit_pattern_decodes_to_the_exact_value(fmt, dtype):
    # 33 rows: two whole panels and a row; three groups or super-groups.
    k = 3 * max(unit_of(fmt), fmt.group_size)
    q = random_tensor(fmt, (33, k), 1)
    assert same(CPU.dequantize(CPU.prepare(q), dtype), q.dequantize(dtype))


@pytest.mark.parametrize(("word", "options"), [("mxfp4", {}), *((w, {"global_scale": "none"}) for w in ("nvfp4", "nvfp4_ue4m3"))])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # products beyond float32
@each_set
def test_case_06_34_every_byte_of_an_8_bit_scale(instruction_set, word, options):  # noqa: F811
    """Row b has scale byte b in all of its groups: NaN, zeros, subnormals and signs among them."""
    fmt = format_named(word, **options)
    codes = np.tile(np.arange(16, dtype=np.uint8) * 17, (256, 2))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 64 // fmt.group_size, 1)
    q = QTensor(fmt, (256, 64), {"codes": codes, "scales": scales})
    prepared, exact = CPU.prepare(q), q.dequantize("float32")
    assert same(CPU.dequantize(prepared, "float32"), exact)
    one = np.zeros((1, 64), np.float32)
    one[0, 4] = 1  # code 2, whose value is 1 or 2: the product meets the scale on its way
    assert same(CPU.linear(one, prepared, None)[0], exact[:, 4])


@pytest.mark.parametrize("word", ["uint2:g128", "uint4:g128", "uint8:g32"])
@each_set
def test_zero_points_take_all_of_int16(instruction_set, word):  # noqa: F811
    """Products, too, of one token and of a tile of them: a zero point has a sign. The spans are of
    one segment: under several, 8-bit activations are exact for zero points among the codes.
    """
    ends = np.array([0, -1, 1, 127, 128, -128, -129, 255, 256, 32767, -32767, -32768], np.int16)
    fmt = format_named(word)
    q = ordinary_tensor(fmt, (48, 256), 5)
    q = QTensor(fmt, q.shape, q.parts | {"zeros": np.resize(ends, q.parts["zeros"].shape)})
    prepared, exact = CPU.prepare(q), q.dequantize("float32")
    assert same(CPU.dequantize(prepared, "float32"), exact)
    for activations in ("exact", "int8"):
        assert same(CPU.linear(np.eye(256, dtype=np.float32), prepared, None, activations=activations), exact.T)
        for j in (0, 133):
            one = np.zeros((1, 256), np.float32)
            one[0, j] = 1
            assert same(CPU.linear(one, prepared, None, activations=activations)[0], exact[:, j])


@each_set
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_a_zero_point_of_half_the_codes_is_a_signed_code(instruction_set, bits, activations):  # noqa: F811
    """Bit for bit: nothing is lost to sums of unsigned codes, 2^(bits−1) times as large."""
    signed, unsigned = format_named(f"int{bits}:g32"), format_named(f"uint{bits}:g32")
    q = ordinary_tensor(signed, (40, 96), bits)
    zeros = np.full(q.parts["scales"].shape, 1 << (bits - 1), np.int16)
    same_values = QTensor(unsigned, q.shape, {**q.parts, "zeros": zeros})
    assert same(same_values.dequantize("float32"), q.dequantize("float32"))
    x = np.random.default_rng(bits).standard_normal((19, 96), np.float32)
    got, want = (CPU.linear(x, CPU.prepare(w), None, activations=activations) for w in (same_values, q))
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("word", ["uint8:channel", "uint4:channel", "uint4:g32"])
@pytest.mark.parametrize("n", [16, 40])
def test_zero_points_come_back(word, n):
    """One group a row and whole panels: the array of the panels is not copied on its way."""
    q = ordinary_tensor(format_named(word), (n, 64), 3)
    prepared = CPU.prepare(q)
    assert unpacked(prepared).identical(q)
    assert unpacked(prepared).identical(q)  # nothing was written into the panels


def test_pieces_after_the_first_hold_zero_points_of_its_range():
    fmt = format_named("uint8:g32")
    q = ordinary_tensor(fmt, (32, 32), 1)
    low = {"zeros": np.full((16, 1), -32768, np.int16)}
    pieces = [q[:16], QTensor(fmt, (16, 32), {**q[16:].parts, **low})]
    with pytest.raises(FormatError, match=r"rows 16 to 31 have a zero point of -32768; allowed: -32640 to 32767"):
        pack_pieces(fmt, (32, 32), iter(pieces))


@each_set
def test_a_product_and_its_bias_are_rounded_once(instruction_set):  # noqa: F811
    """code · scale is half a unit of the bias's last place and 2^-30 of that more, or less: a sum
    that was rounded to float64 on its way is the midpoint, and goes to the other neighbour.
    """
    fmt = format_named("affine8:g32", scale_dtype="float32")
    rows = [
        (code, sign * scale * 2.0**-40, sign * 2.0**14 * (1 + odd * 2.0**-23))
        for code, scale, odd in ((205, 5237765, 0), (217, 4948119, 1))  # 2^30 + 1 and 2^30 - 1
        for sign in (1, -1)
    ]
    wanted = [sign * 2.0**14 * (1 + 2.0**-23) for _ in range(2) for sign in (1, -1)]
    q = QTensor(
        fmt,
        (4, 32),
        {
            "codes": np.array([[code] * 32 for code, _, _ in rows], np.uint8),
            "scales": np.array([[scale] for _, scale, _ in rows], np.float32),
            "biases": np.array([[bias] for _, _, bias in rows], np.float32),
        },
    )
    assert np.array_equal(q.dequantize("float32")[:, 0], wanted)
    prepared = CPU.prepare(q)
    assert np.array_equal(CPU.dequantize(prepared, "float32")[:, 7], wanted)
    for activations in ("exact", "int8"):
        for m in (1, 32):
            got = CPU.linear(np.eye(32, dtype=np.float32)[:m], prepared, None, activations=activations)
            assert np.array_equal(got, [wanted] * m), (activations, m)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_packed_order_returns_every_byte(fmt):
    k = 2 * max(unit_of(fmt), fmt.group_size)
    q = random_tensor(fmt, (37, k), 2)
    assert unpacked(CPU.prepare(q)).identical(q)


@pytest.mark.parametrize("word", ["int4:g32", "nf4:g64", "q4_K"])
def test_the_inverse_reads_the_packed_weight_and_nothing_else(word):
    """A changed byte of each array changes the parts: an inverse that kept the parts it was given
    would not show it.
    """
    q = ordinary_tensor(format_named(word), (32, 512), 2)
    packed = CPU.prepare(q).data
    for name, a in packed.arrays.items():
        if name == "values":
            continue
        changed = a.copy()
        changed.reshape(-1).view(np.uint8)[5] ^= 1
        other = PackedWeight(packed.fields, packed.arrays | {name: changed})
        assert not unpacked(Prepared("cpu", q.format, q.shape, other, 0)).identical(q), name


@pytest.mark.parametrize("word", ["int4:g32", "uint3:g64", "nf4:g64", "affine4:g32"])
def test_act_order_is_kept(word):
    fmt = format_named(word)
    if not optional_index(fmt):
        pytest.fail(f"{word} takes a group index")
    q = act_ordered(ordinary_tensor(fmt, (19, 256), 3), 4)
    assert same(CPU.dequantize(CPU.prepare(q), "float32"), q.dequantize("float32"))


@given(data=st.data())
def test_shapes_of_a_sweep_decode_and_return(data):
    fmt = data.draw(st.sampled_from(FORMATS))
    n = data.draw(st.integers(1, 70))
    k = data.draw(st.integers(1, 4)) * unit_of(fmt)
    if unit_of(fmt) == 1:
        k = data.draw(st.integers(1, 3)) * max(fmt.group_size, 8)
    q = ordinary_tensor(fmt, (n, k), data.draw(st.integers(0, 1000)))
    prepared = CPU.prepare(q)
    assert same(CPU.dequantize(prepared, "float32"), q.dequantize("float32"))
    assert unpacked(prepared).identical(q)


@pytest.mark.parametrize("word", ["uint4:g32", "int3:g32", "int8:channel", "mxfp4"])
@pytest.mark.parametrize("k", [1, 7, 31, 33, 70, 100])
def test_a_short_last_group(word, k):
    q = ordinary_tensor(format_named(word), (5, k), k)
    assert same(CPU.dequantize(CPU.prepare(q), "float32"), q.dequantize("float32"))


@pytest.mark.parametrize("word", ["q8_0", "q4_K", "mxfp4", "hqq4:g64"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embedding_gathers_decoded_rows(word, dtype):
    q = ordinary_tensor(format_named(word), (50, 512), 7)
    ids = np.array([49, 0, 17, 17, 3, 48])
    assert same(CPU.embedding(ids, CPU.prepare(q), dtype), q.dequantize(dtype)[ids])
    assert CPU.embedding(ids[:0], CPU.prepare(q), dtype).shape == (0, 512)


def test_embedding_refuses_an_index_out_of_range():
    prepared = CPU.prepare(ordinary_tensor(format_named("q8_0"), (4, 32), 1))
    with pytest.raises(ShapeError, match="rows 0 to 3"):
        CPU.embedding(np.array([0, 4]), prepared, "float32")


def test_the_order_adds_no_bytes_to_whole_panels():
    q = random_tensor(format_named("q4_K"), (64, 512), 1)
    assert CPU.prepare(q).nbytes == q.nbytes


def test_a_prepared_weight_is_copied_and_pickled():
    q = ordinary_tensor(format_named("q6_K"), (20, 256), 5)
    prepared = CPU.prepare(q)
    for again in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert same(CPU.dequantize(again, "float32"), q.dequantize("float32"))


def test_a_row_slice_of_flat_groups():
    q = ordinary_tensor(format_named("nf4:g64", grouping="flat"), (12, 48), 6)
    assert q.format.grouping == "flat"
    assert same(CPU.dequantize(CPU.prepare(q[3:9]), "float32"), q.dequantize("float32")[3:9])


@pytest.mark.slow
def test_case_28_more_than_2_to_31_elements():
    fmt = format_named("mxfp4")
    rows, k = 2**16 + 2, 2**15
    rng = np.random.default_rng(0)
    codes = np.zeros((rows, k // 2), np.uint8)
    codes[-1] = rng.integers(0, 256, k // 2, dtype=np.uint8)
    q = QTensor(fmt, (rows, k), {"codes": codes, "scales": np.full((rows, k // 32), 127, np.uint8)})
    prepared = CPU.prepare(q)
    dense = CPU.dequantize(prepared, "float16")
    assert np.array_equal(dense[-1], q[rows - 1 : rows].dequantize("float16")[0])
    assert not dense[:-1:4096].any()
    assert np.array_equal(CPU.embedding(np.array([rows - 1]), prepared, "float16")[0], dense[-1])


def test_a_large_weight_starts_on_a_huge_page_and_comes_back():
    q = ordinary_tensor(format_named("int4:g128"), (1040, 4096), 12)
    prepared = CPU.prepare(q)
    plane = prepared.data.arrays["plane4"]
    assert plane.nbytes >= HUGE_PAGE
    assert address(plane) % (HUGE_PAGE if hasattr(mmap, "MADV_HUGEPAGE") else 64) == 0
    assert unpacked(pickle.loads(pickle.dumps(prepared))).identical(q)
    one_hot = np.zeros((1, 4096), np.float32)
    one_hot[0, 4095] = 1
    y = CPU.linear(one_hot, prepared, None, activations="int8")
    assert np.array_equal(y[0], CPU.dequantize(prepared, "float32")[:, 4095])
