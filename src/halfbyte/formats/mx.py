"""OCP Microscaling: a block of 32 small elements and one power of two.

    value = element(code) · 2^(scale_byte − 127)

mxfp4 (E2M1), mxfp6_e2m3, mxfp6_e3m2, mxfp8_e4m3, mxfp8_e5m2 and mxint8 follow the OCP Microscaling
Formats (MX) specification 1.0. Blocks of 32 are the standard; 16 and 64 are non-standard variants,
chosen by the group size. mxint2 and mxint4 exist in microxcaling only.

Scale rules, with amax the block's largest magnitude, emax the element's largest exponent and M its
largest value:

| `scale` | exponent | used by |
|---|---|---|
| `floor` | floor(log2 amax) − emax | OCP, ggml, microxcaling, torchao FLOOR |
| `even` | `floor` of amax rounded to the element's mantissa width, ties up | compressed-tensors, torchao EVEN |
| `ceil` | ceil(log2(amax / M)) | MLX, ModelOpt, torchao RCEIL |
| `ceil_log2` | ceil(log2 amax) − emax | torchao CEIL |

Exponents are clipped to −127 … 127, so that no scale byte is 255 (NaN). Elements beyond M after
scaling saturate.

Codecs: `mxfp4`, `mxfp6_e2m3`, `mxfp6_e3m2`, `mxfp8_e4m3`, `mxfp8_e5m2`, `mxint8`, `mxint4`,
`mxint2`. No format options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..numerics.bits import pack
from ..numerics.minifloat import MINIFLOATS, TIES, ZEROS, e8m0_encode, element_table, round_to_element, sign_zeros
from ..spec import Format
from .base import Family, check_group, require_finite
from .options import only_options
from .rounding.grouping import grouped, ungrouped
from .rounding.policy import COMPUTE, float_info, one_of, policy_from, to_compute_dtype

_CODECS = {
    "mxfp4": ("e2m1", 4), "mxfp6_e2m3": ("e2m3", 6), "mxfp6_e3m2": ("e3m2", 6), "mxfp8_e4m3": ("e4m3", 8),
    "mxfp8_e5m2": ("e5m2", 8), "mxint8": ("mxint", 8), "mxint4": ("mxint", 4), "mxint2": ("mxint", 2),
}  # fmt: skip
SCALE_RULES = ("floor", "even", "ceil", "ceil_log2")
LEAST_ERROR = {w: "floor" if e == "mxint" else "ceil" if w == "mxfp8_e4m3" else "even" for w, (e, _) in _CODECS.items()}
"""Default rule of each codec: the rule of least squared error on real weights,
docs/formats/policies.md.
"""


@dataclass(frozen=True)
class MXPolicy:
    """How a block is rounded.

    scale       rule of the exponent, one of `SCALE_RULES`; `LEAST_ERROR` unless given
    even_bits   mantissa bits to which `even` rounds amax; None for the element's own
    ties        `minifloat.TIES`, halfway between two elements
    zeros       `minifloat.ZEROS`, sign of codes whose magnitude is 0
    zero_byte   scale byte of an all-zero block
    symmetric   MXINT saturates at ±(2^(bits−1) − 1), leaving its lowest code unused
    byte0       divisor of the elements of a block with scale byte 0 (whose value is 2^−127)
    compute     arithmetic of amax / M, its logarithm and the division by the scale, one of
                `policy.COMPUTE`
    """

    scale: str = "even"
    even_bits: int | None = None
    ties: str = "even"
    zeros: str = "keep"
    zero_byte: int = 0
    symmetric: bool = False
    byte0: float = 2.0**-127
    compute: str = "exact"

    def __post_init__(self) -> None:
        one_of("scale", self.scale, SCALE_RULES)
        one_of("ties", self.ties, TIES)
        one_of("zeros", self.zeros, ZEROS)
        one_of("compute", self.compute, COMPUTE)


class MX(Family):
    """MXFP4, MXFP6, MXFP8 and MXINT."""

    name = "mx"
    codecs = tuple(_CODECS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {
        "ocp": {"scale": "floor"},
        "gguf": {"scale": "floor", "ties": "zero", "zeros": "drop", "compute": "float32"},
        "microxcaling": {"scale": "floor", "ties": "away", "zeros": "value", "symmetric": True},
        "microxcaling-even": {"scale": "floor", "zeros": "value", "symmetric": True},
        "microxcaling-floor": {"scale": "floor", "ties": "truncate", "zeros": "value", "symmetric": True},
        "mlx": {"scale": "ceil", "ties": "zero", "zeros": "drop", "zero_byte": 127, "compute": "input"},
        "compressed-tensors": {"scale": "even", "even_bits": 1, "zeros": "value", "compute": "input"},
        "modelopt": {"scale": "ceil", "ties": "zero", "zeros": "negative", "compute": "float32"},
        "torchao": {"scale": "floor", "byte0": 2.0**-126},
        "torchao-even": {"scale": "even", "byte0": 2.0**-126},
        "torchao-ceil": {"scale": "ceil_log2", "byte0": 2.0**-126},
        "torchao-rceil": {"scale": "ceil", "byte0": 1.0, "compute": "float32"},
    }
    policy_codecs: ClassVar[dict[str, tuple[str, ...]]] = {
        "gguf": ("mxfp4",),
        "mlx": ("mxfp4", "mxfp8_e4m3"),
        "compressed-tensors": ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"),
        "modelopt": ("mxfp4", "mxfp8_e4m3"),
    } | {
        p: tuple(w for w in _CODECS if w.startswith("mxfp")) for p in ("torchao", "torchao-even", "torchao-ceil", "torchao-rceil")
    }
    exceptions: ClassVar[dict[tuple[str, str], dict[str, Any]]] = {
        ("compressed-tensors", "mxfp6_e2m3"): {"even_bits": 3, "zeros": "keep"},
        ("modelopt", "mxfp8_e4m3"): {"ties": "even", "zeros": "keep"},
        ("mlx", "mxfp8_e4m3"): {"ties": "even", "zeros": "keep"},
    }

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(codec, options, ())
        element, bits = _CODECS[codec]
        group = check_group(codec, 32 if group_size is None else group_size, (16, 32, 64))
        return Format("mx", codec, bits, element, group, "e8m0")

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        rule = policy_from(MXPolicy, fmt, {"scale": LEAST_ERROR[fmt.name]} | policy)
        blocks = to_compute_dtype(grouped(require_finite(x, fmt.name), fmt), rule.compute)
        exponent = block_exponents(np.abs(blocks).max(axis=-1), fmt, rule)
        with np.errstate(under="ignore"):
            scale = np.where(exponent == -127, rule.byte0, np.ldexp(1.0, exponent)).astype(blocks.dtype)
        # A producer that computes in float16 gets 0 for a power of two below float16's range, and
        # stores 1.
        exponent, scale = np.where(scale == 0, 0, exponent), np.where(scale == 0, blocks.dtype.type(1), scale)
        codes = round_elements(blocks / scale[..., None], fmt, rule)
        return {"codes": pack(ungrouped(codes, fmt, x.shape), fmt.bits), "scales": e8m0_encode(exponent)}


def block_exponents(amax: NDArray[Any], fmt: Format, rule: MXPolicy) -> NDArray[np.int64]:
    """Unbiased exponents of the block scales, clipped to −127 … 127, by the rules of the module's
    table.
    """
    table = element_table(fmt.element, fmt.bits)
    largest = float(np.nanmax(np.where(np.isinf(table), np.nan, table)))
    emax = int(np.frexp(largest)[1]) - 1
    mantissa, power = np.frexp(amax.astype(np.float64))  # amax = mantissa · 2^power, mantissa in [1/2, 1)
    empty = amax == 0
    if rule.scale == "ceil":
        exponent, empty = _ceil_log2_ratio(amax, largest, rule.compute)
    elif rule.scale == "ceil_log2":
        exponent = power - 1 + (mantissa > 0.5) - emax
    elif rule.scale == "floor" and rule.compute == "float32":
        # The float32 logarithm of a number a few ulp below a power of two rounds up to an integer,
        # so its floor is 1 too large.
        with np.errstate(divide="ignore"):
            exponent = np.floor(np.log2(amax.astype(np.float32))).astype(np.float64) - emax
    else:
        exponent = power - 1 - emax
        if rule.scale == "even":
            own = MINIFLOATS[fmt.element].mantissa_bits if fmt.element in MINIFLOATS else fmt.bits - 2
            bits = own if rule.even_bits is None else rule.even_bits
            # Rounded to 1 + bits binary digits, ties up, amax reaches the next power of two.
            exponent = exponent + (mantissa >= 1 - 2.0 ** -(bits + 2))
            if rule.compute == "input":
                # The producer rounds the bits of the number, which takes a subnormal to the
                # smallest normal number or to 0.
                tiny = float(float_info(amax.dtype).smallest_normal)
                up = amax >= tiny * (1 - 2.0 ** -(bits + 1))
                exponent = np.where((amax < tiny) & up, np.log2(tiny) - emax, exponent)
                empty = (amax < tiny) & ~up
    clipped: NDArray[np.int64] = np.clip(np.where(empty, rule.zero_byte - 127, exponent), -127, 127).astype(np.int64)
    return clipped


def _ceil_log2_ratio(amax: NDArray[Any], largest: float, compute: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """(ceil(log2(amax / largest)), where the ratio is 0). Exact, or with the ratio rounded to the
    dtype `compute` and its logarithm to float32.
    """
    if compute == "exact":
        # Least e with amax ≤ largest · 2^e, by comparison of mantissas.
        (m, p), (lm, lp) = np.frexp(amax.astype(np.float64)), np.frexp(largest)
        return p - lp + (m > lm), amax == 0
    a = to_compute_dtype(amax, compute)
    ratio = a / a.dtype.type(largest)
    with np.errstate(divide="ignore"):
        return np.ceil(np.log2(ratio.astype(np.float32))).astype(np.float64), ratio == 0


def round_elements(scaled: NDArray[Any], fmt: Format, rule: MXPolicy) -> NDArray[np.uint8]:
    """Scaled values to codes: a minifloat by `round_to_element`, MXINT by `round_integers`, both
    saturating.
    """
    if fmt.element in MINIFLOATS:
        return sign_zeros(round_to_element(scaled, fmt.element, rule.ties), scaled, fmt.element, rule.zeros)
    steps = scaled.astype(np.float64) * (1 << (fmt.bits - 2))
    top = (1 << (fmt.bits - 1)) - 1
    whole = np.clip(round_integers(steps, rule.ties), -top if rule.symmetric else -top - 1, top)
    codes: NDArray[np.uint8] = (whole.astype(np.int64) & ((1 << fmt.bits) - 1)).astype(np.uint8)
    return codes


def round_integers(x: NDArray[np.float64], ties: str) -> NDArray[np.float64]:
    """Nearest integers with a rule of `minifloat.TIES`."""
    magnitude = np.abs(x)
    if ties == "away":
        whole = np.floor(magnitude + 0.5)
    elif ties == "zero":
        whole = np.ceil(magnitude - 0.5)
    else:
        whole = np.rint(magnitude) if ties == "even" else np.floor(magnitude)
    out: NDArray[np.float64] = np.copysign(whole, x)
    return out
