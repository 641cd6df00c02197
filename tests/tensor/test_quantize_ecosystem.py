"""Encoders against the producers' own packages: random weights of every dtype and magnitude, bit
for bit.

`make test-ecosystem` runs each test in its producer's environment.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from halfbyte.numerics.bits import unpack
from halfbyte.tensor.quantize import quantize

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), BF16, np.dtype(np.float16)]
SEEDS = range(6)


def weights(seed: int, dtype: np.dtype, n: int = 48, k: int = 256, group: int = 16) -> np.ndarray:
    """Rows of every magnitude, zero groups, signed zeros, constants, one value a group, E2M1 values
    and their middles.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, k)) * 10.0 ** rng.uniform(-5, 2, (n, 1))
    x[0] = 0
    x[1] = -0.0
    x[2, : k // 2] = 0
    x[3] = rng.choice([-1, 1]) * 0.37
    x[4, ::group] = 1e-3
    x[4, 1::group] = -0.0
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6.5, 7])
    x[5:9] = rng.choice(grid, (4, k)) * rng.choice([-1, 1], (4, k)) * 2.0 ** rng.integers(-8, 3, (4, 1))
    x[9] = np.abs(x[9])
    x[10] = -np.abs(x[10])
    x[11] = rng.choice([1.75, 1.5, 1.9, -1.0], k) * 2.0 ** rng.integers(-6, 3, k)
    x[12] = 6e-8 * (rng.random(k) < 0.1)
    return x.astype(np.float32).astype(dtype)


def tensor(x: np.ndarray):
    import torch

    return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, x.dtype.name))


def bits_of(t) -> np.ndarray:
    """A torch tensor's bytes as unsigned integers of its width."""
    import torch

    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]).numpy()


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    width = f"u{ours.dtype.itemsize}"
    ours, theirs = (np.ascontiguousarray(a).reshape(-1).view(width) for a in (ours, theirs))
    np.testing.assert_array_equal(ours, theirs)


def codes_of(q) -> np.ndarray:
    return unpack(q.parts["codes"], q.format.bits, q.shape[-1])


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("word", "mode", "options"),
    [("mxfp4", "mxfp4", {}), ("mxfp8_e4m3", "mxfp8", {}), ("nvfp4", "nvfp4", {}), ("nvfp4", "nvfp4", {"global_scale": True})]
    + [(f"affine{b}:g{g}", "affine", {"bits": b, "group_size": g}) for b in (1, 2, 3, 4, 5, 6, 8) for g in (32, 64, 128)],
)
def test_mlx(word, mode, options, seed, dtype):
    import mlx.core as mx

    x = weights(seed, dtype)
    array = mx.array(x.astype(np.float32)).astype({"bfloat16": mx.bfloat16}.get(dtype.name) or getattr(mx, dtype.name))
    policy = "mlx"
    if "global_scale" in options:
        policy, options = "mlx-global", {"global_scale": mx.array(np.abs(x.astype(np.float32)).max())}
    packed, scales, *biases = mx.quantize(array, mode=mode, **options)
    q = quantize(x, word, policy)
    same_bits(q.parts["codes"], np.array(packed).view(np.uint8))
    scale_view = mx.uint8 if scales.dtype == mx.uint8 else mx.uint32 if scales.dtype == mx.float32 else mx.uint16
    same_bits(q.parts["scales"], np.array(scales.view(scale_view)))
    if biases:
        same_bits(q.parts["biases"], np.array(biases[0].view(scale_view)))


