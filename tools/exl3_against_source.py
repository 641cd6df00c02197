"""EXL3's codebooks, bit stream and tile order against ExLlamaV3's own functions, run on the CPU.

    python tools/exl3_against_source.py FOLDER      (a clone of ExLlamaV3, or its wheel unpacked; g++ is needed)

`decode_3inst` of codebook.cuh and `unpack_trellis_kernel` of pack.cu are compiled as C++ with
definitions of the CUDA words that they use: half arithmetic in double, where these sums and
products are exact, rounded by NumPy; one PTX instruction, lop3 with table 0x6a, is (a & b) ^ c.
`tensor_core_perm` of quantize.py is executed with NumPy in place of torch. Where torch is
installed, a weight of their states and codebook values, rotated and scaled by `preapply_had_l`,
`preapply_had_r` and `get_hadamard_dt` in float64 as `get_weight_tensor` of exl3.py does, is
compared with what the layout reads. Nothing of ExLlamaV3 is in this repository. Prints what is
equal; the exit status is 1 when anything is not.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from halfbyte.formats import exl3

WORDS = """
#include <cmath>
#include <cstdint>
#include <cstdio>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(x)
#define __shared__ static
#define __syncthreads()
#define __restrict__
struct half { double v; };
typedef half __half;
struct half2 { half x, y; };
static double number(uint16_t b) {
    int e = (b >> 10) & 31, m = b & 1023;
    double r = e ? std::ldexp(1 + m / 1024.0, e - 15) : std::ldexp(m / 1024.0, -14);
    return b >> 15 ? -r : r;
}
static half __ushort_as_half(uint16_t b) { return {number(b)}; }
struct half_uint16 { half as_half; half_uint16(uint16_t b) : as_half{number(b)} {} };
struct half2_uint32 {
    half2 as_half2;
    half2_uint32(uint32_t b) : as_half2{{number((uint16_t)b)}, {number((uint16_t)(b >> 16))}} {}
};
static half __low2half(half2 a) { return a.x; }
static half __high2half(half2 a) { return a.y; }
static half2 __lows2half2(half2 a, half2 b) { return {a.x, b.x}; }
static half2 __highs2half2(half2 a, half2 b) { return {a.y, b.y}; }
static half __hadd(half a, half b) { return {a.v + b.v}; }
static half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
static half __hfma(half a, half b, half c) { return {std::fma(a.v, b.v, c.v)}; }
static half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
static half2 __half2half2(half a) { return {a, a}; }
static half2 __halves2half2(half a, half b) { return {a, b}; }
static float __half2float(half a) { return (float)a.v; }
static uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
}
static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t s) {
    return (uint32_t)(((uint64_t)high << 32 | low) >> (s & 31));
}
struct Index { unsigned x, y, z; };
static Index threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, gridDim{1, 1, 1};
"""
MAIN = """
template <int cb> void table() {
    for (uint32_t s = 0; s < 65536; s++) { double d = decode_3inst<cb>(s).v; fwrite(&d, 8, 1, stdout); }
}
template <int K> void tiles() {  // the threads of a block one after another, twice: the first pass fills what they share
    uint16_t packed[16 * K], out[256];
    for (int i = 0; i < 64 && fread(packed, 2, 16 * K, stdin); i++) {
        for (unsigned t = 0; t < 256; t++) { threadIdx.x = t & 127; unpack_trellis_kernel<K>(out, packed); }
        fwrite(out, 2, 256, stdout);
    }
}
int main() {
    table<0>(); table<1>(); table<2>();
    tiles<1>(); tiles<2>(); tiles<3>(); tiles<4>(); tiles<5>(); tiles<6>(); tiles<7>(); tiles<8>();
}
"""
LOP3 = re.compile(r'asm \("lop3\.b32 %0, %0, (0x\w+), (0x\w+), 0x6a;" : "\+r"\((\w+)\)\);')


def main(clone: Path) -> int:
    """Compare; 1 when anything differs."""
    quant = clone / "exllamav3" / "exllamav3_ext" / "quant"
    codebook = LOP3.sub(r"\3 = (\3 & \1u) ^ \2u;", (quant / "codebook.cuh").read_text("utf-8").replace("#pragma once", ""))
    kernels = re.split(r"(?m)^(?=template <int K>)", (quant / "pack.cu").read_text("utf-8"))
    kernel = next(k for k in kernels if "void unpack_trellis_kernel" in k)
    rng = np.random.default_rng(0)
    packed = {bits: rng.integers(-(1 << 15), 1 << 15, (1, 64, 16 * bits)).astype(np.int16) for bits in range(1, 9)}
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "run.cpp"), Path(folder, "run")
        source.write_text(WORDS + codebook + kernel[: kernel.index("\n}") + 2] + MAIN, "utf-8")
        flags = ["-DUSE_ROCM", f"-I{quant}"]  # newer sources have plain C++ for their PTX under that word
        subprocess.run(["g++", "-O1", "-fno-strict-aliasing", *flags, "-o", program, source], check=True)
        given = b"".join(p.tobytes() for p in packed.values())
        made = subprocess.run([program], input=given, capture_output=True, check=True).stdout
    size = 3 * 65536 * 8
    tables = np.frombuffer(made[:size]).reshape(3, 65536).astype(np.float16)
    states = np.frombuffer(made[size:], np.uint16).reshape(8, 64, 256)
    perm: dict[str, Any] = {"torch": SimpleNamespace(int=None, tensor=lambda values, **_: np.array(values))}
    tree = ast.parse((clone / "exllamav3" / "modules" / "quant" / "exl3_lib" / "quantize.py").read_text("utf-8"))
    function = next(f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "tensor_core_perm")
    function.decorator_list = []
    exec(compile(ast.Module([function], []), "quantize.py", "exec"), perm)
    rows, columns = np.divmod(perm["tensor_core_perm"]("cpu"), 16)
    failed = 0
    for name, table in zip(exl3.CODEBOOKS, tables, strict=True):
        same = int((exl3.codebook_values(name).astype(np.float16).view(np.uint16) == table.view(np.uint16)).sum())
        failed += same != 65536
        print(f"codebook {name}: {same} of 65536 values equal")
    for bits, want in zip(packed, states, strict=True):
        ours = exl3.states(packed[bits]).reshape(16, 64, 16)[rows, :, columns].T
        failed += not np.array_equal(ours, want)
        print(f"{bits} bits: {int((ours == want).sum())} of {want.size} states equal, in the order of tensor_core_perm")
    return int(failed + not_equal_weights(clone, packed, tables, states, (rows, columns)) > 0)


def rotations(clone: Path) -> dict[str, Any]:
    """`preapply_had_l` and `preapply_had_r` with the Hadamard matrices of hadamard.py, in float64."""
    import math

    import torch

    file = clone / "exllamav3" / "util" / "hadamard.py"
    names: dict[str, Any] = {"__file__": str(file), "__name__": "hadamard"}
    exec(file.read_text("utf-8").replace("from ..ext import exllamav3_ext as ext", ""), names)
    source = (clone / "exllamav3" / "modules" / "quant" / "exl3_lib" / "quantize.py").read_text("utf-8")
    wanted = ("preapply_had_l", "preapply_had_r")
    found = [ast.unparse(f) for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name in wanted]
    names |= {"math": math, "torch": torch, "_HAD_MAX_GEMM_ROWS": 1 << 19}
    exec("\n".join(found).replace("torch.float)", "torch.float64)"), names)
    return names


def not_equal_weights(clone: Path, packed: dict[int, Any], tables: Any, states: Any, order: tuple[Any, Any]) -> int:
    """Number of weights (128, 128), one for each codebook and width, whose values differ."""
    try:
        names = rotations(clone)
    except ImportError:
        print("without torch: no rotations compared")
        return 0
    import torch
    from halfbyte.layouts import LAYOUTS

    markers = {"3inst": {}, "mcg": {"mcg": np.array(0xCBAC1FED, np.uint32).view(np.int32)}}
    markers["mul1"] = {"mul1": np.array(0x83DCD12D, np.uint32).view(np.int32)}
    rng, failed = np.random.default_rng(1), 0
    for (name, table), (bits, found) in itertools.product(
        zip(exl3.CODEBOOKS, tables, strict=True), zip(packed, states, strict=True)
    ):
        tiles = np.empty((64, 16, 16))
        tiles[:, order[0], order[1]] = table[found]
        inner = tiles.reshape(8, 8, 16, 16).swapaxes(1, 2).reshape(128, 128)
        scales = {s: (rng.standard_normal(128) * 0.1).astype(np.float16) for s in ("suh", "svh")}
        w = names["preapply_had_l"](torch.from_numpy(inner), 128) * torch.from_numpy(scales["suh"].astype(np.float64))[:, None]
        w = names["preapply_had_r"](w, 128) * torch.from_numpy(scales["svh"].astype(np.float64))
        tensors = {"trellis": packed[bits].reshape(8, 8, 16 * bits), **scales, **markers[name]}
        ours = LAYOUTS["exl3"].unpack(tensors, {"bits": float(bits)}, "w").dequantize("float64")
        off = float(np.abs(ours - w.numpy().T).max() / np.abs(ours).max())
        failed += off > 1e-14
        print(f"{bits} bits, {name}: a weight (128, 128) within {off:.1g} of its largest value")
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
