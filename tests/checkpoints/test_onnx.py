"""ONNX models as checkpoints: values equal to onnxruntime's, external data, the ledger, and what is
refused.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx

import halfbyte as hb
from halfbyte.checkpoints.onnx.graph import PLAIN, Model
from halfbyte.cli import main
from halfbyte.errors import CheckpointError, HalfbyteError, UnsupportedError
from support.onnx_models import BITS, Graph, packed

RNG = np.random.default_rng(0)


def codes(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    bits = BITS[kind]
    signed = kind.startswith("i")
    low, high = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)
    return RNG.integers(low, high, shape).astype(np.int8 if signed else np.uint8)


def scales(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    return RNG.uniform(0.01, 0.02, shape).astype(dtype)


CASES = {
    "blocks along inputs": ((64, 24), (2, 24), {"axis": 0, "block_size": 32}, True, (24, 64)),
    "blocks along the last axis": ((24, 64), (24, 2), {"axis": 1, "block_size": 32}, False, (24, 64)),
    "short last block": ((70, 5), (3, 5), {"axis": 0, "block_size": 32}, True, (5, 70)),
    "stack": ((3, 24, 64), (3, 24, 2), {"axis": -1, "block_size": 32}, False, (3, 24, 64)),
    "stack, transposed": ((3, 64, 24), (3, 2, 24), {"axis": -2, "block_size": 32}, True, (3, 24, 64)),
    "rows": ((24, 64), (24,), {"axis": 0}, False, (24, 64)),
    "columns": ((24, 64), (64,), {"axis": -1}, True, (64, 24)),
    "tensor": ((24, 64), (), {}, False, (24, 64)),
    "convolution": ((8, 3, 3, 3), (8,), {"axis": 0}, None, (8, 27)),
    "vector": ((64,), (), {}, None, (1, 64)),
}


@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "no zeros"])
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("case", CASES)
def test_dequantize_linear_has_the_values_of_onnxruntime(case, kind, zeros, tmp_path):
    shape, per, attributes, transposed, logical = CASES[case]
    graph = Graph()
    graph.dequantize("w", codes(kind, shape), kind, scales(per), codes(kind, per) if zeros else None, **attributes)
    path = graph.save(tmp_path / "m.onnx")
    want = graph.run(path)["w"]
    want = want.swapaxes(-1, -2) if transposed else want.reshape(logical)
    with hb.open(path) as checkpoint:
        assert checkpoint.keys() == ("w",)
        assert checkpoint.info("w").shape == logical
        assert checkpoint.findings(data=True) is not None
        assert checkpoint["w"].format == checkpoint.info("w").format
        assert np.array_equal(checkpoint["w"].dequantize("float32"), want)
        assert checkpoint.ledger().counts("tensor") == {"claimed": 3 if zeros else 2}


def test_scales_in_float16_are_rounded_once_to_float16(tmp_path):
    graph = Graph()
    graph.dequantize("w", codes("int4", (64, 24)), "int4", scales((2, 24), np.float16), axis=0, block_size=32)
    path = graph.save(tmp_path / "m.onnx")
    assert np.array_equal(hb.open(path)["w"].dequantize("float16"), graph.run(path)["w"].T)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize(("bits", "zeros"), [(4, True), (4, False), (8, True), (2, True)])
def test_matmul_nbits_has_the_values_of_onnxruntime(bits, zeros, external, tmp_path):
    n, k, block = 24, 96, 32
    graph = Graph()
    inputs = [
        graph.feed("x", np.eye(k, dtype=np.float32)),
        graph.constant("m.weight_Q4", codes("uint8", (n, k // block, block * bits // 8))),
        graph.constant("m.scales", scales((n * k // block,))),
    ]
    if zeros:
        inputs.append(graph.constant("m.zeros", codes("uint8", (n * -(-(k // block) * bits // 8),))))
    graph.node("MatMulNBits", inputs, "y", "com.microsoft", K=k, N=n, bits=bits, block_size=block)
    graph.output("y")
    path = graph.save(tmp_path / "m.onnx", external)
    with hb.open(path) as checkpoint:
        assert checkpoint.keys() == ("m",)
        assert checkpoint.info("m").files == (("m.onnx.data",) if external else ("m.onnx",))
        assert np.array_equal(checkpoint["m"].dequantize("float32").T, graph.run(path)["y"])


def product(n: int, k: int, bits: int, block: int, blocks: int, flat: bool = True) -> Graph:
    """MatMulNBits of `blocks` blocks a row; flat codes have one axis."""
    graph, shape = Graph(), (n, blocks, block * bits // 8)
    stored = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    inputs = [
        graph.feed("x", np.eye(k, dtype=np.float32)),
        graph.constant("m.weight_Q4", stored.reshape(-1) if flat else stored),
        graph.constant("m.scales", np.linspace(0.01, 0.02, n * blocks, dtype=np.float32)),
    ]
    graph.node("MatMulNBits", inputs, "y", "com.microsoft", K=k, N=n, bits=bits, block_size=block)
    graph.output("y")
    return graph


@pytest.mark.parametrize(("bits", "k", "block"), [(4, 96, 32), (8, 96, 32), (2, 64, 64), (4, 80, 32), (4, 24, 32)])
def test_codes_of_matmul_nbits_that_are_flat_are_in_blocks(bits, k, block, tmp_path):
    """Older exporters write them so; onnxruntime has stopped reading them."""
    shape = (24, k, bits, block, -(-k // block))
    blocked = product(*shape, flat=False)
    with hb.open(product(*shape).save(tmp_path / "flat.onnx")) as checkpoint:
        values = checkpoint["m"].dequantize("float32")
    assert np.array_equal(values.T, blocked.run(blocked.save(tmp_path / "blocked.onnx"))["y"])


@pytest.mark.parametrize(("block", "blocks"), [(0, 0), (32, 2), (32, 4)])
def test_flat_codes_that_do_not_fit_are_refused_by_name(block, blocks, tmp_path):
    with hb.open(product(24, 96, 4, block, blocks).save(tmp_path / "m.onnx")) as checkpoint:
        with pytest.raises(HalfbyteError, match=r"m\b"):
            checkpoint["m"]
        assert {f.code for f in checkpoint.header_findings()} >= {"unread-weight"}
        found = checkpoint.info("m")
        assert (found.kind, found.format, found.shape) == ("quantized", None, (24 * blocks * block // 2,))


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(
    ("kind", "bits", "axis"), [("uint8", 4, 1), ("uint8", 8, 1), ("int4", 4, 1), ("uint4", 4, 1), ("uint4", 4, -1)]
)
def test_gather_block_quantized_has_the_values_of_onnxruntime(kind, bits, axis, zeros, tmp_path):
    rows, k, block = 20, 64, 32
    per = 8 // bits if kind == "uint8" else 1
    graph = Graph()
    inputs = [
        graph.constant("e.weight_Q4", codes(kind, (rows, k // per)), kind),
        graph.feed("ids", np.arange(rows, dtype=np.int64)),
        graph.constant("e.scales", scales((rows, k // block))),
    ]
    if zeros:
        inputs.append(graph.constant("e.zeros", codes(kind, (rows, -(-(k // block) // per))), kind))
    more = {"bits": bits} if kind == "uint8" else {}
    graph.node("GatherBlockQuantized", inputs, "y", "com.microsoft", gather_axis=0, quantize_axis=axis, block_size=block, **more)
    graph.output("y")
    path = graph.save(tmp_path / "m.onnx")
    with hb.open(path) as checkpoint:
        assert np.array_equal(checkpoint["e"].dequantize("float32"), graph.run(path)["y"])


def small(tmp_path: Path, external: bool = False) -> Path:
    """A product with a weight in blocks, a dense bias, shapes, and a quantized bias."""
    graph = Graph()
    graph.dequantize("w", codes("int4", (64, 24)), "int4", scales((2, 24)), codes("int4", (2, 24)), axis=0, block_size=32)
    graph.node("MatMul", [graph.feed("x", np.ones((1, 64), np.float32)), "w"], "y")
    graph.node("Add", ["y", graph.constant("b", scales((24,)))], "z")
    graph.node("Reshape", ["z", graph.constant("shape", np.array([24], np.int64))], "out")
    graph.output("out")
    graph.node("DequantizeLinear", [graph.constant("c_quantized", RNG.integers(-9, 9, 24).astype(np.int32)), "c_scale"], "c")
    graph.constant("c_scale", scales(()))
    graph.output("c")
    return graph.save(tmp_path / "m.onnx", external)


def test_the_ledger_accounts_for_every_initializer(tmp_path):
    with hb.open(small(tmp_path)) as checkpoint:
        status = {e.name: e.status for e in checkpoint.ledger().entries}
        assert status == {
            "w_quantized": "claimed",
            "w_scale": "claimed",
            "w_zero_point": "claimed",
            "b": "dense",
            "shape": "auxiliary",
            "c_quantized": "claimed",
            "c_scale": "claimed",
        }
        assert checkpoint["c"].dtype == np.float32
        assert [f for f in checkpoint.findings() if f.severity == "error"] == []


@pytest.mark.parametrize("external", [False, True])
def test_commands_read_it(tmp_path, external, capsys):
    path = small(tmp_path, external)
    assert main(["inspect", str(path), "--data"]) == 0
    assert "int4" in capsys.readouterr().out
    assert main(["dequantize", str(path), str(tmp_path / "dense.safetensors"), "--dtype", "float32"]) == 0
    assert main(["convert", str(path), str(tmp_path / "own.safetensors"), "--to", "halfbyte"]) == 0
    assert main(["verify", str(path), str(tmp_path / "own.safetensors")]) == 0
    assert main(["verify", str(path), str(tmp_path / "dense.safetensors")]) == 0
    with hb.open(path) as a, hb.open(tmp_path / "dense.safetensors") as b:
        assert np.array_equal(a["w"].dequantize("float32"), b["w.weight"])


def test_external_data_that_are_cut_meanwhile_are_an_error_and_no_signal(tmp_path):
    path = small(tmp_path, external=True)
    with hb.open(path) as checkpoint:
        os.truncate(tmp_path / "m.onnx.data", 1)
        with pytest.raises(CheckpointError, match=r"m\.onnx\.data: the file was (truncated|changed)"):
            checkpoint["w"]


def test_codes_of_another_operator_are_unknown_by_name(tmp_path):
    graph = Graph()
    inputs = [graph.feed("x", codes("uint8", (1, 64))), graph.constant("w", codes("uint8", (64, 24)))]
    graph.node("MatMulInteger", inputs, "y")
    graph.output("y", np.int32)
    path = graph.save(tmp_path / "m.onnx")
    with pytest.raises(CheckpointError, match=r"w: unknown \(UINT8 \[64, 24\], which MatMulInteger reads\)"):
        hb.open(path).check("dequantize")
    assert main(["inspect", str(path)]) == 1


def test_scales_that_the_graph_computes_are_named(tmp_path):
    graph = Graph()
    graph.constant("w_quantized", codes("int8", (24, 64)))
    graph.node("DequantizeLinear", ["w_quantized", graph.feed("s", np.float32(0.1).reshape(()))], "w")
    graph.output("w")
    (problem,) = hb.open(graph.save(tmp_path / "m.onnx")).ledger().problems
    assert (problem.name, problem.why) == ("w_quantized", "its scales are computed by the graph (s), not constants")


def test_a_weight_that_is_not_read_says_so_and_others_are_read(tmp_path):
    graph = Graph()
    graph.dequantize("good", codes("int8", (24, 64)), "int8", scales((24,)), axis=0)
    graph.dequantize("bad", codes("int8", (2, 24, 64)), "int8", scales((24,)), axis=1)
    path = graph.save(tmp_path / "m.onnx")
    with hb.open(path) as checkpoint:
        assert checkpoint["good"].shape == (24, 64)
        with pytest.raises(
            UnsupportedError, match=r"DequantizeLinear 'bad/DequantizeLinear': one scale for each index of axis 1"
        ):
            checkpoint["bad"]
        with pytest.raises(CheckpointError, match="1 unreadable weight, first bad"):
            checkpoint.check("dequantize")
    assert main(["inspect", str(path)]) == 1


@pytest.mark.parametrize("location", ["../m.onnx.data", "/etc/passwd", "sub/../../x", "a\\b", "", "C:x"])
def test_external_data_stay_in_the_folder(tmp_path, location):
    path = small(tmp_path, external=True)
    model = onnx.load_model(path, load_external_data=False)
    next(e for e in model.graph.initializer[0].external_data if e.key == "location").value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=r"w_quantized"):
        hb.open(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    home = tmp_path / "model"
    home.mkdir()
    path = small(home, external=True)
    (home / "m.onnx.data").rename(tmp_path / "elsewhere")
    (home / "m.onnx.data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link to"):
        hb.open(path)


@pytest.mark.parametrize(
    ("key", "value"), [("offset", "-4"), ("offset", "99999999"), ("length", "3"), ("length", "x"), ("offset", "9" * 30)]
)
def test_ranges_of_external_data_are_checked(tmp_path, key, value):
    path = small(tmp_path, external=True)
    model = onnx.load_model(path, load_external_data=False)
    entries = model.graph.initializer[0].external_data
    (next((e for e in entries if e.key == key), None) or entries.add(key=key)).value = value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=r"w_quantized"):
        hb.open(path)


def test_a_missing_or_short_data_file_names_it(tmp_path):
    path = small(tmp_path, external=True)
    data = tmp_path / "m.onnx.data"
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match=r"m\.onnx\.data, which has 100; that file is cut short"):
        hb.open(path)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"'m\.onnx\.data', which is not here; put it beside the model"):
        hb.open(path)


def test_a_large_external_tensor_is_not_read_on_opening(tmp_path):
    """A sparse file of 64 GB: opening and describing it touches none of it."""
    graph = Graph()
    graph.dequantize("w", codes("int4", (64, 24)), "int4", scales((2, 24)), axis=0, block_size=32)
    path = graph.save(tmp_path / "m.onnx", external=True)
    model = onnx.load_model(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    tensor.dims[:] = [1 << 20, 1 << 17]
    model.graph.initializer[1].dims[:] = [1 << 15, 1 << 17]
    for t, nbytes in zip(model.graph.initializer, (1 << 36, 1 << 34), strict=False):
        for e in t.external_data:
            e.value = {"location": "big", "offset": "0", "length": str(nbytes)}.get(e.key, e.value)
    path.write_bytes(model.SerializeToString())
    with open(tmp_path / "big", "wb") as f:
        f.truncate(1 << 36)
    with hb.open(path) as checkpoint:
        assert checkpoint.info("w").shape == (1 << 17, 1 << 20)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "text"])
def test_a_damaged_model_is_an_error_that_names_it(tmp_path, damage):
    path = small(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(
        {"cut": whole[: len(whole) // 2], "noise": bytes(RNG.integers(0, 256, 500, np.uint8)), "empty": b"", "text": b"{}"}[
            damage
        ]
    )
    with pytest.raises(CheckpointError, match=r"m\.onnx"):
        hb.open(path)


def test_wrong_shapes_are_named(tmp_path):
    for shape, per in (((64, 24), (3, 24)), ((64, 24), (2, 23))):
        graph = Graph()
        graph.dequantize("w", codes("int4", shape), "int4", scales(per), axis=0, block_size=32)
        with pytest.raises(HalfbyteError, match=r"'w_scale' has shape .*; wanted \[2, 24\]"):
            hb.open(graph.save(tmp_path / "m.onnx"))["w"]


def test_tied_nodes_have_one_key_and_other_scales_another(tmp_path):
    graph = Graph()
    graph.dequantize("w", codes("int8", (24, 64)), "int8", scales((24,)), axis=0)
    graph.node("DequantizeLinear", ["w_quantized", "w_scale"], "again", axis=0)
    graph.output("again")
    graph.node("DequantizeLinear", ["w_quantized", graph.constant("s", scales((24,)))], "other", axis=0)
    graph.output("other")
    path = graph.save(tmp_path / "m.onnx")
    with hb.open(path) as checkpoint:
        assert set(checkpoint.keys()) == {"w", "w_quantized"}
        assert np.array_equal(checkpoint["w_quantized"].dequantize("float32"), graph.run(path)["other"])


def test_typed_fields_are_read_as_raw_bytes_are(tmp_path):
    graph = Graph()
    values = codes("int4", (24, 64))
    graph.dequantize("w", values, "int4", scales((24,)), axis=0)
    tensor = graph.tensors[0]
    tensor.ClearField("raw_data")
    tensor.int32_data.extend(packed(values, 4))
    path = graph.save(tmp_path / "m.onnx")
    assert np.array_equal(hb.open(path)["w"].dequantize("float32"), graph.run(path)["w"])


def test_config_and_several_models_are_refused_with_a_way_on(tmp_path):
    path = small(tmp_path)
    with pytest.raises(CheckpointError, match="leave it out"):
        hb.open(path, config={"bits": 4})
    assert hb.open(tmp_path).format == "onnx"
    (tmp_path / "n.onnx").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 ONNX models \(m\.onnx, n\.onnx\); open one of them"):
        hb.open(tmp_path)


@pytest.mark.parametrize("axis", [0, -3])
def test_blocks_of_a_stack_are_along_its_last_two_axes(axis, tmp_path):
    graph = Graph()
    graph.dequantize("w", codes("int8", (64, 4, 8)), "int8", scales((2, 4, 8)), axis=axis, block_size=32)
    with pytest.raises(HalfbyteError, match=r"blocks along axis 0 of \[64, 4, 8\]; the last two axes are read"):
        hb.open(graph.save(tmp_path / "m.onnx"))["w"]


def test_a_vector_has_one_scale(tmp_path):
    for axis in ({"axis": 0}, {"axis": 0, "block_size": 32}):
        graph = Graph()
        graph.dequantize("w", codes("int8", (64,)), "int8", scales((64,) if "block_size" not in axis else (2,)), **axis)
        with pytest.raises(HalfbyteError, match=r"several scales of a vector \[64\]; one scale is read"):
            hb.open(graph.save(tmp_path / "m.onnx"))["w"]


@pytest.mark.parametrize("axes", [(), (3,)])
def test_a_quantized_bias_has_one_scale_or_one_a_value(axes, tmp_path):
    values = RNG.integers(-9, 9, axes).astype(np.int32)
    for count in (0, 1, 2, 3, 4):
        graph = Graph()
        per = scales((count,))
        graph.node("DequantizeLinear", [graph.constant("c_quantized", values), graph.constant("c_scale", per)], "c")
        graph.output("c")
        with hb.open(graph.save(tmp_path / "m.onnx")) as checkpoint:
            assert checkpoint.info("c").shape == axes
            if count == 1 or (count,) == axes:
                assert np.array_equal(checkpoint["c"], (values * per.astype(np.float64)).astype(np.float32).reshape(axes))
            else:
                with pytest.raises(CheckpointError, match=rf"'c' has {count} scales for {re.escape(str(list(axes)))} values"):
                    checkpoint["c"]


@pytest.mark.parametrize("multiplied", [True, False])
def test_a_matrix_under_one_scale_has_inputs_first_where_it_is_multiplied(multiplied, tmp_path):
    graph = Graph()
    graph.dequantize("w", codes("int8", (64, 24)), "int8", scales(()))
    if multiplied:
        graph.node("MatMul", [graph.feed("x", np.ones((1, 64), np.float32)), "w"], "y")
        graph.output("y")
    path = graph.save(tmp_path / "m.onnx")
    with hb.open(path) as checkpoint:
        w, want = checkpoint["w"].dequantize("float32"), graph.run(path)["w"]
        assert np.array_equal(w, want.T if multiplied else want)


def test_names_that_are_there_and_names_that_are_not(tmp_path):
    with hb.open(small(tmp_path)) as checkpoint:
        assert all(key in checkpoint for key in tuple(checkpoint))
        assert "b" in checkpoint
        assert "w_scale" not in checkpoint
        assert "nonesuch" not in checkpoint


@pytest.mark.parametrize(
    ("op", "side", "attributes", "inputs_first"),
    [("MatMul", 1, {}, True), ("MatMul", 0, {}, False), ("Gemm", 1, {}, True), ("Gemm", 1, {"transB": 1}, False)],
)
def test_a_weight_has_its_inputs_first_where_it_is_the_right_factor(op, side, attributes, inputs_first, tmp_path):
    """[64, 24] under one scale is (24, 64) for a product x·w, and as stored for any other."""
    graph = Graph()
    graph.dequantize("w", codes("int8", (64, 24)), "int8", np.array(0.5, np.float32))
    k = 64 if inputs_first else 24
    x = graph.feed("x", np.ones((24, 64) if side == 0 else (2, k), np.float32))
    graph.node(op, ["w", x] if side == 0 else [x, "w"], "y", **attributes)
    graph.output("y")
    with hb.open(graph.save(tmp_path / "m.onnx")) as checkpoint:
        assert checkpoint.info("w").shape == ((24, 64) if inputs_first else (64, 24))


def test_external_data_begin_at_byte_0_unless_the_model_says_otherwise(tmp_path):
    path = small(tmp_path, external=True)
    wanted = hb.open(path)["w"].dequantize("float32")
    model = onnx.load_model(path, load_external_data=False)
    for tensor in model.graph.initializer:
        entries = {e.key: e.value for e in tensor.external_data}
        if not entries:
            continue
        name = f"{tensor.name}.bin"
        start = int(entries.get("offset", 0))
        (tmp_path / name).write_bytes((path.parent / entries["location"]).read_bytes()[start : start + int(entries["length"])])
        del tensor.external_data[:]
        tensor.external_data.add(key="location", value=name)
    onnx.save_model(model, path)
    assert np.array_equal(hb.open(path)["w"].dequantize("float32"), wanted)


def test_constants_are_read_as_initializers_are(tmp_path):
    path = small(tmp_path)
    with hb.open(path) as checkpoint:
        wanted = {k: v.dequantize("float32") if isinstance(v, hb.QTensor) else v for k, v in checkpoint.items()}
    model = onnx.load_model(path)
    nodes = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
    nodes.append(onnx.helper.make_node("Constant", [], ["half"], value_float=0.5))
    del model.graph.initializer[:]
    model.graph.node.MergeFrom(nodes)
    onnx.save_model(model, path)
    with hb.open(path) as checkpoint:
        assert set(checkpoint) == set(wanted)
        for key, values in wanted.items():
            found = checkpoint[key]
            assert np.array_equal(found.dequantize("float32") if isinstance(found, hb.QTensor) else found, values)


def test_types_of_whole_bytes_are_onnxs(tmp_path):
    """Names, and values of random bits."""
    graph = Graph()
    for kind, dtype in PLAIN.items():
        number = onnx.TensorProto.DataType.Value(kind)
        assert onnx.helper.tensor_dtype_to_np_dtype(number) == np.dtype(dtype), kind
        raw = RNG.integers(0, 2, 3 * np.dtype(dtype).itemsize).astype(np.uint8).tobytes()
        graph.tensors.append(onnx.helper.make_tensor(kind, number, (3,), raw, raw=True))
    model = Model(graph.save(tmp_path / "m.onnx"))
    for tensor in graph.tensors:
        assert model.array(tensor.name).tobytes() == onnx.numpy_helper.to_array(tensor).tobytes()


@pytest.mark.parametrize("start", range(9))
def test_values_are_a_view_where_their_bytes_are_aligned(start, tmp_path, monkeypatch):
    tensor = Model(small(tmp_path)).tensors["b"]
    wanted = tensor.array({})
    memory = np.zeros(wanted.nbytes + 16, np.uint8)
    raw = memory[start : start + wanted.nbytes]
    raw[:] = wanted.view(np.uint8)
    monkeypatch.setattr(tensor, "raw", lambda files: raw)
    found = tensor.array({})
    assert np.array_equal(found, wanted)
    assert np.shares_memory(found, raw) == (raw.ctypes.data % 4 == 0)
    assert not found.flags.writeable
