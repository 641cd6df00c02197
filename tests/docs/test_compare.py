"""The comparison page beside the tools that pip installs: what a cell says a tool has is there, in
the environments of `make test-ecosystem`.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from support.second_model import write_smollm2

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "compare.md").read_text("utf-8")
COLUMNS = ["halfbyte", "llama.cpp", "mlx-lm", "transformers", "GPTQModel"]
MLX = {
    "run GPTQ, AWQ, compressed-tensors": ("part", "mlx_lm.utils:_transform_awq_weights"),
    "quantize without calibration": ("yes", "mlx_lm.convert:convert"),
    "quantize with calibration text": ("yes", "mlx_lm.quant.gptq:main"),
    "KL divergence and perplexity beside a baseline": ("part", "mlx_lm.perplexity:eval_ppl"),
    "OpenAI-compatible server": ("yes", "mlx_lm.server:main"),
    "train adapters over packed weights": ("yes", "mlx_lm.lora:main"),
    "convert packed weights between layouts without loss": ("part", "mlx_lm.utils:_compressed_tensors_quantization"),
    "speculative decoding": ("yes", "mlx_lm.generate:speculative_generate_step"),
}
TRANSFORMERS = {
    "run GPTQ, AWQ, compressed-tensors": (
        "yes",
        "transformers.quantizers.quantizer_compressed_tensors:CompressedTensorsHfQuantizer",
    ),
    "run MLX checkpoints": ("no", "transformers.quantizers.quantizer_metal:MetalHfQuantizer"),
    "quantize without calibration": ("yes", "transformers:BitsAndBytesConfig"),
    "quantize with calibration text": ("part", "transformers:GPTQConfig"),
    "OpenAI-compatible server": ("yes", "transformers.cli.serve:Serve"),
    "train adapters over packed weights": ("yes", "transformers.integrations.peft:PeftAdapterMixin"),
    "speculative decoding": ("yes", "transformers.generation.candidate_generator:AssistedCandidateGenerator"),
}

LLAMA_CPP = {
    "run a GGUF file": ("yes", "llama_cpp:Llama"),
    "quantize without calibration": ("yes", "llama_cpp:llama_model_quantize"),
    "quantize with calibration text": ("part", "llama_cpp:llama_model_imatrix_data"),
    "images and audio beside text": ("yes", "llama_cpp.llama_chat_format:MTMDChatHandler"),
    "speculative decoding": ("yes", "llama_cpp.llama_speculative:LlamaPromptLookupDecoding"),
}
GPTQMODEL = {
    "run a GGUF file": ("part", "gptqmodel.utils.internal_gguf:GGUFReader"),
    "speculative decoding": ("part", "gptqmodel.models.base:BaseQModel.generate"),
    "run GPTQ, AWQ, compressed-tensors": ("part", "gptqmodel:GPTQModel"),
    "quantize without calibration": ("yes", "gptqmodel.quantization.config:RTNConfig"),
    "quantize with calibration text": ("yes", "gptqmodel.quantization.config:GPTQConfig"),
    "OpenAI-compatible server": ("part", "gptqmodel.models.base:BaseQModel.serve"),
    "train adapters over packed weights": ("yes", "gptqmodel.adapter.adapter:Lora"),
}
LLAMA_CPP_SOURCES = {
    "convert packed weights between layouts without loss": ("part", "conversion/base.py", "def repack_mxfp4_blocks"),
    "refuse or state the error of a conversion": ("part", "src/llama-quant.cpp", "requantizing from type"),
    "check a file: what is wrong, what engines will do": ("part", "common/arg.cpp", '"--check-tensors"'),
    "KL divergence and perplexity beside a baseline": ("yes", "tools/perplexity/perplexity.cpp", "kl_divergence"),
}
"""Rows -> what is said, and a file of llama.cpp's sources with the words that show it."""
CHECKED = {"mlx-lm": MLX, "transformers": TRANSFORMERS, "llama.cpp": LLAMA_CPP, "GPTQModel": GPTQMODEL}


def cell(row: str, tool: str) -> str:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    return re.split(r"\s*\|\s*", line.strip("| "))[1 + COLUMNS.index(tool)]


def has(where: str) -> bool:
    module, _, name = where.partition(":")
    found = importlib.import_module(module)
    for attribute in filter(None, name.split(".")):
        found = getattr(found, attribute, None)
    return found is not None


@pytest.mark.parametrize("tool", CHECKED)
def test_the_page_says_what_is_checked(tool):
    for row, (said, _) in CHECKED[tool].items():
        assert cell(row, tool) == said, row


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("row", MLX)
def test_mlx_lm_has_it(row):
    pytest.importorskip("mlx_lm")
    assert has(MLX[row][1])


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize("row", LLAMA_CPP)
def test_llama_cpp_has_it(row):
    assert has(LLAMA_CPP[row][1])


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize("row", LLAMA_CPP_SOURCES)
def test_llama_cpp_has_it_in_its_sources(row):
    said, file, words = LLAMA_CPP_SOURCES[row]
    assert cell(row, "llama.cpp") == said
    assert words in (Path(os.environ["HALFBYTE_LLAMA_CPP"]) / file).read_text("utf-8")


@pytest.mark.ecosystem("gptqmodel")
@pytest.mark.parametrize("row", GPTQMODEL)
def test_gptqmodel_has_it(row):
    assert has(GPTQMODEL[row][1])


@pytest.mark.ecosystem("mlx")
def test_mlx_lm_runs_no_gguf(tmp_path):
    import mlx_lm.utils as utils

    write_smollm2(tmp_path / "model.gguf")
    assert cell("run a GGUF file", "mlx-lm") == "no"
    with pytest.raises((FileNotFoundError, ValueError)):
        utils.load_model(tmp_path)


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("row", TRANSFORMERS)
def test_transformers_has_it(row):
    assert has(TRANSFORMERS[row][1])


@pytest.mark.ecosystem("transformers")
def test_transformers_refuses_an_mlx_folder(tmp_path):
    import halfbyte
    from transformers import AutoModelForCausalLM

    write_smollm2(tmp_path / "model.gguf")
    halfbyte.convert(tmp_path / "model.gguf", tmp_path / "mlx", to="mlx", lossy=True)
    assert cell("run MLX checkpoints", "transformers") == "no"
    with pytest.raises(ValueError, match="quant_method"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "mlx")


@pytest.mark.ecosystem("transformers")
def test_transformers_dequantizes_a_gguf_where_there_is_no_kernel(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    write_smollm2(tmp_path / "model.gguf")
    assert cell("run a GGUF file", "transformers") == "part"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert model.model.layers[0].mlp.down_proj.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
