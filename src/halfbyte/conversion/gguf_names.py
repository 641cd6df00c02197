"""A checkpoint presented under the names, row orders and stacks of another checkpoint of the same
model.

    renamed = RenamedLike(open("folder"), open("model.gguf"))    keys, row orders and stacks of model.gguf, values of folder
    renamed["blk.0.attn_q"]                                  model.layers.0.self_attn.q_proj, its
                                                             rows in llama.cpp's order

A transformers folder and a GGUF differ in names, in the row order of LLaMA's q and k, in Gemma's
norms (plus 1), in whether experts are stacked, and in whether gate and up are one matrix
(`verification/match.py`). Whole rows are moved, so packed weights keep every bit. Tensors that only
the other checkpoint has (rotary factors) are taken from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo
from ..errors import CheckpointError
from ..tensor.concat import concat_rows, stack, take_rows
from ..tensor.qtensor import QTensor
from ..tensor.row_view import Source
from ..verification.compare import AUXILIARY
from ..verification.match import Match, Piece, Side, pair
from ..verification.names import dialect_of

Weight = QTensor | NDArray[Any]


@dataclass(frozen=True)
class _Part:
    """One right-hand piece, and the rows of the joined left-hand pieces that it is made of: the
    first and their count.
    """

    piece: Piece
    start: int
    count: int


class RenamedLike(Checkpoint):
    """`source`, read under the keys of `like`.

    left_out  keys of the source without a counterpart: a head that is tied, scales of activations
    Raises CheckpointError when the two are not of one architecture.
    """

    def __init__(self, source: Checkpoint, like: Checkpoint) -> None:
        self.source, self.like = source, like
        self.path, self.format, self.config = source.path, source.format, like.config
        self.left_out: list[str] = []
        a, b = (dialect_of(c.keys(), c.config, c.metadata) for c in (source, like))
        self._infos = [{i.key: i for i in c.infos()} for c in (source, like)]
        self._matches: dict[str, tuple[Match, list[_Part]]] = {}
        unmatched: list[str] = []
        for match in pair(Side.of(list(self._infos[0].values()), a, other=b), Side.of(list(self._infos[1].values()), b)):
            if match.note and "ties its head" in match.note:
                self.left_out += match.left_keys if b.tied else ()
                if not b.tied:
                    self._add(match)
            elif not match.right:
                (self.left_out if all(AUXILIARY.fullmatch(k) for k in match.left_keys) else unmatched).extend(match.left_keys)
            elif match.left and not match.aligned:
                raise CheckpointError(f"[convert] {match.left_keys[0]} and {match.right_keys[0]} cannot be aligned: {match.note}")
            elif match.left:
                self._add(match)
        if unmatched:
            raise CheckpointError(
                f"[convert] {like.path} has no counterpart of {', '.join(unmatched[:4])}"
                + (f" and {len(unmatched) - 4} more" if len(unmatched) > 4 else "")
                + f" of {source.path}; is it the same model?"
            )
        missing = [k for k in like if k not in self._matches and len(self._infos[1][k].shape) > 1]
        if missing:
            raise CheckpointError(
                f"[convert] {source.path} has nothing for {', '.join(missing[:4])} of {like.path}; is it the same model?"
            )

    def _add(self, match: Match) -> None:
        """Record which rows make up each right-hand tensor."""
        parts: dict[str, list[_Part]] = {}
        at = 0
        for piece in match.right:
            count = self._rows(1, piece)
            parts.setdefault(piece.key, []).append(_Part(piece, at, count))
            at += count
        have = sum(self._rows(0, p) for p in match.left)
        if have != at:
            raise CheckpointError(
                f"[convert] {' + '.join(match.left_keys[:3])} has {have} rows, {' + '.join(match.right_keys[:3])} {at}; "
                "is it the same model?"
            )
        for key, own in parts.items():
            self._matches[key] = match, own

    def _rows(self, side: int, piece: Piece) -> int:
        """Rows of a piece, from headers."""
        shape = self._infos[side][piece.key].shape
        if piece.vector:
            return shape[-1] if piece.rows in ("all", "rotary") else shape[-1] // 2
        if piece.expert is not None:
            n = shape[-1] if piece.transposed else shape[-2]
        elif len(shape) < 2:
            n = 1
        else:
            n = shape[-1] if piece.transposed and len(shape) == 3 else int(np.prod(shape[:-1]))
        return n if piece.rows in ("all", "rotary") else n // 2

    def keys(self) -> tuple[str, ...]:
        return tuple(self._name(k) for k in self.like)

    def _name(self, key: str) -> str:
        """The key of a tensor of `like` in this checkpoint: with `.weight` where the source's
        tensor is dense.
        """
        packed = self._packed(key)
        if self._infos[1][key].quantized == packed or not self._infos[1][key].shape[1:]:
            return key
        return key.removesuffix(".weight") if packed else f"{key}.weight"

    def _of(self, key: str) -> str:
        """The key of `like` behind a key."""
        for candidate in (key, f"{key}.weight", key.removesuffix(".weight")):
            if candidate in self._infos[1]:
                return candidate
        raise self.missing(key)

    def _packed(self, key: str) -> bool:
        if key not in self._matches:
            return False
        match, _ = self._matches[key]
        return all(self._infos[0][p.key].quantized for p in match.left)

    def __contains__(self, key: object) -> bool:
        return str(key) in self.keys()

    def info(self, key: str) -> TensorInfo:
        own = self._of(key)
        theirs = self._infos[1][own]
        if own not in self._matches:
            return theirs
        match, parts = self._matches[own]
        first = self._infos[0][match.left[0].key]
        share = sum(p.count for p in parts) / max(1, sum(self._rows(0, p) for p in match.left))
        nbytes = int(share * sum(self._infos[0][k].nbytes for k in match.left_keys))
        kind = "quantized" if self._packed(own) else "dense"
        fmt = first.format if kind == "quantized" else None
        return TensorInfo(self._name(own), kind, first.layout, fmt, theirs.shape, first.dtype, nbytes, first.files)

    def __getitem__(self, key: str) -> Weight:
        own = self._of(key)
        if own not in self._matches:
            return self.like[own]
        match, parts = self._matches[own]
        rows = [_rows_of(self.source[p.key], p) for p in match.left]
        pieces = [_arranged(_slice(rows, part.start, part.count), part.piece) for part in parts]
        shape = self._infos[1][own].shape
        if isinstance(pieces[0], QTensor):
            return _stacked_packed([p for p in pieces if isinstance(p, QTensor)], parts, shape)
        return self._dense([np.asarray(p) for p in pieces], parts, shape, own)

    def _dense(self, pieces: list[NDArray[Any]], parts: list[_Part], shape: tuple[int, ...], key: str) -> NDArray[Any]:
        """A dense tensor of `shape`; vectors take the other checkpoint's dtype where that loses
        nothing.
        """
        if len(pieces) == 1 and parts[0].piece.expert is None:
            out = pieces[0].reshape(shape)
        else:
            e = shape[0]
            matrix = np.stack([np.concatenate([pieces[i] for i in own]) for own in _by_expert(parts, e)])
            if parts[0].piece.rows in ("even", "odd"):
                matrix = matrix.reshape(e, 2, -1, *matrix.shape[2:]).swapaxes(1, 2).reshape(matrix.shape)
            out = (matrix.swapaxes(-1, -2) if parts[0].piece.transposed else matrix).reshape(shape)
        other = self.like[key] if out.ndim == 1 else out
        cast = out if isinstance(other, QTensor) else out.astype(other.dtype)
        return cast if np.array_equal(cast.astype(np.float64), out.astype(np.float64)) else out

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.like.metadata

    def close(self) -> None:
        self.source.close()
        self.like.close()


def _rows_of(weight: Weight, piece: Piece) -> Weight:
    """The rows of a left-hand piece as (n, k), in the common order."""
    if isinstance(weight, QTensor):
        q = weight if piece.expert is None else weight[piece.expert]
        index = Source(q, rows=piece.rows, heads=piece.heads).index if q.ndim == 2 else None
        return q if index is None else take_rows(q, index)
    if piece.vector and weight.ndim == 1:
        weight = weight[:, None]
    source = Source(
        weight if not piece.vector or weight.ndim < 2 or piece.expert is None else weight[..., None],
        piece.expert,
        piece.rows,
        piece.heads,
        piece.transposed,
        piece.add_one,
    )
    return source.read(0, source.shape[0], None, "exact")


def _slice(rows: list[Weight], start: int, count: int) -> Weight:
    """Rows start to start + count of pieces joined."""
    taken: list[Weight] = []
    for piece in rows:
        n = int(np.prod(piece.shape[:-1])) if isinstance(piece, QTensor) else len(piece)
        low, high = max(start, 0), min(start + count, n)
        if low < high:
            whole = low == 0 and high == n
            taken.append(piece if whole else piece.rows(low, high) if isinstance(piece, QTensor) else piece[low:high])
        start -= n
    packed = [t for t in taken if isinstance(t, QTensor)]
    if len(packed) == len(taken):
        return packed[0] if len(packed) == 1 else concat_rows(packed)
    return np.concatenate([np.asarray(t) for t in taken]) if len(taken) > 1 else taken[0]


def _arranged(rows: Weight, piece: Piece) -> Weight:
    """Rows in the order of the right-hand tensor, with its offset removed."""
    if piece.rows == "rotary":
        index = Source(np.empty((rows.shape[0], 1)), rows="rotary", heads=piece.heads).index
        assert index is not None
        back = np.argsort(index)
        return take_rows(rows, back) if isinstance(rows, QTensor) else rows[back]
    if piece.add_one and not isinstance(rows, QTensor):
        return rows.astype(np.float32) - np.float32(1)
    return rows


def _by_expert(parts: list[_Part], count: int) -> list[list[int]]:
    """Numbers of the pieces of each expert, first halves first."""
    own: list[list[int]] = [[] for _ in range(count)]
    for i, part in enumerate(parts):
        own[part.piece.expert or 0].append(i)
    return [sorted(o, key=lambda i: parts[i].piece.rows in ("odd", "second")) for o in own]


def _stacked_packed(pieces: list[QTensor], parts: list[_Part], shape: tuple[int, ...]) -> QTensor:
    """A packed tensor of `shape` from its pieces: one, or those of each expert in order."""
    if len(pieces) == 1 and parts[0].piece.expert is None:
        q = pieces[0]
        return q if q.shape == shape else stack([q.rows(i * shape[-2], (i + 1) * shape[-2]) for i in range(shape[0])])
    if parts[0].piece.expert is None:
        return concat_rows(pieces)
    each = []
    for own in _by_expert(parts, shape[0]):
        joined = pieces[own[0]] if len(own) == 1 else concat_rows([pieces[i] for i in own])
        if parts[0].piece.rows in ("even", "odd"):
            n = joined.shape[0]
            joined = take_rows(joined, np.arange(n).reshape(2, n // 2).T.reshape(-1))
        each.append(joined)
    return stack(each)
