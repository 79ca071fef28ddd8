"""What the scheduler is given (`SchedulerConfig`, `Request`), what it holds of a request (`Sequence`), and what it reports (`Updates`).

All but `Sequence` is plain data that crosses the thread edge. `Sequence` never leaves the scheduler.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.outputs import DraftSource, FinishReason
from aengine.api.params import RepetitionStop
from aengine.cache import PageChain, Windows
from aengine.scheduler.plan import NO_INTS, IntArray, PooledStates, PromptImages, PromptLogprobs, RowParams, TokenLogprobs, TokenStates


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int  # >= max_num_seqs
    max_model_len: int
    num_pages: int  # the reserved page 0 included
    page_size: int
    windows: Windows = (None,)
    state_pages: int = 0  # of a recurrent state; 0: the model has none
    state_interval: int = 0  # every so many tokens of a prompt its state is kept, a multiple of page_size; 0: none is for that reason
    enable_prefix_cache: bool = True
    whole_prompts: bool = False  # a step has the whole of a prompt, or nothing of it
    max_in_flight: int = 1  # steps of different rows; with 1 a step may be planned ahead that has the rows of the one in flight
    max_drafts: int = 0  # of a sequence in a step
    max_adapters: int | None = None  # >= 1, different ones that sequences with rows have; None: any number
    has_draft_model: bool = False  # of the runner
    has_draft_head: bool = False  # its draft model is a head, which reads hidden states of the model
    session_seconds: float = 600.0  # that the prefix of a session is pinned
    session_share: float = 0.5  # of the pages, that sessions may have pinned
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    ageing_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request: it fits the context and the page pool, and every default is applied."""

    key: int  # unique for the life of the engine
    prompt: IntArray  # [p], p >= 1; below -1 at the tokens of images
    params: RowParams
    max_tokens: int  # p + max_tokens fits the context; 0: it ends when its prompt is computed
    output: IntArray = field(default_factory=lambda: NO_INTS)  # that it has already, of the max_tokens, and fewer than these
    stop_token_ids: frozenset[int] = frozenset()  # the request's own
    eos_token_ids: frozenset[int] = frozenset()  # the model's; empty with ignore_eos
    repetition: RepetitionStop | None = None  # what ends it for repeating itself
    fills_context: bool = False  # max_tokens stands for the end of the context: running into it is CONTEXT_LENGTH
    priority: int = 0  # lower runs first
    tenant: str = ""
    arrival: float = 0.0  # seconds on the scheduler's clock
    deadline: float | None = None  # seconds on the scheduler's clock
    cache_salt: str = ""
    session: str | None = None  # whose prefix it has
    adapter: int = 0  # its key in the runner; 0: none
    adapter_number: int = 0  # in the names of pages, the same in every process; 0: the key stands for it
    max_drafts: int | None = None  # in a step; None: as many as the scheduler's
    draft_context: IntArray = field(default_factory=lambda: NO_INTS)  # what the output may repeat
    images: PromptImages | None = None
    num_forks: int = 0  # requests with the same prompt and adapter that name this one in `fork_of`
    fork_of: int | None = None  # key of a request with the same prompt, submitted before, whose pages are shared
    fork_at: int | None = None  # the first tokens, of prompt and output, that are the same there; None: those of the prompt


class OutputCycles:
    """How far an output repeats itself: for each length of a cycle, how many of its latest tokens equal the token that many before."""

    def __init__(self, stop: RepetitionStop, output: IntArray, min_tokens: int) -> None:
        """`output`: the tokens that there are. Before there are `min_tokens`, none ends it."""
        self._lengths = np.arange(stop.min_cycle, stop.max_cycle + 1)
        self._needed = self._lengths * (stop.min_count - 1)
        known = output[-stop.max_cycle * stop.min_count :]
        self._latest = np.full(stop.max_cycle, -1, np.int32)  # the newest one first
        self._latest[: len(known)] = known[: -stop.max_cycle - 1 : -1]
        self._runs = np.array([_num_equal(known, length) for length in self._lengths.tolist()], np.int64)
        self._missing = min_tokens - len(output)

    def add_token(self, token: int) -> bool:
        """Take the next token. Returns whether the output ends with it, as it has repeated itself enough."""
        self._runs += 1
        self._runs[self._latest[self._lengths[0] - 1 :] != token] = 0
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token
        self._missing -= 1
        return self._missing <= 0 and bool(np.count_nonzero(self._runs >= self._needed))


