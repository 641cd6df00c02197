"""Decoders against the producers' own packages: random bytes, every output dtype, bit for bit.

`make test-ecosystem` runs each test in its producer's environment.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from halfbyte.layouts import LAYOUTS
from support.golden_case import same_numbers
from support.random_tensors import random_array

DTYPES = ("float32", "float16", "bfloat16")
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def floats(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Ordinary numbers of one magnitude, of either sign."""
    return np.asarray(rng.standard_normal(shape) * rng.choice([1e-3, 1, 100]), np.float32).astype(NUMPY[dtype])


def tensor(a: np.ndarray):
    """A torch tensor of the same bytes."""
    import torch

    name = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "bfloat16": "bfloat16"}.get(a.dtype.name)
    if name is None:
        return torch.from_numpy(np.array(a))
    width = np.uint8 if a.dtype.itemsize == 1 else np.int16
    return torch.from_numpy(np.array(a).view(width)).view(getattr(torch, name))


def check(layout: str, tensors: dict[str, np.ndarray], config: dict, answers: dict[str, object]) -> None:
    """dequantize(dtype, "producer") against the producer's answer in each dtype, float32 copies
    compared bit for bit.
    """
    q = LAYOUTS[layout].unpack(tensors, config, "m")
    for dtype, answer in answers.items():
        theirs = answer if isinstance(answer, np.ndarray) else answer.detach().float().numpy()
        assert same_numbers(q.dequantize(dtype, "producer").astype(np.float32), theirs.reshape(q.shape).astype(np.float32)), dtype


