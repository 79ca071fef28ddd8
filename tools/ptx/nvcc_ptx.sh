#!/bin/sh
# nvcc for libraries whose kernels are executed from their PTX: none is made for a GPU, and lines of the source are kept.
set -- $(printf '%s\n' "$@" | sed 's/,code=sm_/,code=compute_/')
exec "${AENGINE_NVCC:-nvcc}" "$@" -lineinfo --no-compress
