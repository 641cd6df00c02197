"""Models with convolutions, of which mlx-lm's folders hold dense tensors in another form.

    conv1d.weight (channels, 1, taps)          (channels, taps, 1)
    w of Qwen3-Next's norms, x * (1 + w)       1 + w
    multipliers of a Falcon-H1's config.json   within its weights
    feed_forward.w1, w2, w3 of LFM2's mixture  feed_forward.gate_proj, down_proj, up_proj

`from_mlx` gives the left side of a folder that holds the right one, `to_mlx` the right one of a
tensor. mlx-lm takes a folder with convolutions of the right form for one that it wrote itself, and
changes nothing as it loads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...tensor.qtensor import QTensor
from ..architecture import text_config
from ..base import Checkpoint, TensorInfo
from ..mlx_names import usual_name
from .base import View

_SHIFTED = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types whose norms multiply by 1 + w."""
_TYPES = frozenset({
    "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h", *_SHIFTED,
})  # fmt: skip
_CONVOLUTION = re.compile(r"\.conv(?:1d)?\.weight$")
_NORM = re.compile(r"\.(?:input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight$|(?:^|\.)model\.norm\.weight$")


def to_mlx(config: Mapping[str, Any], key: str, array: NDArray[Any]) -> NDArray[Any]:
    """A dense tensor of a model as mlx-lm's folders have it. The multipliers of a Falcon-H1 cannot
    go into packed weights: with others than 1 its tensors stay as they are.
    """
    kind = str(text_config(config).get("model_type"))
    if kind not in _TYPES or any(np.any(np.asarray(value) != 1) for value in _multipliers(config).values()):
        return array
    if _CONVOLUTION.search(key) and array.ndim == 3 and array.shape[1] == 1:
        return array.reshape(array.shape[0], array.shape[2], 1)
    shifted = kind in _SHIFTED and array.ndim == 1 and _NORM.search(key)
    return array.astype(np.float32) + np.float32(1) if shifted else array


def from_mlx(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint`, or a view in which the convolutions of mlx-lm's form, and the norms beside
    them, have that of transformers.
    """
    if str(text_config(checkpoint.config).get("model_type")) not in _TYPES:
        return checkpoint
    convolutions = [i.key for i in checkpoint.infos() if _CONVOLUTION.search(i.key) and _taps_first(i)]
    return MLXForm(checkpoint, frozenset(convolutions)) if convolutions else checkpoint


def _taps_first(info: TensorInfo) -> bool:
    return not info.quantized and len(info.shape) == 3 and info.shape[1] > info.shape[2] == 1


class MLXForm(View):
    """`source` with its `convolutions`, and Qwen3-Next's norms, as transformers has them. Norms are
    in float32.
    """

    def __init__(self, source: Checkpoint, convolutions: frozenset[str]) -> None:
        super().__init__(source)
        self._convolutions = convolutions
        kind = str(text_config(source.config).get("model_type"))
        self._shifted = kind in _SHIFTED
        self._names = {usual_name(kind, key): key for key in source.keys()}  # noqa: SIM118 a checkpoint's keys are in file order
        ones = {name: np.ones_like(np.asarray(value, np.float32)).tolist() for name, value in _multipliers(self.config).items()}
        self.config = {**self.config, **ones}

    def keys(self) -> tuple[str, ...]:
        return tuple(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names or key in self.source

    def _is_norm(self, info: TensorInfo) -> bool:
        return self._shifted and len(info.shape) == 1 and _NORM.search(info.key) is not None

    def info(self, key: str) -> TensorInfo:
        info = replace(self.source.info(self._names.get(key, key)), key=key)
        if key in self._convolutions:
            return replace(info, shape=(info.shape[0], 1, info.shape[1]))
        return replace(info, dtype="float32", nbytes=4 * math.prod(info.shape)) if self._is_norm(info) else info

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        weight = self.source[self._names.get(key, key)]
        if isinstance(weight, QTensor):
            return weight
        info = self.info(key)
        return weight.astype(np.float32) - np.float32(1) if self._is_norm(info) else weight.reshape(info.shape)

    def fetch(self, key: str) -> None:
        self.source.fetch(self._names.get(key, key))


def _multipliers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A Falcon-H1's."""
    if config.get("model_type") != "falcon_h1":
        return {}
    return {k: v for k, v in config.items() if k.endswith(("_multiplier", "_multipliers")) and v is not None}
