"""Every kernel as data: which buffers, which device function, for a format and a dtype of x.

Names carry function, codec, dtype of x and group: `matvec_mxfp4_half_g32`. Where a codec's scale
has a dtype of its own, that follows the codec: `int4_bfloat`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...spec import Format
from .source import MSL_TYPES, Buffer, Kernel

SIMDGROUP = 32
MATVEC_ROWS, MATVEC_SIMDGROUPS = 4, 2  # as in shaders/matvec.metal
TILE = 64  # outputs and tokens of a threadgroup, as in shaders/gemm_tile.metal
GEMM_GROUP = (128, 1, 1)
SINGLE_STAGE_FLOATS = 2 * TILE * 36
DOUBLE_BUFFERED_FLOATS = 2 * 2 * TILE * 20
FUSED_FLOATS = TILE * 36
FUSED = {"": 4 * 16, "wide": 4 * 96}
"""Variant of the fused schedule -> float4 of staging, of four simdgroups."""
E2M1_DECODERS = {
    "": "e2m1_code",
    "single": "e2m1_single_code",
    "subnormal": "e2m1_subnormal_code",
    "constant": "e2m1_constant_code",
    "threadgroup": "e2m1_threadgroup_code",
}
"""Decoders of E2M1: "" in pairs, which every kernel uses; the others are variants of two kernels,
to be compared on a Mac.
"""

ELEMENTS = {
    "e2m1": "e2m1_code", "e2m3": "e2m3_code", "e3m2": "e3m2_code", "e4m3": "e4m3_code", "e5m2": "e5m2_code", "nf4": "nf4_code",
    "bnb_fp4": "bnb_fp4_code", "iq4_nl": "iq4_nl_code",
    "nf4_modelopt": "nf4_modelopt_code",
}  # fmt: skip
SCALES = {
    "float16": "float_scale<half>",
    "bfloat16": "float_scale<bfloat>",
    "float32": "float_scale<float>",
    "e8m0": "e8m0_scale",
    "e4m3": "e4m3_scale",
    "ue4m3": "ue4m3_scale",
}
SCALE_DTYPES = {"e8m0": "uint8", "e4m3": "uint8", "ue4m3": "uint8"}
FACTORS = {"": "NO_FACTOR", "multiply": "MULTIPLY", "divide": "DIVIDE"}
GATES = {"none": "NONE", "swiglu": "SWIGLU", "swiglu_clamped": "SWIGLU_CLAMPED", "geglu": "GEGLU"}


def element_type(fmt: Format, decoder: str = "") -> str:
    """MSL type of the element codec."""
    if decoder:
        return E2M1_DECODERS[decoder]
    if fmt.element in ("uint", "int", "mxint"):
        return f"{fmt.element}_code<{fmt.bits}>"
    return ELEMENTS[fmt.element]


def addend_kind(fmt: Format) -> str:
    """MSL constant for what is added."""
    return "ZEROS" if fmt.zero == "int" else "BIASES" if fmt.bias else "NO_ADDEND"


def codec_type(fmt: Format, order: str = "packed_rows", decoder: str = "") -> str:
    """MSL type of a weight."""
    group = max(0, fmt.group_size)
    return f"{order}<{element_type(fmt, decoder)}, {SCALES[fmt.scale]}, {addend_kind(fmt)}, {group}>"


def codec_name(fmt: Format) -> str:
    """The codec as kernel names spell it: format, dtype of a float scale but half, and what the
    tensor's factor does.
    """
    scale = f"_{MSL_TYPES[fmt.scale]}" if fmt.scale in ("bfloat16", "float32") else ""
    return f"{fmt.name.lower()}{scale}" + (f"_{fmt.global_op}" if fmt.global_op else "")


def _name(function: str, fmt: Format, dtype: str, *more: str) -> str:
    return "_".join([function, codec_name(fmt), MSL_TYPES[dtype], f"g{max(0, fmt.group_size)}", *more])


def weight_buffers(fmt: Format, codes: str = "uint8") -> tuple[Buffer, ...]:
    """codes, scales, addends; an absent addend is the scales again."""
    scale = SCALE_DTYPES.get(fmt.scale, fmt.scale)
    return Buffer("codes", codes), Buffer("scales", scale), Buffer("addends", "int16" if fmt.zero == "int" else scale)


_ROWS = "W w = {codes, scales, addends, uint(units), uint(groups), {}};\n"
_LAST = (Buffer("bias", "float32"), Buffer("factors", "float32"))


def _body(fmt: Format, dtype: str, lines: str, order: str = "packed_rows", decoder: str = "") -> str:
    text = (
        f"using namespace halfbyte;\ntypedef {codec_type(fmt, order, decoder)} W;\ntypedef {MSL_TYPES[dtype]} T;\n"
        f"constexpr int OP = {FACTORS[fmt.global_op]};\n(void)OP;\n{lines}"
    )
    return "".join(f"  {line}\n" for line in text.splitlines())


def _table(decoder: str) -> str:
    """Lines behind `w` that fill the look-up table in threadgroup memory, for the decoder that
    reads one.
    """
    if decoder != "threadgroup":
        return ""
    fill = "fill_e2m1_table(table, simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);\n"
    return f"threadgroup float table[16];\nw.decode.table = table;\n{fill}"


def dequantize(fmt: Format, dtype: str, gather: bool = False) -> Kernel:
    """All of w, or the rows `ids` of it: a thread eight values."""
    body = (
        _ROWS
        + f"dequantize<W, T, OP, {str(gather).lower()}>(w, ids, factors[0], divisor, y, uint(rows), uint(k),\n"
        + "    thread_position_in_grid.xy);\n"
    )
    return Kernel(
        _name("embedding" if gather else "dequantize", fmt, dtype),
        (*weight_buffers(fmt), Buffer("ids", "int32"), _LAST[1]),
        ("units", "groups", "k", "rows"),
        ("divisor",),
        (Buffer("y", dtype),),
        _body(fmt, dtype, body),
        (SIMDGROUP, 4, 1),
    )


def embedding(fmt: Format, dtype: str) -> Kernel:
    """`dequantize` of gathered rows."""
    return dequantize(fmt, dtype, gather=True)


def matvec(fmt: Format, dtype: str, tokens: int = 1, decoder: str = "") -> Kernel:
    """y for up to `tokens` rows of x a threadgroup. decoder: one of E2M1_DECODERS."""
    floats = MATVEC_SIMDGROUPS * MATVEC_ROWS * tokens
    body = (
        f"threadgroup float partial[{floats}];\n"
        + _ROWS
        + _table(decoder)
        + f"matvec<W, T, OP, {tokens}>(w, x, ulong(x_row), bias, has_bias != 0, factors[0],\n"
        + "    divisor, y, uint(m), uint(n), partial, threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,\n"
        + "    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);\n"
    )
    return Kernel(
        _name("matvec", fmt, dtype, f"t{tokens}", *filter(None, [decoder])),
        (*weight_buffers(fmt), Buffer("x", dtype), *_LAST),
        ("units", "groups", "m", "n", "x_row", "has_bias"),
        ("divisor",),
        (Buffer("y", dtype),),
        _body(fmt, dtype, body, decoder=decoder),
        (SIMDGROUP * MATVEC_SIMDGROUPS, 1, 1),
    )


def _gemm(function: str, name: str, floats: int, fmt: Format, dtype: str) -> Kernel:
    body = (
        f"threadgroup float4 tiles[{floats // 4}];\n"
        + _ROWS
        + f"{function}<W, T, OP>(w, x, ulong(x_row), bias, has_bias != 0, factors[0], divisor,\n"
        + "    y, uint(m), uint(n), (threadgroup float*)tiles, threadgroup_position_in_grid.xy, simdgroup_index_in_threadgroup,\n"
        + "    thread_index_in_simdgroup);\n"
    )
    return Kernel(
        name,
        (*weight_buffers(fmt), Buffer("x", dtype), *_LAST),
        ("units", "groups", "m", "n", "x_row", "has_bias"),
        ("divisor",),
        (Buffer("y", dtype),),
        _body(fmt, dtype, body),
        GEMM_GROUP,
    )


def gemm_single_stage(fmt: Format, dtype: str) -> Kernel:
    """gemm_fp4_single_stage and its kin: the baseline."""
    return _gemm("gemm_single_stage", _gemm_name(fmt, dtype, "single_stage"), SINGLE_STAGE_FLOATS, fmt, dtype)


def gemm_double_buffered(fmt: Format, dtype: str) -> Kernel:
    """gemm_fp4 and its kin: the next tile is decoded while this one is multiplied."""
    return _gemm("gemm_double_buffered", _gemm_name(fmt, dtype), DOUBLE_BUFFERED_FLOATS, fmt, dtype)


def _gemm_name(fmt: Format, dtype: str, schedule: str = "") -> str:
    return "_".join(
        filter(None, ["gemm", codec_name(fmt), schedule, MSL_TYPES[dtype], f"g{max(0, fmt.group_size)}"])
    )  # gemm_fp4_striped_half_g128


def gemm_striped(fmt: Format, dtype: str) -> Kernel:
    """gemm_fp4_striped, first pass: equal shares of all tiles' steps, partial sums to `pieces`."""
    body = (
        f"threadgroup float4 tiles[{SINGLE_STAGE_FLOATS // 4}];\n"
        + _ROWS
        + "gemm_striped<W, T>(w, x, ulong(x_row), pieces, uint(m), uint(n), uint(per_stripe), (threadgroup float*)tiles,\n"
        + "    threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);\n"
    )
    return Kernel(
        _gemm_name(fmt, dtype, "striped"),
        (*weight_buffers(fmt), Buffer("x", dtype)),
        ("units", "groups", "m", "n", "x_row", "per_stripe"),
        (),
        (Buffer("pieces", "float32"),),
        _body(fmt, dtype, body),
        GEMM_GROUP,
    )


