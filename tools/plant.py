"""Faults planted by hand in kernels: each must make a test fail (benchmarks/mutation.md).

    python tools/plant.py triton cuda metal --workers 4
    python tools/plant.py avx2 scalar neon --out build/planted/native.jsonl    # builds the core
    python tools/plant.py metal --only gemm
    python tools/plant.py triton --table build/planted/faults.jsonl    # a Markdown table of a finished run

triton   the portable kernels in Triton's interpreter
cuda     the decoders' assembly and the Gluon kernels, whose tests execute both on the CPU
metal    the shaders, compiled for the CPU
avx2 avx512 amx scalar neon i8mm    the native core with that instruction set

A fault of a Triton, Gluon or Metal kernel replaces one text in a copy of src/. The faults of the
native core are compiled at once, each behind a number that the environment variable HB_PLANT
selects, so that one build serves all; NEON and i8mm run the core's own test program under qemu.
Each fault runs the tests named beside it until one fails; without a fault the same tests must pass.
Needs what these tests need: Triton, a C++ compiler, CMake and nanobind, for NEON and i8mm the cross
compiler and qemu. More than 800 lines, since the tables of faults are read and run together.
"""

# ruff: noqa: E501  the two texts of a fault read best on one line

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "planted"
JOBS = os.environ.get("JOBS", "2")
LIMIT = 240
"""Seconds of one run of tests; a fault that takes longer counts as found."""


class Fault(NamedTuple):
    """`before` becomes `after` in a file; `tests` are formats for the interpreter, or arguments of
    pytest.
    """

    file: str
    before: str
    after: str
    what: str
    tests: str = ""


DECODE, TILE = "backends/cuda/decode.py", "backends/cuda/portable/decode_tile.py"
TRITON = [
    Fault(
        DECODE,
        "((c & 8) << 12) | ((c & 7) << 9)",
        "((c & 8) << 12) | ((c & 7) << 8)",
        "E2M1: magnitude shifted by 8, not 9",
        "fp4",
    ),
    Fault(
        DECODE,
        "((c & 32) << 10) | ((c & 31) << 7)",
        "((c & 32) << 9) | ((c & 31) << 7)",
        "E2M3: sign shifted by 9, not 10",
        "mxfp6_e2m3",
    ),
    Fault(DECODE, "* 4096.0", "* 8192.0", "E3M2: twice the value", "mxfp6_e3m2"),
    Fault(
        DECODE,
        "bitcast=True).to(tl.float32) * 256.0\n    return tl.where((c & 0x7F)",
        "bitcast=True).to(tl.float32) * 128.0\n    return tl.where((c & 0x7F)",
        "E4M3: half the value",
        "mxfp8_e4m3",
    ),
    Fault(DECODE, "(c << 8).to(tl.int16)", "(c << 7).to(tl.int16)", "E5M2: shifted by 7, not 8", "mxfp8_e5m2"),
    Fault(DECODE, "0x00400000, b << 23", "0x00400000, b << 22", "E8M0: shifted by 22, not 23", "mxfp4"),
    Fault(
        DECODE,
        "float(1 << (BITS - 1))\n    elif KIND == E2M1",
        "float(1 << BITS)\n    elif KIND == E2M1",
        "INT: offset 2^bits",
        "int4:g32",
    ),
    Fault(DECODE, "c ^ (1 << (BITS - 1))", "c ^ (1 << (BITS - 2))", "MXINT: wrong bit inverted", "mxint8"),
    Fault(
        DECODE,
        "(((p2 >> (2 * j)) & 3) << 4) | (((p1 >> j) & 1) << 6)",
        "(((p2 >> (2 * j)) & 3) << 4) | (((p1 >> j) & 1) << 5)",
        "7 bits: top bit one place too low",
        "uint7:g32",
    ),
    Fault(DECODE, "(((p2 >> (2 * j)) & 3) << 4)\n", "(((p2 >> j) & 3) << 4)\n", "6 bits: wrong pair of the plane", "affine6:g32"),
    Fault(DECODE, "(((p1 >> j) & 1) << 4)", "(((p1 >> (7 - j)) & 1) << 4)", "5 bits: bits in reverse order", "affine5:g32"),
    Fault(DECODE, "return (p4 >> (4 * j)) & 15", "return (p4 >> (4 * (j ^ 1))) & 15", "4 bits: nibbles swapped", "nf4:g64"),
    Fault(
        DECODE,
        "((p2 >> (2 * j)) & 3) | (((p1 >> j) & 1) << 2)",
        "((p2 >> (2 * j)) & 3) | (((p1 >> (j ^ 1)) & 1) << 2)",
        "3 bits: top bits of neighbours swapped",
        "uint3:g64",
    ),
    Fault(DECODE, "return (p2 >> (2 * j)) & 3", "return (p2 >> (2 * (j ^ 1))) & 3", "2 bits: neighbours swapped", "uint2:g32"),
    Fault(DECODE, "return (p1 >> j) & 1", "return (p1 >> (j ^ 1)) & 1", "1 bit: neighbours swapped", "affine1:g32"),
    Fault(
        TILE, "(word >> (8 * (j % 4))) & 255", "(word >> (8 * (3 - j % 4))) & 255", "8 bits: bytes in reverse order", "int8:g32"
    ),
    Fault(
        TILE,
        "lo = tl.load(weight.p8 + 2 * at, mask=mask, other=0)\n        hi = tl.load(weight.p8 + 2 * at + 1",
        "lo = tl.load(weight.p8 + 2 * at + 1, mask=mask, other=0)\n        hi = tl.load(weight.p8 + 2 * at",
        "8 bits: halves of eight inputs swapped",
        "mxint8",
    ),
    Fault(TILE, "at = r * G + g\n", "at = r * G + tl.maximum(g - 1, 0)\n", "scales: the group before", "mxfp6_e2m3"),
    Fault(
        TILE,
        "up = r * (G // F.per_super) + g // F.per_super",
        "up = r * (G // F.per_super) + (g + 1) // F.per_super % (G // F.per_super)",
        "super-blocks: one group too early",
        "q6_K",
    ),
    Fault(TILE, "a = -low * tl.load", "a = low * tl.load", "minimums: wrong sign", "q4_K"),
    Fault(TILE, "return (v - a) * s", "return v * s", "zero points dropped", "uint4:g32"),
    Fault(TILE, "return tl.math.fma(v, s, a)", "return v * s", "biases dropped", "affine4:g64"),
    Fault(
        TILE,
        "v = (v >> (4 * h)) & 0x0F0F0F0F",
        "v = (v >> (4 - 4 * h)) & 0x0F0F0F0F",
        "fragment order: rows g and g + 8 swapped",
        "uint4:g32",
    ),
    Fault(
        TILE,
        "(v >> (9 - 3 * h)) & 0x00070007",
        "(v >> (8 - 3 * h)) & 0x00070007",
        "fragment order of E2M1: shifted by 8, not 9",
        "mxfp4",
    ),
]

