"""Fuzzes the readers: structure-aware mutants of small checkpoints, guided by where they are
refused.

    python -m support.fuzz --seconds 60 [--seed 0] [--crashers FOLDER]        (make fuzz SECONDS=60)

A mutant that is refused at a place of the source where none was refused before joins the corpus.
Oracle, for each mutant: only errors of the library; under 5 s of CPU time; under 300 MB above the
base; in an accepted mutant every dense tensor of safetensors files equals the bytes that its header
names, and every tensor of a GGUF gguf-py's values. Packed safetensors weights are decoded, not
compared.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import halfbyte
from halfbyte import quantize
from halfbyte.checkpoints.io.journal import Journal
from halfbyte.checkpoints.safetensors.file import NUMPY_DTYPES
from halfbyte.errors import HalfbyteError
from support.gguf_writer import F32, GGUF, Q4_K, Tensor

SECONDS, MEGABYTES = 5.0, 300
Folder = dict[str, bytes]
WORDS: list[Any] = [
    0, 1, -1, 2**31, 2**63, 2**64, 1e308, float("nan"), True, None, "", "x" * 300, "../x", "\0", "\ud800", [], {}, [[]], {"": {}},
    "F4", "F8_E4M3", "I64", "gptq", "awq", "mlx", "nvfp4", "int", 1 << 200, -(2**53), [1] * 9, "model.safetensors", "é\u202e",
]  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}}}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"group_size": 64, "bits": 4},
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "torchao", "quant_type": {"default": "int4wo"}},
    {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "quark", "global_quant_config": {"weight": {}}},
]  # fmt: skip
"""A quantization config of each producer."""


def seeds(work: Path) -> list[Folder]:
    """Small whole checkpoints: own layout, GPTQ's names under each config, shards and an index, a
    GGUF, a journal.
    """
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8, 128)).astype(np.float32)
    path = work / "seed.safetensors"
    halfbyte.save(path, {"m.q_proj": quantize(w, "int4:g32"), "m.up_proj": quantize(w, "mxfp4"), "n.weight": w[0]})
    own = path.read_bytes()
    packed = {
        "m.q_proj.qweight": rng.integers(-(2**31), 2**31, (16, 8), dtype=np.int32),
        "m.q_proj.qzeros": np.full((1, 1), 0x77777777, np.int32),
        "m.q_proj.scales": np.full((1, 8), 0.01, np.float16), "m.q_proj.g_idx": np.zeros(128, np.int32), "n.weight": w,
    }  # fmt: skip
    from safetensors.numpy import save

    gptq, half = save(packed), save({"n.weight": w})
    index = json.dumps(
        {"metadata": {}, "weight_map": {**dict.fromkeys(packed, "a.safetensors"), "z.weight": "b.safetensors"}}
    ).encode()
    tensors = [
        Tensor("blk.0.attn_q.weight", (256, 2), Q4_K, rng.integers(0, 60, 288, dtype=np.uint8).tobytes()),
        Tensor("output_norm.weight", (64,), F32, w[0, :64].tobytes(), offset=288),
    ]
    pairs = [
        ("general.architecture", "string", "llama"), ("general.alignment", "uint32", 32), ("llama.block_count", "uint32", 1),
        ("tokenizer.chat_template", "string", "{{ messages }}"),
    ]  # fmt: skip
    gguf = GGUF(pairs=pairs, tensors=tensors).bytes()
    journal = Journal(work / "journal", work / "x")
    journal.start([{"work": 1}, {"end": 64, "checksum": 5, "note": None, "entries": [["a", ["F32", [4], 0, 16, 4]]]}])
    out = [
        {"model.safetensors": own}, {"m.gguf": gguf}, {"journal": journal.path.read_bytes()},
        {"a.safetensors": gptq, "b.safetensors": half.replace(b"n.weight", b"z.weight"), "model.safetensors.index.json": index},
    ]  # fmt: skip
    for config in CONFIGS:
        text = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": config}).encode()
        out.append({"model.safetensors": gptq, "config.json": text})
    return out


def mutate_json(value: Any, rng: random.Random) -> Any:
    """One change somewhere in a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind = rng.randrange(6)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {(str(rng.choice(WORDS)) if k == key else k): v for k, v in value.items()}
        if kind == 2:
            return {**value, str(rng.choice(WORDS)): rng.choice(list(value.values()))}
        return {**value, key: mutate_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_json(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return value + rng.choice([-1, 1, 8, -8, 1 << 20, -value, value])
    return rng.choice(WORDS)


def mutate_bytes(data: bytes, rng: random.Random, head: int = 1 << 30) -> bytes:
    """Bits flipped, a cut, a run removed, repeated or overwritten by an extreme number."""
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if not raw:
            break
        at, kind = rng.randrange(min(len(raw), head)), rng.randrange(5)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[at:]
        elif kind == 2:
            del raw[at : at + rng.choice([1, 4, 8])]
        elif kind == 3:
            raw[at:at] = raw[at : at + rng.choice([1, 8, 64])]
        else:
            word = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(raw)]))
            raw[at : at + 8] = word[: rng.choice([1, 4, 8])]
    return bytes(raw)


