"""An opened checkpoint of any file format: a mapping from keys to weights. Headers are read on
opening, data on access.

    ckpt = open(path)
    ckpt.keys()                    module paths of packed weights, full names of dense tensors
    ckpt.info(key)                 shape, format, bytes, files; header only
    ckpt[key]                      QTensor (packed) or array (dense), read when asked for
    for key, w in ckpt.items():    one weight in memory at a time
    ckpt.findings()                what looks wrong; findings(data=True) reads the scales too

`SafetensorsCheckpoint`, `GGUFCheckpoint`, `ONNXCheckpoint` and the views of another checkpoint
(`views/`, `conversion.gguf_names`) implement it.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, overload

from numpy.typing import NDArray

from ..errors import CheckpointError, UnsupportedError, plural
from ..spec import Format
from ..tensor.qtensor import QTensor
from .findings import SEVERITIES, Finding
from .findings.weights import weight_findings
from .ledger import CLAIMED, DENSE, Entry, Ledger

DefaultT = TypeVar("DefaultT")
Progress = Callable[[int, int, str], None]
"""Called as progress(done, total, key) while data is read."""


@dataclass(frozen=True)
class TensorInfo:
    """One key, from headers alone.

    key     module path (packed) or full tensor name (dense)
    kind    "quantized" or "dense"
    layout  name of the layout it is stored in ("gptq", "mlx", "gguf", ...); "" when dense
    format  what the codes mean; None when dense, or when the headers do not fit the layout (a
            finding says why)
    shape   logical (n, k) or (e, n, k); the stored shape when dense or when `format` is None for a
            packed weight
    dtype   stored dtype of a dense tensor or of the codes, NumPy's word ("bfloat16", "int32") or
            ggml's ("Q4_K")
    nbytes  bytes in the file, scales and zeros included
    files   names of the files that hold it, relative to the checkpoint
    """

    key: str
    kind: str
    layout: str
    format: Format | None
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    files: tuple[str, ...]

    @property
    def quantized(self) -> bool:
        return self.kind == "quantized"


class Remote(Protocol):
    """A repository on the hub of which byte ranges are read."""

    @property
    def where(self) -> str:
        """Its name and commit."""

    @property
    def requests(self) -> int:
        """Range requests that were made."""

    @property
    def received(self) -> int:
        """Bytes of their replies."""


class MissingKeyError(CheckpointError, KeyError):
    """A key the checkpoint does not have."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


