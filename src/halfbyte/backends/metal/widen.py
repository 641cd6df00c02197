"""Formats of two levels of scale, or of float zero points, as the one level the kernels read; no
bit is lost.

    q · s · S − m · M  =  q · (s S) + (−m M)          ggml's K-quants: small integers times half precision
    (q − z) · s        =  q · s + (−z s)              HQQ, scale and zero point of half precision or bfloat16

Each product in brackets has at most 22 significant bits and stands exactly in float32; the kernels'
fma adds the two terms with one rounding. It costs bytes: 4 a group and term, so that Q4_K takes 6.0
bits a weight on the device instead of 4.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import BackendError
from ...spec import Format
from ...tensor.qtensor import QTensor

F32 = NDArray[np.float32]


def widens(fmt: Format) -> bool:
    """True for formats that `one_level` rewrites."""
    return bool(fmt.super_size) or fmt.zero == "float"


def one_level_format(fmt: Format) -> Format:
    """The format of the rewritten parts."""
    plain = fmt.with_(scale="float32", super_size=0, minimum="", zero="none")
    return plain.with_(bias=bool(fmt.minimum) or fmt.zero == "float")


def one_level(q: QTensor) -> tuple[F32, F32 | None]:
    """Scales and biases [*lead, n, G] in float32.

    Raises BackendError for a float zero point beside a scale that is no number: (0 − z) ∞ is not 0
    ∞ − z ∞.
    """
    fmt, parts = q.format, q.parts
    with np.errstate(over="ignore", invalid="ignore"):
        if fmt.zero == "float":
            scales = parts["scales"].astype(np.float32)
            if not np.isfinite(scales).all():
                raise BackendError(f"[metal] {fmt.name} with scales that are infinite or NaN; the Metal kernels take finite ones")
            return scales, -(parts["zeros"].astype(np.float32) * scales)
        scales = parts["scales"].astype(np.float32) * _each_group(fmt, parts["super_scales"])
        if not fmt.minimum:
            return scales, None
        return scales, -(parts["mins"].astype(np.float32) * _each_group(fmt, parts["super_mins"]))


def _each_group(fmt: Format, a: NDArray[Any]) -> F32:
    return np.repeat(a.astype(np.float32), fmt.super_size // fmt.group_size, axis=-1)
