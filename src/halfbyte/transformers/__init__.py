"""Models of the transformers library whose weights stay packed. Needs torch, transformers and
tokenizers.
"""

try:
    from ..spec import Size
    from ..torch import QLinear  # noqa: F401  first: without torch the library transformers prints advice of its own
    from .hf_quantizer import HalfbyteConfig, HalfbyteQuantizer
    from .load import import_model_code, load_model, model_size
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"{e.name}, which halfbyte.transformers needs; pip install 'halfbyte[transformers]'", name=e.name
    ) from e

__all__ = ["HalfbyteConfig", "HalfbyteQuantizer", "Size", "import_model_code", "load_model", "model_size"]
