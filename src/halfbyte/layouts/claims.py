"""What a layout and a config reader state that they consume: the entries of the ledger that
`checkpoints.ledger` keeps.

    layout.consumes(suffixes)   -> one Claim for each tensor of a module that the layout reads, or
                                knows to be harmless
    reader.key_uses()           -> one KeyUse for each key of the quantization config, nested keys
                                by their dotted path

Whatever has no entry here is unknown: a tensor that nobody claims, a key that nobody consumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

AUXILIARY = "auxiliary"
"""The `part` of a tensor that does not enter the weight's values and is known to be harmless."""
PARAMETERS = "parameters"
"""The `part` of a tensor that describes the weight (its shape, its quantization state) and is read
as such.
"""

CONSUMED, HARMLESS, UNKNOWN = "consumed", "harmless", "unknown"
"""The `use` of a config key: it decides how weights are read; it does not change their values;
no reader knows.
"""


@dataclass(frozen=True)
class Claim:
    """One tensor of a module.

    suffix  what follows the module's path, as the layout calls it (`qweight`, `weight_scale`)
    part    the part of a QTensor it becomes ("codes", "scales", "zeros", ...), `PARAMETERS` or
            `AUXILIARY`
    why     what an auxiliary tensor is, "" for the others
    """

    suffix: str
    part: str
    why: str = ""


@dataclass(frozen=True)
class KeyUse:
    """One key of a quantization config.

    path   dotted (`config_groups.group_0.weights.num_bits`)
    value  as the config has it
    use    `CONSUMED`, `HARMLESS` or `UNKNOWN`
    why    what a harmless key is, or why an unknown one matters; "" for a consumed one
    """

    path: str
    value: Any
    use: str
    why: str = ""
