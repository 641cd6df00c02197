"""Benchmarks of the CUDA kernels."""
