"""Host side of the portable kernels and the fragment kernel: arguments, grids, tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton

import torch

from . import device as gpu
from .decode import BF16_PAIR, E4M3_NORMAL, E8M0_NORMAL, ELEMENTS, F16_PAIR, SCALES, TABLE
from .decoders import FRAGMENTS, PLANES, WORDS, assembly
from .lookups import LANES
from .mma.kernel import fragment_kernel
from .mma.plan import Factors, Plan, TokenBlocks, make_plan
from .mma.plan import Weight as FragmentPointers
from .order import PLANES as PLANE_WIDTHS
from .portable.decode_tile import Format, Weight
from .portable.dequantize import dequantize_kernel
from .portable.matmul import MatmulTile, matmul_kernel
from .portable.matvec import matvec_kernel
from .portable.tiled import TiledTile, striped_kernel, tile_kernel
from .relaunch import CachedLaunch, cached, hooked
from .tuning.mma_tiles import (
    MANY_ROWS,
    BlockTile,
    FragmentTile,
    Tile,
    block_tile,
    expert_tile,
    fragment_tile,
    matmul_tile,
    matvec_tile,
    steps,
)
from .weight import CudaWeight, call_key, element_family, group_elements, row_blocks, scale_groups, super_per

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PAIRS = {torch.float16: F16_PAIR.value, torch.bfloat16: BF16_PAIR.value}
GLOBAL_OPS = {"": 0, "multiply": 1, "divide": 2}


def addend_kind(w: CudaWeight) -> int:
    """decode_tile.NONE, ZERO, BIAS or MIN."""
    return 1 if w.format.zero == "int" else 2 if w.format.bias else 3 if w.format.minimum else 0


def format_of(w: CudaWeight, packed: bool = True) -> Format:
    """The compile-time description of a weight for the portable kernels; `packed` allows inline
    assembly.
    """
    f = w.format
    kind = ELEMENTS[f.element]
    if packed and kind == TABLE.value and f.bits == 4:
        kind = LANES.value  # a table in a warp's lanes is 2.6 times as fast as one in memory at m = 1 (H100)
    return Format(
        words=w.words,
        group=group_elements(w),
        kind=kind,
        bits=f.bits,
        scale=SCALES[f.scale],
        addend=addend_kind(w),
        per_super=super_per(w),
        global_op=GLOBAL_OPS[f.global_op],
        divide=f.divisor != 1.0,
        units=w.tiled,
        lanes=w.lanes,
        **(word_decoders(f.bits, f.element) if packed else {}),
    )


def word_decoders(bits: int, element: str) -> dict[str, Any]:
    """The fields of `Format` that rows of `decoders.WORDS` fill, or none where there is no row."""
    rows = [WORDS.get((bits, element, order)) for order in (PLANES, FRAGMENTS)]
    first = rows[0]
    if first is None:
        return {}
    texts = ["" if row is None else assembly(row, 8, "w0") for row in rows]
    return {"decoder": texts[0], "fragment_decoder": texts[1], "power": 1.0 / first.low}


def pointers_of(w: CudaWeight) -> Weight:
    """The tensors of a weight for the portable kernels; what is absent is the scales, never read as
    such.
    """
    s = w.scales
    planes = (w.planes.get(width, s) for width in (8, 4, 2, 1))
    rest = (s if t is None else t for t in (w.super_scales, w.addend, w.super_mins, w.global_scale, w.table))
    return Weight._make((*planes, s, *rest))


def dequantize(
    w: CudaWeight, dtype: torch.dtype, ids: torch.Tensor | None = None, packed: bool = True, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Dense (n, k), or the rows `ids` of it, on the weight's device. Two-dimensional weights only.
    Values are rounded to float32 and then to `dtype`, except where the float32 value is exact
    (integers and floats of up to 8 bits under 16-bit or 8-bit float scales without addend): a value
    whose float32 is the midpoint of two of `dtype` may be one step off.

    `out`: a contiguous matrix that takes the values, in the weight's own order of inputs.
    """
    n, k = w.shape
    rows = n if ids is None else ids.numel()
    own_order = out is not None
    if out is None:
        out = torch.empty((rows, k), dtype=dtype, device=w.device)
    key = (
        ("dequantize", dtype, w.scales.data_ptr(), *[p.data_ptr() for p in w.planes.values()]) if ids is None and packed else None
    )
    again = w.launches.get(key)
    if again is not None and out.data_ptr() % 16 == 0:
        with gpu.use(w.device):
            again(out)
    elif rows and k:
        bw = min(64, triton.next_power_of_2(w.words))
        bn = max(1, min(8, 512 // bw))
        grid = triton.cdiv(rows, bn), triton.cdiv(w.words, bw)
        weight = w.scales if ids is None else ids, pointers_of(w)
        arguments = *weight, rows, k, scale_groups(w), float(w.format.divisor)
        constants = {"format": format_of(w, packed), "GATHER": ids is not None, "BN": bn, "BW": bw}
        with gpu.use(w.device):
            compiled = dequantize_kernel[grid](out, *arguments, **constants, num_warps=4, enable_fp_fusion=False)
            if key is not None and compiled is not None and out.data_ptr() % 16 == 0:
                w.launches[key] = cached(compiled, grid, (*arguments, *constants.values()))
    if w.order is not None and not own_order:
        back = torch.empty_like(out)
        back[:, w.order] = out
        return back
    return out


class PlainCall:
    """A product that was made before, without tensor maps. `arguments` makes the first ones of y,
    x, bias (0: none) and scratch memory: with a `split`, float32 of partial sums, and counters.
    """

    __slots__ = ("_arguments", "_launch", "_rest", "_shape", "_split")

    def __init__(
        self, launch: Callable[..., None], rest: tuple[Any, ...], shape: tuple[int, int],
        arguments: Callable[[int, int, int, tuple[int, int]], tuple[Any, ...]], split: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._launch, self._rest, self._shape, self._arguments, self._split = launch, rest, shape, arguments, split

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """y; None where a profiler wants Triton's own launch."""
        if hooked():
            return None
        device = x.device
        y = torch.empty(self._shape, dtype=x.dtype, device=device)
        to_y = y.data_ptr()
        scratch = to_y, to_y
        with gpu.use(device):
            stream = gpu.stream_of(device)
            if self._split:
                partial = torch.empty(self._split[0], dtype=torch.float32, device=device)
                counters = gpu.arrival_counters(device, self._split[1], stream)
                scratch = partial.data_ptr(), counters.data_ptr()
            first = self._arguments(to_y, x.data_ptr(), 0 if bias is None else bias.data_ptr(), scratch)
            self._launch(stream, *first, *self._rest)
        return y


def _keep(
    key: Any, w: CudaWeight, again: CachedLaunch, shape: tuple[int, int],
    arguments: Callable[[int, int, int, tuple[int, int]], tuple[Any, ...]], split: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Keep a product with the weight."""
    launch = again.launch.plain(again.grid)
    if launch is not None:
        w.launches.keep(key, PlainCall(launch, again.rest, shape, arguments, split))


def _inputs(x: torch.Tensor, w: CudaWeight, whole: int = 8) -> torch.Tensor:
    """x in the weight's input order, inner stride 1, padded with zeros to a multiple of `whole`
    inputs.
    """
    if w.order is not None:
        x = x.index_select(1, w.order)
    if x.shape[1] % whole:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % whole))
    return x if x.stride(1) == 1 else x.contiguous()


def matvec(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, tile: Tile | None = None, packed: bool = True
) -> torch.Tensor:
    """The schedule of few tokens: the weight is read once a token, float32 products and sums for
    any dtype of x.
    """
    m, n = x.shape[0], w.shape[0]
    x = _inputs(x, w)
    key = ("matvec", *call_key(x, w, bias)) if tile is None and packed else None
    y: torch.Tensor | None = w.launches.again(key, x, bias)
    if y is not None:
        return y
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tile = tile or matvec_tile(w.words, n, m)
    grid = triton.cdiv(n, tile.rows), m
    arguments = pointers_of(w), n, x.stride(0), scale_groups(w), float(w.format.divisor)
    constants = {"format": format_of(w, packed), "HAS_BIAS": bias is not None, "BN": tile.rows, "BC": tile.words}
    with gpu.use(w.device):
        compiled = matvec_kernel[grid](
            y, x, w.scales if bias is None else bias, *arguments, **constants, num_warps=tile.warps, enable_fp_fusion=False
        )
        if key is not None and compiled is not None:
            scales, again = w.scales.data_ptr(), cached(compiled, grid, (*arguments, *constants.values()))
            _keep(key, w, again, (m, n), lambda y, x, bias, _: (y, x, bias or scales))
    return y


def matmul(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, tile: Tile | None = None, packed: bool = True
) -> torch.Tensor:
    """The small-m schedule on the matrix unit; x float16 or bfloat16 (float32 runs through IEEE
    products, slowly).
    """
    m, n = x.shape[0], w.shape[0]
    x = _inputs(x, w)
    key = ("matmul", *call_key(x, w, bias)) if tile is None and packed else None
    y: torch.Tensor | None = w.launches.again(key, x, bias)
    if y is not None:
        return y
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tile = tile or matmul_tile(w.words, n, m)
    grid = (triton.cdiv(n, tile.rows), triton.cdiv(m, tile.tokens), tile.split)
    split, scratch, weight = None, (y, y), pointers_of(w)
    if tile.split > 1:
        split = tile.split * m * n, grid[0] * grid[1]
        partial = torch.empty(split[0], dtype=torch.float32, device=x.device)
        scratch = (partial, gpu.arrival_counters(x.device, split[1]))
    arguments = m, n, x.stride(0), scale_groups(w), float(w.format.divisor)
    constants = {
        "format": format_of(w, packed),
        "tile": MatmulTile(bias is not None, tile.split, tile.tokens, tile.rows, tile.words),
    }
    with gpu.use(w.device):
        compiled = matmul_kernel[grid](
            y, x, w.scales if bias is None else bias, weight, scratch,
            *arguments, **constants, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
        if key is not None and compiled is not None:
            scales, again = w.scales.data_ptr(), cached(compiled, grid, (*arguments, *constants.values()), weight)
            _keep(key, w, again, (m, n), lambda y, x, bias, scratch: (y, x, bias or scales, again.weight, scratch), split)
    return y


def tiled(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, schedule: str, tile: BlockTile | None = None, packed: bool = True
) -> torch.Tensor:
    """The schedules of portable/tiled.py by name, any m, any dtype of x (float32 and what float16
    cannot hold: IEEE products).
    """
    m, n = x.shape[0], w.shape[0]
    dtype = x.dtype
    x = _inputs(x.float() if exceeds_float16(x, w) else x, w)
    tile = tile or block_tile(n, m, x.element_size(), schedule)
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    tiles = triton.cdiv(n, tile.rows) * triton.cdiv(m, tile.tokens)
    programs, scratch = tiles, []
    if schedule == "striped":
        programs = min(tiles * triton.cdiv(w.words, tile.words), tile.programs * gpu.multiprocessors(w.device))
        partial = torch.empty((programs, 2, tile.tokens, tile.rows), dtype=torch.float32, device=x.device)
        scratch = [(partial, gpu.arrival_counters(x.device, tiles))]
    stages = 1 if schedule == "single-stage" else tile.stages
    with gpu.use(w.device):
        (striped_kernel if scratch else tile_kernel)[(programs,)](
            y,
            x,
            w.scales if bias is None else bias,
            pointers_of(w),
            *scratch,
            m,
            n,
            x.stride(0),
            scale_groups(w),
            float(w.format.divisor),
            format=format_of(w, packed),
            tile=TiledTile(bias is not None, tile.tokens, tile.rows, tile.words, stages),
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
    return y


def exceeds_float16(x: torch.Tensor, w: CudaWeight) -> bool:
    """True when decoded values do not fit x's dtype though the result may: MX exponents beyond
    float16's range.
    """
    return x.dtype == torch.float16 and w.format.scale == "e8m0" and not w.exact_half


class Routing(NamedTuple):
    """Tokens of a stack of experts: the table of their blocks, and the most tokens a block."""

    blocks: TokenBlocks
    tokens: int


def family_of(w: CudaWeight) -> str:
    """Weights that share tiles: those of `element_family`; in lane order `planes`, with two levels
    of scales `supers`, in groups of 16 `fine supers`.
    """
    if w.lanes and w.super_scales is not None:
        return "fine supers" if group_elements(w) == 16 else "supers"
    return "planes" if w.lanes else element_family(w)


def tile_tokens(w: CudaWeight, n: int, m: int) -> int:
    """Tokens whose measured tile serves m tokens and n outputs. Tall weights with two levels of
    scales take the tile of 8 tokens from 3 on (22 µs against 39 of the tile measured for affine4;
    Q4_K, 14336 x 4096, H200).
    """
    tall = w.super_scales is not None and not w.lanes and n >= MANY_ROWS
    return 8 if tall and 2 < m < 8 else m


def fragments(
    x: torch.Tensor,
    w: CudaWeight,
    bias: torch.Tensor | None,
    tile: FragmentTile | None = None,
    routing: Routing | None = None,
    dtype: torch.dtype | None = None,
    gate: int = 0,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The register-decode schedule for weights in fragment order; x float16 or bfloat16, any m.
    `routing` for a stack of them, y of `dtype`; `gate` names the activation that makes one output
    of rows 2 j and 2 j + 1, 0 none; `x_scales` float32 (m) multiply the sums of tokens, and then no
    weight is rounded.
    """
    n = w.shape[-2]
    m, count = (x.shape[0], x.shape[0]) if routing is None else (routing.tokens, routing.blocks.y_row.numel())
    given, x = x, _inputs(x, w, 64)
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # rows of x are read 16 bytes at a time
    y = torch.empty((count, n // 2 if gate else n), dtype=dtype or x.dtype, device=x.device)
    key = None
    if tile is None and routing is None:
        made = "fragments", *call_key(x, w, bias)
        key = y.dtype, gate, x_scales is None, *made
        again = w.launches.get(key)
        if again is not None:
            if given is x and not gate and y.dtype == x.dtype and x_scales is None and made not in w.launches.calls:
                rest = again.weight
                _keep(made, w, again, (m, n), lambda y, x, bias, _: (y, x, (bias, *rest, rest[1])) if bias else (y, x))
            with gpu.use(x.device):
                if bias is None and x_scales is None:
                    again(y, x)
                else:
                    again(y, x, _fragment_pointers(bias, again.weight, x_scales))
            return y
    pairs = x.view(torch.int32)
    if tile is None:
        choose = fragment_tile if routing is None else expert_tile
        tile = choose(w.fragments, n, m if routing is not None else tile_tokens(w, n, m), family_of(w), gpu.card_name(w.device))
    plan, rest, unit = _fragment_plan(w, bias is not None, x.dtype == torch.float16, m, tile, routing is not None, gate, x_scales)
    weight = _fragment_pointers(bias, rest, x_scales)
    tiles = triton.cdiv(n, 16)
    grid = _fragment_grid(w, plan, tile, tiles, m, routing)
    factors = Factors(float(w.format.divisor), unit)
    blocks = None if routing is None else routing.blocks
    arguments = (blocks, m, n, pairs.stride(0), factors, max(w.top, 0), tiles)
    with gpu.use(w.device):
        compiled = fragment_kernel[grid](
            y,
            pairs,
            weight,
            *arguments,
            plan=plan,
            **gpu.launch_options(w.device),
            num_warps=tile.input_warps * tile.row_warps,
            enable_fp_fusion=False,
        )
        if key is not None and compiled is not None:
            same = (weight, *arguments, plan) if bias is None and x_scales is None else (*arguments, plan)
            w.launches[key] = cached(compiled, grid, same, rest)
    return y


def _fragment_pointers(bias: torch.Tensor | None, rest: tuple[Any, ...], x_scales: torch.Tensor | None) -> FragmentPointers:
    """The pointers of a call; `rest` are those of the weight."""
    return FragmentPointers._make((rest[1] if bias is None else bias, *rest, rest[1] if x_scales is None else x_scales))


def _fragment_plan(
    w: CudaWeight, has_bias: bool, half: bool, m: int, tile: FragmentTile, routed: bool, gate: int, x_scales: torch.Tensor | None
) -> tuple[Plan, tuple[Any, ...], float]:
    """What the fragment kernel is compiled for, the weight's pointers after the bias, and the power
    of two that its sums lack.
    """
    group = group_elements(w)
    whole = w.lanes and w.format.bits == 4 and w.format.element != "iq4_nl"  # only float32 holds the entries of its table
    step, groups, columns = steps(group, w.fragments, max(m, 8) if whole else m, tile)
    finished = whole or (columns == 8 and w.format.bits == 4 and not w.lanes and _finishes(w, half, tile.scaled))
    if x_scales is not None and not (w.format.element == "e2m1" and w.scales.element_size() == 1):
        finished = whole  # element · scale would be rounded
    s, addend, scale, unit = w.scales, w.addend, SCALES[w.format.scale], 1.0
    if w.plain_scales:
        s, scale = s.view(torch.int16), E4M3_NORMAL.value
        unit = 2.0**14 if finished and w.format.element == "e2m1" else 1.0
    elif w.normal_scales and (w.top >= 0 or not finished):
        s, scale = s.view(torch.int16), E8M0_NORMAL.value
        unit = 2.0 ** (w.top - 128) if finished else 1.0
    if s.dtype in PAIRS and (addend is None or addend.element_size() == 2):
        s, scale, addend = s.view(torch.int32), PAIRS[s.dtype], None if addend is None else addend.view(torch.int32)
    rest = (s if t is None else t for t in (w.super_scales, addend, w.super_mins, w.global_scale))
    widths = PLANE_WIDTHS[w.format.bits] if w.lanes else (w.format.bits,)
    table = s if w.table is None else w.table
    weight = (w.planes[widths[0]], w.planes[widths[-1]], table, s, *rest)
    plan = make_plan(
        units=w.fragments,
        groups=scale_groups(w),
        group=group,
        kind=ELEMENTS[w.format.element],
        bits=w.format.bits,
        scale=scale,
        addend=addend_kind(w),
        per_super=super_per(w),
        global_op=GLOBAL_OPS[w.format.global_op],
        divide=w.format.divisor != 1.0,
        has_bias=has_bias,
        x_scaled=x_scales is not None,
        half=half,
        row_tiles=tile.rows,
        columns=tile.columns,
        input_warps=tile.input_warps,
        row_warps=tile.row_warps,
        step=step,
        set=groups,
        tokens=columns,
        ahead=tile.ahead,
        scaled=finished,
        routed=routed,
        gate=gate,
        fp8=gpu.converts_fp8(w.device),
        pdl=gpu.supports_pdl(w.device),
        plane=widths[0] if w.lanes else 0,
        more=widths[1] if len(widths) == 2 else 0,
        element=w.format.element if w.lanes else "",
    )
    return plan, weight, unit


def _fragment_grid(w: CudaWeight, p: Plan, tile: FragmentTile, tiles: int, m: int, routing: Routing | None) -> tuple[int, int]:
    """Programs along the rows, and blocks of tokens. `tile.programs` a multiprocessor stay and
    iterate; 0: one an iteration.
    """
    blocks = triton.cdiv(m, p.tokens * p.columns)
    programs = triton.cdiv(tiles, p.row_tiles * p.row_warps)
    resident = tile.programs * gpu.multiprocessors(w.device)
    if routing is not None:
        return min(programs * routing.blocks.expert.numel(), resident), 1
    return min(programs, triton.cdiv(resident, blocks)) if tile.programs else programs, blocks


def _finishes(w: CudaWeight, half: bool, requested: bool) -> bool:
    """Whether weights are finished in x's type before the product: in float16 where the tile
    requests it and the data allows it, in bfloat16 where scales are powers of two, which costs
    nothing there.
    """
    if half:
        return requested and (w.scales_half or w.plain_scales or w.top >= 0)
    return w.top >= 0 and w.format.element == "e2m1"


def cublas(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = x · rowsᵀ + bias."""
    if out.dtype != rows.dtype:
        out.copy_(torch.nn.functional.linear(x, rows, bias))
    elif bias is None:
        torch.mm(x, rows.t(), out=out)
    else:
        torch.addmm(bias, x, rows.t(), out=out)


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""A product with decoded rows, as `cublas`."""


def dense_matmul(x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, multiply: Multiply = cublas) -> torch.Tensor:
    """dequantize_then_gemm: rows decoded to x's dtype, a block at a time, then `multiply`."""
    dtype = torch.float32 if exceeds_float16(x, w) else x.dtype
    if w.order is not None:
        x = x.index_select(1, w.order)
    return blockwise_matmul(
        x, w.shape, dtype, bias, lambda first, end, out: dequantize(w.row_block(first, end), dtype, out=out), multiply
    )


def blockwise_matmul(
    x: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    decode: Callable[[int, int, torch.Tensor], Any],
    multiply: Multiply = cublas,
) -> torch.Tensor:
    """y (m, n) = x wᵀ + bias by `multiply` in `dtype`. `decode(first, end, out)` writes rows first
    to end of w into a matrix of `dtype`; blocks of rows, and of tokens where x and y are of another
    type, keep everything beside x and y within WORKSPACE_BYTES.
    """
    m, (n, k) = x.shape[0], shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    addend = None if bias is None else bias.to(dtype)
    tokens, row_bytes = m, k * dtype.itemsize
    if dtype != x.dtype:  # beside the rows: x and y of a block of tokens in `dtype`
        tokens = min(m, 512)
        row_bytes = 2 * row_bytes + tokens * dtype.itemsize
    blocks = list(row_blocks(n, row_bytes))
    dense = torch.empty((blocks[0][1], k), dtype=dtype, device=x.device)
    if len(blocks) == 1 and tokens == m:
        decode(0, n, dense)
        multiply(x.to(dtype), dense, addend, y)
        return y
    for first, end in blocks:
        rows = dense[: end - first]
        decode(first, end, rows)
        for token in range(0, m, tokens):
            some, out = x[token : token + tokens].to(dtype), y[token : token + tokens, first:end]
            multiply(some, rows, None if addend is None else addend[first:end], out)
    return y
