"""Tensors and configs that do not fit together: read to the byte, or refused with the library's own
error. Both are counted.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.spec import Format
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_tensors
from support.layout_tensors import integer_tensor
from support.random_tensors import finite_tensor

UINT4 = format_named("uint4", 32)
CASES: dict[str, tuple[str, Format]] = {
    **{name: (name, UINT4) for name in ("gptq", "awq-gemm", "awq-gemv", "awq-gemv_fast", "compressed-tensors", "metal-marlin")},
    "awq-marlin": ("awq-marlin", format_named("int4", 32)),
    "compressed-tensors nvfp4": ("compressed-tensors", format_named("nvfp4", global_scale="divide")),
    "compressed-tensors fp8": ("compressed-tensors", format_named("fp8_e4m3", -1)),
    "fp8": ("fp8", format_named("fp8_e4m3", 32, rows=32, scale_dtype="float32")),
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
    "onnx": ("onnx", UINT4),
    "onnx default": ("onnx", format_named("int8", 32)),
    "quark mxfp4": ("quark", format_named("mxfp4")),
    "quark fp8": ("quark", format_named("fp8_e4m3", -1, scale_dtype="float32")),
    "fp8 fp4": ("fp8", format_named("mxfp4")),
    "torchao mx": ("torchao", format_named("mxfp6_e2m3")),
    "torchao nvfp4": ("torchao", format_named("nvfp4")),
    "torchao intx": ("torchao", UINT4),
    "torchao float8": ("torchao", format_named("fp8_e4m3", 32)),
    "halfbyte": ("halfbyte", UINT4),
    "exl3": ("exl3", UINT4),
}
"""label -> (layout, format of the weight that is damaged; EXL3's has no codec of its own)."""
DTYPES = (
    np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu,
)  # fmt: skip
KEYS = (
    "bits", "group_size", "w_bit", "q_group_size", "checkpoint_format", "meta", "num_bits", "strategy", "block_structure",
    "codec", "format", "weights", "config_groups", "mode", "quant_algo", "shape", "nbits", "axis", "packing", "K", "N",
    "block_size", "elem_dtype", "target_dtype", "_type", "quant_type", "blocksize", "origin", "details", "window",
    "weight_block_size",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, *range(-2, 9), 16, 32, 64, 128, 200, "128", 1.5, True, [], [1, 2], [0, -1], ["a", 3], {}, {"_data": "int4"}, "group",
    "channel", "tensor", "block", "affine", "mxfp8", "NVFP4", "nf4",
)  # fmt: skip
SIZES = (0, 1, 2, 3, 8, 16, 63, 64, 128)
TRIALS = 150
STACKS = ("modelopt-stack", "compressed-tensors-stack", "vllm-experts")


def valid(label: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A module in this layout and its config."""
    name, fmt = CASES[label]
    if name == "exl3":
        rng = np.random.default_rng(0)
        scales = [rng.standard_normal(128).astype(np.float16) for _ in range(2)]
        trellis = rng.integers(-(1 << 15), 1 << 15, (8, 8, 64)).astype(np.int16)
        return {"trellis": trellis, "suh": scales[0], "svh": scales[1], "mcg": np.array(-877912083, np.int32)}, {
            "codebook": "mcg"
        }
    q = integer_tensor(4, (64, 64), 32, zeros=(1, 15)) if fmt == UINT4 else finite_tensor(fmt, (64, 64), 0)
    if fmt.inverse and fmt.scale == "nested":
        nested = {"nested_map": np.arange(-128, 128, dtype=np.float32), "nested_absmax": np.full(1, 147, np.float32)}
        q = QTensor(q.format, q.shape, {**q.parts, **nested, "nested_offset": np.array(0.5, np.float32)})
    config = LAYOUTS[name].config(q)
    return LAYOUTS[name].pack(q, config), config


def damaged(label: str, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A valid module with one to three things changed."""
    layout = LAYOUTS[CASES[label][0]]
    tensors, config = valid(label)

    def pick(options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    for _ in range(int(rng.integers(1, 4))):
        kind = pick(("shape", "dtype", "drop", "add", "config", "values"))
        if kind == "config":
            config[pick(KEYS)] = pick(VALUES)
            continue
        if kind == "add":
            tensors[pick((*layout.required, *layout.optional))] = np.zeros(
                pick([(), (1,), (64,), (64, 2), (64, 64)]), pick(DTYPES)
            )
            continue
        if not tensors:
            break
        suffix = pick(sorted(tensors))
        old = tensors[suffix]
        if kind == "drop":
            del tensors[suffix]
        elif kind == "dtype":
            tensors[suffix] = np.zeros(old.shape, pick(DTYPES))
        elif kind == "shape":
            tensors[suffix] = np.zeros([pick(SIZES) for _ in range(int(rng.integers(5)))], old.dtype)
        else:
            flat = old.copy().reshape(-1).view(np.uint8)
            flat[:] = int(rng.integers(256))
            tensors[suffix] = flat.view(old.dtype).reshape(old.shape)
    return tensors, config


@pytest.mark.parametrize("label", CASES)
def test_what_does_not_fit_is_refused_and_what_fits_is_read_to_the_byte(label: str) -> None:
    layout = LAYOUTS[CASES[label][0]]
    accepted = refused = 0
    messages: list[str] = []
    for trial in range(TRIALS):
        tensors, config = damaged(label, np.random.default_rng([trial, len(label)]))
        try:
            q = layout.unpack(tensors, config, "layer")
        except HalfbyteError as error:
            refused += 1
            messages.append(str(error))
            continue
        accepted += 1
        q.validate("layer")
        assert layout.describe(tensors, config, "layer") == (q.format, q.shape), trial
        claimed = {s: tensors[s] for s in layout.claims(tensors)}
        assert same_tensors(layout.pack(q, config), claimed), trial
    assert [m for m in messages if "layer" not in m and f"[{layout.name}]" not in m] == []
    # A config key that means nothing here, or other bytes in place of codes, are fine: some must be
    # read, and most are not. Offsets of gemv_fast are whole numbers of its scales: other bytes in
    # place of either are refused, too.
    assert accepted >= TRIALS // (20 if layout.name == "awq-gemv_fast" else 10), (accepted, refused)
    assert refused >= TRIALS // 4, (accepted, refused)


def test_the_cases_are_all_the_layouts_of_single_modules() -> None:
    """GGUF's blocks and stacks of experts have tests of their own (test_gguf.py,
    test_modelopt_stacked_experts.py, test_published.py), and so has marlin-24, whose weights are
    2:4 (test_compressed_tensors_sparse.py).
    """
    assert {name for name, _ in CASES.values()} == set(LAYOUTS) - {"gguf", "compressed-tensors-marlin-24", *STACKS}


def test_an_undamaged_module_is_read() -> None:
    for label, (name, _) in CASES.items():
        tensors, config = valid(label)
        assert same_tensors(LAYOUTS[name].pack(LAYOUTS[name].unpack(tensors, config), config), tensors), label
