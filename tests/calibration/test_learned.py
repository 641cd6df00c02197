"""Learned rounding: variables decode to what the format stores, a layer's error falls, equal
arguments give equal bytes, and the written file holds what training ended with.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte.calibration import LearningOptions, calibrate
from halfbyte.calibration.distill import Distillation
from halfbyte.calibration.learned import Weight, relative_error, split, train_layer
from halfbyte.calibration.statistics import InputCollector
from halfbyte.calibration.trainable import TrainableStack, TrainableWeight
from halfbyte.calibration.walk import multiplying
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import FormatError
from halfbyte.formats import format_named
from halfbyte.quantizers import gptq, mse
from halfbyte.spec import Format
from halfbyte.tensor.quantize import quantize
from support.calibration_models import WORDS, write_model, write_text
from support.gguf_models import VOCABULARY, dense_model, write

FORMATS = (
    "int4:g32", "int3:channel", "uint4:g32", "affine4:g64", "mxfp4", "mxfp6_e3m2", "mxint4", "nvfp4", "nvfp4_ue4m3", "fp4",
    "fp8_e4m3", "nf4", "nf4_modelopt", "q4_0", "q4_1", "q8_0", "q2_K", "q3_K", "q4_K", "q6_K", "iq4_nl", "iq4_xs",
)  # fmt: skip


def weight_of(n: int = 6, k: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, k, generator=generator) * torch.exp(torch.randn(n, k // 32, 1, generator=generator)).expand(
        n, -1, 32
    ).reshape(n, k)


MLX = format_named("nvfp4").with_(divisor=2688.0)
DIVIDED = format_named("nvfp4").with_(global_op="divide")


def test_codes_that_are_not_the_nearest_are_not_all_left_in_one_step():
    """Far positions start between `near` and the next code, in their order; near ones stay."""
    start = quantize(np.tile(np.float32([4, -4]), (1, 16)), format_named("int4:g32"))
    step = float(start.parts["scales"].reshape(()))
    off = torch.linspace(-1.2, 1.2, 32)
    w = torch.from_numpy(start.dequantize("float32")) + step * off
    at = torch.from_numpy(start.dequantize("float32")) / step
    trained = TrainableWeight(start, w, near=0.2)
    assert trained.packed() == start
    moved = (trained.rounding.detach() + w / step - at)[0]
    inside = (w / step > -8) & (w / step < 7)  # what saturates has another distance
    off, moved = off[inside[0]], moved[inside[0]]
    near = off.abs() <= 0.2
    assert torch.allclose(moved[near], off[near], atol=1e-5)
    assert (moved.abs() < 0.49).all()
    for side in (off > 0.2, off < -0.2):
        assert side.sum() > 3
        assert (moved[side].abs() > 0.2).all()
        assert (moved[side].diff() > 0).all()


@pytest.mark.parametrize("codec", [*FORMATS, MLX, DIVIDED], ids=[*FORMATS, "mlx", "divided"])
def test_variables_decode_to_what_is_packed(codec):
    """At the start and after moves of every variable, for equality; the parts are valid."""
    w = weight_of()
    fmt = codec if isinstance(codec, Format) else format_named(codec)
    start = mse(w.numpy(), fmt)
    trained = TrainableWeight(start, w)
    assert np.array_equal(trained.packed().dequantize("float32"), start.dequantize("float32"))
    assert np.array_equal(trained.value().detach().numpy(), start.dequantize("float32"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for variable in (trained.rounding, *trained.ranges.values()):
            variable += 1.6 * torch.rand(variable.shape, generator=generator) - 0.8
    packed = trained.packed()
    packed.validate()
    assert packed.format == fmt
    assert np.array_equal(trained.value().detach().numpy(), packed.dequantize("float32"))
    changed = {part for part, array in packed.parts.items() if not np.array_equal(array, start.parts[part])}
    assert changed == set(packed.parts) - {"global_scale"}


@pytest.mark.parametrize("codec", [*FORMATS, MLX, DIVIDED, "int4:g48"], ids=[*FORMATS, "mlx", "divided", "a last group of 16"])
def test_a_stack_is_its_weights(codec):
    """Decoded values, derivatives, and what is packed once the stack's variables have moved."""
    fmt = codec if isinstance(codec, Format) else format_named(codec)
    dense = [weight_of(n) * 4.0**i for i, n in enumerate((6, 1, 3))]
    starts = [mse(w.numpy(), fmt) for w in dense]
    alone, together = ([TrainableWeight(q, w, near=0.2, free=True) for q, w in zip(starts, dense, strict=True)] for _ in range(2))
    stack = TrainableStack(together)
    for values in (stack.value().split(stack.rows), [w.value() for w in alone]):
        assert [v.shape for v in values] == [w.shape for w in dense]
        torch.autograd.backward(values, [torch.from_numpy(q.dequantize("float32")) for q in starts])
    generator = torch.Generator().manual_seed(1)
    for of_stack, names in ((stack.rounding, None), *((u, part) for part, u in stack.ranges.items())):
        own = [w.rounding if names is None else w.ranges[names] for w in alone]
        assert torch.equal(of_stack.grad, torch.cat([u.grad for u in own]))
        with torch.no_grad():
            of_stack += torch.rand(of_stack.shape, generator=generator) - 0.5
            for u, rows in zip(own, of_stack.split(stack.rows), strict=True):
                u.copy_(rows)
    packed = [w.packed() for w in together]
    assert packed == [w.packed() for w in alone]
    assert packed != starts
    for q, value in zip(packed, stack.value().split(stack.rows), strict=True):
        assert np.array_equal(value.detach().numpy(), q.dequantize("float32"))


