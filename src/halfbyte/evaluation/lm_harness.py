"""A packed model as a model of lm-evaluation-harness.

    lm_eval run --model halfbyte --model_args path=model.gguf,activations=int8 --tasks arc_easy

`halfbyte_autoload` enters the model in the harness's registry. The harness's own Hugging Face class
does the rest: batching, likelihoods, generation. Needs `pip install 'lm_eval[hf]'`.
"""

from __future__ import annotations

import warnings
from typing import Any

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as e:
    sentence = f"{e.name}, which halfbyte.evaluation.lm_harness needs; pip install 'lm_eval[hf]'"
    raise ModuleNotFoundError(sentence, name=e.name) from e

import torch

from ..errors import UnsupportedError
from ..transformers import load_model

LOADING = ("device", "dtype", "activations", "backend")
"""Arguments that `load_model` takes; the others go to the harness's class."""


@register_model("halfbyte")
class HalfbyteLM(HFLM):  # type: ignore[misc,unused-ignore]
    """HFLM over `load_model(path)`."""

    def __init__(self, path: str, **options: Any) -> None:
        loading = {k: options.pop(k) for k in LOADING if k in options}
        if str(loading.get("device")).startswith("cuda") and not torch.cuda.is_available():
            # The harness's command passes its default, "cuda:0", everywhere.
            warnings.warn("[lm_eval] no NVIDIA GPU is seen here; the model runs on the CPU", RuntimeWarning, stacklevel=2)
            loading["device"] = "cpu"
        model, tokenizer = load_model(path, **loading)
        if tokenizer is None:
            raise UnsupportedError(f"[eval] {path} has no tokenizer; put its tokenizer.json beside the weights")
        super().__init__(pretrained=model, tokenizer=tokenizer, device=str(model.device), **options)
