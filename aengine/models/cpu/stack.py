"""The CPU decoder: what `models/torch/decoder.py` computes, from the same named weights, in one call of our kernels per step.

Owns the packed weights of a model and the C struct that describes it. KV pages and scratch come with the call.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.attention import StepLayout
from aengine.cache import LayerGroups, layer_groups
from aengine.kernels.arrays import INT4, INT8, Array, data_address
from aengine.kernels.cpu import ops
from aengine.kernels.cpu.library import (
    BLOCK,
    ELEMENTS,
    MAX_EXPERTS,
    MAX_HEAD_KINDS,
    MAX_HEADS,
    MAX_KEY_DIM,
    MAX_STATE_KEYS,
    MAX_TAPS,
    MAX_VALUE_DIM,
    PAGE_ELEMENTS,
    CStep,
    Workspace,
    address,
    address_of_params,
)
from aengine.kernels.cpu.ops import KvPool, PackedCpuAdapter, StepAdapters, place_bytes
from aengine.kernels.paged_cache import StateLayout
from aengine.models.adapters import Adapter
from aengine.models.cpu.cpu_operations import Captured, page_parts
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.models.cpu.program import CpuProgram
from aengine.models.cpu.weight_packing import pack_adapter
from aengine.models.images import StepImages
from aengine.models.sharding import vocab_bounds
from aengine.models.spec import DraftHead, Experts, LatentAttention, Layer, ModelSpec, ShortConvolution
from aengine.parallel.shard import Shard

IntArray = NDArray[np.int32]
_MOST_CAPTURING = 8  # programs for steps that bring what `Captured` says


def unsupported(spec: ModelSpec, dtype: np.dtype[Any]) -> str | None:
    """Why the kernels cannot run a model, in one line; None: they can."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not one of theirs; choose dtype bfloat16 or float32"
    for attention in spec.attentions:
        if attention.key_dim % 2 or attention.key_dim > MAX_KEY_DIM or attention.value_dim > MAX_VALUE_DIM:
            return f"head_dim {attention.key_dim} is not an even number up to {MAX_VALUE_DIM}"
    kinds = {attention.heads for attention in spec.attentions}
    if len(kinds) > MAX_HEAD_KINDS:
        return f"its layers have {len(kinds)} kinds of heads; the most is {MAX_HEAD_KINDS}"
    if spec.layer_inputs is not None and spec.layer_inputs.width % BLOCK:
        return f"inputs of layers of {spec.layer_inputs.width} numbers, which are to be a multiple of {BLOCK}"
    if spec.streams is not None:
        return "several residual streams"
    if spec.norm is None and spec.logit_scale != 1.0:
        return "logit_scale without a norm before the head"
    return next((reason for reason in map(_unsupported_layer, spec.layers) if reason is not None), None)


