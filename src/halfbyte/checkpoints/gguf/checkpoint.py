"""A GGUF file as a checkpoint: keys of packed weights are names without `.weight`, other keys are
full names.

blk.0.attn_q.weight (Q4_K)      -> key "blk.0.attn_q", a QTensor
blk.0.attn_norm.weight (F32)    -> key "blk.0.attn_norm.weight", an array
blk.0.ffn_up.scale              -> the float32 factor of an NVFP4 weight blk.0.ffn_up.weight, part
                                of its key
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, HalfbyteError, UnsupportedError
from ...layouts import Described, layout_named
from ...layouts import Header as ArrayHeader
from ...tensor.qtensor import QTensor
from ..architecture import (
    GGUF_FAMILIES,
    GGUF_KEYS,
    GGUF_OPTIONAL_KEYS,
    GGUF_SIZES,
    GGUF_TENSOR_NAME,
    GGUF_TOKENS,
    expected_gguf,
    implied_gguf,
    required_gguf,
    stacks_gguf,
)
from ..base import Checkpoint, TensorInfo
from ..findings import Finding, adapter_findings, adapter_words, problem_findings
from ..findings.overflow import warn_of_overflow
from ..ledger import CLAIMED, DENSE, MISSING, UNKNOWN, UNREADABLE, Entry, Ledger, code_like, requirement_entries, sort_tensor
from .file import Files, GGUFFile
from .metadata import Metadata
from .runnable import refusal

BLOCK = re.compile(r"blk\.(\d+)\.")
"""What the names of a block's tensors begin with."""
TOKEN_TABLES = (".ffn_gate_tid2eid.weight",)
"""Ends of tensors of integers: DeepSeek V4's experts of each token."""
GEMMA4_SCALES = (".ffn_gate_inp.scale", ".ffn_down_exps.scale")
"""Gemma 4's own numbers, which belong to no layout: what its router's inputs are multiplied with,
and each expert's output.
"""
PIECE_BYTES = 2 << 20
"""Bytes of a file that `row_pieces` reads at once."""
PROJECTOR = (
    "is a vision projector (general.architecture clip): the image encoder that belongs to a language model, not the model; open "
    "the model's own .gguf beside it"
)


Needed = Callable[["GGUFCheckpoint", Mapping[str, tuple[int, ...]]], list[Entry] | str]
"""(checkpoint, shapes of its tensors without `.weight`) -> entries of what is missing, or why that
is not known.
"""


