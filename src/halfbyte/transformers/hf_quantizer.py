"""Loading through transformers: `from_pretrained` with a `HalfbyteConfig`, and `save_pretrained`
of packed models.

    import halfbyte.transformers
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HalfbyteConfig())
    model = AutoModelForCausalLM.from_pretrained(
        path, gguf_file="m.gguf", quantization_config=HalfbyteConfig())
    model.save_pretrained(folder)           halfbyte's own layout, which `halfbyte.open` and
                                            from_pretrained read

transformers reads the dense tensors; modules whose weights are packed are replaced by placeholders
meanwhile, and filled from the files afterwards, whatever wrote them. Where the caller passes a
HalfbyteConfig, the quantization config of the files is hidden from transformers
(`compat.prefer_callers_config`), because `halfbyte.open` reads it. Of a GGUF file transformers
loads no tensor: its model gets `load_model`'s configuration, is emptied before and filled after.

A program that does not import halfbyte reads such a folder too where halfbyte is installed
(`halfbyte_autoload`). Where it is not, transformers warns of an unknown quantization type and
leaves weights random.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import torch
from torch import nn

from ..backends import ACTIVATIONS
from ..checkpoints import Checkpoint
from ..checkpoints import open as open_checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.views.gptqmodel_gpt_oss import has_split_gate_up
from ..errors import CheckpointError, FormatError, UnsupportedError
from ..torch.modules import Packed, QEmbedding, packed_modules
from ..torch.state import tensors_of
from .build import config_of_gguf, default_dtype, model_of_gguf
from .compat import QUANTIZATION_TABLES, WeightRenaming, prefer_callers_config
from .decode.rmsnorm import replace_rmsnorms
from .fill.safetensors import FolderFilling

METHOD = "halfbyte"
KEPT = ("_attn_implementation_internal", "_experts_implementation_internal", "quantization_config")
"""What `from_pretrained` has set in a configuration before a GGUF file is read."""

for _table in QUANTIZATION_TABLES:
    _table.pop(METHOD, None)  # what halfbyte_autoload entered in place of the classes below


@register_quantization_config(METHOD)
class HalfbyteConfig(QuantizationConfigMixin):  # type: ignore[misc] # transformers is not type-checked
    """How packed weights run.

    activations  as in `halfbyte.linear`
    backend      None picks the best one that serves
    meta         who wrote the checkpoint that a saved model came from, where reading depends on it
                 it (`has_split_gate_up`)
    """

    def __init__(
        self, activations: str = "exact", backend: str | None = None, meta: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if activations not in ACTIVATIONS:
            codec = activations if ":" in activations else "int4:g128"
            raise FormatError(
                f"[HalfbyteConfig] activations={activations!r}; allowed: {', '.join(ACTIVATIONS)}. It says how weights run that "
                f"a checkpoint holds packed; a dense one is packed before: halfbyte quantize MODEL OUT --to halfbyte:{codec}"
            )
        prefer_callers_config(HalfbyteConfig)
        self.quant_method = METHOD
        self.activations, self.backend = activations, backend
        if meta:
            self.meta = meta


class _Aside(nn.Module):  # type: ignore[misc]
    """Placeholder of a packed module: no parameters, so that transformers loads nothing for it.
    Some models initialize the weight of a layer by its name.
    """

    @property
    def weight(self) -> torch.Tensor:
        return torch.empty(0)


@register_quantizer(METHOD)
class HalfbyteQuantizer(HfQuantizer):  # type: ignore[misc]
    """Fills packed modules before and after transformers has loaded the rest."""

    gguf: Path | None = None
    device_map: Any = None
    model_config: Any = None
    """What transformers makes the model from."""

    def read_header(self, gguf_file: str) -> None:
        """transformers names the file of `from_pretrained(gguf_file=...)` here, before it makes the
        model. Its configuration becomes `load_model`'s.
        """
        self.gguf = Path(gguf_file)
        with _open_gguf(self.gguf) as checkpoint:
            ours = config_of_gguf(checkpoint)
        theirs = self.model_config
        if type(ours) is not type(theirs):
            raise UnsupportedError(
                f"[from_pretrained] {gguf_file}: transformers reads a {type(theirs).__name__}, halfbyte a {type(ours).__name__}; "
                "use halfbyte.load_model"
            )
        asked = {key: value for key, value in vars(theirs).items() if key in KEPT}
        vars(theirs).update(vars(ours) | asked)

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Any]:
        """transformers asks for the tensors of a GGUF file here; it loads none of them."""
        return {}

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """transformers gives None for a GGUF file of which no dtype was asked for."""
        self.dtype = default_dtype(dtype, _one_device(self.device_map), self.model_config)
        return self.dtype

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.device = _one_device(kwargs.get("device_map"))
        if self.gguf is not None:
            self.modules = {}
            model._modules.clear()
            model.all_tied_weights_keys = {}
            return model
        self.path = _common_path(kwargs.get("checkpoint_files"))
        with open_checkpoint(self.path) as checkpoint:
            self.paths = _packed_paths(model, checkpoint, self._filling(model, checkpoint))
        self.modules = {path: model.get_submodule(path) for path in self.paths}
        self.tied = dict(model.all_tied_weights_keys)
        for path in self.paths:
            model.set_submodule(path, _Aside())
        if self.modules:
            # The filling ties weights; transformers ties no packed ones.
            model.all_tied_weights_keys = {
                a: b for a, b in model.all_tied_weights_keys.items() if not self._aside(a) and not self._aside(b)
            }
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), r".*"}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.gguf is not None:
            return make_saveable(self._fill_from_gguf(model, self.gguf), self)
        for path, module in self.modules.items():
            model.set_submodule(path, module)
        self.modules = {}
        with open_checkpoint(self.path) as checkpoint, torch.device("cpu"):
            filling = self._filling(model, checkpoint)
            filling.tied = self.tied
            filling.run(only=self.paths)
            if has_split_gate_up(checkpoint.config):
                self.quantization_config.meta = checkpoint.config["quantization_config"]["meta"]
        return make_saveable(model, self)

    def _fill_from_gguf(self, model: Any, path: Path) -> Any:
        """`model` with the modules of `load_model`'s model of the file."""
        options = self.quantization_config
        with _open_gguf(path) as checkpoint, torch.device("cpu"):
            full = model_of_gguf(checkpoint, model.config, self.dtype, self.device, options.activations, options.backend)
        model.__dict__ = full.to(self.device).eval().requires_grad_(False).__dict__
        replace_rmsnorms(model)
        return model

    def _filling(self, model: Any, checkpoint: Checkpoint) -> FolderFilling:
        config = self.quantization_config
        return FolderFilling(model, checkpoint, activations=config.activations, backend=config.backend, device=self.device)

    def _aside(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.modules

    def update_device_map(self, device_map: Any) -> Any:
        """Packed weights go to one device: of the maps that transformers would compute, all are the
        first GPU, else the CPU.
        """
        if isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
            device_map = {
                "": torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            }
        self.device_map = device_map
        return device_map

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """transformers' own, but for those whose target is filled here. transformers 5.17 gives no
        model.
        """
        packed = any(hasattr(m, "gate_up_proj") for m in self.modules.values())
        return [c for c in weight_conversions if isinstance(c, WeightRenaming) or not packed]

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """The state dict without a second copy of a tied head."""
        return packed_state_dict(model), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """True: the gradient passes through packed weights to adapters (`torch/peft.py`)."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def make_saveable(model: Any, quantizer: HalfbyteQuantizer | None = None, meta: dict[str, Any] | None = None) -> Any:
    """The model, so that its `save_pretrained` writes packed weights and a config that says so."""
    config = quantizer.quantization_config if quantizer is not None else HalfbyteConfig(meta=meta)
    model.hf_quantizer = quantizer or HalfbyteQuantizer(config)
    model.config.quantization_config = config
    model.get_memory_footprint, model.num_parameters = Accounting(model, memory_footprint), Accounting(model, number_of_weights)
    model._weight_conversions = []  # names and stacks are written as the model has them
    # Only what is one parameter by now is tied: another call of tie_weights() must not look for
    # packed weights, nor put an embedding in the place of a head that was stored.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = {a: b for a, b in model.all_tied_weights_keys.items() if a in parameters and parameters[a] is parameters.get(b)}
    model.all_tied_weights_keys = model._tied_weights_keys = tied
    return model


class Accounting:
    """A method of one model that counts packed weights, which are no parameters. It keeps no model
    alive.
    """

    def __init__(self, model: Any, count: Callable[..., int]) -> None:
        self.__setstate__({"model": model, "count": count})

    def __call__(self, *args: Any, **options: Any) -> int:
        return int(self.count(self.model(), *args, **options))

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model(), "count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model, self.count = weakref.ref(state["model"]), state["count"]


def memory_footprint(model: Any, return_buffers: bool = True) -> int:
    """Bytes of parameters, packed weights and, by default, buffers; shared ones counted
    once.
    """
    packed = {id(w): w for m in packed_modules(model).values() for w in m.packed.values()}
    tensors = [*model.parameters(), *(model.buffers() if return_buffers else ())]
    return int(sum(w.nbytes for w in packed.values()) + sum(t.nelement() * t.element_size() for t in tensors))


def number_of_weights(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Parameters and packed weights, which are not trainable; shared ones counted once."""
    modules = dict(model.named_modules())
    tables = [m for m in modules.values() if isinstance(m, QEmbedding | nn.Embedding)] if exclude_embeddings else []
    left_out = {id(w) for m in tables for w in (m.packed.values() if isinstance(m, QEmbedding) else [m.weight])}
    packed = {id(w): w.numel() for m in packed_modules(model).values() for w in m.packed.values()}
    dense = {id(p): p.numel() for p in model.parameters() if p.requires_grad or not only_trainable}
    counted = dense if only_trainable else packed | dense
    return sum(n for key, n in counted.items() if key not in left_out)


def packed_state_dict(model: Any) -> dict[str, Any]:
    """Parameters and canonical parts by name; a head that shares the embedding's weight is left out
    when the config ties them.
    """
    state: dict[str, Any] = {}
    seen: set[int] = set()
    head = model.get_output_embeddings()
    shared = bool(getattr(model.config, "tie_word_embeddings", False)) and _shares(head, model.get_input_embeddings())
    for name, module in model.named_modules():
        if shared and module is head:
            continue
        if isinstance(module, Packed):
            for piece in module.packed:
                base = ".".join(p for p in (name, piece) if p)
                state |= {f"{base}.{part}": t for part, t in tensors_of(module.canonical(piece)).items()}
        for leaf, value in (*module.named_parameters(recurse=False), *_persistent(module)):
            if id(value) not in seen:
                seen.add(id(value))
                state[f"{name}.{leaf}" if name else leaf] = value.detach()
    return state


def _persistent(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    skipped = module._non_persistent_buffers_set
    return [(n, b) for n, b in module.named_buffers(recurse=False) if n not in skipped]


def _shares(head: Any, table: Any) -> bool:
    return head is not None and getattr(head, "weight", None) is getattr(table, "weight", head)


def _packed_paths(model: Any, checkpoint: Checkpoint, filling: FolderFilling) -> set[str]:
    """Paths of the modules that packed weights go into, with a tied head that is not stored."""
    groups, _ = filling.plan()
    quantized = [keys for keys in groups.values() if any(checkpoint.info(key).quantized for key in keys.values())]
    paths = {path for keys in quantized for path in (next(iter(keys)).path, *next(iter(keys)).divided)}
    filled = {next(iter(keys)).path for keys in groups.values()}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if source.rpartition(".")[0] in paths and (path := target.rpartition(".")[0]) not in filled:
            paths.add(path)
    names = {id(m): n for n, m in model.named_modules()}
    ends = [names.get(id(m)) for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    if getattr(model.config, "tie_word_embeddings", False) and any(e in paths for e in ends):
        paths |= {e for e in ends if e is not None and e not in filled}
    return paths


def _one_device(device_map: Any) -> str:
    """The device of a device map. UnsupportedError for several."""
    devices = {
        str(torch.device(d) if not isinstance(d, int) else torch.device("cuda", d)) for d in (device_map or {"": "cpu"}).values()
    }
    if len(devices) != 1:
        raise UnsupportedError(f"[from_pretrained] device_map over {', '.join(sorted(devices))}; packed weights go to one device")
    device = devices.pop()
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def _open_gguf(path: Path) -> GGUFCheckpoint:
    checkpoint = open_checkpoint(path)
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise CheckpointError(f"[from_pretrained] {path} is {checkpoint.format}; gguf_file names a GGUF file")
    return checkpoint


def _common_path(files: Any) -> Path:
    """The folder (or file) that transformers was going to read."""
    paths = [Path(f) for f in files or ()]
    if not paths:
        raise CheckpointError("[from_pretrained] no checkpoint files; packed weights are read from safetensors files")
    if any(p.suffix != ".safetensors" for p in paths):
        raise UnsupportedError(
            f"[from_pretrained] {paths[0].name}; packed weights are read from safetensors files, and GGUF files by gguf_file="
        )
    return paths[0].parent