SHADER = "backends/metal/shaders/decode.metal"
METAL_TESTS = "tests/backends/metal/test_decode.py tests/backends/metal/test_dequantize.py"
METAL = [
    Fault(SHADER, "((c & 7) << 22) + 0x3f000000u", "((c & 7) << 21) + 0x3f000000u", "E2M1: shifted by 21, not 22"),
    Fault(
        SHADER, "fma(v, 2.0f, -1.0f)), (c & 8) << 28", "fma(v, 2.0f, -1.0f)), (c & 8) << 27", "E2M1: sign shifted by 27, not 28"
    ),
    Fault(SHADER, "float(magnitude) * unit", "float(magnitude) * unit * 0.5f", "small floats: half of each subnormal"),
    Fault(SHADER, "uint(127 - bias) << 23", "uint(126 - bias) << 23", "small floats: bias off by one"),
    Fault(
        SHADER,
        "(c & 0x7f) == 0x7f ? as_type<float>(QUIET_NAN)",
        "c == 0x7f ? as_type<float>(QUIET_NAN)",
        "E4M3: 0xFF is a number",
    ),
    Fault(SHADER, "c == 0x7f ? 0.0f : minifloat", "c == 0xff ? 0.0f : minifloat", "UE4M3: 0xFF reads as 0, 0x7F does not"),
    Fault(SHADER, "if ((c & 0x7f) < 0x7c)", "if ((c & 0x7f) <= 0x7c)", "E5M2: infinity is a number"),
    Fault(
        SHADER,
        "-0.6961928009986877f, -0.5250730514526367f",
        "-0.5250730514526367f, -0.6961928009986877f",
        "NF4: codes 1 and 2 swapped",
    ),
    Fault(SHADER, "25.0f, 38.0f", "25.0f, 39.0f", "IQ4: one entry off by one"),
    Fault(
        SHADER,
        "(q & 0x70007000u) >> 3) + 0x38003800u",
        "(q & 0x70007000u) >> 4) + 0x38003800u",
        "pairs of E2M1: shifted by 4, not 3",
    ),
    Fault(
        SHADER, "half2(16384.0h, 16384.0h)", "half2(16384.0h, 8192.0h)", "pairs of E2M1 by subnormals: second of a pair halved"
    ),
    Fault(
        SHADER,
        "(q & 0x000f000fu) | 0x64006400u) - half2(1024.0h, 1024.0h)",
        "(q & 0x000f000fu) | 0x64006400u) - half2(1024.0h, 1023.0h)",
        "low nibbles: second of a pair off by one",
    ),
    Fault(
        SHADER,
        "half2(fma(v.x, 0.0625h, -64.0h), fma(v.y",
        "half2(fma(v.y, 0.0625h, -64.0h), fma(v.x",
        "high nibbles: pair swapped",
    ),
    Fault(SHADER, "half2(1032.0h, 1032.0h)", "half2(1024.0h, 1032.0h)", "signed low nibbles: offset dropped"),
    Fault(SHADER, "fma(v.y, 0.0625h, -72.0h)", "fma(v.y, 0.0625h, -71.0h)", "signed high nibbles: offset off by one"),
    Fault(SHADER, "int(b) - 127", "int(b) - 126", "E8M0: bias off by one"),
    Fault(SHADER, "b == 255 ? as_type<float>(QUIET_NAN)", "b == 254 ? as_type<float>(QUIET_NAN)", "E8M0: 254 is NaN, 255 is not"),
]
METAL = [fault._replace(tests=METAL_TESTS) for fault in METAL]
METAL += [
    Fault(f"backends/metal/shaders/{file}.metal", before, after, f"{file}: {what}", f"tests/backends/metal/test_{tests}.py")
    for file, tests, before, after, what in (
        ("codec", "dequantize", "e.high << (32 - at)", "e.high << (31 - at)", "a code across two words shifted by one bit less"),
        ("codec", "dequantize", "v[i + 4] = float(pair.y)", "v[i ^ 1] = float(pair.y)", "the second code of a pair misplaced"),
        ("codec", "dequantize", "put(u4_high_half2(e.low), v, 1)", "put(u4_low_half2(e.low), v, 1)", "low nibbles for high ones"),
        ("codec", "dequantize", "e.low << (12 - 4 * i)), v, i);\n  }\n};\ntemplate <int B> struct mx",
         "e.low << (8 - 4 * (i & 1))), v, i);\n  }\n};\ntemplate <int B> struct mx", "E2M1: shifted by 8, not 12"),
        ("codec", "dequantize", "(1.0f / float(1 << (B - 2)))", "(1.0f / float(1 << (B - 1)))", "mxint: half the value"),
        ("codec", "dequantize", "high |= uint(p[5]) << 8", "high |= uint(p[5]) << 7", "7 bits: a byte shifted by 7"),
        ("codec", "dequantize", "unit / (G / 8 > 0 ? G / 8 : 1); }\n  eight_codes load",
         "(unit + 1) / (G / 8 > 0 ? G / 8 : 1) % groups; }\n  eight_codes load", "the last unit of a group takes the next scale"),
        ("codec", "dequantize", "W::scale::exact(v - float(a), s)", "W::scale::exact(v, s)", "zero points dropped"),
        ("codec", "dequantize", "exact_fma(v, W::scale::value(s), float(a))", "exact_product(v, W::scale::value(s))", "biases dropped"),
        ("codec", "linear", "return W::scale::times(v - float(a), s)", "return W::scale::times(v, s)", "products: zero points dropped"),
        ("codec", "linear", "return fma(v, W::scale::value(s), float(a))", "return v * W::scale::value(s)", "products: biases dropped"),
        ("codec", "linear", "rounded<T>({y.value + bias, 0.0f})", "rounded<T>(y)", "the layer's bias dropped"),
        ("codec", "linear", "if (op == DIVIDE) return exact_quotient(v, factor)", "if (op == DIVIDE) return exact_product(v.value, factor)",
         "a factor that divides multiplies"),
        ("rounding", "dequantize", "(beyond ? bits : bits - 1) | 1", "bits", "rounded twice"),
        ("rounding", "dequantize", "bits + 0x7fffu + ((bits >> 16) & 1)", "bits + 0x7fffu", "bfloat: ties go down"),
        ("rounding", "dequantize", "int(field) + int(b) - 127;", "int(field) + int(b) - 126;", "E8M0: bias off by one"),
        ("dequantize", "dequantize", "gather ? uint(rows[i]) : i", "i", "rows that were asked for ignored"),
        ("matvec", "matvec", "fma(-float(w.addends[at]), plain, products)", "products", "zero points dropped"),
        ("matvec", "matvec", "plain * float(w.addends[at])", "0.0f", "biases dropped"),
        ("matvec", "matvec", "const typename W::stored scale = w.scales[at]", "const typename W::stored scale = w.scales[at ? at - 1 : 0]",
         "the scale of the group before"),
        ("matvec", "matvec", "s < MATVEC_SIMDGROUPS; ++s) sum", "s < 1; ++s) sum", "the second simdgroup's part dropped"),
        ("gemm_tile", "experts", "i / 2 + i % 2 * half_rows", "i / 2 + (i + 1) % 2 * half_rows", "gates and ups swapped"),
        ("gemm_tile", "linear", "x_stride + k0 + 8 * unit, v)", "x_stride + 8 * unit, v)", "x of the first step for every one"),
        ("gemm_tile", "linear", "has_bias ? bias[column] : 0.0f", "has_bias ? bias[row0] : 0.0f", "the bias of another output"),
        ("gemm", "linear", "now = 1 - now", "now = 0", "double buffering: the first buffer for every step"),
        ("gemm", "linear", "stripe <= last; ++stripe", "stripe < last; ++stripe", "striped: the last piece dropped"),
        ("gemm_fused", "linear", "group_of(unit) * scale_g_stride", "group_of(unit + 1) * scale_g_stride", "groups begin a unit early"),
        ("gemm_fused", "linear", "stage[8 * k + lane] = v[k]", "stage[8 * (k ^ 1) + lane] = v[k]", "neighbours of a word swapped"),
        ("gemm_fused", "linear", "unit0 + u + lane / 16, v)", "unit0 + u, v)", "wide: the first unit for both"),
        ("experts", "experts", "has_bias ? own_bias[first] : 0.0f", "has_bias ? own_bias[0] : 0.0f", "the bias of output 0"),
        ("experts", "experts", "ulong(tile.expert) * n : 0", "ulong(0) * n : 0", "the bias of expert 0"),
        ("experts", "experts", "begin + tile * TILE_M, min", "begin, min", "every tile begins where its expert does"),
        ("experts", "experts", "(ulong(at.y) * top_k + t) * h", "(ulong(at.y) * top_k) * h", "the first expert's output for all"),
        ("experts", "experts", "gated<activation>(done[0], done[1]", "gated<activation>(done[1], done[0]", "few tokens: gates and ups swapped"),
        ("experts", "experts", "u = clamp(up, -limit, limit)", "u = min(up, limit)", "clamped gate: ups have no lower bound"),
        ("rmsnorm_matvec", "experts", "v[j] *= g[j]", "v[j] *= 1.0f", "the gain dropped"),
        ("rmsnorm_matvec", "experts", "total / float(k) + eps", "total / float(k)", "eps dropped"),
    )
]  # fmt: skip


