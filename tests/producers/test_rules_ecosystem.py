"""Which modules a config's rules cover, compared with the producers' own functions."""

from __future__ import annotations

import re

import pytest

from halfbyte.layouts.quant_config.module_rules import regex_matches
from halfbyte.layouts.torchao import TorchAOConfig

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