def _num_equal(tokens: IntArray, length: int) -> int:
    """How many of the last tokens equal the one `length` before."""
    differ = np.flatnonzero(tokens[length:] != tokens[:-length])
    return max(len(tokens) - length, 0) - (int(differ[-1]) + 1 if len(differ) else 0)


class SequenceState(enum.Enum):
    WAITING = enum.auto()  # holds neither row nor pages
    RUNNING = enum.auto()  # holds a row and pages
    LEAVING = enum.auto()  # finished, but a step that computes it is still in flight
    FINISHED = enum.auto()  # holds nothing


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a request. While it holds a row, its counters and tokens live in the `RowTable`."""

    request: Request
    primary: Sequence | None  # the sequence that this one is a fork of, until it holds a row
    tokens: IntArray  # every known token; kept up to date only while WAITING
    chain: PageChain = field(init=False)  # of its own tokens
    prompt_chain: PageChain = field(init=False)  # of the prompt alone, shared with the forks
    state: SequenceState = SequenceState.WAITING
    row: int = -1
    parked: bool = False
    preemptions: int = 0
    started: bool = False  # it held a row before
    num_expected: int = 0  # tokens that it has to compute once it is admitted, as far as is known; 0 unless it waits
    awaits: bytes | None = None  # digest of the page that another sequence is computing for it, or that is loaded
    cycles: OutputCycles | None = None  # from its first row on, if it is to end for repeating itself
    num_loads: int = 0  # from tiers, since it last held a row,
    num_loaded: int = 0  # and tokens that they brought

    @property
    def begun(self) -> bool:
        """Whether it has begun, or another sequence of the same request."""
        return self.started or (self.primary is not None and self.primary.started and self.request.fork_at is None)

    def name_pages(self, page_size: int, version: int) -> None:
        """What it computes, from its first token on, is of weights of this version. `chain` and `prompt_chain` have no hashes yet."""
        names = page_size, self.request.cache_salt, self.request.adapter_number or self.request.adapter, version
        self.chain, primary = PageChain(*names), self.primary
        shares = primary is not None and primary.prompt_chain.version == version
        self.prompt_chain = primary.prompt_chain if primary is not None and shares else PageChain(*names)

    def hash_pages(self) -> None:
        """Hash the full pages of its tokens that have no hash yet; those of a prompt once for all its forks."""
        if not self.chain.digests:
            self.prompt_chain.extend(self.request.prompt)
            self.chain.digests.extend(self.prompt_chain.digests)
        self.chain.extend(self.tokens)

    @property
    def cacheable(self) -> IntArray:
        """The tokens up to one behind those of which KV may be found."""
        most = self.request.params.most_cached
        return self.tokens if most is None else self.tokens[: most + 1]

    @property
    def num_shared(self) -> int:
        """The number of leading tokens that a fork takes from its primary, but never the last token of all, which the fork computes."""
        fork_at = len(self.request.prompt) if self.request.fork_at is None else self.request.fork_at
        return min(fork_at, len(self.tokens) - 1)

    @property
    def limit(self) -> int:
        """Number of tokens, prompt included, at which the sequence ends."""
        return len(self.request.prompt) + self.request.max_tokens


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended: it gets no further tokens. Its pages are free once its key is in `Updates.released`."""

    key: int
    reason: FinishReason
    stop_token_id: int | None = None
    error: BaseException | None = None


class DraftCount(NamedTuple):
    """Drafts for a request in one step."""

    key: int
    source: DraftSource
    num_drafts: int
    num_accepted: int


@dataclass(slots=True)
class Updates:
    """What one step changed for the outside, in order: starts, tokens, ends, releases."""

    started: list[tuple[int, int, int, float]] = field(default_factory=list)
    """Keys, prompt tokens found in the prefix cache, those of them that were loaded for it from tiers, and when."""
    keys: list[int] = field(default_factory=list)  # the requests that got a token, and
    token_ids: list[int] = field(default_factory=list)  # the token of each
    logprobs: TokenLogprobs | None = None  # of these tokens, in the same order; undefined for requests that want none
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)  # key, a piece
    pooled: list[tuple[int, PooledStates | TokenStates]] = field(default_factory=list)  # the same
    drafts: list[DraftCount] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    released: list[int] = field(default_factory=list)  # keys of which nothing is left in queues, rows or pages

    def __bool__(self) -> bool:
        return bool(self.started or self.keys or self.prompt_logprobs or self.pooled or self.finished or self.released)

    @property
    def num_requests(self) -> int:
        """Starts, ends and releases: what is more than tokens."""
        return len(self.started) + len(self.finished) + len(self.released)
