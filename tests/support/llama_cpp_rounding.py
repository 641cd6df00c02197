"""llama.cpp's own roundings on top of transformers' dense models: what its CPU products round of
the activations, and its table of GELU.

    with rounded(model, types):          logits of `model` as llama.cpp computes them, its weights
        model(input_ids=...)             in those types

A product with a quantized weight takes its inputs as 8-bit integers: one float16 scale for 32 of
them (Q8_0), or one float32 scale for 256 (Q8_K, for K-quants). GELU is read from a table of float16
values at the nearest float16 input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.phimoe import modeling_phimoe

import torch
from halfbyte.gguf_models.architecture import DBRX_EXPERTS, EACH, EXPERTS, PART, Architecture
from halfbyte.gguf_models.names import LAYER, slot, stem_of

GELU = (GELUActivation, GELUTanh, NewGELUActivation)
Rounding = Callable[[torch.Tensor], torch.Tensor]


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """32 inputs of a scale: amax / 127, as float16; the codes are of the scale before it is
    rounded.
    """
    groups = x.reshape(-1, 32)
    largest = groups.abs().amax(1, keepdim=True)
    codes = torch.round(groups * torch.where(largest > 0, 127.0 / largest, 0.0))
    return (codes * (largest / 127.0).half().float()).reshape(x.shape)


def q8_k(x: torch.Tensor) -> torch.Tensor:
    """256 inputs of a scale: −127 is the code of the largest."""
    groups = x.reshape(-1, 256)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    inverse = torch.where(largest != 0, -127.0 / largest, 0.0)
    codes = torch.round(groups * inverse).clamp(max=127)
    return (codes * torch.where(largest != 0, 1.0 / inverse, 0.0)).reshape(x.shape)


ROUNDINGS: dict[str, Rounding] = {
    "F16": lambda x: x.half().float(), "BF16": lambda x: x.bfloat16().float(), "Q8_0": q8_0, "Q5_0": q8_0, "Q4_0": q8_0,
    "Q4_K": q8_k, "Q5_K": q8_k, "Q6_K": q8_k,
}  # fmt: skip
"""Type of a weight -> what its product does with the other operand. F32 does nothing."""


class Roundings(TorchFunctionMode):
    """Rounds the inputs of every linear product, by the type of its weight."""

    def __init__(self, roundings: dict[int, Rounding]) -> None:
        super().__init__()
        self.roundings = roundings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.linear, torch.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            rounding = self.roundings.get(args[1].untyped_storage().data_ptr())
            if rounding is not None:
                args = (rounding(args[0].float()), *args[1:])
        return func(*args, **(kwargs or {}))


class TableGELU(torch.nn.Module):
    """GELU, by its formula with tanh, of the nearest float16 and as float16; beyond 10 it is x or
    0.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, y))


