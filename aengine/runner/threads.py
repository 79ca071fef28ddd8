"""How many threads torch's CPU operations use, for one calling thread. Other threads keep theirs, unlike with `torch.set_num_threads`."""

from __future__ import annotations

import ctypes
import logging

import torch

_log = logging.getLogger("aengine")
_SETTERS = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")


def set_thread_count(count: int) -> None:
    """CPU operations of torch that the calling thread runs use `count` threads from now on.

    torch uses OpenMP, which keeps this number per calling thread, and MKL, which keeps another one per calling thread. torch's own setter
    writes both for its caller, and also the numbers that other threads start with.
    """
    torch.get_num_threads()  # the first use in a thread sets both numbers, later ones do not
    # The symbols that torch itself uses: those of the process first, then those of its libraries. There may be no MKL.
    libraries = ctypes.PyDLL(None), ctypes.PyDLL(torch._C.__file__)
    for name in _SETTERS:
        setter = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
        if setter is not None:
            setter(ctypes.c_int(count))
    if torch.get_num_threads() != count:
        _log.warning("operations of torch run on %d threads, not on %d: its OpenMP runtime was not found", torch.get_num_threads(), count)
