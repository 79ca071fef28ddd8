"""`make gpu`: checks and benchmarks of the CUDA path in one call of less than ten minutes, on a machine that may have no network."""
