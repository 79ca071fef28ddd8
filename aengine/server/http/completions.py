"""`POST /v1/completions`: outputs of one prompt, or of several at a time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from typing import Any, NamedTuple, cast

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, MAX_INT32, Accepts, FieldChecks, integer
from aengine.api.outputs import Token, TokenLogprob, Usage
from aengine.api.request import ForkPoint, Prompt
from aengine.chat.preparation import GenerationRequest
from aengine.server.core.calls_in_flight import current_time
from aengine.server.core.core import Core
from aengine.server.core.generation import Generation, submit
from aengine.server.http.bodies import STRING, Fields, read_generation
from aengine.server.http.body_parameters import OPTIONS, UNLIMITED, BodyParameters
from aengine.server.http.chat_completions import read_stream, refuse_others
from aengine.server.http.chat_output import (
    FINISH_REASONS,
    Chunks,
    CompletionLogprobs,
    OutputReader,
    Piece,
    StreamAsked,
    TokenTexts,
    chat_logprobs,
    prompt_entries,
    quote,
    receipts_of,
    stop_reason_of,
    usage_of,
    with_receipts,
    write_choices,
)
from aengine.server.http.http_exchange import HttpExchange

MAX_PROMPTS = 1024
_OF_BRANCH = {"prompt": "branch", "at": "branch.at", "index": "branch.index", "known_outputs": "branch"}
_ID_PREFIX = re.compile("(cmpl-|chatcmpl-|resp_|msg_)?")
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, of this API."""
TAKEN: Mapping[str, str] = {
    "model": "the served model or an adapter; empty: the served model",
    "prompt": "a text, token ids, or a list of texts or of token ids",
    "branch": "ours, in place of a prompt: go on within another answer",
    "max_tokens": f"{DEFAULT_MAX_TOKENS} by default, none with branch; 0 with echo alone; -1: no limit",
    "echo": "the text, the logprobs and the ids of the prompt come first",
    "logprobs": "logprobs; with echo prompt_logprobs too",
    "best_of": "n alone",
    "stream": "server-sent events",
    "stream_options": "include_usage; vLLM's continuous_usage_stats: the usage so far, in every chunk",
    "service_tier": "priority",
    "user": "tenant",
    "prompt_cache_key": "session",
    "receipt": "ours: `receipts`, one for each prompt, from which every token can be derived again",
    "return_token_ids": "ours: the ids of the prompt and of the output, and with logprobs those of chat/completions beside them",
}
"""The fields beside those of ours, and what becomes of them."""
REFUSED: Mapping[str, str] = {"suffix": "the model only goes on with a text"}
"""Fields of OpenAI's that would change the answer, and cannot."""


@dataclass(frozen=True, slots=True)
class CompletionsAsked:
    """A request to `/v1/completions`, as its body was read."""

    requests: Sequence[GenerationRequest]  # one for each prompt
    parameters: BodyParameters
    echo: bool = False
    empty: bool = False  # no output, the prompt alone
    stream: StreamAsked | None = None
    return_token_ids: bool = False

    def located(self, index: int) -> AbstractContextManager[None]:
        """A context in which errors name the prompt at `index`, if there are several."""
        names = {"prompt": f"prompt[{index}]"} if len(self.requests) > 1 else {}
        return self.parameters.located(**(_OF_BRANCH if isinstance(self.requests[index].prompt, ForkPoint) else names))


async def completions(core: Core, exchange: HttpExchange) -> None:
    check = FieldChecks()
    asked = read_request(await read_generation(exchange, check), check)
    asked.parameters.tell_ignored(core, exchange)
    with asked.parameters.located():
        async with AsyncExitStack() as stack:
            generations = []
            for index, request in enumerate(asked.requests):
                with asked.located(index):
                    generations.append(await stack.enter_async_context(await submit(core.backend, request)))
                await asyncio.sleep(0)  # a thousand of them at once would stall everybody else
            for index, generation in enumerate(generations):
                with asked.located(index):
                    await generation.stream.started()
            writer = _Writer(core, asked, generations)
            if not asked.stream:
                response = await writer.complete()
            else:
                await exchange.begin_events()
                await _for_each(generations, lambda index: writer.stream(index, exchange))
        if asked.stream:
            await exchange.end_events(writer.chunks.end_events(receipts_of(generations)))
        else:
            await exchange.respond(response)


