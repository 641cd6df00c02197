"""The initializers of an ONNX model, and the nodes that read them.

    model = Model(Path("model.onnx"))
    model.tensors["w_Q4"]             dtype, shape, and where its bytes are
    model.readers["w_Q4"]             (node, input number) of everything that reads it

The model's own file is parsed by the `onnx` package (protobuf allows it 2 GB); external data are
only read when a tensor is asked for. The name of an external file must stay below the
model's folder. Initializers and nodes of subgraphs and `Constant` nodes are included; the bodies of
model-local functions are not.

Source: the ONNX specification, onnx.proto and "External Data".
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedError
from ...numerics.bits import pack, unpack
from ..io.regular_file import FileReader, open_regular
from ..safetensors.folder import inside

PLAIN: dict[str, Any] = {
    "FLOAT": np.float32, "UINT8": np.uint8, "INT8": np.int8, "UINT16": np.uint16, "INT16": np.int16, "INT32": np.int32,
    "INT64": np.int64, "BOOL": np.bool_, "FLOAT16": np.float16, "DOUBLE": np.float64, "UINT32": np.uint32, "UINT64": np.uint64,
    "BFLOAT16": ml_dtypes.bfloat16, "FLOAT8E4M3FN": ml_dtypes.float8_e4m3fn, "FLOAT8E5M2": ml_dtypes.float8_e5m2,
    "FLOAT8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "FLOAT8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "FLOAT8E8M0": ml_dtypes.float8_e8m0fnu, "COMPLEX64": np.complex64, "COMPLEX128": np.complex128,
}  # fmt: skip
"""Name of a data type in onnx.proto -> NumPy dtype, of elements of whole bytes."""
NARROW = {"INT4": 4, "UINT4": 4, "INT2": 2, "UINT2": 2, "FLOAT4E2M1": 4}
"""Data types of several elements a byte, low bits first -> bits of an element."""
MAX_RANK = 8
PROTOBUF_BYTES = (1 << 31) - 1
"""Largest message of protobuf; larger models keep their tensors in files beside it."""
ATTRIBUTES = {
    "com.microsoft.MatMulNBits": ("K", "N", "bits", "block_size", "accuracy_level", "weight_prepacked"),
    "com.microsoft.GatherBlockQuantized": ("gather_axis", "quantize_axis", "block_size", "bits"),
    "DequantizeLinear": ("axis", "block_size", "output_dtype"),
}
"""Operators whose initializers are weights -> their attributes, all integers."""


class Tensor:
    """One initializer.

    name, kind  its name, and its data type as onnx.proto names it
    shape       as the model has it
    nbytes      bytes of its elements
    file        the file that holds it
    """

    def __init__(self, proto: Any, kind: str, model: Path) -> None:
        self.name, self.kind = str(proto.name), kind
        self.shape = tuple(int(d) for d in proto.dims)
        self.model = model
        self._proto = proto
        about = f"[onnx] {model}: initializer {self.name!r}"
        if len(self.shape) > MAX_RANK or any(d < 0 for d in self.shape) or math.prod(self.shape) >> 48:
            raise CheckpointError(f"{about} has dimensions {list(self.shape)[:12]}; up to {MAX_RANK} of at least 0 are read")
        self.nbytes = (
            -(-math.prod(self.shape) * NARROW[kind] // 8) if kind in NARROW else math.prod(self.shape) * self.dtype.itemsize
        )
        self._external: tuple[Path, int, os.stat_result] | None = None
        if proto.data_location == 1:
            self._external = self._find_external(about)
        elif proto.HasField("raw_data") and len(proto.raw_data) != self.nbytes:
            raise CheckpointError(
                f"{about}, {kind} {list(self.shape)}, takes {self.nbytes:,} bytes; it has {len(proto.raw_data):,}"
            )
        self.file = model if self._external is None else self._external[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the array that `array` returns."""
        dtype: np.dtype[Any] = np.dtype(PLAIN.get(self.kind, np.int8 if self.kind.startswith("INT") else np.uint8))
        return dtype

    @property
    def signed(self) -> bool:
        """True for signed integers."""
        return self.kind.startswith("INT")

    @property
    def bits(self) -> int:
        """Of an element."""
        return NARROW.get(self.kind) or 8 * self.dtype.itemsize

    def _find_external(self, about: str) -> tuple[Path, int, os.stat_result]:
        entries = {str(e.key): str(e.value) for e in self._proto.external_data}
        numbers = {}
        for key, usual in (("offset", 0), ("length", self.nbytes)):
            text = entries.get(key, str(usual))
            if not text.isdecimal() or len(text) > 18:
                raise CheckpointError(f"{about}: external data with {key} {text!r:.40}; a whole number of bytes is allowed")
            numbers[key] = int(text)
        path = inside(self.model.parent, entries.get("location", ""), f"{self.model}: initializer {self.name!r}")
        if numbers["length"] != self.nbytes:
            raise CheckpointError(
                f"{about}, {self.kind} {list(self.shape)}, takes {self.nbytes:,} bytes; its external data have "
                f"{numbers['length']:,}"
            )
        try:
            status = os.stat(path)
        except OSError as error:
            raise CheckpointError(
                f"{about}: its external data are in {path.name!r}, which is not here; put it beside the model"
            ) from error
        if numbers["offset"] + self.nbytes > status.st_size:
            raise CheckpointError(
                f"{about} lies at bytes {numbers['offset']:,} to {numbers['offset'] + self.nbytes:,} of {path.name}, which has "
                f"{status.st_size:,}; that file is cut short or belongs to another model"
            )
        return path, numbers["offset"], status

    def raw(self, files: dict[Path, FileReader]) -> NDArray[np.uint8]:
        """Its bytes as stored, read-only. files: the external files that were opened."""
        if self._external is not None:
            path, offset, status = self._external
            if path not in files:
                files[path] = FileReader(path, status)
            return files[path].read(offset, self.nbytes)
        if self._proto.HasField("raw_data"):
            return np.frombuffer(self._proto.raw_data, np.uint8)
        return self._typed()

    def _typed(self) -> NDArray[np.uint8]:
        """The bytes of values in one of the typed fields."""
        from onnx import numpy_helper

        try:
            values = numpy_helper.to_array(self._proto)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"[onnx] {self.model}: initializer {self.name!r} is damaged: {error}") from error
        if self.kind in NARROW:
            width = NARROW[self.kind]
            return pack(values.reshape(-1).astype(np.int8).view(np.uint8) & ((1 << width) - 1), width)
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def array(self, files: dict[Path, FileReader]) -> NDArray[Any]:
        """The values; narrow integers one a byte. A read-only view where the bytes allow it."""
        raw = self.raw(files)
        if self.kind not in NARROW:
            if (raw.ctypes.data % self.dtype.alignment) != 0:
                raw = raw.copy()
            out = raw.view(self.dtype).reshape(self.shape)
            out.flags.writeable = False
            return out
        width, count = NARROW[self.kind], math.prod(self.shape)
        fields = unpack(raw, width, count)
        if self.signed:
            half = 1 << (width - 1)
            fields = ((fields ^ half).astype(np.int8) - np.int8(half)).astype(np.int8)
        return fields.reshape(self.shape)


