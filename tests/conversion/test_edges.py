"""Edges between formats: exact ones keep every value and come back bit for bit, conditional ones
are tried on both sides.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte
from halfbyte import QTensor, format_named, quantize
from halfbyte.conversion import LossyError, convert_tensor, convert_weight, goal_named
from halfbyte.conversion.edges import difference, refusal, requantize
from halfbyte.conversion.outcome import Outcome
from halfbyte.errors import FormatError, LayoutError
from halfbyte.formats import codec_names
from halfbyte.numerics.bits import pack, unpack
from halfbyte.numerics.error_stats import ErrorStats
from support.conversion_weights import all_codes, attempt, integers, reread, same
from support.golden_case import files, label
from support.random_tensors import finite_tensor

TARGETS = ("gptq", "gptq-v2", "awq", "compressed-tensors", "modelopt", "mlx", "gguf", "gpt-oss", "metal-marlin", "halfbyte")
KEEPS = ("exact", "exact-if")


def golden(path) -> QTensor:
    """The packed weight of a producer's file."""
    with halfbyte.open(path) as checkpoint:
        (q,) = [w for w in map(checkpoint.__getitem__, checkpoint) if isinstance(w, QTensor)]
    return q


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("word", [w for w in codec_names() if not w.startswith(("iq1", "iq2", "iq3", "tq"))])
def test_kind_tells_the_truth_and_files_read_back(word, to):
    """`exact` and `exact-if` have the source's values, `lossy` has not, and what is written is read
    as what was returned.
    """
    fmt, goal = format_named(word), goal_named(to)
    q = finite_tensor(fmt, (8, 256), seed=3)
    if fmt.super_size:  # scales of few bits, which random bytes are not
        q = quantize(np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32), word)
    outcome = attempt(q, goal)
    if isinstance(outcome, str):
        assert "cannot be stored as" in outcome
        return
    assert same(q, outcome.weight) == (outcome.kind in KEEPS)
    assert same(reread(outcome, goal), outcome.weight)
    if outcome.kind == "equal":
        origin = outcome.weight.origin
        assert np.array_equal(outcome.weight.dequantize("bfloat16", "producer"), q.dequantize("bfloat16")), origin


ROUND_TRIPS = [
    *((f, a, b) for f in ("int4:g128", "uint4:g128", "uint4:g32", "uint4:channel") for a, b in
      (("gptq-v2", "awq"), ("awq", "compressed-tensors"), ("compressed-tensors", "gptq-v2"), ("gptq-v2", "halfbyte"))),
    ("int4:g32", "gguf", "gptq"), ("int4:g32", "gguf", "compressed-tensors"), ("int4:g32", "mlx", "gguf:q4_1"),
    ("affine4:g32", "gguf", "mlx"), ("affine5:g32", "gguf", "mlx"), ("affine4:g32", "gguf:q4_1", "mlx"),
    *(("mxfp4", a, b) for a in ("gpt-oss", "gguf", "mlx", "compressed-tensors", "modelopt") for b in ("gguf", "mlx", "gpt-oss")),
    ("nvfp4", "gguf", "modelopt"),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "there", "back"), ROUND_TRIPS)
@given(seed=st.integers(0, 2**20), n=st.integers(1, 5), groups=st.integers(1, 3))
@settings(max_examples=6, deadline=None)
def test_exact_edges_come_back_bit_for_bit(codec, there, back, seed, n, groups):
    fmt = format_named(codec)
    q = finite_tensor(fmt, (8 * n, 128 * groups), seed)
    away = convert_tensor(q, there)
    home = convert_tensor(away, back)
    assert same(q, away)
    assert same(q, home)
    for part in ("codes", "zeros", "biases"):
        if part in q.parts and part in home.parts:
            assert np.array_equal(home.parts[part], q.parts[part])
    # Back in its own structure every byte is as it was.
    group = "channel" if fmt.group_size == -1 else f"g{fmt.group_size}"
    if home.format.element == fmt.element and home.format.zero == fmt.zero and not fmt.bias:
        last = convert_tensor(home, f"halfbyte:{fmt.name}:{group}")
        assert {p: a.tobytes() for p, a in last.parts.items() if p != "global_scale"} == {
            p: a.tobytes() for p, a in q.parts.items() if p != "global_scale"
        }