def read_request(given: Fields, check: FieldChecks) -> CompletionsAsked:
    """Read the body of a request to `/v1/completions`. Raises `InvalidRequestError` with all violations."""
    parameters = BodyParameters(given)
    model = given.take_field("model", STRING, "")
    branch = given.sub("branch")
    prompts: list[Prompt] = _read_prompts(given) if branch is None else [_read_branch(branch, given)]
    echo = given.take_field("echo", FLAG, False)
    most = given.take_field("max_tokens", integer(UNLIMITED), None if "n_predict" in given or branch is not None else DEFAULT_MAX_TOKENS)
    empty = most == 0
    if empty and not echo:
        given.refuse("max_tokens", "0 is only possible with echo: true")
    if most is not None and most != UNLIMITED:
        parameters.put_field("max_tokens", max(most, 1), "max_tokens")
    if (logprobs := given.take_field("logprobs", integer(0))) is not None:
        parameters.put_field("logprobs", logprobs, "logprobs")
        if echo and "prompt_logprobs" not in given:
            parameters.put_field("prompt_logprobs", logprobs, "logprobs")
    best_of = given.take_field("best_of", integer(1))
    stream = read_stream(given)
    return_token_ids = given.take_field("return_token_ids", FLAG, False)
    parameters.take_openai()
    parameters.take_ours((*OPTIONS, "receipt"))
    refuse_others(given, REFUSED, (*TAKEN, *OPTIONS))
    params, options = parameters.params(), parameters.options()
    if best_of is not None and best_of != params.n:
        given.refuse("best_of", f"{best_of} is not n, {params.n}: all outputs are returned")
    if options.request_id is not None and len(prompts) > 1:
        given.refuse("request_id", "is only possible with one prompt")
    check.finish(InvalidRequestError)
    requests = [GenerationRequest(prompt=prompt, params=params, options=options, model=model) for prompt in prompts]
    return CompletionsAsked(requests, parameters, echo, empty, stream, return_token_ids)


def _read_branch(branch: Fields, given: Fields) -> ForkPoint:
    """A place in another request, in place of a prompt."""
    given.refuse_all(dict.fromkeys([name for name in ("prompt", "echo") if name in given], "branch has the prompt of another request"))
    request_id = _ID_PREFIX.sub("", branch.need("id", STRING, ""), 1)
    at, index = branch.take_field("at", integer(0)), branch.take_field("index", integer(0), 0)
    then = branch.take_field("then", Accepts(_are_ids, "a list of token ids"), ())
    same_params = branch.take_field("same_params", FLAG, False)
    branch.refuse_rest(("id", "at", "index", "then", "same_params"))
    return ForkPoint(request_id, at, index, then, same_params)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_INT32 for one in value)


def _read_prompts(given: Fields) -> list[Prompt]:
    prompt = given.need("prompt", Accepts(lambda value: isinstance(value, str | list), "a text, token ids, or a list of them"), "")
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        given.refuse("prompt", f"{len(prompt)} prompts are more than {MAX_PROMPTS}")
        return []
    for index, one in enumerate(prompt):
        if not isinstance(one, str | list):
            given.refuse(f"prompt[{index}]", "is neither a text nor a list of token ids")
    return list(prompt)


async def _for_each(generations: Sequence[Generation], read: Any) -> None:
    """Run `read` for the indexes of all at a time; where one raises, the others are cancelled first."""
    tasks: list[asyncio.Future[None]] = []
    try:
        for index in range(len(generations)):
            tasks.append(asyncio.ensure_future(read(index)))
            await asyncio.sleep(0)
        for task in asyncio.as_completed(tasks):
            await task
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Prompt(NamedTuple):
    """What is shown of a prompt."""

    text: str  # of an echo
    token_ids: Sequence[int]


