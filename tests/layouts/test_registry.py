"""What every layout says of itself: names, producers, what it holds and what it consumes."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.checkpoints.quant_config import readers_by_method
from halfbyte.errors import LayoutError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS, config_readers, layout_aliases, layout_named
from halfbyte.producers import DECODERS
from halfbyte.spec import Format
from halfbyte.tensor.qtensor import QTensor
from support.random_tensors import finite_tensor

FORMATS: tuple[Format, ...] = (
    format_named("int4", 32), format_named("uint4", 32), format_named("int8", -1), format_named("int3", 32),
    format_named("affine4", 64), format_named("mxfp4"), format_named("nvfp4"), format_named("nvfp4", global_scale="divide"),
    format_named("fp8_e4m3", -1), format_named("fp8_e4m3", 32, rows=32, scale_dtype="float32"), format_named("nf4", 64),
    format_named("hqq4", 64), format_named("mxfp8_e4m3"), format_named("q4_K"),
)  # fmt: skip
SHAPES = ((64, 256), (2, 64, 256), (33, 256))


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_misfit_is_what_pack_refuses(name: str):
    """Where `misfit` gives a reason pack gives the same one; where it gives none, pack refuses for
    values only.
    """
    layout = LAYOUTS[name]
    fitting = 0
    for fmt in FORMATS:
        for shape in SHAPES:
            if shape[-1] % max(fmt.group_size, 1) or (fmt.grouping == "flat" and len(shape) > 2):
                continue
            q: QTensor = finite_tensor(fmt, shape, 0)
            why = layout.misfit(q.format, shape)
            if why:
                with pytest.raises(LayoutError) as refused:
                    layout.pack(q, {})
                assert why in str(refused.value), (fmt, shape)
                continue
            try:
                tensors = layout.pack(q, {})
            except LayoutError:
                # Zero points, scales or an index without a place: another draw of values has one.
                continue
            fitting += 1
            assert set(tensors) <= {*layout.required, *layout.optional}
    # Shapes or formats that the others have no use for: test_exl3, test_golden_* and their own
    # tests pack them.
    elsewhere = ("bitsandbytes", "hqq", "awq-marlin", "modelopt-stack", "exl3", "compressed-tensors-marlin-24")
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
