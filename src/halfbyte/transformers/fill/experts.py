"""Build an experts module of transformers from a checkpoint's stacks or single experts, packed or
dense.

transformers keeps every expert of a layer in two parameters, `gate_up_proj` and `down_proj`. A
checkpoint may have a tensor for each expert and projection. Packed ones are stacked where all
experts share a format; gate and up are joined where they share a format and a global scale, and
otherwise stay separate tensors with the same result. Dense ones become the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import torch
from torch import Tensor, nn

from ...checkpoints import expert_names
from ...checkpoints.views.gptqmodel_gpt_oss import has_split_gate_up
from ...errors import UnsupportedError
from ...gguf_models.architecture import DBRX_EXPERTS
from ...tensor.concat import concat_rows, incompatibility, stack
from ...tensor.qtensor import QTensor
from ...torch.experts import REGLU, UNGATED, QExperts
from ...torch.modules import Weight
from ...torch.state import tensor
from ..compat import DEFAULT_GATE
from .base import Filling, first_names
from .module_paths import Slot

Keys = Mapping[Slot, str]
"""Slot -> key, of one experts module."""

_CLAMPED = {"GptOssExperts": ("alpha", "limit", True), "MiniMaxM3VLExperts": ("swiglu_alpha", "swiglu_limit", False)}
"""Experts whose gate is gpt-oss's: the attributes of its two numbers, and whether rows of gate and
up alternate.
"""
_LIMITED = {"DeepseekV4Experts": "limit", "HYV4Experts": "swiglu_limit"}
"""Experts whose gate is SiLU(min(gate, limit)) · clamp(up, −limit, limit), and the limit's
attribute.
"""
_PRESCALED = ("Llama4TextExperts",)
"""Experts that take every token once for each expert, times its score; their parameters are (k, n).
"""


class PrescaledExperts(QExperts):
    """Packed experts of Llama 4: rows e·m to (e+1)·m of x are the tokens of expert e, zero where it
    does not serve one.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override] # the routing is in x
        rows = x.reshape(-1, x.shape[-1])
        experts = torch.arange(self.num_experts, device=x.device).repeat_interleave(len(rows) // self.num_experts)
        ids = torch.where((rows != 0).any(-1), experts, self.num_experts)[:, None]
        return super().forward(rows, ids, torch.ones_like(ids, dtype=x.dtype))


_IDENTITY = ("LongcatFlashExperts",)
"""Experts behind which others return the token itself; parameters of those have no meaning."""


class WithIdentityExperts(QExperts):
    """Packed experts of LongCat-Flash: an index past the last one adds the token times its weight."""

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        own = topk_weights.masked_fill(topk_ids < self.num_experts, 0).sum(-1, keepdim=True)
        return super().forward(x, topk_ids, topk_weights) + x * own.to(x.dtype)


_FLAT = ("DbrxExperts",)
"""Experts whose projections are three matrices (`DBRX_EXPERTS`), and that take a whole batch."""


class BatchExperts(QExperts):
    """Packed experts of DBRX: x is (batch, tokens, k)."""

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1]), topk_ids, topk_weights).view_as(x)


