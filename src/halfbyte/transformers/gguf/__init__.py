"""A transformers config and tokenizer from a GGUF header."""
