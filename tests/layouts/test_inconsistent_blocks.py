"""Lies told to the layouts of block, table and float-zero formats: kept to the byte, or refused with the library's own error."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_tensors
from support.random_tensors import finite_tensor

FORMATS = {
    "mlx affine": ("mlx", format_named("affine4", 32)),
    "mlx mxfp4": ("mlx", format_named("mxfp4")),
    "mlx nvfp4": ("mlx", format_named("nvfp4", global_scale="amax")),
    "gpt-oss": ("gpt-oss", format_named("mxfp4")),
    "modelopt nvfp4": ("modelopt", format_named("nvfp4")),
    "modelopt mxfp8": ("modelopt", format_named("mxfp8_e4m3")),
    "modelopt int4": ("modelopt", format_named("int4", 32, scale_dtype="bfloat16")),
    "modelopt INT4QTensor": ("modelopt", format_named("int4", 32, scale_dtype="bfloat16", inverse=True)),
    "modelopt NF4QTensor": ("modelopt", format_named("nf4_modelopt", 64, nested=True)),
    "modelopt fp8": ("modelopt", format_named("fp8_e4m3", rows=-1)),
    "modelopt int8": ("modelopt", format_named("int8", -1, scale_dtype="float32")),
    "bitsandbytes nf4": ("bitsandbytes", format_named("nf4", 64)),
    "bitsandbytes nested": ("bitsandbytes", format_named("bnb_fp4", 64, nested=True)),
    "bitsandbytes int8": ("bitsandbytes", format_named("bnb_int8")),
    "hqq": ("hqq", format_named("hqq4", 64)),
    "hqq 3 bit": ("hqq", format_named("hqq3", 64, axis=0)),
    "onnx": ("onnx", format_named("uint4", 32)),
    "onnx default": ("onnx", format_named("int8", 32)),
    "torchao mx": ("torchao", format_named("mxfp6_e2m3")),
    "torchao nvfp4": ("torchao", format_named("nvfp4")),
    "torchao intx": ("torchao", format_named("uint4", 32)),
    "torchao float8": ("torchao", format_named("fp8_e4m3", 32)),
    "halfbyte": ("halfbyte", format_named("uint4", 32)),
}
KEYS = (
    "bits", "group_size", "mode", "quant_algo", "shape", "nbits", "axis", "packing", "K", "N", "block_size", "elem_dtype",
    "target_dtype", "_type", "quant_type", "blocksize", "format", "origin", "details", "window",
)  # fmt: skip
VALUES = st.one_of(
    st.none(),
    st.integers(-2, 200),
    st.sampled_from(["128", 1.5, True, [], [1, 2], [0, -1], ["a", 3], {}, {"_data": "int4"}, "affine", "mxfp8", "NVFP4", "nf4"]),
)
DTYPES = (
    np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu,
)  # fmt: skip


def valid(label: str) -> tuple[dict[str, np.ndarray], dict]:
    """A module in this layout and its config."""
    name, fmt = FORMATS[label]
    q = finite_tensor(fmt, (64, 64), 0)
    if fmt.inverse and fmt.scale == "nested":
        nested = {"nested_map": np.arange(-128, 128, dtype=np.float32), "nested_absmax": np.full(1, 147, np.float32)}
        q = QTensor(q.format, q.shape, {**q.parts, **nested, "nested_offset": np.array(0.5, np.float32)})
    config = LAYOUTS[name].config(q)
    return LAYOUTS[name].pack(q, config), config


@pytest.mark.parametrize("label", FORMATS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_lie_is_an_error_of_ours_or_harmless(label: str, data: st.DataObject) -> None:
    layout = LAYOUTS[FORMATS[label][0]]
    tensors, config = valid(label)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["shape", "dtype", "drop", "add", "config", "values"]))
        if kind == "config":
            config[data.draw(st.sampled_from(KEYS))] = data.draw(VALUES)
            continue
        if kind == "add":
            suffix = data.draw(st.sampled_from((*layout.required, *layout.optional)))
            shape = data.draw(st.sampled_from([(), (1,), (64,), (64, 2), (64, 64)]))
            tensors[suffix] = np.zeros(shape, data.draw(st.sampled_from(DTYPES)))
            continue
        suffix = data.draw(st.sampled_from(sorted(tensors)))
        if kind == "drop":
            del tensors[suffix]
            if not tensors:
                break
        elif kind == "dtype":
            tensors[suffix] = np.zeros(tensors[suffix].shape, data.draw(st.sampled_from(DTYPES)))
        elif kind == "shape":
            shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 63, 64, 128]), max_size=4))
            tensors[suffix] = np.zeros(shape, tensors[suffix].dtype)
        else:
            flat = tensors[suffix].copy().reshape(-1).view(np.uint8)
            flat[:] = data.draw(st.integers(0, 255))
            tensors[suffix] = flat.view(tensors[suffix].dtype).reshape(tensors[suffix].shape)
    try:
        q = layout.unpack(tensors, config, "layer")
    except HalfbyteError:
        return
    q.validate("layer")
    assert layout.describe(tensors, config, "layer") == (q.format, q.shape)
    claimed = {s: tensors[s] for s in layout.claims(tensors)}
    assert same_tensors(layout.pack(q, config), claimed)
