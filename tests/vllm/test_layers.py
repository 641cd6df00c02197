"""The plug-in's layers alone: the rows and inputs of each rank, formats side by side, tables, heads
and experts, as one operation of a compiled graph and in a CUDA graph.

Each layer of each rank is compared with the same rows and columns of the decoded matrix.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import torch
from halfbyte import format_named
from halfbyte.backends import backend_named
from halfbyte.errors import CheckpointError, ShapeError, UnsupportedError
from halfbyte.numerics import activations as definition
from halfbyte.tensor.qtensor import QTensor
from halfbyte.vllm.source import stated_activations
from support.gpu_weights import product_within, random_parts, stack
from support.vllm_stand_in import vllm_classes
from torch import nn

CODECS = ["int4:g128", "uint4:g32", "int8:g32", "nf4:g64", "affine4:g64", "hqq4:g64", "mxfp4", "nvfp4", "fp8_e4m3:channel"]
CODECS += ["q4_0", "q4_K", "q6_K", "q8_0"]
"""What the checkpoints of every method that the plug-in takes over hold."""
HIDDEN, HEADS, KV_HEADS, HEAD, FEED, VOCAB = 512, 8, 4, 64, 1024, 203
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and (reason := backend_named("cuda").reason()):
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def plugin():
    with vllm_classes() as found:
        yield found


class Packed:
    """Weights by key, in place of an opened checkpoint."""

    def __init__(self, **weights):
        self.weights = weights
        self.checkpoint = SimpleNamespace(path="the checkpoint")

    def weight(self, key):
        return self.weights[key]


def weight(word, rows, inputs, seed=0):
    fmt = format_named(word)
    return QTensor(fmt, (rows, inputs), random_parts(fmt, (rows, inputs), np.random.default_rng(seed)))


def layer_of(kind, **attributes):
    """A layer as vLLM's model has it, without the process groups that its constructor wants."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, value in {"prefix": "model.layers.0.layer", "tp_rank": 0, "tp_size": 1, **attributes}.items():
        setattr(layer, name, value)
    return layer


def filled(plugin, kind, source, device, *, inputs, outputs, dtype, whole=None, method="HalfbyteLinearMethod", **attributes):
    """The method and the layer of one rank, its weights read."""
    how = getattr(plugin.linear, method)(list(source.weights))
    layer = layer_of(kind, **attributes)
    how.create_weights(layer, inputs, outputs, whole or inputs, sum(outputs), dtype)
    assert all(p.shape == (sum(outputs), 1) for p in layer.parameters())  # nothing dense is allocated
    how.fill(layer, source, device)
    return how, layer


def activations(device, inputs, dtype, tokens=5):
    torch.manual_seed(tokens)
    return (torch.randn(tokens, inputs) * 0.05).to(dtype).to(device)


def agrees(y, x, dense, bias=None):
    product_within(y, x, dense, bias, y.dtype)


def dtype_of(device):
    return torch.bfloat16 if device == "cuda" else torch.float32


def qkv_weights(codecs):
    rows = (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)
    return {f"{n}_proj": weight(word, r, HIDDEN, i) for i, (n, word, r) in enumerate(zip("qkv", codecs, rows, strict=True))}