def gemm_striped_reduce(global_op: str, dtype: str) -> Kernel:
    """gemm_fp4_striped, second pass: the pieces of each output in order."""
    lines = (
        f"halfbyte::gemm_striped_reduce<{MSL_TYPES[dtype]}, halfbyte::{FACTORS[global_op]}>(pieces, bias, has_bias != 0,\n"
        "    factors[0], divisor, y, uint(m), uint(n), uint(units), uint(per_stripe), thread_position_in_grid.xy);\n"
    )
    return Kernel(
        "_".join(filter(None, ["gemm_striped_reduce", global_op, MSL_TYPES[dtype]])),
        (Buffer("pieces", "float32"), *_LAST),
        ("units", "m", "n", "per_stripe", "has_bias"),
        ("divisor",),
        (Buffer("y", dtype),),
        f"  {lines}",
        (SIMDGROUP, 4, 1),
    )


def gemm_fused(fmt: Format, dtype: str, variant: str = "", decoder: str = "") -> Kernel:
    """gemm_fused_fp4, gemm_fused_u4 and their kin; variant "" (plain) or "wide", decoder one of
    E2M1_DECODERS.

    Word and scale strides are arguments, so one kernel reads [k/8, n] words and words in rows.
    """
    function = "_".join(filter(None, ["gemm_fused", variant]))
    body = (
        f"threadgroup float4 x_tile[{FUSED_FLOATS // 4}];\n"
        f"threadgroup float4 stages[{FUSED[variant]}];\n"
        "W w = {codes, scales, addends, ulong(word_n), ulong(word_k), ulong(scale_n), ulong(scale_g), uint(units), {}};\n"
        f"{_table(decoder)}"
        f"{function}<W, T, OP>(w, x, ulong(x_row), bias, has_bias != 0, factors[0], divisor, y, uint(m),\n"
        "    uint(n), (threadgroup float*)x_tile, (threadgroup float*)stages, threadgroup_position_in_grid.xy,\n"
        "    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);\n"
    )
    return Kernel(
        _name(function, fmt, dtype, *filter(None, [decoder])), (*weight_buffers(fmt, "uint32"), Buffer("x", dtype), *_LAST),
        ("units", "word_n", "word_k", "scale_n", "scale_g", "m", "n", "x_row", "has_bias"), ("divisor",), (Buffer("y", dtype),),
        _body(fmt, dtype, body, "packed_words", decoder), GEMM_GROUP,
    )  # fmt: skip


