"""JSON files under limits: what is read at a bound and refused beyond it, and what is said."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from halfbyte.checkpoints.io import bounded_json
from halfbyte.checkpoints.io.bounded_json import (
    CONFIG_BYTES,
    INDEX_BYTES,
    MAX_TOKEN_ID,
    MAX_VALUES,
    TOKENIZER_BYTES,
    check_plain_files,
    check_token_ids,
    decoded_floats,
    parse_object,
    read_json,
)
from halfbyte.errors import CheckpointError

MIB = 1 << 20


def test_the_limits_are_those_that_their_reasons_name():
    assert (CONFIG_BYTES, INDEX_BYTES, TOKENIZER_BYTES) == (16 * MIB, 48 * MIB, 256 * MIB)
    assert (MAX_VALUES, MAX_TOKEN_ID) == (1_048_576, 9_999_999)


def test_a_file_as_large_as_its_limit_is_read_and_one_byte_more_is_not(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path) == read_json(path, 8) == {"a": 1}
    with pytest.raises(CheckpointError, match=r"config\.json: 8 bytes; a file of this kind is read up to 7$"):
        read_json(path, 7)
    os.truncate(path, 16 * MIB + 1)
    with pytest.raises(CheckpointError, match=r"16,777,217 bytes; a file of this kind is read up to 16,777,216"):
        read_json(path)


def test_as_many_values_as_the_limit_are_read_and_one_more_is_not():
    def text(values: int) -> bytes:
        return b'{"a":[' + b"0," * (values - 2) + b"0]}"  # an object, a list, and a comma a value

    assert len(parse_object(text(MAX_VALUES), "x")["a"]) == MAX_VALUES - 1
    with pytest.raises(CheckpointError, match=r"about 1,048,577 JSON values; read up to 1,048,576"):
        parse_object(text(MAX_VALUES + 1), "x")
    for more in (b"[", b"{"):
        with pytest.raises(CheckpointError, match="about 1,048,577 JSON values"):
            parse_object(text(MAX_VALUES) + more, "x")


@pytest.mark.parametrize(
    ("text", "says"),
    [("[1]", "holds a JSON array"), ('"a"', "holds a JSON string"), ("true", "holds a JSON boolean"),
     ("1", "holds a JSON number"),
     ("1.5", "holds a JSON number"), ("null", "holds a JSON null"), ("{", "not JSON"), ("[" * 100_000, "nested too deeply"),
     ('{"b": 1, "a": 1, "a": 2}', "key 'a' is given twice"), ('{"c": {"b": 0, "b": 0}}', "key 'b' is given twice"),
     (b'{"a": "\xff"}', r"byte 7 is not UTF-8 \(invalid start byte\)")],
)  # fmt: skip
def test_what_is_no_object_is_told_as_what_it_is(text, says):
    with pytest.raises(CheckpointError, match=rf"\[open\] here: .*{says}"):
        parse_object(text if isinstance(text, bytes) else text.encode(), "here")


def test_one_key_in_several_objects_and_a_byte_order_mark_are_allowed():
    assert parse_object('\ufeff{"a": {"a": [{"a": 1}, {"a": "ü"}]}}'.encode(), "x") == {"a": {"a": [{"a": 1}, {"a": "ü"}]}}


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "a.model", "additional_chat_templates/b.jinja", "v.txt", "v.tiktoken", "m.bpe"]
)
def test_a_file_that_a_library_opens_is_of_at_most_256_mib(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, TOKENIZER_BYTES)
    check_plain_files(tmp_path, "load")
    os.truncate(path, TOKENIZER_BYTES + 1)
    with pytest.raises(CheckpointError, match=rf"\[load\] .*{path.name}: 268,435,457 bytes; .* up to 268,435,456"):
        check_plain_files(tmp_path, "load")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are Unix's")
def test_only_plain_files_lie_where_a_library_opens_them(tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.safetensors")  # is opened by this program alone
    check_plain_files(tmp_path, "load")
    os.mkfifo(tmp_path / "vocab.json")
    with pytest.raises(CheckpointError, match=r"\[load\] .*vocab\.json: cannot be read: it is a pipe, a device or a socket"):
        check_plain_files(tmp_path, "load")


PLACES = {
    "vocabulary": lambda index: {"a": index},
    "model": lambda index: {"model": {"vocab": {"b": 1, "a": index}}, "added_tokens": []},
    "added": lambda index: {"model": None, "added_tokens": [{"id": 1, "content": "b"}, {"id": index, "content": "a"}, 5]},
}


@pytest.mark.parametrize("place", PLACES)
def test_the_largest_id_of_a_token_is_allowed_and_the_next_is_not(place, tmp_path):
    path = tmp_path / "tokenizer.json"
    for index in (5, 9_999_999, "10000000", 1e7):
        path.write_text(json.dumps(PLACES[place](index) | {"x": 12345678.5}))
        check_token_ids(path, "load")
    for index in (10_000_000, 1 << 40):
        path.write_text(json.dumps(PLACES[place](index)))
        with pytest.raises(CheckpointError, match=rf"\[load\] .*: token 'a' has id {index}; ids up to 9,999,999 are allowed"):
            check_token_ids(path, "load")


@pytest.mark.parametrize(
    "text", ["[10000000]", '{"model": [], "added_tokens": {"id": 10000000}}', '{"a": 10000000', "[" * 99_999 + ":10000000"]
)
def test_what_is_no_vocabulary_is_left_to_the_library(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    check_token_ids(tmp_path / "tokenizer.json", "load")


def test_a_tokenizer_as_large_as_the_limit_is_looked_through(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"a": 5}')
    monkeypatch.setattr(bounded_json, "TOKENIZER_BYTES", 8)
    check_token_ids(path, "load")
    path.write_text('{"a": 5 }')
    with pytest.raises(CheckpointError, match="more than 8 bytes; no tokenizer is that large"):
        check_token_ids(path, "load")
    with pytest.raises(CheckpointError, match=r"\[load\] .*missing\.json: cannot be read: No such file"):
        check_token_ids(tmp_path / "missing.json", "load")


def test_floats_that_transformers_encodes():
    encoded = {"a": [{"__float__": "Infinity"}, {"__float__": "-Infinity"}], "b": {"c": {"__float__": "NaN"}, "d": 1.5}}
    decoded = decoded_floats(encoded)
    assert decoded["a"] == [math.inf, -math.inf]
    assert math.isnan(decoded["b"]["c"])
    assert decoded["b"]["d"] == 1.5
    for other in ({"__float__": "1.0"}, {"__float__": "Infinity", "x": 1}, {"float": "NaN"}, "NaN", None):
        assert decoded_floats(other) == other
