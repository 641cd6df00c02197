"""Formats without a packed kernel: the weight is decoded as a whole, then multiplied."""
