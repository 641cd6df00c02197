"""GGUF files: header, tensors, metadata, reader and writer."""
