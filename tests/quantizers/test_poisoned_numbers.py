"""Importances and Hessians that no scale can be chosen under are refused; a run that quantizes
nothing fails.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.checkpoints import save
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.quantizers import gptq, mse
from halfbyte.quantizers.awq_search import awq_scales

W = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
BAD = [np.nan, np.inf, -np.inf, -1.0]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_importance_is_refused_with_its_input(bad):
    importance = np.ones(64)
    importance[5] = bad
    with pytest.raises(FormatError, match=r"\[mse\] the importance has 1 of 64 entries .* at input 5"):
        mse(W, "int4:g32", importance)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_hessian_is_refused(bad):
    hessian = np.eye(64)
    hessian[5, 5] = bad
    with pytest.raises(FormatError, match=r"\[gptq\] the Hessian"):
        gptq(W, hessian, "int4:g32")
    with pytest.raises(FormatError, match=r"\[awq\] the Hessian"):
        awq_scales([W], hessian, lambda w: mse(w, "int4:g32"))


def test_importances_of_zero_are_unweighted():
    assert mse(W, "int4:g32", np.zeros(64)) == mse(W, "int4:g32")


def test_hessians_of_zero_are_unweighted():
    zero, eye = np.zeros((64, 64)), np.eye(64)
    assert gptq(W, zero, "int4:g32") == gptq(W, eye, "int4:g32")
    scales = [awq_scales([W], h, lambda w: mse(w, "int4:g32"))[0] for h in (zero, eye)]
    assert np.array_equal(*scales)


def test_a_norm_of_1e30_is_refused_in_float32():
    x = np.full((4, 64), 1e30, np.float32)
    with np.errstate(over="ignore"), pytest.raises(FormatError, match="NaN or infinite"):
        gptq(W, x.T @ x, "int4:g32")


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_a_run_that_quantizes_nothing_fails_and_says_why(method, tmp_path):
    save(tmp_path / "in.safetensors", {"a.proj.weight": np.ones((4, 33), np.float32)})
    refused = pytest.raises(CheckpointError, match=r"no weight can be mlx:affine4:g32: a\.proj: .*rows of 33")
    with open_checkpoint(tmp_path / "in.safetensors") as checkpoint, refused:
        quantize_checkpoint(checkpoint, tmp_path / "out", recipe_of("mlx:affine4:g32"), method)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["mse", "gptq", "awq"])
def test_a_rounder_that_refuses_names_the_weight(method, tmp_path):
    save(tmp_path / "in.safetensors", {"a.proj.weight": W})
    hessian = np.full((64, 64), np.nan)

    def rounder(module, x, fmt):
        if method == "awq":
            awq_scales([x], hessian, lambda w: mse(w, fmt))
        return mse(x, fmt, hessian[0]) if method == "mse" else gptq(x, hessian, fmt)

    refused = pytest.raises(FormatError, match=rf"a\.proj: \[{method}\]")
    with open_checkpoint(tmp_path / "in.safetensors") as checkpoint, refused:
        quantize_checkpoint(checkpoint, tmp_path / "out.safetensors", recipe_of("mlx:affine4:g32"), rounder, named="nan")
    assert not (tmp_path / "out.safetensors").exists()
