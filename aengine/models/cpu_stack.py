"""The CPU decoder: what `decoder.py` computes, from the same named weights, in one call of our kernels per step.

Owns the packed weights of a model and the C struct that describes it. KV pages and scratch come with the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention import StepLayout
from aengine.kernels.cpu import ops
from aengine.kernels.cpu.library import (
    ELEMENTS,
    MAX_VALUE_DIM,
    CStep,
    Workspace,
    address,
    address_of_params,
    check,
)
from aengine.kernels.cpu.packing import PackedLinear
from aengine.kernels.cpu.pool import KvPool
from aengine.kernels.warm_memory import Allocate, lazy_bytes
from aengine.models.cpu_program import PackedWeights, Program
from aengine.models.named_weights import named_weights
from aengine.models.spec import Activation, Attention, Layer, Mlp, ModelSpec, Norm, QkNorm

IntArray = NDArray[np.int32]


def unsupported(spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run a model, in one line; None: they can."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not bfloat16 or float32"
    head_dim = spec.layers[0].attention.key_dim
    if head_dim % 2 or head_dim > MAX_VALUE_DIM:
        return f"head_dim {head_dim} is not an even number up to {MAX_VALUE_DIM}"
    for layer in spec.layers:
        if not _is_plain(spec, layer):
            return "its layers have blocks that the CPU kernels do not run"
    return None


def _is_plain(spec: ModelSpec, layer: Layer) -> bool:
    """Whether a layer of the model is one of a Llama: what this stack runs."""
    attention, mlp, norm = layer.attention, layer.mlp, spec.norm
    if not (isinstance(attention, Attention) and isinstance(mlp, Mlp) and mlp.gated and mlp.activation is Activation.SILU):
        return False
    first, rope = spec.layers[0].attention, attention.rope
    return (
        norm == Norm(eps=norm.eps if norm else 0.0)
        and (layer.attention_norm, layer.mlp_norm, layer.post_attention_norm, layer.post_mlp_norm) == (norm, norm, None, None)
        and (layer.parallel, layer.residual_multiplier, attention.sinks) == (False, 1.0, False)
        and (attention.scale, attention.soft_cap, rope) == (first.scale, first.soft_cap, first.rope)
        and rope is not None
        and 2 * len(rope.frequencies) == attention.head_dim
        and attention.qk_norm in (None, QkNorm(norm))
        and (spec.embedding_scale, spec.logit_scale, spec.logit_soft_cap, spec.head_bias) == (1.0, 1.0, 0.0, False)
        and spec.learned_positions is None
    )


@dataclass(frozen=True, slots=True)
class LastTokens:
    """How tokens go from one step to the next without the host: contiguous int32 arrays."""

    tokens: IntArray  # [rows], the last token of each row
    input_rows: IntArray  # rows whose last tokens become the first ids of the step when it begins
    output_rows: IntArray  # [m], rows whose last tokens become the sampled ones when the step ends; or none


class StepArguments:
    """A `CStep` and the arrays that it points to, which live as long as the object."""

    def __init__(
        self,
        layout: StepLayout,
        token_ids: IntArray,
        logits_indices: IntArray,
        hidden: Tensor | None,
        sampled: NDArray[np.int64] | None,
        draw_params: NDArray[np.void] | None,
        last_tokens: LastTokens,
    ) -> None:
        """`draw_params` are of `DRAW_PARAMS`. Raises ValueError for too many or too few ids, draws or rows, and for last tokens that could
        not be written back."""
        indices = (layout.qo_indptr, layout.kv_indptr, layout.kv_indices, layout.last_page_len)
        rows = (last_tokens.tokens, last_tokens.input_rows, last_tokens.output_rows)
        given = (token_ids, layout.positions, layout.slot_mapping, *indices, logits_indices, *rows)  # as the fields of `CStep`
        arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in given]
        self._keep = (arrays, hidden, sampled, draw_params)
        num_tokens, num_logits = layout.num_tokens, len(logits_indices)
        tokens, num_inputs, num_outputs = map(len, rows)
        self.c = CStep(
            *map(address, arrays),
            None if hidden is None else hidden.data_ptr(),
            None if sampled is None else address(sampled),
            None if draw_params is None else address_of_params(draw_params, num_logits),
            *(num_tokens, len(layout.last_page_len), num_logits, tokens, num_inputs, num_outputs),
        )
        if len(token_ids) != num_tokens:
            raise ValueError(f"there are {len(token_ids)} token ids for {num_tokens} positions")
        if arrays[-3] is not last_tokens.tokens:
            found = f"{last_tokens.tokens.dtype} with strides {last_tokens.tokens.strides}"
            raise ValueError(f"the last tokens are not contiguous int32, but {found}")
        num_sampled = 0 if sampled is None else num_logits
        if num_inputs > num_tokens or num_outputs not in (0, num_sampled):
            raise ValueError(f"{num_inputs} input rows and {num_outputs} output rows do not fit {num_tokens} tokens, {num_sampled} sampled")


@dataclass(eq=False)
class PreparedStep:
    """One step of a stack, ready for the call, which releases the GIL at once. Token ids may change until then."""

    _workspace: Workspace
    _arguments: tuple[Any, ...]
    _keep: object  # what the arguments point to
    hidden: Tensor | None
    """[m, hidden_size], filled by `run`: normed hidden states at the logits indices, for the head. None: the step samples."""
    sampled: NDArray[np.int64] | None
    """[m], filled by `run`: the next tokens at the logits indices, of a step that samples."""

    def begin(self) -> None:
        """Starts the step on other threads and returns at once. The workspace serves nothing else until `run` has returned.

        Does nothing for a step that `run` will refuse with an error.
        """
        if self._workspace.kernels.begin_layers(*self._arguments) == 0:
            self._workspace.running = self

    @property
    def has_begun(self) -> bool:
        """Whether it has begun and is not finished."""
        return self._workspace.running is self

    def run(self, following: PreparedStep | None = None, hold: ctypes.c_int32 | None = None) -> None:
        """Runs the step, or its rest if it has begun. In that case `following` begins right after it, within the same call, unless `hold`
        is not 0 at that moment.

        Raises ValueError for ids, positions, slots or pages out of range; nothing is written then.
        """
        workspace = self._workspace
        if workspace.running is not self:
            check(workspace.kernels.run_layers(*self._arguments))
            return
        workspace.running = None
        if following is None:
            workspace.kernels.finish_layers(workspace.handle)
        elif workspace.kernels.finish_and_begin(*following._arguments, hold) == 0:
            workspace.running = following


class DecoderStack:
    """A model with packed weights. Immutable once built; one workspace and one pool per concurrent user."""

    def __init__(
        self,
        workspace: Workspace,
        spec: ModelSpec,
        weights: Iterable[tuple[str, Sequence[Tensor]]],
        num_positions: int,
        *,
        dtype: torch.dtype,
        int8: bool = False,
        allocate: Allocate = lazy_bytes,
    ) -> None:
        """Packs each of `weights` as it comes: the names of `named_weights(spec)` with their parts, tensors with consecutive rows of a
        parameter. Only the embedding is kept unpacked: if it has `dtype` it is not copied, so it may stay in a mapped file.

        It can be called with positions below `num_positions`. With `int8` all linear layers and the head are quantised.
        `allocate` makes the memory of packed matrices.
        Raises ValueError for a model that `unsupported` names, and for weights that are missing, unknown or of another shape.
        """
        reason = unsupported(spec, dtype)
        if reason is not None:
            raise ValueError(reason)
        self.spec = spec
        self.dtype = dtype
        self._norms: dict[str, Tensor] = {}
        self._linears: dict[str, PackedLinear] = {}
        self._embedding = torch.empty(0)
        self._take(workspace, weights, int8, allocate)
        self._program = Program(spec, dtype, num_positions, PackedWeights(self._linears, self._norms, self._embedding))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights; without the embedding, which may be mapped."""
        return sum(linear.nbytes for linear in self._linears.values()) + sum(norm.nbytes for norm in self._norms.values())

    def prepare(
        self,
        workspace: Workspace,
        pool: KvPool,
        layout: StepLayout,
        token_ids: IntArray,
        logits_indices: IntArray,
        *,
        greedy: bool = False,
        draw_params: NDArray[np.void] | None = None,
        last_tokens: LastTokens,
    ) -> PreparedStep:
        """A step that writes keys and values of [T] `token_ids` at the layout's slots.

        At the [m] `logits_indices` it brings hidden states; or next tokens, if it is `greedy` or has [m] `draw_params` (of `DRAW_PARAMS`).
        What a token gets depends on its own sequence alone: not on other rows, the cut into chunks, or the number of threads.
        Raises ValueError for a pool of another shape, and for another number of ids or draws than there are tokens.
        """
        if (pool.c.num_layers, pool.c.kv_heads, pool.c.key_dim, pool.c.value_dim, pool.c.element) != self._program.kv_shape:
            raise ValueError("the pool's layers, KV heads, widths or dtype are not the model's")
        samples = greedy or draw_params is not None
        hidden = None if samples else torch.empty(len(logits_indices), self._program.hidden_stride, dtype=self.dtype)
        sampled = np.empty(len(logits_indices), np.int64) if samples else None
        step = StepArguments(layout, token_ids, logits_indices, hidden, sampled, draw_params, last_tokens)
        arguments = (ctypes.byref(self._program.c), ctypes.byref(pool.c), ctypes.byref(step.c), workspace.handle, workspace.threads)
        used = None if hidden is None else hidden[:, : self.spec.hidden_size]
        return PreparedStep(workspace, arguments, (self, pool, step), used, sampled)

    def logits(self, workspace: Workspace, hidden: Tensor) -> Tensor:
        """[m, hidden_size] of `PreparedStep.hidden` -> [m, vocab_size] float32."""
        return ops.logits(workspace, hidden, self._linears["head"])

    def _take(self, workspace: Workspace, weights: Iterable[tuple[str, Sequence[Tensor]]], int8: bool, allocate: Allocate) -> None:
        missing = named_weights(self.spec)
        for name, parts in weights:
            expected = missing.pop(name, None)
            if expected is None:
                raise ValueError(f"{name} is not a weight of the model, or was given before")
            shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
            if shape != expected.shape:
                raise ValueError(f"{name} has shape {shape}; the model's is {expected.shape}")
            stem, _, kind = name.rpartition(".")
            if kind == "bias":
                self._linears[stem].set_bias(parts)
            elif len(shape) == 1:
                self._norms[stem] = ops.norm_weight(torch.cat(tuple(parts)))
            else:
                self._take_matrix(workspace, stem, parts, int8, allocate)
        if missing:
            raise ValueError(f"{next(iter(missing))} is missing")

    def _take_matrix(self, workspace: Workspace, stem: str, parts: Sequence[Tensor], int8: bool, allocate: Allocate) -> None:
        if stem == "embedding":
            self._embedding = (parts[0] if len(parts) == 1 else torch.cat(tuple(parts))).to(self.dtype).contiguous()
            if not self.spec.tied_head:
                return
            stem = "head"
        dtypes = {part.dtype for part in parts}
        packable = parts if len(dtypes) == 1 and dtypes <= ELEMENTS.keys() else [part.to(self.dtype) for part in parts]
        self._linears[stem] = PackedLinear(
            workspace.kernels,
            packable,
            dtype=self.dtype,
            threads=workspace.threads,
            interleaved=stem.endswith("gate_up"),
            int8=int8,
            allocate=allocate,
        )
