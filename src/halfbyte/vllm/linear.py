"""vLLM's linear layers, embeddings and heads over packed weights.

    y = x · w[rows of this rank]ᵀ + bias        column-parallel, fused qkv and gate_up, heads
    y = x · w[:, inputs of this rank]ᵀ          row-parallel; vLLM sums over the ranks

A fused layer is one packed matrix where its parts share a format, else their products side by side.
No dense weight is made. In a compiled graph a product is one call of `halfbyte::linear_at`, whose
last tensor names the module: a graph that vLLM keeps on disk serves every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.utils import set_weight_attrs

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ShapeError, UnsupportedError
from ..tensor.concat import concat_rows, incompatibility
from ..tensor.qtensor import QTensor
from ..tensor.shard import shard_inputs, shard_rows
from ..torch.concat_linear import ConcatLinear
from ..torch.modules import PackedLinear, QEmbedding, QLinear
from ..torch.packed_weight import PackedWeight
from .source import Source

Bounds = tuple[int, int]


def product(module: PackedLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """x · wᵀ + bias of a packed module."""
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.halfbyte.linear_at(x, bias, module.handle.tensor, module.out_features)
        return y
    return module.product(x, bias)


def rounded_on(device: str, activations: str) -> str:
    """How a layer on this device rounds its inputs: "int8_token" is the CPU's alone."""
    return "int8" if activations == "int8_token" and device != "cpu" else activations


def prepared(w: QTensor, device: str, activations: str, dtype: torch.dtype) -> PackedWeight:
    """A weight on the device of its layer, for activations of the layer's dtype."""
    weight = PackedWeight.of(w, device=device, activations=activations)
    weight.dtype = dtype
    return weight


class HalfbyteLinearMethod(LinearMethodBase):  # type: ignore[misc] # vLLM is not type-checked
    """A linear layer whose matrix, or whose parts', are packed in the checkpoint.

    keys         the keys of its parts, in the order of its rows; one key is the whole
    activations  as in `halfbyte.linear`
    """

    def __init__(self, keys: Sequence[str], activations: str = "exact") -> None:
        self.keys, self.activations = tuple(keys), activations

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Remembers what this rank computes. No matrix is allocated: a fused qkv has a column of
        row numbers in its place, of its one matrix or of each of its three (`fill`).
        """
        layer.halfbyte_inputs = (input_size_per_partition, input_size)
        layer.halfbyte_outputs = list(output_partition_sizes)
        layer.halfbyte_dtype = params_dtype
        layer.halfbyte = None
        if self.is_numbered(layer):
            sizes, bounds = _sections(layer)
            starts = [sum(sizes[:i]) if len(self.keys) == 1 else 0 for i in range(len(sizes))]
            rows = [s + row for s, own in zip(starts, bounds, strict=True) for row in range(*own)]
            numbers = nn.Parameter(torch.tensor(rows, dtype=torch.float32)[:, None], requires_grad=False)
            set_weight_attrs(numbers, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
            layer.register_parameter("weight", numbers)
        else:
            layer.weight = torch.empty(0, dtype=params_dtype)  # models ask it for its dtype

    def is_numbered(self, layer: nn.Module) -> bool:
        """Whether vLLM's model is asked for the order of the rows: those of Bloom, Falcon and
        Llama 4 move rows of queries, keys and values as they load a matrix.
        """
        return isinstance(layer, QKVParallelLinear)

    def fill(self, layer: nn.Module, source: Source, device: str) -> None:
        """Reads, cuts, joins and prepares the weight of one layer. Where its rows are numbered, its
        `weight` has the number of each row of this rank, and is let go.

        Raises CheckpointError for a shape other than the layer's, and ShapeError or
        UnsupportedError for a weight that cannot be cut for this rank; both name the layer.
        """
        weights = [source.weight(key) for key in self.keys]
        activations = rounded_on(device, self.activations)
        rows: list[int] = []
        if self.is_numbered(layer):
            rows = layer.weight[:, 0].long().tolist()
            del layer.weight
            layer.weight = torch.empty(0, dtype=layer.halfbyte_dtype)
        try:
            pieces = _numbered(layer, weights, self.keys, rows) if rows else _cut(layer, weights, self.keys)
        except (ShapeError, UnsupportedError) as error:
            raise type(error)(f"[vllm] {layer.prefix}: {error}") from error
        if incompatibility(pieces) is None:
            whole = pieces[0] if len(pieces) == 1 else concat_rows(pieces)
            layer.halfbyte = QLinear(prepared(whole, device, activations, layer.halfbyte_dtype), activations=activations)
        else:
            parts = [prepared(w, device, activations, layer.halfbyte_dtype) for w in pieces]
            layer.halfbyte = ConcatLinear(parts, activations=activations)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x · wᵀ + bias."""
        return product(layer.halfbyte, x, bias)


