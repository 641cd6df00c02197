"""Checkpoints that present another one under other names or row orders."""
