"""Reading a producer's golden file without the library: its packed tensors, config and the
producer's own answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "I32": np.int32, "U32": np.uint32,
    "I64": np.int64,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


class Case(NamedTuple):
    """metadata strings, the config dict, packed tensors, references by variant ("" for the plain
    one), original weights.
    """

    metadata: dict[str, str]
    config: dict
    tensors: dict[str, np.ndarray]
    references: dict[str, np.ndarray]
    originals: dict[str, np.ndarray]


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a safetensors file, after its format's own description."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        tensors[name] = np.frombuffer(raw[start + a : start + b], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


def read_case(path: Path, prefix: str = "model.layers.0.mlp.down_proj.") -> Case:
    """A single-tensor case, its tensors keyed by what follows the module's path."""
    metadata, tensors = read_tensors(path)
    packed, references, originals = {}, {}, {}
    for name, array in tensors.items():
        kind, _, weight = name.rpartition("::")
        if kind == "ref":
            references[weight.partition("@")[2]] = array
        elif kind == "orig":
            originals[weight.partition("@")[2]] = array
        else:
            packed[name.removeprefix(prefix)] = array
    return Case(metadata, json.loads(metadata.get("quantization_config", "{}")), packed, references, originals)


def files(*producers: str) -> list[Path]:
    """The single-tensor files of these producers."""
    found = [path for producer in producers for path in sorted((GOLDEN / producer).glob("*.safetensors"))]
    assert found, producers
    return found


def label(path: Path) -> str:
    """Test id of a file."""
    return f"{path.parent.name}/{path.stem}"


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Equality of dtype, shape and bits, but any NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    bits = np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(b).view(unsigned)
    return bool((bits | (np.isnan(a) & np.isnan(b))).all())


def same_tensors(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Equality of names, dtypes, shapes and bytes."""
    return a.keys() == b.keys() and all(
        a[s].dtype == b[s].dtype and a[s].shape == b[s].shape and a[s].tobytes() == b[s].tobytes() for s in a
    )
