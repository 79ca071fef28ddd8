"""The model's tokenizer and chat template for calls: their limits, and the names of fields in errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from aengine.api.engine import ServedEngine
from aengine.api.errors import InvalidRequestError
from aengine.api.outputs import RenderedChat, TokenizedText
from aengine.api.request import ChatFields
from aengine.server.core.image_urls import ImageUrls

MAX_TEXT_BYTES = 4 * 1024 * 1024
MAX_PIECES_TEXT_BYTES = 256 * 1024
"""Pieces and offsets are many times as large as their text, and are made with the GIL held."""
MAX_TOKEN_IDS = 1024 * 1024


class TokenizedChat(NamedTuple):
    """A chat as the template writes it."""

    rendered: RenderedChat
    token_ids: list[int]


class ServedTexts:
    """Asks `engine`. Fields in errors have the names of the arguments."""

    def __init__(self, engine: ServedEngine, image_urls: ImageUrls) -> None:
        self._engine = engine
        self._image_urls = image_urls

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, literals: Sequence[tuple[int, int]] = ()) -> list[int]:
        """The token ids of a text. Raises `InvalidRequestError` for one of more than MAX_TEXT_BYTES, and what the engine raises."""
        check_size("text", _num_bytes(text), MAX_TEXT_BYTES)
        with _renamed({"prompt": "text"}):
            return await self._engine.tokenize(text, add_special_tokens=add_special_tokens, literals=literals)

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `tokenize` gives, with their pieces and places. Raises `InvalidRequestError`, of `with_pieces` where the tokenizer
        cannot tell places."""
        check_size("text", _num_bytes(text), MAX_PIECES_TEXT_BYTES)
        with _renamed({"prompt": "text", "offsets": "with_pieces"}):
            return await self._engine.locate(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises `InvalidRequestError` for ids that the model does not have."""
        check_ids(token_ids)
        return await self._engine.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def render(self, messages: Sequence[Mapping[str, Any]], fields: ChatFields) -> TokenizedChat:
        """A chat as the model's template writes it, with its token ids. Raises `InvalidRequestError`, of `prompt` for the messages and of
        the names of `fields`."""
        chat = await self._engine.render_chat(await self._image_urls.resolved(messages), **fields)
        return TokenizedChat(chat, await self._engine.tokenize(chat.text, add_special_tokens=False, literals=chat.literals))


@contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise error.moved(lambda field: names.get(field, field)) from error


def check_ids(token_ids: Sequence[int]) -> None:
    """Raises `InvalidRequestError` (token_ids) for more than MAX_TOKEN_IDS."""
    if len(token_ids) > MAX_TOKEN_IDS:
        raise InvalidRequestError.of("token_ids", f"{len(token_ids)} ids are more than {MAX_TOKEN_IDS}")


def check_size(field: str, size: int, limit: int) -> None:
    """Raises `InvalidRequestError` for more bytes than `limit`."""
    if size > limit:
        raise InvalidRequestError.of(field, f"{size} bytes are more than {limit}")


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
