"""Sparse weights of compressed-tensors: the stored values and a bit mask of their positions.

| config `sparsity_config.format` | tensors of module `m` |
|---|---|
| sparse-24-bitmask | `m.compressed` [n, k/2], `m.bitmask` uint8 [n, ⌈k/8⌉], `m.shape` int64 [2, 1] |
| sparse-bitmask | `m.compressed` [count], `m.bitmask` the same, `m.shape` [2], `m.row_offsets` int64 [n] |

Bit i of byte j of a mask's row is input 8j + i; the values follow the positions in row order, zeros
are everywhere else. 2:4 is two values in each four inputs. The dense array is tensor `m.weight` to
everything above: a dense weight where `compressed` is a float type, the codes of one where
`m.weight_scale` is beside it (FP8, INT8). It is expanded when it is read; products run on the
expanded weight. Source: the files of compressed-tensors 0.9 to 0.14, which is the last to write
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...layouts import Header

Array = NDArray[Any]
VALUES, MASK, SHAPE, OFFSETS = "compressed", "bitmask", "shape", "row_offsets"
PARTS = {VALUES: "values of the positions in the mask", MASK: "mask of positions", SHAPE: "shape", OFFSETS: "row offsets"}
"""Part -> what it is."""


class SparseWeight(NamedTuple):
    """One sparse weight.

    tensors  part -> name of its tensor; `row_offsets` where the rows have any number of values
    shape    (n, k)
    dtype    of its values
    """

    tensors: Mapping[str, str]
    shape: tuple[int, int]
    dtype: np.dtype[Any]

    @property
    def header(self) -> Header:
        """Of the dense array."""
        return Header(self.shape, self.dtype)


def find_sparse(names: Iterable[str], header: Callable[[str], Header], array: Callable[[str], Array]) -> dict[str, SparseWeight]:
    """`m.weight` -> the sparse weight of module `m`, for each whose tensors have the types and
    sizes above; others stay tensors of their own.
    """
    known = set(names)
    found = {}
    for mask in (name for name in known if name.endswith(f".{MASK}")):
        module = mask.removesuffix(f".{MASK}")
        tensors = {part: f"{module}.{part}" for part in PARTS if f"{module}.{part}" in known}
        weight = f"{module}.weight"
        if VALUES not in tensors or SHAPE not in tensors or weight in known:
            continue
        values, bits, stated = (header(tensors[part]) for part in (VALUES, MASK, SHAPE))
        if bits.dtype != np.uint8 or len(bits.shape) != 2 or stated.dtype != np.int64 or math.prod(stated.shape) != 2:
            continue
        if OFFSETS in tensors:
            offsets = header(tensors[OFFSETS])
            n, k = (int(size) for size in array(tensors[SHAPE]).reshape(-1))
            if len(values.shape) != 1 or offsets != Header((n,), np.dtype(np.int64)):
                continue
        elif len(values.shape) == 2:
            n, k = values.shape[0], 2 * values.shape[1]
        else:
            continue
        if bits.shape == (n, -(-k // 8)):
            found[weight] = SparseWeight(tensors, (n, k), values.dtype)
    return {name: found[name] for name in sorted(found)}


def expand(weight: SparseWeight, parts: Mapping[str, Array], path: Path) -> Array:
    """The dense array, read-only.

    parts  the tensors by part
    path   of the file, for messages
    Raises CheckpointError where they contradict each other: another shape, a position beyond the
    row, or another number of positions than values.
    """
    n, k = weight.shape
    values, stated = parts[VALUES], [int(size) for size in parts[SHAPE].reshape(-1)]
    if stated != [n, k]:
        raise _damage(path, weight.tensors[SHAPE], f"is {stated}; {weight.tensors[VALUES]} and its mask are of [{n}, {k}]")
    bits = np.unpackbits(parts[MASK], axis=-1, bitorder="little")
    if bits[:, k:].any():
        raise _damage(path, weight.tensors[MASK], f"has positions outside a row; allowed: 0 to {k - 1}")
    mask = bits[:, :k].view(np.bool_)
    counts = mask.sum(-1, dtype=np.int64)
    if OFFSETS in parts:
        wanted = np.cumsum(counts) - counts
        if not np.array_equal(parts[OFFSETS], wanted):
            row = int(np.flatnonzero(parts[OFFSETS] != wanted)[0])
            raise _damage(
                path, weight.tensors[OFFSETS], f"puts row {row} at {parts[OFFSETS][row]}; the mask puts it at {wanted[row]}"
            )
        total = int(counts.sum())
        if total != values.size:
            raise _damage(path, weight.tensors[MASK], f"has {total} positions; {weight.tensors[VALUES]} has {values.size} values")
    elif k % 4 or (wrong := np.argwhere(mask.reshape(n, -1, 4).sum(-1) != 2)).size:
        where = "" if k % 4 else f": row {wrong[0][0]}, inputs {4 * wrong[0][1]} to {4 * wrong[0][1] + 3}"
        raise _damage(path, weight.tensors[MASK], f"is not 2:4, two positions in each four inputs{where}")
    out = np.zeros((n, k), values.dtype)
    width = np.dtype(f"u{values.dtype.itemsize}")  # as integers: a cast of a float could change the bits of a NaN
    out.view(width)[mask] = values.reshape(-1).view(width)
    out.flags.writeable = False
    return out


def _damage(path: Path, tensor: str, text: str) -> CheckpointError:
    return CheckpointError(f"[open] {path}: tensor {tensor!r} {text}")
