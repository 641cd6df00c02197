"""A packed weight as variables of gradient descent: what it decodes to at every moment is a value
that the format stores.

    value = (element(round(p)) − zero) · scale · global + bias − min
    p     = position((x − bias + min) / (scale · global) + zero) + v

x is the dense weight. Codes are positions 0 … N − 1 in the format's values in order of size, and
`position` is linear between neighbours, so that rounding p to the nearest integer is rounding to
the nearest value, for integers and for tables. Variables are v (an offset a weight) and, for each
parameter of a group that the format stores, u: stored = nearest(start + u · unit), where a scale's
unit is its own start, and a zero point's or bias's is the whole range of codes (one step of a bias
where `ranges` are given). Rounding passes gradients straight through (Bengio et al. 2013, arXiv
1308.3432).

| variable | from |
|---|---|
| v, an offset of each weight's rounding | SignRound (Cheng et al. 2023, arXiv 2309.05516) |
| u of scales, through the rounding of x / scale | learned step size (Esser et al. 2020, arXiv 1902.08153) |
| u of minimums, biases and zero points: where a range is cut off | OmniQuant (Shao et al. 2023, arXiv 2308.13137) |

At the start u is 0 and v yields the start's codes, whichever algorithm found them (`near`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats.base import SCALE_DTYPES
from ..formats.decode import scale_values
from ..numerics.bits import pack, unpack
from ..numerics.minifloat import element_table, round_to_element
from ..quantizers import has_search
from ..spec import SMALL_SCALES, Format
from ..tensor.qtensor import QTensor

EDGE = 0.49
"""Distance of a position from its code at the start, at most; the next code begins at 0.5."""


class _StraightThrough(torch.autograd.Function):  # type: ignore[misc] # torch is not type-checked
    """`rounded` as a function of x with derivative 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Round(torch.autograd.Function):  # type: ignore[misc] # torch is not type-checked
    """round(x) with derivative 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Lookup(torch.autograd.Function):  # type: ignore[misc] # torch is not type-checked
    """table[round(p)], with the derivative of the line between the neighbours of p."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(p, table)
        return table[p.round().long()]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        p, table = ctx.saved_tensors
        steps = table[1:] - table[:-1]
        return gradient * steps[p.long().clamp(max=len(steps) - 1)], None


def _within_code(off: Tensor, near: float) -> Tensor:
    """Distances from codes as training starts: those up to `near` as they are, others between it
    and `EDGE`, the farther the closer to it. Were they all put at one place, they would leave their
    codes in the same step, before any gradient saw the first of them leave.
    """
    far, room = (off.abs() - near).clamp(min=0), EDGE - near
    if not room:
        return off.clamp(-EDGE, EDGE)
    out: Tensor = off.clamp(-near, near) + off.sign() * room * (1 - torch.exp(-far / room))
    return out


def check_trainable(fmt: Format) -> None:
    """FormatError for a format whose codes and scales cannot be trained."""
    if not has_search(fmt):
        raise FormatError(
            f"[quantize] {fmt} with method learned, which trains codes under scales along rows; allowed: int, uint, affine, q4_0 "
            "to q8_0, q2_K to q6_K, iq4_nl, iq4_xs, mxfp, nvfp4, fp4, fp8, nf4. Use rtn"
        )