@pytest.mark.parametrize("path", files("gptqmodel", "autogptq", "autoawq"), ids=label)
def test_golden_integers_through_every_layout(path):
    """Files of the producers: to each layout that holds integers and back, the same values, and the
    same codes where kept.
    """
    q = golden(path)
    for to in ("gptq-v2", "awq", "compressed-tensors", "mlx", "halfbyte"):
        outcome = convert_weight(q, goal_named(to), "w", suggest=False)
        assert same(q, outcome.weight) == (outcome.kind in KEEPS)
        act = "group_index" in q.parts
        if not act and to != "mlx" and q.format.bits in (4, 8) and (q.format.zero != "int" or int(q.parts["zeros"].max()) < 16):
            assert outcome.kind in KEEPS
            assert np.array_equal(outcome.weight.parts["codes"], q.parts["codes"])


@pytest.mark.parametrize("path", [p for p in files("compressed-tensors", "modelopt", "mlx") if "nvfp4" in p.stem], ids=label)
def test_golden_nvfp4_through_every_layout(path):
    """Two-level files keep their codes and block scales; the tensor scale is exact, or equal in the
    target's arithmetic.
    """
    q = golden(path)
    for to in ("modelopt", "compressed-tensors", "mlx", "gguf"):
        outcome = attempt(q, goal_named(f"{to}:nvfp4"))
        if isinstance(outcome, str):
            assert "nvfp4" in outcome or "NaN" in outcome  # every one of 256 scale bytes, NaN among them
            continue
        if outcome.kind == "lossy":
            assert "E4M3" in outcome.why or "tensor scale" in outcome.why
            continue
        assert outcome.kind != "equal" or outcome.weight.origin in ("compressed-tensors", "mlx", "modelopt")
        if "is multiplied into the block scales" not in outcome.why:
            assert np.array_equal(outcome.weight.parts["codes"], q.parts["codes"]) or "signs" in outcome.why


# Conditions, one test a side.


def test_mxfp4_block_exponents_inside_the_window_of_e4m3():
    """2^-9 to 2^8 are E4M3 numbers: 18 exponents fit under one tensor scale, wherever they lie."""
    for start in (1, 60, 127 - 9, 200):
        scales = np.arange(start, start + 18, dtype=np.uint8).reshape(2, 9)
        q = QTensor(format_named("mxfp4"), (2, 288), {"codes": pack(all_codes(2, 288), 4), "scales": scales})
        outcome = convert_weight(q, goal_named("modelopt:nvfp4"))
        assert outcome.kind == "exact-if", outcome
        assert "window" in outcome.why
        assert same(q, outcome.weight)


def test_mxfp4_block_exponents_outside_the_window_of_e4m3():
    scales = np.array([[100, 100 + 18]], np.uint8)
    q = QTensor(format_named("mxfp4"), (1, 64), {"codes": pack(all_codes(1, 64), 4), "scales": scales})
    text = r"E4M3's window under one tensor scale.*relative RMS error of .*Exact instead: modelopt:mxfp4"
    with pytest.raises(LossyError, match=text):
        convert_tensor(q, "modelopt:nvfp4")
    lossy = convert_weight(q, goal_named("modelopt:nvfp4"))
    assert lossy.kind == "lossy"
    assert lossy.error is not None
    assert 0 < lossy.error.relative_rms < 0.2


def test_nan_block_scales_are_kept_or_refused():
    q = QTensor(format_named("mxfp4"), (1, 64), {"codes": pack(all_codes(1, 64), 4), "scales": np.array([[255, 120]], np.uint8)})
    assert convert_tensor(q, "gguf").parts["scales"].tolist() == [[255, 120]]
    with pytest.raises((LossyError, FormatError, LayoutError), match="NaN"):
        convert_tensor(q, "modelopt:nvfp4", lossy=True)


def test_case_01_awq_zero_point_zero_stays_zero():
    """A stored zero of 0 with s = 0.5 is 0 to 7.5 in every layout, and its neighbours are
    untouched.
    """
    codes = all_codes(8, 32)
    zeros = np.array([[7, 0, 3, 0, 15, 1, 0, 8]]).T
    q = integers(codes, np.full((8, 1), 0.5, np.float16), zeros)
    for to in ("awq", "gptq", "gptq-v2", "compressed-tensors"):
        outcome = convert_weight(q, goal_named(to))
        back = reread(outcome, goal_named(to))
        assert outcome.kind in KEEPS
        assert np.array_equal(back.dequantize()[1, :16], np.arange(16) * 0.5)
        assert np.array_equal(back.parts["zeros"], zeros)


