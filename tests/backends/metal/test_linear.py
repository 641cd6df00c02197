"""Metal products through the CPU build: one-hot activations return the weight, error bounds an
element, all schedules.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch
from halfbyte.backends.base import Call
from halfbyte.backends.metal import kernels, launch
from halfbyte.backends.metal.weight import refusal
from halfbyte.errors import BackendError
from halfbyte.formats import format_named
from halfbyte.tensor.qtensor import QTensor
from support.metal_cpu.machine import MetalFaultError, available
from support.metal_formats import FORMATS, SIX, TORCH, as_float, backend, on_device, stand
from support.metal_products import (
    FUSED,
    MAKERS,
    TILED,
    assert_one_hot,
    assert_product,
    numbers,
    one_hot,
    product,
    tokens,
    whole_numbers,
)
from support.random_tensors import finite_tensor

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")


@pytest.fixture(scope="module")
def six():
    """The 4-bit formats of most tests with every kernel of tiles, compiled together."""
    stand().load([MAKERS[s](SIX[f], "float16") for s in (*TILED, *FUSED) for f in SIX])


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_one_hot_activations_return_the_weight(six, schedule, name):
    q = finite_tensor(SIX[name], (70, 96), 1)
    y = product(schedule, torch.eye(96).half(), q)
    assert_one_hot(as_float(y), q, "float16")


SPECIAL_SCALES = {"nvfp4": (0x00, 0x01, 0x38, 0x7E, 0x80, 0x81, 0xB8, 0xFE, 0x7F, 0xFF), "mxfp4": (0, 1, 96, 127, 140, 255)}
"""E4M3: zeros, subnormals, one, the largest, of both signs, and both NaN. E8M0: the least, ordinary
ones, NaN.
"""


@pytest.mark.parametrize("name", SPECIAL_SCALES)
@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_special_scale_bytes(six, schedule, name):
    """A row for each byte: exact values, or NaN in the whole row, and in no other."""
    bytes_ = np.array(SPECIAL_SCALES[name], np.uint8)
    q = finite_tensor(SIX[name], (bytes_.size, 64), 4)
    q = QTensor(q.format, q.shape, {**q.parts, "scales": np.broadcast_to(bytes_[:, None], q.parts["scales"].shape).copy()})
    y = as_float(product(schedule, torch.eye(64).half(), q))
    nan = np.isin(bytes_, [0x7F, 0xFF] if name == "nvfp4" else [255])
    assert np.isnan(y[:, nan]).all()
    right = q.dequantize("float16").astype(np.float32).T
    np.testing.assert_array_equal(y[:, ~nan], right[:, ~nan])
    assert np.abs(right[:, ~nan]).max() > 0


PARTS = 6
TILED_AND_FUSED = [(s, f) for f in FORMATS for s in (*TILED, *FUSED) if s in TILED or FORMATS[f].bits == 4]


def features(case):
    """A format by name, and what a schedule's kernel is made of: decoder of elements and of scales,
    addend, group, factor.
    """
    schedule, name = case
    fmt = on_device(FORMATS[name])
    parts = (kernels.element_type(fmt), fmt.scale, kernels.addend_kind(fmt), fmt.group_size, fmt.global_op)
    return {name, *((schedule, i, part) for i, part in enumerate(parts))}


def few():
    """Of TILED_AND_FUSED, as many that every schedule meets every part of a kernel, and every
    format a schedule.
    """
    found, left = [], set().union(*map(features, TILED_AND_FUSED))
    while left:
        found.append(max(TILED_AND_FUSED, key=lambda case: len(left & features(case))))
        left -= features(found[-1])
    return found


FEW = few()


def check_tiled(cases):
    """64 of 256 inputs, each place of eight and of a group's 32 among them; two tiles of outputs
    would be a second's work.
    """
    stand().load([MAKERS[s](on_device(FORMATS[f]), "float32") for s, f in cases])
    x = torch.eye(256)[(5 * torch.arange(64)) % 256]
    for schedule, name in cases:
        q = numbers(FORMATS[name], (9, 256), 3)
        y = as_float(product(schedule, x, q))
        np.testing.assert_array_equal(y, q.dequantize("float32").T[(5 * np.arange(64)) % 256], f"{schedule} {name}")


@pytest.mark.parametrize("part", range(2))
def test_every_format_and_every_part_of_a_tiled_kernel(part):
    """Each format through one schedule at least; test_matvec.py and test_dequantize.py decode each,
    too.
    """
    check_tiled(FEW[part::2])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_format_through_every_tiled_kernel(part):
    names = list(FORMATS)[part::PARTS]
    check_tiled([(s, f) for s, f in TILED_AND_FUSED if f in names])


def test_few_kernels_are_every_kind():
    """No part is missing: not a decoder of elements that only one format has, not a schedule with
    one kind of scale less.
    """
    assert set(FEW) < set(TILED_AND_FUSED)
    assert {name for _, name in FEW} == set(FORMATS)
    for schedule in (*TILED, *FUSED):
        every, mine = ({f for s, f in cases if s == schedule} for cases in (TILED_AND_FUSED, FEW))
        for part in (kernels.element_type, kernels.addend_kind, lambda f: f.scale, lambda f: f.group_size, lambda f: f.global_op):
            assert {part(on_device(FORMATS[f])) for f in mine} == {part(on_device(FORMATS[f])) for f in every}


OTHER = {s: "affine4" if s == "fused wide" else "uint4" if s in FUSED else "nvfp4" for s in (*TILED, *FUSED)}
"""Format in which a schedule is tested with the other dtypes."""


@pytest.fixture(scope="module")
def other_dtypes():
    reduce = [kernels.gemm_striped_reduce("multiply", dtype) for dtype in ("float32", "bfloat16")]
    stand().load([*(MAKERS[s](SIX[f], dtype) for s, f in OTHER.items() for dtype in ("float32", "bfloat16")), *reduce])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_case_31_the_other_dtypes(other_dtypes, schedule, dtype):
    name = OTHER[schedule]
    q = finite_tensor(SIX[name], (37, 96), 2)
    assert_one_hot(as_float(product(schedule, torch.eye(96).to(TORCH[dtype]), q)), q, dtype)
    x = tokens(66, 96, dtype)
    y = product(schedule, x, q)
    assert y.dtype == TORCH[dtype]
    assert_product(y, x, q, dtype)


@settings(max_examples=12)
@given(m=st.integers(1, 70), n=st.integers(1, 70), groups=st.integers(1, 5), seed=st.integers(0, 99))
@pytest.mark.parametrize("schedule", [*TILED, *FUSED, "matvec"])
def test_any_m_n_and_whole_groups_of_k(schedule, m, n, groups, seed):
    q = finite_tensor(SIX["nvfp4"] if seed % 2 else SIX["uint4"], (n, 16 * groups if seed % 2 else 32 * groups), seed)
    x, bias = tokens(m, q.shape[1], seed=seed, scale=0.1), torch.randn(n, generator=torch.Generator().manual_seed(seed))
    assert_product(product(schedule, x, q, bias if seed % 3 else None), x, q, "float16", bias if seed % 3 else None)


@pytest.fixture(scope="module")
def decoders():
    makers = (lambda f, d: kernels.matvec(f, "float16", 4, d), lambda f, d: kernels.gemm_fused(f, "float16", "wide", d))
    stand().load([make(SIX[f], d) for f in ("mxfp4", "fp4") for make in makers for d in kernels.E2M1_DECODERS])


@pytest.mark.parametrize("decoder", [d for d in kernels.E2M1_DECODERS if d])
def test_every_way_to_decode_e2m1_gives_the_same_bits(decoders, decoder):
    b = backend()
    for q in (finite_tensor(SIX["mxfp4"], (9, 96), 5), finite_tensor(SIX["fp4"], (67, 64), 5)):
        x, held = tokens(3, q.shape[1]), b.prepare(q).data
        for run in (lambda p, d: launch.matvec(p, d), lambda p, d: launch.fused(p, "wide", d)):
            pair = [run(launch.Product(b.runtime, x, held, None), d) for d in ("", decoder)]
            assert torch.equal(*pair)


@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_each_simdgroup_of_a_tile_and_each_stripe_is_in_the_result(schedule):
    """Whole numbers, three tiles each way, more steps than stripes: equality everywhere."""
    q = whole_numbers(32 * 23, 131)
    x = np.random.default_rng(1).integers(-3, 4, (131, 32 * 23)).astype(np.float32)
    np.testing.assert_array_equal(as_float(product(schedule, torch.from_numpy(x), q)), x @ q.dequantize("float32").T)


@pytest.mark.parametrize("k", [528, 1040])
def test_case_18_nvfp4_with_a_tail_of_half_a_tile(six, k):
    q = finite_tensor(SIX["nvfp4"], (20, k), 1)
    for schedule, m in (("matvec", 1), ("single-stage", 50), ("double-buffered", 50), ("striped", 50), ("fused wide", 50)):
        x = tokens(m, k, scale=0.05)
        assert_product(product(schedule, x, q), x, q, "float16")


@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_case_19_n_of_one_tile_and_identity(schedule):
    q = finite_tensor(format_named("uint4", 64), (64, 128), 4)
    stand().load([MAKERS[s](q.format, "float16") for s in (*TILED, *FUSED)])
    assert_one_hot(as_float(product(schedule, torch.eye(128).half(), q)), q, "float16")


def test_case_20_groups_that_tiles_span(six):
    for name in ("uint4", "nvfp4"):
        q = finite_tensor(SIX[name], (5, 96), 6)
        for schedule in (*TILED, *FUSED):
            assert_one_hot(as_float(product(schedule, torch.eye(96).half(), q)), q, "float16")


def test_case_24_strided_offset_and_transposed_x():
    q = finite_tensor(SIX["mxfp4"], (9, 64), 1)
    b = backend()
    p = b.prepare(q)
    big = tokens(6, 256)
    for x in (
        big[:, 64:128],
        big[:, 1:65],
        big.flatten()[1:193].view(3, 64),
        big[:, ::4],
        big[::2, :64],
        big[:4].t()[:64].t(),
        tokens(64, 6).t(),
        big[0:1, :64].expand(3, 64),
    ):
        assert torch.equal(b.linear(x, p, None), b.linear(x.contiguous().clone(), p, None))


def at_odd_offset(t):
    """The same tensor as a view that begins one element into its storage."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