MX_ELEMENTS = ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"]


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["floor", "rceil", "even", "ceil"])
@pytest.mark.parametrize("word", MX_ELEMENTS)
def test_torchao_mx(word, mode, seed, dtype):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    import torch

    element = {
        "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
    }[word]
    x = weights(seed, dtype)
    scales, data = to_mx(tensor(x), element, 32, ScaleCalculationMode[mode.upper()])
    q = quantize(x, word, "torchao" if mode == "floor" else f"torchao-{mode}")
    same_bits(q.parts["scales"], bits_of(scales))
    same_bits(q.parts["codes"] if word == "mxfp4" else codes_of(q), bits_of(data))


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("levels", [1, 2])
def test_torchao_nvfp4(levels, seed, dtype):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = weights(seed, dtype)
    t = tensor(x)
    scales, data = nvfp4_quantize(t, 16, per_tensor_amax_to_scale(t.abs().max()) if levels == 2 else None)
    q = quantize(x, "nvfp4", "torchao" if levels == 2 else "torchao-one-level")
    same_bits(q.parts["scales"], bits_of(scales))
    same_bits(q.parts["codes"], bits_of(data))


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_torchao_intx(bits, mapping, seed, dtype):
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    import torch

    x = weights(seed, dtype)
    half = 1 << (bits - 1)
    t, block = tensor(x), (1, 32)
    kind = MappingType[mapping]
    scale, zero = choose_qparams_affine(t, kind, block, torch.int8, -half, half - 1, zero_point_dtype=torch.int8)
    data = quantize_affine(t, block, scale, zero, torch.int8, -half, half - 1)
    q = quantize(x, f"{'int' if mapping == 'SYMMETRIC' else 'uint'}{bits}:g32", "torchao")
    same_bits(q.parts["scales"], bits_of(scale))
    np.testing.assert_array_equal(codes_of(q).astype(int) - half, data.numpy())
    if mapping == "ASYMMETRIC":
        np.testing.assert_array_equal(q.parts["zeros"].reshape(-1) - half, zero.numpy().reshape(-1))


@pytest.mark.ecosystem("compressed-tensors")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("word", "args"),
    [("mxfp4", {"num_bits": 4}), ("mxfp6_e2m3", {"num_bits": 6}), ("mxfp8_e4m3", {"num_bits": 8}), ("nvfp4", {})]
    + [(f"int{b}:g32", {"num_bits": b}) for b in range(2, 9)]
    + [(f"uint{b}:g32", {"num_bits": b}) for b in range(2, 9)]
    + [("fp8_e4m3", {"num_bits": 8})],
)
def test_compressed_tensors(word, args, seed, dtype):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    import torch

    x = weights(seed, dtype)
    t = tensor(x)
    group = {"nvfp4": 16, "fp8_e4m3": 256}.get(word, 32)
    common = {"symmetric": not word.startswith("uint"), "strategy": "group", "group_size": group}
    extra, ratio = {}, None
    if word.startswith("mx"):
        extra = {"type": "float", "scale_dtype": torch.uint8}
    elif word == "nvfp4":
        extra = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
        ratio = generate_gparam(t.min(), t.max())
    elif word == "fp8_e4m3":
        extra = {"type": "float"}
    arguments = QuantizationArgs(**(common | args | extra))
    blocks = t.unflatten(-1, (-1, group))
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=ratio)
    q = quantize(x, word, "compressed-tensors")
    # As its compressors call it: MXFP6 and NVFP4 pass no zero point, the others one of zeros, which
    # turns −0.0 into +0.
    whole = ct_quantize(t, scale, None if word in ("nvfp4", "mxfp6_e2m3") else zero, arguments, global_scale=ratio)
    if word.startswith("mx"):
        same_bits(q.parts["scales"], (torch.log2(scale.float()) + 127).to(torch.uint8).numpy())
    elif word == "nvfp4":
        same_bits(q.parts["global_scale"], ratio.numpy())
        same_bits(q.parts["scales"], bits_of(scale.to(torch.float8_e4m3fn)))
    else:
        same_bits(q.parts["scales"], bits_of(scale))
    if word.startswith(("int", "uint")):
        half = 1 << (args["num_bits"] - 1)
        np.testing.assert_array_equal(codes_of(q).astype(int) - half, whole.float().numpy().astype(int))
        if word.startswith("uint"):
            np.testing.assert_array_equal(q.parts["zeros"] - half, zero.numpy())
        return
    from halfbyte.numerics.minifloat import element_table

    ours = element_table(q.format.element, q.format.bits)[codes_of(q)].astype(np.float32)
    same_bits(ours, whole.float().numpy())


@pytest.mark.ecosystem("modelopt")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_modelopt_mx(seed, dtype):
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor

    x = weights(seed, dtype)
    data, scales = MXFP4QTensor.quantize(tensor(x), 32)
    q = quantize(x, "mxfp4", "modelopt")
    same_bits(q.parts["scales"], scales.numpy())
    same_bits(q.parts["codes"], data._quantized_data.numpy())
    data, scales = MXFP8QTensor.quantize(tensor(x))
    q = quantize(x, "mxfp8_e4m3", "modelopt")
    same_bits(q.parts["scales"], scales.numpy())
    same_bits(q.parts["codes"], bits_of(data._quantized_data))


