"""Integers under a float scale, with an implicit or a stored zero point.

    intN    value = (code − 2^(N−1)) · scale          the zero point is the middle code (U4B8 for N = 4)
    uintN   value = (code − zero) · scale             a stored zero point a group
    inverse value = (code − 2^(N−1)) / scale          ModelOpt's INT4QTensor keeps 7/amax
    bnb_int8 value = (code − 128) · scale / 127       bitsandbytes' row-wise int8, scale is the row's largest magnitude

Codecs: `int1` … `int8`, `uint1` … `uint8`, `bnb_int8`. Any group size, −1 for the whole row; 128
unless given (bnb_int8: −1 only). Format options: `scale_dtype` (float16; bnb_int8: float32), `rows`
(rows that share a scale: tiles of rows × group_size, −1 for all), `inverse` (`intN` only). A signed
producer code q of N bits is stored as q + 2^(N−1); its signed zero point z, if any, as z + 2^(N−1)
in `uintN`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..spec import Format
from .base import Family, check_group, require_finite
from .options import only_options, rows_option, scale_dtype_option
from .rounding.integers import encode_integers

_CODECS = {f"int{b}": ("int", b) for b in range(1, 9)} | {f"uint{b}": ("uint", b) for b in range(1, 9)} | {"bnb_int8": ("int", 8)}


class Integer(Family):
    """Integers with implicit (`int`) or stored (`uint`) zero points."""

    name = "integer"
    codecs = tuple(_CODECS)
    format_options = ("scale_dtype", "rows", "inverse")
    policies: ClassVar[dict[str, dict[str, Any]]] = {
        "compressed-tensors": {
            "scale_dtype": "input", "scale": "half", "zero": "range", "compute": "input", "zero_scale": "eps",
        },
        "torchao": {
            "scale_dtype": "input", "scale": "half", "zero": "range", "compute": "input", "order": "reciprocal",
            "zero_scale": "tiny",
        },
        "modelopt": {"scale_dtype": "input", "scale": "max", "compute": "input"},
        "modelopt-int4": {"scale_dtype": "input", "scale": "max", "compute": "input", "inverse": True},
        "bitsandbytes": {"scale": "max", "compute": "float32", "order": "reciprocal"},
    }  # fmt: skip
    policy_codecs: ClassVar[dict[str, tuple[str, ...]]] = {
        "compressed-tensors": tuple(f"{s}{b}" for s in ("int", "uint") for b in range(2, 9)),
        "torchao": tuple(f"{s}{b}" for s in ("int", "uint") for b in range(1, 9)),
        "modelopt": ("int4",),
        "modelopt-int4": ("int4",),
        "bitsandbytes": ("bnb_int8",),
    }

    def options_of(self, codec: str) -> tuple[str, ...]:
        return () if codec == "bnb_int8" else self.format_options

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        element, bits = _CODECS[codec]
        only_options(codec, options, self.options_of(codec))
        if codec == "bnb_int8":
            check_group(codec, -1 if group_size is None else group_size, (-1,))
            return Format("integer", codec, bits, element, -1, "float32", divisor=127.0)
        if options.get("inverse") and element != "int":
            raise FormatError(f"[format] {codec} with inverse; allowed for int1 to int8, which have no stored zero point")
        group = check_group(codec, 128 if group_size is None else group_size)
        return Format(
            "integer",
            codec,
            bits,
            element,
            group,
            scale_dtype_option(codec, options, "float16"),
            zero="int" if element == "uint" else "none",
            inverse=bool(options.get("inverse", False)),
            **rows_option(codec, options),
        )

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        return encode_integers(require_finite(x, fmt.name), fmt, policy)
