"""A GGUF file from a GGUF file: other block types, the same names, key-values and tokenizer.

What a GGUF of a model is besides weights (architecture, tokenizer, row orders of q and k) is written nowhere in a folder of
safetensors: from there it takes a GGUF of the same model to go by (`relaid`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.gguf.writer import GGUFWriter, pairs_of
from ..checkpoints.io.journal import make_folder
from ..errors import UnsupportedError
from ..formats.ggml.types import GGML_TYPES
from .gguf_names import Relaid
from .unit import blocks

if TYPE_CHECKING:
    from .write import Converted, _Work

_PLAIN = {t.plain: t.name for t in GGML_TYPES.values() if t.plain}


def write_gguf(work: _Work, out: Path, result: Converted) -> None:
    """Write `out` and put what was done into `result`. UnsupportedError unless the source is a GGUF."""
    from .write import identity, resumed_units

    home = gguf_to_go_by(work.checkpoint)
    certain = {k for k in work.keys if _surely_has_factor(work, k)}
    scaled = [k for k in work.keys if _may_have_factor(work, k) and k not in certain]
    # A factor is a tensor of its own, which the header announces: it is known for these from their conversion only.
    planned = zip(scaled, work.planned(scaled), strict=True)
    factors = dict.fromkeys(certain, True) | {k: bool(u.outcomes and "scale" in u.outcomes[0].tensors) for k, u in planned}
    shapes: dict[str, tuple[int, ...]] = {}
    for key in work.keys:
        name = tensor_name(home, key)
        shapes[name] = home.file.headers[name].shape
        if factors.get(key):
            shapes[_factor_name(name)] = shapes[name][:-2] or (1,)
    make_folder(out.absolute().parent, out)
    with GGUFWriter(out, pairs_of(home.file), shapes, identity(work)) as file:
        units = resumed_units(work, file, result)
        for unit in work.units(work.keys[len(units) :]):
            key = unit.record.key
            name = tensor_name(home, key)
            if not unit.outcomes:
                (array,) = unit.arrays.values()
                file.add(name, _PLAIN[array.dtype.name], _released(work, key, array))
            else:
                outcome = unit.outcomes[0]
                file.add(name, outcome.config["type"], _released(work, key, np.asarray(outcome.tensors["weight"])))
                if factors.get(key):
                    file.add(_factor_name(name), "F32", [np.asarray(outcome.tensors["scale"], np.float32)])
            file.unit_done(unit.note())
            units.append(replace(unit, arrays={}, outcomes=()))
    result.records = [u.record for u in units]
    result.files = [out.name]


def gguf_to_go_by(checkpoint: Checkpoint) -> GGUFCheckpoint:
    """The GGUF whose names and key-values the result takes. UnsupportedError when there is none."""
    home = checkpoint.like if isinstance(checkpoint, Relaid) else checkpoint
    if not isinstance(home, GGUFCheckpoint):
        raise UnsupportedError(
            f"[convert] {checkpoint.path} is {checkpoint.format}: a GGUF also holds the model's tokenizer, key-values and its "
            "own row orders, which a folder does not tell. Give a GGUF of the same model, of any type, with --like: names, "
            "tokenizer and key-values are taken from it (llama.cpp's convert_hf_to_gguf.py makes one)"
        )
    return home


def tensor_name(home: GGUFCheckpoint, key: str) -> str:
    """The name in the file of a key, packed or dense."""
    return home.tensor_name(next((k for k in (key, key.removesuffix(".weight"), f"{key}.weight") if k in home), key))


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
