"""`halfbyte quantize` without calibration: recipes, defaults, what is written in each layout."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

import halfbyte
from halfbyte import format_named
from halfbyte import quantize as round_to_nearest
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.cli import main
from halfbyte.cli.failures import complain_of_notes
from halfbyte.conversion.quantize import error_of
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import FormatError, LayoutError
from halfbyte.quantizers import mse

NAMES = {
    "model.embed_tokens": (64, 128), "model.layers.0.self_attn.q_proj": (128, 128), "model.layers.0.mlp.gate_proj": (256, 128),
    "model.layers.0.mlp.down_proj": (128, 256), "model.layers.0.mlp.gate": (8, 128), "lm_head": (64, 128),
}  # fmt: skip
PROJECTIONS = [n for n in NAMES if n.endswith("_proj")]


def write_dense(folder: Path, dtype=ml_dtypes.bfloat16, names: dict | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 128, "intermediate_size": 256}))
    weights = {f"{n}.weight": (rng.standard_normal(s) * 0.05).astype(dtype) for n, s in (names or NAMES).items()}
    with SafetensorsWriter(folder / "model.safetensors") as out:
        for name, array in weights.items():
            out.add(name, array)
        out.add("model.layers.0.input_layernorm.weight", np.ones(128, dtype))
    return weights


TARGETS = [
    "gptq:int4:g128", "gptq:uint4:g64", "awq:uint4:g64", "mlx:affine4:g64", "mlx:nvfp4", "mlx:mxfp4",
    "compressed-tensors:int4:g128", "compressed-tensors:nvfp4", "compressed-tensors:mxfp4", "compressed-tensors:fp8",
    "modelopt:nvfp4", "modelopt:int4:g128", "halfbyte:int3:g32",
]  # fmt: skip


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("to", TARGETS)
def test_projections_are_rounded_and_the_rest_kept(tmp_path, to, method):
    weights = write_dense(tmp_path / "in")
    out = tmp_path / "out"
    assert main(["quantize", str(tmp_path / "in"), str(out), "--to", to, "--method", method]) == 0
    with halfbyte.open(out) as written:
        assert written.format == to.partition(":")[0]
        assert sorted(k for k in written if written.info(k).quantized) == sorted(PROJECTIONS)
        assert [f for f in written.findings(data=True) if f.severity != "note"] == []
        for name, x in weights.items():
            module = name.removesuffix(".weight")
            if module in PROJECTIONS:
                q = written[module]
                fmt = q.format
                if ":int4" in to:  # GPTQ stores the middle code as a zero point
                    fmt = format_named("int4", fmt.group_size, scale_dtype=fmt.scale)
                plain = round_to_nearest(x, fmt)
                if method == "rtn":
                    assert np.array_equal(q.dequantize(), plain.dequantize())
                else:
                    assert error_of(x, q) <= error_of(x, plain)
            else:
                assert np.array_equal(written[name], x)


def test_rules_in_order_and_kept_layers_by_name(tmp_path, capsys):
    write_dense(tmp_path / "in")
    rules = ["--rule", r"q_proj$=keep", "--rule", r"down_proj=affine8:g32", "--rule", "lm_head=affine6"]
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "mlx:affine4:g64", *rules, "--json"]) == 0
    *tensors, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = {t["key"]: (t["kind"], t["other_format"]) for t in tensors}
    assert kinds["model.layers.0.mlp.down_proj.weight"] == ("quantized", "affine8:g32 with bfloat16 scales")
    assert kinds["model.layers.0.mlp.gate_proj.weight"][1].startswith("affine4:g64")
    assert kinds["model.layers.0.self_attn.q_proj.weight"][0] == "copied"
    assert kinds["model.layers.0.mlp.gate.weight"][0] == "copied"
    assert kinds["lm_head.weight"][1].startswith("affine6:g64")
    assert (summary["record"], summary["method"], summary["quantized"]) == ("quantized", "rtn", 3)
    assert all(0 < t["relative_rms"] < 0.2 for t in tensors if t["kind"] == "quantized")
    with halfbyte.open(tmp_path / "out") as written:
        assert written.info("model.layers.0.mlp.down_proj").format.bits == 8
        assert written.info("lm_head").format.bits == 6


def write_gguf(path: Path, k: int = 256) -> dict[str, np.ndarray]:
    """A dense GGUF by gguf's own writer."""
    rng = np.random.default_rng(1)
    weights = {
        "token_embd.weight": rng.standard_normal((32, k)), "blk.0.attn_q.weight": rng.standard_normal((k, k)),
        "blk.0.ffn_down.weight": rng.standard_normal((k, 96)), "blk.0.attn_norm.weight": np.ones(k),
    }  # fmt: skip
    weights = {n: (a * 0.1).astype(np.float32) for n, a in weights.items()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü"])
    for name, array in weights.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_notes_of_one_cause_share_a_line(capsys):
    """300 weights of a model are not 300 lines; what stands alone stays as it is."""
    why = "q4_K does not fit rows of 96: q8_0 instead"
    layers = [f"blk.{i}.{name}: {why}" for i in range(150) for name in ("attn_q", "ffn_up")]
    complain_of_notes(["a whole sentence: with a colon", *layers, "blk.7.ffn_down: kept dense"])
    assert capsys.readouterr().err.splitlines() == [
        "halfbyte: note: a whole sentence: with a colon",
        f"halfbyte: note: 300 weights (blk.*.attn_q, blk.*.ffn_up): {why}",
        "halfbyte: note: blk.7.ffn_down: kept dense",
    ]


@pytest.mark.parametrize("codec", ["q4_0", "q4_K", "q8_0", "mxfp4", "nvfp4", "iq4_nl"])
def test_case_39_a_dense_gguf_to_block_types_with_a_way_out_for_short_rows(tmp_path, codec, capsys):
    """Rows of 96 are no whole blocks of 256 or 64: they become Q8_0 and that is said; gguf's own
    reader decodes the file.
    """
    weights = write_gguf(tmp_path / "in.gguf")
    paths = [str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf")]
    assert main(["quantize", *paths, "--to", f"gguf:{codec}", "--method", "rtn"]) == 0
    err = capsys.readouterr().err
    if codec in ("q4_K", "nvfp4"):
        word = "nvfp4_ue4m3" if codec == "nvfp4" else codec
        assert f"note: blk.0.ffn_down: {word} does not fit rows of 96: q8_0 instead" in err
    reader = gguf.GGUFReader(str(tmp_path / "out.gguf"))
    assert reader.fields["general.name"].contents() == "tiny"
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "ü"]
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert types["token_embd.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.attn_q.weight"] == codec.upper()
    assert types["blk.0.ffn_down.weight"] == ("Q8_0" if codec in ("q4_K", "nvfp4") else codec.upper())
    factor = next((t.data.item() for t in reader.tensors if t.name == "blk.0.attn_q.scale"), 1.0)
    assert (factor != 1.0) == (codec == "nvfp4")
    for t in reader.tensors:
        if t.name.startswith("blk.0.attn_q.w") or t.name.startswith("blk.0.ffn"):
            x = weights[t.name]
            decoded = gguf.quants.dequantize(t.data, t.tensor_type) * (factor if "attn_q" in t.name else 1)
            assert np.sqrt(np.square(decoded - x).sum() / np.square(x).sum()) < 0.12


def test_packed_sources_are_refused_unless_asked_for(tmp_path, capsys):
    write_dense(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "q"), "--to", "mlx:affine8:g64"]) == 0
    assert main(["quantize", str(tmp_path / "q"), str(tmp_path / "out"), "--to", "mlx:affine4:g64"]) == 2
    assert "is packed already (mlx, 3 weights). convert keeps their values; --from-packed" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "q"), str(tmp_path / "out"), "--to", "mlx:affine4:g64", "--from-packed"]) == 0
    with halfbyte.open(tmp_path / "out") as written:
        assert written.info(PROJECTIONS[0]).format.bits == 4


