"""What a weight's arrays become on a device."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

from halfbyte.backends.cuda.weight import tensor_of


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, ml_dtypes.bfloat16])
def test_read_only_arrays_become_tensors_of_their_own_without_a_warning(dtype):
    """Checkpoints' arrays are read-only; a tensor over one could write to it."""
    array = np.arange(6).astype(dtype).reshape(2, 3)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_of(array, "cpu")
    assert tensor.tolist() == array.astype(np.float32).tolist()
    tensor += 1
    assert array.astype(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
