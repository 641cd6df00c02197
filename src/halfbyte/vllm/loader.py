"""vLLM's loader of a checkpoint whose packed weights halfbyte multiplies.

    create_model   opens the checkpoint, so that each layer can ask whether its weight is packed
    load_weights   fills packed layers one after another, and passes every dense tensor to the
                   model's own `load_weights`

It is vLLM's default loader for every other model.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.utils.torch_utils import set_default_torch_dtype

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..torch.modules import packed_modules
from .experts import HalfbyteExpertsMethod
from .linear import HalfbyteLinearMethod

logger = init_logger("vllm.halfbyte")

NAME = "halfbyte"


class HalfbyteLoader(DefaultModelLoader):  # type: ignore[misc] # vLLM is not type-checked
    """Loads models of quantization "halfbyte"; other models as vLLM does."""

    def __init__(self, load_config: Any) -> None:
        if load_config.load_format == NAME:
            load_config = _with_format(load_config, "auto")
        super().__init__(load_config)
        self.config: Any = None

    def create_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """The model without weights. Raises what opening the checkpoint raises."""
        if vllm_config.quant_config is None or vllm_config.quant_config.get_name() != NAME:
            return super().create_model(vllm_config, model_config, prefix)
        self.config = vllm_config.quant_config
        self.config.open(self._path(model_config))
        return super().create_model(vllm_config, model_config, prefix)

    def _path(self, model_config: ModelConfig) -> str:
        """The checkpoint on this machine, downloaded by vLLM's rules where it is a name on a hub."""
        if os.path.exists(model_config.model):
            return str(model_config.model)
        folder, *_ = self._prepare_weights(model_config.model, None, model_config.revision, False, None)
        return str(folder)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fills the model. CheckpointError naming the parameters that no tensor filled."""
        if self.config is None:
            super().load_weights(model, model_config)
            return
        source = self.config.source()
        device = str(next(model.parameters()).device)
        done: set[str] = set()
        names: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[parameter].append(name)
        # vLLM sets its own default dtype and device while a model is loaded.
        with torch.device("cpu"), set_default_torch_dtype(torch.float32):
            numbered: list[tuple[nn.Module, HalfbyteLinearMethod]] = []
            for layer in model.modules():
                method = getattr(layer, "quant_method", None)
                if not isinstance(method, HalfbyteLinearMethod):
                    continue
                if method.is_numbered(layer):
                    numbered.append((layer, method))
                else:
                    method.fill(layer, source, device)
                if not _of_dense_table(layer):
                    done.update(method.keys)
            rest = done | self.config.expert_keys()
            if expanded := [key for key in source.matrices.values() if key not in rest]:
                logger.warning("dequantized, for vLLM's layer takes no packed weight: %s", ", ".join(expanded))
            rows = (source.row_numbers(key) for _, method in numbered for key in method.keys)
            taken: set[str] = set()
            loaded = model.load_weights(_passed_over(model, itertools.chain(rows, source.dense(rest)), taken))
            for layer, method in numbered:
                method.fill(layer, source, device)
            for layer in model.modules():
                method = getattr(layer, "quant_method", None)
                if isinstance(method, HalfbyteExpertsMethod):
                    method.fill(layer, source, device)
                    done.update(method.keys.values())
        self.config.close()
        if loaded is not None:
            empty = [each[0] for each in names.values() if not (loaded | taken).intersection(each)]
            if empty:
                raise CheckpointError(
                    f"[vllm] {model_config.model}: no tensor for {', '.join(empty[:5])}"
                    + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
                )
        packed = sum(module.nbytes for module in packed_modules(model).values())
        logger.info("halfbyte multiplies %d packed weights, %.1f MB", len(done), packed / 1e6)


def _passed_over(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], taken: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, without those of a mixture that its module in vLLM passes over because it looks
    for experts alone (Laguna's bias of the router): these fill their parameters, whose names are
    added to `taken`.
    """
    inner = {
        name.replace(".routed_experts.", "."): (name, parameter)
        for name, parameter in model.named_parameters()
        if ".routed_experts." in name and not hasattr(parameter, "weight_loader")
    }
    for name, value in tensors:
        if name in inner:
            own, parameter = inner[name]
            parameter.data.copy_(value)
            taken.add(own)
        else:
            yield name, value


def _of_dense_table(layer: nn.Module) -> bool:
    """Whether a packed head shares its weight with a table that vLLM keeps dense (Mixtral's): the
    table needs the tensor too.
    """
    table = getattr(layer, "halfbyte_tied", None)
    return table is not None and not isinstance(getattr(table, "quant_method", None), HalfbyteLinearMethod)


def _with_format(load_config: Any, load_format: str) -> Any:
    from vllm.config import replace

    return replace(load_config, load_format=load_format)


def register_loader() -> None:
    """Add the load format "halfbyte"."""
    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(NAME) is not HalfbyteLoader:
        model_loader.register_model_loader(NAME)(HalfbyteLoader)
