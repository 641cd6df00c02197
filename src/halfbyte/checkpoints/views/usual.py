"""A folder in the form of the model's own repository, whoever wrote it."""

from __future__ import annotations

from ..base import Checkpoint
from .gptqmodel_gpt_oss import rows_by_name
from .mlx_form import from_mlx


def usual(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint`, or a view of it without what GPTQModel (`rows_by_name`) and mlx-lm (`from_mlx`)
    change.
    """
    return from_mlx(rows_by_name(checkpoint))
