"""halfbyte's own files say all there is beside each weight: config.json gets nothing."""

from __future__ import annotations

from collections.abc import Sequence

from .common import ConfigFiles, Dense, Packed


def describe(packed: Sequence[Packed], dense: Sequence[Dense]) -> ConfigFiles:
    """No entries."""
    return ConfigFiles({})
