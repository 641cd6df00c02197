"""The internals of transformers that this package touches, with the versions they were tested with.

Nothing is patched when this is imported. `prefer_callers_config` replaces one function of
transformers, when a program makes its first HalfbyteConfig.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import transformers.core_model_loading
import transformers.modeling_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import transformers

__all__ = [
    "CONFIG_MAPPING",
    "DEFAULT_GATE",
    "DIVIDING_ROWS",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "QUANTIZATION_TABLES",
    "Concatenate",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "WeightConverter",
    "WeightRenaming",
    "cache_name",
    "get_model_conversion_mapping",
    "keeps_states",
    "prefer_callers_config",
]

QUANTIZATION_TABLES: tuple[dict[str, Any], ...] = (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING)
"""Quantization method -> configuration class, and -> quantizer."""

DIVIDING_ROWS: tuple[type, ...] = tuple(
    getattr(transformers.core_model_loading, name)
    for name in ("Chunk", "Split")
    if hasattr(transformers.core_model_loading, name)
)
"""Conversions that divide one tensor among modules; 5.17 does not have `Split`."""

OLDEST, TESTED = (5, 0), (5, 24)
"""The oldest version that has these names, and the newest that the tests ran with."""

DEFAULT_GATE = "transformers.integrations.moe"
"""Module in which transformers defines the gate act(gate) · up; experts that override it compute
something else.
"""


def _check_version() -> None:
    """A warning for a version outside the tested range."""
    have = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if have < OLDEST:
        raise ImportError(f"transformers {transformers.__version__}; halfbyte.transformers needs 5.0 or newer")
    if have > TESTED:
        warnings.warn(
            f"transformers {transformers.__version__} is newer than the tested {'.'.join(map(str, TESTED))}; report what fails",
            RuntimeWarning,
            stacklevel=3,
        )


_check_version()


def cache_name(model: Any) -> str:
    """The argument and output of a model's forward that is its cache: `cache` in newer
    versions, `past_key_values` in older ones.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def keeps_states(model: Any) -> bool:
    """Whether a model has more of earlier tokens than keys and values in its cache: states, such as
    Mamba's, or keys in a module (GLM's indexer before 5.17). Several tokens are then computed right
    in one pass alone, the first one.
    """
    return getattr(model, "_is_stateful", False) or any(hasattr(m, "_cached_keys") for m in model.modules())


def prefer_callers_config(kind: type) -> None:
    """Let a quantization config of type `kind` that the caller gives replace what the files say,
    and read GGUF files.

    transformers' `get_hf_quantizer` refuses two configs of different types, and `gguf_file` with
    any config but its own; it has no hook for either.
    """
    original = transformers.modeling_utils.get_hf_quantizer
    if hasattr(original, "halfbyte"):
        return

    @functools.wraps(original)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(quantization_config, kind):
            for holder in (config, config.get_text_config(decoder=True)):
                for key in ("quantization_config", "quantization"):
                    if hasattr(holder, key):
                        delattr(holder, key)
            kwargs.pop("gguf_file", None)
            quantizer, config, device_map = original(config, quantization_config, *args, **kwargs)
            quantizer.model_config = config
            return quantizer, config, device_map
        return original(config, quantization_config, *args, **kwargs)

    get_hf_quantizer.halfbyte = True  # type: ignore[attr-defined]
    transformers.modeling_utils.get_hf_quantizer = get_hf_quantizer
