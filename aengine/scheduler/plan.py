"""What crosses between scheduler and runner: `StepPlan` down, `StepResult` up. Plain, picklable, incremental data.

A row that is new, or whose pages grew, is described in the plan that first needs it; after that the runner knows it by
index. Nothing here refers to requests, streams or devices.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.params import GREEDY_BELOW, NEUTRAL, LogitsProcessor, Reasoning, StructuredOutput

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
NO_INTS: IntArray = np.zeros(0, np.int32)


class Features(enum.IntFlag):
    """What a row needs beyond the likeliest token of the model's logits."""

    RANDOM = 1  # its tokens are drawn
    LOGPROBS = 2
    PROMPT_LOGPROBS = 4
    MASKS = 8  # allowed, banned or biased ids, bad words, min_tokens
    LONG_BAD_WORDS = 16  # of several tokens
    PENALTIES = 32
    GRAMMAR = 64
    PROCESSORS = 128
    POOLED = 256  # hidden states of its prompt are asked for

    OF_PROMPTS = PROMPT_LOGPROBS | POOLED
    PROCESSED = MASKS | PENALTIES | GRAMMAR | PROCESSORS  # its logits change before a token is sampled
    LAST_TOKEN = LONG_BAD_WORDS | GRAMMAR | PROCESSORS  # the host must know a token before it can process the logits of the next
    HISTORY = PROMPT_LOGPROBS | PENALTIES | LAST_TOKEN  # the runner must know the tokens before the row's first step


