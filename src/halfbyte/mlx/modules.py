"""MLX modules of packed weights, and their construction from any checkpoint.

    QLinear      y = x · wᵀ + bias
    QEmbedding   y = w[ids] · scale
    QExperts     gate_up and down of a mixture of experts

The packed arrays are frozen parameters of the module, which `save_weights` and `load_weights` write
and read as any others. Nothing is requantized: a GPTQ, AWQ, compressed-tensors, NVFP4 or gpt-oss
weight keeps its codes, scales and zero points bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..backends.metal.mlx_runtime import MLXRuntime
from ..backends.metal.weight import MetalWeight
from ..errors import CheckpointError
from ..tensor.qtensor import QTensor
from . import verbs

_ARRAYS = ("codes", "scales", "addends", "factors", "order")


class Packed(nn.Module):  # type: ignore[misc] # mlx is not type-checked
    """Base class: the arrays of one packed weight as parameters, its format as plain attributes."""

    def __init__(self, weight: MetalWeight) -> None:
        super().__init__()
        self._format, self._shape = weight.format, weight.shape
        for name in _ARRAYS:
            a = getattr(weight, name)
            if a is not None:
                setattr(self, name, a)
        self.freeze()

    def weight(self) -> MetalWeight:
        """The packed weight, over the module's current arrays."""
        arrays = {name: self.get(name) for name in _ARRAYS}
        return MetalWeight(format=self._format, shape=self._shape, **arrays)

    def _extra_repr(self) -> str:
        return f"shape={self._shape}, {self._format}"


class QLinear(Packed):
    """A linear layer over a packed (n, k) weight."""

    def __init__(self, weight: QTensor | MetalWeight, bias: mx.array | None = None, *, schedule: str | None = None) -> None:
        super().__init__(_prepared(weight))
        self._schedule = schedule
        if bias is not None:
            self.bias = bias
            self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return verbs.linear(x, self.weight(), self.get("bias"), schedule=self._schedule)


class QEmbedding(Packed):
    """Rows of a packed (n, k) table in `dtype`, times `scale`; `as_linear` is the tied head."""

    def __init__(self, weight: QTensor | MetalWeight, *, dtype: str = "float16", scale: float | None = None) -> None:
        super().__init__(_prepared(weight))
        self._dtype, self._scale = dtype, scale

    def __call__(self, ids: mx.array) -> mx.array:
        y = verbs.embedding(ids, self.weight(), dtype=self._dtype)
        return y if self._scale is None else y * self._scale

    def as_linear(self, x: mx.array) -> mx.array:
        """x · wᵀ: the output head of a model whose embeddings are tied."""
        return verbs.linear(x, self.weight())


class QExperts(nn.Module):  # type: ignore[misc] # mlx is not type-checked
    """A mixture of experts over packed stacks (e, 2f, k) and (e, h, f)."""

    def __init__(
        self,
        gate_up: QTensor | MetalWeight,
        down: QTensor | MetalWeight,
        *,
        gate: str = "swiglu",
        interleaved: bool = False,
        gate_up_bias: mx.array | None = None,
        down_bias: mx.array | None = None,
    ) -> None:
        super().__init__()
        self.gate_up, self.down = Packed(_prepared(gate_up)), Packed(_prepared(down))
        self._gate, self._interleaved = gate, interleaved
        if gate_up_bias is not None:
            self.gate_up_bias = gate_up_bias
        if down_bias is not None:
            self.down_bias = down_bias
        self.freeze()

    def __call__(self, x: mx.array, topk_ids: mx.array, topk_weights: mx.array) -> mx.array:
        return verbs.experts(
            x,
            self.gate_up.weight(),
            self.down.weight(),
            topk_ids,
            topk_weights,
            gate=self._gate,
            interleaved=self._interleaved,
            gate_up_bias=self.get("gate_up_bias"),
            down_bias=self.get("down_bias"),
        )


def _prepared(weight: QTensor | MetalWeight) -> MetalWeight:
    return verbs.prepare(weight) if isinstance(weight, QTensor) else weight


def _bias(checkpoint: Mapping[str, Any], key: str) -> mx.array | None:
    name = f"{key}.bias"
    return MLXRuntime().array(checkpoint[name]) if name in checkpoint else None


def linears(checkpoint: Mapping[str, Any], keys: Iterable[str] | None = None) -> Iterator[tuple[str, QLinear]]:
    """(key, QLinear) of each packed matrix of a checkpoint (`halfbyte.open`), one at a time; stacks
    of experts are left out.

    keys  which keys; None for all. Raises CheckpointError for a given key that is not a packed
          matrix.
    """
    wanted = None if keys is None else list(keys)
    for key in checkpoint.keys() if wanted is None else wanted:
        found = checkpoint[key] if key in checkpoint else None  # noqa: SIM401  a Checkpoint has no get
        if isinstance(found, QTensor) and found.ndim == 2:
            yield key, QLinear(found, _bias(checkpoint, key))
        elif wanted is not None:
            what = (
                "is not there"
                if found is None
                else f"has shape {tuple(found.shape)}" + ("" if isinstance(found, QTensor) else ", dense")
            )
            raise CheckpointError(f"[mlx] {key} {what}; a packed (n, k) weight is wanted")


def replace_modules(model: nn.Module, checkpoint: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Replace each Linear or Embedding of `model` whose weight is packed in the checkpoint by a
    QLinear or QEmbedding.

    prefix  what the checkpoint's keys have before the model's own module paths ("model.")
    Returns the paths replaced. Raises CheckpointError when a weight's shape is not the module's.
    """
    replaced: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        key = prefix + path
        if not isinstance(module, (nn.Linear, nn.Embedding)) or key not in checkpoint:
            continue
        found = checkpoint[key]
        if not isinstance(found, QTensor):
            continue
        if found.shape != tuple(module.weight.shape):
            raise CheckpointError(f"[mlx] {key} has shape {found.shape}; the model's module has {tuple(module.weight.shape)}")
        dtype = str(module.weight.dtype).removeprefix("mlx.core.")
        bias = _bias(checkpoint, key)
        new = QLinear(found, bias) if isinstance(module, nn.Linear) else QEmbedding(found, dtype=dtype)
        replaced.append((path, new))
    model.update_modules(tree_unflatten(replaced))
    return sorted(path for path, _ in replaced)
