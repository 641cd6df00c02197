"""Models of the transformers library whose weights stay packed. Needs torch, transformers and tokenizers."""

try:
    from .load import Size, import_model_code, load_model, model_size
    from .quantizer import HalfbyteConfig, HalfbyteQuantizer
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"{e.name}, which halfbyte.transformers needs; pip install 'halfbyte[transformers]'", name=e.name
    ) from e

__all__ = ["HalfbyteConfig", "HalfbyteQuantizer", "Size", "import_model_code", "load_model", "model_size"]