_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class RowParams:
    """The sampling parameters of a row, with all defaults applied; by default they change nothing. Ids are below the vocabulary size.

    Fields that `SamplingParams` has under the same name are taken from there."""

    temperature: float = NEUTRAL["temperature"]  # which is greedy
    top_k: int = NEUTRAL["top_k"]
    top_p: float = NEUTRAL["top_p"]
    min_p: float = NEUTRAL["min_p"]
    seed: int = 0  # 0..2^64-1
    presence_penalty: float = NEUTRAL["presence_penalty"]
    frequency_penalty: float = NEUTRAL["frequency_penalty"]
    repetition_penalty: float = NEUTRAL["repetition_penalty"]
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: NDArray[np.int64] | tuple[int, ...] | None = None  # each once; as an array where there may be many
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    min_tokens: int = 0  # output tokens before which no id in stop_ids can be sampled
    stop_ids: tuple[int, ...] = ()  # the model's end-of-sequence ids and the request's own, where min_tokens needs them
    logprobs: int | None = None  # most likely alternatives to report with every token; None: report nothing
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0  # position of the first token of which they are told
    pooling: str | None = None  # of the hidden states of the prompt: last, mean, cls, label or tokens; None: none are asked for
    pooled_layers: tuple[int, ...] = ()  # with tokens: the residual before each, or behind the last norm with the number of layers
    pooled_from: int = 0  # with tokens: the position of the first one
    pooled_experts: bool = False  # with tokens: the experts that each layer chose, too
    grammar: object | None = None  # a compiled grammar, opaque to everyone but the sampler
    grammar_source: tuple[StructuredOutput | None, Reasoning | None] = (None, None)  # what it was compiled of
    grammar_from: int = 0  # output tokens that it does not limit
    processors: tuple[LogitsProcessor, ...] = ()

    features: Features = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        masks = (self.logit_bias, self.banned_token_ids, self.bad_words, self.allowed_token_ids is not None)
        penalties = any(getattr(self, name) != NEUTRAL[name] for name in _PENALTIES)
        features = Features(0)
        for feature, needed in (
            (Features.RANDOM, self.temperature >= GREEDY_BELOW),
            (Features.LOGPROBS, self.logprobs is not None),
            (Features.PROMPT_LOGPROBS, self.prompt_logprobs is not None),
            (Features.MASKS, any(masks) or (self.min_tokens > 0 and bool(self.stop_ids))),
            (Features.LONG_BAD_WORDS, any(len(word) > 1 for word in self.bad_words)),
            (Features.PENALTIES, penalties),
            (Features.GRAMMAR, self.grammar is not None),
            (Features.PROCESSORS, bool(self.processors)),
            (Features.POOLED, self.pooling is not None),
        ):
            if needed:
                features |= feature
        object.__setattr__(self, "features", features)

    @property
    def most_cached(self) -> int | None:
        """How many tokens of the prompt may be found in a cache, since something of those behind them is asked for, which KV does not
        have; None: all but the last."""
        if self.pooling in ("mean", "cls"):
            return 0
        if self.pooling == "tokens":
            return self.pooled_from
        return None if self.prompt_logprobs is None else max(self.prompt_logprobs_from - 1, 0)


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """What the tokens of images in a prompt are computed from. In the prompt their ids are below -1: they name the image, as ids name text,
    so that pages of KV are shared where the images are the same."""

    tokens: IntArray  # [k], ascending: which tokens of the prompt
    rows: NDArray[Any]  # [k, hidden_size], in host memory: inputs in place of the embedding
    additions: NDArray[Any] | None  # [layers, k, hidden_size], what is added after each of the first layers; None: nothing is
    placeholder: int  # the id that these tokens have for whoever counts or prints ids
    positions: IntArray | None = None  # [3, p], time, row and column of all tokens of the prompt; None: they count on
    whole: tuple[tuple[int, int], ...] = ()  # tokens that see each other, so that one step computes them: begin and end of each image

    def chunk(self, start: int, length: int) -> int:
        """How many of `length` tokens from `start` on a step can compute, which none of an image that it does not compute to its end is
        among."""
        end = start + length
        return next((max(begin - start, 0) for begin, after in self.whole if begin < end < after), length)

    @property
    def num_bytes(self) -> int:
        return int(self.rows.nbytes + (0 if self.additions is None else self.additions.nbytes))

    def shown(self, token_ids: IntArray) -> IntArray:
        """`token_ids` with the placeholder where an image is named."""
        return np.where(token_ids < -1, np.int32(self.placeholder), token_ids)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that is assigned to a new sequence in this step. What the runner holds of the row from before is void."""

    row: int
    params: RowParams
    prompt_len: int = 0  # how many tokens of the sequence are its prompt; later ones are output that it has already
    tokens: IntArray = field(default_factory=lambda: NO_INTS)  # every token so far, with Features.HISTORY; else empty
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class DraftRows:
    """d rows of which the draft model computes the tokens at positions starts[i] .. starts[i] + lengths[i] - 1, before the step. Where it
    proposes drafts, which are all that the row has, the last of the tokens is the row's last one."""

    rows: IntArray  # [d]
    starts: IntArray  # [d]
    lengths: IntArray  # [d], >= 1
    token_ids: IntArray  # [sum(lengths)]
    num_drafts: IntArray  # [d]; 0: it proposes none


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where recurrent states are; a state has p pages. A row's state of all tokens before a step is read and that of all tokens behind it
    is written to the same pages, but that the first step of a row reads it from others."""

    rows: IntArray  # [r], whose first step this is, or one of those that follow
    pages: IntArray  # [r, p], from now on
    sources: IntArray  # [r, p], that their first step reads; page 0: the row begins without tokens before
    kept_rows: IntArray  # [k], of which the step writes another state, too:
    kept_lengths: IntArray  # [k], that of so many tokens of the row, the last of which the step computes
    kept_pages: IntArray  # [k, p]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over a mixed batch of n rows with T tokens.

    The first `num_decodes` rows compute one token each: the one that the runner sampled last for that row (the scheduler may
    not know it yet). The other rows compute the given ids. `positions` of a row's tokens are
    `starts[i] .. starts[i] + lengths[i] - 1`; their KV goes to the row's pages at these positions, and they attend to
    everything of the row at or before their own position. From the logits of each of a row's last `num_sampled[i]` tokens the
    token behind it is sampled; its position keys its noise. Where several are sampled, the row's ids are its last token and
    `num_sampled[i] - 1` drafts: what is sampled behind a draft counts only if all drafts up to there are what was sampled.
    """

    step: int  # counts from 0 without gaps
    rows: IntArray  # [n], no row twice
    num_decodes: int
    starts: IntArray  # [n]
    lengths: IntArray  # [n], >= 1; 1 for decodes
    num_sampled: IntArray  # [n], 0 .. lengths[i]; 1 for decodes, lengths[i] for rows with drafts
    token_ids: IntArray  # [sum(lengths[num_decodes:])], in the order of rows; below -1 where a prompt has an image
    new_rows: tuple[NewRow, ...]
    # Page-table writes that precede the step: in layer group page_groups[i], row page_rows[i] has page page_ids[i] at index page_cols[i].
    # Page 0 stands for one behind the group's window. Writes of a new row start at column 0 and void what the row had before.
    page_groups: IntArray  # [p]
    page_rows: IntArray  # [p]
    page_cols: IntArray  # [p]
    page_ids: IntArray  # [p]
    # Pages whose content is copied before the step, and after the copies of steps before: copy_from[i] to copy_to[i].
    copy_from: IntArray = field(default_factory=lambda: NO_INTS)  # [c]
    copy_to: IntArray = field(default_factory=lambda: NO_INTS)  # [c]
    states: StateRows | None = None  # changes of where recurrent states are
    draft_rows: DraftRows | None = None  # the drafts that are proposed for them are -1 in token_ids
    wants_forced: bool = False  # the result should say what grammars force to follow
    scores_prompts: bool = False  # some rows have a part of a prompt whose logprobs or hidden states are asked for
    adapters: IntArray = field(default_factory=lambda: NO_INTS)  # [n], keys; 0: the row has none. Empty: no row has one

    @property
    def num_prefill(self) -> int:
        """How many of the tokens are of rows that neither decode nor have drafts."""
        if not len(self.token_ids):
            return 0
        chunks = slice(self.num_decodes, None)
        return int(self.lengths[chunks][self.num_sampled[chunks] <= 1].sum())

    @property
    def decoding_rows(self) -> IntArray:
        """The rows that go on from their last token, with drafts or without."""
        if self.num_decodes == len(self.rows):
            return self.rows
        return np.concatenate((self.rows[: self.num_decodes], self.rows[self.num_sampled > 1]))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of m tokens under the raw model: natural log-softmax of the logits before any processor, in float32."""

    token_logprobs: FloatArray  # [m], of the tokens themselves
    ranks: IntArray  # [m], 1 for the most likely token of all
    top_ids: IntArray  # [m, k], most likely first
    top_logprobs: FloatArray  # [m, k]

    def select(self, tokens: NDArray[np.bool_ | np.int64]) -> TokenLogprobs:
        """The logprobs of some of the tokens: those with True in a mask [m], or those at the given [n] indices."""
        return TokenLogprobs(self.token_logprobs[tokens], self.ranks[tokens], self.top_ids[tokens], self.top_logprobs[tokens])


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt tokens of a row at positions start .. start + m - 1, start >= 1."""

    row: int
    start: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class PooledStates:
    """Pooled hidden states of a row's prompt tokens in a chunk that begins at position `start`: with pooling mean their sum, with pooling
    last the state of the prompt's last token."""

    row: int
    start: int
    states: NDArray[np.float64]  # [hidden_size], behind the last norm


