"""Headers of safetensors at the edge of what is read, however they are spelled."""

from __future__ import annotations

import json

import pytest

from halfbyte.checkpoints.safetensors import header as headers
from halfbyte.checkpoints.safetensors.header import DTYPE_BITS, Entry, header_length, parse_header
from halfbyte.errors import CheckpointError

GIB = 1 << 30
FIELDS = {"dtype": '"U8"', "shape": "[4]", "data_offsets": "[0,4]"}
SPELLINGS = {
    "plain": lambda f: "{" + ",".join(f'"{k}":{v}' for k, v in f.items()) + "}",
    "in another order": lambda f: "{" + ",".join(f'"{k}":{f[k]}' for k in reversed(f)) + "}",
    "spaced": lambda f: " { " + "\t, ".join(f'\n"{k}" : {v}' for k, v in f.items()) + "\r }",
}
"""The first and the last are read at once, the second as JSON."""


def of(*entries: str) -> bytes:
    return ("{" + ",".join(entries) + "}").encode()


def one(name: str = "w", spelling: str = "plain", **fields: str) -> str:
    return f'"{name}":' + SPELLINGS[spelling](FIELDS | fields)


def refused(text: bytes, size: int, says: str) -> None:
    with pytest.raises(CheckpointError, match=r"^\[open\] here: " + says):
        parse_header(text, size, "here")


def test_the_limits_are_those_that_their_reasons_name():
    assert (headers.MAX_HEADER, headers.MAX_TENSORS, headers.MAX_RANK) == (100_000_000, 100_000, 32)
    assert (headers.MAX_NAME, headers.MAX_ENTRY) == (256, 4096)
    assert (headers.MAX_METADATA, headers.MAX_PAIRS) == (16_777_216, 65_536)


@pytest.mark.parametrize("length", [2, 3, 500, 100_000_000])
def test_a_length_that_the_file_holds_is_taken(length):
    first = length.to_bytes(8, "little")
    assert header_length(first, length + 8, "here") == header_length(first, GIB, "here") == length
    with pytest.raises(CheckpointError, match=rf"here: header length {length:,}, but {length - 1:,} bytes follow; .* cut short"):
        header_length(first, length + 7, "here")


@pytest.mark.parametrize(("length", "says"), [(0, "the shortest header is {}"), (1, "the shortest header is {}"),
                                              (100_000_001, "the format allows 100,000,000")])  # fmt: skip
def test_lengths_of_no_header(length, says):
    with pytest.raises(CheckpointError, match=rf"\[open\] here: header length {length:,}; {says}"):
        header_length(length.to_bytes(8, "little"), GIB, "here")


def test_a_beginning_of_letters_is_told_as_text():
    for byte in range(256):
        text = byte in b"\t\n\r" or 32 <= byte < 127
        with pytest.raises(
            CheckpointError, match="begins with the text" if text else "the format allows|of header length|shortest"
        ):
            header_length(bytes([byte]) * 8, GIB, "here")
        for at in range(8):  # one byte that is none makes a number of it
            first = bytearray(b"aaaaaaaa")
            first[at] = byte
            with pytest.raises(CheckpointError, match="begins with the text" if text else "the format allows"):
                header_length(bytes(first), GIB, "here")
    with pytest.raises(CheckpointError, match="7 bytes; a safetensors file begins with 8 bytes"):
        header_length(b"\0" * 7, 7, "here")
    with pytest.raises(CheckpointError, match="the file is empty"):
        header_length(b"", 0, "here")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["w", "é" * 128, "x" * 256, r"a\"b", r"a\\", r"\u00e9\/", "__metadata__ "])
def test_every_spelling_of_an_entry_is_read(name, spelling):
    for before in ([], ['"__metadata__":{"format":"pt"}'], [one("v", spelling, shape="[2,0]", data_offsets="[0,0]")]):
        found = parse_header(of(*before, one(name, spelling)) + b" \n" * 300, 4, "here")
        assert list(found.entries)[-1] == json.loads(f'"{name}"')
        assert found.entries[json.loads(f'"{name}"')] == Entry("U8", (4,), 0, 4)
        assert len(found.entries) == 1 + ("U8" in str(before))


