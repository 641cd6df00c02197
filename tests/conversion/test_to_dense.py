"""`dequantize`: dense safetensors of every kind of checkpoint, streamed, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import halfbyte
from halfbyte import QTensor, quantize
from halfbyte.checkpoints import SafetensorsWriter, save
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.conversion.to_dense import dense_config, dense_dtype, dequantize_checkpoint, outputs, parse_size, shards
from halfbyte.errors import CheckpointError, FormatError, HalfbyteError
from halfbyte.layouts import LAYOUTS
from halfbyte.verification.compare import verify
from support.conversion_models import gaps
from support.faults import contents
from support.memory_checkpoint import MemoryCheckpoint, packed

CHECKPOINTS = [
    "mlx/ckpt_affine_g64_b4", "mlx/ckpt_mxfp4", "modelopt/ckpt_nvfp4", "modelopt/ckpt_mxfp4", "modelopt/ckpt_mxfp8",
    "compressed-tensors/ckpt_w4a16", "compressed-tensors/ckpt_nvfp4a16", "bitsandbytes/ckpt_nf4_dq",
    "gguf/tiny_mixed.gguf", "gguf/tiny_fp4_moe.gguf", "gguf/tiny_align64.gguf",
]  # fmt: skip


def model(tmp_path: Path, **tensors: object) -> Path:
    """A folder with a packed model in halfbyte's own layout."""
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {f"layers.{i}.proj": packed("mxfp4", (64, 128), i) for i in range(4)}
    save(folder / "model.safetensors", {**weights, "norm.weight": np.ones(7, np.float32), **tensors})
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_result_is_the_exact_value_rounded_once(name, golden, tmp_path):
    with open_checkpoint(golden / name, allow_unknown=gaps(golden / name)) as source:
        written = dequantize_checkpoint(source, tmp_path / "dense")
        with open_checkpoint(tmp_path / "dense") as result:
            assert result.format == "dense"
            assert written.tensors == len(result)
            for info in source.infos():
                if info.quantized:
                    dense = result[f"{info.key}.weight"]
                    want = source[info.key].dequantize(written.dtype)
                    assert dense.dtype == want.dtype
                    np.testing.assert_array_equal(dense.view(np.uint8), want.view(np.uint8))
                elif info.key not in written.dropped:
                    np.testing.assert_array_equal(np.asarray(result[info.key]), np.asarray(source[info.key]))
            assert verify(source, result).verdict == "identical"


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if "ckpt_" in n])
def test_producer_arithmetic_gives_the_producers_own_weights(name, golden, tmp_path):
    """reference.safetensors holds what the producer's own code decoded."""
    with open_checkpoint(golden / name) as source:
        bf16 = name.startswith(("modelopt/ckpt_nvfp4", "bitsandbytes"))
        dtype = "bfloat16" if bf16 else None
        dequantize_checkpoint(source, tmp_path / "dense.safetensors", dtype=dtype, arithmetic="producer")
    result = load_file(tmp_path / "dense.safetensors")
    reference = load_file(golden / name / "reference.safetensors")
    assert {f"ref::{k}" for k in result} == set(reference)
    for key, want in reference.items():
        np.testing.assert_array_equal(result[key.removeprefix("ref::")].astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype, tmp_path):
    folder = model(tmp_path)
    assert main(["dequantize", str(folder), str(tmp_path / "out"), "--dtype", dtype]) == 0
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert result["layers.0.proj.weight"].dtype.name == dtype
    assert result["norm.weight"].dtype.name == "float32", "dense tensors keep their dtype"


def test_gpt_oss_experts_become_what_transformers_keeps(tmp_path):
    w = packed("mxfp4", (2, 8, 64))
    key = "model.layers.0.mlp.experts.down_proj"
    ckpt = MemoryCheckpoint({key: w}, layout="gpt-oss")
    dequantize_checkpoint(ckpt, tmp_path / "out.safetensors", dtype="bfloat16")
    np.testing.assert_array_equal(load_file(tmp_path / "out.safetensors")[key], w.dequantize("bfloat16").swapaxes(1, 2))


