"""A model with its packed matrices requantized in memory, to measure a change of format before
anything is written.

    other = requantized(model, "mxfp4")        exact values of each packed weight, rounded to
                                               nearest into the codec

A weight that two modules share (a tied head) is requantized once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from ..errors import HalfbyteError
from ..tensor.quantize import quantize
from ..torch.modules import packed_modules
from ..torch.packed_weight import PackedWeight
from .protocols import EvaluationError


def requantized(model: Any, codec: str, *, policy: str | None = None, keep: Callable[[str], bool] = lambda name: False) -> Any:
    """A copy of `model`, dense parameters shared, whose packed weights are in `codec`.

    policy  a producer's rounding, as for `quantize`
    keep    names of modules that stay as they are
    EvaluationError, naming the module, for a weight that the codec cannot hold.
    """
    # The copy shares packed weights by itself; parameters are shared through the memo.
    memo: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    other = deepcopy(model, memo)
    cache: dict[int, PackedWeight] = {}
    for name, module in packed_modules(other).items():
        for piece, weight in module.packed.items():
            if keep(name):
                continue
            if id(weight) not in cache:
                cache[id(weight)] = _requantized_weight(weight, codec, policy, name)
            module.packed[piece] = cache[id(weight)]
    return other


def _requantized_weight(weight: PackedWeight, codec: str, policy: str | None, name: str) -> PackedWeight:
    try:
        q = quantize(weight.canonical().dequantize("float32"), codec, policy)
        return weight.of_same_kind(q)
    except HalfbyteError as error:
        raise EvaluationError(f"[eval] {name} cannot be stored as {codec}: {error}") from error
