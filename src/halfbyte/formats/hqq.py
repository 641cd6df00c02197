"""HQQ: unsigned codes with a float zero point and a float scale (Badri and Shaji 2023).

    value = (code − zero) · scale

HQQ groups the flattened matrix. With axis 1, g consecutive elements share a scale: that is `row` grouping when k is whole
groups and `flat` otherwise. With axis 0 the matrix is reshaped to (g, n·k/g) and a column shares a scale: element f of the
flattened matrix is in group f mod (n·k/g), the `strided` grouping (HQQ itself wants whole groups; here the quotient rounds up).

Words: `hqq1` … `hqq8`. Any group size, −1 for the whole row (axis 1); 64 unless given. Format options: `axis` (1), `scale_dtype`
(float16; the zero points have it too), `grouping` (`row` or `flat` for axis 1; `Family.fit` picks from the shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..spec import Format
from .base import Family, check_group
from .options import fit_flat, grouping_option, only_options, scale_dtype_option


class HQQ(Family):
    """HQQ, 1 to 8 bits, both axes."""

    name = "hqq"
    words = tuple(f"hqq{b}" for b in range(1, 9))
    format_options = ("axis", "scale_dtype", "grouping")
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, word: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(word, options, self.format_options)
        axis = options.get("axis", 1)
        if axis not in (0, 1):
            raise FormatError(f"[format] {word} with axis {axis!r}; allowed: 0, 1")
        grouping = grouping_option(word, options, ("row", "flat") if axis == 1 else ("strided",))
        group = check_group(word, 64 if group_size is None else group_size)
        if group == -1 and grouping != "row":
            raise FormatError(f"[format] {word} with group size -1 in {grouping} groups; give the number of elements a group")
        scale = scale_dtype_option(word, options, "float16")
        return Format("hqq", word, int(word[3:]), "uint", group, scale, zero="float", grouping=grouping)

    def fit(self, fmt: Format, shape: Sequence[int]) -> Format:
        return fit_flat(fmt, shape)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise NotImplementedError
