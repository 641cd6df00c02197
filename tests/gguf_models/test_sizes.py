"""Sizes in a header that do not fit each other or the tensors: refused, never a fault, never a
tensor of another shape than the view states, and never a folder that its own configuration does not
describe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte
import transformers
from halfbyte.checkpoints.architecture import GGUF_FAMILIES, GGUF_SIZES
from halfbyte.cli import main
from halfbyte.errors import CheckpointError, HalfbyteError, UnsupportedError
from halfbyte.gguf_models.view import ModelView
from support.gguf_families import FAMILIES, family_file, family_model
from support.gguf_models import MODELS, dense_model, model_file
from support.gguf_writer import GGUF, f32
from transformers import AutoModelForCausalLM


def changed(path: Path, case: str, key: str, value: Any) -> Path:
    """The file of a family with another value of a key; None leaves the key out."""
    file = family_file(case, family_model(case))
    name = f"{case.partition(':')[0]}.{key}"
    pairs = [(k, kind, value if k == name else v) for k, kind, v in file.pairs if k != name or value is not None]
    assert pairs != file.pairs
    path.write_bytes(replace(file, pairs=pairs).bytes())
    return path


@pytest.mark.parametrize("case", FAMILIES)
def test_any_size_gives_a_view_or_a_refusal(tmp_path, case):
    file, rng = family_file(case, family_model(case)), np.random.default_rng(0)
    sizes = [i for i, (key, kind, _) in enumerate(file.pairs) if kind in ("uint32", "int32") and not key.startswith("tokenizer")]
    path = tmp_path / "model.gguf"
    for i in rng.permutation(sizes)[:8]:
        key, kind, value = file.pairs[i]
        for other in {0, 1, value + 1, 2 * value, value // 2}:
            pairs = [*file.pairs[:i], (key, kind, other), *file.pairs[i + 1 :]]
            path.write_bytes(replace(file, pairs=pairs).bytes())
            refused = ""
            try:
                with halfbyte.open(path) as read:
                    view = ModelView(read)
                    for name in view:
                        assert view[name].shape == view.info(name).shape
            except HalfbyteError as error:
                refused = str(error)
            assert not refused or str(path) in refused


@pytest.mark.parametrize("case", [case for case in FAMILIES if case.partition(":")[0] not in GGUF_FAMILIES])
def test_a_header_of_which_no_model_is_built_is_refused_by_every_command(tmp_path, capsys, case):
    """Of `inspect` and of a GGUF made of the file too, which need no model."""
    file, path, out = family_file(case, family_model(case)), tmp_path / "model.gguf", tmp_path / "out.gguf"
    for i, (key, kind, value) in enumerate(file.pairs):
        if key.partition(".")[2] not in ("embedding_length", "block_count"):
            continue
        pairs = [*file.pairs[:i], (key, kind, 2 * value), *file.pairs[i + 1 :]]
        path.write_bytes(replace(file, pairs=pairs).bytes())
        assert main(["inspect", str(path)]) != 0, key
        assert main(["quantize", str(path), str(out), "--to", "gguf:q8_0", "--method", "rtn"]) == 2, key
        assert not out.exists()
        assert str(path) in "".join(capsys.readouterr())


@pytest.mark.parametrize("case", [case for case in FAMILIES if case.partition(":")[0] in GGUF_FAMILIES])
def test_a_size_of_nothing_and_fewer_blocks_than_there_are_are_refused_by_every_command(tmp_path, capsys, case):
    file, path, out = family_file(case, family_model(case)), tmp_path / "model.gguf", tmp_path / "out.gguf"
    changes = [(i, 0) for i, (key, _, _) in enumerate(file.pairs) if key.partition(".")[2] in GGUF_SIZES]
    changes += [(i, value - 1) for i, (key, _, value) in enumerate(file.pairs) if key.endswith(".block_count")]
    changes = [(i, other) for i, other in changes if file.pairs[i][1] in ("uint32", "int32")]
    assert len(changes) > 5
    for i, other in changes:
        key, kind, _ = file.pairs[i]
        path.write_bytes(replace(file, pairs=[*file.pairs[:i], (key, kind, other), *file.pairs[i + 1 :]]).bytes())
        assert main(["inspect", str(path)]) != 0, key
        assert main(["quantize", str(path), str(out), "--to", "gguf:q8_0", "--method", "rtn"]) == 2, key
        assert not out.exists()
        assert str(path) in "".join(capsys.readouterr())


def others(file: GGUF) -> Iterator[tuple[str, Any, GGUF]]:
    """(key, value, file) of each integer of a header, twice as large: one number, or one of a list."""
    for i, (key, kind, value) in enumerate(file.pairs):
        if kind not in ("uint32", "int32", "array[uint32]", "array[int32]") or key.startswith(("general", "tokenizer")):
            continue
        last = [*value[:-1], 2 * value[-1] or 1] if kind.startswith("array") else 2 * value or 1
        yield key, last, replace(file, pairs=[*file.pairs[:i], (key, kind, last), *file.pairs[i + 1 :]])


@pytest.mark.parametrize("case", [*MODELS, *FAMILIES])
def test_no_size_makes_a_folder_that_is_no_model(tmp_path, capsys, case):
    """Each size of each architecture, doubled: `dequantize` refuses, and nothing is written; or
    transformers loads the folder, with no tensor missing, left over or of another shape.
    """
    whole = model_file(case, dense_model(case), False) if case in MODELS else family_file(case, family_model(case))
    path = tmp_path / "model.gguf"
    refused = []
    for i, (key, _, file) in enumerate(others(whole)):
        path.write_bytes(file.bytes())
        out = tmp_path / str(i)
        status, said = main(["dequantize", str(path), str(out), "--dtype", "float32"]), capsys.readouterr().err
        if status:
            assert (status, out.exists()) == (2, False)
            assert str(path) in said
            refused.append(key.partition(".")[2])
        elif not (out / "config.json").exists():
            assert "names stay GGUF's, and neither config.json nor a tokenizer is written: " in said
        else:
            name = json.loads((out / "config.json").read_text())["architectures"][0]
            loader = getattr(transformers, name, AutoModelForCausalLM)
            _, info = loader.from_pretrained(out, output_loading_info=True, dtype="float32")
            assert not {key for key in info["missing_keys"] if not key.startswith("pooler.")}, key
            assert not info["unexpected_keys"], key
    assert {"block_count", "embedding_length"} <= set(refused)


@pytest.mark.parametrize(
    ("case", "key", "value", "words"),
    [
        ("qwen35moe", "ssm.time_step_rank", 8, r"\.ssm_a: shape \(\[4\]; the header makes it \[8\]\)"),
        ("hy_v4", "attention.kv_lora_rank", 128, r"attn_kv_a_mqa\.weight: shape \(\[72, 64\]; the header makes it \[136, 64\]\)"),
        ("stablelm", "rope.dimension_count", 9, "is 9; an even number up to 16"),
        ("laguna", "rope.dimension_count_swa", 32, "is 32; an even number up to 16"),
        ("bailingmoe2", "expert_group_count", None, "in 1 groups, 2 of them used"),
        ("deepseek2", "expert_group_count", 8, "equal groups of 2 experts or more"),
        ("bailingmoe3", "expert_group_count", 5, "in 5 groups"),
        ("gemma3n", "final_logit_softcapping", None, "its header describes no gemma3n_text: .*final_logit_softcapping"),
        ("minicpm3", "attention.head_count", 5, "its header describes no minicpm3: .*not a multiple of the number"),
        ("phi3:short", "rope.dimension_count", 8, "its header describes no phi3: .*short_factor"),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_load_model(tmp_path, case, key, value, words):
    path = changed(tmp_path / "model.gguf", case, key, value)
    with pytest.raises(CheckpointError, match=words):
        halfbyte.load_model(path)


def test_layers_that_the_header_does_not_state_make_no_folder(tmp_path):
    path = changed(tmp_path / "model.gguf", "bailingmoe3", "block_count", 1)
    with (
        halfbyte.open(path) as read,
        pytest.raises(CheckpointError, match=r"there is a tensor blk\.1.*the header states 1 layer"),
    ):
        ModelView(read)


@pytest.mark.parametrize("stem", ["ffn_gate_exps", "ffn_up_exps"])
@pytest.mark.parametrize("case", ["qwen2moe", "granitemoe", "kimi-linear"])
def test_a_bias_of_one_half_of_experts_is_refused(tmp_path, case, stem):
    path, file = tmp_path / "model.gguf", family_file(case, family_model(case))
    weight = next(t for t in file.tensors if t.name.endswith(f"{stem}.weight"))
    name = weight.name.replace("weight", "bias")
    path.write_bytes(replace(file, tensors=[*file.tensors, f32(name, np.ones(weight.dims[:0:-1], np.float32))]).bytes())
    with pytest.raises(CheckpointError, match=r"gate and up of .* have both a bias or none"):
        halfbyte.load_model(path)


def test_a_bias_of_experts_that_is_one_row_makes_no_folder(tmp_path):
    path, file = tmp_path / "model.gguf", family_file("qwen2moe", family_model("qwen2moe"))
    bias = f32("blk.0.ffn_down_exps.bias", np.ones(64, np.float32))
    path.write_bytes(replace(file, tensors=[*file.tensors, bias]).bytes())
    with halfbyte.open(path) as read, pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_down_exps\.bias have no counterpart"):
        ModelView(read)
