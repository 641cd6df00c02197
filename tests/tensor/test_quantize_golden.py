"""Encoders reproduce the producers' bytes: `quantize(orig, codec, policy)` against the codes and
scales in their files.

The files' words are taken apart here, without the library's layouts: codes one by one, scales as
they are stored.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from halfbyte.numerics.bits import unpack
from halfbyte.tensor.quantize import quantize
from support.golden_case import GOLDEN, Case, files, label, read_case


def codes_of(q) -> np.ndarray:
    return unpack(q.parts["codes"], q.format.bits, q.shape[-1])


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equality of bytes, whatever the shape and the spelling of an 8-bit dtype."""
    assert ours.dtype.itemsize == theirs.dtype.itemsize
    width = f"u{ours.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(ours).reshape(-1).view(width), np.ascontiguousarray(theirs).reshape(-1).view(width)
    )


def same_answers(case: Case, q) -> None:
    """Decoded with the producer's arithmetic, what was encoded here is the producer's own answer,
    bit for bit.
    """
    for variant, reference in case.references.items():
        word = variant or case.metadata["ref_dtype"]
        if word != "none":
            dtype = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(word, word)
            same_bits(q.dequantize(dtype, "producer").astype(np.float32), reference)


def stream(words: np.ndarray, bits: int, k: int) -> np.ndarray:
    """Rows of words that are little-endian bit streams -> codes [n, k]."""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(words.shape[0], -1)
    out = np.zeros((len(data), k), np.int64)
    for j in range(k):
        for b in range(bits):
            at = j * bits + b
            out[:, j] |= (data[:, at // 8].astype(np.int64) >> (at % 8) & 1) << b
    return out


def high_first(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes whose high nibble is the even element of the flattened tensor."""
    flat = data.reshape(-1)
    return np.stack([flat >> 4, flat & 15], -1).reshape(-1)[: np.prod(shape)].reshape(shape)


def original(case: Case) -> np.ndarray:
    (x,) = case.originals.values()
    return x


def ids(paths: list[Path]) -> list[str]:
    return [label(p) for p in paths]


def with_original(*producers: str, pattern: str = "") -> list[Path]:
    """Files of the producers that keep the weight before quantization."""
    found = [p for p in files(*producers) if re.search(pattern, p.stem) and read_case(p).originals]
    assert found
    return found


MLX = with_original("mlx")


@pytest.mark.parametrize("path", MLX, ids=ids(MLX))
def test_mlx(path):
    prefix = "model.layers.0.mlp.switch_mlp.gate_proj." if "moe3d" in path.stem else "model.layers.0.mlp.down_proj."
    case = read_case(path, prefix)
    x = original(case)
    affine = re.match(r"affine_b(\d)_g(\d+)", path.stem)
    word = {"affi": "affine4", "mxfp": "mxfp8_e4m3" if "mxfp8" in path.stem else "mxfp4", "nvfp": "nvfp4"}[path.stem[:4]]
    if affine:
        word = f"affine{affine[1]}:g{affine[2]}"
    q = quantize(x, word, "mlx-global" if "globalscale" in path.stem else "mlx")
    rows = case.tensors["weight"].reshape(-1, case.tensors["weight"].shape[-1])
    np.testing.assert_array_equal(codes_of(q).reshape(len(rows), -1), stream(rows, q.format.bits, x.shape[-1]))
    same_bits(q.parts["scales"], case.tensors["scales"])
    assert q.origin == "mlx"
    for part, name in (("biases", "biases"), ("global_scale", "global_scale")):
        assert (part in q.parts) == (name in case.tensors)
        if part in q.parts:
            same_bits(q.parts[part], case.tensors[name])
    same_answers(case, q)


PACKED = with_original("compressed-tensors", pattern="^pack_int")


@pytest.mark.parametrize("path", PACKED, ids=ids(PACKED))
def test_compressed_tensors_pack(path):
    case = read_case(path)
    x = original(case)
    bits, group, asymmetric = int(path.stem[8]), re.search(r"_g(\d+)", path.stem), "asym" in path.stem
    word = f"{'uint' if asymmetric else 'int'}{bits}:{'g' + group[1] if group else 'channel'}"
    q = quantize(x, word, "compressed-tensors")
    np.testing.assert_array_equal(codes_of(q), stream(case.tensors["weight_packed"], bits, x.shape[1]))
    same_bits(q.parts["scales"], case.tensors["weight_scale"])
    assert asymmetric == ("weight_zero_point" in case.tensors)
    if asymmetric:
        # Packed along the rows.
        zeros = stream(np.ascontiguousarray(case.tensors["weight_zero_point"].T), bits, x.shape[0]).T
        np.testing.assert_array_equal(q.parts["zeros"], zeros)
    same_answers(case, q)


OLD = with_original("compressed-tensors-old")


@pytest.mark.parametrize("path", OLD, ids=ids(OLD))
def test_compressed_tensors_of_older_versions(path):
    """Words of 3 bits held 10 codes each; `weight_g_idx` says which inputs were rounded together."""
    case = read_case(path)
    x, words = original(case), case.tensors["weight_packed"]
    bits, group, asymmetric = int(re.search(r"_int(\d)", path.stem)[1]), re.search(r"_g(\d+)", path.stem)[1], "asym" in path.stem
    index = case.tensors.get("weight_g_idx", np.arange(x.shape[1]) // int(group))
    order = np.argsort(index, kind="stable")
    q = quantize(np.ascontiguousarray(x[:, order]), f"{'uint' if asymmetric else 'int'}{bits}:g{group}", "compressed-tensors")
    each = 32 // bits
    codes = np.concatenate([stream(words[:, [i]], bits, each) for i in range(words.shape[1])], axis=1)[:, : x.shape[1]]
    np.testing.assert_array_equal(codes_of(q), codes[:, order])
    same_bits(q.parts["scales"], case.tensors["weight_scale"])
    assert asymmetric == ("weight_zero_point" in case.tensors)
    if asymmetric:
        zeros = stream(np.ascontiguousarray(case.tensors["weight_zero_point"].T), bits, x.shape[0]).T
        np.testing.assert_array_equal(q.parts["zeros"], zeros)


BYTES = with_original("compressed-tensors", pattern="^(int8|fp8|mx|nv)")


@pytest.mark.parametrize("path", BYTES, ids=ids(BYTES))
def test_compressed_tensors_bytes(path):
    case = read_case(path)
    word = {
        "int8": "int8:channel",
        "fp8": "fp8_e4m3",
        "nvfp4": "nvfp4",
        "mxfp4": "mxfp4",
        "mxfp6": "mxfp6_e2m3",
        "mxfp8": "mxfp8_e4m3",
    }[path.stem.partition("_")[0]]
    q = quantize(original(case), word, "compressed-tensors")
    if word == "int8:channel":
        np.testing.assert_array_equal(codes_of(q).astype(int) - 128, case.tensors["weight"])
    else:
        same_bits(q.parts["codes"], case.tensors.get("weight_packed", case.tensors.get("weight")))
    same_bits(q.parts["scales"], case.tensors["weight_scale"])
    if word == "nvfp4":
        assert q.format.global_op == "divide"
        same_bits(q.parts["global_scale"], case.tensors["weight_global_scale"])
    same_answers(case, q)


MODELOPT = with_original("modelopt", pattern="^(mx|nv)")


@pytest.mark.parametrize("path", MODELOPT, ids=ids(MODELOPT))
def test_modelopt_float(path):
    case = read_case(path)
    word = {"mxfp4": "mxfp4", "mxfp8": "mxfp8_e4m3", "nvfp4": "nvfp4"}[path.stem[:5]]
    q = quantize(original(case), word, "modelopt")
    same_bits(q.parts["codes"], case.tensors["weight"])
    same_bits(q.parts["scales"], case.tensors["weight_scale"])
    if word == "nvfp4":
        same_bits(q.parts["global_scale"], case.tensors["weight_scale_2"])
    same_answers(case, q)


def test_modelopt_int4_awq_export():
    case = read_case(GOLDEN / "modelopt" / "int4_awq_export_g128_bf16.safetensors")
    q = quantize(original(case), "int4:g128", "modelopt")
    signed = (codes_of(q) - 8) & 15
    np.testing.assert_array_equal(signed[0::2], case.tensors["weight"] & 15)
    np.testing.assert_array_equal(signed[1::2], case.tensors["weight"] >> 4)
    same_bits(q.parts["scales"], case.tensors["weight_scale"])


def test_modelopt_int4_qtensor():
    case = read_case(GOLDEN / "modelopt" / "int4_qtensor_g128_bf16.safetensors")
    q = quantize(original(case), "int4:g128", "modelopt-int4")
    assert q.format.inverse
    np.testing.assert_array_equal(codes_of(q), high_first(case.tensors["weight"], q.shape))
    same_bits(q.parts["scales"], case.tensors["weight_scale_inv"])
    same_answers(case, q)


def test_modelopt_nf4():
    case = read_case(GOLDEN / "modelopt" / "nf4_bf16.safetensors")
    q = quantize(original(case), "nf4_modelopt", "modelopt", nested=True)
    np.testing.assert_array_equal(codes_of(q), high_first(case.tensors["weight"], q.shape))
    np.testing.assert_array_equal(q.parts["scales"].reshape(-1).astype(int) - 128, case.tensors["weight_scale"].reshape(-1))
    np.testing.assert_array_equal(q.parts["nested_absmax"], case.tensors["weight_double_scale"].astype(np.float32))
    assert q.parts["nested_offset"] == np.float32(case.tensors["weight_scale_zeros"])
    same_answers(case, q)


TORCHAO_MX = with_original("torchao", pattern="^mx_")


@pytest.mark.parametrize("path", TORCHAO_MX, ids=ids(TORCHAO_MX))
def test_torchao_mx(path):
    case = read_case(path)
    _, element, mode, _ = path.stem.split("_")
    word = {
        "fp4": "mxfp4",
        "fp6e2m3": "mxfp6_e2m3",
        "fp6e3m2": "mxfp6_e3m2",
        "fp8e4m3": "mxfp8_e4m3",
        "fp8e5m2": "mxfp8_e5m2",
    }[element]
    q = quantize(original(case), word, "torchao" if mode == "floor" else f"torchao-{mode}")
    same_bits(q.parts["codes"] if word == "mxfp4" else codes_of(q), case.tensors["weight_qdata"])  # fp6: one code a byte
    same_bits(q.parts["scales"], case.tensors["weight_scale"])
    same_answers(case, q)


TORCHAO_NVFP4 = with_original("torchao", pattern="^nvfp4")


@pytest.mark.parametrize("path", TORCHAO_NVFP4, ids=ids(TORCHAO_NVFP4))
def test_torchao_nvfp4(path):
    case = read_case(path)
    one_level = "1level" in path.stem
    q = quantize(original(case), "nvfp4", "torchao-one-level" if one_level else "torchao")
    same_bits(q.parts["codes"], case.tensors["weight_qdata"])
    same_bits(q.parts["scales"], case.tensors["weight_scale"])
    assert one_level == ("global_scale" not in q.parts)
    if not one_level:
        same_bits(q.parts["global_scale"], case.tensors["weight_per_tensor_scale"])
    same_answers(case, q)


@pytest.mark.parametrize(
    ("stem", "word", "offset"),
    [
        ("affine_uint4_g32_bf16", "uint4:g32", 0),
        ("intx_b4_g32_symmetric_bf16", "int4:g32", 8),
        ("intx_b4_g64_asymmetric_f32", "uint4:g64", 8),
    ],
)
def test_torchao_integers(stem, word, offset):
    case = read_case(GOLDEN / "torchao" / f"{stem}.safetensors")
    q = quantize(original(case), word, "torchao")
    np.testing.assert_array_equal(codes_of(q).astype(int) - offset, case.tensors["weight_qdata"])
    same_bits(q.parts["scales"], case.tensors["weight_scale"])
    if "zeros" in q.parts:
        np.testing.assert_array_equal(q.parts["zeros"].astype(int) - offset, case.tensors["weight_zero_point"])
    else:
        assert not case.tensors["weight_zero_point"].any()
    same_answers(case, q)


BITSANDBYTES = with_original("bitsandbytes", pattern="^(nf4|fp4)")


@pytest.mark.parametrize("path", BITSANDBYTES, ids=ids(BITSANDBYTES))
def test_bitsandbytes_4bit(path):
    case = read_case(path)
    block, nested = re.search(r"_b(\d+)", path.stem)[1], "_dq" in path.stem
    q = quantize(original(case), f"{'nf4' if path.stem[0] == 'n' else 'bnb_fp4'}:g{block}", "bitsandbytes", nested=nested)
    np.testing.assert_array_equal(codes_of(q), high_first(case.tensors["weight"], q.shape))
    same_bits(q.parts["scales"], case.tensors["weight.absmax"])
    assert q.format.grouping == ("flat" if q.shape[1] % int(block) else "row")
    if nested:
        (state,) = (t for name, t in case.tensors.items() if ".quant_state." in name)
        same_bits(q.parts["nested_absmax"], case.tensors["weight.nested_absmax"])
        same_bits(q.parts["nested_map"], case.tensors["weight.nested_quant_map"])
        assert q.parts["nested_offset"] == np.float32(json.loads(bytes(state))["nested_offset"])
    same_answers(case, q)


def test_bitsandbytes_int8():
    case = read_case(GOLDEN / "bitsandbytes" / "int8.safetensors")
    q = quantize(original(case), "bnb_int8", "bitsandbytes")
    np.testing.assert_array_equal(codes_of(q).astype(int) - 128, case.tensors["weight"])
    same_bits(q.parts["scales"], case.tensors["SCB"])
    same_answers(case, q)


HQQ = with_original("hqq", pattern=r"_axis\d_[a-z0-9]+$")


@pytest.mark.parametrize("path", HQQ, ids=ids(HQQ))
def test_hqq_without_its_optimizer(path):
    case = read_case(path)
    bits, group, axis = map(int, re.match(r"b(\d)_g(\d+)_axis(\d)", path.stem).groups())
    x = original(case)
    q = quantize(x, f"hqq{bits}:g{group}", "hqq", axis=axis)
    same_bits(q.parts["scales"], case.tensors["scale"])
    same_bits(q.parts["zeros"], case.tensors["zero"])
    words = case.tensors["W_q"]
    if bits == 3:
        # Ten codes an int32, from bit 27 down; the rows of the last slabs are padding.
        slabs = [words >> (27 - 3 * i) & 7 for i in range(10)]
    else:
        slabs = [words >> (8 - bits * (i + 1)) & ((1 << bits) - 1) for i in range(8 // bits)]
    rows = x.size // words.shape[1]
    np.testing.assert_array_equal(codes_of(q), np.concatenate(slabs)[:rows].reshape(x.shape))
    same_answers(case, q)


MICROXCALING = with_original("microxcaling", pattern="_(nearest|even|floor)$")
CASES = [f"microxcaling/{path.name}" for path in MICROXCALING]
"""Files this module covers, for the test that no golden case is left out."""


@pytest.mark.parametrize("path", MICROXCALING, ids=ids(MICROXCALING))
def test_microxcaling_fake_quantized_values(path):
    """Its output is the decoded values; signs of zero too, where the element has them."""
    case = read_case(path)
    element, _, rounding = path.stem.rpartition("_")
    word = {"int8": "mxint8", "int4": "mxint4", "int2": "mxint2"}.get(element, "mx" + element)
    word = {"mxfp4_e2m1": "mxfp4"}.get(word, word)
    values = quantize(original(case), word, "microxcaling" if rounding == "nearest" else f"microxcaling-{rounding}").dequantize()
    (reference,) = case.references.values()
    np.testing.assert_array_equal(values, reference)
    if not word.startswith("mxint"):
        same_bits(values, reference)


def test_every_file_with_an_original_is_compared_above():
    """No file with an `orig::` tensor is left out but HQQ's optimizer; GGUF has its own tests."""
    compared = {*MLX, *PACKED, *OLD, *BYTES, *MODELOPT, *TORCHAO_MX, *TORCHAO_NVFP4, *BITSANDBYTES, *HQQ, *MICROXCALING}
    one_by_one = {
        "int4_awq_export_g128_bf16", "int4_qtensor_g128_bf16", "nf4_bf16", "int8", "affine_uint4_g32_bf16",
        "intx_b4_g32_symmetric_bf16", "intx_b4_g64_asymmetric_f32", "elemwise_sweep", "b4_g128_axis1_float32_opt",
    }  # fmt: skip
    producers = (
        "mlx", "compressed-tensors", "compressed-tensors-old", "modelopt", "torchao", "bitsandbytes", "hqq", "microxcaling",
    )  # fmt: skip
    everything = with_original(*producers)
    assert {p.stem for p in set(everything) - compared} == one_by_one