def experts_gemm(fmt: Format, dtype: str, gate: str, down: bool) -> Kernel:
    """Products of routed tokens grouped by expert; float32 out."""
    body = (
        f"threadgroup float4 tiles[{SINGLE_STAGE_FLOATS // 4}];\n"
        + _ROWS
        + f"experts_gemm<W, T, OP, {GATES[gate]}, {str(down).lower()}>(w, x,\n"
        + "    ulong(x_row), order, offsets, bias, has_bias != 0, factors, divisor, y, uint(n), uint(experts), uint(top_k),\n"
        + "    uint(half_rows), limit, alpha, (threadgroup float*)tiles, threadgroup_position_in_grid.xy,\n"
        + "    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);\n"
    )
    return Kernel(
        _name("experts", fmt, dtype, gate, *(["down"] if down else [])),
        (*weight_buffers(fmt), Buffer("x", dtype), Buffer("order", "int32"), Buffer("offsets", "int32"), *_LAST),
        ("units", "groups", "n", "x_row", "experts", "top_k", "half_rows", "has_bias"), ("divisor", "limit", "alpha"),
        (Buffer("y", "float32"),), _body(fmt, dtype, body), GEMM_GROUP,
    )  # fmt: skip


def experts_matvec(fmt: Format, dtype: str, gate: str, down: bool) -> Kernel:
    """The same for few tokens."""
    body = (
        f"threadgroup float partial[{MATVEC_SIMDGROUPS * MATVEC_ROWS}];\n"
        + _ROWS
        + f"experts_matvec<W, T, OP, {GATES[gate]}, {str(down).lower()}>(w, x,\n"
        + "    ulong(x_row), indices, bias, has_bias != 0, factors, divisor, y, uint(n), uint(top_k), uint(half_rows), limit,\n"
        + "    alpha, partial, threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup,\n"
        + "    thread_index_in_simdgroup);\n"
    )
    return Kernel(
        _name("experts_matvec", fmt, dtype, gate, *(["down"] if down else [])),
        (*weight_buffers(fmt), Buffer("x", dtype), Buffer("indices", "int32"), *_LAST),
        ("units", "groups", "n", "x_row", "top_k", "half_rows", "has_bias"),
        ("divisor", "limit", "alpha"),
        (Buffer("y", "float32"),),
        _body(fmt, dtype, body),
        (SIMDGROUP * MATVEC_SIMDGROUPS, 1, 1),
    )


