"""Names in a quantization config: which module falls under which entry, and what each producer's
config says of it.
"""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints.quant_config import read_config, readers_by_method
from halfbyte.checkpoints.safetensors.expected_shapes import expected_shape
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.layouts.quant_config.module_rules import (
    aliases,
    covered,
    first_entry,
    fused_from,
    glob_matches,
    lookup,
    path_matches,
    regex_matches,
)
from support.quant_configs import CONFIGS
from support.safetensors_bytes import folder, gptq_weight, mlx_weight, under


@pytest.mark.parametrize(
    ("entry", "name", "covers"),
    [
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate_up_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate.wg", True),
        ("mlp.gate", "model.layers.0.xmlp.gate", False),
        ("layers.1", "model.layers.1.mlp.gate_proj", True),
        ("layers.1", "model.layers.10.mlp.gate_proj", False),
        ("layers.1", "model.layers.11.mlp.gate_proj", False),
        ("1", "model.layers.11.mlp.gate_proj", False),
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "lm_head_2", False),
        ("model.layers.*.self_attn", "model.layers.17.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.17.mlp.q_proj", False),
        ("model.layers.*.mlp.router", "model.layers.3.mlp.router", True),
        ("experts.*.w1", "a.experts.12.w1", True),
        ("experts.*.w1", "a.experts.12.w4", False),
        ("layers.?.mlp", "model.layers.3.mlp.up_proj", True),
        ("layers.?.mlp", "model.layers.13.mlp.up_proj", False),
        ("layers.[0-3].mlp", "model.layers.3.mlp.up_proj", True),
        ("layers.[0-3].mlp", "model.layers.4.mlp.up_proj", False),
        ("layers.0.[qk]?proj*", "model.layers.0.q_proj_a", True),
        ("layers.0.[qk]?proj*", "model.layers.0.v_proj_a", False),
        ("visual.", "visual.blocks.0.attn.qkv", True),
        ("a.b.c", "b.c", False),
    ],
)
def test_case_45_names_are_compared_by_whole_segments(entry: str, name: str, covers: bool):
    assert path_matches(entry, name) is covers
    assert covered([entry], name) is covers


@pytest.mark.parametrize("skip_key", ["modules_to_not_convert"])
def test_case_45_skipping_mlp_gate_leaves_gate_proj_quantized(skip_key: str):
    scheme = read_config(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", skip_key: ["mlp.gate", "layers.1"]}, "config"
    )
    assert scheme.parameters("model.layers.0.mlp.gate") is None
    assert scheme.parameters("model.layers.1.mlp.gate_proj") is None
    for name in ("layers.0.mlp.gate_proj", "layers.0.mlp.gate_up_proj", "layers.10.mlp.gate_proj", "layers.10.self_attn.q_proj"):
        assert scheme.parameters(f"model.{name}") is not None, name


@pytest.mark.parametrize(
    ("pattern", "name", "covers"),
    [
        ("lm_head", "lm_head", True),
        ("*lm_head*", "model.lm_head", True),
        ("model.layers.0.mlp.gate*", "model.layers.0.mlp.gate_proj", True),  # a star is a star
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1.*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1*", "model.layers.10.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("*.mlp.router", "model.layers.3.mlp.router", True),
        ("*.self_attn", "model.layers.3.self_attn.q_proj", True),  # a module above it
        ("*.self_attn", "model.layers.3.self_attn_norm.q_proj", False),
        ("model.layers.?.mlp", "model.layers.12.mlp.up_proj", False),
    ],
)
def test_globs_cover_a_module_or_one_above_it(pattern: str, name: str, covers: bool):
    assert glob_matches(pattern, name) is covers


def test_regular_expressions_match_from_the_start():
    assert regex_matches(r".*mlp\.gate$", "model.layers.0.mlp.gate")
    assert not regex_matches(r".*mlp\.gate$", "model.layers.0.mlp.gate_proj")
    assert not regex_matches(r"mlp\.gate", "model.layers.0.mlp.gate")
    assert regex_matches(r"model\.layers\.(1[0-9]|2[0-9])\.", "model.layers.13.mlp")
    with pytest.raises(CheckpointError, match=r"pattern '\(' is not a regular expression"):
        regex_matches("(", "a")


def test_case_48_prefixes_are_dropped_added_and_exchanged():
    names = list(aliases("language_model.model.layers.0.mlp.up_proj"))
    assert names[0] == "language_model.model.layers.0.mlp.up_proj"
    assert {"layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"} <= set(names)
    assert len(set(names)) == len(names)
    table = {"model.layers.0.mlp.up_proj": 6}
    for prefix in ("", "model.", "language_model.model.", "language_model.", "model.language_model."):
        assert lookup(table, f"{prefix}layers.0.mlp.up_proj") == 6
    assert lookup(table, "model.layers.10.mlp.up_proj") is None
    assert lookup(table, "model.layers.0.mlp.up_proj_2") is None


