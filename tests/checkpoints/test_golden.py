"""Every checkpoint that a producer wrote opens by itself and decodes to that producer's own values."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors

import halfbyte as hb
from halfbyte.checkpoints import CheckpointWarning
from halfbyte.checkpoints.safetensors.file import SafetensorsFile

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "MANIFEST.json").read_text())["cases"]
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "none": "float32"}
FORMAT = {
    "autogptq": "gptq",
    "gptqmodel": "gptq",
    "autoawq": "awq",
    "llm-awq": "awq",
    "compressed-tensors-old": "compressed-tensors",
    "onnxruntime": "onnx",
    "transformers-mxfp4": "gpt-oss",
}
"""Producer's folder -> `Checkpoint.format` where they differ."""
LAYOUT = {
    "awq-gemm": "awq-gemm",
    "awq-gemv": "awq-gemv",
    "awq-gemv_fast": "awq-gemv_fast",
    "awq-marlin": "awq-marlin",
    "onnx-matmulnbits": "onnx",
    "gpt-oss-mxfp4": "gpt-oss",
}
"""Format of a case in the manifest -> layout, where it is not the checkpoint's format."""
MISSING_CONFIG = {
    "bitsandbytes/nf4_codes": {"quant_method": "bitsandbytes", "quant_type": "nf4", "blocksize": 64, "shape": [8, 64]},
    "bitsandbytes/fp4_codes": {"quant_method": "bitsandbytes", "quant_type": "fp4", "blocksize": 64, "shape": [8, 64]},
    "modelopt/nf4_bf16": {"quant_method": "modelopt", "quant_algo": "NF4", "group_size": 64},
    "torchao/fp6e2m3_decode_all_codes": {"quant_method": "torchao", "elem_dtype": "fp6_e2m3"},
    "torchao/mx_fp6e2m3_floor_bf16": {"quant_method": "torchao", "elem_dtype": "fp6_e2m3"},
    "torchao/mx_fp6e3m2_rceil_f32": {"quant_method": "torchao", "elem_dtype": "fp6_e3m2"},
    "torchao/affine_uint4_g32_bf16": {"quant_method": "torchao", "bits": 4},
    "torchao/intx_b4_g32_symmetric_bf16": {"quant_method": "torchao", "target_dtype": "int4"},
    "torchao/intx_b4_g64_asymmetric_f32": {"quant_method": "torchao", "target_dtype": "int4"},
}  # fmt: skip
"""Cases whose file lacks what decoding needs: the configuration a user would pass."""
NOT_WEIGHTS = ("gguf", "microxcaling", "ml_dtypes")
"""Folders whose safetensors are blocks or tables, not modules of a checkpoint."""


def single_files() -> list[str]:
    return [
        c["file"]
        for c in CASES
        if c["file"].endswith(".safetensors") and c["producer"] not in NOT_WEIGHTS and "/ckpt_" not in c["file"]
    ]


def folders() -> list[str]:
    return sorted({str(Path(c["file"]).parent) for c in CASES if "/ckpt_" in c["file"]})


def config_of(file: str, metadata: dict[str, str]) -> dict | None:
    name = file.removesuffix(".safetensors")
    if name in MISSING_CONFIG:
        config = dict(MISSING_CONFIG[name])
        if name.startswith(("bitsandbytes", "modelopt")):
            config["shape"] = list(np.shape(SafetensorsFile(GOLDEN / file).array("ref::model.layers.0.mlp.down_proj.weight")))
        return config
    return json.loads(metadata["node_attributes"]) if "node_attributes" in metadata else None


def open_golden(file: str) -> hb.Checkpoint:
    with safetensors.safe_open(GOLDEN / file, "numpy") as f:
        metadata = f.metadata()
    config = config_of(file, metadata)
    assert (
        config is not None
        or "quantization_config" in metadata
        or not file.startswith(("autogptq", "gptqmodel", "autoawq", "mlx", "hqq"))
    )
    return hb.open(GOLDEN / file, config=config)


def same_values(got: np.ndarray, want: np.ndarray) -> bool:
    got, want = got.astype(np.float32), want.astype(np.float32)
    return got.shape == want.shape and bool(((got == want) | (np.isnan(got) & np.isnan(want))).all())


def test_the_comparison_notices_a_wrong_value():
    a = np.array([1.0, np.nan], np.float32)
    assert same_values(a, a.copy())
    assert not same_values(a, np.array([1.0, 0.0], np.float32))
    assert not same_values(a, np.array([np.nan, np.nan], np.float32))
    assert not same_values(a, a[:1])


