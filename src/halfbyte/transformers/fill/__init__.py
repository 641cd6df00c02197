"""Filling a transformers model with the weights of a checkpoint."""
