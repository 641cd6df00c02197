"""How a float weight is rounded to the codes of a format."""
