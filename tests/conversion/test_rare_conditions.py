"""Conditions that real files hardly meet, each on both sides: of edges, and of layouts that refuse
to write.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from halfbyte import QTensor, format_named, quantize
from halfbyte.conversion import convert_weight, edges, goal_named
from halfbyte.conversion.affine_edges import to_affine
from halfbyte.conversion.codebook_edges import to_codebook
from halfbyte.conversion.outcome import Checks, MisfitError
from halfbyte.conversion.producer_equality import equal_tensor_scale
from halfbyte.conversion.source_values import AffineValues, affine_values_of
from halfbyte.errors import FormatError, LayoutError
from halfbyte.layouts import LAYOUTS
from halfbyte.numerics.bits import pack
from support.conversion_weights import all_codes, same, two_levels
from support.layout_tensors import integer_tensor
from support.random_tensors import random_tensor

KEEPS = ("exact", "exact-if")


@pytest.mark.parametrize(("factor", "kind"), [(1e-38, "equal"), (1e-39, "lossy"), (2.0**-126, "exact-if"), (2.0**-130, "lossy")])
def test_the_reciprocal_of_a_tensor_scale_within_float32_and_beyond(factor, kind):
    """1/1e-39 is over the largest float32; a power of two's is exact until then."""
    outcome = convert_weight(two_levels("multiply", factor, 0x40), goal_named("compressed-tensors:nvfp4"), "w")
    assert outcome.kind == kind
    assert (kind == "lossy") == ("reciprocal of its tensor scale is" in outcome.why)


def e8m0(byte: int) -> QTensor:
    parts = {"codes": pack(all_codes(8, 64), 4), "scales": np.full((8, 2), byte, np.uint8)}
    return QTensor(format_named("mxfp4"), (8, 64), parts)


@pytest.mark.parametrize(("byte", "goes"), [(246, True), (254, False)])
def test_an_amax_within_float32_and_beyond(byte, goes):
    """MLX's tensor scale is 2688 times the factor: 2^119 · 2^11.4 is no float32, though the factor
    is.
    """
    fmt = format_named("nvfp4", global_scale="amax")
    assert convert_weight(e8m0(byte), goal_named("modelopt:nvfp4"), "w").kind == "exact-if"
    rewrites = list(edges._rewrites(e8m0(byte), fmt, goal_named("mlx:nvfp4")))
    if goes:
        assert same(QTensor(fmt, (8, 64), rewrites[0](Checks()), origin="mlx"), e8m0(byte))
    else:
        with pytest.raises(MisfitError, match=r"^the tensor scale is beyond float32$"):
            rewrites[0](Checks())


@pytest.mark.parametrize(("to", "equal"), [("mlx:affine4:g64", True), ("halfbyte:affine4:g64", False)])
def test_rounded_biases_want_a_decoder_to_hide_in(to, equal, monkeypatch):
    """MLX's arithmetic is known, and here made to agree; the canonical layout has none, so the bias
    may not round.
    """
    monkeypatch.setattr(edges, "check_equal", edges.check_equal if not equal else lambda q, w, checks: checks.add("looked at"))
    q = integer_tensor(4, (4, 64), 64, zeros=(13, 13))
    parts = {**q.parts, "scales": np.full((4, 1), 1 + 2**-10, np.float16)}
    outcome = convert_weight(QTensor(q.format, q.shape, parts), goal_named(to, "float16"), "w")
    assert outcome.kind == ("equal" if equal else "lossy")
    if not equal:
        with pytest.raises(MisfitError, match="the target has no decoder here"):
            edges._equal(QTensor(q.format, q.shape, parts), format_named("affine4", 64), goal_named(to, "float16"), Checks())


@pytest.mark.parametrize(
    ("bias", "kind"), [(-15.0, "exact-if"), (-3.0, "exact-if"), (0.0, "exact-if"), (-20.0, "lossy"), (4.0, "lossy")]
)
def test_codes_beside_a_constant_group_stay_in_range_or_do_not(bias, kind):
    """A group of scale 0 and offset 5 takes a step of its own; the other's zero point is 15, 3, 0,
    20 or −4.
    """
    fmt = format_named("affine4", 32)
    scales, biases = np.array([[0, 1]], np.float16), np.array([[5, bias]], np.float16)
    parts = {"codes": pack(all_codes(1, 64), 4), "scales": scales, "biases": biases}
    q = QTensor(fmt, (1, 64), parts)
    outcome = convert_weight(q, goal_named("compressed-tensors:uint4"), "w")
    assert outcome.kind == kind
    assert same(outcome.weight, q) == (kind in KEEPS)
    assert ("codes would leave the range of uint4" in outcome.why) == (kind == "lossy")