@pytest.mark.parametrize("file", single_files())
@pytest.mark.filterwarnings(f"ignore::{CheckpointWarning.__module__}.{CheckpointWarning.__name__}")
def test_single_file_opens_and_decodes_to_the_producers_values(file: str):
    case = next(c for c in CASES if c["file"] == file)
    checkpoint = open_golden(file)
    producer = file.split("/", 1)[0]
    assert checkpoint.format == FORMAT.get(producer, producer)
    packed = [k for k in checkpoint if checkpoint.info(k).quantized]
    assert len(packed) == 1, packed
    (key,) = packed
    info, q = checkpoint.info(key), checkpoint[key]
    assert isinstance(q, hb.QTensor)
    assert info.layout == LAYOUT.get(case["format"], checkpoint.format)
    assert (info.format, info.shape) == (q.format, q.shape)
    if case["bits"] is not None:
        assert q.format.bits == case["bits"]
    assert info.nbytes == sum(
        int(np.prod(t["shape"]))
        * np.dtype(
            t["dtype"].replace("bfloat16", "int16").replace("float8_e4m3fn", "int8").replace("float8_e5m2", "int8")
        ).itemsize
        for name, t in case["tensors"].items()
        if name.startswith(key) and name != f"{key}.bias"
    )
    refs = SafetensorsFile(GOLDEN / file)
    name = next((n for n in (f"ref::{key}.weight", f"ref::{key}") if n in refs.entries), None)
    if name is None:
        assert case["ref_dtype"] == "none"  # the producer has no decoder: the layout's own test checks the bytes
        return
    dtype = checkpoint.metadata["ref_dtype"]
    got, want = q.dequantize(DTYPES.get(dtype, dtype), arithmetic="producer"), refs.array(name)
    if (producer in ("transformers-mxfp4", "onnxruntime") and got.shape != want.shape) or producer == "transformers-mxfp4":
        want = np.swapaxes(want, -1, -2)  # both hand out the transpose
    assert same_values(got, want)


@pytest.mark.parametrize("name", folders())
@pytest.mark.filterwarnings(f"ignore::{CheckpointWarning.__module__}.{CheckpointWarning.__name__}")
def test_checkpoint_folder_opens_and_decodes_to_the_producers_values(name: str):
    checkpoint = hb.open(GOLDEN / name)
    assert checkpoint.format == name.split("/")[0]
    refs = SafetensorsFile(GOLDEN / name / "reference.safetensors")
    seen = set()
    for key in checkpoint:
        info = checkpoint.info(key)
        ref = f"ref::{key}.weight" if info.quantized else f"ref::{key}"
        if ref not in refs.entries:
            assert key.endswith("input_scale")  # an activation's
            continue
        seen.add(ref)
        value = checkpoint[key]
        got = value.dequantize("bfloat16", arithmetic="producer") if isinstance(value, hb.QTensor) else value
        assert same_values(got, refs.array(ref)), key
    assert seen == set(refs.entries)
    packed = {k.rpartition(".")[2] for k in checkpoint if checkpoint.info(k).quantized}
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} <= packed
    assert ("lm_head" in packed) == name.startswith("mlx")


@pytest.mark.parametrize("file", [c["file"] for c in CASES if c["file"].endswith(".gguf")])
def test_gguf_has_the_tensors_of_the_manifest_with_ggufs_own_values(file: str):
    gguf = pytest.importorskip("gguf")
    (case,) = (c for c in CASES if c["file"] == file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        checkpoint = hb.open(GOLDEN / file)
    assert checkpoint.format == "gguf"
    stored = {t.name: t for t in gguf.GGUFReader(GOLDEN / file).tensors}
    names = {key if key.endswith(".weight") else f"{key}.weight": key for key in checkpoint}
    assert set(names) == set(case["tensors"]) == set(stored)
    for name, key in names.items():
        info, described = checkpoint.info(key), case["tensors"][name]
        assert info.shape == tuple(described["shape"]), name
        want = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type).reshape(info.shape)
        value = checkpoint[key]
        if isinstance(value, hb.QTensor):
            assert info.dtype == described["type"], name
            np.testing.assert_array_equal(value.dequantize("float32", arithmetic="producer"), want, err_msg=name)
        else:
            np.testing.assert_array_equal(value.astype(np.float32), want, err_msg=name)


def test_without_a_config_the_complaint_is_that_of_the_layout_most_tensors_belong_to():
    (finding,) = (f for f in hb.open(GOLDEN / "modelopt/nf4_bf16.safetensors").findings() if f.severity == "error")
    assert "[modelopt] model.layers.0.mlp.down_proj.weight is flat" in finding.message
