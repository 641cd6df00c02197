"""The page of a checkpoint: what is wrong with it in words, bits by layer, formats, ranges of the
scales and saturated codes by layer, findings with their fixes, and every kind of tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, Finding, TensorInfo
from ..checkpoints.inspect import Subtotal, bits_per_weight, fix_for, format_word, grouped, totals
from ..errors import plural
from ..formats.decode import element_values, scale_values
from ..tensor.notebook import sample_codes
from ..tensor.qtensor import QTensor
from .page import Head, Row, cards, page, section, table, verdict
from .plots import SIZES, Axes, bars, ranges

_NUMBERED = re.compile(r"((?:[^.\d]+\.)*[^.\d]+)\.(\d+)\.")
SHOWN = 20
"""Findings of one code that the page lists."""


@dataclass
class Values:
    """What the values of one layer's packed weights are like.

    low, high   smallest and largest |scale| of a group that is not 0
    ends        sampled codes at an end of their range, `codes` of how many
    """

    low: float = float("inf")
    high: float = 0.0
    ends: int = 0
    codes: int = 0


@dataclass
class Survey:
    """Collects `Values` by layer: `visit` for each packed weight of a checkpoint."""

    layers: Layers
    values: dict[str, Values] = field(default_factory=dict)

    def visit(self, key: str, q: QTensor) -> None:
        """Adds one weight."""
        own = self.values.setdefault(self.layers.of(key), Values())
        scales = group_scales(q)
        used = scales[np.isfinite(scales) & (scales > 0)]
        if used.size:
            own.low, own.high = min(own.low, float(used.min())), max(own.high, float(used.max()))
        codes = sample_codes(q)
        if codes.size:
            table = element_values(q.format, np.arange(1 << q.format.bits, dtype=np.uint8))
            at_end = (table == np.nanmin(table)) | (table == np.nanmax(table))
            own.ends += int(np.count_nonzero(at_end[codes]))
            own.codes += codes.size


def group_scales(q: QTensor) -> NDArray[np.float64]:
    """|scale| of every group with its second level and the tensor's factor; empty for a format
    without scales of numbers.
    """
    fmt, raw = q.format, q.parts.get("scales")
    if raw is None or fmt.scale in ("none", "nested"):
        return np.empty(0)
    scales: NDArray[np.float64] = np.abs(scale_values(fmt.scale, raw))
    if fmt.super_size and "super_scales" in q.parts:
        second = np.abs(q.parts["super_scales"].astype(np.float64))
        scales = scales * np.repeat(second, fmt.super_size // fmt.group_size, axis=-1)[..., : scales.shape[-1]]
    if fmt.global_op and "global_scale" in q.parts:
        factor = np.abs(q.parts["global_scale"].astype(np.float64))[..., None, None]
        with np.errstate(divide="ignore"):
            scales = scales / factor if fmt.global_op == "divide" else scales * factor
    return scales.reshape(-1)


class Layers:
    """Names of the layers of a model's tensors: "layer 3", "embedding", "head", "other"."""

    def __init__(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        stems = Counter(m[1] for k in keys if (m := _NUMBERED.match(k)))
        self.stem = stems.most_common(1)[0][0] if stems else ""
        found = dict.fromkeys(map(self.of, keys))
        numbers = sorted((n for n in found if n.startswith("layer ")), key=lambda n: int(n.removeprefix("layer ")))
        self.names = [n for n in ("embedding",) if n in found] + numbers + [n for n in ("head", "other") if n in found]

    def of(self, key: str) -> str:
        """The layer that a tensor belongs to."""
        match = _NUMBERED.match(key)
        if match and match[1] == self.stem:
            return f"layer {int(match[2])}"
        if re.search(r"(?:^|\.)(?:token_embd|embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\b", key):
            return "embedding"
        return "head" if re.search(r"(?:^|\.)(?:lm_head|output)(?:\.weight)?$", key) else "other"


def inspection(checkpoint: Checkpoint, findings: Sequence[Finding], survey: Survey | None) -> str:
    """One HTML page.

    survey  of the values, where they were read
    """
    infos = list(checkpoint.infos())
    layers = survey.layers if survey is not None else Layers(i.key for i in infos)
    name = checkpoint.remote.where if checkpoint.remote else str(checkpoint.path)
    body = [_verdict(checkpoint, infos, findings, survey), _cards(checkpoint, infos)]
    sections = ["Findings", "Bits by layer", "Formats"]
    body += [_findings(findings), _bits(infos, layers), _formats(infos)]
    if survey is not None and survey.values:
        sections += ["Scales by layer", "Saturation by layer"]
        body += _values(survey)
    sections.append("Tensors")
    return page(f"Inspection of {PurePath(name).name or name}", [*body, _tensors(infos)], sections)


def _verdict(checkpoint: Checkpoint, infos: Sequence[TensorInfo], findings: Sequence[Finding], survey: Survey | None) -> str:
    counts = Counter(f.severity for f in findings)
    ledger = checkpoint.ledger()
    sentences = [f"{plural(len(infos), 'tensor')}, {checkpoint.format}."]
    tensors = ", ".join(f"{n:,} {status}" for status, n in ledger.counts("tensor").items())
    sentences.append(
        f"Accounted for: {tensors}. "
        + (f"The modules were not compared: {ledger.modules}." if ledger.modules else "The model's modules are all there.")
    )
    if survey is None:
        sentences.append(
            "Values were not read: halfbyte inspect --data also looks for scales that are no numbers, and saturation."
        )
    if counts["error"]:
        word = f"{plural(counts['error'], 'error')}: its values are wrong or incomplete until they are mended"
        return verdict("bad", word, sentences)
    if counts["warning"]:
        return verdict("warn", f"{plural(counts['warning'], 'warning')}: it can be used; read them first", sentences)
    return verdict("good", "Nothing looks wrong.", sentences)


def _cards(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> str:
    sums = totals(infos)
    whole = sums.all
    share = 100 * sums.packed.weights / whole.weights if whole.weights else 0.0
    return cards([
        ("size", f"{whole.nbytes / 1e6:,.1f} MB", plural(len(sums.files), "file")),
        ("bits a weight", f"{whole.bits_per_weight:.3g}", f"packed ones {sums.packed.bits_per_weight:.3g}"),
        ("weights", f"{whole.weights / 1e6:,.1f} M", f"{share:.3g} % of them packed"),
        ("in bfloat16", f"{2 * whole.weights / 1e6:,.1f} MB", "what the same weights would take"),
    ])  # fmt: skip


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return section("Findings", "", ["<p>None.</p>"])
    colours = {"error": "bad", "warning": "warn"}
    seen: Counter[str] = Counter()
    rows: list[Row] = []
    for f in findings:
        seen[f.code] += 1
        if seen[f.code] <= SHOWN:
            rows.append([(f.severity, colours.get(f.severity, "")), f.key, f.message, fix_for(f.code)])
    more = "; ".join(f"{n - SHOWN:,} more of {code}" for code, n in seen.items() if n > SHOWN)
    heads = [Head("severity"), Head("tensor"), Head("what"), Head("fix")]
    note = [f"<p>{more}; halfbyte inspect --json lists all.</p>"] if more else []
    return section("Findings", "What looks wrong, worst first, and what repairs it.", [table(heads, rows), *note])


def _bits(infos: Sequence[TensorInfo], layers: Layers) -> str:
    sums = {name: Subtotal() for name in layers.names}
    for info in infos:
        sums[layers.of(info.key)].add(info)
    whole = sum(s.weights for s in sums.values())
    sums = {name: s for name, s in sums.items() if name != "other" or s.weights > whole / 1000}  # not for a last norm
    axes = Axes("layer (emb: token embedding)", "bits a weight")
    why = "Bits a weight takes in the file, scales and zero points included. Recipes often give the first and last layers more."
    return section(
        "Bits by layer", why, [bars(list(sums), [s.bits_per_weight for s in sums.values()], axes, size) for size in SIZES]
    )


def _formats(infos: Sequence[TensorInfo]) -> str:
    sums = totals(infos)
    heads = [Head("format"), Head("tensors", True), Head("weights", True), Head("bits/weight", True), Head("MB", True)]
    rows = [
        [name, f"{s.tensors:,}", f"{s.weights:,}", f"{s.bits_per_weight:.4g}", f"{s.nbytes / 1e6:,.1f}"]
        for name, s in sorted(sums.formats.items(), key=lambda item: -item[1].nbytes)
    ]
    return section("Formats", "What the weights are stored in, the largest share first.", [table(heads, rows)])


def _values(survey: Survey) -> list[str]:
    names = [n for n in survey.layers.names if n in survey.values]
    own = [survey.values[n] for n in names]
    axis = "layer (emb: token embedding)"
    spans = [(v.low, v.high) for v in own]
    scales = section(
        "Scales by layer",
        "From the smallest to the largest group scale that is not 0. A bar that reaches far beyond its neighbours' names a layer "
        "with outliers, or with damaged scales.",
        [ranges(names, spans, Axes(axis, "group scale"), size) for size in SIZES],
    )
    shares = [100 * v.ends / v.codes if v.codes else 0.0 for v in own]
    saturation = section(
        "Saturation by layer",
        "Codes at an end of their range, of a sample. A group scaled by its largest weight has at least one, so some percent are "
        "normal; much more than in other layers means clipped weights.",
        [bars(names, shares, Axes(axis, "codes at an end, %"), size) for size in SIZES],
    )
    return [scales, saturation]


def _tensors(infos: Sequence[TensorInfo]) -> str:
    heads = [
        Head("tensor"), Head("count", True), Head("layout"), Head("format"), Head("shape", True), Head("bits/weight", True),
    ]  # fmt: skip
    rows = [
        [
            g.pattern,
            f"{len(g.infos):,}",
            g.infos[0].layout,
            format_word(g.infos[0]),
            "x".join(map(str, g.infos[0].shape)),
            f"{bits_per_weight(g.infos[0]):.4g}",
        ]
        for g in grouped(infos)
    ]
    return section("Tensors", "One row for tensors that differ only by the number of their layer.", [table(heads, rows)])
