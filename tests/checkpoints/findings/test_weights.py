"""What each check of a weight's values says, at the number at which it begins to."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor, format_named
from halfbyte.checkpoints.findings.weights import weight_findings
from halfbyte.errors import CheckpointError
from halfbyte.formats import family_of


def weight(word: str, shape: tuple[int, int] = (4, 64), details: dict | None = None, **parts: object) -> QTensor:
    """Zero codes, scales of 1 to 2, zero points and biases of 0; `parts` in place of some."""
    fmt = format_named(word)
    whole = {}
    for part, spec in family_of(fmt).geometry(fmt, shape).items():
        whole[part] = np.zeros(spec.shape, spec.dtype)
        if part.endswith(("scales", "scale")):
            whole[part].reshape(-1)[:] = 0x38 if spec.dtype == np.uint8 else 1
            if whole[part].size > 1:
                whole[part].reshape(-1)[0] = 0x39 if spec.dtype == np.uint8 else 2
    return QTensor(fmt, shape, whole | parts, details=details or {})


def said(q: QTensor) -> list[tuple[str, str, str]]:
    return [(f.severity, f.code, f.message) for f in weight_findings({"k": q}.__getitem__, "k")]


def test_a_weight_without_oddities_and_a_dense_tensor_are_passed():
    for word in ("int4:g32", "mxfp4", "fp8_e4m3:g32", "nvfp4", "affine4:g32"):
        assert said(weight(word)) == [], word
    assert weight_findings({"k": np.full(3, np.nan)}.__getitem__, "k") == []


def test_a_weight_that_cannot_be_read_is_an_error():
    def read(key: str) -> QTensor:
        raise CheckpointError(f"no {key}")

    (found,) = weight_findings(read, "k")
    assert (found.severity, found.code, found.key, found.message) == ("error", "unreadable", "k", "no k")


@pytest.mark.parametrize(("word", "bad", "shown", "severity"), [
    ("mxfp4", (255,), "0xFF", "error"), ("nvfp4", (0x7F, 0xFF), "0x7F or 0xFF", "error"),
    ("nvfp4_ue4m3", (0x7F, 0xFF), "0x7F or 0xFF", "warning"),
])  # fmt: skip
def test_scale_bytes_that_are_no_numbers_are_counted(word, bad, shown, severity):
    scales = weight(word, (4, 256)).parts["scales"]
    for count in (1, 2, 5):
        changed = scales.copy()
        changed.reshape(-1)[3 : 3 + count] = np.resize(bad, count)
        text = f"{count} of {scales.size} scale bytes are {shown}, not a number; producers decode it differently"
        assert (severity, "nan-scale", text) in said(weight(word, (4, 256), scales=changed))
    changed = scales.copy()
    changed.reshape(-1)[1:6] = 254, 0x7E, 0xFE, 0x80, 1
    assert "nan-scale" not in {code for _, code, _ in said(weight(word, (4, 256), scales=changed))}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("word", "part"), [("int4:g32", "scales"), ("affine4:g32", "scales"), ("affine4:g32", "biases"),
                                            ("q4_K", "super_scales"), ("q4_K", "super_mins")])  # fmt: skip
def test_parts_that_are_not_finite_are_counted(word, part, value):
    shape = (4, 256)
    array = weight(word, shape).parts[part]
    for count in (1, 3):
        changed = array.copy()
        changed.reshape(-1)[:count] = value
        assert ("error", "non-finite-scale", f"{count} of {array.size} {part} are NaN or infinite") in said(
            weight(word, shape, **{part: changed})
        )


@pytest.mark.parametrize(("word", "zeros"), [("int4:g32", (0.0, -0.0)), ("nvfp4", (0, 0x80))])
def test_scales_of_0_are_noted_and_all_of_them_warned_of(word, zeros):
    array = weight(word).parts["scales"]
    size = array.size
    for count in (1, size - 1):
        changed = array.copy()
        changed.reshape(-1)[-count:] = np.resize(np.array(zeros, array.dtype), count)
        assert ("note", "zero-scale", f"{count} of {size} scales are 0: their groups are constant") in said(
            weight(word, scales=changed)
        )
    changed = np.resize(np.array(zeros, array.dtype), array.shape)
    assert ("warning", "zero-scale", f"all {size} scales are 0: every weight decodes to its offset") in said(
        weight(word, scales=changed)
    )


def test_small_scales_of_0_under_super_scales_are_ordinary():
    q = weight("q4_K", (4, 256))
    assert "zero-scale" not in {code for _, code, _ in said(weight("q4_K", (4, 256), scales=q.parts["scales"] * 0))}
    found = said(weight("q4_K", (4, 256), super_scales=q.parts["super_scales"] * 0))
    assert ("warning", "zero-scale", "all 4 super_scales are 0: every weight decodes to its offset") in found


@pytest.mark.parametrize(("rows", "groups", "noted"), [(4, 16, True), (9, 7, False), (16, 4, True), (1, 64, True)])
def test_64_scales_that_are_the_same_are_noted(rows, groups, noted):
    shape = (rows, 32 * groups)
    scales = np.ones((rows, groups), np.float16)
    text = ("note", "equal-scales", f"all {rows * groups} scales are the same: were they ever set?")
    assert (text in said(weight("int4:g32", shape, scales=scales))) is noted
    scales[-1, -1] = 2
    assert said(weight("int4:g32", shape, scales=scales)) == []


SYMMETRIC = "the symmetric one: the weight needs no stored zero points"
V1 = ("labelled v1, which stores the zero point minus 1, but all stored values are {m}, as v2 writes a symmetric weight; "
      "if the label lies, checkpoint_format gptq_v2 is right")  # fmt: skip
V2 = ("labelled v2, but all stored zero points are {s}, as v1 writes a symmetric weight; "
      "if the label lies, checkpoint_format gptq is right")  # fmt: skip


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("label", ["", "v1", "v1, read as gptqmodel", "v2"])
def test_equal_zero_points_and_labels_that_do_not_fit_them(bits, label):
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    for zero in range(top + 2):
        zeros = np.full((4, 2), zero, np.int16)
        found = said(weight(f"uint{bits}:g32", zeros=zeros, details={"zeros": label}))
        kind = SYMMETRIC if zero == middle else f"not the symmetric {middle}"
        wanted = [("note", "equal-zeros", f"all 8 zero points are {zero}, {kind}")]
        if label.startswith("v1") and zero == middle + 1:
            wanted.append(("warning", "gptq-label", V1.format(m=middle)))
        if label.startswith("v2") and zero == middle - 1:
            wanted.append(("warning", "gptq-label", V2.format(s=middle - 1)))
        if label.startswith("v1") and zero in (0, top + 1):
            wraps = (
                f"8 of 8 zero points are 0, which v1 stores as {top} and takes from its neighbours; "
                "read as GPTQModel reads them, other readers may not"
                if "gptqmodel" in label
                else f"8 of 8 stored zero points are {top}: what v1 makes of 0, and what it leaves in damaged neighbours; "
                f"read as {top + 1}, as AutoGPTQ reads them"
            )
            wanted.append(("warning", "v1-zero-wraps", wraps))
        assert found == wanted, zero
        zeros[0, 0] = middle + 2 if zero == 1 else 1  # they differ: what is said of all is not said
        assert {code for _, code, _ in said(weight(f"uint{bits}:g32", zeros=zeros, details={"zeros": label}))} <= {
            "v1-zero-wraps"
        }


def test_one_zero_point_is_not_said_to_be_equal_to_others():
    assert said(weight("uint4:channel", (1, 64), zeros=np.full((1, 1), 8, np.int16))) == []
    assert len(said(weight("uint4:channel", (2, 64), zeros=np.full((2, 1), 8, np.int16)))) == 1


@pytest.mark.parametrize(("bits", "codes"), [(3, 10), (5, 6), (6, 5), (7, 4)])
def test_padded_words_are_noted_with_the_codes_that_they_hold(bits, codes):
    text = f"{bits}-bit words hold {codes} codes each, as compressed-tensors wrote them before 0.19"
    assert said(weight(f"int{bits}:g32", details={"packing": "padded"})) == [("note", "padded-words", text)]
    assert said(weight(f"int{bits}:g32", details={"packing": "dense"})) == []
