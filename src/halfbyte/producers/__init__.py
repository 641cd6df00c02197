"""Each producer's own decoder, reproduced bit for bit: one short file a producer.

`decode_as(q, dtype)` is what `dequantize(dtype, arithmetic="producer")` returns. A producer is a function
(QTensor block, dtype) -> array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..errors import FormatError
from . import (
    autoawq,
    autogptq,
    bitsandbytes,
    compressed_tensors,
    gguf,
    gptqmodel,
    hqq,
    mlx,
    modelopt,
    onnxruntime,
    torchao,
    transformers_mxfp4,
)

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor

Decoder = Callable[["QTensor", Any], "NDArray[Any]"]
DECODERS: dict[str, Decoder] = {
    "autoawq": autoawq.decode,
    "autogptq": autogptq.decode,
    "compressed-tensors": compressed_tensors.decode,
    "gptqmodel": gptqmodel.decode,
    "gguf": gguf.decode,
    "bitsandbytes": bitsandbytes.decode,
    "hqq": hqq.decode,
    "mlx": mlx.decode,
    "modelopt": modelopt.decode,
    "onnxruntime": onnxruntime.decode,
    "torchao": torchao.decode,
    "transformers": transformers_mxfp4.decode,
}
"""origin -> decoder."""


def decode_as(q: QTensor, dtype: Any) -> NDArray[Any]:
    """What the decoder of `q.origin` returns for `q`, in `dtype`."""
    if q.origin not in DECODERS:
        raise FormatError(f"[dequantize] no producer arithmetic for {q.origin!r}; known: {', '.join(sorted(DECODERS))}")
    return DECODERS[q.origin](q, dtype)
