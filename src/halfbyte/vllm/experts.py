"""vLLM's mixture of experts over packed weights.

    y[i] = Σ_t topk_weights[i, t] · down_e(act(gate_e(x[i]), up_e(x[i]))),   e = topk_ids[i, t]

vLLM routes and sums over the ranks; `torch.experts.QExperts` multiplies. Under tensor parallelism a
rank holds some outputs of gate and up and the same inputs of down, under expert parallelism some
experts whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import set_weight_attrs

import torch
from torch import Tensor, nn

from ..checkpoints import expert_names
from ..errors import CheckpointError, ShapeError, UnsupportedError
from ..tensor.concat import concat_rows, incompatibility, stack
from ..tensor.qtensor import QTensor
from ..tensor.shard import shard_inputs, shard_rows
from ..torch.experts import QExperts
from .linear import prepared, rounded_on
from .source import Projection, Source

GATES = {
    MoEActivation.SILU: "swiglu",
    MoEActivation.GELU_TANH: "geglu",
    MoEActivation.SWIGLUOAI: "swiglu_clamped",
}
"""vLLM's activation -> the gate of `halfbyte.experts`."""
LIMITED = ("swiglu", "swiglu_clamped")
"""Gates that a limit may be stated of (HY 4, DeepSeek-V4); gpt-oss's is always 7."""

Piece = QTensor | list[QTensor]
"""A projection of the experts of this rank: a stack (e, n, k), or matrices of several formats."""


class HalfbyteExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc] # vLLM is not type-checked
    """The experts of a layer, packed in the checkpoint.

    keys         projection and expert -> key (`source.Projection`)
    activations  as in `halfbyte.experts`

    Raises UnsupportedError for an activation that is not computed on packed weights.
    """

    def __init__(self, moe: Any, keys: Mapping[Projection, str], name: str, activations: str = "exact") -> None:
        super().__init__(moe)
        self.keys, self.name, self.activations = dict(keys), name, activations
        if moe.activation not in GATES:
            allowed = ", ".join(a.value for a in GATES)
            raise UnsupportedError(f"[vllm] {name} gates with {moe.activation.value}; allowed on packed experts: {allowed}")
        if moe.swiglu_limit and GATES[moe.activation] not in LIMITED:
            raise UnsupportedError(f"[vllm] {name} limits {moe.activation.value} to {moe.swiglu_limit}; that of SiLU is computed")

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters for the biases alone, which vLLM's models load themselves."""
        layer.halfbyte = None
        layer.halfbyte_dtype = params_dtype
        if not self.moe.has_bias:
            return
        for name, rows in (("w13_bias", 2 * intermediate_size_per_partition), ("w2_bias", hidden_size)):
            bias = nn.Parameter(torch.zeros(num_experts, rows, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, bias)
            set_weight_attrs(bias, extra_weight_attrs | {"weight_loader": _BiasLoader(layer)})

    def fill(self, layer: nn.Module, source: Source, device: str) -> None:
        """Reads, cuts, joins and prepares the experts of this rank.

        Raises CheckpointError for experts that are missing or of another shape, ShapeError or
        UnsupportedError for weights that cannot be cut for this rank; all name the layer.
        """
        ours = _local_experts(layer)
        pieces = {p: self._piece(source, p, ours) for p in dict.fromkeys(p for p, _ in self.keys)}
        gate = GATES[self.moe.activation]
        joint = next((expert_names.parse(key) for (name, _), key in self.keys.items() if name == "gate_up_proj"), None)
        interleaved = joint is not None and joint.gate_up_alternate(gate == "swiglu_clamped")
        try:
            pieces = _cut(pieces, layer, interleaved)
        except (ShapeError, UnsupportedError) as error:
            raise type(error)(f"[vllm] {self.name}: {error}") from error
        activations = rounded_on(device, self.activations)
        weights: dict[str, Any] = {
            name: _each(piece, lambda q: prepared(q, device, activations, layer.halfbyte_dtype)) for name, piece in pieces.items()
        }
        biases: dict[str, Tensor] = {}
        if self.moe.has_bias:
            first = layer.w13_bias.data
            if joint is None and gate == "swiglu_clamped":  # its rows alternate, those of the weights do not
                biases = {"gate_proj": first[:, ::2], "up_proj": first[:, 1::2]}
                first = torch.cat(list(biases.values()), 1)
            biases = {**({"gate_up_proj": first} if "gate_up_proj" in weights else biases), "down_proj": layer.w2_bias.data}
        limit = self.moe.swiglu_limit if gate == "swiglu" and self.moe.swiglu_limit else None
        layer.halfbyte = QExperts(weights, biases, gate=gate, interleaved=interleaved, activations=activations, limit=limit)

    def _piece(self, source: Source, projection: str, ours: list[int]) -> Piece:
        if (projection, None) in self.keys:
            q = source.weight(self.keys[projection, None])
            if q.ndim != 3 or q.shape[0] != self.moe.num_logical_experts:
                raise CheckpointError(
                    f"[vllm] {self.keys[projection, None]} is {list(q.shape)}; {self.name} has "
                    f"{self.moe.num_logical_experts} experts"
                )
            if q.format.grouping in ("flat", "strided"):
                return [q[e] for e in ours]
            return q if len(ours) == q.shape[0] else stack([q[e] for e in ours])
        lost = [e for e in ours if (projection, e) not in self.keys]
        if lost:
            raise CheckpointError(f"[vllm] {source.checkpoint.path}: no {projection} of expert {lost[0]} of {self.name}")
        weights = [source.weight(self.keys[projection, e]) for e in ours]
        return stack(weights) if incompatibility(weights, stacked=True) is None else weights

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: vLLM's own kernels are not used."""

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """The routed sum over this rank's experts. vLLM runs shared experts itself."""
        experts: QExperts = layer.halfbyte
        if layer.expert_map is not None:
            local = layer.expert_map[topk_ids.long()]
            topk_ids = torch.where(local < 0, experts.num_experts, local)
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        ids = topk_ids.long()
        if torch.compiler.is_compiling():
            y: Tensor = torch.ops.halfbyte.experts_at(x, ids, topk_weights, experts.handle.tensor)
            return y
        return experts.compute(x, ids, topk_weights)


class _BiasLoader:
    """Copies a bias into its parameter: of all experts of this rank, or of one projection of one."""

    supports_moe_loading = True

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(
        self,
        param: nn.Parameter,
        loaded: Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        target = param.data
        if expert_id is not None and loaded.ndim == 1:
            slot = self.layer._map_global_expert_id_to_local_expert_id(expert_id)
            if slot < 0:
                return False if return_success else None
            target = target[slot]
            if shard_id in ("w1", "w3"):
                target = target.chunk(2)[("w1", "w3").index(shard_id)]
        target.copy_(loaded)
        return True if return_success else None


def _local_experts(layer: nn.Module) -> list[int]:
    """The experts of this rank in the order of its slots."""
    slots = {layer._map_global_expert_id_to_local_expert_id(e): e for e in range(layer.global_num_experts)}
    return [slots[slot] for slot in sorted(slots) if slot >= 0]


def _cut(pieces: dict[str, Piece], layer: nn.Module, interleaved: bool) -> dict[str, Piece]:
    """Outputs of gate and up and inputs of down that this rank computes; gate and up joined where
    they can be.
    """
    moe = layer.moe_config
    size, rank = moe.intermediate_size_per_partition_unpadded, moe.moe_parallel_config.tp_rank
    ranks = moe.moe_parallel_config.tp_size
    first, last, whole = rank * size, (rank + 1) * size, size * ranks
    if ranks > 1:
        cut: dict[str, Piece] = {}
        for name, piece in pieces.items():
            if name == "down_proj":
                cut[name] = _each(piece, lambda q: shard_inputs(q, first, last))
            elif name != "gate_up_proj":
                cut[name] = _each(piece, lambda q: shard_rows(q, first, last))
            elif interleaved:
                cut[name] = _each(piece, lambda q: shard_rows(q, 2 * first, 2 * last))
            else:
                cut[name] = _each(
                    piece, lambda q: concat_rows([shard_rows(q, first, last), shard_rows(q, whole + first, whole + last)])
                )
        pieces = cut
    gate, up = pieces.get("gate_proj"), pieces.get("up_proj")
    if isinstance(gate, QTensor) and isinstance(up, QTensor) and incompatibility((gate, up)) is None:
        pieces = {"gate_up_proj": concat_rows([gate, up]), "down_proj": pieces["down_proj"]}
    for name, piece in pieces.items():
        wanted = {
            "gate_up_proj": (2 * size, layer.hidden_size),
            "gate_proj": (size, layer.hidden_size),
            "up_proj": (size, layer.hidden_size),
            "down_proj": (layer.hidden_size, size),
        }[name]
        for q in [piece] if isinstance(piece, QTensor) else piece:
            if q.shape[-2:] != wanted:
                raise ShapeError(f"{name} holds matrices {list(q.shape[-2:])}; wanted {list(wanted)}")
    return pieces


def _each(piece: Piece, function: Callable[[QTensor], Any]) -> Any:
    """The function of a stack, or of each matrix."""
    return function(piece) if isinstance(piece, QTensor) else [function(q) for q in piece]
