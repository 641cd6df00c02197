"""Evaluations, inspections and quantizations of made-up numbers, for tests of the HTML pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import halfbyte as hb
from halfbyte.checkpoints import TensorInfo
from halfbyte.conversion.allocation import Choice, Unit, allocated
from halfbyte.conversion.unit import Record
from halfbyte.evaluation import Thresholds
from halfbyte.evaluation.compare import Comparison, LayerDrift
from halfbyte.evaluation.perplexity import Perplexity
from halfbyte.formats import format_named
from halfbyte.reports.evaluation import Evaluated
from halfbyte.reports.inspection import Layers, Survey, inspection
from halfbyte.reports.quantization import Dense, Quantized, quantization

LIMITS = Thresholds(0.01, 0.95, 0.99)
NO_LIMITS = Thresholds()
CODECS = ("affine4:g64", "affine6:g64", "affine8:g64")


def comparison(loss: float, layers: int = 26) -> Comparison:
    """Of a loss of 1: 4 % more perplexity, 94 % equal tokens."""
    rng = np.random.default_rng(0)
    drifts = [LayerDrift(i, 1 - 0.003 * loss * i, 0.9 - 0.01 * i, 0.01 * loss * (i + 2)) for i in range(-1, layers)]
    model, baseline = Perplexity(10200, 28000.0 + 400 * loss, 130000.0), Perplexity(10200, 28000.0, 120000.0)
    kl = np.exp(rng.normal(-3 - 1 / loss, 2, 10200))
    return Comparison(model, baseline, 1 - 0.06 * loss, kl, drifts[0], tuple(drifts[1:]), 0.97)


def evaluated(name: str, loss: float, layers: int = 26, limits: Thresholds = NO_LIMITS) -> Evaluated:
    """One checkpoint of a page."""
    measured = comparison(loss, layers)
    facts = {
        "path": f"/a/folder/with/a/long/name/and-no-place-to-break-it-anywhere-near/{name}", "text": "wiki.txt", "context": 512,
        "bytes": int(246_956_544 / (1 + loss)), "bits_per_weight": 7.36 / (1 + loss), "baseline_bytes": 536_000_000,
        "perplexity": measured.model.value, "tokens_per_s": 8.86,
    }  # fmt: skip
    return Evaluated(facts, measured, limits.verdicts(measured))


def inspected(folder: Path, data: bool = True) -> str:
    """The page of a checkpoint of four layers, one with a scale that is no number."""
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens": hb.quantize(rng.standard_normal((64, 64)).astype("f"), "int8:g64")}
    for i in range(4):
        weight = rng.standard_normal((64, 64)).astype("f") * 10.0**-i
        tensors[f"model.layers.{i}.mlp.up_proj"] = hb.quantize(weight, "int4:g32")
    scales = tensors["model.layers.2.mlp.up_proj"].parts["scales"].copy()
    scales[5, 1] = np.nan
    bad = tensors["model.layers.2.mlp.up_proj"]
    tensors["model.layers.2.mlp.up_proj"] = hb.QTensor(bad.format, bad.shape, {**bad.parts, "scales": scales})
    hb.save(folder / "inspected.safetensors", tensors)
    with hb.open(folder / "inspected.safetensors") as checkpoint:
        survey = Survey(Layers(checkpoint.keys())) if data else None
        return inspection(checkpoint, checkpoint.findings(data=data, visit=survey and survey.visit), survey)


def quantized(layers: int = 26) -> str:
    """The page of a quantization under a budget: three codecs a matrix, some of it dense."""
    rng = np.random.default_rng(0)
    units, written, records = [], [], []
    for i in range(layers):
        for module, shape in (("self_attn.q_proj", (64, 128)), ("mlp.down_proj", (128, 256))):
            key, n = f"model.layers.{i}.{module}", shape[0] * shape[1]
            kl = np.sort(rng.random(3))[::-1] * 1e-3
            choices = [Choice(c, n * bits // 8, float(loss)) for c, bits, loss in zip(CODECS, (5, 7, 9), kl, strict=True)]
            units.append(Unit(key, (key,), n, tuple(choices)))
    allocation = allocated("mlx", units, (), 256_000, bits=6.5)
    for unit, choice in zip(units, allocation.choices, strict=True):
        shape = (64, 128) if "q_proj" in unit.name else (128, 256)
        fmt = format_named(choice.codec)
        written.append(TensorInfo(unit.name, "quantized", "mlx", fmt, shape, "uint32", choice.nbytes, ("model.safetensors",)))
        error = float(2.0**-fmt.bits)
        records.append(Record(unit.name, "quantized", "", "bfloat16", choice.codec, 2 * unit.weights, choice.nbytes, error))
    embedding = TensorInfo(
        "model.embed_tokens.weight", "dense", "", None, (1000, 128), "bfloat16", 256_000, ("model.safetensors",)
    )
    why = "embeddings, heads, routers, norms and tensors that are no matrix of weights are kept unless a rule names them"
    facts = {"source": "/a/folder/with/a/long/name/and-no-place-to-break-it-anywhere-near/dense", "target": "mlx:affine4:g64",
             "method": "gptq", "seconds_allocating": 81.25, "peak_memory_bytes": 1_234_567_890}  # fmt: skip
    return quantization(
        Quantized("a-model-with-a-rather-long-name-mlx", 20_000_000, [embedding, *written], records, [Dense(embedding.key, why)],
                  comparison(0.5, layers), allocation=allocation, facts=facts)
    )  # fmt: skip
