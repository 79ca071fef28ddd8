"""How many KV pages there are, and how long a sequence may be: arithmetic on byte counts; and how many bytes the weights of a model will
take, known before any is read. Does not import torch."""

from __future__ import annotations

import math
import mmap
import os
import pathlib
from collections.abc import Iterator, Mapping

from aengine.api.config import EngineConfig
from aengine.api.errors import InsufficientMemoryError
from aengine.cache import PageNeeds
from aengine.models.gguf.blocks import kept_bytes
from aengine.models.gguf.gguf_file import BLOCKS
from aengine.models.loading.weights import open_weights, stored_parts
from aengine.models.named_weights import NEVER_QUANTIZED, named_weights
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.sharding import own, sharded_weights, vocab_bounds
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard

GIB = 1 << 30
DEFAULT_CPU_BYTES = GIB
RESERVED_PAGES = 1  # page 0
SHORTEST = 2  # tokens of the shortest max_model_len
_GROUPS = pathlib.Path("/sys/fs/cgroup")
_OWN_GROUPS = pathlib.Path("/proc/self/cgroup")


def size_pool(
    budget: int, bytes_per_page: int, needs: PageNeeds, max_num_seqs: int, max_model_len: int, *, may_shorten: bool
) -> tuple[int, int]:
    """How many pages fit in `budget` bytes, the reserved one included, and how many tokens a sequence may have. There are pages for at
    least one sequence of `max_model_len` tokens, at most for `max_num_seqs` of them.

    With `may_shorten`, a context that does not fit is shortened to one that does. Raises InsufficientMemoryError with the numbers.
    """
    pages_per_seq = needs.pages(needs.columns(max_model_len))
    num_pages = budget // bytes_per_page
    if num_pages < pages_per_seq + RESERVED_PAGES:
        shortened = needs.longest(num_pages - RESERVED_PAGES, max_model_len)
        if not may_shorten or shortened < SHORTEST:
            smallest = pages_per_seq if not may_shorten else needs.pages(needs.columns(SHORTEST))
            needed = (smallest + RESERVED_PAGES) * bytes_per_page
            tokens = max_model_len if not may_shorten else SHORTEST
            raise InsufficientMemoryError(
                f"the KV cache may take {show_bytes(max(budget, 0))}, but one sequence of {tokens} tokens needs {show_bytes(needed)} "
                f"({smallest} + {RESERVED_PAGES} pages of {show_bytes(bytes_per_page)}): "
                "raise kv_cache_memory or gpu_memory_utilization, or lower max_model_len"
            )
        return num_pages, shortened
    return min(num_pages, max_num_seqs * pages_per_seq + RESERVED_PAGES), max_model_len


