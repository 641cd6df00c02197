"""The layout of GGUF tensors."""
