"""GPTQ and AWQ over a model: calibration text goes through it layer by layer, each layer rounded before the next one is read.

Needs torch and transformers. The mathematics on one weight is `quantizers`; what is written is `converting.quantizing`.
"""

try:
    from .spool import Spool
    from .walk import Calibrated, calibrate
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e.name}, which calibration needs; pip install 'halfbyte[transformers]'", name=e.name) from e

__all__ = ["Calibrated", "Spool", "calibrate"]