def test_packed_weights_that_the_recipe_keeps_stay_as_they_are(tmp_path):
    """A Q8_0 embedding beside projections that are rounded again: its blocks are the same bytes."""
    write_gguf(tmp_path / "in.gguf")
    first = ["--to", "gguf:q8_0", "--rule", "token_embd=q8_0", "--method", "rtn"]
    assert main(["quantize", str(tmp_path / "in.gguf"), str(tmp_path / "q8.gguf"), *first]) == 0
    again = ["--to", "gguf:q4_0", "--from-packed", "--method", "rtn"]
    assert main(["quantize", str(tmp_path / "q8.gguf"), str(tmp_path / "q4.gguf"), *again]) == 0
    with halfbyte.open(tmp_path / "q8.gguf") as a, halfbyte.open(tmp_path / "q4.gguf") as b:
        assert a["token_embd"] == b["token_embd"]
        assert b.info("blk.0.attn_q").dtype == "Q4_0"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "mlx"], "target 'mlx' names no codec; mlx holds affine4"),
        (["--to", "mxfp4"], "'mxfp4' is a codec; a target is spelled layout[:codec[:gN]], for example mlx:mxfp4"),
        (["--to", "mlx:affine4", "--rule", "nothing_here=affine6"], "rule 'nothing_here=affine6' matches no module"),
        (["--to", "mlx:affine4", "--rule", "x"], "rule 'x'; a rule is spelled regex=codec[:gN] or regex=keep"),
        (["--to", "mlx:affine4", "--rule", "x=mxfp9"], "'mxfp9' is not a codec"),
        (["--to", "mlx:affine4", "--method", "gtpq"], "--method gtpq; allowed: rtn, mse, gptq, awq, learned"),
        (["--to", "mlx:affine4", "--method", "gptq"], "--method gptq wants --calibration FILE"),
        (["--to", "mlx:affine4", "--act-order"], "--act-order with --method rtn; it belongs to gptq"),
        (["--to", "mlx:affine4", "--steps", "9"], "--steps with --method rtn; it belongs to learned"),
        (["--to", "mlx:affine4", "--method", "learned"], "--method learned wants --calibration FILE"),
        (["--to", "mlx:affine4", "--calibration", "x"], "--calibration with --method rtn, which looks at weights only"),
        (["--to", "mlx:affine4", "--rule", ".=keep"], "no weight to quantize"),
    ],
)
def test_what_cannot_be(tmp_path, capsys, arguments, text):
    write_dense(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rows_that_do_not_fit_are_kept_and_said(tmp_path, capsys):
    write_dense(tmp_path / "in", names={"m.up_proj": (32, 80), "m.down_proj": (32, 128)})
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "mlx:affine4:g64"]) == 0
    text = "note: m.up_proj: kept dense: [quantize] affine4:g64 with rows of 80; MLX wants whole groups of 64"
    assert text in capsys.readouterr().err
    with halfbyte.open(tmp_path / "out") as written:
        assert not written.info("m.up_proj.weight").quantized
        assert written.info("m.down_proj").quantized


