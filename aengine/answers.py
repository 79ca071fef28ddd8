"""The fold of a stream: what was read of each sequence of a request, as one answer. Knows nothing of where tokens come from."""

from __future__ import annotations

from collections.abc import Sequence

from aengine.outputs import Completion, FinishReason, Token, TokenLogprob, Usage
from aengine.params import SamplingParams

TWO_READERS = "another task waits for this stream's next token; a stream has one reader at a time"


class Answers:
    """The answers to a request with `params`, as far as they were read."""

    def __init__(self, params: SamplingParams) -> None:
        self.num_tokens = 0  # of all sequences
        self.open = set(range(params.n))  # sequences whose end was not read
        self._cut: FinishReason | None = None
        self._tokens: list[list[Token]] = [[] for _ in range(params.n)]
        self._with_logprobs = params.logprobs is not None

    def add(self, token: Token) -> None:
        self._tokens[token.index].append(token)
        self.num_tokens += token.token_id >= 0  # what closes a sequence that was ended from outside is none
        if token.finish_reason is not None:
            self.open.discard(token.index)

    def cut(self, reason: FinishReason) -> None:
        """The reading is over: `reason` is why sequences without an end have none. The first call counts."""
        self._cut = self._cut or reason

    def completion(self, usage: Usage, prompt_logprobs: Sequence[TokenLogprob | None] | None) -> Completion:
        """The first sequence, with the others beside it."""
        first, *others = self._tokens
        return self._completion(first, usage, prompt_logprobs, tuple(self._completion(one, usage, prompt_logprobs, ()) for one in others))

    def _completion(
        self,
        tokens: Sequence[Token],
        usage: Usage,
        prompt_logprobs: Sequence[TokenLogprob | None] | None,
        others: tuple[Completion, ...],
    ) -> Completion:
        last = tokens[-1] if tokens else None
        return Completion(
            text="".join([token.text for token in tokens]),
            token_ids=tuple([token.token_id for token in tokens if token.token_id >= 0]),
            finish_reason=(last.finish_reason if last is not None else None) or self._cut,
            stop_reason=last.stop_reason if last is not None else None,
            usage=usage,
            logprobs=_logprobs(tokens) if self._with_logprobs else None,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            others=others,
        )


def _logprobs(tokens: Sequence[Token]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token.token_id, token.logprob, token.rank or 0, token.top_logprobs or {})
        for token in tokens
        if token.logprob is not None
    )
