"""Kernels with one fault each, and what the machine must say of it. Every one is clean but for the
line marked PLANTED.
"""

# ruff: noqa: E501  a kernel body and its fault read best side by side

from __future__ import annotations

from typing import NamedTuple

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"


class Planted(NamedTuple):
    """A kernel `k(const device float* x, device float* y, constant long& n)` on 64 threads a group,
    and the fault's text.
    """

    body: str
    fault: str
    groups: int = 1


BAR = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD = "simdgroup_barrier(mem_flags::mem_threadgroup);"

FAULTS: dict[str, Planted] = {
    "read past the end": Planted("y[i] = x[i + 1];", "out of bounds: read of 4 bytes at byte 256 of x"),
    "read before the start": Planted("y[i] = x[int(i) - 1];", "out of bounds: read of 4 bytes at byte -4 of x"),
    "write past the end": Planted("y[i] = x[i]; if (i == 3) y[n] = 0.0f;", "out of bounds: write of 4 bytes at byte 256 of y"),
    "wide read across the end": Planted(
        "float4 v = *(const device float4*)(x + (i / 4) * 4); if (i == 9) v = *(const device float4*)(x + 64); y[i] = v.x;",
        "out of bounds: read of 16 bytes at byte 256 of x",
    ),
    "threadgroup write past the end": Planted(
        f"threadgroup float t[64]; threadgroup float* p = t + i; *p = x[i]; if (i == 63) p[1] = 1.0f; {BAR} y[i] = t[i];",
        "out of bounds: write of 4 bytes at byte 256 of t",
    ),
    "one threadgroup array runs into the next": Planted(
        f"threadgroup float a[64]; threadgroup float b[64]; a[i] = x[i]; b[i] = x[i]; {BAR} threadgroup float* p = a + i; y[i] = p[i == 63 ? 1 : 0] + b[i];",
        "out of bounds: read of 4 bytes at byte 256 of a",
    ),
    "a loop the compiler could make a block copy": Planted(
        f"threadgroup float t[64]; t[i] = x[i]; {BAR} float v[4]; for (uint j = 0; j < 4; ++j) v[j] = t[j]; {BAR}"
        f" threadgroup float* p = t + 61; if (i == 0) for (uint j = 0; j < 4; ++j) p[j] = v[j]; {BAR} y[i] = t[i];",
        "out of bounds: write of 4 bytes at byte 256 of t",
    ),
    "array of the thread's own": Planted(
        "float a[4] = {0.0f, 1.0f, 2.0f, 3.0f}; y[i] = a[i % 5] + x[i];", "undefined: index beyond an array"
    ),
    "uninitialised threadgroup memory": Planted(
        f"threadgroup float t[64]; if (i != 7) t[i] = x[i]; {BAR} y[i] = t[i];", "uninitialised: read at byte 28 of t"
    ),
    "uninitialised from the last group": Planted(
        f"threadgroup float t[64]; if (g == 0) t[i] = x[i]; {BAR} y[64 * g + i] = t[i];",
        "uninitialised: read at byte 252 of t",
        2,
    ),
    "output read before it is written": Planted("y[i] += x[i];", "uninitialised: read at byte 0 of y"),
    "barrier in one branch": Planted(
        f"threadgroup float t[64]; t[i] = x[i]; if (i < 32) {{ {BAR} }} y[i] = t[i];",
        "divergence: thread 31 waits at threadgroup_barrier that others never reach (32 of 64",
    ),
    "return before a barrier": Planted(
        f"if (i >= 60) {{ y[i] = 0.0f; return; }} threadgroup float t[64]; t[i] = x[i]; {BAR} y[i] = t[i];",
        "divergence: thread 59 waits at threadgroup_barrier that others never reach (4 of 64",
    ),
    "two barriers met at once": Planted(
        f"threadgroup float t[64]; t[i] = x[i]; if (i < 32) {{ {BAR} t[i] = t[i] + 1.0f; }} else {{ {BAR} t[i] = 2.0f; }} y[i] = t[i];",
        "divergence: threadgroup_barrier reached here while other threads wait at threadgroup_barrier elsewhere",
    ),
    "a barrier a loop count apart": Planted(
        f"threadgroup float t[64]; t[i] = x[i]; for (uint j = 0; j < 1 + i / 32; ++j) {{ {BAR} }} y[i] = t[i];",
        "divergence: thread 63 waits at threadgroup_barrier that others never reach (32 of 64",
    ),
    "simdgroup barrier in one branch": Planted(
        f"threadgroup float t[64]; t[i] = x[i]; if (i % 2) {{ {SIMD} }} y[i] = t[i];",
        "divergence: thread 63 waits at simdgroup_barrier that others never reach (32 of 64",
    ),
    "simd_sum of some lanes": Planted(
        "float s = 0.0f; if (i % 32 != 9) s = simd_sum(x[i]); y[i] = s;", "simd_sum that others never reach"
    ),
    "simd_sum against a barrier": Planted(
        f"float s = 0.0f; if (i % 32 < 4) s = simd_sum(x[i]); else {{ {SIMD} }} y[i] = s;",
        "divergence: simdgroup_barrier reached here while other threads wait at simd_sum elsewhere",
    ),
    "shuffle from a lane that is not there": Planted(
        "y[i] = simd_shuffle(x[i], ushort(i == 40 ? 32 : 0));", "simd_shuffle from lane 32"
    ),
    "read races with a write": Planted(
        "threadgroup float t[64]; t[i] = x[i]; y[i] = i % 2 ? t[i - 1] : x[i];",
        "race: read at byte 0 of t after thread 0 wrote it",
    ),
    "write races with a read": Planted(
        f"threadgroup float t[64]; t[i] = x[i]; {BAR} float v = t[(i + 1) % 64]; t[i] = v; y[i] = v;",
        "race: write at byte 0 of t after thread 63 read it",
    ),
    "write races with the second reader": Planted(
        f"threadgroup float t[64]; t[i] = x[i]; {BAR} float v = i == 63 || i == 5 ? t[0] : x[i]; if (i == 5) t[0] = v; y[i] = v;",
        "race: write at byte 0 of t after thread 63 read it",
    ),
    "two writes race": Planted(
        "threadgroup float t[4]; t[i % 4] = x[i]; y[i] = t[i % 4];", "race: write at byte 0 of t after thread 0 wrote it"
    ),
    "simdgroup barrier between simdgroups": Planted(
        f"threadgroup float t[64]; t[i] = x[i]; {SIMD} y[i] = i < 32 ? x[i] : t[63 - i];",
        "race: read at byte 0 of t after thread 0 wrote it",
    ),
    "a barrier for other memory": Planted(
        "threadgroup float t[64]; t[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[i] = t[63 - i];",
        "race: read at byte 0 of t after thread 0 wrote it",
    ),
    "a barrier for no memory": Planted(
        "threadgroup float t[64]; t[i] = x[i]; threadgroup_barrier(mem_flags::mem_none); y[i] = t[63 - i];",
        "race: read at byte 0 of t after thread 0 wrote it",
    ),
    "simd_sum is no barrier": Planted(
        "threadgroup float t[64]; t[i] = x[i]; float s = simd_sum(x[i]); y[i] = t[i ^ 1] + s;",
        "race: read at byte 120 of t after thread 30 wrote it",
    ),
    "groups write one place": Planted("y[i] = x[i];", "race: write at byte 0 of y after thread 0 of another group wrote it", 2),
    "device memory between groups": Planted(
        "y[64 * g + i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[64 * g + i] = y[i];",
        "race: read at byte 252 of y after thread 63 of another group wrote it",
        2,
    ),
    "matrix stored by two simdgroups": Planted(
        f"threadgroup float t[64]; simdgroup_store(make_filled_simdgroup_matrix<float, 8, 8>(1.0f), t, 8); {BAR} y[i] = t[i] + x[i];",
        "of t after thread",
    ),
    "a place nobody writes": Planted("if (i != 50) y[i] = x[i];", "byte 200 of the output y was never written"),
    "misaligned": Planted(
        "y[i] = x[i]; if (i == 1) y[i] = (*(const device float2*)(x + 1)).x;", "misaligned: read of 8 bytes at byte 4 of x"
    ),
    "misaligned by sixteen": Planted(
        "y[i] = x[i]; if (i == 1) y[i] = (*(const device float4*)(x + 2)).x;", "misaligned: read of 16 bytes at byte 8 of x"
    ),
    "division by zero": Planted("y[i] = x[i / (63 - i)];", "undefined: integer division by zero"),
    "too much threadgroup memory": Planted(
        f"threadgroup float t[8200]; t[i] = x[i]; {BAR} y[i] = t[i];", "32800 bytes of threadgroup memory; 32768 is all"
    ),
}


