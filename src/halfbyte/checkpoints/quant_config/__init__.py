"""Quantization configs: reading each producer's, per-module rules, writing."""
