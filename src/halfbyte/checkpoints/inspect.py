"""The content of a checkpoint as table rows and JSON records: layout, format and size of each
tensor, totals, findings.

bits/weight = 8 · bytes in the file / weights        scales, zero points and block headers included
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..spec import Size
from .base import Checkpoint, TensorInfo
from .findings import Finding


def bits_per_weight(info: TensorInfo) -> float:
    """Bits a weight takes in the file; 0 for an empty tensor."""
    return Size(info.nbytes, math.prod(info.shape)).bits_per_weight


@dataclass
class Subtotal:
    """Sums over tensors of one kind."""

    tensors: int = 0
    weights: int = 0
    nbytes: int = 0

    def add(self, info: TensorInfo) -> None:
        self.tensors += 1
        self.weights += math.prod(info.shape)
        self.nbytes += info.nbytes

    @property
    def bits_per_weight(self) -> float:
        return Size(self.nbytes, self.weights).bits_per_weight

    def record(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "weights": self.weights, "nbytes": self.nbytes, "bits_per_weight": self.bits_per_weight}


@dataclass
class Totals:
    """Sums over a checkpoint: packed and dense tensors, each format, files."""

    packed: Subtotal = field(default_factory=Subtotal)
    dense: Subtotal = field(default_factory=Subtotal)
    formats: dict[str, Subtotal] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    @property
    def all(self) -> Subtotal:
        p, d = self.packed, self.dense
        return Subtotal(p.tensors + d.tensors, p.weights + d.weights, p.nbytes + d.nbytes)


def totals(infos: Iterable[TensorInfo]) -> Totals:
    """The sums over `infos`."""
    out = Totals()
    files: dict[str, None] = {}
    for info in infos:
        (out.packed if info.quantized else out.dense).add(info)
        out.formats.setdefault(format_word(info), Subtotal()).add(info)
        files |= dict.fromkeys(info.files)
    out.files = list(files)
    return out


def format_word(info: TensorInfo) -> str:
    """The codec with its group size, the dtype of a dense tensor, or "?" for a packed one whose
    headers do not fit its layout.
    """
    if info.format is not None:
        return str(info.format)
    return f"? ({info.dtype})" if info.quantized else info.dtype


@dataclass(frozen=True)
class Group:
    """Tensors that differ only by the numbers in their names: `model.layers.*.mlp.down_proj`."""

    pattern: str
    infos: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return sum(i.nbytes for i in self.infos)


def pattern_of(key: str) -> str:
    """`key` with every path component that is a number replaced by `*`."""
    return ".".join("*" if part.isdigit() else part for part in key.split("."))


def grouped(infos: Iterable[TensorInfo]) -> list[Group]:
    """Tensors by pattern, layout, format, shape and dtype, in the order they first appear."""
    found: dict[tuple[Any, ...], list[TensorInfo]] = {}
    for i in infos:
        found.setdefault((pattern_of(i.key), i.kind, i.layout, i.format, i.shape, i.dtype), []).append(i)
    return [Group(key[0] if len(group) > 1 else group[0].key, tuple(group)) for key, group in found.items()]


def tensor_record(info: TensorInfo) -> dict[str, Any]:
    """One tensor as plain values."""
    return {
        "record": "tensor", "key": info.key, "kind": info.kind, "layout": info.layout,
        "format": None if info.format is None else str(info.format), "shape": list(info.shape), "dtype": info.dtype,
        "nbytes": info.nbytes, "bits_per_weight": bits_per_weight(info), "files": list(info.files),
    }  # fmt: skip


def checkpoint_record(checkpoint: Checkpoint, sums: Totals) -> dict[str, Any]:
    """The whole checkpoint as plain values."""
    return {
        "record": "checkpoint", "path": str(checkpoint.path), "format": checkpoint.format, **sums.all.record(),
        "quantized": sums.packed.record(), "dense": sums.dense.record(), "files": sums.files,
        "formats": {name: share.record() for name, share in sums.formats.items()},
    }  # fmt: skip


def finding_record(finding: Finding) -> dict[str, Any]:
    """One finding as plain values, with its fix."""
    return {
        "record": "finding",
        "severity": finding.severity,
        "code": finding.code,
        "key": finding.key,
        "message": finding.message,
        "fix": fix_for(finding.code),
    }


def records(checkpoint: Checkpoint, findings: Iterable[Finding]) -> Iterator[dict[str, Any]]:
    """Everything about a checkpoint: the whole, every tensor, the ledger, every finding."""
    infos = list(checkpoint.infos())
    yield checkpoint_record(checkpoint, totals(infos))
    yield from map(tensor_record, infos)
    ledger = checkpoint.ledger()
    yield from (entry.record() for entry in ledger.entries)
    yield {"record": "modules", "checked": not ledger.modules, "why": ledger.modules}
    yield from map(finding_record, findings)


FIXES: dict[str, str] = {
    "activation-tensors": "",
    "adapter": "",
    "alternating-rows": "",
    "assumed-key": "where the values look wrong, give the key in the config or with --config",
    "bias-shape": "the bias belongs to another layer, or the weight was read with wrong sizes: compare with config.json",
    "big-endian": "",
    "cannot-run": "",
    "config-without-weights": "remove quantization_config from config.json, or fetch the packed weights that it describes",
    "configs-disagree": "keep one quantization config; delete or correct the other file",
    "dense-but-listed": "name the module in the config's list of modules left dense, or quantize it",
    "equal-scales": "",
    "equal-zeros": "",
    "float16-overflow": "compute in bfloat16 or float32: --dtype bfloat16",
    "gptq-label": "compare the output of both readings; open with config= and the other checkpoint_format, or correct the label",
    "layout-disagrees": "correct quant_method (or version) in the quantization config to what the tensors are",
    "no-architecture": "write general.architecture into the header (gguf's gguf_set_metadata or gguf_new_metadata)",
    "no-config": "",
    "non-finite-scale": "quantize again from finite weights; fetch the file again only if its checksum is not the original's",
    "nan-scale": "quantize again with a scale that saturates; --arithmetic producer reads these bytes as their producer does",
    "numbers-inferred": "write bits and group_size of this module into the quantization config",
    "one-shard": "",
    "packed-but-skipped": "take the module out of the config's list of modules left dense",
    "padded-words": "",
    "quantized-vector": "",
    "sparse-expanded": "",
    "tied-head-twice": "delete one of the two tensors, or set tie_word_embeddings to what the model was trained with",
    "unexpected-width": "correct bits and group_size of this module in the quantization config, or the sizes in config.json",
    "unlisted-tensor": "delete the file if it is left over from another checkpoint, else write the tensor into the index",
    "unknown-tensor": "give the config that reads it with --config, delete it if it is left over, or pass --allow-unknown NAME",
    "missing-tensor": "fetch the file that holds it; where the model has no such tensor, pass --allow-unknown NAME",
    "shape-tensor": "correct config.json, or bits and group_size in the quantization config, to what the tensors are",
    "unknown-key": "remove the key if it does not concern the weights, or pass --allow-unknown NAME",
    "let-through": "",
    "read-remotely": "",
    "gptq-label-unread": "download it and inspect the folder",
    "unread-weight": "convert the tensor to a type that is read; the message says which it is",
    "unreadable": "correct what the message names; fetch the file again only if its size or checksum is not the original's",
    "unreferenced-file": "delete the file if it is left over from another checkpoint, else repair the index",
    "v1-zero-wraps": "name the writer in the config's meta.quantizer, or convert to gptq_v2, which stores every zero point",
    "vision-projector": "",
    "zero-scale": "quantize again if these weights should not be constant: a scale underflowed",
}
"""Finding code -> how to fix it, "" where nothing needs fixing."""


def fix_for(code: str) -> str:
    """How to fix a finding of this code; "" when nothing needs to be done."""
    return FIXES.get(code, "")
