"""EXL3 files against weights computed from the definition (`support/exl3_reference.py`), through
every way into the library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.edges import LossyError
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import CheckpointError, LayoutError, UnsupportedError
from halfbyte.layouts import LAYOUTS
from halfbyte.tensor.shard import shard_rows
from support.exl3_reference import dense
from support.layout_tensors import headers
from support.safetensors_bytes import folder, under

LAYOUT = LAYOUTS["exl3"]
MARKS = {"3inst": {}, "mcg": {"mcg": np.array(-877912083, np.int32)}, "mul1": {"mul1": np.array(-2082680531, np.int32)}}
NAME = "model.layers.0.mlp.up_proj"


def tensors(k: int, n: int, bits: int, codebook: str = "3inst", seed: int = 0) -> dict[str, np.ndarray]:
    """Random codes under scales of the size that ExLlamaV3 writes."""
    rng = np.random.default_rng(seed)
    trellis = rng.integers(-(1 << 15), 1 << 15, (k // 16, n // 16, 16 * bits)).astype(np.int16)
    suh, svh = ((rng.standard_normal(size) * 0.1).astype(np.float16) for size in (k, n))
    return {"trellis": trellis, "suh": suh, "svh": svh, **MARKS[codebook]}


def config(**changes: Any) -> dict[str, Any]:
    """As ExLlamaV3's compiler writes it."""
    own = {
        "quant_method": "exl3",
        "version": "1.4.6",
        "bits": 3.84,
        "head_bits": 6,
        "out_scales": "auto",
        "calibration": {"rows": 250, "cols": 2048},
        **changes,
    }
    return {"quantization_config": own}


def test_a_module_is_recognised_by_its_codes_and_a_scale_on_each_side():
    """`su` and `sv` are the names of older files."""
    for first in ("suh", "su"):
        for second in ("svh", "sv"):
            whole = {"trellis", first, second}
            assert LAYOUT.matches(whole)
            assert not any(LAYOUT.matches(whole - {part}) for part in whole)
    assert LAYOUT.matches({"trellis", "suh", "su", "svh", "sv", "mcg"})


def slow(t: dict[str, np.ndarray], codebook: str) -> np.ndarray:
    return dense(t["trellis"], t["suh"], t["svh"], codebook)


ALWAYS = [(1, "mcg"), (2, "mul1"), (3, "3inst"), (5, "mul1"), (8, "mcg")]
"""Pairs of a width and a codebook that `make test` decodes; `make test-slow` decodes the rest."""
REST = [(b, c) for b in range(1, 9) for c in MARKS if (b, c) not in ALWAYS]


@pytest.mark.parametrize(("bits", "codebook"), [*ALWAYS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)])
def test_values_and_the_bijection(bits, codebook):
    t = tensors(128, 128, bits, codebook, bits)
    q = LAYOUT.unpack(t, {"codebook": codebook}, NAME)
    assert (q.shape, q.format.bits) == ((128, 128), bits)
    assert LAYOUT.describe({**headers(t), **MARKS[codebook]}, {}) == (q.format, q.shape)
    assert np.array_equal(q.dequantize("float32"), slow(t, codebook).astype(np.float32))
    again = LAYOUT.pack(q, {})
    assert {s: a.tobytes() for s, a in again.items()} == {s: a.tobytes() for s, a in t.items()}


def test_slices_and_shards_of_rows_are_the_wholes():
    t = tensors(128, 256, 2)
    q = LAYOUT.unpack(t, {}, NAME)
    whole = q.dequantize("float32")
    for start, stop in ((0, 256), (100, 140), (130, 131), (255, 256), (7, 7)):
        assert np.array_equal(q[start:stop].dequantize("float32"), whole[start:stop])
        assert np.array_equal(shard_rows(q, start, stop)[1:].dequantize("float32"), whole[start + 1 : stop])
    x = np.eye(128, dtype=np.float32)
    assert np.array_equal(hb.linear(x, q, backend="reference"), whole.T)


def test_older_files_have_signs_as_bits():
    t = tensors(128, 128, 4)
    signs = {s: np.where(t[s] < 0, -1, 1).astype(np.float16) for s in ("suh", "svh")}
    bits = {s[:2]: np.packbits(a < 0, bitorder="little").view(np.int16) for s, a in signs.items()}
    q = LAYOUT.unpack({"trellis": t["trellis"], **bits}, {})
    assert np.array_equal(q.dequantize("float32"), dense(t["trellis"], signs["suh"], signs["svh"], "3inst").astype(np.float32))
    assert {s: a.tolist() for s, a in LAYOUT.pack(q, {}).items() if s != "trellis"} == {s: a.tolist() for s, a in bits.items()}


def test_a_file_is_opened_dequantized_and_converted_with_the_error_stated(tmp_path: Path):
    t = tensors(128, 128, 4, "mcg")
    path = folder(tmp_path / "in", {"model.safetensors": under(NAME, t)}, config(codebook="mcg"))
    with hb.open(path) as ckpt:
        assert (ckpt.format, ckpt.info(NAME).layout, ckpt.findings(data=True)) == ("exl3", "exl3", [])
        assert ckpt.ledger().problems == ()
        dequantize_checkpoint(ckpt, tmp_path / "dense")
        want = slow(t, "mcg").astype(np.float32)
        assert np.array_equal(hb.open(tmp_path / "dense")[f"{NAME}.weight"], want)
        with pytest.raises(LossyError, match=r"is more than one code under its scales .*relative RMS error of 0\.0"):
            convert_checkpoint(ckpt, tmp_path / "mlx", "mlx:affine8:g32")
        result = convert_checkpoint(ckpt, tmp_path / "mlx", "mlx:affine8:g32", lossy=True)
        (record,) = [r for r in result.records if r.key == NAME]
        got = hb.open(tmp_path / "mlx")[NAME].dequantize("float64")
        rms = float(np.sqrt(((got - want) ** 2).sum() / (want.astype(np.float64) ** 2).sum()))
        assert record.relative_rms == pytest.approx(rms, rel=1e-3)
        assert rms < 0.01
        convert_checkpoint(ckpt, tmp_path / "own", "halfbyte")
        assert hb.open(tmp_path / "own")[NAME] == ckpt[NAME]


