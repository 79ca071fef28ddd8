"""Executes compiled GPU kernels on a CPU: see README.md."""
