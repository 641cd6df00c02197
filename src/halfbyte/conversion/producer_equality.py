"""Edges that are equal in the target's arithmetic: its decoder returns the source's value rounded
once.

The reciprocal of a float32 tensor scale is rarely a float32, but the decoders that multiply by it
work in bfloat16, where the products can still be equal. Every code under every scale byte that
occurs is compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.bits import pack
from ..numerics.row_slices import row_slices
from ..spec import Format
from ..tensor.qtensor import QTensor
from .codebook_edges import factor_of, scale_bytes
from .outcome import Checks, MisfitError
from .regroup import Regrouping

NATIVE = {
    "compressed-tensors": "bfloat16",
    "mlx": "bfloat16",
    "modelopt": "bfloat16",
    "gguf": "float32",
    "autogptq": "float16",
    "gptqmodel": "float16",
    "autoawq": "float16",
}
"""Producer -> dtype in which its decoder runs."""
NEIGHBOURS = (0, 1, -1, 2, -2, 3, -3)
"""Units in the last place tried around the rounded tensor scale, nearest first."""

STEP = 1 << 20
"""Elements decoded at a time."""
_PROBE = 64
"""Inputs of a probe: every code, in a row that all block sizes divide."""


def equal_tensor_scale(q: QTensor, fmt: Format, origin: str, checks: Checks) -> dict[str, NDArray[Any]]:
    """Parts of a two-level `fmt` whose stored tensor scale is a rounded one. MisfitError when
    decoded products differ.
    """
    if not (q.format.global_op and fmt.global_op) or q.format.element != fmt.element or origin not in NATIVE:
        raise MisfitError("there is no tensor scale to round")
    groups = Regrouping(q, fmt)
    stored = groups.take(q.parts["scales"], "scales", checks)
    if fmt.scale == "ue4m3" and (stored & 0x80).any():
        raise MisfitError("block scales are negative")
    scales = scale_bytes(stored, q.format.scale, fmt.scale, checks)
    up, down = factor_of(q)
    lead = q.shape[:-2]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        wanted = np.asarray(down / up if fmt.global_op == "divide" else up * fmt.divisor / down, np.float32)
    if not np.isfinite(wanted).all() or (wanted == 0).any():
        raise MisfitError("the reciprocal of its tensor scale is beyond float32")
    chosen = np.empty(lead, np.float32)
    for at in np.ndindex(lead):
        source = q.parts["global_scale"][at]
        there = np.unique(scales[at])
        chosen[at] = _neighbour(q, fmt, origin, there, np.asarray(source, np.float32), np.float32(wanted[at]))
    return {"codes": q.parts["codes"], "scales": scales, "global_scale": chosen}


def _neighbour(
    q: QTensor, fmt: Format, origin: str, there: NDArray[np.uint8], source: NDArray[np.float32], wanted: np.float32
) -> np.float32:
    """The float32 nearest to `wanted` under which every code times every scale byte decodes as the
    source does.
    """
    want = _probe(q.format, there, source, q.origin).dequantize(NATIVE[origin])
    bits = np.asarray(wanted, np.float32).view(np.int32)
    for step in NEIGHBOURS:
        g = (bits + np.int32(step)).view(np.float32)
        got = _probe(fmt, there, np.asarray(g), origin).dequantize(NATIVE[origin], "producer")
        if np.array_equal(got, want, equal_nan=True):
            return np.float32(g)
    raise MisfitError(f"the tensor scale rounds, and {NATIVE[origin]} products differ")


def _probe(fmt: Format, there: NDArray[np.uint8], factor: NDArray[np.float32], origin: str) -> QTensor:
    """Every code under each scale byte: [bytes, 64]."""
    codes = np.resize(np.arange(1 << fmt.bits, dtype=np.uint8), (there.size, _PROBE))
    scales = np.repeat(there[:, None], _PROBE // fmt.group_size, axis=1)
    parts: dict[str, NDArray[Any]] = {"codes": pack(codes, fmt.bits), "scales": scales, "global_scale": factor.reshape(())}
    return QTensor(fmt, codes.shape, parts, origin=origin)


def check_equal(source: QTensor, target: QTensor, checks: Checks) -> None:
    """MisfitError unless every value of `target`, decoded by its own producer, is the source's
    value rounded once.
    """
    dtype = NATIVE.get(target.origin)
    if dtype is None:
        raise MisfitError(f"{target.origin or 'the target'} has no decoder here")
    for a, b in _matrices(source, target):
        for rows in row_slices(a.shape, STEP):
            x = a.rows(rows.start, rows.stop).dequantize(dtype)
            y = b.rows(rows.start, rows.stop).dequantize(dtype, "producer")
            if not np.array_equal(x, y, equal_nan=True):
                raise MisfitError(f"biases round, and {dtype} values differ")
    checks.add(f"every value decodes to the same {dtype}")


def _matrices(a: QTensor, b: QTensor) -> list[tuple[QTensor, QTensor]]:
    return [(a, b)] if a.ndim == 2 else [(a[e], b[e]) for e in range(a.shape[0])]
