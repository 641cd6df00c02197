"""A GGUF file as a model of vLLM: its configuration and its tokenizer, which vLLM asks for by a
config format and a tokenizer mode.

    vllm serve model.gguf --config-format halfbyte --tokenizer-mode halfbyte

Everything is read from the file itself; its weights stay packed (`source.Source`).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from vllm.engine import arg_utils
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tokenizers.registry import TokenizerRegistry
from vllm.transformers_utils import config as vllm_configs
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from transformers import AutoConfig

from ..checkpoints import open as open_checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import UnsupportedError
from ..gguf_models.tokenizer import end_of_turn_ids, tokenizer_of
from .source import model_view

NAME = "halfbyte"


def open_gguf(path: str | Path) -> GGUFCheckpoint:
    """The file. UnsupportedError for another kind of checkpoint, CheckpointError for a damaged one."""
    checkpoint = open_checkpoint(path)
    if not isinstance(checkpoint, GGUFCheckpoint):
        checkpoint.close()
        raise UnsupportedError(f"[vllm] {path} is no GGUF file; a folder wants config format and tokenizer mode 'auto'")
    return checkpoint


class GGUFConfigParser(ConfigParserBase):  # type: ignore[misc] # vLLM is not type-checked
    """The config format "halfbyte": transformers' configuration of the model in a GGUF file."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], Any]:
        """(config.json, configuration). Raises what `open_gguf` raises, and UnsupportedError for an
        architecture that has no table.
        """
        with open_gguf(model) as checkpoint:
            settings = {**model_view(checkpoint).config, "quantization_config": {"quant_method": NAME}}
            if ends := end_of_turn_ids(checkpoint.metadata):
                settings["eos_token_id"] = ends
        return settings, AutoConfig.for_model(**settings)


class GGUFTokenizer:
    """The tokenizer mode "halfbyte": transformers' tokenizer from the vocabulary of a GGUF file."""

    @classmethod
    def from_pretrained(cls, path_or_repo_id: str | Path, *args: Any, **kwargs: Any) -> Any:
        """The tokenizer. Raises what `open_gguf` and `gguf_models.tokenizer.tokenizer_of` raise."""
        with open_gguf(path_or_repo_id) as checkpoint:
            return get_cached_tokenizer(tokenizer_of(checkpoint))


def _pass_over_gguf(look: Any) -> Any:
    """`maybe_override_with_speculators` that leaves GGUF files alone: whatever the config format,
    it reads a model's path as config.json.
    """

    @functools.wraps(look)
    def looked(model: str, tokenizer: str | None, *args: Any, **kwargs: Any) -> Any:
        if str(model).endswith(".gguf"):
            return model, tokenizer, kwargs.get("vllm_speculative_config")
        return look(model, tokenizer, *args, **kwargs)

    return looked


def register_gguf() -> None:
    """Add the config format and the tokenizer mode "halfbyte"."""
    if vllm_configs._CONFIG_FORMAT_TO_CONFIG_PARSER.get(NAME) is not GGUFConfigParser:
        vllm_configs.register_config_parser(NAME)(GGUFConfigParser)
        arg_utils.maybe_override_with_speculators = _pass_over_gguf(arg_utils.maybe_override_with_speculators)
    if NAME not in TokenizerRegistry.tokenizers:
        TokenizerRegistry.register(NAME, __name__, GGUFTokenizer.__name__)
        RENDERER_REGISTRY.register(NAME, *RENDERER_REGISTRY.renderers["hf"])
