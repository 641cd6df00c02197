"""Text from a packed model: one prompt, batches, chat, and the memory a run needs."""
