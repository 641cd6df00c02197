"""Rounding policies: the options of a family's `encode` as a frozen dataclass, with the field names
that users write.

The policies themselves are beside their encoders: `IntegerPolicy`, `FloatPolicy`, `TablePolicy`
in this package, `MXPolicy`, `NVFP4Policy`, `AffinePolicy` in the modules of their families. What
each producer uses is `Family.policies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...spec import Format
from ..base import SCALE_DTYPES

P = TypeVar("P")

COMPUTE = ("exact", "float32", "input")
"""Arithmetic of an encoder: exact (float64), float32, or the dtype of the weight, rounding after
every operation.
"""


def float_info(dtype: Any) -> Any:
    """Limits of a float dtype, bfloat16 included."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def policy_from(cls: type[P], fmt: Format, options: Mapping[str, Any]) -> P:
    """`cls(**options)`; FormatError with the allowed options when one is unknown."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise FormatError(f"[quantize] {fmt.name} with option {', '.join(unknown)}; allowed: {', '.join(names)}")
    return cls(**options)


def one_of(option: str, given: Any, allowed: Sequence[Any]) -> None:
    """FormatError unless `given` is one of the allowed values of an option."""
    if given not in allowed:
        raise FormatError(f"[quantize] {option}={given!r}; allowed: {', '.join(map(repr, allowed))}")


def to_compute_dtype(x: NDArray[Any], compute: str) -> NDArray[Any]:
    """`x` in the dtype an encoder computes in."""
    return x if compute == "input" else x.astype(np.float64 if compute == "exact" else np.float32)


def to_scale_dtype(values: NDArray[Any], fmt: Format, what: str = "scale") -> NDArray[Any]:
    """`values` rounded to the format's scale dtype; FormatError where one is beyond its range."""
    dtype = SCALE_DTYPES[fmt.scale]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out: NDArray[Any] = np.asarray(values).astype(dtype)
    bad = ~np.isfinite(out)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise FormatError(
            f"[quantize] {fmt}: the {what} of group {first} is {np.asarray(values)[first]:.6g}, beyond {fmt.scale}; "
            "give scale_dtype='bfloat16' or 'float32'"
        )
    return out


def ratio(x: NDArray[Any], scale: NDArray[Any]) -> NDArray[Any]:
    """x / scale in their common dtype, 0 where the scale is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        out: NDArray[Any] = np.where(scale == 0, np.zeros((), x.dtype), x / scale)
    return out


def replace_zero(scales: NDArray[Any], by: float | str) -> NDArray[Any]:
    """Scales with their zeros replaced by a number, or by the machine epsilon of their dtype for
    "eps".
    """
    value = float_info(scales.dtype).eps if by == "eps" else by
    return np.where(scales == 0, np.asarray(value).astype(scales.dtype), scales)


def clip_in_dtype(x: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    """x clipped, in its own dtype (np.clip returns float32 for bfloat16)."""
    of = x.dtype.type
    out: NDArray[Any] = np.minimum(np.maximum(x, of(low)), of(high))
    return out
