"""LoRA on packed layers: peft finds them, the gradient is the dense model's, adapters are saved,
loaded and merged.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

import halfbyte as hb
import torch
from halfbyte.errors import UnsupportedError
from halfbyte.torch import QLinear, packed_modules
from halfbyte.transformers import load_model
from support.tiny_models import agree, ids, logits, write_tiny

NAMES = ["q_proj", "down_proj"]


def test_a_gradient_passes_a_packed_layer_to_what_is_below_it():
    """What LoRA needs of a packed layer: d(x · wᵀ)/dx = w, and no gradient of its own."""
    w = hb.quantize(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32), "int4:g32")
    x = torch.ones(3, 64, requires_grad=True)
    layer = QLinear(w)
    layer(x).sum().backward()
    dense = torch.from_numpy(w.dequantize("float32"))
    assert torch.allclose(x.grad, dense.sum(0).expand(3, 64), rtol=1e-6, atol=1e-6)
    assert not list(layer.parameters())


def trained(model, steps: int = 2) -> list[torch.Tensor]:
    """The adapter's gradients of the last of some steps."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert parameters
    assert all("lora_" in n for n in parameters)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
    return [p.grad for p in parameters.values()]


@pytest.mark.ecosystem("peft")
@pytest.mark.parametrize(
    ("arch", "producer"), [("llama", "gptq"), ("llama", "bitsandbytes"), ("qwen2", "awq"), ("gemma3_text", "mlx")]
)
def test_gradients_are_the_dense_models(tmp_path, arch, producer):
    from peft import LoraConfig, PeftModel, get_peft_model

    from halfbyte.torch.peft import LoraQLinear, merge_dense, with_packed_layers

    tiny = write_tiny(tmp_path / "in", arch, producer)
    options = {"r": 4, "lora_alpha": 8, "target_modules": NAMES, "task_type": "CAUSAL_LM"}
    base = load_model(tmp_path / "in")[0]
    torch.manual_seed(0)
    packed = get_peft_model(base, with_packed_layers(LoraConfig(**options)))
    torch.manual_seed(0)
    dense = get_peft_model(copy.deepcopy(tiny.dense), LoraConfig(**options))
    layers = [m for m in packed.modules() if isinstance(m, LoraQLinear)]
    assert len(layers) == 2 * base.config.num_hidden_layers
    for ours, theirs in zip(trained(packed), trained(dense), strict=True):
        assert theirs.abs().max() > 0
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    assert agree(logits(packed, ids()), logits(dense, ids()))

    packed.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        load_model(tmp_path / "in")[0],
        tmp_path / "adapter",
        config=with_packed_layers(LoraConfig.from_pretrained(tmp_path / "adapter")),
    )
    wanted = logits(packed, ids())
    assert torch.equal(logits(again, ids()), wanted)

    merged = merge_dense(again)
    assert not any(isinstance(m, LoraQLinear) for m in merged.modules())
    assert agree(logits(merged, ids()), wanted)


@pytest.mark.ecosystem("peft")
def test_a_merge_rounds_to_the_format_reports_it_and_is_undone(tmp_path):
    from peft import LoraConfig, get_peft_model

    from halfbyte.torch.peft import LoraQLinear, with_packed_layers

    write_tiny(tmp_path, "llama", "gptq")
    base = load_model(tmp_path)[0]
    before = {n: m.canonical() for n, m in packed_modules(base).items() if n.endswith("q_proj")}
    model = get_peft_model(base, with_packed_layers(LoraConfig(r=4, target_modules=["q_proj"])))
    trained(model)
    layers = [m for m in model.modules() if isinstance(m, LoraQLinear)]
    values = [layer.merged_values(["default"]) for layer in layers]
    with pytest.warns(RuntimeWarning, match=r"\[merge\] default rounded to .*: relative error 0\.\d+ of a weight"):
        model.merge_adapter()
    for layer, exact in zip(layers, values, strict=True):
        rounded = layer.get_base_layer().canonical()
        error = np.linalg.norm(rounded.dequantize("float32").astype(np.float64) - exact) / np.linalg.norm(
            exact.astype(np.float64)
        )
        assert layer.rounding_errors == [pytest.approx(error)]
        assert 0 < error < 0.2
        assert rounded.format in {q.format for q in before.values()}
    model.unmerge_adapter()
    assert [layer.get_base_layer().canonical() for layer in layers] == list(before.values())
    with pytest.warns(RuntimeWarning, match="relative error"):
        whole = model.merge_and_unload()
    assert isinstance(whole.model.layers[0].self_attn.q_proj, QLinear)
    whole.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load_model(tmp_path / "out")[0], ids()), logits(whole, ids()))


