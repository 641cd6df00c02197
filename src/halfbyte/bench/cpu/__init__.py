"""Benchmarks of the CPU kernels."""
