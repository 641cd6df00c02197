"""Safetensors files made by hand for tests, right ones and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.checkpoints.safetensors.writer import WORDS

MLX = {"quantization": {"group_size": 32, "bits": 4}}
A, B = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def raw_file(path: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header text, its length told truly or as `length`."""
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Path:
    """A well-formed file, written independently of the library's own writer."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, array in tensors.items():
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        header[name] = entry(WORDS[array.dtype], list(array.shape), len(data), len(data) + array.nbytes)
        data += array.tobytes()
    return raw_file(path, json.dumps(header), data)


def mlx_weight(n: int = 8, k: int = 64, bits: int = 4, group: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of an MLX affine weight, by suffix."""
    rng = np.random.default_rng(seed)
    groups = k // group
    return {
        "weight": rng.integers(0, 1 << 32, (n, k * bits // 32), dtype=np.uint32),
        "scales": rng.uniform(0.01, 0.02, (n, groups)).astype(np.float16),
        "biases": rng.uniform(-0.1, 0.0, (n, groups)).astype(np.float16),
    }


def gptq_weight(
    n: int = 16, k: int = 64, bits: int = 4, group: int = 32, stored_zero: int = 7, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random tensors of a GPTQ weight, every stored zero point alike, by suffix."""
    rng = np.random.default_rng(seed)
    word = sum(stored_zero << (bits * i) for i in range(32 // bits))
    return {
        "qweight": rng.integers(-(1 << 31), 1 << 31, (k * bits // 32, n), dtype=np.int64).astype(np.int32),
        "qzeros": np.full((k // group, n * bits // 32), word, np.uint32).view(np.int32),
        "scales": rng.uniform(0.01, 0.02, (k // group, n)).astype(np.float16),
        "g_idx": (np.arange(k) // group).astype(np.int32),
    }


def under(module: str, tensors: Mapping[str, np.ndarray], joint: str = ".") -> dict[str, np.ndarray]:
    """Tensors by suffix -> by name."""
    return {f"{module}{joint}{suffix}": array for suffix, array in tensors.items()}


def folder(path: Path, shards: Mapping[str, Mapping[str, np.ndarray]], config: Any = None, index: Any = None) -> Path:
    """A checkpoint folder. `index` True writes the weight_map of `shards`; a dict is written as the
    weight_map.
    """
    path.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write(path / name, tensors)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if index is not None:
        weight_map = {t: s for s, tensors in shards.items() for t in tensors} if index is True else index
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
        )
    return path


def two_shards(path: Path, index: object = True) -> Path:
    """Two modules in two shards; the second module's biases lie in the first shard."""
    first, second = under(A, mlx_weight(seed=1)), under(B, mlx_weight(seed=2))
    first[f"{B}.biases"] = second.pop(f"{B}.biases")
    return folder(path, dict(zip(SHARDS, (first, second), strict=True)), MLX, index)
