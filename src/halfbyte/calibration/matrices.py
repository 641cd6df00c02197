"""The matrices of one layer as a checkpoint stores them: views on the parameters that the layer
computes with.

| in the model | in the checkpoint | matrices |
|---|---|---|
| Linear | one tensor | the weight |
| Linear, fused (`qkv_proj`, `gate_up_proj`) | a tensor for each part | rows of the weight, in the parts' order |
| experts: two stacks | stacks, or a tensor for each expert; gate and up joined or separate | one expert's rows of the stack |

Writing into a view changes the layer's weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..transformers.fill.module_paths import Slot, is_experts


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix to quantize.

    key     of the checkpoint
    expert  which matrix of the key's stack; None when the key is a matrix
    input   name of what it is multiplied by, as `statistics.InputCollector` has it
    view    [n, k]
    """

    key: str
    expert: int | None
    input: str
    view: Tensor

    def expert_of(self, paths: Collection[str]) -> bool:
        """True for gate or up of an expert of one of these modules."""
        path, _, last = self.input.rpartition(".")
        return last.isdigit() and path in paths


def expert_input(path: str, expert: int) -> str:
    """Name of the input of an expert's gate and up."""
    return f"{path}.{expert}"


def gated_input(path: str, expert: int) -> str:
    """Name of the input of an expert's down."""
    return f"{path}.{expert}.gated"


def layer_matrices(layer: nn.Module, prefix: str, slots: Mapping[str, Slot], rows: Callable[[str], int]) -> list[Matrix]:
    """Every matrix under the module path `prefix`.

    slots  key -> the parameter it belongs to
    rows   rows of a key's matrix, which tell the parts of a fused module from each other
    """
    modules: dict[str, dict[str, Slot]] = defaultdict(dict)
    for key, slot in slots.items():
        if slot.leaf == "weight" and slot.path.startswith(f"{prefix}."):
            modules[slot.path[len(prefix) + 1 :]][key] = slot
    found: list[Matrix] = []
    for path, keys in modules.items():
        module = layer.get_submodule(path)
        if isinstance(module, nn.Linear):
            found += _of_linear(path, module, keys, rows)
        elif is_experts(module):
            for key, slot in keys.items():
                found += _of_experts(path, module, key, slot)
    return found


def _of_linear(path: str, module: nn.Linear, keys: Mapping[str, Slot], rows: Callable[[str], int]) -> Iterator[Matrix]:
    start = 0
    if len(keys) == 1:  # a matrix of one row may be a vector in the file
        yield Matrix(next(iter(keys)), None, path, module.weight.data)
        return
    for key, _ in sorted(keys.items(), key=lambda item: item[1].part or 0):
        stop = start + rows(key)
        yield Matrix(key, None, path, module.weight.data[start:stop])
        start = stop


def _of_experts(path: str, module: nn.Module, key: str, slot: Slot) -> Iterator[Matrix]:
    count = int(module.down_proj.shape[0])
    for expert in range(count) if slot.expert is None else (slot.expert,):
        given = gated_input(path, expert) if slot.projection == "down_proj" else expert_input(path, expert)
        yield Matrix(key, expert if slot.expert is None else None, given, expert_matrix(module, slot.projection, expert))


def expert_matrix(module: nn.Module, piece: str, expert: int) -> Tensor:
    """Rows (n, k) of one projection of one expert: a view on the stack, in either orientation."""
    gated = hasattr(module, "gate_up_proj")
    stack: Tensor = (module.down_proj if piece == "down_proj" else module.gate_up_proj if gated else module.up_proj).data
    matrix = stack[expert].T if getattr(module, "is_transposed", False) else stack[expert]
    return half(matrix, module, piece) if gated else matrix


def half(rows: Tensor, module: nn.Module, piece: str) -> Tensor:
    """Gate's or up's rows of the joint matrix, concatenated or interleaved; other projections
    unchanged.
    """
    if piece not in ("gate_proj", "up_proj"):
        return rows
    if getattr(module, "is_concatenated", True):
        middle = rows.shape[0] // 2
        return rows[:middle] if piece == "gate_proj" else rows[middle:]
    return rows[int(piece == "up_proj") :: 2]
