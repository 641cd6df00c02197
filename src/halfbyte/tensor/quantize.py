"""quantize: a dense weight to a packed one, by round-to-nearest under a named policy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..formats import family_of, format_named
from ..formats.base import Family, PartSpec, require_finite
from ..formats.rounding.grouping import BLOCK_ELEMENTS
from ..numerics.exact import bfloat16
from ..spec import FLOAT_SCALES, Format
from .qtensor import QTensor

ORIGINS = ("gguf", "mlx", "compressed-tensors", "modelopt", "bitsandbytes", "hqq", "torchao")
"""Producers whose decoders `arithmetic="producer"` reproduces; a tensor quantized by a policy of
theirs gets that origin.
"""


def quantize(x: NDArray[Any], codec: str | Format, policy: str | None = None, **options: Any) -> QTensor:
    """`x` rounded to a packed weight: every element to the nearest code under its group's scale.

    x        [*lead, n, k] finite float64, float32, float16 or bfloat16, of any strides; NumPy, or a
             torch tensor of any device
    codec    `codec[:gN]` ("mxfp4", "int4:g128", "affine4:g64") or a `Format`
    policy   a producer's name ("mlx", "compressed-tensors", "torchao-rceil", ...), whose bytes are
             then reproduced; None for the default of the format, the one with the least error
             (docs/formats/policies.md)
    options  single rules by name, over the policy's: `scale="floor"`, `ties="even"`,
             `zeros="keep"`, ... and the format's own options (`group_size`, `scale_dtype`,
             `global_scale`, `rows`, ...)

    Raises FormatError for an unknown codec, option or policy, for NaN or infinite values (naming
    the first), and where a scale does not fit its dtype; ShapeError for an array that is not a
    weight. An empty tensor has empty parts, and a tensor scale of 1.

    >>> quantize(np.ones((1, 32), np.float32), "mxfp4", scale="floor").parts["scales"].tolist()
    [[125]]
    """
    x = _array(x)
    family = family_of(format_named(codec))
    word = codec.name if isinstance(codec, Format) else format_named(codec).name
    given = {**(family.policy(word, policy) if policy is not None else {}), **options}
    of_format = {k: given.pop(k) for k in ("group_size", *family.format_options) if k in given}
    if of_format.get("scale_dtype") == "input":
        of_format["scale_dtype"] = x.dtype.name if x.dtype.name in FLOAT_SCALES else "float32"
    fmt = _resolve(codec, family, of_format)
    x = require_finite(x, fmt.name)
    fmt = family.fit(fmt, x.shape)
    if x.size == 0:
        parts = {name: _empty(name, spec) for name, spec in family.geometry(fmt, x.shape).items()}
    else:
        parts = _encode(family, x, fmt, given)
    origin = next((o for o in ORIGINS if policy == o or (policy or "").startswith(f"{o}-")), "")
    return QTensor(fmt, x.shape, parts, origin=origin)


def _array(x: Any) -> NDArray[Any]:
    """`x` as a NumPy array; a torch tensor through the CPU, and bfloat16 through float32, which is
    exact.
    """
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float().numpy().astype(bfloat16) if str(x.dtype) == "torch.bfloat16" else x.numpy()
    return np.asarray(x)


def _encode(family: Family, x: NDArray[Any], fmt: Format, options: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Parts of `x`, in blocks of rows (or rows of tiles) where these are independent: temporaries
    stay near 50 MB.
    """
    if fmt.grouping in ("flat", "strided") or fmt.scale == "nested":
        return family.encode(x, fmt, **options)
    if x.ndim > 2:
        experts = [_encode_at(f"in expert {e}", family, x[e], fmt, options) for e in range(len(x))]
        return {name: np.stack([e[name] for e in experts]) for name in experts[0]}
    tile = fmt.group_rows if fmt.grouping == "block" else 1
    step = max(1, BLOCK_ELEMENTS // (max(tile, 1) * x.shape[1])) * tile
    if fmt.global_op or tile == -1 or step >= len(x):
        return family.encode(x, fmt, **options)
    starts = range(0, len(x), step)
    pieces = [_encode_at(f"rows counted from {i}", family, x[i : i + step], fmt, options) for i in starts]
    return {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}


def _encode_at(position: str, family: Family, x: NDArray[Any], fmt: Format, options: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """`_encode` of a piece; its position is added to an error's message."""
    try:
        return _encode(family, x, fmt, options)
    except FormatError as error:
        raise FormatError(f"{error} ({position})") from error


def _resolve(codec: str | Format, family: Family, options: dict[str, Any]) -> Format:
    """The Format of a codec with its options, or a given Format that does not contradict them."""
    if not isinstance(codec, Format):
        return format_named(codec, **options)
    if options:
        wanted = family.format(codec.name, **{"group_size": codec.group_size, **options})
        if wanted != codec:
            raise FormatError(
                f"[quantize] {codec} with {', '.join(f'{k}={v!r}' for k, v in options.items())} is another format; "
                "give the codec's name instead of a Format"
            )
    return codec


def _empty(name: str, spec: PartSpec) -> NDArray[Any]:
    """A part of a tensor without elements; tensor scales, which exist all the same, are 1."""
    return np.ones(spec.shape, spec.dtype) if name == "global_scale" else np.zeros(spec.shape, spec.dtype)
