"""What a request consists of beside its parameters: the forms of a prompt, and the options with their ranges; those of chats, too.

Shared by engine and client. Everything of a chat is plain JSON data, so that it can be sent. Knows neither templates nor messages on the
wire, nor how a request is served.

Images in messages: the forms in which callers give them, and what they are sent as. Knows no pixels.

A part of a content is `{"type": "image", "image": ...}`, with the bytes of a file, its name or a `pathlib.Path`, a picture of PIL, a
`data:` URL, or a `RemoteImage`; or `{"type": "video", "video": [...], "fps": 2.0}`, with such images.
"""

from __future__ import annotations

import base64
import io
import math
import re
import sys
from collections.abc import Mapping, Sequence, Sized
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from aengine.api.config import ADAPTER_NAME
from aengine.api.dataclass import dataclass
from aengine.api.errors import FieldViolation, InvalidRequestError
from aengine.api.fields import FLAG, MAX_INT32, Accepts, Refusal, check_fields, integer, is_not, is_positive, shown, text, to_int
from aengine.api.params import SamplingParams

MAX_FRAMES = 256
MAX_FPS = 1000.0
DEFAULT_FPS = 2.0
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image that whoever serves the request is to fetch."""

    url: str


@dataclass(frozen=True, slots=True)
class Video:
    """Frames at equal distances in time, for models that take videos. Raises `InvalidRequestError` (prompt)."""

    frames: Sequence[Any]  # 1..`MAX_FRAMES`, each as an image of a part, of one size
    fps: float = DEFAULT_FPS  # frames per second, > 0

    def __post_init__(self) -> None:
        if not isinstance(self.frames, list | tuple) or not 1 <= len(self.frames) <= MAX_FRAMES:
            raise InvalidRequestError.of("prompt", f"a video is a list of 1 to {MAX_FRAMES} frames")
        if not is_positive(self.fps) or self.fps > MAX_FPS:
            raise InvalidRequestError.of("prompt", f"the fps of a video is {shown(self.fps)}, which is not a number in (0, {MAX_FPS}]")
        frames = tuple(read_image(frame, number) for number, frame in enumerate(self.frames))
        if any(isinstance(frame, RemoteImage | NamedImage | Video) for frame in frames):
            raise InvalidRequestError.of("prompt", "a frame of a video is an image itself, not a URL to fetch")
        object.__setattr__(self, "frames", frames)


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image, with what stands for its tokens in the names of cached pages."""

    image: Any  # as of `images_of`
    token_id: int  # of its tokens
    names: tuple[int, ...]  # of each of these, below -1


def page_names(token_ids: Sequence[int], images: Sequence[Any]) -> Sequence[int]:
    """The ids with the names of each `NamedImage` in place of its tokens, as replicas name pages."""
    names = [(image.token_id, name) for image in images if isinstance(image, NamedImage) for name in image.names]
    if not names:
        return token_ids
    rest = iter(names)
    return [next(rest, (0, one))[1] if one == names[0][0] else one for one in token_ids]


