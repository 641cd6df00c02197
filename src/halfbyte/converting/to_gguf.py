"""A GGUF file from a GGUF file: other block types, the same names, key-values and tokenizer.

What a GGUF of a model is besides weights (architecture, tokenizer, row orders of q and k) is written nowhere in a folder of
safetensors, so from there it is refused, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.gguf_checkpoint import GGUFCheckpoint
from ..checkpoints.gguf_writer import GGUFWriter, pairs_of
from ..errors import UnsupportedError
from ..formats.ggml_types import GGML_TYPES
from .unit import Record, blocks

if TYPE_CHECKING:
    from .checkpoint import _Work

_PLAIN = {t.plain: t.name for t in GGML_TYPES.values() if t.plain}


def write_gguf(work: _Work, out: Path) -> list[Record]:
    """Write `out` and return the records. UnsupportedError unless the source is a GGUF."""
    checkpoint = work.checkpoint
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise UnsupportedError(
            f"[convert] {checkpoint.path} is {checkpoint.format}: a GGUF also holds the model's tokenizer, key-values and its "
            "own row orders, which a folder does not tell. Make a GGUF of the model once with llama.cpp's "
            "convert_hf_to_gguf.py, and convert that; single weights convert with hb.convert(weight, to='gguf')"
        )
    certain = {k for k in work.keys if _surely_has_factor(work, k)}
    scaled = [k for k in work.keys if _may_have_factor(work, k) and k not in certain]
    # A factor is a tensor of its own, which the header announces: it is known for these from their conversion only.
    planned = zip(scaled, work.planned(scaled), strict=True)
    factors = dict.fromkeys(certain, True) | {
        k: bool(u.outcomes and "scale" in u.outcomes[0].tensors) for k, u in planned
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for key in work.keys:
        name = checkpoint.tensor_name(key)
        shapes[name] = checkpoint.file.headers[name].shape
        if factors.get(key):
            shapes[_factor_name(name)] = shapes[name][:-2] or (1,)
    records = []
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with GGUFWriter(out, pairs_of(checkpoint.file), shapes) as file:
        for unit in work.units(work.keys):
            key = unit.record.key
            name = checkpoint.tensor_name(key)
            records.append(unit.record)
            if not unit.outcomes:
                (array,) = unit.arrays.values()
                file.add(name, _PLAIN[array.dtype.name], _released(work, key, array))
                continue
            outcome = unit.outcomes[0]
            file.add(name, outcome.config["type"], _released(work, key, np.asarray(outcome.tensors["weight"])))
            if factors.get(key):
                file.add(_factor_name(name), "F32", [np.asarray(outcome.tensors["scale"], np.float32)])
    return records


def _may_have_factor(work: _Work, key: str) -> bool:
    info = work.checkpoint.info(key)
    if work.quantizing is not None and work.quantizing.format(info):
        return False
    fmt = info.format
    return fmt is not None and (bool(fmt.global_op) or str(work.goal.target.codec or "").startswith("nvfp4"))


def _surely_has_factor(work: _Work, key: str) -> bool:
    """True for a weight that is rounded to two levels of scales."""
    fmt = work.quantizing.format(work.checkpoint.info(key)) if work.quantizing is not None else None
    return fmt is not None and bool(fmt.global_op)


def _factor_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def _released(work: _Work, key: str, array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return blocks(array, lambda: work.checkpoint.release(key))