@pytest.mark.parametrize("name", ["x" * 257, "é" * 128 + "x"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_name_of_more_than_256_bytes_is_refused(name, spelling):
    refused(of(one(name, spelling)), 4, "a name in the header is over 256 bytes or has no closing quote, at byte 1;")


@pytest.mark.parametrize("space", [" ", "\t", "\n", "\r", " \t\r\n"])
def test_white_space_between_tokens_is_of_at_most_256_bytes(space):
    tokens = ["{", '"w"', ":", "{", '"dtype"', ":", '"U8"', ",", '"shape"', ":", "[4]", ",", '"data_offsets"', ":", "[", "0", ",",
              "4", "]", "}", "}"]  # fmt: skip
    whole = space * (256 // len(space))
    for at in range(1, len(tokens)):
        text = "".join(tokens[:at]) + whole + "".join(tokens[at:])
        assert parse_header(text.encode(), 4, "here").entries == {"w": Entry("U8", (4,), 0, 4)}, at
        if at in (2, 3, 20):  # between those of an entry an object of 4,096 bytes has room
            with pytest.raises(CheckpointError):
                parse_header(("".join(tokens[:at]) + whole + space + "".join(tokens[at:])).encode(), 4, "here")


def test_an_entry_is_of_at_most_4096_bytes():
    bare = len('"dtype":"U8","shape":[4],"data_offsets":[0,4]')
    for spelling in ("plain", "in another order"):
        for room, well in ((4096, True), (4097, False)):
            text = of(one("w", spelling)).replace(b"[4]", b"[4]" + b" " * (room - bare))
            if well:
                assert parse_header(text, 4, "here").entries == {"w": Entry("U8", (4,), 0, 4)}
            else:
                refused(text, 4, "tensor 'w': its entry is not an object of dtype, shape and data_offsets")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_the_bytes_of_a_shape_are_its_bits_over_8(dtype, spelling):
    for shape in ([], [0], [8], [3, 8], [1, 2, 3, 4], [1, 2, 1, 4, 1], [8] + [1] * 31, [40000], [40000, 0]):
        count = 1
        for axis in shape:
            count *= axis
        nbytes, odd = divmod(count * DTYPE_BITS[dtype], 8)
        fields = {"dtype": f'"{dtype}"', "shape": str(shape)}
        for more in (-1, 0, 1):
            text = of(one("w", spelling, **fields, data_offsets=f"[0,{max(nbytes + more, 0)}]"))
            if odd:
                refused(text, max(nbytes + more, 0), rf"tensor 'w': .* is {count * DTYPE_BITS[dtype]} bits, not whole bytes")
            elif max(nbytes + more, 0) == nbytes:
                assert parse_header(text, nbytes, "here").entries == {"w": Entry(dtype, tuple(shape), 0, nbytes)}
            else:
                refused(
                    text,
                    nbytes + more,
                    rf"tensor 'w': shape .* of {dtype} takes {nbytes:,} bytes; data_offsets .* span {nbytes + more:,}",
                )


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [([1] * 33, "U8", "rank 33; read up to 32"), ([1 << 63], "U8", "over 2\\^63 bytes"),
     ([1 << 62, 0, 2], "U8", "over 2\\^63 bytes"),
     ([1 << 60, 0], "I64", "over 2\\^63 bytes"), ([1 << 22, 1 << 21, 1 << 20, 0], "U8", "over 2\\^63 bytes"),
     ([1 << 13, 1 << 12, 1 << 12, 1 << 12, 1 << 14, 0], "U8", "over 2\\^63 bytes"),
     ([4], "U9", "dtype 'U9'; known: BOOL, U8, I8")],
)  # fmt: skip
def test_shapes_that_no_array_can_have(shape, dtype, says, spelling):
    refused(of(one("w", spelling, dtype=f'"{dtype}"', shape=str(shape), data_offsets="[0,0]")), 0, rf"tensor 'w': .*{says}")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("shape", "dtype"), [([(1 << 63) - 1, 0], "U8"), ([1 << 62, 0, 1], "U8"), ([(1 << 60) - 1, 0], "I64"),
                                              ([1 << 15, 1 << 15, 1 << 15, 0], "F64"),
                                              ([0, 32767, 32767, 32767], "U8")])  # fmt: skip
def test_empty_tensors_have_axes_up_to_2_to_the_63_bytes(shape, dtype, spelling):
    text = of(one("w", spelling, dtype=f'"{dtype}"', shape=str(shape), data_offsets="[0,0]"))
    assert parse_header(text, 0, "here").entries == {"w": Entry(dtype, tuple(shape), 0, 0)}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("fields", "says"),
    [({"shape": "[04]"}, "tensor 'w': its entry is not JSON"), ({"data_offsets": "[0,04]"}, "tensor 'w': its entry is not JSON"),
     ({"data_offsets": "[4,0]"}, r"tensor 'w': data_offsets \[4, 0\] run backwards"),
     ({"data_offsets": "[0]"}, "tensor 'w': .*wanted .start"),
     ({"data_offsets": "[0,4,8]"}, "tensor 'w': .*wanted .start"), ({"shape": "[4.0]"}, "tensor 'w': shape .4.0.; wanted a list"),
     ({"shape": "[-4]"}, "tensor 'w': shape .-4.; wanted a list"),
     ({"shape": "[true]"}, "tensor 'w': shape .True.; wanted a list"),
     ({"dtype": "8"}, "tensor 'w': dtype 8; a dtype is a word"), ({"shape": "[1 2]"}, "tensor 'w': its entry is not JSON"),
     ({"shape": "[,4]"}, "tensor 'w': its entry is not JSON"), ({"data_offsets": "[-1,3]"}, "tensor 'w': .*at least 0")],
)  # fmt: skip
def test_entries_that_are_none(fields, says, spelling):
    refused(of(one("w", spelling, **fields)), 4, says)


