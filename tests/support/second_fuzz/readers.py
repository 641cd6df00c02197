"""Checkpoints that are whole, or have one fact that contradicts another, and the values read.

A checkpoint is drawn with its values: the codes are packed here, after the producers' documents,
and the decoded matrix is computed here, so that nothing of the library says what is right. A whole
one has to be read, with these values. Of one with a contradiction every command must refuse the
file, or the library gives these values all the same.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

import halfbyte as hb
from halfbyte.errors import HalfbyteError

from . import sandbox

Array = NDArray[Any]
Rng = np.random.Generator
NAMES: dict[Any, str] = {
    np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float64): "F64", np.dtype(np.uint8): "U8", np.dtype(np.int8): "I8", np.dtype(np.int32): "I32",
    np.dtype(np.uint32): "U32", np.dtype(np.int64): "I64", np.dtype(np.int16): "I16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3", np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
}  # fmt: skip
ODD = (0.0, -0.0, np.inf, -np.inf, np.nan, 6e-8, -65504.0, 1.0)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)  # fmt: skip
SECRET = np.float32(12345.678)
"""The value of a tensor outside the checkpoint's folder."""


def pick(rng: Rng, pool: Any) -> Any:
    return pool[int(rng.integers(len(pool)))]


@dataclass
class Model:
    """Files as they will be written, and what each key has to give.

    tensors  name -> array, in the order of the file
    values   key of the checkpoint -> its values in float32
    """

    layout: str
    tensors: dict[str, Array] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    shards: int = 1

    def put(self, name: str, values: Array, **parts: Array) -> None:
        self.tensors |= {f"{name}.{part}": array for part, array in parts.items()}
        with np.errstate(over="ignore", invalid="ignore"):
            self.values[name] = np.asarray(values, np.float32)


def scales(rng: Rng, *shape: int, dtype: Any = np.float16) -> Array:
    """Scales of ordinary sizes, now and then with values that a producer writes by a fault."""
    found = (2.0 ** rng.integers(-9, 4, shape) * rng.choice([1, 1.25, -1.5], shape)).astype(dtype)
    if rng.random() < 0.15:
        found.reshape(-1)[int(rng.integers(found.size))] = pick(rng, ODD)
    return found