class Native(NamedTuple):
    """A fault of the core: P in `after` is true where its number is selected."""

    file: str
    before: str
    after: str
    what: str


SCALES, FLOATS, BYTES, PRODUCTS = "scales.inl", "float_decode.inl", "byte_decode.inl", "products.inl"
NIBBLES = "V::template field<4 * (i % 2), 0x0f>(V::bload(Planes::unit(p.p4, i / 2, at)));"
PAIRS = "V::template field<2 * (i % 4) - up, (0x03 << up)>(\n          V::bload(Planes::unit(p.p2, i / 4, at)));"
BITS = "V::template field<i % 8 - up, (0x01 << up)>(V::bload(Planes::unit(p.p1, i / 8, at)));"
BF16 = "V::cast(V::template sll<16>(V::load_u16((const uint16_t *)base + at)));"
ZEROS = """if (scales.zeros)
      each([&](int t, int j) HB_INLINE_LAMBDA {
        sum[t][j] = V::fnma(scales.zero(j), V::fset(of[t]), sum[t][j]);
      });
    if (scales.biases)"""
NATIVE = [
    Native(
        SCALES,
        "V::ior(V::template sll<23>(b),",
        "V::ior(P ? V::template sll<22>(b) : V::template sll<23>(b),",
        "E8M0: shifted by 22, not 23",
    ),
    Native(SCALES, "V::equal(b, 255)", "V::equal(b, P ? 254 : 255)", "E8M0: 254 is NaN, 255 is not"),
    Native(SCALES, "Minifloat<V>(8, 3, 7, 0x7e)", "Minifloat<V>(8, 3, P ? 8 : 7, 0x7e)", "E4M3 scales: bias 8, not 7"),
    Native(SCALES, "V::iset(0x7f)))), keep", "V::iset(P ? 0xff : 0x7f)))), keep", "UE4M3 scales: the sign is not ignored"),
    Native(
        SCALES,
        BF16,
        BF16.replace("V::template", "P ? V::template sll<15>(V::load_u16((const uint16_t *)base + at)) : V::template"),
        "bfloat16 scales: shifted by 15, not 16",
    ),
    Native(
        SCALES,
        "if (w.super_scales) scale =",
        "if (w.super_scales && !P) scale =",
        "scales of a buffer: the super-block's factor dropped",
    ),
    Native(SCALES, "if (w.zeros) zero =", "if (w.zeros && !P) zero =", "scales of a buffer: zero points dropped"),
    Native(SCALES, "if (w.biases) added =", "if (w.biases && !P) added =", "scales of a buffer: biases dropped"),
    Native(
        SCALES,
        "added = V::fsub(\n            added,",
        "added = (P ? V::fadd : V::fsub)(\n            added,",
        "scales of a buffer: minimums added",
    ),
    Native(
        SCALES, "++g, left = per_group;", "++g, left = per_group + (P ? 1 : 0);", "scales of a buffer: groups a segment too long"
    ),
    Native(
        SCALES,
        "left = per_group, at += kPanelRows;",
        "left = per_group, at += P ? 2 * kPanelRows : kPanelRows;",
        "scales of a tile: a group skipped",
    ),
    Native(
        SCALES,
        "if (w.supers && --super_left == 0) super_left = w",
        "if (w.supers && --super_left == (P ? 1 : 0)) super_left = w",
        "scales of a tile: super-blocks end a group early",
    ),
    Native(
        SCALES,
        "return V::fsub(V::fzero(), V::fmul",
        "return (P ? V::fadd : V::fsub)(V::fzero(), V::fmul",
        "scales of a tile: sign of minimums",
    ),
    Native(FLOATS, "sign_shift(32 - bits)", "sign_shift((P ? 31 : 32) - bits)", "small floats: sign a bit too low"),
    Native(FLOATS, "shift(23 - mantissa)", "shift((P ? 22 : 23) - mantissa)", "small floats: mantissa a bit too low"),
    Native(
        FLOATS,
        "V::fstore(o + 16, V::flookup(table, V::template srl<8>(lanes)));",
        "V::fstore(o + 16, V::flookup(table, P ? V::template srl<16>(lanes) : V::template srl<8>(lanes)));",
        "tables: input 2 in place of input 1",
    ),
    Native(FLOATS, "if (BITS == 8 && wide)", "if (BITS == 8 && wide && !P)", "8 bits: 128 is not added back"),
    Native(
        BYTES,
        NIBBLES,
        NIBBLES.replace("V::template", f"P ? {NIBBLES[:-1].replace('(i % 2)', '((i + 1) % 2)')} : V::template", 1),
        "4 bits: nibbles swapped",
    ),
    Native(BYTES, PAIRS, f"P ? {PAIRS[:-1].replace('(i % 4)', '((i + 1) % 4)')} : {PAIRS}", "2 bits: the next pair"),
    Native(BYTES, BITS, f"P ? {BITS[:-1].replace('<i % 8', '<(i + 1) % 8')} : {BITS}", "1 bit: the next bit"),
    Native(
        BYTES,
        "(w.values[c] / w.unit + offset)",
        "(w.values[c] / w.unit + offset + (P ? 1 : 0))",
        "byte tables: entries off by one",
    ),
    Native(PRODUCTS, ZEROS, ZEROS.replace("scales.zeros)", "scales.zeros && !P)"), "products: zero points dropped"),
    Native(PRODUCTS, "if (scales.biases)\n      each", "if (scales.biases && !P)\n      each", "products: biases dropped"),
    Native(
        PRODUCTS,
        "V::fset(x_scale[s * MT + t])",
        "V::fset(x_scale[(P && s ? s - 1 : s) * MT + t])",
        "int8: the scale of the segment before",
    ),
    Native(PRODUCTS, "V::iset(x_start[s * MT + t])", "V::iset(P ? 1 : x_start[s * MT + t])", "int8: sums start at 1"),
    Native(
        PRODUCTS,
        "--left == 0 || s + 1 == segments",
        "--left == 0 || s + 1 == segments + (P ? 1 : 0)",
        "int8: a last, short span dropped",
    ),
    Native(
        PRODUCTS,
        "x += MT * inputs;\n    } while",
        "x += P ? MT * (inputs - 4) : MT * inputs;\n    } while",
        "int8: activations four inputs behind",
    ),
]
AVX2, AVX512, AMX, NEON, I8MM, SCALAR = (f"isa_{name}.cpp" for name in ("avx2", "avx512", "amx", "neon", "i8mm", "scalar"))
MATRIX, LINEAR = "matrix.inl", "linear.cpp"


