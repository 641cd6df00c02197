"""Names of the same weight in checkpoints of different layouts."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from halfbyte.errors import CheckpointError
from halfbyte.verification import names as namemap
from halfbyte.verification.match import Match, Side, pair
from halfbyte.verification.names import Dialect, canonical, canonical_names, dialect_of, read_rules
from support.memory_checkpoint import MemoryCheckpoint, packed

GGUF = Dialect(gguf=True, architecture="qwen2")


@pytest.mark.parametrize(
    ("gguf", "transformers"),
    [
        ("token_embd", "model.embed_tokens.weight"),
        ("output", "lm_head"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q", "model.layers.0.self_attn.q_proj"),
        ("blk.11.attn_k.bias", "model.layers.11.self_attn.k_proj.bias"),
        ("blk.3.attn_output", "language_model.model.layers.3.self_attn.o_proj"),
        ("blk.3.attn_q_norm.weight", "model.language_model.layers.3.self_attn.q_norm.weight"),
        ("blk.2.ffn_down", "model.layers.2.mlp.down_proj"),
        ("blk.2.ffn_norm.weight", "model.layers.2.post_attention_layernorm.weight"),
        ("blk.2.ffn_gate_inp.weight", "model.layers.2.mlp.gate.weight"),
        ("blk.2.ffn_gate_inp.weight", "model.layers.2.block_sparse_moe.gate.weight"),
        ("blk.2.ffn_gate_inp.bias", "model.layers.2.mlp.router.bias"),
        ("blk.2.ffn_gate_exps", "model.layers.2.mlp.switch_mlp.gate_proj"),
        ("blk.2.ffn_down_exps.bias", "model.layers.2.mlp.experts.down_proj_bias"),
        ("blk.2.ffn_up_shexp", "model.layers.2.mlp.shared_experts.up_proj"),
        ("blk.0.attn_sinks.weight", "model.layers.0.self_attn.sinks"),
    ],
)
def test_gguf_and_transformers_meet(gguf, transformers):
    assert canonical(gguf, GGUF) == canonical(transformers)


@pytest.mark.parametrize(("w", "proj"), [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")])
def test_mixtral_experts(w, proj):
    assert canonical(f"model.layers.0.block_sparse_moe.experts.7.{w}") == f"layers.0.mlp.experts.7.{proj}"


def test_similar_names_stay_apart():
    """Row 45's kind: mlp.gate is the router, mlp.gate_proj is not."""
    keys = ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate_proj", "model.layers.10.mlp.gate_proj"]
    names = canonical_names(keys, Dialect())
    assert len(set(names.values())) == 3
    assert names["model.layers.1.mlp.gate_proj"] == "layers.1.mlp.gate_proj"


def test_a_gguf_layer_with_norms_on_both_sides():
    names = canonical_names(["blk.0.ffn_norm.weight", "blk.0.post_attention_norm.weight", "blk.1.ffn_norm.weight"], GGUF)
    assert names["blk.0.ffn_norm.weight"] == "layers.0.pre_feedforward_layernorm"
    assert names["blk.0.post_attention_norm.weight"] == "layers.0.post_attention_layernorm"
    assert names["blk.1.ffn_norm.weight"] == "layers.1.post_attention_layernorm"


def test_colliding_names_keep_their_own():
    keys = ["model.layers.0.norm.weight", "transformer.layers.0.norm.weight"]
    assert canonical_names(keys, Dialect()) == dict(zip(keys, keys, strict=True))


def test_dialects():
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2}
    d = dialect_of(["blk.0.attn_q"], {}, metadata)
    assert d == Dialect(gguf=True, architecture="llama", heads=8, kv_heads=2, tied=True)
    d = dialect_of(["model.embed_tokens.weight", "lm_head.weight"], {"model_type": "llama", "num_attention_heads": 4}, {})
    assert d == Dialect(architecture="llama", heads=4, kv_heads=4, tied=False)
    d = dialect_of(["model.embed_tokens.weight"], {"text_config": {"model_type": "gemma3_text", "num_attention_heads": 4}}, {})
    assert (d.architecture, d.tied) == ("gemma3_text", True)


# Rules


