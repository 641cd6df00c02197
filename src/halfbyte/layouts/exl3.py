"""EXL3, ExLlamaV3's trellis-coded weights (`formats/exl3.py` has the values).

| tensor | stored as | meaning |
|---|---|---|
| `trellis` | int16 [k/16, n/16, 16 · bits] | tiles of 16 inputs by 16 outputs, 1 to 8 bits a code |
| `suh`, `svh` | float16 [k], [n] | input and output scales, signs included |
| `su`, `sv` | int16 [k/16], [n/16] | older files: signs alone, one bit each |
| `mcg`, `mul1` | int32 [] | the multiplier of that codebook; without either it is `3inst` |

k and n are multiples of 128. A head is padded to that: its weight is the slice of the rows that the
model's config.json gives it. Half-integer rates, tiles of 16 · bits + 8 words, are refused by name.
Config: `quant_method: exl3`; `codebook`, where it is written, must be the one that a weight's
tensors name, `bits` and `tensor_storage` restate what the tensors say. Source: ExLlamaV3's loader
and compiler (MIT).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import LayoutError, UnsupportedError
from ..formats import FAMILIES
from ..formats.exl3 import BLOCK, CODEBOOKS, MULTIPLIERS, TILE, unpack_signs
from ..spec import Format
from ..tensor.qtensor import QTensor
from .base import Array, Config, Described, HasHeader, Layout, Tensors, label, require
from .claims import PARAMETERS
from .quant_config.reader import PlainReader

I16, I32, F16 = np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.float16)


class EXL3Config(PlainReader):
    """ExLlamaV3's config. Its `bits` is an average, and its widths are those of the tensors."""

    method = "exl3"
    consumed = ("codebook",)
    harmless: ClassVar[dict[str, tuple[str, ...]]] = {
        "widths, which the tensors state": ("bits", "head_bits", "vision_bits", "mtp_bits", "tensor_storage"),
        "how the quantizer searched": ("calibration", "out_scales", "optimize"),
        "the config of the model that was quantized": ("original_quantization_config",),
        "notes of the writer": ("version",),
    }

    unchecked = ("bits", "head_bits", "vision_bits", "mtp_bits", "tensor_storage", "original_quantization_config")

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        word = raw.get("codebook")
        if word is not None and word not in CODEBOOKS:
            raise UnsupportedError(f"[config] {where}: codebook is {word!r:.40}; read: {', '.join(CODEBOOKS)}")

    def parameters(self, module: str) -> dict[str, Any] | None:
        return {k: v for k, v in self.raw.items() if k not in self.unchecked}


