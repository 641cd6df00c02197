"""The compiled core (native/python/). Arrays are NumPy arrays or torch tensors on the CPU; NumPy's
bfloat16 crosses as uint16.
"""

import enum
from typing import Any

Array = Any

class Element(enum.Enum):
    integer = 0
    table = 1
    minifloat = 2

class Scale(enum.Enum):
    none = 0
    e8m0 = 1
    e4m3 = 2
    ue4m3 = 3
    f16 = 4
    bf16 = 5
    f32 = 6
    u8 = 7
    i8 = 8
    nested = 9

class Grouping(enum.Enum):
    row = 0
    flat = 1
    strided = 2
    block = 3

class Global(enum.Enum):
    none = 0
    multiply = 1
    divide = 2

class Activations(enum.Enum):
    exact = 0
    int8 = 1
    int8_token = 2

class Gate(enum.Enum):
    silu = 0
    gelu_tanh = 1

class Probe(enum.Enum):
    read = 0
    fma = 1
    dot = 2

class WeightFields:
    """The fields of native/weight.h, set one by one; `Weight` checks them as a whole."""

    def __init__(self) -> None: ...
    n: int
    k: int
    panel_order: bool
    bits: int
    row_bytes: int
    flip: int
    element: Element
    offset: int
    integral: bool
    table_low: int
    unit: float
    mantissa_bits: int
    exponent_bias: int
    last_finite: int
    groups: int
    group: int
    group_size: int
    seg: int
    span: int
    scale: Scale
    groups_per_super: int
    supers: int
    global_op: Global
    global_scale: float
    divisor: float
    inverse: bool
    grouping: Grouping
    group_rows: int
    first_row: int
    total_rows: int
    nested_offset: float
    plane8: Array
    plane4: Array
    plane2: Array
    plane1: Array
    codes: Array
    values: Array
    gather: Array
    group_index: Array
    scales: Array
    zeros: Array
    float_zeros: Array
    biases: Array
    mins: Array
    super_scales: Array
    super_mins: Array
    nested_map: Array
    nested_absmax: Array

class Weight:
    def __init__(self, fields: WeightFields, /) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...

def known() -> list[str]: ...
def supported() -> list[str]: ...
def current() -> str: ...
def use(name: str) -> None: ...
def known_cores() -> list[str]: ...
def use_core(name: str) -> None: ...
def threads() -> int: ...
def usable_threads() -> int: ...
def quota_threads(groups_of_process: str, mount: str) -> int: ...
def set_threads(threads: int) -> None: ...
def linear(weight: Weight, x: Array, bias: Array | None, activations: Activations, out: Array) -> None: ...
def embedding(weight: Weight, ids: Array, out: Array) -> None: ...
def dequantize(weight: Weight, out: Array) -> None: ...
def pack(fields: WeightFields, codes: Array, /) -> None: ...
def unpack(weight: Weight, codes: Array, /) -> None: ...
def probe(kind: Probe, data: Array, rounds: int) -> float: ...
def transpose(x: Array, out: Array) -> None: ...
def transpose_nibbles(x: Array, columns: int, order: Array, out_order: Array, out: Array) -> None: ...
def merges(characters: Array, ends: Array, left: Array, right: Array) -> int: ...
def string_end(data: Array, start: int, count: int, swapped: bool) -> int: ...

class Strings:
    """The strings of a GGUF array in a header's bytes, which it keeps alive; see native/strings.h."""

    def __init__(self, data: Array, start: int, count: int, swapped: bool) -> None: ...
    def bounds(self, index: int) -> tuple[int, int]: ...
    def find(self, word: bytes) -> int: ...
    def pieces(self, text: bytes, found: Array) -> None: ...
    @property
    def longest(self) -> int: ...
    @property
    def distinct(self) -> bool: ...

def attend(q: Array, keys: Array, values: Array, count: int, begin: int, window: int, scale: float, y: Array) -> None:
    """Attention of the last tokens of a cache; see native/attention.h."""

class Step:
    """A list of operations on float32 buffers, which it keeps alive; see native/step.h."""

    def product(self, weight: Weight, x: Array, bias: Array | None, activations: Activations, y: Array) -> None: ...
    def norm(self, x: Array, scale: Array, eps: float, y: Array, /) -> None: ...
    def rotate(self, x: Array, d: int, table: int, /) -> None: ...
    def attend(self, layer: int, q: Array, k: Array, v: Array, d: int, scale: float, y: Array, /) -> None: ...
    def gate(self, kind: Gate, gate: Array, up: Array, y: Array, /) -> None: ...
    def add(self, x: Array, y: Array, /) -> None: ...
    def bind(self, keys: list[Any], values: list[Any], cosines: list[Any], sines: list[Any], /) -> None: ...
    def run(self, first: Array, count: Array, position: int, token: int, /) -> None: ...
