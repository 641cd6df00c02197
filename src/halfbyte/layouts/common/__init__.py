"""What several layouts share: packed words, integer grids, 8-bit floats, scale tiles."""
