"""What the engine hands back: tokens, completions, usage, statistics. Plain frozen data; knows nothing of how it was made.

A histogram that is cheap to fill: fixed bounds, one count per bucket. Knows nothing of what is measured or of who reads it."""

from __future__ import annotations

import enum
import html
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from aengine.api.dataclass import dataclass
from aengine.api.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aengine.api.receipt import Receipt


class FinishReason(enum.Enum):
    """The reason why a sequence ended."""

    EOS = "eos"  # the model produced one of its end-of-sequence ids
    STOP_STRING = "stop_string"  # the text holds one of the request's stop strings
    STOP_TOKEN = "stop_token"  # the model produced one of the request's stop_token_ids
    MAX_TOKENS = "max_tokens"  # max_tokens were generated
    CONTEXT_LENGTH = "context_length"  # prompt and output fill max_model_len
    REPETITION = "repetition"  # the output ends with what the request's stop_on_repetition says
    DEADLINE = "deadline"  # the request's timeout passed
    CANCELLED = "cancelled"  # cancelled by engine.cancel(), the stream's aclose() or engine shutdown
    ERROR = "error"  # the request failed; the stream raises the cause

    @property
    def cuts(self) -> bool:
        """Whether the sequence ended before the model had ended it."""
        return self in _CUTS


_CUTS = {FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH, FinishReason.REPETITION, FinishReason.DEADLINE, FinishReason.CANCELLED}

