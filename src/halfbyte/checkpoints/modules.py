"""Which tensors make up a module: names cut at the suffixes that layouts know.

    model.layers.0.mlp.down_proj.qweight  ->  model.layers.0.mlp.down_proj + .qweight
    model.layers.0.mlp.experts.gate_up_proj_blocks  ->  ...experts.gate_up_proj + _blocks

The longest known suffix wins, so `x.weight.absmax` belongs to `x` and not to `x.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..layouts import Layout

ANCHORS = (".qweight", ".weight_packed", ".W_q", ".weight_qdata", ".weight.absmax")
"""Suffixes that packed weights alone have: a module with one of them and no layout is incomplete, not dense."""

SUSPECT = (
    *ANCHORS, ".qzeros", ".scales", ".biases", ".g_idx", ".weight_scale", ".weight_scale_2", ".weight_scale_inv",
    ".weight_zero_point", ".weight_global_scale", ".weight_shape", ".weight_g_idx", ".weight.quant_map",
    ".weight.nested_absmax", ".SCB", ".weight_scales",
)  # fmt: skip
"""Suffixes that only parts of packed weights have; others (`.scale`, `.shape`) are ordinary names too."""


def suffixes_of(layouts: Iterable[Layout]) -> frozenset[str]:
    """Every suffix that one of `layouts` claims, with what joins it to the module's path."""
    return frozenset(layout.joint + s for layout in layouts for s in (*layout.required, *layout.optional))


def group(tensors: Iterable[str], suffixes: frozenset[str]) -> dict[str, dict[str, str]]:
    """module -> {suffix: tensor}, in the order of `tensors`; a tensor without a known suffix stands alone under the suffix ""."""
    longest = max(map(len, suffixes), default=0)
    modules: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        module, suffix = tensor, ""
        for at in range(max(1, len(tensor) - longest), len(tensor)):
            if tensor[at] in "._" and tensor[at:] in suffixes:
                module, suffix = tensor[:at], tensor[at:]
                break
        modules.setdefault(module, {})[suffix] = tensor
    return modules


def own_suffixes(layout: Layout, tensors: Mapping[str, str]) -> dict[str, str]:
    """{suffix without its joint: tensor} of those in `tensors` that begin with the layout's joint."""
    joint = layout.joint
    return {s[len(joint) :]: t for s, t in tensors.items() if s.startswith(joint)}


def candidates(layouts: Sequence[Layout], tensors: Mapping[str, str]) -> list[Layout]:
    """The layouts that a module with these tensors can be of, by its suffixes."""
    return [layout for layout in layouts if layout.matches(own_suffixes(layout, tensors))]