def words(codes: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Eight 4-bit codes of the last axis a 32-bit word, code order[i] at bit 4 i."""
    grouped = codes.reshape(*codes.shape[:-1], -1, 8)[..., list(order)].astype(np.uint64)
    return (grouped << (4 * np.arange(8, dtype=np.uint64))).sum(-1).astype(np.uint32)


def spread(values: Array, group: int) -> Array:
    return np.repeat(values.astype(np.float64), group, -1)


def gptq(rng: Rng, model: Model, name: str, n: int, k: int, g: int) -> None:
    q, z, s = rng.integers(0, 16, (n, k)), rng.integers(1, 17, (n, k // g)), scales(rng, n, k // g)
    groups = np.arange(k) // g
    if model.config["quantization_config"]["desc_act"]:
        groups = rng.permutation(groups)
    values = (q - z[:, groups].astype(np.float64)) * s.astype(np.float64)[:, groups]
    model.put(name, values, qweight=words(q).T.astype(np.int32), qzeros=words((z - 1).T).astype(np.int32),
              scales=np.ascontiguousarray(s.T), g_idx=groups.astype(np.int32))  # fmt: skip


def awq(rng: Rng, model: Model, name: str, n: int, k: int, g: int) -> None:
    q, z, s = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // g)), scales(rng, n, k // g)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    model.put(name, (q - spread(z, g)) * spread(s, g), qweight=words(q.T, order).astype(np.int32),
              qzeros=words(z.T, order).astype(np.int32), scales=np.ascontiguousarray(s.T))  # fmt: skip


def mlx(rng: Rng, model: Model, name: str, n: int, k: int, g: int) -> None:
    q, s, b = rng.integers(0, 16, (n, k)), scales(rng, n, k // g), scales(rng, n, k // g)
    model.put(name, q * spread(s, g) + spread(b, g), weight=words(q), scales=s, biases=b)


def packed(rng: Rng, model: Model, name: str, n: int, k: int, g: int) -> None:
    q, s = rng.integers(-8, 8, (n, k)), scales(rng, n, k // g, dtype=pick(rng, (np.float16, ml_dtypes.bfloat16)))
    model.put(name, q * spread(s, g), weight_packed=words(q + 8).astype(np.int32), weight_scale=s,
              weight_shape=np.array([n, k], np.int64))  # fmt: skip


def nvfp4(rng: Rng, model: Model, name: str, n: int, k: int, g: int) -> None:
    q, whole = rng.integers(0, 16, (n, k)), np.array([2.0 ** rng.integers(0, 9)], np.float32)
    s = rng.integers(0, 127, (n, k // 16)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    model.put(name, E2M1[q] * spread(s, 16) / whole.astype(np.float64), weight_scale=s, weight_global_scale=whole,
              weight_packed=(q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8))  # fmt: skip


def fp8(rng: Rng, model: Model, name: str, n: int, k: int, g: int) -> None:
    w = rng.integers(0, 256, (n, k)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    s = scales(rng, -(-n // g), -(-k // g), dtype=np.float32)
    every = np.repeat(np.repeat(s.astype(np.float64), g, 0)[:n], g, 1)[:, :k]
    model.put(name, w.astype(np.float64) * every, weight=w, weight_scale_inv=s)


def bitsandbytes(rng: Rng, model: Model, name: str, n: int, k: int, g: int) -> None:
    q, absmax = rng.integers(0, 16, n * k), np.abs(scales(rng, n * k // 64, dtype=np.float32))
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [n, k]}
    raw = np.frombuffer(json.dumps(state).encode(), np.uint8)
    values = NF4[q].astype(np.float64).reshape(-1, 64) * absmax.astype(np.float64)[:, None]
    model.put(name, values.reshape(n, k), weight=(q[::2] << 4 | q[1::2]).astype(np.uint8)[:, None],
              **{"weight.absmax": absmax, "weight.quant_map": NF4, "weight.quant_state.bitsandbytes__nf4": raw})  # fmt: skip


def weights(**more: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **more}


def compressed(kind: str, described: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": described}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": []}


LAYOUTS: dict[str, tuple[Callable[[Rng, Model, str, int, int, int], None], Callable[[Rng, int], dict[str, Any]]]] = {
    "gptq": (gptq, lambda rng, g: {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": g, "sym": False,
             "desc_act": bool(rng.integers(2)), "checkpoint_format": "gptq"}}),
    "awq": (awq, lambda rng, g: {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": g,
            "zero_point": True, "version": "gemm"}}),
    "mlx": (mlx, lambda rng, g: {"quantization": {"group_size": g, "bits": 4}}),
    "compressed-tensors": (packed, lambda rng, g: {"quantization_config": compressed("pack-quantized", weights(group_size=g))}),
    "nvfp4": (nvfp4, lambda rng, g: {"quantization_config": compressed("nvfp4-pack-quantized",
              weights(type="float", strategy="tensor_group", group_size=16))}),
    "fp8": (fp8, lambda rng, g: {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
            "weight_block_size": [g, g], "activation_scheme": "dynamic"}}),
    "bitsandbytes": (bitsandbytes, lambda rng, g: {"quantization_config": {"quant_method": "bitsandbytes",
                     "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
                     "bnb_4bit_compute_dtype": "float16"}}),
}  # fmt: skip


def drawn(rng: Rng) -> Model:
    """A whole checkpoint of a few weights of one layout and some dense tensors."""
    layout = str(pick(rng, list(LAYOUTS)))
    put, config = LAYOUTS[layout]
    g = int(pick(rng, (32, 64, 128)))
    model = Model(layout, config=config(rng, g), shards=int(pick(rng, (1, 1, 2, 3))))
    for i in range(int(rng.integers(1, 4))):
        n, k = 8 * int(rng.integers(1, 9)), 128 * int(rng.integers(1, 4))
        put(rng, model, f"model.layers.{i}.mlp.{pick(rng, ('up_proj', 'down_proj'))}", n, k, g)
    for i in range(int(rng.integers(1, 4))):
        dtype = pick(rng, (np.float32, np.float16, ml_dtypes.bfloat16))
        norm = rng.standard_normal(int(rng.integers(1, 40))).astype(dtype)
        model.tensors[f"model.layers.{i}.input_layernorm.weight"] = norm
        model.values[f"model.layers.{i}.input_layernorm.weight"] = norm.astype(np.float32)
    names = list(model.tensors)
    rng.shuffle(names)
    model.tensors = {name: model.tensors[name] for name in names}
    return model


def header_of(tensors: dict[str, Array]) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    body = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    return header, body


def file_of(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def write(rng: Rng, model: Model, folder: Path) -> list[Path]:
    """The checkpoint as a folder; its files of tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config, indent=int(pick(rng, (0, 2)))))
    names = list(model.tensors)
    if model.shards == 1:
        (folder / "model.safetensors").write_bytes(file_of(*header_of(model.tensors)))
        return [folder / "model.safetensors"]
    of = {name: f"model-{int(rng.integers(model.shards)) + 1:05d}-of-{model.shards:05d}.safetensors" for name in names}
    for shard in sorted(set(of.values())):
        (folder / shard).write_bytes(file_of(*header_of({n: model.tensors[n] for n in names if of[n] == shard})))
    index = {"metadata": {"total_size": sum(a.nbytes for a in model.tensors.values())}, "weight_map": of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / shard for shard in sorted(set(of.values()))]