def test_case_02_gptq_v1_has_no_code_for_zero_point_zero():
    q = integers(all_codes(8, 32), np.ones((8, 1), np.float16), np.zeros((8, 1)))
    assert convert_weight(q, goal_named("gptq")).config["checkpoint_format"] == "gptq_v2"
    with pytest.raises(LayoutError, match="has no code for 0: write checkpoint_format gptq_v2"):
        convert_tensor(q, "gptq-v1:uint4:g32")
    room = integers(np.minimum(all_codes(8, 32), 14), np.ones((8, 1), np.float16), np.zeros((8, 1)))
    moved = convert_weight(room, goal_named("gptq-v1:uint4:g32"))
    assert moved.kind == "exact-if"
    assert "are shifted into range together" in moved.why
    assert moved.weight.parts["zeros"].tolist() == [[1]] * 8
    assert same(room, reread(moved, goal_named("gptq-v1")))


@given(st.lists(st.integers(1, 15), min_size=8, max_size=8))
def test_case_02_zeros_1_to_15_survive_v2_v1_v2(zeros):
    q = integers(all_codes(8, 32), np.ones((8, 1), np.float16), np.array(zeros)[:, None])
    v1 = convert_weight(q, goal_named("gptq-v1"))
    assert v1.config["checkpoint_format"] == "gptq"
    v2 = convert_weight(reread(v1, goal_named("gptq")), goal_named("gptq-v2"))
    assert v2.config["checkpoint_format"] == "gptq_v2"
    assert np.array_equal(reread(v2, goal_named("gptq")).parts["zeros"][:, 0], zeros)


def test_case_02_autogptq_zero_point_16_moves_into_range():
    """AutoGPTQ reads a stored 15 of v1 as 16; v2 and AWQ end at 15, and codes and zero point move
    where there is room.
    """
    q = integers(np.maximum(all_codes(8, 32), 1), np.ones((8, 1), np.float16), np.full((8, 1), 16))
    for to in ("awq", "gptq-v2"):
        moved = convert_weight(q, goal_named(to))
        assert moved.kind == "exact-if"
        assert same(q, moved.weight)
        assert int(moved.weight.parts["zeros"].max()) == 15
    full = integers(all_codes(8, 32), np.ones((8, 1), np.float16), np.full((8, 1), 16))
    with pytest.raises(LossyError, match="codes would leave the range of uint4"):
        convert_tensor(full, "awq:uint4:g32")


def test_codes_move_up_to_the_last_and_no_further():
    """A zero point of -1 moves to 0, and the codes by 1 with it."""
    for most in (13, 14, 15):
        q = integers(np.minimum(all_codes(8, 32), most), np.ones((8, 1), np.float16), np.full((8, 1), -1))
        if most < 15:
            moved = convert_weight(q, goal_named("awq:uint4:g32"))
            assert moved.kind == "exact-if"
            assert same(q, reread(moved, goal_named("awq")))
            assert unpack(moved.weight.parts["codes"], 4, 32).max() == most + 1
        else:
            with pytest.raises(LossyError, match="codes would leave the range of uint4"):
                convert_tensor(q, "awq:uint4:g32")


def test_case_03_three_bit_words_are_a_dense_stream():
    """128 inputs of 3 bits are 12 words down, 64 outputs 6 words across."""
    q = finite_tensor(format_named("uint3", 64), (64, 128), 0)
    tensors = convert_weight(q, goal_named("gptq")).tensors
    assert tensors["qweight"].shape == (12, 64)
    assert tensors["qzeros"].shape == (2, 6)


@pytest.mark.parametrize("to", ["modelopt:mxfp4", "compressed-tensors:mxfp4", "gguf", "gpt-oss", "mlx"])
def test_case_09_odd_rows_of_fp4_are_refused_and_never_run_together(to):
    q = finite_tensor(format_named("mxfp4"), (5, 3), 0)
    with pytest.raises(LayoutError, match=r"\(5, 3\) cannot be stored as"):
        convert_tensor(q, to)


def test_case_04_awq_interleave_of_codes_and_zero_points():
    q = integers(np.repeat(np.arange(8, dtype=np.uint8)[:, None], 32, 1), np.ones((8, 1), np.float16), np.arange(8)[:, None])
    tensors = convert_weight(q, goal_named("awq")).tensors
    assert int(tensors["qweight"].view(np.uint32)[0, 0]) == 0x75316420
    assert int(tensors["qzeros"].view(np.uint32)[0, 0]) == 0x75316420


