"""Every row of the decoder tables: its assembly is executed over all codes in every position of a
word, and gives the format's exact values.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from halfbyte.backends.cuda import decoders as d
from halfbyte.backends.cuda import order
from halfbyte.numerics.bits import pack
from halfbyte.numerics.minifloat import element_table
from support import ptx

HALF, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def table_of(element, bits):
    """Exact values of all codes."""
    return element_table(element, bits).astype(np.float64)


def all_codes(bits):
    """Codes [words, codes a word], each code in each position of a word."""
    count, places = 1 << bits, 32 // bits
    return np.stack([np.roll(np.arange(count), 7 * i) for i in range(places)], 1).astype(np.uint32)


def words_of(codes, bits):
    """The codes side by side, the first in the lowest bits."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    return (codes << shifts).sum(1, dtype=np.uint32)


def spread(words, element):
    """E2M1 in fragment order has its bits spread."""
    return order.spread_e2m1(words.view(np.int32)).view(np.uint32) if element == "e2m1" else words


@pytest.mark.parametrize("key", d.WORDS, ids=str)
def test_words_of_eight_codes(key):
    bits, element, arranged = key
    row, codes = d.WORDS[key], all_codes(bits)
    words = words_of(codes, bits)
    registers = {"$8": spread(words, element) if arranged == d.FRAGMENTS else words}
    ptx.run(d.assembly(row, 8, "w0"), registers)
    values = np.stack([np.ascontiguousarray(registers[f"${i}"]).view(np.float32) for i in range(8)], 1)
    np.testing.assert_array_equal(values.astype(np.float64) / row.low, table_of(element, bits)[codes])


OPERANDS = [(key, row, "") for key, row in d.OPERANDS.items()] + [(k, r, "by integers") for k, r in d.WITHOUT_E4M3.items()]


