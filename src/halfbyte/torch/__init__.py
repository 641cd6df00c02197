"""torch modules over packed weights. Needs torch; the rest of halfbyte does not."""

try:
    from .experts import QExperts
    from .fuse import FusedLinear, fuse, unfuse
    from .held import Held
    from .modules import Packed, QEmbedding, QLinear, packed_modules
    from .products import linear
    from .rows import QRows
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e.name}, which halfbyte.torch needs; pip install 'halfbyte[torch]'", name=e.name) from e

__all__ = [
    "FusedLinear", "Held", "Packed", "QEmbedding", "QExperts", "QLinear", "QRows", "fuse", "linear", "packed_modules", "unfuse",
]  # fmt: skip
