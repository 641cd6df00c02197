"""A checkpoint as a transformers model whose matrices stay packed.

    model, tokenizer = load_model("model.gguf")         model, tokenizer = load_model("folder", device="cuda")

The architecture is built on torch's meta device, so no dense weight is ever allocated; then each
quantized matrix becomes a packed module over `ops.linear`, `ops.embedding` or `ops.experts`, and
each dense tensor a parameter, one after another from the mapped file. A tied head shares the
embedding's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..backends import X_DTYPES
from ..checkpoints import Checkpoint
from ..checkpoints import open as open_checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.hub import local_copy
from ..checkpoints.views.gptqmodel_gpt_oss import has_split_gate_up
from ..checkpoints.views.mlx_form import from_mlx
from ..errors import BackendError, FormatError
from ..generation.native_tokenizer import tokenizer_of_folder
from ..gguf_models.config import config_of
from ..gguf_models.names import task_of_class
from ..gguf_models.tokenizer import tokenizer_of, tokens_of
from ..spec import Size
from ..torch.modules import batch_invariant, packed_modules
from .build import config_of_gguf, default_dtype, empty_model, model_of_gguf
from .config import add_generation_settings, config_of_folder
from .decode.rmsnorm import replace_rmsnorms
from .fill.safetensors import fill_from_folder
from .hf_quantizer import make_saveable

DEVICES = ("cpu", "cuda", "mps")


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    activations: str = "exact",
    backend: str | None = None,
    config: Mapping[str, Any] | None = None,
    allow_unknown: Sequence[str] = (),
    invariant: bool = False,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a checkpoint of any kind that `open` reads, ready to run.

    path         whatever `open` takes: a folder, a .safetensors file with its config.json beside
                 it, a .gguf file; a name on the hub is downloaded into its cache, the size reported
                 first
    device       where it runs: "cpu", "cuda", "cuda:1"
    dtype        what activations and dense parameters are in: float32, bfloat16 or float16. None is
                 float32 on the CPU, elsewhere the checkpoint's own
    activations  as in `halfbyte.linear`, for every packed matrix
    backend      None picks the best one that serves

    config        the quantization config to read with, instead of the checkpoint's
    allow_unknown names, or patterns with *, of unknown or missing tensors and config keys to pass
    over (`checkpoints/ledger.py`)
    invariant    packed products give each row the same bits whatever the number of rows and the
                 others (`halfbyte.torch.batch_invariant`)

    The tokenizer is None where the checkpoint has none. Raises UnsupportedError for an architecture
    or variant that transformers cannot build from the checkpoint, CheckpointError for files that
    are damaged or lack a tensor, BackendError when no backend serves a format on the device.
    """
    where = _device(device)
    wanted = _dtype(dtype)
    with open_checkpoint(local_copy(path), config, allow_unknown) as checkpoint:
        checkpoint.check_model("load_model")
        meta = checkpoint.config["quantization_config"]["meta"] if has_split_gate_up(checkpoint.config) else None
        if isinstance(checkpoint, GGUFCheckpoint):
            model_settings = config_of_gguf(checkpoint)
            tokens = tokens_of(checkpoint.metadata)
            tokenizer = tokenizer_of(checkpoint, tokens)
            model = model_of_gguf(checkpoint, model_settings, wanted, where, activations, backend, tokens)
            del tokens
        else:
            checkpoint = from_mlx(checkpoint)
            model_settings = config_of_folder(checkpoint)
            checkpoint.check("load_model")
            tokenizer = tokenizer_of_folder(checkpoint)
            task = task_of_class(model_settings.model_type, getattr(model_settings, "architectures", None) or ())
            model = empty_model(model_settings, default_dtype(wanted, where, model_settings), checkpoint.__contains__, task)
            fill_from_folder(model, checkpoint, activations=activations, backend=backend, device=where)
            add_generation_settings(model, checkpoint)
    model = model.to(where).eval().requires_grad_(False)
    replace_rmsnorms(model)
    if invariant:
        batch_invariant(model)
    return make_saveable(model, meta=meta), tokenizer


def _device(device: str | torch.device) -> str:
    """torch's name of the device, its number included where there are several. BackendError for one
    that is not here.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise BackendError(f"[load_model] device={str(device)!r}; allowed: {', '.join(DEVICES)}, cuda:N") from None
    if found.type not in DEVICES:
        raise BackendError(f"[load_model] device={str(device)!r}; allowed: {', '.join(DEVICES)}, cuda:N")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise BackendError("[load_model] device='mps': torch sees no Apple GPU here; use device='cpu'")
    if found.type != "cuda":
        return str(found)
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise BackendError(
            f"[load_model] device={str(device)!r}: torch {torch.__version__}, {built}, sees no NVIDIA GPU here; "
            "use device='cpu', or see `halfbyte backends`"
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise BackendError(f"[load_model] device={str(device)!r}; allowed: cuda:0 to cuda:{count - 1}, the GPUs that torch sees")
    return f"cuda:{index}"


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """torch's dtype of what was asked for. FormatError for one that nothing is computed in."""
    word = None if dtype is None else str(dtype).removeprefix("torch.")
    if word is not None and word not in X_DTYPES:
        raise FormatError(f"[load_model] dtype={word!r}; allowed: {', '.join(X_DTYPES)}")
    return None if word is None else getattr(torch, word)


def model_config(checkpoint: Checkpoint) -> Any:
    """The transformers configuration of an opened checkpoint."""
    return config_of(checkpoint) if isinstance(checkpoint, GGUFCheckpoint) else config_of_folder(checkpoint)


def import_model_code(path: str | Path, config: Mapping[str, Any] | None = None) -> None:
    """Imports what `load_model` will need for this file, so that its time can be separated from the
    model's; `config` as for `load_model`.
    """
    from .compat import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    with open_checkpoint(path, config) as checkpoint:
        kind = type(model_config(checkpoint))
    for classes in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if kind in classes:
            classes[kind]  # imports the module that defines it
            return


def model_size(model: nn.Module) -> Size:
    """Bytes and weights of a model's packed modules and parameters."""
    packed = {id(h): h for m in packed_modules(model).values() for h in m.packed.values()}.values()
    parameters = list(model.parameters())
    nbytes = sum(w.nbytes for w in packed) + sum(p.numel() * p.element_size() for p in parameters)
    return Size(nbytes, sum(math.prod(w.shape) for w in packed) + sum(p.numel() for p in parameters))
