"""The records that the fragment kernel's functions hand to each other: run-time pointers, and one
compile-time plan.

Index names follow one grammar here and in every file of this package. A name is `what` or
`operand_what`: operands are `w` (words of codes), `s` (stored scales and addends), `x`
(activations) and `y` (outputs); `what` is the thing that is counted:

    row     output row of the weight            tile    16 rows
    input   position along k                    unit    64 inputs       block  16 inputs, one product
    group   inputs that share a scale           step    `Plan.step` units, what one iteration loads
    token   row of x and y                      column  one of the eight token columns of a product

`first_` and `end_` bound a half-open range, `_live` is the mask that goes with an index, upper case
is known at compile time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from ..decode import BF16_PAIR, E2M1, E4M3_NORMAL, E8M0_NORMAL, ELEMENTS, F16_PAIR, INT
from ..decoders import (
    BFLOAT16,
    FLOAT16,
    OPERANDS,
    SCALABLE,
    SCALED_BFLOAT16,
    TABLE_ELEMENTS,
    WITHOUT_E4M3,
    Decoder,
    assembly,
    lane_finished,
    lane_operand,
)
from ..portable.decode_tile import NONE
from ..tuning.mma_tiles import warp_units


class Weight(NamedTuple):
    """Pointers to a weight in fragment order, and to the factors of tokens. What a call lacks
    points at the scales and is never read.
    """

    bias: Any
    words: Any
    more: Any
    table: Any
    scales: Any
    super_scales: Any
    addends: Any
    super_minimums: Any
    global_scale: Any
    x_scales: Any


class TokenBlocks(NamedTuple):
    """Blocks of tokens of one expert each, as pointers or as tensors on the device: how many there
    are; each one's expert and half-open range of (token, expert) pairs; each pair's row of x and of
    y.
    """

    count: Any
    expert: Any
    first: Any
    last: Any
    x_row: Any
    y_row: Any


class Factors(NamedTuple):
    """`divisor` of the format, and `unit`, the power of two that the sums lack beside the
    decoder's.
    """

    divisor: Any
    unit: Any


class Span(NamedTuple):
    """Row tiles first, first + stride, … below end, and tokens first_token to end_token."""

    first: Any
    end: Any
    stride: Any
    first_token: Any
    end_token: Any


class Fetched(NamedTuple):
    """What memory holds of one step, per lane: words, those of a second plane, scales, super
    scales, addends, super minimums.
    """

    words: Any
    more: Any
    scales: Any
    supers: Any
    addends: Any
    lows: Any


class Plan(NamedTuple):
    """Everything about a fragment kernel that is known when it is compiled. `make_plan` derives the
    second half from the first.

    units, groups       units of 64 inputs and scale groups in a row          group    inputs of a group: 16, 32 or whole 64s
    kind, bits, scale, addend    element, width of a code, kinds of scale and addend (decode.py)
    plane, more, element    widths of the bit planes in lane order and the element's name; 0, 0, ""
                        in fragment order
    per_super           groups that share a super scale
    global_op, divide   the tensor's factor: 0 none, 1 multiplies, 2 divides; whether the format's
                        divisor applies
    has_bias, half      a bias is added; activations are float16 (else bfloat16)
    x_scaled            the sums of a token are multiplied by its factor
    row_tiles, columns  tiles of 16 rows and blocks of 8 columns of a warp
    input_warps, row_warps       warps along the inputs and along the rows
    step                units loaded at once: a power of two; whole groups or a whole part of one,
                        whole sets of groups
    set, tokens         groups that share an accumulator, and tokens of each: set · tokens ≤ 8
    ahead               when the next words are loaded: 1 before the current products, 0 after them,
                        2 two steps before
    scaled              weights are finished before the product, one rounding at most; one
                        accumulator takes all groups
    routed, gate        a stack of experts; the activation that joins rows 2 j and 2 j + 1
                        (moe.GATES), 0 none
    fp8, pdl            the device converts pairs of E4M3 (capability 8.9); launches overlap (9.0)
    """

    units: int
    groups: int
    group: int
    kind: int
    bits: int
    scale: int
    addend: int
    per_super: int
    global_op: int
    divide: bool
    has_bias: bool
    x_scaled: bool
    half: bool
    row_tiles: int
    columns: int
    input_warps: int
    row_warps: int
    step: int
    set: int
    tokens: int
    ahead: int
    scaled: bool
    routed: bool
    gate: int
    fp8: bool
    pdl: bool
    plane: int = 0
    more: int = 0
    element: str = ""
    # Derived.
    warp_units: int = 0
    """Units of a warp."""
    steps: int = 0
    """Steps of a warp."""
    exact: bool = False
    """No warp reads past the last unit."""
    full: bool = False
    """No group lies past the end."""
    quads: int = 0
    """Blocks of words in a unit of a tile."""
    width: int = 4
    """Words of a lane that lie side by side."""
    lane_decoders: Any = ()
    """Assembly of each block of a unit, in lane order."""
    table: bool = False
    """The element is a table."""
    inputs: str = ""
    """Constraints of its inputs."""
    offset: bool = False
    """`int` codes are decoded unsigned; their implicit zero is taken from the sums through Σ x."""
    sums: bool = False
    """Σ x of each group is needed."""
    span: int = 0
    """Blocks that one accumulator takes."""
    flushes: int = 0
    """Accumulators filled in one step."""
    parities: int = 0
    """Groups among the two columns of a lane."""
    pair: int = 0
    """Blocks of a group that shares registers of x with its neighbour; 0: none does."""
    raw: bool = False
    """Finished E2M1 operands still lack 2^14."""
    paired: bool = False
    """Scales of rows g and g + 8 are read as one number."""
    decoder: str = ""
    """Assembly of a word: a row of decoders.OPERANDS."""
    unit_low: float = 1.0
    """What the value 1 decodes to in rows g."""
    unit_high: float = 1.0
    """The same in rows g + 8."""
    buffers: int = 1
    """Steps in flight."""
    unroll: int = 1
    """Iterations over tiles that the loop body holds."""
    layout: Any = None
    """Accumulators [input_warps, row_warps, 32, row_tiles, columns]."""
    w_layout: Any = None
    """Words [input_warps, row_warps, 32, row_tiles, step · quads, width]."""
    v_layout: Any = None
    """Words of a second plane [input_warps, row_warps, 32, row_tiles, step, more]."""
    s_layout: Any = None
    """Scales [input_warps, row_warps, 32, row_tiles, groups of a step and column, rows g and g +
    8].
    """
    x_layout: Any = None
    """Activations of a unit [input_warps, row_warps, 32, columns, 4, 2]."""

    def constants(self) -> Plan:
        """Called in a kernel: the record, its fields compile-time constants, with the layouts
        (which launch hooks could not serialize, so the host leaves them out).
        """
        return self._replace(
            layout=self._layout(self.row_tiles, self.columns),
            w_layout=self._layout(self.row_tiles, self.step * self.quads, self.width),
            v_layout=self._layout(self.row_tiles, self.step, max(1, self.more)),
            s_layout=self._layout(self.row_tiles, self.flushes * self.parities, 2),
            x_layout=self._layout(self.columns, 4, 2, order=[4, 5, 3, 2, 1, 0]),
        )

    def _layout(self, *own: int, order: list[int] | None = None) -> Any:
        """[input_warps, row_warps, 32 lanes, *own], the last axes in a lane's registers."""
        ones = [1] * len(own)
        order = order or list(reversed(range(3 + len(own))))
        return gl.BlockedLayout([1, 1, 1, *own], [1, 1, 32, *ones], [self.input_warps, self.row_warps, 1, *ones], order)