class TrainableWeight:
    """The variables of one weight [n, k].

    start   a packed weight, whose codes and parameters training starts from
    weight  float32 [n, k], what is approximated; None where codes stay those of the start
    ranges  u of the parts that change, for the same start; all parts without it
    device  of the variables; that of `weight` where there is one
    near    positions that are farther from their code start between this and `EDGE`, in their order
    free    positions are variables of their own, which a scale that moves leaves where they are

    `rounding` is v [n, k], or all positions where they are free or codes stay; `ranges` are u, by
    part. FormatError as `check_trainable`.
    """

    def __init__(
        self,
        start: QTensor,
        weight: Tensor | None,
        ranges: dict[str, Tensor] | None = None,
        device: Any = "cpu",
        near: float = EDGE,
        free: bool = False,
    ) -> None:
        check_trainable(start.format)
        self.start, self.format = start, start.format
        self.weight = None if free else weight
        fmt, device = start.format, device if weight is None else weight.device
        values = element_table(fmt.element, fmt.bits)
        finite = np.flatnonzero(np.isfinite(values))
        table, first = np.unique(values[finite], return_index=True)
        self._codes = finite[first].astype(np.uint8)
        self._table = torch.from_numpy(table).to(device, torch.float32)
        self._uniform = bool((np.diff(table) == 1).all())
        self._global: float | Tensor = float(start.parts["global_scale"]) if fmt.global_op else 1.0
        levels = float(table[-1] - table[0])
        n, k = self.shape = start.shape
        size = k if fmt.group_size == -1 else fmt.group_size
        # Parameters broadcast over groups; where the last group is not whole they are spread.
        self._shape = (n, k // size, size) if size and k % size == 0 else (n, k)
        self._starts: dict[str, Tensor] = {}
        self._units: dict[str, Tensor] = {}
        for part in ("scales", "super_scales", "mins", "super_mins", "zeros", "biases"):
            if part in start.parts:
                raw = scale_values(fmt.scale if part == "scales" else "float32", start.parts[part])
                self._starts[part] = torch.from_numpy(raw).to(device, torch.float32)
                self._units[part] = self._starts[part].abs()
        if "zeros" in self._starts:
            self._units["zeros"] = torch.full_like(self._starts["zeros"], levels)
        if "biases" in self._starts:
            self._units["biases"] = (1 if ranges is not None else levels) * self._units["scales"]
        self.ranges = (
            ranges if ranges is not None else {part: torch.zeros_like(s, requires_grad=True) for part, s in self._starts.items()}
        )
        codes = unpack(start.parts["codes"], fmt.bits, start.shape[-1])
        at = torch.from_numpy(np.searchsorted(table, values).astype(np.float32)[codes]).to(device)
        self.rounding = at
        if weight is not None:
            with torch.no_grad():
                plain = self._position(weight, self._stored())
                self.rounding = at + _within_code(plain - at, near) - (0 if free else plain)
            self.rounding.requires_grad_()

    def variables(self) -> list[Tensor]:
        """What is trained."""
        return [*([self.rounding] if self.rounding.requires_grad else []), *self.ranges.values()]

    def value(self) -> Tensor:
        """The decoded weight, float32 [n, k], differentiable."""
        return self._decoded(self._stored())

    def packed(self) -> QTensor:
        """The packed weight."""
        with torch.no_grad():
            stored = self._stored()
            positions = self._shifted(*self._terms(stored)).round().to(torch.uint8).cpu().numpy()
            codes = self._codes[positions.reshape(self.start.shape)]
        parts = dict(self.start.parts) | {part: self._part(part, value.cpu().numpy()) for part, value in stored.items()}
        return QTensor(self.format, self.start.shape, {**parts, "codes": pack(codes, self.format.bits)}, origin=self.start.origin)

    def _part(self, part: str, value: NDArray[Any]) -> NDArray[Any]:
        """Values as the file has them."""
        kind = self.format.scale
        if part == "scales" and kind == "e8m0":
            exponents: NDArray[np.uint8] = (np.frexp(value)[1] + 126).astype(np.uint8)
            return exponents
        if part == "scales" and kind in ("e4m3", "ue4m3"):
            return round_to_element(value, "e4m3")
        if part == "scales":
            return value.astype(SCALE_DTYPES[kind])
        out: NDArray[Any] = value.astype(self.start.parts[part].dtype)
        return out

    def _stored(self) -> dict[str, Tensor]:
        """Parameters of groups as the format stores them."""
        out: dict[str, Tensor] = {}
        for part, start in self._starts.items():
            if part not in self.ranges:
                out[part] = start
                continue
            # Half a unit at most: a scale, whose unit is its own start, keeps its sign.
            wanted = start + self.ranges[part].clamp(-0.5, 0.5) * self._units[part]
            out[part] = _StraightThrough.apply(wanted, self._nearest(part, wanted.detach()))
        return out

    def _nearest(self, part: str, x: Tensor) -> Tensor:
        fmt = self.format
        if part == "zeros":
            return x.round().clamp_(0, float(self._table[-1] - self._table[0]))
        kind = {"scales": fmt.scale, "mins": fmt.minimum, "biases": fmt.scale}.get(part, "float16")
        if kind in SMALL_SCALES:
            return x.round().clamp_(*SMALL_SCALES[kind])
        if kind == "e8m0":
            return torch.exp2(torch.log2(x).round().clamp_(-127, 127))
        if kind in ("e4m3", "ue4m3"):
            return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        if kind == "float16":
            return x.clamp(-65504, 65504).half().float()
        return x.bfloat16().float() if kind == "bfloat16" else x

    def _terms(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(scale without the tensor scale, offset, zero point), as `_each` has them."""
        scale, offset = stored["scales"], stored.get("biases")
        if "super_scales" in stored:
            scale = scale * self._by_group(stored["super_scales"])
        if "mins" in stored:
            offset = -(stored["mins"] * self._by_group(stored["super_mins"]))
        each = self._each
        return each(scale), None if offset is None else each(offset), each(stored["zeros"]) if "zeros" in stored else None

    def _by_group(self, x: Tensor) -> Tensor:
        """[n, super-blocks] -> [n, groups]"""
        count = self.format.super_size // self.format.group_size
        return x[:, :, None].expand(*x.shape, count).reshape(len(x), -1)

    def _each(self, x: Tensor) -> Tensor:
        """[n, groups] -> what broadcasts against weights of `_shape`."""
        if len(self._shape) == 3:
            return x[:, :, None]
        size, k = self.format.group_size, self.shape[1]
        return x[:, :, None].expand(*x.shape, size).reshape(len(x), -1)[:, :k]

    def _position(self, weight: Tensor, stored: dict[str, Tensor]) -> Tensor:
        """Positions of x [n, k], saturating, before v."""
        return self._position_of(weight, *self._terms(stored)).reshape(weight.shape)

    def _position_of(self, weight: Tensor, scale: Tensor, offset: Tensor | None, zero: Tensor | None) -> Tensor:
        weight = weight.reshape(self._shape)
        x = weight if offset is None else weight - offset
        fmt = self.format
        factor = 1 / self._global if fmt.global_op == "divide" else self._global / fmt.divisor if fmt.global_op else 1.0
        whole = scale * factor
        t = x / torch.where(whole == 0, torch.inf, whole)
        table = self._table
        if self._uniform:
            t = t - table[0] if zero is None else t + (zero - table[0])
        else:
            low = torch.bucketize(t.detach(), table[1:-1])
            t = low + (t - table[low]) / (table[low + 1] - table[low])
        return t.clamp(0, len(table) - 1)

    def _shifted(self, scale: Tensor, offset: Tensor | None, zero: Tensor | None) -> Tensor:
        """Positions of `_shape`."""
        moved = self.rounding.reshape(self._shape)
        if self.weight is not None:
            moved = self._position_of(self.weight, scale, offset, zero) + moved
        return moved.clamp(0, len(self._table) - 1)

    def _decoded(self, stored: dict[str, Tensor]) -> Tensor:
        # The order of `formats.decode`, where float32 rounds once.
        scale, offset, zero = self._terms(stored)
        p = self._shifted(scale, offset, zero)
        if self._uniform:
            # Whole numbers, so that their sums are exact in any order.
            base = self._table[0] if zero is None else self._table[0] - zero
            value = (_Round.apply(p) + base) * scale
        else:
            value = (_Lookup.apply(p, self._table) if zero is None else _Lookup.apply(p, self._table) - zero) * scale
        if self.format.divisor != 1.0:
            value = (value.double() * self._global / self.format.divisor).float()
        elif self.format.global_op:
            value = value / self._global if self.format.global_op == "divide" else value * self._global
        return (value if offset is None else value + offset).reshape(self.shape)


class TrainableStack:
    """Weights [n, k] of one format and one k as one matrix [Σ n, k]: an operation is started once
    for all of them.

    Their positions are free. From then on their variables are rows of the stack's: they follow its
    training, and are not trained themselves.
    """

    def __init__(self, weights: Sequence[TrainableWeight]) -> None:
        self.rows = [w.shape[0] for w in weights]
        whole = self._whole = copy(weights[0])
        whole.shape = (sum(self.rows), weights[0].shape[1])
        whole._shape = (whole.shape[0], *weights[0]._shape[1:])
        whole._starts, whole._units, ranges = (
            {part: torch.cat([x[part].detach() for x in parts]) for part in parts[0]}
            for parts in ([w._starts for w in weights], [w._units for w in weights], [w.ranges for w in weights])
        )
        if whole.format.global_op:
            each = torch.tensor([w._global for w in weights], device=whole.rounding.device)
            ones = [1] * (len(whole._shape) - 1)
            whole._global = each.repeat_interleave(torch.tensor(self.rows, device=each.device)).reshape(-1, *ones)
        rounding = torch.cat([w.rounding.detach() for w in weights])
        for w, positions in zip(weights, rounding.split(self.rows), strict=True):
            w.rounding = positions
        for part, u in ranges.items():
            for w, rows in zip(weights, u.split(self.rows), strict=True):
                w.ranges[part] = rows
        whole.rounding, whole.ranges = rounding.requires_grad_(), {part: u.requires_grad_() for part, u in ranges.items()}
        self.rounding, self.ranges = whole.rounding, whole.ranges

    def value(self) -> Tensor:
        """The decoded weights [Σ n, k], differentiable; `rows` are each one's."""
        return self._whole.value()