def experts_combine(dtype: str) -> Kernel:
    """Routed results weighted and added."""
    return Kernel(
        f"experts_combine_{MSL_TYPES[dtype]}",
        (Buffer("routed", "float32"), Buffer("shares", "float32")),
        ("m", "h", "top_k"),
        (),
        (Buffer("y", dtype),),
        f"  halfbyte::experts_combine<{MSL_TYPES[dtype]}>(routed, shares, y, uint(m), uint(h), uint(top_k), "
        "thread_position_in_grid.xy);\n",
        (SIMDGROUP, 4, 1),
    )


def rmsnorm_matvec(fmt: Format, dtype: str) -> Kernel:
    """RMSNorm, dequantize and product of one token."""
    body = (
        f"threadgroup float partial[{MATVEC_SIMDGROUPS * (MATVEC_ROWS + 1)}];\n"
        + _ROWS
        + "rmsnorm_matvec<W, T, OP>(w, x, gain, factors[0], divisor, eps, y, uint(n), uint(k),\n"
        + "    partial, threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);\n"
    )
    return Kernel(
        _name("rmsnorm_matvec", fmt, dtype),
        (*weight_buffers(fmt), Buffer("x", dtype), Buffer("gain", dtype), _LAST[1]),
        ("units", "groups", "n", "k"),
        ("divisor", "eps"),
        (Buffer("y", dtype),),
        _body(fmt, dtype, body),
        (SIMDGROUP * MATVEC_SIMDGROUPS, 1, 1),
    )


NAMED: dict[str, Callable[[Format, str], Kernel]] = {
    "dequantize": dequantize, "embedding": embedding, "matvec": matvec, "gemm_single_stage": gemm_single_stage,
    "gemm": gemm_double_buffered, "gemm_striped": gemm_striped, "gemm_fused": gemm_fused,
    "gemm_fused_wide": lambda f, t: gemm_fused(f, t, "wide"), "rmsnorm_matvec": rmsnorm_matvec,
}  # fmt: skip
"""Kernels of one weight by the word users write."""
