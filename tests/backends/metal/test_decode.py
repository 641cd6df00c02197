"""MSL decode functions on every code, against the element tables; each packed function in every
place of a word.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.backends.metal.source import shared_source
from halfbyte.numerics.minifloat import TABLES, element_table, scale_table
from support.metal_cpu.machine import available, compile_source

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")

FLOATS = {
    "e2m1_to_float(c)": ("e2m1", 4), "minifloat_to_float<6, 3, 1>(c)": ("e2m3", 6), "minifloat_to_float<6, 2, 3>(c)": ("e3m2", 6),
    "e4m3_to_float(c)": ("e4m3", 8), "e5m2_to_float(c)": ("e5m2", 8), "NF4_TABLE[c]": ("nf4", 4),
    "NF4_MODELOPT_TABLE[c]": ("nf4_modelopt", 4),
    "BNB_FP4_TABLE[c]": ("bnb_fp4", 4),
    "IQ4_NL_TABLE[c]": ("iq4_nl", 4), "e2m1_constant_code::value(c)": ("e2m1", 4), "mxint_code<8>::value(c)": ("mxint", 8),
    "mxint_code<4>::value(c)": ("mxint", 4), "mxint_code<2>::value(c)": ("mxint", 2), "int_code<3>::value(c)": ("int", 3),
    "int_code<8>::value(c)": ("int", 8), "uint_code<5>::value(c)": ("uint", 5),
}  # fmt: skip
SCALE_FUNCTIONS = {"times_e8m0(1.0f, c)": "e8m0", "e4m3_to_float(c)": "e4m3", "ue4m3_to_float(c)": "ue4m3"}
# function -> (nibbles it gives, first and second; what it takes off; a factor)
PAIRS = {
    "e2m1_to_half2": (3, 7, "e2m1", 1.0), "e2m1_to_half2_by_subnormal": (3, 7, "e2m1", 1.0),
    "u4_low_half2": (0, 4, "uint", 1.0), "u4_high_half2": (1, 5, "uint", 1.0), "u4b8_low_half2": (0, 4, "int", 1.0),
    "u4b8_high_half2": (1, 5, "int", 1.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def library():
    text = shared_source() + "using namespace halfbyte;\n"
    for i, call in enumerate([*FLOATS, *SCALE_FUNCTIONS]):
        text += f"kernel void f{i}(device float* y [[buffer(0)]], uint c [[thread_position_in_grid]]) {{ y[c] = {call}; }}\n"
    for name in PAIRS:
        text += (
            f"kernel void {name}_all(const device uint* q [[buffer(0)]], device half2* y [[buffer(1)]],\n"
            f"  uint i [[thread_position_in_grid]]) {{ y[i] = {name}(q[i]); }}\n"
        )
    text += """
    kernel void staged(device float* y [[buffer(0)]], uint c [[thread_index_in_threadgroup]]) {
      threadgroup float table[16];
      fill_e2m1_table(table, c);
      y[c] = table[c & 15];
    }
    kernel void fields(const device float* v [[buffer(0)]], device float* y [[buffer(1)]],
                       uint3 at [[thread_position_in_grid]]) {
      y[at.y * 256 + at.x] = times_e8m0_fields(v[at.y], at.x);
    }
    kernel void products(const device float* v [[buffer(0)]], device float* y [[buffer(1)]],
                         uint3 at [[thread_position_in_grid]]) {
      y[at.y * 256 + at.x] = times_e8m0(v[at.y], at.x);
    }
    kernel void round_half(const device float2* v [[buffer(0)]], device half* y [[buffer(1)]],
                           uint i [[thread_position_in_grid]]) {
      y[i] = rounded<half>({v[i].x, v[i].y});
    }
    kernel void round_bfloat(const device float2* v [[buffer(0)]], device bfloat* y [[buffer(1)]],
                             uint i [[thread_position_in_grid]]) {
      y[i] = rounded<bfloat>({v[i].x, v[i].y});
    }
    """
    return compile_source(text)


def same(a: np.ndarray, b: np.ndarray) -> None:
    """Equal values, NaN in the same places, signs of zeros too."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)]))


@pytest.mark.parametrize("call", FLOATS)
def test_every_code_of_every_element(library, call):
    element, bits = FLOATS[call]
    y = np.empty(1 << bits, np.float32)
    library.run(f"f{list(FLOATS).index(call)}", [y], y.shape, (min(32, y.size),))
    same(y, element_table(element, bits))


