"""Random packed weights for benchmarks: every bit of the codes is random, scales are of ordinary
size, no weight is zero and no two are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import family_of, format_named
from ..spec import Format
from ..tensor.qtensor import QTensor


def random_weight(codec: str | Format, n: int, k: int, seed: int) -> QTensor:
    """A packed (n, k) weight of random bits. E8M0 scales are near 2^−9, E4M3 near 1, float scales
    near 0.01.
    """
    rng = np.random.default_rng(seed)
    fmt = format_named(codec)
    parts: dict[str, Any] = {}
    for name, (shape, dtype) in family_of(fmt).geometry(fmt, (n, k)).items():
        if name == "codes":
            parts[name] = rng.integers(0, 256, shape, dtype=np.uint8)
        elif name == "zeros" and dtype.kind == "i":
            parts[name] = rng.integers(0, 1 << fmt.bits, shape).astype(dtype)
        elif name == "scales" and fmt.scale == "e8m0":
            parts[name] = rng.integers(115, 122, shape, dtype=np.uint8)
        elif name == "scales" and fmt.scale in ("e4m3", "ue4m3"):
            parts[name] = rng.integers(0x28, 0x50, shape, dtype=np.uint8)
        elif dtype.kind in "iu":
            parts[name] = rng.integers(1, 16, shape).astype(dtype)
        else:
            parts[name] = (rng.standard_normal(shape) * 0.01 + 0.02).astype(dtype)
    return QTensor(fmt, (n, k), parts)