def sparse(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Gemma 3n's sparse activations: llama.cpp divides the variance by one less than the width."""
    cut = torch.distributions.normal.Normal(0, 1).icdf(torch.tensor(module.activation_sparsity))
    return torch.relu(x - (x.mean(-1, keepdim=True) + x.std(-1, keepdim=True, unbiased=True) * cut))


def softmax_routing(scores: torch.Tensor, jitter_eps: float, training: bool, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PhiMoE's experts by llama.cpp: the largest of a softmax, their weights made to add up to 1."""
    weights, chosen = scores.softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


LLAMA_CPP_FUNCTIONS = (
    (modeling_gemma3n.Gemma3nTextMLP, "_gaussian_topk", sparse),
    (modeling_phimoe, "sparsemixer", softmax_routing),
)
"""Where llama.cpp computes something else than the model's authors: (owner, name, function)."""


class RMSWithBias(torch.nn.Module):
    """What llama.cpp computes for PhiMoE's layer norms: the mean is not subtracted."""

    def __init__(self, norm: torch.nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm.eps) * self.norm.weight + self.norm.bias


class AbsorbedAttention:
    """Latent attention with the keys' projection applied to the queries and the values' to the sum
    of latent vectors, as llama.cpp computes files that have the two apart.
    """

    def __init__(self, module: Any, keys: Rounding | None, values: Rounding | None) -> None:
        self.weight = module.kv_b_proj.weight.detach()
        self.keys, self.values = keys, values
        self.latent = torch.empty(0)

    def keep(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        """Before `kv_b_proj`: its input, (batch, 1, tokens, latent)."""
        self.latent = args[0]

    def attend(self, module: Any, query: Any, key: Any, mask: Any, scaling: float, indices: Any, sinks: Any) -> Any:
        """`mask`: below 0 where a token does not attend to another, as outside a window.
        `indices`: the tokens that each one attends to, where an indexer has chosen them.
        `sinks`: a score of each head for no token, where it has them.
        """
        size, width = module.qk_nope_head_dim, module.v_head_dim
        by_head = self.weight.view(query.shape[1], size + width, -1)
        nope, rotated = query[..., :size], query[..., size:]
        absorbed = (self.keys(nope) if self.keys else nope) @ by_head[:, :size]
        scores = (absorbed @ self.latent.mT + rotated @ key[..., size:].mT) * scaling
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if indices is not None:
            others = torch.ones(len(indices), *ahead.shape, dtype=torch.bool).scatter(-1, indices.long(), False)
            ahead = ahead | others[:, None]
        if mask is not None:
            ahead = ahead | (mask < 0)
        scores = scores.masked_fill(ahead, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        latent = scores.softmax(-1)[..., : key.shape[-2]] @ self.latent
        out = (self.values(latent) if self.values else latent) @ by_head[:, size:].mT
        return out.transpose(1, 2).contiguous(), None


def dense_copy(path: Path, to: Path) -> dict[str, str]:
    """A GGUF file's values as a float32 file, by the gguf package. Returns the types: tensor name
    -> type name.
    """
    reader = gguf.GGUFReader(path)
    field = reader.fields["general.architecture"]
    writer = gguf.GGUFWriter(to, str(field.contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    types = {}
    for t in reader.tensors:
        types[t.name] = t.tensor_type.name
        whole = t.tensor_type.name == "I32"
        writer.add_tensor(t.name, t.data if whole else np.ascontiguousarray(dequantize(t.data, t.tensor_type), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return types


def roundings_of(model: Any, architecture: Architecture, types: dict[str, str]) -> dict[int, Rounding]:
    """Address of a parameter -> what products with it do with the other operand."""
    out: dict[int, Rounding] = {}
    for name, kind in types.items():
        if kind in ("F32", "I32"):
            continue
        stem = stem_of(name)
        if stem in architecture.splits:
            parts = {name.replace(f".{stem}.", f".{part}."): kind for part in architecture.splits[stem]}
            out |= roundings_of(model, architecture, parts)
            continue
        where = slot(architecture, name)
        if where is None:
            continue
        path, leaf = where
        layer = LAYER.match(name)
        if layer and architecture.absent(model.config, int(layer[1]), layer[2].removesuffix(".weight")):
            continue
        if EXPERTS in path:
            path, _, projection = path.partition(EXPERTS)
            experts = model.get_submodule(path)
            leaf = projection if hasattr(experts, projection) else "gate_up_proj"
            if model.config.model_type == "dbrx":
                inner, _, leaf = DBRX_EXPERTS[projection].partition(".")
                path = f"{path}.{inner}"
        modules = model.get_submodule(path.partition(PART)[0].removesuffix(f".{EACH}"))
        for module in modules if path.endswith(EACH) else [modules]:
            out[getattr(module, leaf).untyped_storage().data_ptr()] = ROUNDINGS[kind]
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return out


@contextmanager
def rounded(model: Any, architecture: Architecture, types: dict[str, str]) -> Iterator[None]:
    """Within it, the model computes as llama.cpp does a file of these types: GELU of its table,
    inputs of products rounded, split latent attention absorbed.
    """
    undo: list[Callable[[], Any]] = []
    for owner, name, function in LLAMA_CPP_FUNCTIONS:
        undo.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, function)
    for path, module in list(model.named_modules()):
        replaced = TableGELU() if isinstance(module, GELU) else None
        if isinstance(module, torch.nn.LayerNorm) and architecture.model_type == "phimoe":
            replaced = RMSWithBias(module)
        if replaced is not None:
            model.set_submodule(path, replaced)
            undo.append(lambda path=path, module=module: model.set_submodule(path, module))
    roundings = roundings_of(model, architecture, types)
    if any(".attn_k_b." in name for name in types):
        absorbed = {}
        for i, layer in enumerate(model.model.layers):
            if f"blk.{i}.attn_k_b.weight" not in types:
                continue
            kinds = (types[f"blk.{i}.attn_{w}_b.weight"] for w in "kv")
            one = absorbed[layer.self_attn] = AbsorbedAttention(layer.self_attn, *map(ROUNDINGS.get, kinds))
            undo.append(layer.self_attn.kv_b_proj.register_forward_pre_hook(one.keep).remove)
            roundings.pop(layer.self_attn.kv_b_proj.weight.untyped_storage().data_ptr(), None)
        ALL_ATTENTION_FUNCTIONS.register(
            "absorbed",
            lambda module, q, k, v, mask, scaling, indices=None, s_aux=None, **_: absorbed[module].attend(
                module, q, k, mask, scaling, indices, s_aux
            ),
        )
        ALL_MASK_ATTENTION_FUNCTIONS.register("absorbed", eager_mask)
        before = model.config._attn_implementation
        model.config._attn_implementation = "absorbed"
        undo.append(lambda: setattr(model.config, "_attn_implementation", before))
    try:
        with Roundings(roundings):
            yield
    finally:
        for step in undo:
            step()