def test_tensors_cover_the_data_whatever_their_order():
    a, b, c = (one(n, shape=f"[{s - r}]", data_offsets=f"[{r},{s}]") for n, r, s in (("a", 0, 4), ("b", 4, 4), ("c", 4, 9)))
    for order in ((a, b, c), (c, a, b), (b, c, a)):
        assert set(parse_header(of(*order), 9, "here").entries) == {"a", "b", "c"}
        refused(of(*order), 10, r"the tensors end at byte 9 of the data \(the last is 'c'\), but the file holds 10")
        refused(of(*order), 8, "tensor 'c' lies at bytes 4 to 9 of the data, but the file holds 8")
    refused(of(c), 9, "tensor 'c' begins at byte 4 and leaves 4 bytes unused after 'the header', which ends at 0")
    over = one("d", shape="[2]", data_offsets="[3,5]")
    refused(of(a, over), 5, "tensor 'd' begins at byte 3 and overlaps 'a', which ends at 4")
    gap = one("d", shape="[2]", data_offsets="[5,7]")
    refused(of(a, gap), 7, "tensor 'd' begins at byte 5 and leaves 1 bytes unused after 'a', which ends at 4")
    assert parse_header(b"{}", 0, "here").entries == {}
    refused(b"{}", 1, r"the tensors end at byte 0 of the data \(the last is ''\), but the file holds 1")


def test_a_header_ends_with_its_brace_and_the_data_begins_behind_it():
    for text in (
        b"{}",
        b"{ }",
        of(one()),
        of(one()) + b" " * 1000 + b"\n\t\r",
        b'{"__metadata__":{}}',
        b'{ "__metadata__" : { } }',
    ):
        assert parse_header(text, 4 * (b"w" in text), "here").data_start == len(text) + 8
    for text, more in (
        (b"{}", b"x"),
        (of(one()), b"  x"),
        (b'{"__metadata__":{}}', b"}"),
        (b'{"__metadata__":{"a":"b"}}', b" ,"),
    ):
        refused(text + more, 4, f"header has more text after its closing brace, at byte {len(text)}; allowed: spaces")
    for text in (b"", b"[]", b" {}", b"x"):
        refused(text, 0, r"header begins with b'.*'; a safetensors header is a JSON object")


@pytest.mark.parametrize(
    "pairs", [{}, {"a": "b"}, {"format": "pt", "ü": "", "": "x"}, {'q"': "\\", "b\\": 'c"'}, {"n": "\n\t\u0001", "s": '\\\\"'}]
)
@pytest.mark.parametrize("indent", [None, 0, 3])
@pytest.mark.parametrize("place", ["first", "last", "alone", "between"])
def test_metadata_is_read_as_json_reads_it(pairs, indent, place):
    for ascii_only in (True, False):
        text = '"__metadata__":' + json.dumps(pairs, indent=indent, ensure_ascii=ascii_only)
        empty = one("v", shape="[0]", data_offsets="[0,0]")
        entries = {"first": [text, one()], "last": [one(), text], "alone": [text], "between": [empty, text, one()]}[place]
        found = parse_header(of(*entries), 4 * (place != "alone"), "here")
        assert found.metadata == pairs
        assert set(found.entries) == {"first": {"w"}, "last": {"w"}, "alone": set(), "between": {"v", "w"}}[place]


@pytest.mark.parametrize("text", ['{"a":1}', '{"a":"b",}', '{"a" "b"}', '{"a":"b"', '{"a"}', "[]", '"a"', "{,}", "{1:2}"])
def test_metadata_that_is_no_object_of_strings_is_refused(text):
    refused(
        f'{{"__metadata__":{text},"w":'.encode(),
        4,
        "(__metadata__ is not an object of strings|header is not JSON after __metadata__)",
    )


def test_metadata_is_of_at_most_65536_keys_and_16_mib():
    def keys(count: int) -> bytes:
        return ('{"__metadata__":{' + ",".join(f'"{i:x}":""' for i in range(count)) + "}}").encode()

    assert len(parse_header(keys(65_536), 0, "here").metadata) == 65_536
    refused(keys(65_537), 0, "__metadata__: it has too many keys; allowed: 65,536")
    refused(b'{"__metadata__":{"a":"b","a":"b"}}', 0, "__metadata__: key 'a' is given twice; allowed: each key once")
    room = 16_777_216 - len('"a":""}')
    whole = b'{"__metadata__":{"a":"' + b"x" * room
    assert len(parse_header(whole + b'"}}', 0, "here").metadata["a"]) == room
    refused(whole + b'x"}}', 0, "__metadata__ is not an object of strings of at most 16,777,216 bytes, at byte 17 of the header")


@pytest.mark.parametrize("name", [r"a\u001b", r"a\n", "a\u200b", "a\u2028", "\x7f"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_are_of_printable_characters(name, spelling):
    refused(of(one(name, spelling)), 4, "tensor '.*': its name holds control characters; allowed: names of printable characters")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_name_is_given_once(spelling):
    refused(of(one("w"), one("w", spelling)), 4, "tensor 'w' is given twice in the header; allowed: each name once")
    refused(of(one("w", spelling), one(r"\u0077")), 4, "tensor 'w' is given twice in the header; allowed: each name once")
    refused(b'{"__metadata__":{},"__metadata__":{}}', 0, "__metadata__ is given twice in the header; allowed: once")
