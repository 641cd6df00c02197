"""Models of the transformers library whose weights stay packed. Needs torch, transformers and tokenizers."""

from .load import Size, import_model_code, load_model, model_size

__all__ = ["Size", "import_model_code", "load_model", "model_size"]