def test_case_05_mxfp4_block_order_of_gguf_and_gpt_oss():
    codes = np.concatenate([np.arange(16), np.arange(16)]).astype(np.uint8)[None]
    q = QTensor(format_named("mxfp4"), (1, 32), {"codes": pack(codes, 4), "scales": np.full((1, 1), 127, np.uint8)})
    block = convert_weight(q, goal_named("gguf")).tensors["weight"][0]
    assert block[1:].tobytes() == bytes.fromhex("00112233445566778899aabbccddeeff")
    blocks = convert_weight(q, goal_named("gpt-oss")).tensors["blocks"]
    assert blocks.tobytes() == bytes.fromhex("1032547698badcfe" * 2)
    assert (
        convert_weight(reread(convert_weight(q, goal_named("gguf")), goal_named("gguf")), goal_named("gpt-oss"))
        .tensors["blocks"]
        .tobytes()
        == blocks.tobytes()
    )


def test_case_10_asymmetric_codes_stay_distinct_in_signed_layouts():
    """q = 15, zero = 10, s = 1 reads back 5 from a layout that stores signed zero points."""
    q = integers(all_codes(8, 32), np.ones((8, 1), np.float16), np.full((8, 1), 10))
    back = reread(convert_weight(q, goal_named("compressed-tensors")), goal_named("compressed-tensors"))
    assert back.dequantize()[0, :16].tolist() == [float(c - 10) for c in range(16)]


def test_case_11_zero_points_of_any_height_are_packed_and_read():
    rng = np.random.default_rng(0)
    zeros = rng.integers(0, 16, (12, 4))
    q = integers(rng.integers(0, 16, (12, 128)), np.ones((12, 4), np.float16), zeros)
    outcome = convert_weight(q, goal_named("compressed-tensors"))
    assert outcome.tensors["weight_zero_point"].shape == (2, 4)
    assert np.array_equal(reread(outcome, goal_named("compressed-tensors")).parts["zeros"], zeros)


def test_scales_in_range_of_the_target():
    q = integers(all_codes(4, 32), np.full((4, 1), 0.75, ml_dtypes.bfloat16))
    outcome = convert_weight(q, goal_named("gguf:q4_0"))
    assert outcome.kind == "exact-if"
    assert outcome.why == "scales are float16 numbers"
    assert same(q, outcome.weight)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 2.0**-26, 70000.0])
def test_scales_out_of_range_of_the_target(scale):
    q = integers(all_codes(4, 32), np.full((4, 1), scale, ml_dtypes.bfloat16))
    with pytest.raises((LossyError, LayoutError), match=r"scales are no float16 numbers|beyond float16|float16 ends"):
        convert_tensor(q, "gguf:q4_0")
    assert same(q, convert_tensor(q, "mlx"))  # MLX has bfloat16 scales


def test_zero_times_scale_representable():
    """−z·s needs the bits of both: a scale of few bits leaves room in float16, one of eleven bits
    times 13 does not.
    """
    codes = all_codes(4, 64)
    zeros = np.full((4, 1), 13)
    fine = integers(codes, np.full((4, 1), 1.25, np.float16), zeros, group=64)
    outcome = convert_weight(fine, goal_named("mlx"))
    assert outcome.weight.format.scale == "float16"
    assert outcome.kind == "exact-if"
    assert same(fine, outcome.weight)
    odd = integers(codes, np.full((4, 1), np.float16(1.0 + 2**-10)), zeros, group=64)
    outcome = convert_weight(odd, goal_named("mlx"))
    assert outcome.weight.format.scale == "float32"
    assert outcome.kind == "exact"
    assert same(odd, outcome.weight)
    assert convert_weight(odd, goal_named("mlx", "float16")).kind in ("equal", "lossy")
    assert convert_weight(odd, goal_named("gguf:q4_1")).kind == "lossy"


def test_symmetric_bias_overflows_float16():
    """−8·s of the largest scales is beyond float16: the bias takes float32."""
    fits = integers(all_codes(2, 64), np.full((2, 1), 8188.0, np.float16), group=64)
    over = integers(all_codes(2, 64), np.full((2, 1), 8192.0, np.float16), group=64)
    assert convert_weight(fits, goal_named("mlx")).weight.format.scale == "float16"
    outcome = convert_weight(over, goal_named("mlx"))
    assert outcome.weight.format.scale != "float16"
    assert same(over, outcome.weight)


def test_rounded_biases_can_be_equal_in_the_target_s_arithmetic():
    """Codes of 0 and 1 only: MLX's float16 sums hide the rounding of a bias, and every value was
    looked at.
    """
    scale = np.float16(1 + 2**-10)
    q = integers(np.full((1, 64), 13, np.uint8), np.full((1, 1), scale), np.full((1, 1), 13), group=64)
    outcome = convert_weight(q, goal_named("mlx", "float16"))
    assert outcome.kind in ("equal", "lossy")
    if outcome.kind == "equal":
        assert np.array_equal(outcome.weight.dequantize("bfloat16", "producer"), q.dequantize("bfloat16"))


