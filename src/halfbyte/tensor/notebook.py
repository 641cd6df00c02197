"""How a packed weight shows itself in a notebook: its facts and a histogram of its codes, as
self-contained HTML.

The histogram counts at most `SAMPLED` codes, of rows at even distances, so its cost does not grow
with the tensor.
"""

from __future__ import annotations

from html import escape

import numpy as np
from numpy.typing import NDArray

from ..numerics.bits import unpack
from ..numerics.minifloat import element_table
from ..spec import EncodedTensor

SAMPLED = 1 << 16
"""Codes counted at most."""
_WIDTH, _HEIGHT, _BARS = 256, 64, 64


def sample_codes(q: EncodedTensor, limit: int = SAMPLED) -> NDArray[np.uint8]:
    """At most `limit` codes of a tensor, uint8 [rows, columns]: the first columns of rows at even
    distances.

    A tensor of raw blocks (`Format.opaque`), or without elements, gives no rows.
    """
    packed = q.parts.get("codes")
    k = q.shape[-1]
    if packed is None or packed.size == 0:
        return np.empty((0, k), np.uint8)
    columns = k if k <= limit else limit // 8 * 8
    total = int(np.prod(packed.shape[:-1]))
    rows = np.linspace(0, total - 1, min(total, max(1, limit // columns))).astype(np.int64)
    sampled = packed[np.unravel_index(rows, packed.shape[:-1])][:, : q.format.row_bytes(columns)]
    return unpack(sampled, q.format.bits, columns)


def html(q: EncodedTensor, facts: dict[str, str]) -> str:
    """`facts` as a table, then the histogram of the codes as an inline SVG; no script, style sheet
    or link.
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    codes = sample_codes(q)
    if codes.size == 0:
        return f"<div><table>{rows}</table></div>"
    counts = np.bincount(codes.reshape(-1), minlength=1 << q.format.bits)
    share = "all" if codes.size == np.prod(q.shape) else f"{codes.size:,} of {np.prod(q.shape):,}"
    caption = f"histogram of {share} codes, {q.format.element}: bar heights are counts, code 0 at the left"
    return f"<div><table>{rows}</table>{_bars(counts, q)}<div>{escape(caption)}</div></div>"


def _bars(counts: NDArray[np.int64], q: EncodedTensor) -> str:
    """One bar a code, or a bar for several neighbours where there are more than 64 codes."""
    bars = min(len(counts), _BARS)
    heights = counts.reshape(bars, -1).sum(axis=1)
    first = len(counts) // bars
    values = element_table(q.format.element, q.format.bits)
    width, tallest = _WIDTH / bars, max(int(heights.max()), 1)
    shapes = []
    for i, count in enumerate(heights.tolist()):
        height = _HEIGHT * count / tallest
        codes = f"code {i * first}" if first == 1 else f"codes {i * first} to {(i + 1) * first - 1}"
        value = f", value {values[i]:g}" if first == 1 else ""
        shapes.append(
            f'<rect x="{i * width:g}" y="{_HEIGHT - height:.4g}" width="{width * 0.9:.4g}" height="{height:.4g}">'
            f"<title>{codes}{value}: {count:,}</title></rect>"
        )
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" fill="#4878a8">{"".join(shapes)}</svg>'
