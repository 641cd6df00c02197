"""The register operand of wgmma, without a GPU: where each lane finds its words, and the assembly
that finishes them, executed.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from halfbyte.backends.cuda import decoders, order
from halfbyte.backends.cuda.wgmma import operand as ro
from halfbyte.numerics.bits import pack
from halfbyte.numerics.minifloat import element_table
from support import ptx

UINT, INT, E2M1, E4M3, E5M2 = 0, 1, 2, 5, 6
NONE, ZERO, BIAS = 0, 1, 2
HALF, BFLOAT, FLOAT32, FLOAT32_BFLOAT = 0, 1, 2, 3
ROWS = (decoders.HALF, decoders.BFLOAT, decoders.FLOAT32, decoders.FLOAT32)
NAMES = {UINT: "uint", INT: "int", E2M1: "e2m1", E4M3: "e4m3", E5M2: "e5m2"}


def decoded(q, kind, add, arithmetic, half, scale, addend, by_16, bits=4, brings_power=False):
    """[16, 64] codes through fragment order, the layout of words and the assembly to the operand,
    as [16, 64] values.
    """
    dtype = np.dtype(np.float16) if half else np.dtype(ml_dtypes.bfloat16)
    codes = q if bits == 8 else pack(q, bits)
    words = order.to_fragments(codes, 64, by_16, NAMES[kind], bits).view(np.uint32).reshape(bits, 32)
    layout = ro.words_layout(1, 4, by_16, bits)
    lane = np.arange(32)
    out = np.full((16, 64), np.nan)
    text = decoders.pair_assembly(bits, NAMES[kind], ROWS[arithmetic], add, brings_power, half)
    positions = decoders.PAIRS[bits, NAMES[kind], ROWS[arithmetic]].positions
    for register in range(8):  # i, block of the half, half
        at = np.zeros((32, 3), np.int64)
        for bit, base in enumerate(layout.lane_bases):
            at += ((lane >> bit) & 1)[:, None] * np.array(base)
        for bit, base in enumerate(layout.reg_bases):
            at += ((register >> bit) & 1) * np.array(base)
        assert (at[:, 0] == 0).all()
        word = words[at[:, 1], at[:, 2]]
        g, t = lane // 4, lane % 4
        inputs = []
        for down in (0, 1):
            position = np.array([positions[o][down] for o in t % 2], np.int64).astype(np.uint32)
            at_pair = [position[:, 0], position[:, 1]][: 0 if bits == 8 else 2 if kind == E2M1 else 1]
            block = 32 * (register >> 2) + 16 * ((register >> 1) & 1)
            row = g + 8 * down
            s, a = scale[row, block], addend[row, block]
            if arithmetic >= FLOAT32:
                s, a = (np.ascontiguousarray(v, np.float32).view(np.uint32) for v in (s, a))
            else:
                if add == ZERO:
                    a = -128.0 - a if arithmetic == BFLOAT else (-64.0 - a if down and bits == 4 else 1024.0 + a)
                s, a = (ptx.joined(v.astype(np.float64), v.astype(np.float64), dtype) for v in (s, a))
            inputs.append([word, *at_pair, s, *([a] if add != NONE else [])])
        registers = {}
        for i in range(len(inputs[0])):
            registers[f"${2 + 4 * i}"], registers[f"${4 + 4 * i}"] = inputs[0][i], inputs[1][i]
        ptx.run(text, registers)
        for down in (0, 1):
            k = block + 8 * (register & 1) + 2 * t
            for p, v in enumerate(ptx.halves(registers[f"${down}"], dtype)):
                out[g + 8 * down, k + p] = v
    assert not np.isnan(out).any()
    return out


CASES = [
    (UINT, NONE, HALF, True), (INT, NONE, HALF, True), (UINT, ZERO, HALF, True), (UINT, BIAS, HALF, True),
    (E2M1, NONE, HALF, True),
    (INT, NONE, BFLOAT, False), (UINT, ZERO, BFLOAT, False), (UINT, BIAS, BFLOAT, False), (E2M1, NONE, BFLOAT, False),
    (INT, NONE, FLOAT32, False), (UINT, ZERO, FLOAT32, False), (UINT, BIAS, FLOAT32, False), (UINT, BIAS, FLOAT32, True),
    (E2M1, NONE, FLOAT32, False),
]  # fmt: skip


def drawn(rng, elements, add, arithmetic, stored, zeros):
    """Scales and addends of groups of 16 inputs, and the values that [16, 64] elements have with
    them, before their rounding.
    """
    scale = (rng.standard_normal((16, 4)) * 0.1).astype(stored).astype(np.float64).repeat(16, 1)
    addend = rng.integers(0, zeros, (16, 4)).repeat(16, 1).astype(np.float64)
    if add == BIAS:
        addend = (rng.standard_normal((16, 4)) * 0.1).astype(stored).astype(np.float64).repeat(16, 1)
    exact = (elements - addend) * scale if add == ZERO else elements * scale + (addend if add == BIAS else 0)
    if arithmetic >= FLOAT32:  # float32 first: exact but for a bias
        exact = exact.astype(np.float32).astype(np.float64)
    return scale, addend, exact


@pytest.mark.parametrize("by_16", [False, True])
@pytest.mark.parametrize(("kind", "add", "arithmetic", "half"), CASES)
def test_every_code_in_every_position_is_finished_and_rounded_once(kind, add, arithmetic, half, by_16):
    rng = np.random.default_rng(7)
    dtype = np.dtype(np.float16) if half else np.dtype(ml_dtypes.bfloat16)
    stored = dtype if arithmetic != FLOAT32 else np.dtype(ml_dtypes.bfloat16) if half else np.dtype(np.float16)
    table = element_table(NAMES[kind], 4).astype(np.float64)
    for _ in range(4):
        q = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (16, 4)), axis=1)
        scale, addend, exact = drawn(rng, table[q], add, arithmetic, stored, zeros=17)
        got = decoded(q, kind, add, arithmetic, half, scale, addend, by_16)
        np.testing.assert_array_equal(got, ptx.rounded(exact, dtype).astype(np.float64))


def decoded2(q, kind, add, arithmetic, half, scale, addend):
    """`decoded` for 2 bits: both words of a lane's rows give both pairs of a block of 16 inputs."""
    dtype = np.dtype(np.float16) if half else np.dtype(ml_dtypes.bfloat16)
    words = order.to_fragments(pack(q, 2), 64, False, NAMES[kind], 2).view(np.uint32).reshape(2, 32)
    layout = ro.words_layout(1, 4, False, 2)
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    out = np.full((16, 64), np.nan)
    text = decoders.pair_assembly(2, NAMES[kind], ROWS[arithmetic], add, False, half)
    for block in range(4):
        registers = {}
        for down in (0, 1):
            at = np.zeros((32, 3), np.int64)
            for bit, base in enumerate(layout.lane_bases):
                at += ((lane >> bit) & 1)[:, None] * np.array(base)
            for bit, base in enumerate(layout.reg_bases):
                at += (((block + 4 * down) >> bit) & 1) * np.array(base)
            row = g + 8 * down
            s, a = scale[row, 16 * block], addend[row, 16 * block]
            if arithmetic >= FLOAT32:
                s, a = (np.ascontiguousarray(v, np.float32).view(np.uint32) for v in (s, a))
            else:
                a = -128.0 - a if add == ZERO and arithmetic == BFLOAT else a
                s, a = (ptx.joined(v.astype(np.float64), v.astype(np.float64), dtype) for v in (s, a))
            inputs = [words[at[:, 1], at[:, 2]], (4 * t).astype(np.uint32), s, *([a] if add != NONE else [])]
            for i, value in enumerate(inputs):
                registers[f"${4 + 8 * i + 2 * down}"] = value
        ptx.run(text, registers)
        for i in range(4):
            for p, v in enumerate(ptx.halves(registers[f"${i}"], dtype)):
                out[g + 8 * (i % 2), 16 * block + 8 * (i // 2) + 2 * t + p] = v
    return out


@pytest.mark.parametrize(("kind", "add", "arithmetic", "half"), [case for case in CASES if case[0] != E2M1])
def test_every_2_bit_code_in_every_position_is_finished_and_rounded_once(kind, add, arithmetic, half):
    rng = np.random.default_rng(27)
    dtype = np.dtype(np.float16) if half else np.dtype(ml_dtypes.bfloat16)
    stored = dtype if arithmetic != FLOAT32 else np.dtype(ml_dtypes.bfloat16) if half else np.dtype(np.float16)
    table = element_table(NAMES[kind], 2).astype(np.float64)
    for _ in range(4):
        q = rng.integers(0, 4, (16, 64), dtype=np.uint8)
        scale, addend, exact = drawn(rng, table[q], add, arithmetic, stored, zeros=5)
        got = decoded2(q, kind, add, arithmetic, half, scale, addend)
        np.testing.assert_array_equal(got, ptx.rounded(exact, dtype).astype(np.float64))


CASES8 = [
    (UINT, NONE, HALF, True), (INT, NONE, HALF, True), (UINT, ZERO, HALF, True), (UINT, BIAS, HALF, True),
    (E4M3, NONE, HALF, True), (E5M2, NONE, HALF, True),
    (INT, NONE, FLOAT32, False), (UINT, ZERO, FLOAT32, False),
    (UINT, BIAS, FLOAT32_BFLOAT, False), (UINT, BIAS, FLOAT32_BFLOAT, True),
    (E4M3, NONE, FLOAT32, False), (E5M2, NONE, FLOAT32, False),
]  # fmt: skip


@pytest.mark.parametrize("by_16", [False, True])
@pytest.mark.parametrize(("kind", "add", "arithmetic", "half"), CASES8)
def test_every_8_bit_code_in_every_position_is_finished_and_rounded_once(kind, add, arithmetic, half, by_16):
    rng = np.random.default_rng(17)
    dtype = np.dtype(np.float16) if half else np.dtype(ml_dtypes.bfloat16)
    stored = np.dtype(ml_dtypes.bfloat16) if arithmetic == FLOAT32_BFLOAT else np.dtype(np.float16)
    table = element_table(NAMES[kind], 8).astype(np.float64)
    codes = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
    for _ in range(4):
        q = rng.permuted(np.resize(codes, (16, 64)).reshape(-1)).reshape(16, 64)
        scale, addend, exact = drawn(rng, table[q], add, arithmetic, stored, zeros=257)
        got = decoded(q, kind, add, arithmetic, half, scale, addend, by_16, bits=8)
        np.testing.assert_array_equal(got, ptx.rounded(exact, dtype).astype(np.float64))


def test_raw_e2m1_meets_scales_that_bring_its_power_of_two():
    """8-bit scales include the factor 2^14, so that one product finishes the value: E8M0 shifted,
    E4M3 times 2^6.
    """
    rng = np.random.default_rng(8)
    table = element_table("e2m1", 4).astype(np.float64)
    q = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (16, 4)), axis=1)
    for power in (-9, 0, 15):
        scale = np.full((16, 64), 2.0**power)
        got = decoded(q, E2M1, NONE, HALF, True, scale, scale, False, brings_power=True)
        np.testing.assert_array_equal(got, table[q] * 2.0 ** (power - 14))
