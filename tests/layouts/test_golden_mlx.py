"""Files written by MLX: mx.dequantize's own numbers bit for bit, the same bytes back."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.golden_layouts import (
    case_of,
    cases_of,
    check_bytes,
    check_checkpoint,
    check_exact,
    check_reference,
    checkpoints,
    config_of,
    ids,
    single,
    variants,
)

MLX = LAYOUTS["mlx"]
CASES = cases_of("mlx")


def unpacked(file: str) -> tuple[QTensor, dict[str, np.ndarray], dict, object]:
    experts = "moe3d" in file
    case = case_of(file, "model.layers.0.mlp.switch_mlp.gate_proj." if experts else "model.layers.0.mlp.down_proj.")
    config = case.config["quantization"]
    return MLX.unpack(case.tensors, config, "m"), case.tensors, config, case


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_mx_dequantize_is_reproduced_bit_for_bit(file: str) -> None:
    q, _, _, case = unpacked(file)
    assert q.origin == "mlx"
    references = dict(variants(case))
    for dtype, reference in references.items():
        check_reference(q, reference, dtype)
    if "float32" not in references:
        # The producer's float32 answer was the same, so it is not stored twice.
        check_reference(q, next(iter(references.values())), "float32")


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_bytes_and_headers(file: str) -> None:
    q, tensors, config, _ = unpacked(file)
    check_bytes(MLX, tensors, config, q)
    check_exact(q)


def test_every_mode_and_width_is_among_the_files() -> None:
    formats = {unpacked(f)[0].format.name for f in single(CASES)}
    assert formats == {*(f"affine{b}" for b in (1, 2, 3, 4, 5, 6, 8)), "mxfp4", "mxfp8_e4m3", "nvfp4"}


@pytest.mark.parametrize("folder", checkpoints(CASES))
def test_checkpoints(folder: str) -> None:
    assert check_checkpoint(folder, MLX, config_of(folder)) == 9
