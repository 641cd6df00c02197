"""Wrappers of a checkpoint with other names or another order of rows."""
