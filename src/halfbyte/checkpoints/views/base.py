"""A checkpoint that wraps another one and passes on whatever a subclass does not override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ...tensor.qtensor import QTensor
from ..base import Checkpoint, TensorInfo
from ..findings import Finding
from ..ledger import Ledger


class View(Checkpoint):
    """`source` unchanged. Subclasses rename keys, reorder rows or transpose axes; closing a view
    closes its source.
    """

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.path, self.format, self.config = source.path, source.format, source.config
        self.allowed = source.allowed

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.source.metadata

    def keys(self) -> tuple[str, ...]:
        return self.source.keys()

    def __contains__(self, key: object) -> bool:
        return key in self.source

    def info(self, key: str) -> TensorInfo:
        return self.source.info(key)

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        return self.source[key]

    def fetch(self, key: str) -> None:
        self.source.fetch(key)

    def ledger(self) -> Ledger:
        return self.source.ledger()

    def header_findings(self) -> list[Finding]:
        return self.source.header_findings()

    def close(self) -> None:
        self.source.close()