class EXL3(Layout):
    """Trellis, scales of both sides, and the marker of a codebook."""

    name = "exl3"
    config_reader = EXL3Config
    required = ("trellis",)
    optional = ("suh", "svh", "su", "sv", "mcg", "mul1")
    peek = ("mcg", "mul1")
    parts: ClassVar[dict[str, str]] = {
        "suh": "input_scales",
        "su": "input_scales",
        "svh": "output_scales",
        "sv": "output_scales",
        "mcg": PARAMETERS,
        "mul1": PARAMETERS,
    }

    def matches(self, suffixes: Collection[str]) -> bool:
        sides = (("suh", "su"), ("svh", "sv"))
        return "trellis" in suffixes and all(any(s in suffixes for s in side) for side in sides)

    def describe(self, tensors: Mapping[str, HasHeader], config: Config, name: str = "") -> Described:
        rows, columns, words = require(self.name, tensors, "trellis", name, (I16,), (None, None, None))
        k, n = TILE * rows, TILE * columns
        if words % TILE == TILE // 2:
            raise UnsupportedError(
                f"[exl3] {label(name, 'trellis')} has {words} words a tile, {words / TILE} bits a code: half-integer rates are "
                "recognised and not read; whole ones are. Use ExLlamaV3, or a file of another rate"
            )
        if words % TILE or not 1 <= words // TILE <= 8:
            raise LayoutError(f"[exl3] {label(name, 'trellis')} has {words} words a tile; wanted 16 · bits for 1 to 8 bits")
        if k % BLOCK or n % BLOCK:
            raise LayoutError(f"[exl3] {label(name, 'trellis')} has {k} inputs and {n} outputs; wanted multiples of {BLOCK}")
        for scales, signs, size in (("suh", "su", k), ("svh", "sv", n)):
            if scales in tensors and signs in tensors:
                both = f"{label(name, scales)} and {label(name, signs)}"
                raise LayoutError(f"[exl3] {both} are both there; one of them is the side's scale")
            if signs in tensors:
                require(self.name, tensors, signs, name, (I16,), (size // TILE,), f"a bit for each of {size}")
            else:
                require(self.name, tensors, scales, name, (F16,), (size,))
        codebook = self._codebook(tensors, config, name)
        stated = config.get("shape")
        if isinstance(stated, (list, tuple)) and len(stated) == 2 and stated[1] == k and 0 < n - stated[0] < BLOCK:
            n = int(stated[0])  # ExLlamaV3 pads the outputs of a head to whole blocks
        word = f"exl3_{words // TILE}" + ("" if codebook == CODEBOOKS[0] else f"_{codebook}")
        return Described(FAMILIES["exl3"].format(word), (n, k))

    def _codebook(self, tensors: Mapping[str, HasHeader], config: Config, name: str) -> str:
        """The codebook that the marker tensor names. LayoutError when the config names another."""
        markers = [word for word in MULTIPLIERS if word in tensors]
        if len(markers) > 1:
            raise LayoutError(f"[exl3] {label(name, 'mcg')} and {label(name, 'mul1')} are both there; a weight has one codebook")
        for word in markers:
            require(self.name, tensors, word, name, (I32,))
            marker = tensors[word]
            if isinstance(marker, np.ndarray):
                value = int(marker.item()) & 0xFFFFFFFF if marker.size == 1 else None
                if value != MULTIPLIERS[word]:
                    shown = f"{value:#x}" if value is not None else f"{marker.size} values"
                    raise LayoutError(
                        f"[exl3] {label(name, word)} is {shown}; the multiplier of {word} is {MULTIPLIERS[word]:#x}"
                    )
        found = markers[0] if markers else CODEBOOKS[0]
        stated = config.get("codebook")
        if stated not in (None, found):
            where = f"{label(name, markers[0])} is there" if markers else f"{label(name, str(stated))} is missing"
            raise LayoutError(f"[exl3] {name or 'weight'}: the config's codebook is {stated}, and {where}; the two must agree")
        return found

    def unpack(self, tensors: Tensors, config: Config, name: str = "") -> QTensor:
        fmt, shape = self.describe(tensors, config, name)
        parts: dict[str, Array] = {"trellis": tensors["trellis"]}
        details: dict[str, Any] = {"layout": self.name}
        for scales, signs, part in (("suh", "su", "input_scales"), ("svh", "sv", "output_scales")):
            parts[part] = unpack_signs(tensors[signs]) if signs in tensors else tensors[scales]
            if signs in tensors:
                details[signs] = "bits"
        for word in MULTIPLIERS:
            if word in tensors and tensors[word].shape:
                details["marker_shape"] = list(tensors[word].shape)
        rows = TILE * tensors["trellis"].shape[1]
        whole = QTensor(fmt, (rows, shape[1]), parts, details=details, name=name)
        return whole if rows == shape[0] else whole.rows(0, shape[0])

    def misfit(self, fmt: Format, shape: tuple[int, ...]) -> str:
        return "" if fmt.family == "exl3" else "this layout holds exl3 trellises, which only ExLlamaV3 writes"

    def pack(self, q: QTensor, config: Config) -> dict[str, Array]:
        self.check_fits(q)
        own = self.own_details(q)
        out: dict[str, Array] = {"trellis": q.parts["trellis"]}
        for scales, signs, part in (("suh", "su", "input_scales"), ("svh", "sv", "output_scales")):
            values = q.parts[part]
            if own.get(signs) == "bits" and bool((np.abs(values) == 1).all()):
                out[signs] = np.packbits(values < 0, bitorder="little").view("<i2").astype(I16, copy=False)
            else:
                out[scales] = values
        word = q.format.element.removeprefix("exl3_")
        if word in MULTIPLIERS:
            out[word] = np.array(MULTIPLIERS[word], np.uint32).view(I32).reshape(own.get("marker_shape", ()))
        return out

    def config(self, q: QTensor) -> dict[str, Any]:
        return {"quant_method": "exl3", "bits": q.format.bits, "codebook": q.format.element.removeprefix("exl3_")}
