"""Load every tensor of a safetensors checkpoint, of any producer, into a transformers model.

Packed matrices become packed modules; a module whose weight the checkpoint keeps dense stays dense.
A head that is not stored shares the embedding's weight; one that is stored is used, whatever the
config says about tying. Modules that transformers keeps fused (`qkv_proj`, `gate_up_proj`) are
joined from separate tensors where these share format and global scale, and become a `ConcatLinear`
where they do not; the rows of a fused tensor are divided among the modules that transformers has
instead.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from torch import nn

from ...checkpoints import Checkpoint
from ...checkpoints.ledger import AUXILIARY_NAMES
from ...errors import UnsupportedError, plural
from ...tensor.concat import concat_rows, incompatibility
from ...tensor.qtensor import QTensor
from ...torch.concat_linear import ConcatLinear
from ...torch.modules import QEmbedding, QLinear
from ...torch.scaled_linear import scaled
from ...torch.state import tensor
from .base import Filling, first_names, inputs_first, make_linear
from .experts import fill_experts
from .module_paths import Slot, SlotResolver

INPUT_SCALE = ".pre_quant_scale"
IGNORED = tuple(joint + word for word in AUXILIARY_NAMES for joint in "._")
"""Endings of tensors that no weight module uses: scales of activations and caches, rotary tables.
"""
TOWER = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|embed_vision|embed_audio|multi_modal_projector|mtp)(?:\.|$)")
"""A component of the names of tensors that belong to other towers of a multimodal model."""
TOWER_CONFIGS = {"vision_config", "audio_config"}
"""Keys of a multimodal model's config.json."""
ALONG_OUTPUTS = re.compile(r".*\.experts\.\w+_proj_weight_scale")
"""What only a stack has whose groups do not run along the inputs: other scales of stacks belong to
a packed weight.
"""


def fill_from_folder(
    model: Any, checkpoint: Checkpoint, *, activations: str = "exact", backend: str | None = None, device: str = "cpu"
) -> None:
    """Puts every tensor of the checkpoint into an empty model, one at a time.

    Raises UnsupportedError when tensors have no counterpart in the model, CheckpointError when
    shapes differ or a parameter stays empty.
    """
    FolderFilling(model, checkpoint, activations=activations, backend=backend, device=device).run()