def test_a_padded_head_has_the_rows_of_the_vocabulary(tmp_path: Path):
    t = tensors(128, 128, 3, "mul1")
    model = {"model_type": "llama", "hidden_size": 128, "vocab_size": 96, "num_hidden_layers": 1, **config()}
    path = folder(tmp_path / "in", {"model.safetensors": under("lm_head", t)}, model)
    with hb.open(path) as ckpt:
        assert ckpt.info("lm_head").shape == (96, 128)
        head = ckpt["lm_head"]
    assert np.array_equal(head.dequantize("float32"), slow(t, "mul1").astype(np.float32)[:96])
    assert LAYOUT.pack(head, {})["trellis"].tobytes() == t["trellis"].tobytes()


def test_load_model_computes_with_it(tmp_path: Path, monkeypatch):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from support.tiny_configs import dense_model
    from support.tiny_models import agree, ids, logits

    model = dense_model("llama", hidden_size=128, num_hidden_layers=1)
    stored, seed = {}, 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "mlp" in name:
            t = tensors(module.in_features, module.out_features, 3, "mcg", seed := seed + 1)
            module.weight.data = torch.from_numpy(slow(t, "mcg").astype(np.float32))
            stored |= under(name, t)
    plain = {n: p.numpy() for n, p in model.state_dict().items() if n.rpartition(".")[0] + ".trellis" not in stored}
    text = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
    path = folder(tmp_path / "in", {"model.safetensors": stored | plain}, json.loads(json.dumps(text)) | config(codebook="mcg"))
    monkeypatch.setattr("halfbyte.ops._warned", set())  # a reason is told once a process
    with pytest.warns(RuntimeWarning, match="runs on the reference backend, slowly"):
        ours, _ = hb.load_model(path, dtype="float32")
    assert agree(logits(ours, ids()), logits(model, ids()))
    dequantize_checkpoint(hb.open(path), tmp_path / "dense", dtype="float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert torch.equal(logits(again.eval(), ids()), logits(model, ids()))


@pytest.mark.parametrize(
    ("change", "config_", "says"),
    [
        ({"mcg": None}, {"codebook": "mcg"}, "codebook is mcg, and m.mcg is missing"),
        ({}, {"codebook": "mul1"}, "codebook is mul1, and m.mcg is there"),
        ({"mcg": np.array(5, np.int32)}, {}, "m.mcg is 0x5; the multiplier of mcg is 0xcbac1fed"),
        ({"mul1": MARKS["mul1"]["mul1"]}, {}, "both there; a weight has one codebook"),
        ({"su": np.zeros(8, np.int16)}, {}, "m.suh and m.su are both there"),
        ({"suh": np.zeros(64, np.float16)}, {}, r"m.suh has shape \[64\]; wanted \[128\]"),
        ({"svh": np.zeros(128, np.float32)}, {}, "m.svh is float32"),
        ({"trellis": np.zeros((8, 8, 24), np.int16)}, {}, "1.5 bits a code: half-integer rates are recognised and not read"),
        ({"trellis": np.zeros((8, 8, 144), np.int16)}, {}, "144 words a tile; wanted 16"),
        ({"trellis": np.zeros((7, 8, 64), np.int16)}, {}, "112 inputs and 128 outputs; wanted multiples of 128"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change, config_, says):
    t = {**tensors(128, 128, 4, "mcg"), **change}
    with pytest.raises((LayoutError, UnsupportedError), match=says):
        LAYOUT.unpack({s: a for s, a in t.items() if a is not None}, config_, "m")


def test_parts_that_are_lost_and_words_that_are_new_are_problems(tmp_path: Path):
    whole = under(NAME, tensors(128, 128, 2)) | under("model.layers.0.mlp.gate_proj", tensors(128, 128, 2, "mcg"))
    for lost in (f"{NAME}.suh", f"{NAME}.svh", f"{NAME}.trellis", "model.layers.0.mlp.gate_proj.mcg"):
        rest = {s: a for s, a in whole.items() if s != lost}
        path = folder(tmp_path / lost, {"model.safetensors": rest}, config(codebook="mcg") if "mcg" in lost else config())
        with hb.open(path) as ckpt, pytest.raises(CheckpointError, match=r"mcg|\.su|\.sv|trellis"):
            dequantize_checkpoint(ckpt, tmp_path / "out")
    path = folder(tmp_path / "word", {"model.safetensors": whole}, config(rotation="random"))
    with pytest.raises(CheckpointError, match="config key rotation: unknown"):
        dequantize_checkpoint(hb.open(path), tmp_path / "out")
    path = folder(tmp_path / "book", {"model.safetensors": whole}, config(codebook="lut"))
    with pytest.raises(UnsupportedError, match="codebook is 'lut'; read: 3inst, mcg, mul1"):
        hb.open(path)
