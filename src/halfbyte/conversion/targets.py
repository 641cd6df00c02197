"""What a target `layout[:codec[:gN]]` may mean for one weight: formats to try, best first.

Without a codec, a weight goes to the format of the layout nearest to its own: integers to integers
with as many bits or more, E2M1 to E2M1, then to integers wide enough for twice its elements.
Without a group size, it keeps its own where the layout has it, else takes the largest that divides
it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import FormatError, LayoutError
from ..formats import format_named, takes
from ..layouts import LAYOUTS, Holds, Layout, layout_aliases, written_layouts
from ..spec import FLOAT_SCALES, Format, Target
from ..tensor.qtensor import QTensor
from .codebook_edges import holds_codebook


@dataclass(frozen=True)
class Goal:
    """A parsed target, with the parameters that its layout word fixes and the dtype of float
    scales, if one was asked for.
    """

    target: Target
    params: Mapping[str, Any] = field(default_factory=dict)
    scale_dtype: str | None = None

    @property
    def layout(self) -> str:
        return self.target.layout

    @property
    def writer(self) -> Layout:
        """The layout called so: what a target needs and can hold is asked of it."""
        return LAYOUTS[self.layout]

    def __str__(self) -> str:
        return str(self.target)


def goal_named(text: str, scale_dtype: str | None = None) -> Goal:
    """The goal spelled `layout[:codec[:gN]]`. LayoutError or FormatError naming what there is when
    a word is unknown.
    """
    word, *rest = text.split(":")
    aliases = layout_aliases()
    name, params = aliases.get(word.lower(), (word.lower(), {}))
    if name not in LAYOUTS:
        holder = _holder(text)
        if holder:
            spelled = f"layout[:codec[:gN]], for example {holder}:{text}"
            raise LayoutError(f"[convert] {text!r} is a codec; a target is spelled {spelled}")
        if name in ("safetensors", "dense", "float16", "bfloat16", "float32"):
            raise LayoutError(f"[convert] {word!r} is not a layout of packed weights; `halfbyte dequantize` writes dense ones")
        near = difflib.get_close_matches(name, (*LAYOUTS, *aliases), n=3)
        known = f"nearest: {', '.join(near)}" if near else layouts_in_words()
        raise LayoutError(f"[convert] {word!r} is not a layout; {known}. A target is spelled layout[:codec[:gN]]")
    if len(rest) > 2:
        raise FormatError(f"[convert] target {text!r}; it is spelled layout[:codec[:gN]]")
    if scale_dtype is not None and scale_dtype not in FLOAT_SCALES:
        raise FormatError(f"[convert] scale dtype {scale_dtype!r}; allowed: {', '.join(FLOAT_SCALES)}")
    codec, group = (rest[0] if rest else None), None
    if len(rest) == 2:
        match = re.fullmatch(r"g(\d+)|channel|g-1", rest[1])
        if not match or match[1] == "0":
            raise FormatError(f"[convert] group {rest[1]!r} of target {text!r}; it is spelled gN, or channel for whole rows")
        group = int(match[1]) if match[1] else -1
    if codec is not None:
        codec = _word(name, codec)
    return Goal(Target(name, codec, group), params, scale_dtype)


def layouts_in_words() -> str:
    """The layouts that a target may name, for messages."""
    written = written_layouts()
    others = [n for n in LAYOUTS if n not in written]
    return f"checkpoints are written as {', '.join(written)}; single weights also as {', '.join(others)}"


def _holder(text: str) -> str | None:
    """A layout that holds the codec; None for what is no codec."""
    try:
        name = format_named(text).name
    except FormatError:
        return None
    return next((layout for layout in ("mlx", "compressed-tensors", "gptq", "gguf") if name in codecs_of(layout)), "halfbyte")


def _word(layout: str, codec: str) -> str:
    """The codec's word in this layout."""
    codecs = codecs_of(layout)
    try:
        fmt = format_named(LAYOUTS[layout].codec_aliases.get(codec.lower(), codec))
    except FormatError as error:
        if not codecs:
            raise
        raise FormatError(f"[convert] {codec!r} is not a codec; {layout} holds {', '.join(codecs)}") from error
    if codecs and fmt.name not in codecs:
        raise FormatError(f"[convert] {layout} holds no {codec}; it holds {', '.join(codecs)}")
    return fmt.name


