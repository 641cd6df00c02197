"""The stored matrices of a config's transforms (`ConfigReader.transforms`), and the weights that
they belong to.

A matrix is tensor `MODULE.GROUP_SIDE.weight`. Modules of one group share a matrix of one size, and
a file then has it under one of their names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedError, plural
from ...layouts.base import Described
from ...layouts.quant_config.reader import ConfigReader, Transform
from ...tensor.qtensor import QTensor
from ..ledger import AUXILIARY, CLAIMED, UNKNOWN, Entry
from .detect import Reading
from .shards import Shards

ROTATIONS = ("q_attn", "k_cache")


class Transforms:
    """Matrices by group, side and module.

    tensors  names of all of them: they are no keys of the checkpoint
    """

    def __init__(self, shards: Shards, scheme: ConfigReader | None, modules: Mapping[str, Any], keys: Iterable[str]) -> None:
        self.shards, self.scheme, self.modules = shards, scheme, modules
        self.tensors: list[str] = []
        self._found: dict[tuple[str, str, str], dict[str, str]] = {}
        groups = scheme.transform_groups if scheme is not None else ()
        self._problems: list[Entry] = []
        if not groups:
            return
        assert scheme is not None
        word = "|".join(re.escape(g) for g in groups)
        pattern = re.compile(rf"(.+)\.({word})_(input|output|q_attn|k_cache)\.(weight|perm)")
        for key in keys:
            if match := pattern.fullmatch(key):
                module, group, side, leaf = match.groups()
                self._found.setdefault((module, group, side), {})[leaf] = key
                self.tensors.append(key)
            elif key.endswith(".weight") and scheme.transforms(key.removesuffix(".weight")) and len(shards.header(key).shape) > 1:
                why = (
                    "config.json multiplies its inputs or outputs by a matrix, and it is dense; packed weights are read with one"
                )
                self._problems.append(Entry("tensor", key, UNKNOWN, why=why))

    def of(self, key: str) -> tuple[Transform, ...]:
        """The transforms of a packed weight."""
        return self.scheme.transforms(key) if self.scheme is not None else ()

    def read(self, key: str, reading: Reading) -> Reading:
        """The reading of a packed weight, its format with the transforms. CheckpointError or
        UnsupportedError where they cannot be applied.
        """
        transforms = self.of(key)
        if not transforms:
            return reading
        fmt, shape = reading.described
        if len(shape) != 2 or fmt.extra or len({t.side for t in transforms}) < len(transforms):
            sides = ", ".join(f"{t.group}_{t.side}" for t in transforms)
            raise UnsupportedError(f"[open] {key}: {fmt} {list(shape)} under transforms {sides}; read: a matrix, one a side")
        for t in transforms:
            self._tensors(key, t, shape)
            if t.side == "output" and f"{key}.bias" in self.shards:
                raise UnsupportedError(
                    f"[open] {key}: its output is multiplied by {t.group}_output, its bias {key}.bias with it; read: layers "
                    "without a bias"
                )
        return replace(reading, described=Described(fmt.with_(extra="transform"), shape))

    def _tensors(self, key: str, t: Transform, shape: tuple[int, ...]) -> dict[str, str]:
        """Names of the matrix and of its order: the weight's own, else the one that it shares.
        CheckpointError without them.
        """
        size = t.size or shape[1 if t.side == "input" else 0]
        wanted = {"weight", *(("perm",) if t.permuted else ())}
        own = self._found.get((key, t.group, t.side))
        if own is not None and set(own) >= wanted:
            header = self.shards.header(own["weight"])
            if header.shape != (size, size):
                raise CheckpointError(
                    f"[open] tensor {own['weight']!r} is {list(header.shape)}; wanted [{size}, {size}] for {key}"
                )
            return own
        shared = [
            names
            for (module, group, side), names in self._found.items()
            if group == t.group and set(names) >= wanted and self._shares(module, side, t)
            if self.shards.header(names["weight"]).shape == (size, size)
        ]
        # A shared matrix is stored once; where modules have their own, none is shared.
        if len(shared) == 1:
            return shared.pop()
        raise CheckpointError(
            f"[open] {key}: config.json multiplies its {t.side} by a matrix of group {t.group!r}; tensor "
            f"{key}.{t.group}_{t.side}.weight, or one of [{size}, {size}] that it shares, is missing"
            + (f"; {plural(len(shared), 'module')} with one of its own" if shared else "")
        )

    def _shares(self, module: str, side: str, t: Transform) -> bool:
        """True for a stored matrix of the same kind: an inverse is no matrix of the group's own."""
        return any((o.group, o.side, o.inverse) == (t.group, side, t.inverse) for o in self.of(module))

    def applied(self, key: str, q: QTensor) -> QTensor:
        """The weight with its transforms as parts."""
        transforms = self.of(key)
        if not transforms:
            return q
        parts: dict[str, NDArray[Any]] = dict(q.parts)
        norms = [1, 1]
        for t in transforms:
            names = self._tensors(key, t, q.shape)
            matrix = self.shards.array(names["weight"])
            if t.permuted:
                order = self.shards.array(names["perm"])
                if order.dtype.kind not in "iu" or not np.array_equal(np.sort(order), np.arange(len(matrix))):
                    raise CheckpointError(
                        f"[open] tensor {names['perm']!r} is no order of {plural(len(matrix), 'row')}; "
                        f"allowed: each of 0 to {len(matrix) - 1} once"
                    )
                matrix = matrix[order][:, order]
            if t.hadamard and not bool((np.abs(matrix.astype(np.float64)) == 1).all()):
                raise CheckpointError(
                    f"[open] tensor {names['weight']!r} has values besides 1 and -1; a Hadamard matrix has none"
                )
            parts[f"{t.side}_transform"] = np.ascontiguousarray(matrix.T) if t.transposed else matrix
            norms[t.side == "output"] = len(matrix) if t.hadamard else 1
        parts["transform_norms"] = np.array(norms, np.int32)
        return QTensor(q.format.with_(extra="transform"), q.shape, parts, details=q.details, name=key)

    def entries(self) -> Iterator[Entry]:
        """Entries of the matrices, and of what config.json transforms and no packed weight is."""
        yield from self._problems
        for (module, group, side), names in self._found.items():
            for tensor in names.values():
                if side in ROTATIONS:
                    why = "an orthogonal matrix on queries and keys, which cancels in attention"
                    yield Entry("tensor", tensor, AUXILIARY, module, why=why)
                elif any((t.group, t.side) == (group, side) for t in self.of(module)) and module in self.modules:
                    yield Entry("tensor", tensor, CLAIMED, module, f"{side}_transform")
                else:
                    yield Entry("tensor", tensor, UNKNOWN, module, why=f"a transform that config.json does not apply to {module}")
