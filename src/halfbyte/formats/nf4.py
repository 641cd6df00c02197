"""Table formats scaled by an absolute maximum: NF4 and bitsandbytes' own fp4, with blocks over the
flattened tensor.

    value = table[code] · absmax
    nested, bitsandbytes:  absmax = nested_map[byte] · nested_absmax[block / 256] + nested_offset
    nested, nf4_modelopt:  absmax = nested_map[byte] / nested_absmax[block / 256] + nested_offset,
                           the map being byte − 128

| part | dtype | shape |
|---|---|---|
| `scales` | float32, or uint8 bytes when nested | [*lead, n, k/g] (`row`) or [ceil(size/g)] (`flat`) |
| `nested_map` | float32 | [256] |
| `nested_absmax` | float32 | [ceil(blocks/256)], blocks of the whole flattened tensor |
| `nested_offset` | float32 | 0-d |

`Family.fit` chooses `row` grouping where k is a multiple of the block (the same blocks, by row),
and `flat` otherwise. ModelOpt's signed scale byte b is stored as b + 128.

Codecs: `nf4` (QLoRA, Dettmers et al. 2023), `bnb_fp4`, `nf4_modelopt` (the NF4 table to four digits
in bfloat16). Any block size; 64 unless given. Format options: `nested` (False), `grouping` (`row`,
`flat`), `scale_dtype` (float32; nf4_modelopt bfloat16).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..spec import Format
from .base import Family, PartSpec, check_group, require_finite
from .decode import NESTED_BLOCK
from .options import fit_flat, grouping_option, only_options, scale_dtype_option
from .rounding.tables import encode_table


class NF4(Family):
    """Table codes under a plain or doubly quantized absolute maximum."""

    name = "nf4"
    codecs = ("nf4", "bnb_fp4", "nf4_modelopt")
    format_options = ("nested", "grouping", "scale_dtype")
    policies: ClassVar[dict[str, dict[str, Any]]] = {
        "bitsandbytes": {
            "compute": "float32",
            "order": "reciprocal",
            "nearest": "sorted",
            "absmax": "unrounded",
            "nested_codes": "grid",
        },
        "modelopt": {"compute": "input", "nearest": "difference", "absmax": "unrounded"},
    }
    policy_codecs: ClassVar[dict[str, tuple[str, ...]]] = {"bitsandbytes": ("nf4", "bnb_fp4"), "modelopt": ("nf4_modelopt",)}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(codec, options, self.format_options)
        group = check_group(codec, 64 if group_size is None else group_size)
        if group == -1:
            raise FormatError(f"[format] {codec} with group size -1; blocks run over the flattened tensor, allowed: 1 or more")
        grouping = grouping_option(codec, options, ("row", "flat"))
        modelopt = codec == "nf4_modelopt"
        scale = scale_dtype_option(codec, options, "bfloat16" if modelopt else "float32")
        nested = bool(options.get("nested", False))
        if nested and "scale_dtype" in options:
            raise FormatError(f"[format] {codec} with nested=True and scale_dtype={scale!r}; nested scales are bytes, give one")
        return Format(
            "nf4", codec, 4, codec, group, "nested" if nested else scale, grouping=grouping, inverse=nested and modelopt
        )

    def fit(self, fmt: Format, shape: Sequence[int]) -> Format:
        return fit_flat(fmt, shape)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        specs = super().geometry(fmt, shape)
        if fmt.scale == "nested":
            f32 = np.dtype(np.float32)
            blocks = math.prod(specs["scales"].shape)
            specs["nested_map"] = PartSpec((256,), f32)
            specs["nested_absmax"] = PartSpec((-(-blocks // NESTED_BLOCK),), f32)
            specs["nested_offset"] = PartSpec((), f32)
        return specs

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        return encode_table(require_finite(x, fmt.name), fmt, policy)