def test_case_08_zero_weights_and_zero_blocks_have_no_nan_scale(tmp_path):
    """A row of 16 zeros and 16 values up to 0.01, and a tensor of zeros: no scale byte is 0x7F,
    zeros stay zeros.
    """
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    x = np.zeros((4, 64), np.float32)
    x[:, 16:32] = np.linspace(-0.01, 0.01, 16)
    with SafetensorsWriter(folder / "model.safetensors") as out:
        out.add("m.a_proj.weight", x)
        out.add("m.b_proj.weight", np.zeros((4, 64), np.float32))
    for to in ("modelopt:nvfp4", "compressed-tensors:nvfp4", "mlx:nvfp4", "mlx:mxfp4"):
        for method in ("rtn", "mse"):
            target = tmp_path / f"{to.replace(':', '-')}-{method}"
            assert main(["quantize", str(folder), str(target), "--to", to, "--method", method]) == 0
            with halfbyte.open(target) as written:
                for key in ("m.a_proj", "m.b_proj"):
                    scales = written[key].parts["scales"]
                    # E8M0's only NaN is 0xFF; E4M3 has one of each sign.
                    assert not ((scales if "mxfp4" in to else scales & 0x7F) == (0xFF if "mxfp4" in to else 0x7F)).any()
                    assert np.isfinite(written[key].dequantize()).all()
                assert not written["m.a_proj"].dequantize()[:, :16].any()
                assert not written["m.b_proj"].dequantize().any()


def test_defaults_of_the_recipe():
    recipe = recipe_of("gptq:int4:g128", ["layers\\.1\\.=int8", "head=int8"])
    assert recipe.of("model.layers.0.mlp.up_proj", 2).target.codec == "int4"
    assert recipe.of("model.layers.1.mlp.up_proj", 2).target.codec == "int8"
    assert recipe.of("model.layers.10.mlp.up_proj", 2).target.codec == "int4"
    assert recipe.of("lm_head", 2).target.codec == "int8"
    for kept in ("model.embed_tokens", "model.layers.0.mlp.gate", "model.norm", "token_embd", "blk.0.ffn_gate_inp", "output"):
        assert recipe.of(kept, 2) is None
    assert recipe.of("model.layers.0.mlp.gate_proj", 2) is not None
    for stack in ("model.layers.0.mlp.experts.gate_up_proj", "blk.0.ffn_up_exps", "model.layers.0.mlp.switch_mlp.up_proj"):
        assert recipe.of(stack, 3) is not None
    assert recipe.of("model.layers.0.conv1d", 3) is None
    with pytest.raises((FormatError, LayoutError)):
        recipe_of("gptq:mxfp4")


def test_searched_scales_are_what_mse_finds(tmp_path):
    weights = write_dense(tmp_path / "in", np.float16)
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "halfbyte:int4:g32", "--method", "mse"]) == 0
    with halfbyte.open(tmp_path / "out") as written:
        for module in PROJECTIONS:
            assert written[module] == mse(weights[f"{module}.weight"], "int4:g32")
