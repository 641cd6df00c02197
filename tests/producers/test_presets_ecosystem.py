"""Every scheme that an installed producer offers, enumerated from its package: a tiny model is read
with the producer's own values, or refused by name; what is read is converted without loss, and
`load_model` gives the dense model's logits.

`make test-ecosystem` runs this in each producer's environment. With HALFBYTE_PRESETS=FILE the
outcomes are appended to FILE, a JSON object a line: benchmarks/ecosystem-presets.jsonl, of which
tools/presets_page.py makes docs/reference/presets.md. HALFBYTE_SCHEMES="A;B" takes some schemes
only. More than 800 lines: each producer needs its own few dozen, which share what is compared.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.verification.compare import verify

Values = Mapping[str, np.ndarray]
Writer = Callable[[str, str, Path], Values | Callable[[], Values]]
"""(architecture, scheme, folder) -> the producer's dense values, float32, by the name of the
module, or what gives them.
"""
ARCHITECTURES = ("llama", "qwen3_moe", "gpt_oss")


class CannotRunError(Exception):
    """The producer does not run what it wrote: there are no values of its own to compare."""


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


def checkpoint_of(folder: Path) -> Path:
    """What `open` takes: the .onnx file where there is one."""
    onnx = folder / "model.onnx"
    return onnx if onnx.exists() else folder


def judge(folder: Path, given: Values | Callable[[], Values]) -> tuple[str, str]:
    """("read", what was compared), ("refused", the sentence), ("wrong", the first difference) or
    ("not run", the error of a producer that does not run its own file).
    """
    try:
        with hb.open(checkpoint_of(folder)) as checkpoint:
            checkpoint.check("dequantize")
            packed = [info.key for info in checkpoint.infos() if info.quantized]
            got = {key: checkpoint[key] for key in packed}
            dense = {key: checkpoint[key] for key in checkpoint if not packed}
    except HalfbyteError as error:
        return "refused", str(error).replace(str(folder), "…")
    try:
        want = given() if callable(given) else given
    except CannotRunError as error:
        return "not run", str(error)
    if want and not packed and all(f"{name}.weight" in dense for name in want):
        different = [name for name in want if not np.array_equal(dense[f"{name}.weight"].astype(np.float32), want[name])]
        return ("wrong", f"{different[0]} differs") if different else ("read", f"{len(want)} dense weights")
    if not packed and not want:
        return "not written", "the producer leaves every weight dense"
    if not packed:
        return "wrong", f"no weight is packed; the producer packed {len(want)}"
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


def converted(folder: Path, work: Path) -> str:
    """ "identical" when `convert` keeps every tensor, else its refusal or what `verify` says."""
    try:
        hb.convert(checkpoint_of(folder), work / "own", to="halfbyte")
        with hb.open(checkpoint_of(folder)) as checkpoint, hb.open(work / "own") as own:
            report = verify(checkpoint, own)
    except HalfbyteError as error:
        return f"refused: {str(error).replace(str(folder), '…')[:300]}"
    different = [c.key for c in report.comparisons if c.status != "identical"]
    return report.verdict + (f": {different[0]}" if different else "")


def loaded(folder: Path, work: Path) -> str:
    """ "equal" when `load_model` gives the logits of the model that transformers loads from the
    folder that `dequantize` writes, else the refusal or the difference.
    """
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(np.random.default_rng(1).integers(3, 96, (2, 12)))
    try:
        with hb.open(folder) as checkpoint:
            dequantize_checkpoint(checkpoint, work / "dense", dtype="float32")
        model, _ = hb.load_model(folder, dtype="float32")
    except HalfbyteError as error:
        return f"refused: {str(error).replace(str(folder), '…')[:300]}"
    dense = AutoModelForCausalLM.from_pretrained(work / "dense", dtype=torch.float32)
    with torch.inference_mode():
        ours, want = model(input_ids=ids).logits, dense(input_ids=ids).logits
    off = float((ours - want).abs().max() / want.abs().max())
    return "equal" if off <= 2e-5 else f"different: by {off:.3g} of the largest logit"


def commands(folder: Path, work: Path, other: Executor | None) -> dict[str, str]:
    """What `convert` and, where torch is installed, `load_model` make of a file that is read.

    other  a process in which the producer has not changed transformers' classes; None for this one
    """
    found = {"convert": converted(folder, work)}
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch.nn") and (folder / "config.json").exists():
        found["load_model"] = loaded(folder, work) if other is None else other.submit(loaded, folder, work).result()
    return found


def every(
    producer: str, schemes: list[str], write: Writer, tmp_path: Path, reads: bool = True, other: Executor | None = None
) -> None:
    """Writes and judges every scheme of every architecture, records the outcomes, and fails for
    wrong ones, and where none is read (with `reads` false: where one is).
    """
    version = f"{producer} {importlib.metadata.version(producer)}"
    wrong, read = [], 0
    some = os.environ.get("HALFBYTE_SCHEMES", "")
    for scheme in [s for s in schemes if not some or s in some.split(";")]:
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
            more = commands(folder, tmp_path / f"{scheme}-{arch}-out", other) if outcome[0] == "read" else {}
            wrong += [(scheme, arch, f"{k}: {v}") for k, v in more.items() if not v.startswith(("identical", "equal", "refused"))]
            row = {"producer": version, "scheme": scheme, "arch": arch, "outcome": outcome[0], "detail": outcome[1][:400], **more}
            if log := os.environ.get("HALFBYTE_PRESETS"):
                with open(log, "a", encoding="utf-8") as out:
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
    assert not wrong
    assert bool(read) == reads


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
# llm-compressor


ROUTERS = ["lm_head", "re:.*mlp.gate$", "re:.*router.*"]


def llmcompressor_schemes() -> list[str]:
    """Each preset under its plain modifier; each other modifier of the package under W4A16."""
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from llmcompressor.modifiers.factory import ModifierFactory

    ModifierFactory.refresh()
    modifiers = sorted(name for name in ModifierFactory._main_registry if name not in ("Modifier", "QuantizationModifier"))
    presets = [name for name, scheme in PRESET_SCHEMES.items() if scheme.get("weights") is not None]
    return presets + modifiers


def llmcompressor(arch: str, scheme: str, folder: Path) -> Values:
    """`oneshot` of the modifier on four texts; the values that the package decompresses."""
    from compressed_tensors.compressors import ModelCompressor
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.factory import ModifierFactory

    import torch
    from support.tiny_tokenizer import write_tokenizer
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    dense = folder.parent / f"{folder.name}-dense"
    tiny(arch).to(torch.bfloat16).save_pretrained(dense)
    write_tokenizer(dense)
    modifiers = ModifierFactory._main_registry
    plain = {"targets": ["Linear"], "scheme": "W4A16", "ignore": ROUTERS}
    recipe = [modifiers["QuantizationModifier"](**plain | ({} if scheme in modifiers else {"scheme": scheme}))]
    if scheme in modifiers:
        fields = modifiers[scheme].model_fields
        options = {
            "sparsity": 0.5,
            "mask_structure": "2:4",
            "iters": 0,
            "scheme": "W4A16",
            "targets": ["Linear"],
            "ignore": ROUTERS,
        }
        own = {key: value for key, value in options.items() if key in fields}
        recipe = [modifiers[scheme](**own), *([] if "scheme" in fields else recipe)]
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(3, 96, 48).tolist(), "attention_mask": [1] * 48} for _ in range(4)]
    calibration = {"dataset": Dataset.from_list(rows), "num_calibration_samples": 4, "max_seq_length": 48}
    oneshot(model=model, processor=PreTrainedTokenizerFast.from_pretrained(dense), recipe=recipe, **calibration)
    model.save_pretrained(folder, save_compressed=True)
    names = [n for n, m in model.named_modules() if getattr(getattr(m, "quantization_scheme", None), "weights", None) is not None]
    ModelCompressor.from_pretrained_model(model).decompress_model(model)
    if scheme == "QuIPModifier":  # what a layer computes: the transforms of its inputs and outputs are part of it
        found = {}
        for name in names:
            layer = model.get_submodule(name).float()
            bias = 0 if layer.bias is None else layer.bias
            found[name] = (layer(torch.eye(layer.in_features)) - bias).T.detach().numpy()
        return found
    return {name: model.get_submodule(name).weight.detach().float().numpy() for name in names}


@pytest.mark.ecosystem("llmcompressor")
def test_every_scheme_and_modifier_of_llmcompressor(tmp_path):
    schemes = llmcompressor_schemes()
    assert len(schemes) > 30
    every("llmcompressor", schemes, llmcompressor, tmp_path)


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
    import torch

    if weight.ndim == 3:  # a stack of experts, each matrix (k, n)
        pairs = zip(weight, scale, strict=True)
        return np.stack([modelopt_values(w.T.contiguous(), s.T.contiguous(), second) for w, s in pairs])
    n, k = weight.shape
    if weight.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn:
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

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


def modelopt_without_gpu() -> None:
    """ModelOpt rounds to NVFP4 by GPU kernels while it calibrates; its tensor class does so on the
    CPU, as its export does. The kernels' names get the tensor class.
    """
    import modelopt.torch.quantization.tensor_quant as module
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    import torch

    original = module.dynamic_block_quantize_op
    if getattr(original, "__name__", "") == "dynamic":
        return

    def rounded(x: Any, size: int, scale: Any, second: Any, dtype: Any) -> Any:
        q, scale, second = NVFP4QTensor.quantize(x, size, scale, second)
        return q.dequantize(dtype=dtype, scale=scale, double_scale=second, block_sizes={-1: size})

    def dynamic(x: Any, size: int, amax: Any, bits: int, exponent: int, scale_bits: int, scale_exponent: int) -> Any:
        if (bits, exponent, scale_exponent) != (4, 2, 4):
            return original(x, size, amax, bits, exponent, scale_bits, scale_exponent)
        flat = x.reshape(-1, x.shape[-1])
        return rounded(flat, size, None, amax.float().amax() / (6 * 448), x.dtype).reshape(x.shape)

    def static(x: Any, amax: Any, total: Any = None, round_scales: bool = True, top: float = 448, dtype: Any = None) -> Any:
        scale, second = amax.float().reshape(-1, 1) / 6, torch.ones(())
        if round_scales:
            second = (amax.max() if total is None else total).float() / (6 * top)
            scale = (scale / second).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        return rounded(x, x.shape[-1], scale, second, dtype or x.dtype)

    module.dynamic_block_quantize_op = dynamic
    module.triton_kernel.static_blockwise_fp4_fake_quant = static
    module.triton_kernel.IS_AVAILABLE = True


def modelopt(arch: str, scheme: str, folder: Path) -> Callable[[], Values]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant

    import torch
    from transformers import AutoModelForCausalLM

    modelopt_without_gpu()
    torch.manual_seed(0)
    tiny(arch).to(torch.bfloat16).save_pretrained(folder / "dense")
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.bfloat16)
    texts = [torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    config = copy.deepcopy(getattr(mtq, scheme))
    if "_KV_" in scheme:  # a config of caches goes over one of weights
        config = update_quant_cfg_with_kv_cache_quant(copy.deepcopy(mtq.FP8_DEFAULT_CFG), config["quant_cfg"])
    model = mtq.quantize(model, config, lambda m: [m(input_ids=t) for t in texts])
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
                    quantizer = getattr(module, "weight_quantizer", None)
                    if getattr(quantizer, "svdquant_lora_a", None) is not None:  # applied one after the other to the inputs
                        found[key] += (quantizer.svdquant_lora_b.double() @ quantizer.svdquant_lora_a.double()).float().numpy()
        return found

    return values


@pytest.mark.ecosystem("modelopt")
def test_every_config_of_modelopt(tmp_path):
    import modelopt.torch.quantization as mtq

    schemes = [name for name in dir(mtq) if name.endswith("_CFG")]
    assert len(schemes) > 25
    every("nvidia-modelopt", schemes, modelopt, tmp_path)


# -------------------------------------------------------------------------------------------------------------------- Quark


def quark(arch: str, scheme: str, folder: Path) -> Values | Callable[[], Values]:
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

    def decoded() -> Values:
        try:
            with torch.no_grad():
                read = import_model_from_safetensors(tiny(arch), str(folder))
                modules = {name: read.get_submodule(name) for name in names}
                return {n: m.weight_quantizer(m.weight).to(torch.float32).numpy() for n, m in modules.items()}
        except (ValueError, AttributeError) as error:
            raise CannotRunError(f"Quark does not read its own file: {str(error).splitlines()[0][:160]}") from error

    # A frozen model keeps these dense; the reader of its own files decodes them.
    return decoded if isinstance(config.global_quant_config.weight, list) else values


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
            "load_in_4bit": True,
            "bnb_4bit_quant_type": t,
            "bnb_4bit_use_double_quant": nested,
        }
        for t in types
        for nested in (False, True)
    }
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
    bits, group, axis = (float(word.rpartition(" ")[2]) for word in scheme.split(", "))
    config = BaseQuantizeConfig(nbits=int(bits) if bits.is_integer() else bits, group_size=int(group), axis=int(axis))
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
    """The scheme without tuning, in its own format; the values of the model after its quantization,
    of FP8 by its export's formula, of the other floats as its own layers decode them.
    """
    from auto_round import AutoRound

    import torch
    from support.tiny_tokenizer import write_tokenizer
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tiny(arch).to(torch.bfloat16).save_pretrained(folder / "dense")
    write_tokenizer(folder / "dense")
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "dense")
    texts = [{"input_ids": torch.randint(3, 96, (1, 64), generator=torch.Generator().manual_seed(i))} for i in range(4)]
    options = {"dataset": texts, "nsamples": 4, "seqlen": 64, "batch_size": 1}  # static activation scales look at them
    rounder = AutoRound(
        model, tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True, device_map="cpu", low_gpu_mem_usage=False, **options
    )
    quantized, _ = rounder.quantize()
    values = {n: m.weight.detach().float().numpy().copy() for n, m in quantized.named_modules() if isinstance(m, torch.nn.Linear)}
    rounder.save_quantized(str(folder), format="auto_round")
    if rounder.data_type == "fp":  # its layers are stored already; its own reader knows one of three kinds
        for name, module in quantized.named_modules():
            scale = getattr(module, "weight_scale", getattr(module, "weight_scale_inv", None))
            if scale is not None:
                values[name] = modelopt_values(module.weight.detach(), scale)
    elif not rounder.data_type.startswith("int"):
        read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
        for name, module in read.named_modules():
            if hasattr(module, "dequant_weight_online"):
                values[name] = module.dequant_weight_online().detach().float().numpy()
    return values


@pytest.mark.ecosystem("autoround")
def test_every_scheme_of_autoround(tmp_path):
    from auto_round.schemes import PRESET_SCHEMES

    schemes = [name for name in PRESET_SCHEMES if not name.startswith("GGUF") and name != "BF16"]
    assert len(schemes) > 20
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        every("auto-round", schemes, autoround, tmp_path, other=other)


# ---------------------------------------------------------------------------------------------------------------- GPTQModel


def gptqmodel_schemes() -> list[str]:
    """Each method in each of its formats; GPTQ and AWQ in each of their widths too."""
    from gptqmodel.quantization.config import QUANT_METHOD_FORMAT_MAPPING

    schemes = []
    for method, formats in QUANT_METHOD_FORMAT_MAPPING.items():
        for form in sorted(f.value for f in formats):
            widths = {"gptq": (2, 3, 4, 5, 6, 7, 8), "gptq_v2": (2, 3, 4, 8), "gguf": ("q4_k_m",)}.get(
                form, (8,) if form == "fp8" else (4,)
            )
            schemes += [f"{method.value}, {form}, {bits}" for bits in widths]
    return schemes


def gptqmodel_packing() -> dict[str, np.ndarray]:
    """GPTQModel's AWQ layers for GPUs pack on the CPU: they are allowed there, and what they pack
    is noted under the module's name, (codes − zero points) · scales.
    """
    from gptqmodel.models._const import DEVICE
    from gptqmodel.nn_modules.qlinear import gemv_awq, gemv_fast_awq

    import torch

    found: dict[str, np.ndarray] = {}
    for cls in (gemv_awq.AwqGEMVLinear, gemv_fast_awq.AwqGEMVFastLinear, gemv_fast_awq.LLMAwqLinear):
        cls.SUPPORTS_DEVICES = [*cls.SUPPORTS_DEVICES, DEVICE.CPU]
        original = getattr(cls.pack, "original", cls.pack)

        def pack(self: Any, linear: Any, scales: Any, zeros: Any, *more: Any, original: Any = original, **named: Any) -> None:
            original(self, linear, scales, zeros, *more, **named)
            wide = [t.float().repeat_interleave(self.group_size, 1) for t in (scales.half(), zeros)]
            codes = torch.round((linear.weight.data.float() / wide[0]) + wide[1])
            found[str(self.name if hasattr(self, "name") else len(found))] = ((codes - wide[1]) * wide[0]).numpy()

        pack.original = original
        cls.pack = pack
    return found


def gptqmodel(arch: str, scheme: str, folder: Path) -> Callable[[], Values]:
    """Two texts of calibration, groups of 32; the values that its own torch layers decode."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization import config as settings
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils import threadx

    import torch
    from support.tiny_tokenizer import write_tokenizer

    # A worker ends the process after an error that its task already reports.
    threadx._DeviceWorker._abort_process = lambda worker, error: None
    method, form, bits = scheme.split(", ")
    packed = gptqmodel_packing() if form in ("gemv", "gemv_fast", "llm-awq") else None
    dense = folder.parent / f"{folder.name}-dense"
    tiny(arch).to(torch.bfloat16 if packed is None else torch.float16).save_pretrained(dense)  # its kernels' dtype
    write_tokenizer(dense)
    classes = {"fp8": "FP8Config", "gguf": "GGUFConfig", "bitsandbytes": "BitsAndBytesConfig", "exl3": "EXL3Config"}
    if method in classes:
        config = getattr(settings, classes[method])(
            **({} if method == "fp8" else {"bits": int(bits) if bits.isdigit() else bits})
        )
    else:
        config = settings.QuantizeConfig(
            bits=int(bits),
            group_size={"gemv": 64, "gemv_fast": 64, "qqq": 128}.get(form, 32),
            quant_method=method,
            format=form,
            device="cpu",
            offload_to_disk=False,
            sym=method != "awq",
        )
    model = GPTQModel.load(str(dense), config, dtype="auto" if packed is None else torch.float16)
    texts = [torch.randint(3, 96, (64,), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    backend = {"gptq": BACKEND.GPTQ_TORCH, "awq, gemm": BACKEND.AWQ_TORCH}.get(
        method if method == "gptq" else f"{method}, {form}", BACKEND.AUTO
    )
    model.quantize([{"input_ids": t, "attention_mask": torch.ones_like(t)} for t in texts], batch_size=4, backend=backend)
    model.save(str(folder))
    if packed is not None:
        return packed.copy

    def values() -> Values:
        read = GPTQModel.load(str(folder), device="cpu", backend=backend)
        found = {}
        for name, module in read.model.named_modules():
            if hasattr(module, "dequantize_weight"):
                weight = module.dequantize_weight().detach().float().numpy()
                found[name] = weight.T if method == "gptq" else weight
            elif method == "awq" and hasattr(module, "qzeros"):  # as its forward pass does
                parts = (module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
                found[name] = dequantize_gemm(*parts).detach().float().numpy().T
        return found

    return values


@pytest.mark.ecosystem("gptqmodel")
def test_every_format_of_gptqmodel(tmp_path):
    schemes = gptqmodel_schemes()
    assert len(schemes) > 15
    every("gptqmodel", schemes, gptqmodel, tmp_path)


# ------------------------------------------------------------------------------------------------------------------- mlx-lm


MLX_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_theta": 10000.0,
    },
    "gpt_oss": {  # mlx-lm wants a layer of either kind
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 10000.0,
        "rope_scaling": None,
    },
}


def mlx_schemes() -> list[str]:
    """Each mode of its command line, affine in each width and group size that MLX has, and its
    mixed recipes.
    """
    import re

    import mlx.core as mx

    command = importlib.import_module("mlx_lm.convert")
    modes = re.search(r'choices=\[("affine"[^\]]*)\]', Path(command.__file__).read_text("utf-8"))
    assert modes is not None
    schemes = [f"{word.strip()[1:-1]}" for word in modes[1].split(",") if word.strip() != '"affine"']
    for bits in range(1, 9):
        for group in (16, 32, 64, 128):
            try:
                mx.eval(mx.quantize(mx.ones((32, 128)), group, bits))
            except ValueError:
                continue
            schemes.append(f"affine, {bits} bits, group {group}")
    return schemes + list(command.QUANT_RECIPES)


def mlx(arch: str, scheme: str, folder: Path) -> Values:
    """mlx-lm's own model class with random weights, its `quantize_model` and `save`."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm import utils

    command = importlib.import_module("mlx_lm.convert")
    config = {
        "model_type": arch, "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, **WIDE,
        "max_position_embeddings": 64, "tie_word_embeddings": False, **MLX_CONFIGS[arch],
    }  # fmt: skip
    model_class, args_class = utils._get_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(lambda p: (mx.random.normal(p.shape) * 0.15).astype(mx.bfloat16), model.parameters()))
    mode, *numbers = scheme.split(", ")
    bits, group = (int("".join(c for c in n if c.isdigit())) for n in numbers) if numbers else (None, None)
    predicate = None
    if mode in command.QUANT_RECIPES:
        predicate, mode = command.mixed_quant_predicate_builder(mode, model, 64), "affine"
    model, config = utils.quantize_model(model, config, group, bits, mode=mode, quant_predicate=predicate)
    utils.save_model(folder, model)
    utils.save_config(config, folder / "config.json")
    values = {}
    for name, module in model.named_modules():
        if "scales" in module:
            parts = (module["weight"], module["scales"], module.get("biases"))
            w = mx.dequantize(*parts, group_size=module.group_size, bits=module.bits, mode=module.mode)
            values[name] = np.array(w.astype(mx.float32))
    return values


@pytest.mark.ecosystem("mlx")
def test_every_mode_of_mlx_lm(tmp_path):
    schemes = mlx_schemes()
    assert len(schemes) > 15
    every("mlx-lm", schemes, mlx, tmp_path)


# --------------------------------------------------------------------------------------------------- onnxruntime and optimum


def onnx_values(path: Path) -> Values:
    """The weights that onnxruntime decodes, each node of the graph alone: a product with the
    identity, or what DequantizeLinear returns, transposed where it is the second factor of MatMul.
    """
    import onnx
    import onnxruntime

    from halfbyte.checkpoints.onnx.weights import SUFFIXES

    model = onnx.load(path)
    tensors = {t.name: t for t in model.graph.initializer}
    seconds = {node.input[1] for node in model.graph.node if node.op_type in ("MatMul", "Gemm")}
    found = {}
    for node in model.graph.node:
        kind = {a.name: a.i for a in node.attribute}
        first = 1 if node.op_type == "MatMulNBits" else 0
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized", "DequantizeLinear") or node.input[first] not in tensors:
            continue
        alone = onnx.NodeProto()
        alone.CopyFrom(node)
        feeds = {}
        if node.op_type == "MatMulNBits":
            alone.input[0], feeds = "x", {"x": np.eye(kind["K"], dtype=np.float32)}
        elif node.op_type == "GatherBlockQuantized":
            alone.input[1], feeds = "x", {"x": np.arange(tensors[node.input[0]].dims[0])}
        inputs = [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ]
        output = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)
        parts = [tensors[n] for n in node.input if n in tensors]
        graph = onnx.helper.make_graph([alone], "g", inputs, [output], parts)
        single = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        try:
            session = onnxruntime.InferenceSession(single.SerializeToString(), providers=["CPUExecutionProvider"])
            value = session.run(None, feeds)[0]
        except Exception as error:  # its exceptions have no base class
            if not type(error).__module__.startswith("onnxruntime."):
                raise
            raise CannotRunError(f"onnxruntime does not run its {node.op_type}: {str(error).splitlines()[0][:160]}") from error
        name = node.input[first]
        name = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name).removesuffix(".weight")
        transposed = node.op_type == "MatMulNBits" or node.output[0] in seconds
        value = value.T if transposed else value
        found[name] = np.asarray(value, np.float32).reshape(1 if value.ndim < 2 else value.shape[0], -1)
    return found


def matmuls(arch: str, path: Path) -> None:
    """A graph with a MatMul for every matrix of the tiny model."""
    import onnx

    state = {key: t.numpy() for key, t in tiny(arch).state_dict().items() if t.ndim == 2 and "embed" not in key}
    nodes = [onnx.helper.make_node("MatMul", [f"x{len(w[0])}", key], [f"{key}/y"], name=key) for key, w in state.items()]
    sizes = {w.shape[1] for w in state.values()}
    inputs = [onnx.helper.make_tensor_value_info(f"x{k}", onnx.TensorProto.FLOAT, ["m", k]) for k in sizes]
    outputs = [onnx.helper.make_tensor_value_info(f"{key}/y", onnx.TensorProto.FLOAT, ["m", len(w)]) for key, w in state.items()]
    tensors = [onnx.numpy_helper.from_array(np.ascontiguousarray(w.T), key) for key, w in state.items()]
    graph = onnx.helper.make_graph(nodes, arch, inputs, outputs, tensors)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)


def onnxruntime_schemes() -> list[str]:
    """Its weight-only configs in each width, symmetry and node format, its two 4-bit float types,
    and its dynamic quantization to each type.
    """
    import inspect as python_inspect

    import onnxruntime.quantization.matmul_nbits_quantizer as module
    from onnxruntime.quantization import QuantFormat, QuantType

    schemes = []
    for name, cls in sorted(vars(module).items()):
        if not (isinstance(cls, type) and issubclass(cls, module.WeightOnlyQuantConfig)) or cls is module.WeightOnlyQuantConfig:
            continue
        options = python_inspect.signature(cls.__init__).parameters
        widths = [f" bits={b}" for b in (2, 4, 8)] if "bits" in options else [""]
        formats = [f" quant_format={f.name}" for f in QuantFormat] if "quant_format" in options else [""]
        signs = [f" is_symmetric={s}" for s in (0, 1)] if "is_symmetric" in options else [""]
        schemes += [f"{name}{b}{f}{s}" for b in widths for f in formats for s in signs]
    return [*schemes, "bnb4 FP4", "bnb4 NF4", *(f"dynamic {t.name}" for t in QuantType)]


def random_inputs(path: Path) -> list[dict[str, np.ndarray]]:
    """Two rows of calibration data for every input of a graph."""
    import onnx

    rng = np.random.default_rng(0)
    sizes = {i.name: i.type.tensor_type.shape.dim[1].dim_value for i in onnx.load(path).graph.input}
    return [{name: rng.standard_normal((32, k)).astype(np.float32) for name, k in sizes.items()} for _ in range(2)]


def onnxruntime(arch: str, scheme: str, folder: Path) -> Callable[[], Values]:
    import onnx
    import onnxruntime.quantization.matmul_nbits_quantizer as module
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer

    folder.mkdir(parents=True)
    dense = folder.parent / f"{folder.name}.onnx"
    matmuls(arch, dense)
    path = folder / "model.onnx"
    name, *words = scheme.split(" ")
    if name == "dynamic":
        quantize_dynamic(dense, path, weight_type=QuantType[words[0]])
    elif name == "bnb4":
        quantizer = MatMulBnb4Quantizer(onnx.load(dense), getattr(MatMulBnb4Quantizer, words[0]), 32)
        quantizer.process()
        quantizer.model.save_model_to_file(str(path))
    else:
        options: dict[str, Any] = {}
        for key, _, value in (word.partition("=") for word in words):
            options[key] = (
                QuantFormat[value] if key == "quant_format" else bool(int(value)) if key == "is_symmetric" else int(value)
            )
        if "Default" in name or "HQQ" in name:
            options["block_size"] = 32
        if name.startswith("GPTQ"):
            options["calibration_data_reader"] = random_inputs(dense)
        config = getattr(module, name)(**options)
        quantizer = module.MatMulNBitsQuantizer(onnx.load(dense), block_size=32, algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(str(path))
    return lambda: onnx_values(path)


@pytest.mark.ecosystem("optimum")
def test_every_config_of_onnxruntime(tmp_path):
    schemes = onnxruntime_schemes()
    assert len(schemes) > 20
    every("onnxruntime", schemes, onnxruntime, tmp_path)


def optimum_schemes() -> list[str]:
    """The presets of `AutoQuantizationConfig` without calibration, a scale a tensor and a channel."""
    from optimum.onnxruntime import AutoQuantizationConfig

    presets = [name for name in vars(AutoQuantizationConfig) if not name.startswith("_")]
    return [f"{name}{', per channel' if c else ''}" for name in presets for c in (0, 1)]


def optimum(arch: str, scheme: str, folder: Path) -> Callable[[], Values]:
    """`main_export` of the tiny model, then `ORTQuantizer` under the preset."""
    import inspect as python_inspect

    from optimum.exporters.onnx import main_export
    from optimum.onnxruntime import AutoQuantizationConfig, ORTQuantizer

    from support.tiny_tokenizer import write_tokenizer

    dense, exported = (folder.parent / f"{arch}-{word}" for word in ("dense", "onnx"))
    if not (exported / "model.onnx").exists():
        tiny(arch).save_pretrained(dense)
        write_tokenizer(dense)
        main_export(str(dense), exported, task="text-generation", do_validation=False)
    preset, _, channel = scheme.partition(", ")
    make = getattr(AutoQuantizationConfig, preset)
    options = {"is_static": False, "per_channel": bool(channel)}
    config = make(**{k: v for k, v in options.items() if k in python_inspect.signature(make).parameters})
    ORTQuantizer.from_pretrained(exported, file_name="model.onnx").quantize(save_dir=folder, quantization_config=config)
    path = folder / "model.onnx"
    (folder / "model_quantized.onnx").rename(path)
    (folder / "config.json").unlink(missing_ok=True)
    return lambda: onnx_values(path)


@pytest.mark.ecosystem("optimum")
def test_every_preset_of_optimum(tmp_path):
    schemes = optimum_schemes()
    assert len(schemes) > 10
    every("optimum-onnx", schemes, optimum, tmp_path, reads=False)
