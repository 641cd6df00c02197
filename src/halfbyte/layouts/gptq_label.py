"""Does a GPTQ file's label fit its bits? v1 stores the zero point minus 1, v2 the zero point, and the label lies at times.

A symmetric file has the middle zero point everywhere: 7 stored at 4 bits under v1, 8 under v2. The other number under a label
says that the label is the other version's, and every weight is off by one step. Under v1 a stored 2^bits − 1 stands for a zero
point that v1 has no code for: AutoGPTQ wrote ones over the higher fields of the same word, and its readers disagree about the
field itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .base import Config
from .gptq import codes_of_planes, variant
from .words import fields_of_words


class Suspicion(NamedTuple):
    """A word for what looks wrong, and a sentence with the numbers."""

    code: str
    message: str


def suspicions(qzeros: NDArray[np.int32], n: int, bits: int, config: Config) -> list[Suspicion]:
    """What the packed zero points [G, n·bits/32] of one module say against its config. Empty when nothing does."""
    how = variant(config, bits)
    stored = codes_of_planes(qzeros, bits)[:, :n] if how.planar else fields_of_words(qzeros, bits, n)[0]
    if not stored.size:
        return []
    found: list[Suspicion] = []
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    label, other, usual, swapped = ("v1", "v2", middle - 1, middle) if how.version == 1 else ("v2", "v1", middle, middle - 1)
    if config.get("sym") is True and (stored == swapped).all():
        message = (
            f"labelled {label} and symmetric, but every stored zero point is {swapped}, as {other} has it; {label} would store {usual}. "
            "If the label lies, every weight is one step off"
        )
        found.append(Suspicion("gptq-label", message))
    elif config.get("sym") is True and (stored != usual).any():
        count = int((stored != usual).sum())
        found.append(Suspicion("gptq-symmetric", f"labelled symmetric, but {count} stored zero points are not {usual}"))
    if how.version == 1 and not how.wordwise and (stored == top).any():
        count = int((stored == top).sum())
        found.append(
            Suspicion(
                "gptq-zero-point",
                f"{count} stored zero points are {top}, which v1 has no zero point for: read as {top + 1}, by some readers as 0. "
                "Its writer may have damaged the other zero points of the same word",
            )
        )
    return found