def test_rules_from_texts_and_files(tmp_path):
    lines = tmp_path / "map.txt"
    lines.write_text("# a comment\n\nfoo=bar\n", encoding="utf-8")
    table = tmp_path / "map.json"
    table.write_text('{"^a\\\\.": "b."}', encoding="utf-8")
    rules = read_rules([r"h\.(\d+)=layers.\1", str(lines), str(table)])
    assert rules.rename("h.3.foo.weight") == "layers.3.bar"
    assert rules.rename("a.x") == "b.x"
    assert rules.rename("b.a.x") == "b.a.x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-file", r"\[map\] 'no-such-file' is neither a rule old=new nor a readable file of rules: No such file"),
        ("(=x", r"\[map\] rule \(=x: not a regular expression and its replacement: missing \)"),
        (r"a=\1", r"\[map\] rule a=\\1: not a regular expression and its replacement: invalid group reference"),
        ("=x", r"\[map\] '=x': a rule is spelled old=new"),
    ],
)
def test_bad_rules_are_named(text, message):
    with pytest.raises(CheckpointError, match=message):
        read_rules([text])


def test_bad_rule_files_are_named(tmp_path):
    bad = tmp_path / "map.json"
    bad.write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"map\.json: a map is an object of strings"):
        read_rules([str(bad)])
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"map\.json' is neither a rule old=new nor a readable file"):
        read_rules([str(bad)])


# Pairing


PLAIN = Dialect()


Shapes = dict[str, tuple[int, ...]]


def sides(a: Shapes, b: Shapes, left: Dialect = PLAIN, right: Dialect = PLAIN) -> list[Match]:
    out = []
    for dialect, shapes in ((left, a), (right, b)):
        ckpt = MemoryCheckpoint({k: np.zeros(s, np.float32) for k, s in shapes.items()})
        out.append(Side.of(list(ckpt.infos()), dialect))
    return pair(*out)


def pairs(match: Match) -> list[tuple[object, object]]:
    return [((p.key, p.expert, p.rows), (q.key, q.expert, q.rows)) for p, q in zip(match.left, match.right, strict=True)]


def test_fused_qkv_meets_its_parts_in_row_order():
    (m,) = sides(
        {"model.layers.0.self_attn.qkv_proj.weight": (12, 4)},
        {f"model.layers.0.self_attn.{p}_proj.weight": (4, 4) for p in "vqk"},
    )
    assert m.left_keys == ("model.layers.0.self_attn.qkv_proj.weight",)
    assert [k.split(".")[-2][0] for k in m.right_keys] == ["q", "k", "v"]


def test_gate_up_splits_into_halves():
    (m,) = sides(
        {f"model.layers.0.mlp.{p}_proj.weight": (4, 4) for p in ("up", "gate")},
        {"model.layers.0.mlp.gate_up_proj.weight": (8, 4)},
    )
    halves = {(p.key.split(".")[-2], q.rows) for p, q in zip(m.left, m.right, strict=True)}
    assert halves == {("gate_proj", "first"), ("up_proj", "second")}


def test_gpt_oss_experts_are_interleaved_in_transformers_and_apart_in_gguf():
    prefix = "model.layers.0.mlp.experts"
    stacks = {f"{prefix}.gate_up_proj": packed("mxfp4", (2, 8, 32)), f"{prefix}.down_proj": packed("mxfp4", (2, 32, 32))}
    ckpt = MemoryCheckpoint(stacks, layout="gpt-oss")
    rows = {"gate": 4, "up": 4, "down": 32}
    other = MemoryCheckpoint({f"blk.0.ffn_{p}_exps": packed("mxfp4", (2, n, 32)) for p, n in rows.items()})
    gguf = Dialect(gguf=True, architecture="gpt-oss")
    found = pair(Side.of(list(ckpt.infos()), Dialect(architecture="gpt_oss")), Side.of(list(other.infos()), gguf))
    assert len(found) == 2
    assert pairs(found[0]) == [
        ((f"{prefix}.gate_up_proj", e, rows), (f"blk.0.ffn_{p}_exps", e, "all"))
        for e in range(2)
        for rows, p in (("even", "gate"), ("odd", "up"))
    ]
    assert pairs(found[1]) == [((f"{prefix}.down_proj", None, "all"), ("blk.0.ffn_down_exps", None, "all"))]


