"""Texts of single tokens, and the columns of completions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import tiny_tokenizers

from aengine.api.outputs import TokenLogprob
from aengine.server.http.chat_output import CompletionLogprobs, TokenTexts
from aengine.tokenizer.codecs import TokenizersCodec
from aengine.tokenizer.tokenizer import Tokenizer
from aengine.tokenizer.vocabulary import TokenBytes

pytestmark = pytest.mark.anyio


def made(name: str) -> Tokenizer:
    return Tokenizer(TokenizersCodec(tiny_tokenizers.ALL[name]()), None)


async def texts_of(tokenizer: Tokenizer, ids: Collection[int]) -> TokenTexts:
    """Those that have learned `ids`."""

    class Engine:
        async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
            known = TokenBytes(tokenizer)
            return {token_id: known[token_id] for token_id in token_ids}

    engine: Any = Engine()
    texts = TokenTexts(engine)
    await texts.learn_ids(ids)
    return texts


CASES = [
    (name, text)
    for name in tiny_tokenizers.ALL
    for text in ("It is a truth", "né 😀 b")
    if name != "no_decoder" and (name, text) != ("word_end", "né 😀 b")  # parts of words are joined by what is before them
]


@pytest.mark.parametrize(("name", "text"), CASES)
async def test_the_bytes_of_tokens_add_up_to_their_text(name: str, text: str) -> None:
    tokenizer = made(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = await texts_of(tokenizer, ids)
    known = [token_id for token_id in ids if tokenizer.piece(token_id) is not None]
    assert b"".join(map(texts.bytes_of, known)).decode().strip() == tokenizer.decode(ids).strip()


async def test_columns_tell_parts_of_characters_apart() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    assert len(ids) > 3, "the character has several tokens"
    columns = CompletionLogprobs(await texts_of(tokenizer, ids)).columns(
        [(ids[0],), *(TokenLogprob(token_id, -1.5, 2, {ids[0]: -0.5}) for token_id in ids[1:])], top=1
    )
    assert columns["tokens"][0] == "a"
    assert len(set(columns["tokens"])) == len(ids)
    assert all(name.startswith("bytes:\\x") for name in columns["tokens"][1:])
    assert columns["token_logprobs"] == [None, *([-1.5] * (len(ids) - 1))]
    assert columns["top_logprobs"] == [None, *({"a": -0.5, name: -1.5} for name in columns["tokens"][1:])]
