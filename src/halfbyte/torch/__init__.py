"""torch modules over packed weights. Needs torch; halfbyte itself does not."""

from .modules import Packed, QEmbedding, QLinear

__all__ = ["Packed", "QEmbedding", "QLinear"]
