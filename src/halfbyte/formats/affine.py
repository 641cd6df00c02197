"""MLX affine: an unsigned code, a scale and a bias a group, both in one float dtype.

    value = code · scale + bias

Scale rules, over a group's least and greatest element and N bits:

| `scale` | scale, bias | used by |
|---|---|---|
| `minmax` | (max − min) / (2^N − 1), min | the default from 4 bits on; MLX with 1 bit |
| `edge` | the end farther from zero is the bias; the scale, negative for a positive end, makes 0 a code | see below |

`edge` is the default to 3 bits, and MLX's rule from 2 bits on.

Codes are round((x − bias) / scale), half to even, clipped, with the stored scale and bias; MLX
rounds before it stores them.

Codecs: `affine1` … `affine6`, `affine8`. Any group size, −1 for the whole row (MLX itself has 32,
64 and 128); 64 unless given. Format option: `scale_dtype` (float16), the dtype of scales and
biases. Where a file's two dtypes differ, `one_dtype` widens both without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..numerics.bits import pack
from ..numerics.exact import bfloat16
from ..spec import Format
from .base import Family, check_group, require_finite
from .options import only_options, scale_dtype_option
from .rounding.grouping import grouped, ungrouped
from .rounding.policy import COMPUTE, one_of, policy_from, ratio, to_compute_dtype, to_scale_dtype
from .rounding.ranges import edge_scale

_BITS = (1, 2, 3, 4, 5, 6, 8)
SCALE_RULES = ("minmax", "edge")


@dataclass(frozen=True)
class AffinePolicy:
    """How a group is rounded.

    scale        "minmax" or "edge"
    compute      arithmetic, "exact" or "float32"
    scale_floor  smallest magnitude of a scale
    codes        "stored": from the scale and bias as they are stored; "unrounded": from those
                 before rounding to their dtype
    """

    scale: str = "minmax"
    compute: str = "exact"
    scale_floor: float = 0.0
    codes: str = "stored"

    def __post_init__(self) -> None:
        one_of("scale", self.scale, SCALE_RULES)
        one_of("compute", self.compute, COMPUTE[:2])
        one_of("codes", self.codes, ("stored", "unrounded"))


class Affine(Family):
    """MLX affine, 1 to 6 and 8 bits."""

    name = "affine"
    codecs = tuple(f"affine{b}" for b in _BITS)
    format_options = ("scale_dtype",)
    policies: ClassVar[dict[str, dict[str, Any]]] = {
        "mlx": {"scale_dtype": "input", "scale": "edge", "compute": "float32", "scale_floor": 1e-7, "codes": "unrounded"},
    }
    exceptions: ClassVar[dict[tuple[str, str], dict[str, Any]]] = {("mlx", "affine1"): {"scale": "minmax"}}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(codec, options, self.format_options)
        group = check_group(codec, 64 if group_size is None else group_size)
        return Format("affine", codec, int(codec[6:]), "uint", group, scale_dtype_option(codec, options, "float16"), bias=True)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        rule = policy_from(AffinePolicy, fmt, {"scale": "edge" if fmt.bits <= 3 else "minmax"} | policy)
        values = to_compute_dtype(grouped(require_finite(x, fmt.name), fmt), rule.compute)
        steps = (1 << fmt.bits) - 1
        scale, bias = scale_and_bias(values, steps, rule)
        stored, biases = to_scale_dtype(scale, fmt), to_scale_dtype(bias, fmt, "bias")
        if rule.codes == "stored":
            scale, bias = stored.astype(values.dtype), biases.astype(values.dtype)
        whole = np.clip(np.rint(ratio(values - bias[..., None], scale[..., None])), 0, steps)
        codes = whole.astype(np.uint8)
        return {"codes": pack(ungrouped(codes, fmt, x.shape), fmt.bits), "scales": stored, "biases": biases}


def scale_and_bias(values: NDArray[Any], steps: int, rule: AffinePolicy) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scale and bias of groups [*groups, g], unrounded, in the dtype of the values."""
    low, high = values.min(axis=-1), values.max(axis=-1)
    if rule.scale == "minmax":
        return np.maximum((high - low) / low.dtype.type(steps), low.dtype.type(rule.scale_floor)), low
    scale, edge, _ = edge_scale(low, high, steps, rule.scale_floor)
    return scale, edge


def one_dtype(scales: NDArray[Any], biases: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scales and biases in one dtype that holds both exactly: their own when equal, else float32.

    Raises FormatError for a dtype other than float16, bfloat16 or float32.
    """
    for label, a in (("scales", scales), ("biases", biases)):
        if a.dtype not in (np.dtype(np.float16), np.dtype(np.float32), bfloat16):
            raise FormatError(f"[affine] {label} are {a.dtype}; allowed: float16, bfloat16, float32")
    if scales.dtype == biases.dtype:
        return scales, biases
    return scales.astype(np.float32), biases.astype(np.float32)
