"""Importance matrices: llama.cpp's file form, read and written, and what `quantize` makes of one."""

from __future__ import annotations

import json

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints.gguf.writer import GGUFWriter
from halfbyte.cli import main
from halfbyte.conversion.importance import (
    ImportanceMatrix,
    ImportanceRounder,
    InputSquares,
    gguf_modules,
    read_importance,
    write_importance,
)
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import CheckpointError, FormatError, ShapeError, UnsupportedError
from halfbyte.gguf_models.pairs import pair
from halfbyte.quantizers import mse
from support.gguf_models import dense_model, write


def squares(k: int, experts: int = 1, seed: int = 0) -> InputSquares:
    rng = np.random.default_rng(seed)
    return InputSquares(np.exp(rng.standard_normal((experts, k))).astype(np.float32), np.full(experts, 8, np.float32))


def matrix_of(path, **changed) -> ImportanceMatrix:
    """Random importances of every matrix in the layers of a GGUF."""
    with hb.open(path) as checkpoint:
        infos = [i for i in checkpoint.infos() if len(i.shape) > 1 and i.key.startswith("blk.")]
    entries = {
        i.key.removesuffix(".weight"): squares(i.shape[-1], i.shape[0] if len(i.shape) == 3 else 1, seed)
        for seed, i in enumerate(infos)
    }
    return ImportanceMatrix({**entries, **changed}, ("text",), 1, 8)


def write_raw(path, tensors: dict[str, np.ndarray], kind: str = "imatrix"):
    with GGUFWriter(path, [pair("general.type", "string", kind)], {n: a.shape for n, a in tensors.items()}) as file:
        for name, array in tensors.items():
            file.add(name, "F32", [array])
    return path


def test_the_file_is_read_back_and_is_llama_cpps_form(tmp_path):
    gguf = pytest.importorskip("gguf")
    given = ImportanceMatrix({"blk.0.attn_q": squares(64), "blk.0.ffn_up_exps": squares(32, 3)}, ("a.txt", "ü"), 7, 512)
    path = write_importance(tmp_path / "i.gguf", given)
    back = read_importance(path)
    assert (back.datasets, back.chunks, back.chunk_size) == (("a.txt", "ü"), 7, 512)
    assert back.entries.keys() == given.entries.keys()
    for name, entry in given.entries.items():
        np.testing.assert_array_equal(back.entries[name].sums, entry.sums)
        np.testing.assert_array_equal(back.entries[name].counts, entry.counts)
    reader = gguf.GGUFReader(path)
    assert {k: reader.fields[k].contents() for k in ("general.type", "imatrix.datasets", "imatrix.chunk_count")} == {
        "general.type": "imatrix",
        "imatrix.datasets": ["a.txt", "ü"],
        "imatrix.chunk_count": 7,
    }
    # ggml's order of dimensions: the inputs first.
    assert {t.name: t.shape.tolist() for t in reader.tensors} == {
        "blk.0.attn_q.weight.in_sum2": [64, 1], "blk.0.attn_q.weight.counts": [1, 1],
        "blk.0.ffn_up_exps.weight.in_sum2": [32, 3], "blk.0.ffn_up_exps.weight.counts": [1, 3],
    }  # fmt: skip


def test_the_importance_is_the_mean_square_and_1_without_tokens():
    entry = InputSquares(np.array([[4, 8], [3, 3]], np.float32), np.array([2, 0], np.float32))
    np.testing.assert_array_equal(entry.importance(), [[2, 4], [1, 1]])


