"""Tile shapes: how they are measured, and the tables that were measured."""
