"""Random canonical tensors of any format, and random foreign bytes: every bit pattern a file can
hold, NaN and negative scales among them.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from halfbyte.formats import Format, family_of
from halfbyte.layouts import Layout
from halfbyte.numerics.bits import pack
from halfbyte.spec import SMALL_SCALES
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_tensors
from support.layout_tensors import headers


def random_array(rng: np.random.Generator, dtype, *shape: int) -> np.ndarray:
    """Random bit patterns of `dtype`."""
    dt = np.dtype(dtype)
    raw = rng.integers(0, 256, math.prod(shape) * dt.itemsize, dtype=np.uint8)
    return raw.view(dt).reshape(shape)


def random_tensor(fmt: Format, shape: tuple[int, ...], seed: int, origin: str = "", details: dict | None = None) -> QTensor:
    """A tensor of `fmt` (fitted to the shape) with random bits in every part; zero points within
    the codes, padding bits zero.
    """
    rng = np.random.default_rng(seed)
    family = family_of(fmt)
    fmt = family.fit(fmt, shape)
    parts = {}
    for part, spec in family.geometry(fmt, shape).items():
        if part == "codes":
            parts[part] = pack(rng.integers(0, 1 << fmt.bits, shape, dtype=np.uint8), fmt.bits)
        elif part == "zeros" and fmt.zero == "int":
            parts[part] = rng.integers(0, 1 << fmt.bits, spec.shape).astype(np.int16)
        elif (kind := {"scales": fmt.scale, "mins": fmt.minimum}.get(part)) in SMALL_SCALES:
            low, high = SMALL_SCALES[kind]
            parts[part] = rng.integers(low, high + 1, spec.shape).astype(spec.dtype)
        else:
            parts[part] = random_array(rng, spec.dtype, *spec.shape)
    return QTensor(fmt, shape, parts, origin=origin, details=details)


def finite_tensor(fmt: Format, shape: tuple[int, ...], seed: int, origin: str = "") -> QTensor:
    """The same with ordinary numbers for scales, so that values can be compared."""
    q = random_tensor(fmt, shape, seed, origin)
    rng = np.random.default_rng(seed + 1)
    parts = dict(q.parts)
    for part, a in parts.items():
        if a.dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
            parts[part] = np.asarray(rng.uniform(0.01, 1, a.shape)).astype(a.dtype)
        elif part == "scales" and fmt.scale in ("e8m0", "e4m3"):
            parts[part] = rng.integers(48, 126, a.shape).astype(np.uint8)
    return QTensor(q.format, shape, parts, origin=origin)


def check_round_trip(layout: Layout, tensors: dict[str, np.ndarray], config: dict) -> QTensor:
    """pack(unpack(t)) == t, headers describe the same, and padding bits of the canonical codes are
    zero.
    """
    q = layout.unpack(tensors, config, "m")
    q.validate("m")
    written = layout.pack(q, config)
    assert same_tensors(written, tensors), {s: (t.dtype, t.shape) for s, t in written.items()}
    assert layout.describe(headers(tensors, layout.peek), config, "m") == (q.format, q.shape)
    return q


def check_return(layout: Layout, q: QTensor) -> dict[str, np.ndarray]:
    """unpack(pack(q)) == q with the config the layout itself names; the tensors it wrote."""
    config = layout.config(q)
    tensors = layout.pack(q, config)
    assert layout.matches(tensors)
    assert set(layout.claims(tensors)) == set(tensors)
    back = layout.unpack(tensors, config, "m")
    assert back == q, (back, q)
    return tensors
