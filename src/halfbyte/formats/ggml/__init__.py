"""The ggml block types of GGUF files."""