# ---- contradictions: each changes what was written, and says what it did


def parts(model: Model) -> list[str]:
    """Tensors of packed weights."""
    return [n for n in model.tensors if not n.endswith("input_layernorm.weight")]


def rewritten(rng: Rng, files: list[Path], change: Callable[[dict[str, Any], bytes], tuple[Any, bytes]]) -> None:
    file = pick(rng, files)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes(file_of(*change(json.loads(raw[8 : 8 + length]), raw[8 + length :])))


def a_part_is_gone(rng: Rng, model: Model, folder: Path, files: list[Path]) -> str:
    optional = ("g_idx",)  # a model without activation order has none
    name = str(pick(rng, [n for n in parts(model) if not n.endswith(optional)]))
    for file in files:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        if name in json.loads(raw[8 : 8 + length]):
            held = [n for n in json.loads(raw[8 : 8 + length]) if n != name]
            file.write_bytes(file_of(*header_of({n: model.tensors[n] for n in held})))
    index = folder / "model.safetensors.index.json"
    if index.exists() and rng.integers(2):
        value = json.loads(index.read_text())
        del value["weight_map"][name]
        index.write_text(json.dumps(value))
    return f"{name} is gone"


def an_entry_lies(rng: Rng, model: Model, folder: Path, files: list[Path]) -> str:
    said = []

    def change(header: dict[str, Any], body: bytes) -> tuple[Any, bytes]:
        entry = header[name := str(pick(rng, list(header)))]
        what = int(rng.integers(6))
        if what == 0:
            entry["data_offsets"][int(rng.integers(2))] += int(pick(rng, (-1, 1, 4, 1 << 40, -(1 << 40))))
        elif what == 1:
            axis = int(rng.integers(len(entry["shape"])))
            entry["shape"][axis] += int(pick(rng, (-1, 1, 8, 1 << 62)))
        elif what == 2:
            sizes = {"F32": "F64", "F16": "I64", "BF16": "F32", "I32": "I16", "U32": "I8", "U8": "I16", "F8_E4M3": "F16"}
            entry["dtype"] = sizes.get(entry["dtype"], pick(rng, ("F4", "X", "", "I32 ")))
        elif what == 3:
            entry[str(pick(rng, list(entry)))] = pick(rng, (None, "x", -1, [], {}, [[1]], [1.5], True, 1e400))
        elif what == 4:
            del entry[str(pick(rng, list(entry)))]
        else:
            header[name + str(pick(rng, ("\0", "\n", "/../x", "x" * 300)))] = dict(entry)
        said.append(f"{name}: {entry}")
        return header, body

    rewritten(rng, files, change)
    return f"an entry of a header lies: {said}"


