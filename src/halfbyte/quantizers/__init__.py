"""How a weight is rounded: to nearest, with the least squared error, or with the least error on calibration inputs.

| method | needs | rounds |
|---|---|---|
| `rtn` | the weight | to nearest, under the format's default policy |
| `mse` | the weight | to nearest, under searched scales (`fitting.py`) |
| `gptq` | its inputs' Hessian | one input after another, errors passed on (`gptq_rounding.py`) |
| `awq` | its inputs' Hessian and what comes before | to nearest after scaling inputs (`awq_search.py`) |

`mse` and `gptq` take torch tensors too, for formats of which `on_tensors` is true, and work where those lie.
"""

from __future__ import annotations

from .awq_search import awq_scales, fold_into_rows
from .gptq_rounding import Factored, factored, gptq, weighted_error
from .grid import has_grid, on_tensors
from .mse_search import mse

METHODS = ("rtn", "mse", "gptq", "awq")

__all__ = [
    "METHODS", "Factored", "awq_scales", "factored", "fold_into_rows", "gptq", "has_grid", "mse", "on_tensors", "weighted_error",
]  # fmt: skip
