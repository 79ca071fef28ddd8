"""The executor of the CPU kernels, and what belongs to it. Knows nothing of the one in torch."""
