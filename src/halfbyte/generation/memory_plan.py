"""What a model needs to run: weights, KV cache, activations, overhead; whether that fits, and what
would make it fit.

    total = overhead + max(weights + cache + activations, loading)

weights      packed matrices as a backend holds them, and dense tensors in the run's dtype, a tied
             head once
cache        keys and values of `context` tokens: Σ over layers of 2 · kv heads · head length ·
             tokens seen · bytes, tokens seen being the sliding window in local layers
activations  of one pass over `context` tokens: the larger of a feed-forward block (2h + 4f a token)
             and of attention, the logits of one position, and masks. Where attention writes its
             scores to memory (gpt-oss): of a pass over `single.prompt_chunk` tokens, with three
             copies of heads · tokens · context, one of which outlives it. Experts on a GPU copy the
             tokens of each expert to whole tiles
loading      the peak while tensors are read, the largest first: those read before and twice the one
             being read
overhead     all other memory of the process: on the CPU measured here, with the libraries and the
             tokenizer loaded; on a GPU its context
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import checkpoints
from ..checkpoints import Checkpoint
from ..checkpoints.io.home import expanded
from ..errors import CheckpointError, HalfbyteError
from ..formats import format_named, packed_nbytes
from ..spec import Format
from .single import prompt_chunk

RUNNING = 24 << 20
"""Bytes that a run takes besides: generation's modules, the allocator's unused parts. The peak of
Gemma 3 270M was 20 to 39 MB above the sum of the others in two environments, and 55 under tests.
"""
CUDA_OVERHEAD = 690_000_000
"""A CUDA context (651 MB) and cuBLAS's workspace (36 MB), as measured on an H200
(benchmarks/models.md).
"""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCORE_COPIES = 3
"""Of the attention scores: as computed, less the largest, and as probabilities."""
PANEL_ROWS = 16
"""Rows to which the CPU kernels' order is padded."""
CODECS = ("int8:g128", "int6:g128", "int5:g128", "int4:g32", "int4:g128", "mxfp4", "int3:g128", "int2:g128")
"""Other formats for the matrices, widest first."""


class Matrix(NamedTuple):
    """A tensor of the model: logical shape, the format it is packed in (None: dense), whether it
    can be packed.
    """

    name: str
    shape: tuple[int, ...]
    format: Format | None
    packable: bool


@dataclass(frozen=True)
class Plan:
    """Bytes, by what they are for. `device_memory` is None when it was not given."""

    path: str
    context: int
    batch: int
    device: str
    dtype: str
    packed: int
    dense: int
    cache: int
    activations: int
    loading: int
    overhead: int
    device_memory: int | None = None

    @property
    def weights(self) -> int:
        return self.packed + self.dense

    @property
    def total(self) -> int:
        return self.overhead + max(self.weights + self.cache + self.activations, self.loading)

    @property
    def fits(self) -> bool | None:
        return None if self.device_memory is None else self.total <= self.device_memory


