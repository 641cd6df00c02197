"""What each layout makes of a module, and each reader of a config, of which one thing is changed.

    python -m support.outcomes              # in tests/: write data/outcomes.txt anew
    python -m support.outcomes gptq-4       # print each change of a module and its outcome

One thing is a tensor that is absent, of another dtype, longer or shorter along one axis, or full of
one value; or a key of the config that is absent, null, of another type, or one more or less. An
outcome is what was read (format, shape, a checksum of the parts, and whether writing gives the same
tensors; of a config what it gives some modules) or the sentence of the refusal. The file has a line
for each tensor and key: how many changes were read, how many refused, and the checksum of all
outcomes. Where a line differs, print the changes of that module before and after, and see that each
new outcome is right.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte.checkpoints.quant_config import read_config
from halfbyte.errors import HalfbyteError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS, Layout
from halfbyte.numerics.bits import pack
from halfbyte.tensor.qtensor import QTensor
from support.layout_tensors import headers, integer_tensor
from support.outcome_table import OutcomeTable
from support.quant_configs import CONFIGS, MORE
from support.random_tensors import finite_tensor

Module = tuple[dict[str, np.ndarray], dict[str, Any]]

NUMPYS = ("int8", "uint8", "int16", "int32", "uint32", "int64", "float16", "float32", "float64")
DTYPES = (*map(np.dtype, NUMPYS), *(np.dtype(getattr(ml_dtypes, d)) for d in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu")))
VALUES: tuple[Any, ...] = (
    None, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 64, 128, "4", "x", 1.5, True, False, [], [1, 2], [64, 64], {},
    {"_data": "int4"},
)  # fmt: skip
WORDS = (
    "gptq", "gptq_v2", "gptq_p", "int32", "int16", "GEMM", "gemv", "marlin", "channel", "tensor", "block", "group", "token",
    "affine", "mxfp4", "mxfp8", "nvfp4", "nf4", "fp4", "int-quantized", "pack-quantized", "float", "int", "uint4", "int4",
    "float8_e4m3fn", "1d", "2d", "MappingType.SYMMETRIC",
)  # fmt: skip
"""Values of config keys, and those of keys that hold a word."""


class Watched(dict):
    """A config that notes which keys are asked for."""

    def __init__(self, config: Mapping[str, Any], asked: dict[str, None]) -> None:
        super().__init__(config)
        self.asked = asked

    def __getitem__(self, key: str) -> Any:
        self.asked[key] = None
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked[str(key)] = None
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = None
        return super().get(key, default)


def checksum(value: Any, crc: int = 0) -> int:
    """CRC-32 of arrays (dtype, shape, bytes), and of what holds them."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            crc = checksum(value[key], zlib.crc32(f"{key}:".encode(), crc))
    elif isinstance(value, (list, tuple)):
        for item in value:
            crc = checksum(item, crc)
    elif isinstance(value, (np.ndarray, np.generic)):
        crc = zlib.crc32(f"{value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes(), crc)
    else:
        crc = zlib.crc32(repr(value).encode(), crc)
    return crc


def read(layout: Layout, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> tuple[bool, str]:
    """(True, what a module is read as and written back as), or (False, why it is not)."""
    try:
        described = layout.describe(headers(dict(tensors), layout.peek), config, "m")
        q = layout.unpack(tensors, config, "m")
        zeros = layout.zero_points(tensors, config, "m")
    except HalfbyteError as error:
        return False, str(error)
    assert described == (q.format, q.shape)
    fields = {field.name: getattr(q.format, field.name) for field in dataclasses.fields(q.format)}
    text = f"{q.format} {q.shape} {checksum([fields, q.parts, zeros, q.details, q.origin]):08x}"
    try:
        written = layout.pack(q, config)
    except HalfbyteError as error:
        return True, f"{text}; not written: {error}"
    same = checksum(written) == checksum({s: tensors[s] for s in layout.claims(tensors)})
    return True, f"{text}; written {'the same' if same else f'as {checksum(written):08x}'}"


def changed_tensors(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, str, dict[str, np.ndarray]]]:
    """(tensor, change, tensors) of every change of one tensor."""
    for suffix, old in tensors.items():
        label = suffix or "weight"
        others = {s: a for s, a in tensors.items() if s != suffix}
        yield label, "absent", others

        def put(array: np.ndarray, suffix: str = suffix) -> dict[str, np.ndarray]:
            return {**tensors, suffix: array}

        for dtype in DTYPES:
            if dtype.name != old.dtype.name:
                yield label, str(dtype), put(np.zeros(old.shape, dtype))
        shapes = [()] if old.shape else [(1,), (2,)]
        for axis, size in enumerate(old.shape):
            shapes += [(*old.shape[:axis], s, *old.shape[axis + 1 :]) for s in (0, 1, size - 1, size + 1, 2 * size) if s != size]
        if old.ndim:
            shapes += [(1, *old.shape), (*old.shape, 1), old.shape[1:], old.shape[::-1], (old.size,)]
        for shape in dict.fromkeys(s for s in shapes if s != old.shape and min(s, default=0) >= 0):
            yield (
                label,
                str(list(shape)),
                put(np.resize(old, shape).astype(old.dtype) if old.size else np.zeros(shape, old.dtype)),
            )
        for byte in (0x00, 0x01, 0x7F, 0x80, 0xFF):
            yield label, f"of bytes {byte:#04x}", put(np.full(old.nbytes, byte, np.uint8).view(old.dtype).reshape(old.shape))
        if old.size > 1 and old.ndim:
            for at, where in ((0, "first"), (old.size - 1, "last")):
                for byte in (0x00, 0x80, 0xFF):
                    flat = old.copy().reshape(-1)
                    flat[at : at + 1] = np.full(old.itemsize, byte, np.uint8).view(old.dtype)
                    yield label, f"whose {where} is {byte:#04x}", put(flat.reshape(old.shape))


def near(value: Any) -> tuple[Any, ...]:
    """Values beside one."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, (int, float)):
        return value + 1, value - 1, 2 * value, value // 2
    if isinstance(value, str):
        return (*WORDS, value.upper(), f"{value}_")
    if isinstance(value, list):
        return value[1:], [*value, 1], value[::-1]
    return ()


def changed_config(config: Mapping[str, Any], keys: Mapping[str, None]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(key, change, config) of every change of one key, nested ones too, and of keys that are asked
    for and not there.
    """
    for key in keys:
        if key not in config:
            for value in (*VALUES, *WORDS):
                yield key, json.dumps(value), {**deepcopy(dict(config)), key: value}

    def places(inner: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        for key, value in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield (*path, key)
            if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
                yield from places(value, (*path, key))

    for path in list(places(config)):
        for value in (..., *VALUES, *near(_at(config, path))):
            changed = deepcopy(dict(config))
            inner = _at(changed, path[:-1])
            if value is ...:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield ".".join(map(str, path)), "absent" if value is ... else json.dumps(value), changed


def _at(config: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


Outcomes = Iterator[tuple[str, str, bool, str]]


def outcomes(label: str) -> Outcomes:
    """(subject, change, whether it was read, outcome) of each change of a module."""
    layout, (tensors, config) = module_of(label)
    asked: dict[str, None] = {}
    yield "nothing", "", *read(layout, tensors, Watched(config, asked))
    for subject, change, some in changed_tensors(tensors):
        yield subject, change, *read(layout, some, config)
    for suffix in (s for s in (*layout.required, *layout.optional) if s not in tensors):
        for like, array in tensors.items():
            yield suffix, f"as {like or 'weight'}", *read(layout, {**tensors, suffix: array}, config)
        for dtype in ("float32", "float16", "uint8", "int32"):
            for shape in ((), (1,)):
                yield suffix, f"{dtype} {list(shape)}", *read(layout, {**tensors, suffix: np.ones(shape, dtype)}, config)
    for subject, change, some in changed_config(config, asked):
        yield subject, change, *read(layout, tensors, some)


NAMES = (
    "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.gate",
    "model.layers.3.mlp.experts.0.w1", "model.embed_tokens", "lm_head", "",
)  # fmt: skip
"""Modules that configs are asked about."""


def given(raw: dict[str, Any]) -> tuple[bool, str]:
    """(True, what a quantization config gives `NAMES`, and what its keys are to its reader), or
    (False, why it is refused).
    """
    try:
        reader = read_config(raw, "config.json")
        parameters = {name: reader.parameters(name) for name in NAMES}
        transforms = {name: reader.transforms(name) for name in NAMES}
        more = [reader.order(LAYOUTS), reader.common(), reader.transform_groups, reader.key_uses(), transforms]
    except HalfbyteError as error:
        return False, str(error)
    return True, f"{reader.method} {parameters} {checksum(more):08x}"


def config_outcomes(label: str) -> Outcomes:
    """As `outcomes`, of a quantization config."""
    config = MORE[label] if label in MORE else CONFIGS[label][0]
    yield "nothing", "", *given(config)
    for subject, change, some in changed_config(config, {}):
        yield subject, change, *given(some)


def outcomes_of(label: str) -> Outcomes:
    """As `outcomes`, of a module or a config."""
    return outcomes(label) if label in MODULES else config_outcomes(label)


def _drawn(name: str, shape: tuple[int, ...] = (64, 64), group: int | None = None, **options: Any) -> QTensor:
    return finite_tensor(format_named(name, group, **options), shape, 1)


def _integers(bits: int, shape: tuple[int, ...] = (64, 64), group: int = 32, **options: Any) -> QTensor:
    return integer_tensor(bits, shape, group, 1, **options)


def _sparse(bits: int, group: int = 128) -> QTensor:
    """Two values that are not 0 in each four inputs."""
    codes = (np.arange(64 * 256).reshape(64, 256) * 7 % ((1 << bits) - 1)).astype(np.uint8)
    codes += codes >= 1 << (bits - 1)
    pair = np.array([(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])[np.arange(64 * 64).reshape(64, 64) * 5 % 6]
    kept = (np.arange(4) == pair[..., :1]) | (np.arange(4) == pair[..., 1:])
    codes = np.where(kept.reshape(64, 256), codes, 1 << (bits - 1)).astype(np.uint8)
    q = finite_tensor(format_named(f"int{bits}", group), (64, 256), 1)
    return QTensor(q.format, q.shape, {**q.parts, "codes": pack(codes, bits)})


def _one_factor(q: QTensor) -> QTensor:
    return QTensor(q.format, q.shape, {**q.parts, "global_scale": np.full(q.shape[0], 0.5, np.float32)})


def _trellis() -> QTensor:
    rng = np.random.default_rng(0)
    scales = [rng.standard_normal(128).astype(np.float16) for _ in range(2)]
    trellis = rng.integers(-(1 << 15), 1 << 15, (8, 8, 64)).astype(np.int16)
    tensors = {"trellis": trellis, "suh": scales[0], "svh": scales[1], "mcg": np.array(-877912083, np.int32)}
    return LAYOUTS["exl3"].unpack(tensors, {"codebook": "mcg"}, "m")


ANY = {"zeros": (1, 3)}
STACK = (3, 32, 64)
MODULES: dict[str, tuple[str, QTensor, dict[str, Any]]] = {
    "gptq-4": ("gptq", _integers(4, **ANY), {}),
    "gptq-2-v2": ("gptq", _integers(2, **ANY), {"checkpoint_format": "gptq_v2"}),
    "gptq-3-planar": ("gptq", _integers(3, **ANY), {"checkpoint_format": "gptq_p"}),
    "gptq-6-planar": ("gptq", _integers(6, **ANY), {}),
    "gptq-8-act-order": ("gptq", _integers(8, act_order=True, **ANY), {"meta": {"quantizer": ["gptqmodel:4.0"]}}),
    "gptq-3-ragged": ("gptq", _integers(3, (40, 48), -1, **ANY), {"pack_dtype": "int32"}),
    "awq-gemm-4": ("awq-gemm", _integers(4, **ANY), {}),
    "awq-gemm-8-row": ("awq-gemm", _integers(8, group=-1, **ANY), {}),
    "awq-gemv": ("awq-gemv", _integers(4, **ANY), {}),
    "awq-gemv-ragged": ("awq-gemv", _integers(4, (40, 96), 64, **ANY), {}),
    "awq-gemv_fast": ("awq-gemv_fast", _integers(4, **ANY), {}),
    "awq-marlin": ("awq-marlin", _integers(4), {}),
    "ct-int4-asymmetric": ("compressed-tensors", _integers(4, **ANY), {}),
    "ct-int8-channel": ("compressed-tensors", _integers(8, group=-1), {}),
    "ct-int4-act-order": ("compressed-tensors", _integers(4, act_order=True), {}),
    "ct-int3-ragged": ("compressed-tensors", _integers(3, (40, 96), 32), {}),
    "ct-nvfp4": ("compressed-tensors", _drawn("nvfp4", global_scale="divide"), {}),
    "ct-mxfp4": ("compressed-tensors", _drawn("mxfp4"), {}),
    "ct-fp8-channel": ("compressed-tensors", _drawn("fp8_e4m3", group=-1), {}),
    "ct-fp8-tensor": ("compressed-tensors", _drawn("fp8_e4m3", group=-1, rows=-1), {}),
    "ct-fp8-block": ("compressed-tensors", _drawn("fp8_e4m3", group=32, rows=32), {}),
    "ct-marlin-24": ("compressed-tensors-marlin-24", _sparse(4), {}),
    "ct-marlin-24-8": ("compressed-tensors-marlin-24", _sparse(8, -1), {}),
    "ct-stack": ("compressed-tensors-stack", _drawn("int4", STACK, 32), {}),
    "modelopt-stack": ("modelopt-stack", _one_factor(_drawn("nvfp4", STACK)), {}),
    "exl3": ("exl3", _trellis(), {"codebook": "mcg"}),
    "metal-marlin": ("metal-marlin", _integers(4, **ANY), {}),
    "metal-marlin-fp4": ("metal-marlin", _drawn("fp4", group=32, scale_dtype="float16"), {}),
    "fp8-block": ("fp8", _drawn("fp8_e4m3", group=32, rows=32, scale_dtype="float32"), {}),
    "fp8-ragged": ("fp8", _drawn("fp8_e4m3", (40, 72), 32, rows=32, scale_dtype="float32"), {}),
    "fp8-row": ("fp8", _drawn("fp8_e4m3", group=-1, scale_dtype="bfloat16"), {}),
    "fp8-mxfp4": ("fp8", _drawn("mxfp4"), {}),
    "fp8-int4": ("fp8", _drawn("int4", group=32, scale_dtype="float32"), {}),
    "mlx-affine4": ("mlx", _drawn("affine4", group=32), {}),
    "mlx-affine3-stack": ("mlx", _drawn("affine3", STACK, 64), {}),
    "mlx-mxfp4": ("mlx", _drawn("mxfp4"), {}),
    "mlx-nvfp4": ("mlx", _drawn("nvfp4", global_scale="amax"), {}),
    "gpt-oss-stack": ("gpt-oss", _drawn("mxfp4", STACK), {}),
    "vllm-experts": ("vllm-experts", _drawn("mxfp4", STACK), {}),
    "modelopt-nvfp4": ("modelopt", _drawn("nvfp4"), {}),
    "modelopt-nvfp4-stack": ("modelopt", _drawn("nvfp4", STACK), {}),
    "modelopt-mxfp4": ("modelopt", _drawn("mxfp4"), {}),
    "modelopt-mxfp8": ("modelopt", _drawn("mxfp8_e4m3"), {}),
    "modelopt-int4": ("modelopt", _drawn("int4", group=32, scale_dtype="bfloat16"), {}),
    "modelopt-int4-qtensor": ("modelopt", _drawn("int4", group=32, scale_dtype="bfloat16", inverse=True), {}),
    "modelopt-fp8": ("modelopt", _drawn("fp8_e4m3", rows=-1), {}),
    "modelopt-fp8-row": ("modelopt", _drawn("fp8_e4m3", group=-1, scale_dtype="float32"), {}),
    "modelopt-int8": ("modelopt", _drawn("int8", group=-1, scale_dtype="float32"), {}),
    "bitsandbytes-nf4": ("bitsandbytes", _drawn("nf4", group=64), {}),
    "bitsandbytes-nested": ("bitsandbytes", _drawn("bnb_fp4", group=64, nested=True), {}),
    "bitsandbytes-int8": ("bitsandbytes", _drawn("bnb_int8"), {}),
    "hqq-4": ("hqq", _drawn("hqq4", group=64), {}),
    "hqq-3-strided": ("hqq", _drawn("hqq3", group=64, axis=0), {}),
    "hqq-2": ("hqq", _drawn("hqq2", (40, 64), 16), {}),
    "hqq-1": ("hqq", _drawn("hqq1", group=64), {}),
    "hqq-8": ("hqq", _drawn("hqq8", group=64), {}),
    "onnx-uint4": ("onnx", _integers(4, **ANY), {}),
    "onnx-int8": ("onnx", _drawn("int8", group=32), {}),
    "onnx-ragged": ("onnx", _integers(2, (24, 72), 32, **ANY), {}),
    "quark-mxfp4": ("quark", _drawn("mxfp4"), {}),
    "quark-fp8": ("quark", _drawn("fp8_e4m3", group=-1, scale_dtype="float32"), {}),
    "quark-uint4": ("quark", _integers(4, scale_dtype="float32", **ANY), {}),
    "quark-int8": ("quark", _integers(8, group=-1, scale_dtype="float32"), {}),
    "torchao-mx": ("torchao", _drawn("mxfp6_e2m3"), {}),
    "torchao-nvfp4": ("torchao", _drawn("nvfp4"), {}),
    "torchao-intx": ("torchao", _integers(4, **ANY), {}),
    "torchao-int8": ("torchao", _integers(8, group=-1), {}),
    "torchao-float8": ("torchao", _drawn("fp8_e4m3", group=32), {}),
    "torchao-float8-row": ("torchao", _drawn("fp8_e4m3", group=-1), {}),
    "halfbyte": ("halfbyte", _integers(4, **ANY), {}),
    "halfbyte-nvfp4-stack": ("halfbyte", _drawn("nvfp4", STACK), {}),
    "gguf-q4_0": ("gguf", _drawn("q4_0"), {}),
    "gguf-q5_1": ("gguf", _drawn("q5_1"), {}),
    "gguf-q4_K": ("gguf", _drawn("q4_K", (4, 512)), {}),
    "gguf-q6_K": ("gguf", _drawn("q6_K", (4, 512)), {}),
    "gguf-mxfp4-stack": ("gguf", _drawn("mxfp4", STACK), {}),
}
"""label -> (layout, weight, what its config has besides)."""


LABELS = (*MODULES, *CONFIGS, *MORE)


def module_of(label: str) -> tuple[Layout, Module]:
    """The layout, tensors and config of a label."""
    name, weight, more = MODULES[label]
    layout = LAYOUTS[name]
    config = {**layout.config(weight), **more}
    return layout, (layout.pack(weight, config), config)


TABLE = OutcomeTable("outcomes", LABELS, outcomes_of)

if __name__ == "__main__":
    TABLE.main()
