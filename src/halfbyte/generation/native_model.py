"""A decoder of the LLaMA kind computed by the native core and NumPy alone: no torch, no
transformers.

    model = native_model(checkpoint)
    session = model.session()
    logits = session(prompt_ids)              float32 (vocabulary,), after the last token
    logits = session([token])

A prompt goes through each layer as one matrix: packed products, norms, gates and attention by the
core's kernels, rotation in float32 by NumPy. A single token is one list of the core's operations
(`decoder_layer.append_layer`). Logits have the same bits however a text is cut into calls, on every
instruction set, and equal those of transformers' own float32 code up to the order of sums (1e-6 of
the largest).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..backends import Call, Prepared
from ..backends.cpu import CPUBackend, activations_named, aligned_empty, native
from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import BackendError, CheckpointError, ShapeError, UnsupportedError
from ..gguf_models.names import ROTATION_FACTORS, unsupported
from ..gguf_models.view import ModelView
from ..ops import choose, embedding, linear
from ..spec import Size
from .decoder_layer import DecoderLayer, Norm, Product, append_layer, append_norm
from .folder_view import FolderView
from .rotary import Rotation, rotation_of

F32 = NDArray[np.float32]

GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
"""Model types that are computed here."""
PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {"before": "input_layernorm", "before_mlp": "post_attention_layernorm"}
GEMMA_NORMS = {
    "before": "input_layernorm",
    "after": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
"""Part of a layer -> its module in transformers' model."""
NORMED_HEADS = ("qwen3", "gemma3_text")
"""Model types whose heads have norms."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""`hidden_act` of a configuration -> the gate's function."""
UNSUPPORTED_OPTIONS = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
CHUNK = 256
"""Tokens of a prompt that go through the layers at once, at most."""
SPARE = 128
"""Free tokens behind the keys and values after a reallocation."""


@dataclass(frozen=True)
class Layer:
    """A layer's packed weights as the verbs take them, and as operations.

    weights  part of the layer -> the prepared weight and its bias
    window   tokens that one token sees, itself included; None for all
    """

    parts: DecoderLayer
    weights: Mapping[str, tuple[Prepared, F32 | None]]
    window: int | None


@dataclass(frozen=True)
class DenseTable:
    """A table of tokens that is not packed: float32 (vocabulary, hidden)."""

    rows: F32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape


@dataclass(frozen=True)
class NativeModel:
    """The weights of a model, ready to multiply.

    context      most tokens of prompt and text together
    embedding    the table, whose rows are multiplied by `scale`
    head         the head; the table itself where they are tied
    rotations    tables of angles; each layer names one
    size         bytes and number of all weights
    stores_scores  False: it divides a prompt by itself (`single.TransformersModel`)
    """

    context: int
    embedding: Prepared | DenseTable
    scale: float
    layers: tuple[Layer, ...]
    norm: Norm
    head: Prepared | DenseTable
    rotations: tuple[Rotation, ...]
    activations: str
    size: Size
    stores_scores: ClassVar[bool] = False

    def session(self) -> NativeSession:
        """One sequence, empty."""
        return NativeSession(self)

    def logits(self, hidden: F32) -> F32:
        """(tokens, vocabulary) of rows after the last norm."""
        if isinstance(self.head, DenseTable):
            return np.asarray(hidden @ self.head.rows.T, np.float32)
        return np.asarray(linear(hidden, self.head, activations=self.activations), np.float32)

    def end_ids(self, tokenizer: Any) -> tuple[Any, ...]:
        """The end-of-turn tokens that the file names, and eos."""
        return tokenizer.end_ids, tokenizer.eos_token_id


