"""Statistics of a layer's inputs: one Hessian Σ x xᵀ for all matrices with a common input,
accumulated by forward hooks.

An expert has two over the tokens routed to it: of the input of gate and up, and of the input of
down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch.nn import functional

import torch
from torch import Tensor, nn

from .matrices import expert_input, gated_input


@dataclass
class InputStatistics:
    """One input of a layer.

    names    paths of the linear modules that share it, or an expert's (`matrices.expert_input`)
    hessian  Σ x xᵀ, float32 [k, k] on the model's device; None before the first token, and where
             only the squares are collected
    squares  its diagonal Σ x², float64 [k], where only the squares are collected
    tokens   rows x seen
    norm     path of the norm module whose output the input is, "" when it is none
    """

    names: list[str] = field(default_factory=list)
    hessian: Tensor | None = None
    squares: Tensor | None = None
    tokens: int = 0
    norm: str = ""
    squares_only: bool = False

    def add(self, x: Tensor) -> None:
        """Rows x [..., k]."""
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
        self.tokens += rows.shape[0]
        if self.squares_only:
            added = rows.square().sum(0, dtype=torch.float64)
            self.squares = added if self.squares is None else self.squares + added
            return
        if self.hessian is None:
            self.hessian = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
        self.hessian.addmm_(rows.T, rows)


class InputCollector:
    """Collects the inputs of a layer by forward hooks. A context manager that removes them at the
    end.

    linear   linear modules, by path in the layer
    experts  experts modules of transformers, by path
    squares_only  no Hessians, which take k² numbers
    """

    def __init__(
        self,
        layer: nn.Module,
        linear: Mapping[str, nn.Module],
        experts: Mapping[str, nn.Module] | None = None,
        squares_only: bool = False,
    ) -> None:
        self._squares_only = squares_only
        self.groups: list[InputStatistics] = []
        self.expert_norms: set[str] = set()
        """Norms whose output experts read; the router reads it too."""
        self.readers: dict[str, list[str]] = {}
        """Norm -> modules with parameters of their own that read its output."""
        self._group_of: dict[str, InputStatistics] = {}
        self._by_input: dict[int, InputStatistics] = {}
        self._norms: dict[int, str] = {}
        self._norm_at: dict[int, str] = {}
        # References that keep tensors alive, so that no address is reused while the first sequence
        # shows which inputs are shared.
        self._references: list[Tensor] = []
        self._first = True
        self._handles = [m.register_forward_pre_hook(self._hook(name)) for name, m in linear.items()]
        for name, module in (experts or {}).items():
            self._handles.append(module.register_forward_pre_hook(self._experts_hook(name), with_kwargs=True))
        for name, module in layer.named_modules():
            if type(module).__name__.endswith("Norm"):
                self._handles.append(module.register_forward_hook(self._norm_hook(name)))
            elif any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(self._reader_hook(name), with_kwargs=True))

    def sequence_done(self) -> None:
        """Freeze the groups after the first sequence."""
        self._first = False
        self._references.clear()

    def of(self, name: str) -> InputStatistics | None:
        """The statistics of this input, None when no token reached it."""
        return self._group_of.get(name)

    def _hook(self, name: str) -> Any:
        def seen(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if name not in self._group_of:
                # Inputs that first appear later (an expert without tokens before) form groups of
                # their own.
                group = self._by_input.get(id(x)) if self._first else None
                if group is None:
                    group = self._new(self._norms.get(id(x), "") if self._first else "")
                    if self._first:
                        self._by_input[id(x)] = group
                        self._references.append(x)
                group.names.append(name)
                self._group_of[name] = group
            if self._group_of[name].names[0] == name:
                self._group_of[name].add(x)

        return seen

    def _new(self, norm: str = "") -> InputStatistics:
        group = InputStatistics(norm=norm, squares_only=self._squares_only)
        self.groups.append(group)
        return group

    def _named(self, name: str) -> InputStatistics:
        if name not in self._group_of:
            self._group_of[name] = self._new()
            self._group_of[name].names.append(name)
        return self._group_of[name]

    def _experts_hook(self, path: str) -> Any:
        def seen(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            index = args[1] if len(args) > 1 else kwargs["top_k_index" if "top_k_index" in kwargs else "router_indices"]
            if self._first:
                norm = self._norm_at.get(x.data_ptr())
                self.expert_norms |= {norm} if norm else set()
            rows, index = x.reshape(-1, x.shape[-1]), index.reshape(-1, index.shape[-1])
            for expert in torch.unique(index).tolist():
                if expert >= module.num_experts:
                    continue  # a masked slot
                mine = rows[(index == expert).any(-1)]
                self._named(expert_input(path, expert)).add(mine)
                self._named(gated_input(path, expert)).add(gated(module, mine, expert))

        return seen

    def _reader_hook(self, name: str) -> Any:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._first:
                return
            for x in (*args, *kwargs.values()):
                norm = self._norm_at.get(x.data_ptr()) if isinstance(x, Tensor) else None
                if norm and name not in self.readers.setdefault(norm, []):
                    self.readers[norm].append(name)

        return seen

    def _norm_hook(self, name: str) -> Any:
        def seen(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._first and isinstance(output, Tensor):
                self._norms[id(output)] = self._norm_at[output.data_ptr()] = name
                self._references.append(output)

        return seen

    def __enter__(self) -> InputCollector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()


def gated(module: Any, x: Tensor, expert: int) -> Tensor:
    """The input of an expert's down for inputs x [m, k], as transformers computes it."""
    matrix = module.gate_up_proj[expert]
    both = functional.linear(x, matrix.T if getattr(module, "is_transposed", False) else matrix)
    if getattr(module, "has_bias", False):
        both = both + module.gate_up_proj_bias[expert]
    out: Tensor = module._apply_gate(both)
    return out
