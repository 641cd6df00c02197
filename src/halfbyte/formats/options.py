"""Checks of the options that refine a codec (`scale_dtype`, `rows`, `grouping`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import FormatError
from ..spec import FLOAT_SCALES, Format


def only_options(codec: str, options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """FormatError with the options that `codec` does not take."""
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise FormatError(f"[format] {codec} with option {', '.join(unknown)}; allowed: {', '.join(allowed) or 'none'}")


def scale_dtype_option(codec: str, options: Mapping[str, Any], default: str) -> str:
    """The dtype of float group scales, by name."""
    given = options.get("scale_dtype", default)
    if given not in FLOAT_SCALES:
        raise FormatError(f"[format] {codec} with scale_dtype {given!r}; allowed: {', '.join(FLOAT_SCALES)}")
    return str(given)


def rows_option(codec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Format` whose scales cover `rows` rows: {} without the option."""
    rows = options.get("rows")
    if rows is None:
        return {}
    if isinstance(rows, bool) or not isinstance(rows, int) or (rows != -1 and not 1 <= rows < 1 << 31):
        raise FormatError(f"[format] {codec} with rows {rows!r}; allowed: 1 to 2^31 - 1, or -1 for all rows of a matrix")
    return {"grouping": "block", "group_rows": rows}


def grouping_option(codec: str, options: Mapping[str, Any], allowed: Sequence[str]) -> str:
    """The grouping of elements, the first of `allowed` unless given."""
    given = options.get("grouping", allowed[0])
    if given not in allowed:
        raise FormatError(f"[format] {codec} with grouping {given!r}; allowed: {', '.join(allowed)}")
    return str(given)


def fit_flat(fmt: Format, shape: Sequence[int]) -> Format:
    """The canonical spelling of groups over a flattened tensor: `row` when k is whole groups,
    `flat` otherwise.
    """
    if fmt.grouping not in ("row", "flat") or fmt.group_size == -1 or math.prod(shape) == 0:
        return fmt
    return fmt.with_(grouping="flat" if shape[-1] % fmt.group_size else "row")
