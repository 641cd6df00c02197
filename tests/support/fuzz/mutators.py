"""Structure-aware mutations of the files of a checkpoint.

mutate(folder, rng)         one mutant of {name: bytes or `GGUF`}
"""

from __future__ import annotations

import copy
import json
import random
import struct
from dataclasses import replace
from typing import Any

from support.gguf_writer import GGUF, SCALARS, Tensor

Folder = dict[str, bytes | GGUF]
MODEL_TYPES = ("llama", "gpt2", "gemma4", "bert", "t5")
WORDS: list[Any] = [
    0, 1, -1, 2**31, 2**63, 2**64, 1e308, float("nan"), float("inf"), True, None, "", "x" * 300, "../x", "/etc/passwd", "\0",
    "\ud800", [], {}, [[]], {"": {}}, "F4", "F8_E4M3", "F8_E8M0", "I64", "F64", "BF16", "U8", "gptq", "awq", "mlx", "nvfp4",
    "int",
    1 << 200, -(2**53), [1] * 9, "model.safetensors", "é\u202e", "re:.*", "re:(a+)+$", "Linear", "int4", *MODEL_TYPES, 2,
    3, 4, 5,
    8, 16, 32, 64, 128, 256, 0.5, "0", "4", {"__float__": "Infinity"}, "ByteLevel", "BPE", "WordPiece",
    "{{ 1 }}", "org/repo--file.Class",
]  # fmt: skip
EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
FRAGMENTS = [
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m['role'] }}", "{% if add_generation_prompt %}",
    "{% endif %}",
    "{% for a in range(9999999) %}", "{% set ns = namespace(x='x') %}", "{% set ns.x = ns.x ~ ns.x %}", "{{ ns.x }}",
    "{% macro f(a) %}", "{{ f(f) }}", "{% endmacro %}", "{{ raise_exception('no') }}", "{{ messages[99].content }}",
    "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{% set x = 'a' * 100000 %}", "{{ x|replace('a', x) }}",
    "{{ messages|tojson }}", "{{ '%9999999d' % 1 }}", "{{ 9 ** 99999 }}", "{% include 'x' %}", "{% import 'os' as os %}",
    "{# ", " #}",
    "{{ tools|map(attribute='f.f')|list }}", "{{ '{:>9999999}'.format(1) }}", "{{ range(999999)|list|sort }}", "{%", "}}",
    "{{ -x }}",
    "{{ m|length / 0 }}", "{{ strftime_now('%Y') }}", "{{ lipsum(9999) }}", "{% generation %}", "{% endgeneration %}",
    "{% break %}",
]  # fmt: skip
"""Parts of chat templates, those that loop, grow or reach out among them."""


def mutate_json(value: Any, rng: random.Random) -> Any:
    """One change somewhere in a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind = rng.randrange(6)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {(str(rng.choice(WORDS)) if k == key else k): v for k, v in value.items()}
        if kind == 2:
            return {**value, str(rng.choice(WORDS)): rng.choice(list(value.values()))}
        return {**value, key: mutate_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        kind = rng.randrange(6)
        if kind == 0:
            return [*value[:at], *value[at + 1 :]]
        if kind == 1:
            return [*value[:at], value[at], *value[at:]]
        return [*value[:at], mutate_json(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return value + rng.choice([-1, 1, 8, -8, 1 << 20, -value, value])
    if isinstance(value, str) and value and rng.random() < 0.3:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(["", value[at] * 2, "\0", "\ud800", "..", "/", "*", "é"]) + value[at + 1 :]
    return rng.choice(WORDS)


def mutate_bytes(data: bytes, rng: random.Random, head: int = 1 << 30) -> bytes:
    """Bits flipped, a cut, a run removed, repeated or overwritten by an extreme number."""
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if not raw:
            break
        at, kind = rng.randrange(min(len(raw), head)), rng.randrange(5)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and rng.random() < 0.5:
            del raw[at:]
        elif kind == 2:
            del raw[at : at + rng.choice([1, 4, 8])]
        elif kind == 3:
            raw[at:at] = raw[at : at + rng.choice([1, 8, 64])]
        else:
            word = struct.pack("<Q", rng.choice([*EXTREMES, len(raw)]))
            raw[at : at + 8] = word[: rng.choice([1, 4, 8])]
    return bytes(raw)


def mutate_gguf(file: GGUF, rng: random.Random) -> GGUF | bytes:
    """A pair, a tensor's entry or a count of the header changed; or bytes of the file."""
    file = copy.copy(file)
    file.pairs, file.tensors = list(file.pairs), list(file.tensors)
    kind = rng.randrange(12)
    if kind < 5 and file.pairs:
        at = rng.randrange(len(file.pairs))
        key, word, value = file.pairs[at]
        if kind == 0:
            del file.pairs[at]
        elif kind == 1:
            file.pairs.insert(at, (rng.choice([key, str(rng.choice(WORDS))]), word, value))
        elif kind == 2:
            word = rng.choice([*SCALARS, "string", "array[int32]", "array[string]", "array[array[uint8]]"])
            value = rng.choice([0, 1, -1, 3]) if word in SCALARS else "x" if word == "string" else []
            file.pairs[at] = (key, word, value)
        else:
            file.pairs[at] = (key, word, mutate_json(value, rng))
    elif kind < 9 and file.tensors:
        at = rng.randrange(len(file.tensors))
        old = file.tensors[at]
        changes: list[Tensor] = [
            replace(
                old, dims=(*old.dims[:-1], rng.choice([*EXTREMES, *range(9), 32, 256])) if rng.random() < 0.7 else old.dims[::-1]
            ),
            replace(old, type=rng.choice([*range(45), 2**31, 2**32 - 1])),
            replace(old, offset=rng.choice([*EXTREMES, 32, 64, len(old.data)])),
            replace(old, name=str(mutate_json(old.name, rng))),
            replace(old, data=mutate_bytes(old.data, rng)),
            replace(old, n_dims=rng.choice([0, 1, 5, 2**31])),
        ]
        file.tensors[at] = rng.choice(changes)
        if rng.random() < 0.1:
            file.tensors.append(old)
    elif kind == 9:
        name = rng.choice(["tensor_count", "pair_count", "alignment", "version", "order", "tail"])
        setattr(
            file, name, ">" if name == "order" else rng.randbytes(9) if name == "tail" else rng.choice([*EXTREMES[:-1], 2, 3, 64])
        )
    elif raw := written(file):
        return mutate_bytes(raw, rng, rng.choice([64, 600, 1 << 30]))
    return file


