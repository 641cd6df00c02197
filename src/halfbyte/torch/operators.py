"""torch operators over packed weights, so that `torch.compile` sees one opaque call where a module multiplies.

    halfbyte::linear(x, bias, module, n)      halfbyte::embedding(ids, module, k, dtype)      halfbyte::experts(...)

A packed weight is no tensor, so an operator is given its module's number; `register` hands one out. Outside a compiled graph
modules call `ops` themselves and pay nothing for this.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _operator(name: str, schema: str) -> Any:
    return torch.library.custom_op(name, mutates_args=(), schema=schema)


def register(module: Any) -> int:
    """A number that stands for `module` while it lives."""
    number = next(_numbers)
    _modules[number] = module
    return number


@_operator("halfbyte::linear", "(Tensor x, Tensor? bias, int module, int n) -> Tensor")  # type: ignore[untyped-decorator]
def _linear(x: Tensor, bias: Tensor | None, module: int, n: int) -> Tensor:
    return _modules[module].compute(x, bias)


@_linear.register_fake  # type: ignore[untyped-decorator]
def _linear_shape(x: Tensor, bias: Tensor | None, module: int, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


@_operator("halfbyte::embedding", "(Tensor ids, int module, int k, ScalarType dtype) -> Tensor")  # type: ignore[untyped-decorator]
def _embedding(ids: Tensor, module: int, k: int, dtype: torch.dtype) -> Tensor:
    return _modules[module].compute(ids)


@_embedding.register_fake  # type: ignore[untyped-decorator]
def _embedding_shape(ids: Tensor, module: int, k: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, k), dtype=dtype)


@_operator("halfbyte::experts", "(Tensor x, Tensor index, Tensor share, int module) -> Tensor")  # type: ignore[untyped-decorator]
def _experts(x: Tensor, index: Tensor, share: Tensor, module: int) -> Tensor:
    return _modules[module].compute(x, index, share)


@_experts.register_fake  # type: ignore[untyped-decorator]
def _experts_shape(x: Tensor, index: Tensor, share: Tensor, module: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


linear: Any = torch.ops.halfbyte.linear
embedding: Any = torch.ops.halfbyte.embedding
experts: Any = torch.ops.halfbyte.experts
