"""Zero points that are read without the codes equal those read with them, of a checkpoint whose
data were fetched ahead too.
"""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints.safetensors.writer import SafetensorsWriter
from halfbyte.layouts import LAYOUTS
from support.layout_tensors import integer_tensor

WIDTHS = [
    ("gptq", {}, (2, 3, 4, 8)), ("gptq", {"checkpoint_format": "gptq_v2"}, (2, 3, 4, 8)), ("awq-gemm", {}, (4, 8)),
    ("gptq", {"meta": {"quantizer": "gptqmodel:7.5"}}, (3, 4)), ("awq-gemv", {}, (4,)), ("compressed-tensors", {}, (3, 4)),
    ("halfbyte", {}, (3, 4)),
]  # fmt: skip
CASES = [(layout, config, bits) for layout, config, widths in WIDTHS for bits in widths]


@pytest.mark.parametrize(("layout", "config", "bits"), CASES)
def test_alone_they_are_the_same(layout, config, bits):
    q = integer_tensor(bits, (32, 64), 32, zeros=(1, (1 << bits) - 1))
    own = LAYOUTS[layout]
    config = own.config(q) | config
    tensors = own.pack(q, config)
    whole = own.unpack(tensors, config).parts["zeros"]
    assert whole.any()
    alone = own.zero_points(tensors, config)
    assert alone.dtype == whole.dtype
    assert np.array_equal(alone, whole)


def test_of_a_checkpoint(tmp_path):
    q = integer_tensor(4, (32, 64), 32, zeros=(1, 15))
    signed = integer_tensor(4, (32, 64), 32)
    hb.save(tmp_path / "own.safetensors", {"a": q, "b": signed})
    with hb.open(tmp_path / "own.safetensors") as checkpoint:
        for key in checkpoint:
            checkpoint.fetch(key)
        assert np.array_equal(checkpoint.zero_points("a"), q.parts["zeros"])
        assert checkpoint.zero_points("b") is None


def test_of_what_is_not_there_or_damaged(tmp_path):
    tensors = LAYOUTS["gptq"].pack(integer_tensor(4, (32, 64), 32, zeros=(1, 15)), {})
    wrong = {**tensors, "g_idx": np.full(64, 9, np.int32), "qzeros": tensors["qzeros"][:, :3]}
    with SafetensorsWriter(tmp_path / "one.safetensors") as out:
        for suffix, array in wrong.items():
            out.add(f"m.a.{suffix}", array)
        out.add("norm.weight", np.ones(4, np.float32))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    with hb.open(tmp_path / "one.safetensors", config=config) as checkpoint:
        assert checkpoint.zero_points("norm.weight") is None
        with pytest.raises(hb.HalfbyteError, match=r"m\.b"):
            checkpoint.zero_points("m.b")
        with pytest.raises(hb.HalfbyteError, match=r"m\.a.*qzeros"):
            checkpoint.zero_points("m.a")
