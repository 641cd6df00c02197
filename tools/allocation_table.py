"""KL divergence and bits of allocated recipes beside uniform codecs and llama.cpp's mixes, all
weights of a GGUF model included: the table of benchmarks/quantize.md.

    python tools/allocation_table.py model.gguf --text eval.txt --calibration cal.txt --out kl.jsonl

The dense stand-in is what the file's own blocks decode to. Every weight, embedding and head
included, is rounded by --method ("rtn", or "mse" under the importance matrix --imatrix) to the
codec of the row. A line of --out is a row, with the divergence of each chunk; what --out has
already is not measured again. Rows of K-quants that do not fit take llama.cpp's replacement.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from quantizer_table import dense_in_place

import torch
from halfbyte import QTensor, quantize
from halfbyte.calibration.sensitivity import Sensitivities, sensitivities
from halfbyte.calibration.sources import layer_source
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.conversion.allocation import Choice, Unit, allocated
from halfbyte.conversion.importance import ImportanceRounder, gguf_modules, read_importance
from halfbyte.conversion.mixes import MIXES, NARROWER, BoundMix
from halfbyte.evaluation import llama_cpp
from halfbyte.evaluation.compare import paired
from halfbyte.evaluation.perplexity import scored_logits, targets_of
from halfbyte.formats import format_named
from halfbyte.formats.ggml.types import GGML_BY_CODEC
from halfbyte.transformers import load_model

CODECS = (
    "mxfp4",
    "nvfp4_ue4m3",
    "q4_0",
    "iq4_nl",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_K",
    "q3_K",
    "iq4_xs",
    "q4_K",
    "q5_K",
    "q6_K",
)


def main() -> None:
    """Measure what is asked for, a line of JSON each."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--calibration", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--context", type=int, default=512)
    arguments.add_argument("--chunks", type=int, default=40)
    arguments.add_argument("--sequences", type=int, default=32)
    arguments.add_argument("--bits", default="4.0,4.5,5.0,5.5")
    arguments.add_argument("--codecs", default=",".join(CODECS), help="candidates, and the uniform rows")
    arguments.add_argument("--mixes", default=",".join(m for m in MIXES if "_K" in m or m.startswith("IQ4")))
    arguments.add_argument("--method", default="rtn", choices=("rtn", "mse"))
    arguments.add_argument("--imatrix", type=Path, help="for mse")
    arguments.add_argument("--device", default="cpu", help="where the model runs")
    arguments.add_argument("--rows", help="only these rows, so that processes may share the work: 4.5 bits,Q4_K_M,q4_K")
    a = arguments.parse_args()
    table = Table(a)
    wanted = a.rows.split(",") if a.rows is not None else None
    for name, codecs, estimated in table.rows():
        if name not in table.done and (wanted is None or name in wanted):
            line = table.measure(name, codecs) | {"estimated_kl": estimated}
            with a.out.open("a") as f:
                f.write(json.dumps(line) + "\n")
            print({k: v for k, v in line.items() if k not in ("chunk_kl", "codecs")}, flush=True)