@pytest.mark.parametrize(("key", "row", "how"), OPERANDS, ids=[f"{key} {how}" for key, _, how in OPERANDS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN among the codes
def test_operands_of_mma(key, row, how):
    """Register 2 i + h has codes 4 p + 2 i + h (of 8 bits register h: 2 h + p) in its halves p."""
    bits, element, output = key
    codes, table = all_codes(bits), table_of(element, bits)
    registers = {"w0": spread(words_of(codes, bits), element) if bits == 4 else words_of(codes, bits)}
    dtype = BFLOAT16 if "bfloat16" in output else HALF
    scale, inputs = [1.0, 1.0], ["w0"]
    if output == d.SCALED_BFLOAT16:
        scale, inputs = [2.0**100, 2.0**7], ["w0", "s0", "s1"]
        registers |= {f"s{i}": ptx.joined(*[np.full(len(codes), s)] * 2, dtype) for i, s in enumerate(scale)}
    results = 4 if bits == 4 else 2
    registers = {f"${results + i}": registers[name] for i, name in enumerate(inputs)}
    ptx.run(d.assembly(row, results, *inputs), registers)
    for r in range(results):
        unit = (row.low, row.high)[r % 2] * scale[r % 2]
        for p, got in enumerate(ptx.halves(registers[f"${r}"], dtype)):
            code = codes[:, 4 * p + r if bits == 4 else 2 * r + p]
            np.testing.assert_array_equal(got, table[code] * unit, err_msg=f"register {r}, half {p}")


WHOLE = (d.FLOAT32, d.TABLE, d.SUBNORMAL)
"""Arithmetics whose values are float32 first."""
PAIRS = [
    (key, addend)
    for key in d.PAIRS
    for addend in (d.NO_ADDEND, d.ZERO_POINTS, d.BIASES)
    if addend != d.ZERO_POINTS or (key[1] == "uint" and key[2] != d.SUBNORMAL)
]


def pairs_in(bits, positions, words, codes):
    """(shift or mask, multiplier, codes of row g, of row g + 8, the same eight inputs further) for
    each pair of a word.
    """
    if bits == 8:
        yield (0, 0), (0, 0), codes[:, :2], codes[:, 2:]
    elif bits == 2:
        for t in range(4):
            yield (4 * t, 0), (4 * t, 0), codes[:, 2 * t : 2 * t + 2], codes[:, 2 * t : 2 * t + 2]
    else:
        for odd in range(2):
            low, high = positions[odd]
            yield low, high, codes[:, [2 * odd, 4 + 2 * odd]], codes[:, [2 * odd + 1, 5 + 2 * odd]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # e5m2 reaches infinity
@pytest.mark.parametrize("half", [True, False], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("key", "addend"), PAIRS, ids=str)
def test_pairs_of_wgmma_are_finished_and_rounded_once(key, addend, half):
    bits, element, arithmetic = key
    if arithmetic in (d.HALF, d.BFLOAT) and half != (arithmetic == d.HALF):
        return  # pairs of x's own type
    dtype = HALF if half else BFLOAT16
    codes, table = all_codes(bits), table_of(element, bits)
    codes = codes[np.isfinite(table[codes]).all(1)] if bits == 8 else codes
    words = spread(words_of(codes, bits), element)
    row = d.PAIRS[key]
    text = d.pair_assembly(bits, element, arithmetic, addend, False, half)
    names, results = d.pair_inputs(bits, element, addend), 4 if bits == 2 else 2
    assert d.pair_constraints(bits, element, addend).split(",") == ["=&r"] * results + ["r"] * (2 * results * len(names))
    for (low, high), (s0, s1) in zip([(0.0, 3.0), (2.0, 1.0)], [(0.25, -1.5), (0.0390625, 7.0)], strict=True):
        for at0, at1, code0, code1 in pairs_in(bits, row.positions, words, codes):
            given = {"w": (words, words), "p": (at0[0], at1[0]), "f": (at0[1], at1[1]), "s": (s0, s1), "z": (low, high)}
            registers = {}
            for i, name in enumerate(names):
                for down in (0, 1):
                    value = given[name][down]
                    if name == "s" and arithmetic == d.SUBNORMAL:
                        value /= d.SUBNORMAL_UNITS[False][down]
                    if name in "sz":
                        value = term(value, name, down, bits, d.FLOAT32 if arithmetic in WHOLE else arithmetic, addend, dtype)
                    first = results + 2 * results * i
                    registers[f"${first + 2 * down}"] = np.broadcast_to(
                        np.asarray(value, np.int64).astype(np.uint32), words.shape
                    )
            ptx.run(text, registers)
            for r in range(results):
                down = r % 2
                code = (code0, code1)[down] if r < 2 else codes[:, [shifted(at0), shifted(at0) + 1]]
                exact = finished(table[code], (s0, s1)[down], (low, high)[down], addend)
                if arithmetic in WHOLE:
                    exact = exact.astype(np.float32).astype(np.float64)
                for p, got in enumerate(ptx.halves(registers[f"${r}"], dtype)):
                    want = ptx.rounded(exact[:, p], dtype).astype(np.float64)
                    np.testing.assert_array_equal(got, want, err_msg=f"register {r}, half {p}")


LANE_ROWS = [
    (key, addend)
    for key in d.LANES
    for addend in (d.NO_ADDEND, d.ZERO_POINTS, d.BIASES)
    if ((key[1] == "uint" and key[2] != d.SUBNORMAL) or addend != d.ZERO_POINTS) and (key[2] != d.TABLE or addend == d.NO_ADDEND)
]


@pytest.mark.parametrize("half", [True, False], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("key", "addend"), LANE_ROWS, ids=str)
def test_planes_in_lane_order_are_joined_and_rounded_once(key, addend, half):
    """All codes, pairs c = 0 to 7 of a lane, rows g and g + 8; a table's entries come from lanes."""
    bits, element, arithmetic = key
    if arithmetic in (d.HALF, d.BFLOAT) and half != (arithmetic == d.HALF):
        return
    dtype, table = HALF if half else BFLOAT16, table_of(element, bits)
    rng = np.random.default_rng(3)
    q = np.resize(rng.permutation(1 << bits), (16, 64)).astype(np.uint8)
    q = rng.permuted(q.reshape(-1)).reshape(16, 64)
    planes = {width: p.view(np.uint32)[0, 0] for width, p in order.to_lanes(pack(q, bits), bits, 64).items()}
    text, names = (
        d.pair_assembly(bits, element, arithmetic, addend, False, half, True),
        d.pair_inputs(bits, element, addend, True),
    )
    assert d.pair_constraints(bits, element, addend, True).split(",") == ["=&r"] * 2 + ["r"] * (4 * len(names))
    (s0, s1), (z0, z1) = (0.0390625, -1.5), (3.0, 2.0)
    lane = np.arange(32)
    for c in range(8):
        words = []
        for width in order.PLANES[bits]:
            at = {4: lambda h: 2 * h + c // 4, 2: lambda h: h, 1: lambda h: 0}[width]  # noqa: B023 # called at once
            words.append([planes[width][:, at(h)] for h in (0, 1)])
        entry = table[lane % 16].astype(np.float32).view(np.uint32) if bits == 4 else lane
        given = {"w": words[0], "v": words[-1], "p": (c, c), "e": (entry, entry), "s": (s0, s1), "z": (z0, z1)}
        registers = {}
        for i, name in enumerate(names):
            for down in (0, 1):
                value = given[name][down]
                if name == "s" and arithmetic == d.SUBNORMAL:
                    value /= d.SUBNORMAL_UNITS[True][down]
                if name in "sz":
                    value = term(value, name, down, 8, d.FLOAT32 if arithmetic in WHOLE else arithmetic, addend, dtype)
                registers[f"${2 + 4 * i + 2 * down}"] = np.broadcast_to(np.asarray(value).astype(np.uint32), 32).copy()
        ptx.run(text, registers)
        for down in (0, 1):
            for p, got in enumerate(ptx.halves(registers[f"${down}"], dtype)):
                code = q[lane // 4 + 8 * down, 8 * c + 2 * (lane % 4) + p]
                element_value = code if arithmetic == d.SUBNORMAL else table[code]
                exact = finished(element_value, (s0, s1)[down], (z0, z1)[down], addend)
                if arithmetic in WHOLE:
                    exact = exact.astype(np.float32).astype(np.float64)
                np.testing.assert_array_equal(got, ptx.rounded(exact, dtype).astype(np.float64), err_msg=f"{c} {down} {p}")


def lane_registers(q, bits, block, entry, first):
    """Registers of codes [16, 64] in lane order, as a block of 16 inputs needs them: the words of
    each plane, then the lane's entry of a table (None: there is no table).
    """
    planes = {width: p.view(np.uint32)[0, 0] for width, p in order.to_lanes(pack(q, bits), bits, 64).items()}
    words = {"e0": entry} if entry is not None else {}
    for letter, width in zip("wv", order.PLANES[bits], strict=False):
        rows = (0,) if width == 1 else (0, 1)
        words |= {f"{letter}{h}": planes[width][:, {4: 2 * h + block // 2, 2: h, 1: 0}[width]] for h in rows}
    return list(words), {f"${first + i}": word for i, word in enumerate(words.values())}


def lane_codes(q, block):
    """The codes of the four registers of a block, [lanes, 2] each: register 2 i + h has pair
    2 block + i of row g + 8 h.
    """
    lane = np.arange(32)
    for i in (0, 1):
        for h in (0, 1):
            first = 8 * (2 * block + i) + 2 * (lane % 4)
            yield h, q[lane // 4 + 8 * h][lane, first], q[lane // 4 + 8 * h][lane, first + 1]


def codes_of_a_block(bits):
    """[16, 64], every code somewhere, in no order."""
    rng = np.random.default_rng(4)
    return rng.permuted(np.resize(np.arange(1 << bits), 16 * 64)).reshape(16, 64).astype(np.uint8)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("output", [d.SCALABLE, d.BFLOAT16])
@pytest.mark.parametrize(("bits", "element"), sorted({key[:2] for key in d.LANES}))
def test_operands_of_mma_in_lane_order(bits, element, output, block):
    """Integers that are scaled later are bare codes; a table's entries are in the result's dtype."""
    dtype = BFLOAT16 if output == d.BFLOAT16 else HALF
    q, table = codes_of_a_block(bits), table_of(element, bits)
    entry = None
    if element in d.TABLE_ELEMENTS:
        table = ptx.rounded(table, dtype).astype(np.float64)
        each = table[np.arange(32) % 16]
        entry = ptx.joined(each, each, dtype)
    elif output == d.SCALABLE and element in ("int", "uint"):
        table = np.arange(1 << bits, dtype=np.float64)
    row = d.lane_operand(bits, element, output, block)
    names, registers = lane_registers(q, bits, block, entry, 4)
    ptx.run(d.assembly(row, 4, *names), registers)
    for r, (h, *codes) in enumerate(lane_codes(q, block)):
        for got, code in zip(ptx.halves(registers[f"${r}"], dtype), codes, strict=True):
            np.testing.assert_array_equal(got, table[code] * (row.low, row.high)[h], err_msg=f"register {r}")


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("half", [True, False], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("element", d.TABLE_ELEMENTS)
def test_finished_operands_of_tables_are_rounded_as_dequantize_rounds(element, half, block):
    dtype, scales = HALF if half else BFLOAT16, np.float32([0.0390625, -1.6180339])
    q, table = codes_of_a_block(4), table_of(element, 4).astype(np.float32)
    names, registers = lane_registers(q, 4, block, table[np.arange(32) % 16].view(np.uint32), 4)
    registers |= {f"${4 + len(names) + h}": np.full(32, scales.view(np.uint32)[h]) for h in (0, 1)}
    ptx.run(d.assembly(d.lane_finished(block, half), 4, *names, "s0", "s1"), registers)
    for r, (h, *codes) in enumerate(lane_codes(q, block)):
        for got, code in zip(ptx.halves(registers[f"${r}"], dtype), codes, strict=True):
            want = (table[code] * scales[h]).astype(dtype).astype(np.float64)
            np.testing.assert_array_equal(got, want, err_msg=f"register {r}")


def shifted(position):
    """Of 2 bits: the first of the pair eight inputs further."""
    return position[0] // 2 + 8


def finished(element, scale, addend, kind):
    if kind == d.ZERO_POINTS:
        return (element - addend) * scale
    return element * scale + (addend if kind == d.BIASES else 0.0)


def term(value, name, down, bits, arithmetic, addend, dtype):
    """A scale or addend in a register, as wgmma/operand.py prepares it."""
    if name == "z" and addend == d.ZERO_POINTS and arithmetic == d.BFLOAT:
        value = -128.0 - value
    elif name == "z" and addend == d.ZERO_POINTS and arithmetic == d.HALF and bits != 2:
        value = -64.0 - value if down and bits == 4 else 1024.0 + value
    if arithmetic == d.FLOAT32:
        return int(np.float32(value).view(np.uint32))
    return int(ptx.joined(np.array([value]), np.array([value]), dtype)[0])


def test_codes_with_zero_points_other_than_uint_are_refused():
    with pytest.raises(ValueError, match=r"\[cuda\] int codes with zero points have no decoder; allowed: uint"):
        d.pair_assembly(4, "int", d.HALF, d.ZERO_POINTS, False, True)


@pytest.mark.parametrize("key", d.BYTES, ids=str)
def test_rows_of_bytes_name_every_register_that_they_declare(key):
    row = d.BYTES[key]
    named = {int(number) for number in re.findall(r"\$(\d+)", row.code)}
    assert sorted(named) == list(range(len(row.registers.split(","))))
    assert row.registers.startswith("=&r,=&r,r")
