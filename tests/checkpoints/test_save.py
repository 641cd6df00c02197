"""halfbyte's own files: what `save` writes, `load` and `open` give back identical; a write that
fails leaves nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import halfbyte as hb
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.safetensors.file import SafetensorsFile
from halfbyte.checkpoints.safetensors.native_layout import OwnLayout
from halfbyte.errors import CheckpointError
from halfbyte.formats import codec_names, format_named
from support.random_tensors import random_tensor
from support.safetensors_bytes import mlx_weight, under, write

WIDE = 256
"""Inputs that are whole blocks of every format."""

pytestmark = pytest.mark.filterwarnings("ignore::halfbyte.checkpoints.CheckpointWarning")


@pytest.mark.parametrize("word", codec_names())
def test_every_format_comes_back_identical(word: str, tmp_path: Path):
    q = random_tensor(format_named(word), (6, WIDE), seed=1, origin="mlx", details={"note": "ü", "n": 3, "list": [1, 2]})
    stack = random_tensor(format_named(word), (2, 4, WIDE), seed=2)
    dense = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)
    weights = {"model.layers.0.w": q, "stack": stack, "model.norm.weight": dense}
    hb.save(tmp_path / "x.safetensors", weights)
    loaded = hb.load(tmp_path / "x.safetensors")
    assert set(loaded) == set(weights)
    assert loaded["model.layers.0.w"] == q
    assert loaded["model.layers.0.w"].origin == "mlx"
    assert dict(loaded["model.layers.0.w"].details) == dict(q.details)
    assert loaded["stack"] == stack
    assert loaded["model.norm.weight"].dtype == dense.dtype
    assert np.array_equal(loaded["model.norm.weight"], dense)
    checkpoint = hb.open(tmp_path / "x.safetensors")
    info = checkpoint.info("model.layers.0.w")
    assert (checkpoint.format, info.layout, info.format, info.shape) == ("halfbyte", "halfbyte", q.format, q.shape)
    assert not [f for f in checkpoint.findings() if f.code in ("unclaimed", "no-config", "unreadable")]


@given(n=st.integers(0, 5), k=st.integers(0, 70), bits=st.sampled_from([1, 3, 4, 8]), group=st.sampled_from([-1, 16, 32]))
def test_any_shape_comes_back_identical(n: int, k: int, bits: int, group: int, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("save") / "x.safetensors"
    q = random_tensor(format_named(f"uint{bits}", group), (n, k), seed=n)
    hb.save(path, {"w": q})
    assert hb.load(path)["w"] == q


@pytest.mark.parametrize("word", ["mxfp4", "uint4", "nf4", "hqq4"])
def test_slices_come_back_identical(word: str, tmp_path: Path):
    q = random_tensor(format_named(word), (8, 96 if word == "nf4" else 64), seed=3)[2:5]
    hb.save(tmp_path / "x.safetensors", {"w": q})
    back = hb.load(tmp_path / "x.safetensors")["w"]
    assert back == q
    assert back.window == q.window
    assert np.array_equal(back.dequantize(), q.dequantize(), equal_nan=True)


def test_a_slice_of_blocks_says_which_rows_it_has(tmp_path: Path):
    q = random_tensor(format_named("fp8_e4m3", 16, rows=2), (12, 32), seed=3)[4:]
    path = tmp_path / "x.safetensors"
    hb.save(path, {"w": q})
    assert hb.load(path)["w"] == q
    assert hb.load(path)["w"].window == (4, 12)
    hb.save(path, {"w": hb.QTensor(q.format, q.shape, q.parts, window=(4, 11))})
    with pytest.raises(CheckpointError, match=r"window \[4, 11\]; wanted the first of 8 rows"):
        hb.load(path)["w"].dequantize()


def test_a_checkpoint_is_saved_one_tensor_at_a_time(tmp_path: Path):
    source = write(tmp_path / "in.safetensors", under("a", mlx_weight()) | {"norm": np.ones(3, np.float16)})
    checkpoint = hb.open(source, config={"bits": 4, "group_size": 32})
    seen: list[tuple[int, int, str]] = []
    hb.save(tmp_path / "out.safetensors", checkpoint, {"source": "test"}, progress=lambda *step: seen.append(step))
    assert seen == [(0, 2, "a"), (1, 2, "norm"), (2, 2, "")]
    back = hb.open(tmp_path / "out.safetensors")
    assert back.metadata["source"] == "test"
    assert back["a"] == checkpoint["a"]
    assert np.array_equal(back["norm"], checkpoint["norm"])


def test_loading_is_lazy_views(tmp_path: Path):
    q = random_tensor(format_named("mxfp4"), (6, WIDE), seed=1)
    hb.save(tmp_path / "x.safetensors", {"w": q})
    assert not hb.load(tmp_path / "x.safetensors")["w"].parts["codes"].flags.owndata


def test_load_refuses_what_save_did_not_write(tmp_path: Path):
    path = write(tmp_path / "x.safetensors", {"w": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"was not written by halfbyte\.save \(dense\); use halfbyte\.open"):
        hb.load(path)
    write(path, {"w": np.ones(3, np.float32)}, {"format": "halfbyte", "version": "99"})
    with pytest.raises(CheckpointError, match="version '99'; this halfbyte reads '1'"):
        hb.load(path)


def own_file(path: Path, **changes: object) -> Path:
    """A saved tensor with some entries of its description changed (None removes one)."""
    q = random_tensor(format_named("uint4", 32), (4, 64), seed=1)
    parts = OwnLayout().pack(q, {})
    about = json.loads(parts["halfbyte"].tobytes())
    for key, value in changes.items():
        holder, name = (about["format"], key.removeprefix("format_")) if key.startswith("format_") else (about, key)
        holder[name] = value
        if value is None:
            del holder[name]
    parts["halfbyte"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    return write(path, under("w", parts), {"format": "halfbyte", "version": "1"})


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [4, 63]}, {"shape": "ab"}, {"shape": None}, {"shape": [-4, 64]}, {"shape": [4.0, 64]}, {"shape": [1 << 62,
         1 << 62]}, {"shape": [4]},
        {"format": "uint4"}, {"format": None}, {"format_bits": 8}, {"format_bits": 0}, {"format_bits": "4"},
         {"format_group_size": 0},
        {"format_group_size": 3.5}, {"format_family": "none"}, {"format_name": "float4"}, {"format_element": "e2m1"},
         {"format_scale": "x"},
        {"format_zero": "x"}, {"format_grouping": "block", "format_group_rows": 0}, {"format_grouping": "spiral"},
         {"format_divisor": 0}, {"format_divisor": -1.0}, {"format_divisor": 1e30},
        {"format_super_size": 7}, {"format_unknown": 1}, {"details": [1]}, {"window": [1]}, {"window": ["a", "b"]},
         {"window": [-1, 2]}, {"window": [0, 3]}, {"window": [0.0, 8]}, {"window": [0, 8.0]}, {"window": [True, 8]},
         {"window": {"0": 8}},
    ],
    ids=str,
)  # fmt: skip
def test_a_description_that_lies_is_refused_naming_file_and_tensor(changes: dict, tmp_path: Path):
    path = own_file(tmp_path / "x.safetensors", **changes)
    with pytest.raises(CheckpointError, match=r"x\.safetensors.*\bw\b"):
        hb.load(path)["w"].dequantize()


@pytest.mark.parametrize("window", [[0, 4], [3, 8], [4, 8]])
def test_a_slice_knows_its_place_in_the_whole(window: list[int], tmp_path: Path):
    assert hb.load(own_file(tmp_path / "x.safetensors", window=window))["w"].window == tuple(window)


def test_the_unchanged_description_is_read(tmp_path: Path):
    assert hb.load(own_file(tmp_path / "x.safetensors"))["w"].shape == (4, 64)


def test_the_format_library_reads_what_the_writer_wrote(tmp_path: Path):
    arrays = {
        "bf16": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3),
         "e4m3": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 3), np.int16), "scalar": np.array(7, np.int64), "bool": np.array([True, False]),
         "é\"\\": np.ones(1, np.float32),
        "strided": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2], "big": np.arange(3, dtype=">f4"), "e8m0": np.ones(2,
         ml_dtypes.float8_e8m0fnu),
    }  # fmt: skip
    with SafetensorsWriter(tmp_path / "x.safetensors", {"k": 'v"'}, expected=len(arrays)) as out:
        for name, array in arrays.items():
            out.add(name, array)
    with safe_open(tmp_path / "x.safetensors", "pt") as f:
        assert f.metadata() == {"k": 'v"'}
        assert set(f.keys()) == set(arrays)
        for name, array in arrays.items():
            assert tuple(f.get_tensor(name).shape) == array.shape
        assert f.get_tensor("big").tolist() == [0, 1, 2]
        assert f.get_tensor("strided").tolist() == [[0, 2], [4, 6], [8, 10]]
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        assert np.array_equal(file.array(name), array)


@pytest.mark.parametrize("expected", [0, 100, 5000])
def test_a_header_larger_than_its_room_and_unaligned_tensors_are_laid_down_again(expected: int, tmp_path: Path):
    rng = np.random.default_rng(0)
    arrays = {f"{'x' * 100}{i}": rng.integers(0, 256, 1 + i % 3, dtype=np.uint8) for i in range(100)}
    arrays |= {f"w{i}": rng.standard_normal(3) for i in range(10)}
    with SafetensorsWriter(tmp_path / "x.safetensors", expected=expected) as out:
        for name, array in arrays.items():
            out.add(name, array)
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.entries) == set(arrays)
    for name, array in arrays.items():
        assert np.array_equal(file.array(name), array)
        assert file.entries[name].start % array.dtype.itemsize == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_case_39_a_write_that_fails_leaves_no_file_and_keeps_the_old_one(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    hb.save(path, {"w": np.ones(3, np.float32)})
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="'bad' is a str; a QTensor or a NumPy array is written"):
        hb.save(path, {"w": np.zeros(3, np.float32), "bad": "no"})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=r"tensor 'c' is complex128; a file holds bool"):
        hb.save(path, {"c": np.zeros(3, np.complex128)})

    def interrupted() -> None:
        with SafetensorsWriter(path) as out:
            out.add("w", np.zeros(3, np.float32))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("length", [0, 1, 31, 63])
def test_data_begin_at_a_multiple_of_64_bytes(length: int, tmp_path: Path):
    with SafetensorsWriter(tmp_path / "x.safetensors", {"note": "a" * length}, expected=1) as out:
        out.add("w", np.ones(3, np.uint8))
    header = int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0


def test_names_that_cannot_stand_in_a_header_are_refused(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    for name in ("", "a\x1b", "__metadata__", "x" * 300):
        with pytest.raises(CheckpointError, match="names are printable and of 1 to 256 bytes"):
            hb.save(path, {name: np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor 'w\.codes' comes twice"):
        hb.save(path, {"w": random_tensor(format_named("mxfp4"), (1, 32), 0), "w.codes": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match="holds strings only"):
        hb.save(path, {}, {"a": 1})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="cannot be written"):
        hb.save(tmp_path / "nowhere" / "x.safetensors", {})
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_comes_back_empty(tmp_path: Path):
    hb.save(tmp_path / "x.safetensors", {})
    assert hb.load(tmp_path / "x.safetensors") == {}


def test_what_was_loaded_stays_when_the_file_is_cut(tmp_path: Path):
    """Memory of its own: a mapped array would end the process by SIGBUS."""
    path, values = tmp_path / "x.safetensors", np.arange(1 << 16, dtype=np.float32)
    hb.save(path, {"w": values})
    loaded, mapped = hb.load(path), hb.load(path, mapped=True)
    assert np.array_equal(mapped["w"], values)
    os.truncate(path, 4096)
    assert np.array_equal(loaded["w"], values)
    with pytest.raises(CheckpointError):
        hb.load(path)