class Table:
    """The dense model, its logits, and the rows."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a = a
        lines = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
        self.done = {line["row"] for line in lines}
        self.checkpoint = open_checkpoint(a.model)
        self.model, tokenizer = load_model(a.model)
        dense_in_place(self.model, everywhere=True)
        self.model.to(a.device)
        ids = tokenizer(a.text.read_text(encoding="utf-8")[: a.chunks * a.context * 8], add_special_tokens=False)["input_ids"]
        self.windows = llama_cpp(ids, a.context, tokenizer.bos_token_id, a.chunks)
        assert len(self.windows) == a.chunks, f"{a.text} has {len(self.windows)} chunks"
        self.source = layer_source(self.checkpoint, "cpu")
        self.infos = {i.key: i for i in self.checkpoint.infos() if len(i.shape) == 2}
        self.dense = {key: self._dense(key) for key in self.infos}
        self.logits = [scored_logits(self.model, w)[0].cpu() for w in self.windows]
        self._rounded: dict[tuple[str, str], QTensor] = {}
        self._importance = None
        if a.imatrix is not None:
            self._importance = ImportanceRounder(read_importance(a.imatrix), gguf_modules(self.checkpoint))

    def _dense(self, key: str) -> np.ndarray[Any, Any]:
        weight = self.checkpoint[key]
        return weight.dequantize("float32") if isinstance(weight, QTensor) else np.asarray(weight, np.float32)

    def rows(self) -> list[tuple[str, dict[str, str], float | None]]:
        """(row, codec of each weight, estimated divergence)."""
        found: list[tuple[str, dict[str, str], float | None]] = []
        every = list(map(float, filter(None, self.a.bits.split(","))))
        estimates = self.sensitivities() if every else Sensitivities()
        for bits in every:
            least = 8 * sum(min(c.nbytes for c in u.choices) for u in estimates.units) / sum(u.weights for u in estimates.units)
            if least > bits:
                print({"row": f"{bits} bits", "least_bits": least}, flush=True)
                continue
            chosen = allocated("gguf", estimates.units, (), 0, bits=bits)
            codecs = {m: c.codec for u, c in zip(chosen.units, chosen.choices, strict=True) for m in u.modules}
            found.append((f"{bits} bits", {k: codecs[k.removesuffix(".weight")] for k in self.infos}, chosen.kl))
        for name in filter(None, self.a.mixes.split(",")):
            mix = BoundMix(name, self.checkpoint)
            found.append((name, {k: str(mix.codec(k.removesuffix(".weight"), i.shape)) for k, i in self.infos.items()}, None))
        found += [
            (codec, {k: self._fitting(codec, i.shape[-1]) for k, i in self.infos.items()}, None)
            for codec in self.a.codecs.split(",")
        ]
        return found

    def _fitting(self, codec: str, k: int) -> str:
        return codec if k % GGML_BY_CODEC[codec].block == 0 else NARROWER[codec]

    def sensitivities(self) -> Sensitivities:
        """The estimates, kept beside --out."""
        kept = self.a.out.with_suffix(f".{self.a.method}.sensitivities.json")
        if not kept.exists():
            start = time.perf_counter()
            found = sensitivities(
                self.checkpoint,
                "gguf",
                self.a.calibration,
                self.a.method,
                codecs=self.a.codecs.split(","),
                context=self.a.context,
                sequences=self.a.sequences,
                device=self.a.device,
                from_packed=True,
            )
            print({"tokens": found.tokens, "seconds": time.perf_counter() - start}, flush=True)
            units = [[u.name, u.modules, u.weights, [[c.codec, c.nbytes, c.kl] for c in u.choices]] for u in found.units]
            kept.write_text(json.dumps({"tokens": found.tokens, "digest": found.digest, "units": units}))
        value = json.loads(kept.read_text())
        units = [Unit(n, tuple(m), w, tuple(Choice(*c) for c in choices)) for n, m, w, choices in value["units"]]
        return Sensitivities(units, [], value["tokens"], value["digest"])

    def _weight(self, key: str, codec: str) -> QTensor:
        if (key, codec) not in self._rounded:
            x, fmt = (
                self.dense[key],
                format_named(codec, global_scale="multiply") if codec.startswith("nvfp4") else format_named(codec),
            )
            if self.a.method == "rtn":
                q = quantize(x, fmt)
            else:
                assert self._importance is not None, "--method mse wants --imatrix"
                q = self._importance(key.removesuffix(".weight"), x, fmt)
            self._rounded[key, codec] = q
        return self._rounded[key, codec]

    def measure(self, name: str, codecs: dict[str, str]) -> dict[str, Any]:
        """The line of a row."""
        start = time.perf_counter()
        nbytes = 0
        for key, codec in codecs.items():
            q = self._weight(key, codec)
            nbytes += q.size // GGML_BY_CODEC[codec].block * GGML_BY_CODEC[codec].nbytes  # a file's, not its parts in memory
            self._put(key, q.dequantize("float32"))
        kl, losses = [], []
        for window, dense in zip(self.windows, self.logits, strict=True):
            device = self.a.device
            pair = paired(dense.to(device), scored_logits(self.model, window)[0], targets_of(window, device))
            kl.append(float(pair.kl.mean()))
            losses.append([float(pair.model.sum()), float(pair.baseline.sum())])
        tokens = sum(len(w.tokens) - w.first for w in self.windows)
        weights = sum(x.size for x in self.dense.values())
        return {
            "row": name, "method": self.a.method, "bits_per_weight": 8 * nbytes / weights, "kl": float(np.mean(kl)),
            "kl_error": float(np.std(kl, ddof=1) / len(kl) ** 0.5), "chunks": len(kl),
            "context": self.a.context, "tokens": tokens,
            "perplexity": float(np.exp(sum(m for m, _ in losses) / tokens)),
            "dense_perplexity": float(np.exp(sum(b for _, b in losses) / tokens)),
            "seconds": round(time.perf_counter() - start, 1), "chunk_kl": kl, "codecs": codecs,
        }  # fmt: skip

    def _put(self, key: str, value: np.ndarray[Any, Any]) -> None:
        order = self.source.rows(key, value.shape[0])
        slot = self.source.slots[key]
        module = self.model.get_submodule(slot.path)
        new = torch.from_numpy(value if order is None else value[order])
        with torch.no_grad():
            if isinstance(module, torch.nn.Embedding):
                old, was = module.weight, torch.from_numpy(self.dense[key])
                scale = float(old.norm().cpu() / was.norm()) if not hasattr(self, "scale") else self.scale
                self.scale = scale
                old.copy_(new * scale)  # Gemma's table is scaled where it is read
                head = self.model.get_output_embeddings()
                if "output" not in self.infos and "output.weight" not in self.infos:
                    head.weight.copy_(new)
            else:
                module.weight.copy_(new)


if __name__ == "__main__":
    main()