SUMS, COUNTS = np.ones((2, 8), np.float32), np.ones((2, 1), np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight.in_sum2": SUMS}, r"a\.weight\.in_sum2 has no a\.weight\.counts"),
        ({"a.weight.counts": COUNTS}, r"tensor 'a\.weight\.counts' is no"),
        ({"a.weight": SUMS}, r"tensor 'a\.weight' is no \.in_sum2 or \.counts"),
        ({"a.weight.in_sum2": SUMS, "a.weight.counts": COUNTS[:1]}, r"\[2, 8\] with \.counts \[1, 1\]; \[e, k\] and \[e, 1\]"),
        ({}, "no entry"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        read_importance(write_raw(tmp_path / "i.gguf", tensors))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("part", ["in_sum2", "counts"])
def test_numbers_that_poison_are_refused_by_name(tmp_path, bad, part):
    tensors = {"blk.0.attn_q.weight.in_sum2": SUMS.copy(), "blk.0.attn_q.weight.counts": COUNTS.copy()}
    tensors[f"blk.0.attn_q.weight.{part}"].flat[1] = bad
    with pytest.raises(FormatError, match=rf"blk\.0\.attn_q\.weight\.{part} has 1 of .* at input 1"):
        read_importance(write_raw(tmp_path / "i.gguf", tensors))


def test_other_files_are_named_for_what_they_are(tmp_path):
    with pytest.raises(CheckpointError, match=r"general\.type is 'model'; an importance matrix says 'imatrix'"):
        read_importance(write_raw(tmp_path / "m.gguf", {}, "model"))
    (tmp_path / "old.dat").write_bytes(b"\x01\0\0\0")
    with pytest.raises(UnsupportedError, match=r"older form; its GGUF form is read: llama-imatrix --in-file old\.dat"):
        read_importance(tmp_path / "old.dat")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny LLaMA: (GGUF, folder)."""
    home = tmp_path_factory.mktemp("importance")
    model = dense_model("llama")
    model.save_pretrained(home / "folder")
    return write(home / "m.gguf", "llama", model, packed=False), home / "folder"


def test_each_weight_is_rounded_under_its_own_importances(llama, tmp_path):
    path, _ = llama
    matrix = matrix_of(path)
    with hb.open(path) as source:
        rounder = ImportanceRounder(matrix, gguf_modules(source))
        done = quantize_checkpoint(source, tmp_path / "out.gguf", recipe_of("gguf:q4_0"), rounder, named="a")
        assert not any("no entry" in note for note in done.notes)
        with hb.open(tmp_path / "out.gguf") as out:
            packed = [k for k in out if out.info(k).quantized]
            assert len(packed) == 2 * 7
            for key in packed:
                dense = np.asarray(source[f"{key}.weight"], np.float32)
                assert out[key] == mse(dense, "q4_0", matrix.entries[key].importance()[0])


def test_a_folder_finds_its_importances_under_the_ggufs_names(llama, tmp_path):
    path, folder = llama
    matrix = matrix_of(path)
    with hb.open(folder) as source:
        done = quantize_checkpoint(
            source, tmp_path / "out", recipe_of("mlx:affine4:g32"), ImportanceRounder(matrix, gguf_modules(source)), named="a"
        )
        assert not any("no entry" in note for note in done.notes)
        with hb.open(tmp_path / "out") as out:
            for hf, name in (("mlp.down_proj", "ffn_down"), ("self_attn.q_proj", "attn_q"), ("mlp.gate_proj", "ffn_gate")):
                key = f"model.layers.1.{hf}"
                want = mse(np.asarray(source[f"{key}.weight"]), out[key].format, matrix.entries[f"blk.1.{name}"].importance()[0])
                assert out[key].parts.keys() == want.parts.keys()
                np.testing.assert_array_equal(out[key].dequantize("float32"), want.dequantize("float32"))


def test_what_has_no_entry_is_named_and_another_models_matrix_is_refused(llama, tmp_path, capsys):
    path, _ = llama
    matrix = matrix_of(path)
    entries = {name: entry for name, entry in matrix.entries.items() if name != "blk.1.ffn_down"}
    write_importance(tmp_path / "less.gguf", ImportanceMatrix(entries))
    command = ["quantize", str(path), str(tmp_path / "out.gguf"), "--to", "gguf:q4_0", "--method", "mse"]
    assert main([*command, "--imatrix", str(tmp_path / "less.gguf"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "the importance matrix has no entry for 1 weight, whose inputs count the same: blk.1.ffn_down" in err
    assert json.loads(out.splitlines()[-1])["record"] == "quantized"
    write_importance(tmp_path / "other.gguf", ImportanceMatrix({"blk.0.ffn_down": squares(32)}))
    assert main([*command, "--force", "--imatrix", str(tmp_path / "other.gguf")]) == 2
    assert "blk.0.ffn_down: importances [1, 32] for a weight" in capsys.readouterr().err
    write_importance(tmp_path / "other2.gguf", ImportanceMatrix({"blk.0.attn_qkv": squares(32)}))
    assert main([*command, "--force", "--imatrix", str(tmp_path / "other2.gguf")]) == 2
    assert "no entry fits a weight of this checkpoint; the entries are named like blk.0.attn_qkv" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--method", "rtn"], ["--method", "mse", "--calibration", "x"]])
def test_methods_that_do_not_use_it_refuse_it(llama, tmp_path, more, capsys):
    write_importance(tmp_path / "i.gguf", matrix_of(llama[0]))
    command = ["quantize", str(llama[0]), str(tmp_path / "out.gguf"), "--to", "gguf:q4_0"]
    assert main([*command, "--imatrix", str(tmp_path / "i.gguf"), *more]) == 2
    assert "allowed: --method mse without --calibration" in capsys.readouterr().err


def test_a_mix_is_rounded_under_importances(llama, tmp_path):
    write_importance(tmp_path / "i.gguf", matrix_of(llama[0]))
    command = ["quantize", str(llama[0]), "--to", "gguf:Q4_0", "--method", "mse"]
    assert main([*command[:2], str(tmp_path / "a.gguf"), *command[2:]]) == 0
    assert main([*command[:2], str(tmp_path / "b.gguf"), *command[2:], "--imatrix", str(tmp_path / "i.gguf")]) == 0
    with hb.open(tmp_path / "a.gguf") as a, hb.open(tmp_path / "b.gguf") as b:
        assert {k: str(a.info(k).format) for k in a} == {k: str(b.info(k).format) for k in b}
        assert a["blk.0.ffn_up"] != b["blk.0.ffn_up"]


def test_stacks_of_experts_have_an_importance_each():
    x = np.random.default_rng(0).standard_normal((3, 8, 32)).astype(np.float32)
    entry = squares(32, 3)
    stacked = ImportanceRounder(ImportanceMatrix({"blk.0.ffn_up_exps": entry}), {})
    fmt = hb.format_named("q4_0")
    whole = stacked("blk.0.ffn_up_exps", x, fmt)
    modules = {f"experts.{e}.up_proj": ("blk.0.ffn_up_exps", e) for e in range(3)}
    apart = ImportanceRounder(ImportanceMatrix({"blk.0.ffn_up_exps": entry}), modules)
    for e in range(3):
        assert apart(f"experts.{e}.up_proj", x[e], fmt) == whole[e] == mse(x[e], fmt, entry.importance()[e])
    with pytest.raises(
        ShapeError, match=r"blk\.0\.ffn_up_exps: importances \[3, 32\] for a weight \[2, 8, 32\]; wanted \[2, 32\]"
    ):
        stacked("blk.0.ffn_up_exps", x[:2], fmt)
