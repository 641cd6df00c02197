"""halfbyte: low-bit quantized weights, decoded exactly."""

from .checkpoints import Checkpoint, load, open, save
from .errors import HalfbyteError
from .formats import format_named
from .qtensor import QTensor
from .spec import Format

__version__ = "0.1.0"
__all__ = ["Checkpoint", "Format", "HalfbyteError", "QTensor", "format_named", "load", "open", "save"]
