"""torch modules over packed weights. Needs torch; the rest of halfbyte does not."""

try:
    from .modules import Packed, QEmbedding, QLinear, packed_modules
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e.name}, which halfbyte.torch needs; pip install 'halfbyte[torch]'", name=e.name) from e

__all__ = ["Packed", "QEmbedding", "QLinear", "packed_modules"]
