"""What every layout says of itself: names, producers, what it holds and what it consumes."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from halfbyte.checkpoints.quant_config import readers_by_method
from halfbyte.errors import FormatError, LayoutError, ShapeError
from halfbyte.formats import codec_names, format_named
from halfbyte.layouts import LAYOUTS, config_readers, layout_aliases, layout_named
from halfbyte.producers import DECODERS
from halfbyte.spec import Format
from halfbyte.tensor.qtensor import QTensor
from support.random_tensors import finite_tensor

OPTIONS: dict[str, tuple[object, ...]] = {
    "scale_dtype": ("float16", "bfloat16", "float32"), "rows": (1, 2, 16, -1),
    "global_scale": ("none", "multiply", "divide", "amax"),
    "nested": (True,), "zero": ("float",), "grouping": ("flat", "strided"),
}  # fmt: skip
SHAPES = ((64, 128), (24, 72), (2, 32, 64), (40, 128), (16, 60), (12, 64))


def formats() -> list[Format]:
    """Every codec in every group size, and with each option alone, where the family allows it."""
    found: dict[Format, None] = {}
    for codec in codec_names():
        for group in (None, 16, 32, 48, 64, 128, -1):
            for options in ({}, *({key: value} for key, values in OPTIONS.items() for value in values)):
                with suppress(FormatError):
                    found[format_named(codec, group, **options)] = None
    return list(found)


def test_names_aliases_and_producers_are_known_words():
    assert all(layout.name == name for name, layout in LAYOUTS.items())
    assert {name for name, _ in layout_aliases().values()} <= set(LAYOUTS)
    assert not set(layout_aliases()) & set(LAYOUTS)
    for layout in LAYOUTS.values():
        assert set(layout.producers) <= set(DECODERS), layout.name
    with pytest.raises(LayoutError, match="'nonesuch' is not a layout; known: awq-gemm"):
        layout_named("nonesuch")


def test_held_codecs_are_codecs_and_the_layout_takes_one_of_each():
    for layout in LAYOUTS.values():
        if layout.holds is None:
            continue
        for codec in layout.holds.codecs:
            sizes = layout.holds.groups or (format_named(codec).group_size, 32, 128, -1)
            levels = [{"global_scale": level} for level in layout.holds.levels] if "nvfp4" in codec else [{}]
            found = [
                layout.misfit(format_named(codec, size, **level), (256, 256))
                for size in (sizes if format_named(codec).float_scale and format_named(codec).family[:4] != "ggml" else (None,))
                for level in levels
            ]
            assert "" in found, (layout.name, codec, found)
        for word, codec in layout.codec_aliases.items():
            assert format_named(codec).name in layout.holds.codecs, (layout.name, word)


@pytest.fixture(scope="module")
def drawn() -> list[QTensor]:
    """A weight of each format, in one of the shapes."""
    out = []
    for number, fmt in enumerate(formats()):
        shape = SHAPES[number % len(SHAPES)]
        if fmt.grouping == "flat" and len(shape) > 2:
            shape = SHAPES[0]
        with suppress(FormatError, ShapeError):
            out.append(finite_tensor(fmt, shape, number))
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_fits_comes_back_and_what_does_not_is_refused(name: str, drawn: list[QTensor]):
    """Where `misfit` gives a reason pack refuses with it. Where it gives none, the tensors read
    back are the same weight, or pack refuses its values.
    """
    layout = LAYOUTS[name]
    fitting = 0
    for q in drawn:
        why = layout.misfit(q.format, q.shape)
        if why:
            with pytest.raises(LayoutError) as refused:
                layout.pack(q, {})
            assert why in str(refused.value), q
            continue
        try:
            config = layout.config(q)
            tensors = layout.pack(q, config)
        except LayoutError:
            continue  # zero points, scales or an index without a place: another draw of values has one
        fitting += 1
        assert set(tensors) <= {*layout.required, *layout.optional}
        back = layout.unpack(tensors, config, "m")
        assert back.shape == q.shape
        assert np.array_equal(back.dequantize(), q.dequantize(), equal_nan=True), (q, config)
    # Formats that formats() does not draw: test_exl3, test_golden_* and their own tests pack them.
    elsewhere = ("modelopt-stack", "exl3", "compressed-tensors-marlin-24", "vllm-experts")
    assert fitting >= (0 if name in elsewhere else 1), name


def test_each_tensor_that_is_packed_is_claimed_as_a_part():
    """Every suffix has one meaning: a part of the QTensor, parameters, or a harmless neighbour with
    a reason.
    """
    for layout in LAYOUTS.values():
        suffixes = (*layout.required, *layout.optional, *layout.harmless)
        claims = layout.consumes(suffixes)
        assert [c.suffix for c in claims] == list(suffixes), layout.name
        assert all(c.part and (c.why or c.part != "auxiliary") for c in claims), layout.name
        assert layout.consumes(["nobody_knows"]) == ()
        assert set(layout.parts) <= {*layout.required, *layout.optional}, layout.name


def test_a_method_names_one_reader():
    methods = [m for reader in config_readers() for m in (reader.method, *reader.methods)]
    assert len(methods) == len(set(methods)) == len(readers_by_method())


def test_only_these_layouts_are_written_as_checkpoints():
    written = {name for name, layout in LAYOUTS.items() if layout.writes_checkpoints}
    assert written == {"gptq", "awq-gemm", "compressed-tensors", "modelopt", "mlx", "gpt-oss", "halfbyte"}
    with pytest.raises(LayoutError, match="no writer for hqq checkpoints"):
        LAYOUTS["hqq"].write_config([], [])


def test_a_stack_of_no_experts_is_still_a_stack():
    q = QTensor(
        format_named("mxfp4"), (0, 4, 64), {"codes": np.zeros((0, 4, 32), np.uint8), "scales": np.zeros((0, 4, 2), np.uint8)}
    )
    for name in ("gpt-oss", "vllm-experts"):
        back = LAYOUTS[name].unpack(LAYOUTS[name].pack(q, {}), {})
        assert back.shape == (0, 4, 64)


def test_vllms_experts_have_any_number_of_outputs_and_whole_bytes_of_inputs():
    layout, fmt = LAYOUTS["vllm-experts"], format_named("mxfp4")
    assert layout.misfit(fmt, (2, 3, 64)) == ""
    assert layout.misfit(fmt, (3, 4, 63)) == "this layout holds stacks (e, n, k) in mxfp4:g32, k even"


FIRST_4, UNSIGNED_TOO = (4, 8, 2, 3, 5, 6, 7), ("int", "uint")
TARGETS: dict[str, tuple[str, ...]] = {
    "gptq": tuple(f"{sign}{b}" for b in FIRST_4 for sign in UNSIGNED_TOO),
    "awq-gemm": ("int4", "uint4", "int8", "uint8"),
    "compressed-tensors": (
        *(f"{sign}{b}" for b in (*FIRST_4, 1) for sign in UNSIGNED_TOO),
        *("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3", "fp8_e5m2"),
    ),
    "metal-marlin": ("int4", "uint4", "fp4"),
    "modelopt": ("int4", "int8", "nvfp4", "mxfp4", "mxfp8_e4m3", "fp8_e4m3"),
    "gpt-oss": ("mxfp4",),
    "gguf": (
        *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "nvfp4_ue4m3", "iq4_nl", "iq4_xs"),
        *("q2_K", "q3_K", "q4_K", "q5_K", "q6_K"),
    ),
    "onnx": ("uint4", "uint8", "uint2"),
    "mlx": (*(f"affine{b}" for b in (4, 8, 6, 5, 3, 2, 1)), "mxfp4", "nvfp4", "mxfp8_e4m3"),
}
"""Codecs that a target of each layout may name, and the order in which one without a codec tries
them.
"""
GROUPS = {"gguf": (32,), "onnx": (256, 128, 64, 32, 16), "mlx": (128, 64, 32)}
LEVELS = {"compressed-tensors": ("divide",), "modelopt": ("multiply",), "gguf": ("none", "multiply"), "mlx": ("none", "amax")}
WIDER = {"gguf": (4, 5, 8), "mlx": (2, 3, 4, 5, 6, 8)}
"""Where these differ from any group, no global scale, and 4 and 8 bits."""


def test_targets_of_every_layout_and_their_order():
    held = {name: layout.holds for name, layout in LAYOUTS.items() if layout.holds is not None}
    assert {name: h.codecs for name, h in held.items()} == TARGETS
    for name, h in held.items():
        scales = ("float16",) if name == "gguf" else ("float16", "bfloat16", "float32")
        found = h.groups, h.levels, h.wider, tuple(sorted(h.scales))
        assert found == (GROUPS.get(name, ()), LEVELS.get(name, ()), WIDER.get(name, (4, 8)), tuple(sorted(scales))), name


def test_layouts_of_one_engine_and_those_that_split_stacks():
    assert {name: layout.engine for name, layout in LAYOUTS.items() if layout.engine} == {"gguf": "llama.cpp", "mlx": "mlx-lm"}
    assert {name for name, layout in LAYOUTS.items() if layout.splits_stacks} == {"gptq", "awq-gemm"}
    assert all(LAYOUTS[name].misfit(format_named("uint4", 32), (2, 8, 32)) for name in ("gptq", "awq-gemm"))


@pytest.mark.parametrize("name", [n for n, layout in LAYOUTS.items() if layout.holds and n not in ("gguf", "onnx")])
def test_the_codecs_that_a_layout_names_are_those_whose_weights_it_can_write(name: str):
    """But for GGUF, whose types are its codecs, and ONNX, which also holds what is named otherwise."""
    layout = LAYOUTS[name]
    fits = {fmt.name for fmt in formats() for shape in SHAPES if layout.misfit(fmt, shape) == ""}
    fits -= {"nf4_modelopt"}  # of ModelOpt's tensor classes, which no target names
    assert set(layout.holds.codecs) == fits
    assert len(layout.holds.codecs) == len(fits)
    if layout.holds.groups:
        sizes = {fmt.group_size for fmt in formats() if fmt.float_scale for shape in SHAPES if layout.misfit(fmt, shape) == ""}
        assert set(layout.holds.groups) == sizes
