"""What is fuzzed: seeds of every kind, and what each kind's mutants are given to.

kind        given to                                               judged by
checkpoint  open, ledger, findings, all values                     the bytes that the header names, `decoders.py`
config      the same, a model that transformers builds on "meta"   the bytes that the header names
gguf        the same                                               gguf-py
journal     Journal.read                                           the lines that were written, up to one of them
resume      a conversion that was interrupted is run again         the bytes of an undisturbed run
vocabulary  the tokenizer of a GGUF header, a text through it      errors of the library only
tokenizer   the tokenizer and config of a folder (transformers)    errors of the library only
template    a chat template rendered                               errors of the library only, the limits
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import halfbyte
from halfbyte import quantize
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.io.journal import Journal
from halfbyte.checkpoints.safetensors.native_layout import OwnLayout
from halfbyte.conversion import convert
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.generation import template_limits as limits
from halfbyte.generation.templates import CHATML, render, token_ids
from support.fuzz.decoders import PRODUCERS, decode
from support.fuzz.mutators import Folder, encoded, written
from support.gguf_writer import BF16, F32, GGUF, MXFP4, NVFP4, Q4_0, Q4_K, Q6_K, Q8_0, Tensor, blocks
from support.golden_case import DTYPES, GOLDEN, read_tensors

ROOT = Path(halfbyte.__file__).parent
PER_PRODUCER = 5
"""Golden files of a producer that are seeds."""
METHODS = {
    "autogptq": "gptq",
    "gptqmodel": "gptq",
    "autoawq": "awq",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "hqq": "hqq",
    "transformers-mxfp4": "mxfp4",
}
"""quant_method that a producer's decoder is for."""
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello {{ 7 * 7 }}"}]


@dataclass(frozen=True)
class Seed:
    """Files of one kind; `producer` names the decoder that judges packed tensors."""

    kind: str
    files: Folder
    producer: str = ""


@dataclass(frozen=True)
class Result:
    """outcome   "accepted", "refused" or "fault"
    detail    the source line that refused, or what is wrong
    compared  tensors whose values an independent decoder gave too
    """

    outcome: str
    detail: str = ""
    compared: int = 0


