"""`ModelSpec`: the description of a decoder-only transformer, made of kinds of blocks.

Both decoders (torch in `models/torch/decoder.py`, the CPU stack in `models/cpu/stack.py`) execute this description; `named_weights.py`
derives the parameters from it, `families/` makes it from a config.json. Knows nothing of files, weights or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypeGuard

from aengine.api.dataclass import dataclass
from aengine.kernels.paged_cache import Heads, Scoring, StateShape, layers_per_place
from aengine.kernels.params import Activation, ExpertRouting
from aengine.layers.rotary import QueryScale, RopeSpec
from aengine.models.images import ImageInput

# Of pages of models without attention: a state of one layer takes about four pages, or more if it is large.
_PAGE_HEAD_DIM, _MAX_PAGE_HEADS, _NUMBERS_PER_HEAD = 128, 32, 8192


class NormKind(Enum):
    RMS = "rms"  # x / sqrt(mean(x^2) + eps) * weight
    LAYER = "layer"  # (x - mean(x)) / sqrt(var(x) + eps) * weight + bias


@dataclass(frozen=True, slots=True)
class Norm:
    kind: NormKind = NormKind.RMS
    eps: float = 1e-6
    bias: bool = False
    unit_offset: bool = False  # the factor is 1 + weight (Gemma)
    weighted: bool = True  # has weights; else they are 1 (Llama 4)


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Normalises queries and keys before they are rotated."""

    norm: Norm
    whole: bool = False  # over all heads together (OLMo 2); else over each head
    head_weights: bool = False  # every head has weights of its own (StableLM); else all heads share one weight [head_dim]


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention: query head h reads KV head h // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys, and of values unless `v_dim` says otherwise
    scale: float
    rope: RopeSpec | None  # of the first 2 * len(frequencies) dimensions of a head, halves paired; None: no rotation
    window: int | None = None  # latest tokens that a query attends to, itself included; None: all
    chunked: bool = False  # of these, only those from the last position on that is a multiple of the window (Llama 4)
    soft_cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: off
    sinks: bool = False  # a logit per head in the denominator of the softmax (GPT-OSS)
    slopes: tuple[float, ...] = ()  # by head what a score loses for each position between key and query (ALiBi); empty: nothing
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False  # what was attended is multiplied by sigmoid(g), where the last rows of qkv make g (Qwen3-Next)
    qk_norm: QkNorm | None = None
    query_scale: QueryScale | None = None
    v_dim: int | None = None
    value_eps: float | None = None  # of an RMSNorm of each value head, without weights (Gemma 4); None: there is none
    keys_as_values: bool = False  # a value is its key as it is projected (Gemma 4); needs a value_eps
    within_images: bool = False  # a token of an image sees all of that image, within its window backwards (Gemma 3)
    kv_distance: int = 0  # a layer without keys and values of its own reads those of the layer so many before it (Gemma 4); 0: it has them

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim)

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.scale, self.window, self.soft_cap, self.sinks, self.slopes, self.within_images, self.chunked)

    @property
    def key_dim(self) -> int:
        return self.head_dim

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """The widths of what is projected of each KV head: a key and a value, or the former, or nothing."""
        return () if self.kv_distance else (self.head_dim,) if self.keys_as_values else (self.head_dim, self.value_dim)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim


