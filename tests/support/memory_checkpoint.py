"""A checkpoint that lives in memory, for tests of what is done with checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from halfbyte import QTensor, format_named
from halfbyte.checkpoints import Checkpoint, Finding, TensorInfo
from halfbyte.formats import family_of
from halfbyte.numerics.bits import pack


class MemoryCheckpoint(Checkpoint):
    """Keys to QTensors and arrays, with any configuration, metadata and findings."""

    def __init__(
        self,
        tensors: dict[str, Any],
        *,
        format: str = "dense",
        config: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        findings: tuple[Finding, ...] = (),
        layout: str = "memory",
        path: str = "memory",
    ) -> None:
        self.path = Path(path)
        self.format = format
        self.config = config or {}
        self.tensors = tensors
        self._metadata = metadata or {}
        self._findings = findings
        self.layout = layout

    @property
    def metadata(self) -> dict[str, Any]:
        return self._metadata

    def keys(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def info(self, key: str) -> TensorInfo:
        if key not in self.tensors:
            raise self.missing(key)
        t = self.tensors[key]
        if isinstance(t, QTensor):
            return TensorInfo(key, "quantized", self.layout, t.format, t.shape, "uint8", t.nbytes, ("model.safetensors",))
        t = np.asarray(t)
        return TensorInfo(key, "dense", "", None, t.shape, t.dtype.name, t.nbytes, ("model.safetensors",))

    def __getitem__(self, key: str) -> Any:
        if key not in self.tensors:
            raise self.missing(key)
        return self.tensors[key]

    def __contains__(self, key: object) -> bool:
        return key in self.tensors

    def close(self) -> None:
        pass

    def header_findings(self) -> list[Finding]:
        return list(self._findings)


def packed(
    word: str, shape: tuple[int, ...], seed: int = 0, group_size: int | None = None, origin: str = "", **options: Any
) -> QTensor:
    """A QTensor of random codes and moderate scales, zero points within the code range."""
    rng = np.random.default_rng(seed)
    fmt = format_named(word, group_size, **options)
    parts: dict[str, Any] = {}
    for part, spec in family_of(fmt).geometry(fmt, shape).items():
        if part == "codes":
            codes = rng.integers(0, 1 << fmt.bits, (*shape[:-1], shape[-1]))
            parts[part] = pack(codes.astype(np.uint8), fmt.bits)
        elif part == "zeros" and fmt.zero == "int":
            parts[part] = rng.integers(0, 1 << fmt.bits, spec.shape).astype(spec.dtype)
        elif spec.dtype == np.uint8:
            low, high = {"e8m0": (119, 128), "e4m3": (40, 60)}.get(fmt.scale, (1, 16))
            parts[part] = rng.integers(low, high, spec.shape).astype(np.uint8)
        elif spec.dtype == np.int8:
            parts[part] = rng.integers(1, 16, spec.shape).astype(np.int8)
        else:
            parts[part] = np.asarray(rng.uniform(0.01, 0.02, spec.shape)).astype(spec.dtype)
    return QTensor(fmt, shape, parts, origin=origin)
