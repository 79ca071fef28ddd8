"""What a request consists of beside its parameters: the forms of a prompt, and the options with their ranges; those of chats are in
`aengine.chat_prompts`.

Shared by engine and client. Knows nothing of how a request is served.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from aengine.chat_prompts import ChatFields, ChatOptions, check_count
from aengine.checks import MAX_INT32, Accepts, Refusal, integer, is_not, is_positive, text, to_int
from aengine.config import ADAPTER_NAME
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""
Form = Literal["text", "token_ids", "chat"]

NO_OUTPUT = "an embedding has no output"
_LABEL = text("a string of at most 128 characters", r"(?s).{0,128}")


def form_of(prompt: Any, options: ChatOptions | None) -> Form:
    """Raises `InvalidRequestError`: (prompt) for something that is no prompt or has too many messages, and for `options` that are for chats
    beside another form."""
    form: Form = "text"
    if not isinstance(prompt, str):
        if isinstance(prompt, bytes | Mapping) or not (isinstance(prompt, Sequence) or _is_array(prompt)):
            name = type(prompt).__name__
            raise InvalidRequestError.of("prompt", f"a {name} is not a string, a list of token ids or a list of chat messages")
        if len(prompt) and isinstance(prompt[0], Mapping):
            check_count(prompt)
            return "chat"
        form = "token_ids"
    if options is not None and (names := options.chat_only):
        reason = f"it is for chat messages, and the prompt is {form.replace('_', ' ')}"
        raise InvalidRequestError([FieldViolation(name, reason) for name in names])
    return form


def _is_array(value: object) -> bool:
    """Whether it is a numpy array. Whoever has one has imported numpy, which importing aengine does not do."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def check_params(params: SamplingParams | None) -> SamplingParams:
    """`params`, or those that leave everything unset. Raises `InvalidRequestError` if they are something else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError.of("params", f"a {type(params).__name__} is not SamplingParams")
    return params


def _known_outputs(value: Any) -> Any:
    """As tuples of plain integers."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise Refusal(is_not(value, "a list with an entry for each sequence: token ids, or None"))
    if value and all(ids is None for ids in value):
        raise Refusal("every sequence has ended")
    return tuple([None if ids is None else _plain_ids(index, ids) for index, ids in enumerate(value)])


def _plain_ids(index: int, ids: Any) -> tuple[int, ...]:
    try:
        if isinstance(ids, str | bytes) or not (isinstance(ids, Sequence) or _is_array(ids)):
            raise TypeError
        plain = tuple(ids if set(map(type, ids)) <= {int} else map(to_int, ids))
    except TypeError:
        raise Refusal(f"entry {index}, {is_not(ids, 'a list of token ids or None')}") from None
    if plain and not 0 <= min(plain) <= max(plain) <= MAX_INT32:
        raise Refusal(f"entry {index}: token ids are in [0, {MAX_INT32}], and it has some from {min(plain)} to {max(plain)}")
    return plain


class OptionFields(ChatFields, total=False):
    """The fields of `RequestOptions` as keyword arguments."""

    request_id: str | None
    priority: int
    tenant: str
    timeout: float | None
    cache_salt: str | None
    adapter: str | None
    known_outputs: Sequence[Sequence[int] | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions(ChatOptions):
    """What a request has beside its prompt and parameters. Raises `InvalidRequestError` naming every field that is out of range."""

    request_id: Annotated[str | None, text("a string that matches [A-Za-z0-9._:-]{1,128}", r"[A-Za-z0-9._:-]{1,128}")] = None
    """1..128 of `A-Za-z0-9._:-`, not in use by a request in flight. Default: a fresh random one."""
    priority: Annotated[int, integer(-100, 100)] = 0
    """-100..100; lower runs first."""
    tenant: Annotated[str, _LABEL] = ""
    """Whose fair share the request counts for: at most 128 characters."""
    timeout: Annotated[float | None, Accepts(is_positive, "a number of seconds > 0")] = None
    """Seconds > 0 after which the request ends with what it has (FinishReason.DEADLINE). Default: none."""
    cache_salt: Annotated[str | None, _LABEL] = None
    """At most 128 characters: the request shares cached prefixes only with requests of the same salt."""
    adapter: Annotated[str | None, text("a string that matches [A-Za-z0-9._:/-]{1,128}", ADAPTER_NAME)] = None
    """Name of a loaded adapter that the model computes with. Default: none."""
    known_outputs: Annotated[Sequence[Sequence[int] | None] | None, _known_outputs] = None
    """Output that the sequences of the request have already, as token ids, one entry for each of the `n` sequences; the request goes on
    behind it. None: that sequence has ended and gets nothing. Default: none has any."""

    def live_sequences(self, n: int) -> Sequence[int]:
        """Of a request with `n` sequences, the indexes of those that get tokens."""
        if self.known_outputs is None:
            return range(n)
        return [index for index, ids in enumerate(self.known_outputs) if ids is not None]

    @property
    def num_known_tokens(self) -> int:
        """Tokens of `known_outputs`."""
        return sum(len(ids) for ids in self.known_outputs or () if ids is not None)

    def for_ids(self, **others: Any) -> RequestOptions:
        """As a prompt of token ids takes them, without those of chats; `others` are fields in place of its own."""
        of_chats: dict[str, Any] = {field.name: field.default for field in fields(ChatOptions)}
        return replace(self, **of_chats, **others)

    @classmethod
    def of(cls, options: RequestOptions | None, fields: OptionFields) -> RequestOptions:
        """`options`, or the defaults, with `fields` in place of its own."""
        if options is None:
            return cls(**fields)
        return replace(options, **fields) if fields else options
