"""GPTQModel's gpt-oss, whose `gate_proj` and `up_proj` are not the rows that their names say.

The rows of gpt-oss's `gate_up_proj` alternate between gate and up: g₀ u₀ g₁ u₁ …. GPTQModel splits
that matrix in the middle and calls the halves `gate_proj` and `up_proj`; in other checkpoints
gate_proj is g₀ g₁ …. Whole rows move, so codes keep every bit:

    stored   gate_proj = rows 0 … f − 1        up_proj = rows f … 2f − 1        of g₀ u₀ g₁ u₁ …
    read     gate_proj = rows 0, 2, 4, …       up_proj = rows 1, 3, 5, …
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, ShapeError
from ...tensor.concat import concat_rows, take_rows
from ...tensor.qtensor import QTensor
from ..base import Checkpoint
from .base import View

_HALF = re.compile(r"(?P<path>.*\.experts(?:\.\d+)?)\.(?P<name>gate|up)_proj(?P<leaf>\.weight|\.bias|_bias|)")
_OTHER = {"gate": "up", "up": "gate"}


def has_split_gate_up(config: Mapping[str, Any]) -> bool:
    """True for a gpt-oss that GPTQModel wrote: its `gate_proj` is the first half of the alternating
    rows of `gate_up_proj`, and its forward joins the halves before it takes every second row.
    """
    if str(config.get("model_type", "")).replace("-", "_") != "gpt_oss":
        return False
    stated = config.get("quantization_config")
    meta = stated.get("meta") if isinstance(stated, Mapping) else None
    made_by = meta.get("quantizer") or () if isinstance(meta, Mapping) else ()
    return "gptqmodel" in str(made_by).lower()


def rows_by_name(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint`, or a view of it in which `gate_proj` holds the rows of gate and `up_proj` those
    of up.
    """
    return AlternatingRows(checkpoint) if has_split_gate_up(checkpoint.config) else checkpoint


class AlternatingRows(View):
    """`source`, whose experts' `gate_proj` and `up_proj` are halves of alternating rows, with the
    rows sorted into gate and up.

    `meta`, which names the writer and so the order of rows, is removed from the configuration.
    Raises CheckpointError when a half has no counterpart, or one that it cannot be joined with.
    """

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        stated: Mapping[str, Any] = source.config.get("quantization_config") or {}
        self.config = {**source.config, "quantization_config": {k: v for k, v in stated.items() if k != "meta"}}

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        halves = self._halves(key)
        if halves is None:
            return self.source[key]
        gate, up = (self.source[k] for k in halves)
        where = f"[open] {self.path}: {halves[0]} and {halves[1]} are halves of one matrix"
        first = 0 if key == halves[0] else 1
        if isinstance(gate, QTensor) and isinstance(up, QTensor):
            try:
                whole = concat_rows([gate, up])
                return take_rows(whole, np.arange(first, whole.shape[-2], 2))
            except ShapeError as error:
                raise CheckpointError(f"{where}: {error}") from error
        if isinstance(gate, QTensor) or isinstance(up, QTensor) or gate.shape != up.shape:
            raise CheckpointError(f"{where}, and differ in shape or kind")
        axis = -1 if key.endswith("bias") else -2
        rows = np.concatenate([gate, up], axis=axis)
        return np.ascontiguousarray(rows[..., first::2] if axis == -1 else rows[..., first::2, :])

    def _halves(self, key: str) -> tuple[str, str] | None:
        """The keys of both halves, gate's first; None for other tensors."""
        match = _HALF.fullmatch(key)
        if match is None:
            return None
        other = f"{match['path']}.{_OTHER[match['name']]}_proj{match['leaf']}"
        if other not in self.source:
            raise CheckpointError(f"[open] {self.path}: {key} is half of a matrix, and the other half, {other}, is not there")
        return (key, other) if match["name"] == "gate" else (other, key)

    def fetch(self, key: str) -> None:
        for half in self._halves(key) or (key,):
            self.source.fetch(half)
