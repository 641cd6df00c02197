"""A checkpoint's configuration as input that may be hostile: no code, no network, no sizes that its
tensors do not have.
"""

from __future__ import annotations

import builtins
import json
import math
import socket

import pytest

from halfbyte.errors import CheckpointError
from halfbyte.transformers import load_model
from halfbyte.transformers.config import plain_config
from support.tiny_models import ids, logits, write_tiny


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No prompt, no socket."""
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked on standard input"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))


def change(folder, name="config.json", **values):
    path = folder / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


def test_code_and_kernels_are_removed_and_reported(tmp_path):
    write_tiny(tmp_path, "llama", "gptq")
    want = logits(load_model(tmp_path)[0], ids())
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    named = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "org/repo--evil.M"}
    change(tmp_path, auto_map=named, attn_implementation="org/kernel")
    with pytest.warns(RuntimeWarning, match=r'which are not used: auto_map = .*evil.*attn_implementation = "org/kernel"'):
        model, _ = load_model(tmp_path)
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert (logits(model, ids()) == want).all()


@pytest.mark.parametrize("code", ["evil.T", "org/repo--evil.T"])
def test_a_tokenizer_of_its_own_code_is_refused(tmp_path, code):
    write_tiny(tmp_path, "llama", "gptq")
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    change(tmp_path, "tokenizer_config.json", auto_map={"AutoTokenizer": [code, None]}, tokenizer_class="EvilTokenizer")
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
        load_model(tmp_path)


def test_encoded_floats():
    config = plain_config({"time_step_limit": [0.0, {"__float__": "Infinity"}], "a": {"b": {"__float__": "-Infinity"}}}, "x")
    assert config == {"time_step_limit": [0.0, math.inf], "a": {"b": -math.inf}}


@pytest.mark.parametrize(("changes", "said"), [
    ({"num_hidden_layers": 10**6}, r"num_hidden_layers = 1,000,000; its \d+ tensors allow at most as many"),
    ({"head_dim": 2**31}, r"head_dim = 2,147,483,648; the longest axis of its tensors is 128"),
    ({"vocab_size": 2**40}, r"vocab_size = 1,099,511,627,776; the longest axis"),
    ({"num_attention_heads": -4}, r"num_attention_heads = -4; 0 or more is allowed"),
    ({"model_type": ["llama"]}, r"model_type \['llama'\]; a string is allowed"),
])  # fmt: skip
def test_numbers_are_compared_with_the_tensors(tmp_path, changes, said):
    write_tiny(tmp_path, "llama", "gptq")
    change(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=said):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 2**31},
        {"num_experts_per_tok": -2},
    ],
)
def test_numbers_of_experts(tmp_path, changes):
    write_tiny(tmp_path, "mixtral", "gptq")
    change(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=r"config.json has num_\w+ = "):
        load_model(tmp_path)
