"""Models that the native core computes without torch: logits, text and tokens are those of the same
file in transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torch
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.cli.demo import model_path
from halfbyte.errors import CheckpointError, ShapeError, UnsupportedError
from halfbyte.generation import native_model as module
from halfbyte.generation.native_model import NativeModel, native_model, native_reader
from halfbyte.generation.native_tokenizer import NativeTokenizer
from halfbyte.generation.rotary import rotation_of
from halfbyte.generation.single import Generation, end_tokens
from halfbyte.transformers import load_model
from halfbyte.transformers.decode.session import DecodeSession
from support import gguf_models
from support.cpu_weights import each_set, instruction_set, needs_native  # noqa: F401
from support.gguf_families import FAMILIES, family_model, write_family
from support.gguf_models import LLAMA3, MODELS, YARN, dense_model, write
from support.gguf_writer import F16, F32, Q8_0, Tensor
from support.tiny_models import agree
from support.without_torch import check_same_text

pytestmark = needs_native
COMPUTED = ("llama", "llama-tied-bias", "llama-3", "qwen2", "qwen2-yarn", "qwen3", "gemma3")
OTHERS = tuple(name for name in MODELS if name not in COMPUTED)
FEEDS = ([5, 7, 11], [8], [9], [10, 3], [4], *([t] for t in range(20, 40)), [6, 6, 6, 12, 13, 14, 15, 16, 17], [12], [13])
"""Prompt, single tokens, several again; past a window of 4 and past the room of the caches."""
REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "gemma3_270m_greedy.json").read_text("utf-8"))
TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token counts."""


def packed_file(folder: Path, name: str, kinds: tuple[int, ...] = (Q8_0,)) -> Path:
    return write(folder / f"{name}.gguf", name, dense_model(name), packed=True, kinds=kinds)


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("chunk", [256, 4])
def test_logits_are_those_of_transformers(name, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SPARE", 5)
    monkeypatch.setattr(module, "CHUNK", chunk)
    path = packed_file(tmp_path, name)
    with open_checkpoint(path) as checkpoint:
        session = native_model(checkpoint).session()
    wanted = DecodeSession(load_model(path)[0])
    for feed in FEEDS:
        assert agree(torch.from_numpy(session(feed).copy()), wanted(feed).float()), feed
    assert session.positions == sum(map(len, FEEDS))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_int8_activations_are_the_cores(name, tmp_path):
    """A prompt of several tokens, where transformers' path calls the same products."""
    path = packed_file(tmp_path, name)
    with open_checkpoint(path) as checkpoint:
        ours = native_model(checkpoint, "int8").session()([5, 7, 11, 9, 3])
        exact = native_model(checkpoint).session()([5, 7, 11, 9, 3])
    theirs = DecodeSession(load_model(path, activations="int8")[0])([5, 7, 11, 9, 3]).numpy()
    rounding = np.abs(theirs - exact).max()
    assert np.abs(ours - theirs).max() < 0.25 * rounding, "a code next to the other where an activation is halfway"


@each_set
@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("name", COMPUTED)
def test_logits_have_the_same_bits_however_a_text_is_cut(instruction_set, name, activations, tmp_path, monkeypatch):  # noqa: F811
    """Past a window of 4, past the splits of 64 tokens whose scores are weighed together, past the
    room of the caches; on every instruction set that the core has here.
    """
    monkeypatch.setattr(module, "SPARE", 5)
    with open_checkpoint(packed_file(tmp_path, name)) as checkpoint:
        model = native_model(checkpoint, activations)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 40, 150).tolist()
    one_by_one = model.session()
    wanted = [one_by_one([token]) for token in ids]
    for chunk, cuts in ((256, [150]), (256, [1, 64, 65, 128, 149, 150]), (7, [150]), (256, rng.choice(150, 9)), (256, [70, 150])):
        monkeypatch.setattr(module, "CHUNK", chunk)
        session, at = model.session(), 0
        for cut in np.unique(cuts).tolist():
            if cut > at:
                assert np.array_equal(session(ids[at:cut]), wanted[cut - 1]), (chunk, at, cut)
                at = cut


