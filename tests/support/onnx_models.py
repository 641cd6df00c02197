"""ONNX models with quantized weights, made node by node, and what onnxruntime makes of them.

model = Graph(); model.dequantize("w", codes, "int4", scales, zeros, axis=0, block_size=32)
model.save(path, external=True); model.values("w")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8}


def packed(values: NDArray[Any], bits: int) -> bytes:
    """Integers in a byte stream, low bits first, the last byte filled with zeros."""
    fields = values.reshape(-1).astype(np.int64) & ((1 << bits) - 1)
    per = 8 // bits
    fields = np.pad(fields, (0, -fields.size % per)).reshape(-1, per)
    return np.bitwise_or.reduce(fields << (np.arange(per) * bits), axis=1).astype(np.uint8).tobytes()


class Graph:
    """A graph under construction; every weight `name` is an output of that name."""

    def __init__(self, opset: int = 25) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.feeds: dict[str, NDArray[Any]] = {}
        self.opset = opset

    def constant(self, name: str, values: NDArray[Any], kind: str = "") -> str:
        """An initializer; `kind` for the narrow integers, whose values are given one an element."""
        if kind in BITS and BITS[kind] < 8:
            raw, word = packed(values, BITS[kind]), getattr(TensorProto, kind.upper())
        else:
            word = helper.np_dtype_to_tensor_dtype(values.dtype)
            raw = np.ascontiguousarray(values).tobytes()
        self.tensors.append(helper.make_tensor(name, word, values.shape, raw, raw=True))
        return name

    def node(self, op: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"{output}/{op}", domain=domain, **attributes))

    def output(self, name: str, dtype: Any = np.float32) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None))

    def feed(self, name: str, values: NDArray[Any]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape))
        self.feeds[name] = values
        return name

    def dequantize(
        self,
        name: str,
        codes: NDArray[Any],
        kind: str,
        scales: NDArray[Any],
        zeros: NDArray[Any] | None = None,
        **attributes: Any,
    ) -> None:
        """A DequantizeLinear whose output is `name`."""
        inputs = [self.constant(f"{name}_quantized", codes, kind), self.constant(f"{name}_scale", scales)]
        if zeros is not None:
            inputs.append(self.constant(f"{name}_zero_point", zeros, kind))
        self.node("DequantizeLinear", inputs, name, **attributes)
        self.output(name, scales.dtype)

    def model(self) -> Any:
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.tensors)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)

    def save(self, path: Path, external: bool = False) -> Path:
        """The model at `path`, its initializers in a file beside it with `external`."""
        onnx.save_model(self.model(), path, save_as_external_data=external, location=f"{path.name}.data", size_threshold=0)
        return path

    def run(self, path: Path) -> dict[str, NDArray[Any]]:
        """The outputs as onnxruntime computes them, without optimizations."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [o.name for o in session.get_outputs()]
        return dict(zip(names, session.run(names, self.feeds), strict=True))
