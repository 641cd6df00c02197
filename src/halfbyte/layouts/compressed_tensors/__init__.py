"""The layouts of compressed-tensors."""
