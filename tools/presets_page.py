"""docs/reference/presets.md from the outcomes of tests/producers/test_presets_ecosystem.py.

python tools/presets_page.py benchmarks/ecosystem-presets.jsonl > docs/reference/presets.md
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

HEAD = """# Producers' schemes

Every scheme that these packages offer, enumerated from the package itself, on a tiny llama,
qwen3-moe and gpt-oss. Read: every weight equals the producer's own values, in exact or in the
producer's arithmetic; a weight that differs in a bit is shown with its deviation, at most 2^-7 of
the largest value. Of ModelOpt's and AutoRound's FP8 schemes the values are those of the formula of
the export; marlin-24, which compressed-tensors does not decode, is compared with the integers from
before its compression. compressed-tensors 0.14 is the last that writes 2:4 sparse weights.

What is read is also converted (`convert --to halfbyte`, then `verify`) and loaded (`load_model`,
its logits against those of the dense model with the decoded values); a cell says so where one of
the two is refused. Of seven ModelOpt files the comparison has no dense model: their
`pre_quant_scale` multiplies the inputs, which `dequantize` refuses and `load_model` does. ONNX
files are converted and not loaded: `load_model` reads no ONNX graphs. What ModelOpt rounds by GPU
kernels while it calibrates, its own tensor class rounds on the CPU here. Its configs of caches go
over FP8_DEFAULT_CFG.

{unchecked}

Refused: by name, with the reason. Not run: the producer does not run what it wrote, so there are no
values of its own to compare. Not written: the producer itself does not write it on a machine
without a GPU or without its optional packages, with the first words of its error. Run by `make
test-ecosystem` (`tests/producers/test_presets_ecosystem.py`); `tools/presets_page.py` makes this
page. GPTQModel's gemv, gemv_fast and llm-awq run on GPUs alone: its own functions pack them here,
and what they packed is compared. Its environment has torch 2.14.1, the others 2.13.
"""


def cell(row: dict[str, str]) -> str:
    """What one file came to."""
    detail = row["detail"].replace("|", "/").replace("\n", " ")
    for command in ("convert", "load_model"):
        if row.get(command, "equal") not in ("equal", "identical"):
            detail += f"; {command} {row[command][:120]}".replace("|", "/")
    return detail if row["outcome"] == "read" else f"{row['outcome']}: {detail[:120]}"


def page(rows: list[dict[str, str]]) -> str:
    """The page."""
    read = [row for row in rows if row["outcome"] == "read"]
    unchecked = sorted({row["producer"] for row in read if "convert" not in row})
    unloaded = Counter(
        row["producer"] for row in read if "convert" in row and "load_model" not in row and "onnx" not in row["producer"]
    )
    loads = "".join(f" {n} files of {producer} were converted and not loaded." for producer, n in sorted(unloaded.items()))
    sentence = f"Files of these were not converted and loaded: {', '.join(unchecked) or 'none'}.{loads}"
    out = [HEAD.replace("{unchecked}", textwrap.fill(sentence, 100, break_on_hyphens=False))]
    by_producer: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        by_producer[row["producer"]][row["scheme"]][row["arch"]] = cell(row)
    for producer, schemes in sorted(by_producer.items()):
        out.append(f"\n## {producer}\n\n| scheme | llama | qwen3-moe | gpt-oss |\n|---|---|---|---|")
        for scheme, cells in schemes.items():
            found = [cells.get(arch, "") for arch in ("llama", "qwen3_moe", "gpt_oss")]
            same = [found[0], *("same" if c == found[0] and c else c for c in found[1:])]
            out.append(f"| `{scheme}` | {' | '.join(same)} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
    sys.stdout.write(page([json.loads(line) for line in lines]))
