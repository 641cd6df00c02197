"""NVFP4: blocks of 16 E2M1 elements, an E4M3 scale a block, and one float32 for the tensor.

| `global_scale` | value | used by |
|---|---|---|
| `multiply` (default) | e2m1(code) · e4m3(scale_byte) · global | ModelOpt, torchao |
| `divide` | e2m1(code) · e4m3(scale_byte) / global | compressed-tensors |
| `amax` | e2m1(code) · e4m3(scale_byte) · global / 2688 | MLX, which stores the tensor's largest magnitude |
| `none` | e2m1(code) · e4m3(scale_byte) | MLX and torchao without a tensor scale |

2688 = 6 · 448, the largest element times the largest scale. Block scales are signed E4M3 (0x7F and
0xFF are NaN); GGUF reads the same byte without its sign: that is the codec `nvfp4_ue4m3`
(`ggml/fp4.py`).

Decoding is in `decode.py`, as for every format with one scale a block. The scale rule: block scale
s = amax / 6 / tensor scale, rounded to the nearest E4M3 value between a floor and 448; elements
divided by the product of both scales are rounded to E2M1. Where each operation rounds, the result
depends on the order (x an element, s its block scale, g the tensor's factor, h = 1 / g; the stored
number is g, h or 2688 · g):

| `order` | block scale | element | used by |
|---|---|---|---|
| `joint` | amax / (6 · g) | x / (s · g) | ModelOpt; the default, computed exactly |
| `reciprocal` | (amax / 6) / g | x · ((1 / g) / s) | torchao |
| `inverse` | (amax / 6) · h | x / (s / h) | compressed-tensors, which stores h |
| `stepwise` | (amax / 6) · h | (x / s) · h | MLX, which stores 2688 · g |

No NaN byte is ever written: an all-zero block has the scale `zero_scale`, an all-zero tensor the
tensor scale 1.

Codecs: `nvfp4`. Group 16. Format option: `global_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..numerics.bits import pack
from ..numerics.minifloat import TIES, ZEROS, element_table, round_to_element, sign_zeros
from ..spec import Format
from .base import Family, check_group, require_finite
from .options import only_options
from .rounding.grouping import grouped, row_blocks, ungrouped
from .rounding.policy import COMPUTE, float_info, one_of, policy_from, to_compute_dtype

GLOBAL_SCALES: dict[str, tuple[str, float]] = {
    "multiply": ("multiply", 1.0), "divide": ("divide", 1.0), "amax": ("multiply", 2688.0), "none": ("", 1.0),
}  # fmt: skip
"""Option `global_scale` -> (Format.global_op, Format.divisor)."""
ORDERS = ("joint", "reciprocal", "inverse", "stepwise")


@dataclass(frozen=True)
class NVFP4Policy:
    """How a tensor is rounded.

    compute      arithmetic: "exact", "float32", or "input", where amax / 6, the tensor scale and
                 the first step of "stepwise" are in the weight's dtype and the rest is float32
    order        order of the operations, one of `ORDERS`
    scale_floor  smallest block scale, as an E4M3 value
    zero_scale   block scale where the rounded amax / 6 is 0
    ties, zeros  rounding of the elements, see `minifloat`
    """

    compute: str = "exact"
    order: str = "joint"
    scale_floor: float = 2.0**-9
    zero_scale: float = 0.0
    ties: str = "even"
    zeros: str = "keep"

    def __post_init__(self) -> None:
        one_of("compute", self.compute, COMPUTE)
        one_of("order", self.order, ORDERS)
        one_of("ties", self.ties, TIES)
        one_of("zeros", self.zeros, ZEROS)


class NVFP4(Family):
    """NVFP4 with one or two levels of scale."""

    name = "nvfp4"
    codecs = ("nvfp4",)
    format_options = ("global_scale",)
    policies: ClassVar[dict[str, dict[str, Any]]] = {
        "modelopt": {"compute": "float32", "zero_scale": 1.0, "zeros": "value"},
        "compressed-tensors": {
            "global_scale": "divide",
            "compute": "input",
            "order": "inverse",
            "scale_floor": 0.0,
            "zero_scale": 0.125,
            "zeros": "value",
        },
        "torchao": {"compute": "float32", "order": "reciprocal", "scale_floor": 2.0**-6, "zero_scale": 2.0**-6},
        "torchao-one-level": {
            "global_scale": "none",
            "compute": "float32",
            "order": "reciprocal",
            "scale_floor": 2.0**-6,
            "zero_scale": 2.0**-6,
        },
        "mlx": {
            "global_scale": "none",
            "compute": "input",
            "order": "stepwise",
            "scale_floor": 0.0,
            "ties": "zero",
            "zeros": "drop",
        },
        "mlx-global": {
            "global_scale": "amax",
            "compute": "input",
            "order": "stepwise",
            "scale_floor": 0.0,
            "ties": "zero",
            "zeros": "drop",
        },
    }

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(codec, options, self.format_options)
        kind = options.get("global_scale", "multiply")
        if kind not in GLOBAL_SCALES:
            raise FormatError(f"[format] {codec} with global_scale {kind!r}; allowed: {', '.join(GLOBAL_SCALES)}")
        group = check_group(codec, 16 if group_size is None else group_size, (16,))
        op, divisor = GLOBAL_SCALES[kind]
        return Format("nvfp4", codec, 4, "e2m1", group, "e4m3", global_op=op, divisor=divisor)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        rule = policy_from(NVFP4Policy, fmt, policy)
        blocks = grouped(require_finite(x, fmt.name), fmt)
        amax = to_compute_dtype(np.abs(blocks).max(axis=-1), rule.compute)
        stored = tensor_scale(amax.max(axis=(-2, -1)), fmt)
        g = stored.astype(_arithmetic(rule))[..., None, None]
        codes, scales = np.empty(blocks.shape, np.uint8), np.empty(amax.shape, np.uint8)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
            for rows in row_blocks(*x.shape[-2:]):
                part = blocks[..., rows, :, :]
                scales[..., rows, :], scaled = block_scale(part, amax[..., rows, :], g, fmt, rule)
                nearest = sign_zeros(round_to_element(scaled, "e2m1", rule.ties), part, "e2m1", rule.zeros)
                # A zero scale, which only a policy without a floor writes, gives codes of 0 where
                # the division gives NaN or infinity.
                codes[..., rows, :, :] = np.where(scales[..., rows, :, None] == 0, np.uint8(0), nearest)
        parts = {"codes": pack(ungrouped(codes, fmt, x.shape), 4), "scales": scales}
        return parts | ({"global_scale": stored} if fmt.global_op else {})


def _arithmetic(rule: NVFP4Policy) -> np.dtype[Any]:
    """dtype of all operations after amax / 6."""
    return np.dtype(np.float64 if rule.compute == "exact" else np.float32)


def tensor_scale(amax: NDArray[Any], fmt: Format) -> NDArray[np.float32]:
    """float32 tensor scales for largest magnitudes [*lead], computed in their dtype; never 0 or
    infinite.

    1 for a tensor of zeros and for a format of one level.
    """
    one = np.float32(1)
    if not fmt.global_op:
        return np.ones(amax.shape, np.float32)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        if fmt.global_op == "divide":
            tiny = float_info(amax.dtype).tiny
            # Two roundings, as PyTorch divides a number by a tensor.
            inverse = (amax.dtype.type(1) / np.maximum(amax, tiny) * amax.dtype.type(2688)).astype(np.float32)
            return np.where(np.isfinite(inverse), inverse, one)
        stored = amax.astype(np.float32) if fmt.divisor != 1.0 else (amax / amax.dtype.type(2688)).astype(np.float32)
    return np.where(amax == 0, one, np.maximum(stored, np.finfo(np.float32).smallest_subnormal))


def block_scale(
    blocks: NDArray[Any], amax: NDArray[Any], g: NDArray[Any], fmt: Format, rule: NVFP4Policy
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """E4M3 bytes of the block scales and the elements over both scales. g [*lead, 1, 1] is the
    stored tensor scale.
    """
    dtype = g.dtype
    x = blocks.astype(dtype)
    sixth = (amax / amax.dtype.type(6)).astype(dtype)
    factor, inverse = _global_factors(g, fmt)
    raw = {
        "joint": lambda: amax.astype(dtype) / (dtype.type(6) * factor),
        "reciprocal": lambda: sixth / factor,
        "inverse": lambda: sixth * inverse,
        "stepwise": lambda: sixth * inverse,
    }[rule.order]()
    # Nearest E4M3 value; `round_to_element` saturates at 448 as the producers clamp.
    scales = round_to_element(np.maximum(raw, rule.scale_floor), "e4m3")
    zero = round_to_element(np.asarray(rule.zero_scale), "e4m3")
    scales = np.where((raw == 0) | (scales == 0), zero, scales)
    s = element_table("e4m3", 8).astype(dtype)[scales][..., None]
    factor, inverse = factor[..., None], inverse[..., None]
    over_block_scale = blocks / s.astype(blocks.dtype) if rule.compute == "input" else x / s
    scaled = {
        "joint": lambda: x / (s * factor),
        "reciprocal": lambda: x * ((1 / factor) / s),
        "inverse": lambda: x / (s / inverse),
        "stepwise": lambda: over_block_scale.astype(dtype) * inverse,
    }[rule.order]()
    return scales, scaled


def _global_factors(stored: NDArray[Any], fmt: Format) -> tuple[NDArray[Any], NDArray[Any]]:
    """The factor by which the tensor scale multiplies values, and its inverse, in the dtype of
    `stored`, each at most one division away from the stored number.
    """
    one, divisor, info = stored.dtype.type(1), stored.dtype.type(fmt.divisor), np.finfo(stored.dtype)
    if fmt.global_op == "divide":
        return np.maximum(one / stored, info.smallest_subnormal), stored
    factor = stored if fmt.divisor == 1.0 else np.maximum(stored / divisor, info.smallest_subnormal)
    return factor, np.minimum(divisor / stored, info.max)