@pytest.mark.parametrize("codec", ["int4:g32", "uint4:g32", "affine4:g32", "mxfp4", "q4_K"])
def test_gradients_pass_straight_through_the_rounding(codec):
    """Along an offset the value's derivative is the scale, times the distance of the neighbours; a
    scale's derivative is that of the rounding error, and of the whole value where x is cut off.
    """
    w = weight_of()
    trained = TrainableWeight(mse(w.numpy(), codec), w)
    trained.value().sum().backward()
    stored = trained._stored()
    terms = trained._terms(stored)
    scale = terms[0].expand(trained._shape).reshape(w.shape)
    shifted = trained._shifted(*terms).detach().reshape(w.shape)
    inside = (shifted % (len(trained._table) - 1) != 0) & (trained._position(w, stored) % 1 != 0)
    steps = trained.rounding.grad / scale.detach()
    possible = {0.5, 1.0, 2.0} if codec == "mxfp4" else {1.0}
    assert set(steps[inside].round(decimals=4).tolist()) <= possible
    if codec == "int4:g32":
        x = (w / scale).detach()
        p = (x.clamp(-8, 7).round() - torch.where((x > -8) & (x < 7), x, 0)) * scale.detach().abs()
        assert torch.allclose(trained.ranges["scales"].grad, p.reshape(6, -1, 32).sum(-1), rtol=1e-5, atol=1e-5)


def one_layer(tmp_path, kind: str, **more):
    """(layer, its linear modules, hidden states, their outputs, a function that runs it)."""
    model = write_model(tmp_path / "in", kind, **more)
    layer = model.model.layers[0]
    seen: list[tuple] = []
    handle = layer.register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for _ in range(24):
            model(torch.tensor(rng.integers(3, WORDS, (1, 48))), use_cache=False)
    handle.remove()

    def run(hidden):
        return layer(hidden, *seen[0][0][1:], **seen[0][1])

    hidden = [a[0] for a, _ in seen]
    with torch.no_grad():
        return (
            layer,
            {n: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)},
            hidden,
            [run(h) for h in hidden],
            run,
        )


