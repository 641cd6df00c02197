"""The kernel for few tokens: weights as fragments of the `mma` instruction."""