@dataclass(frozen=True, slots=True)
class SparseIndex:
    """What chooses the tokens that a query of latent attention sees (DeepSeek-V3.2, 2025): the `top_k` with the highest scores, the earlier
    ones where scores are equal, or all of fewer.

    The score of a token is the sum over the index heads of relu(q . k / sqrt(head_dim)) * w / sqrt(num_heads). `index_q` projects q of each
    head from the normed `q_down`, `index_k` one k, which `index_k_norm` norms, and `index_weights` w of each head. The first rope_dim
    numbers of q and k are rotated. A token's k is kept before its latent key.
    """

    num_heads: int
    head_dim: int
    top_k: int
    norm: Norm  # of index_k_norm


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form, which is grouped-query attention with one KV head.

    A key is the rotated part (shared by all heads), then the normed latent; a value is the normed latent. A query is its rotated part, then
    its other part times the head's `key_up`; what was attended is multiplied by the head's `value_up`.
    """

    num_heads: int
    q_lora_rank: int | None  # None: queries are projected from the hidden state directly
    kv_lora_rank: int  # width of the latent
    nope_dim: int  # of a head's query, not rotated
    rope_dim: int  # of a head's query and of the shared key, rotated
    v_dim: int  # of a head's value after `value_up`
    scale: float
    rope: RopeSpec
    norm: Norm  # of the latents
    bias: bool = False  # of q_down, kv_down and output
    window: int | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    index: SparseIndex | None = None

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim)

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.scale, self.window, self.soft_cap, self.sinks)

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def key_dim(self) -> int:
        return (0 if self.index is None else self.index.head_dim) + self.rope_dim + self.kv_lora_rank

    @property
    def value_dim(self) -> int:
        return self.kv_lora_rank


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated causal convolution of a few tokens in place of attention (LFM2, 2025): conv_out(c * conv(b * x)).

    b, c and x of each token, [channels] each, are projected from the hidden state by `conv_in`. A channel of conv is the sum of the latest
    `taps` inputs of that channel, each times a weight of its own, the newest with the last one.
    """

    channels: int
    taps: int
    bias: bool = False  # of conv_in, conv and conv_out

    rope = None

    @property
    def window(self) -> int:
        """The latest tokens that one sees, itself included."""
        return self.taps


