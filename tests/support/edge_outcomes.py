"""What each target makes of small weights, and where each weight could go.

    python -m support.edge_outcomes               # in tests/: write data/edge_outcomes.txt anew
    python -m support.edge_outcomes gptq-4        # print each target's outcome of a weight

The outcome is the kind, the format and the reason, and of a weight that keeps its values the
checksum of what is written. Values of errors are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from halfbyte.conversion.edges import convert_weight
from halfbyte.conversion.recipe import format_for
from halfbyte.conversion.targets import candidates, codecs_of, goal_named
from halfbyte.errors import HalfbyteError
from halfbyte.formats import format_named
from halfbyte.layouts import written_layouts
from halfbyte.numerics.bits import pack
from halfbyte.tensor.qtensor import QTensor
from support.outcome_table import OutcomeTable
from support.outcomes import MODULES, checksum
from support.random_tensors import finite_tensor

TARGETS = (*written_layouts(), "gptq-v1", "gptq-v2", "onnx", "metal-marlin", "halfbyte:int4:g32", "halfbyte:affine4:g32")
SCALES = (None, "float16", "bfloat16", "float32")


def _with(name: str, group: int | None = None, /, shape: tuple[int, ...] = (8, 128), **parts: Any) -> QTensor:
    """A weight of a codec some of whose parts hold these values, repeated."""
    q = finite_tensor(format_named(name, group, **parts.pop("options", {})), shape, 3)
    made = {p: np.resize(np.asarray(v), q.parts[p].shape).astype(q.parts[p].dtype) for p, v in parts.items()}
    return QTensor(q.format, shape, {**q.parts, **made})


def _coded(name: str, codes: Any, group: int | None = None, **parts: Any) -> QTensor:
    """The same with these codes, repeated."""
    q = _with(name, group, **parts)
    values = np.resize(np.asarray(codes, np.uint8), q.shape)
    return QTensor(q.format, q.shape, {**q.parts, "codes": pack(values, q.format.bits)})


PRODUCED = (
    "gptq-8-act-order", "gptq-3-ragged", "awq-gemm-4", "ct-int4-act-order", "ct-nvfp4", "ct-fp8-channel", "ct-fp8-tensor",
    "fp8-block", "mlx-affine4", "mlx-affine3-stack", "mlx-nvfp4", "gpt-oss-stack", "modelopt-nvfp4", "modelopt-nvfp4-stack",
    "modelopt-int4-qtensor", "modelopt-int8", "bitsandbytes-nf4", "bitsandbytes-nested", "bitsandbytes-int8", "hqq-3-strided",
    "quark-mxfp4", "torchao-mx", "torchao-float8", "halfbyte-nvfp4-stack", "gguf-q5_1",
)  # fmt: skip
"""Weights of `support.outcomes` that are tried."""
POWERS = (0.5, 0.25, 2.0, 2.0**-14, 1.0)
WEIGHTS: dict[str, QTensor] = {
    "middle zeros": _with("uint4", 32, zeros=8),
    "zeros at the ends": _with("uint4", 32, zeros=(0, 15, 1, 14)),
    "zeros of 8 bits": _with("uint8", 64, zeros=(0, 128, 255)),
    "power scales": _with("int4", 32, scales=POWERS),
    "scales of 0": _with("int4", 32, scales=(0.0, 0.5)),
    "negative scales": _with("int4", 32, scales=(-0.5, 0.25)),
    "scales past float16": _with("int4", 32, scales=(1e-9, 1e6, 1.0), options={"scale_dtype": "float32"}),
    "scales of 7 bits": _with("int4", 32, scales=(1 + 1 / 128, 3.0), options={"scale_dtype": "float32"}),
    "codes of 3 bits": _coded("int4", range(4, 12), 32),
    "codes without the lowest": _coded("int4", range(1, 16), 32),
    "one code": _coded("uint4", (5,), 32, zeros=5),
    "alike groups": _with("int4", 32, scales=0.5),
    "affine as integers": _with("affine4", 32, scales=POWERS, biases=[-8 * s for s in POWERS]),
    "affine of odd biases": _with("affine4", 64, scales=0.3, biases=0.1),
    "affine of negative scales": _with("affine4", 32, scales=(-0.5, 0.5), biases=(4.0, -4.0)),
    "affine without steps": _with("affine3", 64, scales=0.0, biases=(0.25, -0.5)),
    "fp4 of the least power": _with("fp4", 32, scales=(2.0**-127, 0.5), options={"scale_dtype": "float32"}),
    "fp4 below it": _with("fp4", 32, scales=(2.0**-128, 0.5), options={"scale_dtype": "float32"}),
    "fp4 of the largest power": _with("fp4", 32, scales=(2.0**127, 0.5), options={"scale_dtype": "float32"}),
    "fp4 of no powers": _with("fp4", 32, scales=(0.75, 0.5), options={"scale_dtype": "float32"}),
    "fp4 of bytes": _with("fp4", 16, scales=(0.875, 448.0, 2.0**-9), options={"scale_dtype": "float32"}),
    "mxfp4 of the ends": _with("mxfp4", scales=(0, 1, 127, 253, 254)),
    "mxfp4 near 1": _with("mxfp4", scales=(118, 127, 130)),
    "mxfp4 of no codes": _coded("mxfp4", (0, 8), scales=(127,)),
    "nvfp4 of power scales": _with("nvfp4", scales=(0x38, 0x40, 0x30), global_scale=1.0),
    "nvfp4 of sixteenths": _with("nvfp4", scales=(0x38, 0x39, 0x01), global_scale=0.0625),
    "nvfp4 divided": _with("nvfp4", scales=(0x38, 0x41), global_scale=4.0, options={"global_scale": "divide"}),
    "nvfp4 of one level": _with("nvfp4", scales=(0x38, 0x08, 0x7E), options={"global_scale": "none"}),
    "nvfp4 of ggml": _with("nvfp4_ue4m3", scales=(0x38, 0x7E, 0)),
    "mxfp8": _with("mxfp8_e4m3", scales=(127, 120)),
    "q4_0": _with("q4_0"),
    "q4_K": finite_tensor(format_named("q4_K"), (4, 256), 1),
    "q6_K": finite_tensor(format_named("q6_K"), (4, 256), 1),
    "iq4_nl": _with("iq4_nl"),
    "nf4": _with("nf4", 64),
    "hqq of whole zeros": _with("hqq4", 64, zeros=(8.0, 3.0)),
    "int8 rows": _with("int8", -1),
    "fp8 rows": _with("fp8_e4m3", -1),
    **{label: MODULES[label][1] for label in PRODUCED},
}


def _goals() -> Iterator[tuple[str, str | None]]:
    for target in TARGETS:
        yield target, None
        for scales in SCALES[1:] if ":" not in target else ():
            yield target, scales
        layout = goal_named(target).layout
        for codec in codecs_of(layout) if target == layout else ():
            for group in ("", ":g32", ":channel"):
                yield f"{target}:{codec}{group}", None


def outcomes(label: str) -> Iterator[tuple[str, str, str]]:
    """(subject, target, outcome) of each target of a weight."""
    q = WEIGHTS[label]
    for text, scales in _goals():
        try:
            goal = goal_named(text, scales)
        except HalfbyteError as error:
            yield "words", f"{text} {scales}", str(error)
            continue
        subject, case = f"to {goal.layout}", f"{text} {scales}"
        with np.errstate(all="ignore"):
            try:
                order = [str(fmt) for fmt in candidates(q, goal)]
                found = convert_weight(q, goal)
                outcome = f"{found.kind} {found.weight.format!r} {found.why} {found.instead}"
                if found.kind != "lossy":
                    outcome += f" {checksum([dict(found.tensors), dict(found.config)]):08x}"
            except HalfbyteError as error:
                outcome = str(error)
        yield subject, case, re.sub(r"\d+\.\d+(e[-+]?\d+)?|\d+e[-+]\d+", "#", f"{order} {outcome}")
        if goal.target.codec is not None:
            for dtype in ("float16", "float32"):
                try:
                    planned = str(format_for(goal, dtype, q.shape))
                except HalfbyteError as error:
                    planned = str(error)
                yield f"planned for {goal.layout}", f"{case} {dtype}", planned


TABLE = OutcomeTable("edge_outcomes", WEIGHTS, outcomes, "targets")

if __name__ == "__main__":
    TABLE.main()
