"""Folders that mlx-lm itself quantized, of every architecture that it computes as we do: they run
here, with its logits.
"""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
from halfbyte.checkpoints.engines import predictions
from halfbyte.cli import main
from halfbyte.errors import HalfbyteError
from support.gguf_families import FAMILIES, IDS, architecture, family_model, logits, write_family

BOUND = 1e-6
"""Normalized mean squared error."""
LATENT = "embed_q"
NOT_READ = {
    "apertus": "alpha_n", "bailingmoe3": LATENT, "dbrx": "experts.0.v1", "deepseek2": LATENT, "deepseek2:temperature": LATENT,
    "deepseek2:whole": LATENT, "deepseek32": LATENT, "ernie4_5-moe": "moe_statics", "kimi-linear": LATENT,
    "laguna": "gate.proj", "mistral4": LATENT,
}  # fmt: skip
"""Cases that are refused, and what the message names: latent attention's keys and values are two
matrices of mlx-lm's own making.
"""
OWN_GROUPS = ("granite", "granitemoe", "minicpm")
"""Cases whose rows are too short for the groups in which mlx-lm quantizes them whatever it is told."""


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("name", [name for name in FAMILIES if architecture(name).task == "text" and name not in OWN_GROUPS])
def test_what_mlx_lm_quantized_runs(tmp_path, name):
    import mlx.core as mx
    import mlx_lm.utils

    gguf = write_family(tmp_path / "model.gguf", name, family_model(name))
    assert main(["dequantize", str(gguf), str(tmp_path / "dense"), "--dtype", "float32"]) == 0
    with halfbyte.open(tmp_path / "dense") as checkpoint:
        verdict = predictions(checkpoint, "mlx==0.32.2")[0].verdict
    if verdict == "refused":
        with pytest.raises((ValueError, TypeError, AttributeError, SystemExit)):
            mlx_lm.utils.load_model(tmp_path / "dense")
        return
    model, config = mlx_lm.utils.load_model(tmp_path / "dense")
    model.set_dtype(mx.float32)
    model, config = mlx_lm.utils.quantize_model(model, config, 32, 8)
    theirs = np.array(model(mx.array(np.array([IDS]))).astype(mx.float32))
    out = tmp_path / "saved"
    out.mkdir()
    mlx_lm.utils.save_model(out, model)
    mlx_lm.utils.save_config(config, out / "config.json")
    if name in NOT_READ:
        with pytest.raises(HalfbyteError, match=NOT_READ[name]):
            halfbyte.load_model(out)
        return
    ours = logits(halfbyte.load_model(out)[0]).numpy()
    error = np.square(theirs - ours).mean() / np.square(ours).mean()
    assert ("fine" if error < BOUND else "wrong") == verdict, error