class Planner:
    """One model, planned for different contexts, dtypes and codecs.

    config, allow_unknown  as `halfbyte.open` takes them

    Raises CheckpointError for another device than "cpu" and "cuda", for a path without a model's
    configuration, for what the checkpoint's ledger does not account for, and for packed weights
    that are described but not there unless `codec` says what they are in.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        codec: str | None = None,
        config: Mapping[str, Any] | None = None,
        allow_unknown: Sequence[str] = (),
    ) -> None:
        self.path, self.device = expanded(path), device
        if device not in ("cpu", "cuda"):
            raise CheckpointError(f"[plan] device {device!r}; allowed: cpu, cuda")
        self.dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        if self.dtype not in DTYPE_BYTES:
            raise CheckpointError(f"[plan] dtype {self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
        self.config, self.matrices, remote = _contents(self.path, codec, config, allow_unknown)
        self.stores_scores = _stores_scores(self.config)
        self.overhead = _resident_memory(self.path, self.config, remote, config) if device == "cpu" else CUDA_OVERHEAD

    def plan(self, context: int, *, batch: int = 1, device_memory: int | None = None, codec: str | None = None) -> Plan:
        """The bytes for a context; `codec` replaces the format of every matrix that can be
        packed.
        """
        if context < 1 or batch < 1:
            raise CheckpointError(f"[plan] context {context}, batch {batch}; 1 or more are allowed")
        sizes = [self._nbytes(m, codec) for m in self.matrices]
        packed = sum(n for m, n in zip(self.matrices, sizes, strict=True) if self._format(m, codec) is not None)
        return Plan(
            str(self.path),
            context,
            batch,
            self.device,
            self.dtype,
            packed,
            sum(sizes) - packed,
            self._cache(context, batch),
            self._activations(context, batch),
            _loading(sizes) if self.device == "cpu" else 0,
            self.overhead,
            device_memory,
        )

    def remedies(self, plan: Plan) -> list[str]:
        """What would make a plan fit that does not, a sentence each."""
        limit = plan.device_memory
        if limit is None or plan.total <= limit:
            return []
        out = []
        context = self._largest_context(plan)
        if context:
            out.append(f"a context of {context:,} tokens")
        for codec in CODECS:
            try:
                other = self.plan(plan.context, batch=plan.batch, device_memory=limit, codec=codec)
            except HalfbyteError:
                continue
            if other.fits and other.packed + other.dense < plan.weights:
                out.append(f"its matrices in {codec} ({other.total / 1e9:.3g} GB)")
                break
        if plan.device != "cpu":
            # Every device has its own overhead; weights and cache divide, activations do not.
            room = limit - plan.overhead - plan.activations
            if room > 0:
                count = math.ceil((plan.weights + plan.cache) / room)
                out.append(f"{count} such devices")
        return out or ["more memory: the overhead alone leaves no room"]

    def _largest_context(self, plan: Plan) -> int:
        """The longest context that fits, 0 when none does."""
        low, high = 0, plan.context
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.plan(middle, batch=plan.batch, device_memory=plan.device_memory).fits
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _format(self, m: Matrix, codec: str | None) -> Format | None:
        return format_named(codec) if codec is not None and m.packable else m.format

    def _nbytes(self, m: Matrix, codec: str | None) -> int:
        fmt = self._format(m, codec)
        if fmt is None:
            return math.prod(m.shape) * DTYPE_BYTES[self.dtype]
        return packed_nbytes(fmt, m.shape, PANEL_ROWS if self.device == "cpu" else 1)

    def _key_value_sizes(self) -> tuple[int, int]:
        """(heads of keys and values, length of a head)."""
        c = self.config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        return heads, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads

    def _cache(self, context: int, batch: int) -> int:
        c = self.config
        heads, head = self._key_value_sizes()
        window = getattr(c, "sliding_window", None)
        kinds = getattr(c, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * c.num_hidden_layers
        seen = sum(min(context, window) if window and kind == "sliding_attention" else context for kind in kinds)
        return int(2 * heads * head * seen * batch * DTYPE_BYTES[self.dtype])

    def _attended(self, context: int, chunk: int) -> int:
        """Tokens to which a token of a pass over `chunk` tokens attends, at most."""
        window = getattr(self.config, "sliding_window", None)
        local = window and all(kind == "sliding_attention" for kind in getattr(self.config, "layer_types", None) or ("",))
        return min(context, window + chunk) if local and window else context

    def _activations(self, context: int, batch: int) -> int:
        c, size = self.config, DTYPE_BYTES[self.dtype]
        chunk = prompt_chunk(context, self.stores_scores)
        tokens = chunk * batch
        h = c.hidden_size
        heads, head = self._key_value_sizes()
        query, key = c.num_attention_heads * head, heads * head
        attention = 2 * h + 3 * query + 4 * key
        experts = getattr(c, "num_experts_per_tok", None)
        f = (getattr(c, "moe_intermediate_size", None) if experts else None) or c.intermediate_size
        feed = tokens * (2 * h + 4 * f) * size
        attended = self._attended(context, chunk)
        scores = SCORE_COPIES * c.num_attention_heads * tokens * attended * size if self.stores_scores else 0
        kinds = 2 if getattr(c, "sliding_window", None) else 1
        masks = chunk * context * kinds * batch * (size if self.stores_scores else 1) if size == 4 or self.stores_scores else 0
        if experts and self.device == "cpu":
            feed += tokens * (experts + 2) * h * 4  # float32 sums over the experts of a token
        elif experts:
            feed = tokens * 5 * h * size + self._routed(tokens * experts, f) + scores // SCORE_COPIES
        widest = max(tokens * attention * size + scores, feed)
        return int(widest + masks + 3 * batch * c.vocab_size * 4)

    def _routed(self, pairs: int, f: int) -> int:
        """Bytes of a block of experts on a GPU for `pairs` of a token and an expert: rows of x, of
        hidden values and of float32 results, and, where gates and ups are not interleaved, both in
        float32.
        """
        c, size = self.config, DTYPE_BYTES[self.dtype]
        count = getattr(c, "num_local_experts", None) or c.num_experts
        padded = _padded_rows(pairs, count) if size == 2 else None
        rows, copies = (pairs, 0) if padded is None else (padded, c.hidden_size * size)
        separate = 0 if c.model_type == "gpt_oss" else 8 * f  # float32 gates and ups
        return int(rows * (copies + separate + f * size + 4 * c.hidden_size))


def _padded_rows(pairs: int, experts: int) -> int | None:
    """`backends.cuda.padded_rows`. A plan of anything else needs no Triton."""
    try:
        from ..backends.cuda import padded_rows
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        sentence = f"{package}, by whose kernels' tiles experts on a GPU are planned; pip install 'halfbyte[cuda]'"
        raise ModuleNotFoundError(sentence, name=e.name) from e
    return padded_rows(pairs, experts)


def _stores_scores(config: Any) -> bool:
    """`single.TransformersModel.stores_scores` of a configuration: transformers has no fused
    attention for the architecture, which keeps nothing but keys and values.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return not model._supports_sdpa and not getattr(model, "_is_stateful", False)


