"""A packed checkpoint to dense safetensors, a block of rows at a time.

    value written = exact value of the weight, rounded once to the dtype

Dense tensors are copied unchanged. Files are written under a temporary name and renamed at the end;
the same command resumes a run that was interrupted, after the last shard of a folder or the last
tensor of a file. Names are those of the source: a packed module `x` becomes `x.weight`. A model's
stacked experts become the two parameters that transformers has, `experts.gate_up_proj` [e, 2f, k]
and `experts.down_proj` [e, h, f], each matrix transposed for the model types in
`TRANSPOSED_EXPERTS`. The parts `x.0`, `x.1` of a fused projection are joined to `x.weight`.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo, expert_names
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.io.home import expanded
from ..checkpoints.io.journal import make_folder
from ..checkpoints.io.output_path import CARRIED, check_output_path
from ..checkpoints.io.safe_files import WriteError, carried_files
from ..checkpoints.ledger import ACTIVATION_SCALES
from ..checkpoints.safetensors.file import NUMPY_DTYPES
from ..checkpoints.safetensors.folder import SIDE_CONFIGS
from ..checkpoints.safetensors.sharded_writer import ResumableFolder
from ..checkpoints.safetensors.writer import SafetensorsWriter
from ..checkpoints.views.usual import usual
from ..errors import CheckpointError, FormatError, HalfbyteError
from ..gguf_models.model_files import model_files
from ..gguf_models.view import ModelView, as_model, no_model
from ..layouts import LAYOUTS
from ..numerics.exact import dtype_named
from ..tensor.qtensor import QTensor
from ..tensor.row_view import RowView, Source
from .source_files import source_files, source_identity

DEFAULT_SHARD = 5_000_000_000
"""Bytes of a shard, the size transformers writes."""

QUANTIZATION_KEYS = ("quantization_config", "quantization", "compression_config")
"""Keys of config.json that describe packed weights."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

TRANSPOSED_EXPERTS = ("aria", "aria_text", "gpt_oss", "llama4", "llama4_text", "openai_privacy_filter")
"""Model types whose expert parameters are [e, k, n] in transformers; those of all others are [e, n,
k].
"""

INTERLEAVED_EXPERTS = ("gpt_oss",)
"""Model types whose gate and up rows alternate in `gate_up_proj`; in all others gate's rows come
first.
"""

_PART = re.compile(r"(.+\.(?:qkv_proj|gate_up_proj))\.(\d+)")

