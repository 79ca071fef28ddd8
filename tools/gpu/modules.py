"""FlashInfer's modules, built where they are missing: python -m tools.gpu.modules FOLDER [NAME...]

Puts each as FOLDER/<module>/<module>.so, where FlashInfer looks for prebuilt modules if FOLDER is its data/aot. Without names all are
built: first what the benchmarks need, last what takes longest. A process that needs one of them at the same time waits for it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def module_specs() -> Mapping[str, Callable[[], Any]]:
    """By our name, FlashInfer's specifications, which can build themselves and know their name."""
    import torch

    jit, prefill, norm = (import_module(f"flashinfer.{name}") for name in ("jit", "prefill", "jit.norm"))

    def attention(backend: str, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, window: bool = False, cap: bool = False) -> Any:
        arguments = (backend, dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, 0, window, cap, False)
        primary = getattr(prefill, "_gen_batch_prefill_primary_module", None)  # of fa2 since 0.7
        return primary(*arguments) if primary is not None and backend == "fa2" else jit.gen_batch_prefill_module(*arguments)

    bf16, fp16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    return {
        "norm": norm.gen_norm_module,
        "silu": lambda: jit.gen_act_and_mul_module("silu"),
        "attention": lambda: attention("fa2", 128, bf16, bf16),
        "attention-64": lambda: attention("fa2", 64, bf16, bf16),
        "attention-window": lambda: attention("fa2", 128, bf16, bf16, window=True),
        "attention-fp8": lambda: attention("fa2", 128, bf16, fp8),
        "attention-cap": lambda: attention("fa2", 128, bf16, bf16, cap=True),
        "attention-fp16": lambda: attention("fa2", 128, fp16, fp16),
        "attention-256": lambda: attention("fa2", 256, bf16, bf16),
        "attention-fa3": lambda: attention("fa3", 128, bf16, bf16),
    }


def build(folder: Path, names: list[str]) -> int:
    """Builds and loads what `folder` lacks. Returns how many failed; one that fails does not keep the others from being built."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    specs = module_specs()
    if unknown := set(names) - specs.keys():
        raise SystemExit(f"there is no module {', '.join(sorted(unknown))}; there are {', '.join(specs)}")
    failed = 0
    for name in names or specs:
        begin = time.monotonic()
        try:
            spec = specs[name]()
            built = folder / spec.name / f"{spec.name}.so"
            if built.exists():
                continue
            spec.build_and_load()
            _place(Path(spec.jit_library_path), built)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name}: {spec.name} in {time.monotonic() - begin:.0f} s, {built.stat().st_size / 1e6:.2f} MB", flush=True)
    return failed


def _place(library: Path, target: Path) -> None:
    """At once or not at all: another process may look for it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    shutil.copyfile(library, partial)
    partial.replace(target)


if __name__ == "__main__":
    sys.exit(min(1, build(Path(sys.argv[1]), sys.argv[2:])))