class _Writer:
    """Writes the outputs of the generations of one request. Choice i is sequence i % n of prompt i // n."""

    def __init__(self, core: Core, asked: CompletionsAsked, generations: Sequence[Generation]) -> None:
        self._core = core
        self._asked = asked
        self._generations = generations
        self._params = asked.requests[0].params
        self._created = current_time()
        self._id = f"cmpl-{generations[0].request_id}"
        shows = (self._params.logprobs, self._params.prompt_logprobs) != (None, None)
        self._texts = TokenTexts(core.engine) if shows else None
        self._readers = [OutputReader(generation, self._texts) for generation in generations]
        self._columns: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        self.chunks = Chunks("text_completion", self._id, self._created, generations[0].model, asked.stream or StreamAsked(), self.usage)

    # ---- streams -------------------------------------------------------------------------------------------------------

    async def stream(self, prompt: int, exchange: HttpExchange) -> None:
        """Send the chunks of one of the prompts."""
        shown: _Prompt | None = None
        async for pieces in self._readers[prompt].pieces():
            if shown is None:
                shown = await self._prompt(prompt)
            if chunks := b"".join([self._chunk(prompt, piece, shown) for piece in pieces]):
                await exchange.send(chunks)

    def _chunk(self, prompt: int, piece: Piece, shown: _Prompt) -> bytes:
        choice = prompt * self._params.n + piece.index
        text, tokens = piece.text, piece.tokens
        ours: dict[str, Any] = {}
        if self._asked.empty:
            text, tokens = "", ()
        first = choice not in self._begun
        if first:
            self._begun.add(choice)
            text = shown.text + text
        if self._asked.return_token_ids:
            if first:
                ours["prompt_token_ids"] = list(shown.token_ids)
            ours["token_ids"] = [token.token_id for token in tokens if token.token_id >= 0]
        reason = piece.last.finish_reason
        if first and (entries := self._prompt_entries(prompt)) is not None:
            ours["prompt_logprobs"] = entries
        logprobs = self._logprobs(choice, prompt, tokens, shown if first else None)
        if not text and reason is None and logprobs is None and not ours:
            return b""
        finish = None if reason is None else FINISH_REASONS[reason]
        return self.chunks.choice(choice, f'"text":{quote(text)}', logprobs, finish, stop_reason_of(reason, piece.last.stop_reason), ours)

    # ---- whole responses -----------------------------------------------------------------------------------------------

    async def complete(self) -> bytes:
        """Read the outputs of all prompts to their ends; returns the whole response, as JSON."""
        outputs: list[list[list[Token]]] = [[[] for _ in range(self._params.n)] for _ in self._generations]

        async def read(prompt: int) -> None:
            async for pieces in self._readers[prompt].pieces():
                for piece in pieces:
                    outputs[prompt][piece.index] += piece.tokens

        await _for_each(self._generations, read)
        choices = []
        for prompt, sequences in enumerate(outputs):
            shown = await self._prompt(prompt)
            choices += [partial(self._choice, prompt, index, tokens, shown) for index, tokens in enumerate(sequences)]
        response = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._generations[0].model,
            "usage": self.usage(),
            **with_receipts(self._generations),
        }
        return await write_choices(response, choices, apart=self._texts is not None, max_bytes=self._core.config.max_message_bytes)

    def _choice(self, prompt: int, index: int, tokens: Sequence[Token], shown: _Prompt) -> dict[str, Any]:
        choice, last = prompt * self._params.n + index, tokens[-1]
        if self._asked.empty:
            tokens = ()
        assert last.finish_reason is not None
        written: dict[str, Any] = {
            "index": choice,
            "text": shown.text + "".join([token.text for token in tokens]),
            "logprobs": self._logprobs(choice, prompt, tokens, shown),
            "finish_reason": FINISH_REASONS[last.finish_reason],
            "stop_reason": stop_reason_of(last.finish_reason, last.stop_reason),
        }
        if self._asked.return_token_ids:
            written["prompt_token_ids"] = list(shown.token_ids)
            written["token_ids"] = [token.token_id for token in tokens if token.token_id >= 0]
        if (entries := self._prompt_entries(prompt)) is not None:
            written["prompt_logprobs"] = entries
        return written

    def usage(self) -> dict[str, Any]:
        """The token counts of all prompts together, in the shape of OpenAI's `usage`."""
        every = [generation.stream.usage for generation in self._generations]
        total = Usage(
            prompt_tokens=sum(one.prompt_tokens for one in every),
            cached_prompt_tokens=sum(one.cached_prompt_tokens for one in every),
            completion_tokens=0 if self._asked.empty else sum(one.completion_tokens for one in every),
            reasoning_tokens=sum(one.reasoning_tokens for one in every),
            image_tokens=sum(one.image_tokens for one in every),
            rewritten_tokens=sum(one.rewritten_tokens for one in every),
            loaded_prompt_tokens=sum(one.loaded_prompt_tokens for one in every),
        )
        return usage_of(total)

    # ---- prompts and logprobs ------------------------------------------------------------------------------------------

    async def _prompt(self, prompt: int) -> _Prompt:
        """What is needed of it."""
        given, asked = self._asked.requests[prompt].prompt, self._asked
        text, token_ids = "", cast(Sequence[int], ())
        if isinstance(given, ForkPoint):
            return _Prompt(text, token_ids)
        if asked.return_token_ids or (asked.echo and self._texts is not None):
            token_ids = await self._core.texts.tokenize(given) if isinstance(given, str) else cast(Sequence[int], given)
            if self._texts is not None:
                await self._texts.learn_ids(token_ids[:1])  # the others have logprobs
        if asked.echo:
            text = given if isinstance(given, str) else await self._core.texts.detokenize(cast(Sequence[int], given))
        return _Prompt(text, token_ids)

    def _logprobs(self, choice: int, prompt: int, tokens: Sequence[Token], shown: _Prompt | None) -> dict[str, Any] | None:
        """The columns of the next tokens of a choice; those of `shown` come first, if there is an echo."""
        if self._params.logprobs is None or self._texts is None:
            return None
        columns = self._columns.get(choice)
        if columns is None:
            columns = self._columns[choice] = CompletionLogprobs(self._texts)
        entries: list[Token | TokenLogprob | tuple[int]] = []
        if shown is not None and self._asked.echo:
            scored = self._generations[prompt].stream.completion().prompt_logprobs or ()
            entries = [(shown.token_ids[0],) if entry is None else entry for entry in scored]
        found = columns.columns([*entries, *tokens], self._params.logprobs)
        if self._asked.return_token_ids:
            found["content"] = chat_logprobs(tokens, self._texts, with_ids=True)
        return found

    def _prompt_entries(self, prompt: int) -> list[dict[str, Any] | None] | None:
        """Ours, where an echo does not show them."""
        if self._params.prompt_logprobs is None or self._texts is None or self._asked.echo:
            return None
        return prompt_entries(self._generations[prompt].stream.completion().prompt_logprobs or (), self._texts)