def test_group_sizes_that_divide_and_that_do_not():
    rng = np.random.default_rng(1)
    codes, scales = rng.integers(0, 16, (4, 256)), rng.uniform(0.5, 1, (4, 2)).astype(np.float16)
    q = integers(codes, scales, group=128)
    split = convert_weight(q, goal_named("gptq:int4:g32"))
    assert split.kind == "exact"
    assert np.array_equal(split.weight.parts["scales"], np.repeat(scales, 4, axis=1))
    joined = convert_weight(split.weight, goal_named("gptq:int4:g128"))
    assert joined.kind == "exact-if"
    assert joined.why == "scales of joined groups are equal"
    assert np.array_equal(joined.weight.parts["scales"], scales)
    with pytest.raises(LossyError, match="groups that would be joined have different scales"):
        convert_tensor(q, "gptq:int4:g256")


@given(st.integers(1, 300), st.sampled_from([16, 32, 48, 128, -1]), st.sampled_from([8, 16, 32, 96, -1]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_any_groups_any_tail(k, source, target, seed):
    """Short last groups, groups that overlap: exact or refused, never shifted."""
    q = finite_tensor(format_named("int4", source), (3, k), seed)
    group = "channel" if target == -1 else f"g{target}"
    outcome = convert_weight(q, goal_named(f"halfbyte:int4:{group}"))
    assert outcome.weight.format.group_size == target
    assert same(q, outcome.weight) == (outcome.kind in KEEPS)


def test_act_order_that_sorts_away():
    """Whole groups in another order, and groups of equal scales, need no index."""
    rng = np.random.default_rng(2)
    q = integers(rng.integers(0, 16, (8, 128)), rng.uniform(0.5, 1, (8, 4)).astype(np.float16), rng.integers(1, 16, (8, 4)))
    index = np.repeat([2, 0, 3, 1], 32).astype(np.int32)
    moved = QTensor(q.format, q.shape, {**q.parts, "group_index": index})
    outcome = convert_weight(moved, goal_named("awq"))
    assert outcome.kind == "exact-if"
    assert "can be dropped" in outcome.why
    assert same(moved, outcome.weight)
    assert convert_weight(moved, goal_named("gptq")).kind == "exact"  # GPTQ stores the index


def test_act_order_that_does_not_sort_away():
    rng = np.random.default_rng(3)
    q = integers(rng.integers(0, 16, (8, 128)), rng.uniform(0.5, 1, (8, 4)).astype(np.float16), rng.integers(1, 16, (8, 4)))
    mixed = QTensor(q.format, q.shape, {**q.parts, "group_index": rng.permutation(np.repeat(np.arange(4), 32)).astype(np.int32)})
    with pytest.raises(LossyError, match="act-order index mixes groups of different"):
        convert_tensor(mixed, "awq")
    assert convert_tensor(mixed, "awq", lossy=True).format.name == "uint4"


def test_zero_points_that_are_the_middle_code_and_that_are_not():
    codes = all_codes(2, 32)
    middle = integers(codes, np.ones((2, 1), np.float16), np.full((2, 1), 8))
    assert convert_weight(middle, goal_named("gguf:q4_0")).why == "zero points are the middle code"
    off = integers(codes, np.ones((2, 1), np.float16), np.full((2, 1), 9))
    with pytest.raises(LossyError, match=r"2 groups reach from -9 to 6 steps; q4_0 holds -8 to 7"):
        convert_tensor(off, "gguf:q4_0")
    assert convert_weight(off, goal_named("gguf:q8_0")).kind in KEEPS


def test_a_group_one_step_too_high_gets_a_negative_scale():
    """Codes 0 to 15 around 7 reach 8 steps up: turned around they fit."""
    q = integers(all_codes(2, 32), np.ones((2, 1), np.float16), np.array([[7], [8]]))
    outcome = convert_weight(q, goal_named("gguf:q4_0"))
    assert outcome.weight.parts["scales"].reshape(-1).tolist() == [-1.0, 1.0]
    assert same(q, outcome.weight)


def test_constant_groups_of_a_scale_of_zero():
    """s = 0 leaves the bias everywhere: one step above the zero point, with the bias for a scale."""
    fmt = format_named("affine4", 32)
    parts = {
        "codes": pack(all_codes(2, 64), 4),
        "scales": np.array([[0, 0.5], [0.25, 0]], np.float16),
        "biases": np.array([[3.5, -1], [0, -7]], np.float16),
    }
    q = QTensor(fmt, (2, 64), parts)
    outcome = convert_weight(q, goal_named("gptq"))
    assert outcome.kind == "exact-if"
    assert same(q, outcome.weight)
    assert outcome.weight.dequantize()[0, :32].tolist() == [3.5] * 32


def test_groups_of_zeros_have_zero_point_0():
    parts = {"codes": pack(all_codes(2, 64), 4), "scales": np.array([[0, 0.5], [0.25, 0]], np.float16)}
    q = QTensor(format_named("affine4", 32), (2, 64), {**parts, "biases": np.array([[0, -1], [-1, 0]], np.float16)})
    outcome = convert_weight(q, goal_named("gptq-v2"))
    assert same(q, outcome.weight)
    assert outcome.weight.parts["zeros"].tolist() == [[0, 2], [4, 0]]
    assert np.array_equal(outcome.weight.parts["codes"], parts["codes"])
    assert outcome.why == "offsets are whole numbers of scales"


@pytest.mark.parametrize("word", ["int4", "uint4", "affine4"])
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.5, 6e-8, -65504.0])
def test_adversarial_scales_keep_their_values(word, scale):
    q = finite_tensor(format_named(word, 32), (8, 64), 5)
    parts = dict(q.parts)
    parts["scales"] = np.full_like(parts["scales"], scale)
    q = QTensor(q.format, q.shape, parts)
    for to in ("gptq-v2", "awq", "compressed-tensors", "mlx", "gguf", "halfbyte"):
        outcome = convert_weight(q, goal_named(to))
        assert same(q, outcome.weight) == (outcome.kind in KEEPS)


