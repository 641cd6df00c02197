"""The ledger of a checkpoint: every tensor and every key of its quantization config, and who accounts for it.

Layouts and config readers state what they consume as `Claim` and `KeyUse` (`layouts/claims.py`, a lower floor); this module
collects them for a whole checkpoint.
"""

from __future__ import annotations

from ..layouts.claims import AUXILIARY, CONSUMED, HARMLESS, PARAMETERS, UNKNOWN, Claim, KeyUse

__all__ = ["AUXILIARY", "CONSUMED", "HARMLESS", "PARAMETERS", "UNKNOWN", "Claim", "KeyUse"]