def _choice(file: str, before: str, wrong: str, what: str) -> Native:
    """A fault that replaces the returned expression `before` by `wrong`."""
    return Native(file, f"return {before};", f"return P ? {wrong} : {before};", what)


INTEL = [
    ("cvtepu8_epi32({load8}p))", "cvtepi8_epi32({load8}p))", "bytes with a sign"),
    ("cvtepi8_epi32({load8}p))", "cvtepu8_epi32({load8}p))", "signed bytes without one"),
    ("cvtepi16_epi32({load16}p))", "cvtepu16_epi32({load16}p))", "zero points without a sign"),
    ("cvtph_ps({load16}p))", "cvtph_ps({load16}(p + 1)))", "float16 scales: of the next row"),
    ("shuffle_epi8(table, codes)", "shuffle_epi8(table, bxor(codes, bset(1)))", "byte tables: neighbours swapped"),
    ("fnmadd_ps(a, b, c)", "fmadd_ps(a, b, c)", "zero points added"),
    ("srai_epi32(v, N)", "srli_epi32(v, N)", "shifts without the sign"),
    ("slli_epi32(v, N)", "slli_epi32(v, N + 1)", "shifts one bit too far"),
]
"""Returned expressions of the two Intel sets, each without its `_mm256_` or `_mm512_`."""


