"""Check, from headers alone, that a recipe leaves the experts of each layer all packed or all
dense.

Loaders stack the experts of a layer, so they cannot read a checkpoint with one dense expert among
packed ones. Packed experts may differ in format. GGUF and MLX store one stack for each projection:
there a whole projection may stay dense, which the layout's own engine reads and `load_model` does
not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..checkpoints import Checkpoint, TensorInfo, expert_names
from ..errors import FormatError, ShapeError, plural
from ..layouts import LAYOUTS
from .outcome import spelled
from .recipe import DTYPES, Recipe, format_for, module_of
from .transposed_experts import with_transposed_experts

_GGUF_EXPERTS = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down|gate_up)_exps(?:\.weight)?")


def check_experts(checkpoint: Checkpoint, recipe: Recipe) -> list[str]:
    """A note about layers whose experts only the layout's own engine will read, if there are any.

    Raises FormatError when the recipe leaves some experts of a layer dense among packed ones and no
    loader will read them.
    """
    layers: dict[str, dict[str, list[tuple[TensorInfo, str, str]]]] = defaultdict(lambda: defaultdict(list))
    for info in with_transposed_experts(checkpoint, recipe).infos():
        found = _experts_and_projection(info.key)
        if found is not None and (info.quantized or info.dtype in DTYPES):
            layers[found[0]][found[1]].append((info, *_becomes(info, recipe)))
    engine = LAYOUTS[recipe.goal.layout].engine
    refused: dict[str, list[str]] = {}
    noted: dict[str, list[str]] = {}
    why = packed = ""
    for path, pieces in layers.items():
        every = [one for piece in pieces.values() for one in piece]
        dense = [(info.key, reason) for info, fmt, reason in every if not fmt]
        if not dense or len(dense) == len(every):
            continue
        by_piece = bool(engine) and all(len({not fmt for _, fmt, _ in piece}) == 1 for piece in pieces.values())
        (noted if by_piece else refused)[path] = [key for key, _ in dense]
        if not why or (len(refused) == 1 and not by_piece):
            why, packed = dense[0][1], next(fmt for _, fmt, _ in every if fmt)
    if refused:
        raise FormatError(
            f"[quantize] {_some(refused)}: dense by this recipe ({why}) among experts that become {packed}; loaders stack the "
            "experts of a layer, so they are all packed (their formats may differ) or all dense. Give these a format too, or "
            f"keep the layer's experts by a first --rule '{re.escape(next(iter(refused)))}=keep'"
        )
    if noted:
        note = (
            f"{_some(noted)}: dense by this recipe ({why}) among experts that become {packed}; {engine} "
            "reads that, but load_model and the commands that run a model want a layer's experts all packed or all dense"
        )
        return [note]
    return []


def _experts_and_projection(key: str) -> tuple[str, str] | None:
    """(path of the experts of a layer, projection) of an expert's weight, under the key's own
    names.
    """
    if match := _GGUF_EXPERTS.fullmatch(key):
        return match[1], match[2]
    found = expert_names.parse(key)
    return None if found is None or found.leaf == "bias" else (found.module, found.projection)


def _becomes(info: TensorInfo, recipe: Recipe) -> tuple[str, str]:
    """(the format that a weight will have, "") or ("", why it stays dense)."""
    module = module_of(info)
    goal = None if module is None else recipe.of(module, len(info.shape))
    if goal is None:
        if info.quantized:
            return spelled(info.format) if info.format else "packed", ""
        rule = recipe.rule(module or info.key)
        return "", f"rule {rule.text!r}" if rule else f"{recipe.goal.layout} keeps {info.dtype} {list(info.shape)}"
    try:
        return spelled(format_for(goal, "float32" if info.quantized else info.dtype, info.shape)[0]), ""
    except ShapeError as error:
        return "", str(error).removeprefix("[quantize] ")


def _some(layers: Mapping[str, Sequence[str]]) -> str:
    names = [name for own in layers.values() for name in own]
    more = f", ... ({plural(len(names), 'tensor')})" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
