"""Modules over packed weights that replace `nn.Linear` and `nn.Embedding`.

    QLinear     y = x · wᵀ + bias         by `functional.linear`, differentiable with respect to x
    QEmbedding  y = w[ids] · scale        by `functional.embedding`

A packed weight is not a parameter: it has no gradient and no dense copy. Two modules may share one
(a tied head). The state dict has its canonical parts, `.to(device)` moves it, deepcopy shares it
and pickle writes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import Prepared
from ..errors import HalfbyteError
from ..ops import at_once
from ..tensor.qtensor import QTensor
from . import custom_ops, functional
from .packed_weight import PackedWeight
from .state import DESCRIPTION, NAMES, qtensor_of, tensors_of

Weight = PackedWeight | Prepared | QTensor


class Packed(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """Base of all packed modules: packed weights by name; the name of a module's only weight is ""."""

    packed: dict[str, PackedWeight]

    def __init__(self, packed: Mapping[str, PackedWeight], activations: str = "exact", backend: str | None = None) -> None:
        super().__init__()
        self.packed = dict(packed)
        self.activations, self.backend = activations, backend
        self.handle = custom_ops.register(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights; a shared weight counts once."""
        return sum(h.nbytes for h in {id(h): h for h in self.packed.values()}.values())

    @property
    def device(self) -> str:
        """torch's name of the device the weights are on."""
        return next(iter(self.packed.values())).device

    def canonical(self, piece: str = "") -> QTensor:
        """One of the weights as the QTensor it was made from."""
        return self.packed[piece].canonical()

    def shape_of(self, piece: str) -> tuple[int, ...]:
        """The shape of one of the weights."""
        return self.packed[piece].shape

    def replace(self, piece: str, weight: PackedWeight) -> None:
        """Replace one weight by another of the same shape."""
        self.packed[piece] = weight

    def extra_repr(self) -> str:
        return "; ".join(f"{name}: {describe(h)}" if name else describe(h) for name, h in self.packed.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packed:
        super()._apply(fn, recurse)
        for name, weight in self.packed.items():
            there = fn(torch.empty(0, dtype=weight.dtype, device=weight.device))
            if there.device.type != "meta":
                self.packed[name] = weight.like(str(there.device), there.dtype)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = {k: deepcopy(v, memo) for k, v in self.__dict__.items() if k != "handle"}
        new.handle = custom_ops.register(new)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.handle = custom_ops.register(self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.packed:
            base = f"{prefix}{name}." if name else prefix
            destination.update({base + part: t for part, t in tensors_of(self.canonical(name)).items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        mine = {key[len(prefix) :]: t for key, t in state_dict.items() if key.startswith(prefix)}
        for name, current in tuple(self.packed.items()):
            base = f"{name}." if name else ""
            tensors = {part: mine.pop(base + part) for part in NAMES if base + part in mine}
            if DESCRIPTION not in tensors:
                missing_keys.append(f"{prefix}{base}{DESCRIPTION}")
                continue
            try:
                q = qtensor_of(tensors, prefix + base.rstrip("."))
            except HalfbyteError as error:
                error_msgs.append(str(error))
                continue
            if q.shape != self.shape_of(name):
                error_msgs.append(f"{prefix}{base}codes hold a weight of shape {q.shape}; the module's is {self.shape_of(name)}")
                continue
            self.replace(name, current.of_same_kind(q))
        rest = {prefix + key: t for key, t in mine.items()}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class PackedLinear(Packed):
    """Base of layers that compute x · wᵀ + bias: a custom operator in a traced graph, `compute` in
    eager mode.
    """

    out_features: int
    in_features: int
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · wᵀ + bias with a bias of the caller's."""
        if custom_ops.needs_dispatch(x, bias):
            y: Tensor = custom_ops.linear(x, bias, self.handle, self.out_features)
            return y
        return self.compute(x, bias)

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · wᵀ + bias, without the dispatcher."""
        raise NotImplementedError


class QLinear(PackedLinear):
    """A linear layer over a packed (n, k) weight.

    weight       QTensor, the result of `ops.prepare`, or a `PackedWeight` shared with another
                 module
    bias         (n,) or None
    activations  as in `ops.linear`
    device       where a QTensor is prepared; backend None picks by it
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        activations: str = "exact",
        device: str = "cpu",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            {"": PackedWeight.of(weight, device=device, backend=backend, activations=activations)}, activations, backend
        )
        self.out_features, self.in_features = self.weight.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> PackedWeight:
        """The packed weight."""
        return self.packed[""]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · wᵀ + bias with a bias of the caller's."""
        if not torch.compiler.is_compiling():
            y: Tensor | None = at_once(x, self.packed[""].prepared, bias, self.activations)
            if y is not None:
                return y
        return super().product(x, bias)

    def extra_repr(self) -> str:
        return f"n={self.out_features}, k={self.in_features}, bias={self.bias is not None}, {super().extra_repr()}"

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · wᵀ + bias, without the dispatcher."""
        return functional.compute(x, self.packed[""].prepared, bias, self.activations)

    def gradient(self, g: Tensor) -> Tensor:
        """g · w, the gradient of `compute` with respect to x."""
        return functional.gradient(g, self.packed[""].prepared)


class QEmbedding(Packed):
    """Rows of a packed (n, k) table, decoded exactly to `dtype` and multiplied by `scale` (Gemma's
    √k), in that dtype.
    """

    def __init__(
        self,
        weight: Weight,
        *,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        backend: str | None = None,
    ) -> None:
        super().__init__({"": PackedWeight.of(weight, device=device, backend=backend)}, backend=backend)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.dtype = dtype
        self.scale = None if scale is None else torch.tensor(scale, dtype=torch.float32, device="cpu").to(dtype)

    @property
    def weight(self) -> PackedWeight:
        """The packed table."""
        return self.packed[""]

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale.item():g}"
        size = f"n={self.num_embeddings}, k={self.embedding_dim}, {str(self.dtype).removeprefix('torch.')}"
        return f"{size}{scale}, {super().extra_repr()}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packed:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        if self.scale is not None:
            self.scale = self.scale.to(self.dtype)
        return super()._apply(fn, recurse)

    def forward(self, ids: Tensor) -> Tensor:
        if custom_ops.needs_dispatch(ids):
            y: Tensor = custom_ops.embedding(ids, self.handle, self.embedding_dim, self.dtype)
            return y
        return self.compute(ids)

    def compute(self, ids: Tensor) -> Tensor:
        """The rows, without the dispatcher."""
        y = functional.rows(ids, self.weight.prepared, self.dtype)
        return y if self.scale is None else y * self.scale


def describe(weight: PackedWeight) -> str:
    """`int4:g128, 4 bits, group 128, 4.25 bits/weight, 1,234 bytes`."""
    fmt = weight.format
    group = "whole rows" if fmt.group_size == -1 else f"group {fmt.group_size}"
    return f"{fmt}, {fmt.bits} bits, {group}, {weight.bits_per_weight:.4g} bits/weight, {weight.nbytes:,} bytes"


def batch_invariant(model: nn.Module, wanted: bool = True) -> None:
    """Make the packed products of a model batch-invariant, in place, or as they were (`ops.linear`,
    invariant): a row of each gives the same bits whatever the other rows. Products with dense
    weights, attention among them, are torch's and are not. BackendError where a backend has none.
    """
    changed: dict[int, PackedWeight] = {}
    for module in packed_modules(model).values():
        for name, weight in module.packed.items():
            if id(weight) not in changed:
                changed[id(weight)] = weight.batch_invariant(wanted)
            module.packed[name] = changed[id(weight)]


def packed_modules(model: nn.Module) -> dict[str, Packed]:
    """Name -> module of every packed module of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
