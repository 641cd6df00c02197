"""2:4 sparse weights of compressed-tensors: python sparse_write.py FILE, in the environment
`compressed-tensors-sparse`, writes tests/data/compressed_tensors_sparse.safetensors.

Modules of each kind as the package's own compressors write them, and beside each its dense values
by the package's own decompressor: `want.MODULE`. Marlin has none; its integers are the quantized
ones from before the compression.
"""

from __future__ import annotations

import sys
from pathlib import Path

from compressed_tensors.compressors.sparse_compressors import Sparse24BitMaskCompressor
from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import get_24_bytemasks
from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import BitmaskCompressor
from compressed_tensors.compressors.sparse_quantized_compressors.marlin_24 import Marlin24Compressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from safetensors.torch import save_file

import torch

MARLIN = {"int4-g128": (4, "group", 384), "int4-channel": (4, "channel", 64), "int8-g128": (8, "group", 256)}
"""Name -> bits, strategy and inputs, of 64 outputs."""


def pruned(n: int, k: int, seed: int) -> torch.Tensor:
    """A matrix with two values in each four inputs, or fewer."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    w = w * get_24_bytemasks(w)
    w[3, 8:12], w[5, 4:8] = 0, torch.tensor([0, 0, 1.5, 0])
    return w


def masks() -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for word, dtype in {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "f32": torch.float32}.items():
        w = (pruned(8, 20, 1) * (20 if dtype == torch.int8 else 1)).to(dtype)
        for kind, compressor in {
            "24": Sparse24BitMaskCompressor(config=Sparse24BitMaskConfig()),
            "any": BitmaskCompressor(config=BitmaskConfig()),
        }.items():
            if dtype == torch.float8_e4m3fn and kind == "any":
                continue  # its compressor cannot compare float8 with 0 on a CPU
            name = f"{kind}-{word}"
            parts = compressor.compress_weight(name, w)
            out |= parts
            out[f"want.{name}"] = compressor.decompress_weight({key.rpartition(".")[2]: t for key, t in parts.items()})
    return out


def marlin() -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, (bits, strategy, k) in MARLIN.items():
        w = pruned(64, k, bits).to(torch.float16)
        groups = 1 if strategy == "channel" else -(-k // 128)
        scale = (0.5 + torch.rand(64, groups, generator=torch.Generator().manual_seed(k))).to(torch.float16) / 2 ** (bits - 2)
        size = 128 if strategy == "group" else None
        args = QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=size, symmetric=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        state = {f"{name}.weight": w, f"{name}.weight_scale": scale}
        out |= Marlin24Compressor().compress(state, {name: scheme})
        out[f"want.{name}"] = quantize(x=w, scale=scale, zero_point=None, args=args).to(torch.int8)
        out[f"scale.{name}"] = scale
    return out


if __name__ == "__main__":
    tensors = {name: t.contiguous() for name, t in (masks() | marlin()).items()}
    save_file(tensors, Path(sys.argv[1]), metadata={"producer": "compressed-tensors 0.14.0.1"})
