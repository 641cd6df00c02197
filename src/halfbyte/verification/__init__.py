"""Whether two checkpoints hold the same weights."""
