"""marlin-24 of compressed-tensors (up to 0.14): 4- and 8-bit codes of a 2:4 sparse weight, the two
values of each four inputs, in the order of one kernel.

| tensor | dtype | shape |
|---|---|---|
| `weight_packed` | int32 | [k/32, n·b/2]: of the k/2 values of a row, 16 by 16 tiles, code q + 2^(b−1) |
| `meta` | int16 | [k/32, 2n]: a nibble for four inputs, the two positions i < j as i + 4j |
| `scale_packed` | float16 | [G, n], one for 128 inputs or for all |

value = (code − 2^(b−1)) · scale, 0 at the other two positions of four inputs.

A strip of 16 values by 64 outputs is 32·4·8 codes: thread t of a warp holds, for j = 0 … 3 and both
halves h of an 8 by 8 tile, values 2(t mod 4) + {0, 1, 8, 9} of output 16⌊t/8⌋ + 8(⌊t/4⌋ mod 2) +
4h + j; the codes of a word lie in nibbles so that nibble i holds code [0, 2, 4, 6, 1, 3, 5, 7][i],
in bytes [0, 2, 1, 3][i]. Scales are permuted within 64 outputs (pairs j, j + 4 of each 8) when
there are several for each half row of values. `meta` is CUTLASS' interleaved order: see
`_positions`. Source: the files of compressed-tensors 0.9 and 0.14, and CUTLASS' documentation of
its sparse operands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import LayoutError
from ...formats import format_named
from ...numerics import bits as stream
from ...spec import Format
from ...tensor.qtensor import QTensor
from ..base import Array, Config, Described, HasHeader, Holds, Layout, Tensors, cannot_hold, integer_of, label, require
from ..common.integers import check_middle_zeros, check_no_group_index, integer_misfit
from ..common.words import as_bytes, as_words, recall, remember
from .read import CompressedTensorsConfig, weight_args

F16, I16, I32 = np.dtype(np.float16), np.dtype(np.int16), np.dtype(np.int32)
INTERLEAVE = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""Code, of those of a word, in each field from the lowest bits up, by width."""
GROUP = 128
PAIRS = np.arange(64).reshape(8, 2, 4).transpose(0, 2, 1).reshape(-1)
"""Output, of 64, of each stored scale where they are permuted."""


