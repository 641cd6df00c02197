"""Run by test_cuda_compile.py in a process of its own: kernels compiled without a GPU for the targets named on the command line,
those of SHORT; with `all` before the targets, or for one that is not in SHORT, every one.

Most of a kernel's second is Triton's own reading of the Python, which is the same for every target.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from halfbyte.backends.cuda.decode import BF16_PAIR, E4M3_NORMAL, E8M0_NORMAL, ELEMENTS, F16_PAIR, SCALES
from halfbyte.backends.cuda.mma.kernel import fragment_kernel
from halfbyte.backends.cuda.moe.activation import gate_kernel
from halfbyte.backends.cuda.moe.routing import combine_kernel, plan_kernel, top_kernel
from halfbyte.backends.cuda.portable.dequantize import dequantize_kernel
from halfbyte.backends.cuda.portable.matmul import matmul_kernel
from halfbyte.backends.cuda.portable.matvec import matvec_kernel
from halfbyte.backends.cuda.portable.tiled import striped_kernel, tile_kernel
from halfbyte.backends.cuda.weight import FRAGMENT_ELEMENTS

POINTERS = {
    "OUT": "*fp16", "IDS": "*i64", "P8": "*i32", "P4": "*i32", "P2": "*i16", "P1": "*u8", "S": "*fp16", "SUPER": "*fp16",
    "A": "*fp16",
    "SMIN": "*fp16", "GLOBAL": "*fp32", "TABLE_PTR": "*fp32", "divisor": "fp32", "Y": "*fp16", "X": "*fp16", "BIAS": "*fp16",
    "BIAS_PTR": "*fp16", "PARTIAL": "*fp32", "COUNT": "*i32", "W": "*i32", "EXPERT": "*i32", "FIRST": "*i32", "LAST": "*i32",
    "XROW": "*i32", "YROW": "*i32",
    "WEIGHTS": "*fp32", "ROUTED": "*fp32", "LOGITS": "*bf16", "SHARE": "*fp32", "INDEX": "*i32", "unit": "fp32",
}  # fmt: skip

# element, bits, scale, group, addend (0 none, 1 zero, 2 bias, 3 minimum), groups a super scale, pointers that differ
FORMATS = {
    "int4:g128": ("int", 4, "float16", 128, 0, 1, {}),
    "mxfp4": ("e2m1", 4, "e8m0", 32, 0, 1, {"S": "*u8"}),
    "nvfp4": ("e2m1", 4, "e4m3", 16, 0, 1, {"S": "*u8"}),
    "mxfp4 in bfloat16": ("e2m1", 4, "e8m0", 32, 0, 1, {"S": "*u8", "X": "*bf16", "Y": "*bf16"}),
    "uint4:g32": ("uint", 4, "float16", 32, 1, 1, {"A": "*i16"}),
    "affine4:g64": ("uint", 4, "bfloat16", 64, 2, 1, {"S": "*bf16", "A": "*bf16", "X": "*bf16", "Y": "*bf16"}),
    "q4_K": ("uint", 4, "u6", 32, 3, 8, {"S": "*u8", "A": "*u8"}),
    "q6_K": ("int", 6, "i8", 16, 0, 16, {"S": "*i8"}),
    "mxfp8_e4m3": ("e4m3", 8, "e8m0", 32, 0, 1, {"S": "*u8"}),
    "q8_0": ("int", 8, "float16", 32, 0, 1, {}),
    "affine8:g64": ("uint", 8, "float16", 64, 2, 1, {}),
    "nf4": ("nf4", 4, "float32", 64, 0, 1, {"S": "*fp32"}),
    "uint3:g64": ("uint", 3, "float16", 64, 1, 1, {"A": "*i16"}),
}

SHORT = {
    80: {"mxfp4": "deep", "mxfp8_e4m3": ""}, 89: {"mxfp8_e4m3": ""}, 100: {"mxfp4": "dots", "mxfp8_e4m3": ""},
    120: {"mxfp4": "tile", "mxfp8_e4m3": ""},
    90: {"nvfp4": "", "q4_K": "", "affine8:g64": "", "nf4": "", "uint3:g64": "tile"},
}  # fmt: skip
"""Target -> formats and how many of their kernels. The others are assembled for 90 where they run (test_cuda_machine.py)."""
ALIKE = (89, 100, 120)
"""Targets whose kernels without a weight are those of 80 or of 90 but for the number."""


def compiled(kernel, constants, pointers, target, warps, source=ASTSource):
    """Compile for `target` with pointers aligned to 16 bytes, as torch gives them."""
    names = kernel.arg_names
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in names}
    values = {(names.index(a),): constants[a] for a in names if a in constants}
    aligned = {(names.index(a),): [["tt.divisibility", 16]] for a in names if signature[a].startswith("*") or a == "ldx"}
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source(kernel, signature, values, aligned), target=target, options=options)


def check(arch, word, deep):
    """One format for one target: dequantize and the fragment kernel; "tile" adds a kernel of tiles, "dots" each that multiplies
    tiles, "deep" every schedule."""
    element, bits, scale, group, add, per, other = FORMATS[word]
    nvidia = isinstance(arch, int)
    target = GPUTarget("cuda", arch, 32) if nvidia else GPUTarget("hip", arch, 64)
    pointers = {**POINTERS, **other}
    tiled = element in FRAGMENT_ELEMENTS.get(bits, ())
    common = {
        "GROUP": group, "KIND": ELEMENTS[element], "SCALE": SCALES[scale], "ADD": add, "PER": per,
        "GLOBAL_OP": 1 if word == "nvfp4" else 0,
        "DIVIDE": False,
    }  # fmt: skip
    planes = {**common, "WORDS": 64, "BITS": bits, "PACKED": nvidia, "UNITS": 8 if tiled else 0}
    binaries = [compiled(dequantize_kernel, {**planes, "GATHER": False, "BN": 8, "BW": 16}, pointers, target, 4)]
    if deep == "deep":
        binaries.append(compiled(matvec_kernel, {**planes, "HAS_BIAS": True, "BN": 2, "BC": 32}, pointers, target, 4))
    if deep in ("dots", "deep"):
        tile = {"HAS_BIAS": False, "SPLIT": 2, "BM": 16, "BN": 16, "BW": 8}
        binaries.append(compiled(matmul_kernel, {**planes, **tile}, pointers, target, 4))
    tile = {"HAS_BIAS": True, "BM": 64, "BN": 64, "BW": 8, "STAGES": 3}
    if deep:
        binaries.append(compiled(tile_kernel, {**planes, **tile}, pointers, target, 4))
    if deep in ("dots", "deep"):
        binaries.append(compiled(striped_kernel, {**planes, **tile}, pointers, target, 4))
    if tiled and bits > 2 and nvidia and arch >= 80:
        if scale in ("e8m0", "e4m3"):  # as checked data allows
            common["SCALE"] = {"e8m0": E8M0_NORMAL, "e4m3": E4M3_NORMAL}[scale].value
            pointers = {**pointers, "S": "*i16"}
        if scale in ("float16", "bfloat16"):
            common["SCALE"] = {"float16": F16_PAIR, "bfloat16": BF16_PAIR}[scale].value
            pointers = {**pointers, "S": "*i32", "A": "*i32"}
        half = pointers["X"] == "*fp16"
        pairs = {**pointers, "X": "*i32"}
        sharing = max(1, min(8, 128 // group))
        for rows, columns, warps, step, share, tokens, ahead in (
            (1, 1, 8, 2, sharing, 1, 2 if deep else 1), (2, 2, 2, 1, 1, 8, 2 if word == "int4:g128" else 0 if deep else 1),
        ):  # fmt: skip
            constants = {
                **common, "BITS": bits,
                "UNITS": 16, "GROUPS": 1024 // group, "HAS_BIAS": True, "HALF": half, "RT": rows, "NB": columns,
                "WK": warps, "WN": 1,
                "STEP": step, "SET": share, "TOKENS": tokens,
                "AHEAD": ahead, "SCALED": columns == 2 and bits == 4 and (half or element == "e2m1"), "ROUTED": columns == 2,
                "GATE": 2 if columns == 2 else 0, "FP8": arch >= 89, "PDL": arch >= 90,
            }  # fmt: skip
            binaries.append(compiled(fragment_kernel, constants, pairs, target, warps, GluonASTSource))
    for binary in binaries:
        assert any(k in binary.asm for k in ("cubin", "hsaco"))
    print(arch, word, len(binaries), "kernels", flush=True)


def check_rest(target, early):
    """The kernels without a weight."""
    compiled(gate_kernel, {"KIND": 2, "BLOCK": 1024, **early}, {**POINTERS, "G": "*fp32", "U": "*fp32"}, target, 4)
    for gather in (False, True):
        constants = {"T": 4, "GATHER": gather, "BLOCK": 1024, **early}
        compiled(combine_kernel, constants, {**POINTERS, "WHERE": "*i32", "Y": "*bf16"}, target, 4)
    compiled(top_kernel, {"TOP": 4, "E": 32, **early}, POINTERS, target, 1)
    plan = {"TOP": 4, "E": 32, "SOME": 256, "MINE": 32, "BLOCKS": 256, **early}
    for ids in ("*i32", "*i64"):
        compiled(plan_kernel, plan, {**POINTERS, "IDS": ids}, target, 4)


def main():
    names = sys.argv[1:]
    for name in names[names[0] == "all" :]:
        arch = int(name) if name.isdigit() else name
        words = {word: "deep" if word in ("mxfp4", "uint3:g64") else "" for word in (FORMATS if arch == 90 else SHORT[80])}
        target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
        if names[0] != "all":
            words = SHORT.get(arch, words)
        if names[0] == "all" or arch not in ALIKE:
            check_rest(target, {"PDL": isinstance(arch, int) and arch >= 90})
        for word, deep in words.items():
            check(arch, word, deep)


main()
