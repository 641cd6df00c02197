"""Weights moved from one format and layout to another: exactly, or not without saying so. See docs/convert.md."""

from __future__ import annotations

from .outcome import KINDS, LossyError, Outcome
from .targets import Goal, goal_named
from .tensor import convert_tensor, convert_weight

__all__ = ["KINDS", "Goal", "LossyError", "Outcome", "convert_tensor", "convert_weight", "goal_named"]