def check_host_pool(kv_cache_memory: int | None, pool: int, num_local: int) -> None:
    """Raises InsufficientMemoryError if the host has less than the configured bytes, or less free than the `pool` bytes that the model can
    use, for each of its `num_local` ranks. Pages are committed as they are written, so it would fail in the middle of a step."""
    if kv_cache_memory is not None and kv_cache_memory > host_memory():
        raise InsufficientMemoryError(f"kv_cache_memory is {show_bytes(kv_cache_memory)}, but this host has {show_bytes(host_memory())}")
    check_addition("the KV cache needs", pool, free_host_memory() // num_local)


def cpu_budget() -> int:
    """Default bytes of the KV cache on a CPU: 1 GiB, at most a quarter of the free memory."""
    return min(DEFAULT_CPU_BYTES, free_host_memory() // 4)


def check_memory(weights: int, bytes_per_page: int, needs: PageNeeds, config: EngineConfig, available: int) -> None:
    """Raises InsufficientMemoryError if `available` bytes do not hold `weights` bytes and the smallest KV cache that `config` allows."""
    num_pages = needs.pages(needs.columns(config.max_model_len or SHORTEST)) + RESERVED_PAGES
    cache = num_pages * bytes_per_page
    if weights + cache > available:
        parts = f"{show_bytes(weights)} of weights and {show_bytes(cache)} of KV cache"
        raise InsufficientMemoryError(
            f"the model needs {show_bytes(weights + cache)} of memory ({parts}), but {show_bytes(max(available, 0))} are available"
        )


def check_addition(what: str, needed: int, available: int) -> None:
    """Raises InsufficientMemoryError if `available` bytes do not hold `needed` bytes, which `what` needs, beside those in use."""
    if needed > available:
        raise InsufficientMemoryError(
            f"{what} {show_bytes(needed)} of host memory beside what is in use, but {show_bytes(max(available, 0))} are available"
        )


def pinned_bytes(nbytes: int) -> int:
    """What a pinned tensor takes of the host: torch rounds its bytes to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def free_host_memory() -> int:
    """Bytes that new allocations can take without swapping, within the limits of the process's control groups."""
    free = _meminfo_available()
    if free is None:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return max(0, min((free, *(left for _, left in _group_memory()))))


def host_memory() -> int:
    """Bytes that the host has, within the limits of the process's control groups."""
    return min((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(limit for limit, _ in _group_memory())))


def resident_memory() -> int:
    """Bytes of this process that are in the memory of the host."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def show_bytes(count: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _meminfo_available() -> int | None:
    lines = _lines(pathlib.Path("/proc/meminfo"))
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _group_memory() -> Iterator[tuple[int, int]]:
    """The limit of each control group of the process, and of each group that it is in, and what is left of it. Cached files count as free,
    since they give way."""
    for line in _lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, prefix = _GROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, used, prefix = _GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            most, taken = _number(folder / limit), _number(folder / used)
            if most is not None and taken is not None:
                stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
                yield most, most - taken + sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            if folder == root:
                break


def _number(path: pathlib.Path) -> int | None:
    (text,) = _lines(path) or ("",)
    return int(text) if text.isdigit() else None


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


BITS = {"int8": 8, "fp8": 8, "int4": 4.5}
"""How many bits a weight takes by `EngineConfig.quantization`, with its share of the scales."""


def weight_bytes(
    config: EngineConfig, spec: ModelSpec, itemsize: int, quantized: Mapping[str, int], shard: Shard = WHOLE
) -> dict[str, int]:
    """Return the bytes of each of `sharded_weights(spec, shard)`, as the CPU kernels read it: what the checkpoint has `quantized` keeps
    its size, a matrix that can be quantised has that of `config.quantization`, all others have `itemsize` bytes per value. A tied
    embedding counts as the head."""
    found = {}
    whole = named_weights(spec)
    for name, part in sharded_weights(spec, shard).items():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        size, source = math.prod(part.shape), part.source_name
        if spec.tied_head and stem == "embedding":
            size = len(own(vocab_bounds(spec, shard), shard)) * spec.hidden_size
        quantizable = len(part.shape) > 1 and stem not in NEVER_QUANTIZED and (spec.tied_head or stem != "embedding")
        if quantizable and source in quantized:
            found[name] = quantized[source] * size // math.prod(whole[source].shape)
        elif quantizable and config.quantization != "none":
            is_head = stem in ("embedding", "head")
            found[name] = int(size * (8 if is_head else BITS[config.quantization]) / 8)
        else:
            found[name] = size * itemsize
    return found


def quantized_bytes(config: EngineConfig, spec: ModelSpec, model_dir: pathlib.Path) -> dict[str, int]:
    """Return about the bytes in memory of each weight of which the checkpoint has all parts quantised. Raises ModelLoadError."""
    quantization = None if config.load_format == "dummy" else load_quantization(model_dir)
    if quantization is None:
        return {}
    tensors = open_weights(spec, model_dir, config.load_format).tensors
    found = {}
    for name, parts in stored_parts(named_weights(spec), quantization, tensors).items():
        stored = [tensors[source] for part in parts for source in part.endings if source in tensors]  # what is missing is refused later
        if all(part.scheme is not None for part in parts) or (stored and all(tensor.dtype in BLOCKS for tensor in stored)):
            found[name] = sum(kept_bytes(tensor.dtype, tensor.nbytes) for tensor in stored)
    return found
