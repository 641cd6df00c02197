"""A GGUF file as a transformers checkpoint: names, row orders and configuration of the model that
it holds.

    view = ModelView(open("model.gguf"))     view["model.layers.0.self_attn.q_proj"], view.config

Whole rows, and whole groups of inputs, are moved, so packed weights keep every bit; Gemma's norms
lose the 1 that the file has added. What a parameter of the model has of other values than the file,
or makes of several tensors by more than putting their rows one after another, is decoded and dense.
Stacks of experts keep their projections separate (`experts.gate_proj`), as MLX stores them;
`joined` alternates the rows of gpt-oss's gate and up, as its own checkpoints do. Dense stacks are
read one expert at a time, under the names of the hub's checkpoints, or are transformers' own
parameters. One tensor is read at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo, expert_names
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.mlx_names import mlx_name, stack_module
from ..checkpoints.views.base import View
from ..errors import CheckpointError, UnsupportedError, plural
from ..layouts import LAYOUTS
from ..numerics.exact import dtype_named
from ..spec import Format
from ..tensor.concat import concat_rows, incompatibility, moved_units, take_inputs, take_rows
from ..tensor.qtensor import QTensor
from .architecture import DBRX_EXPERTS, EACH, EXPERTS, PART, Change
from .config import architecture_of, settings_of
from .keys import Keys, MissingError
from .names import (
    INPUTS_FIRST,
    LAYER,
    LONG_ROTATION,
    ONE_ROW,
    ROTATION_FACTORS,
    class_name,
    input_order,
    row_order,
    slot,
    stem_of,
)
from .published import JOINED, PUBLISHED_VALUES, REPLACED, published, published_name, published_parts
from .rotation import llama3_rope

INTERLEAVED = ("gpt_oss",)
"""Model types whose gate and up rows alternate in one stack."""
TRANSPOSED = ("gpt_oss", "llama4_text")
"""Model types whose parameters of experts are [e, k, n]."""
OWN_STACKS = (
    "dots3_note_text", "gemma4_text", "granitemoe", "granitemoe_swa", "granitemoehybrid", "hy_v4", "llama4_text",
    "minimax_m3_vl_text", "mistral4", "smallthinker",
)  # fmt: skip
"""Model types of which a dense checkpoint has transformers' parameters of all experts: gate's rows
before up's, `gate_up_proj`, and `down_proj`.
"""
NUMBERED = ("deepseek_v4", "kimi_linear", "lfm2_moe", "minimax_m2", "mixtral", "phimoe")
"""Model types whose checkpoints call an expert's projections w1 (gate), w2 (down) and w3 (up)."""
SPARSE_BLOCK = re.compile(r"\.mlp(?=\.(?:experts|gate|router|shared_experts)\b|$)")
"""What is `block_sparse_moe` in checkpoints of `SPARSE_BLOCKS`, its router `gate`, and in engines
that read them by name.
"""
SPARSE_BLOCKS = ("kimi_linear", "minimax_m2", "mixtral", "phimoe")
FLAT = ("dbrx",)
"""Model types whose experts are the matrices of `DBRX_EXPERTS`."""
TOKEN_TYPES = "token_types"
"""Stem of a matrix that a file of one type of tokens has as a vector."""


@dataclass(frozen=True)
class _Tensor:
    """How one key of the view is read.

    keys        of the file; several are joined
    stem        of the tensor in the file, "" outside the layers
    expert      of a dense stack, None for the whole
    element     of a stack of matrices that are modules of a list
    part        stem of the parameter that is rows `rows` of the tensor
    joined      module path, within a layer, of the parameter that `keys` make
    stacked     the keys are stacks of experts: gate's rows before up's, [e, k, n] if `transposed`
    flat        the matrices of the stack follow one another, those of down transposed
    decoded     packed in the file and dense here
    inputs_first  transformers stores the matrix as (inputs, outputs)
    value       of a parameter that the file has as key-values
    """

    keys: tuple[str, ...]
    stem: str = ""
    minus_one: bool = False
    one_row: bool = False
    expert: int | None = None
    element: int | None = None
    part: str = ""
    rows: tuple[int, int] = (0, 0)
    joined: str = ""
    stacked: bool = False
    transposed: bool = False
    flat: bool = False
    decoded: bool = False
    inputs_first: bool = False
    value: NDArray[Any] | None = None