@pytest.mark.ecosystem("modelopt")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_modelopt_nvfp4(seed, dtype):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = weights(seed, dtype)
    data, scales, ratio = NVFP4QTensor.quantize(tensor(x), 16)
    q = quantize(x, "nvfp4", "modelopt")
    same_bits(q.parts["global_scale"], ratio.numpy())
    same_bits(q.parts["scales"], bits_of(scales))
    same_bits(q.parts["codes"], data._quantized_data.numpy())


@pytest.mark.ecosystem("modelopt")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_modelopt_int4_and_nf4(seed, dtype):
    from modelopt.torch.quantization.qtensor import INT4QTensor, NF4QTensor

    x = weights(seed, dtype)[13:]  # groups of zeros, and in float16 tiny ones, give it infinite scales and undefined casts
    x = x[np.abs(x.reshape(len(x), -1, 64)).max(-1).min(-1) > 1e-3]
    data, scales = INT4QTensor.quantize(tensor(x), 64)
    q = quantize(x, "int4:g64", "modelopt-int4")
    same_bits(q.parts["scales"], bits_of(scales))
    high, low = data._quantized_data.numpy() >> 4, data._quantized_data.numpy() & 15
    np.testing.assert_array_equal(codes_of(q).reshape(-1), np.stack([high, low], -1).reshape(-1))
    if dtype != BF16:
        return
    x[0, :64] = 0
    data, scales = NF4QTensor.quantize(tensor(x), 64, 256)
    bytes_, second, offset = NF4QTensor.double_quantization(scales, 256, 8)
    q = quantize(x, "nf4_modelopt", "modelopt", nested=True)
    high, low = data._quantized_data.numpy() >> 4, data._quantized_data.numpy() & 15
    np.testing.assert_array_equal(codes_of(q).reshape(-1), np.stack([high, low], -1).reshape(-1))
    held = q.parts["scales"].reshape(-1).astype(int) - 128
    np.testing.assert_array_equal(held, bytes_.numpy().reshape(-1)[: held.size])
    np.testing.assert_array_equal(q.parts["nested_absmax"], second.float().numpy())
    assert float(q.parts["nested_offset"]) == float(offset)


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block", [64, 128, 256, 1024, 4096])
@pytest.mark.parametrize(("word", "kind"), [("nf4", "nf4"), ("bnb_fp4", "fp4")])
def test_bitsandbytes_4bit(word, kind, block, seed, dtype):
    import bitsandbytes.functional as functional

    x = weights(seed, dtype, n=45, k=200)
    packed, state = functional.quantize_4bit(tensor(x), blocksize=block, quant_type=kind)
    q = quantize(x, f"{word}:g{block}", "bitsandbytes")
    high, low = packed.numpy().reshape(-1) >> 4, packed.numpy().reshape(-1) & 15
    np.testing.assert_array_equal(codes_of(q).reshape(-1), np.stack([high, low], -1).reshape(-1)[: x.size])
    same_bits(q.parts["scales"], state.absmax.numpy())


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_bitsandbytes_nested_absmax(rows, seed):
    import bitsandbytes.functional as functional

    x = np.random.default_rng(seed).standard_normal((rows, 1280)).astype(np.float32)
    x = x if seed else np.ones_like(x)  # nothing left over its mean
    _, state = functional.quantize_4bit(tensor(x), blocksize=64, quant_type="nf4", compress_statistics=True)
    q = quantize(x, "nf4", "bitsandbytes", nested=True)
    assert float(q.parts["nested_offset"]) == float(state.offset)
    np.testing.assert_array_equal(q.parts["scales"].reshape(-1), state.absmax.numpy())
    same_bits(q.parts["nested_absmax"], state.state2.absmax.numpy())
    same_bits(q.parts["nested_map"], state.state2.code.numpy())


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("seed", SEEDS)
def test_bitsandbytes_int8(seed):
    import bitsandbytes.functional as functional

    x = weights(seed, np.dtype(np.float16))[3:]
    codes, stats, _ = functional.int8_vectorwise_quant(tensor(x))
    q = quantize(x, "bnb_int8", "bitsandbytes")
    np.testing.assert_array_equal(codes_of(q).astype(int) - 128, codes.numpy())
    same_bits(q.parts["scales"], stats.numpy())
