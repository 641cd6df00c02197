"""Weights, words and questions shared by the tests of encoders."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from halfbyte import format_named
from halfbyte.formats import codec_names, family_of
from halfbyte.numerics.bits import unpack
from halfbyte.numerics.minifloat import scale_table

BF16 = np.dtype(ml_dtypes.bfloat16)
DECODED_ONLY = ("iq1", "iq2", "iq3")
ENCODED = [w for w in codec_names() if not w.startswith(DECODED_ONLY)]
OWN = [w for w in ENCODED if not family_of(format_named(w)).name.startswith("ggml")]
WIDE = {"scale_dtype": "float32"}


def wide(word: str) -> dict[str, str]:
    """Options that give float scales the range of float32."""
    return WIDE if "scale_dtype" in family_of(format_named(word)).format_options and word != "bnb_int8" else {}


def gaussian(shape, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.02).astype(np.float32).astype(dtype)


def codes_of(q) -> np.ndarray:
    return unpack(q.parts["codes"], q.format.bits, q.shape[-1])


def step(word: str) -> float:
    """Largest relative error of a value at the end of its group's range, with room for a rounded
    scale.
    """
    bits = format_named(word).bits
    if word == "mxint2":
        return 0.5
    return {1: 1.01, 2: 0.4, 3: 0.2}.get(bits, 0.13)


def no_nan_scale(q) -> bool:
    """Whether every stored scale is a finite number."""
    if q.format.scale in ("e8m0", "e4m3", "ue4m3"):
        return bool(np.isfinite(scale_table(q.format.scale)[q.parts["scales"]]).all())
    floats = [a for a in q.parts.values() if a.dtype.kind == "f" or a.dtype == BF16]
    return all(bool(np.isfinite(a.astype(np.float64)).all()) for a in floats)