@pytest.mark.parametrize(("offset", "goes"), [(2.0**40, True), (1 + 2.0**-52, False)])
def test_an_offset_and_a_shift_within_53_bits_and_beyond(offset, goes):
    """Elements that begin at −127 move up under their offset: o + 127·s, exact or refused."""
    q = quantize(np.linspace(-4, 4, 64, dtype=np.float32)[None], "iq4_nl")
    numbers = np.array([-127, *range(-7, 8)], np.int16)
    line = AffineValues(q, numbers, None, np.full((1, 2), 2.0**20 if goes else 2.0**30), np.full((1, 2), offset))
    fmt = format_named("affine8", 32, scale_dtype="float32")
    if not goes:
        with pytest.raises(MisfitError, match=r"^biases need more than 53 bits$"):
            to_affine(line, fmt, Checks())
        return
    parts = to_affine(line, fmt, Checks(), round_biases=True)
    assert parts["biases"].tolist() == [[float(np.float32(2.0**40 - 127 * 2.0**20))] * 2]


@pytest.mark.parametrize("k", [20, 32, 40, 64])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_groups_that_would_have_two_scales_are_refused_whatever_their_number(size, k):
    """Rows of two groups of 32 or of 48 have as many scales, for other inputs."""
    source = random_tensor(format_named("int4", size), (3, k), 1)
    scales = (np.arange(source.parts["scales"].size) + 1).reshape(source.parts["scales"].shape)
    source = QTensor(source.format, source.shape, source.parts | {"scales": scales.astype(np.float16)})
    for new in range(1, k + 1):
        joined = any(i % new and i % size == 0 for i in range(k))
        if joined:
            with pytest.raises(MisfitError, match="groups that would be joined have different scales"):
                to_affine(affine_values_of(source), format_named("int4", new), Checks())
        else:
            target = format_named("int4", new)
            parts = to_affine(affine_values_of(source), target, Checks())
            assert same(QTensor(target, source.shape, parts), source)


@pytest.mark.parametrize("zero", [0.0, 7.0, 7.5, -0.25, 2.0**15 - 1, 2.0**15, -(2.0**15), 2.0**15 + 1])
def test_float_zero_points_are_integers_of_16_bits_or_offsets(zero):
    q = random_tensor(format_named("hqq4", 32, scale_dtype="float32"), (2, 64), 1)
    scales = np.float32([[0.5, 2.0], [-1.0, 0.125]])
    q = QTensor(q.format, q.shape, q.parts | {"scales": scales, "zeros": np.full((2, 2), zero, np.float32)})
    values = affine_values_of(q)
    numbers, spread = values.present().astype(np.float64), lambda a: np.repeat(a, 32, axis=-1)
    if values.offset is None:
        found = (numbers - spread(values.zero)) * spread(values.scale)
    else:
        assert values.zero is None
        found = numbers * spread(values.scale) + spread(values.offset)
    assert np.array_equal(found, q.dequantize("float32"))
    assert (values.offset is None) == (zero == int(zero) and abs(zero) < 2**15)


@pytest.mark.parametrize(
    ("to", "kind"), [("gptq", "exact"), ("awq", "exact"), ("compressed-tensors", "exact"), ("mlx:affine4:g32", "exact-if")]
)
def test_tiles_spread_over_their_rows(to, kind):
    """A scale of 16 rows by 32 inputs becomes one of each row."""
    q = integer_tensor(4, (32, 64), 32, rows=16)
    q = QTensor(q.format, q.shape, {**q.parts, "scales": np.abs(q.parts["scales"])})
    outcome = convert_weight(q, goal_named(to), "w")
    assert outcome.kind == kind
    assert same(outcome.weight, q)
    assert outcome.weight.format.grouping == "row"


