"""An ONNX model as a checkpoint: keys of packed weights are the names of their codes without
endings such as `_Q4`, other keys are names of initializers.

Only the operators of `weights.BLOCKED` are read as weights. Codes that another operator reads
(QLinearMatMul, QMoE, ...), or whose scales the graph computes, are unknown to the ledger. Integers
of 16 to 64 bits that no quantized operator reads are shapes and indices of the graph: they have no
key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, HalfbyteError, plural
from ...tensor.qtensor import QTensor
from ..base import Checkpoint, TensorInfo
from ..findings import Finding, problem_findings
from ..findings.overflow import warn_of_overflow
from ..io.bounded_json import read_json
from ..ledger import AUXILIARY, CLAIMED, DENSE, MISSING, UNKNOWN, UNREADABLE, Entry, Ledger
from .graph import Model, attributes, operator
from .weights import BLOCKED, Reader, Weight, computed, key_of, parts_of

WHOLE = ("BOOL", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64")
"""Data types of shapes, indices and masks."""
CODES = ("UINT8", "INT8", "UINT4", "INT4", "UINT2", "INT2", "FLOAT4E2M1")


class ONNXCheckpoint(Checkpoint):
    """An opened ONNX model."""

    format = "onnx"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = Model(path)
        self._reader = Reader(self.model)
        beside = path.parent / "config.json"
        self.config: dict[str, Any] = read_json(beside) if beside.is_file() else {}
        self._weights: dict[str, Weight] = {}
        self._biases: dict[str, Weight] = {}
        self._claimed: dict[str, tuple[str, str]] = {}
        self._unread: dict[str, str] = dict(self.model.refused)
        for node in self.model.nodes:
            if operator(node) in BLOCKED:
                self._add(node)
        dense = (n for n, t in self.model.tensors.items() if n not in self._claimed and t.kind not in (*CODES, *WHOLE))
        self._dense = dict.fromkeys(dense)
        if twice := next((name for name in self._dense if name in self._weights or name in self._biases), None):
            raise CheckpointError(
                f"[onnx] {path}: {twice!r} is an initializer and the key of a packed weight; allowed: one of both"
            )

    def _add(self, node: Any) -> None:
        """The weight that a quantized node reads, if it reads constant codes."""
        parts = parts_of(node, self.model)
        if parts is None:
            return
        codes = parts["codes"]
        if missing := computed(parts, self.model):
            self._unread[codes] = f"its {missing} are computed by the graph ({parts[missing]}), not constants"
            return
        integers = operator(node) == "DequantizeLinear" and self.model.tensors[codes].kind == "INT32"
        found = self._biases if integers else self._weights
        if any(w.parts == parts and w.kind == operator(node) and attributes(w.node) == attributes(node) for w in found.values()):
            return  # the same weight, read by a second node
        key = key_of(codes)
        if key in found or (key in self.model.tensors and key != codes):
            key = codes if codes not in found else f"{codes}#{node.name or node.output[0]}"
        if key in found:
            raise CheckpointError(
                f"[onnx] {self.path}: two nodes read {codes!r} with other scales and have one name, "
                f"{node.name!r}; allowed: a name each"
            )
        found[key] = Weight(key, node, parts)
        for part, name in parts.items():
            self._claimed.setdefault(name, (key, part))

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.model.metadata)

    def keys(self) -> tuple[str, ...]:
        return (*self._weights, *self._biases, *self._dense)

    def __contains__(self, key: object) -> bool:
        return key in self._weights or key in self._biases or key in self._dense

    def info(self, key: str) -> TensorInfo:
        tensors = self.model.tensors
        if (weight := self._weights.get(key) or self._biases.get(key)) is not None:
            parts = [tensors[n] for n in weight.parts.values()]
            files = tuple(dict.fromkeys(t.file.name for t in parts))
            nbytes = sum(t.nbytes for t in parts)
            if key in self._biases:
                return TensorInfo(key, "dense", "", None, parts[0].shape, parts[1].dtype.name, nbytes, files)
            word = parts[0].kind.lower()
            try:
                described = self._reader.describe(self._weights[key])
            except HalfbyteError:  # header_findings says why
                return TensorInfo(key, "quantized", "onnx", None, parts[0].shape, word, nbytes, files)
            return TensorInfo(key, "quantized", "onnx", described.format, described.shape, word, nbytes, files)
        if key not in self._dense:
            raise self.missing(key)
        t = tensors[key]
        return TensorInfo(key, "dense", "", None, t.shape, t.dtype.name, t.nbytes, (t.file.name,))

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        if key in self._biases:
            return self._bias(self._biases[key])
        if key in self._weights:
            weight = self._reader.unpack(self._weights[key])
            warn_of_overflow(weight, key)
            return weight
        if key not in self._dense:
            raise self.missing(key)
        return self.model.array(key)

    def _bias(self, weight: Weight) -> NDArray[Any]:
        """A bias in 32-bit integers: (q − zero) · scale, rounded once to the scale's dtype."""
        parts = {part: self.model.array(name) for part, name in weight.parts.items()}
        values = parts["codes"].astype(np.float64)
        if "zeros" in parts:
            values = values - parts["zeros"].astype(np.float64)
        if parts["scales"].size not in (1, values.shape[-1] if values.ndim else 1):
            raise CheckpointError(
                f"[onnx] {self.path}: {weight.key!r} has {parts['scales'].size} scales for "
                f"{list(values.shape)} values; allowed: one, or one a row"
            )
        scales = parts["scales"]
        return np.asarray((values * scales.astype(np.float64)).astype(scales.dtype)).reshape(parts["codes"].shape)

    def ledger(self) -> Ledger:
        entries: list[Entry] = []
        for name, tensor in self.model.tensors.items():
            if name in self._claimed:
                key, part = self._claimed[name]
                status, why = CLAIMED, ""
                if key in self._weights and (why := self._problem(key)):
                    status = UNREADABLE
                entries.append(Entry("tensor", name, status, key, part, why))
            elif name in self._unread or tensor.kind in CODES or tensor.kind.startswith("FLOAT8"):
                readers = ", ".join(sorted({operator(n) for n, _ in self.model.readers.get(name, [])})) or "no node"
                why = self._unread.get(name) or f"{tensor.kind} {list(tensor.shape)}, which {readers} reads"
                entries.append(Entry("tensor", name, UNKNOWN, why=why))
            elif tensor.kind in WHOLE:
                entries.append(Entry("tensor", name, AUXILIARY, why="a shape, an index or a mask of the graph"))
            else:
                entries.append(Entry("tensor", name, DENSE))
        entries += [Entry("tensor", n, UNKNOWN, why=why) for n, why in self.model.refused.items()]
        for name, node in self.model.undefined.items():
            why = f"{operator(node)} {node.name or node.output[0]!r} reads it, and nothing in the graph gives it"
            entries.append(Entry("tensor", name, MISSING, why=why))
        return Ledger(tuple(entries), "an ONNX graph names its own initializers")

    def _problem(self, key: str) -> str:
        """Why a packed weight cannot be read, "" where it can."""
        try:
            self._reader.describe(self._weights[key])
        except HalfbyteError as error:
            return str(error)
        return ""

    def check(self, op: str) -> None:
        super().check(op)
        if bad := [(k, why) for k in self._weights if (why := self._problem(k))]:
            raise CheckpointError(f"[{op}] {self.path}: {plural(len(bad), 'unreadable weight')}, first {bad[0][0]}: {bad[0][1]}")

    def header_findings(self) -> list[Finding]:
        found = [Finding("error", "unread-weight", k, why) for k in self._weights if (why := self._problem(k))]
        return [*found, *problem_findings(self.ledger(), self.allowed)]

    def close(self) -> None:
        self.model.close()