@pytest.mark.parametrize(
    "setting",
    [
        "pass",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    ],
)
def test_quick_products_leave_the_settings_of_a_program(setting):
    """By torch's older settings and by its newer ones, which refuse to be mixed; an error counts as
    a state too. Settings last for a process, so each has its own.
    """
    if "fp32_precision" in setting and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has the older settings alone")
    program = f"""
import torch
from halfbyte.calibration.learned import quick_products

def state():
    matmul = torch.backends.cuda.matmul
    found = []
    for read in (torch.get_float32_matmul_precision, lambda: matmul.allow_tf32, lambda: matmul.fp32_precision):
        try:
            found.append(read())
        except (RuntimeError, AttributeError):
            found.append("refused")
    return found

{setting}
before = state()
with quick_products():
    quick = state()
assert quick[2] == "tf32" or quick[1] is True, quick
assert state() == before, (before, state())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("codec", ["uint4:g32", "nvfp4"])
def test_a_layers_error_falls_below_gptqs(tmp_path, codec):
    layer, linear, hidden, outputs, run = one_layer(tmp_path, "llama")
    with torch.no_grad(), InputCollector(layer, *multiplying(layer)) as inputs:
        for i in split(len(hidden))[0]:
            run(hidden[i])
            inputs.sequence_done()
    weights = []
    for name, module in linear.items():
        w, h = module.weight.data.clone(), inputs.of(name).hessian.double().numpy()
        weights.append(Weight(module.weight.data, gptq(w.numpy(), h, codec), w, mse(w.numpy(), codec, h.diagonal())))

    def error(packed) -> float:
        with torch.no_grad():
            for weight, q in zip(weights, packed, strict=True):
                weight.view.copy_(torch.from_numpy(q.dequantize("float32")))
            return float(np.mean([float(relative_error(run(h), y)) for h, y in zip(hidden, outputs, strict=True)]))

    before = min(error([w.packed for w in weights]), error([w.start for w in weights]))
    with torch.no_grad():
        trained = train_layer(layer, weights, hidden, outputs, run, LearningOptions(steps=25))
    assert error(trained) < 0.9 * before
    now = [w.view.clone() for w in weights]
    assert all(np.array_equal(w, q.dequantize("float32")) for w, q in zip(now, trained, strict=True))
    assert not any(p.requires_grad or p.grad is not None for p in (m.weight for m in linear.values()))


def test_the_best_state_is_kept(tmp_path, monkeypatch):
    """Steps that only make things worse: the result is the better of GPTQ's and the start."""
    layer, linear, hidden, outputs, run = one_layer(tmp_path, "llama")
    weights = []
    for i, module in enumerate(linear.values()):
        w = module.weight.data.clone()
        fine, coarse = mse(w.numpy(), "int8:g32"), mse(w.numpy(), "int2:g32")
        weights.append(Weight(module.weight.data, *((fine, w, coarse) if i % 2 else (coarse, w, coarse))))
    for name in ("TRAVEL", "GPTQ_TRAVEL"):
        monkeypatch.setattr(f"halfbyte.calibration.learned.{name}", 500.0)
    with torch.no_grad():
        trained = train_layer(layer, weights, hidden, outputs, run, LearningOptions(steps=4))
    assert trained == [w.packed for w in weights]


def learned(folder, text, to: str, **options):
    with open_checkpoint(folder) as checkpoint:
        return calibrate(
            checkpoint, recipe_of(to), text, "learned", context=32, sequences=16, learning=LearningOptions(**options)
        )


def test_equal_seeds_give_equal_bytes_and_the_file_decodes_to_what_was_trained(tmp_path):
    write_model(tmp_path / "in", "llama", num_hidden_layers=1)
    text = write_text(tmp_path / "text.txt")
    found = {seed: learned(tmp_path / "in", text, "halfbyte:uint4:g32", steps=10, seed=seed) for seed in (5, 6)}
    assert found[5].weights != found[6].weights
    assert found[5].name != found[6].name
    options = ["--method", "learned", "--calibration", str(text), "--context", "32", "--sequences", "16", "--steps", "10"]
    common = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "halfbyte:uint4:g32", *options]
    assert main([*common, "--seed", "5"]) == 0
    with halfbyte.open(tmp_path / "out") as written:
        packed = {key: written[key] for key in written if written.info(key).quantized}
    assert packed == found[5].weights
    for key, q in packed.items():
        assert np.array_equal(q.dequantize("float32"), found[5].weights[key].dequantize("float32")), key


def test_experts_are_trained_and_those_without_tokens_stay_as_they_start(tmp_path):
    write_model(tmp_path / "in", "mixtral", num_local_experts=4, num_experts_per_tok=1, num_hidden_layers=1)
    text = write_text(tmp_path / "text.txt")
    found = learned(tmp_path / "in", text, "halfbyte:uint4:g32", steps=16)
    with open_checkpoint(tmp_path / "in") as checkpoint:
        gptqs = calibrate(checkpoint, recipe_of("halfbyte:uint4:g32"), text, "gptq", context=32, sequences=16)
    assert found.weights.keys() == gptqs.weights.keys()
    experts = [key for key in found.weights if "experts" in key]
    assert experts
    for key in experts:
        assert found.weights[key].shape == gptqs.weights[key].shape
        assert found.weights[key] != gptqs.weights[key]


def test_formats_that_cannot_be_trained_are_refused(tmp_path):
    with pytest.raises(FormatError, match=r"hqq4:g64 with method learned.*allowed: int, uint, affine, q4_0"):
        TrainableWeight(quantize(weight_of().numpy(), "hqq4"), weight_of())
    write_model(tmp_path / "in", "llama", hidden_size=256, head_dim=64)
    text = write_text(tmp_path / "text.txt")
    with pytest.raises(FormatError, match="tq2_0"):
        learned(tmp_path / "in", text, "gguf:tq2_0", steps=1)