@pytest.mark.parametrize(
    ("source", "to", "said"),
    [
        ("fp4:g32", "float32", ""), ("fp4:g32", "bfloat16", "block scales are bfloat16 numbers"), ("mxfp4", "float32", ""),
        ("mxfp4", "float16", "block scales are float16 numbers"),
    ],
)  # fmt: skip
def test_float_scales_of_e2m1_widen_as_they_are_or_are_checked(source, to, said):
    """A wider dtype holds every float16 and every power of two; a narrower one is looked at."""
    q = quantize(np.tile(np.array([0.5, -1, 1.5, 6], np.float32), (8, 16)), source)
    outcome = convert_weight(q, goal_named(f"halfbyte:fp4:g{q.format.group_size}", to), "w")
    assert (outcome.kind, outcome.why) == ("exact-if" if said else "exact", said)
    assert same(outcome.weight, q)


@pytest.mark.parametrize(("factor", "byte", "kind"), [(0.5, 0x41, "exact-if"), (0.3, 0x40, "exact-if"), (0.3, 0x41, "lossy")])
def test_a_block_scale_times_a_tensor_scale_that_is_a_float32_and_one_that_is_not(factor, byte, kind):
    """2.25 · float32(0.3) has 27 bits."""
    outcome = convert_weight(two_levels("multiply", factor, byte), goal_named("halfbyte:fp4:g16", "float32"), "w")
    assert outcome.kind == kind
    assert (outcome.why == "block scales are float32 numbers") == (kind == "exact-if")
    assert ("block scales are no float32 numbers" in outcome.why) == (kind == "lossy")


def test_a_dtype_of_scales_that_there_is_and_one_that_there_is_not():
    assert goal_named("mlx", "bfloat16").scale_dtype == "bfloat16"
    with pytest.raises(FormatError, match=r"scale dtype 'float8'; allowed: float16, bfloat16, float32$"):
        goal_named("mlx", "float8")


@pytest.mark.parametrize("shape", [(40, 64), (3, 40, 64), (0, 40, 64)])
def test_requantizing_in_blocks_does_not_show(shape, monkeypatch):
    q = random_tensor(format_named("uint4", 32), shape, 5)
    scales = np.nan_to_num(q.parts["scales"].astype(np.float32)).clip(0, 9).astype(np.float16)
    q = QTensor(q.format, q.shape, {**q.parts, "scales": scales})
    whole = edges.requantize(q, format_named("int4", 32))
    monkeypatch.setattr(edges, "BLOCK", 7 * 64)
    assert edges.requantize(q, format_named("int4", 32)) == whole
    assert whole.shape == shape


def with_index(q: QTensor) -> QTensor:
    index = np.arange(q.shape[-1]) // q.format.group_size
    return QTensor(q.format, q.shape, {**q.parts, "group_index": index[::-1].astype(np.int32)})


ORDERED = [
    ("compressed-tensors", "mxfp4", (8, 64), "only integers can have an act-order group index here"),
    ("gpt-oss", "mxfp4", (2, 8, 64), "it has no group index"),
    ("metal-marlin", "fp4:g32", (8, 64), "the layout holds groups in order only"),
    ("modelopt", "nvfp4", (8, 64), "ModelOpt has no group index"),
    ("modelopt-stack", "nvfp4", (2, 16, 64), "it has no group index"),
    ("torchao", "mxfp4", (8, 64), "torchao has no group index"),
    ("mlx", "mxfp4", (8, 64), "MLX has no group index"),
]


@pytest.mark.parametrize(("layout", "codec", "shape", "said"), ORDERED)
def test_groups_in_order_are_written_and_others_refused(layout, codec, shape, said):
    q = quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32), codec)
    if layout == "modelopt-stack":
        q = QTensor(q.format, q.shape, {**q.parts, "global_scale": np.full(shape[0], 0.5, np.float32)})
    own = LAYOUTS[layout]
    assert own.pack(q, {})
    with pytest.raises(LayoutError, match=said):
        own.pack(with_index(q), {})


STACKS = [("bitsandbytes", "bnb_int8", "int8 rows are those of one matrix"), ("hqq", "hqq4", r"HQQ holds matrices \(n, k\)")]


