"""`ReadTokens` is what a list of the tokens would be."""

from __future__ import annotations

import random

import pytest

from aengine.api.outputs import NO_TOKEN, FinishReason, Token
from aengine.api.runtime import ReadTokens


def _tokens(seed: int, count: int) -> list[Token]:
    rng = random.Random(seed)
    found = []
    for place in range(count):
        match rng.randrange(5):
            case 0:
                found.append(Token(2, place, "é", -0.5, 1, {place: -0.5, 7: -1.5}))
            case 1:
                found.append(Token(2, place, "", weights_version=rng.randrange(3)))
            case _:
                found.append(Token(2, rng.randrange(2**31), f"text {place}"))
    return [*found, Token(2, NO_TOKEN, "held", finish_reason=FinishReason.CANCELLED)]


@pytest.mark.parametrize("seed", range(5))
def test_they_are_a_list_of_tokens(seed: int) -> None:
    tokens, read = _tokens(seed, 40), ReadTokens(2)
    for token in tokens:
        read.append(token)
    assert len(read) == len(tokens)
    assert list(read) == tokens
    assert read[-1] == tokens[-1]
    assert read[3:-2:2] == tokens[3:-2:2]
    assert "".join(read.texts) == "".join(token.text for token in tokens)
    assert list(read.ids) == [token.token_id for token in tokens]
    with pytest.raises(IndexError):
        read[len(tokens)]
    read.cut(11)
    for token in tokens[30:]:
        read.append(token)
    assert list(read) == [*tokens[:11], *tokens[30:]]