def safetensors_bytes(tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """A file, written after the format's description alone."""
    words = {np.dtype(v): k for k, v in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, array in tensors.items():
        header[name] = {"dtype": words[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values())


def golden_seeds(producer: str) -> list[Seed]:
    """Files by the producer itself, with its config beside them as a model's folder has it."""
    out = []
    for path in sorted((GOLDEN / producer).glob("*.safetensors")):
        metadata, tensors = read_tensors(path)
        packed = {n: a for n, a in tensors.items() if "::" not in n}
        config = json.loads(metadata.get("quantization_config", "{}"))
        nested = config if "quantization_config" in config else {"quantization_config": config} if config else {}
        text = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **nested}).encode()
        kept = {k: metadata[k] for k in ("shape", "axis", "packing") if k in metadata}
        files: Folder = {"model.safetensors": safetensors_bytes(packed, kept), "config.json": text}
        if sum(len(encoded(f)) for f in files.values()) < 70_000:
            out.append(Seed("checkpoint", files, producer))
    step = max(1, len(out) // PER_PRODUCER)
    return out[::step]


def gguf_seeds(rng: np.random.Generator) -> list[Seed]:
    """Tensors of many types under a llama's header; headers of each kind of vocabulary."""
    kinds = [Q4_0, Q8_0, Q4_K, Q6_K, MXFP4, NVFP4]
    packed = [
        blocks(f"blk.0.{n}.weight", (2, 256), k, rng)
        for n, k in zip(("attn_q", "attn_k", "attn_v", "ffn_up", "ffn_down", "ffn_gate"), kinds, strict=True)
    ]
    dense = [
        Tensor("output_norm.weight", (64,), F32, rng.standard_normal(64).astype("<f4").tobytes()),
        Tensor("output.weight", (64, 2), BF16, rng.integers(0, 1 << 14, 128, dtype=np.uint16).tobytes()),
    ]
    pairs: list[tuple[str, str, Any]] = [
        ("general.architecture", "string", "llama"), ("general.alignment", "uint32", 32), ("llama.block_count", "uint32", 1),
        ("llama.embedding_length", "uint32", 256), ("llama.attention.head_count", "uint32", 4), ("llama.context_length",
        "uint32", 64),
        ("llama.feed_forward_length", "uint32", 2), ("llama.attention.layer_norm_rms_epsilon", "float32", 1e-5),
        ("tokenizer.chat_template", "string", "{{ messages }}"),
    ]  # fmt: skip
    out = [Seed("gguf", {"m.gguf": GGUF(pairs=pairs, tensors=[*packed[i : i + 2], *dense])}) for i in (0, 2, 4)]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "\u2581",
        "h",
        "e",
        "l",
        "o",
        "he",
        "ll",
        "\u2581he",
        "llo",
        *(f"<0x{b:02X}>" for b in range(256)),
    ]
    scores = [-float(i) for i in range(len(tokens))]
    types = [2, 3, 3] + [1] * 9 + [6] * 256
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    for model in ("llama", "gpt2", "bert", "t5", "gemma4"):
        own = [*letters, "he", "ll"] if model == "gpt2" else tokens
        vocabulary: list[tuple[str, str, Any]] = [
            ("general.architecture", "string", "llama"), ("tokenizer.ggml.model", "string", model),
            ("tokenizer.ggml.pre", "string", "default"), ("tokenizer.ggml.tokens", "array[string]", own),
            ("tokenizer.ggml.bos_token_id", "uint32", 1), ("tokenizer.ggml.eos_token_id", "uint32", 2),
            ("tokenizer.ggml.add_bos_token", "bool", 1), ("tokenizer.chat_template", "string", CHATML),
        ]  # fmt: skip
        if model in ("llama", "t5"):
            vocabulary += [
                ("tokenizer.ggml.scores", "array[float32]", scores),
                ("tokenizer.ggml.token_type", "array[int32]", types),
            ]
        if model in ("gpt2", "gemma4"):
            vocabulary.append(("tokenizer.ggml.merges", "array[string]", ["h e", "l l"]))
        out.append(Seed("vocabulary", {"m.gguf": GGUF(pairs=vocabulary)}))
    return out


TOKENIZER = {
    "version": "1.0", "added_tokens": [{"id": 0, "content": "<unk>", "special": True, "single_word": False, "lstrip": False,
    "rstrip": False, "normalized": False}], "normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "ByteLevel",
    "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"<unk>": 0, "h": 1, "e": 2, "l": 3, "o": 4, "he": 5}, "merges": [["h", "e"]],
    "unk_token": "<unk>"},
}  # fmt: skip
MODEL_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "tie_word_embeddings": False,
}  # fmt: skip
TEMPLATES = [
    CHATML,
    (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}[{{ m.role }}] "
        "{{ m.content | trim }}{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    ),
    (
        "{% macro f(x, n=2) %}{{ x * n }}{% endmacro %}{% set ns = namespace(i=0) %}{% for m in messages[1:] %}"
        "{% set ns.i = ns.i + 1 %}{{ f(m['content'], ns.i) }}{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
    ),
]


def seeds(home: Path, kinds: tuple[str, ...] = ()) -> list[Seed]:
    """The seeds of these kinds; of all kinds, but "tokenizer" where transformers is not imported.
    `home` keeps what the kinds "journal" and "resume" read.
    """
    rng = np.random.default_rng(0)
    home.mkdir(exist_ok=True)
    w = rng.standard_normal((8, 128)).astype(np.float32)
    path = home / "seed.safetensors"
    halfbyte.save(path, {"m.q_proj": quantize(w, "int4:g32"), "m.up_proj": quantize(w, "mxfp4"), "n.weight": w[0]})
    shards = {"a": {"m.weight": w, "n.weight": w[0]}, "b": {"z.weight": w}}
    index = json.dumps({"metadata": {}, "weight_map": {n: f"{f}.safetensors" for f, t in shards.items() for n in t}}).encode()
    journal = Journal(home / "journal", home / "x")
    journal.start([{"work": 1}, {"end": 64, "checksum": 5, "note": None, "entries": [["a", ["F32", [4], 0, 16, 4]]]}])
    out = [
        Seed("checkpoint", {"model.safetensors": path.read_bytes()}),
        Seed("checkpoint", {**{f"{f}.safetensors": safetensors_bytes(t) for f, t in shards.items()},
        "model.safetensors.index.json": index}),
        Seed("config", {"model.safetensors": safetensors_bytes({f"model.layers.{i}.mlp.up_proj.weight": w for i in range(2)}),
        "config.json": json.dumps(MODEL_CONFIG | {"model_type": "olmo2", "num_hidden_layers": 2}).encode()}),
        Seed("journal", {"journal": journal.path.read_bytes()}),
        *(seed for producer in PRODUCERS for seed in golden_seeds(producer)), *gguf_seeds(rng),
        *(Seed("template", {"chat_template.jinja": t.encode()}) for t in TEMPLATES),
    ]  # fmt: skip
    if not kinds or "resume" in kinds:
        out.append(resume_seed(home))
    if "tokenizer" in kinds or (not kinds and sys.modules.get("transformers")):
        names = {
            "tokenizer.json": TOKENIZER,
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<unk>",
                "chat_template": CHATML,
                "model_max_length": 64,
            },
            "config.json": MODEL_CONFIG,
            "generation_config.json": {"eos_token_id": [1, 2], "temperature": 0.5},
        }
        files: Folder = {n: json.dumps(v).encode() for n, v in names.items()}
        out += 3 * [Seed("tokenizer", {"model.safetensors": safetensors_bytes({"model.norm.weight": w[0, :64]}), **files})]
    return [s for s in out if not kinds or s.kind in kinds]