@pytest.mark.parametrize("word", ["uint4", "int8", "int6", "int2", "affine3"])
def test_weights_that_are_views_at_odd_offsets(word, monkeypatch):
    """Codes that begin between words are copied first; all else is read one number at a time.
    Without the copy, a fault.
    """
    q = finite_tensor(format_named(word, 32), (9, 64), 3)
    makers = [kernels.matvec, kernels.gemm_double_buffered, *([MAKERS["fused wide"]] if q.format.bits == 4 else [])]
    stand().load([*(make(q.format, "float16") for make in makers), kernels.dequantize(q.format, "float32")])
    b = backend()
    held = b.prepare(q).data
    parts = {name: getattr(held, name) for name in ("codes", "scales", "addends", "factors")}
    odd = replace(held, **{name: None if a is None else at_odd_offset(a) for name, a in parts.items()})
    x, bias = at_odd_offset(tokens(20, 64)), at_odd_offset(torch.randn(9))
    for schedule in (None, "double-buffered", *(["fused"] if q.format.bits == 4 else [])):
        for rows in (x, x[3:4]):
            y, right = (launch.linear(b.runtime, rows, w, bias, schedule) for w in (odd, held))
            assert torch.equal(y, right)
    assert torch.equal(launch.dequantize(b.runtime, odd, "float32"), launch.dequantize(b.runtime, held, "float32"))
    if held.word_bytes > 1:
        monkeypatch.setattr(b.runtime, "aligned", lambda codes, nbytes: codes)
        with pytest.raises(MetalFaultError, match="misaligned"):
            launch.dequantize(b.runtime, odd, "float32")