def kernel(body: str, name: str = "k") -> str:
    """A kernel of that body."""
    return (
        f"kernel void {name}(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], constant long& n [[buffer(2)]],\n"
        "              uint i [[thread_index_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]]) {\n"
        f"  uint g = group.x; (void)g; (void)n;\n  {body}\n}}\n"
    )


def source(body: str) -> str:
    """A whole source of one kernel."""
    return HEADER + kernel(body)


REFUSED: dict[str, tuple[str, str]] = {
    "double": ("double d = 1.0; y[i] = float(d);", "MSL has no double"),
    "std": ("y[i] = std::min(x[i], 0.0f);", "no std::"),
    "new": ("float* p = new float; y[i] = *p;", "allocates nothing"),
    "recursion": ("y[i] = again(x[i], 3);", "again calls itself"),
    "function pointer": ("float (*f)(float) = once; y[i] = f(x[i]);", "no function pointers"),
    "lambda": ("auto f = [](float v) { return v; }; y[i] = f(x[i]);", "no lambda"),
    "pointer without a space": ("const float* p = 0; y[i] = x[i]; (void)p;", "needs an address space"),
    "reference without a space": ("float v = x[i]; float& r = v; y[i] = r;", "needs an address space"),
    "static variable": ("static float s = 0.0f; y[i] = s;", "no static variables"),
    "exception": ("if (i > 3) throw 1; y[i] = x[i];", "no exceptions"),
    "goto": ("if (i > 3) goto end; y[i] = x[i]; end: y[i] = 0.0f;", "no goto"),
    "conditional compilation": ("\n#ifdef CPU\ny[i] = 0.0f;\n#else\ny[i] = x[i];\n#endif\n", "no conditional compilation"),
    "compiler built-in": ("y[i] = __builtin_fabsf(x[i]);", "two underscores"),
    "the stand-in's own names": ("y[i] = float(hb_place(0));", "not MSL"),
    "memcpy": ("memcpy(y, x, 4);", "not an MSL function"),
    "assembly": ('asm("nop"); y[i] = x[i];', "no inline assembly"),
    "another pragma": ("\n#pragma METAL fp contract(fast)\ny[i] = x[i];", "the one pragma"),
    "C++17": ("if constexpr (sizeof(float) == 4) y[i] = x[i];", "MSL 3 is C\\+\\+14"),
    "elements of a matrix": (
        "simdgroup_float8x8 m; m.thread_elements()[0] = x[i]; y[i] = x[i];",
        "which lane holds which element",
    ),
    "a macro of Apple's headers": ("y[i] = once(x[i]);", "macro of Apple's headers"),
    "derived class": ("struct base { float v; }; struct more : base { float u; }; y[i] = x[i];", "no derived classes"),
    "noexcept": ("y[i] = noexcept(x[i]) ? x[i] : 0.0f;", "not in MSL"),
    "OpenCL words": ("global float* p = y; p[i] = x[i];", "not MSL's words"),
}
"""What clang might take and the lint refuses: body, reason."""