class GGUFCheckpoint(Checkpoint):
    """An opened GGUF file, or all shards of a split one. `file` is the GGUFFile below it."""

    format = "gguf"
    needed: ClassVar[Needed | None] = None
    """What models of other architectures than `GGUF_FAMILIES` need: `gguf_models.required`, an
    upper floor, which the package sets here.
    """

    def __init__(self, path: str | Path, files: Files | None = None) -> None:
        self.path = Path(path)
        self.file = GGUFFile(path, files)
        self._names: dict[str, str] = {}
        scales = {self._scale_name(name) for name in self.file.headers if self._scale_name(name)}
        for name, header in self.file.headers.items():
            if name in scales:
                continue
            key = name.removesuffix(".weight") if header.quantized else name
            if key in self._names:
                raise CheckpointError(
                    f"[gguf] {self.path}: tensors {self._names[key]!r} and {name!r} have one key, {key!r}; "
                    "allowed: one tensor a key"
                )
            self._names[key] = name
        self.config = self._config()

    def _config(self) -> dict[str, Any]:
        """The part of a config.json that the header gives."""
        meta = self.file.metadata
        quantization: dict[str, Any] = {"quant_method": "gguf"}
        for key in ("general.file_type", "general.quantization_version"):
            if key in meta:
                quantization[key.removeprefix("general.")] = meta[key]
        quantization["types"] = dict(Counter(h.type.name for h in self.file.headers.values()))
        return {"model_type": meta.get("general.architecture", ""), "quantization_config": quantization}

    @property
    def _is_gemma4(self) -> bool:
        return bool(self.file.metadata.get("general.architecture") == "gemma4")

    def _scale_name(self, name: str) -> str:
        """Name of the float32 factor that belongs to tensor `name`, or ""."""
        scale = name.removesuffix(".weight") + ".scale"
        header = self.file.headers.get(scale)
        if scale.endswith(GEMMA4_SCALES) and self.file.headers[name].type.name != "NVFP4" and self._is_gemma4:
            return ""
        return scale if header is not None and header.type.name == "F32" and self.file.headers[name].quantized else ""

    @property
    def metadata(self) -> Metadata:
        return self.file.metadata

    def keys(self) -> tuple[str, ...]:
        return tuple(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def tensor_name(self, key: str) -> str:
        """The name in the file of the tensor behind `key`."""
        if key not in self._names:
            raise self.missing(key)
        return self._names[key]

    def info(self, key: str) -> TensorInfo:
        name = self.tensor_name(key)
        header = self.file.headers[name]
        files = (self.file.file_of(name).name,)
        if not header.quantized:
            return TensorInfo(key, "dense", "", None, header.shape, header.type.plain, header.nbytes, files)
        nbytes = header.nbytes
        if scale := self._scale_name(name):
            nbytes += self.file.headers[scale].nbytes
        with contextlib.suppress(HalfbyteError):  # header_findings says why
            described = self._describe(key)
            return TensorInfo(key, "quantized", "gguf", described.format, described.shape, header.type.name, nbytes, files)
        return TensorInfo(key, "quantized", "gguf", None, header.shape, header.type.name, nbytes, files)

    def _describe(self, key: str) -> Described:
        """Format and shape of a packed weight from the headers; LayoutError or UnsupportedError
        when it is not read.
        """
        name = self._names[key]
        header = self.file.headers[name]
        shape = header.shape if len(header.shape) > 1 else (1, *header.shape)
        tensors = {"weight": ArrayHeader((*shape[:-1], header.type.row_bytes(shape[-1])), np.dtype(np.uint8))}
        if scale := self._scale_name(name):
            tensors["scale"] = ArrayHeader(self.file.headers[scale].shape, np.dtype(np.float32))
        return layout_named("gguf").describe(tensors, {"type": header.type.name}, key)

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        name = self.tensor_name(key)
        if not self.file.headers[name].quantized:
            return self.file.dense(name)
        return self._unpacked(key, name, self.file.rows(name))

    def row_pieces(self, key: str, multiple: int) -> Iterator[QTensor]:
        """Consecutive rows of a packed matrix, each piece read when it is asked for: at most
        `PIECE_BYTES`, and but for the last a multiple of `multiple` rows.
        """
        name = self.tensor_name(key)
        header = self.file.headers[name]
        n, k = header.shape
        step = max(multiple, PIECE_BYTES // max(header.type.row_bytes(k), 1) // multiple * multiple)
        for start in range(0, n, step):
            yield self._unpacked(key, name, self.file.rows(name, start, min(start + step, n)))

    def matrix(self, key: str, index: int) -> QTensor | NDArray[Any]:
        """One matrix of a stack; of a packed one no other is read, but where the stack has scales
        beside it.
        """
        name = self.tensor_name(key)
        header = self.file.headers[name]
        if not header.quantized or len(header.shape) != 3 or self._scale_name(name):
            return self[key][index]
        n = header.shape[1]
        return self._unpacked(key, name, self.file.rows(name, index * n, (index + 1) * n))

    def _unpacked(self, key: str, name: str, blocks: NDArray[np.uint8]) -> QTensor:
        tensors: dict[str, NDArray[Any]] = {"weight": blocks}
        if scale := self._scale_name(name):
            tensors["scale"] = self.file.dense(scale)
        weight = layout_named("gguf").unpack(tensors, {"type": self.file.headers[name].type.name}, key)
        warn_of_overflow(weight, key)
        return weight

    def ledger(self) -> Ledger:
        headers = self.file.headers
        tensors = {name: h.shape for name, h in headers.items()}
        packed = {name.removesuffix(".weight"): key for key, name in self._names.items() if headers[name].quantized}
        entries: list[Entry] = []
        for key, name in self._names.items():
            header = headers[name]
            if header.quantized:
                status, why = CLAIMED, ""
                try:
                    self._describe(key)
                except HalfbyteError as error:
                    status, why = UNREADABLE, str(error)
                entries.append(Entry("tensor", name, status, key, header.type.name, why))
                if scale := self._scale_name(name):
                    entries.append(Entry("tensor", scale, CLAIMED, key, "scale"))
                continue
            parts = name.split(".")
            owner = next((o for i in range(len(parts) - 1, 0, -1) if (o := ".".join(parts[:i])) in packed), "")
            dtype = str(header.type.plain)
            if owner and code_like(name, dtype, header.shape):
                owner = packed[owner]
            if (self._is_gemma4 and name.endswith(GEMMA4_SCALES)) or (dtype == "int32" and name.endswith(TOKEN_TABLES)):
                entries.append(Entry("tensor", name, DENSE))
                continue
            entries.append(sort_tensor(name, dtype, header.shape, owner, tensors))
        for path, file in self.file.shard_headers:
            # A shape or the number of tensors says less than was written.
            for count, where in ((file.gaps, "between tensors"), (file.slack, "after the last tensor")):
                if count:
                    why = f"{count} bytes {where} belong to none: the header says less than the file holds"
                    entries.append(Entry("tensor", f"bytes of {path.name}", UNKNOWN, why=why))
        shapes = {name.removesuffix(".weight"): shape for name, shape in tensors.items()}
        found = self._required(shapes)
        return Ledger(tuple(entries), found) if isinstance(found, str) else Ledger((*entries, *found))

    def _required(self, shapes: dict[str, tuple[int, ...]]) -> list[Entry] | str:
        """What the architecture needs and the file lacks or has in another shape; or why that is
        not known.

        shapes  of all tensors, names without `.weight`
        """
        meta = self.metadata
        architecture = str(meta.get("general.architecture", ""))
        keys = {key: f"{architecture}.{key}" for key in GGUF_KEYS}
        stated = architecture in GGUF_FAMILIES and any(name in meta for name in keys.values())
        lacking = [
            Entry("key", name, MISSING, why=f"{architecture} needs it") for name in keys.values() if stated and name not in meta
        ]
        kinds = {f"{architecture}.{key}": kind for key, kind in (GGUF_KEYS | GGUF_OPTIONAL_KEYS).items() if stated}
        kinds |= dict.fromkeys(GGUF_TOKENS if stated else (), "integer")
        lacking += [Entry("key", name, UNKNOWN, why=why) for name, kind in kinds.items() if (why := self._unusable(name, kind))]
        names = [name for name in self.file.headers if stated and not GGUF_TENSOR_NAME.fullmatch(name)]
        lacking += [Entry("tensor", name, UNKNOWN, why=f"no tensor of {architecture} has such a name") for name in names]
        if lacking:
            return lacking
        if architecture not in GGUF_FAMILIES and self.needed is not None and any(k.startswith(f"{architecture}.") for k in meta):
            return self.needed(shapes)
        size = {key: self._size(name) for key, name in keys.items() if GGUF_KEYS[key] == "integer"}
        blocks, width = size["block_count"], size["embedding_length"]
        needs = required_gguf(architecture, blocks, "output" not in shapes, len(shapes), width)
        if isinstance(needs, str):
            return needs
        further = sorted(
            {int(m[1]) for name in shapes if blocks is not None and (m := BLOCK.match(name)) and int(m[1]) >= blocks}
        )
        if further:
            return [Entry("key", keys["block_count"], UNKNOWN, why=f"{blocks}; there are tensors of block {further[0]}")]
        needs += implied_gguf(shapes.keys(), blocks or 0)
        heads, inner = size["attention.head_count"], size["feed_forward_length"]
        experts, own = (self._size(f"{architecture}.{key}") for key in ("expert_count", "expert_feed_forward_length"))
        needs += stacks_gguf(blocks or 0, len(shapes), width, experts, own or inner)
        few = self._size(f"{architecture}.attention.head_count_kv") or heads
        plain = width // heads if width and heads else None
        lengths = [self._size(f"{architecture}.attention.{word}_length") or plain for word in ("key", "value")]
        expected = expected_gguf(
            blocks or 0,
            len(shapes),
            width,
            (heads, few) if heads and few else None,
            (lengths[0], lengths[1]) if lengths[0] and lengths[1] else None,
            inner,
        )
        return requirement_entries(needs, shapes, expected, "the header")

    def _unusable(self, key: str, kind: str) -> str:
        """Why a key of the header cannot be read, or is no size, "" where it can or is not there."""
        if key in self.metadata and self.metadata.type_name(key).startswith("array["):
            return ""  # one for each layer
        try:
            value = self.metadata.typed(key, kind)
        except CheckpointError:
            return f"{self.metadata.type_name(key)}; {kind} is needed"
        none = key in self.metadata and key.partition(".")[2] in GGUF_SIZES and value < 1
        return f"{value}; 1 or more is needed" if none else ""

    def _size(self, key: str) -> int | None:
        """A count of 1 or more, None where the file has none or one for each layer."""
        if key not in self.metadata or self.metadata.type_name(key).startswith("array"):
            return None
        value = self.metadata.typed(key, "integer")
        return int(value) if value >= 1 else None

    @property
    def adapter(self) -> str:
        if self.metadata.get("general.type") != "adapter":
            return ""
        base = self.metadata.get("general.base_model.0.name")
        return adapter_words(base if isinstance(base, str) else "", f"llama.cpp runs it beside its model with --lora {self.path}")

    def check(self, op: str) -> None:
        if self.metadata.get("general.architecture") == "clip":
            raise UnsupportedError(f"[{op}] {self.path} {PROJECTOR}")
        super().check(op)

    def header_findings(self) -> list[Finding]:
        found: list[Finding] = []

        def add(severity: str, code: str, key: str, message: str) -> None:
            found.append(Finding(severity, code, key, message))

        for path, file in self.file.shard_headers:
            if file.order == ">":
                add("note", "big-endian", path.name, "weights are byte-swapped as they are read")
        found += adapter_findings(self.adapter)
        if self.metadata.get("general.architecture") == "clip":
            add("note", "vision-projector", "", f"it {PROJECTOR}")
        if "general.architecture" not in self.metadata:
            add("warning", "no-architecture", "", "general.architecture is missing: no program can tell which model it is")
        elif self.metadata.get("general.architecture") != "clip" and (why := refusal(self.metadata, self._tokenizer_beside())):
            add("note", "cannot-run", "", f"cannot be run here, because {why}; its weights can be read, verified and converted")
        for key, name in self._names.items():
            header = self.file.headers[name]
            if not header.quantized:
                continue
            if len(header.shape) == 1:
                add("note", "quantized-vector", key, f"a vector in {header.type.name}; it is read as one row")
            try:
                self._describe(key)
            except HalfbyteError as e:
                add("error", "unread-weight", key, str(e))
        found += problem_findings(self.ledger(), self.allowed)
        if self.remote is None and self._head_is_embedding():
            add("warning", "tied-head-twice", "output", "output.weight holds the same bytes as token_embd.weight")
        return found

    def _tokenizer_beside(self) -> bool:
        """Whether a `tokenizer.json` lies beside the file."""
        return self.remote is None and (self.path.parent / "tokenizer.json").is_file()

    def _head_is_embedding(self) -> bool:
        """True when the head is the embedding stored a second time; reading stops at the first
        difference.
        """
        headers = self.file.headers
        a, b = headers.get("token_embd.weight"), headers.get("output.weight")
        if a is None or b is None or a.type != b.type or a.shape != b.shape:
            return False
        x, y = self.file.raw(a.name), self.file.raw(b.name)
        step = 1 << 24
        same = all(np.array_equal(x[i : i + step], y[i : i + step]) for i in range(0, len(x), step))
        return same

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self