LINEAR, PLAIN = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("rope", [LLAMA3, YARN, LINEAR, PLAIN])
def test_angles_are_transformers(rope):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=256, rope_parameters=dict(rope)
    )
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(40, 300)[None])
    found = rotation_of(rope, 64, 256)
    assert found is not None
    for ours, wanted in zip(found.table(40, 260), theirs, strict=True):
        assert np.abs(ours - wanted[0].numpy()).max() < 4e-5, (
            "float32 angles up to 300, a unit in the last place of each frequency"
        )
    assert rotation_of({"rope_type": "longrope", "rope_theta": 1e4}, 64, 256) is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_transformers(name, tmp_path):
    with open_checkpoint(packed_file(tmp_path, name)) as checkpoint:
        why = native_reader(checkpoint)
    assert isinstance(why, str)
    assert why


@pytest.mark.parametrize("arch", sorted(FAMILIES))
def test_a_family_is_computed_or_left_with_a_reason(arch, tmp_path):
    """Files with dense matrices: none is computed here, and none fails."""
    with open_checkpoint(write_family(tmp_path / "m.gguf", arch, family_model(arch))) as checkpoint:
        why = native_reader(checkpoint)
    assert isinstance(why, str)
    assert why


def test_a_dense_matrix_and_another_architecture_are_reasons(tmp_path):
    for name, kinds, why in (("qwen3", (Q8_0, F16), "is not packed"), ("phi3", (Q8_0,), "phi3 is computed by transformers")):
        with open_checkpoint(packed_file(tmp_path, name, kinds)) as checkpoint, pytest.raises(UnsupportedError, match=why):
            native_model(checkpoint)