class ModelView(View):
    """`source` under transformers' names.

    switch   the module of stacked experts is named `switch_mlp`, as MLX's models have it
    published  names are those of published checkpoints (`published_name`, `SPARSE_BLOCKS`)
    joined   gpt-oss's gate and up are one stack of alternating rows
    stacks   dense stacks of experts stay whole
    dense    every weight will be dense: those that the model has in another form are decoded
    dtype, arithmetic  of what is decoded here (`QTensor.dequantize`)

    decoded  keys whose weights are packed in the file and dense here, which their form in the model
             needs
    left_out  keys of the file that belong to what transformers' model does not have, by what it is
    Raises UnsupportedError for an architecture that has no table, or a tensor that its table does
    not name.
    """

    source: GGUFCheckpoint

    def __init__(
        self,
        source: GGUFCheckpoint,
        *,
        switch: bool = False,
        published: bool = False,
        joined: bool = False,
        stacks: bool = False,
        dense: bool = False,
        dtype: str = "float32",
        arithmetic: str = "exact",
    ) -> None:
        super().__init__(source)
        self.architecture = architecture_of(source)
        self.dtype, self.arithmetic, self.dense = dtype, arithmetic, dense
        self.published = published
        settings = settings_of(source)
        self.settings = SimpleNamespace(**settings)
        self.heads, self.head_dim = (int(settings.get(name) or 0) for name in ("num_attention_heads", "head_dim"))
        if ROTATION_FACTORS in source and not self.architecture.absent(self.settings, -1, _stem(ROTATION_FACTORS)):
            settings["rope_parameters"] = llama3_rope(source, settings)
        self.config = model_config(settings, self.architecture.task)
        self.left_out: dict[str, str] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._parts: dict[tuple[str, str], dict[int, str]] = {}
        unknown = [key for key in source.keys() if not self._add(key, switch, stacks)]  # noqa: SIM118 a checkpoint's keys are in file order
        if unknown:
            raise UnsupportedError(
                f"[gguf] {source.path}: {', '.join(unknown[:4])} have no counterpart in transformers' "
                f"{self.architecture.model_type}"
            )
        for (path, leaf), numbered in self._parts.items():
            self._add_joined(path, leaf, [numbered[i] for i in sorted(numbered)])
        for name, value in self.architecture.parameters(Keys(source), settings).items():
            self._tensors[name] = _Tensor((), value=value)
        if joined and self.architecture.model_type in INTERLEAVED:
            self._join()
        if published:
            self._join_rows()
            named = {n: self._published(n, settings) for n in self._tensors}
            kind = self.architecture.model_type
            self._tensors = {mlx_name(kind, named[n]) if switch else named[n]: t for n, t in self._tensors.items()}
        self.decoded = [name for name, t in self._tensors.items() if t.decoded and any(source.info(k).quantized for k in t.keys)]

    def _add(self, key: str, switch: bool, stacks: bool) -> bool:
        """Name one tensor of the file."""
        name = self.source.tensor_name(key)
        if key == ROTATION_FACTORS or key in LONG_ROTATION:
            return True
        if why := self._unused(name):
            self.left_out[key] = why
            return True
        stem, info = stem_of(name), self.source.info(key)
        if stem in self.architecture.splits:
            return self._add_split(key, name, stem)
        where = slot(self.architecture, name)
        if where is None or not info.shape:  # a scalar is none of the model's tensors, whatever its name
            return False
        path, leaf = where
        if self.published and self.architecture.model_type in SPARSE_BLOCKS:
            path = SPARSE_BLOCK.sub(".block_sparse_moe", path).replace("block_sparse_moe.router", "block_sparse_moe.gate")
        if EXPERTS in path:
            if len(info.shape) != (2 if leaf == "bias" else 3):
                return False
            self._add_experts(key, path, leaf, switch, stacks)
            return True
        if PART in path:
            whole, _, number = path.partition(PART)
            if self.published and (parts := published_parts(self.architecture.model_type, whole)):
                self._tensors[f"{parts[int(number)]}.{leaf}"] = _Tensor((key,), stem, decoded=info.quantized)
                return True
            self._parts.setdefault((whole, leaf), {})[int(number)] = key
            return True
        if EACH in path:
            for i in range(info.shape[0]):
                packed = info.quantized and leaf == "weight"
                each = path.replace(EACH, str(i))
                self._tensors[each if packed else f"{each}.{leaf}"] = _Tensor((key,), element=i, decoded=not packed)
            return True
        minus_one = self.architecture.adds_one(path, leaf, stem)
        inputs_first = leaf == "weight" and stem in INPUTS_FIRST.get(self.architecture.model_type, ())
        stays = leaf == "weight" and not (self.dense and inputs_first) and self._stays_packed(stem, info.shape[-1], info.format)
        decoded = info.quantized and not stays
        new = path if info.quantized and stays else f"{path}.{leaf}"
        one_row = stem == ONE_ROW or (_stem(name) == TOKEN_TYPES and leaf == "weight")
        turned = inputs_first and (decoded or not info.quantized)
        self._tensors[new] = _Tensor((key,), stem, minus_one, one_row, inputs_first=turned, decoded=decoded)
        return True

    def _unused(self, name: str) -> str:
        """What a tensor belongs to that the model does not have, "" for one that it has."""
        match = LAYER.match(name)
        layer = int(match[1]) if match else -1
        count = self.source.metadata[f"{self.source.metadata['general.architecture']}.block_count"]
        if layer >= count:
            raise CheckpointError(
                f"[gguf] {self.source.path}: there is a tensor {name}; the header states {plural(count, 'layer')}"
            )
        if match and self.settings.num_hidden_layers <= layer:
            return "layers that predict further tokens"
        stem = match[2] if match else name
        return "what its layers do not use" if self.architecture.absent(self.settings, layer, _stem(stem)) else ""

    def _stays_packed(self, stem: str, width: int, fmt: Format | None) -> bool:
        """Whether packed weights can be what the model has: their values are its own, and inputs in
        another order are moved by whole groups.
        """
        if stem in self.architecture.changes:
            return False
        order = self._columns(stem, width)
        return order is None or (fmt is not None and moved_units(order, fmt) is not None)

    def _columns(self, stem: str, width: int) -> NDArray[np.int64] | None:
        """Inputs of the file in transformers' order, None where both are the same."""
        return input_order(self.architecture, self.settings, stem, width, self.source.path)

    def _add_split(self, key: str, name: str, stem: str) -> bool:
        """Parameters that are rows of one tensor."""
        info, parts = self.source.info(key), self.architecture.splits[stem]
        slots = [slot(self.architecture, name.replace(f".{stem}.", f".{part}.")) for part in parts]
        if not info.shape or None in slots:
            return False
        cut = self.architecture.cuts.get(stem, _query_key_value)
        counts = cut(self.settings, info.shape[0])
        start, ends = 0, [*counts, info.shape[0]]
        if len(ends) != len(parts) or sorted({0, *ends}) != [0, *ends]:
            raise UnsupportedError(
                f"[gguf] {self.source.path}: {key} has {info.shape[0]} rows; {', '.join(parts)} are cut at {counts}"
            )
        for part, where, stop in zip(parts, slots, ends, strict=True):
            assert where is not None
            path, leaf = where
            packed = info.quantized and leaf == "weight"
            self._tensors[path if packed else f"{path}.{leaf}"] = _Tensor((key,), part, part=part, rows=(start, stop))
            start = stop
        return True

    def _add_experts(self, key: str, path: str, leaf: str, switch: bool, stacks: bool) -> None:
        """A stack of experts: packed, or dense as the model's own checkpoints have it."""
        info, kind = self.source.info(key), self.architecture.model_type
        packed = info.quantized and not self.dense
        module, _, projection = path.partition(EXPERTS)
        if kind in FLAT and (self.dense or not info.quantized):
            self._tensors[f"{module}.{DBRX_EXPERTS[projection]}"] = _Tensor(
                (key,), stacked=True, flat=True, transposed=projection == "down_proj", decoded=info.quantized
            )
            return
        if not (packed or switch or stacks) and leaf == "weight" and kind in OWN_STACKS:
            half = {"gate_proj": 0, "up_proj": 1}.get(projection)
            if half is None:
                self._tensors[f"{module}.{projection}"] = _Tensor(
                    (key,), stacked=True, transposed=kind in TRANSPOSED, decoded=info.quantized
                )
            else:
                self._parts.setdefault((f"{module}.gate_up_proj", EXPERTS), {})[half] = key
            return
        if switch and kind not in INTERLEAVED:
            module = f"{module.removesuffix('.experts')}.{stack_module(kind)}"
        if packed or switch or stacks or leaf != "weight" or kind in INTERLEAVED:
            self._tensors[f"{module}.{projection}" if info.quantized else f"{module}.{projection}.{leaf}"] = _Tensor((key,))
        else:
            word = expert_names.words_for(projection)[-1] if kind in NUMBERED else projection
            for e in range(info.shape[0]):
                self._tensors[f"{module}.{e}.{word}.{leaf}"] = _Tensor((key,), expert=e, decoded=info.quantized)

    def _add_joined(self, path: str, leaf: str, keys: list[str]) -> None:
        """A parameter that the file has as several tensors."""
        if leaf == EXPERTS:
            decoded = any(self.source.info(key).quantized for key in keys)
            transposed = self.architecture.model_type in TRANSPOSED
            self._tensors[path] = _Tensor(tuple(keys), stacked=True, transposed=transposed, decoded=decoded)
            return
        inner = path.removeprefix(f"{self.architecture.layers}.").partition(".")[2]
        infos = [self.source.info(key) for key in keys]
        stems = [stem_of(self.source.tensor_name(key)) for key in keys]
        packed = all(i.quantized and i.format == infos[0].format for i in infos) and leaf == "weight"
        packed = packed and inner not in self.architecture.joins and not any(s in self.architecture.changes for s in stems)
        self._tensors[path if packed else f"{path}.{leaf}"] = _Tensor(tuple(keys), joined=inner, decoded=not packed)

    def _published(self, name: str, settings: Mapping[str, Any]) -> str:
        """A key under its published name; the projections of packed experts keep theirs."""
        module, _, projection = name.rpartition(".")
        return (
            f"{published_name(settings, module)}.{projection}" if self._is_packed_stack(name) else published_name(settings, name)
        )

    def _join_rows(self) -> None:
        """Matrices that are one in published checkpoints (`JOINED`). Those packed in different
        formats stay apart, unless the view is dense.
        """
        for whole, (first, *others) in JOINED.get(self.architecture.model_type, {}).items():
            for name in [n for n in self._tensors if re.search(rf"\.{re.escape(first)}(\.weight)?$", n)]:
                path, _, leaf = name.rpartition(first)
                parts = [n for n in (name, *(f"{path}{other}{leaf}" for other in others)) if n in self._tensors]
                keys = tuple(key for n in parts for key in self._tensors[n].keys)
                same = len({self.source.info(key).format for key in keys}) == 1
                if len(parts) > len(others) and (same or self.dense):
                    new = {**dict.fromkeys(parts, ""), name: f"{path}{whole}{leaf if same else '.weight'}"}
                    self._tensors[name] = _Tensor(keys, joined=whole, decoded=not same)
                    self._tensors = {new.get(n, n): t for n, t in self._tensors.items() if new.get(n, n)}

    def _is_packed_stack(self, name: str) -> bool:
        """Whether a key has packed experts, whose projections keep their names."""
        t = self._tensors[name]
        infos = [self.source.info(key) for key in t.keys]
        return not t.decoded and any(info.quantized and len(info.shape) == 3 for info in infos)

    def _join(self) -> None:
        """gpt-oss's stacks under the names of its own checkpoints."""
        out: dict[str, _Tensor] = {}
        for name, t in self._tensors.items():
            path, _, last = name.rpartition(".experts.")
            if not path or last in ("up_proj", "up_proj.bias"):
                if not path:
                    out[name] = t
            elif last in ("gate_proj", "gate_proj.bias"):
                bias = "_bias" if last.endswith(".bias") else ""
                up = self._tensors[name.replace(".gate_proj", ".up_proj")]
                out[f"{path}.experts.gate_up_proj{bias}"] = _Tensor((*t.keys, *up.keys))
            else:
                out[f"{path}.experts.{last.replace('.bias', '_bias')}"] = t
        self._tensors = out

    @property
    def metadata(self) -> Mapping[str, Any]:
        return {}

    @property
    def notes(self) -> list[str]:
        """What the user of the result wants to know."""
        out = []
        if self.decoded and not self.dense:
            some = ", ".join(self.decoded[:3]) + (", ..." if len(self.decoded) > 3 else "")
            out.append(
                f"{plural(len(self.decoded), 'tensor')} of the model is made of packed ones of the file by more than moving "
                f"their rows, and written dense: {some}"
            )
        for what in dict.fromkeys(self.left_out.values()):
            count = sum(why == what for why in self.left_out.values())
            out.append(f"left out: {plural(count, 'tensor')} of {what}")
        return out

    def source_keys(self, key: str) -> tuple[str, ...]:
        """The keys of the file behind a key of the view."""
        if key not in self._tensors:
            raise self.missing(key)
        return self._tensors[key].keys

    def keys(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def info(self, key: str) -> TensorInfo:
        infos = [self.source.info(k) for k in self.source_keys(key)]
        t = self._tensors[key]
        if t.value is not None:
            return TensorInfo(key, "dense", "", None, t.value.shape, t.value.dtype.name, t.value.nbytes, ())
        first = infos[0]
        shapes, nbytes = [i.shape for i in infos], sum(i.nbytes for i in infos)
        if t.joined or t.stacked:
            shape = self._shape(t, shapes)
        elif len(infos) > 1:
            axis = len(first.shape) - (2 if first.quantized else 1)
            shape = (*first.shape[:axis], sum(s[axis] for s in shapes), *first.shape[axis + 1 :])
        elif t.expert is not None or t.element is not None:
            shape, nbytes = first.shape[1:], nbytes // first.shape[0]
        elif t.part:
            rows = t.rows[1] - t.rows[0]
            shape, nbytes = (rows, *first.shape[1:]), nbytes * rows // first.shape[0]
        else:
            shape = self._shape(t, shapes)
        if t.one_row:
            shape = shape if len(shape) == 2 else (1, *shape)
        if t.inputs_first:
            shape = shape[::-1]
        if first.quantized and not t.decoded:
            return replace(first, key=key, shape=shape, nbytes=nbytes)
        dtype = self._dtype(t, infos)
        if not any(i.quantized for i in infos):
            return replace(first, key=key, shape=shape, dtype=dtype, nbytes=nbytes)
        nbytes = int(np.prod(shape)) * dtype_named(dtype).itemsize
        return TensorInfo(key, "dense", "", None, shape, dtype, nbytes, first.files)

    def _dtype(self, t: _Tensor, infos: list[TensorInfo]) -> str:
        """The dtype of a dense tensor of the view."""
        if t.minus_one or any(self._change(t, k, i.shape) for k, i in zip(t.keys, infos, strict=True)):
            return "float32"
        found = {self.dtype if i.quantized else i.dtype for i in infos}
        dtype = found.pop() if len(found) == 1 else "float32"
        return "int64" if dtype == "int32" else dtype

    def _shape(self, t: _Tensor, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of a dense tensor, or of rows that follow one another."""
        small = [np.broadcast_to(np.int8(1), s) for s in shapes]
        if t.stacked:
            e, n, k = shapes[0]
            n = sum(s[1] for s in shapes)
            n, k = (k, n) if t.transposed else (n, k)
            return (e * n, k) if t.flat else (e, n, k)
        if t.joined and t.joined not in self.architecture.joins:
            changed = [self._changed(t, k, a).shape for k, a in zip(t.keys, small, strict=True)]
            return (sum(s[0] for s in changed), *changed[0][1:])
        if t.joined:
            return self.architecture.joins[t.joined].read(self.settings, small).shape
        return self._changed(t, t.keys[0], small[0]).shape

    def _change(self, t: _Tensor, key: str, shape: tuple[int, ...]) -> Change | None:
        """How transformers has the values of a tensor of the file of this shape."""
        name = self.source.tensor_name(key)
        return None if name.endswith(".bias") and len(shape) == 1 and t.stem else self.architecture.changes.get(stem_of(name))

    def _changed(self, t: _Tensor, key: str, array: NDArray[Any]) -> NDArray[Any]:
        """A tensor's values as transformers has them."""
        change = self._change(t, key, array.shape)
        if change is None:
            return array
        with np.errstate(all="ignore"):  # of what has no logarithm
            return np.asarray(change.read(self.settings, array.astype(np.float32)), np.float32)

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        keys, t = self.source_keys(key), self._tensors[key]
        if t.value is not None:
            return t.value
        if t.stacked:
            return self._stack(t)
        if t.joined:
            return self._joined(key, t)
        if len(keys) > 1:
            return self._alternating(key, keys)
        if t.expert is not None:
            return np.asarray(self._values(t, self.source.matrix(keys[0], t.expert)))
        return self.arranged(key, self.source[keys[0]])

    def row_pieces(self, key: str, multiple: int) -> Iterator[QTensor]:
        """A packed matrix in consecutive pieces of its rows (`GGUFCheckpoint.row_pieces`), or whole
        where the view has them in another order.
        """
        keys, t = self.source_keys(key), self._tensors[key]
        rows, width = self.info(key).shape[0], self.info(key).shape[-1]
        plain = not (t.joined or t.part or t.decoded) and t.element is None and self._columns(t.stem, width) is None
        if len(keys) == 1 and plain and self._order(t.stem, rows) is None:
            yield from self.source.row_pieces(keys[0], multiple)
            return
        weight = self[key]
        assert isinstance(weight, QTensor)
        yield weight

    def _order(self, stem: str, rows: int) -> NDArray[np.int64] | None:
        """Rows of the file in transformers' order, None where both are the same."""
        return row_order(self.architecture, self.settings, stem, rows, self.heads, self.head_dim, self.source.path)

    def _values(self, t: _Tensor, weight: QTensor | NDArray[Any]) -> QTensor | NDArray[Any]:
        """A weight of the file, decoded where the view has it dense."""
        return weight.dequantize(self.dtype, self.arithmetic) if isinstance(weight, QTensor) and t.decoded else weight

    def arranged(self, key: str, weight: QTensor | NDArray[Any]) -> QTensor | NDArray[Any]:
        """A tensor of the file as the view has it under `key`."""
        t = self._tensors[key]
        if t.element is not None:
            weight = weight[t.element]
        weight = self._values(t, weight)
        rows = np.arange(*t.rows) if t.part else None
        order = self._order(t.stem, weight.shape[0] if rows is None else len(rows))
        order = order if rows is None else rows if order is None else rows[order]
        if isinstance(weight, QTensor):
            moved = weight if order is None else take_rows(weight, order)
            inputs = self._columns(t.stem, weight.shape[-1])
            return moved if inputs is None else take_inputs(moved, inputs)
        array = weight if order is None else weight[order]
        inputs = self._columns(t.stem, array.shape[-1])
        array = array if inputs is None else array[..., inputs]
        if t.minus_one:
            array = array.astype(np.float32) - np.float32(1)
        array = self._changed(t, t.keys[0], array)
        if array.dtype == np.int32:
            array = array.astype(np.int64)
        if t.one_row and array.ndim == 1:
            array = array[None]
        return np.ascontiguousarray(array.T) if t.inputs_first else array

    def _joined(self, key: str, t: _Tensor) -> QTensor | NDArray[Any]:
        """A parameter of several tensors: their rows one after another in the model's order, or
        what `Architecture.joins` makes of their values.
        """
        dtype = self.info(key).dtype
        read: list[QTensor | NDArray[Any]] = []
        for k in t.keys:
            weight = self._values(t, self.source[k])
            order = self._order(stem_of(self.source.tensor_name(k)), weight.shape[0])
            if isinstance(weight, QTensor):
                read.append(weight if order is None else take_rows(weight, order))
            else:
                read.append(self._changed(t, k, weight if order is None else weight[order]))
        packed = [r for r in read if isinstance(r, QTensor)]
        if packed:
            if why := incompatibility(packed):
                raise UnsupportedError(f"[gguf] {self.source.path}: {', '.join(t.keys)} cannot be {key}: {why}")
            whole = concat_rows(packed)
            order = self._order(t.joined, whole.shape[0])
            return whole if order is None else take_rows(whole, order)
        arrays = [np.asarray(r).astype(dtype_named(dtype), copy=False) for r in read]
        if t.joined in self.architecture.joins:
            return np.ascontiguousarray(self.architecture.joins[t.joined].read(self.settings, arrays))
        array = np.concatenate(arrays)
        order = self._order(t.joined, len(array))
        return array if order is None else array[order]

    def _stack(self, t: _Tensor) -> NDArray[Any]:
        """transformers' parameter of all experts."""
        read = [np.asarray(self._values(t, self.source[k])) for k in t.keys]
        array = np.concatenate(read, axis=1) if len(read) > 1 else read[0]
        array = np.ascontiguousarray(array.swapaxes(1, 2)) if t.transposed else array
        return array.reshape(-1, array.shape[-1]) if t.flat else array

    def names(self) -> dict[str, str]:
        """Key of the file -> key of the view, for tensors that are one in both."""
        return {
            t.keys[0]: key
            for key, t in self._tensors.items()
            if len(t.keys) == 1 and t.expert is None and t.element is None and not t.part
        }

    def modules_of_source(self) -> dict[str, tuple[str, int | None]]:
        """Module of the view -> (module of the file, its number in a stack): the first one of a
        module that the file has in parts, whose inputs are the same.
        """
        return {
            key.removesuffix(".weight"): (t.keys[0].removesuffix(".weight"), t.element if t.expert is None else t.expert)
            for key, t in self._tensors.items()
            if t.keys
        }

    def input_orders(self) -> dict[str, NDArray[np.int64]]:
        """Module of the file -> its index of each input of the view, where the order is another."""
        found = {
            t.keys[0]: self._columns(t.stem, self.source.info(t.keys[0]).shape[-1]) for t in self._tensors.values() if t.stem
        }
        return {key.removesuffix(".weight"): order for key, order in found.items() if order is not None}

    def _alternating(self, key: str, keys: tuple[str, ...]) -> QTensor | NDArray[Any]:
        gate, up = (self.source[k] for k in keys)
        if isinstance(gate, QTensor) and isinstance(up, QTensor):
            if why := incompatibility([gate, up]):
                raise UnsupportedError(f"[gguf] {self.source.path}: {keys[0]} and {keys[1]} cannot be the stack {key}: {why}")
            n = gate.shape[-2]
            return take_rows(concat_rows([gate, up]), np.arange(2 * n).reshape(2, n).T.reshape(-1))
        return np.stack([np.asarray(gate), np.asarray(up)], axis=-1).reshape(*gate.shape[:-1], -1)

    def fetch(self, key: str) -> None:
        for k in self.source_keys(key):
            self.source.fetch(k)


def _stem(name: str) -> str:
    """A tensor's name without its end."""
    return name.removesuffix(".weight").removesuffix(".bias")


def _query_key_value(settings: Any, rows: int) -> list[int]:
    """Where the rows of queries and of keys end in one projection: there are as many heads for
    keys as for values.
    """
    length, queries = settings.head_dim, settings.num_attention_heads * settings.head_dim
    both = length + getattr(settings, "v_head_dim", length)
    return [queries, queries + (rows - queries) // both * length]


def model_config(settings: Mapping[str, Any], task: str) -> dict[str, Any]:
    """config.json of a model with these settings: with the class, and the rotation also under the
    names that older programs read. task: `Architecture.task`.
    """
    kind = str(settings["model_type"])
    named = with_older_names({"architectures": [class_name(kind, task)], **_shortest(dict(settings))})
    return {k: v for k, v in (named | published(named)).items() if k not in REPLACED.get(kind, ())}


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of transformers 5, which has the rotation in `rope_parameters`, with what other
    programs (mlx-lm, llama.cpp's converter) read in its place: `rope_theta`, `rope_scaling`,
    `rope_local_base_freq`, `sliding_window_pattern` and, of Qwen 3's experts, `num_experts`. A name
    that is there stays, but for PUBLISHED_VALUES.
    """
    older: dict[str, Any] = {}
    rope = config.get("rope_parameters") or {}
    main = rope if "rope_type" in rope else rope.get("full_attention") or {}
    if "rope_theta" in main:
        older["rope_theta"] = main["rope_theta"]
    scaled = {k: v for k, v in main.items() if k != "rope_theta"}
    # transformers takes `rope_scaling` for the rotation of all layers, except where Gemma 3's code
    # reads it.
    whole = main is rope or str(config.get("model_type", "")).startswith("gemma3")
    if scaled.get("rope_type", "default") != "default" and whole:
        older["rope_scaling"] = scaled
    if main is not rope and "rope_theta" in rope.get("sliding_attention", {}):
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if config.get("_sliding_window_pattern"):
        older["sliding_window_pattern"] = config["_sliding_window_pattern"]
    if str(config.get("model_type", "")).startswith("qwen3") and config.get("num_local_experts"):
        older["num_experts"] = config["num_local_experts"]
    named = {**config, **{k: v for k, v in older.items() if config.get(k) is None}}
    return {**named, **{k: v for k, v in published(named).items() if config.get(k) is None or k in PUBLISHED_VALUES}}


def _shortest(value: Any) -> Any:
    """Floats of a file, which are float32, in the fewest digits that mean them."""
    if isinstance(value, dict):
        return {k: _shortest(v) for k, v in value.items()}
    return float(str(np.float32(value))) if isinstance(value, float) else value


def as_model(checkpoint: Checkpoint, layout: str, **options: Any) -> Checkpoint:
    """The checkpoint under transformers' names where it is a GGUF of a model that has a table, else
    itself (`no_model` has the reason).

    layout   the target's, "" for dense safetensors
    options  further ones of `ModelView`
    Raises CheckpointError for a header that contradicts the tensors, unless some of them are
    allowed by name (`open`).
    """
    if not isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint
    own_names = bool(layout) and LAYOUTS[layout].engine_names
    by_layout = {"switch": own_names, "published": True, "joined": bool(layout) and not own_names, "dense": not layout}
    try:
        return ModelView(checkpoint, **{**by_layout, **options})
    except (UnsupportedError, MissingError):
        return checkpoint
    except CheckpointError as error:
        if checkpoint.allowed:
            return checkpoint
        raise CheckpointError(f"[gguf] {str(error).partition('] ')[2]}") from error


def no_model(checkpoint: GGUFCheckpoint) -> str:
    """Why a GGUF cannot be written under transformers' names, "" where it can."""
    try:
        ModelView(checkpoint)
    except (UnsupportedError, CheckpointError) as error:
        return str(error).partition("] ")[2].removeprefix(f"{checkpoint.path}: ")
    return ""
