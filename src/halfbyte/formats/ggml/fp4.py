"""ggml's NVFP4: E2M1 codes, an unsigned E4M3 scale for 16 of them, one float32 factor for the
tensor or none.

    value = e2m1(code) · ue4m3(scale_byte) · global

A codec separate from `nvfp4` because the scale byte means something else: the sign bit is ignored,
0x7F is 0 and 0xFF is 480. Blocks hold 64 values. Format option: `global_scale`, "multiply"
(default; a separate `.scale` tensor in a file) or "none".

Encoding: global = largest magnitude of the matrix / 2688 (6 · 448), scale = largest of 16 / 6 /
global, codes to nearest.

| rule | scale byte | ties of codes |
|---|---|---|
| `nearest` (default) | nearest UE4M3, ties to even; at least 1 for a group that is not zero | even |
| `ggml` | ggml's own cast: ties away from zero, 248 and more become 448, subnormals saturate at code 7 | toward zero |

MXFP4, ggml type 39, is `mxfp4` of the `mx` family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...numerics.bits import pack
from ...numerics.minifloat import round_to_element, scale_table
from ...spec import Format
from ..base import Family, PartSpec
from ..rounding.policy import one_of, policy_from
from .scale_search import F32, SMALLEST, in_chunks, safe_divide
from .types import check_blocks, require_fixed

_NVFP4 = Format("ggml_fp4", "nvfp4_ue4m3", 4, "e2m1", 16, "ue4m3", global_op="multiply")
_LARGEST = 2688.0  # 6 · 448


@dataclass(frozen=True)
class NVFP4Policy:
    """`scale`: a rule of the module's table."""

    scale: str = "nearest"

    def __post_init__(self) -> None:
        one_of("scale", self.scale, ("nearest", "ggml"))


class GGMLFP4(Family):
    """NVFP4 with an unsigned E4M3 scale (ggml type 40)."""

    name = "ggml_fp4"
    codecs = ("nvfp4_ue4m3",)
    format_options = ("global_scale",)
    policies: ClassVar[dict[str, dict[str, Any]]] = {"gguf": {"global_scale": "none", "scale": "ggml"}}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        level = options.pop("global_scale", "multiply")
        if level not in ("multiply", "none"):
            raise FormatError(f"[format] {codec} with global_scale {level!r}; allowed: multiply, none")
        return require_fixed(_NVFP4, group_size, options).with_(global_op="" if level == "none" else level)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        check_blocks(fmt.name, shape[-1], 64)
        return super().geometry(fmt, shape)

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        """Parts of finite x [*lead, n, k]. `scale` is a rule of the module's table."""
        rule = policy_from(NVFP4Policy, fmt, policy).scale
        if not fmt.global_op:
            return in_chunks(x, fmt, 64, partial(_encode, factor=np.float32(1), rule=rule))
        factors = np.empty(x.shape[:-2], np.float32)
        pieces = []
        for index in np.ndindex(factors.shape):
            factors[index] = factor = _factor(x[index])
            pieces.append(in_chunks(x[index], fmt, 64, partial(_encode, factor=factor, rule=rule)))
        parts = {p: np.stack([piece[p] for piece in pieces]).reshape(*x.shape[:-1], -1) for p in ("codes", "scales")}
        return {**parts, "global_scale": factors}


def _factor(matrix: NDArray[np.floating]) -> np.float32:
    """The factor of a matrix: a normal float32, 1 for one of zeros."""
    peak = float(np.abs(matrix.astype(np.float64)).max(initial=0))
    return np.float32(max(peak / _LARGEST, float(SMALLEST))) if peak else np.float32(1)


def _encode(x: F32, factor: np.float32, rule: str) -> dict[str, NDArray[Any]]:
    """Rows [rows, k] and the factor of their matrix -> codes and scale bytes."""
    groups = x.reshape(len(x), -1, 16)
    amax = np.abs(groups).max(axis=-1)
    if rule == "ggml":
        byte = _ggml_cast(amax / np.float32(6) / factor)
    else:
        # Signless, so 0x00 to 0x7E of E4M3: round_to_element saturates at 448. A byte of 0 would
        # lose the whole group.
        byte = np.maximum(round_to_element(amax.astype(np.float64) / 6 / np.float64(factor), "e4m3"), (amax > 0).astype(np.uint8))
    step = scale_table("ue4m3")[byte][..., None] * np.float64(factor)
    codes = round_to_element(safe_divide(groups.astype(np.float64), step), "e2m1", "zero" if rule == "ggml" else "even")
    codes[codes == 8] = 0  # ggml reads −0 as 0 and writes 0
    return {"codes": pack(codes.reshape(x.shape), 4), "scales": byte}


def _ggml_cast(x: F32) -> NDArray[np.uint8]:
    """float32 ≥ 0 -> UE4M3 as ggml_fp32_to_ue4m3 has it: three mantissa bits rounded by the fourth,
    248 and more are 448.
    """
    x = np.clip(x, 0, 448).astype(np.float32)
    mantissa, exponent = np.frexp(x)  # x = mantissa · 2^exponent, mantissa in [0.5, 1)
    biased = exponent + 6
    # 8 to 16 in float64, where adding one half is exact; 16 carries into the exponent by itself.
    eighths = np.floor(mantissa.astype(np.float64) * 16 + 0.5).astype(np.int32)
    normal = (biased << 3) + eighths - 8
    normal = np.where(normal >= 15 << 3, 0x7E, normal)
    below = np.minimum((x * 512 + np.float32(0.5)).astype(np.int32), 7)
    return np.where(x <= 0, 0, np.where(biased <= 0, below, normal)).astype(np.uint8)
