"""`Progress`: what a request of a router has got so far, which is what it goes on behind when its replica is lost.

Owns the ids of the prompt and of every token that has come, read or not. Knows nothing of replicas or connections.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from aengine.api.outputs import Token
from aengine.api.params import SamplingParams
from aengine.api.request import RequestOptions
from aengine.router.load import PagePrefix, RoutedPrompt


class Progress:
    """What one request has got, from its submission on."""

    def __init__(self, sent: SamplingParams, options: RequestOptions, live_sequences: Iterable[int]) -> None:
        """`sent`: the parameters as they were given, with the seed."""
        self.ids: Sequence[int] | None = None  # of the prompt, once they are known
        self.open = set(live_sequences)  # sequences whose end has not come
        self._outputs: list[list[int]] = [list(ids or ()) for ids in options.known_outputs or [()] * sent.n]  # of the sequences
        self._sent = sent
        self._options = options
        self._deadline = None if options.timeout is None else time.monotonic() + options.timeout

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._outputs))

    @property
    def seconds_left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def add(self, token: Token) -> None:
        if token.token_id >= 0:
            self._outputs[token.index].append(token.token_id)
        if token.finish_reason is not None:
            self.open.discard(token.index)

    # ---- what a replica gets -------------------------------------------------------------------------------------------

    def prompt(self, digest_salt: bytes, generation: str | None, texts: str | None) -> RoutedPrompt:
        """The prompt with the longest output behind it, as a replica will compute it. `generation`, `texts`: as of `RoutedPrompt`."""
        assert self.ids is not None
        options = self._options
        longest = max(self._outputs, key=len)
        tokens = [*self.ids, *longest] if longest else self.ids
        pages = PagePrefix(tokens, options.cache_salt or "", digest_salt)
        return RoutedPrompt(len(tokens), pages.beginning, pages.digests, options.adapter, generation, texts)

    def params(self, *, has_prompt_logprobs: bool) -> SamplingParams:
        """The parameters for a replica, without prompt logprobs if the request has them already."""
        drops_them = self._sent.prompt_logprobs is not None and has_prompt_logprobs
        return replace(self._sent, prompt_logprobs=None) if drops_them else self._sent

    def options(self, request_id: str) -> RequestOptions:
        """The options for a replica, which gets the prompt as ids: with the output that the request has, and the time that is left."""
        known = [tuple(ids) if index in self.open else None for index, ids in enumerate(self._outputs)]
        left = self.seconds_left
        return self._options.for_ids(
            request_id=request_id,
            timeout=None if left is None else max(0.001, left),
            known_outputs=known if any(known) or None in known else None,
        )