def _unsupported_layer(layer: Layer) -> str | None:
    attention, recurrence = layer.attention, layer.recurrence
    if recurrence is not None:
        if recurrence.key_dim % BLOCK or recurrence.value_dim % BLOCK or recurrence.key_dim > MAX_STATE_KEYS or recurrence.taps > MAX_TAPS:
            widths = f"key_dim {recurrence.key_dim} and value_dim {recurrence.value_dim}, which are to be multiples of {BLOCK}"
            return f"a recurrence with {widths}, with key_dim above {MAX_STATE_KEYS}, or with more than {MAX_TAPS} taps"
        if recurrence.norm_groups and recurrence.width // recurrence.norm_groups % BLOCK:
            return f"norms of {recurrence.width // recurrence.norm_groups} outputs, which are to be a multiple of {BLOCK}"
    if isinstance(attention, ShortConvolution):
        if attention.channels % BLOCK or attention.taps > MAX_TAPS:
            return f"a convolution of {attention.channels} channels, which are to be a multiple of {BLOCK}, or of more than {MAX_TAPS} taps"
    elif isinstance(attention, LatentAttention):
        if attention.index is not None:
            return "attention to tokens that an index chooses"
        if attention.kv_lora_rank % BLOCK or attention.nope_dim % BLOCK or attention.num_heads > MAX_HEADS:
            widths = f"kv_lora_rank {attention.kv_lora_rank} and nope_dim {attention.nope_dim}"
            return f"latent attention with {widths}, which are to be multiples of {BLOCK}, or with more than {MAX_HEADS} heads"
    elif (
        attention is not None
        and attention.qk_norm is not None
        and attention.qk_norm.whole
        and attention.num_kv_heads * attention.head_dim % BLOCK
    ):
        return f"a norm of all keys of a token whose width {attention.num_kv_heads * attention.head_dim} is not a multiple of {BLOCK}"
    if isinstance(layer.mlp, Experts):
        shared = layer.mlp.shared or layer.mlp.expert
        if layer.mlp.num_experts > MAX_EXPERTS:
            return f"{layer.mlp.num_experts} experts; the most is {MAX_EXPERTS}"
        if (shared.gated, shared.activation) != (layer.mlp.expert.gated, layer.mlp.expert.activation):
            return "experts that have other activations than the shared one, or gates where it has none"
    if layer.parallel and (layer.post_attention_norm or layer.post_mlp_norm):
        return "norms after parallel blocks"
    return None


_STATES = (
    "reads",
    "writes",
    "replays",
    "drafts",
    "kept_rows",
    "kept_lengths",
    "kept_pages",
)  # of `StepStates`, in the order of the fields of `CStep`


@dataclass(frozen=True, slots=True)
class CpuLastTokens:
    """How tokens go from one step to the next without the host: contiguous int32 arrays."""

    tokens: IntArray  # [rows], the last token of each row
    input_rows: IntArray  # rows whose last tokens become the first ids of the step when it begins
    output_rows: IntArray  # [m], rows whose last tokens become the sampled ones when the step ends; or none


@dataclass(frozen=True, slots=True)
class KeptHidden:
    """Hidden states that a draft head reads, kept by slot as keys and values are."""

    states: Array  # [slots of the pool, width], contiguous, of the model's dtype
    slots: IntArray  # where the step keeps its own: of each of its tokens, or for a head of each logits index; -1: nowhere


