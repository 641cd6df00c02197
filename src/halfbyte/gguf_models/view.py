"""A GGUF file as a transformers checkpoint: names, row orders and configuration of the model that
it holds.

    view = ModelView(open("model.gguf"))     view["model.layers.0.self_attn.q_proj"], view.config

Whole rows are moved, so packed weights keep every bit; Gemma's norms lose the 1 that the file has
added. Stacks of experts keep their projections separate (`experts.gate_proj`), as MLX stores them;
`joined` alternates the rows of gpt-oss's gate and up, as its own checkpoints do. Dense stacks are
read one expert at a time, under the names of the hub's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.views.base import View
from ..errors import CheckpointError, UnsupportedError
from ..spec import Format
from ..tensor.concat import concat_rows, incompatibility, take_rows
from ..tensor.qtensor import QTensor
from .architecture import EXPERTS
from .config import architecture_of, settings_of
from .names import INPUTS_FIRST, LONG_ROTATION, ONE_ROW, ROTATION_FACTORS, class_name, row_order, slot, stem_of, unsupported
from .rotation import llama3_rope

INTERLEAVED = ("gpt_oss",)
"""Model types whose gate and up rows alternate in one stack."""
TRANSPOSED = ("gpt_oss", "llama4_text")
"""Model types whose parameters of experts are [e, k, n]."""
STACKED = ("gpt_oss", "granitemoe")
"""Model types whose own checkpoints have no tensors of single experts."""


@dataclass(frozen=True)
class _Tensor:
    """How one key of the view is read.

    keys        of the file; two where gate and up are joined
    expert      of a dense stack, None for the whole
    inputs_first  transformers stores the matrix as (inputs, outputs)
    """

    keys: tuple[str, ...]
    stem: str = ""
    minus_one: bool = False
    one_row: bool = False
    expert: int | None = None
    inputs_first: bool = False


class ModelView(View):
    """`source` under transformers' names.

    switch   the module of stacked experts is named `switch_mlp`, as MLX's models have it, and
             Mixtral's mlp `block_sparse_moe`
    joined   gpt-oss's gate and up are one stack of alternating rows
    stacks   dense stacks of experts stay whole
    Raises UnsupportedError for an architecture that has no table, or a tensor that its table does
    not name.
    """

    source: GGUFCheckpoint

    def __init__(self, source: GGUFCheckpoint, *, switch: bool = False, joined: bool = False, stacks: bool = False) -> None:
        super().__init__(source)
        self.architecture = architecture_of(source)
        if feature := unsupported(self.architecture):
            raise UnsupportedError(
                f"[gguf] {source.path}: {self.architecture.model_type} stores some parameters in another form than its GGUF "
                f"({feature}), and this change is made only by load_model"
            )
        settings = settings_of(source)
        self.heads, self.head_dim = int(settings["num_attention_heads"]), int(settings["head_dim"])
        if ROTATION_FACTORS in source:
            settings["rope_parameters"] = llama3_rope(source, settings)
        self.config = model_config(settings, self.architecture.task)
        self.inputs_first: set[str] = set()
        self._tensors: dict[str, _Tensor] = {}
        unknown = [key for key in source.keys() if not self._add(key, switch, stacks)]  # noqa: SIM118 a checkpoint's keys are in file order
        if unknown:
            raise UnsupportedError(
                f"[gguf] {source.path}: {', '.join(unknown[:4])} have no counterpart in transformers' "
                f"{self.architecture.model_type}"
            )
        if joined and self.architecture.model_type in INTERLEAVED:
            self._join()

    def _add(self, key: str, switch: bool, stacks: bool) -> bool:
        """Name one tensor of the file."""
        if key == ROTATION_FACTORS or key in LONG_ROTATION:
            return True
        name = self.source.tensor_name(key)
        where = slot(self.architecture, name)
        if where is None:
            return False
        path, leaf = where
        if switch and self.architecture.model_type == "mixtral":
            path = path.replace(".mlp.", ".block_sparse_moe.")
        info = self.source.info(key)
        if not info.shape:  # a scalar is none of the model's tensors, whatever its name
            return False
        stem = stem_of(name)
        if EXPERTS in path:
            module, _, projection = path.partition(EXPERTS)
            if switch and self.architecture.model_type not in INTERLEAVED:
                module = f"{module.removesuffix('.experts')}.switch_mlp"
            if info.quantized or switch or stacks or leaf != "weight" or self.architecture.model_type in STACKED:
                self._tensors[f"{module}.{projection}" if info.quantized else f"{module}.{projection}.{leaf}"] = _Tensor((key,))
            else:
                for e in range(info.shape[0]):
                    self._tensors[f"{module}.{e}.{projection}.{leaf}"] = _Tensor((key,), expert=e)
            return True
        minus_one = self.architecture.norm_offset and path.endswith("norm") and leaf == "weight"
        inputs_first = leaf == "weight" and stem in INPUTS_FIRST.get(self.architecture.model_type, ())
        new = path if info.quantized and leaf == "weight" else f"{path}.{leaf}"
        if inputs_first:
            self.inputs_first.add(new)
        self._tensors[new] = _Tensor((key,), stem, minus_one, stem == ONE_ROW, None, inputs_first and not info.quantized)
        return True

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
        t, first = self._tensors[key], infos[0]
        shape, nbytes = first.shape, sum(i.nbytes for i in infos)
        if len(infos) > 1:
            axis = len(shape) - (2 if first.quantized else 1)
            shape = (*shape[:axis], sum(i.shape[axis] for i in infos), *shape[axis + 1 :])
        if t.expert is not None:
            shape, nbytes = shape[1:], nbytes // shape[0]
        if t.one_row:
            shape = shape if len(shape) == 2 else (1, *shape)
        if t.inputs_first:
            shape = shape[::-1]
        dtype = "float32" if t.minus_one else first.dtype
        return replace(first, key=key, shape=shape, dtype=dtype, nbytes=nbytes)

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        keys = self.source_keys(key)
        if len(keys) > 1:
            return self._alternating(key, keys)
        return self.arranged(key, self.source[keys[0]])

    def row_pieces(self, key: str, multiple: int) -> Iterator[QTensor]:
        """A packed matrix in consecutive pieces of its rows (`GGUFCheckpoint.row_pieces`), or whole
        where the view has them in another order.
        """
        keys, t = self.source_keys(key), self._tensors[key]
        rows = self.info(key).shape[0]
        if len(keys) == 1 and row_order(self.architecture, t.stem, rows, self.heads, self.head_dim) is None:
            yield from self.source.row_pieces(keys[0], multiple)
            return
        weight = self[key]
        assert isinstance(weight, QTensor)
        yield weight

    def arranged(self, key: str, weight: QTensor | NDArray[Any]) -> QTensor | NDArray[Any]:
        """A tensor of the file as the view has it under `key`."""
        t = self._tensors[key]
        order = row_order(self.architecture, t.stem, weight.shape[0], self.heads, self.head_dim)
        if isinstance(weight, QTensor):
            return weight if order is None else take_rows(weight, order)
        if t.expert is not None:
            return np.asarray(weight[t.expert])
        array = weight if order is None else weight[order]
        if t.minus_one:
            array = array.astype(np.float32) - np.float32(1)
        if t.one_row and array.ndim == 1:
            array = array[None]
        return np.ascontiguousarray(array.T) if t.inputs_first else array

    def names(self) -> dict[str, str]:
        """Key of the file -> key of the view, for tensors that are one in both."""
        return {t.keys[0]: key for key, t in self._tensors.items() if len(t.keys) == 1 and t.expert is None}

    def rounder(self, rounder: Callable[[str, NDArray[Any], Format], QTensor]) -> Callable[[str, NDArray[Any], Format], QTensor]:
        """A function that rounds modules of the file, for modules of the view: in the file's order
        of rows.
        """

        def rounded(module: str, x: NDArray[Any], fmt: Format) -> QTensor:
            key = module if module in self else f"{module}.weight"
            t = self._tensors[key]
            name = t.keys[0].removesuffix(".weight")
            order = row_order(self.architecture, t.stem, x.shape[0], self.heads, self.head_dim)
            if order is None:
                return rounder(name, x, fmt)
            return take_rows(rounder(name, x[np.argsort(order)], fmt), order)

        return rounded

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


def model_config(settings: Mapping[str, Any], task: str) -> dict[str, Any]:
    """config.json of a model with these settings: with the class, and the rotation also under the
    names that older programs read. task: `Architecture.task`.
    """
    return with_older_names({"architectures": [class_name(str(settings["model_type"]), task)], **_shortest(dict(settings))})


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of transformers 5, which has the rotation in `rope_parameters`, with what other
    programs (mlx-lm, llama.cpp's converter) read in its place: `rope_theta`, `rope_scaling`,
    `rope_local_base_freq`, `sliding_window_pattern` and, of Qwen 3's experts, `num_experts`. A name
    that is there stays.
    """
    older: dict[str, Any] = {}
    rope = config.get("rope_parameters") or {}
    main = rope if "rope_type" in rope else rope.get("full_attention") or {}
    if "rope_theta" in main:
        older["rope_theta"] = main["rope_theta"]
    scaled = {k: v for k, v in main.items() if k not in ("rope_theta", "partial_rotary_factor")}
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
    return {**config, **{k: v for k, v in older.items() if config.get(k) is None}}


def _shortest(value: Any) -> Any:
    """Floats of a file, which are float32, in the fewest digits that mean them."""
    if isinstance(value, dict):
        return {k: _shortest(v) for k, v in value.items()}
    return float(str(np.float32(value))) if isinstance(value, float) else value


def as_model(checkpoint: Checkpoint, layout: str, stacks: bool = False) -> Checkpoint:
    """The checkpoint under transformers' names where it is a GGUF of a model that has a table, else
    itself (`no_model` has the reason).

    layout  the target's, "" for dense safetensors
    stacks  dense stacks of experts stay whole
    """
    if not isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint
    try:
        return ModelView(checkpoint, switch=layout == "mlx", joined=layout not in ("", "mlx"), stacks=stacks)
    except (UnsupportedError, CheckpointError):
        return checkpoint


def no_model(checkpoint: GGUFCheckpoint) -> str:
    """Why a GGUF cannot be written under transformers' names, "" where it can."""
    try:
        ModelView(checkpoint)
    except (UnsupportedError, CheckpointError) as error:
        return str(error).partition("] ")[2].removeprefix(f"{checkpoint.path}: ")
    return ""
