"""Every format in which a folder can be written, its head tied and untied, in the loader of the
layout's own ecosystem: config and tensors as it expects them, each weight ours bit for bit, the
logits those of the values.

The cases come from `codecs_of`: a format that a layout learns to hold is a case here. What a loader
refuses is a row of `REFUSED`: it must still be refused, and `inspect --for` must say so. `make
test-ecosystem` runs each test in the environment of its loader.
"""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte
from halfbyte import QTensor
from halfbyte.checkpoints.engines import predictions
from halfbyte.conversion import convert
from halfbyte.conversion.targets import codecs_of
from support.conversion_models import plain_llama, tokenizer_beside, write_llama

IDS = list(range(3, 35))
"""What `plain_llama` reads."""
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def codecs(layout: str, *groups: str) -> list[str]:
    """The formats of a layout as `quantize` takes them: those without a block size of their own in
    each of the groups.
    """
    plain = ("int", "uint", "affine")
    return [f"{c}:{g}" if g else c for c in codecs_of(layout) for g in (groups if c.startswith(plain) else [""])]


def written(folder: Path, codec: str, to: str, tied: bool) -> tuple[Path, dict[str, QTensor], dict[str, np.ndarray]]:
    """A Llama of a codec in a layout: its folder, its packed weights as they are read back, its
    other tensors.
    """
    source, packed, dense = write_llama(folder / "in", codec, tied)
    convert(source, folder / "out", to=to, scale_dtype="float16" if to.startswith(("gptq", "awq")) else None, lossy=True)
    tokenizer_beside(folder / "out")
    with halfbyte.open(folder / "out") as checkpoint:
        held = {name: checkpoint[name] for name in checkpoint if checkpoint.info(name).quantized}
    assert held.keys() == packed.keys()
    return folder / "out", held, dense


def close(logits: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    """Within a part of the largest logit everywhere, and of the logits' size on the whole."""
    assert logits.shape == wanted.shape
    assert np.abs(logits - wanted).max() < tolerance * np.abs(wanted).max()
    assert np.square(logits - wanted).mean() < (tolerance / 2) ** 2 * np.square(wanted).mean()


def torch_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()


REFUSED = {
    ("mlx", "mlx"): ("nvfp4",),  # the scale of the whole tensor
    ("transformers", "compressed-tensors"): tuple(f"uint{bits}" for bits in range(1, 9)),  # unless run_compressed=False
    ("vllm", "modelopt"): ("int4", "int8", "mxfp4"),
}
"""(engine, layout) -> formats that the engine's loader refuses."""


WRONG = {
    ("transformers", "compressed-tensors"): ("mxfp8_e5m2", "fp8_e5m2"),
    ("gptqmodel", "awq"): ("int8", "uint8"),  # 7.5 refuses them
    ("vllm", "modelopt"): ("nvfp4",),  # unequal scales of the tensors that are fused
}
"""The same -> formats that it loads with other values, without a word."""


def verdict(engine: str, layout: str, codec: str, folder: Path) -> str:
    """What the loader does with a format; `inspect --for` must predict just that."""
    name = codec.partition(":")[0]
    lists = {"refused": REFUSED, "wrong": WRONG}
    expected = next((word for word, formats in lists.items() if name in formats.get((engine, layout), ())), "fine")
    with halfbyte.open(folder) as checkpoint:
        assert {p.verdict for p in predictions(checkpoint, engine)} - {"fine"} == {expected} - {"fine"}
    return expected


GPTQMODEL = [("gptq", codec) for codec in codecs("gptq", "g32", "channel")]
GPTQMODEL += [("gptq-v2", codec) for codec in codecs("gptq", "g64")]
GPTQMODEL += [("awq", codec) for codec in codecs("awq-gemm", "g32", "channel")]


@pytest.mark.ecosystem("gptqmodel")
@TIED
@pytest.mark.parametrize(("to", "codec"), GPTQMODEL)
def test_gptqmodel(tmp_path, to, codec, tied):
    """GPTQModel's torch kernels for GPTQ and AWQ, on the CPU in float16."""
    import gptqmodel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    import torch

    folder, held, dense = written(tmp_path, codec, to, tied)
    backend = gptqmodel.BACKEND.AWQ_TORCH if to == "awq" else gptqmodel.BACKEND.GPTQ_TORCH
    load = functools.partial(gptqmodel.GPTQModel.load, str(folder), backend=backend, device="cpu", dtype=torch.float16)
    wrong = verdict("gptqmodel", to, codec, folder) == "wrong"
    try:
        model = load().model
    except ValueError as error:
        if not wrong or "only supports" not in str(error):
            raise
        return
    for name, q in held.items():
        m = model.get_submodule(name)
        if to == "awq":
            theirs = dequantize_gemm(m.qweight, m.qzeros, m.scales, m.bits, m.group_size).T.numpy()
        else:
            theirs = m.dequantize_weight().T.numpy()
        assert theirs.dtype == np.float16
        assert np.array_equal(theirs, q.dequantize("float16")) != wrong, name
    if wrong:
        return
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    close(torch_logits(model), plain_llama(held, dense), 0.02)


QUIET = (
    "kernels-community|native kernel",  # bitsandbytes, as it is imported
    "`loss_type=None`|is_gradient_checkpointing",  # optimum looks at every property of a model
    "(?i)temporarydirectory '.*gptqmodel_",
)
"""What is said of any folder, packed by whomever."""


@pytest.mark.ecosystem("gptqmodel")
@TIED
@pytest.mark.parametrize(
    ("to", "codec"), [("gptq", "int4:g32"), ("gptq", "int8:channel"), ("gptq-v2", "uint4:g64"), ("awq", "uint4:g32")]
)
def test_transformers_with_gptqmodel(tmp_path, to, codec, tied):
    """The model as it is loaded without a word, in float16 by the kernel that GPTQModel chooses."""
    import torch
    import transformers
    from support.quiet import quiet

    folder, held, dense = written(tmp_path, codec, to, tied)
    with quiet(*QUIET):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    close(torch_logits(model), plain_llama(held, dense), 0.02)


COMPRESSED = codecs("compressed-tensors", "g32", "channel")


@pytest.mark.ecosystem("compressed-tensors")
@TIED
@pytest.mark.parametrize("codec", COMPRESSED)
def test_transformers_with_compressed_tensors(tmp_path, codec, tied):
    """The model as it is loaded without a word, whose layers stay packed, and decompressed; in
    bfloat16.
    """
    import torch
    import transformers
    from support.quiet import quiet

    folder, held, dense = written(tmp_path, codec, "compressed-tensors", tied)

    def load(**options: Any) -> Any:
        with quiet("You passed `quantization_config`"):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, output_loading_info=True, **options
            )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        return model

    found = verdict("transformers", "compressed-tensors", codec, folder)
    if found == "refused":
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            load()
    else:
        with pytest.raises(AssertionError) if found == "wrong" else contextlib.nullcontext():
            close(torch_logits(load()), plain_llama(held, dense), 0.04)
    model = load(quantization_config=transformers.CompressedTensorsConfig(run_compressed=False))
    for name, q in held.items():
        theirs = model.get_submodule(name).weight.detach().float().numpy()
        assert np.array_equal(theirs, q.dequantize("bfloat16", "producer").astype(np.float32)), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    close(torch_logits(model.float()), plain_llama(held, dense), 0.02)