def a_header_is_none(rng: Rng, model: Model, folder: Path, files: list[Path]) -> str:
    kind = int(rng.integers(8))

    def change(header: dict[str, Any], body: bytes) -> tuple[Any, bytes]:
        text = json.dumps(header).encode()
        return pick(
            rng,
            [
                (b"[" * 100_000, body), (text[:-1], body), (text + b"x", body), (b"\xff" + text, body), (b"", body),
                (b'{"a":' * 5000 + b"1" + b"}" * 5000, body), (text[:-1] + b"," + text[1:], body), (b"null", body),
            ],
        )  # fmt: skip

    if kind < 4:
        rewritten(rng, files, change)
    else:
        file = pick(rng, files)
        raw = file.read_bytes()
        file.write_bytes(
            [
                raw[: int(rng.integers(len(raw)))], raw + b"\0" * int(rng.integers(1, 9)), struct.pack("<Q", 1 << 63) + raw[8:],
                struct.pack("<Q", int.from_bytes(raw[:8], "little") + int(pick(rng, (-1, 1, 8)))) + raw[8:],
            ][kind - 4]
        )  # fmt: skip
    return f"a header is none ({kind})"


def a_file_is_something_else(rng: Rng, model: Model, folder: Path, files: list[Path]) -> str:
    file = pick(rng, [*files, folder / "config.json"])
    file.unlink()
    kind = str(pick(rng, ("gone", "a folder", "a pipe", "a link to itself", "a link outside", "empty", "a pickle")))
    if kind == "a folder":
        file.mkdir()
    elif kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a link to itself":
        file.symlink_to(file.name)
    elif kind == "a link outside":
        file.symlink_to(folder.parent / "secret.safetensors")
    elif kind != "gone":
        file.write_bytes(b"" if kind == "empty" else b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00exit\x85R.")
    return f"{file.name} is {kind}"


def an_index_lies(rng: Rng, model: Model, folder: Path, files: list[Path]) -> str:
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text()) if index.exists() else {"weight_map": dict.fromkeys(model.tensors, files[0].name)}
    name = str(pick(rng, list(model.tensors)))
    outside = str(folder.parent / "secret.safetensors")
    value["weight_map"][name] = pick(
        rng, ("../secret.safetensors", outside, "./../" + folder.name + "/../secret.safetensors", "none.safetensors", "", 5, None,
              "..\\secret.safetensors", "x" * 300, "config.json", ".", "\0", {"a": 1}, "file://" + outside),
    )  # fmt: skip
    index.write_text(json.dumps(value))
    return f"the index has {name} in {value['weight_map'][name]!r}"


def a_config_contradicts(rng: Rng, model: Model, folder: Path, files: list[Path]) -> str:
    config = json.loads(json.dumps(model.config))
    [(top, inner)] = config.items()
    where = [(inner, k) for k in inner]
    if "config_groups" in inner:
        where += [(inner["config_groups"]["group_0"]["weights"], k) for k in inner["config_groups"]["group_0"]["weights"]]
    place, key = where[int(rng.integers(len(where)))]
    kind = int(rng.integers(3))
    if kind == 0:
        place[key] = pick(rng, (None, "x", -1, 0, 3, 8, 2**40, [], {}, [4], True, 4.5, "4", float("nan"), [0, 0], ["re:(a+)+$"]))
    elif kind == 1:
        del place[key]
    else:
        place["nothing_known"] = place.pop(key)
    (folder / "config.json").write_text(json.dumps(config))
    return f"{top}: {key} becomes {place.get(key, 'gone')!r}"


CONTRADICTIONS = (
    a_part_is_gone, an_entry_lies, an_entry_lies, a_header_is_none, a_file_is_something_else, an_index_lies, a_config_contradicts,
    a_config_contradicts,
)  # fmt: skip


# ---- GGUF