@pytest.mark.parametrize(("layout", "codec", "said"), STACKS)
def test_matrices_are_written_and_stacks_refused(layout, codec, said):
    fmt, own = format_named(codec), LAYOUTS[layout]
    assert own.pack(random_tensor(fmt, (8, 64), 1), {})
    with pytest.raises(LayoutError, match=said):
        own.pack(random_tensor(fmt, (2, 8, 64), 1), {})


@pytest.mark.parametrize(("zero", "scale", "goes"), [(15, 0.01, True), (15, 2.0**-24, True), (-3000, 1.001, False)])
def test_gemv_fast_zero_points_that_come_back_from_their_product(zero, scale, goes):
    """−s·z is kept as float16: 11 bits hold a product of 4 and 11 closely enough, not one of 12 and
    11.
    """
    q = integer_tensor(4, (8, 64), 64, zeros=(zero, zero))
    q = QTensor(q.format, q.shape, {**q.parts, "scales": np.full((8, 1), scale, np.float16)})
    own = LAYOUTS["awq-gemv_fast"]
    if goes:
        assert np.array_equal(own.unpack(own.pack(q, {}), {"bits": 4, "group_size": 64}).parts["zeros"], q.parts["zeros"])
    else:
        with pytest.raises(LayoutError, match="when read back from −scale·zero"):
            own.pack(q, {})


@pytest.mark.parametrize(("k", "goes"), [(64, True), (48, False)])
def test_modelopt_int4_in_whole_groups_and_not(k, goes):
    q = random_tensor(format_named("int4", 32, scale_dtype="bfloat16", inverse=True), (4, k), 2)
    own = LAYOUTS["modelopt"]
    if goes:
        assert own.unpack(own.pack(q, {}), {"quant_algo": "W4A16_AWQ", "group_size": 32}).shape == (4, k)
    else:
        with pytest.raises(LayoutError, match="rows of 48 are not whole bytes in whole groups of 32"):
            own.pack(q, {})


def nested(group: int = 64, shape: tuple[int, int] = (8, 64), **parts) -> QTensor:
    """A NF4 weight as ModelOpt keeps it, some parts replaced."""
    q = random_tensor(format_named("nf4_modelopt", group, nested=True), shape, 3)
    own = {
        "nested_map": np.arange(-128, 128, dtype=np.float32), "nested_offset": np.array(0.0859375, np.float32),
        "nested_absmax": np.full(q.parts["nested_absmax"].shape, 147, np.float32),
    }  # fmt: skip
    return QTensor(q.format, q.shape, {**q.parts, **own, **parts})


@pytest.mark.parametrize(
    ("q", "said"),
    [
        (nested().rows(2, 6), "it is a slice of rows"),
        (nested(nested_map=np.linspace(-1, 1, 256, dtype=np.float32)), "its scale bytes go through a table"),
        (nested(3, (1, 3)), "3 codes are not whole bytes"),
        (nested(nested_offset=np.array(0.1, np.float32)), "nested_offset is not a number of bfloat16"),
        (nested(nested_absmax=np.full((1,), 147.3, np.float32)), "nested_absmax is not a number of bfloat16"),
    ],
)
def test_modelopt_nf4_that_it_can_keep_and_that_it_cannot(q, said):
    assert LAYOUTS["modelopt"].pack(nested(), {})
    with pytest.raises(LayoutError, match=said):
        LAYOUTS["modelopt"].pack(q, {})


def test_the_bfloat16_of_the_cases_above():
    """0.0859375 and 147 are bfloat16 numbers, 0.1 and 147.3 are not."""
    for number, is_one in ((0.0859375, True), (147, True), (0.1, False), (147.3, False)):
        assert (float(ml_dtypes.bfloat16(number)) == float(np.float32(number))) == is_one


