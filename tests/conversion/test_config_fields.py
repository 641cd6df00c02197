"""Every field of a configuration, changed: the GGUF of such a folder has the logits of its model,
or the folder is refused before anything is written. For every architecture that is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import halfbyte
import torch
from halfbyte.cli import main
from halfbyte.gguf_models.model_files import model_files
from halfbyte.transformers.build import POOLED
from support.gguf_families import FAMILIES, family_model, logits, named_tensors, write_family
from transformers import AutoConfig

ACTIVATIONS = ("gelu", "relu", "silu", "gelu_pytorch_tanh", "gelu_new", "relu2", "tanh", "swish")
NOT_THE_MODEL = re.compile(
    r"_.*|return_dict|output_\w+|use_cache|is_decoder|is_encoder_decoder|add_cross_attention|tie_word_embeddings|transformers_version"
    r"|is_causal|use_bidirectional_attention"
)
"""Fields of calls, of the head, and those by which another class is built."""
REFUSALS = (
    r"describes a model that a GGUF of|have no name in a GGUF|: a [\w-]+ model |: these do not divide|key '[\w.-]+' is .* allowed"
    r"|layers a stack make|an even number of rotated ones, are needed"
)
BIASES = re.compile(r".*bias.*|attention_k_eq_v")


def others(value: Any) -> list[Any]:
    """Other values of a field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 1.5 if value else 0.5]
    if isinstance(value, int):
        return [value + 1]
    return [a for a in ACTIVATIONS[:3] if a != value][:2] if value in ACTIVATIONS else []


def fields_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(its name, another value) of a field; of each of its own fields where it has some."""
    if isinstance(value, dict):
        for key, old in value.items():
            for path, other in fields_of(f"{name}.{key}", old):
                yield path, {**value, key: other}
    elif not isinstance(value, list):
        yield from ((name, other) for other in others(value))


def changed(model: Any, fields: Callable[[str, Any], bool]) -> Iterator[tuple[str, Any, Any]]:
    """(field, value, model) of each change with which transformers builds a model that computes."""
    stated = model.config.to_dict()
    for name, old in stated.items():
        if NOT_THE_MODEL.fullmatch(name) or not fields(name, old):
            continue
        for path, value in fields_of(name, old):
            try:
                config = AutoConfig.for_model(**{**stated, name: value})
                options = {"add_pooling_layer": False} if config.model_type in POOLED else {}
                other = type(model)._from_config(config, dtype=torch.float32, **options).eval()
                fill(other)
                usable = bool(torch.isfinite(logits(other)).all())
            except Exception:  # whatever its code meets in a configuration that makes no model
                continue
            if usable:
                yield path, value, other


def fill(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for key, p in named_tensors(model):
            if p.is_floating_point():
                norm = key.endswith("weight") and "norm" in key.split(".")[-2]
                p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else p.shape[-1] ** -0.5) + (1.0 if norm else 0.0))


def check(tmp_path: Path, capsys: Any, case: str, fields: Callable[[str, Any], bool]) -> None:
    model = family_model(case)
    with halfbyte.open(write_family(tmp_path / "m.gguf", case, model)) as file:
        files, _ = model_files(file)
    for i, (name, value, other) in enumerate(changed(model, fields)):
        folder, out = tmp_path / f"{i}", tmp_path / f"{i}.gguf"
        other.save_pretrained(folder)
        for file_name, content in files.items():
            (folder / file_name).write_text(content if isinstance(content, str) else json.dumps(content))
        capsys.readouterr()
        code = main(["convert", str(folder), str(out), "--to", "gguf"])
        said = capsys.readouterr().err
        if code == 2:
            assert not out.exists()
            assert re.search(REFUSALS, said), (name, value, said)
            continue
        assert code == 0, (name, value, said)
        have, want = logits(halfbyte.load_model(out)[0]), logits(other)
        near = torch.allclose(have, want, rtol=0, atol=1e-4 * float(want.abs().max()))
        assert near or f"note: {name} is" in said, (name, value)


@pytest.mark.parametrize("case", FAMILIES)
def test_another_switch_of_biases(tmp_path, capsys, case):
    check(tmp_path, capsys, case, lambda name, value: isinstance(value, bool) and bool(BIASES.fullmatch(name)))


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_another_value_of_any_field(tmp_path, capsys, case):
    check(tmp_path, capsys, case, lambda name, value: True)


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ("deepseek4", "compress_rates"),  # which no key states: 4 and 128 for the two kinds of layers
        ("bailingmoe3", "short_conv_kernel_size"),  # the published name of what linear_conv_kernel_dim says
    ],
)
def test_a_field_that_a_file_cannot_say_alone(tmp_path, capsys, case, field):
    check(tmp_path, capsys, case, lambda name, value: name == field)
