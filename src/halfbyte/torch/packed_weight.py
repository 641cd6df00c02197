"""A packed weight as modules hold it: in a backend's own order, able to come back as a QTensor, to move and to be pickled.

    held = Held.of(q)         prepared for a device, q itself may be dropped
    held.canonical()          the QTensor again, byte for byte
    held.on("cuda:0")         the same weight prepared for another device

Modules that share a weight (a tied head) share one Held; copies and pickles of a model keep sharing it.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import ops
from ..backends import Prepared, backend_named
from ..errors import BackendError
from ..spec import Format
from ..tensor.qtensor import QTensor


class Held:
    """One weight on one device. Immutable: copying a module shares it.

    prepared  the weight in a backend's order
    backend   name of a backend that was asked for, None when the device decides
    """

    __slots__ = ("__weakref__", "_elsewhere", "_origin", "_source", "activations", "backend", "device", "prepared")

    def __init__(
        self,
        prepared: Prepared,
        *,
        device: str = "cpu",
        backend: str | None = None,
        activations: str = "exact",
        source: QTensor | None = None,
    ) -> None:
        self.prepared, self.device, self.backend, self.activations = prepared, device, backend, activations
        self._origin: tuple[str, dict[str, Any]] = ("", {})
        self._source: QTensor | None = None
        self._elsewhere: weakref.WeakValueDictionary[str, Held] = weakref.WeakValueDictionary()
        if source is not None:
            self._origin = (source.origin, dict(source.details))
            # A backend that cannot turn its order back, and a slice that must know where it lay, need the QTensor kept.
            if source.window is not None or not _turns_back(prepared):
                self._source = source

    @classmethod
    def of(
        cls, weight: Held | Prepared | QTensor, *, device: str = "cpu", backend: str | None = None, activations: str = "exact"
    ) -> Held:
        """`weight` itself when it is held already, else prepared for `device`."""
        if isinstance(weight, Held):
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
        """Bytes the backend holds."""
        return self.prepared.nbytes

    @property
    def bits_per_weight(self) -> float:
        return self.prepared.bits_per_weight

    def canonical(self) -> QTensor:
        """The QTensor this was made from. BackendError when the backend cannot turn its order back."""
        if self._source is not None:
            return self._source
        parts = backend_named(self.prepared.backend).canonical(self.prepared)
        if parts is None:
            raise BackendError(
                f"[state] {self.format} prepared for {self.prepared.backend!r} cannot be turned back; make the module from a "
                "QTensor"
            )
        origin, details = self._origin
        return QTensor(self.format, self.shape, parts, origin=origin, details=details)

    @property
    def requires_grad(self) -> bool:
        """Always false: codes have no gradient."""
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, wanted: bool = True) -> Held:
        """As torch's tensors have it. BackendError when a gradient is wanted."""
        if wanted:
            raise BackendError(
                f"[linear] a packed {self.format} weight of shape {self.shape} has no gradient: its codes are whole numbers; "
                "train an adapter beside it (x passes its gradient on), or a dense weight from dequantize()"
            )
        return self

    def on(self, device: str) -> Held:
        """This weight on a device ("cpu", "cuda:1"); modules that share it go on sharing it there."""
        if device == self.device:
            return self
        there = self._elsewhere.get(device)
        if there is None:
            # A backend named for one device means nothing on another.
            backend = self.backend if self.backend and backend_named(self.backend).device == device.partition(":")[0] else None
            there = Held.of(self.canonical(), device=device, backend=backend, activations=self.activations)
            self._elsewhere[device] = there
        return there

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _held_again, (self.canonical(), self.device, self.backend, self.activations)

    def __repr__(self) -> str:
        return f"Held({self.format}, shape={self.shape}, {self.nbytes:,} bytes, backend={self.prepared.backend!r})"


def _turns_back(prepared: Prepared) -> bool:
    """True when the backend of this weight overrides `canonical`."""
    from ..backends import Backend

    return type(backend_named(prepared.backend)).canonical is not Backend.canonical and 0 not in prepared.shape


def _held_again(q: QTensor, device: str, backend: str | None, activations: str) -> Held:
    """A Held from what `__reduce__` took apart."""
    return Held.of(q, device=device, backend=backend, activations=activations)
