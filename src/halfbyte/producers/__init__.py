"""Each producer's own decoder, reproduced bit for bit: the arithmetic of one producer is in the
module of its name.

`decode_as(q, dtype)` is what `dequantize(dtype, arithmetic="producer")` returns. A decoder is a
function (block of a packed weight, dtype) -> array. Steps that several producers share are in
`float32.py`, element and scale tables in `formats/decode.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from ..errors import FormatError
from ..spec import EncodedTensor
from . import bitsandbytes, compressed_tensors, gguf, gptq_awq, hqq, mlx, modelopt, onnxruntime, torchao, transformers_mxfp4

DECODERS: dict[str, Callable[[EncodedTensor, Any], NDArray[Any]]] = {
    "autoawq": gptq_awq.decode_autoawq,
    "autogptq": gptq_awq.decode_autogptq,
    "compressed-tensors": compressed_tensors.decode,
    "gptqmodel": gptq_awq.decode_gptqmodel,
    "gguf": gguf.decode,
    "bitsandbytes": bitsandbytes.decode,
    "hqq": hqq.decode,
    "mlx": mlx.decode,
    "modelopt": modelopt.decode,
    "onnxruntime": onnxruntime.decode,
    "torchao": torchao.decode,
    "transformers": transformers_mxfp4.decode,
}
"""Decoder of each `origin`."""


def decode_as(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What the decoder of `q.origin` returns for `q`, in `dtype`. FormatError for an origin without
    a decoder.
    """
    if q.origin not in DECODERS:
        raise FormatError(f"[dequantize] no producer arithmetic for {q.origin!r}; known: {', '.join(sorted(DECODERS))}")
    return DECODERS[q.origin](q, dtype)
