"""Experts under mlx-lm's names: the matrices of one projection as a stack.

    …mlp.experts.0.gate_proj, …experts.1.gate_proj, …   ->  …mlp.switch_mlp.gate_proj (e, n, k)
    …block_sparse_moe.experts.0.w1, …                   ->  …block_sparse_moe.switch_mlp.gate_proj
    …mlp.experts.0.gate_proj, … of gpt-oss              ->  …mlp.experts.gate_proj
    …feed_forward.w1 of LFM2                            ->  …feed_forward.gate_proj

Codes and scales are placed one after another; no bit changes. Experts that differ in format or
shape, and those whose groups run over the flattened matrix, stay single.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, ShapeError
from ...tensor.concat import stack
from ...tensor.qtensor import QTensor
from .. import expert_names
from ..base import Checkpoint, TensorInfo
from ..mlx_names import mlx_name, stack_module
from .base import View


class MLXExperts(View):
    """`source` with its experts stacked. Raises CheckpointError for matrices that each have an
    order of inputs of their own (act-order).
    """

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        stacks = _stacks(source)
        stack_of = {key: name for name, keys in stacks.items() for key in keys}
        kind = str(source.config.get("model_type"))
        names = dict.fromkeys(stack_of.get(key, key) for key in source)
        self._sources = {mlx_name(kind, name): stacks.get(name, (name,)) for name in names}

    def keys(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def __contains__(self, key: object) -> bool:
        return key in self._sources or key in self.source

    def info(self, key: str) -> TensorInfo:
        names = self._sources.get(key, (key,))
        infos = [self.source.info(name) for name in names]
        if len(infos) == 1:
            return replace(infos[0], key=key)
        files = tuple(dict.fromkeys(file for info in infos for file in info.files))
        shape = (len(infos), *infos[0].shape)
        return replace(infos[0], key=key, shape=shape, nbytes=sum(info.nbytes for info in infos), files=files)

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        names = self._sources.get(key, (key,))
        if len(names) == 1:
            return self.source[names[0]]
        weights = [self.source[name] for name in names]
        packed = [w for w in weights if isinstance(w, QTensor)]
        if not packed:
            return np.stack([w for w in weights if not isinstance(w, QTensor)])
        try:
            return stack(packed)
        except ShapeError as error:
            raise CheckpointError(f"[open] {self.path}: {names[0]} to {names[-1]} make no stack: {error}") from error

    def fetch(self, key: str) -> None:
        for name in self._sources.get(key, (key,)):
            self.source.fetch(name)


def _stacks(source: Checkpoint) -> Mapping[str, tuple[str, ...]]:
    """Name of a stack -> the keys of its matrices, in the order of the experts."""
    found: dict[str, dict[int, TensorInfo]] = {}
    module = stack_module(str(source.config.get("model_type")))
    for info in source.infos():
        name = expert_names.parse(info.key)
        if name is not None and name.expert is not None:
            leaf = f".{name.leaf}" if name.leaf else ""
            parent = name.module.removesuffix(".experts")
            found.setdefault(f"{parent}.{module}.{name.projection}{leaf}", {})[name.expert] = info
    return {
        name: tuple(experts[e].key for e in range(len(experts)))
        for name, experts in found.items()
        if len(experts) > 1 and set(experts) == set(range(len(experts))) and _one_kind(list(experts.values()))
    }


def _one_kind(infos: list[TensorInfo]) -> bool:
    """True where the matrices can be stacked, as far as headers say."""
    first = infos[0]
    if any(
        (i.kind, i.format, i.shape, i.dtype, i.layout) != (first.kind, first.format, first.shape, first.dtype, first.layout)
        for i in infos
    ):
        return False
    fmt = first.format
    return not first.quantized or (fmt is not None and fmt.grouping == "row" and fmt.scale != "nested" and not fmt.composite)