def test_nvfp4_reciprocal_of_a_power_of_two_is_exact_and_of_others_equal():
    q = finite_tensor(format_named("nvfp4"), (4, 64), 6)
    for g, kind in ((2.0**-9, "exact-if"), (3e-4, "equal"), (1.0, "exact-if")):
        two = QTensor(q.format, q.shape, {**q.parts, "global_scale": np.array(g, np.float32)})
        outcome = convert_weight(two, goal_named("compressed-tensors"))
        assert outcome.kind == kind, (g, outcome)
        assert np.array_equal(outcome.weight.parts["codes"], two.parts["codes"])
        assert np.array_equal(outcome.weight.dequantize("bfloat16", "producer"), two.dequantize("bfloat16"))


def test_nvfp4_products_of_nan_block_scales_are_equal_too():
    q = finite_tensor(format_named("nvfp4"), (4, 64), 6)
    scales = q.parts["scales"].copy()
    scales[1, 2] = 0x7F
    nan = QTensor(q.format, q.shape, {**q.parts, "scales": scales, "global_scale": np.array(3e-4, np.float32)})
    assert convert_weight(nan, goal_named("compressed-tensors")).kind == "equal"


def test_nvfp4_products_that_differ_are_lossy(monkeypatch):
    """In float32 the products of a rounded reciprocal differ: the check that found them equal in
    bfloat16 finds it.
    """
    from halfbyte.conversion import producer_equality as arithmetic

    monkeypatch.setitem(arithmetic.NATIVE, "compressed-tensors", "float32")
    q = finite_tensor(format_named("nvfp4"), (4, 64), 6)
    two = QTensor(q.format, q.shape, {**q.parts, "global_scale": np.array(3.3e-4, np.float32)})
    monkeypatch.setattr("halfbyte.producers.compressed_tensors.bfloat16", np.dtype(np.float32))
    assert convert_weight(two, goal_named("compressed-tensors:nvfp4")).kind == "lossy"


def test_negative_block_scales_of_nvfp4_move_their_sign_into_the_codes():
    scales = np.array([[0x38, 0xB8, 0x80, 0x30]], np.uint8)
    fmt = format_named("nvfp4", global_scale="none")
    q = QTensor(fmt, (1, 64), {"codes": pack(all_codes(1, 64), 4), "scales": scales})
    outcome = convert_weight(q, goal_named("gguf"))
    assert outcome.why == "signs of scales are moved into the codes"
    assert same(q, outcome.weight)
    codes = unpack(outcome.weight.parts["codes"], 4, 64)
    assert np.array_equal(codes[0, 16:32], unpack(q.parts["codes"], 4, 64)[0, 16:32] ^ 8)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_block_scale_bytes_that_ggml_reads_otherwise(byte):
    fmt = format_named("nvfp4_ue4m3", global_scale="none")
    q = QTensor(fmt, (1, 64), {"codes": pack(all_codes(1, 64), 4), "scales": np.array([[0x38, byte, 0x38, 0x38]], np.uint8)})
    assert convert_weight(q, goal_named("gguf")).kind == "exact"
    outcome = convert_weight(q, goal_named("modelopt:nvfp4"))
    assert outcome.kind == "lossy"
    assert "GGUF as 0 or 480" in outcome.why


