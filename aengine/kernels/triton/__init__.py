"""Our own Triton kernels for CUDA: norms, rotary embedding and activation, sampling from logits, attention over pages.

Owns the kernels and their launches. Docstrings name the torch code with the same results. Knows tensors and shapes; nothing of backends,
layers, rows or samplers. Triton is optional: only the modules of this package import it, and they are imported where a CUDA device is in
use. With `TRITON_INTERPRET=1` they run on CPU tensors.
"""
