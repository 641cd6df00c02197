"""The canonical parts of a packed weight: the inverse of `pack.pack_weight`, byte for byte.

Format and shape determine which parts there are and their dtypes, so nothing but the packed weight
is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats import family_of
from ...formats.base import PartSpec
from ...spec import Format
from .pack import PackedWeight, from_lanes

_TILED = ("scales", "zeros", "biases")
"""Parts that `pack_weight` repeats for every row of a tile."""


def canonical_parts(packed: PackedWeight, fmt: Format, shape: tuple[int, int]) -> dict[str, NDArray[Any]]:
    """Parts of one (n, k) matrix."""
    n, _ = shape
    specs = family_of(fmt).geometry(fmt, shape)
    parts = {name: _part(packed, fmt, n, name, spec) for name, spec in specs.items()}
    if "group_index" in packed.arrays:
        parts["group_index"] = packed.arrays["group_index"].copy()
    return parts


def _part(packed: PackedWeight, fmt: Format, n: int, name: str, spec: PartSpec) -> NDArray[Any]:
    if name == "global_scale":
        return np.asarray(packed.fields["global_scale"], spec.dtype)
    if name == "nested_offset":
        return np.asarray(packed.fields["nested_offset"], spec.dtype).reshape(spec.shape)
    if not packed.fields["panel_order"]:
        native = "float_zeros" if name == "zeros" and fmt.zero == "float" else name
        return packed.arrays[native].view(spec.dtype).reshape(spec.shape).copy()
    if name == "codes":
        from ... import _native

        codes = np.empty(spec.shape, spec.dtype)
        _native.unpack(packed.native, codes)
        return codes
    rows = from_lanes(packed.arrays[name], n)
    if name == "zeros":
        rows = rows + rows.dtype.type(packed.fields["offset"])
    if fmt.grouping == "block" and name in _TILED:
        rows = rows[:: max(n if fmt.group_rows == -1 else fmt.group_rows, 1)]
    return np.ascontiguousarray(rows).view(spec.dtype)
