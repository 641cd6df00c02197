"""Parts of a model that run on their own: what is before its layers, one layer, and what is behind
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HalfbyteError, UnsupportedError, summary_of
from .sources import Source


class _Placeholder(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """Stands for a layer, with its attributes: some models read a layer's attention type, or
    another, before they call it.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # no module of this one

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "_layer" else getattr(self._layer[0], name)


class _Recorder(_Placeholder):
    """Records its arguments and returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.arguments: tuple[Any, dict[str, Any]] = ((), {})

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.arguments = (args, kwargs)
        return hidden


def first_inputs(
    source: Source, ids: list[list[int]], device: str, *, again: bool = False
) -> tuple[list[Tensor], list[tuple[Any, dict[str, Any]]]]:
    """Hidden states before the first layer, and the other arguments of each layer.

    again  what lies outside the layers is there already
    """
    if not again:
        source.start()
    layers = source.model.get_submodule(source.prefix)
    real = list(layers)
    recorders = [_Recorder(layer) for layer in real]
    for i, recorder in enumerate(recorders):
        layers[i] = recorder
    inner = source.model.get_submodule(source.prefix.rpartition(".")[0]) if "." in source.prefix else source.model
    firsts: list[Tensor] = []
    handle = recorders[0].register_forward_pre_hook(lambda module, args: firsts.append(args[0]))
    with _one_by_one(source):
        for sequence in ids:
            inner(input_ids=torch.tensor([sequence], device=device), use_cache=False)
    handle.remove()
    for i, layer in enumerate(real):
        layers[i] = layer
    return firsts, [recorder.arguments for recorder in recorders]


def run_layer(layer: nn.Module, hidden: Tensor, arguments: tuple[Any, dict[str, Any]]) -> Tensor:
    """The outputs of a layer, under the arguments that the model gives it."""
    with _one_by_one(layer):
        out = layer(hidden, *arguments[0], **arguments[1])
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


@contextmanager
def _one_by_one(what: Source | nn.Module) -> Iterator[None]:
    """UnsupportedError for what a model's code raises because its layers are called one by one,
    with the arguments of the first call.
    """
    try:
        yield
    except (HalfbyteError, MemoryError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        name = type(what.model if isinstance(what, Source) else what).__name__
        raise UnsupportedError(
            f"[quantize] layers of {name} cannot be called one by one, as calibration walks them ({summary_of(error)}); "
            "use --method mse or rtn"
        ) from error


@contextmanager
def without_layers(source: Source) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """A function that gives the logits [sequences, tokens, vocabulary] of tokens [sequences,
    tokens], for their hidden states behind the last layer [sequences, tokens, d].
    """
    layers = source.model.get_submodule(source.prefix)
    real = list(layers)
    given: list[Tensor] = []

    class Last(_Placeholder):
        """Returns the given states in place of a layer's."""

        def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return given[0]

    for i, layer in enumerate(real):
        layers[i] = Last(layer)

    def run(ids: Tensor, hidden: Tensor) -> Tensor:
        given[:] = [hidden]
        logits: Tensor = source.model(input_ids=ids, use_cache=False).logits
        return logits

    try:
        yield run
    finally:
        for i, layer in enumerate(real):
            layers[i] = layer