def test_case_26_more_rows_than_sixteen_bits():
    q = finite_tensor(SIX["int4"], (2, 8), 1)
    b = backend()
    x = tokens(65600, 8)
    y = b.linear(x, b.prepare(q), None)
    assert_product(y[-100:], x[-100:], q, "float16")
    assert_product(y[:100], x[:100], q, "float16")


@pytest.mark.parametrize("schedule", ["matvec", *TILED, *FUSED])
def test_case_29_partial_sums_beyond_float16(schedule):
    q = QTensor(
        SIX["int4"], (8, 128), {"codes": np.full((8, 64), 0xFF, np.uint8), "scales": np.full((8, 1), 8, np.float16)}
    )  # every weight 56
    x = torch.cat([torch.full((9, 64), 32.0), torch.full((9, 64), -32.0)], 1).half()
    assert (product(schedule, x, q) == 0).all()


def test_case_32_no_tokens_no_outputs_no_inputs():
    b = backend()
    bias = torch.ones(5).half()
    p = b.prepare(finite_tensor(SIX["mxfp4"], (5, 64), 0))
    assert b.linear(torch.zeros(0, 64).half(), p, bias).shape == (0, 5)
    p = b.prepare(finite_tensor(SIX["mxfp4"], (0, 64), 0))
    assert b.linear(torch.zeros(3, 64).half(), p, None).shape == (3, 0)
    p = b.prepare(finite_tensor(SIX["mxfp4"], (5, 0), 0))
    assert torch.equal(b.linear(torch.zeros(3, 0).half(), p, bias), torch.ones(3, 5).half())