def paired(scale: int) -> bool:
    """True where the scales of rows g and g + 8 are read as one number."""
    return scale in (E4M3_NORMAL.value, E8M0_NORMAL.value, F16_PAIR.value, BF16_PAIR.value)


ELEMENT_NAMES = {number: name for name, number in ELEMENTS.items() if name in ("uint", "int", "e2m1", "e4m3", "e5m2")}


def decoder_of(p: Plan, offset: bool, raw: bool) -> Decoder:
    """The row of `OPERANDS` for the codes of a plan. Finished weights (`scaled`) need the exact
    value, unless the scale makes up for a power of two (`raw`).
    """
    if p.scaled:
        output = SCALED_BFLOAT16 if not p.half else SCALABLE if raw else FLOAT16
    else:
        output = SCALABLE if p.half else BFLOAT16
    if p.plane and p.scaled:
        return lane_finished(0, p.half)
    if p.plane:
        return lane_operand(p.bits, p.element, output, 0)
    key = p.bits, "uint" if offset else ELEMENT_NAMES[p.kind], output
    return (OPERANDS if p.fp8 else OPERANDS | WITHOUT_E4M3)[key]


def lane_inputs(p: Plan) -> tuple[str, ...]:
    """Inputs of `decoders.lane_operand`: a word of both rows, or of each, of each plane, and the
    lane's entry of a table.
    """
    own = {0: (), 1: ("0",), 2: ("0", "1"), 4: ("0", "1")}
    table = ("e0",) if p.element in TABLE_ELEMENTS else ()
    scales = ("s0", "s1") if p.scaled else ()
    return (*(f"w{h}" for h in own[p.plane]), *(f"v{h}" for h in own[p.more]), *table, *scales)


