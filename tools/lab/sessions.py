"""A trace of conversations for simulations: prompts that grow from turn to turn behind system prompts of very different popularity.

Everything follows from a seed. Knows no replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aengine.cache import PageChain, published_digest
from aengine.router.replica_load import MAX_PAGES, PageNaming, PagePrefix, RoutedPrompt

IntArray = NDArray[np.int32]
SALT = b"simulation"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Means are of geometric distributions; tokens unless said otherwise."""

    num_sessions: int
    rate: float  # sessions that begin in a second
    burst: int = 1  # sessions that begin at the same time
    mean_turns: float = 5.0
    num_system_prompts: int = 50
    zipf: float = 1.1  # system prompt k is chosen as often as k ** -zipf
    system_len: int = 512  # mean of system prompts
    user_len: int = 100  # mean of what a user says in a turn
    output_len: int = 150  # mean of an answer
    huge_share: float = 0.0  # of sessions that begin with a document
    huge_len: int = 8000  # of each document
    think_seconds: float = 10.0  # mean from an answer to the next turn
    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_sessions", "burst", "num_system_prompts", "system_len", "user_len", "output_len", "huge_len", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 1")
        for name, least in (("mean_turns", 1.0), ("think_seconds", 0.0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least {least}")
        if self.rate <= 0:
            raise ValueError(f"rate: {self.rate} is not above 0")
        if not 0 <= self.huge_share <= 1:
            raise ValueError(f"huge_share: {self.huge_share} is not in [0, 1]")


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request of a session."""

    prompt: RoutedPrompt
    output_tokens: int
    think_seconds: float  # from the end of the turn before
    digests: Sequence[int]  # of all pages that prompt and output fill


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    start: float  # seconds
    turns: Sequence[Turn] = field(repr=False)


def make_sessions(options: SessionOptions) -> list[Session]:
    """By their start. Bursts come at random, as a Poisson process does."""
    rng = np.random.default_rng(options.seed)
    system_prompts = [_ids(rng, _length(rng, options.system_len)) for _ in range(options.num_system_prompts)]
    popularity = np.arange(1, options.num_system_prompts + 1) ** -options.zipf
    choices = rng.choice(options.num_system_prompts, options.num_sessions, p=popularity / popularity.sum())
    sessions = []
    start = 0.0
    for number, choice in enumerate(choices.tolist()):
        if number % options.burst == 0:
            start += rng.exponential(options.burst / options.rate)
        document = _ids(rng, options.huge_len) if rng.random() < options.huge_share else _ids(rng, 0)
        sessions.append(Session(start, _turns(rng, options, [system_prompts[choice], document])))
    return sessions


def _turns(rng: np.random.Generator, options: SessionOptions, beginning: list[IntArray]) -> list[Turn]:
    count = _length(rng, options.mean_turns)
    lengths = [(_length(rng, options.user_len), _length(rng, options.output_len)) for _ in range(count)]
    think = rng.exponential(options.think_seconds, count).tolist()
    token_ids = np.concatenate([*beginning, _ids(rng, sum(map(sum, lengths)))])
    chain = PageChain(options.page_size)
    chain.extend(token_ids)
    digests = [published_digest(name, SALT) for name in chain.digests]
    turns = []
    end = sum(map(len, beginning))
    for (user_len, output_len), seconds in zip(lengths, think, strict=True):
        prompt_len = end + user_len
        end = prompt_len + output_len
        turns.append(
            Turn(
                _prompt(token_ids[:prompt_len], digests[: min(MAX_PAGES, (prompt_len - 1) // options.page_size)]),
                output_len,
                seconds,
                digests[: end // options.page_size],
            )
        )
    return turns


def _prompt(token_ids: IntArray, digests: Sequence[int]) -> RoutedPrompt:
    """As `PagePrefix` makes it, but the pages of a session are hashed once for all of its turns."""

    def known(naming: PageNaming) -> Sequence[int]:
        return digests

    return RoutedPrompt(len(token_ids), PagePrefix(token_ids, "", SALT).beginning, known)


def _length(rng: np.random.Generator, mean: float) -> int:
    """At least 1."""
    return int(rng.geometric(1 / mean))


def _ids(rng: np.random.Generator, length: int) -> IntArray:
    return rng.integers(1 << 17, size=length, dtype=np.int32)
