"""Run by test_cuda_fused_compile.py in a process of its own: the fused schedule compiled for Hopper without a GPU."""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from halfbyte.backends.cuda.wgmma.kernel import wgmma_kernel

# element, scale, group, addend, arithmetic, bytes a scale, x in float16, bits
FORMATS = {
    "int4:g128": (1, 0, 128, 0, 0, 2, True, 4),
    "mxfp4": (2, 5, 32, 0, 0, 1, True, 4),
    "nvfp4": (2, 2, 16, 0, 1, 1, False, 4),
    "uint4:g64": (0, 0, 64, 1, 0, 2, True, 4),
    "affine4:g32": (0, 0, 32, 2, 2, 2, False, 4),
    "int2:g64": (1, 0, 64, 0, 0, 2, True, 2),
    "uint2:g16": (0, 0, 16, 1, 0, 2, True, 2),
    "affine2:g64": (0, 0, 64, 2, 1, 2, False, 2),
    "q8_0": (1, 0, 32, 0, 0, 2, True, 8),
    "uint8:g16": (0, 0, 16, 1, 2, 2, False, 8),
    "affine8:g64": (0, 0, 64, 2, 3, 2, False, 8),
    "mxfp8_e4m3": (5, 5, 32, 0, 0, 1, True, 8),
    "mxfp8_e5m2": (6, 5, 32, 0, 2, 1, False, 8),
}
# tokens, blocks of 64 rows a warpgroup, warpgroups along rows and inputs, stages, routed, gate
SHAPES = {
    "linear": (64, 1, 2, 1, 4, False, 0), "experts": (32, 2, 2, 1, 4, True, 2),
    "deep": (64, 1, 2, 2, 8, False, 0), "narrow": (32, 1, 1, 4, 8, False, 0),
}  # fmt: skip


def described(kind, shape, bits):
    """Signature of a tensor map."""
    layout = gl.NVMMASharedLayout(min(128, shape[-1] * bits // 8), bits, rank=len(shape))
    return f"tensordesc<{kind}[{','.join(map(str, shape))}],{layout!r}>"


def compile_one(word, shape):
    kind, scale, group, add, way, size, half, bits = FORMATS[word]
    tokens, rows, warpgroups, deep, stages, routed, gate = SHAPES[shape]
    groups, bn = max(1, 64 // group), 64 * rows * warpgroups
    width, x = groups * 8 * size, "fp16" if half else "bf16"
    signature = {
        "y_desc": described(x, [tokens, 32 * rows if gate else 64 * rows], 16), "Y": f"*{x}",
        "x_desc": described(x, [tokens, 64], 16), "w_desc": described("i32", [bn // 16, bits, 32], 32),
        "s_desc": described("i16", [max(bn // 16, 8), width], 16),
        "a_desc": described("i16", [max(bn // 16, 8), 16 * groups], 16), "BIAS_PTR": f"*{x}", "GLOBAL": "*fp32", "BLOCKS": "*i32",
        "EXPERT": "*i32", "FIRST": "*i32", "LAST": "*i32", "PARTIAL": "*fp32", "COUNT": "*i32", "out_unit": "fp32",
        "divisor": "fp32",
    }  # fmt: skip
    constants = {
        "BT": tokens, "R": rows, "WGS": warpgroups, "WGK": deep, "STAGES": stages, "GROUP": group, "GROUPS": groups,
        "SW": width, "KIND": kind, "BITS": bits,
        "SCALE": scale, "ADD": add, "WAY": way, "GLOBAL_OP": 1 if word == "nvfp4" else 0, "DIVIDE": False, "HAS_BIAS": True,
        "HALF": half, "TOGETHER": 8, "STORE": 2, "ROUTED": routed, "GATE": gate, "AHEAD": word != "mxfp4",
        "PDL": True,
    }  # fmt: skip
    names = wgmma_kernel.arg_names
    types = {a: "constexpr" if a in constants else signature.get(a, "i32") for a in names}
    values = {(names.index(a),): constants[a] for a in names if a in constants}
    aligned = {(names.index(a),): [["tt.divisibility", 16]] for a in ("Y", "PARTIAL")}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    target = GPUTarget("cuda", 90, 32)
    binary = triton.compile(GluonASTSource(wgmma_kernel, types, values, aligned), target=target, options=options)
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", binary.asm["ptx"])
    assert products, "no wgmma"
    assert set(products) == {"{"}, "the weight is not the register operand"
    assert binary.metadata.shared <= 232448, binary.metadata.shared
    return len(products)


for name in sys.argv[1:]:
    word, _, shape = name.partition("/")
    print(name, compile_one(word, shape), flush=True)
