"""`EagerCapture`: recording without a device that can, for tests of everything around it.

Owns a tape of operations. Replaying calls each of them again, on the very tensors it was recorded with, and puts the results where they
were: as a graph does, and unlike calling the recorded function again, it sees neither new tensors nor other values of Python's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aengine.runner.capture import Replay


class EagerCapture:
    """Satisfies `Capture`. Operations are carried out while they are recorded."""

    holds_attention = False  # torch_native plans on the host

    def __init__(self, device: torch.device) -> None:
        self._tape: _Tape | None = None
        self._bytes = 0

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        self._tape = _Tape()
        self._tape.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Replay:
        tape, self._tape = self._tape, None
        assert tape is not None, "begun"
        tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._bytes += tape.num_bytes
        return tape.replay

    def memory(self) -> int:
        """Of all tapes so far."""
        return self._bytes


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0  # of the operations' results
        self._operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = _tensors(result)
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        self.num_bytes += sum(tensor.nbytes for tensor in results if tensor.untyped_storage().data_ptr() not in given)
        self._operations.append((func, args, kwargs, results))
        return result

    def replay(self) -> None:
        for func, args, kwargs, results in self._operations:
            for new, old in zip(_tensors(func(*args, **kwargs)), results, strict=True):
                if new.data_ptr() != old.data_ptr():  # else a view, or written in place
                    old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
