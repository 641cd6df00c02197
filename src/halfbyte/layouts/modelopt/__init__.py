"""The layouts of NVIDIA ModelOpt."""