def make_plan(**given: Any) -> Plan:
    """The plan of a weight, tile and call, with what follows from them."""
    p = Plan(**given)
    buffers = 2 if p.ahead == 2 else 1
    each = warp_units(p.units, p.input_warps, p.step, buffers)
    steps, exact, quads = each // p.step, each * p.input_warps == p.units, 1 if p.plane else p.bits // 4
    few = p.columns == 1 or steps == 1 or p.bits == 8 or p.plane > 0
    offset = p.kind == INT.value and p.half and not p.scaled and few
    span, parities = p.set * p.group // 16, 2 if p.tokens == 1 else 1
    flushes = max(1, 4 * p.step // span)
    raw = p.scaled and p.kind == E2M1.value and p.scale in (E8M0_NORMAL.value, E4M3_NORMAL.value)
    row = decoder_of(p, offset, raw)
    names = lane_inputs(p)
    rows = [
        lane_finished(block, p.half) if p.scaled else lane_operand(p.bits, p.element, SCALABLE if p.half else BFLOAT16, block)
        for block in range(4 if p.plane else 0)
    ]
    inputs = ("w0", "s0", "s1") if p.scaled and not p.half else ("w0",)
    return p._replace(
        warp_units=each,
        steps=steps,
        exact=exact,
        quads=quads,
        offset=offset,
        full=exact and (p.groups == 1 or p.groups * p.group == p.units * 64),
        sums=not p.scaled and (p.addend != NONE.value or offset),
        span=span,
        flushes=flushes,
        parities=parities,
        pair=p.group // 16 if p.tokens == 1 and p.set >= 2 and p.step >= 2 and not p.plane else 0,
        raw=raw,
        paired=paired(p.scale),
        decoder="" if p.plane else assembly(row, 4 if p.bits == 4 else 2, *inputs),
        table=p.element in TABLE_ELEMENTS,
        width=p.plane or 4,
        lane_decoders=tuple(assembly(one, 4, *names) for one in rows),
        inputs=",".join(["=&r"] * 4 + ["f" if name[0] == "s" else "r" for name in names]),
        unit_low=1.0 if p.scaled else row.low,
        unit_high=1.0 if p.scaled else row.high,
        buffers=buffers,
        unroll=buffers if steps == 1 else 1,
    )
