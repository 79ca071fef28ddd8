"""Benchmarks of the package's internals, run by hand from the repository root: `python -m tools.bench.serving`."""