@pytest.fixture
def divergences(monkeypatch):
    """What `Distillation.divergence` returned, in order."""
    seen: list[float] = []
    divergence = Distillation.divergence
    monkeypatch.setattr(Distillation, "divergence", lambda self, at: seen.append(divergence(self, at)) or seen[-1])
    return seen


def test_scales_of_a_large_model_bring_its_predictions_nearer(tmp_path, monkeypatch, divergences):
    """Less divergence on sequences left out; codes stay, scales change; equal runs give equal
    weights; powers of two stay.
    """
    monkeypatch.setattr("halfbyte.calibration.distill.KEPT_IN_MEMORY", 0)
    monkeypatch.setattr("halfbyte.calibration.distill.LOGITS", 1)  # the sequences of a step one after another
    write_model(tmp_path / "in", "llama", num_hidden_layers=1)
    text = write_text(tmp_path / "text.txt", 1200)
    plain = learned(tmp_path / "in", text, "halfbyte:int4:g32", steps=1)
    assert divergences == []
    found = [learned(tmp_path / "in", text, "halfbyte:int4:g32", steps=1, distill=12) for _ in range(2)]
    assert min(divergences[1:5]) < 0.99 * divergences[0]
    assert divergences[5:] == divergences[:5]
    assert found[0].weights == found[1].weights
    for key, q in found[0].weights.items():
        assert np.array_equal(q.parts["codes"], plain.weights[key].parts["codes"])
        assert q != plain.weights[key]
    powers = [learned(tmp_path / "in", text, "halfbyte:mxfp4", steps=1, distill=n).weights for n in (0, 4)]
    assert powers[0] == powers[1]


def test_layers_decoded_together_are_trained_as_one_by_one(tmp_path, monkeypatch, divergences):
    """Two formats, so that a block of layers has two stacks of weights."""
    write_model(tmp_path / "in", "llama", num_hidden_layers=3)
    text = write_text(tmp_path / "text.txt", 1200)
    recipe = recipe_of("halfbyte:int4:g32", rules=["down_proj=mxfp4"])
    found = []
    for together in (0, 80_000, 1 << 26):  # one layer, two and one, all three
        monkeypatch.setattr("halfbyte.calibration.distill.TOGETHER", together)
        with open_checkpoint(tmp_path / "in") as checkpoint:
            options = LearningOptions(steps=0, distill=4)
            found.append(calibrate(checkpoint, recipe, text, "learned", context=32, sequences=16, learning=options).weights)
    assert found[0] == found[1] == found[2]
    assert len(set(divergences)) == len(divergences) / 3 > 1


def test_the_graph_of_a_whole_model_gives_the_gradients_of_layers_one_by_one(tmp_path, monkeypatch, divergences):
    write_model(tmp_path / "in", "llama", num_hidden_layers=3)
    text = write_text(tmp_path / "text.txt", 1200)
    found = []
    for free in (0, 1 << 40):
        monkeypatch.setattr("halfbyte.calibration.distill._free_bytes", lambda device, free=free: free)
        found.append(learned(tmp_path / "in", text, "halfbyte:affine4:g32", steps=0, distill=8, norms=True))
    assert found[0].weights == found[1].weights
    assert divergences[:5] == divergences[5:]
    assert len(set(divergences[:5])) == 5
    for key, value in found[0].replaced.items():
        assert np.array_equal(value, found[1].replaced[key]), key


@pytest.mark.parametrize("codec", ["affine4:g32", "nvfp4"])
def test_compiled_steps_have_the_gradients_of_steps(tmp_path, monkeypatch, divergences, codec):
    """And lead to the same divergences, with scales that the format stores."""
    write_model(tmp_path / "in", "llama", num_hidden_layers=2)
    text = write_text(tmp_path / "text.txt", 1200)
    found: list[list[torch.Tensor]] = []
    one_pass = Distillation._pass

    def watched(self: Distillation, sequences: list[int]) -> None:
        one_pass(self, sequences)
        found.append([v.grad.clone() for stack in self._stacks for v in (stack.rounding, *stack.ranges.values())])

    monkeypatch.setattr(Distillation, "_pass", watched)
    monkeypatch.setattr("halfbyte.calibration.distill.RATE", 0.05)  # scales of 8 bits move, too
    for compiled in (False, True):
        learned(tmp_path / "in", text, f"halfbyte:{codec}", steps=0, distill=4, compiled=compiled)
    for plain, fused in zip(found[0], found[4], strict=True):
        assert (plain - fused).norm() < 1e-4 * plain.norm()
    plain, fused = np.array(divergences).reshape(2, 5)
    assert np.abs(plain - plain[0]).max() > 0.02 * plain[0]
    assert np.abs(plain - fused).max() < 0.02 * np.abs(plain - plain[0]).max()