class NativeSession:
    """One sequence: tokens in, logits of the last one out.

    tokens     so far
    positions  their number
    """

    def __init__(self, model: NativeModel) -> None:
        self.model, self.positions = model, 0
        self.tokens: list[int] = []
        self._caches = [_Cache(layer) for layer in model.layers]
        hidden = model.embedding.shape[1]
        self._x, self._out = np.empty(hidden, np.float32), np.empty(hidden, np.float32)
        self._rows: dict[tuple[str, int], F32] = {}
        self._operations: Any = None
        self._written = self._room = 0  # tokens of the bound tables

    def __call__(self, ids: Sequence[int]) -> F32:
        """Logits (vocabulary,) after these tokens, which follow those of earlier calls."""
        if not len(ids):
            raise ShapeError("[generate] no tokens; a call takes one or more")
        if len(ids) == 1 and self.positions:
            hidden = self.step(ids[0])
        else:
            for at in range(0, len(ids), CHUNK):
                hidden = self._prompt(np.asarray(ids[at : at + CHUNK], np.int64), at + CHUNK >= len(ids))
        self.tokens += ids
        logits: F32 = self.model.logits(hidden)[0]
        return logits

    def rewind(self, count: int) -> bool:
        """Forget all tokens but the first `count`. False, and nothing is forgotten, where a window
        has dropped tokens that the next one sees.
        """
        back = self.positions - count
        if not all(cache.reaches(count, back) for cache in self._caches):
            return False
        for cache in self._caches:
            cache.count -= back
        self.positions = count
        del self.tokens[count:]
        self._leave_tables()
        return True

    def _embedded(self, ids: NDArray[np.int64]) -> F32:
        table = self.model.embedding
        if ids.min() < 0 or ids.max() >= table.shape[0]:
            raise ShapeError(
                f"[generate] tokens run from {ids.min()} to {ids.max()}; the table has rows 0 to {table.shape[0] - 1}"
            )
        rows: F32 = table.rows[ids] if isinstance(table, DenseTable) else embedding(ids, table)
        return rows * np.float32(self.model.scale) if self.model.scale != 1 else rows

    # ------------------------------------------------------------------------------------------
    # a prompt

    def _prompt(self, ids: NDArray[np.int64], last: bool) -> F32:
        """(1, hidden) after the last norm; `last`: nothing but the last token's is wanted."""
        model, count = self.model, len(ids)
        x = self._embedded(ids)
        self._leave_tables()
        tables = [r.table(self.positions, count) for r in model.rotations]
        for number, (layer, cache) in enumerate(zip(model.layers, self._caches, strict=True)):
            only_last = last and number == len(model.layers) - 1
            x = self._through(layer, cache, x, tables[layer.parts.rotation], only_last)
        self.positions += count
        return _normed(x[-1:], model.norm)

    def _through(self, layer: Layer, cache: _Cache, x: F32, table: tuple[F32, F32], only_last: bool) -> F32:
        """The layer's output for rows x [tokens, hidden], or for the last row alone."""
        parts, count = layer.parts, len(x)
        h = _normed(x, parts.before)
        k = self._heads(h, layer, "k", parts.k_norm, table)
        v = self._heads(h, layer, "v", None, None)
        cache.append(k, v)
        rows = 1 if only_last else count
        x, h, table = x[-rows:], h[-rows:], (table[0][-rows:], table[1][-rows:])
        q = self._heads(h, layer, "q", parts.q_norm, table)
        y = self._product(_attention(q, cache, parts.scaling), layer, "o")
        x = x + (y if parts.after is None else _normed(y, parts.after))
        h = _normed(x, parts.before_mlp)
        gate = _gate(parts.gate_function, self._product(h, layer, "gate"), self._product(h, layer, "up"))
        y = self._product(gate, layer, "down")
        return x + (y if parts.after_mlp is None else _normed(y, parts.after_mlp))

    def _product(self, x: F32, layer: Layer, name: str) -> F32:
        weight, bias = layer.weights[name]
        y: F32 = linear(x, weight, bias, activations=self.model.activations)
        return y

    def _heads(self, h: F32, layer: Layer, name: str, norm: Norm | None, table: tuple[F32, F32] | None) -> F32:
        """A projection as heads [heads, tokens, d], normed and rotated."""
        d = layer.parts.head_dim
        y = self._product(h, layer, name).reshape(len(h), -1, d)
        if norm is not None:
            y = _normed(y, norm)
        y = y.transpose(1, 0, 2)
        return y if table is None else _rotated(y, *table)

    # ------------------------------------------------------------------------------------------
    # a token

    def step(self, token: int) -> F32:
        """(1, hidden) after the last norm, of one more token, by the core's operations alone. The
        next call overwrites it.
        """
        if self._written == self._room:
            self._bind()
        self._x[:] = self._embedded(np.array([token]))[0]
        ends = np.array([cache.count + 1 for cache in self._caches])
        seen = np.array([cache.seen(1) for cache in self._caches])
        self._operations.run(ends - seen, seen, self._written, self.positions)
        for cache in self._caches:
            cache.count += 1
        self._written += 1
        self.positions += 1
        return self._out[None]

    def _bind(self) -> None:
        """Room for further tokens in every cache, and the angles of their positions."""
        if self._operations is None:
            self._operations = native().Step()
            for index, layer in enumerate(self.model.layers):
                append_layer(self._operations, index, layer.parts, self._x, self._row)
            append_norm(self._operations, self.model.norm, self._x, self._out)
        self._written, self._room = 0, min(cache.reserve(1) for cache in self._caches)
        tables = [r.table(self.positions, self._room) for r in self.model.rotations]
        self._operations.bind(
            [cache.keys for cache in self._caches],
            [cache.values for cache in self._caches],
            [cosines for cosines, _ in tables],
            [sines for _, sines in tables],
        )

    def _leave_tables(self) -> None:
        """A prompt may move the caches: the next single token binds them again."""
        self._written = self._room = 0

    def _row(self, name: str, width: int) -> F32:
        return self._rows.setdefault((name, width), np.empty(width, np.float32))


