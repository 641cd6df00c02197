"""Format options and rounding rules in every combination: each is a rounding of the weight, near
the default's error, or is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte import quantize
from halfbyte.errors import FormatError
from halfbyte.formats import affine, mx, nvfp4
from halfbyte.formats.nested import GRIDS
from halfbyte.formats.rounding import integers
from halfbyte.formats.rounding.policy import COMPUTE
from halfbyte.numerics.minifloat import TIES, ZEROS

DTYPES = ("float32", "float16", "bfloat16")
MX: dict[str, tuple[Any, ...]] = {
    "scale": mx.SCALE_RULES, "even_bits": (0, 1, 2), "ties": TIES, "zeros": ZEROS, "symmetric": (False, True), "compute": COMPUTE,
    "zero_byte": (0, 127), "byte0": (2.0**-127, 1.0),
}  # fmt: skip
FLOAT: dict[str, tuple[Any, ...]] = {
    "compute": COMPUTE,
    "zero_scale": (0.0, "eps", 1.0),
    "ties": TIES,
    "zeros": ZEROS,
    "scale_dtype": DTYPES,
}
INTEGER: dict[str, tuple[Any, ...]] = {
    "scale": integers.SCALE_RULES,
    "zero": integers.ZERO_RULES,
    "compute": COMPUTE,
    "order": ("divide", "reciprocal"),
    "zero_scale": (0.0, "eps", "tiny", 1.0),
    "scale_dtype": DTYPES,
}
AFFINE: dict[str, tuple[Any, ...]] = {
    "scale": affine.SCALE_RULES,
    "compute": COMPUTE[:2],
    "codes": ("stored", "unrounded"),
    "scale_floor": (0.0, 1e-7),
    "scale_dtype": DTYPES,
}
TABLE: dict[str, tuple[Any, ...]] = {
    "compute": COMPUTE, "order": ("divide", "reciprocal"), "nearest": ("midpoint", "sorted", "difference"),
    "absmax": ("stored", "unrounded"), "nested_codes": tuple(GRIDS), "nested": (True,), "scale_dtype": DTYPES,
}  # fmt: skip
HQQ: dict[str, tuple[Any, ...]] = {
    "rule": ("range", "edge", "hqq"), "axis": (0, 1), "grouping": ("row", "flat", "strided"), "scale_dtype": DTYPES,
}  # fmt: skip
NVFP4: dict[str, tuple[Any, ...]] = {
    "global_scale": tuple(nvfp4.GLOBAL_SCALES),
    "compute": COMPUTE,
    "order": nvfp4.ORDERS,
    "ties": TIES,
    "zeros": ZEROS,
}
SPACES = {
    "mxfp4": MX, "mxfp6_e2m3": MX, "mxfp6_e3m2": MX, "mxfp8_e4m3": MX, "mxfp8_e5m2": MX, "mxint8": MX, "fp4": FLOAT,
    "fp8_e4m3": FLOAT | {"rows": (2,)}, "fp8_e5m2": FLOAT, "int2:g32": INTEGER, "int4:g32": INTEGER | {"inverse": (True,)},
    "int8:g64": INTEGER, "uint2:g32": INTEGER, "uint4:g32": INTEGER, "uint8:g32": INTEGER, "affine2:g32": AFFINE,
    "affine4:g32": AFFINE, "affine8:g32": AFFINE, "nf4": TABLE, "hqq1:g64": HQQ, "hqq4:g64": HQQ, "hqq8:g64": HQQ, "nvfp4": NVFP4,
}  # fmt: skip
X = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
MOST = 6.0
"""Error over the default's. Rules that clip (`floor`, no mantissa bits) or truncate add up to 5; a
rule that is misapplied loses the weight, 7 times the error of 4 bits.
"""


def error(q: Any, x: Any) -> float:
    return float(np.sqrt(np.mean((q.dequantize().astype(np.float64) - x) ** 2) / np.mean(x.astype(np.float64) ** 2)))


def error_or_refusal(x: Any, word: str, options: dict[str, Any]) -> float:
    """The error; 0 where the combination is refused."""
    try:
        return error(quantize(x, word, **options), x)
    except FormatError as refusal:
        return 0.0 if any(option in str(refusal) for option in options) else float("inf")


@pytest.mark.parametrize("word", SPACES)
@given(data=st.data())
@settings(max_examples=40)
def test_any_combination_rounds_the_weight_or_is_refused(word, data):
    options = data.draw(st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in SPACES[word].items()}))
    x = X
    if options.get("global_scale") != "none":  # where E4M3 alone bounds the range
        x = X * np.float32(data.draw(st.sampled_from([1.0, 1e-3, 30.0])))
    assert error_or_refusal(x, word, options) <= MOST * error(quantize(x, word), x)


@pytest.mark.parametrize("word", SPACES)
def test_each_option_alone_is_taken_or_refused(word):
    """More are taken than refused, or the test above would compare little."""
    taken = refused = 0
    for option, values in SPACES[word].items():
        for value in values:
            try:
                quantize(X, word, **{option: value})
                taken += 1
            except FormatError:
                refused += 1
    assert taken > 2 * refused
