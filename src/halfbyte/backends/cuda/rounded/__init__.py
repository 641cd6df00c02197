"""Products of activations rounded to 8 bits: `activations="int8"` and `"fp8"`."""
