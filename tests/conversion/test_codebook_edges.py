"""Edges between scales of one codebook: refused exactly where the target's scales lack a number
that the source's mean, in Fractions.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from halfbyte import QTensor, format_named
from halfbyte.conversion.codebook_edges import factor_of, holds_codebook, scale_bytes, to_codebook
from halfbyte.conversion.outcome import Checks, MisfitError
from halfbyte.formats import codec_names
from halfbyte.numerics.bits import pack
from halfbyte.numerics.exact import DTYPES
from halfbyte.numerics.minifloat import scale_table
from halfbyte.spec import Format
from support.conversion_weights import all_codes, same

TABLE = scale_table("e4m3")
E4M3 = {Fraction(float(x)) for x in np.abs(TABLE[np.isfinite(TABLE)])}
POWERS = {Fraction(2) ** p for p in range(-127, 128)} | {Fraction(0)}
FP4 = {kind: format_named("fp4", 32, scale_dtype=kind) for kind in ("float16", "bfloat16", "float32")}
ONE_LEVEL = FP4 | {"e8m0": format_named("mxfp4"), "e4m3": format_named("nvfp4", global_scale="none"),
                   "ue4m3": format_named("nvfp4_ue4m3", global_scale="none")}  # fmt: skip
TWO_LEVELS = {op: format_named("nvfp4", global_scale=op) for op in ("multiply", "divide", "amax")}
TWO_LEVELS |= {"ue4m3 multiply": format_named("nvfp4_ue4m3")}
FORMATS = ONE_LEVEL | TWO_LEVELS
FLOATS = [0, 1, -1, 1.5, 1.125, 1.0625, 448, 480, -464, 2**-9, 2**-10, 3 * 2**-9, 65504, 2**-24, 1 / 3, np.nan, np.inf]
BYTES = [*range(0, 256, 5), 1, 126, 127, 128, 129, 254, 118, 119, 136]
FACTORS = (1.0, 0.5, 3.0, 1.25, 2.0**-20, 2.0**100, 2.0**-140, 0.1)


def weight(fmt: Format, stored: list[float], factor: float = 1.0) -> QTensor:
    """Every code under each stored scale: a row for a scale."""
    with np.errstate(over="ignore"):
        column = np.array(stored).astype(DTYPES[fmt.scale] if fmt.float_scale else np.uint8)[:, None]
    parts = {"codes": pack(all_codes(len(stored), 64), 4), "scales": np.repeat(column, 64 // fmt.group_size, axis=1)}
    if fmt.global_op:
        parts["global_scale"] = np.asarray(factor, np.float32)
    return QTensor(fmt, (len(stored), 64), parts)


def meant(q: QTensor) -> list[Fraction | None]:
    """What multiplies the elements of each row, None where it is no number."""
    fmt, first = q.format, q.parts["scales"][:, 0]
    values = first.astype(np.float64) if fmt.float_scale else scale_table(fmt.scale)[first].astype(np.float64)
    factor = Fraction(float(q.parts["global_scale"])) if fmt.global_op else Fraction(1)
    factor = (1 / factor if fmt.global_op == "divide" else factor) / Fraction(fmt.divisor)
    return [Fraction(float(v)) * factor if np.isfinite(v) else None for v in values]


def held(value: Fraction | None, kind: str) -> bool:
    """Whether a scale of a kind is this number; signs go into the codes."""
    if value is None:
        return False
    if kind in ("e4m3", "ue4m3"):
        return abs(value) in E4M3
    if kind == "e8m0":
        return abs(value) in POWERS
    with np.errstate(over="ignore", under="ignore"):
        there = float(np.float64(float(value)).astype(DTYPES[kind]))
    return bool(np.isfinite(there)) and Fraction(there) == value


def always_held(kind: str, to: str) -> bool:
    """Whether each finite scale of a kind is one of another."""
    if kind in ("float16", "bfloat16", "float32"):
        return to in (kind, "float32")
    table = scale_table(kind)
    return all(held(Fraction(float(x)), to) for x in table[np.isfinite(table)])


def edge(q: QTensor, fmt: Format) -> tuple[dict[str, np.ndarray], list[str], str]:
    """(parts, conditions, "") or ({}, [], the refusal)."""
    checks = Checks()
    try:
        return to_codebook(q, fmt, checks), [*checks.rewritten, *checks.met], ""
    except MisfitError as error:
        return {}, [], str(error)


def sources() -> list[QTensor]:
    """Weights of one scale each."""
    out = [weight(fmt, [x]) for fmt in ONE_LEVEL.values() for x in (FLOATS if fmt.float_scale else BYTES)]
    return out + [weight(fmt, [b], f) for fmt in TWO_LEVELS.values() for f in FACTORS for b in (1, 8, 0x38, 0x39, 0x7E, 0xB8)]


@pytest.mark.parametrize("to", ONE_LEVEL)
def test_one_level_holds_a_scale_where_its_table_does(to: str):
    fmt, outcomes = ONE_LEVEL[to], {True: 0, False: 0}
    for q in sources():
        (value,), own = meant(q), q.format
        fits = held(value, to)
        if own.scale in ("e4m3", "ue4m3") and to in ("e4m3", "ue4m3") and q.parts["scales"][0, 0] & 0x7F == 0x7F:
            fits = own.scale == to  # NaN, 0 and 480, which the kinds read differently: only the same bytes serve
        parts, met, why = edge(q, fmt)
        assert fits == (not why), (own, q.parts["scales"][0, 0], value)
        outcomes[fits] += 1
        if why:
            continue
        assert same(QTensor(fmt, q.shape, parts), q)
        if to == "e8m0" and value == 0:
            assert not parts["scales"].any()
            assert not parts["codes"].any()
        negative = bool(np.signbit(q.parts["scales"][0, 0]) if own.float_scale else q.parts["scales"][0, 0] & 0x80)
        moved = (to in ("e8m0", "ue4m3") and own.scale not in ("e8m0", "ue4m3") and negative) or (to == "e8m0" and value == 0)
        assert ("signs of scales are moved into the codes" in met) == moved
        plain = not own.global_op and always_held(own.scale, to)
        if to not in ("e4m3", "ue4m3"):
            words = "powers of two" if to == "e8m0" else f"{to} numbers"
            assert (f"block scales are {words}" in met) == (not plain)
    assert min(outcomes.values()) > 20


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("own", FORMATS)
def test_an_edge_is_exact_unconditionally_where_all_finite_scales_have_one(own: str, to: str):
    """Of hard bytes, or floats, under ordinary and hard tensor scales: where some are refused the
    others are `exact-if`, where none is, all are `exact`.
    """
    source, fmt = FORMATS[own], FORMATS[to]
    if to in FP4:
        fmt = fmt.with_(group_size=source.group_size)
    scales = FLOATS[:-2] if source.float_scale else (0, 1, 2, 0x38, 0x39, 0x7E, 0x7F, 0x80, 0xB9, 0xF0, 0xFE, 0xFF)
    factors = (1.0, 3.0, 0.1, 2688.0, 2.0**-140) if source.global_op else (1.0,)
    kinds, refused = {}, False
    for *pair, factor in itertools.product(scales, (*scales[2:4], scales[6]), factors):
        q = weight(source, pair, factor)
        if None in meant(q):
            continue
        checks = Checks()
        try:
            parts = to_codebook(q, fmt, checks)
        except MisfitError:
            refused = True
            continue
        assert same(QTensor(fmt, q.shape, parts), q)
        kinds[checks.kind] = checks.why
    assert set(kinds) == {"exact-if" if refused else "exact"}, kinds


@pytest.mark.parametrize("to", TWO_LEVELS)
def test_two_levels_hold_scales_that_one_power_of_two_brings_into_e4m3(to: str):
    fmt = TWO_LEVELS[to]
    others = (0.0, 2.0**-17, 2.0**-18, 1.75 * 2.0**-9, -3.5, 2.0**13, 448.0, 449.0, 1.75 * 2.0**15)
    floats = [(a, b) for a in (1.0, 1.125, 0.3125) for b in others]
    for own in (FP4["float32"], FP4["bfloat16"], ONE_LEVEL["e8m0"]):
        bytes_ = [(a, b) for a in (0, 100, 127, 240, 254) for b in (0, 82, 83, 109, 110, 126, 144, 145)]
        pairs = floats if own.float_scale else bytes_
        for pair in pairs:
            q = weight(own, list(pair))
            values = [abs(v) for v in meant(q)]
            largest, units = max(values), [Fraction(2) ** p for p in range(-160, 160)]
            fits = any(all(v / u in E4M3 for v in values) for u in units if largest / u < 512)
            parts, _, why = edge(q, fmt)
            if fits and why:  # its unit, the largest that fits, has no float32 where the tensor scale goes
                assert "beyond float32" in why
                assert not 2.0**-100 < largest < 2.0**100
            if why:
                continue
            assert fits, pair
            assert same(QTensor(fmt, q.shape, parts), q), pair
            if largest:
                top = np.abs(TABLE[parts["scales"]]).max()
                assert 224 < top <= 448


@pytest.mark.parametrize("to", TWO_LEVELS)
@pytest.mark.parametrize("own", TWO_LEVELS)
def test_a_tensor_scale_has_a_counterpart_or_not(own: str, to: str):
    source, fmt = TWO_LEVELS[own], TWO_LEVELS[to]
    for factor in (*FACTORS, 7.0, 2.0**-126, 2.0**-127, 2.0**127, 3e38, 6.0 * 448, 1344.0):
        q = weight(source, [0x38, 0x30], factor)
        (value, _), _ = meant(q), None
        wanted = 1 / value if fmt.global_op == "divide" else value * Fraction(fmt.divisor)
        with np.errstate(over="ignore", under="ignore"):
            there = np.float32(float(wanted)) if wanted < 2**128 else np.float32(np.inf)
        fits = bool(np.isfinite(there)) and Fraction(float(there)) == wanted
        parts, met, why = edge(q, fmt)
        assert ("of its tensor scale is no float32 number" in why) == (not fits), factor
        if why:
            continue
        assert same(QTensor(fmt, q.shape, parts), q)
        assert parts["global_scale"] == there
        if own == to and fmt.global_op == "multiply":
            assert "the tensor scale has an exact counterpart" not in met


def test_bytes_that_both_kinds_read_alike_are_kept():
    for byte in range(256):
        stored = np.array([0x38, byte], np.uint8)
        for kind in ("e4m3", "ue4m3"):
            assert scale_bytes(stored, kind, kind, Checks()) is stored
        if byte & 0x7F == 0x7F:
            for source, target in (("e4m3", "ue4m3"), ("ue4m3", "e4m3")):
                with pytest.raises(MisfitError, match=f"^1 block scale bytes are {byte:#04x}, which E4M3 reads as NaN"):
                    scale_bytes(stored, source, target, Checks())
        else:
            assert scale_bytes(stored, "e4m3", "ue4m3", Checks()).tolist() == [0x38, byte]
            assert scale_bytes(stored, "ue4m3", "e4m3", Checks()).tolist() == [0x38, byte & 0x7F]


def test_factors_of_the_matrices_of_a_stack():
    codes, scales = np.zeros((2, 3, 4, 8), np.uint8), np.ones((2, 3, 4, 1), np.uint8)
    g = (np.arange(6, dtype=np.float32) + 1).reshape(2, 3)
    for op, divisor in (("none", 1), ("multiply", 1), ("divide", 1), ("amax", 2688)):
        fmt = format_named("nvfp4", global_scale=op)
        parts = {"codes": codes, "scales": scales} | ({"global_scale": g} if fmt.global_op else {})
        up, down = factor_of(QTensor(fmt, (2, 3, 4, 16), parts))
        wanted = {"none": g * 0 + 1, "divide": 1 / g.astype(float)}.get(op, g.astype(float) / divisor)
        assert np.array_equal(up / down, wanted)


def test_formats_that_hold_a_codebook():
    for word in codec_names():
        fmt = format_named(word)
        plain = word in ("nvfp4", "nvfp4_ue4m3", "fp4", "nf4", "bnb_fp4", "nf4_modelopt", "iq4_nl") or word.startswith(
            ("mxfp", "fp8")
        )
        assert holds_codebook(fmt, fmt.element) == plain, word
        assert not holds_codebook(fmt, "e1m9")
    e4m3 = format_named("fp8_e4m3")
    assert not holds_codebook(format_named("fp8_e4m3", 32, rows=4), "e4m3")
    assert not holds_codebook(e4m3.with_(inverse=True), "e4m3")
    assert not holds_codebook(format_named("nf4", 64, nested=True), "nf4")


@pytest.mark.parametrize("to", FORMATS)
def test_a_matrix_is_its_rows_and_a_stack_its_matrices(to: str):
    """Of two rows or matrices one may fit and the other not, have a sign, be 0 or NaN."""
    fmt, outcomes = FORMATS[to], {True: 0, False: 0}
    for name, own in FORMATS.items():
        scales = [0.0, 1.0, -2.0, 1.0625, 2.0**-30, np.nan] if own.float_scale else [0, 0x38, 0xB8, 0x7E, 0x7F, 0xFF]
        if own.global_op and fmt in ONE_LEVEL.values():
            scales = scales[:-2]  # whose bytes are kept under a tensor scale of 1, and no products
        factors = (1.0, 3.0, 2.0**-140) if own.global_op else (1.0,)
        singles = [weight(own, [x], f) for x in scales for f in factors]
        alone = [edge(q, fmt) for q in singles]
        for i, (a, (parts, met, why)) in enumerate(zip(singles, alone, strict=True)):
            for b, (others, also, or_why) in zip(singles[i:], alone[i:], strict=True):
                stack = QTensor(own, (2, 1, 64), {p: np.stack([a.parts[p], b.parts[p]]) for p in a.parts})
                got, conditions, refused = edge(stack, fmt)
                assert bool(refused) == bool(why or or_why), (name, a.parts, b.parts)
                outcomes[not refused] += 1
                if refused:
                    continue
                assert set(conditions) == {*met, *also}
                assert same(QTensor(fmt, stack.shape, got), stack)
                if not own.global_op:
                    for at, one in ((0, parts), (1, others)):
                        assert all(np.array_equal(got[p][at], one[p]) for p in one), (name, a.parts, b.parts)
                if not own.global_op and not fmt.global_op:
                    rows = QTensor(own, (2, 64), {p: np.concatenate([a.parts[p], b.parts[p]]) for p in a.parts})
                    both, said, _ = edge(rows, fmt)
                    assert all(np.array_equal(both[p], got[p].reshape(both[p].shape)) for p in both)
                    assert said == conditions
    assert min(outcomes.values()) > 20


@pytest.mark.parametrize(("own", "to", "word"), [
    ("multiply", "divide", "reciprocal"), ("divide", "multiply", "reciprocal"), ("multiply", "amax", "multiple by 2688"),
    ("divide", "amax", "reciprocal"), ("amax", "multiply", "reciprocal"),
])  # fmt: skip
def test_the_refusal_of_a_tensor_scale_says_what_is_no_float32(own: str, to: str, word: str):
    q = weight(TWO_LEVELS[own], [0x38], 0.1)
    assert edge(q, TWO_LEVELS[to])[2] == f"the {word} of its tensor scale is no float32 number"


def test_the_refusal_of_bytes_names_the_first_and_counts():
    q = weight(ONE_LEVEL["ue4m3"], [0x38, 0x7F, 0xFF])
    said = "8 block scale bytes are 0x7f, which E4M3 reads as NaN and GGUF as 0 or 480"
    assert edge(q, ONE_LEVEL["e4m3"])[2] == said


@pytest.mark.parametrize(("to", "scales", "count", "what"), [
    ("e8m0", [1.0, 3.0, np.nan], 4, "powers of two from 2^-127 to 2^127"), ("float16", [1.0, 2.0**-30], 2, "float16 numbers"),
    ("bfloat16", [1.00390625, 1.0, 2.0], 2, "bfloat16 numbers"),
])  # fmt: skip
def test_the_refusal_of_one_level_counts_the_scales(to: str, scales: list[float], count: int, what: str):
    assert edge(weight(FP4["float32"], scales), ONE_LEVEL[to])[2] == f"{count} block scales are no {what}"


def test_the_refusal_of_a_window_says_what_the_scales_reach():
    two = weight(FP4["float32"], [0.0, 2.0**-20, 2.0**20])
    assert (
        edge(two, TWO_LEVELS["multiply"])[2]
        == "block scales from 9.54e-07 to 1.05e+06 do not fit E4M3's window under one tensor scale"
    )
    assert edge(two, ONE_LEVEL["e4m3"])[2] == "block scales from 9.54e-07 to 1.05e+06 do not fit E4M3's window"