NO_TOKEN = -1
"""`Token.token_id` of the end of a sequence that is ended from outside."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    `text` is whole UTF-8: characters that span tokens appear with the token that completes them, so it may be empty, and the
    concatenation of all texts is the decoded output. The last token of a sequence carries `finish_reason`. A sequence that is
    ended from outside (CANCELLED, DEADLINE) closes with a token whose `token_id` is -1 and whose text is what was held back.
    """

    index: int  # which of the request's sequences, from 0
    token_id: int
    text: str
    logprob: float | None = None  # natural log, under the model's own distribution (see TokenLogprob)
    rank: int | None = None  # 1 for the most likely token
    top_logprobs: Mapping[int, float] | None = None  # token id -> logprob, most likely first
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # with finish_reason: the stop token id or stop string that matched
    weights_version: int = 0  # of the weights that made it: 0 for those that the engine started with


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was under the model itself: natural log-softmax of the logits before any sampling parameter."""

    token_id: int
    logprob: float
    rank: int  # 1 for the most likely token
    top_logprobs: Mapping[int, float]  # token id -> logprob of the most likely tokens, most likely first


class DraftSource(enum.Enum):
    """Where a draft comes from. The value is its name in statistics."""

    GRAMMAR = "grammar"  # text that a grammar forces
    NGRAM = "ngram"  # what followed the same tokens before
    MODEL = "draft"  # a smaller model
    HEAD = "eagle"  # a head that reads hidden states of the model
    MTP = "mtp"  # layers of the model's checkpoint for tokens after the next


@dataclass(frozen=True, slots=True)
class DraftUsage:
    """Drafts of one source: tokens that are proposed to follow those of a sequence, and that one step checks all at once."""

    drafter: str  # where they come from: grammar, ngram, draft, eagle or mtp
    steps: int = 0  # in which a sequence had some
    drafted: int = 0  # tokens
    accepted: int = 0  # those that were right; they are among the completion tokens

    def plus(self, drafted: int, accepted: int, steps: int = 1) -> DraftUsage:
        """Return the counts with those of `steps` more steps added."""
        return DraftUsage(self.drafter, self.steps + steps, self.drafted + drafted, self.accepted + accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Base of what counts drafts: the usage of a request, and the statistics of an engine."""

    drafts: tuple[DraftUsage, ...] = ()  # by drafter; only those with any

    @property
    def draft_tokens(self) -> int:
        """Tokens that were drafted, by all drafters."""
        return sum(drafts.drafted for drafts in self.drafts)

    @property
    def accepted_draft_tokens(self) -> int:
        """Drafted tokens that were accepted, of all drafters."""
        return sum(drafts.accepted for drafts in self.drafts)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a step with drafts brought its sequence: those that were accepted, and one. 1 without any."""
        return 1 + self.accepted_draft_tokens / max(1, sum(drafts.steps for drafts in self.drafts))


@dataclass(frozen=True, slots=True)
class Usage(Drafted):
    """Token counts of a request, so far."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # those of them up to the end of the reasoning, where the request said how that is marked
    image_tokens: int = 0  # those of the prompt that are of images
    rewritten_tokens: int = 0  # computed by the latest request of its session, and not at the beginning of its prompt
    loaded_prompt_tokens: int = 0  # those of cached_prompt_tokens that came from host memory or files for this request


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a request in seconds, so far. None where that has not happened."""

    queue: float | None = None  # from its arrival to its first step
    first_token: float | None = None  # from its arrival to its first generated token
    decode: float | None = None  # from its first generated token to its latest


class RequestState(enum.Enum):
    """What a request in flight is doing."""

    PREPARING = "preparing"  # its prompt is being tokenized or its grammar compiled
    WAITING = "waiting"  # for its first step
    RUNNING = "running"
    PARKED = "parked"  # until its reader catches up
    FINISHED = "finished"  # but not yet released


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request in flight, as it is now."""

    request_id: str
    state: RequestState
    usage: Usage  # completion tokens are those that were generated, read or not
    timing: Timing
    arrival: float  # by the wall clock, seconds since the epoch


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of a request: all tokens of its stream."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None while the stream is still running
    stop_reason: int | str | None  # the stop token id or stop string that matched, None for every other reason
    usage: Usage  # of the whole request
    logprobs: tuple[TokenLogprob, ...] | None = None  # of the tokens, where asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # of the prompt's tokens; the first has none
    others: tuple[Completion, ...] = ()  # with n > 1: the sequences after this, the first one
    weights_versions: tuple[int, ...] = ()  # of the weights that made each token; empty: all by those that the engine started with
    token_texts: tuple[str, ...] = field(default=(), compare=False)
    """With logprobs: of each token, as of `Token.text`; a server may send the text of several with the last of them."""
    receipt: Receipt | None = field(default=None, compare=False)  # of the whole request, once it has ended, where one was asked for

    def _repr_html_(self) -> str:
        """For notebooks: the text, and with logprobs each token on a ground that is the darker the less likely it was."""
        parts = [f"<span>{html.escape(self.text)}</span>"]
        if self.logprobs is not None and len(self.logprobs) == len(self.token_texts):
            parts = []
            for text, each in zip(self.token_texts, self.logprobs, strict=True):
                likely = math.exp(min(each.logprob, 0.0))
                title = f"token {each.token_id}, probability {likely:.3f}, rank {each.rank}"
                parts.append(
                    f'<span title="{title}" style="background: rgba(220, 90, 0, {0.6 * (1 - likely):.2f})">{html.escape(text)}</span>'
                )
        end = "running" if self.finish_reason is None else self.finish_reason.value
        told = f"{self.usage.prompt_tokens} + {self.usage.completion_tokens} tokens, {end}"
        return f'<div style="white-space: pre-wrap">{"".join(parts)}</div><small>{told}</small>'


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is behind a prompt."""

    tokens: tuple[TokenLogprob, ...]  # of the text: those that it adds to the prompt's
    usage: Usage

    @property
    def logprob(self) -> float:
        """The sum of the logprobs of its tokens: of the text as a whole."""
        return math.fsum(each.logprob for each in self.tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether each of its tokens is the most likely one."""
        return all(each.rank == 1 for each in self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """What a model makes of a prompt as a whole."""

    values: NDArray[np.float32]  # [hidden_size], or as many as were asked for; with pooling tokens [layers, tokens, hidden_size]
    num_tokens: int  # of the prompt
    cached_tokens: int = 0  # those of them whose KV was found in the prefix cache
    experts: NDArray[np.int32] | None = None  # [layers with experts, tokens, top_k], the best first, where they were asked for


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """The counts at one moment. A bucket holds the values above the bound before it, up to its own; the last one has no bound."""

    bounds: tuple[float, ...] = ()  # ascending
    counts: tuple[int, ...] = (0,)  # one more than bounds
    total: float = 0.0  # the sum of all values


class Histogram:
    """To be filled by one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending upper bounds of all buckets but the last."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: Histogram) -> None:
        """Add the counts of one with the same bounds."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.bounds, tuple(self.counts), self.total)


@dataclass(frozen=True, slots=True)
class EngineStats(Drafted):
    """A snapshot taken by the step thread: after a step in which a request began or ended, and otherwise at most 50 ms before its latest
    step."""

    running: int = 0  # sequences that hold a row and are scheduled
    waiting: int = 0  # sequences that hold no pages yet,
    loading: int = 0  # and those of them whose prefix is being loaded from host memory or files
    parked: int = 0  # sequences that keep their pages but are not scheduled
    pages_used: int = 0  # pages referenced by sequences
    pages_total: int = 0
    uncomputed_tokens: int = 0  # that waiting and prefilling sequences still have to compute
    cached_tokens: int = 0  # tokens whose KV stays in unreferenced pages of the prefix cache
    sessions: int = 0  # that are known
    session_tokens: int = 0  # tokens whose KV is kept for these, and evicted behind what is kept for none
    steps: int = 0  # steps committed since start
    preemptions: int = 0  # sequences that gave way to others since start, and were or will be computed anew
    prompt_tokens: int = 0  # of requests that began since start
    cached_prompt_tokens: int = 0  # those of them that were found in the prefix cache
    completion_tokens: int = 0  # generated since start
    loaded_tokens: int = 0  # whose KV has come from host memory or files since start
    saved_tokens: int = 0  # whose KV was written to files since start
    host_kv_bytes: int = 0  # of KV in host memory, as of `EngineConfig.host_kv_memory`
    disk_kv_bytes: int = 0  # of the files below `EngineConfig.kv_disk_path`, as far as is known
    paused: bool = False  # by AsyncEngine.pause()
    sleep_level: int = 0  # by AsyncEngine.sleep(); 0: awake
    weights_version: int = 0  # of the weights in use: how often AsyncEngine.update_weights() replaced them
    weights_time: float = 0.0  # when these came into use, seconds since the epoch; 0.0: they are not loaded
    role: str = ""  # as of `EngineConfig`; empty: both
    fingerprint: str = ""  # a digest of all that decides tokens and texts; engines with the same one give the same; empty: not loaded
    mean_step_seconds: float = 0.0  # of the latest steps; 0.0: there were none
    prefill_tokens_per_second: float = 0.0  # of the latest steps with prompt tokens; 0.0: there were none
    step_seconds: HistogramSnapshot = field(default_factory=HistogramSnapshot)  # of a step: from its launch, or the commit before if later
    step_tokens: HistogramSnapshot = field(default_factory=HistogramSnapshot)  # computed in one step, of prompts and of outputs

    @property
    def tokens_per_step(self) -> float:
        """Mean number of completion tokens that a step brought a sequence that got any: 1 without drafts."""
        return self.completion_tokens / max(1, self.completion_tokens - self.accepted_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What limits the requests of an engine, and how its model is computed."""

    max_num_seqs: int = 0  # sequences that run at once
    max_num_batched_tokens: int = 0  # of a step
    max_queued_requests: int = 0  # sequences that wait before more are refused; 0: any number
    max_queued_tokens: int = 0  # of their prompts; 0: any number
    max_logprobs: int = 0  # most alternatives of a token
    page_size: int = 0  # tokens of a page of the KV cache
    num_pages: int = 0
    speculative: str = "off"  # as of `EngineConfig`, as all that follow
    speculative_model: str | None = None
    max_drafts: int = 0
    tensor_parallel_size: int = 1
    tensor_parallel_mode: str = "exact"
    pipeline_parallel_size: int = 1
    fingerprint: str = ""  # as of `EngineStats`
    fingerprint_parts: Mapping[str, str] = field(default_factory=dict)  # what it is made of, by name: values, or digests of them


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text, in columns."""

    ids: list[int]
    pieces: list[str]  # as the vocabulary spells them
    starts: list[int]  # where each begins in the text, in bytes of UTF-8
    ends: list[int]  # where it ends


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as a chat template writes it."""

    text: str
    literals: tuple[tuple[int, int], ...] = ()
    """Places in the text, from one character to before another, in their order: what the caller wrote there is no part of a control token.
    Empty where the caller wrote nothing that could be."""
    images: tuple[object, ...] = ()
    """Those whose tokens the text has, each a `NamedImage`, for `RequestOptions.images`."""

    history: tuple[int, ...] = ()
    """Ids that come before the text, where `keep_history` leaves those of the session as they were."""

    def __add__(self, text: str) -> RenderedChat:
        """With text of the template's own behind it."""
        return replace(self, text=self.text + text)


class ChatIds(list[int]):
    """The ids of a prompt, with the messages that they were made of, which `keep_history` of the session's next request goes by."""

    def __init__(self, ids: Iterable[int], messages: Iterable[Mapping[str, Any]]) -> None:
        super().__init__(ids)
        self.messages = tuple(messages)


@dataclass(frozen=True, slots=True)
class CachedPages:
    """Which pages of prompts the prefix cache of a server holds, or how that has changed: by digests that tell nobody what is in them."""

    snapshot: bool  # `added` is all there is; else `added` and `removed` have changed
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy a server is, and whether it takes requests."""

    stats: EngineStats
    draining: bool = False  # it refuses new requests, since it shuts down
    pages: CachedPages | None = None  # where they are asked for


class ReplicaState(enum.Enum):
    """Whether a router sends requests to a replica."""

    CONNECTING = "connecting"  # it is started, loads its model, or is looked at before it gets requests
    SERVING = "serving"
    DRAINING = "draining"  # it gets no new ones
    LOST = "lost"  # it died, is silent, or cannot be reached
    SUPERSEDED = "superseded"  # replicas of a newer generation serve: it gets new ones only where none of those takes them
    REFUSED = "refused"  # it was reached, and cannot be used


@dataclass(frozen=True, slots=True)
class StoredKV:
    """What KV of a prompt an engine keeps beside its pool."""

    identity: str = ""  # of all that decides what KV holds: engines of the same one can use each other's. "": it keeps none
    num_tokens: int = 0  # the first ones, in whole pages, whose KV can be used


@dataclass(frozen=True, slots=True)
class KVPage:
    """The KV of a page of tokens, of all layers, or the state of recurrent layers behind them, on its way between engines."""

    index: int  # of the page in the prompt
    content: bytes
    digest: bytes  # a checksum of the content and the tokens
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One of the engines behind a router."""

    name: str
    state: ReplicaState
    report: LoadReport  # its latest
    generation: str = ""  # replicas with the same word give the same tokens; empty: it is not known yet
    reason: str = ""  # why it gets no requests, or only those that others cannot take; empty: it gets them


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests can name."""

    name: str
    rank: int  # the largest of its matrices
    target_modules: tuple[str, ...]  # names of the modules that it changes, such as q_proj
    num_bytes: int  # of its matrices
    num_requests: int = 0  # that use it now
    key: int = 0  # its number in the names of cached pages


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that the engine's device has in use: of the GPU, or of the process where it runs on a CPU."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same tokens in the KV cache."""

    num_layers: int
    window: int | None = None  # tokens of their sliding window; None: they attend to all tokens


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a started engine serves: its model's names, sizes, formats and defaults."""

    name: str  # its Hugging Face id, the last part of its path, or "demo"; of a server what this calls it
    architecture: str  # as in the model's config, for example Qwen3ForCausalLM
    max_model_len: int  # prompt and output together, in tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # of weights and KV cache
    num_parameters: int
    chat_template: bool  # whether chat messages can be a prompt
    generation_defaults: SamplingParams  # what unset parameters mean
    device: str = ""  # that runs it, such as cpu or cuda:0; empty where that is not known
    tokenizer: bool = True  # whether it has one; without it prompts are token ids, and outputs have no text
    family: str = ""  # model_type in the model's config, for example qwen3
    implementation: str = "native"  # native: of aengine itself; transformers: the code of that package
    executor: str = ""  # what computes its layers: cpu (our kernels) or torch
    num_active_parameters: int = 0  # that one token uses; fewer than num_parameters if there are experts
    kv_bytes_per_token: int = 0  # of all layers on all ranks, K and V
    state_bytes: int = 0  # that recurrent layers keep of a sequence, on all ranks, in whole pages; 0: there are none
    layer_groups: tuple[LayerGroup, ...] = ()  # all layers but recurrent ones, by window
    quantization: str = (
        ""  # of its weights: quant_method of the checkpoint, what `EngineConfig.quantization` made of the others, or both; empty: none
    )
    call_format: str = ""  # how it writes calls of tools, as far as its chat template says: a name of `aengine.chat.formats.CALLS`
    reasoning_format: str = ""  # the same for reasoning: a name of `aengine.chat.formats.REASONING`
    num_layers: int = 0
    hidden_size: int = 0  # of its hidden states, and so of embeddings
    pooling: str = "last"  # of embeddings that ask for none; other than last and mean: what the checkpoint says, which is not supported
    max_images: int = 0  # of a chat; 0: the model takes text alone
    encoder: bool = False  # whether every token sees all of the prompt, of which a step computes the whole
    labels: tuple[str, ...] = ()  # that it gives scores of, if it classifies texts
    output_head: bool = True  # whether the checkpoint has one; without it the model only makes embeddings

    def describe(self) -> str:
        """Describe the model in one line for people."""
        groups = ", ".join(
            f"{group.num_layers} layer{'' if group.num_layers == 1 else 's'}"
            + ("" if group.window is None else f" (window {group.window})")
            for group in self.layer_groups
        ) + (" with KV" if self.state_bytes else "")
        active = f" ({self.num_active_parameters:,} active)" if self.num_active_parameters != self.num_parameters else ""
        end_ids = ", ".join(map(str, self.eos_token_ids)) or "none"
        dtype = f"{self.dtype} ({self.quantization})" if self.quantization else self.dtype
        state = f" and {self.state_bytes:,} of the states of recurrent layers per sequence" if self.state_bytes else ""
        return (
            f"{self.name}: {self.family} ({self.architecture}), {self.num_parameters:,} parameters{active} in {dtype}, {groups}, "
            f"context of {self.max_model_len} tokens, {self.kv_bytes_per_token:,} bytes of KV per token{state}, EOS ids {end_ids}; "
            f"{self.implementation}, executor {self.executor}"
        )
