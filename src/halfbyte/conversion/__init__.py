"""Convert packed weights between formats and layouts: exactly, or with an error only when asked.
See docs/guides/convert.md.

| question | file |
|---|---|
| is an edge to a target exact? the decision for one weight | `edges.py` (`convert_weight`) |
| integers and affine codes: `(c − z)·s` to `c'·s' + o'` | `affine_edges.py` |
| codebook elements (E2M1, E4M3, NF4, ...) under other scales | `codebook_edges.py` |
| equal in the target's own decoder, though not in real values | `producer_equality.py` |
| which formats a target `layout[:codec[:gN]]` may mean | `targets.py` |
| a whole checkpoint: keys in order, resumption, writers | `run.py`, `unit.py`, `write.py`, `write_gguf.py` |
| dense weights rounded to packed ones | `recipe.py`, `quantize.py` |
| packed weights to dense ones | `to_dense.py` |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, overload

from ..checkpoints import Checkpoint
from ..checkpoints import open as open_checkpoint
from ..checkpoints.hub import local_copy
from ..errors import FormatError
from ..tensor.qtensor import QTensor
from .edges import convert_tensor, convert_weight
from .outcome import KINDS, LossyError, Outcome
from .run import Converted
from .targets import Goal, goal_named
from .write import convert_checkpoint

Path = str | os.PathLike[str]


@overload
def convert(source: QTensor, *, to: str, lossy: bool = False, **options: Any) -> QTensor: ...
@overload
def convert(source: Path | Checkpoint, out: Path | None = None, *, to: str, lossy: bool = False, **options: Any) -> Converted: ...
def convert(
    source: QTensor | Path | Checkpoint, out: Path | None = None, *, to: str, lossy: bool = False, **options: Any
) -> QTensor | Converted:
    """A weight, or a whole checkpoint, in another layout: exactly, or with an error only when
    `lossy` allows it.

    source   a QTensor, or a checkpoint or the path of one
    out      where to write a checkpoint (`convert_checkpoint`)
    to       `layout[:codec[:gN]]`: "mlx", "gguf:q4_0", "gptq:int4:g128", "compressed-tensors:nvfp4"
    lossy    allow the least-error requantization of weights that no exact edge keeps
    options  of `convert_tensor` or `convert_checkpoint`: scale_dtype, name; plan, like, workers,
             max_shard_size, overwrite, progress; with a path also config and allow_unknown of
             `open`

    Raises LossyError, naming weights and the error it would cost, when values would change and
    `lossy` is not set.
    """
    if isinstance(source, QTensor):
        if out is not None:
            raise FormatError(f"[convert] out={out!r} with a single weight; it is returned, halfbyte.save writes it")
        return convert_tensor(source, to, lossy=lossy, **options)
    if out is None:
        raise FormatError("[convert] out is missing: give the folder or file in which the checkpoint is written")
    like = options.pop("like", None)
    reading: dict[str, Any] = {k: options.pop(k) for k in ("config", "allow_unknown") if k in options}
    with _opened(source, reading) as checkpoint, _opened(like) as other:
        return convert_checkpoint(checkpoint, out, to, lossy=lossy, like=other, **options)


def _opened(source: Any, reading: Mapping[str, Any] | None = None) -> contextlib.AbstractContextManager[Any]:
    """A context with the checkpoint: an open one stays open afterwards, a path is opened and
    closed.
    """
    opened = source is None or isinstance(source, Checkpoint)
    return contextlib.nullcontext(source) if opened else open_checkpoint(local_copy(source), **(reading or {}))


__all__ = [
    "KINDS", "Converted", "Goal", "LossyError", "Outcome", "convert", "convert_checkpoint", "convert_tensor", "convert_weight",
    "goal_named",
]  # fmt: skip
