"""Kernels in plain Triton: every format, every GPU from compute capability 8.0 on."""