class FolderFilling(Filling):
    """Fills from module paths and tensor names of transformers' kind.

    tied   parameter -> the one it shares, None for what the model says
    """

    tied: Mapping[str, str] | None = None

    def run(self, only: Collection[str] | None = None) -> None:
        """Puts every tensor, or those of the modules at the paths in `only`."""
        groups, unknown = self.plan()
        self.turn_packed(groups)
        if across := [key for key in unknown if ALONG_OUTPUTS.fullmatch(key)]:
            raise UnsupportedError(
                f"[load_model] {self.checkpoint.path}: {first_names(across)} scale groups along the outputs (ModelOpt's MXFP4 of "
                "stacked experts), which no product reads; export them as NVFP4"
            )
        unknown = self.without_towers(unknown)
        if unknown:
            raise UnsupportedError(
                f"[load_model] {self.checkpoint.path}: {first_names(unknown)} have no counterpart in "
                f"{type(self.model).__name__}: the checkpoint is of another variant of {self.model.config.model_type}, or "
                "transformers converts these tensors as it reads them, which packed weights are not"
            )
        info = self.checkpoint.info
        # Packed weights first, since their modules replace those that biases belong to; the largest
        # first of all.
        order = sorted(groups, key=lambda g: (not any(info(k).quantized for k in groups[g].values()), -self.nbytes(groups[g])))
        for group in order:
            keys = groups[group]
            slot = next(iter(keys))
            if only is not None and not {slot.path, *slot.divided} & set(only):
                continue
            self.put(group, keys)
        for path, scales in self.input_scales.items():
            if only is None or path in only:
                self.put_input_scale(path, scales)
        self.tie()
        self.check_full()

    def turn_packed(self, groups: Mapping[str, Mapping[Slot, str]]) -> None:
        """Ordinary linear layers for the packed ones that are (outputs, inputs) where transformers'
        are (inputs, outputs). Where a matrix of one shape could be both, the others say which.
        """
        own, packed = inputs_first(self.model), {}
        for slot, key in ((slot, key) for keys in groups.values() for slot, key in keys.items()):
            if slot.path in own and slot.leaf == "weight" and self.checkpoint.info(key).quantized:
                packed[slot.path] = self.checkpoint.info(key).shape
        shapes = {path: tuple(own[path].weight.shape) for path in packed}
        if any(packed[path] == shapes[path][::-1] != shapes[path] for path in packed):
            make_linear(self.model, {path: own[path] for path in packed})

    def without_towers(self, unknown: list[str]) -> list[str]:
        """`unknown` without the tensors of other modalities, which a warning names, where the
        model is the language model of a multimodal checkpoint.
        """
        whole = TOWER_CONFIGS & set(self.checkpoint.config)
        if not whole or TOWER_CONFIGS & set(self.model.config.to_dict()):
            return unknown
        towers = [key for key in unknown if TOWER.search(key)]
        if towers:
            warnings.warn(
                f"[load_model] {self.checkpoint.path}: {type(self.model).__name__} is the language model alone; "
                f"not loaded: {plural(len(towers), 'tensor')} of other towers ({first_names(towers)})",
                RuntimeWarning,
                stacklevel=4,
            )
        return [key for key in unknown if key not in set(towers)]

    def nbytes(self, keys: dict[Slot, str]) -> int:
        return sum(self.checkpoint.info(k).nbytes for k in keys.values())

    def plan(self) -> tuple[dict[str, dict[Slot, str]], list[str]]:
        """Keys by what must be put at once (a module's experts, the parts of a fused module, one
        tensor), and those with no slot.
        """
        resolver = SlotResolver(self.model)
        groups: dict[str, dict[Slot, str]] = defaultdict(dict)
        unknown = []
        self.input_scales: dict[str, list[str]] = defaultdict(list)
        for key in self.checkpoint:
            if key.endswith(INPUT_SCALE):
                scale_slot = resolver.resolve(key.removesuffix(INPUT_SCALE), True)
                if scale_slot is None or scale_slot.projection:
                    raise UnsupportedError(
                        f"[load_model] {self.checkpoint.path}: {key} multiplies the inputs of what is no linear layer here; "
                        "quantize without AWQ's scales, or fold them"
                    )
                self.input_scales[scale_slot.path].append(key)
                continue
            slot = resolver.resolve(key, self.checkpoint.info(key).quantized)
            if slot is None:
                if not key.endswith(IGNORED):
                    unknown.append(key)
                continue
            whole = slot.projection or slot.part is not None
            group = groups[slot.path if slot.projection else f"{slot.path}.{slot.leaf}"]
            if slot in group or (group and not whole):
                raise self.error(f"tensors {key!r} and {next(iter(group.values()))!r} both belong to {slot.path}.{slot.leaf}")
            group[slot] = key
        return dict(groups), unknown

    def put(self, group: str, keys: dict[Slot, str]) -> None:
        slot, key = next(iter(keys.items()))
        if slot.projection:
            fill_experts(self, slot.path, keys)
        elif slot.divided:
            self.put_divided(key, slot)
        elif slot.part is not None:
            self.put_fused(group, keys)
        elif self.checkpoint.info(key).quantized:
            self.put_packed(key, self.packed(key), slot.path, slot.leaf)
        elif slot.leaf == "bias":
            self.put_bias(key, slot.path)
        else:
            self.put_dense(key, self.dense(key), slot.path, slot.leaf)

    def put_bias(self, key: str, path: str) -> None:
        """A bias where the model has one, and where it is stored without: what the packed layer
        adds.
        """
        module = self.module(key, path)
        bias = self.dense(key)
        if isinstance(module, QLinear | ConcatLinear | nn.Linear) and module.bias is None:
            if bias.shape != (module.out_features,):
                raise self.error(f"tensor {key!r} is {list(bias.shape)}; {path} has {module.out_features} outputs")
            value = tensor(bias).to(device=self.device, dtype=self.model.dtype)
            module.bias = nn.Parameter(value, requires_grad=False) if bool(value.any()) else None
            return
        self.put_dense(key, bias, path, "bias")

    def put_input_scale(self, path: str, keys: list[str]) -> None:
        """What x is multiplied by before a packed layer; the parts of a fused one must share it, as
        they share x.
        """
        module = self.module(keys[0], path)
        scales = [self.dense(key) for key in keys]
        if not isinstance(module, QLinear | ConcatLinear):
            raise self.error(f"tensor {keys[0]!r} multiplies the inputs of {path}, whose weight is dense")
        if any(s.shape != (module.in_features,) for s in scales):
            raise self.error(f"tensor {keys[0]!r} is {list(scales[0].shape)}; {path} has {module.in_features} inputs")
        if any(s.tobytes() != scales[0].tobytes() for s in scales[1:]):
            raise self.error(f"{first_names(keys)} differ; {path} is one module here, with one input")
        value = tensor(scales[0]).to(device=self.device, dtype=self.model.dtype)
        self.model.set_submodule(path, scaled(module, value))

    def put_divided(self, key: str, slot: Slot) -> None:
        """Give the rows of one tensor to the modules that transformers has instead of it."""
        whole, start = self.checkpoint[key], 0
        paths = (slot.path, *slot.divided)
        sizes = [int(getattr(self.module(key, path), slot.leaf).shape[0]) for path in paths]
        if whole.shape[0] != sum(sizes):
            raise self.error(f"tensor {key!r} is {list(whole.shape)}; {', '.join(paths)} have {sizes} rows")
        for path, size in zip(paths, sizes, strict=True):
            if isinstance(whole, QTensor):
                self.put_packed(key, whole.rows(start, start + size), path, slot.leaf)
            else:
                self.put_dense(key, whole[start : start + size], path, slot.leaf)
            start += size

    def put_fused(self, group: str, keys: dict[Slot, str]) -> None:
        """Build a fused module from its parts: one joined matrix where their formats agree, else a
        `ConcatLinear`.
        """
        path, _, leaf = group.rpartition(".")
        parts = [key for _, key in sorted(keys.items(), key=lambda item: item[0].part or 0)]
        weights = [self.checkpoint[key] for key in parts]
        packed = [w for w in weights if isinstance(w, QTensor)]
        if not packed:
            self.put_dense(group, np.concatenate([np.asarray(w) for w in weights]), path, leaf)
            return
        if len(packed) < len(weights):
            dense = [key for key, w in zip(parts, weights, strict=True) if not isinstance(w, QTensor)]
            raise self.error(f"{first_names(dense)} are dense and the rest of {path} packed; a fused module is all of one kind")
        if incompatibility(packed) is None:
            self.put_packed(group, concat_rows(packed), path, leaf)
            return
        module = self.module(group, path)
        self.check(group, (sum(w.shape[0] for w in packed), packed[0].shape[1]), module.weight)
        rows = ConcatLinear([self.prepare(w) for w in packed], module.bias, activations=self.activations, backend=self.backend)
        self.model.set_submodule(path, rows)

    def tie(self) -> None:
        """The head from the embedding, or the other way round, where only one of them is stored."""
        self.tie_parameters()
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if not getattr(self.model.config, "tie_word_embeddings", False) or head is None:
            return
        if _is_empty(head):
            self.tie_head()
        elif _is_empty(table):
            if isinstance(head, QLinear):
                path = next(name for name, module in self.model.named_modules() if module is table)
                self.put_embedding(path, table, head)
            else:
                table.weight = head.weight

    def tie_parameters(self) -> None:
        """Parameters that the model ties to others and no tensor filled: the bias of BERT's head,
        the table of ProphetNet's decoder, the blocks that Zamba repeats.
        """
        tied = getattr(self.model, "all_tied_weights_keys", None) if self.tied is None else self.tied
        for name, source in (tied or {}).items():
            (path, _, leaf), (owner, _, source_leaf) = name.rpartition("."), source.rpartition(".")
            target, given = self.model.get_submodule(path), self.model.get_submodule(owner)
            value = getattr(given, source_leaf, None)
            if not getattr(getattr(target, leaf, None), "is_meta", False) or value is None:
                continue
            both_linear = isinstance(given, QLinear | ConcatLinear) and isinstance(target, nn.Linear)
            if both_linear or (isinstance(given, QEmbedding) and isinstance(target, nn.Embedding)):
                self.model.set_submodule(path, given)
            elif isinstance(value, nn.Parameter) and not value.is_meta:
                setattr(target, leaf, value)

    def put_embedding(self, path: str, table: nn.Module, head: QLinear) -> None:
        scale = getattr(table, "scalar_embed_scale", None)
        self.model.set_submodule(path, QEmbedding(head.weight, scale=scale, dtype=self.model.dtype, backend=self.backend))


def _is_empty(module: Any) -> bool:
    """True when nothing has filled this module's weight."""
    return bool(getattr(getattr(module, "weight", None), "is_meta", False))
