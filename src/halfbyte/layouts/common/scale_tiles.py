"""Block scales in the tiles that tensor-core instructions read: 128 rows by 4 columns become 32
rows by 16.

Scale (r, c) of tile (R, C), r < 128, c < 4, is at row r mod 32, column 4·(r // 32) + c of that
tile; tiles follow one another, C fastest, and the matrix is padded to whole tiles. Source: cuBLAS
documentation, 1-D block scaling factors layout; torchao calls it swizzled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def tiled_shape(n: int, groups: int) -> tuple[int, int]:
    """Shape of the tiled bytes of an [n, groups] matrix: never that of the plain one unless a size
    is 0.
    """
    return 32 * -(-n // 128), 16 * -(-groups // 4)


def untile(tiled: U8, n: int, groups: int) -> tuple[U8, U8]:
    """Tiled bytes -> (scales [n, groups], the padding, flat: rows n and on, then columns `groups`
    and on of the rest).
    """
    R, C = -(-n // 128), -(-groups // 4)
    padded = tiled.reshape(R, C, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(128 * R, 4 * C)
    scales = np.ascontiguousarray(padded[:n, :groups])
    return scales, np.concatenate([padded[n:].reshape(-1), padded[:n, groups:].reshape(-1)])


def tile(scales: U8, padding: U8 | None = None) -> U8:
    """Scales [n, groups] -> tiled bytes of `tiled_shape`, padded with zeros or with `padding`.
    Inverse of `untile`.
    """
    n, groups = scales.shape
    R, C = -(-n // 128), -(-groups // 4)
    padded = np.zeros((128 * R, 4 * C), np.uint8)
    padded[:n, :groups] = scales
    if padding is not None:
        below = padding[: padded[n:].size]
        padded[n:] = below.reshape(padded[n:].shape)
        padded[:n, groups:] = padding[below.size :].reshape(n, 4 * C - groups)
    return np.ascontiguousarray(padded.reshape(R, 4, 32, C, 4).transpose(0, 3, 2, 1, 4)).reshape(tiled_shape(n, groups))