def test_values_that_happen_to_lie_on_the_grid_are_exact():
    """A dequantized weight put into a wide table comes back exactly where its values allow it."""
    q = quantize(np.tile(np.array([0, 0.5, -1, 2], np.float32), (4, 64)), "int8:g32")
    outcome = convert_weight(q, goal_named("mlx:mxfp4"))
    assert outcome.kind == "exact-if"
    assert outcome.why == "every value is on the grid of mxfp4:g32"
    assert same(q, outcome.weight)


def test_the_refusal_names_the_weight_its_error_and_what_would_be_exact():
    q = quantize(np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32), "uint4:g32")
    with pytest.raises(LossyError) as caught:
        convert_tensor(q, "gguf:q4_0", name="blk.0.attn_q")
    text = str(caught.value)
    assert text.startswith("[convert] 1 weight cannot go to gguf:q4_0 exactly: blk.0.attn_q: ")
    assert "a relative RMS error of 0.0" in text
    assert "Exact instead: gguf:q5_0. Allow the error with --lossy (lossy=True)" in text
    ((key, _, rms),) = caught.value.losses
    assert key == "blk.0.attn_q"
    assert 0 < rms < 0.1


def lost(why: str, rms: float, *instead: str) -> Outcome:
    error = ErrorStats()
    error.add(np.ones((1, 2)), np.full((1, 2), 1.0 + rms))
    return Outcome(quantize(np.eye(1, 32, dtype=np.float32), "int4:g32"), {}, {}, "lossy", why, error, instead)


def test_the_refusal_gives_each_cause_once_with_its_least_and_largest_error():
    goal = goal_named("gguf:q4_0")
    a, b, c = lost("too wide", 0.25, "gguf:q5_0"), lost("too wide", 0.5, "gguf:q8_0"), lost("too odd", 0.125)
    said = [
        (
            (a,),
            (
                "[convert] 1 weight cannot go to gguf:q4_0 exactly: k0: too wide, a relative RMS error of 0.25. Exact instead: "
                "gguf:q5_0. Allow"
            ),
        ),
        (
            (a, b),
            (
                "2 weights cannot go to gguf:q4_0 exactly: too wide, relative RMS errors of 0.25 to 0.5, the largest in k1. "
                "Exact instead: gguf:q5_0, gguf:q8_0. Allow"
            ),
        ),
        ((b, a), "too wide, relative RMS errors of 0.25 to 0.5, the largest in k0. Exact instead: gguf:q5_0, gguf:q8_0. Allow"),
        ((a, a), "exactly: too wide, a relative RMS error of 0.25 in k0. Exact instead: gguf:q5_0. Allow"),
        ((c, c), "exactly: too odd, a relative RMS error of 0.125 in k0. Allow"),
        (
            (a, c, b),
            (
                "3 weights cannot go to gguf:q4_0 exactly: 2 of them: too wide, relative RMS errors of 0.25 to 0.5, the largest "
                "in k2; 1 of them: too odd, a relative RMS error of 0.125 in k1. Exact"
            ),
        ),
    ]
    for outcomes, text in said:
        error = refusal(goal, [(f"k{i}", o) for i, o in enumerate(outcomes)])
        assert text in str(error)
        assert error.losses == [(f"k{i}", o.why, o.error.relative_rms) for i, o in enumerate(outcomes)]
        assert error.instead == ("" if c in outcomes else "gguf" if b in outcomes else "gguf:q5_0")
    counted = refusal(goal, [("k0", a), ("k1", c)], {"k0": 1000, "k1": 234})
    assert "1,234 weights cannot go" in str(counted)
    assert "exactly: 1,000 of them: too wide, a relative RMS error of 0.25 in k0; 234 of them: too odd" in str(counted)
    assert "in k1 (the first rows of one weight of each format were tried; --plan tries all). Exact" in str(counted)


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ("gtpq", "'gtpq' is not a layout; nearest: gptq"),
        ("zzzz", "'zzzz' is not a layout; checkpoints are written as gptq, "),
        ("safetensors", "'safetensors' is not a layout of packed weights; `halfbyte dequantize` writes dense ones"),
        ("q4_K", "'q4_K' is a codec; a target is spelled layout[:codec[:gN]], for example gguf:q4_K"),
        ("gptq:int4:128", "group '128' of target 'gptq:int4:128'; it is spelled gN"),
        ("gptq:int4:g128:x", "it is spelled layout[:codec[:gN]]"),
        ("gptq:mxfp4", "gptq holds no mxfp4; it holds int4"),
        ("gguf:q9", "'q9' is not a codec"),
        ("mlx:affine4:g0", "group 'g0'"),
    ],
)
def test_targets_that_are_not_spelled_right(to, text):
    with pytest.raises((LayoutError, FormatError)) as caught:
        goal_named(to)
    assert text in str(caught.value)