def _strip(bits: int) -> NDArray[np.int64]:
    """Position of each of a strip's 1024 codes in its 16 values × 64 outputs, as 64·value + output."""
    thread, j, half, within = np.meshgrid(np.arange(32), np.arange(4), np.arange(2), np.arange(4), indexing="ij")
    value = 2 * (thread % 4) + within % 2 + 8 * (within // 2)
    output = 16 * (thread // 8) + 8 * (thread // 4 % 2) + 4 * half + j
    order = INTERLEAVE[bits]
    return np.asarray((64 * value + output).reshape(-1, len(order))[:, order]).reshape(-1)


STRIPS = {bits: _strip(bits) for bits in INTERLEAVE}


class Marlin24(Layout):
    """marlin-24 of compressed-tensors; only read, and written back where the zeros allow it."""

    name = "compressed-tensors-marlin-24"
    sparse = True
    holds: ClassVar[Holds | None] = None
    config_reader = CompressedTensorsConfig
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "meta", "scale_packed")
    parts: ClassVar[dict[str, str]] = {"weight_packed": "codes", "meta": "codes", "scale_packed": "scales"}

    def accepts(self, headers: Mapping[str, HasHeader]) -> bool:
        return self.matches(headers) and headers["meta"].dtype == I16

    def matches(self, suffixes: Collection[str]) -> bool:
        return super().matches(suffixes) and "weight_scale" not in suffixes

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        args = weight_args(config)
        if args.get("format") not in (None, "marlin-24", "mixed-precision"):
            raise LayoutError(
                f"[{self.name}] {name or 'weight'} is marlin-24 by its tensors; the config's format is {args['format']}"
            )
        groups, n = require(self.name, tensors, "scale_packed", name, (F16,), (None, None))
        strips, width = require(self.name, tensors, "weight_packed", name, (I32,), (None, None))
        k, bits = 32 * strips, 2 * width // n if n else 0
        if n % 64 or bits not in INTERLEAVE or 2 * width != bits * n:
            raise LayoutError(
                f"[{self.name}] {label(name, 'weight_packed')} has shape {[strips, width]} under scales of {n} outputs; wanted "
                f"[k/32, 2·n] or [k/32, 4·n], for 4 and 8 bits and a multiple of 64 outputs"
            )
        require(self.name, tensors, "meta", name, (I16,), (strips, 2 * n), f"for {k} inputs and {n} outputs")
        stated, size = integer_of(self.name, args, "num_bits", name), integer_of(self.name, args, "group_size", name)
        if stated not in (None, bits):
            raise LayoutError(
                f"[{self.name}] {name}: num_bits is {stated} in the quantization config; its tensors are of {bits} bits"
            )
        grouped = args.get("strategy") == "group" or groups > 1
        if size not in (None, -1, GROUP) or groups != (k // GROUP if grouped else 1) or (grouped and k % GROUP):
            raise LayoutError(
                f"[{self.name}] {label(name, 'scale_packed')} has {groups} scales for {k} inputs; wanted one for each "
                f"{GROUP}, or one"
            )
        return Described(format_named(f"int{bits}", GROUP if grouped else -1, scale_dtype="float16"), (n, k))

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, (n, k) = self.describe(tensors, config, name)
        positions = _positions(tensors["meta"], n, k)
        if (positions[..., 0] >= positions[..., 1]).any():
            row, quad = np.argwhere(positions[..., 0] >= positions[..., 1])[0]
            raise LayoutError(
                f"[{self.name}] {label(name, 'meta')} gives output {row}, inputs {4 * quad} to {4 * quad + 3} the positions "
                f"{positions[row, quad].tolist()}; wanted two that ascend"
            )
        fields = stream.unpack(as_bytes(tensors["weight_packed"]), fmt.bits, 16 * n).reshape(k // 32, n // 64, 1024)
        strips = fields[..., np.argsort(STRIPS[fmt.bits])].reshape(k // 32, n // 64, 16, 64)
        values = strips.transpose(1, 3, 0, 2).reshape(n, k // 4, 2)
        codes = np.full((n, k // 4, 4), 1 << (fmt.bits - 1), np.uint8)
        np.put_along_axis(codes, positions, values, axis=-1)
        details: dict[str, Any] = {"layout": self.name}
        if not np.array_equal(positions, _usual_positions(codes, fmt.bits)):
            remember(details, "meta", tensors["meta"])
        order = _scale_order(k, fmt.groups(k))
        scales = tensors["scale_packed"].reshape(-1, 64)[:, np.argsort(order)].reshape(-1, n)
        parts = {"codes": stream.pack(codes.reshape(n, k), fmt.bits), "scales": np.ascontiguousarray(scales.T)}
        return QTensor(fmt, (n, k), parts, details=details, name=name)

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        why = integer_misfit(fmt, shape, tuple(INTERLEAVE))
        if not why and (shape[0] % 64 or shape[1] % 32 or fmt.group_size not in (-1, GROUP) or fmt.scale != "float16"):
            why = "it holds multiples of 64 outputs by 32 inputs under float16 scales of 128 inputs or of a row"
        return why

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        check_no_group_index(self.name, q)
        check_middle_zeros(self.name, q)
        (n, k), bits = q.shape, q.format.bits
        codes = stream.unpack(q.parts["codes"], bits, k).reshape(n, k // 4, 4)
        full = np.argwhere((codes != 1 << (bits - 1)).sum(-1) > 2)
        if full.size:
            row, quad = full[0]
            raise cannot_hold(
                self.name, q, f"row {row} has more than two values in inputs {4 * quad} to {4 * quad + 3}; it is 2:4"
            )
        positions = _usual_positions(codes, bits)
        meta = recall(self.own_details(q), "meta", (k // 32, 2 * n), I16)
        if meta is not None:
            own, rest = _positions(meta, n, k), codes.copy()
            np.put_along_axis(rest, own, 1 << (bits - 1), axis=-1)
            positions = own if bool((rest == 1 << (bits - 1)).all()) else positions
        values = np.take_along_axis(codes, positions, -1).reshape(n // 64, 64, k // 32, 16)
        fields = values.transpose(2, 0, 3, 1).reshape(k // 32, n // 64, 1024)[..., STRIPS[bits]].reshape(k // 32, 16 * n)
        scales = np.ascontiguousarray(q.parts["scales"].T)
        order = _scale_order(k, scales.shape[0])
        return {
            "weight_packed": as_words(stream.pack(fields, bits)),
            "meta": _meta(positions),
            "scale_packed": scales.reshape(-1, 64)[:, order].reshape(scales.shape),
        }

    def config(self, q: QTensor) -> dict[str, Any]:
        weights: dict[str, Any] = {"num_bits": q.format.bits, "type": "int", "symmetric": True, "strategy": "channel"}
        if q.format.group_size != -1:
            weights |= {"strategy": "group", "group_size": GROUP}
        return {"format": "marlin-24", "weights": weights}


def _positions(meta: NDArray[Any], n: int, k: int) -> NDArray[np.int64]:
    """[n, k/4, 2]: the positions of the two values in each four inputs.

    Word (r, c) of the [n, k/16] words of outputs r lies at 2n·⌊c/2⌋ + 2(64⌊r/64⌋ + 32·r1 +
    4·r345 + 2·r0 + c0) + r2, where r0 … r5 are the bits of r and c0 the lowest of c.
    """
    words = meta.reshape(k // 32, n // 64, 2, 8, 2, 2, 2)  # c >> 1, r >> 6, r1, r345, r0, c0, r2
    rows = words.transpose(1, 3, 6, 2, 4, 0, 5).reshape(n, k // 16).view(np.uint16)
    nibbles = (rows[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)).reshape(n, k // 4) & 15
    return np.stack([nibbles & 3, nibbles >> 2], -1).astype(np.int64)


def _meta(positions: NDArray[np.int64]) -> NDArray[np.int16]:
    """Inverse of `_positions`."""
    n, quads = positions.shape[:2]
    nibbles = (positions[..., 0] | positions[..., 1] << 2).reshape(n, quads // 4, 4)
    rows = (nibbles << np.arange(0, 16, 4)).sum(-1).astype(np.uint16)
    words = rows.reshape(n // 64, 8, 2, 2, 2, quads // 8, 2)  # r >> 6, r345, r2, r1, r0, c >> 1, c0
    return np.ascontiguousarray(words.transpose(5, 0, 3, 1, 4, 6, 2)).view(I16).reshape(quads // 8, 2 * n)


def _usual_positions(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """The positions that the producer chooses for four codes [n, k/4, 4]: those of the values that
    are not 0, filled up with zeros where there are fewer than two.
    """
    there = codes != 1 << (bits - 1)
    a, b, d = there[..., 0], there[..., 1], there[..., 3]
    first = np.where(a, 0, np.where(b, 1, 2))
    return np.stack([first, np.where(a & b, 1, np.where(a | b, 2 + d, 3))], axis=-1)


def _scale_order(k: int, groups: int) -> NDArray[np.int64]:
    """Output, of 64, of each stored scale."""
    return PAIRS if groups > 1 and k // 2 > GROUP else np.arange(64)