def mutate(folder: Folder, rng: random.Random) -> Folder:
    """A mutant of a checkpoint."""
    name = rng.choice(list(folder))
    data = folder[name]
    if rng.random() < 0.3:
        return {**folder, name: mutate_bytes(data, rng, 600)}
    if name.endswith(".json"):
        try:
            value = mutate_json(json.loads(data), rng)
            return {**folder, name: json.dumps(value).encode("utf-8", "surrogatepass")}
        except ValueError:
            return {**folder, name: mutate_bytes(data, rng)}
    if name.endswith(".safetensors") and len(data) > 8:
        length = min(int.from_bytes(data[:8], "little"), len(data) - 8)
        try:
            value = mutate_json(json.loads(data[8 : 8 + length]), rng)
        except ValueError:
            return {**folder, name: mutate_bytes(data, rng, 8 + length)}
        head = json.dumps(value).encode("utf-8", "surrogatepass")
        return {**folder, name: struct.pack("<Q", len(head)) + head + data[8 + length :]}
    return {**folder, name: mutate_bytes(data, rng, 500)}


def check_values(path: Path, checkpoint: Any) -> str:
    """ "" or how a dense tensor differs from the bytes that the file's header names."""
    if path.suffix == ".gguf":
        import gguf

        reader = gguf.GGUFReader(path)
        for tensor in reader.tensors:
            key = next((k for k in (tensor.name, tensor.name.removesuffix(".weight")) if k in checkpoint), None)
            if key is None:
                return f"{tensor.name} is not there"
            ours = checkpoint[key]
            ours = ours.dequantize("float32") if hasattr(ours, "dequantize") else np.asarray(ours)
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape)
            if not np.array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), equal_nan=True):
                return f"{tensor.name} differs"
        return ""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name in checkpoint and name != "__metadata__" and isinstance(ours := checkpoint[name], np.ndarray):
            start, stop = entry["data_offsets"]
            theirs = np.frombuffer(raw[8 + length + start : 8 + length + stop], NUMPY_DTYPES[entry["dtype"]])
            if ours.tobytes() != theirs.tobytes():
                return f"{name} differs"
    return ""


def run_one(folder: Folder, work: Path) -> tuple[str, str]:
    """(outcome, detail): "accepted", "refused" with the place of the refusal, or "fault"."""
    for path in work.iterdir():
        path.unlink()
    for name, data in folder.items():
        (work / name).write_bytes(data)
    names = list(folder)
    path = work / names[0] if len(names) == 1 else work
    try:
        if names == ["journal"]:
            Journal(path, work / "x").read()
            return "accepted", ""
        with halfbyte.open(path) as checkpoint:
            checkpoint.header_findings()
            for key in checkpoint:
                checkpoint.info(key)
                value = checkpoint[key]
                if hasattr(value, "dequantize"):
                    value.dequantize("float32")
            files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
            wrong = next(filter(None, (check_values(file, checkpoint) for file in files)), "")
    except HalfbyteError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "refused", f"{Path(frame.filename).name}:{frame.lineno}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return "fault", f"{type(error).__name__} at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {error}"
    return ("fault", wrong) if wrong else ("accepted", "")


def fuzz(seconds: float, seed: int, crashers: Path | None, report: Callable[[str], None] = print) -> dict[str, Any]:
    """A run; returns the counts, and the faults by kind."""
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        corpus = seeds(home)
        work = home / "work"
        work.mkdir()
        for folder in corpus:
            outcome, detail = run_one(folder, work)
            if outcome == "fault":
                raise AssertionError(f"a seed fails: {detail}")
        counts: Counter[str] = Counter()
        places: Counter[str] = Counter()
        faults: dict[str, str] = {}
        slowest, base = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            folder = mutate(rng.choice(corpus), rng)
            start = time.process_time()
            outcome, detail = run_one(folder, work)
            took = time.process_time() - start
            slowest = max(slowest, took)
            counts[outcome] += 1
            if outcome == "refused":
                places[detail] += 1
                if places[detail] == 1:
                    corpus.append(folder)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024
            if took > SECONDS:
                outcome, detail = "fault", f"took {took:.1f} s"
            elif grown > MEGABYTES:
                outcome, detail = "fault", f"took {grown} MB"
                base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if outcome == "fault" and (kind := detail.split(": ")[0]) not in faults:
                faults[kind] = detail
                report(f"fault: {detail}")
                if crashers is not None:
                    target = crashers / f"{len(faults):03d}"
                    target.mkdir(parents=True, exist_ok=True)
                    for file, data in folder.items():
                        (target / file).write_bytes(data)
        total = sum(counts.values())
        return {
            "cases": total, "a_second": round(total / seconds), **counts, "places": len(places), "slowest_s": round(slowest, 2),
            "faults": list(faults.values()),
        }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crashers", type=Path, default=None)
    given = parser.parse_args()
    result = fuzz(given.seconds, given.seed, given.crashers)
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["faults"]))
