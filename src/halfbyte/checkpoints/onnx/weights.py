"""Quantized nodes of an ONNX graph as packed weights.

    value = (q − zero) · scale

| node | weight (n, k) | zero where none is stored |
|---|---|---|
| MatMulNBits | B, blocks along k | 2^(bits−1) |
| GatherBlockQuantized | data, blocks along its last axis | 2^(bits−1) of bytes, 0 of int4 and uint4 |
| DequantizeLinear | x; transposed where it is stored as (k, n) | 0 |

A DequantizeLinear's x is stored as (k, n) where its blocks run along the last axis but one, where
each column has a scale, or where it has one scale and only products read it. A signed code q is
kept as q + 2^(bits−1), and so is its zero point, which changes no value. One scale for a tensor is
repeated for each row.

Source: ONNX operator DequantizeLinear (opsets 10 to 25); onnxruntime's contributed operators
MatMulNBits and GatherBlockQuantized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import LayoutError
from ...formats import format_named
from ...layouts import Described, Header, layout_named
from ...numerics.bits import pack, unpack
from ...spec import Format
from ...tensor.qtensor import QTensor
from .graph import ATTRIBUTES, Model, Tensor, attributes, checked_attributes, operator, unsupported

BLOCKED = tuple(ATTRIBUTES)
"""Operators whose initializers are weights."""
SCALES = ("FLOAT", "FLOAT16", "BFLOAT16")
INTEGERS = ("INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2")
SUFFIXES = ("_Q2", "_Q4", "_Q8", "_quantized", "_quant", "_q4", "_q8")
"""Endings that quantizers give to the names of codes; a key is the name without them."""


@dataclass(frozen=True)
class Weight:
    """One packed weight of a graph.

    node    the node that reads it
    parts   "codes", "scales", "zeros", "group_index" -> name of the initializer
    """

    key: str
    node: Any = field(compare=False)
    parts: Mapping[str, str]

    @property
    def kind(self) -> str:
        """Domain and operator."""
        return operator(self.node)


def parts_of(node: Any, model: Model) -> dict[str, str] | None:
    """The initializers of a quantized node by what they are; None where it reads no constant codes."""
    names = [str(n) for n in node.input]
    slots = {
        "com.microsoft.MatMulNBits": {"codes": 1, "scales": 2, "zeros": 3, "group_index": 4},
        "com.microsoft.GatherBlockQuantized": {"codes": 0, "scales": 2, "zeros": 3},
        "DequantizeLinear": {"codes": 0, "scales": 1, "zeros": 2},
    }[operator(node)]
    parts = {part: names[i] for part, i in slots.items() if i < len(names) and names[i]}
    return parts if parts.get("codes") in model.tensors else None


def computed(parts: Mapping[str, str], model: Model) -> str:
    """The part that the graph computes instead of holding it, "" where all are constants."""
    return next((part for part, name in parts.items() if name not in model.tensors), "")


def key_of(codes: str) -> str:
    """The key of a weight by the name of its codes."""
    for suffix in SUFFIXES:
        codes = codes.removesuffix(suffix)
    return codes.removesuffix(".weight") or codes


class Reader:
    """Reads the weights of a model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def describe(self, weight: Weight) -> Described:
        """Format and shape, from headers. LayoutError or UnsupportedError for what is not read."""
        if weight.kind == "com.microsoft.MatMulNBits":
            headers = {s: Header(self._shape(weight, s, t), t.dtype) for s, t in self._matmul(weight).items()}
            return layout_named("onnx").describe(headers, self._config(weight), weight.key)
        view = self._gather(weight) if weight.kind.endswith("GatherBlockQuantized") else self._linear(weight)
        return Described(view.format, view.shape)

    def unpack(self, weight: Weight) -> QTensor:
        """The packed weight."""
        if weight.kind == "com.microsoft.MatMulNBits":
            arrays = {s: self.model.array(t.name).reshape(self._shape(weight, s, t)) for s, t in self._matmul(weight).items()}
            return layout_named("onnx").unpack(arrays, self._config(weight), weight.key)
        view = self._gather(weight) if weight.kind.endswith("GatherBlockQuantized") else self._linear(weight)
        return view.unpack(weight.key)

    def _part(self, weight: Weight, part: str) -> Tensor | None:
        name = weight.parts.get(part)
        return None if name is None else self.model.tensors[name]

    # ----------------------------------------------------------------------------------------
    # MatMulNBits

    def _config(self, weight: Weight) -> dict[str, int]:
        given = checked_attributes(weight.node, self.model.path)
        return {"bits": 4, **{k: given[k] for k in ("K", "N", "bits", "block_size") if k in given}}

    def _matmul(self, weight: Weight) -> dict[str, Tensor]:
        bits = self._config(weight)["bits"]
        if bits not in (2, 4, 8):
            raise unsupported(weight.node, self.model.path, f"{bits} bits; 2, 4 and 8 are read")
        if attributes(weight.node).get("weight_prepacked", 0):
            raise unsupported(
                weight.node, self.model.path, "its weight is in a kernel's own order; export the model again without it"
            )
        suffixes = {
            "codes": f"weight_Q{bits}",
            "scales": "weight_scales",
            "zeros": "weight_zero_points",
            "group_index": "weight_g_idx",
        }
        return {suffix: t for part, suffix in suffixes.items() if (t := self._part(weight, part)) is not None}

    def _shape(self, weight: Weight, suffix: str, tensor: Tensor) -> tuple[int, ...]:
        """[n, blocks, bytes] of codes that the model has flattened; other shapes as they are."""
        config = self._config(weight)
        shape = tensor.shape
        if suffix.startswith("weight_Q") and len(shape) != 3 and {"K", "N", "block_size"} <= set(config):
            width = config["block_size"] * config["bits"] // 8
            wanted = (config["N"], -(-config["K"] // max(1, config["block_size"])), width)
            if math.prod(wanted) == math.prod(shape):
                return wanted
        return shape

    # -------------------------------------------------------------------------------
    # GatherBlockQuantized

    def _gather(self, weight: Weight) -> View:
        given, (codes, scales, zeros) = checked_attributes(weight.node, self.model.path), self._three(weight)
        packed = codes.kind == "UINT8"
        bits = given.get("bits", 4) if packed else codes.bits
        if codes.kind not in ("UINT8", "INT4", "UINT4") or bits not in (2, 4, 8) or len(codes.shape) != 2:
            raise self._odd(weight, f"codes {codes.kind} {list(codes.shape)} of {bits} bits; a matrix of 2, 4 or 8 bits is read")
        n, k = codes.shape[0], codes.shape[1] * (8 // bits if packed else 1)
        axis = given.get("quantize_axis", 1) % 2
        if axis != 1 or given.get("gather_axis", 0) % 2 != 0:
            raise unsupported(weight.node, self.model.path, "blocks along the gathered axis; blocks along the other one are read")
        block = given.get("block_size", 128)
        groups = self._blocks(weight, k, block)
        self._fits(weight, scales, (n, groups))
        if zeros is not None:
            self._fits(weight, zeros, (n, -(-groups * bits // 8) if packed else groups))
        usual = 1 << (bits - 1) if packed else 0
        return View(self.model, codes, scales, zeros, (n, k), groups, block, bits, usual=usual, packed=packed)

    # ----------------------------------------------------------------------------------
    # DequantizeLinear

    def _linear(self, weight: Weight) -> View:
        given, (codes, scales, zeros) = checked_attributes(weight.node, self.model.path), self._three(weight)
        if codes.kind not in INTEGERS:
            raise unsupported(weight.node, self.model.path, f"codes of {codes.kind}; {', '.join(INTEGERS)} are read")
        shape, rank = codes.shape, len(codes.shape)
        if zeros is not None and zeros.kind != codes.kind:
            raise self._odd(weight, f"zero points of {zeros.kind} beside codes of {codes.kind}; they have one type")
        axis = given.get("axis", 1)
        axis += rank if axis < 0 else 0
        block = given.get("block_size", 0)
        one = math.prod(scales.shape) == 1 and not block
        if zeros is not None and (math.prod(zeros.shape) != 1 if one else zeros.shape != scales.shape):
            raise self._odd(weight, f"zero points {list(zeros.shape)} beside scales {list(scales.shape)}; they have one shape")
        if not one and not 0 <= axis < rank:
            raise self._odd(weight, f"axis {axis} of codes with {rank} axes")
        if one or rank < 2:
            return self._plain(weight, codes, scales, zeros, one)
        if block:
            return self._blocked(weight, codes, scales, zeros, axis, block)
        self._fits(weight, scales, (shape[axis],))
        if rank == 2:
            n, k = (shape[0], shape[1]) if axis == 0 else (shape[1], shape[0])
            return View(self.model, codes, scales, zeros, (n, k), 1, -1, codes.bits, transposed=axis == 1)
        if axis == 0:
            return View(self.model, codes, scales, zeros, (shape[0], math.prod(shape[1:])), 1, -1, codes.bits)
        raise unsupported(
            weight.node, self.model.path, f"one scale for each index of axis {axis} of {list(shape)}; axis 0 is read"
        )

    def _plain(self, weight: Weight, codes: Tensor, scales: Tensor, zeros: Tensor | None, one: bool) -> View:
        """One scale for all codes; or a vector of codes."""
        shape = codes.shape
        if not one:
            raise unsupported(weight.node, self.model.path, f"several scales of a vector {list(shape)}; one scale is read")
        matrix = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        transposed = len(shape) == 2 and self._inputs_first(weight)
        matrix = (matrix[1], matrix[0]) if transposed else matrix
        return View(self.model, codes, scales, zeros, matrix, 1, -1, codes.bits, transposed=transposed, repeated=True)

    def _blocked(self, weight: Weight, codes: Tensor, scales: Tensor, zeros: Tensor | None, axis: int, block: int) -> View:
        shape, rank = codes.shape, len(codes.shape)
        groups = self._blocks(weight, shape[axis], block)
        self._fits(weight, scales, (*shape[:axis], groups, *shape[axis + 1 :]))
        if rank > 3 or axis < rank - 2:
            raise unsupported(
                weight.node, self.model.path, f"blocks along axis {axis} of {list(shape)}; the last two axes are read"
            )
        transposed = axis == rank - 2
        out = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        return View(self.model, codes, scales, zeros, out, groups, block, codes.bits, transposed=transposed)

    def _inputs_first(self, weight: Weight) -> bool:
        """True when the weight is only multiplied as (k, n)."""
        readers = self.model.readers.get(str(weight.node.output[0]), [])
        first = [
            number == 1 and (node.op_type == "MatMul" or (node.op_type == "Gemm" and not attributes(node).get("transB", 0)))
            for node, number in readers
        ]
        return bool(first) and all(first)

    # --------------------------------------------------------------------------------------------
    # shared

    def _three(self, weight: Weight) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, scales = self._part(weight, "codes"), self._part(weight, "scales")
        if codes is None or scales is None:
            raise self._odd(weight, "its scales are missing")
        if scales.kind not in SCALES:
            raise unsupported(weight.node, self.model.path, f"scales of {scales.kind}; {', '.join(SCALES)} are read")
        return codes, scales, self._part(weight, "zeros")

    def _blocks(self, weight: Weight, k: int, block: int) -> int:
        if block < 1:
            raise self._odd(weight, f"block_size {block}; 1 or more is allowed")
        return -(-k // block)

    def _fits(self, weight: Weight, tensor: Tensor, wanted: tuple[int, ...]) -> None:
        if tensor.shape != wanted:
            raise self._odd(weight, f"{tensor.name!r} has shape {list(tensor.shape)}; wanted {list(wanted)}")

    def _odd(self, weight: Weight, text: str) -> LayoutError:
        return LayoutError(f"[onnx] {self.model.path}: {weight.kind} with {weight.parts['codes']!r}: {text}")


@dataclass(frozen=True)
class View:
    """How stored integers become a matrix (n, k), or a stack of them.

    groups      groups of a row, of `block` inputs each (−1: one group)
    usual       zero point where none is stored
    transposed  the stored last two axes are k, n
    packed      several codes a byte, although the data type says bytes
    repeated    one scale serves all rows
    """

    model: Model
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    shape: tuple[int, ...]
    groups: int
    block: int
    bits: int
    usual: int = 0
    transposed: bool = False
    packed: bool = False
    repeated: bool = False

    @property
    def format(self) -> Format:
        """int where the zero point is the middle code by definition, uint with zero points
        elsewhere.
        """
        middle = self.zeros is None and (self.codes.signed or self.usual == 1 << (self.bits - 1))
        return format_named(f"{'int' if middle else 'uint'}{self.bits}", self.block, scale_dtype=str(self.scales.dtype))

    def unpack(self, name: str) -> QTensor:
        """The packed weight."""
        fmt = self.format
        half = 1 << (self.bits - 1)
        codes = self._fields(self.codes, self.shape[-1])
        if self.codes.signed:
            codes = (codes.astype(np.int16) + half).astype(np.uint8)
        codes = self._oriented(codes.reshape(self.codes.shape if not self.packed else self.shape)).reshape(self.shape)
        per_group = (*self.shape[:-1], self.groups)
        parts: dict[str, NDArray[Any]] = {
            "codes": pack(np.ascontiguousarray(codes), self.bits),
            "scales": np.ascontiguousarray(self._spread(self.model.array(self.scales.name), per_group)),
        }
        if fmt.zero == "int":
            if self.zeros is None:
                zeros = np.full(per_group, self.usual, np.int16)
            else:
                zeros = self._fields(self.zeros, self.groups).astype(np.int16)
                zeros = self._spread(zeros.reshape(self.zeros.shape if not self.packed else per_group), per_group)
            parts["zeros"] = np.ascontiguousarray(zeros + (half if self.codes.signed else 0)).astype(np.int16)
        return QTensor(fmt, self.shape, parts, origin="onnxruntime", name=name)

    def _fields(self, tensor: Tensor, last: int) -> NDArray[Any]:
        """Integers one an element; bytes of several elements are unpacked along the last axis."""
        values = self.model.array(tensor.name)
        return unpack(values, self.bits, last) if self.packed else values

    def _oriented(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.swapaxes(-1, -2) if self.transposed else values

    def _spread(self, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Scales or zero points, one for each group of each row."""
        if self.repeated:
            return np.broadcast_to(values.reshape(()), shape)
        return self._oriented(values).reshape(shape) if values.ndim > 1 else values.reshape(shape)
