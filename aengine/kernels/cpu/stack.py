"""A whole decoder in one call per step: what `models/decoder.py` computes, from the same named weights.

Owns the packed weights of a model and the C struct that describes it. KV pages and scratch come with the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu import ops
from aengine.kernels.cpu.library import BLOCK, ELEMENTS, MAX_HEAD_DIM, PANEL, CLayer, CModel, CPackedLinear, Workspace
from aengine.kernels.cpu.memory import Allocate, lazy_zeros
from aengine.kernels.cpu.packing import PackedLinear
from aengine.kernels.cpu.pool import KvPool
from aengine.kernels.cpu.step import IntArray, Layout, StepArguments, check
from aengine.kernels.feed import NOTHING, Feed


class StackSpec(Protocol):
    """The part of `aengine.models.ModelSpec` that shapes the computation."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def tied_head(self) -> bool: ...


def unsupported(spec: StackSpec, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run a model, in one line; None: they can."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not bfloat16 or float32"
    if spec.head_dim % BLOCK or not BLOCK <= spec.head_dim <= MAX_HEAD_DIM:
        return f"head_dim {spec.head_dim} is not a multiple of {BLOCK} in [{BLOCK}, {MAX_HEAD_DIM}]"
    return None


class PreparedStep:
    """One step of a stack. Nothing is left to do but the call, which releases the GIL at once. Token ids may change until then."""

    def __init__(
        self, workspace: Workspace, arguments: tuple[Any, ...], keep: object, hidden: Tensor | None, chosen: NDArray[np.int64] | None
    ) -> None:
        self._workspace = workspace
        self._arguments = arguments
        self._keep = keep  # what the arguments point to
        self.hidden = hidden
        """[m, hidden_size]: after `run`, normed hidden states of the wanted tokens, ready for the head; of a step that does not choose."""
        self.chosen = chosen
        """[m]: after `run`, the tokens that follow the wanted ones; of a step that chooses."""

    def begin(self) -> None:
        """Lets other threads go ahead with it. Until `run` takes part and sees it through, the workspace serves nothing else.

        Nothing happens where `run` will raise an error.
        """
        if self._workspace.kernels.begin_layers(*self._arguments) == 0:
            self._workspace.under_way = self

    @property
    def has_begun(self) -> bool:
        return self._workspace.under_way is self

    def follow(self, hold: ctypes.c_int32) -> None:
        """Begins when the step that is under way and run next is over, unless `hold` is not 0 by then; `has_begun` tells."""
        self._workspace.following = (self, hold)

    def run(self) -> None:
        """Raises ValueError for ids, positions, slots or pages out of range; nothing is written then."""
        workspace = self._workspace
        following, workspace.following = workspace.following, None
        if workspace.under_way is not self:
            check(workspace.kernels.run_layers(*self._arguments))
            return
        workspace.under_way = None
        if following is None:
            workspace.kernels.finish_layers(workspace.handle)
            return
        step, hold = following
        if workspace.kernels.go_on(*step._arguments, hold) == 0:
            workspace.under_way = step


class DecoderStack:
    """A model with packed weights. Immutable once built; one workspace and one pool per concurrent user."""

    def __init__(
        self,
        workspace: Workspace,
        spec: StackSpec,
        weights: Iterable[tuple[str, Sequence[Tensor]]],
        cos_sin: Tensor,
        *,
        dtype: torch.dtype,
        int8: bool = False,
        allocate: Allocate = lazy_zeros,
    ) -> None:
        """Packs each of `weights` as it comes: the names of `models.named_weights` with their parts, tensors that are one after another
        the rows of a parameter. What is packed is not kept; the embedding is, where it is of `dtype`, so it may stay in a mapped file.

        `cos_sin` is [positions, head_dim] float32. With `int8` all linear layers and the head are quantised.
        `allocate` makes the memory of packed matrices.
        Raises ValueError for a model that `unsupported` names, and for weights that are missing or unknown.
        """
        reason = unsupported(spec, dtype)
        if reason is not None:
            raise ValueError(reason)
        self.spec = spec
        self.dtype = dtype
        self._cos_sin = cos_sin.float().contiguous()
        self._hidden_stride = -(-spec.hidden_size // PANEL) * PANEL
        self._norms: dict[str, Tensor] = {}
        self._linears: dict[str, PackedLinear] = {}
        self._embedding = torch.empty(0)
        self._take(workspace, weights, int8, allocate)
        self._layers = (CLayer * spec.num_layers)(*(self._layer(index) for index in range(spec.num_layers)))
        self._c = CModel(
            layers=self._layers,
            head=ctypes.pointer(self._linears["head"].c),
            embedding=self._embedding.data_ptr(),
            final_norm=self._norms["norm"].data_ptr(),
            cos_sin=self._cos_sin.data_ptr(),
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab_size,
            num_positions=len(self._cos_sin),
            eps=spec.rms_norm_eps,
            scale=spec.head_dim**-0.5,
            soft_cap=0.0,
            element=ELEMENTS[dtype],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights; without the embedding, which may be mapped."""
        return sum(linear.nbytes for linear in self._linears.values()) + sum(norm.nbytes for norm in self._norms.values())

    @property
    def head(self) -> PackedLinear:
        """The output head: [vocab_size, hidden_size]."""
        return self._linears["head"]

    def run(self, workspace: Workspace, pool: KvPool, layout: Layout, token_ids: IntArray, wanted: IntArray) -> Tensor:
        """The hidden states of a step that is prepared and run at once."""
        step = self.prepare(workspace, pool, layout, token_ids, wanted)
        step.run()
        assert step.hidden is not None, "not greedy"
        return step.hidden

    def prepare(
        self,
        workspace: Workspace,
        pool: KvPool,
        layout: Layout,
        token_ids: IntArray,
        wanted: IntArray,
        *,
        greedy: bool = False,
        draws: NDArray[np.void] | None = None,
        feed: Feed = NOTHING,
    ) -> PreparedStep:
        """One step, ready to run: it will write keys and values of the T `token_ids` at the layout's slots and bring the hidden states of
        the tokens `wanted` (indices into the step). Or it chooses what follows them: what is likeliest if it is `greedy`, else as each of
        [m] `draws` (of `DRAW`) says. With `feed` it reads the first ids when it begins, and keeps what it chose.

        Results of a token depend on its own sequence alone: not on other rows, the cut into chunks, or the number of threads.
        Raises ValueError for a pool of another shape, and for another number of ids or draws than there are tokens.
        """
        shape = (pool.c.num_layers, pool.c.kv_heads, pool.c.head_dim, pool.c.element)
        if shape != (self._c.num_layers, self._c.kv_heads, self._c.head_dim, self._c.element):
            raise ValueError("the pool's layers, KV heads, head_dim or dtype are not the model's")
        chooses = greedy or draws is not None
        hidden = None if chooses else torch.empty(len(wanted), self._hidden_stride, dtype=self.dtype)
        chosen = np.empty(len(wanted), np.int64) if chooses else None
        step = StepArguments(layout, token_ids, wanted, hidden, chosen, draws, feed)
        arguments = (ctypes.byref(self._c), ctypes.byref(pool.c), ctypes.byref(step.c), workspace.handle, workspace.threads)
        used = None if hidden is None else hidden[:, : self.spec.hidden_size]
        return PreparedStep(workspace, arguments, (self, pool, step), used, chosen)

    def logits(self, workspace: Workspace, hidden: Tensor) -> Tensor:
        """[m, hidden_size] of `run` -> [m, vocab_size] float32."""
        return ops.logits(workspace, hidden, self.head)

    def greedy(self, workspace: Workspace, hidden: Tensor) -> Tensor:
        """[m, hidden_size] of `run` -> [m] int64: the argmax of `logits`, which are not written. A greedy step brings it for less."""
        return ops.argmax(workspace, hidden, self.head)

    def _take(self, workspace: Workspace, weights: Iterable[tuple[str, Sequence[Tensor]]], int8: bool, allocate: Allocate) -> None:
        spec = self.spec
        shapes = _shapes(spec)
        for name, parts in weights:
            stem, _, kind = name.rpartition(".")
            if stem not in shapes or kind not in ("weight", "bias"):
                raise ValueError(f"{name} is not a weight of the model")
            expected = shapes[stem] if kind == "weight" else shapes[stem][:1]
            shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
            if shape != expected:
                raise ValueError(f"{name} has shape {shape}; the model's is {expected}")
            if kind == "bias":
                self._linears[stem].set_bias(parts)
            elif len(expected) == 1:
                self._norms[stem] = ops.norm_weight(torch.cat(tuple(parts)))
            else:
                self._take_matrix(workspace, stem, parts, int8, allocate)
        missing = shapes.keys() - self._norms.keys() - self._linears.keys() - {"embedding"}
        if missing or not len(self._embedding):
            raise ValueError(f"{min(missing, default='embedding')}.weight is missing")

    def _take_matrix(self, workspace: Workspace, stem: str, parts: Sequence[Tensor], int8: bool, allocate: Allocate) -> None:
        if stem == "embedding":
            self._embedding = (parts[0] if len(parts) == 1 else torch.cat(tuple(parts))).to(self.dtype).contiguous()
            if not self.spec.tied_head:
                return
            stem = "head"
        packable = [part if part.dtype in ELEMENTS else part.to(self.dtype) for part in parts]
        self._linears[stem] = PackedLinear(
            workspace.kernels,
            packable,
            dtype=self.dtype,
            threads=workspace.threads,
            interleaved=stem.endswith("gate_up"),
            int8=int8,
            allocate=allocate,
        )

    def _layer(self, index: int) -> CLayer:
        def norm(name: str) -> int | None:
            found = self._norms.get(f"layers.{index}.{name}")
            return None if found is None else found.data_ptr()

        def linear(name: str) -> CPackedLinear:
            return self._linears[f"layers.{index}.{name}"].c

        return CLayer(
            attention_norm=norm("attention_norm"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            mlp_norm=norm("mlp_norm"),
            qkv=linear("qkv"),
            output=linear("output"),
            gate_up=linear("gate_up"),
            down=linear("down"),
            window=self.spec.windows[index] or 0,
        )


def _shapes(spec: StackSpec) -> dict[str, tuple[int, ...]]:
    """Of every weight that the model must have, without ".weight"."""
    hidden, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, hidden), "head": (spec.vocab_size, hidden), "norm": (hidden,)}
    for index in range(spec.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "attention_norm": (hidden,),
            "qkv": (queries + 2 * keys, hidden),
            "output": (hidden, queries),
            "mlp_norm": (hidden,),
            "gate_up": (2 * spec.intermediate_size, hidden),
            "down": (hidden, spec.intermediate_size),
        }
        if spec.qk_norm:
            layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
