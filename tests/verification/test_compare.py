"""`verify` says identical when it is so, and is itself shown to fail on every planted fault."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from halfbyte import QTensor
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.numerics.bits import pack, unpack
from halfbyte.tensor.row_view import RowView, Source
from halfbyte.verification.compare import STATUSES, Report, verify
from halfbyte.verification.names import read_rules
from support.memory_checkpoint import MemoryCheckpoint, packed

KEY = "model.layers.0.mlp.down_proj"
WORDS = [
    ("mxfp4", None, {}),
    ("nvfp4", None, {}),
    ("int4", 32, {}),
    ("uint4", 32, {}),
    ("int3", 32, {}),
    ("affine4", 64, {}),
    ("q4_K", None, {}),
    ("q8_0", None, {}),
]


def one(w: Any, **more: Any) -> MemoryCheckpoint:
    return MemoryCheckpoint({KEY if isinstance(w, QTensor) else f"{KEY}.weight": w}, **more)


def only(report: Report) -> Any:
    (c,) = report.comparisons
    return c


def replaced(w: QTensor, **parts: Any) -> QTensor:
    return QTensor(w.format, w.shape, {**w.parts, **parts}, origin=w.origin)


@pytest.mark.parametrize(("word", "group", "options"), WORDS, ids=[w[0] for w in WORDS])
@pytest.mark.parametrize("dtype", ["packed", "float32", "bfloat16", "float16"])
def test_identical_to_itself_and_to_its_dense_values(word, group, options, dtype):
    w = packed(word, (24, 512), group_size=group, **options)
    other = w if dtype == "packed" else w.dequantize(dtype)
    report = verify(one(w), one(other))
    assert report.verdict == "identical"
    c = only(report)
    assert (c.difference.count, c.difference.differing) == (24 * 512, 0)
    assert c.compared_as == ("float64" if dtype == "packed" else dtype)


# Planted faults: each must be reported as different, with the right number of values.


def nibbles_swapped(w: QTensor) -> QTensor:
    codes = np.asarray(w.parts["codes"])
    return replaced(w, codes=(codes << 4) | (codes >> 4))


def zero_off_by_one(w: QTensor) -> QTensor:
    return replaced(w, zeros=w.parts["zeros"] + np.int16(1))


def scale_inverted(w: QTensor) -> QTensor:
    return replaced(w, scales=(1 / w.parts["scales"].astype(np.float32)).astype(w.parts["scales"].dtype))


def test_fault_nibble_order_swapped():
    w = packed("mxfp4", (16, 256))
    c = only(verify(one(w), one(nibbles_swapped(w))))
    a, b = w.dequantize(), nibbles_swapped(w).dequantize()
    assert c.status == "different"
    assert c.difference.differing == np.count_nonzero(a != b)
    assert c.difference.relative_rms > 1


def test_fault_zero_point_off_by_one():
    w = packed("uint4", (16, 256), group_size=32)
    c = only(verify(one(w), one(zero_off_by_one(w))))
    assert (c.status, c.difference.differing) == ("different", 16 * 256)


def test_fault_scale_inverted():
    w = packed("int4", (16, 256), group_size=32)
    c = only(verify(one(w), one(scale_inverted(w)), rtol=0.5))
    assert c.status == "different"
    assert c.difference.relative_rms > 100


def test_fault_one_code_in_a_million():
    w = packed("int4", (1000, 1000), group_size=40)
    codes = unpack(np.asarray(w.parts["codes"]), 4, 1000).copy()
    codes[617, 3] ^= 1
    c = only(verify(one(w), one(replaced(w, codes=pack(codes, 4)))))
    assert (c.status, c.difference.differing, c.difference.worst) == ("different", 1, (617, 3))
    assert c.difference.relative_rms < 1e-3


def test_fault_one_dense_value_by_one_unit_in_the_last_place():
    w = packed("affine4", (64, 256), group_size=64)
    dense = w.dequantize("float32")
    dense[5, 6] = np.nextafter(dense[5, 6], np.float32(np.inf))
    c = only(verify(one(w), one(dense)))
    assert (c.status, c.difference.differing, c.difference.worst) == ("different", 1, (5, 6))


def test_fault_nan_in_a_scale():
    w = packed("mxfp4", (16, 256))
    scales = np.asarray(w.parts["scales"]).copy()
    scales[3, 1] = 255
    c = only(verify(one(w), one(replaced(w, scales=scales)), rtol=1e6))
    assert (c.status, c.difference.differing) == ("different", 32)
    assert c.difference.relative_rms == math.inf


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_case_57_shuffled_small_weights_are_different(scale):
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((32, 64)) * scale).astype(np.float32)
    c = only(verify(one(w), one(rng.permuted(w, axis=1)), rtol=0.5))
    assert c.status == "different"
    assert c.difference.relative_rms > 1


def test_a_tolerance_makes_close_and_no_more():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((32, 64)).astype(np.float32)
    near = one((w * 1.001).astype(np.float32))
    assert only(verify(one(w), near)).status == "different"
    report = verify(one(w), near, rtol=0.002)
    assert (only(report).status, report.verdict) == ("close", "close")
    assert verify(one(w), near, rtol=0.0005).verdict == "different"


# Structure


def test_shapes_missing_and_extra_are_rows_worst_first():
    same = {"y.weight": np.ones((2, 2))}
    a = MemoryCheckpoint({"x.weight": np.zeros((2, 4)), **same, "w.weight": np.ones((2, 2)), "z.weight": np.ones(3)})
    b = MemoryCheckpoint({"x.weight": np.zeros((4, 2)), **same, "v.weight": np.ones(1), "z.weight": np.zeros(3)})
    report = verify(a, b)
    assert [(c.status, c.key) for c in report.comparisons] == [
        ("missing", "w.weight"),
        ("extra", "v.weight"),
        ("shape", "x.weight"),
        ("different", "z.weight"),
        ("identical", "y.weight"),
    ]
    assert report.counts == dict(zip(STATUSES, (0, 0, 1, 1, 1, 1, 0, 0, 1), strict=True))
    assert report.verdict == "different"


def test_activation_scales_and_rotary_tables_need_no_counterpart():
    w = {"a.weight": np.ones((2, 2))}
    a = MemoryCheckpoint({**w, "a.input_scale": np.ones(1), "rope_freqs.weight": np.ones(4)})
    report = verify(a, MemoryCheckpoint(w))
    assert [(c.status, c.key) for c in report.comparisons] == [
        ("auxiliary", "a.input_scale"),
        ("auxiliary", "rope_freqs.weight"),
        ("identical", "a.weight"),
    ]
    assert report.verdict == "identical"
    b = MemoryCheckpoint({**w, "a.input_scale": np.zeros(1)})
    assert verify(a, b).verdict == "different", "where both sides have one it is compared"
    assert verify(MemoryCheckpoint({"a.input_scale": np.ones(1)}), MemoryCheckpoint({})).verdict == "different"


def test_worst_difference_comes_first():
    w = np.ones((4, 4))
    a = MemoryCheckpoint({f"{n}.weight": w for n in "abc"})
    b = MemoryCheckpoint({"a.weight": w * 1.1, "b.weight": w * 3, "c.weight": w * 2})
    assert [c.key[0] for c in verify(a, b).comparisons] == ["b", "c", "a"]


def test_nothing_compared_is_not_identical():
    assert verify(MemoryCheckpoint({}), MemoryCheckpoint({})).verdict == "different"


def test_fused_and_split_projections_are_compared_row_for_row():
    w = packed("int4", (96, 64), group_size=32)
    parts = {p: w.rows(i * 32, i * 32 + 32) for i, p in enumerate("qkv")}
    layer = "model.layers.0.self_attn"
    fused = MemoryCheckpoint({f"{layer}.qkv_proj": w, f"{layer}.qkv_proj.bias": np.arange(96.0)})
    split = MemoryCheckpoint(
        {f"{layer}.{p}_proj": t for p, t in parts.items()}
        | {f"{layer}.{p}_proj.bias": np.arange(32.0) + 32 * i for i, p in enumerate("qkv")}
    )
    assert [c.status for c in verify(fused, split).comparisons] == ["identical"] * 2
    assert [c.status for c in verify(split, fused).comparisons] == ["identical"] * 2
    wrong = MemoryCheckpoint({**split.tensors, f"{layer}.q_proj": parts["k"], f"{layer}.k_proj": parts["q"]})
    report = verify(fused, wrong)
    assert [c.status for c in report.comparisons] == ["different", "identical"]
    assert report.comparisons[0].record()["other_keys"] == tuple(f"{layer}.{p}_proj" for p in "qkv")


def test_interleaved_experts_meet_separate_ones():
    rng = np.random.default_rng(0)
    prefix = "model.layers.0.mlp.experts"
    w = packed("mxfp4", (2, 8, 64))
    bias = rng.standard_normal((2, 8)).astype(np.float32)
    dense = w.dequantize("float32")
    oss = MemoryCheckpoint(
        {f"{prefix}.gate_up_proj": w, f"{prefix}.gate_up_proj_bias": bias}, layout="gpt-oss", config={"model_type": "gpt_oss"}
    )
    metadata = {"general.architecture": "gpt-oss"}
    gguf = {f"blk.0.ffn_{p}_exps.weight": dense[:, i::2] for i, p in enumerate(("gate", "up"))}
    gguf |= {f"blk.0.ffn_{p}_exps.bias": bias[:, i::2] for i, p in enumerate(("gate", "up"))}
    assert [c.status for c in verify(oss, MemoryCheckpoint(gguf, metadata=metadata)).comparisons] == ["identical"] * 2
    gate, up = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"
    swapped = {**gguf, gate: gguf[up], up: gguf[gate]}
    assert verify(oss, MemoryCheckpoint(swapped, metadata=metadata)).verdict == "different"


@pytest.mark.parametrize("config", [{}, {"model_type": "gpt_oss"}])
def test_dense_expert_stacks_may_be_transposed(config):
    key = "model.layers.0.mlp.experts.down_proj"
    w = packed("mxfp4", (2, 8, 64))
    dense = MemoryCheckpoint({key: np.ascontiguousarray(w.dequantize("bfloat16").swapaxes(1, 2))}, config=config)
    assert verify(MemoryCheckpoint({key: w}), dense).verdict == "identical"
    assert verify(dense, MemoryCheckpoint({key: w})).verdict == "identical"


def test_llama_gguf_rotary_rows():
    """GGUF's writer turns a head's halves (i, i + d/2) into neighbours (2i, 2i + 1)."""
    heads, d, k = 2, 8, 32
    w = np.random.default_rng(0).standard_normal((heads * d, k)).astype(np.float32)
    gguf_rows = np.empty_like(w)
    for h in range(heads):
        for i in range(d // 2):
            gguf_rows[h * d + 2 * i] = w[h * d + i]
            gguf_rows[h * d + 2 * i + 1] = w[h * d + i + d // 2]
    metadata = {"general.architecture": "llama", "llama.attention.head_count": heads}
    gguf = MemoryCheckpoint({"blk.0.attn_q.weight": gguf_rows}, metadata=metadata)
    hf = MemoryCheckpoint({"model.layers.0.self_attn.q_proj.weight": w}, config={"model_type": "llama"})
    assert verify(gguf, hf).verdict == "identical"
    assert verify(hf, gguf).verdict == "identical"
    straight = MemoryCheckpoint({"blk.0.attn_q.weight": w}, metadata=metadata)
    assert verify(straight, hf).verdict == "different"


def test_gemma_gguf_norms():
    w = np.array([0.5, -0.25, 3.0], ml_dtypes.bfloat16)
    gguf = MemoryCheckpoint({"output_norm.weight": w.astype(np.float32) + 1}, metadata={"general.architecture": "gemma3"})
    hf = MemoryCheckpoint({"model.norm.weight": w}, config={"model_type": "gemma3_text"})
    assert verify(gguf, hf).verdict == "identical"


def test_a_map_pairs_what_cannot_be_guessed():
    w = packed("int4", (8, 64), group_size=32)
    a, b = MemoryCheckpoint({"encoder.0.dense": w}), MemoryCheckpoint({"blocks.0.fc.weight": w.dequantize()})
    assert verify(a, b).verdict == "different"
    assert verify(a, b, rules=read_rules([r"encoder\.(\d+)\.dense=blocks.\1.fc"])).verdict == "identical"


def test_integers_are_compared_as_they_are():
    a = MemoryCheckpoint({"g_idx": np.arange(4, dtype=np.int32)})
    b = MemoryCheckpoint({"g_idx": np.arange(4, dtype=np.int64)})
    assert verify(a, b).verdict == "identical"
    assert verify(a, MemoryCheckpoint({"g_idx": np.arange(1, 5)})).verdict == "different"


def test_a_dtype_rounds_both_sides():
    w = np.array([[1.0, 2.0]], np.float32)
    b = (w * np.float32(1 + 2.0**-20)).astype(np.float32)
    assert verify(one(w), one(b)).verdict == "different"
    assert verify(one(w), one(b), dtype="bfloat16").verdict == "identical"
    with pytest.raises(FormatError, match="'int9' is not a dtype to decode to"):
        verify(one(w), one(b), dtype="int9")


def test_records_are_json_with_the_fields_words():
    w = packed("int4", (4, 64), group_size=32)
    report = verify(one(w), one(w.dequantize()))
    record = json.loads(json.dumps(only(report).record()))
    assert record == {
        "record": "tensor", "key": KEY, "other_key": f"{KEY}.weight", "status": "identical", "shape": [4, 64],
        "other_shape": [4, 64], "format": "int4:g32", "other_format": "float32", "compared_as": "float32", "count": 256,
        "differing": 0, "max_abs_error": 0.0, "max_relative_error": 0.0, "relative_rms": 0.0, "cosine": 1.0, "worst": None,
    }  # fmt: skip
    assert report.record() == {"record": "summary", "verdict": "identical", **report.counts}


def test_progress_counts_every_match():
    calls: list[tuple[int, int, str]] = []
    w = np.ones((2, 2))
    c = MemoryCheckpoint({"a": w, "b": w})
    verify(c, c, progress=lambda *args: calls.append(args))
    assert calls == [(0, 2, "a"), (1, 2, "b"), (2, 2, "")]


# Views


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5))
def test_any_block_of_a_view_is_that_slice(start, length, pieces):
    arrays = [np.arange(i * 100, i * 100 + (i + 1) * 8).reshape(-1, 4).astype(np.float32) for i in range(pieces)]
    view = RowView([Source(a) for a in arrays])
    whole = np.concatenate(arrays)
    start = min(start, len(whole))
    stop = min(start + length, len(whole))
    assert view.shape == whole.shape
    np.testing.assert_array_equal(view.read(start, stop), whole[start:stop])


@pytest.mark.parametrize("rows", ["even", "odd", "first", "second"])
def test_row_selections_of_packed_weights(rows):
    w = packed("int4", (16, 64), group_size=32)
    dense = w.dequantize("float64")
    want = {"even": dense[::2], "odd": dense[1::2], "first": dense[:8], "second": dense[8:]}[rows]
    view = RowView([Source(w, rows=rows)])
    np.testing.assert_array_equal(view.read(0, 8), want)
    np.testing.assert_array_equal(view.read(3, 6), want[3:6])


def test_reading_touches_one_block_at_a_time(monkeypatch):
    """Peak size of anything decoded stays at a block, whatever the tensor's size."""
    w = packed("int4", (4096, 1024), group_size=128)
    sizes: list[int] = []
    original = QTensor.dequantize

    def spy(self, dtype="float32", arithmetic="exact"):
        sizes.append(self.size)
        return original(self, dtype, arithmetic)

    monkeypatch.setattr(QTensor, "dequantize", spy)
    assert verify(one(w), one(w)).verdict == "identical"
    assert max(sizes) == 1 << 20
    assert sum(sizes) == 2 * w.size