@pytest.mark.ecosystem("peft")
def test_what_is_no_plain_lora_is_refused(tmp_path):
    from peft import LoraConfig, get_peft_model

    from halfbyte.torch.peft import with_packed_layers

    write_tiny(tmp_path, "llama", "gptq")
    with pytest.raises(UnsupportedError, match="use_dora on a packed layer"):
        get_peft_model(load_model(tmp_path)[0], with_packed_layers(LoraConfig(target_modules=["q_proj"], use_dora=True)))


class Small(torch.nn.Module):
    """A packed layer beside one with parameters, which peft asks for their device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.q = QLinear(hb.quantize(np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32), "int4:g32"))

    def forward(self, x):
        return self.q(self.norm(x))


@pytest.mark.ecosystem("peft")
def test_merge_dense_keeps_the_adapter_that_is_merged():
    from peft import LoraConfig, get_peft_model

    from halfbyte.torch.peft import merge_dense, with_packed_layers

    config = with_packed_layers(LoraConfig(r=4, target_modules=["q"], init_lora_weights=False))
    model = get_peft_model(Small(), config)
    model.add_adapter("other", config)
    wanted = model.base_model.model.q.merged_values(["other"])
    with pytest.warns(RuntimeWarning, match="relative error"):
        model.base_model.merge_adapter(["other"])
    assert np.array_equal(merge_dense(model).q.weight.numpy(), wanted)


@pytest.mark.ecosystem("peft")
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_that_changes_the_packed_weight_is_refused(start):
    from peft import LoraConfig, get_peft_model

    from halfbyte.torch.peft import with_packed_layers

    with pytest.raises(UnsupportedError, match="changes the base weight, which is packed"):
        get_peft_model(Small(), with_packed_layers(LoraConfig(r=4, target_modules=["q"], init_lora_weights=start)))


@pytest.mark.ecosystem("peft")
def test_nan_in_an_adapter_is_not_merged():
    from peft import LoraConfig, get_peft_model

    from halfbyte.torch.peft import merge_dense, with_packed_layers

    model = get_peft_model(Small(), with_packed_layers(LoraConfig(r=4, target_modules=["q"])))
    model.base_model.model.q.lora_B["default"].weight.data.fill_(torch.nan)
    for merge in (merge_dense, lambda m: m.merge_and_unload()):
        with pytest.raises(UnsupportedError, match="default: NaN or infinity in the merged weight"):
            merge(model)


EXPERTS = ["q_proj", "experts"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.ecosystem("peft")
@pytest.mark.parametrize(
    ("arch", "producer"), [("qwen3_moe", "gptq"), ("qwen3_moe", "bitsandbytes"), ("mixtral", "awq"), ("gpt_oss", "gpt-oss")]
)
def test_gradients_of_experts_are_the_dense_models(tmp_path, arch, producer):
    """peft's own `target_parameters` of the dense experts: the adapter's tensors have one name and
    shape, gradients and logits are equal, and what is saved of one is loaded into the other.
    """
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    from halfbyte.torch import QExperts
    from halfbyte.torch.peft import LoraQExperts, merge_dense, with_packed_layers

    tiny = write_tiny(tmp_path / "in", arch, producer)
    options = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    packed = get_peft_model(load_model(tmp_path / "in")[0], with_packed_layers(LoraConfig(**options, target_modules=["experts"])))
    theirs = LoraConfig(**options, target_modules=[], target_parameters=PARAMETERS)
    dense = get_peft_model(copy.deepcopy(tiny.dense), theirs)
    assert len([m for m in packed.modules() if isinstance(m, LoraQExperts)]) == 2 * tiny.dense.config.num_hidden_layers
    start = get_peft_model_state_dict(dense)
    assert {k: v.shape for k, v in get_peft_model_state_dict(packed).items()} == {k: v.shape for k, v in start.items()}
    set_peft_model_state_dict(packed, start)
    ours, wanted = (
        dict(zip([n for n, p in m.named_parameters() if p.requires_grad], trained(m), strict=True)) for m in (packed, dense)
    )
    assert set(ours) == set(wanted)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm()
    assert agree(logits(packed, ids()), logits(dense, ids()))
    with packed.disable_adapter():
        assert agree(logits(packed, ids()), logits(tiny.dense, ids()))

    packed.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        load_model(tmp_path / "in")[0],
        tmp_path / "adapter",
        config=with_packed_layers(LoraConfig.from_pretrained(tmp_path / "adapter")),
    )
    assert torch.equal(logits(again, ids()), logits(packed, ids()))
    wanted = logits(packed, ids())
    merged = merge_dense(again)
    assert not any(isinstance(m, LoraQExperts | QExperts) for m in merged.modules())
    assert agree(logits(merged, ids()), wanted)


@pytest.mark.ecosystem("peft")
def test_a_merge_of_experts_rounds_reports_it_and_is_undone(tmp_path):
    from peft import LoraConfig, get_peft_model

    from halfbyte.torch import QExperts
    from halfbyte.torch.peft import LoraQExperts, with_packed_layers

    write_tiny(tmp_path, "qwen3_moe", "gptq")
    model = get_peft_model(load_model(tmp_path)[0], with_packed_layers(LoraConfig(r=4, target_modules=EXPERTS)))
    trained(model)
    layers = [m for m in model.modules() if isinstance(m, LoraQExperts)]
    packed = [(m, name, m.canonical(name)) for m in model.modules() if isinstance(m, QExperts) for name in m.packed]
    values = [layer.merged_values(["default"]) for layer in layers]
    with pytest.warns(
        RuntimeWarning, match=r"\[merge\] default rounded to uint4:g32: relative error 0\.\d+ of a weight \[4, 128, 64\]"
    ):
        model.merge_adapter()
    for layer, exact in zip(layers, values, strict=True):
        off = sum(
            np.square(layer._experts.canonical(n).dequantize("float32") - v.astype(np.float64)).sum() for n, v in exact.items()
        )
        size = sum(np.square(v.astype(np.float64)).sum() for v in exact.values())
        assert layer.rounding_errors == [pytest.approx((off / size) ** 0.5)]
        assert 0 < layer.rounding_errors[0] < 0.2
    model.unmerge_adapter()
    assert len(packed) == 4
    assert all(m.canonical(name) == before for m, name, before in packed)
    with pytest.warns(RuntimeWarning, match="relative error"):
        whole = model.merge_and_unload()
    assert type(whole.model.layers[0].mlp.experts) is QExperts
    whole.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load_model(tmp_path / "out")[0], ids()), logits(whole, ids()))


@pytest.mark.ecosystem("peft")
def test_dropout_on_experts_is_refused(tmp_path):
    from peft import LoraConfig, get_peft_model

    from halfbyte.torch.peft import with_packed_layers

    write_tiny(tmp_path, "qwen3_moe", "gptq")
    with pytest.raises(UnsupportedError, match=r"lora_dropout 0\.1 on packed experts; allowed: 0"):
        get_peft_model(load_model(tmp_path)[0], with_packed_layers(LoraConfig(target_modules=["experts"], lora_dropout=0.1)))
