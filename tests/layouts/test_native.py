"""halfbyte's own layout: every format of the registry comes back identical, its origin and details
too; descriptions that lie are refused.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import FormatError, LayoutError
from halfbyte.formats import codec_names, format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.native import format_from_json, format_to_json
from halfbyte.tensor.qtensor import QTensor
from support.layout_tensors import headers
from support.random_tensors import random_tensor

NATIVE = LAYOUTS["halfbyte"]


def through_json(q: QTensor) -> tuple[dict[str, np.ndarray], dict]:
    return NATIVE.pack(q, {}), json.loads(json.dumps(NATIVE.config(q)))


@pytest.mark.parametrize("word", codec_names())
def test_every_format_comes_back_identical(word: str) -> None:
    fmt = format_named(word)
    assert format_from_json(json.loads(json.dumps(format_to_json(fmt)))) == fmt
    for shape in ((4, 512), (2, 3, 256), (0, 256), (3, 0)):
        if len(shape) == 3 and fmt.opaque:
            continue
        q = random_tensor(fmt, shape, 1, "mlx", {"scales_dtype": "float32", "shape": [1, 2]})
        tensors, config = through_json(q)
        back = NATIVE.unpack(tensors, config, "m")
        assert back == q
        assert (back.origin, dict(back.details), back.window) == (q.origin, dict(q.details), q.window)
        assert NATIVE.describe(headers(tensors), config) == (q.format, q.shape)
        assert NATIVE.matches(tensors)
        assert set(NATIVE.claims(tensors)) == set(tensors)


@given(
    word=st.sampled_from(["nf4", "bnb_fp4", "hqq3", "uint5", "fp8_e4m3", "int4"]),
    n=st.integers(0, 5),
    k=st.integers(1, 70),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_tensors_and_their_slices_come_back(word, n, k, seed) -> None:
    q = random_tensor(format_named(word, 16, **({"rows": 2} if word == "fp8_e4m3" else {})), (n, k), seed, "bitsandbytes")
    for part in (q, q[n // 2 :]):
        tensors, config = through_json(part)
        assert NATIVE.unpack(tensors, config) == part
        assert NATIVE.unpack(tensors, config).window == part.window


def test_case_09_the_true_shape_of_an_odd_k_is_kept() -> None:
    q = random_tensor(format_named("fp4", 3), (5, 3), 0)
    tensors, config = through_json(q)
    assert tensors["codes"].shape == (5, 2)  # rows padded each to a byte, never run into one another
    back = NATIVE.unpack(tensors, config)
    assert back.shape == (5, 3)
    dirty = tensors["codes"].copy()
    dirty[2, 1] |= 0xF0
    with pytest.raises(FormatError, match="padding bits after code 2 are not zero"):
        NATIVE.unpack({**tensors, "codes": dirty}, config, "m")


def test_act_order_comes_back() -> None:
    q = random_tensor(format_named("uint4", 32), (4, 64), 0)
    q = QTensor(q.format, q.shape, {**q.parts, "group_index": np.arange(64, dtype=np.int32)[::-1] // 32})
    tensors, config = through_json(q)
    assert NATIVE.unpack(tensors, config) == q
    with pytest.raises(FormatError, match="group index runs from 2 to 2; there are 2 groups"):
        NATIVE.unpack({**tensors, "group_index": np.full(64, 2, np.int32)}, config, "m")


def test_descriptions_that_lie_are_refused() -> None:
    tensors, config = through_json(random_tensor(format_named("mxfp4"), (4, 64), 0))
    spoil = lambda **changes: {**config, "format": {**config["format"], **changes}}  # noqa: E731
    for bad, why in (
        ({}, "its description has nothing; 'format' is missing"),
        ({"format": config["format"]}, "'shape' is missing"),
        ({**config, "shape": [4]}, r"shape \[4\]; a weight is"),
        ({**config, "shape": [4, -64]}, r"m: shape is \[4, -64\] .* a list of sizes is wanted"),
        ({**config, "shape": ["x", 64]}, "a list of sizes is wanted"),
        ({**config, "window": [1]}, r"window \[1\] for shape \[4, 64\]"),
        ({**config, "window": [3, 4]}, r"window \[3, 4\] for shape"),
        ({**config, "details": [1]}, "wanted a name and an object"),
        ({**config, "format": 3}, "wanted an object"),
        (spoil(colour="red"), r"unknown \['colour'\]"),
        (spoil(bits="4"), "bits is '4'; wanted int"),
        (spoil(bits=True), "bits is True; wanted int"),
        (spoil(bits=9), "9 bits"),
        (spoil(family="mxx"), "family 'mxx'"),
        (spoil(group_size=0), "groups of 1 by 0; sizes are 1 to 2.31 - 1, or -1"),
        (spoil(group_size=10**30), "groups of 1 by 1000"),
        (spoil(grouping="block", group_rows=10**30), "groups of 1000000000000000000000000000000 by 32"),
        ({**config, "shape": [4, 96]}, r"m\.codes is uint8 \[4, 32\]; mxfp4:g32 of shape \[4, 96\] wants uint8 \[4, 48\]"),
    ):
        with pytest.raises(LayoutError, match=why):
            NATIVE.unpack(tensors, bad, "m")
    with pytest.raises(LayoutError, match=r"m\.scales is missing"):
        NATIVE.unpack({"codes": tensors["codes"]}, config, "m")
