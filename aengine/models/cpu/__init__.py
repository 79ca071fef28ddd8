"""Models as lists of operations for the CPU kernels."""
