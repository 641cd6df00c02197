"""Which modules a config's rules cover, compared with the producers' own functions."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import halfbyte as hb
from halfbyte.checkpoints.quant_config import read_config
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import CheckpointError
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.quant_config.module_rules import aliases, fused_from, path_matches, regex_matches
from halfbyte.layouts.quant_config.reader import ConfigReader
from halfbyte.layouts.torchao import TorchAOConfig
from support.many_architectures import random_model
from support.safetensors_bytes import folder

NAMES = [
    f"{prefix}layers.{layer}.{leaf}"
    for prefix in ("model.", "model.language_model.")
    for layer in (0, 1, 10, 12)
    for leaf in ("self_attn.q_proj", "self_attn.qkv_proj", "mlp.gate", "mlp.gate_proj", "mlp.experts.0.up_proj", "linear.linear")
] + ["lm_head", "model.embed_tokens", "visual.blocks.0.attn.qkv"]
EXPRESSIONS = [
    r".*mlp\.gate$", r".*mlp.gate", r".*self_attn.*", r".*lm_head", r"model\.layers\.1", r"model\.layers\.1\..*", r"layers",
    r"^(?!.*gate).*$", r".*\.(?:0|1[0-2])\..*(?:q|gate)_proj", r"visual", r".*visual.*", r".*linear$", r"(?i)MODEL\.LAYERS.*",
    r".*layers\.\d{2}\.",
    r".*experts\.\d+\.(up|down)_proj$", r".*(?<=self_attn\.)q_proj", r"[^.]*$", r"\w+\.\w+$", r"",
]  # fmt: skip


@pytest.mark.ecosystem("compressed-tensors")
@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_compressed_tensors_matches_the_same_names(pattern):
    from compressed_tensors.utils.match import match_name

    assert [regex_matches(pattern, name) for name in NAMES] == [match_name(name, f"re:{pattern}") for name in NAMES]


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("pattern", [*EXPRESSIONS, r".*q_proj\.weight"])
def test_torchao_quantizes_the_same_modules(pattern):
    """The expression keeps dense what it matches; one name and one weight have entries of their own
    after it. torchao knows no fused modules.
    """
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, quantize_

    import torch

    names = [name for name in NAMES if re.fullmatch(r"model\.layers.*(?<!qkv_proj)|lm_head", name)]
    model = torch.nn.Module()
    for name in names:
        *path, last = name.split(".")
        parent = model
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(32, 32, bias=False))
    own = ("model.layers.10.mlp.gate_proj", "model.layers.12.mlp.gate.weight")
    quantize_(
        model,
        FqnToConfig({f"re:{pattern}": None, **{n: Int8WeightOnlyConfig() for n in own}, "_default": Int8WeightOnlyConfig()}),
        None,
    )
    packed = {n for n in names if type(model.get_submodule(n).weight.data) is not torch.Tensor}
    entry = {"_type": "Int8WeightOnlyConfig", "_data": {}}
    table = {f"re:{pattern}": None, **dict.fromkeys(own, entry), "_default": entry}
    raw = {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": table}}}}
    config = TorchAOConfig(raw, "config.json")
    assert {name for name in names if config.parameters(name) is not None} == packed


# ------------------------------------------------------------------------- lists of dense modules

LISTS = {"bitsandbytes": "llm_int8_skip_modules", "awq": "modules_to_not_convert", "fp8": "modules_to_not_convert",
         "mxfp4": "modules_to_not_convert", "torchao": "modules_to_not_convert"}  # fmt: skip
"""`quant_method` -> its key of a list of modules that stay dense."""
ROUTED = [*NAMES, "model.layers.1.mlp.shared_expert.gate_proj", "model.layers.1.mlp.shared_expert_gate"]
PLAIN = [n for n in ROUTED if fused_from(n) == ()]


def runs(name: str) -> set[str]:
    """Every run of whole segments of a name, and every ending of it."""
    parts = name.split(".")
    whole = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return whole | {name[i:] for i in range(0, len(name), 3)}


ENTRIES = sorted({run for name in PLAIN for run in runs(name)} | {"model.layers.*.mlp", "model.layers.1*", "model.lay"})


def reader(method: str, entries: list[str]) -> ConfigReader:
    """Of a config that keeps `entries` dense."""
    words = {"bits": 4, "group_size": 128, "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
    return read_config({"quant_method": method, LISTS[method]: entries, **words}, "config.json")


def inside(entry: str, name: str) -> bool:
    """Whether an entry is a run of whole segments of the name or of one of its aliases."""
    return any(path_matches(entry, alias) for alias in aliases(name))


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("method", LISTS)
def test_transformers_keeps_the_same_modules_dense(method):
    """What transformers keeps dense, we expect to be dense, but for entries that are a letters'
    ending of a name or a regular expression over several segments; what we expect to be dense
    besides are runs of segments from its middle, which transformers before version 5 kept dense,
    and names under another prefix.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    pairs = equal = 0
    for entry in ENTRIES:
        config = reader(method, [entry])
        for name in PLAIN:
            ours, theirs = config.parameters(name) is None, not should_convert_module(name, [entry])
            pairs, equal = pairs + 1, equal + (ours == theirs)
            if ours and not theirs:
                assert inside(entry, name)
                assert not f".{name}.".startswith(f".{entry}.")
                assert not name.endswith(entry)
            if theirs and not ours:
                assert name.endswith(entry) or "*" in entry
                assert not inside(entry, name)
    assert equal > 0.9 * pairs


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize(
    "entries", [["lm_head"], ["mlp.gate", "lm_head"], ["self_attn"], ["gate"], ["model.layers.1"], ["layers.*.mlp"]]
)
def test_the_list_decides_no_value(entries, tmp_path):
    """Whichever modules a producer kept dense for a list, by its own reading of it, each is read as
    it is stored.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    rng, tensors, want = np.random.default_rng(0), {}, {}
    for name in PLAIN:
        w = rng.standard_normal((64, 128)).astype(np.float32)
        if not should_convert_module(name, entries):
            tensors[f"{name}.weight"] = want[f"{name}.weight"] = w
            continue
        q = hb.quantize(w, "uint4:g64", scale_dtype="float16")
        tensors |= {f"{name}.{s}": t for s, t in LAYOUTS["awq-gemm"].pack(q, {}).items()}
        want[name] = q.dequantize("float32")
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "modules_to_not_convert": entries}
    folder(tmp_path, {"model.safetensors": tensors}, {"quantization_config": config})
    with hb.open(tmp_path) as checkpoint:
        assert not [f for f in checkpoint.findings() if f.severity == "error"]
        found = {k: checkpoint[k] for k in checkpoint}
    assert found.keys() == want.keys()
    for key, value in want.items():
        have = found[key].dequantize("float32") if isinstance(found[key], hb.QTensor) else found[key]
        assert np.array_equal(have, value), key


KEPT = [r"layers\.1\.", "self_attn", r"experts\.", r"layers\.0\.self_attn\.[qkv]_proj$", "o_proj$"]


def written(target: str, keep: str, path: Path) -> tuple[dict[str, Any], set[str], set[str]]:
    """(the quantization config that we write of a qwen3-moe, its packed modules, the dense linear
    ones), with the modules that `keep` matches dense.
    """
    random_model("qwen3_moe").save_pretrained(path / "in")
    with hb.open(path / "in") as checkpoint:
        quantize_checkpoint(checkpoint, path / "out", recipe_of(target, [f"{keep}=keep"]), "rtn")
    config = json.loads((path / "out" / "config.json").read_text())["quantization_config"]
    with hb.open(path / "out") as checkpoint:
        packed = set(checkpoint.packed_keys())
        dense = {k.removesuffix(".weight") for k in checkpoint.dense_keys() if len(checkpoint.info(k).shape) == 2}
    assert packed
    return config, packed, {name for name in dense if not name.endswith("embed_tokens")}


@pytest.mark.ecosystem("transformers")
@pytest.mark.parametrize("keep", KEPT)
def test_transformers_keeps_dense_what_our_config_names(keep, tmp_path):
    from transformers.quantizers.quantizers_utils import should_convert_module

    config, packed, dense = written("awq-gemm:uint4:g32", keep, tmp_path)
    skipped = config["modules_to_not_convert"]
    assert {n for n in packed | dense if should_convert_module(n, skipped)} == packed


@pytest.mark.ecosystem("compressed-tensors")
@pytest.mark.parametrize("keep", KEPT)
def test_compressed_tensors_keeps_dense_what_our_config_names(keep, tmp_path):
    from compressed_tensors.utils.match import is_match

    import torch

    config, packed, dense = written("compressed-tensors:int4:g32", keep, tmp_path)
    linear = torch.nn.Linear(1, 1)
    (group,) = config["config_groups"].values()
    kept = {n for n in packed | dense if is_match(n, linear, group["targets"], config["ignore"])}
    assert kept == packed


@pytest.mark.ecosystem("vllm")
@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("target", ["awq-gemm:uint4:g32", "modelopt:nvfp4"])
def test_vllm_keeps_dense_what_our_config_names(target, keep, tmp_path):
    """By its own functions, under the names of a file; AWQ by letters anywhere in a name."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    config, packed, dense = written(target, keep, tmp_path)
    if target.startswith("awq"):
        skipped = config["modules_to_not_convert"]
        kept = {n for n in packed | dense if is_layer_skipped(n, skipped, match_mode="substring")}
    else:
        own = ModelOptNvFp4Config.from_config(config)
        kept = {n for n in packed | dense if own.is_layer_excluded(n)}
    assert kept == dense


FUSED_NAMES = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.mark.ecosystem("vllm")
def test_vllm_takes_fused_modules_as_we_do():
    """`ignored_layers` of FP8: every set of entries of a layer's modules, on the names that vLLM
    fuses; a list with some parts of one is refused by both.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    parts = [
        f"model.layers.1.{block}.{p}"
        for block, ps in (("self_attn", "qkv"), ("mlp", ("gate", "up")))
        for p in map("{}_proj".format, ps)
    ]
    names = [
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.10.self_attn.qkv_proj",
        "lm_head",
    ]
    answers = {True: 0, False: 0, None: 0}
    for count in range(len(parts) + 1):
        for entries in itertools.combinations([*parts, "lm_head"], count):
            config = reader("fp8", list(entries))
            for name in names:
                try:
                    theirs = is_layer_skipped(name, list(entries), FUSED_NAMES)
                except ValueError:
                    theirs = None
                try:
                    ours = config.parameters(name) is None
                except CheckpointError:
                    ours = None
                assert ours == theirs, (entries, name)
                answers[theirs] += 1
    assert min(answers.values()) > 20
