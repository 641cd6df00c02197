"""Numbers of a config.json that no tensor of the checkpoint can have.

    impossible_number(config, tensors, longest)    the first of them as a clause, "" for none

transformers builds a model of these numbers before a tensor is read, so that 10^6 layers would take
minutes and lists of 2^31 entries all memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
STRUCTURE = re.compile(r"(num|n)_.+|.+_(heads|layers|experts|dim|rank|size)")
"""Keys of numbers that are lengths of tensors or modules."""
UNBOUNDED = re.compile(r"(.+_)?chunk_size|initial_context_length|sliding_window_size")
"""Among them, those that are lengths of texts and sounds."""
ALWAYS_ALLOWED = 1 << 16
"""Lengths that cost nothing, whatever the tensors are."""


def impossible_number(config: Mapping[str, Any], tensors: int, longest: int) -> str:
    """The first number of layers, experts, heads or dimensions that no tensor can have, as a
    clause; "" when there is none.

    tensors  how many the checkpoint has
    longest  their longest axis
    """
    limit = max(ALWAYS_ALLOWED, 4 * longest, tensors)
    for part in (config, *(v for k, v in config.items() if k.endswith("_config") and isinstance(v, dict))):
        for key, value in part.items():
            if isinstance(value, bool) or not isinstance(value, int) or not STRUCTURE.fullmatch(key) or UNBOUNDED.fullmatch(key):
                continue
            if key in LAYERS and value > tensors:
                return f"{key} = {value:,}; its {tensors:,} tensors allow at most as many"
            if value > limit:
                return f"{key} = {value:,}; the longest axis of its tensors is {longest:,}, and up to {limit:,} is allowed"
            if value < -1:
                return f"{key} = {value:,}; 0 or more is allowed"
    return ""
