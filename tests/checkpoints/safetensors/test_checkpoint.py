"""Small rules of a folder's checkpoint."""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.safetensors.checkpoint import _matrix, _vocabulary


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
