"""Bit packing, exact arithmetic, small floating-point types, transposition and error statistics."""
