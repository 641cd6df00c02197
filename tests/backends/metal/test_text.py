"""`python -m halfbyte.backends.metal`: every kernel of every format prints as text the compiler
takes; what is none is a sentence.
"""

from __future__ import annotations

import pytest

from halfbyte.backends.metal.__main__ import text
from halfbyte.backends.metal.kernels import NAMED
from halfbyte.errors import HalfbyteError
from support.metal_cpu.lint import check_source
from support.metal_cpu.machine import available, compile_source


@pytest.mark.parametrize("function", NAMED)
def test_every_function_prints(function):
    for codec in ("mxfp4", "uint4", "nvfp4", "q4_k", "hqq4"):
        for dtype in ("float16", "bfloat16", "float32"):
            entry, whole = (text([function, codec, dtype, *more]) for more in ([], ["--whole"]))
            assert entry.startswith(f"kernel void {function.split('_')[0]}_")
            assert whole.endswith(entry)
            check_source(whole)


@pytest.mark.skipif(not available(), reason="clang-19 is not installed")
def test_what_is_printed_compiles():
    compile_source(text(["rmsnorm_matvec", "q4_k", "bfloat16", "--whole"]))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], r"nothing given; FUNCTION CODEC DTYPE \[--whole\] is wanted"),
        (["matmul", "mxfp4", "float16"], "Functions: dequantize, embedding, matvec"),
        (["matvec", "mxfp4", "float64"], "dtypes of x: float16, bfloat16, float32"),
        (["matvec", "uint9", "float16"], "'uint9' is not a codec"),
        (["matvec", "iq1_s", "float16"], "raw ggml blocks"),
        (["gemm_fused_wide", "int8", "float16"], "reads words of eight 4-bit codes, not int8"),
    ],
)
def test_what_is_no_kernel_is_said(words, why):
    with pytest.raises(HalfbyteError, match=why):
        text(words)