DTYPES = {d.name: d for d in NUMPY_DTYPES.values()}
"""Dtypes of safetensors files by NumPy's names."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Output:
    """One tensor of the result."""

    name: str
    info: TensorInfo
    dtype: str
    shape: tuple[int, ...]
    transposed: bool = False
    sources: tuple[tuple[str, ...], ...] = ()
    """Keys of the matrices that are joined along rows, where the tensor is not that of `info`
    alone: a stack, or one for each expert.
    """
    interleaved: bool = False

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass
class Written:
    """What `dequantize_checkpoint` wrote.

    files      names of all files in `path` (or the one file)
    dropped    tensors that are not written because only packed modules use them
    nonfinite  tensor -> values that are infinite or NaN in the result
    notes      remarks for the user of the result
    """

    path: Path
    dtype: str
    files: list[str] = field(default_factory=list)
    tensors: int = 0
    quantized: int = 0
    nbytes: int = 0
    dropped: list[str] = field(default_factory=list)
    nonfinite: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "record": "dequantized", "path": str(self.path), "dtype": self.dtype, "files": self.files, "tensors": self.tensors,
            "quantized": self.quantized, "nbytes": self.nbytes, "dropped": self.dropped, "nonfinite": self.nonfinite,
            "notes": self.notes,
        }  # fmt: skip


def parse_size(text: str, op: str = "dequantize") -> int:
    """Bytes of `5GB`, `500MB`, `2GiB`, `1000000`. FormatError for anything else, under the name of
    the command `op`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise FormatError(f"[{op}] shard size {text!r}; allowed: a number with B, KB, MB, GB, TB, KiB, MiB or GiB")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def dense_dtype(config: dict[str, Any]) -> str:
    """The dtype a model's configuration names, else float32, which loses least."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            for key in ("dtype", "torch_dtype"):
                name = str(part.get(key, "")).removeprefix("torch.")
                if name in ("float16", "bfloat16", "float32"):
                    return name
    return "float32"


def outputs(checkpoint: Checkpoint, dtype: str) -> tuple[list[Output], list[str]]:
    """The tensors to write, and the names of those that are dropped. CheckpointError when headers
    do not fit their layout.
    """
    found, dropped = [], []
    for info in checkpoint.infos():
        if info.quantized and info.format is None:
            checkpoint[info.key]  # raises with the reason
            raise CheckpointError(f"[dequantize] {info.key}: does not fit layout {info.layout!r}; see halfbyte inspect")
    joined, sources = _joined_outputs(checkpoint, dtype)
    for info in checkpoint.infos():
        if info.key in sources:
            found += joined.pop(info.key, [])
            continue
        if not info.quantized:
            module, _, last = info.key.rpartition(".")
            if last == "pre_quant_scale":
                raise CheckpointError(
                    f"[dequantize] {info.key} scales the inputs of {module}; without it the weights are another model. "
                    "load_model multiplies by it, and halfbyte convert --to halfbyte keeps it"
                )
            if last in ACTIVATION_SCALES and module in checkpoint and checkpoint.info(module).quantized:
                dropped.append(info.key)
            else:
                found.append(Output(info.key, info, info.dtype, info.shape))
            continue
        layout = LAYOUTS.get(info.layout)
        if layout is not None and layout.inputs_first and len(info.shape) == 3:
            e, n, k = info.shape
            found.append(Output(info.key, info, dtype, (e, k, n), transposed=True))
        else:
            found.append(Output(f"{info.key}.weight", info, dtype, info.shape))
    return found, dropped


def _joined_outputs(checkpoint: Checkpoint, dtype: str) -> tuple[dict[str, list[Output]], set[str]]:
    """Outputs that are made of several tensors, or renamed, by the first of their keys; and all
    keys that they are made of.
    """
    text = checkpoint.config.get("text_config")
    kinds = [c.get("model_type") for c in (text, checkpoint.config) if isinstance(c, dict)]
    if not isinstance(kinds[-1], str) or isinstance(checkpoint, GGUFCheckpoint):
        return {}, set()
    kind = next(k for k in kinds if isinstance(k, str))
    groups: dict[str, dict[tuple[str, str], dict[int | None, TensorInfo]]] = {}
    parts: dict[str, dict[int, TensorInfo]] = {}
    for info in checkpoint.infos():
        if found := expert_names.parse(info.key):
            if found.word == "w13" and kind in INTERLEAVED_EXPERTS:
                continue
            groups.setdefault(found.path, {}).setdefault((found.projection, found.leaf or "weight"), {})[found.expert] = info
        elif info.quantized and (match := _PART.fullmatch(info.key)):
            parts.setdefault(match[1], {})[int(match[2])] = info
    out: list[Output] = []
    for path, projections in groups.items():
        stacked = any(
            None in infos and infos[None].key != f"{path}.{name}{'_bias' if leaf == 'bias' else ''}"
            for (name, leaf), infos in projections.items()
        )
        stacked |= any(infos[None].quantized for infos in projections.values() if None in infos)
        # transformers joins single experts of other types; of these it leaves them unread.
        stacked |= kind in TRANSPOSED_EXPERTS and any(set(infos) != {None} for infos in projections.values())
        if stacked:
            out += _expert_outputs(checkpoint, path, projections, dtype, kind)
    for path, numbered in parts.items():
        infos = [numbered[i] for i in sorted(numbered)]
        shape = (sum(i.shape[0] for i in infos), infos[0].shape[1])
        out.append(Output(f"{path}.weight", infos[0], dtype, shape, sources=tuple((i.key,) for i in infos)))
    by_key: dict[str, list[Output]] = {}
    for output in out:
        by_key.setdefault(output.info.key, []).append(output)
    return by_key, {key for output in out for keys in output.sources for key in keys}


def _expert_outputs(
    checkpoint: Checkpoint, path: str, projections: dict[tuple[str, str], dict[int | None, TensorInfo]], dtype: str, kind: str
) -> list[Output]:
    """transformers' parameters of one experts module. CheckpointError where projections or experts
    are missing.
    """
    out = []
    for leaf in ("weight", "bias"):
        gated = any(name in ("gate_proj", "gate_up_proj") for name, _ in projections)
        first_target = ("gate_up_proj", ("gate_proj", "up_proj")) if gated else ("up_proj", ())
        for target, halves in (first_target, ("down_proj", ())):
            names = [n for n in ((target,) if (target, leaf) in projections else halves) if (n, leaf) in projections]
            if not names:
                continue
            sources = []
            for name in names:
                infos = projections[name, leaf]
                numbers = [None] if None in infos else sorted(infos, key=lambda e: e or 0)
                if (numbers != [None] and numbers != list(range(len(numbers)))) or (names != [target] and len(names) < 2):
                    raise CheckpointError(
                        f"[dequantize] {path}: {', '.join(i.key for i in infos.values())} are not all of its experts"
                    )
                least = 2 if leaf == "weight" else 1
                for info in (infos[n] for n in numbers):
                    if len(info.shape) < least:
                        raise CheckpointError(
                            f"[dequantize] {info.key} has shape {list(info.shape)}; a {leaf} of experts has {least} axes or more"
                        )
                sources.append([infos[n] for n in numbers])
            first = sources[0][0]
            experts = first.shape[0] if len(sources[0]) == 1 and first.shape else len(sources[0])
            rows = sum(each[0].shape[-2 if leaf == "weight" else -1] for each in sources)
            native = not first.quantized and first.key == f"{path}.{target}"
            transposed = leaf == "weight" and kind in TRANSPOSED_EXPERTS and not native
            shape: tuple[int, ...] = (experts, rows)
            if leaf == "weight":
                k = first.shape[-1]
                shape = (experts, k, rows) if transposed else first.shape if native else (experts, rows, k)
            word = dtype if any(i.quantized for each in sources for i in each) else first.dtype
            keys = tuple(tuple(i.key for i in each) for each in sources)
            interleaved = len(keys) > 1 and kind in INTERLEAVED_EXPERTS
            name = f"{path}.{target}" if leaf == "weight" else f"{path}.{target}_bias"
            out.append(Output(name, first, word, shape, transposed, keys, interleaved))
    return out


def shards(tensors: list[Output], limit: int) -> list[list[Output]]:
    """Tensors in order, split so that each file holds at most `limit` bytes, or one tensor that is
    larger.
    """
    out: list[list[Output]] = [[]]
    size = 0
    for t in tensors:
        if out[-1] and size + t.nbytes > limit:
            out.append([])
            size = 0
        out[-1].append(t)
        size += t.nbytes
    return out


def dequantize_checkpoint(
    checkpoint: Checkpoint,
    out: Path | str,
    *,
    dtype: str | None = None,
    arithmetic: str = "exact",
    max_shard_size: int = DEFAULT_SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write every tensor of `checkpoint` dense to `out`: a folder, or one file when the name ends
    in .safetensors.

    dtype           of the packed weights; None takes the configuration's, else float32. Dense
                    tensors keep their own
    arithmetic      "exact", or "producer": bit for bit what each producer's decoder gives
    max_shard_size  bytes of a file of a folder
    overwrite       replace a checkpoint that is at `out`; nothing else is ever replaced
    progress        called as progress(done_bytes, total_bytes, key)
    Raises CheckpointError when the ledger has problems (`Checkpoint.check`), when `out` exists,
    when the disk is too small, or when a tensor cannot be read.
    """
    given = expanded(out)
    out = Path(os.path.abspath(given))  # "." has no name for a temporary file beside it
    word = dtype_named(dtype).name if dtype else dense_dtype(checkpoint.config)
    if word == "float64":
        raise FormatError("[dequantize] dtype float64; allowed: float32, bfloat16, float16")
    if arithmetic not in ("exact", "producer"):
        raise FormatError(f"[dequantize] arithmetic {arithmetic!r}; allowed: exact, producer")
    if given.suffix == ".gguf":
        raise CheckpointError(f"[dequantize] {given}: dense weights are written as a folder, or as one file named *.safetensors")
    checkpoint.check("dequantize")
    check_output_path("dequantize", checkpoint.path, given, overwrite, inputs=source_files(checkpoint))
    checkpoint = as_model(usual(checkpoint), "", dtype=word, arithmetic=arithmetic)
    beside, notes = beside_weights(checkpoint, out)
    tensors, dropped = outputs(checkpoint, word)
    result = Written(
        given, word, tensors=len(tensors), quantized=sum(t.info.quantized for t in tensors), dropped=dropped, notes=notes
    )
    result.nbytes = sum(t.nbytes for t in tensors)
    free = shutil.disk_usage(_existing(out.parent)).free + _partial_bytes(out)
    if result.nbytes > free:
        raise CheckpointError(
            f"[dequantize] {given}: {result.nbytes:,} bytes are needed, {free:,} are free; "
            "give another path or a narrower --dtype"
        )
    walk = _Walk(checkpoint, arithmetic, result, progress)
    work = {**source_identity(checkpoint), "dtype": word, "arithmetic": arithmetic, "limit": max_shard_size, "version": 2}
    if out.suffix == ".safetensors":
        make_folder(out.parent, out)
        walk.file(out, tensors, {**work, "op": "dequantize"})
        result.files = [out.name]
    else:
        walk.folder(out, shards(tensors, max_shard_size), {**work, "op": "dequantize"}, max_shard_size, beside)
    return result


