"""Packed tensors, quantization to them, and operations on them that change no value."""