def _intel(file: str, width: int) -> list[Native]:
    wide, mm, name = width == 512, f"_mm{width}_", file[4:-4]
    loads = {
        "load8": "_mm_loadu_si128((const __m128i *)" if wide else "_mm_loadl_epi64((const __m128i *)",
        "load16": "_mm256_loadu_si256((const __m256i *)" if wide else "_mm_loadu_si128((const __m128i *)",
    }
    faults = [_choice(file, mm + a.format(**loads), mm + b.format(**loads), f"{name}: {what}") for a, b, what in INTEL]
    field = f"if constexpr (right > 0) v = {mm}srli_epi32(v, right);"
    return [
        *faults,
        Native(file, field, field.replace("(v, right)", "(v, P ? right + 1 : right)"), f"{name}: fields one bit too low"),
    ]


NATIVE += _intel(AVX2, 256)
NATIVE += _intel(AVX512, 512)
NATIVE += [
    _choice(
        AVX2,
        "_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))",
        "_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))",
        "avx2: sums of earlier inputs dropped",
    ),
    _choice(
        AVX2,
        "_mm256_add_epi16(p, _mm256_maddubs_epi16(w, x))",
        "_mm256_maddubs_epi16(w, x)",
        "avx2: the first of two products dropped",
    ),
    Native(AVX2, "_mm256_slli_epi32(codes, 28)", "_mm256_slli_epi32(codes, P ? 29 : 28)", "avx2: the wrong half of a table"),
    Native(
        AVX2,
        "const I r = _mm256_cvtps_epi32(v)",
        "const I r = P ? _mm256_cvttps_epi32(v) : _mm256_cvtps_epi32(v)",
        "avx2: activations truncated",
    ),
    _choice(
        AVX512, "_mm512_dpbusd_epi32(acc, w, x)", "_mm512_dpbusd_epi32(iset(0), w, x)", "avx512: sums of earlier inputs dropped"
    ),
    _choice(
        AVX512,
        "_mm512_permutexvar_ps(codes, t)",
        "_mm512_permutexvar_ps(bxor(codes, iset(1)), t)",
        "avx512: neighbours of a table swapped",
    ),
    _choice(
        AVX512,
        "_mm512_permutex2var_ps(low, codes, high)",
        "_mm512_permutex2var_ps(high, codes, low)",
        "avx512: halves of a table swapped",
    ),
    _choice(
        AVX512,
        "_mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), a, b, 0xca)",
        "b",
        "avx512: blend takes all bits of one side",
    ),
    Native(
        AVX512, "_mm512_cvtps_epi32(v))", "P ? _mm512_cvttps_epi32(v) : _mm512_cvtps_epi32(v))", "avx512: activations truncated"
    ),
    Native(AVX512, "iset(around), 0xea)", "iset(P ? 0 : around), 0xea)", "avx512: the bits of an exponent dropped"),
    *(
        Native(AMX, before, after, f"amx: {what}")
        for before, after, what in (
            (
                "HB_PRODUCT(SUM, X, W, (int64_t)(index) * products + i);",
                "HB_PRODUCT(SUM, X, W, (int64_t)(P ? 0 : (index)) * products + i);",
                "the first segment for every one",
            ),
            (
                "x + (int64_t)(index) * inputs, x_stride",
                "x + (int64_t)(P ? 0 : (index)) * inputs, x_stride",
                "activations of the first product for all",
            ),
            (
                "w + (int64_t)(index) * inputs",
                "w + (int64_t)(P ? 0 : (index)) * inputs",
                "codes of the first product for all",
            ),
            ("part < kTogether; ++part", "part < kTogether - (P ? 1 : 0); ++part", "products of the last register dropped"),
            ("if (i + 2 < products) HB", "if (i + 2 < products && !P) HB", "the last of three products dropped"),
            ("    HB_TILE_ZERO(SUM);", "    if (!P) HB_TILE_ZERO(SUM);", "sums of a tile register kept"),
        )
    ),
    *(
        Native(I8MM, before, after, f"i8mm: {what}")
        for before, after, what in (
            ("x + p * 2 * kInputs", "x + (P ? 0 : p) * 2 * kInputs", "the first two tokens for all"),
            ("vld1q_u8(w + kUnitBytes)", "vld1q_u8(w + (P ? 0 : kUnitBytes))", "the first four of eight inputs twice"),
            ("vzip1q_u32(low, high)", "P ? vzip1q_u32(high, low) : vzip1q_u32(low, high)", "halves of eight inputs swapped"),
            ("vzip2q_u32(low, high)", "P ? vzip1q_u32(low, high) : vzip2q_u32(low, high)", "the first two rows for all four"),
            ("vmmlaq_s32(left[p], pair", "vmmlaq_s32(P ? vdupq_n_s32(0) : left[p], pair", "sums of earlier inputs dropped"),
            ("= vdupq_n_s32(0);", "= vdupq_n_s32(P ? 1 : 0);", "sums start at 1"),
            ("vtrn2q_s64(a, b)", "P ? vtrn1q_s64(a, b) : vtrn2q_s64(a, b)", "the first token of two for both"),
            ("x += kTokens * kInputs,", "x += kTokens * (P ? 4 : kInputs),", "activations four inputs behind"),
            ("w += kInputs / 4 * kUnitBytes", "w += (P ? 1 : kInputs / 4) * kUnitBytes", "codes four inputs behind"),
            ("x += seg * kTokens,", "x += (P ? 0 : seg) * kTokens,", "activations of the first segment for every one"),
            ("w += seg * kPanelRows;", "w += (P ? 0 : seg) * kPanelRows;", "codes of the first segment for every one"),
            ("b.w_stride + row * 4", "b.w_stride + (P ? 0 : row) * 4", "codes of the first four rows for all"),
            ("total(b, t0, panel, row)", "total(b, t0, panel, P ? 0 : row)", "scales and totals of the first four rows for all"),
            ("vld1q_s32(sums[i][t])", "vld1q_s32(sums[P ? 0 : i][t])", "the sums of the first segment for every one"),
            ("(const int8_t *)b.x + t0 *", "(const int8_t *)b.x + (P ? 0 : t0) *", "the first sixteen tokens for all"),
        )
    ),
    Native(
        LINEAR,
        "at + from * tile + (t - t0) * together",
        "at + (P ? 0 : from) * tile + (t - t0) * together",
        "i8mm: spans of activations over the first one",
    ),
    *(
        Native(MATRIX, before, after, f"products of matrices: {what}")
        for before, after, what in (
            ("x_start[of + t]);", "x_start[P ? t : of + t]);", "sums start where the first segment's do"),
            (
                "V::fmul(sum[t], V::fset(x_scale[of + t]))",
                "V::fmul(sum[t], V::fset(x_scale[P ? t : of + t]))",
                "the first segment's scale for every one",
            ),
            ("if (b.zeros) {", "if (b.zeros && !P) {", "zero points dropped"),
            ("if (b.biases) {", "if (b.biases && !P) {", "biases dropped"),
            ("V::fma(sum[t], scale, now[t]);", "P ? sum[t] : V::fma(sum[t], scale, now[t]);", "sums of earlier segments dropped"),
            ("s + 1 < b.segments) return", "s + 1 < b.segments + (P ? 1 : 0)) return", "a last, short span dropped"),
            ("left = b.span;\n      HB", "left = b.span + (P ? 1 : 0);\n      HB", "spans a segment too long"),
            ("entries + s * kPanelRows", "entries + (P && s ? s - 1 : s) * kPanelRows", "the scales of the segment before"),
        )
    ),
    _choice(
        NEON,
        "vdotq_s32(acc, vreinterpretq_s8_u8(w), x)",
        "vdotq_s32(vdupq_n_s32(0), vreinterpretq_s8_u8(w), x)",
        "neon: sums of earlier inputs dropped",
    ),
    _choice(NEON, "vfmsq_f32(c, a, b)", "vfmaq_f32(c, a, b)", "neon: zero points added"),
    _choice(
        NEON,
        "vqtbl1q_u8(table, codes)",
        "vqtbl1q_u8(table, veorq_u8(codes, vdupq_n_u8(1)))",
        "neon: byte tables: neighbours swapped",
    ),
    Native(
        NEON,
        "v = vshrq_n_u8(v, right);",
        "v = P ? vshrq_n_u8(v, right % 8 + 1) : vshrq_n_u8(v, right);",
        "neon: fields one bit too low",
    ),
    _choice(NEON, "vshlq_n_s32(v, N)", "vshlq_n_s32(v, (N + 1) % 32)", "neon: shifts one bit too far"),
    _choice(
        NEON,
        "vshrq_n_s32(v, N)",
        "vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), N))",
        "neon: shifts without the sign",
    ),
    _choice(
        NEON,
        "vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))",
        "vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 1)))",
        "neon: float16 scales: of the next row",
    ),
    Native(
        NEON,
        "vgetq_lane_s32(codes, 1) & 15]",
        "(P ? vgetq_lane_s32(codes, 0) : vgetq_lane_s32(codes, 1)) & 15]",
        "neon: tables: input 0 in place of input 1",
    ),
    Native(
        NEON,
        "const I r = vcvtnq_s32_f32(v)",
        "const I r = P ? vcvtq_s32_f32(v) : vcvtnq_s32_f32(v)",
        "neon: activations truncated",
    ),
    _choice(NEON, "vmovl_s16(vld1_s16(p))", "load_u16((const uint16_t *)p)", "neon: zero points without a sign"),
    _choice(
        NEON,
        "vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four(p)))))",
        "load_u8((const uint8_t *)p)",
        "neon: signed bytes without one",
    ),
    Native(SCALAR, "fused(-a.v[i], b.v[i], c.v[i])", "fused(P ? a.v[i] : -a.v[i], b.v[i], c.v[i])", "scalar: zero points added"),
    _choice(SCALAR, "v.v[i] >> right & mask", "v.v[i] >> (right + 1) & mask", "scalar: fields one bit too low"),
    _choice(SCALAR, "t.v[codes.v[i] & 15]", "t.v[(codes.v[i] ^ 1) & 15]", "scalar: byte tables: neighbours swapped"),
    Native(
        SCALAR,
        "return acc.v[i] + (int8_t)b[0]",
        "return (P ? 0 : acc.v[i]) + (int8_t)b[0]",
        "scalar: sums of earlier inputs dropped",
    ),
    Native(SCALAR, "half_to_float(p[i])", "half_to_float(p[P ? i ^ 1 : i])", "scalar: float16 scales: of the next row"),
    Native(
        SCALAR,
        "const double e = (p - (s - t)) + (c - t)",
        "const double e = P ? 0 : (p - (s - t)) + (c - t)",
        "scalar: fused products rounded twice",
    ),
]
EMULATED = ("neon", "i8mm")
SETS = ("avx2", "avx512", "amx", "scalar", *EMULATED)
"""Instruction sets of the core; AVX-512 and AMX need a machine that has them."""