@pytest.mark.parametrize("call", SCALE_FUNCTIONS)
def test_case_06_34_every_byte_of_every_scale(library, call):
    y = np.empty(256, np.float32)
    library.run(f"f{len(FLOATS) + list(SCALE_FUNCTIONS).index(call)}", [y], (256,), (32,))
    right = scale_table(SCALE_FUNCTIONS[call])
    if call.startswith("times"):  # 1 · 2^−127 is a float32 subnormal: zero on the GPU, the one value lost
        assert y[0] == 0
        y, right = y[1:], right[1:]
    same(y, right)


@pytest.mark.parametrize("name", PAIRS)
def test_packed_pairs_in_every_place_with_every_neighbour(library, name):
    first, second, element, factor = PAIRS[name]
    rng = np.random.default_rng(0)
    q = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    q[:256] &= ~np.uint32((15 << 4 * first) | (15 << 4 * second))  # every pair of codes at least once
    q[:256] |= (np.arange(256, dtype=np.uint32) & 15) << np.uint32(4 * first)
    q[:256] |= (np.arange(256, dtype=np.uint32) >> np.uint32(4)) << np.uint32(4 * second)
    y = np.empty((4096, 2), np.float16)
    library.run(f"{name}_all", [q, y], (4096,), (64,))
    codes = np.stack([(q >> np.uint32(4 * j)) & 15 for j in (first, second)], -1)
    same(y, element_table(element, 4)[codes] * factor)


def test_the_table_in_threadgroup_memory(library):
    y = np.empty(32, np.float32)
    library.run("staged", [y], (32,), (32,))
    same(y[:16], element_table("e2m1", 4))


@pytest.mark.parametrize("element", ["e2m1", "e5m2", "e4m3", "mxint"])
def test_case_06_every_element_times_every_e8m0_byte_is_exact_to_the_last_subnormal(library, element):
    bits = 4 if element == "e2m1" else 8
    v = element_table(element, bits).astype(np.float32)
    y = np.empty((v.size, 256), np.float32)
    library.run("fields", [v, y], (256, v.size), (32, 1))
    with np.errstate(over="ignore"):
        same(y, (v[:, None].astype(np.float64) * scale_table("e8m0")).astype(np.float32))
    library.run("products", [v, y], (256, v.size), (32, 1))
    exact = v[:, None].astype(np.float64) * scale_table("e8m0")
    with np.errstate(over="ignore"):
        normal = ~(np.abs(exact) < 2.0**-126)
        same(y[normal], exact.astype(np.float32)[normal])


def test_products_and_sums_are_not_joined():
    """Where Metal made one fma of the product and the sum in exact_fma, the remainder would count
    twice.
    """
    head = shared_source().partition("namespace halfbyte")[0]
    assert "#pragma METAL fp contract(off)\n" in head


def test_tables_in_the_shader_are_the_tables_of_the_library():
    for name in ("nf4", "nf4_modelopt", "bnb_fp4", "iq4_nl"):
        text = shared_source().split(f"constant constexpr float {name.upper()}_TABLE[16] = {{")[1].split("}")[0]
        values = np.array([float(v.strip().rstrip("f")) for v in text.replace("\n", " ").split(",")], np.float32)
        np.testing.assert_array_equal(values, TABLES[name].astype(np.float32))


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_values_with_a_remainder_round_once(library, dtype):
    """Ties of the narrow type broken by what float32 left out, and by nothing when it left out
    nothing.
    """
    import ml_dtypes

    out = np.float16 if dtype == "half" else ml_dtypes.bfloat16
    rng = np.random.default_rng(1)
    low = np.abs(rng.standard_normal(512)).astype(out)
    high = np.nextafter(low, out(np.inf)) if dtype == "half" else (low.view(np.uint16) + 1).view(out)
    tie = (low.astype(np.float32) + high.astype(np.float32)) / 2
    sign = np.where(rng.integers(0, 2, 512), 1, -1).astype(np.float32)
    for error, right in ((1e-9, high), (-1e-9, low), (0.0, tie.astype(out))):
        y = np.empty(512, out)
        v = np.stack([tie * sign, (np.float32(error) * sign).astype(np.float32)], -1).copy()
        library.run(f"round_{dtype}", [v, y], (512,), (32,))
        same(y, right.astype(np.float32) * sign)
