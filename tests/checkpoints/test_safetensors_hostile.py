"""Files that lie: each is refused with a CheckpointError that names file and tensor, soon and in
little memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.checkpoints.safetensors.header import MAX_HEADER, MAX_METADATA, MAX_NAME, MAX_TENSORS, parse_header
from halfbyte.errors import CheckpointError, UnsupportedError
from support.safetensors_bytes import entry, folder, gptq_weight, mlx_weight, raw_file, under, write

F16 = entry("F16", [2, 2], 0, 8)


def header(**tensors: object) -> str:
    return json.dumps(tensors)


HOSTILE: dict[str, tuple[str | bytes, bytes, str]] = {
    # name: (header, data, what the message must say)
    "not json": ("hello, world", b"", "header begins with b'hello, world'"),
    "array": ("[1, 2]", b"", "a safetensors header is a JSON object"),
    "cut short json": ('{"w":{"dtype":"F16","shape":[2,2],"data_off', b"", "tensor 'w'"),
    "number for a name": ("{1:2}", b"", "where a name in quotes belongs"),
    "text after": (header(w=F16) + "x", b"\0" * 8, "more text after its closing brace"),
    "two objects": (header(w=F16) + "{}", b"\0" * 8, "more text after its closing brace"),
    "bad utf-8 name": (b'{"w\xff":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]}}', b"\0" * 8, "is not UTF-8"),
    "bad escape in name": (b'{"\\q":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]}}', b"\0" * 8, "is not a JSON string"),
    "control in name": ('{"w\\u001b[2J":' + json.dumps(F16) + "}", b"\0" * 8, "control characters"),
    "deep json": ('{"w":' + "[" * 100_000 + "]" * 100_000 + "}", b"", "tensor 'w'"),
    "deep json in entry": ('{"w":{"dtype":' + "[" * 3000 + "}}", b"", "tensor 'w'"),
    "same tensor twice": (header(w=F16)[:-1] + "," + header(w=F16)[1:], b"\0" * 8, "tensor 'w' is given twice"),
    "same field twice": ('{"w":{"dtype":"F16","dtype":"F16","shape":[2,2],"data_offsets":[0,8]}}', b"\0" * 8,
     "tensor 'w': its entry has dtype, dtype"),
    "field missing": ('{"w":{"dtype":"F16","shape":[2,2]}}', b"", "tensor 'w': its entry has dtype, shape; wanted"),
    "field unknown": ('{"w":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8],"x":1}}', b"\0" * 8, "tensor 'w': its entry has"),
    "entry is a list": ('{"w":[1]}', b"", "tensor 'w': its entry is not an object"),
    "entry is null": ('{"w":null}', b"", "tensor 'w': its entry is not an object"),
    "dtype unknown": (header(w=entry("Q4", [2, 2], 0, 8)), b"\0" * 8, "tensor 'w': dtype 'Q4'; known: BOOL, U8"),
    "dtype of 80 characters": (header(w=entry("Q" * 78, [2, 2], 0, 8)), b"\0" * 8, f"dtype '{'Q' * 78}'; known"),
    "dtype of 81 characters": (header(w=entry("Q" * 79, [2, 2], 0, 8)), b"\0" * 8, f"dtype '{'Q' * 76}...; known"),
    "dtype of a scalar unknown": (header(w=entry("Q4", [], 0, 4)), b"\0" * 4, "tensor 'w': dtype 'Q4'; known: BOOL, U8"),
    "dtype a number": (header(w=entry(16, [2, 2], 0, 8)), b"\0" * 8, "tensor 'w': dtype 16"),  # type: ignore[arg-type]
    "shape negative": (header(w=entry("F16", [-2, -2], 0, 8)), b"\0" * 8, "tensor 'w': shape [-2, -2]"),
    "shape of floats": (header(w=entry("F16", [2.0, 2.0], 0, 8)), b"\0" * 8, "tensor 'w': shape [2.0, 2.0]"),
    "shape of booleans": (header(w=entry("F16", [True, 4], 0, 8)), b"\0" * 8, "tensor 'w': shape [True, 4]"),
    "shape of strings": (header(w=entry("F16", ["2", 2], 0, 8)), b"\0" * 8, "tensor 'w': shape ['2', 2]"),
    "shape a number": (header(w=entry("F16", 4, 0, 8)), b"\0" * 8, "tensor 'w': shape 4"),
    "shape of 33 axes": (header(w=entry("F16", [1] * 33, 0, 2)), b"\0" * 2, "tensor 'w': rank 33; read up to 32"),
    "shape wraps to 4": (header(w=entry("U8", [4194305, 4194305, 211106198978564], 0, 4)), b"\0" * 4,
     "tensor 'w': shape [4194305"),
    "shape past every file": (header(w=entry("U8", [3 << 61], 0, 3 << 61)), b"",
     "tensor 'w' lies at bytes 0 to 6,917,529,027,641,081,856 of the data, but the file holds 0"),
    "shape wraps to 0": (header(w=entry("U8", [1 << 62, 4], 0, 0)), b"", "tensor 'w': shape"),
    "empty with huge axes": (header(w=entry("U8", [0, 1 << 62, 1 << 62], 0, 0)), b"", "tensor 'w': shape"),
    "number of 5000 digits": ('{"w":{"dtype":"U8","shape":[' + "9" * 3900 + '],"data_offsets":[0,8]}}', b"\0" * 8, "tensor 'w'"),
    "too small for shape": (header(w=entry("F16", [2, 3], 0, 8)), b"\0" * 8, "tensor 'w': shape [2, 3] of F16 takes 12 bytes"),
    "too large for shape": (header(w=entry("F16", [2, 1], 0, 8)), b"\0" * 8, "tensor 'w': shape [2, 1] of F16 takes 4 bytes"),
    "half a byte": (header(w=entry("F4", [3], 0, 2)), b"\0" * 2, "tensor 'w': shape [3] of F4 is 12 bits, not whole bytes"),
    "offsets backwards": (header(w=entry("U8", [8], 8, 0)), b"\0" * 8, "tensor 'w': data_offsets [8, 0] run backwards"),
    "offsets negative": (header(w=entry("U8", [8], -8, 0)), b"\0" * 8, "tensor 'w': data_offsets [-8, 0]"),
    "offsets of floats": (header(w=entry("U8", [8], 0.0, 8.0)), b"\0" * 8, "tensor 'w': data_offsets [0.0, 8.0]"),
    "three offsets": ('{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,4,8]}}', b"\0" * 8, "tensor 'w': data_offsets [0, 4, 8]"),
    "past the end": (header(a=entry("U8", [4], 0, 4), w=entry("U8", [8], 4, 12)), b"\0" * 11, "tensor 'w' lies at bytes 4 to 12"),
    "far past the end": (header(w=entry("U8", [1 << 40], 0, 1 << 40)), b"\0" * 8,
     "tensor 'w' lies at bytes 0 to 1,099,511,627,776"),
    "offset near 2^64": (header(w=entry("U8", [8], (1 << 64) - 32, (1 << 64) - 24)), b"\0" * 8, "tensor 'w' lies at"),
    "overlap": (header(a=entry("U8", [8], 0, 8), w=entry("U8", [8], 4, 12)), b"\0" * 12,
     "tensor 'w' begins at byte 4 and overlaps 'a'"),
    "same bytes twice": (header(a=entry("U8", [8], 0, 8), w=entry("U8", [8], 0, 8)), b"\0" * 8,
     "tensor 'w' begins at byte 0 and overlaps 'a'"),
    "hole": (header(a=entry("U8", [4], 0, 4), w=entry("U8", [4], 8, 12)), b"\0" * 12,
     "tensor 'w' begins at byte 8 and leaves 4 bytes unused after 'a'"),
    "hole at the start": (header(w=entry("U8", [4], 8, 12)), b"\0" * 12, "tensor 'w' begins at byte 8 and leaves 8 bytes unused"),
    "bytes left over": (header(w=entry("U8", [4], 0, 4)), b"\0" * 5, "the tensors end at byte 4 of the data (the last is 'w')"),
    "metadata not an object": ('{"__metadata__":[1],"w":' + json.dumps(F16) + "}", b"\0" * 8,
     "__metadata__ is not an object of strings"),
    "metadata of numbers": ('{"__metadata__":{"a":1},"w":' + json.dumps(F16) + "}", b"\0" * 8,
     "__metadata__ is not an object of strings"),
    "metadata twice": ('{"__metadata__":{"a":"b"},"__metadata__":{},"w":' + json.dumps(F16) + "}", b"\0" * 8,
     "__metadata__ is given twice"),
    "metadata key twice": ('{"__metadata__":{"a":"b","a":"c"},"w":' + json.dumps(F16) + "}", b"\0" * 8, "key 'a' is given twice"),
    "metadata bad utf-8": (b'{"__metadata__":{"a":"\xff"}}', b"", "__metadata__ is not UTF-8"),
    "metadata unclosed": ('{"__metadata__":{"a":"b"', b"", "__metadata__ is not an object of strings"),
    "name unclosed": ('{"w', b"", "no closing quote"),
    "name too long": ('{"' + "w" * (MAX_NAME + 1) + '":' + json.dumps(F16) + "}", b"\0" * 8, f"over {MAX_NAME} bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused_naming_file_and_tensor(name: str, tmp_path: Path):
    text, data, says = HOSTILE[name]
    path = raw_file(tmp_path / "bad.safetensors", text, data)
    with pytest.raises(CheckpointError) as caught:
        hb.open(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty; fetch it again"),
        (b"\x05\0\0", "3 bytes; a safetensors file begins with 8 bytes"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "header length 1,152,921,504,606,846,976; the format allows 100,000,000"),
        ((MAX_HEADER + 1).to_bytes(8, "little") + b"{}", "the format allows 100,000,000"),
        ((500).to_bytes(8, "little") + b"{}", "header length 500, but 2 bytes follow"),
        ((1).to_bytes(8, "little") + b"{", "header length 1"),
        ((0).to_bytes(8, "little"), "header length 0"),
        (b"PK\x03\x04" + b"\0" * 60, "a zip archive: a PyTorch pickle, which runs code"),
        (b"\x80\x02}q\0" + b"\0" * 60, "a pickle, which runs code"),
        (b"<html><body>404", "begins with the text '<html><b'; a safetensors file begins with the length of its header"),
        (b"no\n", "begins with the text 'no'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer"),
    ],
)  # fmt: skip
def test_wrong_beginning_is_refused_naming_the_file(content: bytes, says: str, tmp_path: Path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        hb.open(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_as_many_tensors_as_the_limit_are_read_and_one_more_is_not():
    def header(count: int) -> bytes:
        return ("{" + ",".join(f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count)) + "}").encode()

    assert len(parse_header(header(MAX_TENSORS), 0, "file").entries) == MAX_TENSORS
    with pytest.raises(CheckpointError, match=r"100,001 tensors in the header; read up to 100,000"):
        parse_header(header(MAX_TENSORS + 1), 0, "file")


def test_every_truncation_of_a_file_is_refused(tmp_path: Path):
    whole = write(tmp_path / "whole.safetensors", under("layer", mlx_weight(2, 32)), {"note": "x"}).read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        path = tmp_path / "cut.safetensors"
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            hb.open(path)


@given(st.binary(max_size=120), st.integers(0, 200))
def test_random_headers_never_raise_anything_else(text: bytes, size: int):
    try:
        header = parse_header(b"{" + text, size, "file")
    except CheckpointError as error:
        names_the_file = "[open] file: " in str(error)
    else:
        # Random bytes are a header only if they close the object at once, and then there is no
        # data.
        names_the_file = text.lstrip(b" \t\r\n").startswith(b"}") and (header.entries, size) == ({}, 0)
    assert names_the_file


def test_a_header_with_bytes_changed_parses_as_before_or_is_refused():
    """One or two bytes changed, 2000 times: a fixed seed accepts some and refuses some, and what is
    accepted is right.
    """
    rng = np.random.default_rng(0)
    accepted = sum(_one_changed_header(rng) for _ in range(2000))
    assert 40 < accepted < 1960, accepted


def _one_changed_header(rng: np.random.Generator) -> bool:
    """True when the changed header is accepted; then the standard library must read the same from
    it.
    """
    good = json.dumps({"__metadata__": {"k": 'v"\\'}, "a.b": entry("F32", [2], 0, 8), "c": entry("U8", [0, 3], 8, 8)}).encode()
    bad = bytearray(good)
    for _ in range(rng.integers(1, 3)):
        bad[rng.integers(len(bad))] = rng.integers(32, 127)
    try:
        parsed = parse_header(bytes(bad), 8, "file")
    except CheckpointError:
        return False
    # What is accepted is what the standard library reads, too.
    tree = json.loads(bytes(bad), strict=False)
    assert parsed.metadata == tree.pop("__metadata__", {})
    assert {n: (e.dtype, list(e.shape), [e.start, e.stop]) for n, e in parsed.entries.items()} == {
        n: (e["dtype"], e["shape"], e["data_offsets"]) for n, e in tree.items()
    }
    return True


@pytest.mark.parametrize("dtype", ["F4096", "", "f32", "é"])
@pytest.mark.parametrize("shape", [[], [1], [0], [2, 0]])
def test_a_dtype_that_is_none_is_refused_whatever_the_shape(tmp_path, dtype, shape):
    path = raw_file(tmp_path / "x.safetensors", header(w=entry(dtype, shape, 0, 0)))
    with pytest.raises(CheckpointError, match="dtype"):
        hb.open(path)


@pytest.mark.parametrize(
    ("axes", "allowed"), [([0, 1 << 15], True), ([0, 1 << 30, 1 << 30], True), ([0, 1 << 30, 1 << 31], False)]
)
def test_a_tensor_of_no_bytes_has_axes_that_addresses_span(tmp_path, axes, allowed):
    path = raw_file(tmp_path / "x.safetensors", header(w=entry("F32", axes, 0, 0)))
    if allowed:
        assert hb.open(path).shards.header("w").shape == tuple(axes)
    else:
        with pytest.raises(CheckpointError, match=r"tensor 'w': shape .* is over 2\^63 bytes"):
            hb.open(path)


def test_a_tensor_whose_name_is_empty_is_a_tensor(tmp_path):
    """It is listed, its value is read, and beside a model's config it is accounted for."""
    raw_file(tmp_path / "model.safetensors", json.dumps({"": entry("F32", [1, 1], 0, 4)}), np.float32(2).tobytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with hb.open(tmp_path) as checkpoint:
        assert checkpoint.keys() == ("",)
        assert checkpoint[""].tolist() == [[2.0]]
        assert checkpoint.dense_keys() == ("",)
        assert [e.name for e in checkpoint.ledger().entries if e.subject == "tensor"] == [""]


def test_headers_of_other_writers_are_read(tmp_path: Path):
    """Fields in any order, any white space, escapes in names, padding, an empty header, empty
    tensors, zero axes.
    """
    text = (
        '{ "a\\u00e9\\"\\\\" : {"data_offsets" : [ 0 , 4 ], "shape":[ 1,1 ], "dtype":"F32"},\n\t'
        '"empty":{"dtype":"F16","shape":[0,7],"data_offsets":[4,4]}, "scalar":{"dtype":"U8","shape":[],"data_offsets":[4,5]},'
        '"__metadata__" : { "k\\"" : "\\\\v\\u20ac" , "l":"" } }   '
    )
    checkpoint = hb.open(raw_file(tmp_path / "odd.safetensors", text, np.float32(1.5).tobytes() + b"\x07"))
    assert dict(checkpoint.metadata) == {'k"': "\\v€", "l": ""}
    assert checkpoint['aé"\\'].tolist() == [[1.5]]
    assert checkpoint["empty"].shape == (0, 7)
    assert checkpoint["scalar"].shape == ()
    assert int(checkpoint["scalar"]) == 7
    assert hb.open(raw_file(tmp_path / "empty.safetensors", "{}")).keys() == ()
    assert hb.open(raw_file(tmp_path / "only.safetensors", '{"__metadata__":{}}')).format == "dense"


def test_misaligned_data_is_read_right(tmp_path: Path):
    """Neither header nor tensors need be aligned: the value is copied out, not read through a wild
    pointer.
    """
    values = np.arange(6, dtype=np.float32)
    text = json.dumps({"b": entry("U8", [3], 0, 3), "w": entry("F32", [2, 3], 3, 27)})
    path = raw_file(tmp_path / "odd.safetensors", text + " " * (1 - len(text) % 2), b"abc" + values.tobytes())
    got = hb.open(path)["w"]
    assert got.flags.aligned
    assert not got.flags.writeable
    assert np.array_equal(got, values.reshape(2, 3))


def bombs(path: Path) -> list[Path]:
    """Files and folders made to cost time or memory."""
    small = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    config = {"model_type": "x"}
    weights = {"model.safetensors": under("a", mlx_weight(2, 32))}
    deep = folder(path / "deep", weights, config)
    (deep / "config.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    wide = folder(path / "wide", weights, config)
    (wide / "config.json").write_text('{"a":[' + "[]," * 4_000_000 + "[]]}")
    long_config = folder(path / "long", weights, config)
    (long_config / "config.json").write_bytes(b" " * (100 << 20))
    index = folder(path / "index", weights, config)
    (index / "model.safetensors.index.json").write_text('{"weight_map":{"a":' + "[" * 10_000_000 + "}}")
    return [
        raw_file(path / "quotes.safetensors", b'{"__metadata__":{"a":"' + b'\\"' * 20_000_000 + b'"}}'),
        raw_file(path / "metadata.safetensors", b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(900_000)) + b"}}"),
        raw_file(path / "lists.safetensors", b'{"a":' + b"[]," * 13_000_000 + b"}"),
        raw_file(path / "name.safetensors", b'{"' + b"\\\\" * 20_000_000 + b'":1}'),
        raw_file(path / "spaces.safetensors", b'{"a"' + b" " * 99_000_000 + b":1}"),
        raw_file(path / "padding.safetensors", b"{}" + b" " * 99_000_000),
        raw_file(path / "tensors.safetensors", "{" + ",".join(f'"t{i}":{small}' for i in range(500_000)) + "}"),
        raw_file(path / "last.safetensors", "{" + ",".join(f'"{"t" * 240}{i}":{small}' for i in range(MAX_TENSORS - 1)) + "}",
         b"x"),
        deep, wide, long_config, index,
    ]  # fmt: skip


def test_bombs_cost_a_second_and_200_megabytes_at_most(tmp_path: Path, request: pytest.FixtureRequest):
    assert MAX_METADATA < MAX_HEADER  # or the first two would be ordinary files
    paths = bombs(tmp_path)
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))  # half a gigabyte
    script = Path(__file__).parents[1] / "support" / "opening_cost.py"
    done = subprocess.run([sys.executable, script, *map(str, paths)], capture_output=True, text=True, check=True)
    costs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(costs) == len(paths), done.stderr
    for cost in costs:
        if not cost["path"].endswith("padding.safetensors"):  # legal, and empty
            assert cost["error"].startswith("CheckpointError"), cost
            assert cost["path"] in cost["error"]
        assert cost["peak_mb"] < 200, cost
        assert cost["seconds"] < 1, cost  # of this process: the suite's workers share the machine


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[]", "holds a JSON array; an object"),
        ('"gptq"', "holds a JSON string"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ('{"a": NaN, "a": 1}', "key 'a' is given twice"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4, "bits": 8, "group_size": 32}}',
         "key 'bits' is given twice"),
        ('{"quantization_config": "gptq"}', "quantization_config is 'gptq'; wanted an object"),
        ('{"quantization_config": [4, 32]}', "quantization_config is [4, 32]; wanted an object"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": "4", "group_size": 32}}',
         "bits is '4'; wanted a whole number of bits"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4.5, "group_size": 32}}',
         "bits is 4.5; wanted a whole number of bits"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": true, "group_size": 32}}',
         "bits is True; wanted a whole number"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 0, "group_size": 32}}',
         "bits is 0; wanted a whole number of bits, 1 to 32"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}}',
         "group_size is 0; wanted a whole group size"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -7}}', "group_size is -7; wanted"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": [32]}}', "group_size is [32]; wanted"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": [1]}}',
         "dynamic is [1]; wanted an object"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:(": {}}}}',
         "is not a regular expression"),
        ('{"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": 3}}',
         "modules_to_not_convert is 3"),
        ('{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": "Linear"}}}}',
         "has targets 'Linear'"),
        (
            '{"quantization_config": {"config_groups": {"g": {"targets": ["Linear"], "weights": 4}}}}',
            "has weights 4",
        ),
        ('{"quantization_config": {"quant_method": "modelopt", "quantized_layers": {"a": 4}}}', "quantized_layers is"),
        ('{"quantization_config": {"quant_method": "hqq", "quant_config": {"weight_quant_params": 4}}}',
         "'weight_quant_params' is 4"),
        ('{"quantization_config": {"quant_method": "nonesuch"}}', "quant_method 'nonesuch' is not read; read: gptq"),
        ('{"quantization_config": {"something": 1}}', "its producer cannot be recognised"),
    ],
)  # fmt: skip
def test_damaged_config_is_refused_naming_the_file(config: str, says: str, tmp_path: Path):
    path = folder(tmp_path / "model", {"model.safetensors": under("a", gptq_weight())})
    (path / "config.json").write_text(config)
    with pytest.raises(CheckpointError) as caught:
        [hb.open(path)[key] for key in hb.open(path)]
    assert "config.json" in str(caught.value)
    assert says in str(caught.value)


