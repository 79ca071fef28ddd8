"""CPU kernels in C++ behind a plain C interface: packed products, norms, rotary, paged attention, and whole decoders.

Owns everything between tensors and machine code: choosing a build level, compiling, layouts, calling. Importing this compiles and loads
nothing; `library.load_kernels` does.
"""