@pytest.mark.parametrize("schedule", ["matvec", "single-stage", *FUSED])
def test_nan_and_infinite_scales_stay_in_their_rows(schedule):
    q = finite_tensor(SIX["mxfp4"], (6, 64), 2)
    scales = np.array(q.parts["scales"])
    scales[2, 1] = 255
    q = QTensor(q.format, q.shape, {**q.parts, "scales": scales})
    y = as_float(product(schedule, torch.ones(2, 64).half() * 2.0**-8, q))
    assert np.isnan(y[:, 2]).all()
    assert np.isfinite(np.delete(y, 2, 1)).all()


def test_act_order_and_odd_k_reach_the_products():
    q = finite_tensor(SIX["uint4"], (7, 96), 3)
    index = np.random.default_rng(0).permutation(np.repeat(np.arange(3, dtype=np.int32), 32))
    for w in (QTensor(q.format, q.shape, {**q.parts, "group_index": index}), finite_tensor(format_named("int4", -1), (7, 91), 1)):
        k = w.shape[1]
        for schedule in ("matvec", "double-buffered", "fused wide"):
            assert_one_hot(as_float(product(schedule, torch.eye(k).half(), w)), w, "float16")


def test_metal_marlin_words_are_read_where_they_lie():
    """[k/8, n] words and [G, n] scales: the fused kernels' strides, no copy into rows."""
    from halfbyte.layouts import LAYOUTS

    for name in ("fp4", "uint4"):
        q = finite_tensor(format_named(name, 32), (70, 96), 8)
        t = LAYOUTS["metal-marlin"].pack(q, {})
        b = backend()
        runtime, kernel = b.runtime, kernels.gemm_fused(q.format, "float16", "wide")
        zeros = t["zeros"].astype(np.int16) if "zeros" in t else t["scales"]
        x, n = torch.eye(96).half(), 70
        inputs = [torch.from_numpy(a) for a in (t["qweight"].view(np.int32), t["scales"], zeros)]
        one = torch.ones(8)
        (y,) = runtime.run(kernel, [*inputs, x, one, one], [12, 1, n, 1, n, 96, n, 96, 0], [1.0], [(96, n)], (2 * 128, 2, 1))
        assert_one_hot(as_float(y), q, "float16")


def test_every_schedule_gives_the_same_answer_twice(six):
    q = finite_tensor(SIX["affine4"], (40, 160), 2)
    x = tokens(30, 160)
    for schedule in ("matvec", *TILED, *FUSED, "dequantize_then_gemm"):
        assert torch.equal(product(schedule, x, q), product(schedule, x, q))


def test_zero_points_of_any_size_are_exact():
    q = finite_tensor(SIX["uint4"], (8, 32), 0)
    zeros = np.array([[300], [-3000], [15], [0], [1], [7], [256], [32767]], np.int16)
    q = QTensor(q.format, q.shape, {**q.parts, "zeros": zeros})
    stand().load([MAKERS[s](q.format, "float32") for s in (*TILED, *FUSED)])
    for schedule in ("matvec", *TILED, *FUSED):
        assert_one_hot(as_float(product(schedule, torch.eye(32), q)), q, "float32")


def test_what_a_schedule_cannot_hold_is_refused_with_the_reason():
    b = backend()
    wide = b.prepare(finite_tensor(format_named("int8", 32), (8, 32), 0)).data
    with pytest.raises(BackendError, match="reads words of eight 4-bit codes, not int8"):
        launch.fused(launch.Product(b.runtime, tokens(2, 32), wide, None), "")
    assert "reads words of eight 4-bit codes, not int8" in b.refuses(Call("linear", format_named("int8"), schedule="fused"))
    assert "exact activations only" in b.refuses(Call("linear", format_named("int8"), activations="int8"))
    assert "raw ggml blocks" in refusal(format_named("iq1_s"))
    assert "float32 zero points" in refusal(format_named("hqq4", 64, scale_dtype="float32"))


def test_the_checker_fails_on_one_wrong_column():
    q = finite_tensor(SIX["mxfp4"], (64, 128), 0)
    x = tokens(3, 128, "float32")
    y = product("matvec", x, q)
    assert_product(y, x, q, "float32")
    y[1, 40] *= 1.001
    with pytest.raises(AssertionError):
        assert_product(y, x, q, "float32")


def test_the_one_hot_check_fails_on_a_neighbouring_value():
    q = finite_tensor(SIX["affine4"], (5, 64), 4)
    y = one_hot(q, "float16")
    assert_one_hot(y, q, "float16")
    for i, j in ((0, 0), (63, 4), (17, 2)):
        wrong = y.copy()
        wrong[i, j] = np.nextafter(np.float16(y[i, j]), np.float16(np.inf))
        with pytest.raises(AssertionError):
            assert_one_hot(wrong, q, "float16")
