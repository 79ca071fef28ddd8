"""How many KV pages there are, and how long a sequence may be: arithmetic on byte counts."""

from __future__ import annotations

import os
import pathlib

from aengine.errors import InsufficientMemoryError

GIB = 1 << 30
DEFAULT_CPU_BYTES = GIB
RESERVED_PAGES = 1  # page 0


def size_pool(
    budget: int, bytes_per_page: int, page_size: int, max_num_seqs: int, max_model_len: int, *, may_shorten: bool
) -> tuple[int, int]:
    """How many pages fit in `budget` bytes, the reserved one included, and how many tokens a sequence may have. There are pages for at
    least one sequence of `max_model_len` tokens, at most for `max_num_seqs` of them.

    With `may_shorten`, a context that does not fit is shortened to one that does. Raises InsufficientMemoryError with the numbers.
    """
    pages_per_seq = -(-max_model_len // page_size)
    num_pages = budget // bytes_per_page
    if num_pages < pages_per_seq + RESERVED_PAGES:
        shortened = (num_pages - RESERVED_PAGES) * page_size
        if not may_shorten or shortened < 2:
            smallest = pages_per_seq if not may_shorten else -(-2 // page_size)
            needed = (smallest + RESERVED_PAGES) * bytes_per_page
            tokens = max_model_len if not may_shorten else 2
            raise InsufficientMemoryError(
                f"the KV cache may take {show_bytes(max(budget, 0))}, but one sequence of {tokens} tokens needs {show_bytes(needed)} "
                f"({smallest} + {RESERVED_PAGES} pages of {show_bytes(bytes_per_page)}): "
                "raise kv_cache_memory or gpu_memory_utilization, or lower max_model_len"
            )
        return num_pages, shortened
    return min(num_pages, max_num_seqs * pages_per_seq + RESERVED_PAGES), max_model_len


def cpu_budget() -> int:
    """Default bytes of the KV cache on a CPU: 1 GiB, at most a quarter of the free memory."""
    return min(DEFAULT_CPU_BYTES, free_host_memory() // 4)


def free_host_memory() -> int:
    """Bytes that new allocations can take without swapping, within the limit of the process's control group."""
    free = _meminfo_available()
    if free is None:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    limit, used = (_number(pathlib.Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else max(0, min(free, limit - used))


def show_bytes(count: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _meminfo_available() -> int | None:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _number(path: pathlib.Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
