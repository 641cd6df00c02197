"""Every step between a GGUF's tensors and transformers' has an exact inverse: changes of values,
joins, cuts, orders of rows and of inputs, of every architecture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halfbyte.gguf_models.architecture import EACH, EXPERTS, LOG_OF_NEGATIVE, ONE_MORE, PART, changed
from halfbyte.gguf_models.folder_names import FolderNames
from support.gguf_families import FAMILIES, architecture, family_model, gguf_tensors

CASES = [
    case for case in FAMILIES if any(getattr(architecture(case), f) for f in ("changes", "joins", "orders", "columns", "cuts"))
]


def layer_tensors(case: str, model: Any) -> dict[str, list[np.ndarray]]:
    """Stem -> the file's tensors of it."""
    out: dict[str, list[np.ndarray]] = {}
    for name, x in gguf_tensors(case, model).items():
        stem = name.partition(".")[2].partition(".")[2].removesuffix(".weight").removesuffix(".bias")
        if not (name.endswith(".bias") and x.ndim == 1):
            out.setdefault(stem, []).append(x)
    return out


@pytest.mark.parametrize("case", CASES)
def test_changes_orders_and_columns_are_undone(case):
    a, model = architecture(case), family_model(case)
    model.config.allow_global_per_layer_attribute_access = True
    names = FolderNames(a, case.partition(":")[0], model.config, 0, 0)
    found = layer_tensors(case, model)
    seen = 0
    for stem in (*a.changes, *a.orders, *a.columns):
        for x in found.get(stem, []):
            seen += 1
            if stem in a.changes:
                once = a.changes[stem].read(model.config, x)
                np.testing.assert_array_equal(a.changes[stem].write(model.config, once), x)
            order = names.order(stem, len(x)) if stem in a.orders else None
            if order is not None:
                assert sorted(order) == list(range(len(x)))
                np.testing.assert_array_equal(x[order][np.argsort(order)], x)
            inputs = a.columns[stem](model.config, x.shape[-1]) if stem in a.columns else None
            if inputs is not None:
                np.testing.assert_array_equal(x[..., inputs][..., np.argsort(inputs)], x)
    assert seen or not (a.changes or a.columns)


@pytest.mark.parametrize("case", [case for case in FAMILIES if architecture(case).joins and "dots3" not in case])
def test_joins_are_undone(case):
    a, model = architecture(case), family_model(case)
    for path, join in a.joins.items():
        for key, p in model.named_parameters():
            if key.endswith(f"{path}.weight"):
                x = p.detach().numpy()
                parts = join.write(model.config, x)
                assert len(parts) == sum(v.startswith(f"{path}{PART}") for v in a.names.values())
                np.testing.assert_array_equal(join.read(model.config, parts), x)
                break
        else:
            raise AssertionError(f"no parameter {path}")


def test_every_mark_of_a_path_is_one_that_is_written():
    """Names are plain paths, or have one mark that `FolderNames` knows."""
    for case in FAMILIES:
        for path in (*architecture(case).names.values(), *architecture(case).top.values()):
            assert sum(path.count(mark) for mark in (EXPERTS, PART, EACH)) <= 1, path


def test_a_logarithm_is_rounded_once():
    """A = −exp(A_log) within half a unit in the last place, and the logarithm of what is written is
    the logarithm again from then on.
    """
    rng = np.random.default_rng(0)
    logs = np.log(rng.uniform(0.01, 64, 4096)).astype(np.float32)
    a = LOG_OF_NEGATIVE.write(None, logs)
    np.testing.assert_array_equal(a, np.float32(-np.exp(logs.astype(np.float64))))
    assert np.abs(LOG_OF_NEGATIVE.read(None, a) - logs).max() <= 2.0**-23 * 4


def test_changes_are_undone_in_the_opposite_order():
    both = changed(ONE_MORE, LOG_OF_NEGATIVE)
    x = np.array([-1.0, -3.0, 0.5], np.float32)
    np.testing.assert_array_equal(both.read(None, x), LOG_OF_NEGATIVE.read(None, ONE_MORE.read(None, x)))
    np.testing.assert_array_equal(both.write(None, x), ONE_MORE.write(None, LOG_OF_NEGATIVE.write(None, x)))