@pytest.mark.parametrize(("levels", "target"), [("multiply", "compressed-tensors"), ("divide", "modelopt")])
def test_a_tensor_scale_whose_reciprocal_misses_a_midpoint_takes_its_neighbour(levels, target):
    """A factor halfway between two bfloat16 numbers: its rounded reciprocal is off to one side, and
    the next float32 number gives the source's values.
    """
    moved = 0
    for i in range(0, 128, 3):
        factor = np.float32(1 + (2 * i + 1) / 256)
        q = two_levels(levels, float(factor if levels == "multiply" else 1 / factor), 0x38)
        outcome = convert_weight(q, goal_named(f"{target}:nvfp4"), "w")
        assert outcome.kind == "equal"
        native = outcome.weight.dequantize(ml_dtypes.bfloat16, arithmetic="producer")
        assert np.array_equal(native, q.dequantize(ml_dtypes.bfloat16)), factor
        moved += outcome.weight.parts["global_scale"] != np.float32(1 / q.parts["global_scale"])
    assert moved > 3


def test_block_scales_that_fill_e4m3_go_under_a_power_of_two():
    """448 times a power of two, and the smallest subnormal number times the same one."""
    scales = np.ones((8, 4), np.float32)
    scales[0] = 448, 2.0**-9, 1, 2.0**-6
    fmt = format_named("fp4", 16, scale_dtype="float32")
    q = QTensor(fmt, (8, 64), {"codes": pack(all_codes(8, 64), 4), "scales": scales / 8})
    outcome = convert_weight(q, goal_named("modelopt:nvfp4"), "w")
    assert (outcome.kind, float(outcome.weight.parts["global_scale"])) == ("exact-if", 0.125)
    assert same(outcome.weight, q)


def stacked(levels: str, factors: list[float]) -> QTensor:
    """NVFP4 weights of one matrix each, one above the other."""
    one = [two_levels(levels, factor, 0x38) for factor in factors]
    parts = {part: np.stack([q.parts[part] for q in one]) for part in one[0].parts}
    return QTensor(one[0].format, (len(one), *one[0].shape), parts)


@pytest.mark.parametrize("factors", [[1, 2], [2, 1], [1, 1], [2, 0.5], [0.25, 1, 4]])
@pytest.mark.parametrize(
    ("levels", "other"), [("multiply", "divide"), ("divide", "multiply"), ("multiply", "none"), ("divide", "none")]
)
def test_every_matrix_of_a_stack_has_a_tensor_scale_of_its_own(levels, other, factors):
    """One that is 1 has a counterpart by its value, as the others."""
    q = stacked(levels, factors)
    fmt = format_named("nvfp4", global_scale=other)
    checks = Checks()
    found = QTensor(fmt, q.shape, to_codebook(q, fmt, checks))
    assert same(found, q)
    said = (
        "the tensor scale is multiplied into the block scales" if other == "none" else "the tensor scale has an exact counterpart"
    )
    assert checks.met == [said]
    if other != "none":
        assert found.parts["global_scale"].tolist() == [1 / factor for factor in factors]


@pytest.mark.parametrize("zeros", [(5, 5), (1, 14)])
@pytest.mark.parametrize("most", [14, 15])
@pytest.mark.parametrize("new", [16, 32])
def test_zero_points_and_codes_in_range_stay_as_they_are(zeros, most, new):
    """Codes that could move up by one as well do not."""
    q = integer_tensor(4, (2, 64), 32, zeros=zeros)
    q = QTensor(q.format, q.shape, q.parts | {"codes": pack(np.minimum(all_codes(2, 64), most), 4)})
    checks = Checks()
    parts = to_affine(affine_values_of(q), format_named("uint4", new), checks)
    assert np.array_equal(parts["codes"], q.parts["codes"])
    assert np.array_equal(parts["zeros"], np.repeat(q.parts["zeros"], 32 // new, axis=-1))
    assert checks.met == []


@pytest.mark.parametrize("byte", [0x01, 0x38, 0x7E, 0x80, 0xB8])
def test_a_rounded_tensor_scale_of_scales_without_a_sign_wants_none(byte):
    """GGUF's NVFP4 has block scales of E4M3 whose sign is ignored."""
    q = two_levels("multiply", 3e-4, byte)
    fmt = format_named("nvfp4_ue4m3")
    if byte & 0x80:
        with pytest.raises(MisfitError, match=r"^block scales are negative$"):
            equal_tensor_scale(q, fmt, "gguf", Checks())
    else:
        parts = equal_tensor_scale(q, fmt, "gguf", Checks())
        assert same(QTensor(fmt, q.shape, parts), q)