@pytest.mark.parametrize("option", ["norms", "compiled"])
def test_options_of_the_whole_models_steps_want_their_number(tmp_path, option):
    """Without steps they would change nothing."""
    write_model(tmp_path / "in", "llama", num_hidden_layers=1)
    with pytest.raises(FormatError, match="give their number: --distill"):
        learned(tmp_path / "in", write_text(tmp_path / "text.txt"), "halfbyte:uint4:g32", steps=0, **{option: True})


def test_norms_that_do_not_stay_in_memory_are_named_in_a_note(tmp_path, monkeypatch):
    write_model(tmp_path / "in", "llama", num_hidden_layers=1)
    monkeypatch.setattr("halfbyte.calibration.distill.KEPT_IN_MEMORY", 0)
    text = write_text(tmp_path / "text.txt")
    found = learned(tmp_path / "in", text, "halfbyte:uint4:g32", steps=0, distill=1, norms=True)
    assert any("norms were not trained" in note for note in found.notes)
    assert not found.replaced


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_norms_are_trained_with_the_model_and_written_in_the_files_convention(tmp_path, monkeypatch, divergences, source):
    """All norms inside layers, and no other tensor; each by a little."""
    if source == "gguf":
        target = "gguf:q4_0"
        model = write(tmp_path / "in.gguf", "gemma3", dense_model("gemma3"), False)
        ids = np.random.default_rng(0).integers(3, VOCABULARY, (32, 32)).tolist()
        monkeypatch.setattr("halfbyte.calibration.walk.token_sequences", lambda *a: ids)
        text = ""
    else:
        target = "halfbyte:int4:g32"
        write_model(tmp_path / "in", "llama", num_hidden_layers=2)
        model, text = tmp_path / "in", write_text(tmp_path / "text.txt", 4000)
    monkeypatch.setattr("halfbyte.calibration.distill.CODE_RATE", 1e-9)  # the norms alone
    plain = learned(model, text, target, steps=0, distill=0)
    found = learned(model, text, target, steps=0, distill=24, norms=True)
    assert min(divergences[1:]) < 0.98 * divergences[0]
    assert plain.replaced == {}
    with open_checkpoint(model) as checkpoint:
        last = ("output_norm.weight", "model.norm.weight")
        norms = {i.key for i in checkpoint.infos() if len(i.shape) == 1 and "norm" in i.key and not i.key.endswith(last)}
        assert found.replaced.keys() == norms
        for key, value in found.replaced.items():
            was = np.asarray(checkpoint[key])
            assert value.dtype == was.dtype
            assert 0 < np.abs(value - was).max() < 0.1 * np.abs(was).max(), key


@pytest.mark.parametrize("codec", ["mxfp4", "uint2:g32"])
def test_codes_of_a_model_in_memory_are_trained_end_to_end(tmp_path, divergences, codec):
    """Codes change and the divergence falls further than scales bring it; zero points and powers of
    two stay; equal runs give equal weights.
    """
    write_model(tmp_path / "in", "llama", num_hidden_layers=1)
    text = write_text(tmp_path / "text.txt", 4000)

    def run(distill: int):
        with open_checkpoint(tmp_path / "in") as checkpoint:
            return calibrate(
                checkpoint,
                recipe_of(f"halfbyte:{codec}"),
                text,
                "learned",
                context=32,
                sequences=96,
                learning=LearningOptions(steps=1, distill=distill),
            ).weights

    plain, found, again = run(0), run(40), run(40)
    assert min(divergences[1:5]) < 0.95 * divergences[0]
    assert found == again
    for key, q in found.items():
        assert not np.array_equal(q.parts["codes"], plain[key].parts["codes"])
        same = "scales" if codec == "mxfp4" else "zeros"
        assert np.array_equal(q.parts[same], plain[key].parts[same])


def test_a_gguf_is_distilled_in_its_own_row_order(tmp_path, monkeypatch):
    """Rows of q and k lie in llama.cpp's order: trained scales go back to their rows."""
    source = write(tmp_path / "in.gguf", "llama", dense_model("llama"), False)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (10, 32)).tolist()
    monkeypatch.setattr("halfbyte.calibration.walk.token_sequences", lambda *a: ids)
    for rate in ("RATE", "CODE_RATE"):  # nothing changes, and so rows stay
        monkeypatch.setattr(f"halfbyte.calibration.distill.{rate}", 1e-9)
    plain, same = (learned(source, "", "gguf:q4_0", steps=1, distill=n).weights for n in (0, 2))
    assert plain == same
