"""What each codec is called with, what it rounds hard values to, and what its codes mean.

    python -m support.format_outcomes             # in tests/: write data/format_outcomes.txt anew
    python -m support.format_outcomes uint4       # print each case of a codec and its outcome

A case is a group size and an option (the format, or the refusal), a policy and a matrix (the parts
that `quantize` makes of it) or a dtype (the values of random codes and scales).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte import quantize
from halfbyte.errors import HalfbyteError
from halfbyte.formats import codec_names, family_of, format_named, packed_nbytes
from halfbyte.spec import Format
from support.outcome_table import OutcomeTable
from support.outcomes import checksum
from support.random_tensors import random_tensor

GROUPS = (None, -2, -1, 0, 1, 8, 16, 24, 32, 48, 64, 100, 128, 256, 1 << 20)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "scale_dtype": ("float16", "bfloat16", "float32", "float64", "e4m3"),
    "rows": (-2, -1, 0, 1, 2, 16), "axis": (-1, 0, 1, 2), "global_scale": ("none", "multiply", "divide", "amax", "other"),
    "nested": (True, False), "zero": ("float", "int", "none"), "grouping": ("row", "flat", "strided", "block"),
    "inverse": (True, False), "other": (1,),
}  # fmt: skip
SEARCHED = ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs")
"""Codecs whose scales are searched for: their tests compare with llama.cpp's own."""
FORMATS = 12
"""Formats of a codec that matrices are rounded to."""
WORDS = (
    "exact", "float32", "input", "minmax", "edge", "max", "half", "no_clip", "range", "hqq", "divide", "reciprocal", "inverse",
    "joint", "stepwise", "midpoint", "sorted", "difference", "floor", "even", "ceil", "ceil_log2", "stored", "unrounded", "keep",
    "value", "drop", "negative", "away", "zero", "truncate", "grid", "other",
)  # fmt: skip
NUMBERS = (0.0, 1.0, 2.0**-9, -1.0, 0, 1, 7, True)
RULES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("scale", "compute", "order", "ties", "zeros", "zero", "nearest", "codes", "rule", "zero_scale"), WORDS),
    **dict.fromkeys(("scale_floor", "zero_scale", "even_bits", "eps", "largest"), NUMBERS),
}  # fmt: skip
ROUNDED = (
    "mxfp4", "mxfp8_e4m3", "mxint8", "nvfp4", "int4", "uint4", "int8", "bnb_int8", "affine4", "fp8_e4m3", "nf4", "bnb_fp4",
    "nf4_modelopt", "hqq2", "hqq4", "q4_0",
)  # fmt: skip
"""Codecs, one or two of each kind, that are rounded by each rule."""
DTYPES = ("float16", "bfloat16", "float32", "float64")


def hard_matrix(k: int) -> np.ndarray:
    """Rows of zeros, of one value, of one sign, of ties, of extremes, of subnormals, float32."""
    steps = np.arange(k, dtype=np.float64)
    rows = [
        np.zeros(k), np.full(k, -3.0), np.where(steps == 5, 7.0, 0.0), steps % 15 - 7, (steps % 31 - 15) / 2,
        (steps % 13) / 4 + 0.125, -(steps % 9) - 1, np.where(steps % 16 == 3, 448.0, steps % 7),
        65504.0 * np.where(steps % 2, 1, -1), 2.0**-24 * (steps % 5), 2.0**-140 * (steps % 3), 1000 + (steps % 2) / 256,
        1e30 * (steps - k / 2),
        np.sqrt(steps) - 4, ((steps * 7919) % 1009) / 1009 - 0.5,
    ]  # fmt: skip
    return np.stack(rows).astype(np.float32)


def formats_of(codec: str) -> Iterator[tuple[str, Format | str]]:
    """(case, format or why there is none) of every group size and option of a codec."""
    for group in GROUPS:
        for option in (None, *OPTIONS):
            for value in OPTIONS[option] if option else (None,):
                named = {option: value} if option else {}
                try:
                    yield f"{group} {named}", format_named(codec, group, **named)
                except HalfbyteError as error:
                    yield f"{group} {named}", str(error)


def values(array: np.ndarray) -> int:
    """Checksum of numbers, every NaN alike."""
    wide = array.astype(np.float64)
    return checksum([array.dtype.name, np.where(np.isnan(wide), 0.0, wide), np.isnan(wide)])


def outcomes(codec: str) -> Iterator[tuple[str, str, str]]:
    """(subject, case, outcome) of each case of a codec."""
    yield from of_options(codec) if codec in ROUNDED else ()
    found: dict[Format, str] = {}
    for case, fmt in formats_of(codec):
        if isinstance(fmt, Format):
            found.setdefault(fmt, case)
        yield "formats", case, repr(fmt)
    for number, (fmt, case) in enumerate(found.items()):
        for shape in ((15, 128), (15, 100), (2, 7, 64), (3, 512), (1, 1), (0, 64)):
            with np.errstate(all="ignore"):
                yield "sizes", f"{case} {shape}", _tried(lambda fmt=fmt, shape=shape: _sizes(fmt, shape))
        shape = ((5, 256), (4, 256), (2, 3, 256))[number % 3] if fmt.grouping == "row" else (4, 256)
        with suppress(HalfbyteError):
            q = random_tensor(fmt, shape, number)
            for dtype in DTYPES:
                with np.errstate(all="ignore"):
                    yield f"dequantize to {dtype}", case, _tried(lambda q=q, dtype=dtype: values(q.dequantize(dtype)))
        rounded = codec not in SEARCHED and number % (1 + len(found) // FORMATS) == 0
        for policy in family_of(fmt).policies_of(codec) if rounded else ():
            for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
                for k in (128, 100):
                    with np.errstate(all="ignore"):
                        x = hard_matrix(k).astype(dtype)
                        name = f"{case} of {np.dtype(dtype)} [15, {k}]"
                        for rows in (slice(None), *(slice(i, i + 1) for i in range(15) if k == 128 and number == 0)):
                            yield (
                                f"quantize {policy}",
                                f"{name} {rows}",
                                _tried(
                                    lambda x=x, rows=rows, fmt=fmt, policy=policy: checksum(
                                        dict(quantize(x[rows], fmt, policy=policy).parts)
                                    )
                                ),
                            )


def of_options(codec: str) -> Iterator[tuple[str, str, str]]:
    """(subject, case, outcome) of each rule of rounding and each word or number for it."""
    for option, values in RULES.items():
        for value in values:
            for rows in (slice(None), slice(1, 2)):
                with np.errstate(all="ignore"):
                    x = hard_matrix(128)[rows]
                    yield (
                        f"option {option}",
                        f"{value!r} {rows}",
                        _tried(
                            lambda x=x, option=option, value=value: checksum(dict(quantize(x, codec, **{option: value}).parts))
                        ),
                    )


def _sizes(fmt: Format, shape: tuple[int, ...]) -> Any:
    fitted = family_of(fmt).fit(fmt, shape)
    family = family_of(fitted)
    return fitted, family.geometry(fitted, shape), family.optional_parts(fitted, shape), packed_nbytes(fitted, shape)


def _tried(work: Any) -> str:
    try:
        return repr(work())
    except HalfbyteError as error:
        return str(error)


TABLE = OutcomeTable("format_outcomes", codec_names(), outcomes)

if __name__ == "__main__":
    TABLE.main()
