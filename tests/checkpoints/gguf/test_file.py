"""The files of a GGUF model: how much of a header is read, and which files are its parts."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoints.gguf.file import FIRST_READ, MOST_HEADER, GGUFFile, header_from
from halfbyte.errors import CheckpointError
from support.gguf_writer import F32, GGUF, Q4_0, Tensor, blocks, f32


class Source:
    """A file that is `data` at its start; notes what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, []

    def __call__(self, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        return self.data[start:stop]


def model(strings: int) -> bytes:
    pairs = [("general.architecture", "string", "llama"), ("s", "array[string]", ["ab"] * strings)]
    return GGUF(pairs=pairs, tensors=[Tensor("t", (4,), F32, bytes(16))]).bytes()


@pytest.mark.parametrize("first", [4, 24, 100, 700, 10_000])
def test_a_header_is_read_from_its_start_in_pieces_that_meet(first):
    data = model(50)
    source = Source(data)
    header = header_from(source, "x", len(data), first)
    assert header.metadata["s"] == ["ab"] * 50
    assert [start for start, _ in source.asked] == [0, *(stop for _, stop in source.asked[:-1])]
    assert source.asked[0] == (0, min(first, len(data)))
    steps = [stop - start for start, stop in source.asked]
    assert all(
        stop == len(data) or stop >= 2 * before for (_, before), (_, stop) in zip(source.asked, source.asked[1:], strict=False)
    )
    assert len(steps) <= 12


def test_no_more_is_read_than_the_header_says_it_takes():
    text = "x" * 5000
    data = GGUF(pairs=[("general.architecture", "string", "llama"), ("s", "string", text)]).bytes()
    source = Source(data)
    assert header_from(source, "x", len(data), 100).metadata["s"] == text
    assert source.asked == [(0, 100), (100, len(data))]


@pytest.mark.parametrize(
    ("data", "says", "asked"),
    [(b"", "the file is empty; fetch it again", 0), (b"G", "starts with b'G'; a GGUF file starts with b'GGUF'", 1),
     (b"abcdefgh" * 9, "starts with b'abcd'", 1), (b"GGUF", r"the version needs 4 bytes at byte 4, the file ends at 4", 1)],
)  # fmt: skip
def test_what_has_no_header_is_not_read_on(data, says, asked):
    source = Source(data)
    with pytest.raises(CheckpointError, match=says):
        header_from(source, "x", len(data), 16)
    assert len(source.asked) == asked


def test_a_header_is_of_at_most_256_mib():
    assert (FIRST_READ, MOST_HEADER) == (8 << 20, 268_435_456)
    start = GGUF(pairs=[], pair_count=1).bytes() + struct.pack("<Q", 1) + b"s" + struct.pack("<I", 8)
    for needed in (MOST_HEADER, MOST_HEADER + 1):
        data = start + struct.pack("<Q", needed - len(start) - 8)
        source = Source(data)
        says = "the file ends at" if needed == MOST_HEADER else f"its header takes {needed:,} bytes or more; up to 268,435,456"
        with pytest.raises(CheckpointError, match=says):
            header_from(source, "x", 1 << 40, len(data))
        # The bytes of the largest header are asked for, of a larger one nothing.
        assert source.asked == [(0, len(data)), (len(data), MOST_HEADER)][: 1 + (needed == MOST_HEADER)]


def parts(folder: Path, count: int, stated: dict[int, list[tuple[str, str, int]]] | None = None) -> list[Path]:
    """Files m-0000I-of-N.gguf of one tensor each; `stated` replaces the numbers of some."""
    paths = []
    for i in range(count):
        usual = [("split.no", "uint16", i), ("split.count", "uint16", count)]
        pairs = [("general.architecture", "string", "llama"), *(stated or {}).get(i, usual)]
        path = folder / f"m-{i + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(GGUF(pairs=pairs, tensors=[f32(f"t{i}", np.full(4, i))]).bytes())
        paths.append(path)
    return paths


@pytest.mark.parametrize("count", [1, 2, 11])
def test_every_part_opens_all_in_their_order(count, tmp_path):
    paths = parts(tmp_path, count)
    for path in {paths[0], paths[-1]}:
        with GGUFFile(path) as file:
            assert file.paths == tuple(paths)
            assert [p for p, _ in file.shard_headers] == paths
            for i in range(count):
                assert file.file_of(f"t{i}") == paths[i]
                assert file.dense(f"t{i}").tolist() == [i] * 4
        with pytest.raises(CheckpointError, match=r"\.gguf: the file is closed; open it again"):
            file.raw("t0")


@pytest.mark.parametrize(
    "stated", [[], [("split.count", "uint16", 0)], [("split.count", "uint16", 1)], [("split.no", "uint16", 3)]]
)
def test_a_file_that_names_no_others_is_the_whole(stated, tmp_path):
    path = parts(tmp_path, 2, {0: stated})[0]
    assert GGUFFile(path).paths == (path,)


NO, COUNT = ("split.no", "uint16"), ("split.count", "uint16")


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("missing", ["split.no", "split.count"])
def test_a_part_without_its_number_is_refused(part, missing, tmp_path):
    numbers = [(*NO, part), (*COUNT, 2)]
    paths = parts(tmp_path, 2, {part: [n for n in numbers if n[0] != missing]})
    said = {"split.no": (None, 2), "split.count": (part, None)}[missing]
    with pytest.raises(
        CheckpointError, match=rf"split.no is {said[0]} \(from 0\) and split.count {said[1]}; its name says {part} of 2"
    ):
        GGUFFile(paths[1 - part])


@pytest.mark.parametrize(("part", "no", "count"), [(0, 1, 2), (1, 0, 2), (1, 2, 2), (1, 1, 3), (1, 1, 1), (1, 1, 0)])
def test_a_part_with_another_number_is_refused(part, no, count, tmp_path):
    paths = parts(tmp_path, 2, {part: [(*NO, no), (*COUNT, count)]})
    with pytest.raises(CheckpointError, match=rf"split.no is {no} \(from 0\) and split.count {count}; its name says {part} of 2"):
        GGUFFile(paths[1 - part])


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00003.gguf", "m-1-of-2.gguf", "m-00001-of-00002.gguf.gguf"])
def test_a_part_under_another_name_is_told_its_own(name, tmp_path):
    path = parts(tmp_path, 2)[0].rename(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"it is one of 2 shards \(split.count\), which are named NAME-00001-of-00002.gguf"):
        GGUFFile(path)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("shape", [(64,), (3, 32), (2, 5, 96), (2, 3, 1, 64)], ids=str)
def test_rows_of_any_axes_are_the_blocks_of_the_file(shape, order, tmp_path):
    tensor = blocks("w", shape, Q4_0, np.random.default_rng(1))
    stored = np.frombuffer(tensor.data, np.uint8).reshape(-1, 18)
    if order == ">":
        tensor.data = stored[:, [1, 0, *range(2, 18)]].tobytes()
    (tmp_path / "m.gguf").write_bytes(GGUF(tensors=[tensor], order=order).bytes())
    file = GGUFFile(tmp_path / "m.gguf")
    wide = (1, *shape) if len(shape) == 1 else shape
    assert file.rows("w").shape == (*wide[:-1], wide[-1] // 32 * 18)
    assert file.rows("w").tobytes() == stored.tobytes()
    assert file.raw("w").tobytes() == tensor.data
    if len(shape) == 2:
        for start, stop in ((0, 1), (1, 3), (2, 2), (0, 3)):
            assert file.rows("w", start, stop).tobytes() == stored.reshape(3, -1)[start:stop].tobytes()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "dtype"), [(0, "f4"), (1, "f2"), (24, "i1"), (25, "i2"), (26, "i4"), (27, "i8"), (28, "f8")])
