"""ggml types that are stored as the file's raw blocks and decoded by the gguf package: IQ1, IQ2,
IQ3 (codebooks) and TQ1, TQ2 (ternary).

One part, `blocks`, the bytes of the file. `gguf.quants` is imported at the first decoding. Its
float32 arithmetic is exact for these types: float16 scale times small integers times codebook
entries of at most 6 bits stays within 24 bits, and nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedError
from ...numerics.exact import Exact, bfloat16, dtype_named
from ...spec import Format
from ..base import Family, PartSpec
from ..decode import Parts
from .scale_search import SMALLEST, to_float16
from .types import GGML_BY_CODEC, check_blocks, require_fixed

_BITS = {"iq1_s": 1, "iq1_m": 1, "iq2_xxs": 2, "iq2_xs": 2, "iq2_s": 2, "iq3_xxs": 3, "iq3_s": 3, "tq1_0": 1, "tq2_0": 2}
"""Nominal bits of a code, as in the name. The exact size of a block is in `types.py`."""
_TERNARY = ("tq1_0", "tq2_0")


class GGMLRaw(Family):
    """IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, TQ1_0, TQ2_0."""

    name = "ggml_rare"
    codecs = tuple(_BITS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {"gguf": {}}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        return require_fixed(Format("ggml_rare", codec, _BITS[codec], "blocks", 256, "none"), group_size, options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        *lead, n, k = shape
        check_blocks(fmt.name, k, 256)
        specs = {"blocks": PartSpec((*lead, n, GGML_BY_CODEC[fmt.name].row_bytes(k)), np.dtype(np.uint8))}
        if fmt.global_op:
            specs["global_scale"] = PartSpec(tuple(lead), np.dtype(np.float32))
        return specs

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def decode(
        self, fmt: Format, shape: tuple[int, ...], parts: Parts, dtype: Any, window: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        """Exact values rounded once to `dtype`. Raises UnsupportedError without the gguf package."""
        value = dequantize_blocks(fmt.name, parts["blocks"])
        with np.errstate(all="ignore"):
            if not fmt.global_op:
                return value.astype(bfloat16 if dtype_named(dtype) == bfloat16 else dtype_named(dtype), copy=False)
            # 24 bits times 24: exact in float64, then one rounding.
            wide = value.astype(np.float64) * parts["global_scale"].astype(np.float64)[..., None, None]
            return Exact([wide]).round(dtype)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        """Ternary types: x / amax to −1, 0, 1, halves away from zero, by gguf.quants. The codebook
        types have no encoder.
        """
        if fmt.name not in _TERNARY:
            raise UnsupportedError(
                f"[quantize] {fmt.name} is decoded only: its codebooks need an importance matrix and a search; "
                "use q2_K, q3_K, iq4_nl or iq4_xs"
            )
        check_blocks(fmt.name, x.shape[-1], 256)
        x = x.astype(np.float32)
        peak = np.abs(x.reshape(*x.shape[:-1], -1, 256)).max(axis=-1)
        to_float16(peak, fmt)  # the scale is the block's largest magnitude
        # The reciprocal of a smaller float32 is infinite and would make NaN of the zeros beside it.
        x = np.where(np.repeat(peak < SMALLEST, 256, axis=-1), np.float32(0), x)
        quants, kind = _quants(fmt.name)
        return {"blocks": quants.quantize(x, kind)}


def dequantize_blocks(codec: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Block bytes [..., bytes] -> float32 [..., k], by gguf.quants.dequantize. Raises
    UnsupportedError without the package.
    """
    kind = GGML_BY_CODEC[codec]
    k = kind.elements(blocks.shape[-1])
    if not blocks.size:
        return np.zeros((*blocks.shape[:-1], k), np.float32)
    quants, number = _quants(codec)
    with np.errstate(all="ignore"):
        out: NDArray[np.float32] = quants.dequantize(np.ascontiguousarray(blocks), number)
    return out


def _quants(codec: str) -> tuple[Any, Any]:
    """The gguf.quants module and its number for `codec`. Raises UnsupportedError when it is
    missing, or too old for the type.
    """
    kind = GGML_BY_CODEC[codec]
    try:
        from gguf import GGMLQuantizationType, quants

        return quants, GGMLQuantizationType[kind.name]
    except ImportError:
        raise UnsupportedError(
            f"[dequantize] {kind.name} is decoded by the gguf package, which is not installed; pip install gguf"
        ) from None
    except KeyError:
        raise UnsupportedError(f"[dequantize] this gguf package does not know {kind.name}; pip install -U gguf") from None
