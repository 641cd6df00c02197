"""Whole checkpoints: what is written opens as what it says, holds the same values, and is whole or
not there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

import halfbyte
from halfbyte import QTensor, quantize
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.safetensors.native_layout import OwnLayout
from halfbyte.conversion import LossyError, convert, convert_checkpoint
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import format_for, recipe_of
from halfbyte.errors import CheckpointError, LayoutError, UnsupportedError
from halfbyte.verification.compare import verify
from support.conversion_models import CONFIG, gaps, identical, write_model
from support.golden_case import GOLDEN
from support.other_run import other_run
from support.safetensors_bytes import folder

EXACT = [
    *(("int4:g128", to) for to in ("gptq", "awq", "compressed-tensors", "mlx", "modelopt")),
    *(("uint4:g64", to) for to in ("gptq", "gptq-v2", "awq", "compressed-tensors", "mlx")),
    ("mxfp4", "compressed-tensors"), ("mxfp4", "modelopt"), ("mxfp4", "mlx"), ("mxfp4", "halfbyte"), ("nvfp4", "modelopt"),
    ("affine4:g64", "mlx"), ("int8:g32", "gptq"), ("int3:g64", "mlx"), ("int8:channel", "compressed-tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "to"), EXACT)
def test_written_checkpoints_open_as_what_they_are_and_hold_the_same_values(tmp_path, codec, to):
    source = write_model(tmp_path / "in", codec)
    done = convert(source, tmp_path / "out", to=to, workers=1)
    assert done.counts["lossy"] == done.counts["equal"] == 0
    assert identical(source, tmp_path / "out")
    with halfbyte.open(tmp_path / "out") as written:
        layout = done.goal.layout
        assert written.format == {"awq-gemm": "awq"}.get(layout, layout)
        assert {written.info(k).layout for k in written if written.info(k).quantized} == {layout}
        assert [str(f) for f in written.findings(data=True) if f.severity != "note"] == []
        assert written.config["_note"] == "ünïcode"
        assert len(written) == 4 * 2 + 4
    assert (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8") == '{"model": "ü"}'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("to", ["compressed-tensors", "mlx:nvfp4"])
def test_equal_edges_are_done_and_reported(tmp_path, to):
    source = write_model(tmp_path / "in", "nvfp4")
    done = convert(source, tmp_path / "out", to=to)
    assert done.counts["equal"] == 8
    assert {r.why for r in done.records if r.kind == "equal"} == {"every code under every block scale decodes to the same number"}
    with halfbyte.open(source) as a, halfbyte.open(tmp_path / "out") as b:
        for key in a:
            if a.info(key).quantized:
                assert np.array_equal(b[key].dequantize("bfloat16", "producer"), a[key].dequantize("bfloat16"))


def test_there_and_back_is_byte_identical(tmp_path):
    """halfbyte -> GPTQ -> AWQ -> compressed-tensors -> halfbyte: every part as it was."""
    source = write_model(tmp_path / "a", "uint4:g64")
    at = source
    for i, to in enumerate(("gptq-v2", "awq", "compressed-tensors", "halfbyte")):
        convert(at, tmp_path / f"{i}", to=to, workers=1)
        at = tmp_path / f"{i}"
    with halfbyte.open(source) as a, halfbyte.open(at) as b:
        assert set(a) == set(b)
        for key in a:
            assert a[key] == b[key] if isinstance(a[key], QTensor) else a[key].tobytes() == b[key].tobytes()


@pytest.mark.parametrize("folder", ["compressed-tensors/ckpt_w4a16", "compressed-tensors/ckpt_nvfp4a16"])
@pytest.mark.parametrize("to", ["gptq", "mlx", "modelopt", "halfbyte", "compressed-tensors"])
def test_golden_checkpoints_go_to_every_layout(tmp_path, folder, to):
    """Folders of compressed-tensors' own writer: exact or equal, or refused with every weight
    named.
    """
    source = GOLDEN / folder
    with halfbyte.open(source) as checkpoint:
        packed = [k for k in checkpoint if checkpoint.info(k).quantized]
        plan = convert_checkpoint(checkpoint, tmp_path / "out", to, plan=True)
        if plan.counts["lossy"]:
            with pytest.raises(LossyError) as caught:
                convert_checkpoint(checkpoint, tmp_path / "out", to)
            assert {k for k, _, _ in caught.value.losses} <= {r.key for r in plan.records if r.kind == "lossy"}
            assert not list(tmp_path.iterdir())
            return
        done = convert_checkpoint(checkpoint, tmp_path / "out", to)
    assert done.records == plan.records
    with halfbyte.open(tmp_path / "out") as written:
        assert [k for k in written if written.info(k).quantized] == packed
    if not done.counts["equal"]:
        assert identical(source, tmp_path / "out")


def test_mixed_widths_and_dense_projections_are_told_in_each_config(tmp_path):
    """Per-module parameters: what the layout's own config can say, it says; AWQ cannot and refuses."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    codecs = {"q_proj": "int4:g64", "k_proj": "int4:g64", "v_proj": "int8:g64"}
    with SafetensorsWriter(folder / "model.safetensors", {"format": "halfbyte", "version": "1"}) as out:
        for name, codec in codecs.items():
            q = quantize((rng.standard_normal((64, 128)) * 0.05).astype(np.float32), codec)
            for part, array in OwnLayout().pack(q, {}).items():
                out.add(f"model.layers.0.self_attn.{name}.{part}", array)
        out.add("model.layers.0.self_attn.o_proj.weight", rng.standard_normal((64, 128)).astype(np.float16))
    for to in ("gptq", "compressed-tensors", "mlx"):
        convert(folder, tmp_path / to, to=to, workers=1)
        assert identical(folder, tmp_path / to)
        with halfbyte.open(tmp_path / to) as written:
            assert [f for f in written.findings() if f.severity != "note"] == []
            assert written.info("model.layers.0.self_attn.v_proj").format.bits == 8
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert config["dynamic"] == {
        r"+:^model\.layers\.0\.self_attn\.v_proj$": {"bits": 8, "group_size": 64},
        r"-:^model\.layers\.0\.self_attn\.o_proj$": {},
    }
    ct = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())["quantization_config"]
    assert ct["ignore"] == ["model.layers.0.self_attn.o_proj"]
    assert [g["weights"]["num_bits"] for g in ct["config_groups"].values()] == [4, 8]
    with pytest.raises(CheckpointError, match=r"AWQ has one width and group size for all modules.*v_proj has"):
        convert(folder, tmp_path / "awq", to="awq")
    assert not (tmp_path / "awq").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_refusal_comes_before_the_work_and_gives_a_cause_once(tmp_path, monkeypatch):
    source, read = write_model(tmp_path / "in", "uint4:g64"), []
    one = halfbyte.open(source)
    get = type(one).__getitem__
    monkeypatch.setattr(type(one), "__getitem__", lambda self, key: (read.append(key), get(self, key))[1])
    with pytest.raises(LossyError) as caught:
        convert(source, tmp_path / "out", to="modelopt", workers=2)
    assert len(read) == len(caught.value.losses) == 1
    text = str(caught.value)
    assert text.startswith("[convert] 8 weights cannot go to modelopt exactly: ")
    assert text.count("relative RMS error of 0.") == 1
    assert "the first rows of one weight of each format were tried; --plan tries all" in text
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    done = convert(source, tmp_path / "out", to="modelopt", lossy=True)
    assert done.counts["lossy"] == 8
    assert all(0 < r.relative_rms < 0.2 for r in done.records if r.kind == "lossy")
    with halfbyte.open(source) as a, halfbyte.open(tmp_path / "out") as b:
        for c in verify(a, b).comparisons:
            (r,) = [r for r in done.records if r.key == c.key]
            if r.kind == "lossy":
                assert c.difference.relative_rms == pytest.approx(r.relative_rms, rel=1e-9)