@pytest.mark.parametrize("word", CODECS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_rank_has_the_rows_of_its_heads(plugin, device, word, ranks):
    """8 ranks share 4 heads of k and v, two a head."""
    source, dtype = Packed(**qkv_weights([word] * 3)), dtype_of(device)
    q, k, v = (w.dequantize("float64") for w in source.weights.values())
    copies = max(1, ranks // KV_HEADS)
    own_q, own_kv = HEADS // ranks * HEAD, max(1, KV_HEADS // ranks) * HEAD
    x = activations(device, HIDDEN, dtype)
    for rank in range(ranks):
        how, layer = filled(
            plugin, plugin.QKVParallelLinear, source, device, inputs=HIDDEN, outputs=[own_q, own_kv, own_kv], dtype=dtype,
            tp_rank=rank, tp_size=ranks, total_num_heads=HEADS, total_num_kv_heads=KV_HEADS, head_size=HEAD, v_head_size=HEAD,
            num_kv_head_replicas=copies,
        )  # fmt: skip
        kv = rank // copies
        rows = [q[rank * own_q : (rank + 1) * own_q], *(w[kv * own_kv : (kv + 1) * own_kv] for w in (k, v))]
        agrees(how.apply(layer, x), x, np.concatenate(rows))


@pytest.mark.parametrize("word", CODECS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_gate_and_up_of_a_rank_stand_one_after_the_other(plugin, device, word, ranks):
    source, dtype = Packed(gate_proj=weight(word, FEED, HIDDEN, 1), up_proj=weight(word, FEED, HIDDEN, 2)), dtype_of(device)
    gate, up = (w.dequantize("float64") for w in source.weights.values())
    bias = torch.randn(2 * FEED // ranks).to(dtype).to(device)
    x, own = activations(device, HIDDEN, dtype), FEED // ranks
    for rank in range(ranks):
        how, layer = filled(
            plugin, nn.Module, source, device, inputs=HIDDEN, outputs=[own, own], dtype=dtype, tp_rank=rank, tp_size=ranks
        )
        part = slice(rank * own, (rank + 1) * own)
        agrees(how.apply(layer, x, bias), x, np.concatenate([gate[part], up[part]]), bias)


@pytest.mark.parametrize("word", CODECS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ranks_of_a_row_parallel_layer_add_up(plugin, device, word, ranks):
    source, dtype = Packed(down_proj=weight(word, HIDDEN, FEED, 3)), dtype_of(device)
    dense, own = source.weights["down_proj"].dequantize("float64"), FEED // ranks
    x = activations(device, FEED, dtype)
    for rank in range(ranks):
        how, layer = filled(
            plugin, plugin.RowParallelLinear, source, device, inputs=own, outputs=[HIDDEN], dtype=dtype, whole=FEED,
            tp_rank=rank, tp_size=ranks, output_size=HIDDEN,
        )  # fmt: skip
        part = slice(rank * own, (rank + 1) * own)
        agrees(how.apply(layer, x[:, part].contiguous()), x[:, part], dense[:, part])


def table_of(plugin, source, device, dtype, ranks, rank):
    """A table of embeddings whose rows are padded to 256 and divided among the ranks."""
    own = 256 // ranks
    first, last = min(rank * own, VOCAB), min((rank + 1) * own, VOCAB)
    return filled(
        plugin, plugin.VocabParallelEmbedding, source, device, inputs=HIDDEN, outputs=[own], dtype=dtype,
        method="HalfbyteEmbeddingMethod", org_vocab_size=VOCAB, num_embeddings_per_partition=own,
        shard_indices=SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last),
    ), slice(first, last)  # fmt: skip


@pytest.mark.parametrize("word", CODECS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_table_looks_up_and_multiplies_the_rows_of_its_rank(plugin, device, word, ranks):
    source, dtype = Packed(embed_tokens=weight(word, VOCAB, HIDDEN, 4)), dtype_of(device)
    table = source.weights["embed_tokens"]
    dense, x = table.dequantize("float64"), activations(device, HIDDEN, dtype)
    for rank in range(ranks):
        (how, layer), part = table_of(plugin, source, device, dtype, ranks, rank)
        rows = dense[part]
        logits = how.apply(layer, x)
        agrees(logits[:, : len(rows)], x, rows)
        assert logits.shape == (len(x), 256 // ranks)
        assert not logits[:, len(rows) :].any()  # padding of the vocabulary
        ids = torch.tensor([0, len(rows) - 1, 3], device=device)
        agrees(how.embedding(layer, ids).T, torch.eye(HIDDEN, dtype=dtype), rows[ids.cpu().numpy()])
        head = layer_of(plugin.VocabParallelEmbedding, num_embeddings_per_partition=256 // ranks)
        tied = plugin.linear.HalfbyteEmbeddingMethod(["lm_head"])
        tied.create_weights(head, HIDDEN, [256 // ranks], HIDDEN, 256 // ranks, dtype)
        tied.fill(tied.tie_weights(head, layer), source, device)
        assert head.halfbyte is layer.halfbyte
        assert torch.equal(tied.apply(head, x), logits)


@pytest.mark.parametrize("codecs", list(itertools.permutations(["int4:g128", "q6_K", "nvfp4"])), ids="+".join)
def test_parts_of_several_formats_are_multiplied_side_by_side(plugin, device, codecs):
    source, dtype = Packed(**qkv_weights(codecs)), dtype_of(device)
    x = activations(device, HIDDEN, dtype)
    how, layer = filled(
        plugin, plugin.QKVParallelLinear, source, device, inputs=HIDDEN, dtype=dtype,
        outputs=[HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], total_num_heads=HEADS, total_num_kv_heads=KV_HEADS,
        head_size=HEAD, v_head_size=HEAD, num_kv_head_replicas=1,
    )  # fmt: skip
    dense = np.concatenate([w.dequantize("float64") for w in source.weights.values()])
    agrees(how.apply(layer, x), x, dense)


def test_what_does_not_fit_names_the_layer_and_its_key(plugin):
    source = Packed(down_proj=weight("q4_K", HIDDEN, FEED))
    options = {"dtype": torch.float32, "output_size": HIDDEN}
    with pytest.raises(CheckpointError, match=r"down_proj is \[512, 1024\]; model\.layers\.0\.layer wants \[512, 2048\]"):
        filled(plugin, plugin.RowParallelLinear, source, "cpu", inputs=2048, outputs=[HIDDEN], **options)
    with pytest.raises((ShapeError, UnsupportedError), match=r"\[vllm\] model\.layers\.0\.layer: "):
        filled(plugin, plugin.RowParallelLinear, source, "cpu", inputs=128, whole=FEED, outputs=[HIDDEN], **options)


INT8, FP8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
BY_TOKEN = INT8 | {"symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([INT8], "int8"), ([INT8, INT8], "int8"), ([{"num_bits": 8}], "int8"),
        ([BY_TOKEN], "int8_token"), ([BY_TOKEN, BY_TOKEN], "int8_token"), ([BY_TOKEN, INT8], "int8"),
        ([BY_TOKEN | {"symmetric": False}], "int8"), ([BY_TOKEN | {"dynamic": False}], "int8"),
        ([BY_TOKEN | {"strategy": "tensor"}], "int8"),
        ([], "exact"), ([None], "exact"), ([FP8], "exact"), ([{"num_bits": 4, "type": "int"}], "exact"), ([INT8, None], "exact"),
    ],
)  # fmt: skip
def test_inputs_are_rounded_where_the_checkpoint_says_so(groups, wanted):
    listed = {f"group_{i}": {"weights": INT8, "input_activations": found} for i, found in enumerate(groups)}
    assert stated_activations({"quant_method": "compressed-tensors", "config_groups": listed}) == wanted
    assert stated_activations({"quant_method": "gptq", "bits": 8}) == "exact"


def test_inputs_of_whole_tokens_are_rounded_on_the_cpu_and_by_groups_on_a_gpu(plugin, device):
    source, dtype = Packed(down_proj=weight("int8:channel", HIDDEN, FEED)), dtype_of(device)
    how, layer = plugin.linear.HalfbyteLinearMethod(["down_proj"], "int8_token"), layer_of(plugin.RowParallelLinear)
    how.create_weights(layer, FEED, [HIDDEN], FEED, HIDDEN, dtype)
    layer.output_size = HIDDEN
    how.fill(layer, source, device)
    mode = "int8_token" if device == "cpu" else "int8"
    assert layer.halfbyte.activations == mode
    x, w = activations(device, FEED, dtype), source.weights["down_proj"]
    rounded = definition.rounded(x.float().cpu().numpy(), w.format, mode)
    agrees(how.apply(layer, x), torch.from_numpy(rounded).to(device), w.dequantize("float64"))


def moe_layer(plugin, ranks, rank, experts, size, bias=False, limit=None):
    """A layer of experts whose intermediate values are divided among the ranks."""
    parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks)
    moe = SimpleNamespace(
        activation=plugin.MoEActivation.SILU, has_bias=bias, num_logical_experts=experts,
        intermediate_size_per_partition_unpadded=size // ranks, moe_parallel_config=parallel, swiglu_limit=limit,
    )  # fmt: skip
    layer = layer_of(
        nn.Module, global_num_experts=experts, hidden_size=HIDDEN, moe_config=moe, expert_map=None,
        apply_router_weight_on_input=False, _map_global_expert_id_to_local_expert_id=lambda e: e,
    )  # fmt: skip
    return moe, layer


EXPERTS, SIZE = 6, 256


def experts_of(plugin, word, device, dtype, ranks=1, rank=0, limit=None):
    up, down = stack(word, (EXPERTS, 2 * SIZE, HIDDEN), np.random.default_rng(1)), None
    down = stack(word, (EXPERTS, HIDDEN, SIZE), np.random.default_rng(2))
    names = {"gate_up_proj": "mlp.experts.gate_up_proj", "down_proj": "mlp.experts.down_proj"}
    source = Packed(**{names["gate_up_proj"]: up, names["down_proj"]: down})
    moe, layer = moe_layer(plugin, ranks, rank, EXPERTS, SIZE, limit=limit)
    how = plugin.experts.HalfbyteExpertsMethod(moe, {(p, None): key for p, key in names.items()}, "mlp.experts")
    how.create_weights(layer, EXPERTS, HIDDEN, SIZE // ranks, dtype)
    how.fill(layer, source, device)
    return how, layer, up.dequantize("float64"), down.dequantize("float64")


def routes(device, tokens=5):
    rng = np.random.default_rng(3)
    ids = torch.from_numpy(np.stack([rng.permutation(EXPERTS)[:2] for _ in range(tokens)])).to(device)
    return torch.from_numpy(rng.random((tokens, 2), dtype=np.float32)).to(device), ids.int()


@pytest.mark.parametrize("word", ["int4:g32", "uint4:g32", "mxfp4", "nvfp4", "affine4:g64", "q8_0"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("limit", [None, 0.002])
def test_the_ranks_of_a_layer_of_experts_add_up(plugin, device, word, ranks, limit):
    """Also where gate and up are limited, as HY 4 and DeepSeek-V4 state it."""
    dtype = dtype_of(device)
    x = activations(device, HIDDEN, dtype) * 0.1
    share, ids = routes(device)
    total = 0
    for rank in range(ranks):
        how, layer, up, down = experts_of(plugin, word, device, dtype, ranks, rank, limit)
        total = total + how.apply(layer, x, share, ids, None, None).double().cpu().numpy()
    want, largest = np.zeros((len(x), HIDDEN)), limit or np.inf
    for i, row in enumerate(x.double().cpu().numpy()):
        for e, s in zip(ids[i].tolist(), share[i].tolist(), strict=True):
            gate, value = np.split(up[e] @ row, 2)
            assert limit is None or (gate > limit).any()
            gate, value = np.minimum(gate, largest), np.clip(value, -largest, largest)
            want[i] += s * (down[e] @ (gate / (1 + np.exp(-gate)) * value))
    error = np.linalg.norm(total - want) / np.linalg.norm(want)
    assert error <= (8e-3 * ranks if device == "cuda" else 2e-6)


@pytest.mark.parametrize("words", [("mxfp4", "mxfp4"), ("mxfp4", "nvfp4")], ids="-".join)
@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_of_gpt_oss_go_with_the_rows_of_gate_and_up(plugin, words, ranks):
    """Gate and up in matrices of their own, of one format and of two; in vLLM's parameter of their
    biases the two alternate, and a rank has its part.
    """
    gate, up = (stack(word, (EXPERTS, SIZE, HIDDEN), np.random.default_rng(i)) for i, word in enumerate(words))
    down = stack("mxfp4", (EXPERTS, HIDDEN, SIZE), np.random.default_rng(2))
    source = Packed(gate_proj=gate, up_proj=up, down_proj=down)
    random = torch.Generator().manual_seed(4)
    first, last = torch.randn(EXPERTS, 2 * SIZE, generator=random), torch.randn(EXPERTS, HIDDEN, generator=random)
    x, (share, ids) = activations("cpu", HIDDEN, torch.float32) * 0.1, routes("cpu")
    total = np.zeros((len(x), HIDDEN))
    for rank in range(ranks):
        moe, layer = moe_layer(plugin, ranks, rank, EXPERTS, SIZE, bias=True)
        moe.activation = plugin.MoEActivation.SWIGLUOAI
        how = plugin.experts.HalfbyteExpertsMethod(moe, {(p, None): p for p in source.weights}, "mlp.experts")
        how.create_weights(layer, EXPERTS, HIDDEN, SIZE // ranks, torch.float32)
        part = 2 * SIZE // ranks
        layer.w13_bias.data.copy_(first[:, rank * part : (rank + 1) * part])
        layer.w2_bias.data.copy_(last if rank == 0 else torch.zeros_like(last))
        how.fill(layer, source, "cpu")
        total += how.apply(layer, x, share, ids, None, None).double().numpy()
    want = np.zeros_like(total)
    matrices = [q.dequantize("float64") for q in (gate, up, down)]
    for i, row in enumerate(x.double().numpy()):
        for e, s in zip(ids[i].tolist(), share[i].tolist(), strict=True):
            g, u = (w[e] @ row + first[e, half::2].double().numpy() for half, w in enumerate(matrices[:2]))
            g, u = np.minimum(g, 7), np.clip(u, -7, 7)
            want[i] += s * (matrices[2][e] @ (g / (1 + np.exp(-1.702 * g)) * (u + 1)) + last[e].double().numpy())
    assert np.linalg.norm(total - want) <= 2e-6 * np.linalg.norm(want)


def layers_in_one_call(plugin, device):
    """Kind -> a call of one layer, and its argument."""
    dtype = dtype_of(device)
    gate_up = Packed(gate_proj=weight("int4:g128", FEED, HIDDEN, 1), up_proj=weight("int4:g128", FEED, HIDDEN, 2))
    mixed = Packed(gate_proj=weight("q4_K", FEED, HIDDEN, 1), up_proj=weight("nvfp4", FEED, HIDDEN, 2))
    x = activations(device, HIDDEN, dtype)
    calls = {}
    for name, source in (("fused", gate_up), ("side by side", mixed)):
        how, layer = filled(plugin, nn.Module, source, device, inputs=HIDDEN, outputs=[FEED, FEED], dtype=dtype)
        calls[name] = (lambda v, how=how, layer=layer: how.apply(layer, v), x)
    source = Packed(embed_tokens=weight("q8_0", VOCAB, HIDDEN, 4))
    (how, layer), _ = table_of(plugin, source, device, dtype, 1, 0)
    calls["head"] = (lambda v, how=how, layer=layer: how.apply(layer, v), x)
    calls["table"] = (lambda v, how=how, layer=layer: how.embedding(layer, v), torch.tensor([0, 7, 202], device=device))
    how, layer, _, _ = experts_of(plugin, "mxfp4", device, dtype)
    share, ids = routes(device)
    calls["experts"] = (lambda v, how=how, layer=layer: how.apply(layer, v, share, ids, None, None), x * 0.1)
    return calls


KINDS = ["fused", "side by side", "head", "table", "experts"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_graph_sees_one_operation(plugin, device, kind):
    call, x = layers_in_one_call(plugin, device)[kind]
    seen = []

    def backend(graph, example):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "halfbyte" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        assert torch.equal(torch.compile(call, fullgraph=True, backend=backend)(x), call(x))
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_holds_the_layer(plugin, kind):
    """Replayed on new activations in the memory that was captured, it gives the bits of a call."""
    if reason := backend_named("cuda").reason():
        pytest.skip(reason)
    call, x = layers_in_one_call(plugin, "cuda")[kind]
    with torch.inference_mode():
        call(x)  # compiles its kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(x)
        x.copy_(x.flip(0))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, call(x))
