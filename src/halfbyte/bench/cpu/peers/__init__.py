"""Other libraries timed beside the CPU kernels, one file a library."""