def test_a_loss_beyond_the_first_rows_is_found_by_cause(tmp_path):
    """The first weight fits MLX's groups of 64; others have unequal scales in the halves of one."""
    source = tmp_path / "in.safetensors"
    rng = np.random.default_rng(0)
    fits = quantize(rng.integers(-8, 8, (8, 64)).astype(np.float32), "int4:g32")
    parts = dict(fits.parts) | {"scales": np.ones_like(fits.parts["scales"])}
    names = ["a", "b", "c"]
    with SafetensorsWriter(source, {"format": "halfbyte", "version": "1"}) as out:
        for name in names:
            scales = parts["scales"].copy()
            scales[..., 0] *= 1 if name == "a" else 3
            for part, array in OwnLayout().pack(QTensor(fits.format, fits.shape, {**parts, "scales": scales}), {}).items():
                out.add(f"{name}.{part}", array)
    with pytest.raises(LossyError) as caught:
        convert(source, tmp_path / "out", to="mlx:affine4:g64")
    assert [key for key, _, _ in caught.value.losses] == ["b", "c"]
    text = str(caught.value)
    assert "2 weights cannot go to mlx:affine4:g64 exactly: groups that would be joined have different scales" in text
    assert text.count("groups that would be joined") == 1
    assert caught.value.instead == "mlx:affine4:g32"
    assert not (tmp_path / "out").exists()


