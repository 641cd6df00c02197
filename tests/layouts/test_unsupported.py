"""Formats that are recognised and not read are refused by name, whatever tells them: the method,
the format word or the tensors.
"""

from __future__ import annotations

import pytest

from halfbyte.errors import UnsupportedError
from halfbyte.layouts.unsupported import RECOGNISED, recognise, refuse_recognised


@pytest.mark.parametrize("entry", RECOGNISED, ids=lambda e: e.name)
def test_every_entry_is_found_by_each_of_its_marks(entry) -> None:
    assert entry.methods or entry.formats or entry.suffixes
    for method in entry.methods:
        assert recognise({"quant_method": method.upper()}) is entry
    for word in entry.formats:
        assert recognise({"quant_method": "gptq", "checkpoint_format": word}) is entry
        assert recognise({"format": word}) is entry
    if entry.suffixes:
        found = recognise({}, ("bias", *entry.suffixes))
        assert found is not None
        assert set(found.suffixes) <= set(entry.suffixes)


@pytest.mark.parametrize("entry", RECOGNISED, ids=lambda e: e.name)
def test_the_refusal_says_what_it_is_and_what_to_use(entry) -> None:
    mark = {"quant_method": entry.methods[0]} if entry.methods else {"format": entry.formats[0]}
    with pytest.raises(UnsupportedError) as error:
        refuse_recognised(mark, where="model/config.json")
    text = str(error.value)
    assert text.startswith(f"[open] model/config.json is {entry.name}: {entry.what}.")
    assert f"use {entry.use}" in text


@pytest.mark.parametrize(
    ("config", "suffixes"),
    [
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, ("qweight", "qzeros", "scales", "g_idx")),
        ({"quant_method": "awq", "version": "gemm"}, ("qweight", "qzeros", "scales")),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ("weight_packed", "weight_scale", "weight_shape")),
        ({"quant_method": "mxfp4"}, ("blocks", "scales")),
        ({}, ("weight", "scales", "biases")),
        ({}, ("weight",)),
        ({}, ("codes", "scales")),
        ({}, ()),
    ],
)
def test_what_is_read_is_not_refused(config, suffixes) -> None:
    assert recognise(config, suffixes) is None
    refuse_recognised(config, suffixes)


def test_a_config_of_a_method_that_is_read_wins_over_lookalike_tensors() -> None:
    assert recognise({}, ("B", "s")).name == "Marlin"
    assert recognise({"quant_method": "awq"}, ("B", "s")) is None