def test_scales_of_the_inputs_are_refused(tmp_path):
    """ModelOpt's AWQ: dense weights without them would be another model."""
    ckpt = MemoryCheckpoint({"m.up": packed("int4:g32", (4, 32)), "m.up.pre_quant_scale": np.ones(32, np.float32)})
    with pytest.raises(CheckpointError, match=r"m\.up\.pre_quant_scale scales the inputs of m\.up; without it the weights"):
        dequantize_checkpoint(ckpt, tmp_path / "out", dtype="float32")


def test_shards_and_their_index(tmp_path):
    folder = model(tmp_path)
    out = tmp_path / "out"
    assert main(["dequantize", str(folder), str(out), "--max-shard-size", "40kB", "--dtype", "bfloat16"]) == 0
    names = sorted(p.name for p in out.glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == 4 * 64 * 128 * 2 + 28
    found = {key: name for name in names for key in load_file(out / name)}
    assert found == index["weight_map"]
    assert all(sum(a.nbytes for a in load_file(out / n).values()) <= 40_000 for n in names)
    with open_checkpoint(folder) as a, open_checkpoint(out) as b:
        assert verify(a, b).verdict == "identical"


def test_a_tensor_larger_than_a_shard_has_a_file_to_itself(tmp_path):
    sizes = [10, 500, 10, 10]
    ckpt = MemoryCheckpoint({f"t{i}": np.zeros(s, np.uint8) for i, s in enumerate(sizes)})
    from halfbyte.conversion.to_dense import outputs

    found = shards(outputs(ckpt, "float32")[0], 100)
    assert [[t.name for t in shard] for shard in found] == [["t0"], ["t1"], ["t2", "t3"]]
    assert shards([], 100) == [[]]


def test_what_goes_along(golden, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(golden / "modelopt" / "ckpt_nvfp4", source)
    (source / "reference.safetensors").unlink()
    (source / "tokenizer.json").write_text('{"é": 1}', encoding="utf-8")
    (source / "chat_template.jinja").write_text("{{ x }}", encoding="utf-8")
    (source / "notes.pdf").write_bytes(b"%PDF")
    assert main(["dequantize", str(source), str(tmp_path / "out")]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    before = json.loads((source / "config.json").read_text(encoding="utf-8"))
    after = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" in before
    before.pop("quantization_config")
    assert after == before
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_configurations():
    text = {"dtype": "float16", "quantization": {}, "x": 1}
    nested = {"torch_dtype": "float32", "text_config": text, "compression_config": {}, "y": 2}
    assert dense_config(nested, "bfloat16") == {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "x": 1}, "y": 2}
    assert dense_dtype({}) == "float32"
    assert dense_dtype({"torch_dtype": "torch.bfloat16"}) == "bfloat16"
    assert dense_dtype({"dtype": None, "text_config": {"dtype": "float16"}}) == "float16"
    assert dense_dtype({"dtype": "float8_e4m3fn"}) == "float32"


def test_activation_scales_are_left_out_and_said(golden, tmp_path, capsys):
    assert main(["dequantize", str(golden / "modelopt" / "ckpt_nvfp4"), str(tmp_path / "out"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["record"] == "dequantized"
    assert len(record["dropped"]) == 7
    assert all(n.endswith(".input_scale") for n in record["dropped"])
    assert (record["tensors"], record["quantized"], record["nonfinite"]) == (12, 7, {})


def test_values_beyond_the_dtype_are_counted(tmp_path, capsys):
    w = packed("mxfp4", (4, 32))
    scales = np.full((4, 1), 127, np.uint8)
    scales[2] = 145  # 6 · 2^18 is beyond float16
    codes = np.full((4, 16), 0x77, np.uint8)
    big = QTensor(w.format, w.shape, {"codes": codes, "scales": scales})
    save(tmp_path / "w.safetensors", {"big": big})
    assert main(["dequantize", str(tmp_path / "w.safetensors"), str(tmp_path / "out.safetensors"), "--dtype", "float16"]) == 0
    assert "warning: big.weight: 32 values infinite or NaN in float16" in capsys.readouterr().err


def test_memory_is_a_block_of_rows(tmp_path, monkeypatch):
    w = packed("int4", (8192, 512), group_size=128)
    sizes: list[int] = []
    original = QTensor.dequantize

    def spy(self, dtype="float32", arithmetic="exact"):
        sizes.append(self.size)
        return original(self, dtype, arithmetic)

    monkeypatch.setattr(QTensor, "dequantize", spy)
    dequantize_checkpoint(MemoryCheckpoint({"w": w}), tmp_path / "out.safetensors")
    assert max(sizes) == 1 << 20
    assert sum(sizes) == w.size


def test_odd_sizes_and_dtypes_keep_their_bytes(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.integers(0, 9, 3).astype(np.uint8), "b": np.float32(1.5).reshape(()), "c": np.zeros((0, 4), np.float16),
        "d": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16), "e": rng.standard_normal((2, 3, 5)),
        "f": np.array([True, False, True]), "g": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    }  # fmt: skip
    dequantize_checkpoint(MemoryCheckpoint(tensors), tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as result:
        assert set(result.keys()) == set(tensors)
        for key, want in tensors.items():
            got = result[key]
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    "wrong",
    [[np.zeros((2, 3), np.float32)], [np.zeros((3, 3), np.float32)] * 2, [np.zeros(6, np.float64)]],
    ids=["too few", "too many", "another dtype"],
)
def test_the_writer_wants_every_byte_once(wrong, tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"\[save\] .*: the blocks of 'w' do not make up float32 \[4, 3\]"),
        SafetensorsWriter(tmp_path / "w.safetensors") as out,
    ):
        out.add_blocks("w", np.dtype(np.float32), (4, 3), wrong)
    assert list(tmp_path.iterdir()) == []


# Places


def test_an_existing_checkpoint_is_replaced_when_forced_and_else_untouched(tmp_path, capsys):
    folder = model(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model-00001-of-00002.safetensors", "README.md", "LICENSE", "config.json", "vocab.txt"):
        (out / name).write_text("old", encoding="utf-8")
    before = sorted(p.name for p in out.iterdir())
    assert main(["dequantize", str(folder), str(out)]) == 2
    assert f"{out} exists; give another path, or --force to replace it" in capsys.readouterr().err
    assert sorted(p.name for p in out.iterdir()) == before
    assert main(["dequantize", str(folder), str(out), "--force"]) == 0
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_where_names_cannot_be_exchanged_what_has_the_name_in_between_stays(kind, tmp_path, capsys, monkeypatch):
    """The old folder is then renamed first, to a name that only a run of this program uses."""
    folder, out, between = model(tmp_path), tmp_path / "out", tmp_path / ".out.replaced"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"old")
    began = []

    def put_there(*args):
        began.append(args)
        {"folder": between.mkdir, "file": between.touch, "link": lambda: between.symlink_to(folder)}[kind]()
        return False

    monkeypatch.setattr("halfbyte.checkpoints.safetensors.sharded_writer.exchange", put_there)
    assert main(["dequantize", str(folder), str(out), "--force"]) == 2
    assert len(began) == 1
    says = {"folder": "exists", "file": "is not a folder", "link": "is a link"}[kind]
    assert f"{between} {says}; an interrupted run leaves no such thing there" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == b"old"
    assert os.path.lexists(between)


@pytest.mark.parametrize("stray", ["thesis.tex", ".git/config", "holiday.jpg", "link.safetensors"])
def test_force_replaces_checkpoints_only(stray, tmp_path, capsys):
    folder = model(tmp_path)
    out = tmp_path / "out"
    (out / stray).parent.mkdir(parents=True)
    (out / "model.safetensors").write_bytes(b"old")
    if stray == "link.safetensors":
        (out / stray).symlink_to(tmp_path / "elsewhere")
    else:
        (out / stray).write_text("mine", encoding="utf-8")
    assert main(["dequantize", str(folder), str(out), "--force"]) == 2
    first = stray.partition("/")[0]
    assert f"{out} holds {first!r}; --force replaces checkpoints only" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == b"old"


def test_force_leaves_folders_without_weights_and_devices_alone(tmp_path, capsys):
    folder = model(tmp_path)
    code = tmp_path / "code"
    code.mkdir()
    (code / "main.py").write_text("print()", encoding="utf-8")
    assert main(["dequantize", str(folder), str(code), "--force"]) == 2
    assert f"{code} holds no weights; --force replaces checkpoints only" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert main(["dequantize", str(folder), str(tmp_path / "pipe"), "--force"]) == 2
    assert "is a device, a pipe or a socket" in capsys.readouterr().err


def test_a_gguf_is_not_written_dense(tmp_path, capsys):
    assert main(["dequantize", str(model(tmp_path)), str(tmp_path / "x.gguf")]) == 2
    assert "x.gguf: dense weights are written as a folder, or as one file named *.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()


def test_the_current_folder_is_a_place_too(tmp_path, monkeypatch):
    folder = model(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["dequantize", str(folder), "."]) == 0
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["model.safetensors"]


def test_an_empty_folder_is_a_fine_place(tmp_path):
    (tmp_path / "out").mkdir()
    assert main(["dequantize", str(model(tmp_path)), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_the_source_is_never_replaced(force, tmp_path, capsys):
    folder = model(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    for out in (folder, tmp_path, folder / "model.safetensors"):
        source = folder if out != folder / "model.safetensors" else out
        assert main(["dequantize", str(source), str(out), *force]) == 2
        assert "holds the checkpoint being read" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_failure_leaves_nothing(name, tmp_path, monkeypatch):
    calls = 0

    def fail_late(self, dtype="float32", arithmetic="exact"):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise CheckpointError("[open] layers.2: damaged")
        return np.zeros(self.shape, dtype)

    folder = model(tmp_path)
    monkeypatch.setattr(QTensor, "dequantize", fail_late)
    with open_checkpoint(folder) as ckpt, pytest.raises(CheckpointError):
        dequantize_checkpoint(ckpt, tmp_path / name)
    assert calls == 3
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_an_interrupted_run_is_resumed(name, tmp_path):
    """Tensors that were written are not decoded again, and the bytes and the report are those of
    one run.
    """
    folder = model(tmp_path)
    with open_checkpoint(folder) as ckpt:
        whole = dequantize_checkpoint(ckpt, tmp_path / f"whole-{name}", max_shard_size=1)

        def stop(done: int, total: int, key: str) -> None:
            if done > total // 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            dequantize_checkpoint(ckpt, tmp_path / name, max_shard_size=1, progress=stop)
        assert not (tmp_path / name).exists()
        seen: list[int] = []
        again = dequantize_checkpoint(ckpt, tmp_path / name, max_shard_size=1, progress=lambda d, t, k: seen.append(d))
    assert seen == sorted(seen)
    assert seen[-1] == again.nbytes
    assert again.nonfinite == whole.nonfinite
    first, second = tmp_path / f"whole-{name}", tmp_path / name
    assert contents(first) == contents(second)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_full_disk_is_foreseen(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with open_checkpoint(model(tmp_path)) as ckpt, pytest.raises(CheckpointError, match=r"bytes are needed, 1,000 are free"):
        dequantize_checkpoint(ckpt, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("1000", 1000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5XB", "1e9"])
def test_bad_sizes(text):
    with pytest.raises(FormatError, match=r"\[dequantize\] shard size .*; allowed: a number with B, KB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--dtype", "int4"), "'int4' is not a dtype to decode to"),
        (("--dtype", "float64"), "dtype float64; allowed: float32, bfloat16, float16"),
        (("--arithmetic", "fast"), "arithmetic 'fast'; allowed: exact, producer"),
        (("--max-shard-size", "lots"), "shard size 'lots'"),
    ],
)
def test_bad_options(option, message, tmp_path, capsys):
    assert main(["dequantize", str(model(tmp_path)), str(tmp_path / "out"), *option]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "gate_up_proj_blocks",
            np.zeros(512, np.uint8),
            r"gate_up_proj_blocks has shape \[512\]; wanted \[experts, rows, k/32, 16\]",
        ),
        ("w13_weight", np.zeros(512, np.float32), r"w13_weight has shape \[512\]; a weight of experts has 2 axes or more"),
    ],
)
def test_experts_of_another_shape_are_named(tmp_path, name, array, message):
    path = "model.layers.0.mlp.experts."
    save_file({path + name: array, path + "gate_up_proj_scales": np.zeros((2, 8, 2), np.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "quantization_config": {"quant_method": "mxfp4"}}))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(HalfbyteError, match=message):
        outputs(checkpoint, "float32")


@pytest.mark.parametrize("are_packed", [False, True])
def test_single_experts_of_gpt_oss_become_the_stacks_that_transformers_reads(are_packed, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from support.safetensors_bytes import folder
    from support.tiny_models import dense_model, ids, logits

    model = dense_model("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    state = {name: t.numpy() for name, t in model.state_dict().items()}
    path = "model.layers.0.mlp.experts"
    stacks = {leaf: state.pop(f"{path}.{leaf}") for leaf in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")}
    experts = model.get_submodule(path)
    for e in range(len(stacks["down_proj"])):
        up, bias = stacks["gate_up_proj"][e].T, stacks["gate_up_proj_bias"][e]  # rows of gate and up alternate
        single = {"gate_proj": (up[0::2], bias[0::2]), "up_proj": (up[1::2], bias[1::2])}
        single["down_proj"] = (stacks["down_proj"][e].T, stacks["down_proj_bias"][e])
        for name, (weight, own_bias) in single.items():
            at = f"{path}.{e}.{name}"
            state[f"{at}.bias"] = np.ascontiguousarray(own_bias)
            state[f"{at}.weight"] = np.ascontiguousarray(weight)
            if are_packed:
                q = quantize(np.ascontiguousarray(weight), "int4:g32", scale_dtype="float32")
                del state[f"{at}.weight"]
                state |= {f"{at}.{s}": t for s, t in LAYOUTS["compressed-tensors"].pack(q, {}).items()}
                rounded = torch.from_numpy(np.ascontiguousarray(q.dequantize("float32").T))
                target = (
                    experts.down_proj.data[e] if name == "down_proj" else experts.gate_up_proj.data[e, :, name == "up_proj" :: 2]
                )
                target.copy_(rounded)
    config = json.loads(json.dumps({k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}))
    if are_packed:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
        groups = {"group_0": {"targets": ["re:.*experts.*"], "weights": weights, "format": "pack-quantized"}}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
        }
    given = folder(tmp_path / "single", {"model.safetensors": state}, config)
    dequantize_checkpoint(open_checkpoint(given), tmp_path / "dense", dtype="float32")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    assert torch.equal(logits(read, ids()), logits(model, ids()))


def test_dense_experts_of_gpt_oss_have_mlx_s_names_and_come_back(tmp_path):
    """MLX holds gate and up apart and rows first; the other layers are packed."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from support.tiny_models import agree, dense_model, ids, logits

    model = dense_model("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    model.save_pretrained(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "mlx"), "--to", "mlx:affine8:g32"]) == 0
    path = "model.layers.0.mlp.experts"
    experts = {leaf: p.detach().numpy() for leaf, p in model.get_submodule(path).named_parameters()}
    with open_checkpoint(tmp_path / "mlx") as written:
        keys = {key.removeprefix(f"{path}.") for key in written.keys() if key.startswith(path)}  # noqa: SIM118
        assert keys == {f"{n}.{kind}" for n in ("gate_proj", "up_proj", "down_proj") for kind in ("weight", "bias")}
        for first, half in enumerate(("gate_proj", "up_proj")):
            rows = experts["gate_up_proj"].swapaxes(1, 2)[:, first::2]
            assert np.array_equal(written[f"{path}.{half}.weight"], rows)
            assert np.array_equal(written[f"{path}.{half}.bias"], experts["gate_up_proj_bias"][:, first::2])
        assert np.array_equal(written[f"{path}.down_proj.weight"], experts["down_proj"].swapaxes(1, 2))
    assert main(["dequantize", str(tmp_path / "mlx"), str(tmp_path / "dense"), "--dtype", "float32"]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    for leaf, p in back.get_submodule(path).named_parameters():
        assert np.array_equal(p.detach().numpy(), experts[leaf]), leaf
    packed, _ = halfbyte.load_model(tmp_path / "mlx")
    assert agree(logits(packed, ids()), logits(back, ids()))


@pytest.mark.parametrize(("leaf", "shape"), [("down_proj", (64, 32)), ("gate_up_proj_bias", (2, 3, 64))])
def test_a_tensor_of_another_rank_than_gpt_oss_has_stays_as_it_is(leaf, shape, tmp_path):
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    with SafetensorsWriter(tmp_path / "model.safetensors") as out:
        out.add(f"model.layers.0.mlp.experts.{leaf}", values)
        out.add("model.layers.0.self_attn.q_proj.weight", np.ones((32, 64), np.float32))
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}', "utf-8")
    assert main(["quantize", str(tmp_path), str(tmp_path / "mlx"), "--to", "mlx:affine8:g32"]) == 0
    assert np.array_equal(load_file(tmp_path / "mlx" / "model.safetensors")[f"model.layers.0.mlp.experts.{leaf}"], values)
