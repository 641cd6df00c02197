"""Packed tensors, and operations on them that change no value."""
