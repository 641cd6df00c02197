"""What every golden test of a layout asks: the producer's own numbers, the same bytes back, headers
that suffice, exact values against fractions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from halfbyte import QTensor
from halfbyte.layouts import Layout
from support.fractions_reference import NUMPY, rounded, value_at
from support.golden_case import GOLDEN, Case, read_case, read_tensors, same_numbers, same_tensors
from support.layout_tensors import headers

WORDS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def cases_of(producer: str) -> list[str]:
    """All files of a producer's folder, relative to the golden folder, `CASES` of a test module."""
    return sorted(str(p.relative_to(GOLDEN)) for p in (GOLDEN / producer).rglob("*") if p.is_file())


def single(cases: list[str]) -> list[str]:
    """The single-tensor files among them."""
    return [c for c in cases if c.count("/") == 1 and c.endswith(".safetensors")]


def checkpoints(cases: list[str]) -> list[str]:
    """The checkpoint folders among them."""
    return sorted({c.rpartition("/")[0] for c in cases if c.count("/") > 1})


def case_of(file: str, prefix: str = "model.layers.0.mlp.down_proj.") -> Case:
    return read_case(GOLDEN / file, prefix)


def variants(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """(dtype, the producer's numbers in it as float32) of each reference."""
    for variant, reference in case.references.items():
        word = variant or case.metadata["ref_dtype"]
        yield WORDS.get(word, word), reference


def check_reference(q: QTensor, reference: np.ndarray, dtype: str) -> None:
    """dequantize(dtype, "producer") is the reference, bit for bit, whole and by rows."""
    value = q.dequantize(dtype, "producer")
    assert same_numbers(value.astype(np.float32), reference)
    if q.ndim == 2 and q.shape[0] > 5:
        assert same_numbers(q[3:5].dequantize(dtype, "producer"), value[3:5])


def check_bytes(layout: Layout, tensors: dict[str, np.ndarray], config: dict, q: QTensor) -> None:
    """Written back the tensors are the file's, read again they are q, and headers alone describe
    them.
    """
    q.validate()
    assert same_tensors(layout.pack(q, config), tensors)
    assert layout.unpack(layout.pack(q, config), config) == q
    assert layout.describe(headers(tensors, layout.peek), config) == (q.format, q.shape)
    fresh = QTensor(q.format, q.shape, q.parts)  # without an origin: nothing but the parts decides what is written
    written = layout.pack(fresh, layout.config(fresh))
    assert layout.unpack(written, layout.config(fresh)) == q


def check_exact(q: QTensor) -> None:
    """The exact value rounded once, on two rows, against rational arithmetic; compared by value, so
    -0 is 0.
    """
    part = q[1] if q.ndim == 3 else q
    values = {d: part.dequantize(d)[2:4].astype(np.float64) for d in NUMPY}
    for i, j in np.ndindex(values["float32"].shape):
        exact = value_at(part.format, part.shape, part.parts, (2 + i, j))
        for dtype, got in values.items():
            want = rounded(exact, dtype) if isinstance(exact, Fraction) else exact
            assert got[i, j] == want or (np.isnan(got[i, j]) and np.isnan(want)), (dtype, i, j)


def modules(folder: str, layout: Layout) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """(module, its tensors, the file's references) of every quantized module of a folder, then the
    dense tensors as ("", ...).
    """
    _, tensors = read_tensors(GOLDEN / folder / "model.safetensors")
    _, references = read_tensors(GOLDEN / folder / "reference.safetensors")
    names = sorted({n.partition(".weight")[0] if ".weight" in n else n.rpartition(".")[0] for n in tensors})
    dense = dict(tensors)
    for name in names:
        own = {n[len(name) + 1 :]: t for n, t in tensors.items() if n.startswith(name + ".")}
        if layout.matches(own):
            claimed = {s: own[s] for s in layout.claims(own)}
            for s in claimed:
                del dense[f"{name}.{s}"]
            yield name, claimed, references
    yield "", dense, references


def config_of(folder: str) -> dict:
    """The quantization config of a checkpoint folder."""
    config = json.loads((GOLDEN / folder / "config.json").read_text(encoding="utf-8"))
    return dict(config.get("quantization_config") or config["quantization"])


def check_checkpoint(folder: str, layout: Layout, config: dict, dtype: str = "bfloat16") -> int:
    """Every quantized module and dense tensor of a checkpoint against its reference; how many
    modules were quantized.
    """
    count = 0
    for name, tensors, references in modules(folder, layout):
        if not name:
            for key, t in tensors.items():
                if f"ref::{key}" in references:
                    assert same_numbers(t.astype(np.float32), references[f"ref::{key}"]), key
            continue
        q = layout.unpack(tensors, config, name)
        check_reference(q, references[f"ref::{name}.weight"], dtype)
        check_bytes(layout, tensors, config, q)
        count += 1
    return count


def ids(path: str) -> str:
    return Path(path).stem
