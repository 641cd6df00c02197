"""What a layer's linear modules are given: one Hessian Σ x xᵀ for all that share an input, gathered while sequences pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Shared:
    """Modules of a layer with one input.

    names    their paths in the layer
    hessian  Σ x xᵀ, float32 [k, k] on the model's device
    tokens   rows x seen
    norm     path of the norm module whose output the input is, "" when it is none
    """

    names: list[str] = field(default_factory=list)
    hessian: Tensor | None = None
    tokens: int = 0
    norm: str = ""


class Inputs:
    """Watches a layer. A context manager: the hooks go when it is left.

    modules  the linear modules to watch, by path in the layer
    """

    def __init__(self, layer: nn.Module, modules: dict[str, nn.Module]) -> None:
        self.groups: list[Shared] = []
        self._group_of: dict[str, Shared] = {}
        self._by_input: dict[int, Shared] = {}
        self._norms: dict[int, str] = {}
        # References, so that no address is given to a second tensor while the first sequence tells who shares what.
        self._held: list[Tensor] = []
        self._first = True
        self._handles = [m.register_forward_pre_hook(self._hook(name)) for name, m in modules.items()]
        for name, module in layer.named_modules():
            if type(module).__name__.endswith("Norm"):
                self._handles.append(module.register_forward_hook(self._norm_hook(name)))

    def sequence_done(self) -> None:
        """After the first sequence the groups are known."""
        self._first = False
        self._held.clear()

    def _hook(self, name: str) -> Any:
        def seen(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if name not in self._group_of:
                # After the first sequence newcomers (an expert that had no token) stand alone.
                group = self._by_input.get(id(x)) if self._first else None
                if group is None:
                    group = Shared(norm=self._norms.get(id(x), "") if self._first else "")
                    self.groups.append(group)
                    if self._first:
                        self._by_input[id(x)] = group
                        self._held.append(x)
                group.names.append(name)
                self._group_of[name] = group
            if self._group_of[name].names[0] == name:
                self._add(self._group_of[name], x)

        return seen

    @staticmethod
    def _add(group: Shared, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if group.hessian is None:
            group.hessian = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
        group.hessian.addmm_(rows.T, rows)
        group.tokens += rows.shape[0]

    def _norm_hook(self, name: str) -> Any:
        def seen(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._first and isinstance(output, Tensor):
                self._norms[id(output)] = name
                self._held.append(output)

        return seen

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
