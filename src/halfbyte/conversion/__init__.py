"""Weights moved from one format and layout to another: exactly, or not without saying so. See docs/guides/convert.md."""

from __future__ import annotations

import contextlib
import os
from typing import Any, overload

from ..checkpoints import Checkpoint
from ..checkpoints import open as open_checkpoint
from ..errors import FormatError
from ..tensor.qtensor import QTensor
from .outcome import KINDS, LossyError, Outcome
from .targets import Goal, goal_named
from .tensor import convert_tensor, convert_weight
from .write import Converted, convert_checkpoint

Path = str | os.PathLike[str]


@overload
def convert(source: QTensor, *, to: str, lossy: bool = False, **options: Any) -> QTensor: ...
@overload
def convert(source: Path | Checkpoint, out: Path | None = None, *, to: str, lossy: bool = False, **options: Any) -> Converted: ...
def convert(
    source: QTensor | Path | Checkpoint, out: Path | None = None, *, to: str, lossy: bool = False, **options: Any
) -> QTensor | Converted:
    """A weight, or a whole checkpoint, in another layout: exactly, or not without saying so.

    source   a QTensor, or a checkpoint or the path of one
    out      where to write a checkpoint (`convert_checkpoint`)
    to       `layout[:codec[:gN]]`: "mlx", "gguf:q4_0", "gptq:int4:g128", "compressed-tensors:nvfp4"
    lossy    allow the least-error requantization of weights that no edge keeps
    options  of `convert_tensor` or `convert_checkpoint`: scale_dtype, name; plan, like, workers, max_shard_size, overwrite,
             progress

    Raises LossyError, naming weights and the error it would cost, when values would change and `lossy` is not set.
    """
    if isinstance(source, QTensor):
        if out is not None:
            raise FormatError(f"[convert] out={out!r} with a single weight; it is returned, halfbyte.save writes it")
        return convert_tensor(source, to, lossy=lossy, **options)
    if out is None:
        raise FormatError("[convert] a checkpoint is written somewhere: give out, a folder or a file")
    like = options.pop("like", None)
    with _opened(source) as checkpoint, _opened(like) as other:
        return convert_checkpoint(checkpoint, out, to, lossy=lossy, like=other, **options)


def _opened(source: Any) -> contextlib.AbstractContextManager[Any]:
    """A checkpoint that stays open, or one opened here."""
    opened = source is None or isinstance(source, Checkpoint)
    return contextlib.nullcontext(source) if opened else open_checkpoint(source)


__all__ = [
    "KINDS", "Converted", "Goal", "LossyError", "Outcome", "convert", "convert_checkpoint", "convert_tensor", "convert_weight",
    "goal_named",
]  # fmt: skip