@dataclass(frozen=True, slots=True)
class TokenStates:
    """The hidden states of n of a row's prompt tokens from position `start` on, with pooling tokens."""

    row: int
    start: int
    states: NDArray[np.float32]  # [n, layers, hidden_size], in the order of `pooled_layers`
    experts: NDArray[np.int32] | None  # [n, layers with experts, top_k], the best first; None: not asked for


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: the sampled tokens, in the order of the plan's rows and of a row's positions.

    Of a row's tokens the first `accepted` count. With 0 there was no time to process its logits: it has to compute its last token again.
    `logprobs` is not None if one of the sampled rows asks for them: in the order of `tokens`, k the most that any row asks for;
    what a row did not ask for is undefined. `prompt_logprobs` has one entry per chunk of a prompt that asks for them, and so has
    `pooled`; with pooling last for the last chunk alone.
    The tokens of a row in `failures` are undefined, for the given reason.
    """

    step: int
    tokens: IntArray  # [num_sampled.sum()]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledStates | TokenStates, ...] = ()
    failures: Mapping[int, BaseException] = field(default_factory=dict)  # by row
    forced: Mapping[int, IntArray] = field(default_factory=dict)
    """By row, of a plan that `wants_forced`: likely next tokens, where a grammar forces a text or has just done so."""
    accepted: IntArray | None = None  # [rows with num_sampled > 0]; None: one of each


class RowsFailed(Exception):
    """Raised instead of running a step: some of its rows cannot be built, each for a reason of its own.

    Nothing of the step has happened that would matter: it can be planned again without those rows.
    """

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        super().__init__(f"rows {sorted(errors)} cannot be built")
        self.errors = dict(errors)