def test_a_stack_meets_single_experts():
    (m,) = sides(
        {"model.layers.0.mlp.experts.down_proj": (3, 4, 8)},
        {f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight": (4, 8) for e in (2, 0, 1)},
    )
    assert [(p.expert, q.key) for p, q in zip(m.left, m.right, strict=True)] == [
        (e, f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight") for e in range(3)
    ]


def test_missing_parts_leave_a_group_unaligned_with_the_reason():
    (m,) = sides(
        {"model.layers.0.self_attn.qkv_proj.weight": (12, 4)},
        {f"model.layers.0.self_attn.{p}_proj.weight": (4, 4) for p in "qk"},
    )
    assert not m.aligned
    assert m.note == "one side lacks layers.0.self_attn.v_proj"


def test_one_sided_tensors_are_kept():
    found = sides({"a.weight": (2, 2), "b.weight": (2, 2)}, {"b.weight": (2, 2), "c.weight": (2, 2)})
    assert [(m.left_keys, m.right_keys) for m in found] == [
        (("a.weight",), ()),
        (("b.weight",), ("b.weight",)),
        ((), ("c.weight",)),
    ]


def test_case_50_a_tied_head_meets_the_embedding():
    left = {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4)}
    right = {"token_embd.weight": (8, 4)}
    found = sides(left, right, right=Dialect(gguf=True, tied=True))
    assert [(m.left_keys, m.right_keys) for m in found] == [
        (("model.embed_tokens.weight",), ("token_embd.weight",)),
        (("lm_head.weight",), ("token_embd.weight",)),
    ]
    assert found[1].note == "the other checkpoint ties its head to the embedding"
    untied = sides(left, right, right=Dialect(gguf=True, tied=False))
    assert untied[1].right == ()


def test_llama_gguf_rows_are_put_back():
    left = {"blk.0.attn_q": (8, 4), "blk.0.attn_k": (4, 4), "blk.0.attn_v": (4, 4)}
    right = {f"model.layers.0.self_attn.{p}_proj": (8 if p == "q" else 4, 4) for p in "qkv"}
    d = Dialect(gguf=True, architecture="llama", heads=4, kv_heads=2)
    rows = [(m.left[0].rows, m.left[0].heads) for m in sides(left, right, left=d)]
    assert rows == [("rotary", 4), ("rotary", 2), ("all", 0)]
    # Two GGUF files have one order of rows already.
    assert {m.left[0].rows for m in sides(left, left, left=d, right=d)} == {"all"}


def test_gemma_norms_get_their_one_back():
    left = {"blk.0.attn_norm.weight": (4,), "blk.0.attn_q.weight": (4, 4)}
    right = {"model.layers.0.input_layernorm.weight": (4,), "model.layers.0.self_attn.q_proj.weight": (4, 4)}
    found = sides(left, right, left=Dialect(gguf=True, architecture="gemma3"), right=Dialect(architecture="gemma3_text"))
    assert [m.right[0].add_one for m in found] == [True, False]


def test_rules_rename_into_the_other_dialect():
    a = MemoryCheckpoint({"enc.0.query": np.zeros((2, 2))})
    b = MemoryCheckpoint({"blk.0.attn_q": np.zeros((2, 2))})
    d = Dialect(gguf=True, architecture="qwen2")
    rules = read_rules([r"enc\.(\d+)\.query=blk.\1.attn_q"])
    (m,) = pair(Side.of(list(a.infos()), Dialect(), rules, d), Side.of(list(b.infos()), d))
    assert (m.left_keys, m.right_keys) == (("enc.0.query",), ("blk.0.attn_q",))


def test_rules_that_merge_two_tensors_are_refused():
    a = MemoryCheckpoint({"x.a": np.zeros(1), "x.b": np.zeros(1)})
    with pytest.raises(CheckpointError, match=r"\[map\] x\.a and x\.b both become x\.c; each tensor needs a name of its own"):
        Side.of(list(a.infos()), Dialect(), read_rules(["[ab]$=c"]))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are Unix's")
def test_a_file_of_rules_without_end_is_refused_and_a_pipe_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(namemap, "MAX_BYTES", 100)
    (tmp_path / "long").write_text("a=b\n" * 26)
    with pytest.raises(CheckpointError, match=r"long: over 100 bytes; a map is read up to that"):
        read_rules([str(tmp_path / "long")])
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("a=b\n",))
    writer.start()
    assert [(p.pattern, new) for p, new in read_rules([str(tmp_path / "pipe")]).rules] == [("a", "b")]
    writer.join()
