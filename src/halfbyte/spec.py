"""What a weight format is, before any bits are read.

A `Format` is the complete description of how codes become numbers. It describes structure only
(element table, bits, groups, kinds of scale and zero point), never where the bytes are in a file:
that is a layout. Kernels dispatch on these fields, not on the name.

    value = ((element(code) − zero) · scale · super_scale · global) / divisor
            + bias − min · super_min

docs/design/layering.md lists the parts of a tensor that carry each term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from numpy.typing import NDArray

ELEMENT_BITS: dict[str, int] = {
    "e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8,
    "nf4": 4, "bnb_fp4": 4, "nf4_modelopt": 4, "iq4_nl": 4,
}  # fmt: skip
"""Element tables of a fixed width. `int` (code − 2^(bits−1)), `uint` (code) and `mxint` take their
width from the format.
"""

FLOAT_SCALES = ("float16", "bfloat16", "float32")
SCALE_KINDS = ("e8m0", "e4m3", "ue4m3", *FLOAT_SCALES, "u4", "u6", "i6", "i8", "nested", "none")
SMALL_SCALES = {"u4": (0, 15), "u6": (0, 63), "i6": (-32, 31), "i8": (-128, 127)}
"""Least and largest value of the small-integer scale kinds, each stored in one byte."""
ZERO_KINDS = ("none", "int", "float")
EXTRAS = ("", "trellis", "low-rank", "transform")
GROUPINGS = ("row", "flat", "strided", "block")


@dataclass(frozen=True)
class Size:
    """Bytes and weights of a tensor, a file or a model; what two modules share counts once."""

    nbytes: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        """8 · nbytes / weights; 0 of nothing."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Format:
    """How codes of one tensor become numbers.

    family      key of the family in `formats.FAMILIES` that encodes and decodes it (`mx`, `nvfp4`,
                `integer`, ...)
    name        codec name as users write it: `mxfp4`, `int4`, `affine4`, `q4_K`
    bits        width of one code, 1 to 8
    element     `int`, `uint`, `mxint` or a table name of `ELEMENT_BITS`
    group_size  inputs that share a scale; −1 is the whole row
    scale       kind of the `scales` part, one of `SCALE_KINDS`
    zero        `none`, `int` (stored integer zero points) or `float` (HQQ)
    bias        a `biases` part is added
    minimum     kind of the `mins` part, "" without one
    super_size  inputs that share a `super_scales` entry; 0 without a second level
    global_op   "" , "multiply" or "divide": what the float32 `global_scale` does
    divisor     constant that divides the value (MLX nvfp4 stores amax: 2688; bitsandbytes int8:
                127)
    grouping    how elements map to scales: `row`, `flat`, `strided`, `block`
    group_rows  rows that share a scale when `grouping == "block"`; −1 is all
    inverse     the stored scale divides instead of multiplies (ModelOpt INT4QTensor)
    extra       what else the value depends on than the formula above, one of `EXTRAS`: "trellis"
                (EXL3: states of a trellis under a Hadamard transform), "low-rank" (plus b · a),
                "transform" (matrices on the input and output side); "" for nothing
    """

    family: str
    name: str
    bits: int
    element: str
    group_size: int
    scale: str
    zero: str = "none"
    bias: bool = False
    minimum: str = ""
    super_size: int = 0
    global_op: str = ""
    divisor: float = 1.0
    grouping: str = "row"
    group_rows: int = 1
    inverse: bool = False
    extra: str = ""

    def __str__(self) -> str:
        group = "channel" if self.group_size == -1 else f"g{self.group_size}"
        also = f"+{self.extra}" if self.extra not in ("", "trellis") else ""
        return f"{self.name}{also}:{group}"

    def with_(self, **changes: object) -> Format:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def opaque(self) -> bool:
        """True where a value is more than one code under its scales: ggml types that are stored as
        raw blocks and decoded by the gguf package, and every `composite` format.
        """
        return self.element == "blocks" or self.composite

    @property
    def kept_as(self) -> str:
        """What an `opaque` weight is stored as, for messages of backends that do not decode it."""
        names = {"trellis": "an EXL3 trellis", "low-rank": "codes and a low-rank part", "transform": "codes and a transform"}
        return names.get(self.extra, "raw ggml blocks")

    @property
    def composite(self) -> bool:
        """True where a row's values depend on more than that row's codes: a matrix (n, k) only, and
        slices keep every part whole.
        """
        return bool(self.extra)

    @property
    def float_scale(self) -> bool:
        """True when group scales are plain float16, bfloat16 or float32 numbers."""
        return self.scale in FLOAT_SCALES

    def groups(self, k: int) -> int:
        """Scale groups along a row of k inputs, the last possibly short: ceil(k / group_size)."""
        if k == 0:
            return 0
        if self.group_size == -1:
            return 1
        return -(-k // self.group_size)

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of canonical codes: ceil(k · bits / 8)."""
        return -(-k * self.bits // 8)


class EncodedTensor(Protocol):
    """What a decoder reads of a packed weight; `tensor.QTensor` is one, and documents the
    attributes.
    """

    @property
    def format(self) -> Format: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> Mapping[str, NDArray[Any]]: ...
    @property
    def origin(self) -> str: ...
    @property
    def details(self) -> Mapping[str, Any]: ...
    @property
    def window(self) -> tuple[int, int] | None: ...


@dataclass(frozen=True)
class Target:
    """A conversion target, spelled `layout[:codec[:gN]]`."""

    layout: str
    codec: str | None = None
    group_size: int | None = None

    def __str__(self) -> str:
        tail = "" if self.group_size is None else f":g{self.group_size}"
        return self.layout + ("" if self.codec is None else f":{self.codec}{tail}")
