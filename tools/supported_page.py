"""Write docs/reference/supported.md: layouts, formats and models, from the library's own tables and
the list of models that the tests load.

python tools/supported_page.py
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

from halfbyte.formats import codec_names, format_named
from halfbyte.gguf_models.architectures import ARCHITECTURES
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.unsupported import RECOGNISED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "supported.md"
HEAD = """# Supported models and formats

Written by `tools/supported_page.py` from the library's own tables.

"""
LAYOUTS_TEXT = (
    "A layout is how a producer stores a packed weight. All of these are read; written means by `convert` and `quantize`."
)
FORMATS_TEXT = "Codec names as options take them. Groups are the default; `:gN` gives another where the format allows it."
MODELS_TEXT = (
    "`load_model` and `dequantize` give transformers' logits for these values of `model_type` in a generated test over every "
    "causal language model of transformers 5.24 (`tests/conversion/test_dense_models.py`). A layer whose product transformers "
    "computes in a way of its own is decoded as it is read, and its values are the same."
)
NOT_MODELS_TEXT = "Not among them, of the same classes:"
GGUF_TEXT = (
    "Files of these values of `general.architecture` run; [the list](../gguf-models.md) has their vocabularies, and what cannot "
    "be run."
)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def tested(name: str) -> Any:
    """A list or table of tests/support/many_architectures.py, which is not imported: it needs
    torch.
    """
    source = ast.parse((ROOT / "tests" / "support" / "many_architectures.py").read_text("utf-8"))
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise ValueError(f"tests/support/many_architectures.py has no {name}")


def not_models() -> list[tuple[str, ...]]:
    """model_type, what happens."""
    refused = {kind: f"refused: `{sentence}`" for kind, sentence in tested("REFUSED").items()}
    return [(f"`{kind}`", why) for kind, why in sorted((refused | tested("NOT_COMPARED")).items())]


def layouts() -> list[tuple[str, ...]]:
    """name, `convert --to` writes it, whose arithmetic `arithmetic="producer"` reproduces."""
    rows = []
    for name, layout in LAYOUTS.items():
        written = "yes" if layout.writes_checkpoints or layout.container == "gguf" else ""
        rows.append((f"`{name}`", written, ", ".join(layout.producers)))
    return rows


def formats() -> list[tuple[str, ...]]:
    """codec, bits of a code, bits a weight with scales, elements, group."""
    rows = []
    for name in codec_names():
        fmt = format_named(name)
        group = "row" if fmt.group_size == -1 else str(fmt.group_size or "")
        rows.append((f"`{name}`", str(fmt.bits), f"`{fmt.element}`", group))
    return rows


def page() -> str:
    """The whole page."""
    refused = [(r.name, r.what, r.use) for r in RECOGNISED]
    parts = [
        "## Layouts", LAYOUTS_TEXT, table(("layout", "written", "producer's arithmetic"), layouts()),
        "## Formats", FORMATS_TEXT, table(("codec", "bits of a code", "element", "group"), formats()),
        "## Recognised, not read", table(("format", "what it is", "use instead"), refused),
        "## Models of folders", MODELS_TEXT, " ".join(f"`{m}`" for m in tested("ARCHITECTURES")),
        NOT_MODELS_TEXT, table(("model_type", "why"), not_models()),
        "## Models of GGUF files", GGUF_TEXT, " ".join(f"`{m}`" for m in sorted(ARCHITECTURES)),
    ]  # fmt: skip
    return HEAD + "\n\n".join(p.rstrip("\n") if p.startswith("|") else _filled(p) for p in parts) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
