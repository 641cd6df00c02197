"""The bits of products and logits: the same on every instruction set, with any number of threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte.backends.cpu import native, set_threads, use_instruction_set
from halfbyte.bench import product_hash as hashes
from halfbyte.bench.product_hash import EXPECTED, FORMATS, ROW_FORMATS, SHAPE, product_hash
from halfbyte.cli import selftest
from halfbyte.errors import FormatError
from halfbyte.formats import format_named
from halfbyte.generation.native_model import DenseTable, native_model
from support.cpu_weights import CPU, SETS, each_set, instruction_set, needs_native  # noqa: F401
from support.tiny_models import write_tiny

pytestmark = needs_native
PAGE = Path(__file__).parents[3] / "docs" / "design" / "cpu.md"


@pytest.fixture
def threads():
    yield set_threads
    set_threads(0)


@each_set
@pytest.mark.parametrize(("activations", "count"), [("int8", 1), ("int8", 8), ("int8_token", 1), ("int8_token", 8), ("exact", 1)])
def test_products_have_the_documented_bits(instruction_set, activations, count, threads):  # noqa: F811
    threads(count)
    assert product_hash(activations) == EXPECTED[activations]


def test_the_page_states_the_hashes():
    text = PAGE.read_text("utf-8")
    assert all(sha256 in text for sha256 in EXPECTED.values())


def test_weights_are_numbers_and_act_order_permutes():
    """A hash of NaN would depend on their payload."""
    for word in (*FORMATS, *ROW_FORMATS):
        weight = hashes.weight_of(format_named(word.split()[0]), SHAPE, word)
        dense = weight.dequantize("float32")
        assert np.isfinite(dense).all()
        assert len(np.unique(dense)) > 2
        assert ("group_index" in weight.parts) == (word == hashes.ACT_ORDER)


def native_tiny(folder: Path, activations: str = "int8"):
    with halfbyte.open(write_tiny(folder, "gemma3_text", "mlx").folder) as checkpoint:
        return native_model(checkpoint, activations)


def test_logits_have_the_same_bits_on_every_instruction_set(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(hashes, "PROMPTS", 3)
    model = native_tiny(tmp_path)
    found = set()
    before = native().current()
    try:
        for name in SETS:
            for count in (1, 8):
                use_instruction_set(name)
                threads(count)
                found.add(hashes.logits_hash(model, "m"))
    finally:
        use_instruction_set(before)
    assert len(found) == 1


def test_logits_of_the_hash_are_those_of_the_model(tmp_path):
    """Step after step from the first token on, and the prompt at once."""
    model = native_tiny(tmp_path, "exact")
    session, tokens = model.session(), [5, 7, 11, 9]
    for token in tokens:
        hidden = session.step(token)
    assert np.allclose(model.logits(hidden)[0], model.session()(tokens), rtol=1e-5, atol=1e-5)


def test_a_dense_head_is_refused_and_dense_rows_of_tokens_are_the_same(tmp_path, monkeypatch):
    """Only the head is multiplied; a token's row is taken as it is."""
    monkeypatch.setattr(hashes, "PROMPTS", 2)
    model = native_tiny(tmp_path)
    with halfbyte.open(tmp_path) as checkpoint:
        table = DenseTable(checkpoint["model.embed_tokens"].dequantize("float32"))
    with pytest.raises(FormatError, match=r"\[selftest\] a/file: the head, .* is not packed"):
        hashes.logits_hash(replace(model, head=table), "a/file")
    assert hashes.logits_hash(replace(model, embedding=table), "m") == hashes.logits_hash(model, "m")


def test_the_command_prints_the_hashes_and_fails_on_another(capsys, monkeypatch):
    monkeypatch.setattr(hashes, "product_hash", lambda kind: EXPECTED[kind])
    assert selftest.selftest(hash=True) == 0
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines()] == [["as", "documented"]] * 3
    monkeypatch.setattr(hashes, "product_hash", lambda kind: EXPECTED["int8"])
    assert selftest.selftest(hash=True, json=True) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["sha256"] == r["expected"] for r in records] == [True, False, False]
    assert {r["instruction_set"] for r in records} == {CPU.describe().split(",")[0]}
    with pytest.raises(FormatError, match=r"--model m.gguf without --hash"):
        selftest.selftest(model="m.gguf")