class _Walk:
    """The tensors of a checkpoint, decoded into files."""

    def __init__(self, checkpoint: Checkpoint, arithmetic: str, result: Written, progress: Progress | None) -> None:
        self.checkpoint = checkpoint
        self.arithmetic = arithmetic
        self.result = result
        self.progress = progress
        self.done = 0

    def file(self, path: Path, tensors: list[Output], work: dict[str, Any]) -> None:
        """Write one file, a tensor after another."""
        with SafetensorsWriter(path, {"format": "pt"}, len(tensors), work) as out:
            for note in out.notes:
                self.resume(note)
            for t in _by_width(tensors)[len(out.notes) :]:
                out.add_blocks(t.name, DTYPES[t.dtype], t.shape, self.counted(t))
                out.unit_done(self.note([t]))

    def folder(self, path: Path, parts: list[list[Output]], work: dict[str, Any], limit: int, beside: Mapping[str, Any]) -> None:
        """Write a folder, a shard after another; `beside`: its further files."""
        files, carried = _model_files(self.checkpoint, self.result.dtype)
        files |= beside
        expected = max(map(len, parts))
        with ResumableFolder(path, work, limit, {"format": "pt"}, expected) as folder:
            for note in folder.notes:
                self.resume(note)
            try:
                for tensors in parts[len(folder.notes) :]:
                    folder.add(self.written(tensors), sum(t.nbytes for t in tensors), None)
                    folder.note(self.note(tensors))
                    folder.end_shard()
            except WriteError:
                raise  # the disk may have space later
            except (HalfbyteError, ValueError):
                folder.discard()  # it would happen again
                raise
            self.result.files = folder.finish(files, carried)

    def written(self, tensors: list[Output]) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...], Iterator[NDArray[Any]]]]:
        """The arguments of a writer, for the tensors of a shard."""
        for t in _by_width(tensors):
            yield t.name, DTYPES[t.dtype], t.shape, self.counted(t)

    def note(self, tensors: list[Output]) -> dict[str, Any]:
        """What a resumed run must know of tensors that were written."""
        return {
            "nbytes": sum(t.nbytes for t in tensors),
            "key": tensors[-1].info.key if tensors else "",
            "nonfinite": {t.name: n for t in tensors if (n := self.result.nonfinite.get(t.name))},
        }

    def resume(self, note: dict[str, Any]) -> None:
        """Count tensors that an earlier run had written."""
        self.done += note["nbytes"]
        self.result.nonfinite |= note["nonfinite"]
        if self.progress is not None and note["key"]:
            self.progress(self.done, self.result.nbytes, note["key"])

    def counted(self, t: Output) -> Iterator[NDArray[Any]]:
        """The blocks of a tensor, each reported as progress when it has been written."""
        for block in self.blocks(t):
            yield block
            self.done += block.nbytes
            if self.progress is not None:
                self.progress(self.done, self.result.nbytes, t.info.key)

    def blocks(self, t: Output) -> Iterator[NDArray[Any]]:
        if t.sources:
            yield from self.joined_blocks(t)
            return
        weight = self.checkpoint[t.info.key]
        if not isinstance(weight, QTensor):
            if weight.ndim < 2:
                yield weight
                return
            view = RowView([Source(weight)])
            for start, stop in view.blocks():
                yield view.read(start, stop, None)
            return
        if t.transposed:
            for e in range(weight.shape[0]):
                yield self.checked(t, weight[e].dequantize(t.dtype, self.arithmetic)).T
            return
        view = RowView([Source(weight)])
        for start, stop in view.blocks():
            yield self.checked(t, view.read(start, stop, t.dtype, self.arithmetic))

    def joined_blocks(self, t: Output) -> Iterator[NDArray[Any]]:
        """Rows of several tensors, one expert at a time where they are stacks."""
        loaded = [[self.checkpoint[key] for key in keys] for keys in t.sources]
        if len(t.shape) == 2 and loaded[0][0].ndim == 2 and t.info.quantized:  # parts of a fused matrix
            for (weight,) in loaded:
                view = RowView([Source(weight)])
                for start, stop in view.blocks():
                    yield self.checked(t, view.read(start, stop, t.dtype, self.arithmetic))
            return
        for e in range(t.shape[0]):
            pieces = []
            for tensors in loaded:
                piece = tensors[0][e] if len(tensors) == 1 else tensors[e]
                if isinstance(piece, QTensor):
                    pieces.append(piece.dequantize(t.dtype, self.arithmetic))
                else:
                    pieces.append(np.asarray(piece, DTYPES[t.dtype]))
            rows = np.stack(pieces, 1).reshape(-1, *pieces[0].shape[1:]) if t.interleaved else np.concatenate(pieces)
            yield self.checked(t, rows).T if t.transposed else self.checked(t, rows)

    def checked(self, t: Output, block: NDArray[Any]) -> NDArray[Any]:
        """The block, its infinities and NaN counted."""
        bad = block.size - int(np.count_nonzero(np.isfinite(block)))
        if bad:
            self.result.nonfinite[t.name] = self.result.nonfinite.get(t.name, 0) + bad
        return block