class _Cache:
    """Keys and values [kv_heads, capacity, d] of one layer; the first `count` tokens are filled,
    and the first one is token `begin` of the sequence. A layer with a window drops what none of its
    later tokens sees, when it moves.
    """

    def __init__(self, layer: Layer) -> None:
        parts = layer.parts
        self.window, self.count, self.begin = layer.window, 0, 0
        self._heads, self._d = parts.k.outputs // parts.head_dim, parts.head_dim
        self.keys = self.values = np.empty((self._heads, 0, self._d), np.float32)

    def reserve(self, more: int) -> int:
        """Free tokens, at least `more`."""
        if self.count + more > self.keys.shape[1]:
            kept = self.count if self.window is None else min(self.count, self.window - 1)
            self.keys, self.values = (self._moved(a, kept, more) for a in (self.keys, self.values))
            self.begin += self.count - kept
            self.count = kept
        return int(self.keys.shape[1]) - self.count

    def _moved(self, old: F32, kept: int, more: int) -> F32:
        shape = (self._heads, kept + more + SPARE, self._d)
        new: F32 = aligned_empty(4 * math.prod(shape)).view(np.float32).reshape(shape)
        new[:, :kept] = old[:, self.count - kept : self.count]
        return new

    def append(self, keys: F32, values: F32) -> None:
        """Tokens [kv_heads, tokens, d] at the end."""
        more = keys.shape[1]
        self.reserve(more)
        self.keys[:, self.count : self.count + more] = keys
        self.values[:, self.count : self.count + more] = values
        self.count += more

    def reaches(self, tokens: int, back: int) -> bool:
        """Whether without its last `back` ones it has all that the token behind the sequence's
        first `tokens` sees.
        """
        return self.count - back >= (tokens if self.window is None else min(tokens, self.window - 1))

    def seen(self, more: int) -> int:
        """Tokens in view of the last of `more` further ones, itself included."""
        end = self.count + more
        return end if self.window is None else min(end, self.window)


def _normed(x: F32, norm: Norm) -> F32:
    """Rows of the norm's width, normed."""
    y, operations = np.empty(x.shape, np.float32), native().Step()
    append_norm(operations, norm, np.ascontiguousarray(x), y)
    _run(operations)
    return y


