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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.architecture import longrope_factor
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.gguf.writer import Pair
from ..checkpoints.io.bounded_json import decoded_floats
from ..checkpoints.views.base import View
from ..errors import CheckpointError, UnsupportedError, plural
from ..spec import Format
from ..tensor.concat import concat_rows, moved_units, stack, take_inputs, take_rows
from ..tensor.qtensor import QTensor
from .architecture import Architecture, Change, Field
from .architectures import ARCHITECTURES
from .config import register, settings_of
from .folder_names import FolderNames, Piece
from .names import INPUTS_FIRST, ONE_ROW, input_order
from .pairs import Header, metadata_of, pair
from .rotation import stored_factors, with_defaults
from .stated import CONSTANT, DERIVED, KEYED, SHARED_WIDTHS, STATED, Keyed, nothing
from .variants import SAME_MODEL, SAME_SIZES, VARIANTS

_NEEDED = (
    "[convert] {path}: writing a GGUF from a folder needs transformers and tokenizers, for the configuration and the vocabulary; "
    "pip install 'halfbyte[transformers]', or give a GGUF of the same model with --like"
)
FLOAT32 = ("ffn_gate_inp", ONE_ROW, "attn_sinks", "exp_probs_b", "altup_correct_coef", "altup_predict_coef", "attn_rel_b")
"""Stems that llama.cpp keeps in float32 besides vectors, convolutions and what a `Change` makes."""


Rounder = Callable[[str, NDArray[Any], Format], QTensor]