def torch_dtypes() -> dict[str, object]:
    import torch

    return {d: getattr(torch, d) for d in DTYPES}


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize(("scales", "biases"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_mlx_affine(bits: int, scales: str, biases: str) -> None:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(bits)
    words = random_array(rng, np.uint32, 8, 256 * bits // 32)
    s, b = floats(rng, scales, 8, 4), floats(rng, biases, 8, 4)
    arrays = [mx.array(a.astype(np.float32)).astype(getattr(mx, d)) for a, d in ((s, scales), (b, biases))]
    answers = {
        d: np.array(mx.dequantize(mx.array(words), *arrays, group_size=64, bits=bits, dtype=getattr(mx, d)).astype(mx.float32))
        for d in DTYPES
    }
    check("mlx", {"weight": words, "scales": s, "biases": b}, {"bits": bits, "group_size": 64, "mode": "affine"}, answers)


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
@pytest.mark.parametrize("amax", [None, 0.37, 1e-35])
def test_mlx_block_modes(mode: str, bits: int, group: int, amax: float | None) -> None:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    if amax is not None and mode != "nvfp4":
        return
    rng = np.random.default_rng(0)
    tensors = {
        "weight": random_array(rng, np.uint32, 256, 128 * bits // 32),
        "scales": random_array(rng, np.uint8, 256, 128 // group),
    }
    options = {} if amax is None else {"global_scale": mx.array(amax, dtype=mx.float32)}
    if amax is not None:
        tensors["global_scale"] = np.array(amax, np.float32)
    answers = {}
    for d in DTYPES if amax is None else ("float32",):  # with a global scale it answers in float32 whatever is asked
        words, scales = mx.array(tensors["weight"]), mx.array(tensors["scales"])
        out = mx.dequantize(words, scales, group_size=group, bits=bits, mode=mode, dtype=getattr(mx, d), **options)
        answers[d] = np.array(out.astype(mx.float32))
    check("mlx", tensors, {"mode": mode}, answers)


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("element", ["float4_e2m1fn_x2", "fp6_e2m3", "fp6_e3m2", "float8_e4m3fn", "float8_e5m2"])
def test_torchao_mx(element: str) -> None:
    import torchao.prototype.mx_formats.mx_tensor as mx_tensor

    import torch

    rng = np.random.default_rng(0)
    codes = {
        "float4_e2m1fn_x2": random_array(rng, np.uint8, 256, 32), "float8_e4m3fn": random_array(rng, E4M3, 256, 64),
        "float8_e5m2": random_array(rng, E5M2, 256, 64),
    }.get(element, rng.integers(0, 64, (256, 64), dtype=np.uint8))  # fmt: skip
    scales = np.stack([np.arange(256), np.arange(256)[::-1]], 1).astype(np.uint8)
    kind = getattr(torch, element, element)
    e8m0 = tensor(scales).view(torch.float8_e8m0fnu)
    answers = {d: mx_tensor.to_dtype(tensor(codes), e8m0, kind, 32, dt) for d, dt in torch_dtypes().items()}
    check("torchao", {"weight_qdata": codes, "weight_scale": scales}, {"elem_dtype": element}, answers)


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("factor", [None, 0.0123, 1e-30])
def test_torchao_nvfp4(factor: float | None) -> None:
    import torchao.prototype.mx_formats.nvfp4_tensor as nvfp4

    import torch

    rng = np.random.default_rng(0)
    tensors = {"weight_qdata": random_array(rng, np.uint8, 256, 32), "weight_scale": random_array(rng, E4M3, 256, 4)}
    if factor is not None:
        tensors["weight_per_tensor_scale"] = np.array(factor, np.float32)
    level = None if factor is None else torch.tensor(factor)
    w = nvfp4.NVFP4Tensor(
        tensor(tensors["weight_qdata"]), tensor(tensors["weight_scale"]), 16, torch.bfloat16, per_tensor_scale=level
    )
    check("torchao", tensors, {}, {d: w.dequantize(dt) for d, dt in torch_dtypes().items()})


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("scale", DTYPES)
@pytest.mark.parametrize("codes", [np.int8, np.uint8], ids=["int8", "uint8"])
def test_torchao_affine(codes, scale: str) -> None:
    import torchao.quantization.quant_primitives as primitives

    import torch

    rng = np.random.default_rng(0)
    signed = codes is np.int8
    zeros = random_array(rng, np.int8, 16, 4) if signed else random_array(rng, np.uint8, 16, 4).astype(np.int32)
    tensors = {
        "weight_qdata": random_array(rng, codes, 16, 128),
        "weight_scale": floats(rng, scale, 16, 4),
        "weight_zero_point": zeros,
    }
    q, s, z = (tensor(t) for t in tensors.values())
    dtype = torch.int8 if signed else torch.uint8
    answers = {d: primitives.dequantize_affine(q, (1, 32), s, z, dtype, output_dtype=dt) for d, dt in torch_dtypes().items()}
    check("torchao", tensors, {"bits": 8, "block_size": [1, 32]}, answers)


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("group", [64, 4096])
@pytest.mark.parametrize("shape", [(16, 128), (7, 10), (9, 64), (5, 21)], ids=str)
def test_bitsandbytes_nf4(shape: tuple[int, int], group: int) -> None:
    import bitsandbytes.functional as functional

    import torch

    rng = np.random.default_rng(0)
    size = shape[0] * shape[1]
    tensors = {
        "weight": random_array(rng, np.uint8, (size + 1) // 2, 1),
        "weight.absmax": np.abs(floats(rng, "float32", -(-size // group))),
        "weight.quant_map": functional.get_4bit_type("nf4", device="cpu").numpy(),
    }  # fmt: skip
    answers = {}
    for d, dt in torch_dtypes().items():
        state = functional.QuantState(
            absmax=tensor(tensors["weight.absmax"]),
            shape=torch.Size(shape),
            code=tensor(tensors["weight.quant_map"]),
            blocksize=group,
            quant_type="nf4",
            dtype=dt,
        )
        answers[d] = functional.dequantize_4bit(tensor(tensors["weight"]), state)
    check("bitsandbytes", tensors, {"shape": list(shape), "quant_type": "nf4", "blocksize": group}, answers)


@pytest.mark.ecosystem("transformers")
def test_bitsandbytes_double_quantized_and_int8() -> None:
    import bitsandbytes.functional as functional

    import torch

    weight, state = functional.quantize_4bit(torch.randn(64, 320), blocksize=64, compress_statistics=True, quant_type="nf4")
    tensors = {"weight": weight.numpy(), **{f"weight.{k}": t.numpy() for k, t in state.as_dict(packed=True).items()}}
    answers = {}
    for d, dt in torch_dtypes().items():
        state.dtype = dt
        answers[d] = functional.dequantize_4bit(weight, state)
    check("bitsandbytes", tensors, {}, answers)
    rng = np.random.default_rng(0)
    rows = {"weight": random_array(rng, np.int8, 32, 64), "SCB": floats(rng, "float32", 32)}
    check("bitsandbytes", rows, {}, {"float32": functional.int8_vectorwise_dequant(*(tensor(t) for t in rows.values()))})


@pytest.mark.ecosystem("hqq")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("bits", "packing", "per"), [(8, "8bit_u8", 1), (4, "4bit_u8", 2), (3, "3bit_32", 10), (2, "2bit_u8", 4), (1, "1bit_u8", 8)]
)
def test_hqq(bits: int, packing: str, per: int, axis: int, dtype: str) -> None:
    from hqq.core.quantize import Quantizer

    rng = np.random.default_rng(bits)
    n, k, group = 16, 128, 64
    count = n * k // group
    rows, columns = (count, group) if axis else (group, count)
    scale = (count, 1) if axis else (1, count)
    tensors = {
        "W_q": random_array(rng, np.int32 if bits == 3 else np.uint8, -(-rows // per), columns),
        "scale": floats(rng, dtype, *scale),
        "zero": floats(rng, dtype, *scale),
    }
    meta = {
        "packing": packing, "view_as_float": False, "nbits": bits, "group_size": group, "axis": axis, "shape": (n, k),
        "scale": tensor(tensors["scale"]), "zero": tensor(tensors["zero"]), "compute_dtype": torch_dtypes()[dtype],
    }  # fmt: skip
    answer = Quantizer.dequantize(tensor(tensors["W_q"]), meta)
    config = {"nbits": bits, "axis": axis, "shape": [n, k], "group_size": group}
    check("hqq", tensors, config, {d: answer.to(dt) for d, dt in torch_dtypes().items()})


@pytest.mark.ecosystem("onnxruntime")
@pytest.mark.parametrize("k", [128, 100])
@pytest.mark.parametrize("zeros", ["packed", "float", "default"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_onnxruntime(bits: int, dtype: str, zeros: str, k: int) -> None:
    import onnx
    import onnxruntime as runtime

    if bits == 8 and zeros == "float":
        return  # the runtime's CPU kernel refuses it
    rng = np.random.default_rng(bits)
    n, block, blocks = 24, 32, -(-k // 32)
    tensors = {
        f"weight_Q{bits}": random_array(rng, np.uint8, n, blocks, block * bits // 8),
        "weight_scales": rng.standard_normal((n, blocks)).astype(NUMPY[dtype]),
    }
    if zeros == "packed":
        tensors["weight_zero_points"] = random_array(rng, np.uint8, n, -(-blocks * bits // 8))
    elif zeros == "float":
        tensors["weight_zero_points"] = (rng.standard_normal((n, blocks)) * 4).astype(NUMPY[dtype])
    kind = onnx.TensorProto.FLOAT if dtype == "float32" else onnx.TensorProto.FLOAT16
    attributes = {"K": k, "N": n, "bits": bits, "block_size": block}
    node = onnx.helper.make_node("MatMulNBits", ["x", *tensors], ["y"], domain="com.microsoft", **attributes)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [value("x", kind, [k, k])],
        [value("y", kind, [k, n])],
        [onnx.numpy_helper.from_array(t, s) for s, t in tensors.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    answer = session.run(None, {"x": np.eye(k, dtype=NUMPY[dtype])})[0].T.astype(np.float32)
    check("onnx", tensors, attributes, {"float32": answer})


@pytest.mark.ecosystem("modelopt")
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "INT4QTensor", "NF4QTensor"])
@pytest.mark.parametrize("held", DTYPES)
def test_modelopt(kind: str, held: str) -> None:
    import modelopt.torch.quantization.qtensor as qtensor

    import torch

    rng = np.random.default_rng(0)
    n, k = 256, 128
    config: dict = {}
    bytes_a_scale = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, k // 32))
    if kind == "nvfp4":
        tensors = {"weight": random_array(rng, np.uint8, n, k // 2), "weight_scale": random_array(rng, E4M3, n, k // 16)}
        tensors["weight_scale_2"] = np.array({"float32": 0.0123, "float16": 3e-38, "bfloat16": -2.5}[held], np.float32)
        options = {"double_scale": tensor(tensors["weight_scale_2"]), "block_sizes": {-1: 16}}
    elif kind in ("mxfp4", "mxfp8"):
        weight = random_array(rng, np.uint8, n, k // 2) if kind == "mxfp4" else random_array(rng, E4M3, n, k)
        tensors, options = {"weight": weight, "weight_scale": bytes_a_scale}, {"block_sizes": {-1: 32}}
    elif kind == "INT4QTensor":
        tensors = {"weight": random_array(rng, np.uint8, n, k // 2), "weight_scale_inv": floats(rng, held, n * k // 32, 1)}
        options, config = {"block_sizes": {-1: 32}}, {"group_size": 32}
    else:
        n = 64
        tensors = {
            "weight": random_array(rng, np.uint8, n * k // 2), "weight_scale": random_array(rng, np.int8, 1, 256),
            "weight_double_scale": np.abs(floats(rng, held, 1)) + NUMPY[held](1), "weight_scale_zeros": floats(rng, held),
        }  # fmt: skip
        options = {"double_scale": tensor(tensors["weight_double_scale"]), "scale_zeros": tensor(tensors["weight_scale_zeros"])}
        options, config = {**options, "block_sizes": {-1: 64}}, {"shape": [n, k], "group_size": 64}
    cls = getattr(qtensor, {"nvfp4": "NVFP4QTensor", "mxfp4": "MXFP4QTensor", "mxfp8": "MXFP8QTensor"}.get(kind, kind))
    scale = tensor(tensors["weight_scale_inv" if kind == "INT4QTensor" else "weight_scale"])
    answers = {
        d: cls(torch.Size((n, k)), dt, tensor(tensors["weight"])).dequantize(dtype=dt, scale=scale, **options)
        for d, dt in torch_dtypes().items()
    }
    check("modelopt", tensors, config, answers)
