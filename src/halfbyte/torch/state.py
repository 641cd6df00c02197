"""Packed weights in a state dict: the canonical parts as tensors, and `halfbyte`, what describes them, beside them.

    model.layers.0.mlp.down_proj.codes, .scales, ...      uint8 and whatever the format has
    model.layers.0.mlp.down_proj.halfbyte                 uint8: JSON of format, shape, origin, details

These are the names and bytes of halfbyte's own files, so a state dict that is written to safetensors with metadata
`format` = `halfbyte` is a checkpoint that `halfbyte.open` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..backends.arrays import to_numpy
from ..checkpoints.own_layout import OwnLayout
from ..exact import bfloat16
from ..layouts.native import PARTS
from ..qtensor import QTensor

DESCRIPTION = "halfbyte"
NAMES = (*PARTS, DESCRIPTION)


def tensors_of(q: QTensor) -> dict[str, Tensor]:
    """Part name -> tensor, the description included."""
    return {name: tensor(array) for name, array in OwnLayout().pack(q, {}).items()}


def qtensor_of(tensors: Mapping[str, Tensor], name: str) -> QTensor:
    """The inverse of `tensors_of`. LayoutError, naming the weight, when the tensors do not fit their description."""
    arrays = {part: np.array(to_numpy(t.cpu())) for part, t in tensors.items()}
    return OwnLayout().unpack(arrays, {}, name)


def tensor(array: NDArray[Any]) -> Tensor:
    """A torch copy of a NumPy array, bfloat16 included."""
    copy = np.array(array, order="C")
    if copy.dtype == bfloat16:
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copy)
