"""Every scheme that an installed producer offers, enumerated from its package: a tiny model is read
with the producer's own values, or refused by name.

`make test-ecosystem` runs this in each producer's environment. With HALFBYTE_PRESETS=FILE the
outcomes are appended to FILE, a JSON object a line: benchmarks/ecosystem-presets.jsonl, of which
tools/presets_page.py makes docs/reference/presets.md.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.errors import HalfbyteError

Values = Mapping[str, np.ndarray]
Writer = Callable[[str, str, Path], Values | Callable[[], Values]]
"""(architecture, scheme, folder) -> the producer's dense values, float32, by the name of the
module, or what gives them.
"""
ARCHITECTURES = ("llama", "qwen3_moe", "gpt_oss")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
"""Sizes that whole groups of 128 divide."""


def tiny(arch: str) -> Any:
    from support.tiny_configs import dense_model

    more = (
        {"moe_intermediate_size": 128}
        if arch == "qwen3_moe"
        else {"layer_types": ["full_attention"]}
        if arch == "gpt_oss"
        else {}
    )
    return dense_model(arch, **WIDE, **more)


def judge(folder: Path, given: Values | Callable[[], Values]) -> tuple[str, str]:
    """("read", what was compared), ("refused", the sentence) or ("wrong", the first difference)."""
    try:
        with hb.open(folder) as checkpoint:
            checkpoint.check("dequantize")
            packed = [info.key for info in checkpoint.infos() if info.quantized]
            got = {key: checkpoint[key] for key in packed}
            dense = {key: checkpoint[key] for key in checkpoint if not packed}
    except HalfbyteError as error:
        return "refused", str(error).replace(str(folder), "…")
    want = given() if callable(given) else given
    if not packed and all(f"{name}.weight" in dense for name in want):
        different = [name for name in want if not np.array_equal(dense[f"{name}.weight"].astype(np.float32), want[name])]
        return ("wrong", f"{different[0]} differs") if different else ("read", f"{len(want)} dense weights")
    if not packed:
        return "refused", "the file has no packed weights"
    formats = sorted({str(q.format) for q in got.values()})
    for key, q in got.items():
        if key not in want:
            return "wrong", f"{key} is no module that the producer packed"
        arithmetics = ("exact", "producer") if q.origin else ("exact",)
        ways = [
            (dtype, a) for a in arithmetics for dtype in ("float32", "bfloat16")
        ]  # a bfloat16 model's own decoder rounds to it
        if not any(np.array_equal(q.dequantize(dtype, a).astype(np.float32), want[key]) for dtype, a in ways):
            ours = q.dequantize("float32")
            off = float(np.abs(ours - want[key]).max() / np.abs(want[key]).max()) if ours.shape == want[key].shape else np.inf
            if off > 2.0**-7:
                return "wrong", f"{key}: {q.format} differs by {off:.3g} of the largest value"
            formats.append(f"to {off:.1g} of the largest value")
    return "read", f"{len(packed)} weights: {', '.join(dict.fromkeys(formats))}"


def every(producer: str, schemes: list[str], write: Writer, tmp_path: Path) -> None:
    """Writes and judges every scheme of every architecture, records the outcomes, and fails for
    wrong ones.
    """
    version = f"{producer} {importlib.metadata.version(producer)}"
    wrong, read = [], 0
    for scheme in schemes:
        for arch in ARCHITECTURES:
            folder = tmp_path / f"{scheme}-{arch}"
            try:
                want = write(arch, scheme, folder)
            except Exception as error:  # whatever a producer raises is its refusal
                first = (str(error).strip().splitlines() or [""])[0]
                outcome = "not written", f"{type(error).__name__}: {first[:160]}"
            else:
                outcome = judge(folder, want)
            read += outcome[0] == "read"
            wrong += [(scheme, arch, outcome[1])] if outcome[0] == "wrong" else []
            row = {"producer": version, "scheme": scheme, "arch": arch, "outcome": outcome[0], "detail": outcome[1][:400]}
            if log := os.environ.get("HALFBYTE_PRESETS"):
                with open(log, "a", encoding="utf-8") as out:
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
    assert not wrong
    assert read


# -------------------------------------------------------------------------------------------------------
# compressed-tensors


def compressed_tensors(arch: str, scheme: str, folder: Path) -> Values:
    """The scheme on every Linear but the head; scales from the weights' own ranges."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    import torch

    model = tiny(arch)
    group = preset_name_to_scheme(scheme, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], quantization_status="initialized")
    apply_quantization_config(model, config)
    names = []
    for name, module in model.named_modules():
        args = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if args is None or getattr(module, "weight", None) is None:
            continue
        names.append(name)
        w = module.weight.data
        n, k = w.shape
        if args.strategy in ("group", "tensor_group"):
            cut = w.reshape(n, -1, args.group_size)
            low, high = cut.amin(-1), cut.amax(-1)
        elif args.strategy == "block":
            rows, columns = args.block_structure
            cut = w.reshape(-(-n // rows), min(rows, n), -1, min(columns, k))
            low, high = cut.amin((1, 3)), cut.amax((1, 3))
        elif args.strategy == "channel":
            low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
        else:
            low, high = w.min().reshape(1), w.max().reshape(1)
        total = None
        if args.strategy == "tensor_group":
            total = generate_gparam(w.min().reshape(1), w.max().reshape(1))
            module.weight_global_scale.data.copy_(total)
        scale, zero = calculate_qparams(low, high, args, total)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape).to(module.weight_zero_point.dtype)
        for part in ("input_scale", "input_global_scale"):
            if getattr(module, part, None) is not None:
                getattr(module, part).data.fill_(1)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {name: model.get_submodule(name).weight.detach().to(torch.float32).numpy() for name in names}


@pytest.mark.ecosystem("compressed-tensors")
def test_every_scheme_of_compressed_tensors(tmp_path):
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    schemes = [name for name, scheme in PRESET_SCHEMES.items() if scheme.get("weights") is not None]
    assert len(schemes) > 20
    every("compressed-tensors", schemes, compressed_tensors, tmp_path)


# ------------------------------------------------------------------------------------------
# compressed-tensors, 2:4 sparse


def sparse_schemes() -> list[str]:
    """The sparse words of the package's list of formats, each with what it quantizes."""
    from compressed_tensors.config import CompressionFormat

    words = [f.value for f in CompressionFormat if f.value.startswith("sparse") or f.value.startswith("marlin")]
    inner = {
        word: ("int4 group", "int4 channel", "int8 channel") if "marlin" in word else ("", "float8", "int8") for word in words
    }
    return [f"{word} {kind}".strip() for word, kinds in inner.items() for kind in kinds]


def compressed_tensors_sparse(arch: str, scheme: str, folder: Path) -> Values:
    """Weights with two values in each four inputs, under the scheme on every Linear but the head."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import get_24_bytemasks
    from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import quantize

    import torch

    word, _, kind = scheme.partition(" ")
    model = tiny(arch).to(torch.float16 if word == "marlin-24" else torch.bfloat16)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    for module in linears.values():
        module.weight.data *= get_24_bytemasks(module.weight.data)
    quantization = None
    if kind:
        bits = int(kind.split()[0].removeprefix("float").removeprefix("int"))
        strategy = "group" if kind.endswith("group") else "channel"
        type_ = "float" if "float" in kind else "int"
        size = 128 if strategy == "group" else None
        args = QuantizationArgs(num_bits=bits, type=type_, strategy=strategy, group_size=size, symmetric=True)
        form = word if word == "marlin-24" else f"{type_}-quantized"
        group = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        quantization = QuantizationConfig(
            config_groups={"group_0": group}, ignore=["lm_head"], quantization_status="initialized", format=form
        )
        apply_quantization_config(model, quantization)
        for module in linears.values():
            w = module.weight.data.float()
            top = w.abs().amax(1, keepdim=True) if size is None else w.reshape(len(w), -1, size).abs().amax(-1)
            module.weight_scale.data = (top / (448 if type_ == "float" else 2 ** (bits - 1) - 0.5)).to(module.weight_scale.dtype)
    classes = {"sparse-bitmask": BitmaskConfig, "sparse-24-bitmask": Sparse24BitMaskConfig}
    sparsity = classes[word](targets=["Linear"], ignore=["lm_head"]) if word in classes else None
    compressor = ModelCompressor(quantization_config=quantization, sparsity_config=sparsity)
    if word == "marlin-24":  # it has no decompressor: the integers from before
        from safetensors.torch import save_file

        values = {}
        for name, module in linears.items():
            scale = module.weight_scale.data.to(torch.float16)
            args = module.quantization_scheme.weights
            q = quantize(x=module.weight.data, scale=scale, zero_point=None, args=args).float()
            values[name] = (q * scale.float().repeat_interleave(q.shape[1] // scale.shape[1], 1)).numpy()
        schemes = {name: module.quantization_scheme for name, module in linears.items()}
        state = compressor.quantization_compressor[word].compress(model.state_dict(), schemes)
        folder.mkdir()
        save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(folder)
        compressor.update_config(folder)
        return values
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {name: model.get_submodule(name).weight.detach().to(torch.float32).numpy() for name in linears}


@pytest.mark.ecosystem("compressed-tensors-sparse")
def test_every_sparse_scheme_of_compressed_tensors(tmp_path):
    schemes = sparse_schemes()
    assert len(schemes) > 8
    every("compressed-tensors", schemes, compressed_tensors_sparse, tmp_path)


# ------------------------------------------------------------------------------------------------------------------
# torchao


def torchao_configs() -> dict[str, Any]:
    """Name -> config class; those that map names of modules to other configs have no values of
    their own.
    """
    import torchao.prototype.mx_formats as mx
    import torchao.quantization as quantization
    from torchao.core.config import AOBaseConfig

    classes = {
        name: cls
        for module in (quantization, mx)
        for name, cls in vars(module).items()
        if name[:1].isupper()
        if isinstance(cls, type)
        and issubclass(cls, AOBaseConfig)
        and cls is not AOBaseConfig
        and "Fqn" not in name
        and "PerModule" not in name
    }
    return dict(sorted(classes.items()))


def torchao(arch: str, scheme: str, folder: Path) -> Values:

    import torch
    from transformers import AutoModelForCausalLM, TorchAoConfig

    model = tiny(arch).to(torch.bfloat16)
    model.save_pretrained(folder / "dense")
    config = TorchAoConfig(torchao_configs()[scheme](), modules_to_not_convert=["lm_head"])
    made = AutoModelForCausalLM.from_pretrained(
        folder / "dense", dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )
    made.save_pretrained(folder / "out")
    for path in (folder / "out").iterdir():
        path.rename(folder / path.name)
    values = {}
    for name, module in made.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Linear) and type(weight.data) is not torch.Tensor:
            values[name] = weight.dequantize().detach().to(torch.float32).numpy()
    return values


@pytest.mark.ecosystem("transformers")
def test_every_config_of_torchao(tmp_path):
    schemes = list(torchao_configs())
    assert len(schemes) > 8
    every("torchao", schemes, torchao, tmp_path)


# -----------------------------------------------------------------------------------------------------------------
# ModelOpt


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def modelopt_values(weight: Any, scale: Any, second: Any = None) -> np.ndarray:
    """What a module's exported tensors mean: NVFP4 by ModelOpt's own decoder, the rest by its
    export's rules.
    """
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    import torch

    if weight.ndim == 3:  # a stack of experts, each matrix (k, n)
        pairs = zip(weight, scale, strict=True)
        return np.stack([modelopt_values(w.T.contiguous(), s.T.contiguous(), second) for w, s in pairs])
    n, k = weight.shape
    if weight.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn:
        packed = NVFP4QTensor((n, 2 * k), torch.float32, weight)
        scales = {"scale": scale, "double_scale": second, "block_sizes": {-1: 2 * k // scale.shape[1]}}
        return packed.dequantize(dtype=torch.float32, **scales).numpy()
    if scale.dtype == torch.uint8:  # powers of two, one for 32 elements
        values = weight.float().numpy()
        if weight.dtype == torch.uint8:
            values = E2M1[torch.stack([weight & 15, weight >> 4], 2).reshape(n, 2 * k).numpy()]
        return values * np.repeat(np.ldexp(np.float32(1), scale.numpy().astype(int) - 127), 32, 1)
    if weight.dtype == torch.uint8:  # rows 2i in the low nibbles, rows 2i + 1 in the high ones
        codes = torch.stack([weight & 15, weight >> 4], 1).reshape(-1, k).numpy().astype(np.int8)
        signed = np.where(codes > 7, codes - 16, codes).astype(np.float32)
        return signed * np.repeat(scale.float().numpy(), k // scale.shape[1], 1)
    values = weight.float().numpy()
    factors = scale.float().numpy()
    if factors.ndim == 4:
        factors = factors[:, 0, :, 0]
    if factors.ndim == 2 and factors.shape != (n, 1):  # tiles of 128 by 128
        factors = np.repeat(np.repeat(factors, 128, 0), 128, 1)[:n, :k]
    return values * (factors.reshape(-1, 1) if factors.size in (1, n) else factors)


def modelopt(arch: str, scheme: str, folder: Path) -> Callable[[], Values]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    tiny(arch).to(torch.bfloat16).save_pretrained(folder / "dense")
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.bfloat16)
    texts = [torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    model = mtq.quantize(model, copy.deepcopy(getattr(mtq, scheme)), lambda m: [m(input_ids=t) for t in texts])
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=str(folder))

    def values() -> Values:
        found = {}
        for name, module in model.named_modules():
            for leaf in ("weight", "gate_up_proj", "down_proj"):
                stem = leaf if leaf == "weight" else f"{leaf}_weight"
                scale = getattr(module, f"{stem}_scale", None)
                if scale is not None:
                    key = name if leaf == "weight" else f"{name}.{leaf}"
                    found[key] = modelopt_values(getattr(module, leaf).data, scale, getattr(module, f"{stem}_scale_2", None))
        return found

    return values


@pytest.mark.ecosystem("modelopt")
def test_every_config_of_modelopt(tmp_path):
    import modelopt.torch.quantization as mtq

    schemes = [name for name in dir(mtq) if name.endswith("_CFG") and "_KV_" not in name]
    assert len(schemes) > 15
    every("nvidia-modelopt", schemes, modelopt, tmp_path)


# -------------------------------------------------------------------------------------------------------------------- Quark


def quark(arch: str, scheme: str, folder: Path) -> Values:
    """The scheme on every Linear but the head; the values of the frozen model, which its own
    quantizers give.
    """
    from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
    from quark.torch.quantization.config.config import QConfig
    from quark.torch.quantization.config.template import QuantizationSchemeCollection

    import torch

    config = QConfig(global_quant_config=QuantizationSchemeCollection().get_scheme(scheme).config, exclude=["lm_head", "*.gate"])
    # Weights in float32, so that scales and values are not rounded once more.
    texts = [torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(tiny(arch), texts))
    names = [name for name, module in model.named_modules() if type(module).__name__ == "QuantLinear"]
    values = {name: model.get_submodule(name).weight.detach().to(torch.float32).numpy() for name in names}
    with torch.no_grad():
        export_safetensors(model, folder)
        if isinstance(config.global_quant_config.weight, list):
            # A frozen model keeps these dense; the reader of its own files decodes them.
            read = import_model_from_safetensors(tiny(arch), str(folder))
            for name in names:
                module = read.get_submodule(name)
                values[name] = module.weight_quantizer(module.weight).to(torch.float32).numpy()
    return values


@pytest.mark.ecosystem("quark")
def test_every_scheme_of_quark(tmp_path):
    from quark.torch.quantization.config.template import QuantizationSchemeCollection

    schemes = QuantizationSchemeCollection().get_supported_schemes()
    assert len(schemes) > 15
    every("amd-quark", schemes, quark, tmp_path)


# ------------------------------------------------------------------------------------------------- bitsandbytes, HQQ, mlx-lm


def bitsandbytes_schemes() -> dict[str, dict[str, Any]]:
    """The quant types of its 4-bit functions, each with and without nested scales, and int8."""
    import inspect as python_inspect

    import bitsandbytes.functional as functional

    text = python_inspect.getsource(functional.get_4bit_type)
    types = [word for word in ("nf4", "fp4", "int4", "af4") if f'"{word}"' in text]
    four = {
        f"{t}{', nested' if nested else ''}": {
            "load_in_4bit": True, "bnb_4bit_quant_type": t, "bnb_4bit_use_double_quant": nested,
        }
        for t in types
        for nested in (False, True)
    }  # fmt: skip
    return {**four, "int8": {"load_in_8bit": True}}


def bitsandbytes(arch: str, scheme: str, folder: Path) -> Values:
    import bitsandbytes as bnb

    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny(arch).to(torch.bfloat16).save_pretrained(folder / "dense")
    config = BitsAndBytesConfig(**bitsandbytes_schemes()[scheme])
    made = AutoModelForCausalLM.from_pretrained(
        folder / "dense", dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )
    made.save_pretrained(folder / "out")
    for path in (folder / "out").iterdir():
        path.rename(folder / path.name)
    values = {}
    for name, module in made.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            values[name] = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float().numpy()
        elif isinstance(module, bnb.nn.Linear8bitLt):
            values[name] = bnb.functional.int8_vectorwise_dequant(module.weight.CB, module.weight.SCB).float().numpy()
    return values


@pytest.mark.ecosystem("transformers")
def test_every_type_of_bitsandbytes(tmp_path):
    schemes = list(bitsandbytes_schemes())
    assert len(schemes) > 4
    every("bitsandbytes", schemes, bitsandbytes, tmp_path)


def hqq(arch: str, scheme: str, folder: Path) -> Values:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from hqq.models.hf.base import AutoHQQHFModel

    import torch
    from transformers import AutoModelForCausalLM

    tiny(arch).to(torch.float16).save_pretrained(folder / "dense")
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float16)
    bits, group, axis = (int(word.rpartition(" ")[2]) for word in scheme.split(", "))
    config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float16, device="cpu")
    AutoHQQHFModel.save_to_safetensors(model, str(folder))
    return {name: m.dequantize().float().numpy() for name, m in model.named_modules() if isinstance(m, HQQLinear)}


@pytest.mark.ecosystem("hqq")
def test_every_width_of_hqq(tmp_path):
    from hqq.core.quantize import Quantizer

    schemes = [f"bits {b}, group {g}, axis {a}" for b in Quantizer.SUPPORTED_BITS for g in (32, 64) for a in (0, 1)]
    assert len(schemes) > 10
    every("hqq", schemes, hqq, tmp_path)


# ---------------------------------------------------------------------------------------------------------------- AutoRound


def autoround(arch: str, scheme: str, folder: Path) -> Values:
    """The scheme without tuning, in its own format; the values of the model after its quantization."""
    from auto_round import AutoRound

    import torch
    from support.tiny_tokenizer import write_tokenizer
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tiny(arch).to(torch.bfloat16).save_pretrained(folder / "dense")
    write_tokenizer(folder / "dense")
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "dense")
    rounder = AutoRound(model, tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True, device_map="cpu", low_gpu_mem_usage=False)
    quantized, _ = rounder.quantize()
    values = {n: m.weight.detach().float().numpy().copy() for n, m in quantized.named_modules() if isinstance(m, torch.nn.Linear)}
    rounder.save_quantized(str(folder), format="auto_round")
    return values


@pytest.mark.ecosystem("autoround")
def test_every_scheme_of_autoround(tmp_path):
    from auto_round.schemes import PRESET_SCHEMES

    schemes = [name for name in PRESET_SCHEMES if not name.startswith("GGUF") and name != "BF16"]
    assert len(schemes) > 20
    every("auto-round", schemes, autoround, tmp_path)
