"""A weight in a backend's own layout, which modules share: convertible back to a QTensor, movable
and picklable.

    weight = PackedWeight.of(q)         prepared for a device; q itself may be dropped
    weight.canonical()                  the QTensor again, byte for byte
    weight.on("cuda:0")                 the same weight prepared for another device

Modules with a common weight (a tied head) share one PackedWeight; copies and pickles of a model
keep sharing it.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import torch

from .. import ops
from ..backends import Call, Prepared, backend_named
from ..errors import BackendError
from ..spec import Format
from ..tensor.qtensor import QTensor


class DeviceName(str):
    """The name of a device ("cpu", "cuda:1"), with the `type` that code written for tensors reads."""

    __slots__ = ()

    @property
    def type(self) -> str:
        return self.partition(":")[0]


class PackedWeight:
    """One weight on one device. Immutable: copying a module shares it.

    prepared  the weight in a backend's layout
    backend   the requested backend, None to choose by device
    dtype     of the activations, which model code reads from a layer's weight; the codes have none
    """

    __slots__ = ("__weakref__", "_elsewhere", "_origin", "_source", "activations", "backend", "device", "dtype", "prepared")

    def __init__(
        self,
        prepared: Prepared,
        *,
        device: str = "cpu",
        backend: str | None = None,
        activations: str = "exact",
        source: QTensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.prepared, self.device, self.backend, self.activations = prepared, DeviceName(device), backend, activations
        self.dtype = dtype
        self._origin: tuple[str, dict[str, Any]] = ("", {})
        self._source: QTensor | None = None
        self._elsewhere: weakref.WeakValueDictionary[str, PackedWeight] = weakref.WeakValueDictionary()
        if source is not None:
            self._origin = (source.origin, dict(source.details))
            # The QTensor is kept where the backend cannot restore it, and for a slice, whose group
            # offset is not stored.
            if source.window is not None or not _is_reversible(prepared):
                self._source = source

    @classmethod
    def of(
        cls,
        weight: PackedWeight | Prepared | QTensor,
        *,
        device: str = "cpu",
        backend: str | None = None,
        activations: str = "exact",
    ) -> PackedWeight:
        """`weight` itself when it is a PackedWeight, else prepared for `device`."""
        if isinstance(weight, PackedWeight):
            return weight
        if isinstance(weight, Prepared):
            return cls(weight, device=device, backend=backend, activations=activations)
        prepared = ops.prepare(weight, device=device, backend=backend, activations=activations)
        return cls(prepared, device=device, backend=backend, activations=activations, source=weight)

    @property
    def format(self) -> Format:
        return self.prepared.format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.prepared.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the backend's layout."""
        return self.prepared.nbytes

    @property
    def bits_per_weight(self) -> float:
        return self.prepared.bits_per_weight

    def canonical(self) -> QTensor:
        """The QTensor this was made from. BackendError when the backend cannot restore it."""
        if self._source is not None:
            return self._source
        parts = backend_named(self.prepared.backend).canonical(self.prepared)
        if parts is None:
            raise BackendError(
                f"[state] {self.format} prepared for {self.prepared.backend!r} cannot be converted back; make the module from a "
                "QTensor"
            )
        origin, details = self._origin
        return QTensor(self.format, self.shape, parts, origin=origin, details=details)

    def of_same_kind(self, q: QTensor) -> PackedWeight:
        """Another weight, prepared as this one is."""
        other = PackedWeight.of(q, device=self.device, backend=self.backend, activations=self.activations)
        return other.batch_invariant(self.invariant)

    @property
    def invariant(self) -> bool:
        """Products give each row the same bits whatever the number of rows (`ops.linear`)."""
        return self.prepared.invariant

    def batch_invariant(self, wanted: bool = True) -> PackedWeight:
        """This weight with batch-invariant products, or without. BackendError where its backend has
        none.
        """
        if wanted == self.invariant:
            return self
        ops.choose(Call("linear", self.format, invariant=wanted), backend=self.prepared.backend)
        other = PackedWeight(
            replace(self.prepared, invariant=wanted),
            device=self.device,
            backend=self.backend,
            activations=self.activations,
            dtype=self.dtype,
        )
        other._origin, other._source = self._origin, self._source
        return other

    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def requires_grad(self) -> bool:
        """Always false: codes have no gradient."""
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, wanted: bool = True) -> PackedWeight:
        """As torch's tensors have it. BackendError when a gradient is wanted."""
        if wanted:
            raise BackendError(
                f"[linear] a packed {self.format} weight of shape {self.shape} has no gradient: its codes are whole numbers; "
                "train an adapter beside it (x passes its gradient on), or a dense weight from dequantize()"
            )
        return self

    def on(self, device: str) -> PackedWeight:
        """This weight on a device ("cpu", "cuda:1"); modules that share it go on sharing it there."""
        return self.like(device, self.dtype)

    def like(self, device: str, dtype: torch.dtype) -> PackedWeight:
        """This weight on a device, for activations of a dtype; shared as by `on`."""
        if device == self.device and dtype == self.dtype:
            return self
        name = f"{device} {dtype}"
        there = self._elsewhere.get(name)
        if there is None:
            if device == self.device:
                there = PackedWeight(
                    self.prepared, device=device, backend=self.backend, activations=self.activations, dtype=dtype
                )
                there._origin, there._source = self._origin, self._source
                self._elsewhere[name] = there
                return there
            # A backend of one device does not serve another.
            backend = self.backend if self.backend and backend_named(self.backend).device == device.partition(":")[0] else None
            there = PackedWeight.of(self.canonical(), device=device, backend=backend, activations=self.activations)
            there = there.batch_invariant(self.invariant)
            there.dtype = dtype
            self._elsewhere[name] = there
        return there

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.canonical(), self.device, self.backend, self.activations, self.dtype, self.invariant)

    def __repr__(self) -> str:
        return f"PackedWeight({self.format}, shape={self.shape}, {self.nbytes:,} bytes, backend={self.prepared.backend!r})"


def _is_reversible(prepared: Prepared) -> bool:
    """True when the backend of this weight overrides `canonical`."""
    from ..backends import Backend

    return type(backend_named(prepared.backend)).canonical is not Backend.canonical and 0 not in prepared.shape


def _rebuild(
    q: QTensor, device: str, backend: str | None, activations: str, dtype: torch.dtype = torch.float32, invariant: bool = False
) -> PackedWeight:
    """Inverse of `PackedWeight.__reduce__`."""
    weight = PackedWeight.of(q, device=device, backend=backend, activations=activations).batch_invariant(invariant)
    weight.dtype = dtype
    return weight