MLX = codecs("mlx", "g32", "g64")


@pytest.mark.ecosystem("mlx")
@TIED
@pytest.mark.parametrize("codec", MLX)
def test_mlx_lm(tmp_path, codec, tied):
    """mlx-lm builds the model from our config, sums in float32."""
    import mlx.core as mx
    import mlx_lm.utils

    folder, held, dense = written(tmp_path, codec, "mlx", tied)
    if verdict("mlx", "mlx", codec, folder) == "refused":
        with pytest.raises(ValueError, match="global_scale"):
            mlx_lm.utils.load_model(folder)
        return
    model, _ = mlx_lm.utils.load_model(folder)
    assert bool(model.args.tie_word_embeddings) == tied
    modules = dict(model.named_modules())
    assert {n for n, m in modules.items() if type(m).__name__ == "QuantizedLinear"} == held.keys()
    for name, q in held.items():
        m = modules[name]
        biases = m.get("biases")
        theirs = mx.dequantize(m.weight, m.scales, biases, m.group_size, m.bits, mode=m.mode)
        ours = q.dequantize("float32" if biases is None else q.parts["scales"].dtype, "producer")
        assert np.array_equal(np.array(theirs.astype(mx.float32)), ours.astype(np.float32)), name
    model.set_dtype(mx.float32)
    close(np.array(model(mx.array([IDS])).astype(mx.float32))[0], plain_llama(held, dense), 0.02)


MODELOPT = ["int4:g32", "int8:channel", *codecs("modelopt")]


@pytest.mark.ecosystem("vllm")
@TIED
@pytest.mark.parametrize("codec", MODELOPT)
def test_vllm_reads_the_config_of_modelopt(tmp_path, codec, tied):
    """vLLM, ModelOpt's reader: which class takes the config, and that it leaves the head dense.
    Its kernels for these formats need a GPU.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config

    folder, _, _ = written(tmp_path, codec, "modelopt", tied)
    config = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    classes = [get_quantization_config(n) for n in ("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "modelopt")]
    takes = next((c for c in classes if c.override_quantization_method(config, None)), classes[-1])
    if verdict("vllm", "modelopt", codec, folder) == "refused":
        with pytest.raises(ValueError, match="ModelOpt currently only supports"):
            takes.from_config(config)
        return
    read = takes.from_config(config)
    assert read.is_layer_excluded("lm_head")
    assert not read.is_layer_excluded("model.layers.0.mlp.down_proj")
