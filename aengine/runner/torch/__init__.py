"""The executor in torch, on CUDA or on a CPU, and what belongs to it. Knows nothing of the one of the CPU kernels."""