def resume_seed(home: Path) -> Seed:
    """What a conversion leaves that is stopped half way: finished shards and a journal."""

    class StopError(Exception):
        pass

    def stop(done: int, total: int, key: str) -> None:
        if done > total // 2:
            raise StopError

    source = home / "source"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps({"model_type": "part_of_a_llama"}))
    rng = np.random.default_rng(1)
    with SafetensorsWriter(source / "model.safetensors", {"format": "halfbyte", "version": "1"}) as f:
        for i in range(4):
            for part, array in (
                OwnLayout().pack(quantize(rng.standard_normal((8, 32)).astype(np.float32), "int4:g32"), {}).items()
            ):
                f.add(f"model.layers.{i}.mlp.up_proj.{part}", array)
    convert(source, home / "fresh", to="gptq", workers=1, max_shard_size=1)
    state = home / "state"
    state.mkdir()
    with contextlib.suppress(StopError):
        convert(source, state / "out", to="gptq", workers=1, max_shard_size=1, progress=stop)
    files: Folder = {str(p.relative_to(state)): p.read_bytes() for p in sorted(state.rglob("*")) if p.is_file()}
    assert any(n.endswith(".shard") for n in files)
    assert any(n.endswith(".journal") for n in files)
    return Seed("resume", files)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def header_of(raw: bytes) -> dict[str, np.ndarray]:
    """Tensors of a file, read after the format's description alone."""
    length = int.from_bytes(raw[:8], "little")
    out = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            out[name] = np.frombuffer(raw[8 + length + start : 8 + length + stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return out


def quantization_of(raw: bytes) -> dict[str, Any] | None:
    """The quantization config of a config.json that has one."""
    config = json.loads(raw)
    both = [config[k] for k in ("quantization_config", "quantization") if config.get(k)]
    if len(both) > 1 and both[0] != both[1]:
        return None
    found = both[0] if both else {}
    nested = found.get("quantization")
    if isinstance(nested, dict) and "quant_algo" not in nested:
        return None
    return found


def check_safetensors(file: Path, checkpoint: Any, producer: str) -> tuple[str, int]:
    """("" or how a tensor differs from what an independent reader gives, tensors compared)."""
    if not any(file.name in checkpoint.info(key).files for key in checkpoint):
        return "", 0  # a file that the index leaves out
    tensors = header_of(file.read_bytes())
    beside = file.with_name("config.json")
    config = quantization_of(beside.read_bytes()) if beside.exists() else {}
    method = METHODS.get(producer)
    known = producer and config is not None and (method is None or config.get("quant_method") == method)
    if producer == "mlx" and config is not None:
        known = known and not any(isinstance(v, dict) for v in config.values())
    compared = 0
    for key in checkpoint:
        ours = checkpoint[key]
        if isinstance(ours, np.ndarray):
            if key in tensors:
                compared += 1
                if ours.tobytes() != tensors[key].tobytes():
                    return f"{key} differs", compared
        elif known:
            theirs = decode(producer, key, tensors, config)
            if theirs is None:
                continue
            compared += 1
            values = ours.dequantize("float32")
            same = theirs.ndim not in (2, 3) or values.shape == theirs.shape
            if not same or not np.array_equal(values.ravel(), theirs.ravel(), equal_nan=True):
                return f"{key} of {producer} has other values", compared
    return "", compared


def check_gguf(file: Path, checkpoint: Any) -> tuple[str, int]:
    """The same against gguf-py; a file that gguf-py does not read is not compared."""
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        if reader.byte_order == "S":
            return "", 0  # gguf-py swaps the header of such a file alone
        theirs = [(t.name, gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors]
    except Exception:
        return "", 0
    for name, values in theirs:
        key = next((k for k in (name, name.removesuffix(".weight")) if k in checkpoint), None)
        if key is None:
            return f"{name} is not there", 0
        ours = checkpoint[key]
        ours = ours.dequantize("float32", "producer") if hasattr(ours, "dequantize") else np.asarray(ours)
        if not np.array_equal(np.asarray(ours, np.float32).reshape(-1), values.astype(np.float32).reshape(-1), equal_nan=True):
            return f"{name} differs", 0
    return "", len(theirs)


known_problems: dict[int, set[str]] = {}
"""Problems in the ledger of each seed, a fragment of a model, by the seed's id."""


def run_checkpoint(path: Path, seed: Seed) -> tuple[str, int]:
    known = known_problems.get(id(seed))
    with halfbyte.open(path) as checkpoint:
        checkpoint.header_findings()
        problems = {f"{e.name} {e.status}" for e in checkpoint.ledger().problems}
        for key in checkpoint:
            checkpoint.info(key)
            value = checkpoint[key]
            if hasattr(value, "dequantize"):
                value.dequantize("float32")
        checkpoint.findings(data=True)
        if known is None:
            known_problems[id(seed)] = problems
        elif problems - known:
            raise CheckpointError("[fuzz] the ledger has a problem, and every command refuses the file")
        if path.suffix == ".gguf":
            return check_gguf(path, checkpoint)
        total = 0
        for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
            wrong, compared = check_safetensors(file, checkpoint, seed.producer)
            total += compared
            if wrong:
                return wrong, total
        return "", total


def run_journal(work: Path, home: Path) -> tuple[str, int]:
    found = Journal(work / "journal", work / "x").read()
    want = Journal(home / "journal", home / "x").read()
    return ("" if found == want[: len(found)] else "other lines than were written"), len(found)


def run_resume(work: Path, home: Path) -> tuple[str, int]:
    try:
        convert(home / "source", work / "out", to="gptq", workers=1, max_shard_size=1)
    except HalfbyteError:
        if (work / "out").exists():
            return "refused, with an output", 0
        raise
    if contents(work / "out") != contents(home / "fresh"):
        return "the output differs from an undisturbed run's", 1
    return "", 1


def run_vocabulary(path: Path) -> tuple[str, int]:
    from halfbyte.gguf_models.tokenizer import described

    with halfbyte.open(path) as checkpoint:
        backend, _ = described(checkpoint)
        ids = backend.encode("Hello hello wörld 123\n").ids
        backend.decode(ids)
    return "", 0


def run_tokenizer(work: Path) -> tuple[str, int]:
    from halfbyte.generation.native_tokenizer import tokenizer_of_folder
    from halfbyte.transformers.config import config_of_folder

    with halfbyte.open(work) as checkpoint:
        tokenizer = tokenizer_of_folder(checkpoint)
        if tokenizer is not None:
            tokenizer.decode(token_ids(tokenizer, "hello h", "fuzz"))
            if tokenizer.chat_template:
                render(tokenizer, MESSAGES)
        config_of_folder(checkpoint)
    return "", 0


class Renderer:
    """A tokenizer that renders as transformers does, without it."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages: Any, chat_template: str | None = None, **given: Any) -> dict[str, list[int]]:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise ValueError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = raise_exception
        text = environment.from_string(chat_template or self.chat_template).render(messages=messages, bos_token="<s>", **given)
        return {"input_ids": [len(text)]}


def run_template(work: Path) -> tuple[str, int]:
    text = (work / "chat_template.jinja").read_bytes().decode("utf-8", "replace")
    limits.SECONDS, limits.MEGABYTES = 0.2, 100
    render(Renderer(text), MESSAGES)
    return "", 0


def run_one(seed: Seed, files: Folder, work: Path, home: Path) -> Result:
    """Write the files, give them to what the kind names, and judge what comes of it."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name, content in files.items():
        data = written(content)
        if data is None:
            return Result("unwritten")
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_bytes(data)
    names = list(files)
    path = work / names[0] if len(names) == 1 else work
    target = {
        **dict.fromkeys(("checkpoint", "config", "gguf"), partial(run_checkpoint, path, seed)),
        "journal": partial(run_journal, work, home), "resume": partial(run_resume, work, home),
        "vocabulary": partial(run_vocabulary, path), "tokenizer": partial(run_tokenizer, work),
        "template": partial(run_template, work),
    }[seed.kind]  # fmt: skip
    try:
        wrong, compared = target()
    except HalfbyteError as error:
        return Result("refused", raised_at(error))
    except BaseException as error:  # a panic of a Rust library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return Result("fault", f"{type(error).__name__} at {raised_at(error)}: {error!s:.300}")
    return Result("fault", f"{seed.kind}: {wrong}") if wrong else Result("accepted", "", compared)


def raised_at(error: BaseException) -> str:
    """File and line of the innermost frame of the library, else of the innermost frame."""
    found = ""
    ours = False
    step = error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        inside = name.startswith(str(ROOT))
        if inside or not ours:
            found, ours = f"{Path(name).name}:{step.tb_lineno}", inside
        step = step.tb_next
    return found