def codecs_of(layout: str) -> tuple[str, ...]:
    """The codecs that a target of this layout may name; () for any."""
    holds = LAYOUTS[layout].holds
    return holds.codecs if holds else ()


def candidates(q: QTensor, goal: Goal) -> Iterator[Format]:
    """Formats to try for `q`, best first, each once."""
    seen: set[Format] = set()
    for fmt in _candidates(q, goal):
        if fmt not in seen:
            seen.add(fmt)
            yield fmt


def _candidates(q: QTensor, goal: Goal) -> Iterator[Format]:
    layout, target = LAYOUTS[goal.layout], goal.target
    holds = layout.holds
    # What a layout's own reader made is what it holds, whatever the words say.
    own = holds is None or q.origin in layout.producers
    if target.codec is None and target.group_size is None and goal.scale_dtype in (None, q.format.scale) and own:
        yield q.format
    words = (target.codec,) if target.codec is not None else tuple(_nearest(q, holds)) if holds else ()
    for word in words:
        yield from _formats(q, word, holds, goal)
    if target.codec is None and target.group_size in (None, q.format.group_size) and goal.scale_dtype in (None, q.format.scale):
        yield q.format


def _nearest(q: QTensor, holds: Holds) -> Iterator[str]:
    """Words of a layout in the order a weight of q's format tries them."""
    fmt = q.format
    usual = {w: format_named(w) for w in holds.codecs}
    same = [w for w, f in usual.items() if holds_codebook(f, fmt.element)]
    signed = {"ue4m3": "e4m3"}
    if fmt.element not in ("int", "uint"):
        own = signed.get(fmt.scale, fmt.scale)
        yield from sorted(same, key=lambda w: signed.get(usual[w].scale, usual[w].scale) != own)
    whole = [w for w, f in usual.items() if f.element in ("int", "uint") and not f.super_size]
    bits = fmt.bits if fmt.element in ("int", "uint") else fmt.bits + 1
    offset = fmt.zero != "none" or fmt.bias or bool(fmt.minimum)
    wide = [w for w in whole if usual[w].bits >= bits and usual[w].bits in (fmt.bits, *holds.wider)]
    wide = wide or sorted(whole, key=lambda w: -usual[w].bits)[:1]
    # As many bits as its own first; among equals one with zero points or biases when the weight has
    # them.
    yield from sorted(wide, key=lambda w: (usual[w].bits, (usual[w].zero != "none" or usual[w].bias) != offset))
    if not whole:
        yield from holds.codecs


def _formats(q: QTensor, word: str, holds: Holds | None, goal: Goal) -> Iterator[Format]:
    """Formats of a word for `q`: group sizes, then tensor scales, then dtypes of scales."""
    usual = format_named(word)
    for size in _groups(q, usual, holds, goal.target.group_size):
        if takes(usual, "scale_dtype"):
            for dtype in _dtypes(q, holds, goal.scale_dtype):
                yield format_named(word, size, scale_dtype=dtype)
        elif usual.family in ("nvfp4", "ggml_fp4"):
            for level in (holds.levels if holds else ()) or ("multiply", "none"):
                yield format_named(word, size, global_scale=level)
        else:
            yield format_named(word, size)


def _groups(q: QTensor, usual: Format, holds: Holds | None, asked: int | None) -> Iterator[int]:
    if asked is not None:
        yield asked
        return
    if not takes(usual, "scale_dtype"):
        yield usual.group_size
        return
    own, k, act = q.format.group_size, q.shape[-1], "group_index" in q.parts
    allowed = holds.groups if holds else ()
    if not allowed:
        yield own
        smaller = (128, 64, 32, 16) if act or q.format.super_size else ()
        yield from (s for s in smaller if own == -1 or (s < own and own % s == 0))
        return
    whole = k if own == -1 else own
    yield from (s for s in allowed if s == own)
    yield from (s for s in allowed if s < whole and whole % s == 0 and s != own)
    yield from sorted(s for s in allowed if s > whole or whole % s)


def _dtypes(q: QTensor, holds: Holds | None, asked: str | None) -> Iterator[str]:
    if asked is not None:
        yield asked
        return
    allowed = holds.scales if holds else FLOAT_SCALES
    if q.format.scale in allowed:
        yield q.format.scale
    yield from (d for d in allowed if d != q.format.scale)