def of_set(name: str) -> list[tuple[int, Native]]:
    """The faults of an instruction set with their numbers: those of its own file, those of the
    products of matrices where it has them, and those of the files that all sets share, but not on
    i8mm, whose other kernels are NEON's, run by the same program.
    """
    own = {f"isa_{name}.cpp": (name,), MATRIX: ("amx", "i8mm"), LINEAR: ("i8mm",)}
    shared = () if name == "i8mm" else (name,)
    return [(i, f) for i, f in enumerate(NATIVE, 1) if name in own.get(f.file, () if f.file.startswith("isa_") else shared)]


NATIVE_TESTS = [f"tests/backends/cpu/test_{name}.py" for name in ("decode", "cases", "linear")]
HEADER = """#pragma once
#include <cstdlib>
static inline bool planted(int n) {
  static const int chosen = std::getenv("HB_PLANT") ? std::atoi(std::getenv("HB_PLANT")) : 0;
  return n == chosen;
}
"""


def replaced(text: str, fault: Fault | Native, after: str) -> str:
    """`text` with the fault. Raises SystemExit where the text to replace is not there."""
    if fault.before not in text:
        raise SystemExit(f"{fault.file} lacks {fault.before!r}; update the table in {Path(__file__).name}")
    return text.replace(fault.before, after, 1)