def test_case_48_derived_names_take_the_entry_of_what_they_were_made_from():
    assert fused_from("model.layers.0.self_attn.qkv_proj") == tuple(f"model.layers.0.self_attn.{p}_proj" for p in "qkv")
    assert fused_from("l.mlp.switch_mlp.gate_proj") == ("l.mlp.experts.0.gate_proj",)
    assert fused_from("l.mlp.down_proj") == ()
    six = {f"model.layers.0.self_attn.{p}_proj": {"bits": 6} for p in "qkv"}
    assert lookup(six, "model.layers.0.self_attn.qkv_proj") == {"bits": 6}
    with pytest.raises(
        CheckpointError, match=r"qkv_proj is fused from modules with different entries \(q_proj: None, k_proj: .*6"
    ):
        lookup({k: v for k, v in six.items() if "q_proj" not in k}, "model.layers.0.self_attn.qkv_proj")
    assert covered(["q_proj", "k_proj", "v_proj"], "a.qkv_proj")
    assert covered(["self_attn"], "l.self_attn.qkv_proj")
    assert not covered(["mlp"], "l.self_attn.qkv_proj")
    with pytest.raises(CheckpointError, match=r"with different entries \(q_proj: True, k_proj: None, v_proj: None\)"):
        covered(["q_proj"], "a.qkv_proj")


def test_first_rule_that_matches_wins():
    assert first_entry({".*a": 1, ".*": 2}, "x.a", regex_matches) == 1
    assert first_entry({".*": 2, ".*a": 1}, "x.a", regex_matches) == 2
    assert first_entry({".*q_proj": 1, ".*k_proj": 1, ".*v_proj": 1}, "x.qkv_proj", regex_matches) == 1
    assert first_entry({}, "x.qkv_proj", path_matches) is None
    assert first_entry({"model.*": 1, "lm_head": 2}, "lm_head", regex_matches) == 2  # not 1, as model.lm_head would be


@pytest.mark.parametrize("name", CONFIGS)
def test_config_gives_each_module_its_parameters(name: str):
    config, wanted = CONFIGS[name]
    scheme = read_config(config, "config.json")
    for module, some in wanted.items():
        got = scheme.parameters(module)
        if some is None:
            assert got is None, module
        else:
            assert got is not None, module
            assert {k: got.get(k) for k in some} == some, module


def test_every_scheme_is_among_the_tested_configs():
    tested = {type(read_config(config, "")) for config, _ in CONFIGS.values()}
    assert {r.method for r in set(readers_by_method().values()) - tested} == {"metal-marlin"}


@pytest.mark.parametrize("method", ["exl2", "aqlm", "quip", "spqr", "fbgemm_fp8", "quanto", "eetq", "bitnet"])
def test_methods_that_are_not_read_are_named(method: str):
    with pytest.raises(UnsupportedError, match="recognised and not read"):
        read_config({"quant_method": method, "bits": 4.5}, "config.json")


def mixed(path, config: dict, module: str = "model.layers.0.mlp.down_proj", bits: int = 6, **extra: object) -> hb.Checkpoint:
    """A checkpoint whose layers are 4-bit in groups of 64 but for one."""
    tensors = under("model.layers.1.mlp.down_proj", mlx_weight(k=128, bits=4, group=64)) | under(
        module, mlx_weight(k=128, bits=bits, group=64)
    )
    return hb.open(folder(path, {"model.safetensors": tensors}, {"quantization": config, **extra}))


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model.", "language_model.model."])
def test_case_48_one_layer_of_other_bits_under_another_prefix(prefix: str, tmp_path):
    config = {"group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 6}}
    checkpoint = mixed(tmp_path, config, f"{prefix}layers.0.mlp.down_proj" if prefix else "model.layers.0.mlp.down_proj")
    bits = {k: checkpoint.info(k).format.bits for k in checkpoint}
    assert sorted(bits.values()) == [4, 6]
    assert bits["model.layers.1.mlp.down_proj"] == 4
    assert all(checkpoint[k].shape == (8, 128) for k in checkpoint)
    assert not [f for f in checkpoint.findings() if f.severity != "note"]


def test_case_48_an_override_that_was_lost_is_inferred_where_k_is_known_and_refused_where_it_is_not(tmp_path):
    config = {"group_size": 64, "bits": 4}
    checkpoint = mixed(tmp_path / "known", config, hidden_size=64, intermediate_size=128)
    assert checkpoint["model.layers.0.mlp.down_proj"].format.bits == 6
    (finding,) = [f for f in checkpoint.findings() if f.severity != "note"]
    assert (finding.code, finding.key) == ("numbers-inferred", "model.layers.0.mlp.down_proj")
    # 12 words and 2 groups a row: 6 bits in groups of 64, or 3 bits in groups of 128.
    checkpoint = mixed(tmp_path / "unknown", config)
    with pytest.raises(
        CheckpointError, match=r"affine3:g128 \(k = 256\), affine6:g64 \(k = 128\); which one, nothing in the checkpoint says"
    ) as caught:
        checkpoint["model.layers.0.mlp.down_proj"]
    assert "model.safetensors" in str(caught.value)
    assert checkpoint["model.layers.1.mlp.down_proj"].format.bits == 4


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 512, 1024, 2048])
def test_groups_that_the_config_misstates_are_those_of_the_shapes(group: int, tmp_path):
    tensors = under("model.layers.0.mlp.down_proj", gptq_weight(k=2048, group=group))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 700, "checkpoint_format": "gptq_v2"}
    path = folder(tmp_path, {"model.safetensors": tensors}, {"quantization_config": config, "intermediate_size": 2048})
    (info,) = hb.open(path).infos()
    assert info.format.group_size == (group if group < 2048 else -1)