def test_plain_numbers_are_read_in_either_byte_order(kind, dtype, order, tmp_path):
    values = np.arange(-3, 9).reshape(3, 4).astype(f"{order}{dtype}")
    (tmp_path / "m.gguf").write_bytes(GGUF(tensors=[Tensor("w", (4, 3), kind, values.tobytes())], order=order).bytes())
    got = GGUFFile(tmp_path / "m.gguf").dense("w")
    assert got.dtype == np.dtype(dtype)
    assert got.tolist() == values.tolist()
    assert not got.flags.writeable


def test_names_of_tensors_that_are_not_there(tmp_path):
    file = GGUFFile(parts(tmp_path, 2)[0])
    for read in (file.raw, file.rows, file.dense, file.file_of):
        with pytest.raises(CheckpointError, match=r"no tensor 'x'; there are 2, see \.headers"):
            read("x")


@pytest.mark.parametrize("declared", [1, 2, 3])
def test_the_number_of_tensors_of_all_parts_counts(declared, tmp_path):
    numbers = [(*NO, 0), (*COUNT, 2), ("split.tensors.count", "int32", declared)]
    path = parts(tmp_path, 2, {0: numbers})[0]
    if declared == 2:
        assert len(GGUFFile(path).headers) == 2
    else:
        with pytest.raises(CheckpointError, match=rf"split.tensors.count is {declared}; 2 files with 2 in all"):
            GGUFFile(path)
    alone = parts(tmp_path, 1, {0: numbers[2:]})[0]  # one file may be a part that was made whole
    assert len(GGUFFile(alone).headers) == 1
