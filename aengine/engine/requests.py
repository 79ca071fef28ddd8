"""From what a user asks to the `Request`s that the scheduler takes: the checks of `stream()`, whose violations name field, value and range;
the `Limits` that a request must fit into; then its text is tokenized, its ids are read, and its parameters get the form of the sampler.

Pure functions over plain data, in steps for a worker thread; knows nothing of streams or threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.errors import CapacityViolation, ContextLengthError, FieldViolation, InvalidRequestError, KVCapacityError, refusal
from aengine.api.fields import read_token_ids, shown
from aengine.api.outputs import ModelInfo, RenderedChat
from aengine.api.params import EmbeddingParams, SamplingParams, derive_seed
from aengine.api.request import (
    NO_OUTPUT,
    ChatOptions,
    ForkPoint,
    Form,
    NamedImage,
    Prompt,
    RemoteImage,
    RequestOptions,
    Video,
    form_of,
    images_of,
)
from aengine.engine.workers import Steps
from aengine.scheduler.drafters import NGRAM
from aengine.scheduler.plan import NO_INTS, PromptImages, RowParams
from aengine.scheduler.sequence import Request
from aengine.tokenizer.caller_text import QUICK_SECONDS, TemplateTimeError
from aengine.tokenizer.tokenizer import PIECE_CHARACTERS, Tokenizer

if TYPE_CHECKING:
    from aengine.images.encoder import ImageText
    from aengine.models.images import ImageInput


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request to one engine must fit into."""

    model: ModelInfo
    kv_tokens: int  # of the longest sequence that the page pool holds
    max_logprobs: int
    least_output: int = 1  # tokens, that a prompt leaves room for
    image_input: ImageInput | None = None  # None: prompts have no images
    step_tokens: int = 0  # that one step can always compute of a prompt
    looks_up: bool = False  # there are n-gram drafts

    @property
    def tokens(self) -> int:
        return min(self.model.max_model_len, self.kv_tokens)

    def without_output(self) -> Limits:
        """For a request that gets no token."""
        return replace(self, least_output=0)

    def read_known(self, outputs: Sequence[Sequence[int] | None] | None, params: SamplingParams) -> dict[int, NDArray[np.int32]]:
        """The output that sequences of a request have already, by index, of those that have some.

        Raises `InvalidRequestError` (known_outputs) for what no request with `params` can have.
        """
        if outputs is None:
            return {}
        if not self.least_output:
            raise InvalidRequestError.of("known_outputs", NO_OUTPUT)
        if len(outputs) != params.n:
            raise InvalidRequestError.of("known_outputs", f"{len(outputs)} entries are not one for each of {params.n} sequences (n)")
        most = self.model.vocab_size - 1
        known = {index: read_token_ids(ids, most, "known_outputs").astype(np.int32) for index, ids in enumerate(outputs) if ids}
        longest = max(map(len, known.values()), default=0)
        if params.max_tokens is not None and longest >= params.max_tokens:
            reason = f"an entry of {longest} tokens is not below max_tokens ({params.max_tokens}); give None for a sequence that has ended"
            raise InvalidRequestError.of("known_outputs", reason)
        return known

    def read_ids(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        """A prompt's ids. Raises `InvalidRequestError` (prompt) if there are none, or one that the model does not have."""
        array = read_token_ids(ids, self.model.vocab_size - 1)
        if not len(array):
            raise InvalidRequestError.of("prompt", "it is empty; at least one token is needed")
        return array.astype(np.int32)

    def check(self, params: SamplingParams | None, prompt_len: int, qualified: str = "", num_known: int = 0) -> None:
        """Raises `ContextLengthError` or `KVCapacityError` for a prompt that does not fit, or what `params` ask for beside it.
        `qualified`: said of the number of tokens. `num_known`: most that a sequence has of its output already."""
        if misfits := self.misfits(params, prompt_len, qualified, num_known):
            raise refusal(misfits)

    def misfits(self, params: SamplingParams | None, prompt_len: int, qualified: str = "", num_known: int = 0) -> list[FieldViolation]:
        """Return the violations for which `check` refuses a request; none if it fits."""
        leaves = "leave no room for a new one in" if self.least_output else "are more than what fits into"
        asked = [("prompt", self.least_output, f"{prompt_len} tokens{qualified} {leaves}")]
        if params is not None:
            text = f"beside a prompt of {prompt_len} tokens is more than what fits into"
            names = ("min_tokens",) if params.clamp_max_tokens else ("max_tokens", "min_tokens")
            asked += [(name, count, f"{count} {text}") for name in names if (count := getattr(params, name))]
        if num_known:
            text = f"beside a prompt of {prompt_len} leave no room for a new one in"
            asked.append(("known_outputs", num_known + self.least_output, f"{num_known} tokens {text}"))
        kinds = ((ContextLengthError, "the context", self.model.max_model_len), (KVCapacityError, "the KV cache", self.kv_tokens))
        found: list[FieldViolation] = []
        for field, count, what in asked:
            got = prompt_len + count
            over = (
                CapacityViolation(field, f"{what} {unit} of {limit} tokens", kind, limit, got) for kind, unit, limit in kinds if got > limit
            )
            found.extend(islice(over, 1))
            if found and field == "prompt":
                break
        return found


INLINE_CHARACTERS = 1000
"""Longer texts are tokenized in a worker thread: up to here it takes well under a millisecond."""
INLINE_OUTPUT = 32
"""Tokens of known outputs: more are decoded there."""
INLINE_ENTRIES = 8192
"""Longer lists are read there too."""
QUICK_CHARACTERS = 65536
"""Longer texts are tokenized in a thread of their own."""
NEEDS_TOKENIZER = "needs a tokenizer, and this model has none"


@dataclass(frozen=True, slots=True)
class ForkSource:
    """The request that another one is a fork of."""

    key: int  # of the sequence
    num_shared: int  # tokens, of prompt and output
    images: PromptImages | None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request of which nothing is known to be wrong, but that is not tokenized."""

    form: Form
    prompt: Prompt | NDArray[np.int32]  # an array if it is ids that are quickly read
    params: SamplingParams  # with every default and a seed
    size: int  # of what is left to do in a worker thread, in characters; 0 where it takes well under a millisecond
    known: Mapping[int, NDArray[np.int32]]  # output that sequences have already, by index, of those that have some
    images: Sequence[Any] = ()  # as `images_of` has them; once they are encoded, `EncodedImage`s
    pooled: EmbeddingParams | None = None  # then there is no output, and most parameters mean nothing
    fork: ForkSource | None = None  # where the prompt, which is ids, and the known outputs come from


def check_request(
    prompt: Prompt, params: SamplingParams, options: RequestOptions | None, limits: Limits, violations: list[FieldViolation]
) -> CheckedRequest:
    """Adds to `violations`; only if there are none, the result is what it says. `options`: None if they are known to be wrong."""
    form, size, at_least, checked = _check_prompt(prompt, options, limits, violations)
    if params.bad_words or params.draft_context or len(params.allowed_token_ids or ()) > INLINE_ENTRIES:
        size = max(size, sum(map(len, params.draft_context)), 1)
    model = limits.model
    found = limits.misfits(params, at_least)
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
        ids = getattr(params, name) or ()
        if ids and max(ids) >= model.vocab_size:
            found.append(FieldViolation(name, f"{max(ids)} is not in [0, {model.vocab_size - 1}]"))
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > limits.max_logprobs:
            found.append(FieldViolation(name, f"{wanted} is not in [0, {limits.max_logprobs}] (max_logprobs)"))
    if not model.output_head and limits.least_output:
        found.append(FieldViolation("prompt", "the model only makes embeddings: its checkpoint has no output head"))
    if not model.tokenizer:
        found.extend(FieldViolation(name, f"it {NEEDS_TOKENIZER}") for name in _TEXTS if getattr(params, name))
    try:
        params = params.with_defaults_of(model.generation_defaults)
    except InvalidRequestError as error:
        named = {violation.field for violation in found}
        found.extend(violation for violation in error.violations if violation.field not in named)
    images: Sequence[Any] = ()
    try:
        given = images_of(prompt) if form == "chat" else () if options is None else options.images  # type: ignore[arg-type]
        images = check_images(given, limits)
        if options is not None and options.images and form != "token_ids":
            found.append(FieldViolation("images", f"it is for token ids, and the prompt is {form}"))
    except InvalidRequestError as error:
        found.extend(error.violations)
    known: Mapping[int, NDArray[np.int32]] = {}
    try:
        known = limits.read_known(None if options is None else options.known_outputs, params)
    except InvalidRequestError as error:
        found.extend(error.violations)
    if options is not None and options.receipt and not limits.least_output:
        found.append(FieldViolation("receipt", NO_OUTPUT))
    if options is not None and options.receipt and params.logits_processors:
        found.append(FieldViolation("receipt", "not possible with logits_processors: custom code is in no receipt"))
    violations.extend(found)
    if (num_known := sum(map(len, known.values()))) > INLINE_OUTPUT:
        size += num_known
    return CheckedRequest(form, checked, params if violations else params.with_seed(), size, known, images)


_TEXTS = ("stop", "bad_words", "draft_context", "structured_output", "reasoning", "detokenize")


def check_images(images: Sequence[Any], limits: Limits) -> Sequence[Any]:
    """Return the images, which may be none. Raises `InvalidRequestError` (prompt), for any of a model that takes none."""
    model, described = limits.model, limits.image_input
    if len(images) > model.max_images:
        most = f"at most {model.max_images} are possible" if model.max_images else "the model takes text alone"
        raise InvalidRequestError.of("prompt", f"it has {len(images)} image{'s' * (len(images) > 1)}; {most}")
    found = [image.image if isinstance(image, NamedImage) else image for image in images]
    for number, image in enumerate(found):
        if isinstance(image, RemoteImage):
            raise InvalidRequestError.of("prompt", f"image {number} is a URL, and URLs are not fetched here")
        if isinstance(image, Video) and (described is None or not described.takes_videos):
            raise InvalidRequestError.of("prompt", f"image {number} is a video, and the model takes no videos")
    return found


def chat_size(messages: Sequence[Any], options: ChatOptions | None) -> int:
    """About how many characters a chat has; contents in parts and tools count as more than small."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    is_plain = (options is None or not options.tools) and all(isinstance(content, str) for content in contents)
    return max(1, sum(len(content) for content in contents if isinstance(content, str)) + (0 if is_plain else QUICK_CHARACTERS))


def _check_prompt(
    prompt: Prompt, options: RequestOptions | None, limits: Limits, violations: list[FieldViolation]
) -> tuple[Form, int, int, Prompt | NDArray[np.int32]]:
    """The form; what is left to do and the prompt as in `CheckedRequest`, and between these how many tokens there are at least."""
    form: Form = "text"
    try:
        form = form_of(prompt, options)
        if isinstance(prompt, ForkPoint):
            if not limits.least_output:
                raise InvalidRequestError.of("prompt", f"it is a fork, and {NO_OUTPUT}")
            return form, 0, 1, prompt
        if form != "token_ids" and not limits.model.tokenizer:
            raise InvalidRequestError.of("prompt", f"a {form} {NEEDS_TOKENIZER}; give token ids")
        if form == "text":
            return form, len(prompt) if len(prompt) > INLINE_CHARACTERS else 0, 1, prompt
        if form == "chat":
            return form, chat_size(prompt, options), 1, tuple(prompt)  # type: ignore[return-value]
        num_tokens = len(prompt)
        limits.check(None, num_tokens)
        if num_tokens > INLINE_ENTRIES and not isinstance(prompt, np.ndarray):
            return form, num_tokens, num_tokens, tuple(prompt)  # type: ignore[return-value] # it is read later, and may have changed by then
        return form, 0, num_tokens, limits.read_ids(prompt)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        violations.extend(error.violations)
        return form, 0, 1, prompt


CHARACTERS_PER_TOKEN = 4
"""Characters for each token of ordinary text, about. A text with more for each token that fits is counted before it is encoded."""

_CONVERTED = {"temperature", "top_k", "logit_bias", "allowed_token_ids", "bad_words"}
"""Parameters that rows have in another form."""
_SAME = ({one.name for one in fields(RowParams)} & {one.name for one in fields(SamplingParams)}) - _CONVERTED
"""What the sampler is given as it is in the parameters."""


def prepare(
    request: CheckedRequest,
    tokenizer: Tokenizer | None,
    limits: Limits,
    sequences: Sequence[tuple[int, int]],
    options: RequestOptions,
    deadline: float | None,
    grammar: object | None = None,
    adapter: tuple[int, int] = (0, 0),
    history: SessionHistory | None = None,
) -> Steps[list[Request]]:
    """One request for each sequence, as the scheduler takes them; all but the first are forks of it.

    `sequences`: the index and the key of each that gets tokens. `adapter`: as of `Adapters.key_of`. `deadline` is on time.monotonic.
    `history`: of a chat that keeps the ids of its session. Raises `InvalidRequestError`, as soon as it shows that the prompt cannot fit.
    """
    params, prompt = request.params, request.prompt
    bad_words: dict[tuple[int, ...], None] = {}
    if tokenizer is not None:
        for word in params.bad_words:
            spellings = tokenizer.bad_word_ids(word)
            if not spellings:
                raise InvalidRequestError.of("bad_words", f"{shown(word)} has no tokens in this model's vocabulary")
            bad_words.update(dict.fromkeys(spellings))
        literals: Sequence[tuple[int, int]] = ()
        before: tuple[int, ...] = ()
        if request.form == "chat":
            said = [image.said for image in request.images]
            rendered = yield from render_chat(prompt, tokenizer, options, said, history)  # type: ignore[arg-type]
            prompt, literals, before = rendered.text, rendered.literals, rendered.history
            yield len(prompt)
        if isinstance(prompt, str):
            encoded = yield from encode_text(prompt, tokenizer, limits, add_special_tokens=request.form == "text", literals=literals)
            prompt = [*before, *encoded] if before else encoded
    images: PromptImages | None = None
    if request.fork is not None:
        ids, images = np.asarray(prompt), request.fork.images
    elif request.images and limits.image_input is not None:
        from aengine.images.encoder import place_images  # imports torch, which importing the engine should not do

        ids, images = place_images(np.asarray(prompt, np.int32), request.images, limits.image_input)
        most = max((end - begin for begin, end in images.whole), default=0)
        if most > limits.step_tokens:
            room = f"{limits.step_tokens} tokens, which max_num_batched_tokens leaves beside max_num_seqs"
            raise InvalidRequestError.of("prompt", f"an image of {most} tokens, which one step has to compute together, exceeds the {room}")
        limits.read_ids(ids[ids >= 0])
    else:
        ids = prompt if isinstance(prompt, np.ndarray) else limits.read_ids(prompt)  # type: ignore[arg-type] # no text by now
    context: list[int] = []
    for text in params.draft_context if limits.looks_up else ():
        assert tokenizer is not None
        # Behind the end of the prompt, so that the first tokens of each are found where nothing is generated yet.
        context += [*ids[-NGRAM:].tolist(), *tokenizer.encode(text, add_special_tokens=False, literals=[(0, len(text))])]
        yield len(text)
    limits.check(params, len(ids), num_known=max(map(len, request.known.values()), default=0))
    model = limits.model
    eos_token_ids = frozenset() if params.ignore_eos else frozenset(model.eos_token_ids)
    stop_token_ids = frozenset(params.stop_token_ids)
    assert params.seed is not None
    assert params.temperature is not None
    assert params.top_k is not None
    budget = params.reasoning.max_tokens if params.reasoning is not None and params.structured_output is None else None
    row_params = RowParams(
        **{name: getattr(params, name) for name in _SAME},
        temperature=0.0 if params.greedy else params.temperature,
        top_k=min(params.top_k, model.vocab_size),
        logit_bias=tuple(params.logit_bias.items()),
        allowed_token_ids=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64),
        bad_words=tuple(bad_words),
        stop_ids=tuple(sorted(eos_token_ids | stop_token_ids)) if params.min_tokens else (),
        grammar=grammar,
        grammar_source=(None, None) if grammar is None else (params.structured_output, params.reasoning),
        grammar_from=min(budget or 0, limits.tokens),
        processors=params.logits_processors,
        **({} if request.pooled is None else pooled_fields(request.pooled, limits.model, len(ids))),
    )
    left = limits.tokens - len(ids)
    most_tokens = left if params.max_tokens is None else min(params.max_tokens, left)
    now, (_, first), fork = time.monotonic(), sequences[0], request.fork
    return [
        Request(
            key=key,
            prompt=ids,
            output=request.known.get(index, NO_INTS),
            params=replace(
                row_params,
                seed=derive_seed(params.seed, index) if index else params.seed,
                prompt_logprobs=params.prompt_logprobs if key == first else None,
                prompt_logprobs_from=params.prompt_logprobs_from,
            ),
            max_tokens=most_tokens if request.pooled is None else 0,
            fills_context=params.max_tokens is None or params.max_tokens > left,
            stop_token_ids=stop_token_ids,
            eos_token_ids=eos_token_ids,
            repetition=params.stop_on_repetition,
            priority=options.priority,
            tenant=options.tenant,
            arrival=now,
            deadline=deadline,
            cache_salt=options.cache_salt or "",
            session=options.session if key == first else None,
            adapter=adapter[0],
            adapter_number=adapter[1],
            max_drafts=params.max_drafts,
            draft_context=np.array(context, np.int32),
            images=images,
            num_forks=len(sequences) - 1 if key == first and fork is None else 0,
            fork_of=fork.key if fork is not None else None if key == first else first,
            fork_at=None if fork is None else fork.num_shared,
        )
        for index, key in sequences
    ]


