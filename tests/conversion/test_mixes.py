"""llama.cpp's mixes by name: block types by rule, and equal to llama-quantize's where it is
installed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import halfbyte
import torch
from halfbyte.cli import main
from halfbyte.conversion.mixes import MIXES
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import FormatError
from support import gguf_families
from support.gguf_families import FAMILIES, family_model, write_family


def file(tmp_path: Path, arch: str, layers: int) -> Path:
    """A model of `layers` layers, 256 wide."""
    changes, keys = FAMILIES[arch]
    gguf_families.FAMILIES = FAMILIES | {arch: (changes | {"num_hidden_layers": layers}, keys)}
    try:
        return write_family(tmp_path / f"{arch}.gguf", arch, family_model(arch, 256))
    finally:
        gguf_families.FAMILIES = FAMILIES


def types(path: Path) -> dict[str, str]:
    with halfbyte.open(path) as read:
        return {k.removesuffix(".weight"): read.info(k).dtype for k in read if len(read.info(k).shape) > 1}


def test_q4_k_m_has_six_bits_where_llama_cpp_has_them(tmp_path, capsys):
    source, out = file(tmp_path, "internlm2", 9), tmp_path / "out.gguf"
    assert main(["quantize", str(source), str(out), "--to", "gguf:q4_k_m"]) == 0
    found = types(out)
    assert [found[f"blk.{i}.attn_v"] for i in range(9)] == ["Q6_K", *["Q4_K", "Q4_K", "Q6_K"] * 2, "Q6_K", "Q6_K"]
    assert [found[f"blk.{i}.ffn_down"] for i in range(9)] == [found[f"blk.{i}.attn_v"] for i in range(9)]
    assert {found[f"blk.{i}.attn_q"] for i in range(9)} == {found["token_embd"]} == {"Q4_K"}
    assert found["output"] == "Q6_K"
    with halfbyte.open(out) as read:
        assert read.metadata["general.file_type"] == 15
    assert torch.isfinite(halfbyte.load_model(out)[0](torch.tensor([[1, 2, 3]])).logits).all()


def test_a_rule_comes_before_the_mix(tmp_path):
    source, out = file(tmp_path, "internlm2", 2), tmp_path / "out.gguf"
    arguments = ["quantize", str(source), str(out), "--to", "gguf:Q4_K_S"]
    assert main([*arguments, "--rule", "token_embd=keep", "--rule", "attn_q$=q8_0"]) == 0
    found = types(out)
    assert (found["token_embd"], found["blk.0.attn_q"], found["blk.1.ffn_up"]) == ("float32", "Q8_0", "Q4_K")


def test_an_interrupted_mix_is_not_taken_up_as_another(tmp_path):
    """Both mixes have one default type and one length of header."""
    source, out = file(tmp_path, "internlm2", 9), tmp_path / "out.gguf"

    def stop(done: int, total: int, key: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with halfbyte.open(source) as checkpoint:
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(checkpoint, out, recipe_of("gguf:Q4_K_M"), "rtn", progress=stop)
        done = quantize_checkpoint(checkpoint, out, recipe_of("gguf:Q4_K_S"), "rtn")
        quantize_checkpoint(checkpoint, tmp_path / "whole.gguf", recipe_of("gguf:Q4_K_S"), "rtn")
    assert done.resumed == 0
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize(("arch", "layers"), [("internlm2", 17), ("qwen2moe", 9), ("gptneox", 8), ("qwen2vl", 9)])
def test_the_types_are_llama_quantizes(tmp_path, name, arch, layers):
    llama_cpp = pytest.importorskip("llama_cpp")
    source = file(tmp_path, arch, layers)
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread, options.ftype = 1, MIXES[name].file_type
    theirs, ours = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    assert llama_cpp.llama_model_quantize(bytes(source), bytes(theirs), ctypes.byref(options)) == 0
    assert main(["quantize", str(source), str(ours), "--to", f"gguf:{name}"]) == 0
    assert types(ours) == types(theirs)
    with halfbyte.open(ours) as a, halfbyte.open(theirs) as b:
        assert a.metadata["general.file_type"] == b.metadata["general.file_type"]


def test_a_misspelled_mix_is_answered_with_the_mixes():
    with pytest.raises(FormatError, match=r"'q4_Q' is not a codec; .*mixes: .*Q4_K_M"):
        recipe_of("gguf:q4_Q")