def _loading(sizes: Iterable[int]) -> int:
    """Peak bytes while tensors are read, the largest first."""
    resident = most = 0
    for size in sorted(sizes, reverse=True):
        most = max(most, resident + 2 * size)
        resident += size
    return most


def _contents(
    path: Path, codec: str | None, config: Mapping[str, Any] | None, allow_unknown: Sequence[str]
) -> tuple[Any, list[Matrix], bool]:
    """(configuration of the text model, every tensor, whether the checkpoint is on the hub)."""
    remote = False
    if not _has_tensors(path):
        settings, matrices = _described(path, codec)
    else:
        from ..transformers.load import model_config

        with checkpoints.open(path, config, allow_unknown) as checkpoint:
            checkpoint.check_model("plan")
            settings = model_config(checkpoint)
            checkpoint.check("plan")
            remote = checkpoint.remote is not None
            matrices = list(_stored(checkpoint))
        if codec is not None:
            matrices = [m._replace(format=format_named(codec)) if m.packable else m for m in matrices]
    return settings.get_text_config(), matrices, remote


def _has_tensors(path: Path) -> bool:
    """False for a folder that only describes a model; shards that an index names count, there or
    not.
    """
    return not path.is_dir() or any(any(path.glob(f"*.{end}")) for end in ("safetensors", "safetensors.index.json", "gguf"))


def _stored(checkpoint: Checkpoint) -> Iterable[Matrix]:
    for info in checkpoint.infos():
        stem = info.key.removesuffix(".weight").rpartition(".")[2]
        packable = len(info.shape) >= 2 and "norm" not in stem
        yield Matrix(info.key, info.shape, info.format if info.quantized else None, packable)


def _described(folder: Path, codec: str | None) -> tuple[Any, list[Matrix]]:
    """(configuration, tensors) of a folder with a config.json and no tensors: the shapes that
    transformers builds, packed as the config says.
    """
    import torch
    from torch import nn
    from transformers import AutoConfig

    from ..checkpoints.quant_config import read_config
    from ..checkpoints.safetensors.folder import Sources, read_configs
    from ..transformers.build import empty_model
    from ..transformers.config import plain_config

    sources = Sources(folder)
    read_configs(folder, sources)
    raw = plain_config(sources.config, f"[plan] {folder}")
    kind = raw.pop("model_type", None)
    if kind is None:
        raise CheckpointError(f"[plan] {folder} has neither tensors nor a config.json with a model_type")
    quantization = raw.pop("quantization_config", None) or raw.pop("quantization", None)
    scheme = read_config(quantization, str(folder / "config.json")) if quantization else None
    word = codec or ("mxfp4" if scheme is not None and scheme.method == "gpt-oss" else None)
    if scheme is not None and word is None:
        raise CheckpointError(
            f"[plan] {folder} says {scheme.method} and has no tensors; give --codec (int4:g128) for its matrices"
        )
    config = AutoConfig.for_model(kind, **raw)
    model = empty_model(config, torch.float32)
    fmt = None if word is None else format_named(word)
    matrices = []
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        shape = tuple(parameter.shape)
        experts = parameter.ndim == 3
        if experts and getattr(module, "is_transposed", False):
            shape = (shape[0], shape[2], shape[1])
        packable = experts or (leaf == "weight" and isinstance(module, nn.Linear | nn.Embedding))
        if scheme is None:  # without a quantization config embeddings and the head stay dense
            packs = not isinstance(module, nn.Embedding) and path != "lm_head"
        else:
            packs = scheme.parameters(name if experts else path) is not None
        matrices.append(Matrix(name, shape, fmt if packable and packs else None, packable))
    return config, matrices


def _resident_memory(path: Path, config: Any, remote: bool, override: Mapping[str, Any] | None) -> int:
    """Resident bytes of this process with everything imported that the model needs, and its
    tokenizer; 0 where the system does not say.

    remote    the checkpoint is on the hub: its tokenizer, some megabytes, is not downloaded for this
    override  the quantization config to read with
    """
    from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
    from ..transformers.load import import_model_code

    tokenizer: Any = None
    if remote:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # imports the model's code
    elif _has_tensors(path):
        import_model_code(path, override)
        with checkpoints.open(path, override) as checkpoint:
            if isinstance(checkpoint, GGUFCheckpoint):
                from ..gguf_models.tokenizer import tokenizer_of

                tokenizer = tokenizer_of(checkpoint)
            else:
                from .native_tokenizer import tokenizer_of_folder

                tokenizer = tokenizer_of_folder(checkpoint)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    resident = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)
    del tokenizer
    return resident + RUNNING if resident else 0
