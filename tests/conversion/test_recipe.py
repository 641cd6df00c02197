"""What a recipe keeps whatever its format."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.conversion.recipe import is_kept, recipe_of
from halfbyte.gguf_models.view import ModelView
from support.gguf_families import FAMILIES, family_model, write_family


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_routers_are_kept_under_every_name(tmp_path, name, published):
    """Granite's lies one module deeper in published checkpoints, Hunyuan's everywhere."""
    with hb.open(write_family(tmp_path / "model.gguf", name, family_model(name))) as file:
        routers = [np.asarray(file[key]) for key in file if key.endswith(".ffn_gate_inp.weight")]
        model = ModelView(file, published=published)
        found = {
            key.removesuffix(".weight")
            for key in model
            for router in routers
            if tuple(model.info(key).shape) == router.shape and np.array_equal(np.asarray(model[key]), router)
        }
    assert len(found) == len(routers)
    assert all(is_kept(key) and recipe_of("mlx:affine8:g32").of(key, 2) is None for key in found), found


@pytest.mark.parametrize(
    "module", ["model.layers.0.mlp.gate_proj", "model.layers.0.routers.up", "a.layer", "router.layer.up_proj"]
)
def test_other_modules_are_not(module):
    assert not is_kept(module)
