"""torch modules over packed weights. Needs torch; the rest of halfbyte does not."""

try:
    from .concat_linear import ConcatLinear
    from .experts import QExperts
    from .functional import linear
    from .fuse import FusedLinear, fuse, unfuse
    from .modules import Packed, QEmbedding, QLinear, batch_invariant, packed_modules
    from .packed_weight import PackedWeight
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e.name}, which halfbyte.torch needs; pip install 'halfbyte[torch]'", name=e.name) from e

__all__ = [
    "ConcatLinear",
    "FusedLinear",
    "Packed",
    "PackedWeight",
    "QEmbedding",
    "QExperts",
    "QLinear",
    "batch_invariant",
    "fuse",
    "linear",
    "packed_modules",
    "unfuse",
]
