"""What functions make of hard input: those of `numerics`, of `formats` that are no codec, of GPU
orders, regular expressions, mixes and budgets.

python -m support.number_outcomes             # in tests/: write data/number_outcomes.txt anew
python -m support.number_outcomes bits        # print each case of a module and its outcome
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte.conversion.knapsack import solve
from halfbyte.conversion.mixes import MIXES, BoundMix, mix_named
from halfbyte.errors import HalfbyteError
from halfbyte.formats import codec_names
from halfbyte.formats.composite import exact_product, slices
from halfbyte.formats.exl3 import codebook_values, states, unpack_signs
from halfbyte.formats.nested import dynamic_map, lane_sum, nest, nest_modelopt, nested_values
from halfbyte.layouts.quant_config.safe_regex import compiled, compiled_glob
from halfbyte.numerics import activations, bits, exact, minifloat, transpose
from halfbyte.numerics.error_stats import error_stats
from halfbyte.spec import Format
from support.format_outcomes import formats_of
from support.outcome_table import OutcomeTable
from support.outcomes import checksum

Cases = Iterator[tuple[str, str, Callable[[], Any]]]
FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def hard_numbers(dtype: Any) -> np.ndarray:
    """Numbers of a type at and beside powers of two, ties, limits, zeros, infinities, NaN."""
    powers = np.ldexp(1.0, np.arange(-150, 128, 3))
    near = np.concatenate([powers, powers * 1.5, np.nextafter(powers, 0), np.nextafter(powers, 1e300), powers * (1 + 2.0**-11)])
    small = np.concatenate([np.arange(-40, 40) / 16, np.arange(0, 512) / 8 + 2.0**-5, [65504, 65519, 65520, 448, 464, 480]])
    every = np.concatenate([near, -near, small, [0.0, -0.0, np.inf, -np.inf, np.nan]])
    return every.astype(dtype)


def quiet(value: Any) -> int:
    """Checksum in which every NaN is alike."""
    if isinstance(value, (list, tuple)):
        return checksum([quiet(v) for v in value])
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "bciuOU":
        wide = np.asarray(value).astype(np.float64)
        return checksum([str(value.dtype), np.where(np.isnan(wide), 0.0, wide), np.isnan(wide)])
    return checksum(value)


def of_minifloat() -> Cases:
    elements = (*minifloat.MINIFLOATS, *minifloat.TABLES, "int", "uint", "mxint", "other")
    for element in elements:
        for width in (1, 2, 3, 4, 8):
            yield "tables", f"{element} {width}", lambda e=element, w=width: minifloat.element_table(e, w)
            yield "significant bits", f"{element} {width}", lambda e=element, w=width: minifloat.element_significant_bits(e, w)
    for kind in ("e8m0", "e4m3", "ue4m3", "float16"):
        yield "scales", kind, lambda k=kind: minifloat.scale_table(k)
    yield "exponents", "", lambda: minifloat.e8m0_encode(np.arange(-300, 300))
    for element in minifloat.MINIFLOATS:
        values = minifloat.element_table(element, minifloat.MINIFLOATS[element].bits)
        finite = np.unique(values[np.isfinite(values)] + 0.0)  # one zero
        middle = (finite[1:] + finite[:-1]) / 2
        x = np.concatenate([finite, middle, np.nextafter(middle, 1e9), np.nextafter(middle, -1e9), [-0.0, 1e9, -1e9]])
        for ties in (*minifloat.TIES, "other"):
            yield "rounding", f"{element} {ties}", lambda e=element, t=ties, x=x: minifloat.round_to_element(x, e, t)
        for zeros in (*minifloat.ZEROS, "other"):
            tiny = np.array([0.0, -0.0, 1e-9, -1e-9, 1.0, -1.0])
            yield (
                "zeros",
                f"{element} {zeros}",
                lambda e=element, z=zeros, x=tiny: minifloat.sign_zeros(minifloat.round_to_element(x, e), x, e, z),
            )


def of_activations() -> Cases:
    for length in (*range(1, 300), 384, 512, 1000, 4096, 11008):
        yield "segments", str(length), lambda n=length: activations.segment_length(n)
    seen: dict[Format, None] = {}
    for codec in codec_names():
        for _, fmt in formats_of(codec):
            if isinstance(fmt, Format):
                seen[fmt] = None
    for element, width in sorted({(f.element, f.bits) for f in seen if not f.opaque}):
        yield "elements", f"{element} {width}", lambda e=element, b=width: activations.exact_in_e4m3(e, b)
    for fmt in seen:
        for mode in ("int8", "int8_token", "fp8"):
            yield "refusals", f"{fmt!r} {mode}", lambda f=fmt, m=mode: activations.refusal(f, m)
        if not fmt.opaque:
            yield "spans", repr(fmt), lambda f=fmt: (
                activations.product_bits(f), activations.is_integral(f),
                [activations.activation_span(f, s) for s in (8, 16, 32, 64, 128)],
            )  # fmt: skip
    x = np.resize(np.nan_to_num(hard_numbers(np.float32), nan=3.0, posinf=5.0, neginf=-7.0), (6, 256)) * np.float32(2.0**-30)
    rows = [
        np.zeros(256),
        np.full(256, np.nan),
        np.full(256, np.inf),
        np.arange(256) - 128.0,
        np.where(np.arange(256) % 9, 0, 448.0),
    ]
    x = np.concatenate(
        [x, np.stack(rows).astype(np.float32), np.float32([[1e-36], [9e-37], [1e-40], [1e38]]) * np.ones(256, np.float32)]
    )
    for span in (8, 32, 100, 128, 256):
        yield "int8", str(span), lambda s=span: activations.round_int8(x, s)
    yield "fp8", "", lambda: activations.round_e4m3(x)
    index = (np.arange(256) * 7 % 8).astype(np.int32)
    for fmt in list(seen)[::5]:
        if not fmt.opaque and fmt.grouping in ("row", "block") and (fmt.group_size == -1 or 256 % fmt.group_size == 0):
            for mode in ("int8", "int8_token", "fp8"):
                yield "rounded", f"{fmt!r} {mode}", lambda f=fmt, m=mode: activations.rounded(x, f, m)
                if fmt.group_size == 32:
                    yield "rounded by index", f"{fmt!r} {mode}", lambda f=fmt, m=mode: activations.rounded(x, f, m, index)


def of_bits() -> Cases:
    for width in range(1, 9):
        for k in (*range(40), 63, 64, 65, 127, 128, 129, 1000):
            codes = ((np.arange(3 * k).reshape(3, k) * 37 + 11) % (1 << width)).astype(np.uint8)
            yield f"{width} bits", f"pack {k}", lambda c=codes, w=width: bits.pack(c, w)
            yield f"{width} bits", f"unpack {k}", lambda c=codes, w=width, k=k: bits.unpack(bits.pack(c, w), w, k)
            data = np.full((2, -(-k * width // 8)), 0xFF, np.uint8)
            yield f"{width} bits", f"padding {k}", lambda d=data, w=width, k=k: bits.padding_is_zero(d, w, k)
        for wrong in (
            np.full((2, 8), 1 << width, np.int64),
            np.full((2, 8), -1),
            np.zeros(8, np.uint8),
            np.zeros((0, 4), np.uint8),
        ):
            yield f"{width} bits", f"{wrong.shape} of {wrong.dtype}", lambda a=wrong, w=width: bits.pack(a, w)


def of_exact() -> Cases:
    wide = hard_numbers(np.float64)
    for dtype in FLOATS:
        yield "once", str(np.dtype(dtype)), lambda d=dtype: exact.round_once(wide, d)
        for shift in (1, 7, 50, 200):
            terms = [wide, np.roll(wide, shift), np.roll(wide, 3 * shift) * 2.0**-60]
            yield "sums", f"{np.dtype(dtype)} {shift}", lambda t=terms, d=dtype: exact.round_sum(t, d)
            yield "sums", f"{np.dtype(dtype)} {shift} of two", lambda t=terms, d=dtype: exact.round_sum(t[:2], d)
            yield "quotients", f"{np.dtype(dtype)} {shift}", lambda t=terms, d=dtype: exact.round_quotient(t[:1], t[1], d)
            yield "quotients", f"{np.dtype(dtype)} {shift} of two", lambda t=terms, d=dtype: exact.round_quotient(t[:2], t[2], d)
    some = wide[np.isfinite(wide) & (np.abs(wide) < 1e100)]
    yield "two", "sum", lambda: exact.two_sum(some, np.roll(some, 5))
    yield "two", "product", lambda: exact.two_product(some, np.roll(some, 5))
    yield "two", "to odd", lambda: exact.to_odd(*exact.two_sum(some, np.roll(some, 9)))
    yield "distil", "", lambda: exact.distil([some, np.roll(some, 1), np.roll(some, 2), np.roll(some, 3) * 2.0**-70])
    for word in ("float16", "bfloat16", "float32", "float64", np.float32, "half", "int8", "float8_e4m3fn", 3):
        yield "dtypes", str(word), lambda w=word: exact.dtype_named(w).name


def of_transpose() -> Cases:
    for dtype in (np.uint8, np.int16, np.float32, np.float64, np.complex64):
        for shape in ((0, 3), (1, 1), (3, 5), (8, 64), (65, 129), (2, 3, 4), (128, 256)):
            x = (np.arange(int(np.prod(shape))).reshape(shape) * 31 % 251).astype(dtype)
            yield "arrays", f"{np.dtype(dtype)} {shape}", lambda x=x: np.array(transpose.transpose(x))
    orders = (tuple(range(8)), (0, 4, 1, 5, 2, 6, 3, 7), (7, 6, 5, 4, 3, 2, 1, 0))
    for rows, columns in ((8, 8), (16, 24), (40, 64), (8, 12), (1, 8), (24, 20)):
        x = (np.arange(rows * ((columns + 1) // 2)).reshape(rows, -1) * 73 % 256).astype(np.uint8)
        # Any order but the natural one needs whole eights.
        for first in orders if rows % 8 == 0 else orders[:1]:
            for out in orders if columns % 8 == 0 else orders[:1]:
                case = f"{rows} by {columns} {first} {out}"
                yield "nibbles", case, lambda x=x, c=columns, a=first, b=out: transpose.transpose_nibbles(x, c, a, b)
                yield (
                    "nibbles",
                    f"{case} in numpy",
                    lambda x=x, c=columns, a=first, b=out: transpose.transpose_nibbles_numpy(x, c, a, b),
                )


def of_error_stats() -> Cases:
    base = np.array([[1.0, -2.0, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0], [1e200, 1e-200, 3.0, -3.0]])
    for at in range(12):
        for value in (0.0, -0.0, 1.0, -2.0, 5.0, np.inf, -np.inf, np.nan, 1e-310, 1e308):
            other = base.copy()
            other.flat[at] = value
            for a, b, way in ((base, other, "to"), (other, base, "from"), (other, other, "beside")):
                yield "one value", f"{at} {way} {value}", lambda a=a, b=b: _stats(error_stats(a, b))
    whole = np.array([[1 << 53, (1 << 53) + 1, -3]])
    for b in (whole, whole + 1, whole * 2, whole.astype(np.float64), np.zeros((1, 3), np.int64), np.zeros((1, 2))):
        yield "integers", str(b), lambda b=b: _stats(error_stats(whole, b))
    for shape in ((), (0,), (3,), (0, 4), (2, 0), (2, 3, 4)):
        yield "shapes", str(shape), lambda s=shape: _stats(error_stats(np.ones(s), np.ones(s) * 2))


def _stats(e: Any) -> list[str]:
    numbers = [e.count, e.differing, e.max_abs_error, e.max_relative_error, e.worst, e.identical]
    near = [float(f"{x:.9g}") for x in (e.relative_rms, e.cosine)]  # sums: their last bits are a machine's own
    return [repr(n) for n in (*numbers, *near, e.within(0.5), e.within(1e-12))]


def of_formats() -> Cases:
    yield "dynamic map", "", dynamic_map
    for size in (31, 600, 1000, 5000, 70000):
        yield "sums that round", str(size), lambda n=size: lane_sum(np.float32(1) / (np.arange(n, dtype=np.float32) + 3))
    for size in (1, 255, 256, 257, 600):
        absmax = (np.arange(size) % 97 + 1).astype(np.float32) / 64
        for policy in ("nearest", "bitsandbytes", "other"):
            yield "nest", f"{size} {policy}", lambda a=absmax, p=policy: nest(a, p)
        yield "nest", f"{size} of modelopt", lambda a=absmax: nest_modelopt(a)
        yield "sums", str(size), lambda a=absmax: lane_sum(a)
        for inverse in (True, False):
            yield (
                "nested",
                f"{size} {inverse}",
                lambda a=absmax, i=inverse: nested_values(nest_modelopt(a) if i else nest(a, "nearest"), inverse=i),
            )
    x = (np.arange(-24, 24, dtype=np.float64).reshape(6, 8) * 2.0**-20 + np.arange(8)) * 3.0
    for width in (4, 8, 20, 26, 53):
        yield "slices", str(width), lambda w=width: slices(x, w)
    yield "products", "", lambda: exact_product(x, x.T)
    for word in ("3inst", "mcg", "mul1", "exl3_3inst", "exl3_mcg", "exl3_mul1"):
        yield "codebooks", word, lambda w=word: codebook_values(w)
    for width in range(1, 9):
        trellis = ((np.arange(2 * 3 * 16 * width) * 977) % 65536 - 32768).astype(np.int16).reshape(2, 3, 16 * width)
        yield "states", str(width), lambda t=trellis: states(t)
    yield "signs", "", lambda: unpack_signs(np.array([0, 1, -1, 0x5555, -32768], np.int16))


def of_orders() -> Cases:
    from halfbyte.backends.cuda import order  # wants Triton

    for width in range(1, 9):
        for n, k in ((16, 64), (32, 128), (16, 192), (8, 64), (16, 32), (48, 256)):
            codes = bits.pack(((np.arange(n * k).reshape(n, k) * 29 + 3) % (1 << width)).astype(np.uint8), width)
            case = f"{width} bits {n} by {k}"
            yield "planes", case, lambda c=codes, w=width, k=k: order.split(c, w, k)
            yield "planes", f"{case} joined", lambda c=codes, w=width, k=k: order.join(order.split(c, w, k), w, k)
            yield "lanes", case, lambda c=codes, w=width, k=k: order.to_lanes(c, w, k)
            yield "lanes", f"{case} back", lambda c=codes, w=width, n=n, k=k: order.from_lanes(order.to_lanes(c, w, k), w, n, k)
            for by_16 in (False, True):
                for element in ("uint", "int", "e2m1", "nf4") if width in (4, 8) else ():
                    words = f"{case} {by_16} {element}"
                    yield "fragments", words, lambda c=codes, k=k, b=by_16, e=element, w=width: order.to_fragments(c, k, b, e, w)
                    yield (
                        "fragments",
                        f"{words} back",
                        lambda c=codes, n=n, k=k, b=by_16, e=element, w=width: order.from_fragments(
                            order.to_fragments(c, k, b, e, w), n, k, b, e, w
                        ),
                    )
    words = (np.arange(4096, dtype=np.int64) * 1048573 % (1 << 32)).astype(np.uint32).view(np.int32).reshape(2, -1)
    yield "e2m1", "spread", lambda: order.spread_e2m1(words)
    yield "e2m1", "gathered", lambda: order.gather_e2m1(order.spread_e2m1(words))
    for n, groups in ((16, 4), (32, 1), (20, 3), (8, 2)):
        scales = np.arange(n * groups, dtype=np.float32).reshape(n, groups)
        yield "scales", f"{n} {groups}", lambda s=scales: order.by_tiles(s)
        yield "scales", f"{n} {groups} back", lambda s=scales: order.untile(order.by_tiles(s), len(s))


NAMES = (
    "model.layers.0.mlp.down_proj",
    "model.layers.10.mlp.gate_up_proj",
    "lm_head",
    "model.layers.3.self_attn.q_proj",
    "",
    "a",
    "aa",
    "visual.blocks.1.attn.qkv",
    "MODEL.LAYERS.0",
    "x-y_z",
    "layers.19.gate",
    "a.b",
    "ab\nc",
    "q_projq_proj",
)
PATTERNS = (
    r".*\.mlp\..*",
    r"model\.layers\.(1[0-9]|2[0-9])\.",
    r"^(?:lm_head|.*gate)$",
    r"(?i)model\.LAYERS\.\d+",
    r"[^.]+\.[a-z_]*\.\w{1,2}\b",
    r"(?!.*down)model.*",
    r"(?<=layers\.)\d{1,}",
    r"(?<!\.)a{2}?",
    r"a*?b+|c?d{2,3}",
    r"(?P<n>q_proj)+",
    r"\Amodel\S*\Z",
    r"[\]a-c\-_]+",
    r"(?:q|k|v)_proj$",
    r"\x61|\u0062",
    r"\D\W\s?",
    r"x{,2}y{3",
    r"(?s:.)*",
    r"(?x) a b # c",
)


def of_regular_expressions() -> Cases:
    def of(pattern: str) -> list[tuple[bool, bool, bool]]:
        found = compiled(pattern)
        return [(found.match(name), found.fullmatch(name), found.search(name)) for name in NAMES]

    for number, pattern in enumerate(PATTERNS):
        yield "patterns", pattern, lambda p=pattern: of(p)
        for at in range(len(pattern)):
            changed = [pattern[:at] + pattern[at + 1 :], pattern[: at + 1] + pattern[at:]]
            changed += [pattern[:at] + c + pattern[at + 1 :] for c in "a.*+?^$()[]{}|\\0-,"]
            for one in changed:
                yield f"pattern {number}", f"{at} {one}", lambda p=one: of(p)
    for glob in ("*", "*.mlp.*", "model.layers.?.*", "[ml]*", "[!m]*", "a[", "**", "q_proj*", "*\n*", "a.b", "[]a]", "[a-c]?"):
        yield "globs", glob, lambda g=glob: [compiled_glob(g).fullmatch(name) for name in NAMES]


STEMS = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_output",
    "ffn_down",
    "ffn_up",
    "ffn_gate",
    "ffn_down_exps",
    "ffn_gate_inp",
    "attn_norm",
)


def of_mixes() -> Cases:
    for name in (*MIXES, "q4_k_m", "Q4_k_s", "other"):
        yield "names", name, lambda n=name: mix_named(n)
    for arch, layers, heads, kv, experts, tied in (
        ("llama", 32, 32, 8, 0, False),
        ("llama", 80, 64, 8, 0, False),
        ("qwen2", 80, 64, 64, 0, True),
        ("llama", 5, 4, 1, 8, False),
        ("gemma3", 17, 4, 2, 0, True),
        ("llama", 16, 8, 3, 4, False),
        ("falcon", 4, 8, 1, 0, False),
    ):
        keys = ["token_embd", "output_norm", *([] if tied else ["output"])]
        keys += [f"blk.{i}.{s}" for i in range(layers) if i % 4 != 3 or arch != "gemma3" for s in STEMS]
        metadata = {
            "general.architecture": arch, f"{arch}.block_count": layers, f"{arch}.attention.head_count": heads,
            f"{arch}.attention.head_count_kv": kv, f"{arch}.expert_count": experts,
        }  # fmt: skip
        stand_in: Any = SimpleNamespace(metadata=metadata, keys=lambda keys=keys: [f"{k}.weight" for k in keys])
        for name in MIXES:
            for k in (256, 288, 100):
                yield (
                    f"{arch} of {layers} layers",
                    f"{name} {k}",
                    lambda n=name, c=stand_in, keys=keys, k=k: [
                        mix.codec(key, (8,) if "norm" in key else (8, k)) for mix in [BoundMix(n, c)] for key in keys
                    ],
                )


def of_budgets() -> Cases:
    draw = random.Random(1)
    for case in range(60):
        groups, choices = draw.randint(1, 9), draw.randint(1, 5)
        costs = [[draw.randint(1, 60) for _ in range(choices)] for _ in range(groups)]
        values = [[draw.randint(0, 1 << 20) / 1024 for _ in range(choices)] for _ in range(groups)]
        least, most = sum(map(min, costs)), sum(map(max, costs))
        for budget in sorted({least - 1, least, least + 1, (least + most) // 2, most - 1, most, most + 5}):
            yield "budgets", f"{case} {budget}", lambda c=costs, v=values, b=budget: repr(solve(c, v, b))


MODULES: dict[str, Callable[[], Cases]] = {
    "orders": of_orders, "regular expressions": of_regular_expressions, "mixes": of_mixes, "budgets": of_budgets,
    "minifloat": of_minifloat, "activations": of_activations, "bits": of_bits, "exact": of_exact, "transpose": of_transpose,
    "error_stats": of_error_stats, "formats": of_formats,
}  # fmt: skip


def outcomes(module: str) -> Iterator[tuple[str, str, str]]:
    """(subject, case, outcome) of each case of a module."""
    for subject, case, work in MODULES[module]():
        with np.errstate(all="ignore"):
            try:
                value = work()
                outcome = repr(value) if isinstance(value, (int, str, bool, type(None))) else f"{quiet(value):08x}"
            except HalfbyteError as error:
                outcome = str(error)
        yield subject, case, outcome


TABLE = OutcomeTable("number_outcomes", MODULES, outcomes)

if __name__ == "__main__":
    TABLE.main()
