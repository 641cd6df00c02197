"""Whole models on an NVIDIA GPU: logits of the dense model, text, CUDA graphs, and the way from one
device to the other.
"""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest

from halfbyte.backends import Call, backend_named
from halfbyte.errors import BackendError
from halfbyte.evaluation import compare, windows_of
from halfbyte.generation.batch import BatchGeneration
from halfbyte.generation.single import Generation, Sampling
from halfbyte.torch import packed_modules

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from halfbyte.transformers import load_model  # noqa: E402 # after the skips
from support.tiny_models import MATRIX, agree, ids, logits, write_tiny  # noqa: E402
from support.tiny_tokenizer import write_tokenizer  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
EACH = dict(MATRIX)
"""An architecture -> one of its producers."""


@pytest.fixture(autouse=True)
def _gpu():
    reason = backend_named("cuda").reason()
    if reason:
        pytest.skip(reason)


def on_gpu(folder, **options):
    return load_model(folder, device=DEVICE, **options)[0]


def gpu_logits(model, tokens):
    return logits(model, tokens.to(DEVICE)).cpu()


@pytest.mark.parametrize(("arch", "producer"), MATRIX)
def test_logits_equal_the_dense_model(tmp_path, arch, producer):
    """float32: the exact kernels' bound, that of the CPU. A format without CUDA kernels is refused
    by name.
    """
    tiny = write_tiny(tmp_path, arch, producer)
    if any(backend_named("cuda").refuses(Call("linear", q.format)) for q in tiny.packed.values()):
        with pytest.raises(BackendError, match=r"no backend serves .* on 'cuda:0': cuda: "):
            on_gpu(tmp_path)
        return
    model = on_gpu(tmp_path, dtype="float32")
    assert all(m.device.startswith(DEVICE) for m in packed_modules(model).values())
    assert all(p.device.type == DEVICE for p in (*model.parameters(), *model.buffers()))
    assert agree(gpu_logits(model, ids()), logits(tiny.dense, ids()))
    assert agree(gpu_logits(model, ids(1, 1)), logits(tiny.dense, ids(1, 1)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", EACH)
def test_half_precision_costs_what_it_costs_a_dense_model(tmp_path, arch, dtype):
    """Error against float32, no more than twice that of the dense model in the same dtype on the
    same device. The median over tokens, since a rounding may send a token to another expert.
    """
    tiny = write_tiny(tmp_path, arch, EACH[arch])
    want = logits(tiny.dense, ids(24, 4))
    dense = copy.deepcopy(tiny.dense).to(DEVICE, getattr(torch, dtype))
    ours = gpu_logits(on_gpu(tmp_path, dtype=dtype), ids(24, 4))
    assert ours.dtype == getattr(torch, dtype)
    theirs = gpu_logits(dense, ids(24, 4))
    size = want.norm(dim=-1)
    mine, its = (float(((a.float() - want).norm(dim=-1) / size).median()) for a in (ours, theirs))
    assert 0 < mine <= 2 * its


@pytest.mark.parametrize("arch", EACH)
def test_greedy_text_is_the_cpus(tmp_path, arch):
    """transformers' generate with a cache, a prompt of some tokens and eight steps of one."""
    write_tiny(tmp_path, arch, EACH[arch])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    here = load_model(tmp_path)[0].generate(ids(5, 2), **options)
    there = on_gpu(tmp_path, dtype="float32").generate(ids(5, 2).to(DEVICE), **options)
    assert torch.equal(here, there.cpu())


def test_streamed_and_batched_text_is_the_cpus(tmp_path):
    write_tiny(tmp_path, "gemma3_text", "mlx")
    write_tokenizer(tmp_path)
    prompts = ["<tok7> <tok8> <tok9>", "<tok10>", "<tok11> <tok12>"]
    sampling = Sampling(temperature=0.8, top_k=20, seed=3)
    texts = []
    for device in ("cpu", DEVICE):
        model, tokenizer = load_model(tmp_path, device=device, dtype="float32")
        one = Generation(model, tokenizer, prompts[0], max_tokens=9, sampling=sampling)
        single = "".join(piece.text for piece in one)
        batch = BatchGeneration(model, tokenizer, prompts, max_tokens=9)
        list(batch)
        texts.append([single, one.tokens, [t.tokens for t in batch.texts]])
    assert texts[0] == texts[1]


def forward_for_a_graph(model, tokens):
    """A step without a cache, its mask given: nothing is left for transformers to ask of the
    device.
    """
    count = tokens.shape[1]
    mask = torch.full((count, count), float("-inf"), device=DEVICE, dtype=model.dtype).triu(1)[None, None]
    mask = mask.expand(tokens.shape[0], 1, -1, -1)
    kinds = set(getattr(model.config, "layer_types", None) or ())
    masks = dict.fromkeys(kinds, mask) if "sliding_attention" in kinds else mask
    places = torch.arange(count, device=DEVICE)[None].expand(tokens.shape[0], -1)
    return lambda: model(input_ids=tokens, attention_mask=masks, position_ids=places, use_cache=False).logits


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(
    ("arch", "producer"),
    [("llama", "gptq"), ("qwen3", "mlx"), ("gemma3_text", "mlx"), ("phi3", "ct-mxfp4"), ("gpt_oss", "gpt-oss"),
     ("qwen3_moe", "ct-nvfp4")],
)  # fmt: skip
def test_case_54_a_graph_of_the_whole_model_replays_eager_logits(tmp_path, arch, producer, tokens):
    """Captured after a warm-up, replayed on other tokens, bit for bit."""
    write_tiny(tmp_path, arch, producer)
    model = on_gpu(tmp_path, dtype="float16")
    static = ids(tokens, 1).to(DEVICE)
    step = forward_for_a_graph(model, static)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for seed in (2, 3):
            static.copy_(ids(tokens, 1, seed))
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, step())


def test_case_51_from_one_device_to_the_other(tmp_path):
    """.to(), state dicts, copies and pickles: the canonical bytes come back, and logits with them."""
    write_tiny(tmp_path, "qwen3_moe", "ct-nvfp4")
    here = load_model(tmp_path)[0]
    want, state = logits(here, ids()), here.state_dict()
    there = on_gpu(tmp_path, dtype="float32")
    moved = copy.deepcopy(here).to(DEVICE)
    assert torch.equal(gpu_logits(moved, ids()), gpu_logits(there, ids()))
    assert {n: m.device for n, m in packed_modules(moved).items()} == {n: m.device for n, m in packed_modules(there).items()}
    for name, value in there.state_dict().items():
        assert torch.equal(value.cpu(), state[name]), name
    there.load_state_dict(state, strict=True)
    file = io.BytesIO()
    torch.save(there, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(gpu_logits(again, ids()), gpu_logits(moved, ids()))
    assert torch.equal(logits(moved.to("cpu"), ids()), want)


def test_evaluation_is_the_cpus(tmp_path):
    """Perplexity and cosines of a model on the GPU against the same one on the CPU: nothing but
    rounding apart.
    """
    write_tiny(tmp_path, "llama", "gptq")
    tokens = np.random.default_rng(0).integers(3, 90, 200).tolist()
    windows = windows_of(tokens, "llama.cpp", 32, bos=1)
    measured = compare(on_gpu(tmp_path, dtype="float32"), load_model(tmp_path)[0], windows)
    assert abs(measured.perplexity_increase) < 1e-5
    assert measured.agreement == 1
    assert measured.least_cosine > 1 - 1e-9
    assert measured.kl_p99 < 1e-9