def image_file(image: Any) -> bytes:
    """The file of one of `images_of`. Raises `InvalidRequestError` (prompt) for one that cannot be read."""
    if isinstance(image, NamedImage):
        image = image.image
    if isinstance(image, bytes):
        return image
    try:
        if isinstance(image, Path):
            return image.read_bytes()
        held = io.BytesIO()
        image.save(held, "PNG")
        return held.getvalue()
    except (OSError, ValueError) as error:
        raise InvalidRequestError.of("prompt", f"an image cannot be read: {error}") from None


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images of a chat, in their order: the bytes of a file, a `pathlib.Path`, a picture of PIL, a `RemoteImage` or a `Video` each.
    Raises `InvalidRequestError` (prompt).

    A part `{"type": "image", "image": ...}` of a content has any of these, the name of a file, or a `data:` URL. A part
    `{"type": "video", "video": [frames], "fps": 2.0}` has the fields of a `Video`.
    """
    found: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") == "image":
                found.append(read_image(part.get("image"), len(found)))
            elif isinstance(part, Mapping) and part.get("type") == "video":
                found.append(Video(part.get("video"), part.get("fps", DEFAULT_FPS)))  # type: ignore[arg-type]  # which it checks
    return found


def image_part(image: Any) -> dict[str, Any]:
    """The part of a content that has one of `images_of`."""
    if isinstance(image, Video):
        return {"type": "video", "video": list(image.frames), "fps": image.fps}
    return {"type": "image", "image": image}


def read_image(value: Any, number: int) -> Any:
    if isinstance(value, str):
        if value[:5].lower() != "data:":
            return Path(value)
        try:
            return image_of_url(value)
        except ValueError as error:
            raise InvalidRequestError.of("prompt", f"image {number} {error}") from None
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, RemoteImage | NamedImage | Video):
        return value
    if isinstance(value, bytes | Path) or (hasattr(value, "convert") and hasattr(value, "getexif")):
        return value
    raise InvalidRequestError.of(
        "prompt", f"image {number} is a {type(value).__name__}, not bytes, a path, a data: URL or a picture of PIL"
    )


def image_of_url(url: str) -> bytes | RemoteImage:
    """What a `data:` URL in base64 holds, or another URL to be fetched. Raises ValueError with what is wrong, as it goes on behind the name
    of an image."""
    if url[:5].lower() != "data:":
        return RemoteImage(url)
    head, comma, encoded = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError("is no URL such as data:image/png;base64,... with an image in base64")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        raise ValueError("is a data: URL whose base64 is not valid") from None


def url_of_image(data: bytes) -> str:
    """A `data:` URL with a file of an image."""
    kind = next((f"image/{name}" for signature, name in _SIGNATURES.items() if data.startswith(signature)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


MAX_CHAT_MESSAGES = 4096
MAX_CHAT_CHARACTERS = 4 << 20
"""Most characters and other values in the messages of a chat. A template may leave out most of them, so the context does not bound this."""
MAX_OPTION_CHARACTERS = 1 << 18
"""Most of them in the tools, and in the template_kwargs."""
_IMAGE_PARTS = {"image": {"image"}, "video": {"video", "fps"}}
"""The types of parts that are no text -> what they have beside their type."""
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_DEPTH = 64
"""Most lists and dicts within each other."""
RESERVED = frozenset(
    {"self", "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""What `apply_chat_template` of transformers and its renderer call parameters of their own, which are no variables of a template."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the messages, in which images and videos are parts with their types alone. Raises `InvalidRequestError` (prompt) for what
    is no conversation."""
    if not messages:
        raise InvalidRequestError.of("prompt", "there are no messages")
    check_count(messages)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError.of("prompt", f"message {index} is a {type(message).__name__}, not a dict with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError.of("prompt", f"message {index} has role {shown(role)}, which is not a non-empty string")
        if isinstance(content, list | tuple) and content and all(isinstance(part, Mapping) for part in content):
            _check_parts(content, f"message {index} has a content part")
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            name = type(content).__name__
            raise InvalidRequestError.of("prompt", f"message {index} has content of type {name}, not a string or a list of parts")
    try:
        copied: list[dict[str, Any]] = _plain(list(map(_without_images, messages)), MAX_CHAT_CHARACTERS)
    except Refusal as refusal:
        raise InvalidRequestError.of("prompt", f"the messages hold {refusal}") from None
    return copied


def _without_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple) or not any(part.get("type") in _IMAGE_PARTS for part in content):
        return message
    return {**message, "content": [{"type": part["type"]} if part.get("type") in _IMAGE_PARTS else part for part in content]}