def test_shards_at_a_size_and_one_file(tmp_path):
    source = write_model(tmp_path / "in", "int4:g128")
    done = convert(source, tmp_path / "out", to="gptq", max_shard_size=30_000)
    shards = [f for f in done.files if f.endswith(".safetensors")]
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert max((tmp_path / "out" / f).stat().st_size for f in shards) < 30_000 + 600_000  # the room kept for headers
    assert identical(source, tmp_path / "out")
    convert(source, tmp_path / "one.safetensors", to="gptq")
    assert identical(source, tmp_path / "one.safetensors")
    with halfbyte.open(tmp_path / "one.safetensors") as written:
        assert written.format == "gptq"


def test_places_that_are_not_written(tmp_path):
    source = write_model(tmp_path / "in", "int4:g128")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    cases = {
        "there": ("gptq", "exists; give another path, or --force"), "in": ("gptq", "holds the checkpoint being read"),
        "x.gguf": ("gptq", "gptq is written as a folder"), "x": ("gguf", "a gguf target is one file, named *.gguf"),
    }  # fmt: skip
    for name, (to, text) in cases.items():
        with pytest.raises(CheckpointError) as caught:
            convert(source, tmp_path / name, to=to)
        assert text in str(caught.value)
    with pytest.raises(UnsupportedError, match=r"convert_hf_to_gguf.py"):
        convert(source, tmp_path / "x.gguf", to="gguf")
    with pytest.raises(LayoutError, match="no writer for bitsandbytes checkpoints; there are gptq"):
        convert(source, tmp_path / "y", to="bitsandbytes")
    with pytest.raises(CheckpointError, match=r"there holds 'x'; --force replaces checkpoints only"):
        convert(source, tmp_path / "there", to="gptq", overwrite=True)
    (tmp_path / "there" / "x").rename(tmp_path / "there" / "x.safetensors")
    convert(source, tmp_path / "there", to="gptq", overwrite=True)
    assert not (tmp_path / "there" / "x.safetensors").exists()


