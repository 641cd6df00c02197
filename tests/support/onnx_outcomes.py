"""What is read of ONNX models of which one attribute, input or initializer is another.

python -m support.onnx_outcomes                    # in tests/: write data/onnx_outcomes.txt anew
python -m support.onnx_outcomes 'blocks of int4'   # print each change of a model and its outcome
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx

import halfbyte as hb
from halfbyte.errors import HalfbyteError
from halfbyte.tensor.qtensor import QTensor
from support.onnx_models import BITS, Graph
from support.outcome_table import OutcomeTable
from support.outcomes import checksum


def _codes(kind: str, *shape: int) -> np.ndarray:
    half = 1 << BITS[kind] - 1
    low = -half if kind.startswith("i") else 0
    return np.random.default_rng(1).integers(low, low + 2 * half, shape).astype(np.int8 if low else np.uint8)


def _scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).uniform(0.01, 0.02, shape).astype(np.float32)


def _linear(kind: str, shape: tuple[int, ...], per: tuple[int, ...], **attributes: Any) -> Graph:
    graph = Graph()
    graph.dequantize("w", _codes(kind, *shape), kind, _scales(*per), _codes(kind, *per), **attributes)
    return graph


def _multiplied(kind: str, shape: tuple[int, ...], per: tuple[int, ...], **attributes: Any) -> Graph:
    """The weight is the right factor of a product: inputs come first."""
    graph = _linear(kind, shape, per, **attributes)
    graph.node("MatMul", [graph.feed("x", np.eye(shape[0], dtype=np.float32)), "w"], "y")
    graph.output("y")
    return graph


def _product(bits: int, n: int, k: int, block: int) -> Graph:
    graph, groups = Graph(), -(-k // block)
    inputs = [
        graph.feed("x", np.eye(k, dtype=np.float32)),
        graph.constant("m.weight_Q4", _codes("uint8", n, groups, block * bits // 8)),
        graph.constant("m.scales", _scales(n * groups)),
        graph.constant("m.zeros", _codes("uint8", n * -(-groups * bits // 8))),
    ]
    graph.node("MatMulNBits", inputs, "y", "com.microsoft", K=k, N=n, bits=bits, block_size=block)
    graph.output("y")
    return graph


def _rows(kind: str, bits: int) -> Graph:
    graph, rows, k, per = Graph(), 20, 64, 8 // bits if kind == "uint8" else 1
    inputs = [
        graph.constant("e_quant", _codes(kind, rows, k // per), kind),
        graph.feed("ids", np.arange(3, dtype=np.int64)),
        graph.constant("e_scales", _scales(rows, k // 32)),
    ]
    words = {"gather_axis": 0, "quantize_axis": 1, "block_size": 32, **({"bits": bits} if kind == "uint8" else {})}
    graph.node("GatherBlockQuantized", inputs, "y", "com.microsoft", **words)
    graph.output("y")
    return graph


MODELS = {
    "blocks of int4": _linear("int4", (24, 64), (24, 2), axis=1, block_size=32),
    "blocks of uint8 along inputs": _multiplied("uint8", (70, 6), (3, 6), axis=0, block_size=32),
    "columns of int8": _multiplied("int8", (24, 64), (64,), axis=-1),
    "rows of uint2": _linear("uint2", (24, 64), (24,), axis=0),
    "one scale": _linear("int8", (24, 64), ()),
    "a convolution": _linear("uint4", (8, 3, 3, 3), (8,), axis=0),
    "a stack": _linear("int4", (3, 24, 64), (3, 24, 2), axis=-1, block_size=32),
    "a vector": _linear("int8", (64,), ()),
    "MatMulNBits of 4": _product(4, 24, 96, 32),
    "MatMulNBits of 2, ragged": _product(2, 16, 80, 64),
    "MatMulNBits of 8": _product(8, 8, 64, 16),
    "rows of uint8": _rows("uint8", 4),
    "rows of uint8 in 8 bits": _rows("uint8", 8),
    "rows of uint8 in 2 bits": _rows("uint8", 2),
    "rows of int4": _rows("int4", 4),
}
TYPES = ("FLOAT", "FLOAT16", "BFLOAT16", "UINT8", "INT8", "UINT4", "INT4", "UINT2", "INT32", "INT64", "STRING", "FLOAT8E4M3FN")
OPERATORS = ("DequantizeLinear", "MatMulNBits", "GatherBlockQuantized", "QuantizeLinear", "Identity", "DynamicQuantizeLinear")


def _read(model: Any, path: Path) -> tuple[bool, str]:
    onnx.save_model(model, path)
    try:
        with hb.open(path) as checkpoint:
            out: list[object] = [*checkpoint.infos(), *map(str, checkpoint.findings()), *map(str, checkpoint.ledger().entries)]
            for key in checkpoint:
                try:
                    w = checkpoint[key]
                    out.append(checksum([dict(w.parts), w.details] if isinstance(w, QTensor) else w))
                except HalfbyteError as error:
                    out.append(str(error))
            was_read, text = True, "\n".join(map(str, out))
    except HalfbyteError as error:
        was_read, text = False, str(error)
    text = text.replace(str(path), "FILE").replace(str(path.resolve()), "FILE")
    return was_read, re.sub(r"is damaged: .*", "is damaged", text)  # what the onnx package says of it


def outcomes(name: str) -> Iterator[tuple[str, str, bool, str]]:
    """(subject, change, whether the model was read, outcome) of each change of a model."""
    with TemporaryDirectory() as place:
        path, whole = Path(place) / "m.onnx", MODELS[name].model()

        def changed(change: Any) -> tuple[bool, str]:
            model = type(whole)()
            model.CopyFrom(whole)
            change(model.graph)
            return _read(model, path)

        yield "nothing", "", *changed(lambda g: None)
        for i, tensor in enumerate(whole.graph.initializer):
            dims = list(tensor.dims)
            shapes = [[], [1], dims[::-1], [1, *dims], [*dims, 1], dims[1:]]
            shapes += [
                [*dims[:a], s, *dims[a + 1 :]] for a in range(len(dims)) for s in (0, 1, dims[a] - 1, dims[a] + 1, 2 * dims[a])
            ]
            for shape in shapes:
                yield tensor.name, f"shape {shape}", *changed(lambda g, i=i, s=shape: _reshape(g.initializer[i], s))
            for kind in TYPES:
                word = getattr(onnx.TensorProto, kind)
                yield tensor.name, kind, *changed(lambda g, i=i, w=word: setattr(g.initializer[i], "data_type", w))
            for size in (0, len(tensor.raw_data) - 1, len(tensor.raw_data) // 2):
                raw = tensor.raw_data[:size]
                yield tensor.name, f"{size} bytes", *changed(lambda g, i=i, r=raw: setattr(g.initializer[i], "raw_data", r))
            for byte in (0, 0x80, 0xFF):
                raw = bytes([byte]) * len(tensor.raw_data)
                yield tensor.name, f"of {byte:#04x}", *changed(lambda g, i=i, r=raw: setattr(g.initializer[i], "raw_data", r))
            yield tensor.name, "absent", *changed(lambda g, i=i: g.initializer.pop(i))
            yield tensor.name, "twice", *changed(lambda g, i=i: g.initializer.append(g.initializer[i]))
        for n, node in enumerate(whole.graph.node):
            for a, attribute in enumerate(node.attribute):
                yield attribute.name, "absent", *changed(lambda g, n=n, a=a: g.node[n].attribute.pop(a))
                for value in sorted(
                    {-3, -2, -1, 0, 1, 2, 3, 8, 16, 31, 33, 128, attribute.i + 1, attribute.i - 1, 2 * attribute.i}
                ):
                    yield (
                        attribute.name,
                        str(value),
                        *changed(lambda g, n=n, a=a, v=value: setattr(g.node[n].attribute[a], "i", v)),
                    )
            for i, name_of in enumerate(node.input):
                for other in ("", "nobody", node.input[0]):
                    word = f"input {i} {other!r}"
                    yield node.op_type, word, *changed(lambda g, n=n, i=i, o=other: g.node[n].input.__setitem__(i, o))
                yield node.op_type, f"without {name_of}", *changed(lambda g, n=n, i=i: g.node[n].input.pop(i))
            for op in OPERATORS:
                yield node.op_type, op, *changed(lambda g, n=n, o=op: setattr(g.node[n], "op_type", o))
            for domain in ("", "com.microsoft", "other"):
                yield node.op_type, f"of {domain!r}", *changed(lambda g, n=n, d=domain: setattr(g.node[n], "domain", d))
            yield node.op_type, "twice", *changed(lambda g, n=n: g.node.append(g.node[n]))


def _reshape(tensor: Any, shape: list[int]) -> None:
    del tensor.dims[:]
    tensor.dims.extend(shape)


TABLE = OutcomeTable("onnx_outcomes", MODELS, outcomes)

if __name__ == "__main__":
    TABLE.main()
