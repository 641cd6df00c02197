"""Decoders of the producers' tensors that share nothing with the library: NumPy alone, after each
producer's description of its format.

    decode(producer, module, tensors, config)   float32 values, rounded once (flat where the file
                                                has no shape); None for a config or tensors that
                                                are not known here

They are checked against the producers' own numbers (tests/checkpoints/test_fuzz.py) and judge what
the library accepts of a mutant. Products and sums are formed in long double.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of an eight that nibble i of a word holds."""
BITSANDBYTES_TABLES = (157801411, 3295803418)
"""CRC-32 of the tables of NF4 and FP4, as files have them."""
Tensors = dict[str, np.ndarray]


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the last axis, a bit stream from the lowest bit of the first element."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    stream = np.unpackbits(raw, axis=-1, bitorder="little")
    stream = stream[..., : stream.shape[-1] // bits * bits].reshape(*stream.shape[:-1], -1, bits)
    return (stream.astype(np.int64) << np.arange(bits)).sum(-1)


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32 if array.dtype.itemsize < 4 else array.dtype).astype(np.longdouble)


def exact_sum(a: Any, b: Any) -> np.ndarray:
    """a + b in long double, rounded to odd: rounding it again to float32 rounds once."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    mantissa, exponent = np.frexp(total)
    even = np.fmod(np.abs(np.ldexp(mantissa, 64)), 2) == 0
    step = np.ldexp(np.longdouble(1), exponent - 64) * np.sign(error)
    return np.where(np.isfinite(total) & (error != 0) & even, total + step, total)


def spread(groups: np.ndarray, k: int) -> np.ndarray:
    """Groups of the last axis repeated over its `k` columns."""
    size, rest = divmod(k, groups.shape[-1])
    if rest:
        raise ValueError("groups do not divide the row")
    return np.repeat(groups, size, axis=-1)


def e8m0(scales: np.ndarray) -> np.ndarray:
    exponents = scales.view(np.uint8).astype(np.int64)
    return np.where(exponents == 255, np.nan, np.ldexp(np.longdouble(1), exponents - 127))


def integer(value: Any, *allowed: int) -> int:
    if type(value) is not int or value not in allowed:
        raise ValueError("no known number")
    return value


def gptq(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    bits = integer(config["bits"], 2, 3, 4, 8)
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2") or "dynamic" in config:
        raise ValueError("another version")
    codes = fields(np.ascontiguousarray(t["qweight"].T), bits)
    zeros = fields(t["qzeros"], bits)
    if form == "gptq" and zeros.max() + 1 == 1 << bits:
        raise ValueError("AutoGPTQ and GPTQModel differ in a zero point of 2^bits")
    zeros = zeros + (form == "gptq")
    index = t["g_idx"]
    if index.min() < 0 or codes.shape[-1] != len(index):
        raise ValueError("no index of groups")
    return (codes - zeros[index].T) * wide(t["scales"])[index].T


def awq(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    integer(config["bits"], 4)
    if config.get("version") != "gemm" or config.get("zero_point") is not True:
        raise ValueError("another version")

    def columns(words: np.ndarray) -> np.ndarray:
        out = np.empty((*words.shape, 8), np.int64)
        for i, column in enumerate(AWQ_ORDER):
            out[..., column] = words.view(np.uint32) >> 4 * i & 15
        return out.reshape(words.shape[0], -1).T

    codes = columns(t["qweight"])
    k = codes.shape[-1]
    if config["group_size"] != -1 and k % config["group_size"]:
        raise ValueError("AutoAWQ has no last group that is shorter")
    return (codes - spread(columns(t["qzeros"]), k)) * spread(wide(t["scales"]).T, k)


def compressed_tensors(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    [group] = config["config_groups"].values()
    weights = group["weights"]
    scale = t["weight_scale"]
    if weights["type"] == "float":
        integer(weights["num_bits"], 4)
        if ("weight_global_scale" in t) == (scale.dtype == np.uint8):
            raise ValueError("scales of another format")
        codes = fields(t["weight_packed"], 4)
        if "weight_global_scale" in t:
            return E2M1[codes] * spread(wide(scale), codes.shape[-1]) / wide(t["weight_global_scale"])
        return E2M1[codes] * spread(e8m0(scale), codes.shape[-1])
    bits = integer(weights["num_bits"], 4, 8)
    rows, k = map(int, t["weight_shape"])
    codes = fields(t["weight_packed"], bits)[:, :k]
    if codes.shape != (rows, k):
        raise ValueError("another shape")
    zeros: Any = 1 << (bits - 1)
    if "weight_zero_point" in t:
        zeros = spread(fields(np.ascontiguousarray(t["weight_zero_point"].T), bits)[:, :rows].T, k)
    elif weights.get("symmetric") is not True:
        raise ValueError("no zero points")
    if "weight_g_idx" in t:
        raise ValueError("reordered")
    return (codes - zeros) * spread(wide(scale), k)


def modelopt(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    codes = fields(t["weight"], 4)
    if (config.get("quantization") or config).get("quant_algo") not in ("NVFP4", "MXFP4") or t["weight"].dtype != np.uint8:
        raise ValueError("another algorithm")
    if "weight_scale_2" in t:
        return E2M1[codes] * spread(wide(t["weight_scale"]), codes.shape[-1]) * wide(t["weight_scale_2"])
    return E2M1[codes] * spread(e8m0(t["weight_scale"]), codes.shape[-1])


def mlx(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    config = config.get("quantization", config)
    mode = config.get("mode", "affine")
    bits = integer(config["bits"], 2, 3, 4, 5, 6, 8)
    codes = fields(t["weight"], bits)
    k = codes.shape[-1]
    if mode == "affine":
        return exact_sum(codes * spread(wide(t["scales"]), k), spread(wide(t["biases"]), k))
    integer(bits, 4)
    if mode == "mxfp4":
        return E2M1[codes] * spread(e8m0(t["scales"]), k)
    raise ValueError("another mode")


def bitsandbytes(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    [state] = [json.loads(a.tobytes()) for s, a in t.items() if "quant_state.bitsandbytes__" in s]
    if "nested_absmax" in " ".join(t):
        raise ValueError("nested scales")
    if zlib.crc32(t["weight.quant_map"].tobytes()) not in BITSANDBYTES_TABLES:
        raise ValueError("its kernels have their own table, whatever the file has")
    packed = t["weight"].reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1, integer(state["blocksize"], 64, 128, 256, 4096))
    return (wide(t["weight.quant_map"])[codes] * wide(t["weight.absmax"])[:, None]).reshape(state["shape"])


def hqq(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    given = config["quant_config"]["weight_quant_params"]
    integer(given["nbits"], 4), integer(given["axis"], 1)
    codes = np.concatenate([t["W_q"] >> 4, t["W_q"] & 15]).astype(np.int64)
    zeros = wide(t["zero"])
    magnitudes = np.abs(zeros[zeros != 0])
    if magnitudes.size and not (magnitudes.min() > 2**-12 and magnitudes.max() < 2**12):
        raise ValueError("differences that need more bits than a long double has")
    return ((codes - zeros) * wide(t["scale"])).reshape(-1)


def torchao(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    data, scale = t["weight_qdata"], t["weight_scale"]
    if "weight_zero_point" in t:
        k = data.shape[-1]
        return (data.astype(np.int64) - spread(t["weight_zero_point"].astype(np.int64), k)) * spread(wide(scale), k)
    codes = fields(data, 4)
    k = codes.shape[-1]
    if data.dtype != np.uint8 or k != scale.shape[-1] * (32 if scale.dtype == np.uint8 else 16):
        raise ValueError("another format")
    if scale.dtype == np.uint8:
        return E2M1[codes] * spread(e8m0(scale), k)
    return E2M1[codes] * spread(wide(scale), k) * wide(t.get("weight_per_tensor_scale", np.float32(1)))


def gpt_oss(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    blocks, scales = t["_blocks"], t["_scales"]
    codes = fields(blocks, 4)
    values = E2M1[codes] * e8m0(scales)[..., None]
    return values.reshape(*blocks.shape[:2], -1)


def onnxruntime(t: Tensors, config: dict[str, Any]) -> np.ndarray:
    codes = fields(t["weight_Q4"], 4)
    rows, blocks, _ = codes.shape
    zeros = fields(t["weight_zero_points"], 4)[:, :blocks] if "weight_zero_points" in t else np.full((rows, blocks), 8)
    return ((codes - zeros[..., None]) * wide(t["weight_scales"])[..., None]).reshape(rows, -1)


PRODUCERS: dict[str, Callable[[Tensors, dict[str, Any]], np.ndarray]] = {
    "autogptq": gptq, "gptqmodel": gptq, "autoawq": awq, "compressed-tensors": compressed_tensors, "modelopt": modelopt,
    "mlx": mlx, "bitsandbytes": bitsandbytes, "hqq": hqq, "torchao": torchao, "transformers-mxfp4": gpt_oss,
    "onnxruntime": onnxruntime,
}  # fmt: skip
"""Folder of the golden files -> the producer's decoder."""


def decode(producer: str, module: str, tensors: Tensors, config: dict[str, Any]) -> np.ndarray | None:
    """The values of one module of a file, or None (see above)."""
    own = {
        n[len(module) + 1 :] if n[len(module)] == "." else n[len(module) :]: a
        for n, a in tensors.items()
        if n.startswith(module) and len(n) > len(module) and n[len(module)] in "._"
    }
    try:
        with np.errstate(all="ignore"):
            return PRODUCERS[producer](own, config).astype(np.float32)
    except (KeyError, ValueError, IndexError, TypeError, AttributeError, OverflowError):
        return None
