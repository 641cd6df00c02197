"""GPTQ, AWQ and learned rounding over a whole model: calibration text passes through it layer by
layer; each is quantized before the next is read. `allocate` chooses a codec for each weight within
a budget.

Needs torch and transformers. `quantizers` has the algorithms for one weight, `conversion.quantize`
writes the result.
"""

try:
    from .allocate import allocate
    from .importance import collect_importance
    from .learned import LearningOptions
    from .spool import Spool
    from .walk import Calibrated, calibrate
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e.name}, which calibration needs; pip install 'halfbyte[transformers]'", name=e.name) from e

__all__ = ["Calibrated", "LearningOptions", "Spool", "allocate", "calibrate", "collect_importance"]
