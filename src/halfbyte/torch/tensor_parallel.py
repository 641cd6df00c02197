"""Tensor parallelism for packed models: a rank has some attention heads, a part of each
feed-forward layer, and some experts.

    torch.distributed.init_process_group("gloo")
    model, tokenizer = load_model(path)
    parallelize(model)                      every rank calls it; outputs are the whole model's on
                                            every rank

q, k, v, gate and up are sharded by rows (every rank computes its own outputs), o and down by inputs
at group boundaries, each followed by one all-reduce. Fused projections are sharded within each
part. An expert is on one rank as a whole. Embedding, head, norms and routers are replicated. The
bias of a layer sharded by inputs is added once, after the sum.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import torch
from torch import Tensor, nn

from ..errors import HalfbyteError, ShapeError, UnsupportedError
from ..tensor.concat import concat_rows, incompatibility
from ..tensor.qtensor import QTensor
from ..tensor.shard import input_unit, shard_experts, shard_inputs, shard_rows, split
from .concat_linear import ConcatLinear
from .experts import QExperts
from .fuse import unfuse
from .modules import Packed, QLinear
from .packed_weight import PackedWeight
from .scaled_linear import scale_of, scaled

Bounds = tuple[int, int]


class SummedLinear(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """A linear layer cut by inputs: y = Σ over ranks of x_r · w_rᵀ, then bias."""

    def __init__(self, inner: nn.Module, bias: Tensor | None, group: Any = None) -> None:
        super().__init__()
        self.inner, self.group = inner, group
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = summed(self.inner(x), self.group)
        return y if self.bias is None else y + self.bias


class SummedExperts(nn.Module):  # type: ignore[misc]
    """The experts of this rank, numbered from `first`; the sum over the ranks is the mixture."""

    def __init__(self, inner: QExperts, first: int, group: Any = None) -> None:
        super().__init__()
        self.inner, self.first, self.group = inner, first, group

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        here = (topk_ids >= self.first) & (topk_ids < self.first + self.inner.num_experts)
        # A slot of another rank's expert is masked and contributes nothing.
        local = torch.where(here, topk_ids - self.first, self.inner.num_experts)
        return summed(self.inner(x, local, topk_weights), self.group)


def summed(x: Tensor, group: Any = None) -> Tensor:
    """Σ over ranks in float32, rounded once to x's dtype."""
    total = x.to(torch.float32).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def parallelize(model: Any, rank: int | None = None, ranks: int | None = None, group: Any = None) -> Any:
    """Shard a model in place and return it.

    rank, ranks  of this process, and how many there are; None: those of torch.distributed
    group        a process group, None for all

    Raises ShapeError where there are fewer heads, groups or experts than ranks, UnsupportedError
    for a format that cannot be cut along its inputs; both name the module.
    """
    rank = dist.get_rank(group) if rank is None else rank
    ranks = dist.get_world_size(group) if ranks is None else ranks
    if ranks == 1:
        return model
    unfuse(model)
    for name, module in list(model.named_modules()):
        try:
            if _linears(module, "o_proj") and (_linears(module, "q_proj", "k_proj", "v_proj") or _linears(module, "qkv_proj")):
                _cut_attention(module, model.config.get_text_config(), rank, ranks, group)
            elif _linears(module, "down_proj") and (_linears(module, "gate_proj", "up_proj") or _linears(module, "gate_up_proj")):
                _cut_feed_forward(module, rank, ranks, group)
            elif isinstance(module, QExperts):
                model.set_submodule(name, cut_experts(module, rank, ranks, group))
        except HalfbyteError as error:
            raise type(error)(f"[parallelize] {name} over {ranks} ranks: {error}") from error
    return model


def _linears(module: nn.Module, *names: str) -> bool:
    return all(isinstance(module._modules.get(n), nn.Linear | QLinear | ConcatLinear) for n in names)


def _cut_attention(attention: Any, config: Any, rank: int, ranks: int, group: Any) -> None:
    """Distribute heads of keys and values, each with its heads of queries, over the ranks at group
    boundaries of the output projection.
    """
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    head = attention.head_dim
    per = heads // kv
    unit = _unit(attention.o_proj)
    step = unit // math.gcd(unit, head * per)
    first, last = split(kv, ranks, step)[rank]
    keys: Bounds = (first * head, last * head)
    queries: Bounds = (keys[0] * per, keys[1] * per)
    if "qkv_proj" in attention._modules:
        sizes = (heads * head, kv * head, kv * head)
        attention.qkv_proj = cut_rows(attention.qkv_proj, _sections(sizes, (queries, keys, keys)))
        # Some models split the fused projection by the configuration's numbers of heads.
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads, attention.config.num_key_value_heads = (last - first) * per, last - first
    else:
        attention.q_proj = cut_rows(attention.q_proj, [queries])
        attention.k_proj = cut_rows(attention.k_proj, [keys])
        attention.v_proj = cut_rows(attention.v_proj, [keys])
    attention.o_proj = cut_inputs(attention.o_proj, queries, group)
    for count, value in (("num_heads", (last - first) * per), ("num_key_value_heads", last - first)):
        if hasattr(attention, count):
            setattr(attention, count, value)
    if isinstance(getattr(attention, "sinks", None), nn.Parameter):
        attention.sinks = nn.Parameter(attention.sinks.detach()[first * per : last * per].clone(), requires_grad=False)


