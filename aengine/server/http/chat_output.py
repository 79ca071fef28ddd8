"""Outputs of generations for all APIs: what is read together of a sequence, why it ended, and how many tokens there were."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aengine.chat.events import Event
from aengine.outputs import FinishReason, Token, Usage
from aengine.server.core.generation import READ_TOKENS, Generation
from aengine.server.http.logprobs import TokenTexts

FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.ERROR: "stop",
}
"""In OpenAI's words."""
_OURS = (FinishReason.DEADLINE, FinishReason.CANCELLED)


@dataclass(slots=True)
class Piece:
    """What was read together of one sequence."""

    index: int
    tokens: Sequence[Token]  # a closing one has the id -1
    events: Sequence[Event]  # of an output that is parsed
    last: Token  # has the finish reason, if the sequence has ended

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens if token.token_id >= 0]


class OutputReader:
    """Reads a generation, and parses its output if it is to be. `texts` learns its tokens, where their bytes are shown."""

    def __init__(self, generation: Generation, texts: TokenTexts | None = None) -> None:
        self.generation = generation
        self._texts = texts
        self._knows_prompt = False

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What there is to read, whenever there is something; a piece for each sequence that brought something."""
        generation = self.generation
        read, note = generation.stream.read, generation.note
        while tokens := await read(READ_TOKENS):  # for every token of every stream: what is added here is paid often
            note(tokens)
            if self._texts is not None:
                await self._learn(self._texts, tokens)
            if len(tokens) == 1:
                yield [self._piece(tokens)]
                continue
            runs: dict[int, list[Token]] = {}
            for token in tokens:
                runs.setdefault(token.index, []).append(token)
            yield [self._piece(run) for run in runs.values()]

    async def _learn(self, texts: TokenTexts, tokens: Sequence[Token]) -> None:
        if not self._knows_prompt:
            self._knows_prompt = True
            await texts.learn(self.generation.stream.completion().prompt_logprobs or ())
        await texts.learn(tokens)

    def _piece(self, run: Sequence[Token]) -> Piece:
        last = run[-1]
        return Piece(last.index, run, self.generation.parse(run) if self.generation.prepared is not None else (), last)

    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape."""
        return usage_of(self.generation.stream.usage)


def usage_of(usage: Usage) -> dict[str, Any]:
    """In OpenAI's shape."""
    details: dict[str, Any] = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.drafts:
        details["accepted_prediction_tokens"] = usage.accepted_draft_tokens
        details["rejected_prediction_tokens"] = usage.draft_tokens - usage.accepted_draft_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "completion_tokens_details": details,
    }


def stop_reason_of(reason: FinishReason | None, matched: int | str | None) -> int | str | None:
    """The stop string or token that matched, or our own name for an end that OpenAI has no word for."""
    return reason.value if reason in _OURS else matched
