"""What a configuration requires, bounded by what the checkpoint can hold."""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.architecture import implied_gguf, prefix_of, required, required_gguf

MOST = 2**31 - 1


def test_blocks_that_no_file_of_this_size_has_are_not_all_listed():
    """A header that states 131,072 blocks took 22 s to inspect."""
    needs = required_gguf("llama", MOST, True, 20)
    assert not isinstance(needs, str)
    assert needs == required_gguf("llama", 21, True, 20)
    assert {n.name.split(".")[1] for n in needs if n.name.startswith("blk.")} == {str(i) for i in range(21)}


@pytest.mark.parametrize("held", [0, 1, 20])
def test_layers_are_required_up_to_one_more_than_there_are_tensors(held):
    needs = required({"model_type": "llama", "num_hidden_layers": 4000, "hidden_size": 64}, "model.", held)
    assert not isinstance(needs, str)
    layers = {n.name.split(".")[2] for n in needs if n.name.startswith("model.layers.")}
    assert layers == {str(i) for i in range(held + 1)}


def test_experts_that_no_file_of_this_size_has_are_not_all_listed():
    config = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": MOST, "hidden_size": 64}
    needs = required(config, "model.", 20)
    assert not isinstance(needs, str)
    each = [names for need in needs for names in need.names if ".experts.0." in names[0]]
    assert {len(names) for names in each} == {21}


def test_what_the_file_can_hold_is_required_whole():
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 1,
        "num_local_experts": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    assert required(config, "model.", 32) == required(config, "model.", 10**6)
    [bias] = [need for need in required(config, "model.", 3) if need.name.endswith("gate_up_proj_bias")]
    assert bias.shape == (32, 192)


def test_what_one_block_of_a_gguf_has_every_block_has():
    """Biases by their own names, q, k and v together; a router beside experts; both factors."""

    def needed(*names):
        return {need.name for need in implied_gguf({*names, "output_norm"}, 2)}

    assert needed("blk.0.attn_q") == set()
    assert needed("blk.1.ffn_up.bias") == {"blk.0.ffn_up.bias", "blk.1.ffn_up.bias"}
    biases = {f"blk.{i}.attn_{n}.bias" for i in (0, 1) for n in "qkv"}
    for n in "qkv":
        assert needed(f"blk.0.attn_{n}.bias") == biases
    assert needed("blk.0.attn_k.bias", "blk.0.attn_output.bias") == biases | {f"blk.{i}.attn_output.bias" for i in (0, 1)}
    assert needed("blk.0.ffn_up_exps") == {"blk.0.ffn_gate_inp", "blk.1.ffn_gate_inp"}
    assert needed("rope_factors_short") == {"rope_factors_long", "rope_factors_short"}


def test_the_language_model_has_the_prefix_of_most_layers_wherever_it_is_listed():
    names = [
        f"{prefix}layers.{i}.mlp.up_proj" for prefix, count in (("draft.", 1), ("model.", 3), ("mtp.", 2)) for i in range(count)
    ]
    assert prefix_of(names) == prefix_of(names[::-1]) == "model."
    assert prefix_of(["layers.0.mlp.up_proj"]) == ""
    assert prefix_of(["model.norm", "vision_tower.layers.0.mlp.up_proj"]) is None


def test_each_expert_may_have_any_of_the_names_in_use():
    config = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2, "hidden_size": 64}
    needs = required(config, "model.", 100)
    assert not isinstance(needs, str)
    [down] = [need for need in needs if need.name == "model.layers.0.mlp.experts.0.down_proj"]
    assert {names for names in down.names if len(names) == 2} == {
        tuple(f"model.layers.0.{module}.{expert}.{word}" for expert in range(2))
        for module in ("mlp.experts", "block_sparse_moe.experts")
        for word in ("down_proj", "w2")
    }
