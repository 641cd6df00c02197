"""Findings from the values of one packed weight; `findings(data=True)` runs them for every key."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import HalfbyteError
from ...tensor.qtensor import QTensor
from . import Finding
from .overflow import CheckpointWarning, may_overflow_float16, overflow_text

Check = Callable[[QTensor], Iterator[tuple[str, str, str]]]
"""(weight) -> (severity, code, sentence) of each finding."""

NAN_BYTES = {"e8m0": (255,), "e4m3": (0x7F, 0xFF), "ue4m3": (0x7F, 0xFF)}
"""Scale bytes that are not numbers."""


def weight_findings(read: Callable[[str], QTensor | NDArray[Any]], key: str) -> list[Finding]:
    """What looks wrong in the packed weight `key`; one finding of severity error when it cannot be
    read.

    read  returns the weight of a key: a checkpoint's `__getitem__`
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # the same is reported below
            q = read(key)
    except HalfbyteError as error:
        return [Finding("error", "unreadable", key, str(error))]
    if not isinstance(q, QTensor):
        return []
    return [Finding(severity, code, key, text) for check in CHECKS for severity, code, text in check(q)]


def _nan_scales(q: QTensor) -> Iterator[tuple[str, str, str]]:
    bad = NAN_BYTES.get(q.format.scale, ())
    count = sum(int(np.count_nonzero(q.parts["scales"] == b)) for b in bad)
    if count:
        shown = " or ".join(f"0x{b:02X}" for b in bad)
        # ggml decodes these bytes of its unsigned E4M3 as 0 and 480; other producers as NaN,
        # infinity or 2^128.
        severity = "warning" if q.format.scale == "ue4m3" else "error"
        text = f"{count:,} of {q.parts['scales'].size:,} scale bytes are {shown}, not a number; producers decode it differently"
        yield severity, "nan-scale", text


def _float_scales(q: QTensor) -> Iterator[tuple[str, str, str]]:
    for part in ("scales", "biases", "super_scales", "super_mins", "global_scale", "nested_absmax", "nested_offset"):
        array = q.parts.get(part)
        if array is None or array.dtype.kind in "iu":
            continue
        values = array.astype(np.float32)
        bad = int(np.count_nonzero(~np.isfinite(values)))
        if bad:
            yield "error", "non-finite-scale", f"{bad:,} of {array.size:,} {part} are NaN or infinite"


def _zero_scales(q: QTensor) -> Iterator[tuple[str, str, str]]:
    for part in ("super_scales", "scales", "global_scale"):
        array = q.parts.get(part)
        # A small-integer scale of 0 is ordinary: the second level carries the magnitude.
        if array is None or q.format.scale in ("e8m0", "nested") or (part == "scales" and q.format.super_size):
            continue
        if q.format.scale in ("e4m3", "ue4m3") and part == "scales":
            zero = int(np.count_nonzero(array & 0x7F == 0))
        else:
            zero = int(np.count_nonzero(array == 0))
        if zero and (zero == array.size or part == "global_scale"):
            yield "warning", "zero-scale", f"all {array.size:,} {part} are 0: every weight decodes to its offset"
        elif zero:
            yield "note", "zero-scale", f"{zero:,} of {array.size:,} {part} are 0: their groups are constant"


def _zeros(q: QTensor) -> Iterator[tuple[str, str, str]]:
    """Zero points of integer formats, and whether a GPTQ version label fits them."""
    zeros, bits = q.parts.get("zeros"), q.format.bits
    if q.format.zero != "int" or zeros is None or not zeros.size:
        return
    first, middle, top = int(zeros.reshape(-1)[0]), 1 << (bits - 1), (1 << bits) - 1
    same = bool((zeros == first).all())
    if same and zeros.size > 1:
        kind = "the symmetric one: the weight needs no stored zero points" if first == middle else f"not the symmetric {middle}"
        yield "note", "equal-zeros", f"all {zeros.size:,} zero points are {first}, {kind}"
    label = str(q.details.get("zeros", ""))
    if label.startswith("v1") and same and first == middle + 1:
        yield (
            "warning",
            "gptq-label",
            (
                f"labelled v1, which stores the zero point minus 1, but all stored values are {middle}, as v2 writes a "
                f"symmetric weight; if the label lies, checkpoint_format gptq_v2 is right"
            ),
        )
    if label.startswith("v2") and same and first == middle - 1:
        yield (
            "warning",
            "gptq-label",
            (
                f"labelled v2, but all stored zero points are {middle - 1}, as v1 writes a symmetric weight; "
                f"if the label lies, checkpoint_format gptq is right"
            ),
        )
    if label.startswith("v1"):
        wrapped = int(np.count_nonzero((zeros < 1) | (zeros > top)))
        if wrapped and "gptqmodel" in label:
            yield (
                "warning",
                "v1-zero-wraps",
                (
                    f"{wrapped:,} of {zeros.size:,} zero points are 0, which v1 stores as {top} and takes from its neighbours; "
                    f"read as GPTQModel reads them, other readers may not"
                ),
            )
        elif wrapped:
            yield (
                "warning",
                "v1-zero-wraps",
                (
                    f"{wrapped:,} of {zeros.size:,} stored zero points are {top}: what v1 makes of 0, and what it leaves in "
                    f"damaged neighbours; read as {top + 1}, as AutoGPTQ reads them"
                ),
            )


def _overflow(q: QTensor) -> Iterator[tuple[str, str, str]]:
    if may_overflow_float16(q):
        yield "warning", "float16-overflow", overflow_text(q)


def _words(q: QTensor) -> Iterator[tuple[str, str, str]]:
    if q.details.get("packing") == "padded":
        yield (
            "note",
            "padded-words",
            f"{q.format.bits}-bit words hold {32 // q.format.bits} codes each, as compressed-tensors wrote them before 0.19",
        )


def _equal(array: NDArray[Any]) -> bool:
    return bool(array.size > 1 and array.min() == array.max())


def _equal_scales(q: QTensor) -> Iterator[tuple[str, str, str]]:
    scales = q.parts.get("scales")
    if scales is not None and scales.size >= 64 and _equal(scales):
        yield "note", "equal-scales", f"all {scales.size:,} scales are the same: were they ever set?"


CHECKS: tuple[Check, ...] = (_nan_scales, _float_scales, _zero_scales, _equal_scales, _zeros, _overflow, _words)
"""Every check of a weight's values."""
