"""Small rules of a folder's checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints.safetensors.checkpoint import _matrix, _vocabulary
from support.safetensors_bytes import write


@pytest.mark.parametrize(
    ("stated", "shape", "wanted"),
    [((3, 5), (3, 5), (3, 5)), ((3, 5), (4, 5), (3, 5)), ((3, 5), (), (3, 5)), ((3, 5), (5, 3), (None, None)),
     ((4, 4), (4, 4), (None, None)), ((), (3, 5), (None, None)), ((3,), (5,), (None, None)), ((2, 3, 5), (2, 3, 5), (None, None)),
     ((2, 3, 5), (2, 3, 4), (None, None))],
)  # fmt: skip
def test_a_matrix_of_transformers_states_a_shape_unless_it_is_stored_as_gpt2_does(stated, shape, wanted):
    assert _matrix(stated, shape) == wanted


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.q_proj"])
@pytest.mark.parametrize("n", [None, 0, 99, 100])
@pytest.mark.parametrize("shape", [(98, 8), (100, 8), (128, 8), (128,), ()])
def test_a_vocabulary_may_be_padded_with_rows(name, n, shape):
    padded = bool(n) and len(shape) == 2 and shape[0] > n and name != "model.q_proj"
    assert _vocabulary((n, 8), name, shape) == (shape[0] if padded else n, 8)


def test_mlx_lms_adapters_hold_more_than_pairs_of_matrices(tmp_path):
    """DoRA has a vector of magnitudes beside them."""
    module, ones = "model.layers.0.mlp.up_proj", np.ones((8, 8), np.float32)
    write(tmp_path / "adapters.safetensors", {f"{module}.lora_a": ones, f"{module}.lora_b": ones, f"{module}.m": ones[0]})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "dora", "model": "org/base"}))
    with hb.open(tmp_path) as checkpoint:
        assert f"mlx-lm runs it beside its model with --adapter-path {tmp_path}" in checkpoint.adapter
