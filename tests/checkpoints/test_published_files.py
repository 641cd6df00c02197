"""Files as people publish them, by the rows of tests/cases.md: read with the right values, or
refused with what to do.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
from halfbyte.cli import main
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.layouts import LAYOUTS
from support.gguf_writer import GGUF, Q8_0, blocks, f32
from support.safetensors_bytes import folder, gptq_weight, under, write

RNG = np.random.default_rng(0)
Q, M = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}}


def gguf(path: Path, **options: object) -> Path:
    path.write_bytes(GGUF(**options).bytes())  # type: ignore[arg-type]
    return path


# Case 73: the parts of a weight lie in several shards.


def fp8(seed: int = 0) -> dict[str, np.ndarray]:
    q = hb.quantize(np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32), "fp8_e4m3:g32", rows=32)
    layout = LAYOUTS["fp8"]
    return dict(layout.pack(q, layout.config(q)))


def test_case_73_scales_in_another_shard_than_their_codes(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
    whole = under(Q, fp8())
    one = folder(tmp_path / "one", {"model.safetensors": whole}, config)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    two = folder(tmp_path / "two", dict(zip(names, ({k: v} for k, v in whole.items()), strict=True)), config)
    assert len(hb.open(two).info(Q).files) == 2
    assert np.array_equal(hb.open(one)[Q].dequantize(), hb.open(two)[Q].dequantize())
    for name, lost in zip(names, reversed(whole), strict=True):
        with hb.open(two / name) as alone:
            (entry,) = [e for e in alone.ledger().problems if e.status == "missing"]
            assert entry.name.startswith(Q)
            assert lost in f"{entry.name} {entry.why}" or lost.removeprefix(f"{Q}.") in entry.why
            with pytest.raises(CheckpointError, match=f"{entry.name}: missing"):
                dequantize_checkpoint(alone, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_case_73_four_parts_over_three_shards(tmp_path):
    whole = under(Q, gptq_weight())
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    parts = list(whole.items())
    shards = dict(zip(names, (dict(parts[:1]), dict(parts[1:2]), dict(parts[2:])), strict=True))
    split = folder(tmp_path / "split", shards, GPTQ)
    one = folder(tmp_path / "one", {"model.safetensors": whole}, GPTQ)
    assert np.array_equal(hb.open(one)[Q].dequantize(), hb.open(split)[Q].dequantize())
    for name in names:
        lacks = next(
            s for s in ("qweight", "qzeros", "scales", "g_idx") if f"{Q}.{s}" in whole and f"{Q}.{s}" not in shards[name]
        )
        try:
            with hb.open(split / name, GPTQ["quantization_config"]) as alone:
                message = str(alone.ledger().problems)
        except CheckpointError as error:  # codes without anything beside them do not open
            message = str(error)
        assert Q in message
        assert lacks in message or "its scales or zeros are missing" in message


# Case 77: the config ties the head, and the file has one of its own.


def test_case_77_a_head_of_its_own_under_a_tied_config(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from support.tiny_models import agree, ids, logits, write_tiny

    def tie(config: dict) -> None:
        config["tie_word_embeddings"] = True

    tiny = write_tiny(tmp_path / "in", "llama", "mlx", change_config=tie)
    with hb.open(tiny.folder) as checkpoint:
        assert "tied-head-twice" in {f.code for f in checkpoint.findings()}
        dequantize_checkpoint(checkpoint, tmp_path / "dense", dtype="float32")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert torch.equal(logits(theirs, ids()), logits(tiny.dense, ids()))
    model, _ = hb.load_model(tiny.folder)
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


# Case 78: another copy of the weights beside the shards.


def test_case_78_consolidated_weights_beside_the_shards(tmp_path):
    names = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    shards = {names[0]: under(Q, gptq_weight(seed=1)), names[1]: under(M, gptq_weight(seed=2))}
    clean = folder(tmp_path / "clean", shards, GPTQ)
    both = folder(tmp_path / "both", {**shards, "consolidated.safetensors": under("layers.0.attention.wq", gptq_weight())}, GPTQ)
    with hb.open(clean) as a, hb.open(both) as b:
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[k].dequantize(), b[k].dequantize()) for k in (Q, M))
        (finding,) = [f for f in b.findings() if f.code == "unreferenced-file"]
        assert (finding.key, finding.message) == ("consolidated.safetensors", "ignored: the numbered shards are the checkpoint")


# Case 79: oddities of a GGUF header.

ODD = {
    "a key twice": ({"pairs": [("k", "uint32", 1), ("k", "uint32", 2)]}, "key 'k' is given twice"),
    "an unknown value type": ({"raw_pairs": GGUF().string("odd") + (77).to_bytes(4, "little"), "pair_count": 2},
                              "key 'odd' has value type 77"),
    "a key that is not UTF-8": ({"raw_pairs": GGUF().string(b"\xff\xfe") + (4).to_bytes(4, "little") + bytes(4),
                                 "pair_count": 2}, "key 2 of 2 is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_case_79_odd_headers_name_the_key(name, tmp_path):
    options, message = ODD[name]
    path = gguf(tmp_path / "x.gguf", tensors=[f32("w", np.ones(4))], **options)
    with pytest.raises(CheckpointError, match=message):
        hb.open(path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "pair",
    [("", "uint32", 7), ("nested", "array[array[uint32]]", [[1, 2], [3]]), ("none", "array[string]", []), ("é", "string", "ü")],
)
def test_case_79_odd_headers_that_are_right_keep_every_value(pair, version, tmp_path):
    want = np.arange(8, dtype=np.float32).reshape(2, 4)
    path = gguf(tmp_path / "x.gguf", version=version, pairs=[pair, ("after", "uint32", 5)], tensors=[f32("w", want)])
    with hb.open(path) as checkpoint:
        assert checkpoint.metadata["after"] == 5
        value = checkpoint.metadata[pair[0]]
        assert [list(v) for v in value] == pair[2] if "array[array" in pair[1] else value == pair[2]
        assert np.array_equal(checkpoint["w"], want)


# Case 80: split files.


def split(path: Path, total: int = 2, **changes: object) -> list[Path]:
    out = []
    for i in range(2):
        pairs = [("general.architecture", "string", "llama")] if i == 0 else []
        numbers = {"split.no": ("uint16", i), "split.count": ("uint16", 2), "split.tensors.count": ("int32", total)}
        pairs += [(k, kind, changes.get(f"{k}@{i}", v)) for k, (kind, v) in numbers.items()]
        name = path / f"m-{i + 1:05d}-of-00002.gguf"
        out.append(gguf(name, pairs=pairs, tensors=[f32(f"t{i}", np.full(4, i + 1.0))]))
    return out


def test_case_80_any_part_opens_the_model_with_the_architecture_of_the_first(tmp_path):
    for path in split(tmp_path):
        with hb.open(path) as checkpoint:
            assert checkpoint.metadata["general.architecture"] == "llama"
            assert [checkpoint[k].tolist() for k in checkpoint] == [[1.0] * 4, [2.0] * 4]


def test_case_80_a_folder_of_parts_is_one_model_and_of_two_models_neither(tmp_path):
    parts = split(tmp_path)
    with hb.open(tmp_path) as checkpoint:
        assert len(checkpoint.keys()) == len(parts)
    parts[1].with_name("other.gguf").write_bytes(parts[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"2 models \(m-00001-of-00002\.gguf, other\.gguf\); open one of them by its path"):
        hb.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"split.count@1": 3}, "00002-of-00002.gguf"), ({"split.no@1": 0}, "00002-of-00002.gguf"),
        ({"split.no@0": 1}, "00001-of-00002.gguf"), ({"total": 5}, "split.tensors.count is 5; 2 files with 2 in all"),
    ],
)  # fmt: skip
def test_case_80_parts_that_contradict_each_other_are_named(changes, culprit, tmp_path):
    with pytest.raises(CheckpointError, match=culprit):
        hb.open(split(tmp_path, **changes)[0])


def test_case_80_a_part_missing_renamed_or_empty_is_named(tmp_path):
    first, second = split(tmp_path)
    raw = second.read_bytes()
    second.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf: the file is empty"):
        hb.open(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"shard 2 of 2 is missing: .*00002-of-00002\.gguf"):
        hb.open(first)
    (tmp_path / "other.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"other\.gguf: it is one of 2 shards .* give the files back their names"):
        hb.open(tmp_path / "other.gguf")


# Case 81: byte pieces.


@pytest.mark.parametrize("name", ["m.gguf.part{}of2", "m.gguf.part{}", "m.gguf.00{}", "m.safetensors.part{}of2"])
def test_case_81_byte_pieces_say_how_they_are_joined(name, tmp_path):
    whole = gguf(tmp_path / "whole", tensors=[blocks("w.weight", (16, 512), Q8_0, RNG)]).read_bytes()
    (tmp_path / "whole").unlink()
    paths = [tmp_path / name.format(i) for i in (1, 2)]
    for path, part in zip(paths, (whole[:4000], whole[4000:]), strict=True):
        path.write_bytes(part)
    for path in (*paths, tmp_path):
        with pytest.raises(
            CheckpointError, match=f"cat {paths[0].name} {paths[1].name} > {name.split('.part')[0].split('.00')[0]}"
        ):
            hb.open(path)
    if name.startswith("m.gguf"):
        joined = tmp_path / "m.gguf"
        joined.write_bytes(b"".join(p.read_bytes() for p in paths))
        assert hb.open(joined)["w"].shape == (16, 512)


@pytest.mark.parametrize(("count", "named"), [(6, 6), (7, 6)])
def test_case_81_of_many_byte_pieces_six_are_named(count, named, tmp_path):
    names = [f"m.gguf.part{i}" for i in range(count)]
    for name in (*names, "m.gguf.txt", "other.gguf.part0"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError) as caught:
        hb.open(tmp_path / names[0])
    assert f"cat {' '.join(names[:named])}{' ...' * (count > named)} > m.gguf" in str(caught.value)


def test_a_git_lfs_pointer_is_named_wherever_it_is(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    for name in ("m.gguf", "model.safetensors"):
        (tmp_path / name).write_bytes(pointer)
        with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`"):
            hb.open(tmp_path / name)
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a Git LFS pointer"):
        hb.open(tmp_path)
    write(tmp_path / "model.safetensors", under(Q, gptq_weight()))
    (tmp_path / "config.json").write_bytes(pointer)
    with pytest.raises(CheckpointError, match=r"config\.json is a Git LFS pointer"):
        hb.open(tmp_path)


def test_a_type_of_a_fork_says_what_to_type(tmp_path):
    tensor = f32("w", np.ones(32))
    tensor.type = 138
    with pytest.raises(CheckpointError, match=r"type 138; .* forks of llama\.cpp.*llama-quantize --allow-requantize IN OUT Q8_0"):
        hb.open(gguf(tmp_path / "x.gguf", tensors=[tensor]))


# Case 82: a vision projector beside the model.


def test_case_82_a_projector_is_not_taken_for_the_model(tmp_path, capsys):
    clip = [("general.architecture", "string", "clip")]
    projector = gguf(tmp_path / "mmproj-Model-f16.gguf", pairs=clip, tensors=[f32("v.patch_embd.weight", np.ones((2, 2)))])
    model = gguf(tmp_path / "Model-Q8_0.gguf", tensors=[blocks("token_embd.weight", (4, 32), Q8_0, RNG)])
    with hb.open(tmp_path) as checkpoint:
        assert isinstance(checkpoint, GGUFCheckpoint)
        assert checkpoint.file.paths == (model,)
    assert main(["inspect", str(projector)]) == 0
    assert "vision projector (general.architecture clip)" in capsys.readouterr().out
    with hb.open(projector) as checkpoint, pytest.raises(UnsupportedError, match=r"vision projector .*open the model's own"):
        checkpoint.check("load_model")


def test_a_v1_label_over_v2_zeros_is_found_without_data_and_warned_of_in_use(tmp_path, capsys):
    """All stored zero points are 8: what v2 writes for a symmetric weight, and v1 would read as 9."""
    tensors = gptq_weight()
    tensors["qzeros"] = np.full_like(tensors["qzeros"], int.from_bytes(bytes([0x88] * 4), "little", signed=True))
    path = folder(tmp_path / "in", {"model.safetensors": under(Q, tensors)}, GPTQ)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "warning [gptq-label]" in out
    assert "values: not read" in out
    with hb.open(path) as checkpoint, pytest.warns(hb.checkpoints.CheckpointWarning, match="labelled v1"):
        dequantize_checkpoint(checkpoint, tmp_path / "out")
