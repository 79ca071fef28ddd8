"""Our own Triton kernels for CUDA: what a layer does between its products, draws from logits, attention over pages.

Owns the kernels and their launches, a file per subject; each says in its docstring which torch code it computes the same as. Knows
tensors and shapes; nothing of backends, layers, rows or samplers. Triton is optional: only the modules of this package import it, and
they are imported where a CUDA device is in use. Under `TRITON_INTERPRET=1` they run on CPU tensors.
"""
