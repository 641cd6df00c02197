"""A decoding step of a transformers model: caches, the native step, norms."""
