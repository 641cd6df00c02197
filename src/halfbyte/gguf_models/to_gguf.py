"""A folder as a GGUF: llama.cpp's names, row orders and key-values for a transformers checkpoint,
dense or packed.

    view = GGUFView(open("folder"))     view["blk.0.attn_q"], view.pairs, view.shapes

The tables are those of `architectures.py`, read from the model to the file: rows of LLaMA's q and k
are interleaved, Gemma's norms get their 1, experts are stacked and gate and up are separate. Whole
rows are moved, so packed weights keep every bit. The header is read back by `settings_of` before
anything is written, and must describe the configuration that the folder has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo, expert_names
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.gguf.writer import Pair
from ..checkpoints.views.base import View
from ..errors import CheckpointError, UnsupportedError, plural
from ..spec import Format
from ..tensor.concat import concat_rows, stack, take_rows
from ..tensor.qtensor import QTensor
from .architecture import EXPERTS, PARAMETER, Architecture, Field
from .architectures import ARCHITECTURES, MIXTRAL
from .config import settings_of
from .cycles import hrm_text
from .mixtures import COHERE2_MOE_RMS
from .names import INPUTS_FIRST, ONE_ROW, row_order, unsupported
from .pairs import Header, metadata_of, pair
from .rotation import attention_factor, stored_factors
from .stated import BARE, CONSTANT, DERIVED, SAME_MODEL, SHARED_WIDTHS, STATED
from .view import INTERLEAVED

_NEEDED = (
    "[convert] {path}: writing a GGUF from a folder needs transformers and tokenizers, for the configuration and the vocabulary; "
    "pip install 'halfbyte[transformers]', or give a GGUF of the same model with --like"
)
_OTHER_MODALITY = re.compile(r"(.*\.)?(vision_tower|visual|vision_model|multi_modal_projector|audio_tower|embed_vision)\..+")
"""Tensors of an image or sound encoder beside the text model."""
_WRAPPERS = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_head", "lm_head"))
_MIXTRAL_MODULE = ".block_sparse_moe."
"""The module of Mixtral's checkpoints that its class in transformers calls `mlp`."""
_FUSED = {
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
}
FLOAT32 = ("ffn_gate_inp", ONE_ROW, "attn_sinks", "exp_probs_b")
"""Stems that llama.cpp keeps in float32 besides vectors."""


Rounder = Callable[[str, NDArray[Any], Format], QTensor]


@dataclass(frozen=True)
class _Piece:
    """Rows of one tensor of the folder.

    rows  "all", or "even", "odd", "first", "second" of each matrix
    """

    key: str
    rows: str = "all"
    transposed: bool = False


@dataclass
class _Tensor:
    """One tensor of the file.

    pieces  experts to stack, or matrices whose rows follow one another
    """

    name: str
    stem: str
    pieces: list[_Piece]
    stacked: bool = False
    plus_one: bool = False