def test_case_40_to_42_broken_sources_are_refused_before_anything_is_written(tmp_path):
    source = write_model(tmp_path / "in", "int4:g128")
    convert(source, tmp_path / "sharded", to="gptq", max_shard_size=30_000)
    victim = sorted((tmp_path / "sharded").glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        convert(tmp_path / "sharded", tmp_path / "out", to="awq")
    assert not (tmp_path / "out").exists()


def test_stacks_of_experts_are_taken_apart_for_layouts_of_matrices(tmp_path):
    """gpt-oss: three experts in MXFP4 become modules of their own in GPTQ, and gate and up modules
    in MLX.
    """
    rng = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    config = CONFIG | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    path = "model.layers.0.mlp.experts"
    with SafetensorsWriter(folder / "model.safetensors") as out:
        for name, (n, k) in {"gate_up_proj": (128, 64), "down_proj": (64, 64)}.items():
            out.add(f"{path}.{name}_blocks", rng.integers(0, 256, (3, n, k // 32, 16)).astype(np.uint8))
            out.add(f"{path}.{name}_scales", rng.integers(118, 126, (3, n, k // 32)).astype(np.uint8))
            out.add(f"{path}.{name}_bias", rng.standard_normal((3, n)).astype(ml_dtypes.bfloat16))
    some = {"workers": 1, "allow_unknown": ["model.*", "lm_head"]}  # a part of a model
    convert(folder, tmp_path / "gptq", to="gptq", **some)
    with halfbyte.open(folder) as a, halfbyte.open(tmp_path / "gptq") as b:
        for e in range(3):
            assert np.array_equal(a[f"{path}.gate_up_proj"][e].dequantize(), b[f"{path}.{e}.gate_up_proj"].dequantize())
    convert(folder, tmp_path / "mlx", to="mlx", **some)
    with halfbyte.open(folder) as a, halfbyte.open(tmp_path / "mlx") as b:
        both = a[f"{path}.gate_up_proj"]
        assert np.array_equal(both.dequantize()[:, ::2], b[f"{path}.gate_proj"].dequantize())
        assert np.array_equal(both.dequantize()[:, 1::2], b[f"{path}.up_proj"].dequantize())
        assert b[f"{path}.gate_proj"].format.name == "mxfp4"
        assert np.array_equal(a[f"{path}.gate_up_proj_bias"][:, ::2], b[f"{path}.gate_proj.bias"])
    assert identical(folder, tmp_path / "mlx", some["allow_unknown"])
    for to in ("gpt-oss", "compressed-tensors", "modelopt", "halfbyte"):
        convert(folder, tmp_path / to, to=to, **some)
        assert identical(folder, tmp_path / to, some["allow_unknown"])


def test_input_scales_of_another_producer_s_kernels_are_left_out_and_pre_quant_scales_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    q = quantize(np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32), "nvfp4")
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    from halfbyte.layouts import LAYOUTS

    tensors = LAYOUTS["modelopt"].pack(q, {})
    with SafetensorsWriter(folder / "model.safetensors") as out:
        for suffix, array in tensors.items():
            out.add(f"m.up.{suffix}", array)
        out.add("m.up.input_scale", np.ones((), np.float32))
    done = convert(folder, tmp_path / "ct", to="compressed-tensors")
    assert done.dropped == ["m.up.input_scale"]
    assert convert(folder, tmp_path / "mo", to="modelopt").dropped == []
    with SafetensorsWriter(folder / "model.safetensors") as out:
        for suffix, array in tensors.items():
            out.add(f"m.up.{suffix}", array)
        out.add("m.up.pre_quant_scale", np.ones(64, np.float32))
    with pytest.raises(CheckpointError, match=r"m\.up\.pre_quant_scale scales the inputs of m\.up"):
        convert(folder, tmp_path / "x", to="compressed-tensors")


@pytest.mark.filterwarnings("ignore::halfbyte.checkpoints.CheckpointWarning")
@pytest.mark.parametrize("name", ["tiny_mixed.gguf", "tiny_fp4_moe.gguf", "tiny_align64.gguf"])
def test_gguf_to_gguf_keeps_names_key_values_and_values(tmp_path, name):
    source, out = GOLDEN / "gguf" / name, tmp_path / "out.gguf"
    done = convert(source, out, to="gguf", allow_unknown=gaps(source))
    assert done.counts["lossy"] == 0
    assert identical(source, out, gaps(source))
    ours, theirs = gguf.GGUFReader(str(out)), gguf.GGUFReader(str(source))
    skipped = ("GGUF.", "general.file_type", "general.alignment")
    for key, field in theirs.fields.items():
        if not key.startswith(skipped):
            assert repr(ours.fields[key].contents()) == repr(field.contents()), key  # NaN among them
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert (a.name, a.tensor_type, list(a.shape)) == (b.name, b.tensor_type, list(b.shape))
        assert a.data.tobytes() == b.data.tobytes()


@pytest.mark.filterwarnings("ignore::halfbyte.checkpoints.CheckpointWarning")
def test_gguf_to_another_block_type_is_read_by_gguf_s_own_reader(tmp_path):
    source, out = GOLDEN / "gguf" / "tiny_mixed.gguf", tmp_path / "out.gguf"
    with pytest.raises(LossyError, match="cannot go to gguf:q8_0 exactly"):
        convert(source, out, to="gguf:q8_0", allow_unknown=gaps(source))
    assert not list(tmp_path.iterdir())
    done = convert(source, out, to="gguf:q8_0", lossy=True, allow_unknown=gaps(source))
    kinds = {r.key: r.kind for r in done.records}
    reader = gguf.GGUFReader(str(out))
    assert int(reader.fields["general.file_type"].contents()) == 7
    with halfbyte.open(out) as written:
        for t in reader.tensors:
            key = t.name if t.name in written else t.name.removesuffix(".weight")
            if written.info(key).quantized:
                assert t.tensor_type.name == "Q8_0"
                ours = written[key].dequantize("float32", "producer")
                assert np.array_equal(gguf.quants.dequantize(t.data, t.tensor_type).reshape(ours.shape), ours)
                assert kinds[key] in ("exact", "exact-if", "lossy")


def test_a_gguf_that_is_no_model_keeps_names_and_says_so(tmp_path):
    done = convert(GOLDEN / "gguf" / "tiny_fp4_moe.gguf", tmp_path / "out", to="halfbyte")
    assert done.notes[0].endswith("neither config.json nor a tokenizer is written: a gpt-oss model without experts")
    assert identical(GOLDEN / "gguf" / "tiny_fp4_moe.gguf", tmp_path / "out")
    done = convert(GOLDEN / "gguf" / "tiny_fp4_moe.gguf", tmp_path / "mlx", to="mlx", lossy=True)
    assert "names stay GGUF's" in done.notes[0]


def test_case_39_rows_that_are_no_whole_k_quant_blocks(tmp_path):
    """Rows of 128 have no Q4_K: refused by name, and no file is left."""
    out = tmp_path / "x.gguf"
    with pytest.raises((LayoutError, LossyError), match=r"256|multiple"):
        convert(GOLDEN / "gguf" / "tiny_fp4_moe.gguf", out, to="gguf:q4_K", lossy=True)
    assert not list(tmp_path.iterdir())


def _killed(source: Path, out: Path, after: int) -> None:
    """A conversion whose process kills itself when so many shards are written."""

    def die(done: int, total: int, key: str) -> None:
        if len(list((out.parent / ".out.partial").glob("*.shard"))) >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, out, to="gptq", workers=1, max_shard_size=1, progress=die)


@pytest.mark.parametrize("after", [2, 5, 9])
def test_a_killed_run_leaves_nothing_that_opens_and_is_taken_up(tmp_path, after):
    source = write_model(tmp_path / "in", "int4:g128", layers=4)
    child = multiprocessing.get_context("fork").Process(target=_killed, args=(source, tmp_path / "out", after))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    partial = tmp_path / ".out.partial"
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"no \.safetensors or \.gguf file here"):
        halfbyte.open(partial)
    for path in partial.glob("*.shard"):
        with pytest.raises(CheckpointError, match=r"shard is part of an unfinished result; run the same command again"):
            halfbyte.open(path)
    done = convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=1)
    assert done.resumed == after
    assert identical(source, tmp_path / "out")
    fresh = convert(source, tmp_path / "fresh", to="gptq", workers=1, max_shard_size=1)
    assert fresh.records == done.records
    for path in sorted((tmp_path / "fresh").iterdir()):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "in", "out"]


def test_an_interrupted_run_of_other_work_is_thrown_away(tmp_path):
    source = write_model(tmp_path / "in", "int4:g128")

    def stop(done: int, total: int, key: str) -> None:
        if key.endswith("layers.1.self_attn.q_proj"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=1, progress=stop)
    assert (tmp_path / ".out.partial").is_dir()
    assert convert(source, tmp_path / "out", to="awq", workers=1, max_shard_size=1).resumed == 0
    assert identical(source, tmp_path / "out")


def test_two_runs_at_one_place(tmp_path):
    source = write_model(tmp_path / "in", "int4:g128")
    with other_run(tmp_path / ".out.partial.lock") as pid, pytest.raises(CheckpointError, match=f"process {pid} is writing it"):
        convert(source, tmp_path / "out", to="gptq")
    convert(source, tmp_path / "out", to="gptq")
    assert identical(source, tmp_path / "out")


_MEASURED = """
import resource, sys
from halfbyte.conversion import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], workers=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("to", ["compressed-tensors", "awq", "mlx"])
def test_case_43_conversion_streams(tmp_path, to):
    """96 MB of weights in tensors of 8 MB: memory grows by a few tensors, not by the checkpoint."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    with SafetensorsWriter(folder / "model.safetensors") as out:
        for i in range(12):
            out.add(f"l.{i}.up_proj.qweight", rng.integers(-(2**31), 2**31, (512, 4096), dtype=np.int32))
            out.add(f"l.{i}.up_proj.qzeros", np.full((32, 512), 0x77777777, np.int32))
            out.add(f"l.{i}.up_proj.scales", np.full((32, 4096), 0.01, np.float16))
    command = [sys.executable, "-c", _MEASURED, str(folder), str(tmp_path / "out"), to]
    grown_kb = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown_kb < (64 if to != "awq" else 96) * 1024


def test_case_55_configs_with_any_text_under_any_locale(tmp_path):
    """Files are read as ASCII by default, and the terminal takes cp1252."""
    source = write_model(tmp_path / "in", "int4:g128")
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252"}
    code = (
        "import locale, sys; from halfbyte.conversion import convert; convert(sys.argv[1], sys.argv[2], to='gptq'); "
        "print(locale.getpreferredencoding(False), sys.stdout.encoding)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, env={**os.environ, **settings}, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["ANSI_X3.4-1968", "cp1252"]
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["_note"] == "ünïcode"


def test_progress_counts_bytes_read(tmp_path):
    source = write_model(tmp_path / "in", "int4:g128")
    seen = []
    convert(source, tmp_path / "out", to="gptq", progress=lambda d, t, k: seen.append((d, t, k)))
    assert seen[-1][0] == seen[-1][1]
    assert [d for d, _, _ in seen] == sorted(d for d, _, _ in seen)


@pytest.mark.parametrize("at", range(1, 5))
def test_stopped_while_shards_get_their_names(tmp_path, monkeypatch, at):
    """Between two renames of the end: some shards have their names, the folder opens as nothing,
    the next run is whole.
    """
    source = write_model(tmp_path / "in", "int4:g128")
    real, count = Path.replace, 0

    def stop(self, target):
        nonlocal count
        if str(target).endswith(".safetensors"):
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=40_000)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError):
        halfbyte.open(tmp_path / ".out.partial")
    convert(source, tmp_path / "out", to="gptq", workers=1, max_shard_size=40_000)
    assert identical(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_a_plan_refuses_what_the_conversion_would(tmp_path):
    """A folder has not all that a GGUF holds: said before anybody relies on the plan."""
    source = write_model(tmp_path / "in", "int4:g32")
    for plan in (True, False):
        with pytest.raises(UnsupportedError, match="Give a GGUF of the same model, of any type, with --like"):
            convert(source, tmp_path / "out.gguf", to="gguf", plan=plan)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("to", "rule", "label"),
    [
        ("gptq:int4:g32", "int8:g32", "gptq"),
        ("gptq:int4:g32", "uint8:g32", "gptq_v2"),
        ("gptq-v2:int4:g32", "int8:g32", "gptq_v2"),
        ("gptq-v1:int4:g32", "int8:g32", "gptq"),
        ("gptq:int4:g32", "int6:g32", "gptq_p"),
        ("gptq-v2:int4:g32", "int6:g32", "gptq_v2"),
        ("gptq-v2:int3:g32", "int6:g32", "gptq_p"),  # as GPTQModel corrects the label
    ],
)
def test_weights_that_a_rule_names_have_the_zero_points_of_the_checkpoint(tmp_path, to, rule, label):
    """One `checkpoint_format` describes all of them: a weight written under another is read one
    zero point off.
    """
    rng = np.random.default_rng(0)
    dense = {f"model.layers.0.{name}": rng.standard_normal((64, 128)).astype(np.float32) for name in ("up_proj", "down_proj")}
    source = folder(tmp_path / "in", {"model.safetensors": {f"{name}.weight": w for name, w in dense.items()}}, CONFIG)
    recipe = recipe_of(to, [f"down_proj$={rule}"])
    with halfbyte.open(source) as opened:
        quantize_checkpoint(opened, tmp_path / "out", recipe, "rtn")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == label
    with halfbyte.open(tmp_path / "out") as out:
        for name, w in dense.items():
            fmt, _ = format_for(recipe.of(name, 2), "float32", w.shape)
            assert np.array_equal(out[name].dequantize("float32"), quantize(w, fmt).dequantize("float32")), name


@pytest.mark.parametrize("word", ["gptq", "gptq-v2"])
@pytest.mark.parametrize("codec", ["int5:g32", "uint6:g32", "int7:g32"])
def test_a_gptq_checkpoint_with_5_to_7_bits_has_one_kind_of_zero_points(tmp_path, codec, word):
    """All of it as GPTQModel corrects the label: planar; v1 beside another width is refused."""
    source = write_model(tmp_path / "in", codec)
    convert(source, tmp_path / "out", to=word, scale_dtype="float16")
    label = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["checkpoint_format"]
    assert label == {"gptq": "gptq_p", "gptq-v2": "gptq_v2"}[word]
    assert identical(source, tmp_path / "out")
    with halfbyte.open(source) as opened:
        name = next(k for k in opened if opened.info(k).quantized)
    mixed = recipe_of("gptq:int4:g32", [f"{re.escape(name)}$={codec}"])
    assert mixed.goal.params == {"checkpoint_format": "gptq_p"}
    assert mixed.rules[0].goal.params == {"checkpoint_format": "gptq_p"}