def text_of(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf(rng: Rng, path: Path) -> tuple[dict[str, Array], bool, str]:
    """(values, whether the file is whole, what was changed) of a GGUF that is written here."""
    types = [
        GGMLQuantizationType[n] for n in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    ]
    types += [GGMLQuantizationType[n] for n in ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")]
    align, values, entries, body = int(pick(rng, (32, 32, 64, 8))), {}, [], b""
    for i in range(int(rng.integers(1, 6))):
        kind, n, k = pick(rng, types), int(rng.integers(1, 9)), 256 * int(rng.integers(1, 3))
        if kind.name in ("F32", "F16", "BF16"):
            dense = rng.standard_normal((n, k)).astype(np.float32)
            raw = quants.quantize(dense, kind).tobytes()
            values[f"blk.{i}.ffn_up.weight"] = quants.dequantize(quants.quantize(dense, kind), kind).astype(np.float32)
        else:
            size = k // 256 * 256 // {32: 32, 256: 256}[quants.GGML_QUANT_SIZES[kind][0]] * quants.GGML_QUANT_SIZES[kind][1]
            blocks = rng.integers(0, 256, (n, size)).astype(np.uint8)
            flat = blocks.reshape(-1, quants.GGML_QUANT_SIZES[kind][1])
            ends = {"Q6_K": [(-2, None)], "Q3_K": [(-2, None)], "Q2_K": [(-4, -2), (-2, None)]}
            for begin, end in ends.get(
                kind.name, [(0, 2), (2, 4)] if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [(0, 2)]
            ):
                flat[:, begin:end] = scales(rng, len(flat)).view(np.uint8).reshape(-1, 2)
            raw = blocks.tobytes()
            with np.errstate(all="ignore"):
                values[f"blk.{i}.ffn_up"] = quants.dequantize(blocks, kind)
        entries.append((f"blk.{i}.ffn_up.weight", (k, n), int(kind), len(body)))
        body += raw + bytes(-len(raw) % align)
    pairs = {"general.architecture": "nothing", "general.alignment": align, "general.name": "a file of the fuzzer"}
    whole, what = bool(rng.integers(2)), "whole"
    count, keys, magic, version = len(entries), len(pairs), b"GGUF", 3
    if not whole:
        kind_ = int(rng.integers(7))
        at = int(rng.integers(len(entries)))
        name, dims, type_, offset = entries[at]
        extreme = int(pick(rng, (0, 1, 3, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
        if kind_ == 0:
            count += int(pick(rng, (-1, 1, 2**40)))
        elif kind_ == 1:
            keys += int(pick(rng, (-1, 1, 2**40)))
        elif kind_ == 2:
            entries[at] = (name, (extreme, dims[1]) if rng.integers(2) else (dims[0], extreme), type_, offset)
        elif kind_ == 3:
            entries[at] = (name, dims, int(pick(rng, (4, 5, 31, 36, 50, 2**31))), offset)
        elif kind_ == 4:
            entries[at] = (name, dims, type_, int(pick(rng, (offset + 1, 2**62, 2**64 - 32, offset + len(body)))))
        elif kind_ == 5:
            entries.append(entries[at])
            count += 1
        else:
            body = body[: -int(rng.integers(align, align + 40))]
        what = f"contradiction {kind_}: {entries[at] if at < len(entries) else ''} {extreme}"
    head = magic + struct.pack("<IQQ", version, count, keys)
    for key, value in pairs.items():
        head += text_of(key) + (struct.pack("<I", 8) + text_of(value) if isinstance(value, str) else struct.pack("<II", 4, value))
    for name, dims, type_, offset in entries:
        head += text_of(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)
    path.write_bytes(head + bytes(-len(head) % align) + body)
    return values, whole, what


# ---- the verdict


def read(path: Path) -> dict[str, Array]:
    """Every key's values in float32; HalfbyteError where a command would refuse the file."""
    found = {}
    with hb.open(path) as checkpoint:
        for key in checkpoint:
            value: Any = checkpoint[key]
            found[key] = value.dequantize("float32") if isinstance(value, hb.QTensor) else np.asarray(value).astype(np.float32)
            if isinstance(value, hb.QTensor) and len(value.shape) == 2:
                one = np.zeros((1, value.shape[1]), np.float32)
                one[0, (at := value.shape[1] // 3)] = 1
                if np.isfinite(found[key]).all():
                    got = hb.linear(one, value)[0]
                    assert np.array_equal(got, found[key][:, at]), f"{key}: a product with a one-hot row gives other values"
        refusals = [f for f in checkpoint.findings(data=True) if f.severity == "error"]
        if refusals or checkpoint.ledger().problems:
            raise HalfbyteError(f"[inspect] {path}: {refusals or checkpoint.ledger().problems}")
    return found


def compare(found: dict[str, Array], values: dict[str, Array]) -> list[str]:
    problems = []
    for key, want in values.items():
        got = found.get(key)
        if got is None:
            problems.append(f"{key} is not there; {sorted(found)[:9]} are")
        elif got.shape != want.shape or not np.array_equal(got, want, equal_nan=True):
            at = np.argwhere(~((got == want) | (np.isnan(got) & np.isnan(want))))[:1] if got.shape == want.shape else "shape"
            problems.append(f"{key} has other values at {at}")
    if any(np.any(array == SECRET) for array in found.values()):
        problems.append("a file outside the folder was read")
    return problems


BATCH = 60
MEGABYTES = 300


def batch(seed: int, count: int, work: Path) -> list[tuple[int, str, list[str]]]:
    """(seed, case, problems) of the cases of `count` seeds that have problems."""
    found = []
    for i in range(seed, seed + count):
        folder = work / "reading"
        folder.mkdir()
        begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        what, problems = one(i, folder)
        if (took := time.process_time() - begin) > 5:
            problems.append(f"took {took:.1f} s")
        if (grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024) > MEGABYTES:
            problems.append(f"took {grown:.0f} MB")
        if problems:
            found.append((i, what, problems))
        shutil.rmtree(folder)
    return found


def reading(rng: Rng, writer: Any, work: Path) -> tuple[str, list[str]]:
    """Cases of this module in a child; those of a child that ends are run again, each in its own."""
    seed = int(rng.integers(1 << 60))
    outcome = sandbox.run(batch, seed, BATCH, work)
    if outcome.kind == "value":
        found = outcome.value
    else:
        found = []
        for i in range(seed, seed + BATCH):
            shutil.rmtree(work / "reading", ignore_errors=True)
            alone = sandbox.run(batch, i, 1, work)
            found += alone.value if alone.kind == "value" else [(i, alone.kind, [str(alone.value)[-1500:]])]
        found = found or [(seed, outcome.kind, [str(outcome.value)[-1500:]])]
    return f"{BATCH} checkpoints from seed {seed}", [f"seed {i}: {what}: {p}" for i, what, ps in found for p in ps]


def one(seed: int, work: Path) -> tuple[str, list[str]]:
    """What the case of a seed is, and its problems."""
    rng = np.random.default_rng(seed)
    if rng.random() < 0.4:
        values, whole, what = gguf(rng, path := work / "model.gguf")
        model = None
    else:
        model, whole, what = drawn(rng), bool(rng.integers(2)), "whole"
        values, path = model.values, work / "in"
        (work / "secret.safetensors").write_bytes(file_of(*header_of({"secret": np.full(4, SECRET)})))
        files = write(rng, model, path)
        if not whole:
            what = str(pick(rng, CONTRADICTIONS)(rng, model, path, files))
    what = f"{model.layout if model else 'gguf'}: {what}"
    try:
        found = read(path)
    except HalfbyteError as error:
        refusal = str(error)
        named = any(part in refusal for part in (str(path), *values))
        odd = "non-finite-scale" in refusal and any(not np.isfinite(v).all() for v in values.values())
        return what, [f"a whole checkpoint is refused: {refusal[:500]}"] * (whole and not odd) + [
            f"nothing is named: {refusal[:300]}"
        ] * (not named)
    return what, compare(found, values)
