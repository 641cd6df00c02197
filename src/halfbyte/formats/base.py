"""What a format family is: its codec names, the geometry of its parts, decoding and encoding.

To add a format, subclass `Family`, give `codecs`, `format` and `encode`, and register it in
`formats/__init__.py`. Decoding follows from the `Format` description unless the family overrides
it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, ShapeError
from ..numerics.exact import bfloat16
from ..spec import Format
from .decode import Parts, decode_exact

SCALE_DTYPES: dict[str, np.dtype[Any]] = {
    "e8m0": np.dtype(np.uint8), "e4m3": np.dtype(np.uint8), "ue4m3": np.dtype(np.uint8),
    "float16": np.dtype(np.float16), "bfloat16": bfloat16, "float32": np.dtype(np.float32),
    "u4": np.dtype(np.uint8), "u6": np.dtype(np.uint8), "i6": np.dtype(np.int8), "i8": np.dtype(np.int8),
    "nested": np.dtype(np.uint8),
}  # fmt: skip
"""NumPy dtype in which each kind of scale is stored."""


_LARGEST = float(np.finfo(np.float32).max)


class PartSpec(NamedTuple):
    """Shape and dtype of one part of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Family(ABC):
    """One family of formats."""

    name: ClassVar[str]
    codecs: ClassVar[tuple[str, ...]]
    """Codec names, each a `Format.name` of this family."""
    decoded: ClassVar[tuple[str, ...]] = ()
    """Further values of `Format.name`, of formats that only files have: no user asks for one."""
    policies: ClassVar[dict[str, dict[str, Any]]] = {}
    """Producer name -> format options and keyword arguments of `encode` that reproduce that
    producer's bytes.
    """
    policy_codecs: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Producer name -> the codecs it has, where these are not all of the family's."""
    exceptions: ClassVar[dict[tuple[str, str], dict[str, Any]]] = {}
    """(producer, codec) -> entries that replace those of `policies` for that codec."""
    format_options: ClassVar[tuple[str, ...]] = ()
    """Options of `format` other than the group size; `quantize` passes all others to `encode`."""

    def options_of(self, codec: str) -> tuple[str, ...]:
        """Those of `format_options` that a codec takes."""
        return self.format_options

    def policies_of(self, codec: str) -> tuple[str, ...]:
        """Producers whose bytes `encode` reproduces for a codec."""
        return tuple(p for p in self.policies if codec in self.policy_codecs.get(p, self.codecs))

    def policy(self, codec: str, producer: str) -> dict[str, Any]:
        """Format and encode options of a producer's policy for a codec; FormatError with the
        allowed names for an unknown one.
        """
        known = self.policies_of(codec)
        if producer not in known:
            raise FormatError(f"[quantize] policy {producer!r} for {codec}; allowed: {', '.join(known) or 'none'}")
        return self.policies[producer] | self.exceptions.get((producer, codec), {})

    def fit(self, fmt: Format, shape: Sequence[int]) -> Format:
        """The canonical spelling of `fmt` for a tensor of this shape: flat blocks that never
        straddle rows become row groups.
        """
        return fmt

    @abstractmethod
    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        """The `Format` of a codec; FormatError for a group size or option that it does not allow."""

    @abstractmethod
    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        """Round finite x [*lead, n, k] to the format's parts. `policy` names the scale and tie
        rules.
        """

    def decode(
        self, fmt: Format, shape: tuple[int, ...], parts: Parts, dtype: Any, window: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        """Exact values rounded once to `dtype`."""
        return decode_exact(fmt, shape, parts, dtype, window)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        """Required parts of a tensor of logical `shape` (*lead, n, k), with their shapes and
        dtypes.
        """
        *lead_list, n, k = shape
        lead = tuple(lead_list)
        specs = {"codes": PartSpec((*lead, n, fmt.row_bytes(k)), np.dtype(np.uint8))}
        if fmt.scale != "none":
            scale_shape: tuple[int, ...] = (*lead, n, fmt.groups(k))
            if fmt.grouping in ("flat", "strided"):
                scale_shape = (-(-math.prod(shape) // fmt.group_size),)
            elif fmt.grouping == "block":
                rows = 1 if fmt.group_rows == -1 else -(-n // fmt.group_rows)
                scale_shape = (*lead, rows, fmt.groups(k))
            dtype = SCALE_DTYPES[fmt.scale]
            specs["scales"] = PartSpec(scale_shape, dtype)
            if fmt.zero == "int":
                specs["zeros"] = PartSpec(scale_shape, np.dtype(np.int16))
            elif fmt.zero == "float":
                specs["zeros"] = PartSpec(scale_shape, dtype)
            if fmt.bias:
                specs["biases"] = PartSpec(scale_shape, dtype)
        if fmt.minimum:
            specs["mins"] = PartSpec((*lead, n, fmt.groups(k)), np.dtype(np.uint8))
        if fmt.super_size:
            per_super = (*lead, n, k // fmt.super_size)
            specs["super_scales"] = PartSpec(per_super, np.dtype(np.float16))
            if fmt.minimum:
                specs["super_mins"] = PartSpec(per_super, np.dtype(np.float16))
        if fmt.global_op:
            specs["global_scale"] = PartSpec(lead, np.dtype(np.float32))
        return specs

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        """Parts that a tensor may have in addition to the required ones."""
        if fmt.grouping == "row" and fmt.super_size == 0 and not fmt.opaque:
            return {"group_index": PartSpec((shape[-1],), np.dtype(np.int32))}
        return {}


def check_group(codec: str, group_size: int, allowed: Sequence[int] | None = None) -> int:
    """A positive group size or −1, from `allowed` when given; FormatError otherwise."""
    if isinstance(group_size, bool) or not isinstance(group_size, (int, np.integer)):
        raise FormatError(f"[format] {codec} with group size {group_size!r}; a whole number is allowed")
    if allowed is not None and group_size not in allowed:
        raise FormatError(f"[format] {codec} with group size {group_size}; allowed: {', '.join(map(str, allowed))}")
    if group_size != -1 and not 1 <= group_size < 1 << 31:
        raise FormatError(f"[format] {codec} with group size {group_size}; allowed: 1 to 2^31 - 1, or -1 for the whole row")
    return int(group_size)


def require_finite(x: NDArray[Any], codec: str) -> NDArray[Any]:
    """x as an array of two or three axes of finite floats; an error with the first position of
    another value.
    """
    x = np.asarray(x)
    if x.ndim not in (2, 3):
        raise ShapeError(f"[quantize] shape {x.shape}; a weight is (n, k) or (experts, n, k)")
    if x.dtype not in (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), bfloat16):
        raise ShapeError(
            f"[quantize] dtype {x.dtype}; allowed: float64, float32, float16, bfloat16; convert it, as "
            "np.asarray(x, np.float32) does"
        )
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(x) <= _LARGEST) if x.dtype == np.float64 else ~np.isfinite(x)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        what = "NaN, infinite or beyond float32" if x.dtype == np.float64 else "NaN or infinite"
        raise FormatError(
            f"[quantize] {int(bad.sum())} values are {what}, the first at {first}: {x[first]}; {codec} holds finite weights only"
        )
    return x