class Model:
    """An ONNX model opened for reading.

    tensors   initializers by name, in file order
    readers   name of a tensor -> the nodes that read it, with the number of the input
    refused   name of an initializer -> why it is not read
    undefined name that a node reads and that nothing in the graph gives -> the node
    metadata  the model's metadata properties
    """

    def __init__(self, path: Path) -> None:
        try:
            import onnx
        except ImportError:
            raise CheckpointError(
                f"[onnx] {path}: reading ONNX models needs the package onnx: pip install 'halfbyte[onnx]'"
            ) from None
        self.path = path
        self.files: dict[Path, FileReader] = {}
        try:
            with open_regular(path) as f:
                if os.fstat(f.fileno()).st_size > PROTOBUF_BYTES:
                    raise OSError(errno.EFBIG, f"it has more than {PROTOBUF_BYTES:,} bytes, the limit of protobuf")
                data = f.read(PROTOBUF_BYTES)
            proto = onnx.ModelProto.FromString(data)
        except OSError as error:
            raise CheckpointError(f"[onnx] {path}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # protobuf's DecodeError; its class depends on the implementation
            raise CheckpointError(f"[onnx] {path}: not an ONNX model, or damaged: {str(error)[:200]}") from error
        if not proto.graph.node and not proto.graph.initializer:
            raise CheckpointError(f"[onnx] {path}: the model has no graph; it is not an ONNX model, or damaged")
        self.metadata: Mapping[str, str] = {str(p.key): str(p.value) for p in proto.metadata_props}
        self.tensors: dict[str, Tensor] = {}
        self.refused: dict[str, str] = {}
        self.readers: dict[str, list[tuple[Any, int]]] = {}
        self.nodes: list[Any] = []
        kinds = {number: word for word, number in onnx.TensorProto.DataType.items()}
        given: set[str] = {""}  # an optional input that is left out
        for graph in self._graphs(proto.graph, 0):
            self._read(graph, kinds)
            given.update(str(i.name) for i in graph.input)
            given.update(str(o) for node in graph.node for o in node.output)
            given.update(str(t.values.name) for t in graph.sparse_initializer)
        given |= {*self.tensors, *self.refused}
        self.undefined: dict[str, Any] = {name: found[0][0] for name, found in self.readers.items() if name not in given}

    def _graphs(self, graph: Any, depth: int) -> Iterator[Any]:
        if depth > 64:
            raise CheckpointError(f"[onnx] {self.path}: subgraphs are nested; allowed: at most 64 deep")
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                    yield from self._graphs(inner, depth + 1)

    def _read(self, graph: Any, kinds: Mapping[int, str]) -> None:
        constants = [
            (str(node.output[0]), a.t)
            for node in graph.node
            for a in node.attribute
            if node.op_type == "Constant" and a.name == "value" and len(node.output) == 1
        ]
        for name, proto in [*((str(t.name), t) for t in graph.initializer), *constants]:
            proto.name = name
            if name in self.tensors or name in self.refused:
                raise CheckpointError(f"[onnx] {self.path}: initializer {name!r} is given twice; allowed: each name once")
            kind = kinds.get(proto.data_type, "?")
            if kind in PLAIN or kind in NARROW:
                self.tensors[name] = Tensor(proto, kind, self.path)
            else:
                self.refused[name] = f"data type {kind} ({proto.data_type}), which is not read"
        for sparse in graph.sparse_initializer:
            self.refused[str(sparse.values.name)] = "a sparse initializer, which is not read"
        for node in graph.node:
            self.nodes.append(node)
            for number, name in enumerate(node.input):
                self.readers.setdefault(str(name), []).append((node, number))

    def array(self, name: str) -> NDArray[Any]:
        """The values of an initializer."""
        return self.tensors[name].array(self.files)

    def close(self) -> None:
        """Close the external files; arrays taken from them stay valid."""
        for file in self.files.values():
            file.close()
        self.files = {}


def operator(node: Any) -> str:
    """Domain and operator of a node."""
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else str(node.op_type)


def attributes(node: Any) -> dict[str, int]:
    """The integer attributes of a node."""
    return {str(a.name): int(a.i) for a in node.attribute if a.type == 2}


def checked_attributes(node: Any, path: Path) -> dict[str, int]:
    """The attributes of a node whose initializers are a weight. UnsupportedError for one that its
    operator does not have, that is no integer, or that is given twice.
    """
    known = ATTRIBUTES[operator(node)]
    names = [str(a.name) for a in node.attribute]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise unsupported(node, path, f"its attribute {twice!r} is given twice")
    for a in node.attribute:
        if a.name not in known or a.type != 2 or a.ref_attr_name:
            kind = "is no integer" if a.name in known else f"is not known; {', '.join(known)} are"
            raise unsupported(node, path, f"its attribute {a.name!r} {kind}")
    return attributes(node)


def unsupported(node: Any, path: Path, text: str) -> UnsupportedError:
    """The error for a node whose weight is recognised and not read."""
    return UnsupportedError(f"[onnx] {path}: {operator(node)} {node.name or node.output[0]!r}: {text}")