def _cut_feed_forward(mlp: Any, rank: int, ranks: int, group: Any) -> None:
    f = mlp.down_proj.in_features
    bounds = split(f, ranks, _unit(mlp.down_proj))[rank]
    if "gate_up_proj" in mlp._modules:
        mlp.gate_up_proj = cut_rows(mlp.gate_up_proj, _sections((f, f), (bounds, bounds)))
    else:
        mlp.gate_proj, mlp.up_proj = cut_rows(mlp.gate_proj, [bounds]), cut_rows(mlp.up_proj, [bounds])
    mlp.down_proj = cut_inputs(mlp.down_proj, bounds, group)


def cut_experts(experts: QExperts, rank: int, ranks: int, group: Any) -> SummedExperts:
    """The experts of one rank; slots of other experts contribute nothing."""
    first, last = split(experts.num_experts, ranks)[rank]
    weights: dict[str, Any] = {}
    biases: dict[str, Tensor] = {}
    for name, stacked in experts.stacked.items():
        if stacked:
            weights[name] = _prepare_like(experts, shard_experts(experts.packed[name].canonical(), first, last))
        else:
            weights[name] = [experts.packed[f"{e}.{name}"] for e in range(first, last)]
        bias = getattr(experts, f"{name}_bias")
        if bias is not None:
            biases[name] = bias.detach()[first:last].clone()
    inner = QExperts(
        weights,
        biases,
        gate=experts.gate,
        interleaved=experts.interleaved,
        limit=experts.limit,
        activations=experts.activations,
        backend=experts.backend,
    )
    return SummedExperts(inner, first, group)


def _unit(module: nn.Module) -> int:
    """Number of inputs between two positions at which a layer may be cut."""
    if not isinstance(module, Packed):
        return 1
    return math.lcm(*(input_unit(h.canonical()) for h in module.packed.values()))


def _sections(sizes: Sequence[int], bounds: Sequence[Bounds]) -> list[Bounds]:
    """Bounds within the parts of a fused projection as bounds within the whole."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [(s + a, s + b) for s, (a, b) in zip(starts, bounds, strict=True)]


def cut_rows(module: nn.Module, bounds: Sequence[Bounds]) -> nn.Module:
    """A linear layer with some of its outputs: the ranges of rows in `bounds`, in order."""
    bias = getattr(module, "bias", None)
    bias = None if bias is None else torch.cat([bias.detach()[a:b] for a, b in bounds])
    if isinstance(module, nn.Linear):
        rows = torch.cat([module.weight.detach()[a:b] for a, b in bounds])
        return _linear(rows, bias)
    pieces = [piece for a, b in bounds for piece in _rows_of(module, a, b)]
    whole = [w for _, w in pieces]
    options: dict[str, Any] = {"activations": module.activations, "backend": module.backend}
    if incompatibility(whole) is None:
        cut: Any = QLinear(_prepare_like(module, concat_rows(whole)), bias, **options)
    else:
        cut = ConcatLinear(
            [_prepare_like(module, w) for w in whole], bias, activations=module.activations, backend=module.backend
        )
    return scaled(cut, scale_of(module))


def _rows_of(module: Packed, start: int, stop: int) -> list[tuple[PackedWeight, QTensor]]:
    """Rows start to stop of a module, with the weight that each range belongs to."""
    out, first = [], 0
    for weight in module.packed.values():
        n = weight.shape[0]
        a, b = max(start - first, 0), min(stop - first, n)
        if a < b:
            out.append((weight, shard_rows(weight.canonical(), a, b)))
        first += n
    return out


def cut_inputs(module: nn.Module, bounds: Bounds, group: Any = None) -> SummedLinear:
    """A linear layer over inputs start to stop, its outputs summed over the ranks."""
    bias = getattr(module, "bias", None)
    if isinstance(module, nn.Linear):
        return SummedLinear(_linear(module.weight.detach()[:, bounds[0] : bounds[1]].contiguous(), None), bias, group)
    if not isinstance(module, Packed):
        raise UnsupportedError(f"[shard] a {type(module).__name__} cannot be cut along its inputs")
    cut = [_prepare_like(module, shard_inputs(h.canonical(), *bounds)) for h in module.packed.values()]
    options: dict[str, Any] = {"activations": module.activations, "backend": module.backend}
    inner = QLinear(cut[0], **options) if len(cut) == 1 else ConcatLinear(cut, **options)
    scale = scale_of(module)
    return SummedLinear(scaled(inner, None if scale is None else scale[bounds[0] : bounds[1]]), bias, group)


def _prepare_like(module: Packed, w: QTensor) -> PackedWeight:
    weight = PackedWeight.of(w, device=module.device, backend=module.backend, activations=module.activations)
    return weight.batch_invariant(any(one.invariant for one in module.packed.values()))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    if weight.ndim != 2:
        raise ShapeError(f"[shard] a weight of shape {tuple(weight.shape)}; (n, k) is wanted")
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    out.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        out.bias = nn.Parameter(bias, requires_grad=False)
    return out
