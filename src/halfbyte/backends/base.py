"""What a backend is: a place that multiplies packed weights, and says why when it cannot.

A backend never sees a file and never sees another backend. `ops` hands it canonical QTensors once,
through `prepare`; from then on the backend works on its own order of the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import BackendError
from ..numerics import opaque_call
from ..spec import Format, Size
from ..tensor.qtensor import QTensor

OPERATIONS = ("dequantize", "linear", "embedding", "experts")
ACTIVATIONS = ("exact", "int8", "int8_token", "fp8")
"""Activation modes. `exact`: products and sums in float32. `int8`: activations rounded to 8-bit
integers a group at a time. `int8_token`: under one scale a token, where the weight has one scale a
row. `fp8`: activations rounded to E4M3 under a scale a token (`numerics/activations.py`).
"""
SCHEDULES = ("single-stage", "double-buffered", "striped", "fused", "dequantize_then_gemm")
X_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Call:
    """What a backend is asked for, as far as it decides whether it can serve."""

    op: str
    format: Format
    dtype: str = "float32"
    activations: str = "exact"
    schedule: str | None = None
    invariant: bool = False


@dataclass(frozen=True)
class Prepared:
    """A weight in one backend's own order, as `halfbyte.prepare` returns it.

    data    the backend's form of the bits, of `nbytes` bytes
    served  calls that the backend was found to serve: (op, dtype, activations, schedule, invariant)
            -> backend
    invariant    products give each row the same bits, whatever the number of rows and the others
    """

    backend: str
    format: Format
    shape: tuple[int, ...]
    data: Any
    nbytes: int
    served: dict[tuple[str, str, str, str | None, bool], Backend] = field(default_factory=dict, repr=False, compare=False)
    invariant: bool = False
    graph_name = opaque_call.graph_name

    @property
    def bits_per_weight(self) -> float:
        return Size(self.nbytes, math.prod(self.shape)).bits_per_weight

    def __repr__(self) -> str:
        return f"Prepared({self.format}, shape={self.shape}, {self.bits_per_weight:.3g} bits/weight, backend={self.backend!r})"


class Backend(ABC):
    """One machine's kernels. Arrays are NumPy on devices of type `cpu`, torch tensors elsewhere.

    Activations come 2-D, (m, k), in float32, float16 or bfloat16, any strides; results are new
    arrays in x's dtype.
    """

    name: ClassVar[str]
    device: ClassVar[str]
    """torch's device type this backend computes on: cpu, cuda or mps."""
    batch_invariant: ClassVar[bool] = False
    """Products of weights with `Prepared.invariant` give each row of x the same bits, whatever the
    number of rows and what the others hold.
    """

    @abstractmethod
    def reason(self) -> str | None:
        """None when it can run here, else the sentence that says what is missing."""

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """None when it serves the call, else the sentence that says why not. Called only when
        `reason()` is None.
        """

    @abstractmethod
    def prepare(self, w: QTensor) -> Prepared:
        """The weight in this backend's order. The QTensor may be dropped afterwards."""

    def prepare_on(self, w: QTensor, device: str) -> Prepared:
        """`prepare` for one device of several ("cuda:1"); backends with one device ignore the name."""
        return self.prepare(w)

    @abstractmethod
    def linear(self, x: Any, w: Prepared, bias: Any | None, *, activations: str = "exact", schedule: str | None = None) -> Any:
        """x (m, k) · wᵀ (k, n) + bias -> (m, n) in x's dtype. w is one (n, k) matrix."""

    @abstractmethod
    def embedding(self, ids: Any, w: Prepared, dtype: str) -> Any:
        """Rows `ids` (int64, 1-D, within range) of w, decoded to `dtype` -> (len(ids), k)."""

    @abstractmethod
    def dequantize(self, w: Prepared, dtype: str) -> Any:
        """The dense weight, exact values rounded once to `dtype`."""

    @abstractmethod
    def expert(self, w: Prepared, index: int) -> Prepared:
        """One (n, k) matrix of an (e, n, k) stack, without copying."""

    def canonical(self, w: Prepared) -> dict[str, Any] | None:
        """The canonical parts `prepare` was given, byte for byte; None where the backend cannot
        convert its order back.
        """
        return None

    def experts(
        self,
        x: Any,
        gate_up: Prepared,
        down: Prepared,
        topk_ids: Any,
        topk_weights: Any,
        *,
        gate: str,
        interleaved: bool,
        gate_up_bias: Any | None,
        down_bias: Any | None,
        up: Prepared | None = None,
        up_bias: Any | None = None,
    ) -> Any:
        """A mixture of experts as a whole, for devices where the host should not wait for the
        routing; see `ops.experts`.
        """
        raise BackendError(f"[experts] the {self.name} backend has no experts yet")

    def describe(self) -> str:
        """What it found here, for `halfbyte backends` ("AVX2, 2 threads")."""
        return ""


class AbsentBackend(Backend):
    """A backend that this version or this machine does not have, kept so that its absence is a
    sentence.
    """

    def __init__(self, name: str, device: str, sentence: str) -> None:
        self.name = name  # type: ignore[misc]
        self.device = device  # type: ignore[misc]
        self.sentence = sentence

    def reason(self) -> str | None:
        return self.sentence

    def refuses(self, call: Call) -> str | None:
        return self.sentence

    def _raise(self) -> BackendError:
        return BackendError(f"[{self.name}] {self.sentence}")

    def prepare(self, w: QTensor) -> Prepared:
        raise self._raise()

    def linear(self, x: Any, w: Prepared, bias: Any | None, *, activations: str = "exact", schedule: str | None = None) -> Any:
        raise self._raise()

    def embedding(self, ids: Any, w: Prepared, dtype: str) -> Any:
        raise self._raise()

    def dequantize(self, w: Prepared, dtype: str) -> Any:
        raise self._raise()

    def expert(self, w: Prepared, index: int) -> Prepared:
        raise self._raise()
