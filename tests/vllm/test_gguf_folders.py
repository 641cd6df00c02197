"""vLLM runs what a GGUF becomes, of every architecture that halfbyte knows: a dense folder, one in
halfbyte's layout, and the file itself. Its log probabilities and its text are ours.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import halfbyte
from halfbyte.gguf_models.architectures import ARCHITECTURES
from halfbyte.gguf_models.names import unsupported
from support import served_models
from support.gguf_families import architecture
from support.gguf_models import MODELS
from support.served_models import BOUND
from support.vllm_models import (
    ASKED,
    CASES,
    DIFFERS,
    HALF_PRECISION,
    MENDED,
    NEWER,
    PASSED_OVER,
    REFUSED,
    sizes_for_vllm,
    write_folders,
    write_packed,
)

FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "halfbyte": {"quantization": "halfbyte"},
    "model.gguf": {"config_format": "halfbyte"},
}
"""What vLLM is given -> its options."""

pytestmark = pytest.mark.ecosystem("vllm")


@pytest.mark.parametrize("name", CASES)
def test_vllm_runs_what_a_file_becomes(vllm_here, tmp_path, monkeypatch, name):
    width = sizes_for_vllm(monkeypatch, name)
    if name in NEWER:
        with pytest.raises(ValueError, match="Unrecognized model identifier"):
            write_packed(tmp_path, name, width)
        return
    packed = write_packed(tmp_path, name, width)
    write_folders(tmp_path, packed)
    model = halfbyte.load_model(packed)[0]
    rows, text = served_models.answer(model)
    bound = BOUND
    if name in HALF_PRECISION:  # as far as transformers' own answer in bfloat16, or half as far again
        bound = 1.5 * float(np.abs(served_models.answer(model.bfloat16())[0] - rows).max())
    reason = unsupported(ARCHITECTURES[MODELS[name][0]] if name in MODELS else architecture(name))
    for form, options in FORMS.items():
        theirs = served_models.vllm_words(tmp_path / form, **options, **ASKED.get(name, {}))
        if form == "model.gguf" and reason:
            assert isinstance(theirs, str)
            assert f"another form than its GGUF ({reason})" in theirs
        elif name in REFUSED:
            assert isinstance(theirs, str)
            assert re.search(REFUSED[name], theirs)
        else:
            assert not isinstance(theirs, str), f"{form}: {theirs}"
            far = np.abs(theirs[0] - rows).max()
            print(f"{name} {form}: {far:.2g}")
            equal = far < bound and theirs[1] == text
            assert equal == (name not in DIFFERS and (form != "dense" or name not in PASSED_OVER)), form
    assert ({path.name for path in tmp_path.glob("mended-*")} != set()) == (name in MENDED)
