"""Algorithms that choose codes and scales: round to nearest, least squared error, or least error on
calibration inputs.

| method | needs | rounds |
|---|---|---|
| `rtn` | the weight | to nearest, under the format's default policy |
| `mse` | the weight | to nearest, under searched scales (`fitting.py`) |
| `gptq` | its inputs' Hessian | one input after another, propagating errors (`gptq_rounding.py`) |
| `awq` | its inputs' Hessian and the preceding operation | to nearest after scaling inputs (`awq_search.py`) |
| `learned` | the layer's inputs and outputs | by gradient descent (`calibration/learned.py`) |

`mse` and `gptq` take torch tensors too, for formats where `on_tensors` is true, and run on their
device.
"""

from __future__ import annotations

from .awq_search import awq_scales, fold_into_rows
from .gptq_rounding import Factored, factored, gptq, weighted_error
from .grid import has_grid, on_tensors
from .mse_search import has_search, mse

METHODS = ("rtn", "mse", "gptq", "awq", "learned")

__all__ = [
    "METHODS", "Factored", "awq_scales", "factored", "fold_into_rows", "gptq", "has_grid", "has_search", "mse", "on_tensors",
    "weighted_error",
]  # fmt: skip