def _rotated(x: F32, cosines: F32, sines: F32) -> F32:
    """x cos + (−second half, first half) sin, rows by position."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    swapped = np.concatenate([-second, first], axis=-1)
    return np.asarray(x * cosines + swapped * sines, np.float32)


def _gate(function: str, gate: F32, up: F32) -> F32:
    """f(gate) ∘ up, in place of `gate`."""
    operations = native().Step()
    operations.gate(native().Gate[function], gate, up, gate)
    _run(operations)
    return gate


def _run(operations: Any) -> None:
    """Operations without attention or rotations."""
    operations.bind([], [], [], [])
    operations.run(np.empty(0, np.int64), np.empty(0, np.int64), 0, 0)


def _attention(q: F32, cache: _Cache, scaling: float) -> F32:
    """softmax(scaling · q·kᵀ)·v of the last tokens of the cache: q [heads, tokens, d] ->
    [tokens, heads · d]. A token sees itself and what precedes it, as far as the window.
    """
    heads, count, d = q.shape
    y = np.empty((count, heads * d), np.float32)
    window = cache.window or np.iinfo(np.int64).max
    native().attend(np.ascontiguousarray(q), cache.keys, cache.values, cache.count, cache.begin, window, scaling, y)
    return y


# ----------------------------------------------------------------------------------------------
# from a checkpoint


def native_model(checkpoint: Checkpoint, activations: str = "exact") -> NativeModel:
    """The model of a GGUF file or of a folder. Raises what `NativeReader` raises."""
    return NativeReader(checkpoint, activations).model()


def native_reader(checkpoint: Checkpoint, activations: str = "exact") -> NativeReader | str:
    """The reader of a model that is computed here, or why transformers is needed, as a clause.
    CheckpointError for a damaged or incomplete file.
    """
    try:
        return NativeReader(checkpoint, activations)
    except UnsupportedError as error:
        return str(error).partition("] ")[2].removeprefix(f"{checkpoint.path}: ")


class NativeReader:
    """Reads a checkpoint into a `NativeModel`: its header here, its weights by `model`.

    Raises UnsupportedError for what is not computed here: another architecture, an option, a
    rotation or a tensor that only transformers knows, a dense matrix of a layer, no native core.
    CheckpointError for a damaged or incomplete file.
    """

    def __init__(self, checkpoint: Checkpoint, activations: str) -> None:
        self.path, self.activations = checkpoint.path, activations
        self.view: ModelView | FolderView
        if isinstance(checkpoint, GGUFCheckpoint):
            self.view = ModelView(checkpoint)
            self.check_type(self.view.config)
            if why := unsupported(self.view.architecture):
                raise self.other(
                    f"{self.view.config['model_type']} in a file of another form ({why}) is computed by transformers"
                )
        else:
            self.check_type(checkpoint.config)
            self.view = FolderView(checkpoint)
        self.config = config = self.view.config
        for option in UNSUPPORTED_OPTIONS:
            if config.get(option):
                raise self.other(f"{option} is computed by transformers")
        checkpoint.check("generate")
        self.gemma = config["model_type"] == "gemma3_text"
        name = config.get("hidden_act") or config.get("hidden_activation") or ("gelu_pytorch_tanh" if self.gemma else "silu")
        if name not in ACTIVATIONS:
            raise self.other(f"the gate {name} is computed by transformers")
        self.gate_function = ACTIVATIONS[name]
        self.divisors = np.asarray(checkpoint[ROTATION_FACTORS], np.float32) if ROTATION_FACTORS in checkpoint else None
        self.rotations = self.ropes()
        self.kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        ends = {name: f".{module}.bias" for name, module in PROJECTIONS.items()}
        self.biased = {name for name, end in ends.items() if any(key.endswith(end) for key in self.view.keys())}  # noqa: SIM118
        self.check_names()
        self.backend = CPUBackend()
        self.sizes: list[Size] = []

    def other(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"[generate] {self.path}: {why}")

    def check_type(self, config: Mapping[str, Any]) -> None:
        if (kind := config.get("model_type")) not in GATED:
            raise self.other(f"{kind} is computed by transformers; without it: {', '.join(GATED)}")

    def check_names(self) -> None:
        """Every matrix of a layer is packed in a format that the core multiplies, and nothing else
        is there.
        """
        config, layers = self.config, [f"model.layers.{i}." for i in range(len(self.kinds))]
        hidden, wide, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        queries, keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
        sizes = {
            "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries),
            "gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide),
        }  # fmt: skip
        products = {layer + module: sizes[name] for layer in layers for name, module in PROJECTIONS.items()}
        tables = ["model.embed_tokens", *([] if config["tie_word_embeddings"] else ["lm_head"])]
        table = (config["vocab_size"], hidden)
        packed: dict[str, tuple[int, ...]] = {**products} | {key: table for key in tables if f"{key}.weight" not in self.view}
        for key, shape in packed.items():
            info = self.view.info(key) if key in self.view else None
            if info is None or info.format is None or len(info.shape) != 2:
                raise self.other(f"{key} is not packed")
            self.check_shape(key, shape)
            try:
                backend = choose(Call("linear", info.format, activations=self.activations), "cpu").name
            except BackendError:
                backend = ""
            if backend != "cpu":
                raise self.other(f"{key} is {info.format}, which the native core does not multiply")
        norms = dict.fromkeys((GEMMA_NORMS if self.gemma else NORMS).values(), hidden)
        norms |= dict.fromkeys(HEAD_NORMS.values(), d) if config["model_type"] in NORMED_HEADS else {}
        dense: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
        dense |= {f"{key}.bias": shape[:1] for key, shape in products.items()}
        dense |= {f"{layer}{module}.weight": (width,) for layer in layers for module, width in norms.items()}
        dense |= {f"{key}.weight": table for key in tables if key not in packed}
        for key, shape in dense.items():
            if key in self.view:
                self.check_shape(key, shape)
        if left := [key for key in self.view.keys() if key not in packed and key not in dense]:  # noqa: SIM118 in file order
            raise self.other(f"{left[0]} is a tensor that transformers computes with")

    def check_shape(self, key: str, wanted: tuple[int, ...]) -> None:
        found = self.view.info(key).shape
        if tuple(found) != wanted:
            raise CheckpointError(f"[generate] {self.path}: {key} is {list(found)}; the header's sizes make it {list(wanted)}")

    def model(self) -> NativeModel:
        """Reads the weights: the table of tokens, most of a small model, beside the layers."""
        config = self.config
        with ThreadPoolExecutor(1) as beside:
            reading = beside.submit(self.table, "model.embed_tokens")
            layers = tuple(self.layer(i, kind) for i, kind in enumerate(self.kinds))
            table = reading.result()
        head = table if config["tie_word_embeddings"] else self.table("lm_head")
        return NativeModel(
            config["max_position_embeddings"],
            table,
            math.sqrt(config["hidden_size"]) if self.gemma else 1.0,
            layers,
            self.norm("model.norm"),
            head,
            tuple(self.rotations.values()),
            self.activations,
            Size(sum(s.nbytes for s in self.sizes), sum(s.weights for s in self.sizes)),
        )

    def ropes(self) -> dict[str, Rotation]:
        """Kind of layer -> its rotation; "" for all kinds."""
        given, d = self.config["rope_parameters"], self.config["head_dim"]
        if "rope_type" in given:
            return {"": self.rotation(given, d)}
        return {kind: self.rotation(rope, d) for kind, rope in given.items()}

    def rotation(self, rope: Mapping[str, Any], head_dim: int) -> Rotation:
        found = rotation_of(rope, head_dim, self.config["max_position_embeddings"], self.divisors)
        if found is None:
            raise self.other(f"the rotation {rope.get('rope_type')!r} is computed by transformers")
        return found

    def layer(self, index: int, kind: str) -> Layer:
        config, path = self.config, f"model.layers.{index}."
        weights = {
            name: (self.packed(path + module), self.dense(f"{path}{module}.bias") if name in self.biased else None)
            for name, module in PROJECTIONS.items()
        }
        norms = {name: self.norm(path + module) for name, module in (GEMMA_NORMS if self.gemma else NORMS).items()}
        if config["model_type"] in NORMED_HEADS:
            norms |= {name: self.norm(path + module) for name, module in HEAD_NORMS.items()}
        mode = activations_named(self.activations)
        products = {name: Product(weight.data.native, weight.shape[0], bias, mode) for name, (weight, bias) in weights.items()}
        ropes, d = list(self.rotations), config["head_dim"]
        parts = DecoderLayer(
            q=products["q"],
            k=products["k"],
            v=products["v"],
            o=products["o"],
            gate=products["gate"],
            up=products["up"],
            down=products["down"],
            before=norms["before"],
            before_mlp=norms["before_mlp"],
            after=norms.get("after"),
            after_mlp=norms.get("after_mlp"),
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            head_dim=d,
            scaling=(config["query_pre_attn_scalar"] if self.gemma else d) ** -0.5,
            gate_function=self.gate_function,
            rotation=ropes.index(kind) if kind in ropes else 0,
        )
        window = config.get("sliding_window") if kind == "sliding_attention" or config["model_type"] == "mistral" else None
        return Layer(parts, weights, window)

    def table(self, key: str) -> Prepared | DenseTable:
        return DenseTable(self.dense(f"{key}.weight")) if f"{key}.weight" in self.view else self.packed(key)

    def packed(self, key: str) -> Prepared:
        """The matrix in the core's order, read a piece at a time: a table of tokens is most of a
        small model.
        """
        info = self.view.info(key)
        assert info.format is not None  # check_names
        shape = (info.shape[0], info.shape[1])
        weight = self.backend.prepare_pieces(info.format, shape, functools.partial(self.view.row_pieces, key))
        self.sizes.append(Size(weight.nbytes, math.prod(shape)))
        return weight

    def dense(self, key: str) -> F32:
        if key not in self.view or self.view.info(key).quantized:
            raise CheckpointError(f"[generate] {self.path}: tensor {key!r} is missing, or quantized")
        array = np.ascontiguousarray(np.asarray(self.view[key]).astype(np.float32))
        self.sizes.append(Size(array.nbytes, array.size))
        return array

    def norm(self, module: str) -> Norm:
        scale = self.dense(f"{module}.weight")
        return Norm(np.float32(1) + scale if self.gemma else scale, self.config["rms_norm_eps"])