def encoded(content: bytes | GGUF) -> bytes:
    """The bytes of a file."""
    return content if isinstance(content, bytes) else content.bytes()


def written(content: bytes | GGUF) -> bytes | None:
    """The bytes of a file, None for a header that no file can hold and for one whose alignment
    would pad it with more than a megabyte.
    """
    if isinstance(content, GGUF) and content.alignment > 1 << 20:
        return None
    try:
        return encoded(content)
    except (struct.error, OverflowError, MemoryError, TypeError, AttributeError, KeyError, ValueError):
        return None


def mutate_template(text: str, rng: random.Random) -> str:
    """Fragments put in, taken out or moved."""
    for _ in range(rng.choice([1, 2, 3, 8])):
        at = rng.randrange(len(text) + 1)
        if rng.random() < 0.6:
            text = text[:at] + rng.choice(FRAGMENTS) + text[at:]
        else:
            text = text[:at] + text[at + rng.choice([1, 8, 30]) :]
    return text


def mutate_file(name: str, data: bytes | GGUF, rng: random.Random) -> bytes | GGUF:
    """One file's mutant, by what its name says that it is."""
    if isinstance(data, GGUF):
        return mutate_gguf(data, rng)
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    if name.endswith(".jinja"):
        return mutate_template(data.decode("utf-8", "replace"), rng).encode("utf-8", "surrogatepass")
    if name.endswith(".json"):
        try:
            value = mutate_json(json.loads(data), rng)
            return json.dumps(value).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            return mutate_bytes(data, rng)
    if name.endswith(".safetensors") and len(data) > 8:
        length = min(int.from_bytes(data[:8], "little"), len(data) - 8)
        body = data[8 + length :]
        if rng.random() < 0.15:  # other values, which both decoders must give
            return data[: 8 + length] + mutate_bytes(body, rng)[: len(body)].ljust(len(body), b"\0")
        try:
            value = json.loads(data[8 : 8 + length])
            value = swap_entries(value, rng) if rng.random() < 0.2 else mutate_json(value, rng)
        except (ValueError, RecursionError):
            return mutate_bytes(data, rng, 8 + length)
        head = json.dumps(value).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(head)) + head + body
    return mutate_bytes(data, rng, 600)


def swap_entries(header: Any, rng: random.Random) -> Any:
    """Two tensors of a header exchange a field, or one is renamed with its dtype kept: headers that
    are whole.
    """
    names = [n for n, v in header.items() if n != "__metadata__" and isinstance(v, dict)] if isinstance(header, dict) else []
    if len(names) < 2:
        return mutate_json(header, rng)
    a, b = rng.sample(names, 2)
    field = rng.choice(["dtype", "shape", "data_offsets", ""])
    if not field:
        return {{a: b, b: a}.get(n, n): v for n, v in header.items()}
    return {**header, a: {**header[a], field: header[b].get(field)}, b: {**header[b], field: header[a].get(field)}}


def mutate(folder: Folder, rng: random.Random) -> Folder:
    """A mutant of a checkpoint; now and then of several of its files."""
    out = dict(folder)
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        name = rng.choice(list(out))
        out[name] = mutate_file(name, out[name], rng)
    return out
