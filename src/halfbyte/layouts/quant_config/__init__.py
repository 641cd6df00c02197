"""Quantization configs: what the readers and writers of all producers share, and the rules that
name modules in them.
"""