class Checkpoint(ABC):
    """An opened checkpoint: a read-only mapping from keys to weights, and a context manager. Arrays
    already taken stay valid after `close`.

    Iterating gives keys, as for a dict: `for key, weight in checkpoint.items()` reads one weight at
    a time. Two checkpoints are equal only if they are the same object; `verify` compares values.

    path    file or folder it was opened from
    format  "gptq", "awq", "compressed-tensors", "modelopt", "gpt-oss", "mlx", "gguf",
            "bitsandbytes", "hqq", "torchao", "onnx", "metal-marlin", "fp8", "auto-round", "quark",
            "halfbyte" or "dense"
    config  the model's configuration ({} when there is none)
    allowed names, or patterns with *, of unknown and missing tensors and config keys that `check`
    lets through
    remote  the repository on the hub that it is read from by ranges, None for files on disk
    """

    path: Path
    format: str
    config: dict[str, Any]
    allowed: tuple[str, ...] = ()
    remote: Remote | None = None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key-values of the file header."""
        return {}

    @property
    def adapter(self) -> str:
        """What the checkpoint is when it holds a LoRA adapter and no model, and what to do with it;
        "" for a model.
        """
        return ""

    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """Keys in file order."""

    @abstractmethod
    def info(self, key: str) -> TensorInfo:
        """What the headers say about `key`; MissingKeyError when there is none."""

    @abstractmethod
    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        """The weight: a QTensor when packed, an array when dense. MissingKeyError; CheckpointError
        or LayoutError when it is damaged.
        """

    def zero_points(self, key: str) -> NDArray[Any] | None:
        """The stored zero points [*lead, n, G] of the packed weight `key`, None where it has none.
        Codes are not read where the layout allows that.
        """
        weight = self[key]
        return weight.parts.get("zeros") if isinstance(weight, QTensor) else None

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Close the files. Reading afterwards raises CheckpointError."""

    def fetch(self, key: str) -> None:  # noqa: B027  a reader without a map has nothing to fetch
        """Prefetch the pages of `key`, without waiting for them."""

    def ledger(self) -> Ledger:
        """Who accounts for every tensor and every key of the quantization config (`ledger.py`);
        from headers alone.
        """
        entries = [Entry("tensor", i.key, CLAIMED if i.quantized else DENSE) for i in self.infos()]
        return Ledger(tuple(entries), "this kind of checkpoint has no configuration")

    def check(self, op: str) -> None:
        """CheckpointError naming every tensor and config key that is not accounted for, those of
        `allowed` excepted.

        op  the command, for messages. Everything that uses the weights calls this first.

        UnsupportedError for an adapter, which is no model.
        """
        self.check_model(op)
        self.ledger().require(op, self.path, self.allowed)

    def check_model(self, op: str) -> None:
        """UnsupportedError for a LoRA adapter, which is no model."""
        if self.adapter:
            raise UnsupportedError(f"[{op}] {self.path} is {self.adapter}")

    def header_findings(self) -> list[Finding]:
        """What looks wrong from headers and configuration alone."""
        return []

    def findings(
        self, data: bool = False, progress: Progress | None = None, visit: Callable[[str, QTensor], None] | None = None
    ) -> list[Finding]:
        """What looks wrong, worst first.

        data      also read every packed weight, one at a time, for NaN scales, overflow and the
                  like
        progress  called as progress(done, total, key) before each weight that is read
        visit     called as visit(key, weight) with each packed weight that is read
        """

        def read(key: str) -> QTensor | NDArray[Any]:
            weight = self[key]
            if visit is not None and isinstance(weight, QTensor):
                visit(key, weight)
            return weight

        found = self.header_findings()
        if data:
            packed = [k for k in self.keys() if self.info(k).quantized]
            for done, key in enumerate(packed):
                if progress is not None:
                    progress(done, len(packed), key)
                found += weight_findings(read, key)
            if progress is not None:
                progress(len(packed), len(packed), "")
        return sorted(dict.fromkeys(found), key=lambda f: SEVERITIES.index(f.severity))

    def items(self) -> ItemsView[str, QTensor | NDArray[Any]]:
        """Pairs (key, weight), each weight read when its turn comes."""
        return ItemsView(self)

    def values(self) -> ValuesView[QTensor | NDArray[Any]]:
        """The weights, each read when its turn comes."""
        return ValuesView(self)

    @overload
    def get(self, key: str) -> QTensor | NDArray[Any] | None: ...
    @overload
    def get(self, key: str, default: DefaultT) -> QTensor | NDArray[Any] | DefaultT: ...
    def get(self, key: str, default: Any = None) -> Any:
        """The weight, or `default` where there is no such key."""
        return self[key] if key in self else default  # noqa: SIM401  it is this method

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def infos(self) -> Iterator[TensorInfo]:
        """`info` of every key."""
        return (self.info(k) for k in self.keys())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, format={self.format!r}, {plural(len(self), 'tensor')})"

    def _repr_html_(self) -> str:
        """HTML for notebooks: what it is, and its first 20 tensors."""
        first = ((i.key, str(i.format or i.dtype), " × ".join(map(str, i.shape))) for i in islice(self.infos(), 20))
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in first)
        return f"<p>{escape(repr(self))}</p><table><tr><th>key</th><th>format</th><th>shape</th></tr>{rows}</table>"

    def missing(self, key: object) -> MissingKeyError:
        """The error for a key that does not exist, naming the nearest ones."""
        text = str(key)
        if text.removesuffix(".weight") in self:
            near = f"it is packed: its key is {text.removesuffix('.weight')!r}"
        elif f"{text}.weight" in self:
            near = f"it is dense: its key is {text + '.weight'!r}"
        else:
            close = difflib.get_close_matches(text, self.keys()[:20000], n=3)
            near = f"nearest: {', '.join(close)}" if close else f"{plural(len(self), 'key')}, see .keys()"
        return MissingKeyError(f"[checkpoint] {self.path}: no tensor {text!r}; {near}")


Mapping.register(Checkpoint)  # type: ignore[type-abstract]
