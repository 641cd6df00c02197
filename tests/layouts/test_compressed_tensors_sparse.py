"""2:4 sparse weights: files of compressed-tensors' own compressors (tests/data, written by
tests/support/producers/sparse_write.py) against its decompressor, and damage to them.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints.safetensors.file import SafetensorsFile
from halfbyte.checkpoints.safetensors.sparse import find_sparse
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import CheckpointError, LayoutError, UnsupportedError
from halfbyte.layouts import LAYOUTS, Header
from halfbyte.numerics.bits import pack
from support.layout_tensors import headers
from support.safetensors_bytes import folder, under

DATA = Path(__file__).parents[1] / "data" / "compressed_tensors_sparse.safetensors"
MARLIN = LAYOUTS["compressed-tensors-marlin-24"]
NAME = "model.layers.0.mlp.up_proj"


def stored(name: str) -> dict[str, np.ndarray]:
    file = SafetensorsFile(DATA)
    return {t.rpartition(".")[2]: np.array(file.array(t)) for t in file.entries if t.startswith(f"{name}.")}


def reference(name: str) -> np.ndarray:
    return np.array(SafetensorsFile(DATA).array(name))


def config(word: str | None, structure: str = "2:4", **groups: dict) -> dict:
    own = {"quant_method": "compressed-tensors", **groups}
    if word:
        own["sparsity_config"] = {"format": word, "sparsity_structure": structure, "targets": ["Linear"], "ignore": ["lm_head"]}
    return {"quantization_config": own}


def channel(type_: str, format_: str) -> dict:
    weights = {"num_bits": 8, "type": type_, "strategy": "channel", "symmetric": True}
    return {"format": format_, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize("name", ["24-bf16", "24-f32", "any-bf16", "any-f32"])
def test_dense_weights_are_the_decompressors(name: str, tmp_path: Path):
    word = "sparse-24-bitmask" if name.startswith("24") else "sparse-bitmask"
    path = folder(tmp_path / "in", {"model.safetensors": under(NAME, stored(name))}, config(word))
    want = reference(f"want.{name}")
    with hb.open(path) as ckpt:
        assert ckpt.keys() == (f"{NAME}.weight",)
        got = ckpt[f"{NAME}.weight"]
        assert (got.dtype, got.tobytes()) == (want.dtype, want.tobytes())
        assert ckpt.ledger().problems == ()
        claimed = {e.name.rpartition(".")[2] for e in ckpt.ledger().entries if e.status == "claimed"}
        assert claimed == set(stored(name))
        (note,) = ckpt.findings()
        assert (note.severity, note.code) == ("note", "sparse-expanded")
        assert f"{ckpt.info(f'{NAME}.weight').nbytes:,} bytes here, {want.nbytes:,} when read" in note.message
        dequantize_checkpoint(ckpt, tmp_path / "dense", dtype="float32")
    with hb.open(tmp_path / "dense") as dense:
        assert np.array_equal(dense[f"{NAME}.weight"], want.astype(np.float32))
    for without in (None, "dense"):  # the tensors say it, too
        path = folder(tmp_path / str(without), {"model.safetensors": under(NAME, stored(name))}, config(without))
        with hb.open(path) as ckpt:
            assert ckpt[f"{NAME}.weight"].tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("name", "args"),
    [("24-fp8", ("float", "float-quantized")), ("24-int8", ("int", "int-quantized")), ("any-int8", ("int", "int-quantized"))],
)
def test_codes_under_scales_are_sparse_too(name: str, args: tuple[str, str], tmp_path: Path):
    word = "sparse-24-bitmask" if name.startswith("24") else "sparse-bitmask"
    scale = (np.arange(1, 9, dtype=np.float32)[:, None] / 8).astype(ml_dtypes.bfloat16)
    tensors = under(NAME, {**stored(name), "weight_scale": scale})
    path = folder(tmp_path / "in", {"model.safetensors": tensors}, config(word, **channel(*args)))
    want = reference(f"want.{name}").astype(np.float64) * scale.astype(np.float64)
    with hb.open(path) as ckpt:
        assert np.array_equal(ckpt[NAME].dequantize("float64"), want)
        assert ckpt.ledger().problems == ()
        assert sum(e.status == "claimed" for e in ckpt.ledger().entries) == len(tensors)
        convert_checkpoint(ckpt, tmp_path / "ct", "compressed-tensors")
    with hb.open(tmp_path / "ct") as written:
        assert np.array_equal(written[NAME].dequantize("float64"), want)
        assert {e.name.rpartition(".")[2] for e in written.ledger().entries if e.subject == "tensor"} >= {
            "weight",
            "weight_scale",
        }


@pytest.mark.parametrize("part", ["compressed", "bitmask", "shape"])
def test_a_part_that_is_lost_is_named(part: str, tmp_path: Path):
    for name in ("24-bf16", "24-fp8"):
        tensors = under(NAME, {s: t for s, t in stored(name).items() if s != part})
        path = folder(tmp_path / name, {"model.safetensors": tensors}, config("sparse-24-bitmask"))
        with hb.open(path) as ckpt, pytest.raises(CheckpointError, match=rf"{NAME}\.(compressed|bitmask|shape): unknown"):
            ckpt.check("dequantize")


@pytest.mark.parametrize(
    ("name", "part", "index", "value", "says"),
    [
        ("24-bf16", "bitmask", (2, 0), 0x37, r"bitmask' is not 2:4, two positions in each four inputs: row 2, inputs 0 to 3"),
        ("24-bf16", "bitmask", (7, 2), 0x13, r"bitmask' has positions outside a row; allowed: 0 to 19"),
        ("24-bf16", "shape", (1, 0), 24, r"shape' is \[8, 24\]; .*compressed and its mask are of \[8, 20\]"),
        ("any-bf16", "row_offsets", (3,), 1, r"row_offsets' puts row 3 at 1; the mask puts it at"),
        ("any-bf16", "shape", (0,), 9, "unknown"),
    ],
)
def test_parts_that_contradict_each_other(name: str, part: str, index, value: int, says: str, tmp_path: Path):
    tensors = stored(name)
    tensors[part][index] = value
    path = folder(tmp_path / "in", {"model.safetensors": under(NAME, tensors)}, config("sparse-24-bitmask"))
    with pytest.raises(CheckpointError, match=says), hb.open(path) as ckpt:
        dequantize_checkpoint(ckpt, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_mask_than_values_is_refused(tmp_path: Path):
    tensors = stored("any-bf16")
    row = int(np.flatnonzero(np.diff(tensors["row_offsets"], append=tensors["compressed"].size))[-1])
    tensors["bitmask"][row] &= 0xFF ^ (tensors["bitmask"][row] & -tensors["bitmask"][row].astype(np.int16)).astype(np.uint8)
    path = folder(tmp_path / "in", {"model.safetensors": under(NAME, tensors)}, config("sparse-bitmask"))
    with hb.open(path) as ckpt, pytest.raises(CheckpointError, match=r"bitmask|row_offsets"):
        ckpt[f"{NAME}.weight"]


def test_a_format_word_that_is_new_is_refused(tmp_path: Path):
    path = folder(tmp_path / "in", {"model.safetensors": under(NAME, stored("24-bf16"))}, config("sparse-48"))
    with pytest.raises(
        UnsupportedError, match="sparsity_config has format 'sparse-48', which is not read; read: dense, sparse-24"
    ):
        hb.open(path)


def args_of(name: str) -> dict:
    word, kind = name.split("-")
    strategy = {"strategy": "channel"} if kind == "channel" else {"strategy": "group", "group_size": 128}
    return {"format": "marlin-24", "weights": {"num_bits": int(word[3:]), "type": "int", "symmetric": True, **strategy}}


@pytest.mark.parametrize("name", ["int4-g128", "int4-channel", "int8-g128"])
def test_marlin_codes_are_the_quantized_integers(name: str):
    tensors, codes, scale = stored(name), reference(f"want.{name}"), reference(f"scale.{name}")
    for args in (args_of(name), {}):
        q = MARLIN.unpack(tensors, args, NAME)
        want = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), codes.shape[1] // scale.shape[1], 1)
        assert np.array_equal(q.dequantize("float64"), want)
    assert MARLIN.describe(headers(tensors), args_of(name)) == (q.format, q.shape)
    assert MARLIN.config(q) == args_of(name)
    assert {s: t.tobytes() for s, t in MARLIN.pack(q, {}).items()} == {s: t.tobytes() for s, t in tensors.items()}
    assert {s: t.shape for s, t in MARLIN.pack(q, {}).items()} == {s: t.shape for s, t in tensors.items()}


@pytest.mark.parametrize(("n", "k"), [(64, 32), (128, 992), (64, 1024), (192, 2048), (4032, 32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_marlin_weights_of_every_width_come_back(bits: int, n: int, k: int):
    """Two values of four, any number of steps of 32 inputs and of strips of 64 outputs."""
    rng = np.random.default_rng(k)
    codes = rng.integers(0, 1 << bits, (n, k // 4, 4)).astype(np.uint8)
    np.put_along_axis(codes, rng.permuted(np.tile(np.arange(4), (n, k // 4, 1)), axis=-1)[..., :2], 1 << (bits - 1), axis=-1)
    parts = {"codes": pack(codes.reshape(n, k), bits), "scales": rng.random((n, 1)).astype(np.float16)}
    q = hb.QTensor(hb.format_named(f"int{bits}", -1, scale_dtype="float16"), (n, k), parts)
    tensors = MARLIN.pack(q, {})
    assert tensors["meta"].shape == (k // 32, 2 * n)
    assert tensors["weight_packed"].shape == (k // 32, 16 * n * bits // 32)
    assert MARLIN.unpack(tensors, MARLIN.config(q)) == q


def test_marlin_positions_that_another_writer_chose_are_kept():
    tensors = stored("int4-channel")
    q = MARLIN.unpack(tensors, {})
    # Row 3, inputs 8 to 11 are all 0: the producer takes positions 2 and 3 for them.
    other = MARLIN.unpack({**tensors, "meta": moved(tensors["meta"], 3, 2)}, {})
    assert other == q
    assert MARLIN.pack(other, {})["meta"].tobytes() == moved(tensors["meta"], 3, 2).tobytes()
    assert MARLIN.pack(q, {})["meta"].tobytes() == tensors["meta"].tobytes()


def moved(meta: np.ndarray, row: int, quad: int) -> np.ndarray:
    """The positions 0 and 1 in the nibble of four inputs, at the address that the layout's table
    gives.
    """
    n = meta.shape[1] // 2
    c, nibble = divmod(quad, 4)
    r0, r1, r2, r345 = row & 1, row >> 1 & 1, row >> 2 & 1, row >> 3 & 7
    at = 2 * n * (c // 2) + 2 * (64 * (row // 64) + 32 * r1 + 4 * r345 + 2 * r0 + c % 2) + r2
    words = meta.copy().reshape(-1).view(np.uint16)
    words[at] = int(words[at]) & ~(15 << 4 * nibble) | 0b0100 << 4 * nibble
    return words.view(np.int16).reshape(meta.shape)


def test_marlin_opens_converts_and_loads_as_integers(tmp_path: Path):
    name = "int4-g128"
    whole = under(NAME, stored(name))
    groups = {"group_0": {"targets": ["Linear"], **args_of(name)}}
    path = folder(tmp_path / "in", {"model.safetensors": whole}, config(None, format="marlin-24", config_groups=groups))
    with hb.open(path) as ckpt:
        assert (ckpt.info(NAME).layout, ckpt.ledger().problems) == (MARLIN.name, ())
        read = sum(part.nbytes for part in ckpt[NAME].parts.values())
        assert [f.code for f in ckpt.findings()] == ["sparse-expanded"]
        assert f"{sum(a.nbytes for a in whole.values()):,} bytes here, {read:,} when read" in ckpt.findings()[0].message
        want = ckpt[NAME].dequantize("float64")
        for to in ("gptq", "mlx", "compressed-tensors"):
            convert_checkpoint(ckpt, tmp_path / to, to)
            with hb.open(tmp_path / to) as written:
                assert np.array_equal(written[NAME].dequantize("float64"), want)
    for lost in whole:
        rest = {s: t for s, t in whole.items() if s != lost}
        path = folder(tmp_path / lost, {"model.safetensors": rest}, config(None, format="marlin-24", config_groups=groups))
        with pytest.raises(CheckpointError, match=NAME), warnings.catch_warnings(), hb.open(path) as ckpt:
            dequantize_checkpoint(ckpt, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "args", "says"),
    [
        ({"meta": np.zeros((12, 127), np.int16)}, {}, r"m.meta has shape \[12, 127\]; wanted \[12, 128\]"),
        ({"meta": np.zeros((12, 128), np.int16)}, {}, r"m.meta gives output 0, inputs 0 to 3 the positions \[0, 0\]"),
        ({"scale_packed": np.zeros((2, 64), np.float16)}, {}, "2 scales for 384 inputs; wanted one for each 128, or one"),
        ({"weight_packed": np.zeros((12, 100), np.int32)}, {}, r"m.weight_packed has shape \[12, 100\] under scales of 64"),
        ({}, {"weights": {"num_bits": 8}}, "num_bits is 8 in the quantization config; its tensors are of 4 bits"),
        ({}, {"format": "pack-quantized"}, "marlin-24 by its tensors; the config's format is pack-quantized"),
    ],
)
def test_marlin_tensors_that_do_not_fit_are_named(change: dict, args: dict, says: str):
    with pytest.raises(LayoutError, match=says):
        MARLIN.unpack({**stored("int4-g128"), **change}, args, "m")


def test_marlin_takes_no_weight_that_is_not_sparse():
    q = MARLIN.unpack(stored("int4-channel"), {})
    codes = q.parts["codes"].copy()
    codes[4, 0] = codes[4, 1] = 0x11
    dense = hb.QTensor(q.format, q.shape, {**q.parts, "codes": codes})
    with pytest.raises(LayoutError, match="row 4 has more than two values in inputs 0 to 3; it is 2:4"):
        MARLIN.pack(dense, {})


def test_a_weight_without_inputs_is_sparse_too():
    """No value, no mask byte, and the number of its rows."""
    arrays = {
        "m.compressed": np.zeros((3, 0), np.float16), "m.bitmask": np.zeros((3, 0), np.uint8), "m.shape": np.array([[3], [0]]),
    }  # fmt: skip
    found = find_sparse(arrays, lambda name: Header(arrays[name].shape, arrays[name].dtype), arrays.__getitem__)
    assert [(name, weight.shape, weight.dtype) for name, weight in found.items()] == [("m.weight", (3, 0), np.dtype(np.float16))]