def beside_weights(checkpoint: Checkpoint, out: Path) -> tuple[dict[str, Any], list[str]]:
    """(files that a folder gets from a GGUF header, remarks for the user of the result)."""
    if isinstance(checkpoint, ModelView):
        files, notes = ({}, []) if out.suffix == ".safetensors" else model_files(checkpoint.source)
        return files, [*checkpoint.notes, *notes]
    if isinstance(checkpoint, GGUFCheckpoint):
        return {}, [f"names stay GGUF's, and neither config.json nor a tokenizer is written: {no_model(checkpoint)}"]
    return {}, []


def _by_width(tensors: list[Output]) -> list[Output]:
    """Wider elements first: every tensor is aligned, so that the writer need not copy the data."""
    return sorted(tensors, key=lambda t: -DTYPES[t.dtype].itemsize)


def carried_model_files(folder: Path, op: str) -> dict[str, Path]:
    """Tokenizer, template and similar files of a folder that an output gets as they are, by name."""
    found = carried_files(folder, CARRIED, op)
    return {n: p for n, p in found.items() if n not in (*SIDE_CONFIGS, "config.json") and not n.endswith(".index.json")}


def _model_files(checkpoint: Checkpoint, dtype: str) -> tuple[dict[str, Any], dict[str, Path]]:
    """config.json without its quantization, and the tokenizer and other model files to copy."""
    source = checkpoint.path
    if isinstance(checkpoint, ModelView):
        return {"config.json": untied(dense_config({**checkpoint.config, "dtype": dtype}, dtype), checkpoint)}, {}
    if not source.is_dir():
        return {}, {}
    carried = carried_model_files(source, "dequantize")
    # A GGUF's configuration is derived from its header; only a config.json is copied.
    if not (source / "config.json").is_file():
        return {}, carried
    return {"config.json": untied(dense_config(checkpoint.config, dtype), checkpoint)}, carried


def untied(config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """`config` with `tie_word_embeddings` false where the checkpoint stores a head of its own,
    which a tied model would drop.
    """
    if not any(key.removesuffix(".weight").rpartition(".")[2] == "lm_head" for key in checkpoint):
        return config
    out = {k: untied(v, checkpoint) if k == "text_config" and isinstance(v, dict) else v for k, v in config.items()}
    return out | {"tie_word_embeddings": False} if out.get("tie_word_embeddings") is True else out


def dense_config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A model's configuration once its weights are dense: no quantization, and the dtype that was
    written.
    """
    out = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    for key in ("dtype", "torch_dtype"):
        if isinstance(out.get(key), str):
            out[key] = dtype
    return {k: dense_config(v, dtype) if str(k).endswith("_config") and isinstance(v, dict) else v for k, v in out.items()}


def _partial_bytes(out: Path) -> int:
    """Bytes that an interrupted run for `out` has written."""
    partial = out.with_name(f".{out.name}.partial")
    paths = list(partial.iterdir()) if partial.is_dir() and not partial.is_symlink() else [partial]
    return sum(p.lstat().st_size for p in paths if os.path.lexists(p))


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