class _FlatShapes(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """The shapes of `_FLAT` experts as other experts have them, without memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        e, f, h = module.num_experts, module.ffn_hidden_size, module.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, h, device="meta"), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(e, h, f, device="meta"), requires_grad=False)
        self.act_fn = module.mlp.activation_fn


_KINDS = {
    **dict.fromkeys(_PRESCALED, PrescaledExperts),
    **dict.fromkeys(_IDENTITY, WithIdentityExperts),
    **dict.fromkeys(_FLAT, BatchExperts),
}
"""transformers' experts -> the packed ones that take what they take."""


def is_transposed(module: nn.Module) -> bool:
    """Whether the parameters of an experts module are (k, n)."""
    return bool(getattr(module, "is_transposed", False)) or type(module).__name__ in _PRESCALED


def has_gate(module: nn.Module) -> bool:
    """Whether experts have a gate beside the projection up."""
    return hasattr(module, "gate_up_proj")


def fill_experts(filling: Filling, path: str, keys: Keys) -> None:
    """Puts the experts at `path` into the model.

    Raises CheckpointError when an expert is missing, has another shape, or is dense where others
    are packed; UnsupportedError for an activation that is not computed on packed weights.
    """
    module = filling.module(next(iter(keys.values())), path)
    info = filling.checkpoint.info
    kinds = {info(key).quantized for slot, key in keys.items() if slot.leaf == "weight"}
    if len(kinds) > 1:
        odd = [key for slot, key in keys.items() if slot.leaf == "weight" and not info(key).quantized]
        raise filling.error(
            f"{first_names(odd)} are dense and the other experts of {path} packed; all of one layer must be of one kind"
        )
    biased = {slot.projection: key for slot, key in keys.items() if slot.leaf == "bias"}
    halves = biased.keys() & {"gate_proj", "up_proj"}
    if len(halves) == 1 and has_gate(module):
        raise filling.error(f"{biased[halves.pop()]} has no counterpart: gate and up of {path} have both a bias or none")
    if type(module).__name__ in _FLAT and kinds != {True}:
        _flat(filling, path, module, keys)
        return
    if kinds != {True}:
        _dense(filling, path, module, keys)
        return
    if type(module).__name__ in _IDENTITY:
        keys = {slot: key for slot, key in keys.items() if slot.expert is None or slot.expert < len(module.down_proj)}
    _packed(filling, path, module, keys)


def gate_of(module: nn.Module) -> tuple[str, bool]:
    """(gate, interleaved) of a transformers experts module. UnsupportedError for one
    `ops.experts` does not compute.
    """
    name = type(module).__name__
    if name in _CLAMPED:
        *names, alternate = _CLAMPED[name]
        alpha, limit = (float(getattr(module, attribute)) for attribute in names)
        if (alpha, limit) != (1.702, 7.0):
            raise UnsupportedError(
                f"[load_model] {name} with alpha {alpha} and limit {limit}; 1.702 and 7 are computed on packed weights"
            )
        return "swiglu_clamped", alternate
    function = getattr(module, "act_fn", None)
    if not has_gate(module):
        if type(function).__name__ != "ReLUSquaredActivation":
            raise UnsupportedError(
                f"[load_model] {name} without a gate, with {type(function).__name__}; squared ReLU is computed on packed experts"
            )
        return UNGATED, False
    act = "SiLU" if function is nn.functional.silu or (function is None and name in _LIMITED) else type(function).__name__
    words = {"SiLU": "swiglu", "SiLUActivation": "swiglu", "GELUTanh": "geglu", "PytorchGELUTanh": "geglu", "ReLU": REGLU}
    own_gate = None if name in _LIMITED else getattr(type(module), "_apply_gate", None)
    if act not in words or (own_gate is not None and own_gate.__module__ != DEFAULT_GATE):
        raise UnsupportedError(f"[load_model] {name} gates with {act}; SiLU, tanh GELU and ReLU are computed on packed experts")
    return words[act], not getattr(module, "is_concatenated", True)


def _packed(filling: Filling, path: str, module: nn.Module, keys: Keys) -> None:
    kind = type(module).__name__
    module = _FlatShapes(module) if kind in _FLAT else module
    gate, interleaved = gate_of(module)
    experts = int(module.down_proj.shape[0])
    pieces = {p: _piece(filling, path, p, experts, keys) for p in dict.fromkeys(k.projection for k in keys if k.leaf == "weight")}
    weights: dict[str, Weight | list[Weight]] = {}
    cut = interleaved and has_split_gate_up(filling.checkpoint.config)
    if "gate_proj" in pieces and "up_proj" in pieces and (cut or not interleaved):
        joined = _joined(pieces["gate_proj"], pieces["up_proj"])
        if joined is not None:
            pieces = {"gate_up_proj": joined, "down_proj": pieces["down_proj"]}
    _check_shapes(filling, path, module, pieces)
    for name in list(pieces):
        weights[name] = _prepared(filling, pieces.pop(name))
    biases = {}
    for name in weights:
        bias = _bias(filling, path, name, experts, keys)
        if name == "gate_up_proj" and bias is None:
            halves = [_bias(filling, path, half, experts, keys) for half in ("gate_proj", "up_proj")]
            if all(b is not None for b in halves):
                bias = torch.cat([b for b in halves if b is not None], dim=-1)
        if bias is not None:
            biases[name] = bias.to(device=filling.device, dtype=filling.model.dtype)
        elif getattr(module, "has_bias", False):
            raise filling.error(f"no tensor for {path}.{name}_bias of {type(filling.model).__name__}")
    replacement = _KINDS.get(kind, QExperts)(
        weights,
        biases,
        gate=gate,
        interleaved=interleaved and (cut or "gate_up_proj" in weights),
        limit=float(getattr(module, _LIMITED[kind])) if kind in _LIMITED else None,
        activations=filling.activations,
        backend=filling.backend,
    )
    filling.model.set_submodule(path, replacement)


Piece = QTensor | list[QTensor]
"""A projection of all experts: a stack (e, n, k), or matrices that cannot be stacked."""


def _piece(filling: Filling, path: str, piece: str, experts: int, keys: Keys) -> Piece:
    whole = next(
        (key for slot, key in keys.items() if (slot.projection, slot.leaf, slot.expert) == (piece, "weight", None)), None
    )
    if whole is not None:
        q = filling.packed(whole)
        if q.ndim != 3 or q.shape[0] != experts:
            raise filling.error(f"tensor {whole!r} is {list(q.shape)}; {path} has {experts} experts")
        # No backend takes one expert out of groups that run over the flattened stack.
        return [q[e] for e in range(experts)] if q.format.grouping in ("flat", "strided") else q
    single = {slot.expert: key for slot, key in keys.items() if slot.projection == piece and slot.leaf == "weight"}
    lost = [f"{path}.{e}.{piece}" for e in range(experts) if e not in single]
    if lost or len(single) != experts:
        raise filling.error(
            f"no tensor for {first_names(lost)}" if lost else f"{path} has {experts} experts; {len(single)} are stored"
        )
    weights = [filling.packed(single[e]) for e in range(experts)]
    return stack(weights) if incompatibility(weights, stacked=True) is None else weights


def _joined(gate: Piece, up: Piece) -> Piece | None:
    """Gate's rows, then up's, of every expert; None when one of them cannot be joined."""
    if isinstance(gate, QTensor) and isinstance(up, QTensor):
        return concat_rows([gate, up]) if incompatibility((gate, up)) is None else None
    if isinstance(gate, list) and isinstance(up, list):
        pairs = list(zip(gate, up, strict=True))
        return [concat_rows(pair) for pair in pairs] if all(incompatibility(pair) is None for pair in pairs) else None
    return None


def _prepared(filling: Filling, piece: Piece) -> Weight | list[Weight]:
    if isinstance(piece, QTensor):
        return filling.prepare(piece)
    return [filling.prepare(q) for q in piece]


def _check_shapes(filling: Filling, path: str, module: nn.Module, pieces: Mapping[str, Piece]) -> None:
    """Every expert is the matrix transformers would have."""
    order = (2, 1) if is_transposed(module) else (1, 2)
    h, f = (int(module.down_proj.shape[i]) for i in order)
    named = set(pieces)
    if has_gate(module):
        two_f, k = (int(module.gate_up_proj.shape[i]) for i in order)
        wanted = {"gate_up_proj": (two_f, k), "gate_proj": (two_f // 2, k), "up_proj": (two_f // 2, k), "down_proj": (h, f)}
        if named not in ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}):
            raise filling.error(
                f"{path} has {', '.join(sorted(named))}; wanted down_proj with gate_up_proj, or with gate_proj and up_proj"
            )
    else:
        up = tuple(int(module.up_proj.shape[i]) for i in order)
        wanted = {"up_proj": (up[0], up[1]), "down_proj": (h, f)}
        if named != set(wanted):
            raise filling.error(f"{path} has {', '.join(sorted(named))}; wanted up_proj and down_proj")
    for name, piece in pieces.items():
        for q in [piece] if isinstance(piece, QTensor) else piece:
            if q.shape[-2:] != wanted[name]:
                raise filling.error(f"{path}.{name} holds matrices {list(q.shape[-2:])}; the model wants {list(wanted[name])}")


def _bias(filling: Filling, path: str, piece: str, experts: int, keys: Keys) -> Tensor | None:
    """(e, n) of a projection, None when there is none."""
    mine = {slot.expert: key for slot, key in keys.items() if slot.projection == piece and slot.leaf == "bias"}
    if not mine:
        return None
    if None in mine:
        return tensor(filling.dense(mine[None]))
    if len(mine) != experts:
        raise filling.error(f"{path}.{piece} has a bias for {len(mine)} of {experts} experts")
    return torch.stack([tensor(filling.dense(mine[e])) for e in range(experts)])


def _dense(filling: Filling, path: str, module: nn.Module, keys: Keys) -> None:
    """The parameters of a module whose experts are stored dense."""
    transposed, interleaved = is_transposed(module), not getattr(module, "is_concatenated", True)
    interleaved = interleaved and not has_split_gate_up(filling.checkpoint.config)
    first: tuple[str, tuple[str, ...]] = ("gate_up_proj", ("gate_proj", "up_proj")) if has_gate(module) else ("up_proj", ())
    for name, halves in (first, ("down_proj", ())):
        for leaf in ("weight", "bias"):
            experts = int(getattr(module, name).shape[0])
            whole, matrices = _values(filling, name, leaf, experts, keys)
            parts = [_values(filling, half, leaf, experts, keys)[0] for half in halves]
            if whole is None and parts and all(p is not None for p in parts):
                whole, matrices = _joined_values([p for p in parts if p is not None], interleaved), True
            if whole is not None:
                whole = whole.swapaxes(1, 2) if leaf == "weight" and transposed and matrices else whole
                filling.put_dense(f"{path}.{name}", whole, path, name if leaf == "weight" else f"{name}_bias")


def _flat(filling: Filling, path: str, module: nn.Module, keys: Keys) -> None:
    """DBRX's parameters."""
    shapes = _FlatShapes(module)
    e, h, f = shapes.down_proj.shape
    for projection, name in DBRX_EXPERTS.items():
        values, _ = _values(filling, projection, "weight", e, keys)
        if values is None:
            continue
        wanted = (e, h, f) if projection == "down_proj" else (e, f, h)
        if values.shape != wanted:
            raise filling.error(f"{path}.{projection} is {list(values.shape)}; the model wants {list(wanted)}")
        rows = values.swapaxes(1, 2) if projection == "down_proj" else values
        inner, _, leaf = name.partition(".")
        filling.put_dense(f"{path}.{name}", np.ascontiguousarray(rows.reshape(-1, h)), f"{path}.{inner}", leaf)


def _joined_values(halves: list[Any], interleaved: bool) -> Any:
    """Gate's rows, then up's, or gate and up rows interleaved."""
    if not interleaved:
        return np.concatenate(halves, axis=1)
    stacked = np.stack(halves, axis=2)
    return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])


def _values(filling: Filling, piece: str, leaf: str, experts: int, keys: Keys) -> tuple[Any, bool]:
    """A projection of all experts, and whether its matrices are (n, k): they are but where a
    parameter of transformers' own is stored, which may be (k, n).
    """
    mine = {slot.expert: key for slot, key in keys.items() if (slot.projection, slot.leaf) == (piece, leaf)}
    if None in mine:
        # What was packed in some layout is (n, k) too, however its key ends; in a folder a
        # parameter of another name (Aria's `experts.fc1.weight`) is transformers' own.
        key, gguf = mine[None], filling.checkpoint.format == "gguf"
        named = key.endswith(".weight") and (gguf or expert_names.parse(key) is not None)
        return filling.dense(key), named or bool(filling.checkpoint.info(key).layout)
    if len(mine) != experts:
        return None, True
    return np.stack([filling.dense(mine[e]) for e in range(experts)]), True
