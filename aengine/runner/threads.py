"""How many threads torch takes for what one thread asks of it. Changes nothing for the others, unlike `torch.set_num_threads`."""

from __future__ import annotations

import ctypes
import logging

import torch

_log = logging.getLogger("aengine")
_SETTERS = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")


def own_threads(count: int) -> None:
    """Let operations of torch on the CPU run on `count` threads where the thread calls them that calls this.

    torch takes OpenMP's threads, whose number belongs to the thread that asks for them, and MKL keeps one more number for each thread.
    torch's own setter writes both for its caller, and also what other threads begin with that use torch later.
    """
    torch.get_num_threads()  # the first use in a thread sets both numbers, and no later one does
    # As torch itself finds these: in what the whole process shares first, then in what it is linked with. There may be no MKL.
    libraries = ctypes.PyDLL(None), ctypes.PyDLL(torch._C.__file__)
    for name in _SETTERS:
        setter = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
        if setter is not None:
            setter(ctypes.c_int(count))
    if torch.get_num_threads() != count:
        _log.warning("operations of torch run on %d threads, not on %d: its OpenMP runtime was not found", torch.get_num_threads(), count)
