"""Which tensors make up a module: names cut at the suffixes that layouts know.

    model.layers.0.mlp.down_proj.qweight  ->  model.layers.0.mlp.down_proj + .qweight
    model.layers.0.mlp.experts.gate_up_proj_blocks  ->  ...experts.gate_up_proj + _blocks

The longest known suffix wins, so `x.weight.absmax` belongs to `x` and not to `x.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...layouts import Layout
from ...layouts.base import HasHeader
from ...layouts.unsupported import Recognised, recognise

ANCHORS = (".qweight", ".weight_packed", ".W_q", ".weight_qdata", ".weight.absmax")
"""Suffixes that packed weights alone have: a module with one of them and no layout is incomplete,
not dense.
"""

SUSPECT = (
    *ANCHORS, ".qzeros", ".scales", ".biases", ".g_idx", ".weight_scale", ".weight_scale_2", ".weight_scale_inv",
    ".weight_zero_point", ".weight_global_scale", ".weight_shape", ".weight_g_idx", ".weight.quant_map",
    ".weight.nested_absmax", ".SCB", ".weight_scales", ".trellis", ".suh", ".svh",
)  # fmt: skip
"""Suffixes that only parts of packed weights have; others (`.scale`, `.shape`) are ordinary names
too.
"""


def suffixes_of(layouts: Iterable[Layout]) -> frozenset[str]:
    """Every suffix that one of `layouts` claims, with what joins it to the module's path."""
    return frozenset(layout.separator + s for layout in layouts for s in (*layout.required, *layout.optional) if s)


def group(tensors: Iterable[str], suffixes: frozenset[str]) -> dict[str, dict[str, str]]:
    """module -> {suffix: tensor}, in the order of `tensors`; a tensor without a known suffix is a
    module of its own, with the suffix "".
    """
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


def without_separator(layout: Layout, suffixes: Iterable[str]) -> dict[str, str]:
    """{suffix as the layout calls it: suffix as the name ends} of those that begin with the
    layout's separator, and "" for a tensor under the module's own name where the layout has one.
    """
    bare = "" in layout.required
    return {s[len(layout.separator) :]: s for s in suffixes if s.startswith(layout.separator) or (bare and s == "")}


def own_suffixes(layout: Layout, tensors: Mapping[str, str]) -> dict[str, str]:
    """{suffix as the layout calls it: tensor} of those in `tensors` that the layout can have."""
    return {own: tensors[s] for own, s in without_separator(layout, tensors).items()}


class Kind(NamedTuple):
    """What modules with the same suffixes can be.

    meant    layouts that the quantization config can mean, most likely first
    others   other layouts that the suffixes allow
    claimed  suffixes that one of these takes for the weight
    refused  the entry of `recognised` that they are, if any
    """

    meant: tuple[Layout, ...]
    others: tuple[Layout, ...]
    claimed: frozenset[str]
    refused: Recognised | None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return (*self.meant, *self.others)


def kind_of(layouts: Sequence[Layout], headers: Mapping[str, HasHeader], prefers: Sequence[str]) -> Kind:
    """The `Kind` of modules with tensors like these, keyed by suffix. `prefers` names the layouts
    that the config can mean, most likely first.
    """
    possible: dict[str, Layout] = {}
    for layout in layouts:
        own = without_separator(layout, headers)
        if layout.accepts({suffix: headers[full] for suffix, full in own.items()}):
            possible[layout.name] = layout
    meant = tuple(possible[name] for name in prefers if name in possible)
    others = tuple(layout for layout in possible.values() if layout not in meant)
    claimed: set[str] = set()
    for layout in possible.values():
        own = without_separator(layout, headers)
        claimed.update(own[s] for s in layout.claims(own))
    found = recognise({}, [s[1:] for s in headers])
    # One suffix may belong to another kind too: alone it decides only where no layout matches.
    refused = found if found and (len(found.suffixes) > 1 or not possible) else None
    return Kind(meant, others, frozenset(claimed), refused)