def test_case_48_same_shapes_of_two_formats_are_settled_by_the_config_or_refused(tmp_path):
    """4 bits in groups of 32 and 2 bits in groups of 64 have the same shapes where k is not known
    from elsewhere.
    """
    four = mlx_weight(k=128, bits=4, group=32)
    two = mlx_weight(k=256, bits=2, group=64)
    assert {s: a.shape for s, a in four.items()} == {s: a.shape for s, a in two.items()}
    shards = {"model.safetensors": under("model.layers.0.mlp.down_proj", four)}
    key = "model.layers.0.mlp.down_proj"
    for bits, group, k in ((4, 32, 128), (2, 64, 256)):
        config = {"bits": bits, "group_size": group}
        told = hb.open(folder(tmp_path / f"told{bits}", shards, {"quantization": config}))
        assert (told[key].format.bits, told[key].shape) == (bits, (8, k))
        given = hb.open(tmp_path / f"told{bits}" / "model.safetensors", config=config)
        assert given[key].shape == (8, k)
        sized = hb.open(folder(tmp_path / f"sized{bits}", shards, {"intermediate_size": k}))
        assert (sized[key].format.bits, sized[key].shape) == (bits, (8, k))
    silent = hb.open(folder(tmp_path / "silent", shards))
    with pytest.raises(
        CheckpointError, match=r"affine2:g64 \(k = 256\), affine4:g32 \(k = 128\).*Pass config= with bits and group_size"
    ):
        silent[key]


def test_skip_list_and_tensors_that_disagree_are_findings(tmp_path):
    tensors = under("model.layers.0.mlp.gate_proj", gptq_weight()) | {
        "model.layers.0.mlp.up_proj.weight": np.zeros((16, 64), np.float16)
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {r"-:.*gate_proj": {}}}
    checkpoint = hb.open(folder(tmp_path, {"model.safetensors": tensors}, {"quantization_config": config}))
    assert checkpoint["model.layers.0.mlp.gate_proj"].format.bits == 4
    found = {(f.code, f.key) for f in checkpoint.findings()}
    assert ("packed-but-skipped", "model.layers.0.mlp.gate_proj") in found
    assert ("dense-but-listed", "model.layers.0.mlp.up_proj.weight") in found


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("config", "module", "shape"),
    [
        (LLAMA, "model.layers.0.self_attn.q_proj", (128, 64)),
        (LLAMA, "model.layers.0.self_attn.k_proj", (64, 64)),
        (LLAMA, "model.layers.0.self_attn.o_proj", (64, 128)),
        (LLAMA, "model.layers.0.mlp.gate_proj", (160, 64)),
        (LLAMA, "model.layers.0.mlp.down_proj", (64, 160)),
        (LLAMA, "lm_head", (100, 64)),
        (LLAMA, "model.layers.0.unknown", (None, None)),
        ({"text_config": LLAMA}, "language_model.model.layers.0.mlp.down_proj", (64, 160)),
        (LLAMA, "model.vision_tower.layers.0.mlp.down_proj", (None, None)),
        (LLAMA | {"moe_intermediate_size": 32}, "model.layers.0.mlp.experts.3.down_proj", (64, 32)),
        (LLAMA | {"moe_intermediate_size": 32}, "model.layers.0.mlp.down_proj", (64, None)),
        ({}, "model.layers.0.mlp.down_proj", (None, None)),
        ({"hidden_size": "64", "intermediate_size": -1}, "model.layers.0.mlp.down_proj", (None, None)),
    ],
)  # fmt: skip
def test_sizes_follow_from_the_models_config(config: dict, module: str, shape: tuple):
    assert expected_shape(config, module) == shape