@dataclass
class _Tensor:
    """One tensor of the file.

    path    module path that the table has for it
    pieces  experts or modules of a list to stack, or matrices whose rows follow one another
    """

    name: str
    stem: str
    path: str
    pieces: list[Piece] = field(default_factory=list)
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
        self.arch, self.architecture = architecture_for(source, self.settings)
        self.heads = int(getattr(self.settings, "num_attention_heads", None) or 0)
        self.head_dim = int(
            getattr(self.settings, "head_dim", None) or (self.settings.hidden_size // self.heads if self.heads else 0)
        )
        self.names = FolderNames(self.architecture, self.arch, self.settings, self.heads, self.head_dim, self.source.path)
        self.notes: list[str] = []
        self.left_out: dict[str, str] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._collect()
        self._factors = stored_factors(_main_rope(self.settings), self._rotated_length()) | self._unused()
        self.shapes = {t.name: self.info(key).shape for key, t in self._tensors.items()}
        self.shapes |= {name: factors.shape for name, factors in self._factors.items()}
        self.pairs = [] if names_only else self._pairs()
        if not names_only:
            self._read_back()

    # Names

    def _collect(self) -> None:
        """Find the tensors of the file among those of the folder."""
        found: dict[str, dict[int, Piece]] = {}
        tensors: dict[str, _Tensor] = {}
        unknown: list[str] = []
        for key in self.source.keys():  # noqa: SIM118 a checkpoint's keys are in file order
            if why := self.names.left_out(key):
                self.left_out[key] = why
                continue
            if self.names.is_keyed(key):
                continue
            places = self.names.places(key, self.source.info(key))
            if not places:
                unknown.append(key)
            for place in places:
                t = tensors.setdefault(place.name, _Tensor(place.name, place.stem, place.path))
                t.stacked |= place.stack and place.number >= 0
                found.setdefault(place.name, {}).setdefault(place.number, place.piece)
        if unknown:
            raise UnsupportedError(
                f"[convert] {self.source.path}: {', '.join(unknown[:4])}{' ...' if len(unknown) > 4 else ''} have no name in a "
                f"GGUF of architecture {self.arch}"
                f"{'' if self.names.knows_rules else '; transformers has rules for such names, which need torch'}"
            )
        for name, numbered in found.items():
            t = tensors[name]
            t.pieces = [numbered[i] for i in sorted(numbered)]
            if t.stacked and sorted(numbered) != list(range(len(numbered))):
                raise CheckpointError(
                    f"[convert] {self.source.path}: experts of {name} are missing; there are {sorted(numbered)}"
                )
            packed = self.source.info(t.pieces[0].key).quantized
            t.plus_one = self.architecture.adds_one(t.path, name.rpartition(".")[2], t.stem)
            inputs = self._input_order(t, self.source.info(t.pieces[0].key).shape[-1])
            if packed and (why := self._other_values(t) or ("has its inputs in another order" if inputs is not None else "")):
                raise UnsupportedError(
                    f"[convert] {self.source.path}: {t.pieces[0].key} is packed, and {why} in {name} of a GGUF of {self.arch}. "
                    "halfbyte dequantize makes a dense folder of it, and halfbyte quantize --to gguf:TYPE packs that one"
                )
            self._tensors[name.removesuffix(".weight") if packed else name] = t

    def _other_values(self, t: _Tensor) -> str:
        """What a tensor of the file has that packed weights of the folder cannot give, besides an
        order of inputs, as a clause of its weights; "" for nothing.
        """
        if any(p.part for p in t.pieces):
            return "is divided, its rows becoming columns,"
        if t.stem in self.architecture.changes or t.plus_one:
            return "has other values"
        return "is transposed" if any(p.transposed for p in t.pieces) else ""

    def _rotated_length(self) -> int:
        """Channels of a head that rotate by the global layers' frequencies."""
        return int(getattr(self.settings, "global_head_dim", None) or self.head_dim)

    def _unused(self) -> dict[str, NDArray[np.float32]]:
        """Zeros for tensors that a file has and no layer reads: Gemma 3n's keys of layers that take
        another's, which a folder may leave out and llama.cpp asks for.
        """
        if self.arch != "gemma3n":
            return {}
        c = self.settings
        shapes = {"attn_k": (c.num_key_value_heads * c.head_dim, c.hidden_size), "attn_k_norm": (c.head_dim,)}
        shapes["attn_v"] = shapes["attn_k"]
        names = [
            (f"blk.{layer}.{stem}.weight", shape)
            for layer in range(c.num_hidden_layers - c.num_kv_shared_layers, c.num_hidden_layers)
            for stem, shape in shapes.items()
        ]
        return {
            name: np.zeros(shape, np.float32)
            for name, shape in names
            if not {name, name.removesuffix(".weight")} & self._tensors.keys()
        }

    # Values

    def keys(self) -> tuple[str, ...]:
        return (*self._tensors, *self._factors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors or key in self._factors

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What says that names are llama.cpp's."""
        return {"general.architecture": self.arch}

    def tensor_name(self, key: str) -> str:
        """The name in the file of a key, packed or dense."""
        for candidate in (key, key.removesuffix(".weight"), f"{key}.weight"):
            if candidate in self._tensors:
                return self._tensors[candidate].name
        return key

    def changed_keys(self) -> list[str]:
        """Keys of values that the folder has in another form: the first of each kind."""
        first = {t.stem: key for key, t in reversed(self._tensors.items()) if t.stem in self.architecture.changes}
        return list(first.values())

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
        nbytes = sum(i.nbytes * int(np.prod(s)) // max(1, int(np.prod(i.shape))) for i, s in zip(infos, shapes, strict=True))
        if t.stacked:
            shape: tuple[int, ...] = (len(shapes), *shapes[0])
        else:
            shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
        if t.stem == ONE_ROW and len(shape) == 2:
            shape = shape[1:]
        if not first.quantized and (change := self._change(t, shape)) is not None and change.reshapes:
            shape = change.write(self.settings, np.zeros(shape, np.float32)).shape
        dtype = first.dtype if first.quantized else self._dtype(t, shape, first.dtype)
        return replace(first, key=key, shape=shape, dtype=dtype, nbytes=nbytes)

    def _shape(self, info: TensorInfo, piece: Piece) -> tuple[int, ...]:
        shape = info.shape
        if piece.experts:
            shape = (piece.experts, shape[0] // piece.experts, *shape[1:])
        if piece.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if piece.part is not None:
            divide, number = piece.part
            return divide(np.empty(shape, np.int8))[number].shape
        if self._inputs_first(piece) and not info.quantized and len(shape) == 2:
            shape = shape[::-1]
        if piece.rows is None:
            return shape
        axis = _row_axis(piece, len(shape))
        return (*shape[:axis], len(piece.rows(shape[axis])), *shape[axis + 1 :])

    def _inputs_first(self, piece: Piece) -> bool:
        """Whether transformers stores a dense matrix as (inputs, outputs)."""
        stems = INPUTS_FIRST.get(self.architecture.model_type, ())
        return piece.key.endswith(".weight") and any(piece.key.endswith(f".{self.architecture.names[s]}.weight") for s in stems)

    def _change(self, t: _Tensor, shape: tuple[int, ...]) -> Change | None:
        """How the file has the values of a tensor that the folder has in this shape."""
        return None if t.name.endswith(".bias") and len(shape) == 1 else self.architecture.changes.get(t.stem)

    def _dtype(self, t: _Tensor, shape: tuple[int, ...], dtype: str) -> str:
        """Numbers that are no weights of a product are float32, or int32."""
        if dtype.startswith("int"):
            return "int32"
        plain = len(shape) < 2 or t.stem in FLOAT32 or t.stem in self.architecture.changes or t.name.endswith(".bias")
        return "float32" if plain or t.stem.startswith(("hc_", "output_hc_")) else dtype

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        if key in self._factors:
            return self._factors[key]
        t = self._tensor(key)
        return self._joined(t, [self._read(p) for p in t.pieces])

    def input_orders(self) -> dict[str, NDArray[np.int64]]:
        """Module of the file -> its index of each input of the source, where the order is another."""
        found = {t.name: self._input_order(t, self.source.info(t.pieces[0].key).shape[-1]) for t in self._tensors.values()}
        return {name.removesuffix(".weight"): order for name, order in found.items() if order is not None}

    def rounder(self, rounder: Rounder, of_file: Rounder) -> Rounder:
        """A function that rounds modules of the source, for modules of the view: as the source has
        their rows and inputs. `of_file` rounds what the file has of other values than the source,
        or of inputs in an order that divides groups of the format, as the file has it.
        """

        def rounded(module: str, x: NDArray[Any], fmt: Format) -> QTensor:
            t = self._tensor(module if module in self._tensors else f"{module}.weight")
            order = self._input_order(t, x.shape[-1])
            inputs = None if order is None else np.argsort(order)
            if self._other_values(t) or (inputs is not None and moved_units(inputs, fmt) is None):
                return of_file(t.pieces[0].key.removesuffix(".weight"), x, fmt)
            read: list[QTensor | NDArray[Any]] = []
            for piece in t.pieces:
                whole = self._read(replace(piece, rows=None))
                q = rounder(piece.key.removesuffix(".weight"), np.asarray(whole), fmt)
                read.append(q if piece.rows is None else take_rows(q, piece.rows(q.shape[-2])))
            joined = self._joined(t, read)
            assert isinstance(joined, QTensor)
            return joined if inputs is None else take_inputs(joined, inputs)

        return rounded

    def _joined(self, t: _Tensor, read: list[QTensor | NDArray[Any]]) -> QTensor | NDArray[Any]:
        """A tensor of the file from its pieces."""
        packed = [r for r in read if isinstance(r, QTensor)]
        if packed:
            if len(packed) != len(read):
                raise CheckpointError(
                    f"[convert] {t.name}: some of its parts are packed and some are dense: {t.pieces[0].key}, ..."
                )
            q = (stack(packed) if t.stacked else concat_rows(packed)) if len(packed) > 1 or t.stacked else packed[0]
            order = self._order(t, q.shape[0])
            return q if order is None else take_rows(q, order)
        arrays = [np.asarray(r) for r in read]
        array = np.stack(arrays) if t.stacked else np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        if t.stem == ONE_ROW and array.ndim == 2:
            array = array[0]
        if (change := self._change(t, array.shape)) is not None:
            array = change.write(self.settings, array.astype(np.float32))
        if t.plus_one:
            array = array.astype(np.float32) + np.float32(1)
        if (inputs := self._input_order(t, array.shape[-1])) is not None:
            array = array[..., np.argsort(inputs)]
        order = self._order(t, array.shape[0])
        array = array if order is None else array[order]
        dtype = self._dtype(t, array.shape, array.dtype.name)
        return np.ascontiguousarray(array if dtype == array.dtype.name else array.astype(dtype))

    def _input_order(self, t: _Tensor, width: int) -> NDArray[np.int64] | None:
        return input_order(self.architecture, self.settings, t.stem, width, self.source.path)

    def _order(self, t: _Tensor, rows: int) -> NDArray[np.int64] | None:
        if t.stem in self.architecture.splits:  # each piece is in order
            return None
        order = self.names.order(t.stem, rows)
        return None if order is None else np.argsort(order)

    def _read(self, piece: Piece) -> QTensor | NDArray[Any]:
        weight = self.source[piece.key]
        if isinstance(weight, QTensor):
            return weight if piece.rows is None else take_rows(weight, piece.rows(weight.shape[-2]))
        array = weight.reshape(piece.experts, -1, *weight.shape[1:]) if piece.experts else weight
        array = np.swapaxes(array, -1, -2) if piece.transposed else array
        if piece.part is not None:
            divide, number = piece.part
            return divide(array)[number]
        if self._inputs_first(piece) and array.ndim == 2:
            array = array.T
        if piece.rows is None:
            return array
        axis = _row_axis(piece, array.ndim)
        return np.take(array, piece.rows(array.shape[axis]), axis)

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
        return [*general, *self._model_pairs(), *self._keyed_pairs(), *vocabulary_pairs(folder, own, rows, self.arch)]

    def _keyed_pairs(self) -> list[Pair]:
        """Key-values that are parameters of the model."""
        layers = int(self.settings.num_hidden_layers)

        def values(keyed: Keyed, keys: Mapping[int, str]) -> list[Any]:
            read = {layer: np.asarray(self.source[key]).reshape(-1).tolist() for layer, key in keys.items()}
            if "int" in keyed.kind:
                return next(iter(read.values()))
            missing = [i for i in range(layers) if i not in read]
            if missing and keyed.default is None:
                raise CheckpointError(f"[convert] {self.source.path}: layer {missing[0]} has no {keyed.key.rpartition('.')[2]}")
            return [read[i][0] if i in read else keyed.default for i in range(layers)]

        stated = {keyed: self.names.keyed.get(keyed, {}) for keyed in KEYED.get(self.arch, {}).values()}
        return [
            pair(_key(self.arch, keyed.key), keyed.kind, values(keyed, keys))
            for keyed, keys in stated.items()
            if keys or keyed.default is not None
        ]

    def _model_pairs(self) -> list[Pair]:
        def get(name: str) -> Any:
            """A field; `a.b` is field b of the configuration in field a."""
            outer, _, inner = name.rpartition(".")
            return _one(getattr(getattr(self.settings, outer) if outer else self.settings, inner, None))

        hidden, kv = int(self.settings.hidden_size), get("num_key_value_heads") or self.heads or None
        rope = _main_rope(self.settings)
        rotated = int(self.head_dim * float(rope.get("partial_rotary_factor") or get("partial_rotary_factor") or 1)) or None
        sizes = {
            "context_length": get("max_position_embeddings") or get("max_seq_len"), "embedding_length": hidden,
            "block_count": get("num_hidden_layers"),
            "feed_forward_length": get("intermediate_size") or get("n_inner") or 4 * hidden,
            "attention.head_count": self.heads, "attention.head_count_kv": kv, "attention.key_length": self.head_dim or None,
            "attention.value_length": self.head_dim or None, "rope.dimension_count": rotated, "vocab_size": get("vocab_size"),
        }  # fmt: skip
        stated: list[tuple[str, str, Any]] = [(key, "uint32", value) for key, value in sizes.items()]
        key, name = self.architecture.eps
        stated.append((key, "float32", get(name)))
        stated.append(("rope.freq_base", "float32", rope.get("rope_theta")))
        if rope.get("rope_type") in ("linear", "yarn"):
            stated += [("rope.scaling.type", "string", rope["rope_type"]), ("rope.scaling.factor", "float32", rope["factor"])]
        if rope.get("rope_type") == "yarn":
            stated.append(("rope.scaling.original_context_length", "uint32", rope.get("original_max_position_embeddings")))
            stated += [(f"rope.scaling.yarn_{key}", "float32", rope.get(key) or None) for key in ("beta_fast", "beta_slow")]
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or get("original_max_position_embeddings")
            factor = rope.get("attention_factor")
            scale = longrope_factor(sizes["context_length"], original) if factor is None else float(factor)
            stated.append(("rope.scaling.original_context_length", "uint32", original))
            stated.append(("rope.scaling.attn_factor", "float32", scale))
        local = (get("rope_parameters") or {}).get("sliding_attention")
        if isinstance(local, dict):
            stated.append(("rope.freq_base_swa", "float32", local.get("rope_theta")))
        kinds = {"size": "uint32", "integer": "uint32", "positive": "float32", "float": "float32", "bool": "bool"}
        fields: tuple[Field, ...] = (*self.architecture.fields, *STATED.get(self.arch, ()))
        stated += [(f.key, kinds[f.kind], get(f.name)) for f in fields]
        stated += CONSTANT.get(self.arch, ())
        stated += DERIVED.get(self.arch, nothing)(self.settings, self.shapes)
        if self.arch in SHARED_WIDTHS:
            width, count = map(get, SHARED_WIDTHS[self.arch])
            stated.append(("expert_shared_feed_forward_length", "uint32", (width or 0) * (1 if count is None else count) or None))
        last: dict[str, tuple[str, Any]] = {}
        for key, kind, value in stated:
            value = value[0] if isinstance(value, list) and value and not kind.startswith("array") else value
            if value is not None:
                last[key] = (kind, value)
        return [pair(_key(self.arch, key), kind, value) for key, (kind, value) in last.items()]

    def _read_back(self) -> None:
        """UnsupportedError where the header describes another model than the configuration."""
        shapes = {**self.shapes, **{n.removesuffix(".weight"): s for n, s in self.shapes.items()}}
        header = Header(self.source.path, metadata_of(self.pairs, self.source.path), shapes, self._factors)
        try:
            read = settings_of(cast(GGUFCheckpoint, header))
        except (CheckpointError, UnsupportedError) as error:
            kind = UnsupportedError if isinstance(error, UnsupportedError) else CheckpointError
            raise kind(str(error).replace("[load_model]", "[convert]")) from error
        different = []
        for name, value in read.items():
            own = getattr(self.settings, name, None)
            if name in _NOT_COMPARED or name.endswith("token_id") or own is None:
                continue
            if name == "original_max_position_embeddings" and _main_rope(self.settings).get("rope_type", "default") == "default":
                continue  # Phi-3 chooses between long and short factors by it, and there are none
            if name == "rope_parameters":
                if value is None:  # the model does not rotate
                    continue
                value, own = _comparable(value), _comparable(own)
                if own.get("rope_type") == "llama3":  # the reader has its factors as a tensor instead
                    own["rope_type"] = value["rope_type"]
            if isinstance(value, dict) and not isinstance(own, dict):
                own = vars(own)  # a configuration within the configuration
            if not _equal(value, own if isinstance(value, list) else _one(own)):
                different.append(f"{name} is {own!r}, a GGUF of {self.arch} says {value!r}")
        different += self._unstated(read)
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
        for what in dict.fromkeys(self.left_out.values()):
            count = sum(why == what for why in self.left_out.values())
            self.notes.append(f"the text model alone is written, without {plural(count, 'tensor')} of {what}")

    def _unstated(self, read: Mapping[str, Any]) -> list[str]:
        """Fields that no key states and that the reader's configuration has at its default."""
        from transformers import AutoConfig

        fields = {k: v for k, v in read.items() if k != "model_type"}
        try:
            default = AutoConfig.for_model(str(read["model_type"]), **fields)
        except Exception:  # what its checks raise is raised when the file is loaded, too
            return []
        stated: dict[str, Any] = default.to_dict()
        out = []
        for name, value in stated.items():
            own = getattr(self.settings, name, None)
            unused = _COMPUTES_NOTHING.fullmatch(name) or name in _UNUSED.get(self.arch, ())
            if name in read or unused or own is None:
                continue
            if isinstance(value, dict) and not isinstance(own, dict):
                continue  # a configuration within the configuration
            if not _equal(_ACTIVATIONS.get(str(value), value), _ACTIVATIONS.get(str(own), own)):
                out.append(f"{name} is {own!r}, a GGUF of {self.arch} says {value!r}")
            elif isinstance(own, str) and {own, value} <= _GELUS and own != value:
                self.notes.append(f"{name} is {own!r}; a GGUF has one GELU for all kinds, which load_model computes as {value!r}")
        return out


_COMPUTES_NOTHING = re.compile(
    # training, and the numbers that parameters begin with
    r"\w*(dropout|pdrop|jitter|loss|aux_)\w*|initializer_\w+|init_\w+|learnable_sink_init|rescale_prenorm_residual"
    r"|time_step_(floor|init_scheme|max|min|scale)|seed"
    # how it is computed
    r"|use_cache|output_\w+|return_dict|\w*chunk_size\w*(?<!attention_chunk_size)|pretraining_tp|slow_but_exact|use_mamba\w*"
    r"|use_associative_scan|deterministic_flash_attn|\w*_in_fp32|reorder_and_upcast_attn|enable_moe_fp32_combine"
    r"|num_logits_to_keep|mamba_ssm_cache_dtype|split_ngram_parts|number_of_conv_states|moe_shared_expert_overlap"
    # names, and what is not the model
    r"|_\w+|architectures|dtype|id2label|label2id|problem_type|transformers_version|\w+_token_id|model_max_length"
    r"|(summary|classifier|sparse_pred)\w*|decoder_bias|mtp_\w+|num_nextn_predict_layers|is_decoder|add_cross_attention"
    # what other fields, which a file states, are made of or say again
    r"|(use_)?sliding_window(_pattern)?|max_window_layers|first_k_dense_replace|layer_group_size|full_attn_idxs|rope_theta"
    r"|global_attn_every_n_layers|no_rope_layer_interval|expan(d|sion_ratio)|time_step_rank|block_multiple_of"
    r"|linear_(conv_kernel|head)_dim|moe_renormalize|num_expert_group|num_experts(_per_token)?|num_shared_experts"
)
"""Fields of a configuration that do not change what its model computes where no key states them.
Any other field that transformers' configuration has must have the value that the reader's has.
"""
_GELUS = frozenset(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python"))
_ACTIVATIONS = dict.fromkeys(_GELUS, "gelu") | {"swish": "silu"}
"""Names of one activation: llama.cpp has one GELU."""
_NOT_COMPARED = (
    "model_type", "tie_word_embeddings", "vocab_size", "partial_rotary_factor", "rope_theta", "compress_rope_theta",
)  # fmt: skip
"""Settings that are read from the tensors, or that the reader gives under several names."""
_UNUSED = {"kimi-linear": ("head_dim",)}
"""Fields of published configurations that a model does not use."""


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
    """Rotation parameters, also within layer types, with what is taken where nothing is stated."""
    if not isinstance(rope, dict):
        return rope
    return {k: _comparable(v) for k, v in with_defaults(rope).items()}


def _row_axis(piece: Piece, axes: int) -> int:
    """The axis of rows: the first of a vector, a matrix or a kernel, the second of a stack."""
    if piece.key.endswith("bias"):
        return axes - 1
    return axes - 2 if piece.whole_stack else 0


def _key(arch: str, key: str) -> str:
    """The whole key of one that `stated` has."""
    return key[1:] if key.startswith("/") else f"{arch}.{key}"


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
        k: decoded_floats(v)
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
        register(kind)
        settings = AutoConfig.for_model(kind, **raw).get_text_config(decoder=True)
    except Exception as error:  # its checks raise errors of many kinds
        raise UnsupportedError(
            f"[convert] {source.path}: its config.json describes no {kind} that transformers knows "
            f"({' '.join(str(error).split())[:120]}). Give a GGUF of the same model, of any type, with --like: names, tokenizer "
            "and key-values are taken from it (llama.cpp's convert_hf_to_gguf.py makes one)"
        ) from error
    settings.architectures = raw.get("architectures")
    settings.allow_global_per_layer_attribute_access = True
    return SAME_SIZES.get(str(settings.model_type), lambda config: config)(settings)


def _main_rope(settings: Any) -> dict[str, Any]:
    """Rotation of the global layers."""
    rope = getattr(settings, "rope_parameters", None) or {}
    main = rope.get("full_attention", rope)
    return dict(main)


def task_of(settings: Any) -> str:
    """What a configuration's class does: `Architecture.task`."""
    if getattr(settings, "use_bidirectional_attention", False) or getattr(settings, "is_causal", True) is False:
        return "encoder"
    return "encoder" if "T5EncoderModel" in (getattr(settings, "architectures", None) or ()) else "text"


def architecture_for(source: Checkpoint, settings: Any) -> tuple[str, Architecture]:
    """(general.architecture, table) of a configuration. UnsupportedError for one without a table."""
    model_type = str(settings.model_type)
    wanted = SAME_MODEL.get(model_type, model_type)
    if wanted in VARIANTS:
        return VARIANTS[wanted](settings, task_of(settings))
    names = [name for name, a in ARCHITECTURES.items() if a.model_type == wanted]
    if not names:
        known = sorted({a.model_type for a in ARCHITECTURES.values()} | {*VARIANTS, *SAME_MODEL})
        raise UnsupportedError(
            f"[convert] {source.path}: model_type {model_type!r} has no table of a GGUF here; there are {', '.join(known)}. A "
            "GGUF of the same model, of any type, gives names and key-values with --like"
        )
    plain = re.sub(r"[-_]", "", wanted)
    name = next((n for n in names if re.sub(r"[-_]", "", n) == plain), names[0])
    return name, ARCHITECTURES[name]
