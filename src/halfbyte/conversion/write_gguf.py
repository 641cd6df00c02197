"""Write a GGUF file: names, key-values and tokenizer of an existing GGUF with other block types, or
of a model's folder.

For a folder these are made from its configuration and tokenizer (`gguf_models.to_gguf`), or taken
from a GGUF of the same model (`gguf_names.RenamedLike`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.gguf.writer import GGUFWriter, pairs_of
from ..checkpoints.io.journal import make_folder
from ..errors import UnsupportedError
from ..formats.ggml.types import GGML_TYPES
from ..gguf_models.to_gguf import GGUFView
from .gguf_names import RenamedLike
from .run import ConversionRun, Converted, identity, resumed_units
from .unit import blocks

_PLAIN = {t.plain: t.name for t in GGML_TYPES.values() if t.plain}


def write_gguf(run: ConversionRun, out: Path, result: Converted) -> None:
    """Write `out` and put what was done into `result`."""
    home = gguf_template(run.checkpoint)
    certain = {k for k in run.keys if _surely_has_factor(run, k)}
    scaled = [k for k in run.keys if _may_have_factor(run, k) and k not in certain]
    # A tensor scale is a separate tensor of the header; for these keys only a conversion shows
    # whether there is one.
    planned = zip(scaled, run.planned(scaled), strict=True)
    factors = dict.fromkeys(certain, True) | {k: bool(u.outcomes and "scale" in u.outcomes[0].tensors) for k, u in planned}
    shapes: dict[str, tuple[int, ...]] = {}
    for key in run.keys:
        name = tensor_name(home, key)
        shapes[name] = home.shapes[name] if isinstance(home, GGUFView) else home.file.headers[name].shape
        if factors.get(key):
            shapes[_factor_name(name)] = shapes[name][:-2] or (1,)
    make_folder(out.absolute().parent, out)
    with GGUFWriter(
        out,
        home.pairs if isinstance(home, GGUFView) else pairs_of(home.file),
        shapes,
        identity(run),
        getattr(run.rounding, "file_type", None),
    ) as file:
        units = resumed_units(run, file, result)
        for unit in run.units(run.keys[len(units) :]):
            key = unit.record.key
            name = tensor_name(home, key)
            if not unit.outcomes:
                (array,) = unit.arrays.values()
                file.add(name, _PLAIN[array.dtype.name], blocks(array))
            else:
                outcome = unit.outcomes[0]
                file.add(name, outcome.config["type"], blocks(np.asarray(outcome.tensors["weight"])))
                if factors.get(key):
                    file.add(_factor_name(name), "F32", [np.asarray(outcome.tensors["scale"], np.float32)])
            file.unit_done(unit.note())
            units.append(replace(unit, arrays={}, outcomes=()))
    result.records = [u.record for u in units]
    result.files = [out.name]


def gguf_template(checkpoint: Checkpoint) -> GGUFCheckpoint | GGUFView:
    """What names and key-values of the result are taken from. UnsupportedError when `--like` is no
    GGUF.
    """
    home = checkpoint.like if isinstance(checkpoint, RenamedLike) else checkpoint
    if not isinstance(home, (GGUFCheckpoint, GGUFView)):
        raise UnsupportedError(
            f"[convert] --like {home.path} is {home.format}: a GGUF takes names and key-values from a GGUF of the same model. "
            "Without --like they are made from the folder's configuration and tokenizer"
        )
    return home


def tensor_name(home: GGUFCheckpoint | GGUFView, key: str) -> str:
    """The name in the file of a key, packed or dense."""
    return home.tensor_name(next((k for k in (key, key.removesuffix(".weight"), f"{key}.weight") if k in home), key))


def _may_have_factor(run: ConversionRun, key: str) -> bool:
    info = run.checkpoint.info(key)
    if run.rounding is not None and run.rounding.format(info):
        return False
    fmt = info.format
    return fmt is not None and (bool(fmt.global_op) or str(run.goal.target.codec or "").startswith("nvfp4"))


def _surely_has_factor(run: ConversionRun, key: str) -> bool:
    """True for a weight that is rounded to two levels of scales."""
    fmt = run.rounding.format(run.checkpoint.info(key)) if run.rounding is not None else None
    return fmt is not None and bool(fmt.global_op)


def _factor_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"