NOT_COMPILED: dict[str, tuple[str, str]] = {
    "write through const": ("x[i] = 1.0f; y[i] = x[i];", "read-only|const"),
    "pointers of different spaces": (
        "threadgroup float t[64]; device float* p = t; p[i] = x[i]; y[i] = t[i];",
        "cannot initialize",
    ),
    "threadgroup variable in a function": ("y[i] = helper(x[i]);", "function scope|address space|local variable"),
    "a product of matrices of two types": (
        "simdgroup_half8x8 a, b; simdgroup_float8x8 c; simdgroup_multiply_accumulate(c, a, b, c); y[i] = x[i];",
        "no matching function",
    ),
    "unknown function": ("y[i] = erfinv(x[i]);", "undeclared identifier"),
    "threadgroup variable in a branch": ("if (i < 64) { threadgroup float t[64]; t[i] = x[i]; y[i] = t[i]; }", "scope"),
    "program variable that is no constant": ("counter = 1.0f; y[i] = counter;", "address space|undeclared"),
}
"""What the compiler refuses by itself: body, part of its message."""

ASIDE = {
    "a macro of Apple's headers": "METAL_FUNC float once(float v) { return v; }\n",
    "recursion": "inline float again(float v, int n) { return n ? again(v, n - 1) : v; }\n",
    "function pointer": "inline float once(float v) { return v; }\n",
    "threadgroup variable in a function": "inline float helper(float v) { threadgroup float t[4]; t[0] = v; return t[0]; }\n",
}
"""Functions those bodies need."""
