"""mlx-lm: python mlx_write.py DENSE OUT [WORD ...]. Its own `convert`, quantizing as each of its
modes does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from dense import each
from mlx_lm import convert
from mlx_lm.utils import load_model


def quantized(mode: str, bits: int, group: int) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        convert(str(source), str(target), quantize=True, q_mode=mode, q_bits=bits, q_group_size=group)
        if arch == "gemma3_text":
            return  # mlx-lm's Gemma 3 looks at its sixth layer; there are two
        model, _ = load_model(target)
        model.set_dtype(mx.float32)
        ids = np.random.default_rng(1).integers(3, 96, (2, 12))  # those of tiny_models.ids
        np.save(target / "logits.npy", np.array(model(mx.array(ids)).astype(mx.float32)))

    return write


if __name__ == "__main__":
    modes = {
        "affine4": quantized("affine", 4, 32), "affine6": quantized("affine", 6, 32), "mxfp4": quantized("mxfp4", 4, 32),
        "nvfp4": quantized("nvfp4", 4, 16),
    }  # fmt: skip
    each(modes, {"gpt_oss": "gpt_oss_mxfp4"})
