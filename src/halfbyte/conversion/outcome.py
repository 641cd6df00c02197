"""The outcome of converting one weight: the kind of edge, and why.

| kind | the converted weight |
|---|---|
| `exact` | has the same real values, for any bits |
| `exact-if` | has the same real values, by a condition that was checked on these bits |
| `equal` | decodes, in the target's own arithmetic, to the source's value rounded once; its real values differ |
| `lossy` | has other values: the least-error requantization |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from ..errors import HalfbyteError
from ..numerics.error_stats import ErrorStats
from ..spec import Format
from ..tensor.qtensor import QTensor

KINDS = ("exact", "exact-if", "equal", "lossy")
"""Best first."""


class MisfitError(Exception):
    """Why a target format cannot hold a tensor exactly: one clause, read after "because"."""


class LossyError(HalfbyteError, ValueError):
    """An exact conversion was asked for and there is none.

    losses   (key, reason, relative RMS error) of each tensor that was tried
    instead  a target that keeps all of them exactly, "" where none of the layout is known to
    """

    def __init__(self, message: str, losses: list[tuple[str, str, float]], instead: str = "") -> None:
        super().__init__(message)
        self.losses = losses
        self.instead = instead


@dataclass(frozen=True)
class Outcome:
    """One converted weight.

    weight   the tensor in its new format
    tensors  what its layout writes, by suffix, and `config`: the parameters they were written with
    kind     one of `KINDS`
    why      what was checked, or what was lost, as a clause; "" for an unconditional edge
    error    statistics of a lossy conversion, None when nothing is lost
    instead  for a lossy outcome, targets of the same layout that would be exact
    """

    weight: QTensor
    tensors: Mapping[str, NDArray[Any]]
    config: Mapping[str, Any]
    kind: str
    why: str = ""
    error: ErrorStats | None = None
    instead: tuple[str, ...] = ()


@dataclass
class Checks:
    """Conditions that were checked and are true, in order; with any, an edge is `exact-if` instead
    of `exact`. `rewritten`: what was done that every weight of the format allows.
    """

    met: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)

    def add(self, clause: str) -> None:
        """Note a condition that is true."""
        if clause not in self.met:
            self.met.append(clause)

    @property
    def kind(self) -> str:
        return "exact-if" if self.met else "exact"

    @property
    def why(self) -> str:
        return ", ".join([*self.rewritten, *self.met])


def spelled(fmt: Format) -> str:
    """A format as a target's codec: `int4:g128`, scales named where they are not float16."""
    extra = f" with {fmt.scale} scales" if fmt.float_scale and fmt.scale != "float16" else ""
    return f"{fmt}{extra}"