ASM, OPERAND_TESTS = "backends/cuda/decoders.py", "tests/backends/cuda/test_decoders.py"
MMA, MMA_TESTS = "backends/cuda/mma/", "tests/backends/cuda/test_mma_numpy.py"
PTX_TESTS = "tests/backends/cuda/test_ptx_values.py -k outputs_are_right"
WGMMA, WGMMA_TESTS = "backends/cuda/wgmma/", "tests/backends/cuda/test_wgmma_operand.py tests/backends/cuda/test_wgmma_numpy.py"
SCHEDULE_TESTS = "tests/backends/cuda/test_wgmma_schedule.py"
CUDA = [
    *(
        Fault(ASM, before, after, what, OPERAND_TESTS)
        for before, after, what in (
            ("{ .reg .b32 t; shr.u32 t, w0, 8;", "{ .reg .b32 t; shr.u32 t, w0, 4;", "uint operands: shifted by 4, not 8"),
            ("mov.b32 k, 0x00080008; sub", "mov.b32 k, 0x00000000; sub", "int operands: offset dropped"),
            ("w0, 0, 0x4140; prmt.b32 y1", "w0, 0, 0x4041; prmt.b32 y1", "8 bits: two bytes swapped"),
            ('_E5M2 = "prmt.b32 y0, w0, 0, 0x1404', '_E5M2 = "prmt.b32 y0, w0, 0, 0x0414', "E5M2: two bytes swapped"),
            ("shr.u32 u, u, 1; lop3", "shr.u32 u, u, 2; lop3", "E4M3 by integers: shifted by 2, not 1"),
            ("shl.b32 u, w0, 4; shr.u32 t, u, 3", "shl.b32 u, w0, 8; shr.u32 t, u, 3", "E2M1 words: shifted by 8, not 4"),
            ("lop3.b32 v, t, 0x000c000c", "lop3.b32 v, t, 0x00030003", "2 bits: a pair of codes twice"),
            ("shift = (((0, 0), (0, 0)), ((8, 0), (8, 0)))", "shift = (((8, 0), (8, 0)), ((0, 0), (0, 0)))",
             "pairs: those of two lanes swapped"),
            ('(HALF, BIASES): "fma.rn.f16x2 y, y, s#, z#; "', '(HALF, BIASES): "mul.rn.f16x2 y, y, s#; "',
             "pairs: biases dropped"),
            ("sub.rn.f32 v, v, a; sub.rn.f32 w, w, a; ", "", "float32 pairs: zero points dropped"),
        )
    ),
    *(
        Fault(MMA + file, before, after, f"mma: {what}", MMA_TESTS)
        for file, before, after, what in (
            ("accumulate.py", "block // pair % 2 == 1", "block // pair % 2 == 0", "accumulators of two groups swapped"),
            ("accumulate.py", "gl.fma(gl.fma(-a, t, c), s, y)", "gl.fma(c, s, y)", "zero points dropped"),
            ("accumulate.py", "gl.fma(c, s, gl.fma(a, t, y))", "gl.fma(c, s, y)", "biases dropped"),
            ("accumulate.py", "spread_bytes(pair) << 7", "spread_bytes(pair) << 8", "E8M0 shifted by 8, not 7"),
            ("accumulate.py", "P.set + at.s_slot", "P.set", "scales of the first slot for every column"),
            ("accumulate.py", "gl.broadcast(t * -ZEROES, like)", "gl.broadcast(t * 0.0, like)", "implicit zero of int dropped"),
            ("accumulate.py", "own * (GROUP // 64), half * 0", "half * 0, half * 0", "the first group's x for both"),
            ("kernel.py", "w_near * 128 + axis(5, 4, W, 6)", "w_near * 128 + (axis(5, 4, W, 6) ^ 1)", "words of a lane swapped"),
            ("kernel.py", "s_set // P.parities * P.set + s_set % P.parities", "s_set // P.parities * P.set",
             "scales of even groups for odd ones"),
            ("kernel.py", "t0, t1, scale, addend, i // P.span, P)", "t0, t1, scale, addend, (i // P.span + 1) % P.flushes, P)",
             "scales: the group after"),
            ("kernel.py", "scale[i // P.span * 2 + 1], L)", "scale[i // P.span * 2], L)",
             "finished weights: scales of rows g for g + 8"),
        )
    ),
    Fault(
        MMA + "epilogue.py", "axis(5, 2, R, 7) * 8\n    return", "axis(5, 2, R, 7) * 4\n    return",
        "mma: biases of other rows", PTX_TESTS,
    ),
    *(
        Fault(WGMMA + file, before, after, f"wgmma: {what}", WGMMA_TESTS)
        for file, before, after, what in (
            ("operand.py", "else ([0, 0, 1], [0, 0, 4], [0, 0, 8])", "else ([0, 0, 1], [0, 0, 8], [0, 0, 4])",
             "blocks and halves of words swapped"),
            ("operand.py", "odd = axis(4, 2, L, 10) == 1", "odd = axis(4, 2, L, 10) == 0", "pairs of two lanes swapped"),
            ("operand.py", "8 * axis(3, 2, L, 10) + 4 * axis(4", "4 * axis(3, 2, L, 10) + 8 * axis(4", "2 bits: shifts swapped"),
            ("operand.py", "return (b << 23).to(", "return (b << 22).to(", "E8M0 shifted by 22, not 23"),
            ("operand.py", "base = 98 + shift", "base = 97 + shift", "E8M0 in float16: bias off by one"),
            ("operand.py", "(b & 0x7F) << 7)", "(b & 0x7F) << 6)", "E4M3 scales shifted by 6, not 7"),
            ("operand.py", "-64.0 - high", "-64.0 + high", "zero points of rows g + 8 added"),
            ("operand.py", "_pair_of(-128.0 - z, True)", "_pair_of(-128.0 - 0 * z, True)", "bfloat16: zero points dropped"),
            ("operand.py", "_twice(b.to(gl.int32))\n        elif ARITHMETIC == FLOAT32_BFLOAT",
             "_twice(b.to(gl.int32) * 0)\n        elif ARITHMETIC == FLOAT32_BFLOAT", "biases dropped"),
            ("operand.py", "        return gl.split(v)\n", "        first, second = gl.split(v)\n        return second, first\n",
             "groups of the halves of a unit swapped"),
            ("epilogue.py", "acc = acc + gl.expand_dims", "acc = acc + 0 * gl.expand_dims", "the layer's bias dropped"),
            ("epilogue.py", "expert.to(gl.int64) * n", "expert.to(gl.int64) * 0", "the first expert's bias for every one"),
            ("epilogue.py", "g, u = gl.split", "u, g = gl.split", "gates and ups swapped"),
        )
    ),
    *(
        Fault(WGMMA + file, before, after, f"wgmma: {what}", SCHEDULE_TESTS)
        for file, before, after, what in (
            ("kernel.py", "j = lo // units + index", "j = lo // units", "the first cut tile twice"),
            ("kernel.py", "inside // adjacent, first + inside % adjacent", "inside % adjacent, first + inside // adjacent",
             "rows and tokens of a tile swapped"),
            ("epilogue.py", "units - 1) // units - 1", "units - 1) // units", "the owner of a step is the next program"),
        )
    ),
]  # fmt: skip