def encode_text(
    text: str,
    tokenizer: Tokenizer,
    limits: Limits | None,
    *,
    add_special_tokens: bool,
    literals: Sequence[tuple[int, int]] = (),
    pair: str | None = None,
) -> Steps[list[int]]:
    """With `limits` it is a prompt. `pair`: the second of two texts, as of `Tokenizer.encode_pair`. Raises `ContextLengthError` or
    `KVCapacityError` of one that is much too long, before the whole is encoded."""
    if limits is not None and len(text) > QUICK_CHARACTERS:
        num_bytes = len(text.encode(errors="replace"))
        limits.check(None, tokenizer.least_tokens(num_bytes), f" or more, for {num_bytes} bytes of text,")
    if limits is not None and len(text) > CHARACTERS_PER_TOKEN * limits.tokens:
        for num_pieces, at_least in enumerate(tokenizer.count_pieces(text), 1):
            limits.check(None, at_least, " or more")
            yield 2 * len(text) - num_pieces * PIECE_CHARACTERS
    if pair is not None:
        return tokenizer.encode_pair(text, pair)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens, literals=literals)


@dataclass(frozen=True, slots=True)
class SessionHistory:
    """The latest request of a session: its first sequence."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    messages: Sequence[Mapping[str, Any]]  # that the prompt was made of; none: it was no chat, or one with images or stop strings

    @property
    def computed(self) -> NDArray[np.int32]:
        """The tokens whose KV was computed: all but the last."""
        return np.concatenate((self.prompt, self.output[:-1]))


_MARK = "0c1f5e9a-history-7d2b"
"""In the place of an answer, to find what a template writes behind it."""


def _behind_history(
    history: SessionHistory, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, options: ChatOptions
) -> RenderedChat | None:
    """What a template writes behind the answer of a history, which stays as it was; None: the messages are not that history, with that
    answer and others behind it, or the template does not tell."""
    count = len(history.messages)
    if not count or len(messages) < count + 2 or list(messages[:count]) != list(history.messages):
        return None
    answer, said = messages[count], tokenizer.decode(history.output.tolist())
    content = answer.get("content") or ""
    names = [call.get("function", {}).get("name", "") for call in answer.get("tool_calls") or ()]
    if answer.get("role") != "assistant" or not isinstance(content, str) or any(part not in said for part in (content.strip(), *names)):
        return None
    try:
        marked = [*messages[:count], {"role": "assistant", "content": _MARK}, *messages[count + 1 :]]
        rendered = tokenizer.render_chat(marked, options)
    except InvalidRequestError:
        return None
    before, found, text = rendered.text.partition(_MARK)
    if not found or _MARK in text:
        return None
    ids, shift = [*history.prompt.tolist(), *history.output.tolist()], len(before) + len(found)
    last = tokenizer.decode(ids[-1:], skip_special_tokens=False)
    if tokenizer.decode(ids[-1:]) == "" and last:  # a control token, which ended the answer, and which the template may write there, too
        if text.startswith(last):
            text, shift = text[len(last) :], shift + len(last)
        else:
            ids.pop()
    literals = tuple([(begin - shift, end - shift) for begin, end in rendered.literals if begin >= shift])
    return RenderedChat(text, literals, history=tuple(ids))


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    options: ChatOptions,
    images: Sequence[ImageText] = (),
    history: SessionHistory | None = None,
) -> Steps[RenderedChat]:
    """What takes a template long is done again, as work that small work does not wait for. `images`: of the messages."""
    if history is not None and not images:
        yield QUICK_CHARACTERS + 1
        kept = _behind_history(history, messages, tokenizer, options)
        if kept is not None:
            return kept
    if not tokenizer.is_ready_for_chats:
        yield QUICK_CHARACTERS + 1
    try:
        rendered = tokenizer.render_chat(messages, options, QUICK_SECONDS)
    except TemplateTimeError:
        yield QUICK_CHARACTERS + 1
        rendered = tokenizer.render_chat(messages, options)
    if not images:
        return rendered
    from aengine.images.encoder import with_images  # imports torch

    return with_images(rendered, images)


MOST_STATE_VALUES = 1 << 27
"""Numbers of the hidden states of one request: 512 MiB."""


def pooled_fields(params: EmbeddingParams, model: ModelInfo, prompt_len: int) -> dict[str, Any]:
    """What `RowParams` have of an embedding's parameters. Raises `InvalidRequestError` (first_token, layers) for what the prompt does not
    have, or too much of it."""
    if params.pooling != "tokens":
        return {"pooling": params.pooling}
    if params.first_token >= prompt_len:
        raise InvalidRequestError.of(
            "first_token", f"{params.first_token} is not in [0, {prompt_len - 1}]: the prompt has {prompt_len} tokens"
        )
    num_values = (prompt_len - params.first_token) * len(params.layers) * model.hidden_size
    if num_values > MOST_STATE_VALUES:
        what = f"{len(params.layers)} of {prompt_len - params.first_token} tokens are {num_values} numbers, more than {MOST_STATE_VALUES}"
        raise InvalidRequestError.of("layers", f"{what}; ask for fewer tokens at once")
    told = {"pooled_layers": params.layers, "pooled_from": params.first_token, "pooled_experts": params.experts}
    return {"pooling": params.pooling, **told}