def test_what_the_ledger_does_not_account_for_is_an_error(tmp_path, capsys):
    """As for every command that uses values; --allow-unknown passes over it."""
    more = [Tensor("blk.0.attn_q.scales", (4,), F16, bytes(8))]
    path = write(tmp_path / "m.gguf", "llama", dense_model("llama"), packed=True, kinds=(Q8_0,), more=more)
    assert main(["generate", str(path), "-p", "abc", "-n", "2"]) == 2
    assert "blk.0.attn_q.scales" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arch", "more", "said"),
    [
        ("llama", Tensor("blk.0.attn_q_norm.weight", (32,), F32, bytes(128)), "attn_q_norm"),
        ("llama", Tensor("output.bias", (48,), F32, bytes(192)), ".bias"),
    ],
)
def test_a_tensor_that_the_architecture_does_not_have_is_never_computed_with(arch, more, said, tmp_path, capsys):
    path = write(tmp_path / "m.gguf", arch, dense_model(arch), packed=True, kinds=(Q8_0,), more=[more])
    for engine in ("auto", "native", "transformers"):
        assert main(["generate", str(path), "-p", "abc", "-n", "2", "--engine", engine]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arch", "left_out"),
    [
        ("qwen3", "blk.0.attn_q_norm.weight"), ("gemma3", "blk.3.attn_k_norm.weight"), ("qwen2", "blk.1.attn_v.bias"),
        ("llama", "blk.1.ffn_norm.weight"), ("gemma3", "output_norm.weight"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [(), ("--allow-unknown", "*")])
def test_a_norm_or_bias_that_is_missing_is_an_error(arch, left_out, options, tmp_path, monkeypatch, capsys):
    """Let through or not, the model has no text without it."""
    plain = gguf_models.GGUF

    def without(pairs: Any, tensors: Any) -> Any:
        kept = [t for t in tensors if t.name != left_out]
        assert len(kept) == len(tensors) - 1
        return plain(pairs=pairs, tensors=kept)

    monkeypatch.setattr(gguf_models, "GGUF", without)
    path = write(tmp_path / "m.gguf", arch, dense_model(arch), packed=True, kinds=(Q8_0,))
    assert main(["generate", str(path), "-p", "abc", "-n", "2", "--engine", "native", *options]) == 2
    said = capsys.readouterr().err
    assert left_out.removesuffix(".weight") in said or ".v_proj.bias" in said or "norm.weight" in said


SIZES = [("hidden_size", 32), ("intermediate_size", 64), ("num_key_value_heads", 4), ("head_dim", 16)]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_shape_that_is_not_the_configurations_names_the_tensor(name, size, tmp_path, monkeypatch):
    with open_checkpoint(packed_file(tmp_path, "qwen3")) as checkpoint:
        view = module.ModelView(checkpoint)
        monkeypatch.setitem(view.config, name, size)
        monkeypatch.setattr(module, "ModelView", lambda source: view)
        with pytest.raises(CheckpointError, match=r"is \[.*\]; the header's sizes make it \["):
            native_model(checkpoint)


def test_a_call_takes_tokens(tmp_path):
    with open_checkpoint(packed_file(tmp_path, "llama")) as checkpoint, pytest.raises(ShapeError, match="one or more"):
        native_model(checkpoint).session()([])


# ------------------------------------------------------------------------------------------------
# a real model


@pytest.fixture(scope="module")
def gemma() -> tuple[NativeModel, NativeTokenizer]:
    with open_checkpoint(model_path()) as checkpoint:
        assert not isinstance(native_reader(checkpoint), str)
        return native_model(checkpoint), NativeTokenizer(checkpoint)


def test_tokens_are_those_of_transformers_tokenizer(gemma):
    for case in REFERENCE["generations"]:
        assert gemma[1](case["prompt"])["input_ids"] == case["prompt_ids"]
        assert gemma[1].decode(case["tokens"]) == case["text"]
    assert end_tokens(*gemma) == {1, 106}


def test_text_is_that_of_transformers(gemma):
    """Token by token; each is the reference's, whose logits are recorded."""
    case = REFERENCE["generations"][0]
    generation = Generation(*gemma, case["prompt"], max_tokens=12)
    assert [p.token for p in generation] == case["tokens"][:12]
    session = gemma[0].session()
    logits = session(case["prompt_ids"])
    for best, values in list(zip(case["best"], case["logits"], strict=True))[:3]:
        assert np.abs(logits[best] - np.asarray(values)).max() < TIE
        logits = session([best[0]])


def test_a_text_longer_than_the_window(gemma):
    """Local layers see 512 tokens and rotate with base 10000, global layers see all and rotate with
    base a million.
    """
    long = REFERENCE["long"]
    ids = gemma[1](long["text"])["input_ids"]
    at, best, values = next(row for row in zip(long["at"], long["best"], long["logits"], strict=True) if row[0] > 600)
    logits = gemma[0].session()(ids[: at + 1])
    assert np.argsort(-logits)[: len(best)].tolist() == best
    assert np.abs(logits[best] - np.asarray(values)).max() < TIE


def test_the_command_needs_no_torch(tmp_path):
    check_same_text(packed_file(tmp_path, "llama"))


def test_the_engine_that_is_asked_for_computes(tmp_path, capsys):
    path = packed_file(tmp_path, "qwen2")

    def engine(*options: str) -> Any:
        assert main(["generate", str(path), "-p", "abc", "-n", "3", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["engine"]

    assert engine() == engine("--engine", "native") == engine("--dtype", "float32") == "native"
    for options in (("--engine", "transformers"), ("--dtype", "bfloat16"), ("--backend", "reference")):
        assert engine(*options) == "transformers"
    assert main(["generate", str(path), "-p", "abc", "--dtype", "bfloat16", "--engine", "native"]) == 2
    assert "--engine native does not take this: --dtype bfloat16; use --engine transformers" in capsys.readouterr().err
    assert main(["generate", str(path), "-p", "abc", "--activations", "int4"]) == 2
    assert "int4; allowed: exact, int8, int8_token" in capsys.readouterr().err
    assert main(["generate", str(packed_file(tmp_path, "phi3")), "-p", "abc", "--engine", "native"]) == 2
    assert "phi3 is computed by transformers" in capsys.readouterr().err
