"""Damage to an ONNX model: each initializer dropped, renamed, given another type or shape, or there
twice; each node and each attribute of a node dropped, renamed or given another type. The rule is
that of `test_mutations.py`: right values, or an error that names the culprit. A changed model that
is a valid one of other values must have those that onnxruntime computes.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper

import halfbyte as hb
from halfbyte.checkpoints.onnx.graph import Tensor
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.verification.compare import verify
from support.mutations import WIDER, holds, values
from support.onnx_models import BITS, Graph

SAMPLE = 16
Change = tuple[str, str, str, str]
"""(subject, kind, name of the initializer or node, attribute)."""


def whole_model() -> Graph:
    """A product in blocks, a table of rows, two dequantized matrices and a dense vector."""
    rng = np.random.default_rng(0)

    def codes(kind: str, shape: tuple[int, ...]) -> np.ndarray:
        low, high = (-(1 << BITS[kind] - 1), 1 << BITS[kind] - 1) if kind.startswith("i") else (0, 1 << BITS[kind])
        return rng.integers(low, high, shape).astype(np.int8 if kind.startswith("i") else np.uint8)

    def scales(*shape: int) -> np.ndarray:
        return rng.uniform(0.01, 0.02, shape).astype(np.float32)

    graph = Graph(opset=21)
    x = graph.feed("x", np.eye(64, dtype=np.float32))
    inputs = [x, graph.constant("m.weight_Q4", codes("uint8", (64, 2, 16))), graph.constant("m.scales", scales(128))]
    inputs.append(graph.constant("m.zeros", codes("uint8", (64,))))
    graph.node("MatMulNBits", inputs, "y", "com.microsoft", K=64, N=64, bits=4, block_size=32)
    inputs = [graph.constant("e.weight_Q4", codes("uint8", (20, 32))), graph.feed("ids", np.arange(20, dtype=np.int64))]
    inputs.append(graph.constant("e.scales", scales(20, 2)))
    more = {"gather_axis": 0, "quantize_axis": 1, "block_size": 32, "bits": 4}
    graph.node("GatherBlockQuantized", inputs, "rows", "com.microsoft", **more)
    graph.dequantize("w", codes("int4", (64, 64)), "int4", scales(2, 64), codes("int4", (2, 64)), axis=0, block_size=32)
    graph.dequantize("r", codes("uint8", (64, 64)), "uint8", scales(64), codes("uint8", (64,)), axis=0)
    graph.node("Identity", [graph.constant("b", scales(24))], "b_out")
    for name in ("y", "rows", "b_out"):
        graph.output(name)
    return graph


def changes(model: Any) -> list[Change]:
    tensors = [
        ("tensor", kind, t.name, "") for t in model.graph.initializer for kind in ("drop", "rename", "duplicate", "retype")
    ]
    tensors += [("tensor", "reshape", t.name, "") for t in model.graph.initializer]
    nodes = [("node", kind, n.name, "") for n in model.graph.node for kind in ("operator", "domain", "unread")]
    keys = [
        ("key", kind, n.name, a.name)
        for n in model.graph.node
        for a in n.attribute
        for kind in ("drop", "rename", "retype", "twice")
    ]
    return [*tensors, *nodes, *keys]


def damaged(graph: Graph, change: Change) -> Any:
    """The changed model."""
    model = graph.model()
    subject, kind, name, key = change
    if subject == "tensor":
        tensors = model.graph.initializer
        at = next(i for i, t in enumerate(tensors) if t.name == name)
        if kind == "drop":
            del tensors[at]
        elif kind == "rename":
            tensors[at].name = f"{name}_renamed"
        elif kind == "duplicate":
            tensors.append(tensors[at])
            tensors[-1].name = f"{name}_copy"
        elif kind == "reshape":
            dims = list(tensors[at].dims)
            tensors[at].dims[:] = dims[::-1] if dims != dims[::-1] else [1, *dims]
        else:
            array = numpy_helper.to_array(tensors[at])
            wide = np.int8 if tensors[at].data_type == TensorProto.INT4 else WIDER[array.dtype.name]
            tensors[at].CopyFrom(numpy_helper.from_array(array.astype(wide), name))
        return model
    node = next(n for n in model.graph.node if n.name == name)
    if kind == "operator":
        node.op_type += "Renamed"
    elif kind == "domain":
        node.domain = "example.org"
    elif kind == "unread":
        model.graph.node.remove(node)
    else:
        at = next(i for i, a in enumerate(node.attribute) if a.name == key)
        if kind == "drop":
            del node.attribute[at]
        elif kind == "rename":
            node.attribute[at].name = f"{key}_renamed"
        elif kind == "retype":
            node.attribute[at].CopyFrom(helper.make_attribute(key, float(node.attribute[at].i)))
        else:
            node.attribute.append(helper.make_attribute(key, node.attribute[at].i + 1))
    return model


def computed(graph: Graph, path: Path) -> dict[str, np.ndarray] | None:
    """The values that onnxruntime computes of a changed model, None where it refuses it."""
    try:
        outputs = graph.run(path)
    except Exception:  # its exceptions have no base class
        return None
    found = {"m": outputs["y"].T, "e": outputs["rows"], "w": outputs["w"].T, "r": outputs["r"], "b": outputs["b_out"]}
    return {key: value.astype(np.float64) for key, value in found.items()}


def inspected(path: Path, out: Path) -> dict[str, np.ndarray]:
    with hb.open(path) as checkpoint:
        if errors := [f for f in checkpoint.findings() if f.severity == "error"]:
            raise HalfbyteError("; ".join(map(str, errors)))
        return rounded(checkpoint)


def rounded(checkpoint: hb.Checkpoint) -> dict[str, np.ndarray]:
    """The values as onnxruntime has them, in float32."""
    return {key: array.astype(np.float32).astype(np.float64) for key, array in values(checkpoint).items()}


def written(path: Path, out: Path, dense: bool) -> dict[str, np.ndarray]:
    with hb.open(path) as checkpoint:
        if dense:
            dequantize_checkpoint(checkpoint, out, dtype="float32", overwrite=True)
        else:
            convert_checkpoint(checkpoint, out, "halfbyte", overwrite=True, workers=1)
    with hb.open(out) as made:
        return rounded(made)


COMMANDS: dict[str, Callable[[Path, Path], dict[str, np.ndarray]]] = {
    "inspect": inspected,
    "dequantize": lambda path, out: written(path, out, True),
    "convert": lambda path, out: written(path, out, False),
}


def verified(path: Path, other: Path) -> None:
    with hb.open(path) as checkpoint, hb.open(other) as whole:
        report = verify(checkpoint, whole)
    if report.verdict != "identical":
        raise HalfbyteError("; ".join(f"{c.key} {c.status} {c.note}" for c in report.comparisons if c.status != "identical"))


def named(message: str, change: Change) -> bool:
    """True when an error names the initializer, the node, its weight or the attribute."""
    _, _, name, key = change
    stem = name.partition("_")[0].partition(".")[0].partition("/")[0]
    stem = {"y": "m", "rows": "e"}.get(stem, stem)
    return any(part in message for part in (name, key or name, f"'{stem}", f"{stem}:", f"{stem} ", f"{stem}.", f"{stem}_"))


def check(tmp_path: Path, count: int | None) -> tuple[int, int, int]:
    """`count` changes by a fixed seed, or all: (changes, right answers, refusals). Asserts the
    rule.
    """
    graph = whole_model()
    whole = graph.save(tmp_path / "whole.onnx")
    want = computed(graph, whole)
    assert want is not None
    every = changes(graph.model())
    right = refused = 0
    faults: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in COMMANDS.values():
            assert holds(make(whole, tmp_path / "out.safetensors"), want)
        for change in every if count is None else random.Random(0).sample(every, count):
            path = tmp_path / "damaged.onnx"
            path.write_bytes(damaged(graph, change).SerializeToString())
            other = computed(graph, path)
            for command, make in COMMANDS.items():
                try:
                    found = make(path, tmp_path / "out.safetensors")
                except HalfbyteError as error:
                    refused += 1
                    if not named(str(error), change):
                        faults.append(f"{change}: {command} does not name the culprit: {str(error)[:300]}")
                    continue
                # A scale for each column says that the matrix is stored as (k, n).
                others = [] if other is None else [other, other | {"r": other["r"].T}]
                good = holds(found, want) or any(holds(found, o) for o in others)
                right += good
                if not good:
                    faults.append(f"{change}: other values without an error in {command}")
            try:
                verified(path, whole)
                if not holds(inspected(path, tmp_path), want):
                    faults.append(f"{change}: verify calls other values identical")
                right += 1
            except HalfbyteError as error:
                refused += 1
                if not named(str(error), change):
                    faults.append(f"{change}: verify does not name the culprit: {str(error)[:300]}")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:60])
    return len(every), right, refused


def test_a_sample_of_damage_is_right_or_refused_by_name(tmp_path):
    _, right, refused = check(tmp_path, SAMPLE)
    assert right + refused == SAMPLE * (len(COMMANDS) + 1)
    assert refused > SAMPLE


@pytest.mark.slow
def test_all_damage_is_right_or_refused_by_name(tmp_path):
    count, right, refused = check(tmp_path, None)
    print(f"{count} changes, {right} right, {refused} refused")
    assert count > 100


HOSTILE: dict[str, Callable[[Any], None]] = {
    "negative size": lambda t: t.dims.__setitem__(0, -1),
    "smallest size": lambda t: t.dims.__setitem__(0, -(1 << 63)),
    "largest size": lambda t: t.dims.__setitem__(0, (1 << 63) - 1),
    "product that wraps": lambda t: t.dims.__setitem__(slice(None), [1 << 32, 1 << 32]),
    "no values": lambda t: t.dims.__setitem__(0, 0),
    "a scalar": lambda t: t.dims.__setitem__(slice(None), []),
    "a value more": lambda t: t.dims.__setitem__(0, t.dims[0] + 1),
    "a thousand axes": lambda t: t.dims.extend([1] * 1000),
    "no bytes": lambda t: t.ClearField("raw_data"),
    "a byte less": lambda t: setattr(t, "raw_data", t.raw_data[:-1]),
    "a byte more": lambda t: setattr(t, "raw_data", t.raw_data + b"\0"),
    "bytes and a typed field": lambda t: t.int32_data.append(1),
    "no dtype": lambda t: setattr(t, "data_type", 0),
    "an unknown dtype": lambda t: setattr(t, "data_type", 12345),
    "strings": lambda t: setattr(t, "data_type", TensorProto.STRING),
    "complex": lambda t: setattr(t, "data_type", TensorProto.COMPLEX64),
    "a segment": lambda t: setattr(t.segment, "begin", 3),
}
"""What is done to one initializer."""
COMPLETE = ("bytes and a typed field", "a segment")
"""After which the bytes are still those of the whole tensor: it is read."""


@pytest.mark.parametrize("damage", HOSTILE)
def test_an_initializer_that_contradicts_itself_is_refused_by_name(damage, tmp_path):
    """Each initializer of the model in turn, on opening or when its weight is read."""
    graph, path = whole_model(), tmp_path / "m.onnx"
    want = computed(graph, graph.save(tmp_path / "whole.onnx"))
    assert want is not None
    refused = 0
    for i, tensor in enumerate(graph.model().graph.initializer):
        model = graph.model()
        HOSTILE[damage](model.graph.initializer[i])
        path.write_bytes(model.SerializeToString())
        found, message = right_or_refused(path, tmp_path)
        refused += bool(message)
        assert found is None or holds(found, want), (damage, tensor.name)
        assert found is not None or named(message, ("tensor", damage, tensor.name, "")), (damage, tensor.name, message[:300])
    assert refused > 0 or damage in COMPLETE


def right_or_refused(path: Path, work: Path) -> tuple[dict[str, np.ndarray] | None, str]:
    """(the values that `dequantize` writes, "") or (None, the refusal)."""
    try:
        return written(path, work / "out.safetensors", dense=True), ""
    except HalfbyteError as error:
        return None, str(error)


def doubled(model: Any) -> None:
    model.graph.initializer.append(model.graph.initializer[0])
    model.graph.initializer[-1].raw_data = bytes(len(model.graph.initializer[0].raw_data))


def inner(model: Any, op: str) -> None:
    """The node that reads m and its initializers become the branches of an If, the body of a Loop."""
    own = next(n for n in model.graph.node if n.op_type == "MatMulNBits")
    body = helper.make_graph([own], "inner", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    for tensor in [t for t in model.graph.initializer if t.name.startswith("m.")]:
        body.initializer.append(tensor)
        model.graph.initializer.remove(tensor)
    given = {"then_branch": body, "else_branch": body} if op == "If" else {"body": body}
    node = helper.make_node(op, ["condition"] if op == "If" else ["", "condition"], ["y"], name="outer", **given)
    model.graph.node.remove(own)
    model.graph.node.append(node)


def sparse(model: Any) -> None:
    at = next(i for i, t in enumerate(model.graph.initializer) if t.name == "m.scales")
    values = model.graph.initializer[at]
    indices = helper.make_tensor("m.scales_indices", TensorProto.INT64, [128], list(range(128)))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [128]))
    del model.graph.initializer[at]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (doubled, "m.weight_Q4"),
        (lambda m: inner(m, "If"), "outer|m.weight_Q4|m: "),
        (lambda m: inner(m, "Loop"), "outer|m.weight_Q4|m: "),
        (sparse, "m.scales"),
    ],
    ids=["the same name twice", "in an If", "in a Loop", "sparse"],
)  # fmt: skip
def test_weights_elsewhere_than_in_the_graphs_list_are_named_or_right(damage, says, tmp_path):
    graph, path = whole_model(), tmp_path / "m.onnx"
    want = computed(graph, graph.save(tmp_path / "whole.onnx"))
    assert want is not None
    model = graph.model()
    damage(model)
    path.write_bytes(model.SerializeToString())
    found, message = right_or_refused(path, tmp_path)
    assert found is None or holds(found, want)
    assert found is not None or re.search(says, message), message


def test_load_model_says_what_an_onnx_model_is(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(HalfbyteError, match="onnx"):
        hb.load_model(whole_model().save(tmp_path / "model.onnx"))


@pytest.mark.parametrize(("dims", "read"), [((2,) * 8, True), ((1,) * 9, False)])
def test_an_initializer_has_up_to_eight_axes(dims: tuple[int, ...], read: bool) -> None:
    proto = helper.make_tensor("w", TensorProto.FLOAT, dims, np.zeros(int(np.prod(dims))))
    if read:
        assert Tensor(proto, "FLOAT", Path("model.onnx")).shape == dims
        return
    with pytest.raises(CheckpointError, match=r"initializer 'w' has dimensions \[1, .*\]; up to 8 of at least 0 are read"):
        Tensor(proto, "FLOAT", Path("model.onnx"))