class RecurrenceKind(Enum):
    GATED_DELTA = "gated_delta"  # Yang et al., "Gated Delta Networks", 2024 (arXiv 2412.06464)
    KIMI_DELTA = "kimi_delta"  # Kimi Team, "Kimi Linear", 2025 (arXiv 2510.26692)
    MAMBA1 = "mamba1"  # Gu and Dao, "Mamba", 2023 (arXiv 2312.00752)
    MAMBA2 = "mamba2"  # Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060)
    LIGHTNING = "lightning"  # Qin et al., "Lightning Attention-2", 2024 (arXiv 2401.04658)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A layer's mixer with a state in place of keys and values: for each head a matrix S [key_dim, value_dim] in float32, which begins as
    zero.

    `recur_in` projects q and k of each key head, v and the gate z of each head, and `recur_gates` a of each head, of GATED_DELTA b before
    them. A causal convolution of `taps` tokens with SiLU is applied to each number of q, k and v. Of each token, with the step
    dt = softplus(a + `step_bias`) and decay = exp(-exp(`log_decay`) * dt):

    - GATED_DELTA divides q and k by their lengths, and q by sqrt(key_dim).
      S = decay * S;  S = S + outer(k, sigmoid(b) * (v - S^T k));  o = S^T q
    - KIMI_DELTA is GATED_DELTA with a decay for each of the key_dim rows of S. Its a, [key_dim] of each head, and its z are projected by
      two matrices each, `decay_down` and `decay_up`, `z_down` and `z_up`, with `gate_rank` numbers between them.
    - MAMBA2, whose papers name q C, k B and v x:
      S = decay * S + outer(k, dt * v);  o = S^T q + `skip` * v
    - MAMBA1 is MAMBA2 with an a, `step_bias` and `skip` for each of the value_dim columns of S, and a `log_decay` for each of its numbers;
      a head is some of the channels. v alone is convolved: `recur_gates` projects q and k from it, and `decay_down` and `decay_up` a.
      With a `gate_norm`, what `decay_down` makes, q and k are normed by `decay_norm`, `gate_q_norm` and `gate_k_norm`.
    - LIGHTNING has no gates, and no convolution, but SiLU: `taps` is 1. The decay of a head is exp(-slope), by `slopes`.
      S = decay * S + outer(k, v);  o = S^T q

    `recur_out` projects norm(o) * silu(z), or if `gated_first` norm(o * silu(z)); of KIMI_DELTA and LIGHTNING norm(o) * sigmoid(z).
    """

    kind: RecurrenceKind
    num_heads: int
    num_key_heads: int  # head h reads key head h // (num_heads // num_key_heads)
    key_dim: int
    value_dim: int
    taps: int
    norm: Norm | None
    norm_groups: int | None = None  # equal parts of the outputs of all heads that are normed apart; None: each head, by the same weights
    gated_first: bool = False
    conv_bias: bool = False
    bias: bool = False  # of recur_in, recur_gates and recur_out
    gate_rank: int | None = None
    gate_norm: Norm | None = None
    slopes: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """How many numbers of a token all heads have."""
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """How many numbers of a token are convolved: q, k and v; of MAMBA1 v."""
        return self.width + (0 if self.kind is RecurrenceKind.MAMBA1 else 2 * self.num_key_heads * self.key_dim)

    @property
    def num_gates(self) -> int:
        match self.kind:
            case RecurrenceKind.GATED_DELTA:
                return 2 * self.num_heads
            case RecurrenceKind.KIMI_DELTA:
                return (self.key_dim + 1) * self.num_heads
            case RecurrenceKind.MAMBA1:
                return 2 * self.num_key_heads * self.key_dim + self.width
            case RecurrenceKind.MAMBA2:
                return self.num_heads
            case RecurrenceKind.LIGHTNING:
                return 0

    @property
    def gated_by_sigmoid(self) -> bool:
        """Whether z gates by its sigmoid; else by its SiLU."""
        return self.kind in (RecurrenceKind.KIMI_DELTA, RecurrenceKind.LIGHTNING)

    @property
    def state(self) -> StateShape:
        return StateShape(self.num_heads, self.key_dim, self.value_dim, self.channels + self.num_gates, self.taps)


@dataclass(frozen=True, slots=True)
class Mlp:
    """An MLP: down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    gated: bool = True
    up_bias: bool = False  # of gate and up
    down_bias: bool = False
    sparsity: float = 0.0
    """Above 0: gate(x) becomes relu(gate(x) - its mean - z * its deviation), z being the normal quantile of this share (Gemma 3n)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, of which each token goes to a few."""

    num_experts: int
    expert: Mlp
    routing: ExpertRouting
    router_bias: bool = False
    correction: bool = False  # an expert's bias that is added to its score to choose experts, not to weight them (DeepSeek-V3)
    shared: Mlp | None = None  # added for every token
    scaled_inputs: bool = False  # an expert's weight multiplies what it reads, not what it makes (Llama 4)
    shared_gate: bool = False  # the shared output is multiplied by sigmoid(shared_gate(x)) (Qwen2-MoE)
    branch_norm: Norm | None = None
    """Router, experts and shared MLP read x each after a norm of its own, `router_norm`, `experts_norm` and `shared_norm`; what the latter
    two make is normed by `experts_out_norm` and `shared_out_norm`; weights are multiplied by an `expert_scale` (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class InputGate:
    """x += input_norm(input_out(activation(input_gate(x)) * input)) after a layer's blocks, see `LayerInputs` (Gemma 3n, 2025)."""

    activation: Activation
    norm: Norm


@dataclass(frozen=True, slots=True)
class Streams:
    """x as several streams, of which a layer's blocks compute the first (Baykal et al., "Alternating Updates", 2023; Gemma 3n).

    The others begin as `streams_in` of the embedding, each as long as that. In a layer, with c = tanh(streams_router(streams_norm(x[0]) /
    hidden_size)), x[i] += sum of streams_predict(c)[i, j] x[j]. The blocks make y of x[0], where the first one has a path beside it: x[0] =
    (x[0] + mixed + n + laurel_norm(laurel_up(laurel_down(n)))) / sqrt(2), n being what mixers read (LAuReL, 2024). With c of y, x[i] +=
    (y - x[0]) * (streams_correct(c)[i] + 1). The `input_gate` reads x[0] * streams_scale, and adds to the others. At last x is the mean of
    the first stream and of `streams_out` of the others, each as long as the first."""

    count: int
    norm: Norm
    laurel_rank: int


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """`width` numbers for each layer and token, (layer_inputs_norm(projected) + sqrt(width) * embedded) / sqrt(2), where `layer_inputs`
    projects x as the first layer has it, times hidden_size ** -0.5, and `layer_embedding` embeds the token."""

    width: int
    vocab_size: int  # of the embedding; tokens that it has no row for have row 0
    norm: Norm  # of each layer's numbers, by the same weights


