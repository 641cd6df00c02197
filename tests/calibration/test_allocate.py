"""A codec for each weight within a budget: the estimates beside measured divergences, budgets that
are met, and recipes that lead to the same file again.
"""

from __future__ import annotations

import json

import pytest

import halfbyte as hb
import torch
from halfbyte.calibration import allocate
from halfbyte.calibration.sensitivity import sensitivities
from halfbyte.calibration.walk import token_sequences
from halfbyte.cli import main
from halfbyte.conversion.allocation import KEEP
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.evaluation import Window, compare
from support.calibration_models import write_model, write_text

CONTEXT, SEQUENCES = 64, 6
OPTIONS = {"context": CONTEXT, "sequences": SEQUENCES}
ON_THE_COMMAND_LINE = ["--context", str(CONTEXT), "--sequences", str(SEQUENCES)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(folder, its dense model, text, windows of the calibration)."""
    folder = tmp_path_factory.mktemp("allocate")
    model = write_model(folder / "in", "llama", tie_word_embeddings=True)
    text = write_text(folder / "text.txt", 1500)
    ids = token_sequences(hb.load_model(folder / "in")[1], text, CONTEXT, SEQUENCES)
    return folder / "in", model, text, [Window(tuple(s), 1) for s in ids]


def kl_of(path, source) -> float:
    return compare(hb.load_model(path)[0], source[1], source[3]).kl_mean


def test_estimates_are_close_to_what_one_rounded_weight_costs(source):
    folder, model, text, windows = source
    with hb.open(folder) as checkpoint:
        found = sensitivities(checkpoint, "mlx", text, codecs=["affine4:g64", "affine3:g64"], **OPTIONS)
    assert not found.kept
    assert [u.name for u in found.units].count("model.embed_tokens") == 1
    ratios = {}
    for unit in found.units:
        parameter = model.get_parameter(f"{unit.name}.weight")
        dense = parameter.detach().clone()
        for choice in unit.choices:
            # To second order; at some tenths of a nat the divergence grows more slowly.
            if (
                choice.codec != KEEP
                and choice.kl < 0.3
                and unit.name.endswith(("embed_tokens", "q_proj", "v_proj", "o_proj", "down_proj"))
            ):
                with torch.no_grad():
                    rounded = hb.quantize(dense.numpy(), choice.codec).dequantize("float32")
                    parameter.copy_(torch.from_numpy(rounded))
                    changed = [model(torch.tensor([w.tokens])).logits for w in windows]
                    parameter.copy_(dense)
                    kl = [
                        torch.nn.functional.kl_div(
                            c.log_softmax(-1),
                            model(torch.tensor([w.tokens])).logits.log_softmax(-1),
                            log_target=True,
                            reduction="none",
                        )
                        .sum(-1)
                        .mean()
                        for c, w in zip(changed, windows, strict=True)
                    ]
                ratios[unit.name, choice.codec] = choice.kl / float(torch.stack(kl).mean())
    assert len(ratios) > 12
    assert 0.5 < min(ratios.values()) <= max(ratios.values()) < 2
    assert 0.8 < sum(ratios.values()) / len(ratios) < 1.25


def test_estimates_follow_the_method(source):
    folder, _, text, _ = source
    with hb.open(folder) as checkpoint:
        nearest, other = (sensitivities(checkpoint, "mlx", text, m, codecs=["affine3:g64"], **OPTIONS) for m in ("rtn", "gptq"))
    totals = [sum(u.choices[0].kl for u in found.units if "embed" not in u.name) for found in (nearest, other)]
    assert totals[1] < 0.7 * totals[0]


def test_a_budget_of_bits_beats_the_uniform_codec_of_its_size(source, tmp_path, capsys):
    folder, _, text, _ = source
    command = ["quantize", str(folder)]
    assert main([*command, str(tmp_path / "uniform"), "--to", "mlx:affine4:g64", "--rule", "embed_tokens=affine4:g64"]) == 0
    budget = ["--to", "mlx", "--bits", "4.5", "--calibration", str(text), *ON_THE_COMMAND_LINE]
    recipe = tmp_path / "recipe.json"
    capsys.readouterr()
    assert main([*command, str(tmp_path / "mixed"), *budget, "--save-recipe", str(recipe), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    summary = next(r for r in records if r["record"] == "allocation")
    sizes = []
    for name in ("uniform", "mixed"):
        with hb.open(tmp_path / name) as read:
            sizes.append(sum(read.info(k).nbytes for k in read if read.info(k).quantized))
            assert all(read.info(k).quantized for k in read if "norm" not in k)
    assert sizes[1] == summary["bytes"] <= sizes[0]
    assert kl_of(tmp_path / "mixed", source) < 0.8 * kl_of(tmp_path / "uniform", source)
    assert main([*command, str(tmp_path / "again"), "--recipe", str(recipe)]) == 0
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "mixed/model.safetensors").read_bytes()
    with hb.open(folder) as checkpoint:
        same = allocate(checkpoint, "mlx", text, bits=4.5, **OPTIONS)
    assert list(same.rules) == json.loads(recipe.read_text())["rules"]


@pytest.mark.parametrize("size", [535_000, 560_000])
def test_a_budget_of_bytes_counts_the_whole_file(source, tmp_path, size):
    folder, _, text, _ = source
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--to", "halfbyte", "--size", str(size),
                 "--calibration", str(text), "--codecs", "affine3:g64,q4_0,mxfp4,affine8:g64",
                 *ON_THE_COMMAND_LINE]) == 0  # fmt: skip
    assert 0.9 * size < (tmp_path / "out/model.safetensors").stat().st_size <= size


def test_a_budget_of_divergence_is_measured(source, tmp_path):
    folder, _, text, _ = source
    with hb.open(folder) as checkpoint:
        found = allocate(
            checkpoint, "mlx", text, max_kl=0.1, folder=tmp_path, codecs=["affine4:g64", "affine6:g64", "affine8:g64"], **OPTIONS
        )
        assert list(tmp_path.iterdir()) == []
        quantize_checkpoint(checkpoint, tmp_path / "out", found.recipe)
    measured = found.facts["measured_kl"]
    assert 0.05 < measured <= 0.1
    assert kl_of(tmp_path / "out", source) == pytest.approx(measured, rel=1e-4)


def test_experts_and_joined_matrices_take_one_codec(tmp_path):
    write_model(tmp_path / "in", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    text = write_text(tmp_path / "text.txt", 300)
    with hb.open(tmp_path / "in") as checkpoint:
        found = allocate(
            checkpoint, "compressed-tensors", text, bits=4.4, codecs=["int4", "int8", "int3"], context=32, sequences=2
        )
        names = {m: c.codec for u, c in zip(found.units, found.choices, strict=True) for m in u.modules}
        assert {m.rpartition(".")[2] for m in names} == {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"}
        for layer in range(2):
            path = f"model.layers.{layer}"
            assert len({names[f"{path}.self_attn.{p}_proj"] for p in "qkv"}) == 1
            for word in ("w1", "w2", "w3"):
                assert len({names[f"{path}.block_sparse_moe.experts.{e}.{word}"] for e in range(4)}) == 1
        assert len(set(names.values())) > 1
        recipe = found.recipe
        assert all(str(recipe.of(m, 2).target.codec) == codec for m, codec in names.items())


def test_what_cannot_be_done_is_refused_with_what_can(source, tmp_path, capsys):
    folder, _, text, _ = source
    few = ["--codecs", "affine4:g64", *ON_THE_COMMAND_LINE]
    given = ["--calibration", str(text)]
    (tmp_path / "bad.json").write_text('{"halfbyte_recipe": 7}')
    for arguments, message in (
        (["--to", "mlx", "--bits", "2", *given, *few], "take 4.5 bits a weight at least"),
        (["--to", "mlx", "--size", "20KB", *given, *few], "this checkpoint takes"),
        (["--to", "mlx:affine4:g64", "--bits", "5", *given], "chooses the codecs; give mlx"),
        (["--to", "mlx", "--bits", "5"], "wants --calibration"),
        (["--to", "mlx", "--bits", "5", "--size", "1MB", *given], "one budget is allowed"),
        (["--to", "mlx", "--bits", "5", *given, "--rule", "q_proj=keep"], "--rule with --bits"),
        (["--to", "awq", "--bits", "5", *given], "one format for all"),
        (["--to", "mlx:affine4:g64", "--save-recipe", "r.json"], "without a budget"),
        (["--recipe", str(tmp_path / "bad.json")], "halfbyte_recipe is 7"),
        (["--to", "mlx", "--bits", "5", *given, "--save-recipe", str(tmp_path / "bad.json")], "halfbyte_recipe is 7"),
        (["--to", "mlx", "--bits", "5", *given, "--save-recipe", str(tmp_path / "no/r.json")], "there is no folder"),
        ([], "no target"),
    ):
        assert main(["quantize", str(folder), str(tmp_path / "out"), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
