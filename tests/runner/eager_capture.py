"""`EagerCapture`: recording without a device that can, for tests of everything around it.

Owns a tape of operations. Replaying calls each of them again, on the very tensors it was recorded with, and puts the results where they
were: as a graph does, and unlike calling the recorded function again, it sees neither new tensors nor other values of Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aengine.attention import AttentionMetadata, AttentionStep, StepLayout
from aengine.attention.base import convolve_torch
from aengine.attention.torch_native import TorchNativeBackend
from aengine.layers.ops import TorchOps
from aengine.runner.torch.capture import Replay

_experts = TorchOps.experts


class PlannedStep:
    """A `GraphStep` that is planned anew after each `prepare`. Attention is not recorded but runs at each replay: its operations depend
    on lengths that the host knows."""

    def __init__(self, backend: TorchNativeBackend, buffers: AttentionMetadata) -> None:
        self._backend = backend
        self._buffers = buffers
        self._written: tuple[Tensor, Tensor] | None = None

    def prepare(self, layout: StepLayout) -> None:
        self._layout = layout
        self._step: AttentionStep | None = None

    def plan(self) -> AttentionStep:
        """The step, from the layout that was prepared last."""
        slots = torch.from_numpy(self._layout.slot_mapping)
        return self._backend.plan(replace(self._buffers, host=self._layout, slot_mapping=slots))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._written = key, value

    def convolve(self, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Recorded as on a GPU: what it reads of the step is in the buffers."""
        return convolve_torch(self._backend, self._buffers, places, inputs, weight, bias)

    def target(self, layer: int) -> None:
        """Nothing is written before a replay."""

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        assert self._written is not None, "a layer writes before it attends"
        key, value = self._written
        attended = query.new_empty(*query.shape[:2], self._backend.spec.value_dim) if out is None else out

        def run() -> None:
            if self._step is None:
                self._step = self.plan()
            self._step.write(layer, key, value)
            self._step.attend(layer, query, sinks, attended)

        _Tape.run_live(run)
        return attended


class EagerCapture:
    """Satisfies `Capture`. Operations are executed while they are recorded."""

    def __init__(self, device: torch.device) -> None:
        self._tape: _Tape | None = None
        self._bytes = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        """Lends the torch_native backend a graph step. Experts are not recorded but run at each replay: on a CPU, which tokens an expert
        computes decides shapes."""
        with (
            mock.patch.object(TorchNativeBackend, "graph_step", lambda *given: self.graph_step(*given)),
            mock.patch.object(TorchOps, "experts", _live_experts),
        ):
            yield

    @staticmethod
    def graph_step(backend: TorchNativeBackend, buffers: AttentionMetadata) -> PlannedStep | None:
        return PlannedStep(backend, buffers)

    def begin(self) -> None:
        self._tape = _Tape()
        self._tape.__enter__()  # type: ignore[no-untyped-call]
        _Tape.recording = self._tape

    def end_capture(self) -> Replay:
        tape, self._tape, _Tape.recording = self._tape, None, None
        assert tape is not None, "begun"
        tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._bytes += tape.num_bytes
        return tape.replay

    def memory(self) -> int:
        """Of all tapes so far."""
        return self._bytes


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    recording: ClassVar[_Tape | None] = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0  # of the operations' results
        self._operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._paused = False

    @classmethod
    def run_live(cls, action: Callable[[], None]) -> None:
        """Runs the action now, and again at this place of every replay, with whatever operations it then calls."""
        tape = cls.recording
        if tape is None:
            return action()
        tape._paused = True
        action()
        tape._paused = False
        tape._operations.append((action, (), {}, []))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
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


def _live_experts(ops: TorchOps, x: Tensor, *given: Any) -> Tensor:
    out = torch.zeros(x.shape)

    def run() -> None:
        out.copy_(_experts(ops, x, *given))

    _Tape.run_live(run)
    return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