def test_checkpoints_are_compared_by_their_paths(tmp_path):
    values = {"a.weight": np.arange(64, dtype=np.float32).reshape(2, 32)}
    for name, change in (("a", 0), ("b", 0), ("c", 1)):
        save_file({key: x + change for key, x in values.items()}, tmp_path / f"{name}.safetensors")
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    assert verify(a, str(b)).verdict == "identical"
    with open_checkpoint(b) as opened:
        assert verify(c, opened).verdict == "different"
        assert verify(opened, c).verdict == "different"
        assert opened.keys()  # what the caller opened stays open
    with pytest.raises(CheckpointError, match="nowhere"):
        verify(a, tmp_path / "nowhere")


def test_a_notebook_shows_the_first_tensors_of_a_checkpoint(tmp_path):
    save_file({f"<{i}>.weight": np.zeros((2, 3), np.float32) for i in range(30)}, tmp_path / "a.safetensors")
    with open_checkpoint(tmp_path / "a.safetensors") as opened:
        page = ET.fromstring(f"<div>{opened._repr_html_()}</div>")
        assert page.findtext("p") == repr(opened)
        rows = [[cell.text for cell in row] for row in page.iter("tr")]
        assert rows == [["key", "format", "shape"], *([i.key, "float32", "2 × 3"] for i in list(opened.infos())[:20])]
