"""A checkpoint of one or several safetensors files, of any producer: tensors are grouped into
modules, and each module is read by its layout.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, HalfbyteError, plural
from ...formats import packed_nbytes
from ...layouts import Layout, safetensors_layouts
from ...layouts.quant_config.reader import ConfigReader
from ...layouts.unsupported import RECOGNISED, refuse_recognised
from ...numerics.row_slices import row_slices
from ...tensor.qtensor import QTensor
from ..architecture import Requirement, in_table, prefix_of, required
from ..base import Checkpoint, TensorInfo
from ..config_numbers import impossible_number
from ..findings import Finding, adapter_findings, adapter_words
from ..findings.headers import header_findings
from ..findings.overflow import CheckpointWarning, warn_of_overflow
from ..findings.weights import weight_findings
from ..io.bounded_json import parse_object, read_json
from ..ledger import (
    AUXILIARY,
    CLAIMED,
    CONSUMED,
    DENSE,
    MISSING,
    UNKNOWN,
    UNREADABLE,
    Entry,
    Ledger,
    code_like,
    key_entries,
    requirement_entries,
    sort_tensor,
)
from ..meta_model import required_by_transformers
from ..quant_config import CONFIG_KEYS, read_config
from .detect import DAMAGE, Detector, Reading
from .expected_shapes import expected_shape
from .folder import Sources, read_configs
from .modules import ANCHORS, SUSPECT, group, own_suffixes, suffixes_of
from .native_layout import OwnLayout
from .shards import Shards
from .sparse import PARTS as SPARSE_PARTS
from .transforms import Transforms

Made = TypeVar("Made")
METADATA_KEYS = ("shape", "axis", "packing", "quant_state")
"""Parameters that a single file may have in its metadata beside `quantization_config`, each a JSON
value or a word.
"""

_LORA = re.compile(r"(^|\.)lora_([abAB]|embedding_[AB]|magnitude_vector)(\.|$)")
"""In the names of an adapter's tensors: peft's and mlx-lm's."""

_CHUNK = 1 << 20
"""Bytes of two tensors compared at a time."""

LABELS_READ = 3
"""Weights whose zero points are read to check a GPTQ version label."""

