"""A call on torch tensors that `torch.compile` records as one operation: its compiler, Dynamo,
cannot trace the NumPy code of the verbs.

    halfbyte::call(inputs, name) -> Tensor        the function recorded under `name`, of the inputs

A function is recorded for as long as the weights it computes with exist; Dynamo compiles anew for
other weights. torch is used only where the caller has imported it.

`remember` and `recall` are the registry behind it, and behind the operators over modules
(`torch/custom_ops.py`): an operator takes numbers and text, never objects.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..errors import BackendError
from .array_interop import is_torch, records_gradient

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _Call(NamedTuple):
    function: Callable[..., Any]
    fake: Callable[..., Any]
    objects: tuple[weakref.ref[Any], ...]


_remembered: dict[int, Callable[[], Any]] = {}
_numbers = itertools.count(1)


def remember(get: Callable[[], Any], *owners: Any) -> int:
    """A number for `recall`, valid while all owners exist. `get` returns the object and holds no
    owner: it may be a weak reference to one.
    """
    number = next(_numbers)
    _remembered[number] = get
    for owner in owners:
        weakref.finalize(owner, _remembered.pop, number, None).atexit = False
    return number


def recall(number: int) -> Any:
    """The object of a number. BackendError when an owner is gone."""
    get = _remembered.get(number)
    if get is None:
        raise BackendError(
            f"[compile] call {number} of a graph whose weight no longer exists; allowed: weights that live as long as the "
            "graph; keep a reference to it"
        )
    return get()


def constant(function: FunctionT) -> FunctionT:
    """`torch.compiler.assume_constant_result`, without torch: Dynamo calls `function` once while it
    traces. Arguments are numbers and text: before torch 2.13 Dynamo takes no other object.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@constant
def graph_name(self: Any) -> str:
    """A name of the object for `recall`: the method of a class whose objects `name_of` takes."""
    return str(remember(weakref.ref(self), self))


def name_of(w: Any) -> str:
    """The name of a weight while Dynamo traces, which compiles anew for another weight."""
    id(w)  # Dynamo guards the identity here; it installs no guard for the object of a constant method
    name: str = w.graph_name()
    return name


def is_recordable(*inputs: Any) -> bool:
    """True where Dynamo traces the caller, and the inputs are tensors that record no gradient, or
    None.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.compiler.is_dynamo_compiling():
        return False
    return all(x is None or (is_torch(x) and not records_gradient(x)) for x in inputs)


def record(function: Callable[..., Any], fake: Callable[..., Any], *objects: Any) -> str:
    """A name for `call`, valid while the objects exist.

    function  (*objects, *inputs) -> a new tensor
    fake      the inputs without memory -> an empty tensor of the result's shape and dtype
    """
    _define()
    made = _Call(function, fake, tuple(weakref.ref(o) for o in objects))
    return str(remember(lambda: made, *objects))


def call(name: str, *inputs: Any) -> Any:
    """The recorded function of the inputs, as one operation of the graph that is traced."""
    torch = sys.modules["torch"]
    return torch.ops.halfbyte.call([None if x is None else x.detach() for x in inputs], name)


@functools.cache
def _define() -> None:
    """Define the operator, once."""
    library = sys.modules["torch"].library

    @library.custom_op("halfbyte::call", mutates_args=(), schema="(Tensor?[] inputs, str name) -> Tensor")  # type: ignore[untyped-decorator]
    def operator(inputs: list[Any], name: str) -> Any:
        known = recall(int(name))
        return known.function(*(o() for o in known.objects), *inputs)

    @operator.register_fake  # type: ignore[untyped-decorator]
    def _(inputs: list[Any], name: str) -> Any:
        return recall(int(name)).fake(*inputs)
