"""What looks wrong in a checkpoint is found, and nothing else is: each finding by a file that has
it and one that has not.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.checkpoints import CheckpointWarning, Finding
from halfbyte.checkpoints.findings import SEVERITIES
from halfbyte.checkpoints.findings.overflow import FLOAT16_LIMIT, largest_magnitude, may_overflow_float16, peak
from halfbyte.checkpoints.findings.weights import CHECKS
from halfbyte.formats import Format, codec_names, format_named
from support.random_tensors import random_tensor
from support.safetensors_bytes import folder, gptq_weight, mlx_weight, under, write

KEY = "model.layers.0.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def codes(checkpoint: hb.Checkpoint, data: bool = True) -> dict[str, str]:
    """code -> severity of everything found."""
    return {f.code: f.severity for f in checkpoint.findings(data=data)}


def gptq_file(path: Path, config: dict, **weight: int) -> hb.Checkpoint:
    return hb.open(folder(path, {"model.safetensors": under(KEY, gptq_weight(**weight))}, {"quantization_config": GPTQ | config}))


@pytest.mark.parametrize(
    ("label", "stored", "suspect"),
    [
        ("gptq", 7, False),
        ("gptq", 8, True),
        ("gptq_v2", 8, False),
        ("gptq_v2", 7, True),
        ("gptq", 5, False),
        ("gptq_v2", 5, False),
    ],
)
def test_a_label_that_contradicts_symmetric_zero_points_is_suspect(label: str, stored: int, suspect: bool, tmp_path: Path):
    """Version 1 stores the zero point minus 1: a symmetric weight has 7 in its nibbles under v1 and
    8 under v2.
    """
    found = codes(gptq_file(tmp_path, {"checkpoint_format": label, "sym": True}, stored_zero=stored))
    assert found.get("gptq-label") == ("warning" if suspect else None)
    assert found["equal-zeros"] == "note"
    assert "v1-zero-wraps" not in found


@pytest.mark.parametrize(
    ("writer", "reads", "says"),
    [
        ("autogptq", 16, "32 of 32 stored zero points are 15: what v1 makes of 0"),
        ("gptqmodel:7.7.0", 0, "4 of 32 zero points are 0, which v1 stores as 15"),
    ],
)
def test_case_02_a_v1_word_that_holds_15_is_flagged(writer: str, reads: int, says: str, tmp_path: Path):
    checkpoint = gptq_file(tmp_path, {"checkpoint_format": "gptq", "meta": {"quantizer": [writer]}}, stored_zero=15)
    (finding,) = [f for f in checkpoint.findings(data=True) if f.code == "v1-zero-wraps"]
    assert finding.severity == "warning"
    assert finding.message.startswith(says)
    assert int(checkpoint[KEY].parts["zeros"][0, 0]) == reads
    assert finding.key == KEY


@pytest.mark.parametrize("writer", ["autogptq", "gptqmodel:7.7.0"])
@pytest.mark.parametrize("stored", [0, 14])
def test_case_02_the_least_and_the_largest_zero_point_of_v1_are_ordinary(writer: str, stored: int, tmp_path: Path):
    checkpoint = gptq_file(tmp_path, {"checkpoint_format": "gptq", "meta": {"quantizer": [writer]}}, stored_zero=stored)
    assert "v1-zero-wraps" not in codes(checkpoint)


@pytest.mark.parametrize(
    ("file", "wraps"),
    [("autogptq/b4_g32_asym_zero_points", True), ("gptqmodel/v1_b4_g32_asym_zero_points", True),
     ("gptqmodel/v2_b4_g32_asym_zero_points", False),
     ("autogptq/b4_g128_sym", False), ("autogptq/b2_g64_asym", True)],
)  # fmt: skip
def test_case_02_producers_files_with_damaged_zero_points(file: str, wraps: bool, golden: Path):
    checkpoint = hb.open(golden / f"{file}.safetensors")
    assert ("v1-zero-wraps" in codes(checkpoint)) == wraps
    assert "gptq-label" not in codes(checkpoint)


@pytest.mark.parametrize(
    ("file", "bad"),
    [("compressed-tensors/mxfp4_decode_all_scales", True), ("mlx/nvfp4_decode_all_scales", True),
     ("modelopt/nvfp4_decode_all_scales", True),
     ("compressed-tensors/mxfp4_bf16_real", False), ("mlx/nvfp4_bf16", False), ("mlx/mxfp4_bf16", False)],
)  # fmt: skip
def test_case_06_scale_bytes_that_are_nan_are_errors(file: str, bad: bool, golden: Path):
    found = codes(hb.open(golden / f"{file}.safetensors"))
    assert found.get("nan-scale") == ("error" if bad else None)


@pytest.mark.parametrize(("scale", "dtype"), [("e8m0", "float8_e8m0fnu"), ("e4m3", "float8_e4m3fn"), ("ue4m3", "float8_e4m3fn")])
def test_case_06_scale_bytes_that_are_nan_are_those_of_their_type(scale: str, dtype: str):
    """Each of the 256 bytes in turn, beside others that are numbers."""
    word = next(name for name in codec_names() if format_named(name).scale == scale)
    weight = random_tensor(format_named(word), (4, 256), 0)
    for byte in range(256):
        weight.parts["scales"][:] = 0x30
        weight.parts["scales"].reshape(-1)[1] = byte
        found = [(code, text) for check in CHECKS for _, code, text in check(weight) if code == "nan-scale"]
        assert len(found) == np.isnan(np.array([byte], np.uint8).view(getattr(ml_dtypes, dtype))[0]), byte
        assert all(text.startswith(f"1 of {weight.parts['scales'].size} ") for _, text in found)


def mlx_file(path: Path, scales: np.ndarray | None = None, biases: np.ndarray | None = None, **config: object) -> hb.Checkpoint:
    weight = mlx_weight()
    weight["scales"] = weight["scales"] if scales is None else scales
    weight["biases"] = weight["biases"] if biases is None else biases
    return hb.open(
        folder(path, {"model.safetensors": under(KEY, weight)}, {"quantization": {"group_size": 32, "bits": 4}, **config})
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_errors(value: float, tmp_path: Path):
    scales = mlx_weight()["scales"].copy()
    scales[1, 1] = value
    (finding,) = [f for f in mlx_file(tmp_path, scales).findings(data=True) if f.severity == "error"]
    assert (finding.code, finding.key) == ("non-finite-scale", KEY)
    assert finding.message == "1 of 16 scales are NaN or infinite"


def test_zero_scales_are_notes_and_all_zero_a_warning(tmp_path: Path):
    scales = mlx_weight()["scales"].copy()
    scales[1, 1] = 0
    assert codes(mlx_file(tmp_path / "one", scales))["zero-scale"] == "note"
    assert codes(mlx_file(tmp_path / "all", scales * 0))["zero-scale"] == "warning"
    assert "zero-scale" not in codes(mlx_file(tmp_path / "none"))


def test_a_weight_that_float16_cannot_hold_warns_naming_the_tensor(tmp_path: Path):
    """15 · 4368 + 0 = 65520 is the first magnitude that rounds to infinity; 15 · 4364 + 44 is below
    it.
    """
    scales, biases = np.full((8, 2), 4368, np.float32), np.zeros((8, 2), np.float32)
    high = mlx_file(tmp_path / "high", scales, biases)
    with pytest.warns(CheckpointWarning, match=rf"\[open\] {KEY}: its scales allow magnitudes of 65520, and float16 is infinite"):
        q = high[KEY]
    assert np.isinf(q.dequantize("float16").astype(np.float32)).any() == bool((np.abs(q.dequantize()) == 15 * 4368).any())
    assert codes(high)["float16-overflow"] == "warning"
    low = mlx_file(tmp_path / "low", scales - 4, biases + 44)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert largest_magnitude(low[KEY]) == 15 * 4364 + 44
    assert "float16-overflow" not in codes(low)
    # A bias of the other sign keeps the range in bounds: the bound is on values, not on a sum of
    # magnitudes.
    both = mlx_file(tmp_path / "both", scales * 2, biases - 8 * 8736)
    with pytest.warns(CheckpointWarning):
        assert largest_magnitude(both[KEY]) == 8 * 8736
    assert not may_overflow_float16(mlx_file(tmp_path / "in", scales, biases - 32000)[KEY])


FORMATS = {w: format_named(w) for w in codec_names() if not format_named(w).opaque} | {
    "int4 under inverse scales": format_named("int4", 32, scale_dtype="bfloat16", inverse=True),
    "uint4 under float32 scales": format_named("uint4", 64, scale_dtype="float32"),
    "nvfp4 divided": format_named("nvfp4", global_scale="divide"),
    "nvfp4 under its largest value": format_named("nvfp4", global_scale="amax"),
    "nvfp4 of one level": format_named("nvfp4", global_scale="none"),
    "fp8 in blocks": format_named("fp8_e4m3", 64, rows=2, scale_dtype="float32"),
    "fp8 under one scale": format_named("fp8_e4m3", -1, rows=-1, scale_dtype="float32"),
}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@given(seed=st.integers(0, 50))
def test_the_bound_holds_for_every_code_and_is_reached(fmt: Format, seed: int):
    q = random_tensor(fmt, (4, 256), seed)
    with np.errstate(all="ignore"):
        values = np.abs(q.dequantize("float32").astype(np.float64))
        values = values[np.isfinite(values)]
        bound = largest_magnitude(q)
    assert values.max(initial=0.0) <= bound * (1 + 2.0**-23) or bound >= 3e38
    assert may_overflow_float16(q) == (bound >= FLOAT16_LIMIT)


@pytest.mark.parametrize("scale", [np.nextafter(np.float32(65520), np.float32(0)), np.float32(65520)])
def test_what_rounds_to_the_largest_float16_is_no_overflow(scale: np.float32):
    q = hb.QTensor(format_named("int2", 32, scale_dtype="float32"), (1, 32), {"codes": np.full((1, 8), 0b11_10_01_00, np.uint8),
                                                                              "scales": np.array([[scale / 2]])})  # fmt: skip
    assert may_overflow_float16(q) == bool(np.isinf(q.dequantize("float16")).any())


@pytest.mark.parametrize(("fmt", "ordinary", "large"), [(format_named("int4", 32), 1, 2**14), (format_named("mxfp4"), 127, 141)])
@pytest.mark.parametrize("where", [0, 70_000, -1])
def test_the_largest_scale_counts_wherever_it_is(fmt: Format, ordinary: int, large: int, where: int):
    """Of more groups than are looked at together."""
    shape = (75, 32_000)
    q = random_tensor(fmt, shape, 1)
    scales = np.full_like(q.parts["scales"], ordinary)
    few = hb.QTensor(q.format, shape, q.parts | {"scales": scales})
    assert scales.size > 1 << 16
    assert largest_magnitude(few) < FLOAT16_LIMIT
    assert not may_overflow_float16(few)
    scales.reshape(-1)[where] = large
    assert largest_magnitude(few) >= FLOAT16_LIMIT
    assert may_overflow_float16(few)


@pytest.mark.parametrize("shape", [(3, 256), (2, 3, 256)])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_bound_is_the_value_of_the_worst_code(fmt: Format, shape: tuple[int, ...]):
    q = random_tensor(fmt, shape, seed=7)
    parts = dict(q.parts)
    for name, array in parts.items():
        if array.dtype.kind == "f":
            parts[name] = np.asarray(np.random.default_rng(1).uniform(0.5, 1.5, array.shape)).astype(array.dtype)
        elif name == "scales" and q.format.scale in ("e8m0", "e4m3", "ue4m3"):
            parts[name] = np.full(array.shape, 100, np.uint8)
    worst = 0.0
    for byte in range(256):
        codes_ = np.full_like(parts["codes"], byte)
        values = np.abs(hb.QTensor(q.format, q.shape, parts | {"codes": codes_}).dequantize("float32"))
        worst = max(worst, float(values[np.isfinite(values)].max(initial=0.0)))
    bound = largest_magnitude(hb.QTensor(q.format, q.shape, parts))
    assert math.isclose(bound, worst, rel_tol=1e-6)


@pytest.mark.parametrize("absmax", [100.0, 60_000.0, 65_000.0, 66_000.0])
def test_the_bound_of_nested_scales_is_the_table_times_the_absmax_plus_the_offset(absmax: float):
    q = random_tensor(format_named("nf4", 64, nested=True), (4, 256), seed=3)
    parts = q.parts | {
        "nested_map": np.linspace(-0.5, 0.5, 256, dtype=np.float32),
        "nested_absmax": np.full_like(q.parts["nested_absmax"], absmax),
        "nested_offset": np.full_like(q.parts["nested_offset"], absmax / 2),
    }
    nested = hb.QTensor(q.format, q.shape, parts)
    assert largest_magnitude(nested) == absmax  # NF4 ends at 1: (0.5 + 0.5) · absmax
    assert may_overflow_float16(nested) == (absmax >= 65_520)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int16", "uint8"])
def test_peak_is_the_largest_magnitude(dtype: str):
    rng = np.random.default_rng(0)
    a = rng.integers(-100 if not dtype.startswith("u") else 0, 100, 200_000).astype(dtype)
    assert peak(a) == float(np.abs(a.astype(np.float64)).max())
    assert peak(a[:0]) == 0.0
    if dtype.startswith("float"):
        assert peak(np.array([1, -np.inf, 3], dtype)) == math.inf
        assert math.isnan(peak(np.array([1, np.nan, np.inf], dtype)))


@pytest.mark.parametrize(("tied", "same", "severity"), [(True, True, "warning"), (True, False, "warning"), (None, True, "note"),
 (None, False, None),
                                                         (False, True, None)])  # fmt: skip
def test_case_50_a_tied_head_that_is_stored_twice(tied: bool | None, same: bool, severity: str | None, tmp_path: Path):
    embedding = np.arange(32, dtype=np.float16).reshape(4, 8)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding if same else embedding + 1}
    config = {} if tied is None else {"tie_word_embeddings": tied}
    checkpoint = hb.open(folder(tmp_path, {"model.safetensors": tensors}, config))
    found = [f for f in checkpoint.findings() if f.code == "tied-head-twice"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    if tied:
        assert ("the same bytes" in found[0].message) == same


def test_case_50_a_quantized_head_beside_its_embedding(tmp_path: Path):
    weight = mlx_weight()
    tensors = under("model.embed_tokens", weight) | under("lm_head", weight)
    config = {"quantization": {"group_size": 32, "bits": 4}, "text_config": {"tie_word_embeddings": True}}
    (finding,) = hb.open(folder(tmp_path / "a", {"model.safetensors": tensors}, config)).findings()
    assert (finding.code, finding.key) == ("tied-head-twice", "lm_head")
    assert "the same bytes" in finding.message
    for changed in weight:
        other = tensors | {f"lm_head.{changed}": np.zeros_like(weight[changed])}
        (finding,) = hb.open(folder(tmp_path / changed, {"model.safetensors": other}, config)).findings()
        assert "other bytes" in finding.message
    alone = hb.open(folder(tmp_path / "b", {"model.safetensors": under("model.embed_tokens", weight)}, config))
    assert alone.findings() == []
    assert alone.keys() == ("model.embed_tokens",)


def test_tensors_nobody_claims(tmp_path: Path):
    stray = {
        "model.layers.1.mlp.down_proj.scales": np.ones((8, 2), np.float16), "model.layers.2.up_proj.weight": np.zeros((8, 8),
         np.uint32),
        f"{KEY}.input_scale": np.ones(1, np.float32), "model.layers.3.k_scale": np.ones(1, np.float32),
         "model.norm.weight": np.ones(8, np.float16),
        "model.layers.0.ls.scale": np.ones(8, np.float16), "position_ids": np.arange(8),
    }  # fmt: skip
    checkpoint = hb.open(
        folder(tmp_path, {"model.safetensors": under(KEY, mlx_weight()) | stray}, {"quantization": {"group_size": 32, "bits": 4}})
    )
    found = {(f.severity, f.code, f.key) for f in checkpoint.findings()}
    assert found == {
        ("error", "unknown-tensor", "model.layers.1.mlp.down_proj.scales"),
        ("error", "missing-tensor", "model.layers.1.mlp.down_proj.weight"),
        ("error", "unknown-tensor", "model.layers.2.up_proj.weight"),
        ("error", "missing-tensor", "model.layers.2.up_proj.scales"),
        ("note", "activation-tensors", "input_scale"), ("note", "activation-tensors", "k_scale"),
        ("warning", "dense-but-listed", "model.layers.2.up_proj.weight"),
    }  # fmt: skip


def test_scales_of_inputs_are_said_to_be_used():
    checkpoint = hb.open(Path(__file__).parents[1] / "data" / "models" / "modelopt" / "mistral-int4-awq")
    (note,) = [f for f in checkpoint.findings() if f.key == "pre_quant_scale"]
    assert note.code == "activation-tensors"
    assert "load_model multiplies by them" in note.message


def test_a_width_that_the_models_config_contradicts(tmp_path: Path):
    assert codes(mlx_file(tmp_path / "right", intermediate_size=64)) == {}
    (finding,) = mlx_file(tmp_path / "wrong", intermediate_size=128).findings()
    assert (finding.severity, finding.code) == ("warning", "unexpected-width")
    assert finding.message == "has 64 inputs as affine4:g32; the model's config makes it 128. Are bits and group size right?"


def test_a_group_size_that_does_not_fit_the_shapes_is_an_error(tmp_path: Path):
    tensors = under(KEY, gptq_weight())
    checkpoint = hb.open(folder(tmp_path, {"model.safetensors": tensors}, {"quantization_config": GPTQ | {"group_size": 16}}))
    (finding,) = [f for f in checkpoint.findings() if f.severity == "error"]
    assert finding.code == "unreadable"
    assert "has 2 groups; 64 inputs in groups of 16 are 4" in finding.message
    assert "model.safetensors" in finding.message


@pytest.mark.parametrize(("file", "padded"), [("compressed-tensors-old/0.12.2_int3_g64_sym", True),
 ("compressed-tensors/pack_int3_g32_sym_bf16", False),
                                              ("compressed-tensors/pack_int4_g32_sym_bf16", False)])  # fmt: skip
def test_old_words_of_compressed_tensors_are_noted(file: str, padded: bool, golden: Path):
    assert codes(hb.open(golden / f"{file}.safetensors")).get("padded-words") == ("note" if padded else None)


@pytest.mark.parametrize(("shape", "right"), [((8,), True), ((9,), False), ((), False), ((8, 1), False), ((1, 8), True)])
def test_a_bias_of_the_wrong_length(shape: tuple[int, ...], right: bool, tmp_path: Path):
    tensors = under(KEY, mlx_weight()) | {f"{KEY}.bias": np.zeros(shape, np.float16)}
    checkpoint = hb.open(folder(tmp_path, {"model.safetensors": tensors}, {"quantization": {"group_size": 32, "bits": 4}}))
    found = [(f.code, f.message) for f in checkpoint.findings()]
    assert found == [("bias-shape", f"has shape {list(shape)}; the weight has 8 outputs")] * (not right)


def test_a_config_without_packed_weights(tmp_path: Path):
    checkpoint = hb.open(
        folder(tmp_path, {"model.safetensors": {"w": np.zeros((2, 2), np.float16)}}, {"quantization_config": GPTQ})
    )
    assert checkpoint.format == "dense"
    assert codes(checkpoint) == {"config-without-weights": "warning"}


def test_scales_all_alike_are_noted(tmp_path: Path):
    weight = mlx_weight(n=64)
    weight["scales"][:] = 0.5
    checkpoint = hb.open(write(tmp_path / "x.safetensors", under(KEY, weight)), config={"group_size": 32, "bits": 4})
    assert codes(checkpoint) == {"equal-scales": "note"}


def test_header_findings_read_no_weights_and_data_findings_report_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scales = mlx_weight()["scales"] * 0
    checkpoint = mlx_file(tmp_path, scales)
    steps: list[tuple[int, int, str]] = []
    assert "zero-scale" in {f.code for f in checkpoint.findings(data=True, progress=lambda *step: steps.append(step))}
    assert steps == [(0, 1, KEY), (1, 1, "")]
    monkeypatch.setattr(type(checkpoint), "__getitem__", lambda self, key: pytest.fail("a weight was read"))
    assert checkpoint.findings() == []


def test_findings_come_worst_first_and_print_in_a_line(tmp_path: Path):
    scales = mlx_weight()["scales"].copy()
    scales[0, 0], scales[1, 1] = np.nan, 0
    checkpoint = mlx_file(tmp_path, scales, intermediate_size=128)
    severities = [SEVERITIES.index(f.severity) for f in checkpoint.findings(data=True)]
    assert severities == sorted(severities)
    assert len(set(severities)) == 3
    assert str(Finding("note", "x", "", "said.")) == "note [x] said."
    assert str(Finding("error", "x", "k", "said.")) == "error [x] k: said."


def test_every_check_of_values_is_quiet_on_an_ordinary_weight():
    rng = np.random.default_rng(0)
    q = random_tensor(format_named("uint4", 32), (32, 64), seed=0)
    q = hb.QTensor(
        q.format, q.shape, dict(q.parts) | {"scales": rng.uniform(0.01, 0.02, q.parts["scales"].shape).astype(np.float16)}
    )
    assert [list(check(q)) for check in CHECKS] == [[]] * len(CHECKS)


@pytest.mark.parametrize("code", ["config.json"])
def test_findings_are_json_ready(code: str, tmp_path: Path):
    checkpoint = mlx_file(tmp_path, intermediate_size=128)
    (finding,) = checkpoint.findings()
    assert json.loads(json.dumps(finding.__dict__))["code"] == "unexpected-width"


def test_every_code_is_in_the_documentation():
    """docs/reference/checkpoints.md has a row for each code that the sources raise."""
    from halfbyte.checkpoints.inspect import FIXES

    root = Path(__file__).parents[2]
    docs = (root / "docs" / "reference" / "checkpoints.md").read_text(encoding="utf-8")
    sources = "".join(p.read_text(encoding="utf-8") for p in sorted((root / "src" / "halfbyte" / "checkpoints").rglob("*.py")))
    severities = "|".join(SEVERITIES)
    raised = set(re.findall(rf'"(?:{severities})"(?: if [^"]*else "(?:{severities})")?,\s*"([a-z0-9-]+)"', sources))
    assert {"unreadable", "zero-scale", "v1-zero-wraps", "unreferenced-file", "one-shard"} <= raised
    assert raised - set(SEVERITIES) <= set(FIXES)
    for code in FIXES:
        assert f"`{code}`" in docs, code


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.scale in ("e8m0", "e4m3", "ue4m3")], ids=str)
def test_every_scale_byte_overflows_or_does_not(fmt: Format):
    q = random_tensor(fmt, (3, 256), 2)
    parts = q.parts | ({"global_scale": np.full_like(q.parts["global_scale"], 100.0)} if q.format.global_op else {})
    for byte in range(256):
        scales = np.ones_like(parts["scales"])
        for where in (0, -1):
            scales.reshape(-1)[where] = byte
            one = hb.QTensor(q.format, q.shape, parts | {"scales": scales.copy()})
            assert may_overflow_float16(one) == (largest_magnitude(one) >= FLOAT16_LIMIT)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_each_matrix_of_a_stack_has_its_factor(rows: int):
    q = random_tensor(format_named("nvfp4"), (3, rows, 32), 4)
    scales = np.full_like(q.parts["scales"], 0x38)  # 1
    for large in range(3):
        factor = np.ones(3, np.float32)
        factor[large] = 5
        stack = hb.QTensor(q.format, q.shape, q.parts | {"scales": scales, "global_scale": factor})
        assert largest_magnitude(stack) == 30
        scales[large, rows - 1, -1] = 0x40  # 2
        assert largest_magnitude(stack) == 60
        scales[large, rows - 1, -1] = 0x38
