"""GPTQModel: python gptqmodel_write.py DENSE OUT [WORD ...]. GPTQ in both versions, with act-order
too; AWQ after AutoAWQ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dense import ARCHITECTURES, WIDE, calibration, each

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its pool wants two, whatever the machine has

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig


def quantized(backend: Any, **options: Any) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        config = QuantizeConfig(bits=4, group_size=32, device="cpu", offload_to_disk=False, **options)
        model = GPTQModel.load(str(source), config)
        model.quantize(list(calibration(64)), batch_size=4, backend=backend)
        model.save(str(target))

    return write


def variants() -> dict[str, Callable[[Path, Path, str], None]]:
    return {
        "gptq": quantized(BACKEND.GPTQ_TORCH, quant_method="gptq", format="gptq", sym=True),
        "gptq-act-order": quantized(BACKEND.GPTQ_TORCH, quant_method="gptq", format="gptq_v2", sym=False, desc_act=True),
        "awq": quantized(BACKEND.AWQ_TORCH, quant_method="awq", format="gemm", sym=False),
    }


def main() -> None:
    """GPTQ in this process; AWQ in one for each model, since a search that fails ends its process."""
    made = variants()
    wide = {"awq": made.pop("awq")}
    sources = {arch: arch + WIDE for arch in ARCHITECTURES}
    if sys.argv[3:]:
        each(made)
        each(wide, sources)
        return
    each(made)
    for arch in ARCHITECTURES:
        done = subprocess.run([sys.executable, *sys.argv, f"{arch}-awq"], capture_output=True, text=True)
        said = [line[line.find("{") :] for line in done.stdout.splitlines() if '{"wrote"' in line or '{"refused"' in line]
        print(
            "\n".join(said) or json.dumps({"refused": f"{arch}-awq", "why": done.stderr.strip().splitlines()[-1][:300]}),
            flush=True,
        )


if __name__ == "__main__":
    main()
