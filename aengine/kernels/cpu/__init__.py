"""CPU kernels in C++ behind a plain C interface: packed products, norms, rotary, paged attention, and whole decoders.

Owns everything between tensors and machine code: choosing a build level, compiling, layouts, calling. Importing this compiles and loads
nothing; `library.load_kernels` does.

All layers of a step are one call without the GIL (`DecoderStack` in `models/cpu/stack.py`). A model is a list of operations on numbered
buffers (`src/abi.h`), which `models/cpu/program.py` writes from the `ModelSpec`. If all rows are greedy or sampled without processors and
logprobs, the head and the sampling are part of that call. Otherwise the sampler continues from the logits and samples with the same kernel,
so a token does not depend on the neighbours of its row.

The kernels are compiled at first use, in three units side by side (8.5 seconds on a Zen 5 machine with two virtual processors, 2026-11-22;
half of it for products with codes of 4 and 8 bits). They are cached under `$XDG_CACHE_HOME/aengine` by sources, flags, compiler and level.
`AENGINE_CPU_LEVEL` forces a level. GCC 12 and clang 14 pass the tests, and GCC 12 for ARM in QEMU 7.2 (2026-12-01).

A team of threads works through the operations of a step (`src/team.h`). Tasks are taken from an atomic counter, and an operation ends when
its tasks are done, not when all threads have come, because the event loop uses the cores too. A team is either torch's threads or worker
threads of the workspace (`src/worker_threads.h`), which begin a step by themselves and which the step thread joins. Only steps that sample
in the kernels use worker threads: after an operation of torch its threads spin for some milliseconds on the same cores.

A product takes a list of groups, each a packed matrix with its rows (`src/gemm.h`); a single matrix is a list of one. The experts of a
layer (`src/experts.h`) and the matrices of each head of latent attention (`src/heads.h`) are such lists. There is no barrier between
groups, and each expert that is chosen is read once per step. The outputs of a token's experts are summed in the order of its choices.

Packed matrices have a format (`PackedLinear` in `src/abi.h`): pairs of bfloat16, float32, int8 with one scale per row, or codes of 4 or 8
bits with scales per group (`src/codes.h`). A product with many rows unpacks a block of a panel into the thread's scratch once, and
multiplies all rows with that; few rows unpack in registers. Where a CPU has no bfloat16 instructions, many rows of bfloat16 are widened to
float32 in the same way. Int8 activations are quantised per row and group when the product begins.

Tokens of a step may have adapters (`src/adapters.cpp`). Before a product the team computes `u = A x` for the rows that have one; a task is
up to 48 rows of one adapter times 8 rows of `A`. With few rows `B u` is computed then, too, in one piece per adapter, since `B` is read at
the speed of memory only as a stream of its own; with many rows it is computed panel by panel. Both sum from zero and add once, so they give
the same bits.

An int8 KV cache has integers and a float32 scale for each head's key and value of a token. Scores and weighted sums are exact in int32
(`src/attention.cpp`, `Int16Dot`).

A token depends on its own sequence alone: not on the batch, the chunks or the number of threads. KV pages have a layout of their own
(`src/abi.h`). On the torch decoder logits depend on the batch up to rounding, because torch's libraries add up products in an order that
depends on the shape of the step. Equal bits there would take products and attention in tiles of one shape, 2 to 4 times slower for a lone
request (measured).
"""
