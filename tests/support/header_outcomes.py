"""What is made of headers of safetensors and GGUF files of which one byte or one number is another.

    python -m support.header_outcomes             # in tests/: write data/header_outcomes.txt anew
    python -m support.header_outcomes gguf        # print each change of a file and its outcome

The outcome is all that the header says, or the sentence of the refusal; what Python says of broken
JSON is left out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import halfbyte as hb
from halfbyte.checkpoints.safetensors.header import DTYPE_BITS, header_length, parse_header
from halfbyte.errors import HalfbyteError
from halfbyte.tensor.qtensor import QTensor
from support.gguf_writer import GGUF, MXFP4, Q4_0, Q4_K, Q8_0, blocks, f32
from support.outcome_table import OutcomeTable
from support.outcomes import checksum

BYTES = b' \t"\\09-.,:[]{}aF_\x00\x1f\x7f\x80\xff'
"""What takes the place of each byte of a text."""

F16 = '{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}'
TEXTS = {
    "compact": '{"a":' + F16 + ',"b":{"dtype":"U8","shape":[],"data_offsets":[12,13]}}',
    "spaced": '{ "a" : { "dtype" : "F4" , "shape" : [ 3 , 8 ] , "data_offsets" : [ 0 , 12 ] } , "m\\u00e9" : '
    '{"shape":[1],"dtype":"BF16","data_offsets":[12,14]} } ',
    "metadata": '{"__metadata__":{"format":"pt","x y":"z"},"a":' + F16 + "}  ",
}  # fmt: skip
SIZES = {"compact": 13, "spaced": 14, "metadata": 12}
NUMBERS = ("0", "1", "2", "3", "8", "15", "16", "32767", "32768", "4294967296", "18446744073709551615", "-1", "1.0", "01")


def _said(work: Callable[[], object]) -> tuple[bool, str]:
    try:
        return True, repr(work())
    except HalfbyteError as error:
        return False, re.sub(r"(not JSON|not a JSON string).*", r"\1", str(error), flags=re.DOTALL)


Outcomes = Iterator[tuple[str, str, bool, str]]


def safetensors() -> Outcomes:
    """(subject, change, whether it was read, outcome) of each change of a header."""
    for label, text in TEXTS.items():
        data, size = text.encode(), SIZES[label]

        def parsed(data: bytes, size: int = size) -> tuple[bool, str]:
            return _said(lambda: parse_header(data, size, "FILE"))

        yield label, "nothing", *parsed(data)
        for at in range(len(data)):
            yield f"{label} without a byte", str(at), *parsed(data[:at] + data[at + 1 :])
            yield f"{label} with a byte twice", str(at), *parsed(data[: at + 1] + data[at:])
            for byte in BYTES:
                yield f"{label} with another byte", f"{at} {byte:#04x}", *parsed(data[:at] + bytes([byte]) + data[at + 1 :])
        for more in (-13, -1, 1):
            yield f"{label} and {more} bytes of data", "", *parsed(data, size + more)
    for dtype in (*DTYPE_BITS, "F8", "f16", ""):
        for shape in (
            (),
            (0,),
            (1,),
            (2,),
            (3,),
            (2, 3),
            (1, 2, 3, 4),
            (1, 1, 1, 1, 2),
            (1 << 15, 0),
            (1 << 62, 0),
            (1 << 63, 2),
        ):
            for stop in (0, 1, 2, 3, 4, 6, 8, 16, 24, 48):
                header = f'{{"a":{{"dtype":"{dtype}","shape":{list(shape)},"data_offsets":[0,{stop}]}}}}'
                yield "dtypes and shapes", header, *_said(lambda h=header, s=stop: parse_header(h.encode(), s, "FILE"))
    for rank in (4, 5, 31, 32, 33):
        header = f'{{"a":{{"dtype":"U8","shape":{[1] * rank},"data_offsets":[0,1]}}}}'
        yield "axes", str(rank), *_said(lambda h=header: parse_header(h.encode(), 1, "FILE"))
    for first in NUMBERS:
        for second in NUMBERS:
            header = f'{{"a":{{"dtype":"U8","shape":[{first}],"data_offsets":[0,{second}]}}}}'
            size = int(second) if second.isdecimal() else 3
            yield "numbers", f"{first} {second}", *_said(lambda h=header, s=size: parse_header(h.encode(), s, "FILE"))
        header = f'{{"a":{{"dtype":"U8","shape":[3],"data_offsets":[{first},3]}}}}'
        yield "numbers", f"from {first}", *_said(lambda h=header: parse_header(h.encode(), 3, "FILE"))
    for width in (0, 1, 255, 256, 257, 300):
        names = {
            "name": f'{{"{"n" * width}":{F16}}}',
            "space": f'{{{" " * width}"a":{F16}}}',
            "end": f'{{"a":{F16}}}{" " * width}',
        }
        for where, header in names.items():
            yield "long texts", f"{where} {width}", *_said(lambda h=header: parse_header(h.encode(), 12, "FILE"))
    for length in (0, 1, 2, 3, 99, 100, 101, 100_000_000, 100_000_001, 1 << 40):
        for file_size in (0, 7, 8, 10, 108, 109, 100_000_008, 100_000_009):
            first = length.to_bytes(8, "little")[:file_size]
            yield "lengths", f"{length} {file_size}", *_said(lambda f=first, s=file_size: header_length(f, s, "FILE"))


def gguf_bytes() -> bytes:
    """A small file of every kind of value and some types of blocks."""
    rng = np.random.default_rng(0)
    pairs = [
        ("general.architecture", "string", "llama"), ("general.alignment", "uint32", 32), ("llama.block_count", "uint32", 1),
        ("a.uint8", "uint8", 200), ("a.int8", "int8", -3), ("a.uint16", "uint16", 40000), ("a.int16", "int16", -5),
        ("a.float32", "float32", 0.5), ("a.bool", "bool", True), ("a.uint64", "uint64", 1 << 40), ("a.int64", "int64", -9),
        ("a.float64", "float64", 0.25), ("a.words", "array[string]", ["x", "yz", ""]), ("a.numbers", "array[int32]", [1, -2, 3]),
    ]  # fmt: skip
    tensors = [f32("n.weight", np.ones((2, 3), np.float32)), blocks("q.weight", (2, 64), Q4_0, rng)]
    tensors += [
        blocks("r.weight", (2, 256), Q4_K, rng),
        blocks("s.weight", (2, 2, 32), MXFP4, rng),
        blocks("t", (1, 32), Q8_0, rng),
    ]
    return GGUF(pairs=pairs, tensors=tensors).bytes()


def gguf() -> Outcomes:
    """As `safetensors`, of a whole file."""
    whole = gguf_bytes()
    head = whole.index(b"t", whole.index(b"s.weight") + 30) + 40
    with TemporaryDirectory() as place:
        path = Path(place) / "a.gguf"

        def read() -> list[object]:
            with hb.open(path) as checkpoint, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pairs = {key: getattr(value, "tolist", lambda v=value: v)() for key, value in checkpoint.metadata.items()}
                out: list[object] = [pairs, *checkpoint.infos(), *map(str, checkpoint.header_findings())]
                for key in checkpoint:
                    w = checkpoint[key]
                    out.append(checksum(dict(w.parts) if isinstance(w, QTensor) else w))
                return out

        def opened(data: bytes) -> tuple[bool, str]:
            path.write_bytes(data)
            was_read, text = _said(read)
            return was_read, text.replace(str(path), "FILE").replace(str(path.resolve()), "FILE")

        yield "nothing", "", *opened(whole)
        for at in range(head):
            for byte in sorted({0, 1, 0xFF, whole[at] ^ 0x80, (whole[at] + 1) % 256, (whole[at] - 1) % 256} - {whole[at]}):
                yield f"bytes {at // 32 * 32}", f"{at} {byte:#04x}", *opened(whole[:at] + bytes([byte]) + whole[at + 1 :])
        for size in (0, 3, 4, 8, 23, 24, 100, head - 8, head, len(whole) - 33, len(whole) - 1):
            yield "cut", str(size), *opened(whole[:size])
        yield "more", "", *opened(whole + bytes(33))


FILES: dict[str, Callable[[], Outcomes]] = {"safetensors": safetensors, "gguf": gguf}


TABLE = OutcomeTable("header_outcomes", FILES, lambda kind: FILES[kind]())

if __name__ == "__main__":
    TABLE.main()
