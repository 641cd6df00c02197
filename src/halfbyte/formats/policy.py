"""How a family rounds: the options of its `encode`, as a frozen dataclass whose field names are the words users write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..spec import Format

P = TypeVar("P")

COMPUTE = ("exact", "float32", "input")
"""Arithmetic of an encoder: exact (float64), float32, or the dtype of the weight, rounding after every operation."""


def policy_from(cls: type[P], fmt: Format, options: Mapping[str, Any]) -> P:
    """`cls(**options)`; FormatError naming the options there are when one is unknown."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise FormatError(f"[quantize] {fmt.name} with option {', '.join(unknown)}; allowed: {', '.join(names)}")
    return cls(**options)


def one_of(option: str, given: Any, allowed: Sequence[Any]) -> None:
    """FormatError unless `given` is one of the allowed values of an option."""
    if given not in allowed:
        raise FormatError(f"[quantize] {option}={given!r}; allowed: {', '.join(map(repr, allowed))}")


def computing(x: NDArray[Any], compute: str) -> NDArray[Any]:
    """`x` in the dtype an encoder computes in."""
    return x if compute == "input" else x.astype(np.float64 if compute == "exact" else np.float32)