INNER_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Parts of a multimodal model's config.json that may hold the quantization config of its language
model.
"""


class SafetensorsCheckpoint(Checkpoint):
    """An opened set of safetensors files.

    scheme  the quantization config, None when there is none
    """

    def __init__(self, path: Path, sources: Sources, quantization: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._sources = sources
        self.shards = Shards(sources.shards, sources.weight_map, sources.index, sources.opened)
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
        self._ledger: Ledger | None = None
        self._group()
        self.format = self._format()

    def _find_scheme(self, quantization: Mapping[str, Any] | None) -> ConfigReader | None:
        """The quantization config: the caller's, config.json's, the one a file beside it, or a
        single file's metadata.
        """
        found: list[tuple[str, Mapping[str, Any]]] = []
        where = str(self._sources.folder / "config.json")
        if quantization is not None:
            found.append(("config=", quantization))
        for holder in (self.config, *(v for k, v in self.config.items() if k in INNER_CONFIGS and isinstance(v, dict))):
            for key in CONFIG_KEYS:
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
        self._incomplete: dict[str, dict[str, str]] = {}
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
            if not kind.claimed and any(s in SUSPECT for s in tensors):
                self._incomplete[module] = tensors
            for suffix, tensor in tensors.items():
                if suffix not in kind.claimed:
                    if tensor in self._keys:
                        raise CheckpointError(
                            f"[open] {self.shards.path_of(tensor)}: {tensor!r} is a tensor and a packed module; one key for both"
                        )
                    self._keys[tensor] = tensor
        self._transforms = Transforms(self.shards, self.scheme, self._modules, self._keys)
        for tensor in self._transforms.tensors:
            del self._keys[tensor]

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
            files = self.shards.shards_of(key)
            return TensorInfo(key, "dense", "", None, header.shape, header.dtype.name, self.shards.nbytes(key), files)
        reading = self.reading_or_error(key)
        tensors = list(self._modules[key].values())
        if isinstance(reading, Reading):
            own = own_suffixes(reading.layout, self._modules[key])
            tensors = [own[s] for s in reading.layout.claims(own)]
        first = self.shards.header(max(tensors, key=self.shards.nbytes))
        files = tuple(dict.fromkeys(shard for tensor in tensors for shard in self.shards.shards_of(tensor)))
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
        q = self._transforms.applied(key, self._made(key, reading.layout.unpack, raw))
        warn_of_overflow(q, key)
        return q

    def zero_points(self, key: str) -> NDArray[Any] | None:
        if key not in self._keys:
            raise self.missing(key)
        return self._made(key, self.reading(key).layout.zero_points, self.raw(key)) if key in self._modules else None

    def _made(
        self,
        key: str,
        make: Callable[[Mapping[str, NDArray[Any]], Mapping[str, Any], str], Made],
        raw: Mapping[str, NDArray[Any]],
    ) -> Made:
        """`make` applied to the tensors of a packed weight. CheckpointError naming file and tensor
        when they are damaged.
        """
        try:
            return make(raw, self.reading(key).params, key)
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
        return tuple(t for k, t in self._keys.items() if k not in self._modules)

    def expected_inputs(self, key: str) -> int | None:
        """k of `key` as the model's config implies it, None where it does not."""
        return expected_shape(self.config, key)[1]

    def same_bytes(self, a: str, b: str) -> bool | None:
        """True when two keys hold the same tensors, byte for byte. Reads them only when dtypes and
        shapes agree, and not over the network: None there.
        """
        if any(self._transforms.of(key) for key in (a, b)):
            return False  # the matrices of their transforms are tensors of other names
        ours, theirs = (self._modules.get(key, {".weight": self._keys[key]}) for key in (a, b))
        if set(ours) != set(theirs) or any(self.shards.header(ours[s]) != self.shards.header(theirs[s]) for s in ours):
            return False
        if self.remote is not None:
            return None
        return all(_equal_bytes(self.shards.array(ours[s]), self.shards.array(theirs[s])) for s in ours)

    def reading(self, key: str) -> Reading:
        """How the packed weight `key` is read; CheckpointError naming file and tensor when it
        cannot be.
        """
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

    def reading_or_error(self, key: str) -> Reading | HalfbyteError:
        """`reading`, or the error it would raise."""
        if key not in self._readings:
            try:
                self._readings[key] = self._transforms.read(key, self._detector.read(key, self._modules[key]))
            except HalfbyteError as error:
                self._readings[key] = error
        return self._readings[key]

    def _damaged(self, key: str, text: str) -> CheckpointError:
        paths = dict.fromkeys(str(self.shards.path_of(t)) for t in self._modules[key].values())
        return CheckpointError(f"[open] {', '.join(paths)}: {text}")

    def ledger(self) -> Ledger:
        if self._ledger is None:
            entries = [
                *self._claimed(),
                *self._unclaimed(),
                *self._transforms.entries(),
                *self._missing_parts(),
                *self._lost_parts(),
            ]
            if self.scheme is not None:
                # Parameters that a single file may carry are read from a config as well.
                uses = self.scheme.key_uses()
                entries += key_entries(replace(u, use=CONSUMED) if u.path in METADATA_KEYS else u for u in uses)
            modules, problems = self._modules_of_the_model()
            stored = [own for entry in entries for own in self._stored(entry)]
            self._ledger = Ledger(tuple(dict.fromkeys([*stored, *problems])), modules)
        return self._ledger

    def _stored(self, entry: Entry) -> Iterator[Entry]:
        """An entry of a sparse weight as entries of the tensors that the file has; others as they
        are.
        """
        if entry.subject != "tensor" or entry.name not in self.shards.sparse or entry.status == MISSING:
            yield entry
            return
        for part, tensor in self.shards.sparse[entry.name].tensors.items():
            status = CLAIMED if entry.status == DENSE else entry.status
            owner = entry.owner or entry.name.removesuffix(".weight")
            yield replace(entry, name=tensor, status=status, owner=owner, part=part, why=entry.why or SPARSE_PARTS[part])

    def _claimed(self) -> Iterator[Entry]:
        """Entries of the tensors of packed weights."""
        against = {k for k in self._modules if isinstance(r := self.reading_or_error(k), Reading) and _against_config(r)}
        some = 0 < len(against) < len(self._modules)  # where all are, the config is mislabelled: a finding says so
        for key, tensors in self._modules.items():
            reading = self.reading_or_error(key)
            if some and key in against and isinstance(reading, Reading):
                why = f"has the shapes of {reading.layout.name}, other weights are what the config says"
                yield from (Entry("tensor", t, UNKNOWN, key, why=why) for t in tensors.values())
                continue
            if not isinstance(reading, Reading):
                yield from (Entry("tensor", t, UNREADABLE, key, why=str(reading)) for t in tensors.values())
                continue
            own = own_suffixes(reading.layout, tensors)
            parts = {own[c.suffix]: c for c in reading.layout.consumes(own)}
            for tensor in tensors.values():
                if tensor not in parts:
                    yield Entry("tensor", tensor, UNKNOWN, key, why=f"beside {key}, which is {reading.layout.name} without it")
                else:
                    claim = parts[tensor]
                    status = AUXILIARY if claim.part == AUXILIARY else CLAIMED
                    yield Entry("tensor", tensor, status, key, claim.part, claim.why)

    def _unclaimed(self) -> Iterator[Entry]:
        """Entries of tensors that no layout has claimed."""
        shapes = {t: self.shards.header(t).shape for t in self.shards}
        orphans = {t for tensors in self._incomplete.values() for s, t in tensors.items() if s in SUSPECT}
        for tensor in self.dense_keys():
            header = self.shards.header(tensor)
            owner = self._owner(tensor)
            if owner and (why := self._harmless_beside(owner, tensor)):
                yield Entry("tensor", tensor, AUXILIARY, owner, why=why)
            elif tensor in orphans:
                yield Entry("tensor", tensor, UNKNOWN, why="named like a part of a packed weight that is not there")
            else:
                yield sort_tensor(tensor, header.dtype.name, header.shape, owner, shapes)

    def _owner(self, tensor: str) -> str:
        """The packed weight whose path the name of a tensor continues, "" for none."""
        for at in range(len(tensor) - 1, 0, -1):
            if tensor[at] in "._" and tensor[:at] in self._modules:
                reading = self.reading_or_error(tensor[:at])
                if tensor[at] == "." or (isinstance(reading, Reading) and reading.layout.separator == "_"):
                    return tensor[:at]
        return ""

    def _harmless_beside(self, owner: str, tensor: str) -> str:
        """Why a tensor beside a packed weight changes none of its values, as its layout says; ""
        when it says nothing.
        """
        reading = self.reading_or_error(owner)
        if not isinstance(reading, Reading):
            return ""
        suffix = tensor[len(owner) + 1 :]
        own = own_suffixes(reading.layout, self._modules[owner])
        claims = reading.layout.consumes([*own, suffix])
        return next((c.why for c in claims if c.suffix == suffix and c.part == AUXILIARY), "")

    def _missing_parts(self) -> Iterator[Entry]:
        """The parts that incomplete packed weights lack: of the layout that the config means, else
        of the nearest one.
        """
        layouts = {layout.name: layout for layout in self._detector.layouts}
        meant = [layouts[n] for n in self.scheme.order(layouts)] if self.scheme is not None else []
        codes = {
            module: tensors
            for module, tensors in group(self.dense_keys(), suffixes_of(self._detector.layouts)).items()
            if any(code_like(t, self.shards.header(t).dtype.name, self.shards.header(t).shape) for t in tensors.values())
        }
        for module, tensors in {**codes, **self._incomplete}.items():

            def rank(layout: Layout, tensors: Mapping[str, str] = tensors) -> tuple[int, int]:
                own = own_suffixes(layout, tensors)
                return -len(layout.claims(own)), sum(s not in own for s in layout.required)

            layout = min(meant or layouts.values(), key=rank)
            own = own_suffixes(layout, tensors)
            if layout.claims(own):
                beside = next(iter(tensors.values()))
                lacks = [part for part in layout.required if part not in own]
                why = f"{layout.name} needs it beside {beside}"
                if not lacks and not layout.matches(own):  # it needs one of its optional parts
                    why = f"{layout.name} needs one of {', '.join(layout.optional)} beside {beside}"
                    lacks = [part for part in layout.optional if part not in own][:1]
                for part in lacks:
                    yield Entry("tensor", f"{module}{layout.separator}{part}" if part else module, MISSING, module, why=why)

    def _lost_parts(self) -> Iterator[Entry]:
        """Optional parts that a weight lacks beside others of its layout and format that have them:
        its own was lost.

        Of tensor scales of two-level formats, and of ONNX's zero points; elsewhere weights with and
        without a part may be mixed.
        """
        suffixes: dict[tuple[str, ...], str] = {}
        without: list[tuple[tuple[str, ...], str]] = []
        for key, tensors in self._modules.items():
            reading = self.reading_or_error(key)
            if not isinstance(reading, Reading):
                continue
            layout, fmt = reading.layout, reading.described.format
            part = "global_scale" if fmt.family in ("nvfp4", "ggml_fp4") else "zeros" if layout.name == "onnx" else ""
            if part:
                kind: tuple[str, ...] = layout.name, fmt.element if part == "global_scale" else str(fmt.bits), part
                found = next((c.suffix for c in layout.consumes(own_suffixes(layout, tensors)) if c.part == part), None)
                if found is None:
                    without.append((kind, key))
                else:
                    suffixes[kind] = layout.separator + found
        for kind, key in without:
            if kind in suffixes:
                yield Entry("tensor", key + suffixes[kind], MISSING, key, why=f"the other weights of {kind[0]} have it")

    def _modules_of_the_model(self) -> tuple[str, list[Entry]]:
        """(why the modules are not compared with config.json, "" when they are; missing tensors and
        wrong shapes).
        """
        if not self.config:
            return "there is no config.json", []
        prefix = prefix_of(self._keys)
        needs: list[Requirement] | str = "no tensor is named like a decoder's layer"
        note, stated = "", None
        if prefix is not None:
            needs = required(self.config, prefix, len(self._keys))
        if isinstance(needs, str) and (not self.config.get("model_type") or in_table(self.config)):
            return needs, []
        shapes = self._shapes()
        if isinstance(needs, str):
            longest = max((d for shape in shapes.values() for d in shape), default=0)
            if number := impossible_number(self.config, len(self.shards), longest):
                return f"model_type {self.config['model_type']!r} is not in the table, and config.json has {number}", []
            found = required_by_transformers(self.config, [k.removesuffix(".weight") for k in self._keys])
            if isinstance(found, str):
                return found, []
            needs, note, stated = found
        expected: dict[str, tuple[int | None, int | None]] = {}
        for need in needs:
            for names in need.names:
                for name in names:
                    unreadable = name in self._modules and not isinstance(self.reading_or_error(name), Reading)
                    if name in shapes and not unreadable:
                        wanted = expected_shape(self.config, name) if stated is None else _matrix(stated[name], shapes[name])
                        expected[name] = _vocabulary(wanted, name, shapes[name])
        return note, requirement_entries(needs, shapes, expected)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of weights and dense tensors, without `.weight`; () for one that cannot be read."""
        shapes: dict[str, tuple[int, ...]] = {}
        for key, tensor in self._keys.items():
            if key not in self._modules:
                shapes[key.removesuffix(".weight")] = self.shards.header(tensor).shape
            else:
                reading = self.reading_or_error(key)
                shapes[key] = reading.described.shape if isinstance(reading, Reading) else ()
        return shapes

    def label_findings(self) -> list[Finding]:
        """Whether the version label of a GPTQ checkpoint fits the zero points of its first weights,
        which are read for this.
        """
        if self.format != "gptq" or self.remote is not None:
            return []
        found = [f for key in list(self._modules)[:LABELS_READ] for f in weight_findings(self.__getitem__, key)]
        return [f for f in found if f.code == "gptq-label"]

    @property
    def adapter(self) -> str:
        if "model_type" in self.config or not any(map(_LORA.search, self.keys())):
            return ""
        beside = self._sources.folder / "adapter_config.json"
        settings = read_json(beside) if beside.is_file() else {}
        base = settings.get("base_model_name_or_path") or settings.get("model")  # peft's word, mlx-lm's
        use = (
            "load the model that it was trained on with halfbyte.load_model and put it on with "
            f"peft.PeftModel.from_pretrained(model, {str(self.path)!r})"
        )
        if any(key.endswith((".lora_a", ".lora_b")) for key in self.keys()):
            use = f"mlx-lm runs it beside its model with --adapter-path {self.path}"
        return adapter_words(base if isinstance(base, str) else "", use)

    def check(self, op: str) -> None:
        super().check(op)
        for finding in self.label_findings():
            warnings.warn(f"[{op}] {finding.key}: {finding.message}", CheckpointWarning, stacklevel=2)

    def header_findings(self) -> list[Finding]:
        unread = []
        if self.format == "gptq" and self.remote is not None:
            text = "zero points are not read over the network: whether the version label fits them is not checked"
            unread.append(Finding("note", "gptq-label-unread", "", text))
        return [
            *self._sources.findings,
            *adapter_findings(self.adapter),
            *self._odd,
            *self._sparse_findings(),
            *header_findings(self),
            *self.label_findings(),
            *unread,
        ]

    def _sparse_findings(self) -> Iterator[Finding]:
        """What 2:4 sparse weights take in the file, and when they are read."""
        modules = {name.removesuffix(".weight") for name in self.shards.sparse}
        keys = [key for key in self._keys if key.removesuffix(".weight") in modules or self._is_sparse(key)]
        read_keys = [key for key in keys if key not in self._modules or isinstance(self.reading_or_error(key), Reading)]
        infos = [self.info(key) for key in read_keys]
        if infos:
            read = sum(
                packed_nbytes(i.format, i.shape) if i.format else math.prod(i.shape) * self.shards.header(i.key).dtype.itemsize
                for i in infos
            )
            text = f"sparse: {sum(i.nbytes for i in infos):,} bytes here, {read:,} when read; products use the expanded weight"
            yield Finding("note", "sparse-expanded", "", f"{plural(len(infos), 'weight')}, {text}")

    def _is_sparse(self, key: str) -> bool:
        reading = self.reading_or_error(key) if key in self._modules else None
        return isinstance(reading, Reading) and reading.layout.sparse

    def close(self) -> None:
        self.shards.close()


def _says_own(config: Mapping[str, Any]) -> bool:
    """True for a model with halfbyte modules that transformers saved: the files' metadata is then
    that of transformers.
    """
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "halfbyte"


def _against_config(reading: Reading) -> bool:
    """True for a weight that is read as another layout than the config means."""
    return reading.odd is not None and reading.odd.code == "layout-disagrees"


def _matrix(stated: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """(n, k) of a matrix as transformers has it; (None, None) for other tensors and for GPT-2's
    layers, which keep (k, n).
    """
    return (stated[0], stated[1]) if len(stated) == 2 and shape != stated[::-1] else (None, None)


def _vocabulary(size: tuple[int | None, int | None], name: str, shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """The expected (n, k); an embedding or a head may have more rows than the vocabulary, which
    writers pad.
    """
    n, k = size
    if n and len(shape) == 2 and shape[0] > n and name.endswith(("embed_tokens", "lm_head")):
        n = shape[0]
    return n, k


def _equal_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equality of the bytes, compared in steps so that reading stops at the first difference."""
    x, y = (v.reshape(-1).view(np.uint8) for v in (a, b))
    return all(np.array_equal(x[part], y[part]) for part in row_slices((x.size, 1), _CHUNK))