@pytest.mark.parametrize("shape", [(0, 64), (8, 0), (2, 8, 64), (0, 8, 64), (1, 64)])
@pytest.mark.parametrize("to", ["compressed-tensors", "mlx", "gguf", "halfbyte"])
def test_empty_tensors_and_stacks(shape, to):
    q = finite_tensor(format_named("mxfp4"), shape, 1)
    outcome = convert_weight(q, goal_named(to))
    assert outcome.kind == "exact"
    assert same(q, outcome.weight)


def test_stacks_have_a_tensor_scale_a_matrix():
    q = finite_tensor(format_named("mxfp4"), (3, 4, 64), 1)
    parts = {**q.parts, "scales": q.parts["scales"].copy()}
    for e, base in enumerate((10, 120, 230)):
        parts["scales"][e] = base + np.arange(8, dtype=np.uint8).reshape(4, 2)
    q = QTensor(q.format, q.shape, parts)
    outcome = convert_weight(q, goal_named("modelopt:nvfp4"))
    assert outcome.kind == "exact-if"
    assert outcome.weight.parts["global_scale"].shape == (3,)
    assert same(q, outcome.weight)


def half_everywhere(power):
    """0.5 · 2^power in every place, under float32 scales, in FP4."""
    scales = np.ldexp(np.ones((1, 1)), power).astype(np.float32)
    return QTensor(format_named("fp4:g32", scale_dtype="float32"), (1, 32), {"codes": HALVES, "scales": scales})


HALVES = pack(np.ones((1, 32), np.uint8), 4)


@pytest.mark.parametrize(("power", "byte"), [(-127, 0), (-126, 1), (0, 127), (127, 254)])
def test_powers_of_two_that_e8m0_has(power, byte):
    q = half_everywhere(power)
    outcome = convert_weight(q, goal_named("gpt-oss:mxfp4"))
    assert outcome.kind == "exact-if"
    assert outcome.weight.parts["scales"].tolist() == [[byte]]
    assert same(q, outcome.weight)


def test_groups_of_scale_0_have_e8m0_byte_0_and_codes_0():
    parts = {"codes": HALVES, "scales": np.zeros((1, 2), np.uint8), "global_scale": np.asarray(1.0, np.float32)}
    q = QTensor(format_named("nvfp4"), (1, 32), parts)
    outcome = convert_weight(q, goal_named("gpt-oss:mxfp4"))
    assert outcome.weight.parts["scales"].tolist() == [[0]]
    assert same(q, outcome.weight)


def test_powers_of_two_that_e8m0_lacks():
    """Of 2^128 the byte would be 255, which is NaN: 0.5 · 2^128 is rounded anew under a smaller
    scale. 2^-128 has no byte.
    """
    assert convert_weight(half_everywhere(-128), goal_named("gpt-oss:mxfp4")).kind == "lossy"
    for power, byte, code in ((119, 254, 1), (120, 252, 6)):
        parts = {"codes": HALVES, "scales": np.full((1, 2), 0x78, np.uint8)}  # 2^8
        q = QTensor(format_named("nvfp4"), (1, 32), {**parts, "global_scale": np.asarray(2.0**power, np.float32)})
        outcome = convert_weight(q, goal_named("gpt-oss:mxfp4"))
        assert same(q, outcome.weight)
        assert outcome.weight.parts["scales"].tolist() == [[byte]]
        assert set(unpack(outcome.weight.parts["codes"], 4, 32)[0].tolist()) == {code}


def test_the_error_of_a_stack_is_that_of_all_its_matrices():
    x = np.ones((3, 2, 64), np.float32)
    x[2, 1, ::2] = 0.01
    a = quantize(x, "int8:g32")
    b = requantize(a, format_named("int4", 32))
    want = ErrorStats()
    want.add(a.dequantize("float64").reshape(6, 64), b.dequantize("float64").reshape(6, 64))
    assert difference(a, b).__dict__ == want.__dict__
    assert want.differing