def test_config_of_bad_utf8_is_refused(tmp_path: Path):
    path = folder(tmp_path / "model", {"model.safetensors": under("a", gptq_weight())})
    (path / "config.json").write_bytes(b'{"name": "\xff\xfe"}')
    with pytest.raises(CheckpointError, match=r"config\.json: byte 10 is not UTF-8"):
        hb.open(path)


@pytest.mark.parametrize("missing", ["qzeros", "scales"])
def test_a_missing_part_is_refused_naming_the_tensor(missing: str, tmp_path: Path):
    tensors = under("model.layers.0.mlp.down_proj", gptq_weight())
    del tensors[f"model.layers.0.mlp.down_proj.{missing}"]
    path = folder(
        tmp_path / "model",
        {"model.safetensors": tensors},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*model\.layers\.0\.mlp\.down_proj") as caught:
        hb.open(path)["model.layers.0.mlp.down_proj"]
    assert missing in str(caught.value)


def test_a_part_of_the_wrong_shape_is_refused_naming_file_and_tensor(tmp_path: Path):
    tensors = under("x.down_proj", gptq_weight())
    tensors["x.down_proj.qzeros"] = tensors["x.down_proj.qzeros"][:1]
    path = folder(
        tmp_path / "model",
        {"model.safetensors": tensors},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    )
    checkpoint = hb.open(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*x\.down_proj\.qzeros has shape \[1, 2\]; wanted \[2, \*\]"):
        checkpoint["x.down_proj"]
    assert [f.code for f in checkpoint.findings() if f.severity == "error"] == ["unreadable"]
    assert checkpoint.info("x.down_proj").format is None


@pytest.mark.parametrize(
    "state",
    [b"{", b"[]", b"\xff", b'{"quant_type":"nf4","blocksize":0,"dtype":"bfloat16","shape":[2,64]}',
     b'{"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":"ab"}', b'{"quant_type":7,"blocksize":64,"shape":[2,64]}',
     b'{"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[-2,-64]}', b"[" * 50_000],
)  # fmt: skip
def test_nonsense_inside_a_tensor_is_refused_naming_file_and_module(state: bytes, tmp_path: Path):
    tensors = {
        "m.weight": np.zeros((64, 1), np.uint8), "m.weight.absmax": np.ones(2, np.float32), "m.weight.quant_map": np.ones(16,
         np.float32),
        "m.weight.quant_state.bitsandbytes__nf4": np.frombuffer(state, np.uint8),
    }  # fmt: skip
    path = write(tmp_path / "bnb.safetensors", tensors)
    checkpoint = hb.open(path, config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(CheckpointError, match=r"bnb\.safetensors.*\bm\b"):
        checkpoint["m"]


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"quant_method": "exl2", "bits": 4.65}, {"a.q_weight": np.zeros((2, 2), np.int32)}, "EXL2"),
        (None, {"a.q_weight": np.zeros((2, 2), np.int32), "a.q_scale": np.zeros(2, np.int32), "a.q_groups": np.zeros(2,
         np.int16)}, "EXL2"),
        ({"quant_method": "aqlm"}, {"a.codes": np.zeros((2, 2), np.int8)}, "AQLM"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin", "bits": 4}, {"a.B": np.zeros((2, 2), np.int32),
         "a.s": np.zeros((1, 2), np.float16)},
         "Marlin"),
    ],
)  # fmt: skip
def test_recognised_kinds_are_refused_by_name(config: dict | None, tensors: dict, says: str, tmp_path: Path):
    path = folder(tmp_path / "model", {"model.safetensors": tensors}, {"quantization_config": config} if config else None)
    with pytest.raises(UnsupportedError, match=says):
        hb.open(path)
