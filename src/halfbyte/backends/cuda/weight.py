"""A packed weight on a GPU: bit planes, scales and addends as torch tensors, and the constants its
kernels are compiled for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...numerics.exact import bfloat16
from ...numerics.minifloat import element_table, scale_table
from ...spec import Format
from ...tensor.act_order import sort_by_group
from ...tensor.qtensor import QTensor
from . import device as gpu
from .decoders import TABLE_ELEMENTS
from .order import PLANES, TILE_ROWS, split

KERNEL_ELEMENTS = ("uint", "int", "e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "mxint", *TABLE_ELEMENTS)
"""Elements that decode.py decodes, by name; here, so that a refusal needs no Triton."""
HALF_MAX, HALF_STEP = 65504.0, 2.0**-24


WORKSPACE_BYTES = 1 << 25
"""Device memory that one product may take beside x and y: decoded rows, or partial sums."""


def row_blocks(n: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows that cover 0 to n, as even as whole tiles of 128 rows allow, each of
    at most WORKSPACE_BYTES at `row_bytes` a row (a tile of TILE_ROWS may take more).
    """
    most = max(1, WORKSPACE_BYTES // max(1, row_bytes))
    each = -(-n // -(-n // most))  # as many blocks as must be, all of one size
    whole = 128 if most >= 128 else TILE_ROWS
    each = max(1, min(most // whole, -(-each // whole))) * whole
    for first in range(0, n, each):
        yield first, min(n, first + each)


def refusal(fmt: Format) -> str | None:
    """Why this format has no CUDA kernel, as a sentence, or None."""
    if fmt.opaque:
        return f"{fmt.name} is kept as {fmt.kept_as} and has no CUDA kernel; dequantize it on the CPU"
    if fmt.element not in KERNEL_ELEMENTS:
        return f"{fmt.name} has the element table {fmt.element!r}, which no CUDA kernel decodes"
    if fmt.zero == "float":
        return f"{fmt.name} has float zero points, which have no CUDA kernel yet"
    if fmt.scale == "nested":
        return f"{fmt.name} has doubly quantized scales, which have no CUDA kernel yet"
    if fmt.grouping != "row":
        return f"{fmt.name} has {fmt.grouping} groups; CUDA kernels take groups along a row"
    if fmt.inverse:
        return f"{fmt.name} stores reciprocal scales, which have no CUDA kernel yet"
    if fmt.divisor != 1.0 and not fmt.global_op:
        return f"{fmt.name} divides every value by {fmt.divisor:g}, which has no CUDA kernel yet"
    if fmt.group_size != -1 and fmt.group_size % 8:
        return f"{fmt.name} has groups of {fmt.group_size}; CUDA kernels take multiples of 8"
    return None


FRAGMENT_ELEMENTS = {2: ("uint", "int"), 4: ("uint", "int", "e2m1"), 8: ("uint", "int", "e4m3", "e5m2")}


def even_groups(q: QTensor) -> bool:
    """True when act-order groups, if there are any, have the same number of inputs, so that sorting
    the inputs by group makes groups contiguous.
    """
    index = q.parts.get("group_index")
    if index is None or q.format.group_size == -1:
        return True
    counts = np.bincount(index, minlength=q.format.groups(q.shape[-1]))
    return not (counts[:-1] != q.format.group_size).any()


def in_fragments(fmt: Format, k: int) -> bool:
    """True for weights kept in fragment order: integers and floats of 4 and 8 bits, integers of 2
    bits with one level of scales, in groups of 16, 32, whole units of 64, or one a row.
    """
    if fmt.element not in FRAGMENT_ELEMENTS.get(fmt.bits, ()) or (fmt.bits == 2 and fmt.super_size):
        return False
    return fmt.groups(k) == 1 or fmt.group_size in (16, 32) or fmt.group_size % 64 == 0


LANE_ELEMENTS = {1: ("uint",), 2: ("uint", "int"), 3: ("uint", "int"), 4: TABLE_ELEMENTS, 5: ("uint", "int"),
                 6: ("uint", "int", "e2m3", "e3m2")}  # fmt: skip


def in_lanes(fmt: Format, k: int) -> bool:
    """True for weights that are kept in lane order for `mma` and `wgmma`: of up to two bit planes,
    tables of 16 values, and what has two levels of scales, in groups as `in_fragments`.
    """
    if fmt.element not in LANE_ELEMENTS.get(fmt.bits, ()) or in_fragments(fmt, k) or (fmt.bias and fmt.scale == "float32"):
        return False
    if fmt.super_size % 64:
        return False
    return fmt.groups(k) == 1 or fmt.group_size in (16, 32) or fmt.group_size % 64 == 0


class Launches(dict[Any, Any]):
    """Cache of a weight's launches: tensor maps, arguments, compiled kernels. Copies and pickles of
    the weight start with an empty one. `calls` has whole products of the shapes that came last: by
    schedule and `call_key`, and by the latter alone where the schedule was the library's choice.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: dict[Any, Any] = {}

    def again(self, key: Any, x: Any, bias: Any | None) -> Any | None:
        """A product by what was kept, or None."""
        call = self.calls.get(key)
        return None if call is None else call(x, bias)

    def keep(self, key: Any, call: Any) -> None:
        """Keep a whole product, and no more of them than CALLS_KEPT."""
        if call is None:
            return
        if len(self.calls) >= CALLS_KEPT:
            self.calls.clear()
        self.calls[key] = call

    def __deepcopy__(self, memo: Any) -> Launches:
        return Launches()

    def __reduce__(self) -> tuple[type[Launches], tuple[()]]:
        return Launches, ()


@dataclass
class CudaWeight:
    """Tensors and compile-time constants of one weight (or a stack: a leading expert axis on every
    tensor).

    planes      {8: int32, 4: int32, 2: int16, 1: uint8}: [*lead, n, words (·2 for 8)], or in
                fragment order {4: int32 [*lead, tiles, units (·2 for 8), 32, 4], 2: int16 [*lead,
                tiles, units, 16, 8]} with scales and addends [*lead, tiles, groups, 16], or in lane
                order {width: int32 [*lead, tiles, units, 32, width]} with the same scales
    order         permutation of the inputs that makes act-order groups contiguous, or None
    exact_half    every decoded value is exact in float16 (checked on the data for MX scales)
    normal_scales no E8M0 scale is 0 (2^-127, a subnormal) or 255 (NaN), checked on the data:
                  kernels omit the selects
    plain_scales  no E4M3 scale is NaN, no UE4M3 scale has a sign or is 0x7F, checked on the data:
                  kernels decode two at a time
    scales_half   element · scale in float16 is exact or rounds once, in the normal range: checked
                  on the data
    top           largest E8M0 byte where all lie within NEAR of it (E2M1: element · 2^(b - top + 1)
                  is exact in float16), else -1
    spread        largest less smallest E8M0 byte
    lanes         the planes lie in lane order
    """

    format: Format
    shape: tuple[int, ...]
    planes: dict[int, Any]
    scales: Any
    addend: Any
    super_scales: Any
    super_mins: Any
    global_scale: Any
    table: Any
    order: Any
    exact_half: bool
    normal_scales: bool
    scales_half: bool
    plain_scales: bool = False
    top: int = -1
    spread: int = 255
    lanes: bool = False
    launches: Launches = field(default_factory=Launches, init=False, repr=False, compare=False)

    @cached_property
    def words(self) -> int:
        """Words of eight elements in a row."""
        return -(-self.shape[-1] // 8)

    @cached_property
    def units(self) -> int:
        """Units of 64 inputs in a row of 4-bit codes in fragment order, else 0."""
        return self.fragments if self.format.bits == 4 else 0

    @cached_property
    def fragments(self) -> int:
        """Units of 64 inputs in a row in lane order, or in fragment order of 4 or 8 bits: what the
        kernel for few tokens reads; else 0.
        """
        return self.tiled if self.format.bits > 2 or self.lanes else 0

    @cached_property
    def tiled(self) -> int:
        """Units of 64 inputs in a row in fragment or lane order; 0 in plane order."""
        return -(-self.shape[-1] // 64) if self.lanes or in_fragments(self.format, self.shape[-1]) else 0

    @property
    def device(self) -> Any:
        return next(iter(self.planes.values())).device

    def tensors(self) -> list[Any]:
        """All tensors of the weight."""
        rest = [self.scales, self.addend, self.super_scales, self.super_mins, self.global_scale, self.table, self.order]
        return [*self.planes.values(), *(t for t in rest if t is not None)]

    def row_block(self, first: int, end: int) -> CudaWeight:
        """Rows first to end of a matrix, as views; `first` a multiple of TILE_ROWS."""
        n = self.shape[0]
        if (first, end) == (0, n):
            return self
        block: CudaWeight | None = self.launches.get(("rows", first, end))
        if block is None:
            each = TILE_ROWS if self.tiled else 1

            def take(t: Any) -> Any:
                return None if t is None else t[first // each : -(-end // each)]

            block = self.launches["rows", first, end] = replace(
                self,
                shape=(end - first, self.shape[1]),
                planes={b: take(p) for b, p in self.planes.items()},
                scales=take(self.scales),
                addend=take(self.addend),
                super_scales=take(self.super_scales),
                super_mins=take(self.super_mins),
            )
        return block

    def expert(self, index: int) -> CudaWeight:
        """One matrix of a stack, as views."""

        def take(t: Any) -> Any:
            return None if t is None else t[index]

        return CudaWeight(
            self.format,
            self.shape[1:],
            {b: p[index] for b, p in self.planes.items()},
            take(self.scales),
            take(self.addend),
            take(self.super_scales),
            take(self.super_mins),
            take(self.global_scale),
            self.table,
            self.order,
            self.exact_half,
            self.normal_scales,
            self.scales_half,
            self.plain_scales,
            self.top,
            self.spread,
            self.lanes,
        )


CALLS_KEPT = 64
"""Whole calls that are kept with a weight: two for a shape of x."""


def call_key(x: Any, w: CudaWeight, bias: Any | None) -> tuple[Any, ...]:
    """What a product depends on; the addresses tell whether a weight's tensors were replaced."""
    of_bias = None if bias is None else (bias.dtype, bias.device, bias.data_ptr() % 16)
    codes = next(iter(w.planes.values()))
    return x.shape, x.stride(), x.data_ptr() % 16, x.dtype, x.device, of_bias, w.scales.data_ptr(), codes.data_ptr()


def tensor_of(array: NDArray[Any], device: Any) -> Any:
    """A NumPy array on the device; bfloat16 is copied as 16-bit words."""
    import torch

    array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = array.copy()  # torch warns about read-only (memory-mapped) arrays
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(array).to(device)


def _exact_half(q: QTensor) -> bool:
    """True when every element · scale is exact in float16, by the range of the scale bytes (8-bit
    scales only).
    """
    if q.format.scale not in ("e8m0", "e4m3", "ue4m3") or not q.parts["scales"].size:
        return q.format.scale not in ("e8m0",)
    used = scale_table(q.format.scale)[np.unique(q.parts["scales"])]
    used = np.abs(used[np.isfinite(used) & (used != 0)])
    elements = np.abs(element_table(q.format.element, q.format.bits))
    elements = elements[np.isfinite(elements) & (elements != 0)]
    if not used.size:
        return True
    return bool(used.max() * elements.max() <= HALF_MAX and used.min() * elements.min() >= HALF_STEP * 8)


def _normal_scales(q: QTensor) -> bool:
    """True when E8M0 scales hold neither 0 nor 255."""
    if q.format.scale != "e8m0":
        return False
    scales = q.parts["scales"]
    return bool(scales.size and scales.min() > 0 and scales.max() < 255)


def _plain_scales(q: QTensor) -> bool:
    """True when the E4M3 scales of E2M1 codes hold no NaN, and unsigned ones nothing from 0x7F on."""
    if q.format.scale not in ("e4m3", "ue4m3") or q.format.element != "e2m1":
        return False
    scales = q.parts["scales"]
    odd = (scales & 0x7F) == 0x7F if q.format.scale == "e4m3" else scales >= 0x7F
    return not odd.any()


NEAR = {"e2m1": 24, "e4m3": 21, "e5m2": 8}
"""Largest difference of E8M0 bytes for which element · scale, times one power of two, is exact in
float16.
"""


def _top(q: QTensor) -> int:
    """The largest E8M0 byte when the smallest is at most NEAR below it, else -1."""
    scales = q.parts["scales"]
    if q.format.scale != "e8m0" or not _normal_scales(q):
        return -1
    top = int(scales.max())
    return top if top - int(scales.min()) <= NEAR.get(q.format.element, 24) else -1


def _spread(q: QTensor) -> int:
    """The largest less the smallest E8M0 byte; 255 of other scales."""
    scales = q.parts["scales"]
    return int(scales.max()) - int(scales.min()) if q.format.scale == "e8m0" and scales.size else 255


def _scales_half(q: QTensor) -> bool:
    """True when a 4-bit weight may be finished in float16 arithmetic: scales that are float16 and
    far from both ends, or products that are exact.
    """
    f = q.format
    if f.bits != 4 or f.minimum:
        return False
    if f.scale in ("e8m0", "e4m3", "ue4m3"):
        return not f.bias and f.zero != "int" and _exact_half(q)
    if f.scale != "float16":
        return False
    used = np.abs(q.parts["scales"][q.parts["scales"] != 0].astype(np.float32))
    return not used.size or bool(used.min() >= 2.0**-14 and used.max() * 15 <= HALF_MAX)


def to_device(q: QTensor, device: Any, lanes: bool | None = None) -> CudaWeight:
    """The weight in GPU order on `device`. Parts are converted one at a time, so that host memory
    has no second copy of the whole weight. `lanes`: whether formats of `in_lanes` lie in lane
    order; None: on every GPU.
    """
    from .arrange import by_tiles

    fmt, k = q.format, q.shape[-1]
    codes, order = sort_by_group(q, "cuda")
    fragments = in_fragments(fmt, k)
    lanes = (gpu.reads_lanes(device) if lanes is None else lanes) and in_lanes(fmt, k)

    def spread(part: NDArray[Any]) -> Any:
        """Per-group values in the order of the codes."""
        stored = tensor_of(part, device)
        return by_tiles(stored) if fragments or lanes else stored

    if lanes:
        planes = _lanes_of(codes, k, fmt, device)
    elif fragments:
        planes = {fmt.bits: _fragments_of(codes, k, fmt, device)}
    else:
        dtypes = {8: np.int32, 4: np.int32, 2: np.int16, 1: np.uint8}
        planes = {
            width: tensor_of(np.ascontiguousarray(plane).view(dtypes[width]), device)
            for width, plane in split(codes, fmt.bits, k).items()
        }
    addend = None
    for part in ("zeros", "biases", "mins"):
        if part in q.parts:
            addend = spread(q.parts[part])
    supers = {p: spread(q.parts[p]) if p in q.parts else None for p in ("super_scales", "super_mins")}
    whole = tensor_of(q.parts["global_scale"], device) if "global_scale" in q.parts else None
    table = tensor_of(element_table(fmt.element, fmt.bits).astype(np.float32), device) if fmt.element in TABLE_ELEMENTS else None
    packed = CudaWeight(
        fmt,
        q.shape,
        planes,
        spread(q.parts["scales"]),
        addend,
        supers["super_scales"],
        supers["super_mins"],
        whole,
        table,
        None if order is None else tensor_of(order, device),
        _exact_half(q),
        _normal_scales(q),
        _scales_half(q),
        _plain_scales(q),
        _top(q),
        _spread(q),
        lanes,
    )
    synchronize(device)
    return packed


def _fragments_of(codes: NDArray[np.uint8], k: int, fmt: Format, device: Any) -> Any:
    """Every matrix in fragment order on the device: int32 [*lead, tiles, units (·2 for 8), 32, 4],
    of 2 bits int16 [*lead, tiles, units, 16, 8].
    """
    import torch

    from .arrange import to_fragments

    *lead, n, width = codes.shape
    tiles, units = -(-n // TILE_ROWS), -(-k // 64)
    tile = (units, 16, 4) if fmt.bits == 2 else (units * fmt.bits // 4, 32, 4)
    words = torch.empty((math.prod(lead), tiles, *tile), dtype=torch.int32, device=device)
    for one, matrix in zip(words, codes.reshape(len(words), n, width), strict=True):
        one.copy_(to_fragments(tensor_of(matrix, device), k, by_16(fmt, k), fmt.element, fmt.bits))
    words = words.view(torch.int16) if fmt.bits == 2 else words
    return words.reshape(*lead, *words.shape[1:])


def _lanes_of(codes: NDArray[np.uint8], k: int, fmt: Format, device: Any) -> dict[int, Any]:
    """Every matrix in lane order on the device: {width: int32 [*lead, tiles, units, 32, width]}."""
    import torch

    from .arrange import to_lanes

    *lead, n, width = codes.shape
    each = [to_lanes(tensor_of(matrix, device), fmt.bits, k) for matrix in codes.reshape(math.prod(lead), n, width)]
    if not lead:
        return each[0]
    tile = -(-n // TILE_ROWS), -(-k // 64), 32
    return {
        plane: torch.cat([one[plane] for one in each]).reshape(*lead, *tile, plane)
        if each
        else torch.empty((*lead, *tile, plane), dtype=torch.int32, device=device)
        for plane in PLANES[fmt.bits]
    }


def synchronize(device: Any) -> None:
    """Wait until the weights are written on the device: a kernel may read them before the preceding
    kernel has ended (programmatic dependent launch, launch.py).
    """
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def nbytes(w: CudaWeight) -> int:
    """Bytes on the device."""
    return sum(t.numel() * t.element_size() for t in w.tensors())


def by_16(fmt: Format, k: int) -> bool:
    """True for fragment order of groups of 16."""
    return fmt.group_size == 16 and fmt.groups(k) > 1


def element_family(w: CudaWeight) -> str:
    """Weights of one level of scales whose products take the same work: `wide` of 8 bits, `e2m1`,
    in groups of 16 `fine`, `int` without zero points, `affine` with them, `biased`.
    """
    if w.format.bits == 8:
        return "wide"
    if w.format.element == "e2m1":
        return "fine" if group_elements(w) == 16 else "e2m1"
    return "int" if w.addend is None else "affine" if w.format.zero == "int" else "biased"


def group_elements(w: CudaWeight) -> int:
    """Elements that share a scale, as kernels count them: a whole padded row for one group."""
    if w.format.group_size == -1 or w.format.groups(w.shape[-1]) == 1:
        return 64 * w.tiled if w.tiled else 8 * w.words
    return w.format.group_size


def super_per(w: CudaWeight) -> int:
    """Groups that share a super scale (1 without a second level)."""
    return w.format.super_size // w.format.group_size if w.format.super_size else 1


def elements_of(shape: tuple[int, ...]) -> int:
    """Product of a shape."""
    return math.prod(shape)


def scale_groups(w: CudaWeight) -> int:
    """Groups along a row as stored."""
    return max(1, w.format.groups(w.shape[-1]))