class GGUFView(View):
    """`source` under llama.cpp's names.

    pairs     key-values of the header
    notes     what the file cannot state
    left_out  keys of the source that the file does not get
    names_only  no header is made, which needs the tokenizer
    Raises UnsupportedError for a model that no GGUF of the tables describes, CheckpointError when
    files or tensors of the folder are missing.
    """

    def __init__(self, source: Checkpoint, names_only: bool = False) -> None:
        super().__init__(source)
        if not (find_spec("transformers") and find_spec("tokenizers")):
            raise UnsupportedError(_NEEDED.format(path=source.path))
        self.settings = _settings(source)
        self.arch, self.architecture = _variant(*architecture_for(source, str(self.settings.model_type)), self.settings)
        self.heads = int(self.settings.num_attention_heads)
        self.head_dim = int(getattr(self.settings, "head_dim", None) or self.settings.hidden_size // self.heads)
        self.notes: list[str] = []
        self.left_out: list[str] = []
        self._tensors: dict[str, _Tensor] = {}
        self._collect()
        rope = _main_rope(self.settings)
        self._factors = stored_factors(rope, self.head_dim)
        self.shapes = {t.name: self.info(key).shape for key, t in self._tensors.items()}
        self.shapes |= {name: factors.shape for name, factors in self._factors.items()}
        self.pairs = [] if names_only else self._pairs()
        if not names_only:
            self._read_back()

    # Names

    def _collect(self) -> None:
        """Find the tensors of the file among those of the folder."""
        stems = {path: stem for stem, path in self.architecture.names.items()}
        tops = {path: stem for stem, path in self.architecture.top.items()}
        found: dict[str, dict[int, _Piece]] = {}
        stem_by_name: dict[str, str] = {}
        unknown: list[str] = []
        for key in self.source.keys():  # noqa: SIM118 a checkpoint's keys are in file order
            if _OTHER_MODALITY.fullmatch(key):
                self.left_out.append(key)
                continue
            slots = list(self._slots(key, stems, tops))
            if not slots:
                unknown.append(key)
            for name, stem, number, piece in slots:
                found.setdefault(name, {})[number] = piece
                stem_by_name[name] = stem
        if unknown:
            raise UnsupportedError(
                f"[convert] {self.source.path}: {', '.join(unknown[:4])}{' ...' if len(unknown) > 4 else ''} have no name in a "
                f"GGUF of architecture {self.arch}"
            )
        for name, numbered in found.items():
            stem = stem_by_name[name]
            pieces = [numbered[i] for i in sorted(numbered)]
            stacked = stem.endswith("_exps") and -1 not in numbered
            if stacked and sorted(numbered) != list(range(len(numbered))):
                raise CheckpointError(
                    f"[convert] {self.source.path}: experts of {name} are missing; there are {sorted(numbered)}"
                )
            packed = self.source.info(pieces[0].key).quantized
            plus_one = (
                self.architecture.norm_offset
                and (stem.endswith("norm") or name.startswith("output_norm"))
                and (name.endswith(".weight"))
            )
            key = name.removesuffix(".weight") if packed else name
            self._tensors[key] = _Tensor(name, stem, pieces, stacked, plus_one)

    def _slots(self, key: str, stems: Mapping[str, str], tops: Mapping[str, str]) -> Iterator[tuple[str, str, int, _Piece]]:
        """(name in the file, stem, number among its pieces, piece) of what a key holds."""
        info = self.source.info(key)
        name = key if not info.quantized else f"{key}.weight"
        for old, new in _WRAPPERS:
            name = new + name[len(old) :] if name.startswith(old) else name
        if not any(path.startswith(_MIXTRAL_MODULE[1:]) for path in stems):
            name = name.replace(_MIXTRAL_MODULE, ".mlp.")
        layers = f"{self.architecture.layers}."
        for candidate in (name, f"model.{name}", f"transformer.{name}", f"gpt_neox.{name}"):
            path, _, leaf = candidate.rpartition(".")
            if path in tops:
                yield f"{tops[path]}.{leaf}", tops[path], 0, _Piece(key)
                return
            if (stem := tops.get(f"{path}{PARAMETER}{leaf}")) is not None:
                yield stem, stem, 0, _Piece(key)
                return
            if candidate.startswith(layers):
                number, _, within = candidate.removeprefix(layers).partition(".")
                if number.isdigit():
                    yield from self._layer_slots(key, info, number, within, stems)
                    return

    def _layer_slots(
        self, key: str, info: TensorInfo, number: str, within: str, stems: Mapping[str, str]
    ) -> Iterator[tuple[str, str, int, _Piece]]:
        """The same for a tensor of a layer."""
        start = f"blk.{number}."
        if found := expert_names.parse(within):
            leaf = found.leaf or "weight"
            interleaved = found.expert is None and found.gate_up_alternate(self.architecture.model_type in INTERLEAVED)
            parameter = found.expert is None and not info.quantized and not found.leaf
            piece_number = -1 if found.expert is None else found.expert
            for stem, rows in _halves(stems, found.path, found.projection, interleaved):
                yield f"{start}{stem}.{leaf}", stem, piece_number, _Piece(key, rows, parameter and interleaved)
            return
        path, _, leaf = within.rpartition(".")
        if f"{path}{PARAMETER}{leaf}" in stems:
            stem = stems[f"{path}{PARAMETER}{leaf}"]
            end = "" if stem in BARE.get(self.arch, ()) else ".bias" if stem == "exp_probs_b" else ".weight"
            yield f"{start}{stem}{end}", stem, 0, _Piece(key)
        elif path in stems:
            yield f"{start}{stems[path]}.{leaf}", stems[path], 0, _Piece(key)
        for fused, parts in _FUSED.items():
            if fused in stems and path in parts:
                yield f"{start}{stems[fused]}.{leaf}", stems[fused], parts.index(path), _Piece(key)

    # Values

    def keys(self) -> tuple[str, ...]:
        return (*self._tensors, *self._factors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors or key in self._factors

    @property
    def metadata(self) -> Mapping[str, Any]:
        return {}

    def tensor_name(self, key: str) -> str:
        """The name in the file of a key, packed or dense."""
        for candidate in (key, key.removesuffix(".weight"), f"{key}.weight"):
            if candidate in self._tensors:
                return self._tensors[candidate].name
        return key

    def source_names(self) -> dict[str, str]:
        """Module of the file -> its name in the folder, the first of several."""
        return {key.removesuffix(".weight"): t.pieces[0].key.removesuffix(".weight") for key, t in self._tensors.items()}

    def modules_of_source(self) -> dict[str, tuple[str, int | None]]:
        """Module of the folder -> (module of the file, its number in a stack): the first one of a
        module that the file splits.
        """
        found: dict[str, tuple[str, int | None]] = {}
        for t in self._tensors.values():
            for number, piece in enumerate(t.pieces if t.name.endswith(".weight") else ()):
                where = t.name.removesuffix(".weight"), number if t.stacked else None
                found.setdefault(piece.key.removesuffix(".weight"), where)
        return found

    def _tensor(self, key: str) -> _Tensor:
        if key not in self._tensors:
            raise self.missing(key)
        return self._tensors[key]

    def info(self, key: str) -> TensorInfo:
        if key in self._factors:
            factors = self._factors[key]
            return TensorInfo(key, "dense", "", None, factors.shape, "float32", factors.nbytes, ())
        t = self._tensor(key)
        infos = [self.source.info(p.key) for p in t.pieces]
        first = infos[0]
        shapes = [self._shape(i, p) for i, p in zip(infos, t.pieces, strict=True)]
        nbytes = sum(i.nbytes if p.rows == "all" else i.nbytes // 2 for i, p in zip(infos, t.pieces, strict=True))
        if t.stacked:
            shape: tuple[int, ...] = (len(shapes), *shapes[0])
        else:
            shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
        if t.stem == ONE_ROW and len(shape) == 2:
            shape = shape[1:]
        dtype = first.dtype if first.quantized else "float32" if self._is_float32(t, shape) else first.dtype
        return replace(first, key=key, shape=shape, dtype=dtype, nbytes=nbytes)

    def _shape(self, info: TensorInfo, piece: _Piece) -> tuple[int, ...]:
        shape = (*info.shape[:-2], info.shape[-1], info.shape[-2]) if piece.transposed else info.shape
        if piece.rows == "all":
            shape = shape[::-1] if self._inputs_first(piece) and not info.quantized and len(shape) == 2 else shape
            return shape
        axis = len(shape) - (1 if info.key.endswith("bias") else 2)
        return (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])

    def _inputs_first(self, piece: _Piece) -> bool:
        """Whether transformers stores a dense matrix as (inputs, outputs)."""
        stems = INPUTS_FIRST.get(self.architecture.model_type, ())
        return piece.key.endswith(".weight") and any(piece.key.endswith(f".{self.architecture.names[s]}.weight") for s in stems)

    def _is_float32(self, t: _Tensor, shape: tuple[int, ...]) -> bool:
        return len(shape) < 2 or t.stem in FLOAT32 or t.name.endswith(".bias")

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        if key in self._factors:
            return self._factors[key]
        t = self._tensor(key)
        return self._joined(t, [self._read(p) for p in t.pieces])

    def rounder(self, rounder: Rounder) -> Rounder:
        """A function that rounds modules of the source, for modules of the view: in the source's
        order of rows.
        """

        def rounded(module: str, x: NDArray[Any], fmt: Format) -> QTensor:
            t = self._tensor(module if module in self._tensors else f"{module}.weight")
            read: list[QTensor | NDArray[Any]] = []
            for piece in t.pieces:
                whole = self._read(replace(piece, rows="all"))
                q = rounder(piece.key.removesuffix(".weight"), np.asarray(whole), fmt)
                read.append(q if piece.rows == "all" else take_rows(q, _chosen(q.shape[-2], piece.rows)))
            joined = self._joined(t, read)
            assert isinstance(joined, QTensor)
            return joined

        return rounded

    def _joined(self, t: _Tensor, read: list[QTensor | NDArray[Any]]) -> QTensor | NDArray[Any]:
        """A tensor of the file from its pieces."""
        packed = [r for r in read if isinstance(r, QTensor)]
        order = self._order(t, sum(r.shape[0] for r in read))
        if packed:
            if len(packed) != len(read):
                raise CheckpointError(
                    f"[convert] {t.name}: some of its parts are packed and some are dense: {t.pieces[0].key}, ..."
                )
            q = (stack(packed) if t.stacked else concat_rows(packed)) if len(packed) > 1 or t.stacked else packed[0]
            return q if order is None else take_rows(q, order)
        arrays = [np.asarray(r) for r in read]
        array = np.stack(arrays) if t.stacked else np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        array = array if order is None else array[order]
        if t.plus_one:
            array = array.astype(np.float32) + np.float32(1)
        if t.stem == ONE_ROW and array.ndim == 2:
            array = array[0]
        return np.ascontiguousarray(array.astype(np.float32) if self._is_float32(t, array.shape) else array)

    def _order(self, t: _Tensor, rows: int) -> NDArray[np.int64] | None:
        order = row_order(self.architecture, t.stem, rows, self.heads, self.head_dim)
        return None if order is None else np.argsort(order)

    def _read(self, piece: _Piece) -> QTensor | NDArray[Any]:
        weight = self.source[piece.key]
        if isinstance(weight, QTensor):
            if piece.rows == "all":
                return weight
            return take_rows(weight, _chosen(weight.shape[-2], piece.rows))
        array = np.swapaxes(weight, -1, -2) if piece.transposed else weight
        if piece.rows == "all":
            return array.T if self._inputs_first(piece) else array
        axis = array.ndim - (1 if piece.key.endswith("bias") else 2)
        return np.take(array, _chosen(array.shape[axis], piece.rows), axis)

    def fetch(self, key: str) -> None:
        for p in self._tensors[key].pieces if key in self._tensors else ():
            self.source.fetch(p.key)

    # Header

    def _pairs(self) -> list[Pair]:
        """Every key-value but the file type."""
        from .vocabulary import vocabulary_pairs

        folder = self.source.path if self.source.path.is_dir() else self.source.path.parent
        own = {f"{w}_token_id": getattr(self.settings, f"{w}_token_id", None) for w in ("bos", "eos", "unk", "pad")}
        rows = self.shapes["token_embd.weight"][0] if "token_embd.weight" in self.shapes else 0
        general = [
            pair("general.architecture", "string", self.arch), pair("general.type", "string", "model"),
            pair("general.name", "string", folder.resolve().name), pair("general.quantization_version", "uint32", 2),
        ]  # fmt: skip
        return [*general, *self._model_pairs(), *vocabulary_pairs(folder, own, rows, self.arch)]

    def _model_pairs(self) -> list[Pair]:
        def get(name: str) -> Any:
            """A field; `a.b` is field b of the configuration in field a."""
            outer, _, inner = name.rpartition(".")
            return _one(getattr(getattr(self.settings, outer) if outer else self.settings, inner, None))

        hidden, kv = int(self.settings.hidden_size), get("num_key_value_heads") or self.heads
        rope = _main_rope(self.settings)
        rotated = int(self.head_dim * float(rope.get("partial_rotary_factor") or get("partial_rotary_factor") or 1))
        sizes = {
            "context_length": get("max_position_embeddings") or get("max_seq_len"), "embedding_length": hidden,
            "block_count": get("num_hidden_layers"),
            "feed_forward_length": get("intermediate_size") or get("n_inner") or 4 * hidden,
            "attention.head_count": self.heads, "attention.head_count_kv": kv, "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim, "rope.dimension_count": rotated, "vocab_size": get("vocab_size"),
        }  # fmt: skip
        stated: list[tuple[str, str, Any]] = [(key, "uint32", value) for key, value in sizes.items()]
        key, name = self.architecture.eps
        stated.append((key, "float32", get(name)))
        stated.append(("rope.freq_base", "float32", rope.get("rope_theta")))
        if rope.get("rope_type") in ("linear", "yarn"):
            stated += [("rope.scaling.type", "string", rope["rope_type"]), ("rope.scaling.factor", "float32", rope["factor"])]
        if rope.get("rope_type") == "yarn":
            stated.append(("rope.scaling.original_context_length", "uint32", rope.get("original_max_position_embeddings")))
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or get("original_max_position_embeddings")
            scale = attention_factor(rope, sizes["context_length"] / original)
            stated.append(("rope.scaling.original_context_length", "uint32", original))
            stated.append(("rope.scaling.attn_factor", "float32", scale))
        local = (get("rope_parameters") or {}).get("sliding_attention")
        if isinstance(local, dict):
            stated.append(("rope.freq_base_swa", "float32", local.get("rope_theta")))
        kinds = {"size": "uint32", "integer": "uint32", "positive": "float32", "float": "float32", "bool": "bool"}
        fields: tuple[Field, ...] = (*self.architecture.fields, *STATED.get(self.arch, ()))
        stated += [(f.key, kinds[f.kind], get(f.name)) for f in fields]
        stated += CONSTANT.get(self.arch, ())
        stated += DERIVED.get(self.arch, lambda settings: [])(self.settings)
        if self.arch in SHARED_WIDTHS:
            width, count = map(get, SHARED_WIDTHS[self.arch])
            stated.append(("expert_shared_feed_forward_length", "uint32", width * (1 if count is None else count) or None))
        last: dict[str, tuple[str, Any]] = {}
        for key, kind, value in stated:
            value = value[0] if isinstance(value, list) and value and not kind.startswith("array") else value
            if value is not None:
                last[key] = (kind, value)
        return [pair(f"{self.arch}.{key}", kind, value) for key, (kind, value) in last.items()]

    def _read_back(self) -> None:
        """UnsupportedError where the header describes another model than the configuration."""
        shapes = {**self.shapes, **{n.removesuffix(".weight"): s for n, s in self.shapes.items()}}
        header = Header(self.source.path, metadata_of(self.pairs, self.source.path), shapes, self._factors)
        try:
            read = settings_of(cast(GGUFCheckpoint, header))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace("[load_model]", "[convert]")) from error
        different = []
        for name, value in read.items():
            own = getattr(self.settings, name, None)
            if name in _NOT_COMPARED or name.endswith(("_bias", "token_id")) or own is None:
                continue
            if name == "original_max_position_embeddings" and _main_rope(self.settings).get("rope_type", "default") == "default":
                continue  # Phi-3 chooses between long and short factors by it, and there are none
            if name == "rope_parameters":
                value, own = _comparable(value), _comparable(own)
                if own.get("rope_type") == "llama3":
                    continue  # the reader has the tensor of its factors in their place
            if isinstance(value, dict) and not isinstance(own, dict):
                own = vars(own)  # a configuration within the configuration
            if not _equal(value, own if isinstance(value, list) else _one(own)):
                different.append(f"{name} is {own!r}, a GGUF of {self.arch} says {value!r}")
        if different:
            raise UnsupportedError(
                f"[convert] {self.source.path}: its config.json describes a model that a GGUF of {self.arch} cannot state: "
                f"{'; '.join(different[:4])}"
            )
        window = getattr(self.settings, "sliding_window", None)
        if window and getattr(self.settings, "use_sliding_window", True) and "sliding_window" not in read:
            self.notes.append(
                f"the file states no sliding window: texts longer than {window:,} tokens are read whole, where the model "
                "drops the oldest"
            )
        if self.left_out:
            self.notes.append(
                f"the text model alone is written, without {plural(len(self.left_out), 'tensor')} of its image or sound encoder"
            )


_NOT_COMPARED = ("model_type", "tie_word_embeddings", "vocab_size", "use_bias", "use_qkv_bias", "partial_rotary_factor")
"""Settings that are read from the tensors, or that the reader gives under several names."""


def _equal(a: Any, b: Any) -> bool:
    """Equal values; floats as float32, which a file stores."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_equal(a[k], b[k]) for k in a.keys() & b.keys())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return bool(np.float32(a) == np.float32(b)) if isinstance(a, (int, float)) and isinstance(b, (int, float)) else a == b
    return bool(a == b)


def _one(value: Any) -> Any:
    """A list of one number a layer, all equal, as that number."""
    same = isinstance(value, list) and value and all(isinstance(v, (int, float)) and v == value[0] for v in value)
    return value[0] if same else value


def _comparable(rope: Any) -> Any:
    """Rotation parameters without what files do not state."""
    if not isinstance(rope, dict):
        return rope
    return {k: _comparable(v) for k, v in rope.items() if v is not None}


def _halves(stems: Mapping[str, str], path: str, projection: str, interleaved: bool) -> Iterator[tuple[str, str]]:
    """(stem, rows) of a projection of experts: gate and up where it holds both."""
    if projection != "gate_up_proj":
        if f"{path}{EXPERTS}{projection}" in stems:
            yield stems[f"{path}{EXPERTS}{projection}"], "all"
        return
    for half, rows in zip(("gate_proj", "up_proj"), ("even", "odd") if interleaved else ("first", "second"), strict=True):
        if f"{path}{EXPERTS}{half}" in stems:
            yield stems[f"{path}{EXPERTS}{half}"], rows


def _chosen(rows: int, which: str) -> NDArray[np.int64]:
    start, stop, step = {"even": (0, rows, 2), "odd": (1, rows, 2), "first": (0, rows // 2, 1), "second": (rows // 2, rows, 1)}[
        which
    ]
    return np.arange(start, stop, step)


class Replaced(View):
    """`source` with other values of some dense tensors."""

    def __init__(self, source: Checkpoint, replaced: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(source)
        self.replaced = replaced

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        return self.replaced[key] if key in self.replaced else self.source[key]


def as_gguf(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under llama.cpp's names; a GGUF is itself."""
    return checkpoint if isinstance(checkpoint, GGUFCheckpoint) else GGUFView(checkpoint)


def _settings(source: Checkpoint) -> Any:
    """transformers' configuration of the text model, its defaults filled in."""
    from transformers import AutoConfig

    raw = {
        k: v
        for k, v in source.config.items()
        if k not in ("quantization_config", "quantization", "compression_config", "auto_map")
    }
    kind = raw.pop("model_type", None)
    if not isinstance(kind, str):
        raise CheckpointError(
            f"[convert] {source.path}: no config.json with a model_type, and a GGUF states architecture and sizes. "
            "Give a GGUF of the same model with --like"
        )
    try:
        return AutoConfig.for_model(kind, **raw).get_text_config(decoder=True)
    except Exception as error:  # its checks raise errors of many kinds
        raise UnsupportedError(
            f"[convert] {source.path}: its config.json describes no {kind} that transformers knows "
            f"({' '.join(str(error).split())[:120]}). Give a GGUF of the same model, of any type, with --like: names, tokenizer "
            "and key-values are taken from it (llama.cpp's convert_hf_to_gguf.py makes one)"
        ) from error


def _main_rope(settings: Any) -> dict[str, Any]:
    """Rotation of the global layers."""
    rope = getattr(settings, "rope_parameters", None) or {}
    main = rope.get("full_attention", rope)
    return dict(main)


def architecture_for(source: Checkpoint, model_type: str) -> tuple[str, Architecture]:
    """(general.architecture, table) of a transformers model type. UnsupportedError for one without
    a table.
    """
    wanted = SAME_MODEL.get(model_type, model_type)
    if wanted == MIXTRAL.model_type:
        return "llama", MIXTRAL
    names = [name for name, a in ARCHITECTURES.items() if a.model_type == wanted]
    names.sort(key=lambda name: ARCHITECTURES[name].task != "text")  # Gemma 3's encoder is no Gemma 3
    if not names:
        known = sorted({a.model_type for a in ARCHITECTURES.values()} | {MIXTRAL.model_type, *SAME_MODEL})
        raise UnsupportedError(
            f"[convert] {source.path}: model_type {model_type!r} has no table of a GGUF here; there are {', '.join(known)}. A "
            "GGUF of the same model, of any type, gives names and key-values with --like"
        )
    plain = re.sub(r"[-_]", "", wanted)
    name = next((n for n in names if re.sub(r"[-_]", "", n) == plain), names[0])
    if feature := unsupported(ARCHITECTURES[name]):
        raise UnsupportedError(
            f"[convert] {source.path}: {model_type} changes tensors on the way into a GGUF ({feature}); give --like"
        )
    return name, ARCHITECTURES[name]


def _variant(name: str, architecture: Architecture, settings: Any) -> tuple[str, Architecture]:
    """The table of a model, which for some names depends on the configuration."""
    if name == "hrm_text":
        return name, hrm_text(int(settings.num_layers_per_stack))
    if name == "cohere2moe" and getattr(settings, "rms_norm_eps", None):
        return name, COHERE2_MOE_RMS
    return name, architecture