@dataclass(frozen=True, slots=True)
class Layer:
    """x += m * post_attention_norm(mixers(attention_norm(x))), then x += m * post_mlp_norm(mlp(mlp_norm(x))), m the `residual_multiplier`.
    What mixes tokens is the sum of attention and recurrence. What is None is left out; a norm that is None is the identity.

    `parallel`: x += m * (mixers(attention_norm(x)) + mlp(mlp_norm(x))) instead; mlp_norm None then means the attention's normed input.
    `normed_residuals`: x = factor * attention_norm(x) + m * .., then x = factor * mlp_norm(x) + m * .., by a factor for each.
    `input_gate` and at last `scaled`, x *= the learned number `scale`, come after that.
    """

    attention: Attention | LatentAttention | ShortConvolution | None
    mlp: Mlp | Experts | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    parallel: bool = False
    residual_multiplier: float = 1.0
    recurrence: Recurrence | None = None
    normed_residuals: tuple[float, float] | None = None
    input_gate: InputGate | None = None
    scaled: bool = False
    weight_factors: tuple[float, ...] = ()  # by which the `Family.transform` multiplies weights of the checkpoint


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Position p adds row p + offset of a table with `count` + `offset` rows to the embedding (GPT-2, OPT)."""

    count: int
    offset: int = 0


class HeadKind(Enum):
    EAGLE3 = "eagle3"  # Li et al., "EAGLE-3", 2025 (arXiv 2503.01840)
    MTP = "mtp"  # multi-token prediction: DeepSeek-V3, 2024 (arXiv 2412.19437), section 2.2


@dataclass(frozen=True, slots=True)
class DraftHead:
    """What makes a spec that of a draft head: a layer that proposes tokens for another model, its target, from that model's hidden states.

    At position p it reads the embedding e of the token at p + 1 and a hidden state h of position p; its logits are of the token at p + 2.
    Where the target has computed p, h is the target's; behind that it is the `carried` one of the head at p - 1.
    With x = [embedding_norm(e), hidden_norm(h)]:

    - EAGLE3: the target's h is fuse([inputs of its layers `taps`]). q, k and v are projected from x, the residual begins as h, and what is
      carried is the residual before the norm of the `ModelSpec`.
    - MTP: the target's h is what its output head reads. The residual begins as combine(x); carried is what the head's output head reads.
    """

    kind: HeadKind
    norm: Norm  # both of embedding_norm and hidden_norm
    target_size: int  # hidden_size of the target
    target_layers: int  # how many layers the target has
    taps: tuple[int, ...] = ()  # layers of the target, 0 .. target_layers; the last stands for the output of the last layer
    normed_residual: bool = False  # of EAGLE3: the residual begins as hidden_norm(h)
    own_embedding: bool = False  # else it is the target's
    own_head: bool = False  # an output head of its own; else it is the target's
    num_draft_ids: int | None = None  # tokens of its own output head, if these are not all of the vocabulary


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """logits = soft_cap(logit_scale * head(norm(layers(embedding_norm(embedding_scale * embedding(ids) + positions)))))."""

    family: str  # model_type in config.json, a key of `families.FAMILIES`
    architecture: str  # the name in config.json
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm | None
    max_position_embeddings: int  # longest sequence in tokens
    tied_head: bool  # the output head is the embedding
    head_bias: bool = False
    learned_positions: LearnedPositions | None = None
    layer_inputs: LayerInputs | None = None
    streams: Streams | None = None
    embedding_norm: Norm | None = None
    embedding_scale: float = 1.0  # rounded to the dtype of the weights before it is used
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # logits become cap * tanh(logits / cap); 0: off
    dtype: str | None = None  # the checkpoint's, as config.json names it
    initializer_range: float = 0.02  # standard deviation of random weights
    eos_token_ids: tuple[int, ...] = ()  # of config.json; those of a generation_config.json override them
    draft_head: DraftHead | None = None  # None: a model that runs on its own
    is_part: bool = False  # of a model for images or audio as well, whose checkpoint has tensors that are not looked at
    images: ImageInput | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[Attention | LatentAttention, ...]:
        """The attention of the layers that have their own keys and values. Where none has, one that no layer calls, as wide as a page."""
        every = (layer.attention for layer in self.layers if isinstance(layer.attention, Attention | LatentAttention))
        return tuple(one for one in every if not _reads_other_layer(one)) or (_page_of_states(self.states),)

    @property
    def widest_attention(self) -> Attention | LatentAttention:
        """The one of `attentions` that keeps most of a token."""
        return max(self.attentions, key=width_of_place)

    @property
    def layers_per_place(self) -> tuple[int, ...]:
        """By place, how many layers such as its own have room in it, because they keep less of a token than the widest attention."""
        rest = len(self.place_windows) - len(self.attentions)
        return (*layers_per_place([attention.heads for attention in self.attentions]), *(1,) * rest)

    @property
    def convolutions(self) -> tuple[ShortConvolution, ...]:
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, ShortConvolution))

    @property
    def states(self) -> tuple[StateShape, ...]:
        """What each of the recurrent layers keeps of a sequence."""
        return tuple(layer.recurrence.state for layer in self.layers if layer.recurrence is not None)

    @property
    def places(self) -> tuple[range, ...]:
        """By layer, its places: what KV pages have of it, in units of the keys and values of one attention. Those of `attentions` come
        first, then those of `convolutions`, which keep their inputs of each token where others keep keys and values. A layer without
        either has none, and one without keys and values of its own that of the layer whose it reads."""
        first, place_width, places = len(self.attentions), width_of_place(self.widest_attention), list[range]()
        numbers = iter(range(first))
        for layer in self.layers:
            if isinstance(layer.attention, ShortConvolution):
                places.append(range(first, first + -(-layer.attention.channels // place_width)))
                first = places[-1].stop
            elif layer.attention is None:
                places.append(range(0))
            elif _reads_other_layer(layer.attention):
                places.append(places[-layer.attention.kv_distance])
            else:
                places.append(range(number := next(numbers), number + 1))
        return tuple(places)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window in tokens, which of a convolution are its taps, of each layer that has either; None: all tokens."""
        return tuple(layer.attention.window for layer in self.layers if layer.attention is not None)

    @property
    def attends(self) -> bool:
        """Whether a layer has attention."""
        return any(isinstance(layer.attention, Attention | LatentAttention) for layer in self.layers)

    @property
    def place_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers by place."""
        held = [places for places in self.places if places]
        by_place = {} if self.attends else {0: self.attentions[0].window}
        by_place |= {place: window for places, window in zip(held, self.windows, strict=True) for place in places}
        return tuple(by_place[place] for place in range(len(by_place)))

    @property
    def query_scales(self) -> frozenset[QueryScale]:
        """The different query scales of the layers."""
        every = (layer.attention for layer in self.layers if isinstance(layer.attention, Attention))
        return frozenset(one.query_scale for one in every if one.query_scale is not None)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ropes of the layers, in the order of their first layers."""
        attentions = (layer.attention for layer in self.layers if layer.attention is not None)
        return tuple(dict.fromkeys(attention.rope for attention in attentions if attention.rope is not None))


def _reads_other_layer(attention: Attention | LatentAttention) -> TypeGuard[Attention]:
    return isinstance(attention, Attention) and attention.kv_distance > 0


def _page_of_states(states: Sequence[StateShape]) -> Attention:
    """One that sees one token, and as wide as it takes for a state of few pages."""
    largest = max((state.heads * state.key_dim * state.value_dim for state in states), default=0) // _NUMBERS_PER_HEAD
    heads = min(max(largest, 1), _MAX_PAGE_HEADS)
    return Attention(heads, heads, _PAGE_HEAD_DIM, scale=1.0, rope=None, window=1)


def width_of_place(attention: Attention | LatentAttention) -> int:
    """How many numbers of a token a KV page has for a layer."""
    return attention.num_kv_heads * (attention.key_dim + (0 if isinstance(attention, LatentAttention) else attention.value_dim))
