"""Bits, exact arithmetic, small floating-point types and error statistics."""