class StepArguments:
    """A `CStep` and the arrays that it points to, which live as long as the object."""

    def __init__(
        self,
        layout: StepLayout,
        token_ids: IntArray,
        logits_indices: IntArray,
        hidden: Array | None,
        sampled: NDArray[np.int64] | None,
        draw_params: NDArray[np.void] | None,
        last_tokens: CpuLastTokens,
        kept: KeptHidden | None = None,
        inputs: Array | None = None,
        adapters: StepAdapters | None = None,
        positions: IntArray | None = None,
        images: tuple[Array, Array | None] | None = None,
    ) -> None:
        """`images`: rows and additions. `draw_params` are of `DRAW_PARAMS`. Raises ValueError for too many or too few ids, draws or rows,
        and for last tokens that could not be written back."""
        indices = (layout.qo_indptr, layout.kv_indptr, layout.kv_indices, layout.last_page_len)
        rows = (last_tokens.tokens, last_tokens.input_rows, last_tokens.output_rows)
        positions = layout.positions if positions is None else positions
        given = (token_ids, positions, layout.slot_mapping, *indices, logits_indices, *rows)  # as the fields of `CStep`
        arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in given]
        kept_slots = None if kept is None else np.ascontiguousarray(kept.slots, dtype=np.int32)
        states = layout.states
        seen = None if layout.seen is None else np.ascontiguousarray(layout.seen, dtype=np.int32)
        of_states = [] if states is None else [np.ascontiguousarray(getattr(states, name)) for name in _STATES]
        self._keep = (arrays, of_states, hidden, sampled, draw_params, kept, kept_slots, inputs, adapters, images, seen)
        num_tokens, num_logits = layout.num_tokens, len(logits_indices)
        tokens, num_inputs, num_outputs = map(len, rows)
        self.c = CStep(
            *map(address, arrays),
            None if hidden is None else data_address(hidden),
            None if sampled is None else address(sampled),
            None if draw_params is None else address_of_params(draw_params, num_logits),
            None if kept is None else data_address(kept.states),
            None if kept_slots is None else address(kept_slots),
            None if inputs is None else data_address(inputs),
            None if adapters is None else ctypes.pointer(adapters.c),
            None if images is None else data_address(images[0]),
            None if seen is None else address(seen),
            None if images is None or images[1] is None else data_address(images[1]),
            *(map(address, of_states) if of_states else [None] * len(_STATES)),
            *(num_tokens, len(layout.last_page_len), num_logits, tokens, num_inputs, num_outputs, len(layout.kv_indices)),
            0 if kept_slots is None else len(kept_slots),
            *(0, 0) if states is None else (states.reads.shape[1], len(states.kept_rows)),
            0 if images is None else len(images[0]),
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
    hidden: Array | None
    """[m, hidden_size], filled by `run`: normed hidden states at the logits indices, for the head. None: the step samples."""
    sampled: NDArray[np.int64] | None
    """[m], filled by `run`: the next tokens at the logits indices, of a step that samples."""
    impossible: NDArray[np.bool_] | None = None
    """[m], set by `run`: which of them no logit allows, since the largest is NaN or minus infinity; None: none of them."""
    captured: Array | None = None
    """[m, width], of which `hidden` are the first columns: what else was asked for, where `Captured` says."""

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

        Raises ValueError for ids, positions, slots or pages out of range; nothing is written then. ExchangeError: other ranks did not
        take part.
        """
        workspace = self._workspace
        if workspace.running is not self:
            workspace.check(workspace.kernels.run_layers(*self._arguments))
        else:
            workspace.running = None
            if following is None:
                workspace.check(workspace.kernels.finish_layers(workspace.handle))
            elif workspace.kernels.finish_and_begin(*following._arguments, hold) == 0:
                workspace.running = following
        if self.sampled is not None and np.count_nonzero(impossible := self.sampled < 0):
            self.impossible = impossible
            np.invert(self.sampled, out=self.sampled, where=impossible)


class DecoderStack:
    """A model with packed weights. One workspace and one pool per concurrent user."""

    def __init__(
        self,
        weights: PackedWeights,
        num_positions: int,
        *,
        groups: LayerGroups | None = None,
        states: StateLayout | None = None,
        target: DecoderStack | None = None,
    ) -> None:
        """It can be called with positions below `num_positions`. `groups`: of the KV; None: all layers are in one. `states`: of recurrent
        layers. `target`: of a draft head, whose embedding and output head it reads where it has none. Raises ValueError for a model that
        `unsupported` names."""
        reason = unsupported(weights.whole_spec, weights.dtype)
        if reason is not None:
            raise ValueError(reason)
        self._weights = weights
        self.spec, self.dtype = weights.spec, weights.dtype
        self._groups, self._states = groups or layer_groups([None] * self.spec.num_layers), states
        parts = page_parts(self.spec, self._groups)
        self._place_bytes = functools.cache(lambda page_size, dtype: place_bytes(page_size, parts, dtype))  # each step asks for the same
        if target is not None:
            weights.share(target._weights)
        self._num_positions = num_positions
        self._served: tuple[DraftHead | None, DecoderStack | None] = None, None
        self._program = self._make_program(weights)
        self._capturing: dict[Captured, CpuProgram] = {}

    def serve(self, head: DraftHead, stack: DecoderStack | None) -> None:
        """From now on steps keep the hidden states that a draft head reads. Before any step is prepared. `stack`: of the head; None on the
        ranks that do not run it, which compute what those steps need."""
        self._served = head, stack
        self._capturing.clear()
        self._program = self._make_program(self._weights)

    @property
    def weights(self) -> PackedWeights:
        return self._weights

    def prepare_use(self, weights: PackedWeights) -> tuple[PackedWeights, CpuProgram | None]:
        """Other weights of the same model, for `use`. May run beside steps."""
        return weights, self._make_program(weights) if self._served[1] is None else None  # the head's weights may be others by then

    def use(self, weights: PackedWeights, program: CpuProgram | None) -> None:
        """Computes with other weights from now on, and so does a draft head with those of them that it shares. Steps that were prepared
        before are void."""
        self._weights = weights
        self._capturing.clear()
        _, stack = self._served
        if stack is not None:
            stack._weights.share(weights)
            stack._program = stack._make_program(stack._weights)
        self._program = program or self._make_program(weights)

    def drop(self) -> None:
        """Gives the weights up, and those of them that a draft head shares. Before either is called again the stack is to `use` others."""
        _, stack = self._served
        if stack is not None:
            stack._weights.unshare()
            del stack._program
        self._capturing.clear()
        self._weights = PackedWeights(self._weights.whole_spec, self.dtype, self._weights.shard)
        del self._program

    def _make_program(self, weights: PackedWeights, captured: Captured | None = None) -> CpuProgram:
        head, stack = self._served
        given = weights, self._num_positions, self._groups, self._states, head, None if stack is None else stack._weights
        return CpuProgram(*given, captured, None if captured is None else self._program)

    def _program_of(self, captured: Captured | None) -> CpuProgram:
        if captured is None:
            return self._program
        if captured not in self._capturing:
            if len(self._capturing) >= _MOST_CAPTURING:
                del self._capturing[next(iter(self._capturing))]
            self._capturing[captured] = self._make_program(self._weights, captured)
        return self._capturing[captured]

    def pack_adapter(self, adapter: Adapter) -> PackedCpuAdapter:
        """What steps of this stack take. From any thread, while steps run. Raises AdapterError for one that does not fit the model."""
        return pack_adapter(self._weights, self._program.matrices, adapter)

    @property
    def kept_width(self) -> int:
        """The width of the hidden states that steps read or keep by slot; 0: they do not."""
        return self._program.kept_width

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights; without the embedding, which may be mapped."""
        return self._weights.nbytes

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
        last_tokens: CpuLastTokens,
        kept: KeptHidden | None = None,
        inputs: Array | None = None,
        adapters: StepAdapters | None = None,
        positions: IntArray | None = None,
        images: StepImages | None = None,
        captured: Captured | None = None,
    ) -> PreparedStep:
        """A step that writes keys and values of [T] `token_ids` at the layout's slots.

        At the [m] `logits_indices` it brings hidden states; or next tokens, if it is `greedy` or has [m] `draw_params` (of `DRAW_PARAMS`).
        What a token gets depends on its own sequence alone: not on other rows, the cut into chunks, or the number of threads. `kept` is for
        a draft head, and for the model that it reads hidden states of. Of several stages, those but the last bring the residual [T,
        hidden_size] of all tokens, and those but the first are given it as `inputs`, contiguous.
        `adapters` are those of the tokens. `positions` [T]: their rows in tables of angles; None: the layout's. `images`: what the ids
        below 0 stand for; those of steps that were prepared before must not be needed any more. `captured`: what it brings beside hidden
        states, on a rank that has all layers.
        Raises ValueError for a pool or hidden states of another shape, and for another number of ids, draws or slots than there are tokens.
        """
        c = pool.c
        dtype = next((dtype for dtype in (self.dtype, INT8, INT4) if PAGE_ELEMENTS[dtype] == c.element), None)
        shape = c.layers_per_page, c.key_page_bytes, c.value_page_bytes
        if dtype is None or shape != (self._groups.layers_per_page, *self._place_bytes(c.page_size, dtype)):
            raise ValueError("the pool's layers, KV heads, widths or dtype are not the model's")
        if (layout.states is None) != (self._states is None):
            raise ValueError("the layout has no states, or the model has none")
        if len(layout.kv_indices) != len(self._groups.windows):
            raise ValueError(f"the layout has {len(layout.kv_indices)} layer groups, not {len(self._groups.windows)}")
        self._check_kept(kept, pool, layout.num_tokens if self.spec.draft_head is None else len(logits_indices))
        samples, shard = greedy or draw_params is not None, self._weights.shard
        if shard.num_ranks > 1:
            self._check_rank(workspace, shard, samples, inputs, layout.num_tokens)
        if adapters is not None:
            adapters.check(layout.num_tokens, len(self._program.matrices))
        num_rows = len(logits_indices) if shard.is_last_stage else layout.num_tokens
        program = self._program_of(captured)
        hidden = None if samples else np.empty((num_rows, program.hidden_stride), self.dtype)
        sampled = np.empty(len(logits_indices), np.int64) if samples else None
        of_images = None if images is None else self._of_images(images)
        angles = layout.positions if positions is None else positions
        program.angles.make(angles)
        step = StepArguments(
            layout, token_ids, logits_indices, hidden, sampled, draw_params, last_tokens, kept, inputs, adapters, angles, of_images
        )
        arguments = (ctypes.byref(program.c), ctypes.byref(pool.c), ctypes.byref(step.c), workspace.handle, workspace.threads)
        used = None if hidden is None else hidden[:, : self.spec.hidden_size]
        return PreparedStep(workspace, arguments, (self, program, pool, step), used, sampled, captured=None if captured is None else hidden)

    def _of_images(self, images: StepImages) -> tuple[Array, Array | None]:
        """The rows and additions of a step's images, as the kernels take them; tables of angles get those that the step names."""
        self._program.angles.mix_positions(images.first_mixed, images.mixed)
        rows, additions = (None if one is None else self._as_activations(one) for one in (images.rows, images.additions))
        assert rows is not None
        return rows, additions

    def _as_activations(self, rows: Array) -> Array:
        return np.ascontiguousarray(rows, dtype=self.dtype)

    def _check_kept(self, kept: KeptHidden | None, pool: KvPool, num_rows: int) -> None:
        width = self.kept_width
        if kept is None and not width:
            return
        shape = (pool.c.num_pages * pool.c.page_size, width)
        if kept is None or kept.states.shape != shape or kept.states.dtype != self.dtype or not kept.states.flags.c_contiguous:
            raise ValueError(f"the model keeps hidden states {list(shape)} of {self.dtype}")
        if len(kept.slots) != num_rows:
            raise ValueError(f"there are {len(kept.slots)} slots for hidden states of {num_rows} tokens")

    def _check_rank(self, workspace: Workspace, shard: Shard, samples: bool, inputs: Array | None, num_tokens: int) -> None:
        size = 1 if workspace.exchange is None else workspace.exchange.c.size
        if shard.size > 1 and size != shard.size:
            raise ValueError(f"the workspace's exchange is between {size} ranks, and the model is on {shard.size}")
        if samples:
            raise ValueError("a step of one of several ranks cannot sample")
        shape = (num_tokens, self.spec.hidden_size) if shard.stage else None
        found = None if inputs is None else tuple(inputs.shape)
        if found != shape or (inputs is not None and (inputs.dtype != self.dtype or not inputs.flags.c_contiguous)):
            raise ValueError(f"inputs of shape {found} are not {shape} of {self.dtype}, which this stage begins with")

    def logits(self, workspace: Workspace, hidden: Array, adapters: StepAdapters | None = None) -> Array:
        """[m, hidden_size] of `PreparedStep.hidden` -> [m, vocab_size] float32; of several ranks, this rank's columns of them. `adapters`:
        of the rows."""
        if adapters is not None:
            adapters.check(len(hidden), len(self._program.matrices))
        return ops.logits(workspace, hidden, self._weights.linears["head"], self.spec.logit_soft_cap, adapters)

    def gather_logits(self, workspace: Workspace, part: Array) -> Array | None:
        """The `logits` of all ranks, [m, vocab_size], on the first of them; None on the others. All call it. Raises ExchangeError."""
        shard = self._weights.shard
        return part if shard.size == 1 else ops.gather_ranks(workspace, part, vocab_bounds(self.spec, shard))
