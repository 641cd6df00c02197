"""A dense model whose hidden states are rotated, so that outliers spread over all of a group before
it is rounded; what the model computes does not change, nor the graph of its operations.

With Q orthogonal and hidden states x' = x Q (R1), and H orthogonal on the values of a head (R2):

| tensor | becomes |
|---|---|
| embedding E | E Q |
| q, k, v, gate, up, head W after a norm of weight g | W diag(g) Q |
| o, down W; bias b | Qᵀ W; b Q |
| norms | 1 |
| v, rows of a head W; bias b | Hᵀ W; b H |
| o, columns of a head W | W H |

RMSNorm without a weight commutes with rotations (Ashkboos et al. 2024, SliceGPT, arXiv 2401.15024;
QuaRot, arXiv 2404.00456; R1 and R2 as SpinQuant names them, Liu et al. 2024, arXiv 2405.16406). Q
is a Hadamard matrix of the largest power of two in the width, times a random orthogonal matrix of
the odd rest, under random signs. A tied head becomes a tensor of its own, for it takes the last
norm's weight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.views.base import View
from ..errors import UnsupportedError
from ..tensor.qtensor import QTensor

F64 = NDArray[np.float64]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Models of RMSNorms that only q, k, v, gate, up and head read."""
HEAD = "lm_head.weight"
_NORMS = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
_KEY = re.compile(
    r"(?:model\.(?P<outer>embed_tokens|norm)|(?P<head>lm_head)"
    r"|model\.layers\.(?P<layer>\d+)\.(?:self_attn\.(?P<attention>[qkvo]_proj|[qk]_norm)|mlp\.(?P<mlp>gate_proj|up_proj|down_proj)"
    r"|(?P<norm>input_layernorm|post_attention_layernorm)))\.(?P<leaf>weight|bias)"
)


@dataclass(frozen=True, eq=False)
class Orthogonal:
    """x ↦ x D (R ⊗ H) along the last axis of width n = m · p, p the largest power of two in n: D
    random signs, R [m, m] random orthogonal, H the Hadamard matrix over √p.
    """

    signs: F64
    mixing: F64

    @staticmethod
    def of(width: int, seed: int) -> Orthogonal:
        """The rotation of a width for a seed."""
        random = np.random.default_rng([seed, width])
        odd = width // (width & -width)
        q, r = np.linalg.qr(random.standard_normal((odd, odd)))
        return Orthogonal(random.choice([-1.0, 1.0], width), q * np.sign(np.diag(r)))

    def __call__(self, x: NDArray[Any]) -> F64:
        m, p = len(self.mixing), len(self.signs) // len(self.mixing)
        y = (x * self.signs).reshape(*x.shape[:-1], m, p)
        y = np.moveaxis(np.moveaxis(y, -2, -1) @ self.mixing, -1, -2)
        half = 1
        while half < p:
            pairs = y.reshape(*x.shape[:-1], m, p // (2 * half), 2, half)
            y = np.concatenate([pairs[..., :1, :] + pairs[..., 1:, :], pairs[..., :1, :] - pairs[..., 1:, :]], -2)
            half *= 2
        out: F64 = y.reshape(x.shape) / np.sqrt(p)
        return out


class Rotated(View):
    """`source` with rotated hidden states, its tensors in their own dtypes.

    seed   of the rotation
    dtype  of every tensor in place of its own, to compare what the models compute
    Raises UnsupportedError for packed checkpoints, GGUFs, and models that a rotation would change.
    """

    def __init__(self, source: Checkpoint, seed: int = 0, dtype: str = "") -> None:
        super().__init__(source)
        kind = source.config.get("model_type")
        if isinstance(source, GGUFCheckpoint) or kind not in MODEL_TYPES:
            given = "a GGUF file" if isinstance(source, GGUFCheckpoint) else repr(kind)
            raise UnsupportedError(
                f"[quantize] {source.path}: --rotate for {given}; allowed: folders of {', '.join(MODEL_TYPES)}, whose norms are "
                "read by matrices alone, so that their weights can be folded. Quantize without --rotate"
                + (", or dequantize to a folder first" if source.format == "gguf" else "")
            )
        for info in source.infos():
            if info.quantized or not _KEY.fullmatch(info.key):
                why = "is packed" if info.quantized else "has no place in a rotation"
                raise UnsupportedError(f"[quantize] {source.path}: --rotate, and {info.key} {why}; quantize without --rotate")
        self._dtype = dtype
        heads = int(source.config["num_attention_heads"])
        self._hidden = Orthogonal.of(int(source.config["hidden_size"]), seed)
        self._head = Orthogonal.of(int(source.config.get("head_dim") or source.config["hidden_size"] // heads), seed)
        self._tied = bool(source.config.get("tie_word_embeddings")) or HEAD not in source
        self.config = {**source.config, "tie_word_embeddings": False, "halfbyte_rotation": {"seed": seed}}

    def keys(self) -> tuple[str, ...]:
        keys = self.source.keys()
        return keys if HEAD in keys else (*keys, HEAD)

    def __contains__(self, key: object) -> bool:
        return key == HEAD or key in self.source

    def _source_key(self, key: str) -> str:
        return "model.embed_tokens.weight" if key == HEAD and self._tied else key

    def info(self, key: str) -> TensorInfo:
        info = self.source.info(self._source_key(key))
        dtype = self._dtype or info.dtype
        return replace(info, key=key, dtype=dtype)

    def fetch(self, key: str) -> None:
        self.source.fetch(self._source_key(key))

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        stored = self.source[self._source_key(key)]
        assert not isinstance(stored, QTensor)
        found = _KEY.fullmatch(key)
        assert found is not None
        dtype = np.dtype(self._dtype) if self._dtype else stored.dtype
        out: NDArray[Any] = self._rotated(found, np.asarray(stored, np.float64)).astype(dtype)
        return out

    def _rotated(self, key: re.Match[str], x: F64) -> F64:
        name = key["outer"] or key["head"] or key["attention"] or key["mlp"] or key["norm"]
        if name in ("norm", *_NORMS):
            return np.ones_like(x)
        if name in ("q_norm", "k_norm"):
            return x
        if name == "embed_tokens":
            return self._hidden(x)
        if name == "lm_head":
            return self._hidden(x * self._norm("model.norm"))
        layer = f"model.layers.{key['layer']}"
        d = len(self._head.signs)
        if name == "v_proj":
            columns = x if key["leaf"] == "bias" else x.T
            x = self._head(columns.reshape(*columns.shape[:-1], -1, d)).reshape(columns.shape)
            x = x if key["leaf"] == "bias" else x.T
        if key["leaf"] == "bias":
            return self._hidden(x) if name in ("o_proj", "down_proj") else x
        if name == "o_proj":
            x = self._head(x.reshape(len(x), -1, d)).reshape(x.shape)
        if name in ("o_proj", "down_proj"):
            return self._hidden(x.T).T
        norm = next(norm for norm, readers in _NORMS.items() if name in readers)
        return self._hidden(x * self._norm(f"{layer}.{norm}"))

    def _norm(self, path: str) -> F64:
        return np.asarray(self.source[f"{path}.weight"], np.float64)