class HalfbyteEmbeddingMethod(HalfbyteLinearMethod):
    """A table of embeddings, or a head, packed in the checkpoint. A tied head shares the table."""

    def embedding(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Rows by index, decoded exactly."""
        table: QEmbedding = layer.halfbyte_table
        if torch.compiler.is_compiling():
            y: Tensor = torch.ops.halfbyte.embedding_at(ids, table.handle.tensor, table.embedding_dim, table.dtype)
            return y
        return table.compute(ids)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """The head multiplies by the table's own bytes."""
        layer.halfbyte_tied = embed_tokens
        return layer

    def fill(self, layer: nn.Module, source: Source, device: str) -> None:
        """The rows of this rank's part of the vocabulary, as a table and as a head."""
        tied = getattr(layer, "halfbyte_tied", None)
        if tied is not None and getattr(tied, "halfbyte", None) is not None:
            layer.halfbyte = tied.halfbyte
            return
        super().fill(layer, source, device)
        if not isinstance(layer.halfbyte, QLinear):
            raise CheckpointError(f"[vllm] {layer.prefix}: a table in several formats")
        layer.halfbyte_table = QEmbedding(layer.halfbyte.weight, dtype=layer.halfbyte_dtype)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of this rank's tokens, zero for the padding of the vocabulary."""
        rows = layer.halfbyte.out_features
        padding = layer.num_embeddings_per_partition - rows
        y = product(layer.halfbyte, x, None if bias is None else bias[:rows])
        return nn.functional.pad(y, (0, padding)) if padding else y


def _cut(layer: nn.Module, weights: Sequence[QTensor], keys: Sequence[str]) -> list[QTensor]:
    """The parts of the matrix that this rank multiplies by, in the order of the layer's outputs."""
    own, inputs = layer.halfbyte_inputs
    if isinstance(layer, VocabParallelEmbedding):
        _check(layer, weights[0], (layer.org_vocab_size, inputs), keys[0])
        shard = layer.shard_indices
        bounds = (shard.org_vocab_start_index, shard.org_vocab_end_index)
        return [_rows(weights[0], bounds)]
    if isinstance(layer, RowParallelLinear):
        _check(layer, weights[0], (layer.output_size, inputs), keys[0])
        first = layer.tp_rank * own
        return [weights[0] if own == inputs else shard_inputs(weights[0], first, first + own)]
    sizes, bounds_of = _sections(layer)
    if len(weights) == 1 and len(sizes) > 1:
        _check(layer, weights[0], (sum(sizes), inputs), keys[0])
        if all(b == (0, n) for b, n in zip(bounds_of, sizes, strict=True)):
            return [weights[0]]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [_rows(weights[0], (s + a, s + b)) for s, (a, b) in zip(starts, bounds_of, strict=True)]
    for weight, size, key in zip(weights, sizes, keys, strict=True):
        _check(layer, weight, (size, inputs), key)
    return [_rows(w, b) for w, b in zip(weights, bounds_of, strict=True)]


def _numbered(layer: nn.Module, weights: Sequence[QTensor], keys: Sequence[str], rows: list[int]) -> list[QTensor]:
    """The rows of one matrix, or of each part's, in the order of their numbers."""
    sizes, own = _sections(layer)[0], layer.halfbyte_outputs
    if len(weights) == 1:
        sizes, own = [sum(sizes)], [sum(own)]
    pieces = []
    for i, (weight, size, key) in enumerate(zip(weights, sizes, keys, strict=True)):
        _check(layer, weight, (size, layer.halfbyte_inputs[1]), key)
        part = rows[sum(own[:i]) : sum(own[: i + 1])]
        starts = [j for j, row in enumerate(part) if not j or row != part[j - 1] + 1]
        runs = [_rows(weight, (part[j], part[k - 1] + 1)) for j, k in zip(starts, [*starts[1:], len(part)], strict=True)]
        pieces.append(runs[0] if len(runs) == 1 else concat_rows(runs))
    return pieces


def _sections(layer: nn.Module) -> tuple[list[int], list[Bounds]]:
    """Rows of each part of a column-parallel layer in the checkpoint, and this rank's among them."""
    own, rank = layer.halfbyte_outputs, layer.tp_rank
    if isinstance(layer, QKVParallelLinear):
        kv_rank = rank // layer.num_kv_head_replicas
        whole = [
            layer.total_num_heads * layer.head_size,
            layer.total_num_kv_heads * layer.head_size,
            layer.total_num_kv_heads * layer.v_head_size,
        ]
        return whole, [(r * n, (r + 1) * n) for r, n in zip((rank, kv_rank, kv_rank), own, strict=True)]
    return [n * layer.tp_size for n in own], [(rank * n, (rank + 1) * n) for n in own]


def _rows(weight: QTensor, bounds: Bounds) -> QTensor:
    return weight if bounds == (0, weight.shape[0]) else shard_rows(weight, *bounds)


def _check(layer: nn.Module, weight: QTensor, shape: tuple[int, int], key: str) -> None:
    if weight.shape != shape:
        raise CheckpointError(f"[vllm] {key} is {list(weight.shape)}; {layer.prefix} wants {list(shape)}")
