"""Tensors and configs that lie: whatever is wrong with them, a layout either reads them or raises the library's own error."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.layouts import LAYOUTS
from halfbyte.tensor.qtensor import QTensor
from support.layout_tensors import integer_tensor

DTYPES = (
    np.int8,
    np.uint8,
    np.int16,
    np.int32,
    np.uint32,
    np.int64,
    np.float16,
    np.float32,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
)
VALUES = st.one_of(
    st.none(),
    st.integers(-2, 200),
    st.sampled_from(["128", 1.5, True, [], [1, 2], [0, -1], "group", "channel", "tensor", "block"]),
)
KEYS = (
    "bits", "group_size", "w_bit", "q_group_size", "checkpoint_format", "meta", "num_bits", "strategy", "block_structure",
    "codec", "format", "weights", "config_groups",
)  # fmt: skip


def valid(name: str) -> tuple[dict[str, np.ndarray], dict]:
    """A module of this layout and its config."""
    q: QTensor = integer_tensor(4, (64, 64), 32, zeros=None if name == "awq-marlin" else (1, 15))
    config = LAYOUTS[name].config(q)
    return LAYOUTS[name].pack(q, config), config


@pytest.mark.parametrize(
    "name", ["gptq", "awq-gemm", "awq-gemv", "awq-gemv_fast", "awq-marlin", "compressed-tensors", "metal-marlin"]
)
@settings(max_examples=150)
@given(data=st.data())
def test_a_lie_is_an_error_of_ours_or_harmless(name: str, data: st.DataObject) -> None:
    tensors, config = valid(name)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["shape", "dtype", "drop", "config", "values"]))
        if kind == "config":
            config[data.draw(st.sampled_from(KEYS))] = data.draw(VALUES)
            continue
        suffix = data.draw(st.sampled_from(sorted(tensors)))
        if kind == "drop":
            del tensors[suffix]
            if not tensors:
                break
        elif kind == "dtype":
            tensors[suffix] = np.zeros(tensors[suffix].shape, data.draw(st.sampled_from(DTYPES)))
        elif kind == "shape":
            shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 63, 64, 128]), max_size=3))
            tensors[suffix] = np.zeros(shape, tensors[suffix].dtype)
        else:
            flat = tensors[suffix].copy().reshape(-1).view(np.uint8)
            flat[:] = data.draw(st.integers(0, 255))
            tensors[suffix] = flat.view(tensors[suffix].dtype).reshape(tensors[suffix].shape)
    try:
        q = LAYOUTS[name].unpack(tensors, config, "layer")
    except HalfbyteError:
        return
    q.validate("layer")
    assert LAYOUTS[name].describe(tensors, config, "layer") == (q.format, q.shape)
    back = LAYOUTS[name].pack(q, config)
    assert all(back[s].tobytes() == tensors[s].tobytes() for s in LAYOUTS[name].claims(tensors))