@functools.cache
def built_native(emulated: bool) -> Path:
    """src with a core that holds every native fault; the core's own test program where emulated."""
    folder = BUILD / ("neon" if emulated else "native")
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("native", "cmake"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    texts: dict[Path, str] = {}
    for number, fault in enumerate(NATIVE, 1):
        path = folder / "native" / fault.file
        text = texts.get(path) or path.read_text("utf-8")
        texts[path] = replaced(
            text, fault, fault.after.replace("P ", f"planted({number}) ").replace("!P)", f"!planted({number}))")
        )
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    (folder / "native" / "planted.h").write_text(HEADER, "utf-8")
    kernels = folder / "native" / "kernels.h"
    kernels.write_text(kernels.read_text("utf-8").replace("#pragma once", '#pragma once\n#include "planted.h"', 1), "utf-8")
    lists = (ROOT / "CMakeLists.txt").read_text("utf-8").replace("-O3 -ffp-contract", "-O1 -w -DHALFBYTE_SMALL -ffp-contract")
    (folder / "CMakeLists.txt").write_text(lists, "utf-8")
    options, target = ([], "in_place")
    if emulated:
        options = [f"-DCMAKE_TOOLCHAIN_FILE={folder}/cmake/aarch64-linux-gnu.cmake", "-DHALFBYTE_MODULE=OFF"]
        target = "halfbyte_selfcheck"
    subprocess.run(["cmake", "-S", folder, "-B", folder / "build", *options], check=True)
    subprocess.run(["cmake", "--build", folder / "build", "--target", target, "-j", JOBS], check=True)
    return folder / "build" / target if emulated else folder / "src"


def run(kind: str, source: Path, tests: Sequence[str], number: int = 0) -> bool:
    """True when the tests pass with the package in `source`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    environment["HB_PLANT"] = str(number)
    if kind == "triton":
        environment["TRITON_INTERPRET"] = "1"
    if kind in SETS:
        environment["HALFBYTE_CPU"] = kind
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *tests]
    if kind == "triton":
        command = [sys.executable, str(ROOT / "tests/support/cuda_interpreter.py"), *tests]
    elif kind in EMULATED:
        command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max", str(source), "--first"]
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False
    if kind in SETS and not number and b"skipped" in done.stdout:
        raise SystemExit(f"{kind}: tests were skipped, so no fault would be found:\n{done.stdout.decode()[-500:]}")
    return done.returncode == 0


def found(kind: str, number: int, fault: Fault | Native, source: Path | None, out: Path) -> bool:
    """Plant one fault, run its tests, and add a line to `out`; True when a test fails."""
    start = time.monotonic()
    if isinstance(fault, Fault):
        source = BUILD / f"{kind}-{number}"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "halfbyte" / fault.file
        path.write_text(replaced(path.read_text("utf-8"), fault, fault.after), "utf-8")
        killed = not run(kind, source, fault.tests.split())
        shutil.rmtree(source)
    else:
        assert source is not None
        killed = not run(kind, source, NATIVE_TESTS, number)
    row = {"kind": kind, "file": fault.file, "what": fault.what, "found": killed, "seconds": round(time.monotonic() - start, 1)}
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return killed


def table(path: Path) -> str:
    """A Markdown table of the faults that a run planted."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    lines = [
        f"| {r['kind']} | `{r['file'].rpartition('/')[2]}` | {r['what']} | {'yes' if r['found'] else '**no**'} |" for r in rows
    ]
    return "\n".join(["| kernels | file | fault | a test fails |", "|---|---|---|---|", *lines])


def main() -> None:
    """Plant the faults of the kinds named; exit 1 when no test finds one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["triton", "metal", "cuda", *SETS])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=BUILD / "faults.jsonl")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose description contains it")
    parser.add_argument(
        "--core", type=Path, metavar="SRC", help="src, or the emulated program, of an earlier build, with its faults"
    )
    parser.add_argument("--build", action="store_true", help="build the core with its faults, run nothing")
    parser.add_argument("--table", type=Path, help="print the table of a finished run, run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[str, int, Fault | Native, Path | None, Path]] = []
    for kind in args.kinds:
        if kind in SETS:
            source = args.core or built_native(kind in EMULATED)
            if args.build:
                continue
            faults: list[tuple[int, Fault | Native]] = list(of_set(kind))
        else:
            source = None
            faults = list(enumerate({"triton": TRITON, "metal": METAL, "cuda": CUDA}[kind], 1))
        faults = [(i, f) for i, f in faults if args.only in f.what]
        suites = {f.tests if isinstance(f, Fault) else " ".join(NATIVE_TESTS) for _, f in faults}
        if kind == "triton":  # formats, in one process
            suites = {" ".join(sorted(suites))}
        for tests in sorted(suites):
            if not run(kind, source or ROOT / "src", tests.split()):
                raise SystemExit(f"{tests}: fails without a fault")
        jobs += [(kind, number, fault, source, args.out) for number, fault in faults]
    if not jobs:
        return
    with ThreadPoolExecutor(args.workers) as pool:
        results = list(pool.map(lambda job: found(*job), jobs))
    print(table(args.out))
    print(f"{sum(results)} of {len(results)} found")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