def check_count(messages: Sized) -> None:
    """Raises `InvalidRequestError` (prompt) for more than MAX_CHAT_MESSAGES."""
    if len(messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequestError.of("prompt", f"{len(messages)} messages are more than {MAX_CHAT_MESSAGES}")


def _check_parts(parts: Sequence[Mapping[str, Any]], what: str) -> None:
    for part in parts:
        kind = part.get("type")
        if isinstance(kind, str) and kind in _IMAGE_PARTS and set(part) - {"type"} <= _IMAGE_PARTS[kind]:
            continue
        if kind != "text":
            raise InvalidRequestError.of("prompt", f"{what} of type {shown(kind)}; only 'text', 'image' and 'video' are possible")
        if len(part) != 2 or not isinstance(part.get("text"), str):
            raise InvalidRequestError.of("prompt", f"{what} {shown(dict(part))}, which is not {{'type': 'text', 'text': a string}}")


def _plain(value: Any, most: int) -> Any:
    """A copy of JSON data in plain types. Raises `Refusal` for other values, more than `most` characters and other values, and more than
    MAX_DEPTH levels."""
    left = most

    def copy(one: Any, depth: int) -> Any:
        nonlocal left
        if isinstance(one, str):
            left -= len(one)
            if left >= 0:
                _check_unicode(one)
                return one
        left -= 1
        if left < 0:
            raise Refusal(f"more than {most} characters and other values")
        if depth > MAX_DEPTH:
            raise Refusal(f"lists and dicts in more than {MAX_DEPTH} levels")
        if one is None or (isinstance(one, int) and one.bit_length() <= 64) or (isinstance(one, float) and math.isfinite(one)):
            return one  # a bool is an int
        if isinstance(one, list | tuple):
            return [copy(item, depth + 1) for item in one]
        if isinstance(one, Mapping) and all(isinstance(key, str) for key in one):
            left -= sum(map(len, one))
            _check_unicode("".join(one))
            return {key: copy(item, depth + 1) for key, item in one.items()}
        raise Refusal(f"{shown(one)}, which is no JSON value")

    return copy(value, 0)


def _check_unicode(text: str) -> None:
    """Raises `Refusal` for surrogates, which no tokenizer takes."""
    if not text.isascii() and (found := _SURROGATE.search(text)) is not None:
        raise Refusal(f"{found[0]!r}, which is not valid Unicode")


def _tools(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise Refusal(is_not(value, "a list of dicts, each describing a tool"))
    return _held(value) or None  # a template may take an empty list for tools


def _template_kwargs(value: Any) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise Refusal(is_not(value, "a dict of names and values"))
    if taken := sorted(RESERVED.intersection(value)):
        raise Refusal(f"{', '.join(taken)} cannot be set here")
    return _held(value) or None


def _held(value: Any) -> Any:
    try:
        return _plain(value, MAX_OPTION_CHARACTERS)
    except Refusal as refusal:
        raise Refusal(f"it holds {refusal}") from None


class ChatFields(TypedDict, total=False):
    """The fields of `ChatOptions` as keyword arguments."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None
    keep_history: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a chat template is given beside the messages. Raises `InvalidRequestError` naming every field that is out of range."""

    tools: Annotated[Sequence[Mapping[str, Any]] | None, _tools] = None
    """Chats only: the tools that the model may call, as the model's chat template takes them; mostly
    `{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`."""
    add_generation_prompt: bool | None = None
    """Chats only: whether the prompt ends with the opening of the assistant's turn. Default: true unless `continue_final_message`."""
    continue_final_message: bool = False
    """Chats only: the last message is left open, and the output continues it."""
    template_kwargs: Annotated[Mapping[str, Any] | None, _template_kwargs] = None
    """Chats only: variables for the chat template, such as `{"enable_thinking": False}`."""
    keep_history: Annotated[str, Accepts(lambda value: value in ("text", "ids"), "'text' or 'ids'")] = "text"
    """Chats of a `session` only: "ids" leaves the ids of its latest request and answer as they were, where the messages go on there."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError.of("continue_final_message", "true cannot be combined with add_generation_prompt")

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the beginning of an answer: `add_generation_prompt`, or not `continue_final_message`."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def chat_only(self) -> list[str]:
        """The names of those that are set."""
        return [field.name for field in fields(ChatOptions) if getattr(self, field.name) != field.default]


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A prompt that stands for a place in a request that runs, or has ended not long ago: its prompt, and the first tokens of the output of
    one of its sequences. What goes on from there computes none of them again whose KV is still in memory."""

    request_id: str
    at: int | None = None  # tokens, those of known_outputs included; None: all that there are
    index: int = 0  # of the sequence
    then: Sequence[int] = ()  # token ids that come behind these, in place of what came there
    same_params: bool = False  # as of that sequence, but for those of `TOLD`: the others that are given mean nothing


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | ForkPoint
"""Text, token ids, chat messages, or a place in another request."""
Form = Literal["text", "token_ids", "chat", "fork"]

NO_OUTPUT = "an embedding has no output"
_LABEL = text("a string of at most 128 characters", r"(?s).{0,128}")


def form_of(prompt: Any, options: ChatOptions | None) -> Form:
    """Raises `InvalidRequestError`: (prompt) for something that is no prompt or has too many messages, and for `options` that are for chats
    beside another form."""
    form: Form = "text"
    if isinstance(prompt, ForkPoint):
        form = "fork"
    elif not isinstance(prompt, str):
        if isinstance(prompt, bytes | Mapping) or not (isinstance(prompt, Sequence) or _is_array(prompt)):
            name = type(prompt).__name__
            raise InvalidRequestError.of("prompt", f"a {name} is not a string, a list of token ids or a list of chat messages")
        if len(prompt) and isinstance(prompt[0], Mapping):
            check_count(prompt)
            return "chat"
        form = "token_ids"
    if options is not None and (names := options.chat_only):
        reason = f"it is for chat messages, and the prompt is {'a fork' if form == 'fork' else form.replace('_', ' ')}"
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
    """Return the token ids of each sequence as a tuple of plain integers. Raises `Refusal` for anything else."""
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


def _images(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise Refusal(is_not(value, "a list of images"))
    try:
        return tuple(read_image(one, number) for number, one in enumerate(value))
    except InvalidRequestError as error:
        raise Refusal(error.violations[0].description) from None


class OptionFields(ChatFields, total=False):
    """The fields of `RequestOptions` as keyword arguments."""

    request_id: str | None
    priority: int
    tenant: str
    timeout: float | None
    cache_salt: str | None
    session: str | None
    adapter: str | None
    known_outputs: Sequence[Sequence[int] | None] | None
    images: Sequence[Any]
    receipt: bool


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
    session: Annotated[str | None, text("a string of 1 to 128 characters", r"(?s).{1,128}")] = None
    """A conversation of the tenant, whose prefix is kept for its next request: 1 to 128 characters. Default: none."""
    adapter: Annotated[str | None, text("a string that matches [A-Za-z0-9._:/-]{1,128}", ADAPTER_NAME)] = None
    """Name of a loaded adapter that the model computes with. Default: none."""
    known_outputs: Annotated[Sequence[Sequence[int] | None] | None, _known_outputs] = None
    """Output that the sequences of the request have already, as token ids, one entry for each of the `n` sequences; the request goes on
    behind it. None: that sequence has ended and gets nothing. Default: none has any."""
    images: Annotated[Sequence[Any], _images] = ()
    """Prompts of token ids only: the images whose tokens are among the ids, in their order, each as in a part of a chat. Default: none."""
    receipt: Annotated[bool, FLAG] = False
    """Whether the completion has a `Receipt`, with the ids of prompt and output. Not possible with `logits_processors`."""

    def live_sequences(self, n: int) -> Sequence[int]:
        """Return the indexes of the sequences that get tokens, in a request with `n` sequences."""
        known = self.known_outputs
        return range(n) if known is None else [index for index, ids in enumerate(known) if ids is not None]

    @property
    def num_known_tokens(self) -> int:
        """The number of tokens in `known_outputs`, of all sequences."""
        return sum(map(len, filter(None, self.known_outputs or ())))

    def of_fork(self, source: RequestOptions, output: Sequence[int], n: int) -> RequestOptions:
        """Return the options of `n` sequences behind the `output` of a request that has the options `source`: what is not set here is as
        there. Raises `InvalidRequestError` for what cannot be set."""
        given = {"known_outputs": self.known_outputs, "cache_salt": self.cache_salt, "adapter": self.adapter, "images": self.images or None}
        same: dict[str, Any] = {"cache_salt": source.cache_salt, "adapter": source.adapter}
        if wrong := [name for name, value in given.items() if value not in (None, same.get(name))]:
            raise InvalidRequestError([FieldViolation(name, "a fork has that of the request that it is a fork of") for name in wrong])
        same |= {"tenant": self.tenant or source.tenant, "priority": self.priority or source.priority}
        return self.for_ids(known_outputs=[output] * n, images=source.images, **same)

    def for_ids(self, **others: Any) -> RequestOptions:
        """Return the options for a prompt of token ids: those of chats have their defaults, and `others` replace fields."""
        of_chats: dict[str, Any] = {field.name: field.default for field in fields(ChatOptions)}
        return replace(self, **of_chats, **others)

    @classmethod
    def of(cls, options: RequestOptions | None, fields: OptionFields) -> RequestOptions:
        """`options`, or the defaults, with `fields` in place of its own."""
        if options is None:
            return cls(**fields)
        return replace(options, **fields) if fields else options


_SECONDS = Accepts(lambda value: is_positive(value) and value <= 600, "a number of seconds in (0, 600]")


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How long an engine is profiled. Raises `InvalidRequestError` naming every field that is out of range."""

    num_steps: Annotated[int, integer(1, 10_000)] = 100
    """1..10000 steps, or fewer if these take longer than `seconds`."""
    seconds: Annotated[float, _SECONDS] = 10.0
    """In (0, 600]."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError)
