"""Packed weights in a state dict: the canonical parts as tensors, and `halfbyte`, what describes
them, beside them.

    model.layers.0.mlp.down_proj.codes, .scales, ...      uint8 and whatever the format has
    model.layers.0.mlp.down_proj.halfbyte                 uint8: JSON of format, shape, origin,
                                                          details

These are the names and bytes of halfbyte's own files, so a state dict that is written to
safetensors with metadata `format` = `halfbyte` is a checkpoint that `halfbyte.open` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor

from ..checkpoints.safetensors.native_layout import OwnLayout
from ..layouts.native import PARTS
from ..numerics.array_interop import to_numpy
from ..numerics.exact import bfloat16
from ..tensor.qtensor import QTensor

DESCRIPTION = "halfbyte"
NAMES = (*PARTS, DESCRIPTION)


def tensors_of(q: QTensor) -> dict[str, Tensor]:
    """Part name -> tensor, the description included."""
    return {name: tensor(array) for name, array in OwnLayout().pack(q, {}).items()}


def qtensor_of(tensors: Mapping[str, Tensor], name: str) -> QTensor:
    """The inverse of `tensors_of`. LayoutError, naming the weight, when the tensors do not fit
    their description.
    """
    arrays = {part: np.array(to_numpy(t.cpu())) for part, t in tensors.items()}
    return OwnLayout().unpack(arrays, {}, name)


def tensor(array: NDArray[Any]) -> Tensor:
    """A torch copy of a NumPy array, bfloat16 included, in memory of torch's own: it begins on 64
    bytes, as every copy and moved tensor does. (NumPy's begins on 16, and products of a math
    library may differ by a rounding with where a matrix begins.)
    """
    wide = array.dtype == bfloat16
    array = array.view(np.int16) if wide else array
    copy = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype)
    copy.numpy()[...] = array
    return copy.view(torch.bfloat16) if wide else copy
