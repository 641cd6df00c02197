"""The canonical parts of a weight in the GPU's order: the inverse of `weight.to_device`,
byte for byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats import family_of
from ...numerics.exact import bfloat16
from ...tensor.act_order import group_index, restore_order
from .order import from_fragments, from_lanes, join, untile
from .weight import CudaWeight, by_16

ADDENDS = ("zeros", "biases", "mins")
"""Parts that share the place of the addend; a format has one of them."""


def canonical_parts(w: CudaWeight) -> dict[str, NDArray[Any]]:
    """Parts of an (n, k) weight, or of an (e, n, k) stack."""
    fmt, shape = w.format, w.shape
    tensors = {"scales": w.scales, "super_scales": w.super_scales, "super_mins": w.super_mins, "global_scale": w.global_scale}
    tensors |= dict.fromkeys(ADDENDS, w.addend)
    parts: dict[str, NDArray[Any]] = {}
    for name, (size, dtype) in family_of(fmt).geometry(fmt, shape).items():
        if name == "codes":
            parts[name] = _codes(w)
            continue
        part = to_numpy(tensors[name])
        if w.tiled and name != "global_scale":
            part = untile(part, shape[-2])
        parts[name] = np.ascontiguousarray(part).view(dtype).reshape(size)
    if w.order is not None:
        parts["group_index"] = group_index(to_numpy(w.order), fmt.group_size)
    return parts


def _codes(w: CudaWeight) -> NDArray[np.uint8]:
    """The code stream, in the order of the inputs as they were given."""
    fmt, (n, k) = w.format, w.shape[-2:]
    if w.lanes:
        planes = {width: to_numpy(p).reshape(-1, *p.shape[-4:]) for width, p in w.planes.items()}
        stacked = [
            from_lanes({width: p[i] for width, p in planes.items()}, fmt.bits, n, k)
            for i in range(len(next(iter(planes.values()))))
        ]
        codes = np.stack(stacked).reshape(*w.shape[:-2], *stacked[0].shape)
    elif w.tiled:
        words = to_numpy(w.planes[fmt.bits])
        flat = words.reshape(-1, *words.shape[-4:])
        codes = np.stack([from_fragments(one, n, k, by_16(fmt, k), fmt.element, fmt.bits) for one in flat])
        codes = codes.reshape(*w.shape[:-2], *codes.shape[1:])
    else:
        codes = join({width: to_numpy(p).view(np.uint8) for width, p in w.planes.items()}, fmt.bits, k)
    if w.order is None:
        return np.ascontiguousarray(codes)
    return restore_order(codes, fmt.bits, to_numpy(w.order))


def to_numpy(t: Any) -> NDArray[Any]:
    """A tensor on the host; bfloat16 crosses as raw words."""
    import torch

    t = t.detach().cpu()
    if t.dtype == torch.bfloat16:
        raw: NDArray[Any] = t.view(torch.int16).numpy()
        return raw.view(bfloat16)
    return np.asarray(t.numpy())
