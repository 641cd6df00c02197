"""The model that a GGUF file holds, and how a model becomes such a file: names, row orders,
configuration, tokenizer. See docs/gguf-models.md.
"""
