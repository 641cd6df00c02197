"""gpt-oss's dense experts with outputs first: transformers stores (experts, k, rows), packed
layouts (experts, rows, k).

    mlp.experts.gate_up_proj [e, k, 2·f]   is read as   mlp.experts.gate_up_proj.weight [e, 2·f, k]

The rows still alternate, gate, up, gate, up, as in the packed checkpoints.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.views.base import View
from ..errors import plural
from ..layouts import LAYOUTS
from ..tensor.qtensor import QTensor
from .recipe import DTYPES, Recipe
from .unit import is_gpt_oss

STACK = re.compile(r".*\.experts\.(gate_up_proj|down_proj|fc[12]\.weight)")
HOLDERS = tuple(name for name, layout in LAYOUTS.items() if layout.stacks_only or layout.container == "halfbyte")
"""Layouts whose loaders read such a stack."""


class TransposedExperts(View):
    """`source` with its dense stacks of experts transposed to outputs first and named as weights."""

    def __init__(self, source: Checkpoint, keys: list[str]) -> None:
        super().__init__(source)
        self._of = {f"{key}.weight": key for key in keys}
        self._name = {key: name for name, key in self._of.items()}

    def keys(self) -> tuple[str, ...]:
        return tuple(self._name.get(key, key) for key in self.source.keys())  # noqa: SIM118 a checkpoint's keys are in file order

    def info(self, key: str) -> TensorInfo:
        if key not in self._of:
            return self.source.info(key)
        info = self.source.info(self._of[key])
        e, k, rows = info.shape
        return replace(info, key=key, shape=(e, rows, k))

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        if key not in self._of:
            return self.source[key]
        stack = self.source[self._of[key]]
        assert not isinstance(stack, QTensor)
        transposed: NDArray[Any] = stack.swapaxes(1, 2)
        return transposed

    def __contains__(self, key: object) -> bool:
        return key in self._of or (key in self.source and key not in self._name)

    def fetch(self, key: str) -> None:
        self.source.fetch(self._of.get(key, key))


def stacks_of(checkpoint: Checkpoint) -> list[str]:
    """Dense stacks of experts that transformers stores as parameters, not as weights of modules."""
    return [
        i.key
        for i in checkpoint.infos()
        if STACK.fullmatch(i.key) and not i.quantized and len(i.shape) == 3 and i.dtype in DTYPES
    ]


def with_transposed_experts(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint with the stacks that the recipe rounds transposed, where the target layout
    stores stacks.
    """
    if reason_kept_dense(checkpoint, recipe):
        return checkpoint
    keys = [key for key in stacks_of(checkpoint) if recipe.of(key, 3) is not None]
    return TransposedExperts(checkpoint, keys) if keys else checkpoint


def reason_kept_dense(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """A sentence that says why stacks stay dense, "" when none do."""
    keys = stacks_of(checkpoint)
    if not keys or (is_gpt_oss(checkpoint) and recipe.goal.layout in HOLDERS):
        return ""
    why = (
        f"{recipe.goal.layout} stores no stacks of gpt-oss; {' and '.join(HOLDERS)} do"
        if is_gpt_oss(checkpoint)
        else "which of their axes are inputs is known of gpt-oss's only"
    )
    return f"kept dense: {plural(len(keys), 'stack')} of experts ({keys[0]}{', ...' if len(keys) > 1 else ''}): {why}"
