"""Perplexity of a model, and its divergence from a baseline. Needs torch and transformers.

perplexity(model, windows)                  of one model
compare(model, baseline, windows)           equal tokens, KL divergence, cosines by layer
llama_cpp(ids, context, bos), sliding(...)  the windows of a text and their scored tokens
"""

try:
    from .compare import Comparison, LayerDrift, compare
    from .perplexity import Perplexity, perplexity
    from .protocols import PROTOCOLS, EvaluationError, Window, llama_cpp, sliding, windows_of
    from .thresholds import Thresholds, Verdict
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"{e.name}, which halfbyte.evaluation needs; pip install 'halfbyte[transformers]'", name=e.name
    ) from e

__all__ = [
    "PROTOCOLS", "Comparison", "EvaluationError", "LayerDrift", "Perplexity", "Thresholds", "Verdict", "Window", "compare",
    "llama_cpp", "perplexity", "sliding", "windows_of",
]  # fmt: skip
