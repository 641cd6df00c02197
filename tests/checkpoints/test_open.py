"""Opening: folders, lone files, indices and shards, configuration beside them, laziness, and what
is refused.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.checkpoints import MissingKeyError
from halfbyte.errors import CheckpointError
from support.safetensors_bytes import (
    MLX,
    SHARDS,
    A,
    B,
    entry,
    folder,
    gptq_weight,
    mlx_weight,
    raw_file,
    two_shards,
    under,
    write,
)


def test_a_sharded_folder_reads_across_its_shards(tmp_path: Path):
    checkpoint = hb.open(two_shards(tmp_path))
    assert checkpoint.keys() == (A, B)
    assert (A in checkpoint, "x" in checkpoint, len(checkpoint), list(checkpoint)) == (True, False, 2, [A, B])
    assert checkpoint.info(A).files == (SHARDS[0],)
    assert set(checkpoint.info(B).files) == set(SHARDS)
    assert checkpoint.info(B).nbytes == sum(a.nbytes for a in mlx_weight().values())
    assert np.array_equal(checkpoint[B].parts["biases"], mlx_weight(seed=2)["biases"])
    assert checkpoint.findings() == []
    assert checkpoint.config == MLX
    assert repr(checkpoint) == f"SafetensorsCheckpoint('{tmp_path}', format='mlx', 2 tensors)"


def test_one_shard_opened_alone_says_so(tmp_path: Path):
    checkpoint = hb.open(two_shards(tmp_path) / SHARDS[0], config=MLX["quantization"])
    assert checkpoint.format == "mlx"
    assert checkpoint[A].shape == (8, 64)
    assert "one-shard" in {f.code for f in checkpoint.findings()}
    assert f"{B}.biases" in checkpoint  # its weight is in the other shard
    found = {(f.severity, f.code, f.key) for f in checkpoint.findings()}
    assert {("error", "unknown-tensor", f"{B}.biases"), ("error", "missing-tensor", f"{B}.weight")} <= found


@pytest.mark.parametrize("encoding", ["C", "cp1252"])
def test_case_55_config_is_utf8_whatever_the_locale(encoding: str, tmp_path: Path):
    path = folder(tmp_path, {"model.safetensors": under(A, mlx_weight())}, MLX | {"name": "Zoë 模型 “½”", "author": "\u2028"})
    text = json.dumps(MLX | {"name": "Zoë 模型 “½”"}, ensure_ascii=False)
    (path / "config.json").write_text("\ufeff" + text if encoding == "C" else text, encoding="utf-8")
    code = (
        "import _locale, locale, sys\n"
        "if sys.argv[2] == 'cp1252':\n"
        "    locale.getpreferredencoding = lambda *a: 'cp1252'; locale.getencoding = lambda: 'cp1252'\n"
        "    import io; io.text_encoding = lambda e, s=2: e or 'cp1252'\n"
        "import halfbyte as hb\n"
        "print(ascii(hb.open(sys.argv[1]).config['name']))\n"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LANG": "C"}
    done = subprocess.run([sys.executable, "-c", code, str(path), encoding], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ascii("Zoë 模型 “½”")


def test_configuration_given_goes_before_what_files_say(tmp_path: Path):
    wrong = {"quantization": {"group_size": 64, "bits": 2}}
    path = folder(tmp_path, {"model.safetensors": under(A, mlx_weight())}, wrong)
    assert hb.open(path)[A].format.bits == 2
    assert hb.open(path, config=MLX["quantization"])[A].format.bits == 4
    assert hb.open(path, config={"quantization_config": MLX["quantization"]})[A].format.bits == 4
    with pytest.raises(CheckpointError, match="config is a str; wanted the dictionary"):
        hb.open(path, config="mlx")  # type: ignore[arg-type]


def test_a_lone_file_carries_its_configuration_in_its_metadata(tmp_path: Path):
    path = write(tmp_path / "x.safetensors", under(A, mlx_weight()), {"quantization_config": json.dumps(MLX["quantization"])})
    assert hb.open(path)[A].shape == (8, 64)
    write(path, under(A, mlx_weight()), {"quantization_config": "[4"})
    with pytest.raises(CheckpointError, match=r"x\.safetensors: metadata quantization_config: not JSON"):
        hb.open(path)


def test_a_lone_file_that_carries_no_configuration_takes_the_one_beside_it(tmp_path: Path):
    path = folder(tmp_path, {"model.safetensors": under(A, mlx_weight())}, MLX) / "model.safetensors"
    assert hb.open(path)[A].format.bits == 4
    assert hb.open(path).config == MLX
    two = {"group_size": 64, "bits": 2}
    assert hb.open(path, config=two)[A].format.bits == 2
    write(path, under(A, mlx_weight()), {"quantization_config": json.dumps(two)})
    assert hb.open(path)[A].format.bits == 2
    (tmp_path / "config.json").write_text("{")
    assert hb.open(path)[A].format.bits == 2
    write(path, under(A, mlx_weight()))
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        hb.open(path)


@pytest.mark.parametrize("name", ["quantize_config.json", "hf_quant_config.json", "quant_config.json"])
def test_configs_beside_config_json_are_read(name: str, tmp_path: Path):
    tensors = {"model.safetensors": under(A, gptq_weight())}
    path = folder(tmp_path, tensors, {"hidden_size": 16})
    config = {
        "quantize_config.json": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        "quant_config.json": {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "gemm"},
        "hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    }[name]
    (path / name).write_text(json.dumps(config))
    checkpoint = hb.open(path)
    expected = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}[name]
    assert checkpoint.format == expected
    # The tensors are GPTQ's whatever the config says: read as that, with a warning.
    assert checkpoint[A].format.bits == 4
    assert checkpoint.info(A).layout == "gptq"
    assert ("layout-disagrees" in {f.code for f in checkpoint.findings()}) == (expected != "gptq")


def test_two_configs_that_contradict_each_other_are_a_finding(tmp_path: Path):
    path = folder(
        tmp_path,
        {"model.safetensors": under(A, gptq_weight())},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    )
    (path / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 128, "desc_act": True, "checkpoint_format": "gptq_v2"})
    )
    checkpoint = hb.open(path)
    assert checkpoint[A].format.group_size == 32
    assert dict(checkpoint[A].details)["zeros"].startswith("v2")  # what the first leaves out comes from the second
    (finding,) = [f for f in checkpoint.findings() if f.code == "configs-disagree"]
    assert "group_size is 32 in" in finding.message
    assert "and 128 in" in finding.message


@pytest.mark.parametrize(
    ("weight", "layout"),
    [(gptq_weight(), "gptq"), (gptq_weight(bits=8, stored_zero=127), "gptq")],
)
def test_without_a_config_the_tensors_say_what_they_are(weight: dict, layout: str, tmp_path: Path):
    checkpoint = hb.open(write(tmp_path / "x.safetensors", under(A, weight)))
    assert checkpoint.info(A).layout == layout
    assert checkpoint.info(A).shape == (16, 64)
    assert [f.code for f in checkpoint.findings()] == ["no-config"]


def test_without_a_config_awq_is_told_from_gptq_by_shape(tmp_path: Path):
    rng = np.random.default_rng(0)
    tensors = {
        "qweight": rng.integers(0, 100, (64, 4), dtype=np.int32), "qzeros": rng.integers(0, 100, (2, 4), dtype=np.int32),
        "scales": np.ones((2, 32), np.float16),
    }  # fmt: skip
    checkpoint = hb.open(write(tmp_path / "x.safetensors", under(A, tensors)))
    assert (checkpoint.format, checkpoint.info(A).layout, checkpoint.info(A).shape) == ("awq", "awq-gemm", (32, 64))


def test_biases_and_dense_tensors_keep_their_full_names(tmp_path: Path):
    dense = {
        f"{A}.bias": np.zeros(8, np.float16),
        "model.norm.weight": np.ones(64, np.float32),
        "odd name/é": np.zeros((1, 2), np.int64),
    }
    checkpoint = hb.open(folder(tmp_path, {"model.safetensors": under(A, mlx_weight()) | dense}, MLX))
    assert set(checkpoint) == {A, *dense}
    for key, array in dense.items():
        info = checkpoint.info(key)
        assert (info.kind, info.layout, info.format, info.quantized) == ("dense", "", None, False)
        assert (info.shape, info.dtype, info.nbytes, info.files) == (
            array.shape,
            array.dtype.name,
            array.nbytes,
            ("model.safetensors",),
        )
        assert np.array_equal(checkpoint[key], array)


def test_fused_experts_are_one_weight_of_three_axes(tmp_path: Path):
    rng = np.random.default_rng(0)
    blocks = {
        "blocks": rng.integers(0, 256, (3, 8, 2, 16), dtype=np.uint8),
        "scales": rng.integers(100, 140, (3, 8, 2), dtype=np.uint8),
    }
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = under(name, blocks, "_") | {f"{name}_bias": np.zeros((3, 8), np.float16)}
    stack = {s: np.stack([mlx_weight(seed=e)[s] for e in range(4)]) for s in ("weight", "scales", "biases")}
    checkpoint = hb.open(
        folder(tmp_path / "a", {"model.safetensors": tensors}, {"quantization_config": {"quant_method": "mxfp4"}})
    )
    assert checkpoint.format == "gpt-oss"
    assert checkpoint[name].shape == (3, 8, 64)
    assert checkpoint[f"{name}_bias"].shape == (3, 8)
    checkpoint = hb.open(folder(tmp_path / "b", {"model.safetensors": under("l.mlp.switch_mlp.up_proj", stack)}, MLX))
    assert checkpoint["l.mlp.switch_mlp.up_proj"].shape == (4, 8, 64)


def test_a_key_that_is_not_there_names_what_is(tmp_path: Path):
    checkpoint = hb.open(
        folder(tmp_path, {"model.safetensors": under(A, mlx_weight()) | {"norm.weight": np.ones(2, np.float32)}}, MLX)
    )
    for bad, says in (
        (f"{A}.weight", "it is packed: its key is"),
        ("norm", "it is dense: its key is 'norm.weight'"),
        (f"{A}x", f"nearest: {A}"),
    ):
        with pytest.raises(MissingKeyError) as caught:
            checkpoint[bad]
        assert says in str(caught.value)
        with pytest.raises(KeyError):
            checkpoint.info(bad)


def test_the_two_nearest_names_are_named(tmp_path: Path):
    for name in ("model_a", "model_b", "model_c", "other"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"no such file or folder here \(nearest: [^,]*model_.?, [^,]*model_.?\)"):
        hb.open(tmp_path / "model_d")
    with pytest.raises(CheckpointError, match=r"no such file or folder here \(nearest: [^,]*other\)"):
        hb.open(tmp_path / "othe")


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        hb.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no \.safetensors or \.gguf file here"):
        hb.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, which runs code"):
        hb.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="allowed: a folder or a regular file"):
        hb.open(tmp_path / "pipe")
    (tmp_path / "model.txt").write_text("hello, this is no model at all")
    with pytest.raises(
        CheckpointError, match=r"model\.txt begins with the text 'hello, t'; a safetensors file .* fetch it again"
    ):
        hb.open(tmp_path / "model.txt")
    with pytest.raises(CheckpointError, match=r"model\.tx: there is no such file or folder here \(nearest: .*model\.txt\)"):
        hb.open(tmp_path / "model.tx")
    (tmp_path / "noise").write_bytes(b"hello, t".translate(bytes(range(128, 256)) * 2))
    with pytest.raises(CheckpointError, match=r"noise: header length .* Is it a safetensors file\?"):
        hb.open(tmp_path / "noise")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"empty\.safetensors: the file is empty; fetch it again"):
        hb.open(tmp_path / "empty.safetensors")


def test_a_web_page_in_place_of_a_shard_is_called_one(tmp_path: Path):
    (tmp_path / "model-00001-of-00001.safetensors").write_text("<!DOCTYPE html><html></html>")
    with pytest.raises(
        CheckpointError, match=r"model-00001-of-00001\.safetensors begins with the text '<!DOCTYP'; .* A web page"
    ):
        hb.open(tmp_path)


def test_a_gguf_is_known_by_its_first_bytes_or_by_its_ending(tmp_path: Path, golden: Path):
    model = (golden / "gguf" / "tiny_mixed.gguf").read_bytes()
    (tmp_path / "model.bin").write_bytes(model)
    assert hb.open(tmp_path / "model.bin").format == "gguf"
    (tmp_path / "model.gguf").write_bytes(b"GGU?" + model[4:])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        hb.open(tmp_path / "model.gguf")


def test_a_folder_of_gguf_files(tmp_path: Path, golden: Path):
    model = (golden / "gguf" / "tiny_mixed.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(model)
    (tmp_path / "mmproj-a.gguf").write_bytes(model)
    assert hb.open(tmp_path).format == "gguf"
    (tmp_path / "b.gguf").write_bytes(model)
    with pytest.raises(CheckpointError, match=r"2 models \(a\.gguf, b\.gguf\); open one of them"):
        hb.open(tmp_path)


def test_arrays_are_views_of_the_file_and_outlive_the_checkpoint(tmp_path: Path):
    values = np.arange(4096, dtype=np.float32)
    path = tmp_path / "x.safetensors"
    save_file({"w": values, "v": values + 1}, path)
    with hb.open(path) as checkpoint:
        w = checkpoint["w"]
        assert not w.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            w[0] = 1
        assert np.array_equal(w, values)
    assert np.array_equal(w, values)
    with pytest.raises(CheckpointError, match="closed; open the checkpoint again"):
        checkpoint["v"]


def test_a_file_replaced_after_opening_is_noticed(tmp_path: Path):
    path = write(tmp_path / "x.safetensors", {"w": np.arange(8, dtype=np.float32)})
    checkpoint = hb.open(path)
    other = write(tmp_path / "y.safetensors", {"w": np.arange(8, dtype=np.float32) + 1})
    other.replace(path)
    with pytest.raises(CheckpointError, match="was changed since it was opened"):
        checkpoint["w"]


def test_no_file_stays_open_and_no_warning_comes_from_one(tmp_path: Path):
    """A checkpoint that is dropped without `close`, in a reference cycle as an error's traceback
    makes, and one whose file was replaced.
    """
    path = write(tmp_path / "x.safetensors", {"w": np.arange(8, dtype=np.float32)})
    gc.collect()  # what earlier tests left open
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for cyclic in (False, True):
            checkpoint = hb.open(path)
            assert checkpoint["w"][1] == 1
            if cyclic:
                cycle = [checkpoint]
                cycle.append(cycle)
                del cycle
        replaced = hb.open(path)
        write(tmp_path / "y.safetensors", {"w": np.arange(8, dtype=np.float32)}).replace(path)
        with pytest.raises(CheckpointError, match="was changed"):
            replaced["w"]
        if sys.platform == "linux":
            assert len(os.listdir("/proc/self/fd")) == before + 1  # of `checkpoint`
        del checkpoint
        gc.collect()
    assert not caught
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == before


def test_four_and_six_bit_dtypes_are_their_bytes(tmp_path: Path):
    text = json.dumps(
        {
            "a": entry("F4", [2, 6], 0, 6),
            "b": entry("F6_E2M3", [1, 4], 6, 9),
            "c": entry("F4", [2], 9, 10),
            "d": entry("F4", [6, 1], 10, 13),
        }
    )
    checkpoint = hb.open(raw_file(tmp_path / "x.safetensors", text, bytes(range(13))))
    assert checkpoint["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint["b"].tolist() == [[6, 7, 8]]
    assert checkpoint["c"].tolist() == [9]
    with pytest.raises(CheckpointError, match=r"tensor 'd': rows of \[6, 1\] F4 elements are not whole bytes"):
        checkpoint["d"]


def sparse(path: Path, shards: int = 4, gigabytes: int = 8, modules: int = 400) -> Path:
    """A GPTQ checkpoint whose data were never written: holes of the file system."""
    path.mkdir()
    each = gigabytes * (1 << 30) // (shards * modules)
    k, n = 4096, each * 2 // 4096 // 64 * 64
    weight_map = {}
    for shard in range(shards):
        header, end, name = {}, 0, f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        for m in range(modules):
            for suffix, dtype, shape in (
                ("qweight", "I32", [k // 8, n]),
                ("qzeros", "I32", [k // 128, n // 8]),
                ("scales", "F16", [k // 128, n]),
            ):
                size = shape[0] * shape[1] * (4 if dtype == "I32" else 2)
                tensor = f"model.layers.{shard}.mlp.experts.{m}.down_proj.{suffix}"
                header[tensor] = entry(dtype, shape, end, end + size)
                weight_map[tensor] = name
                end += size
        raw_file(path / name, json.dumps(header))
        os.truncate(path / name, (path / name).stat().st_size + end)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}))
    return path


def test_opening_8_gigabytes_touches_headers_only(tmp_path: Path):
    path = sparse(tmp_path / "model")
    assert sum(p.stat().st_size for p in path.glob("*.safetensors")) > 8 << 30
    script = Path(__file__).parents[1] / "support" / "opening_cost.py"
    done = subprocess.run([sys.executable, script, str(path)], capture_output=True, text=True, check=True)
    cost = json.loads(done.stdout)
    assert cost["error"] == ""
    assert cost["peak_mb"] < 150, cost
    assert cost["seconds"] < 1, cost


def test_reading_a_tensor_touches_its_own_bytes_only(tmp_path: Path):
    """Of two large tensors one is read: resident memory grows by its size, not by both."""
    size = 64 << 20
    path = raw_file(
        tmp_path / "x.safetensors", json.dumps({"a": entry("U8", [size], 0, size), "b": entry("U8", [size], size, 2 * size)})
    )
    with path.open("r+b") as f:
        f.seek(0, os.SEEK_END)
        f.write(bytes(2 * size))
    code = (
        "import sys, halfbyte as hb\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "c = hb.open(sys.argv[1]); c.info('a'); start = rss(); a = c['a']; lazy = rss(); total = int(a.sum()); read = rss()\n"
        "del a; print(lazy - start, read - start, rss() - start, total)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    lazy, read, released, total = map(int, done.stdout.split())
    assert total == 0
    assert size * 0.9 < lazy < size * 1.2  # read, not mapped
    assert size * 0.9 < read < size * 1.2
    assert released < size * 0.2


def test_importing_halfbyte_is_light():
    heavy = ("torch", "transformers", "gguf", "safetensors", "typer", "rich", "mlx")
    code = f"import sys, halfbyte; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("given", "kind"), [(None, "NoneType"), (3, "int"), (["a"], "list"), (b"a", "bytes")])
def test_what_is_no_path_is_named(given, kind):
    with pytest.raises(CheckpointError, match=rf"^\[open\] .* is a {kind}; give the path of a folder or a file$"):
        hb.open(given)
