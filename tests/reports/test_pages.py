"""HTML pages: the verdict in words, plots with explanations and axes, one self-contained file; and
the commands that write them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.calibration.walk import token_sequences
from halfbyte.cli.app import main
from halfbyte.evaluation import Thresholds, Window, compare
from halfbyte.formats.decode import element_values
from halfbyte.reports.evaluation import Evaluated, report
from halfbyte.reports.inspection import Layers, group_scales
from halfbyte.reports.page import verdict
from support.calibration_models import write_model, write_text
from support.report_pages import LIMITS, comparison, evaluated, inspected
from support.tiny_models import write_tiny
from support.tiny_tokenizer import write_tokenizer

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Checks that tags nest, and collects ids, links and the text of the verdict."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.ids, self.links, self.tags, self.words = [], [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if "href" in values else []
        assert "src" not in values
        if tag not in VOID:
            self.open.append((tag, values.get("class") or ""))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if any(tag == "section" and word.startswith("verdict") for tag, word in self.open):
            self.words.append(data.replace("\u00a0", " "))


def read(page: str) -> Reader:
    """A page that is self-contained, its links and ids in order."""
    found = Reader(page)
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert not re.search(r"https?:|@import|url\(", page)
    assert len(set(found.ids)) == len(found.ids)
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)
    return found


def test_a_line_does_not_break_before_a_per_cent_sign_or_behind_a_relation():
    page = report([evaluated("gemma", 1.0, 26, LIMITS), evaluated("gemma-2", 2.0)])
    assert page.count("\u00a0%") > 20
    assert "≥\u00a0" in page
    assert not re.search(r"\d %|[≤≥] ", re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))


WORDS = [(0.1, "Very small loss"), (0.4, "Small loss"), (2.0, "Noticeable loss"), (4.0, "Large loss")]


@pytest.mark.parametrize(("loss", "word"), WORDS)
def test_the_loss_is_a_word_first(loss, word):
    found = read(report([evaluated("model", loss)]))
    assert found.words[0] == word
    assert found.words[1].startswith(f"{word}: the model finds the same next token")
    assert f"likeliest as the baseline in {100 - 6 * loss:.1f} % of 10,200 positions" in found.words[1]


def test_limits_come_before_words():
    found = read(report([evaluated("model", 1.0, limits=LIMITS)]))
    assert found.words[0] == "3 of 3 limits missed"
    assert found.words[1].startswith("Missed: perplexity increase 3.9")
    assert read(report([evaluated("model", 1.0, limits=Thresholds(0.1))])).words[0] == "The limit is kept."


def test_an_option_is_not_broken_behind_its_hyphens():
    assert "<p>Run it with <code>--data</code> &lt;b&gt;.</p>" in verdict("warn", "A word", ["Run it with --data <b>."])


def test_no_baseline_is_no_loss():
    facts = {"path": "model", "perplexity": 12.5}
    assert read(report([Evaluated(facts, None, [])])).words[0].startswith("No baseline was given")


def test_numbers_that_are_none_are_called_broken():
    broken = comparison(1.0)
    object.__setattr__(broken.layers[3], "cosine", float("nan"))
    one = evaluated("model", 1.0)
    assert read(report([one._replace(comparison=broken)])).words[0].startswith("Broken")


def test_names_are_quoted():
    page = report([Evaluated({"path": "<i>&", "perplexity": 1.5}, comparison(1.0), [])])
    read(page)
    assert "<i>" not in page
    assert "&lt;i&gt;&amp;" in page


@pytest.mark.parametrize("count", [2, 3, 12])
def test_any_number_of_checkpoints_is_compared(count):
    names = [f"model-q{i}" for i in range(count)]
    page = report([evaluated(name, 3.0 - 2.9 * (i == 1)) for i, name in enumerate(names)])
    found = read(page)
    assert found.words[0] == "model-q1 is closest to the baseline: very small loss"
    assert all(f"#{name}" in found.links for name in names)
    assert page.count("<circle") == 2 * count


def test_every_plot_is_explained_and_names_both_axes(tmp_path):
    for page in (report([evaluated("a", 1.0), evaluated("b", 2.0)]), inspected(tmp_path)):
        svgs = re.findall(r"<svg.*?</svg>", page)
        assert svgs
        assert all(re.search(r'class="up"[^>]*>↑ \w', s) and re.search(r'class="label"[^>]*>\w.* →<', s) for s in svgs)
        assert all(s.count('<p class="why">') for s in re.split(r"<section", page) if "<svg" in s)


def test_equal_models_get_a_sentence_in_place_of_empty_plots():
    equal = comparison(0.5)
    zero = replace(equal.embedding, relative_rms=0.0)
    equal = replace(equal, kl=np.zeros(5), embedding=zero, layers=(zero, zero))
    page = report([Evaluated({"path": "model"}, equal, [])])
    read(page)
    assert "<svg" not in page
    assert "<p>0 after every layer.</p>" in page
    assert "<p>0 at every position.</p>" in page


def test_an_inspection_says_what_is_wrong_first(tmp_path):
    page = inspected(tmp_path)
    found = read(page)
    assert found.words[0] == "1 error: its values are wrong or incomplete until they are mended"
    assert "1 of 128 scales are NaN or infinite" in page
    assert "quantize again from finite weights" in page
    assert found.ids == ["findings", "bits-by-layer", "formats", "scales-by-layer", "saturation-by-layer", "tensors"]
    without = read(inspected(tmp_path, data=False))
    assert without.words[0] == "Nothing looks wrong."
    assert "scales-by-layer" not in without.ids


def test_scales_of_a_layer_reach_from_the_smallest_to_the_largest(tmp_path):
    page = inspected(tmp_path)
    with hb.open(tmp_path / "inspected.safetensors") as checkpoint:
        scales = np.abs(checkpoint["model.layers.1.mlp.up_proj"].parts["scales"])
    assert f"<title>layer 1: {scales.min():.3g} to {scales.max():.3g}</title>" in page


@pytest.mark.parametrize("codec", ["q4_K", "q6_K", "nvfp4", "mxfp4", "affine4:g32", "int4:g32", "fp8_e4m3:g32"])
def test_the_values_of_a_group_span_its_scale_times_the_codes(codec):
    weight = np.random.default_rng(0).standard_normal((8, 256)).astype("f")
    q = hb.quantize(weight, codec)
    scales = group_scales(q).reshape(8, -1)
    values = q.dequantize("float32").reshape(8, scales.shape[1], -1)
    codes = element_values(q.format, np.arange(1 << q.format.bits, dtype=np.uint8))
    whole, span = scales * (np.nanmax(codes) - np.nanmin(codes)), values.max(-1) - values.min(-1)
    assert (span <= whole * 1.0001).all()
    assert (span >= whole * 0.25).all()


def test_layers_have_names():
    layers = Layers(["token_embd", "blk.0.ffn_up", "blk.10.ffn_up", "blk.2.ffn_up", "output", "output_norm.weight"])
    assert layers.names == ["embedding", "layer 0", "layer 2", "layer 10", "head", "other"]


def test_eval_compares_checkpoints_on_one_page(tmp_path, capsys):
    for name, producer in (("base", "halfbyte"), ("a", "gptq"), ("b", "mlx")):
        write_tiny(tmp_path / name, "llama", producer)
        write_tokenizer(tmp_path / name)
    (tmp_path / "text.txt").write_text(" ".join(f"<tok{6 + i % 80}>" for i in range(80)))
    page = tmp_path / "page.html"
    paths = [str(tmp_path / name) for name in ("a", "b")]
    options = ["--baseline", str(tmp_path / "base"), "--text", str(tmp_path / "text.txt"), "--context", "16"]
    assert main(["eval", *paths, *options, "--report", str(page), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["path"] for r in records if r["record"] == "evaluation"] == paths
    found = read(page.read_text("utf-8"))
    assert {"checkpoints", "a", "b", "a-error-by-layer", "b-error-by-layer"} <= set(found.ids)
    assert main(["eval", *paths, *options, "--min-agreement", "100%", "--max-ppl-increase", "-50%"]) == 1


@pytest.mark.parametrize("command", ["inspect", "eval"])
def test_a_page_replaces_pages_only(tmp_path, command, capsys):
    write_tiny(tmp_path / "model", "llama", "gptq")
    weights = tmp_path / "model" / "model.safetensors"
    before = weights.read_bytes()
    options = ["--text", str(tmp_path / "text.txt")] if command == "eval" else []
    for where, why in ((weights, "exists and is no HTML page"), (tmp_path / "no" / "page.html", "there is no folder")):
        assert main([command, str(tmp_path / "model"), "--report", str(where), *options]) == 2
        assert why in capsys.readouterr().err
    assert weights.read_bytes() == before
    if command == "inspect":
        for _ in range(2):
            assert main([command, str(tmp_path / "model"), "--report", str(tmp_path / "page.html"), "--data"]) == 0
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "page.html"]
        assert read((tmp_path / "page.html").read_text("utf-8")).words[0] == "Nothing looks wrong."


def test_the_page_of_a_quantization_says_what_was_measured(tmp_path):
    dense = write_model(tmp_path / "in", "llama")
    text, other = write_text(tmp_path / "text.txt", 600), write_text(tmp_path / "other.txt", 200, seed=2)
    few = ["--context", "64", "--sequences", "2", "--codecs", "affine4:g64,affine8:g64"]
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "mlx", "--bits", "6",
                 "--calibration", str(text), "--report", str(tmp_path / "page.html"),
                 "--report-text", str(other), *few]) == 0  # fmt: skip
    page = (tmp_path / "page.html").read_text("utf-8")
    found = read(page)
    assert found.links == [
        "#error-by-layer",
        "#divergence-of-the-next-token",
        "#layers-worst-first",
        "#error-of-the-weights-by-layer",
        "#where-the-bits-went",
        "#bytes-and-divergence",
        "#what-was-run",
    ]
    model, tokenizer = hb.load_model(tmp_path / "out")
    windows = [Window(tuple(ids), 1) for ids in token_sequences(tokenizer, other, 64, 2)]
    measured = compare(model, dense, windows)
    assert f"<strong>{measured.kl_mean:.3g}</strong>" in page
    assert "The text is the one that calibrated" not in page
    with hb.open(tmp_path / "out") as written:
        words = [(str(i.format), i.nbytes) for i in written.infos() if i.quantized]
    for codec in {word for word, _ in words}:
        assert f"<td>{codec}</td>" in page
        assert f"{sum(n for word, n in words if word == codec) / 1e6:,.2f}" in page
    for row in ("seconds allocating", "seconds measuring", "peak memory bytes", "measured on"):
        assert f">{row}</th>" in page


def test_the_page_of_a_quantization_without_a_text_says_that_no_loss_was_measured(tmp_path):
    write_model(tmp_path / "in", "llama")
    page = tmp_path / "page.html"
    command = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "halfbyte:int4:g32", "--report", str(page)]
    assert main([*command, "--rule", "layers.1.mlp.down_proj=keep"]) == 0
    words = page.read_text("utf-8")
    assert "The loss was not measured" in "".join(read(words).words)
    assert "rule layers.1.mlp.down_proj=keep" in words
    assert "embeddings, heads, routers" in words
    assert main([*command[:2], str(tmp_path / "other"), *command[3:], "--plan"]) == 2
    page.write_text("mine")
    assert main([*command[:2], str(tmp_path / "other"), *command[3:]]) == 2
    assert page.read_text() == "mine"
