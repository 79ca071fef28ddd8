"""Forced text: what is proposed for it, and what is learned from the tokens that came."""

from __future__ import annotations

from collections.abc import Sequence

from aengine.sampling.grammar import ForcedPlace, ForcedText

TEXTS = [b"na", b"me", b'"', b'":', b" ", b"name", b"{", b"", b"n", b"a"]
NA, ME, QUOTE, QUOTE_COLON, SPACE, NAME, BRACE, SPECIAL, N, _ = range(len(TEXTS))


def encode(before: int, text: bytes) -> Sequence[int]:
    return [NAME, QUOTE] if text == b'name"' else []


def proposed(learned: ForcedText, place: ForcedPlace, before: int = BRACE) -> list[int]:
    return learned.tokens(before, place, TEXTS, encode)


def sample(learned: ForcedText, tokens: list[int], text: bytes = b'name"') -> None:
    before, place = BRACE, ForcedPlace().forced(text)
    for token in tokens:
        learned.learn(before, place, token)
        before, place = token, place.behind(TEXTS[token])


def test_at_first_it_is_cut_as_by_the_tokenizer() -> None:
    learned = ForcedText()
    assert proposed(learned, ForcedPlace().forced(b'name"')) == [NAME, QUOTE]
    assert proposed(learned, ForcedPlace().forced(b'me"')) == []
    assert proposed(learned, ForcedPlace()) == []


def test_then_as_the_model_cut_it() -> None:
    learned = ForcedText()
    sample(learned, [NA, ME, QUOTE_COLON])
    assert proposed(learned, ForcedPlace().forced(b'name"')) == [NA, ME, QUOTE_COLON]
    assert proposed(learned, ForcedPlace(b'name"', b'me"'), before=NA) == [ME, QUOTE_COLON]
    for _ in range(3):
        sample(learned, [NAME, QUOTE])
    assert proposed(learned, ForcedPlace().forced(b'name"')) == [NAME, QUOTE]
    sample(learned, [NA, ME, QUOTE])
    assert proposed(learned, ForcedPlace().forced(b'name"')) == [NAME, QUOTE], "one exception changes nothing"


def test_what_followed_twice_is_proposed_too() -> None:
    learned = ForcedText()
    sample(learned, [NAME, QUOTE_COLON, SPACE, QUOTE, BRACE])
    assert proposed(learned, ForcedPlace().forced(b'name"')) == [NAME, QUOTE_COLON]
    sample(learned, [NAME, QUOTE_COLON, SPACE, QUOTE, BRACE])
    assert proposed(learned, ForcedPlace().forced(b'name"')) == [NAME, QUOTE_COLON, SPACE, QUOTE, BRACE]
    assert proposed(learned, ForcedPlace(b'name"', b"", 2), before=SPACE) == [QUOTE, BRACE]
    assert proposed(learned, ForcedPlace(b'other"', b"", 2), before=SPACE) == [], "it depends on the text"


def test_proposals_and_memory_are_bounded() -> None:
    learned = ForcedText()
    sample(learned, [N] * 100, b"n" * 100)
    assert len(proposed(learned, ForcedPlace().forced(b"n" * 100), BRACE)) == 16
    for number in range(30_000):
        learned.learn(number, ForcedPlace().forced(b"x"), N)
    assert len(learned._next) <= 10_000


def test_a_token_without_text_ends_it() -> None:
    assert ForcedPlace(b"ab", b"ab").behind(TEXTS[SPECIAL]) == ForcedPlace(b"ab", b"", 1)
    assert ForcedPlace(b"ab", b"b").forced(b"bc") == ForcedPlace(b"ab", b"bc"), "more of the same text"
    assert ForcedPlace(b"ab", b"", 2).forced(b"xy") == ForcedPlace(b"xy", b"xy")
