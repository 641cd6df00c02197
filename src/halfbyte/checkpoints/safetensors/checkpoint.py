"""A checkpoint of one or several safetensors files, of any producer: tensors are grouped into modules, and each module is read
by its layout."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, HalfbyteError
from ...layouts import safetensors_layouts
from ...layouts.quant_config.reader import ConfigReader
from ...layouts.unsupported import RECOGNISED, refuse_recognised
from ...tensor.qtensor import QTensor
from ..base import Checkpoint, TensorInfo
from ..findings import Finding
from ..findings.headers import header_findings
from ..findings.overflow import warn_of_overflow
from ..io.bounded_json import parse_object
from ..quant_config import read_config
from .detect import DAMAGE, Detector, Reading
from .expected_shapes import expected_shape
from .folder import Sources, read_configs
from .modules import ANCHORS, SUSPECT, group, own_suffixes, suffixes_of
from .native_layout import OwnLayout
from .shards import Shards

Made = TypeVar("Made")
METADATA_KEYS = ("shape", "axis", "packing", "quant_state")
"""Parameters that a single file may have in its metadata beside `quantization_config`, each a JSON value or a word."""

INNER_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Parts of a multimodal model's config.json that may hold the quantization config of its language model."""


class SafetensorsCheckpoint(Checkpoint):
    """An opened set of safetensors files.

    scheme  the quantization config, None when there is none
    """

    def __init__(self, path: Path, sources: Sources, quantization: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._sources = sources
        self.shards = Shards(sources.shards, sources.weight_map, sources.index)
        self._metadata = {k: v for file in reversed(self.shards.files.values()) for k, v in file.metadata.items()}
        self._own = self._metadata.get("format") == "halfbyte" or _says_own(sources.config)
        if sources.lone and quantization is None and not self._own and "quantization_config" not in self._metadata:
            read_configs(sources.folder, sources)
        self.config = sources.config
        self._odd: list[Finding] = []
        self.scheme: ConfigReader | None = None
        layouts = safetensors_layouts()
        if self._own:
            layouts = (OwnLayout(),)
        else:
            self.scheme = self._find_scheme(quantization)
        self._detector = Detector(self.shards, self.scheme, self.config, self._extra(), layouts)
        self._modules: dict[str, dict[str, str]] = {}
        self._keys: dict[str, str] = {}
        self._readings: dict[str, Reading | HalfbyteError] = {}
        self._group()
        self.format = self._format()

    def _find_scheme(self, quantization: Mapping[str, Any] | None) -> ConfigReader | None:
        """The quantization config: the caller's, config.json's, the one a file beside it, or a single file's metadata."""
        found: list[tuple[str, Mapping[str, Any]]] = []
        where = str(self._sources.folder / "config.json")
        if quantization is not None:
            found.append(("config=", quantization))
        for holder in (self.config, *(v for k, v in self.config.items() if k in INNER_CONFIGS and isinstance(v, dict))):
            for key in ("quantization_config", "quantization"):
                raw = holder.get(key)
                if raw is not None and not isinstance(raw, dict):
                    raise CheckpointError(f"[config] {where}: {key} is {raw!r:.80}; wanted an object")
                if raw:
                    found.append((where, raw))
        found += [(str(self._sources.folder / name), raw) for name, raw in self._sources.side.items()]
        for file in self.shards.files.values():
            if text := file.metadata.get("quantization_config"):
                found.append((f"{file.path} metadata", parse_object(text.encode(), f"{file.path}: metadata quantization_config")))
        if not found:
            return None
        scheme = read_config(found[0][1], found[0][0])
        for where, raw in found[1:] if quantization is None else ():
            other = read_config(raw, where)
            if other.method != scheme.method:
                text = f"says {other.method}, {scheme.where} says {scheme.method}; read as {scheme.method}"
                self._odd.append(Finding("warning", "configs-disagree", Path(where).name, text))
            else:
                self._odd += [Finding("warning", "configs-disagree", "", text) for text in scheme.complete(other)]
        return scheme

    def _extra(self) -> dict[str, Any]:
        """Parameters from the metadata of a single file."""
        extra: dict[str, Any] = {}
        for key in METADATA_KEYS if len(self.shards.files) == 1 else ():
            text = self._metadata.get(key)
            if text is not None:
                try:
                    extra[key] = json.loads(text) if len(text) < 4096 else text
                except (ValueError, RecursionError):
                    extra[key] = text
        return extra

    def _group(self) -> None:
        """Sort tensors into packed modules and dense tensors, in file order."""
        self._suffixed: set[str] = set()
        known = suffixes_of(self._detector.layouts) | {f".{s}" for entry in RECOGNISED for s in entry.suffixes}
        grouped = group(self.shards, known)
        for module, tensors in grouped.items():
            kind = self._detector.kind(tensors)
            if kind.refused is not None:
                path = self.shards.path_of(next(iter(tensors.values())))
                refuse_recognised({}, kind.refused.suffixes, f"{path}: {module}")
            if kind.claimed:
                self._modules[module] = {s: t for s, t in tensors.items() if s in kind.claimed}
                self._keys[module] = ""
            elif anchor := next((tensors[a] for a in ANCHORS if a in tensors), None):
                raise CheckpointError(
                    f"[open] {self.shards.path_of(anchor)}: tensor {anchor!r} is packed, but {module!r} has only "
                    f"{', '.join(s.lstrip('._') for s in tensors)}; its scales or zeros are missing"
                )
            for suffix, tensor in tensors.items():
                if suffix not in kind.claimed:
                    if suffix in SUSPECT:
                        self._suffixed.add(tensor)
                    if tensor in self._keys:
                        raise CheckpointError(
                            f"[open] {self.shards.path_of(tensor)}: {tensor!r} is a tensor and a packed module; one key for both"
                        )
                    self._keys[tensor] = tensor

    def _format(self) -> str:
        if not self._modules:
            return "dense"
        if self.scheme is not None:
            return self.scheme.method
        layouts: Counter[str] = Counter()
        for module in list(self._modules)[:8]:
            reading = self.reading_or_error(module)
            possible = self._detector.kind(self._modules[module]).layouts
            layouts[reading.layout.name if isinstance(reading, Reading) else possible[0].name] += 1
        name = layouts.most_common(1)[0][0]
        return "awq" if name.startswith("awq-") else name

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._metadata

    def keys(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def info(self, key: str) -> TensorInfo:
        if key not in self._keys:
            raise self.missing(key)
        if key not in self._modules:
            header = self.shards.header(key)
            files: tuple[str, ...] = (self.shards.shard_of(key),)
            return TensorInfo(key, "dense", "", None, header.shape, header.dtype.name, self.shards.nbytes(key), files)
        reading = self.reading_or_error(key)
        tensors = list(self._modules[key].values())
        if isinstance(reading, Reading):
            own = own_suffixes(reading.layout, self._modules[key])
            tensors = [own[s] for s in reading.layout.claims(own)]
        first = self.shards.header(max(tensors, key=self.shards.nbytes))
        files = tuple(dict.fromkeys(map(self.shards.shard_of, tensors)))
        nbytes = sum(map(self.shards.nbytes, tensors))
        if not isinstance(reading, Reading):
            return TensorInfo(key, "quantized", "", None, first.shape, first.dtype.name, nbytes, files)
        fmt, shape = reading.described
        return TensorInfo(key, "quantized", reading.layout.name, fmt, shape, first.dtype.name, nbytes, files)

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        if key not in self._keys:
            raise self.missing(key)
        if key not in self._modules:
            return self.shards.array(key)
        reading, raw = self.reading(key), self.raw(key)
        q = self._made(key, reading.layout.unpack)
        for suffix, array in raw.items():
            if not any(np.may_share_memory(array, part) for part in q.parts.values()):
                # Every bit has been copied: the file's pages need not stay resident.
                self.shards.release(own_suffixes(reading.layout, self._modules[key])[suffix])
        warn_of_overflow(q, key)
        return q

    def zero_points(self, key: str) -> NDArray[Any] | None:
        if key not in self._keys:
            raise self.missing(key)
        return self._made(key, self.reading(key).layout.zero_points) if key in self._modules else None

    def _made(self, key: str, make: Callable[[Mapping[str, NDArray[Any]], Mapping[str, Any], str], Made]) -> Made:
        """`make` applied to the tensors of a packed weight. CheckpointError naming file and tensor when they are damaged."""
        try:
            return make(self.raw(key), self.reading(key).params, key)
        except HalfbyteError as error:
            raise self._damaged(key, str(error)) from error
        except DAMAGE as error:
            raise self._damaged(key, f"{key}: its tensors are damaged ({type(error).__name__}: {error})") from error

    @property
    def index(self) -> str:
        """Name of the shard index, "" without one."""
        return self._sources.index

    def packed_keys(self) -> tuple[str, ...]:
        """Keys of packed weights."""
        return tuple(self._modules)

    def dense_keys(self) -> tuple[str, ...]:
        """Keys of dense tensors."""
        return tuple(t for t in self._keys.values() if t)

    def has_packed_suffix(self, tensor: str) -> bool:
        """True when a dense tensor's name ends as parts of packed weights do."""
        return tensor in self._suffixed

    def expected_inputs(self, key: str) -> int | None:
        """k of `key` as the model's config implies it, None where it does not."""
        return expected_shape(self.config, key)[1]

    def same_bytes(self, a: str, b: str) -> bool:
        """True when two keys hold the same tensors, byte for byte. Reads them only when dtypes and shapes agree."""
        ours, theirs = (self._modules.get(key, {".weight": self._keys[key]}) for key in (a, b))
        if set(ours) != set(theirs) or any(self.shards.header(ours[s]) != self.shards.header(theirs[s]) for s in ours):
            return False
        return all(_equal_bytes(self.shards.array(ours[s]), self.shards.array(theirs[s])) for s in ours)

    def reading(self, key: str) -> Reading:
        """How the packed weight `key` is read; CheckpointError naming file and tensor when it cannot be."""
        reading = self.reading_or_error(key)
        if not isinstance(reading, Reading):
            raise reading
        return reading

    def raw(self, key: str) -> dict[str, NDArray[Any]]:
        """The stored tensors of the packed weight `key` by suffix, as its layout is given them."""
        own = own_suffixes(self.reading(key).layout, self._modules[key])
        return {s: self.shards.array(own[s]) for s in self.reading(key).layout.claims(own)}

    def fetch(self, key: str) -> None:
        for tensor in self._modules.get(key, {key: key}).values():
            self.shards.fetch(tensor)

    def release(self, key: str) -> None:
        """The pages behind `key` stop counting as resident memory; they come back when touched."""
        for tensor in self._modules.get(key, {key: key}).values():
            self.shards.release(tensor)

    def reading_or_error(self, key: str) -> Reading | HalfbyteError:
        """`reading`, or the error it would raise."""
        if key not in self._readings:
            try:
                self._readings[key] = self._detector.read(key, self._modules[key])
            except HalfbyteError as error:
                self._readings[key] = error
        return self._readings[key]

    def _damaged(self, key: str, text: str) -> CheckpointError:
        paths = dict.fromkeys(str(self.shards.path_of(t)) for t in self._modules[key].values())
        return CheckpointError(f"[open] {', '.join(paths)}: {text}")

    def header_findings(self) -> list[Finding]:
        return [*self._sources.findings, *self._odd, *header_findings(self)]

    def close(self) -> None:
        self.shards.close()


def _says_own(config: Mapping[str, Any]) -> bool:
    """True for a model with halfbyte modules that transformers saved: the files' metadata is then that of transformers."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "halfbyte"


def _equal_bytes(a: NDArray[Any], b: NDArray[Any], step: int = 1 << 20) -> bool:
    """Equality of the bytes, compared in steps so that reading stops at the first difference."""
    x, y = (v.reshape(-1).view(np.uint8) for v in (a, b))
    return all(np.array_equal(x[i : i + step], y[i : i + step]) for i in range(0, x.size, step))
