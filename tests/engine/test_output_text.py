"""Stop strings against the plain way: decode everything, then look for the earliest match. Runs in about ten seconds."""

from __future__ import annotations

import functools

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but
from test_detokenizer import KINDS, load, sequences

from aengine.engine.text import OutputText, StopStrings
from aengine.tokenizer.tokenizer import Tokenizer

TORTURE = "Hi 👨‍👩‍👧‍👦!🇦🇹 e\u0301a\u0308\u0323 漢字かな שָׁלוֹם עולם aaab\ufffd\ufffd don't, a truth\n\n\tof 12"


def tokens_of(kind: str) -> list[int]:
    """The torture text, with bytes that are no UTF-8 in its middle and at its end."""
    tokenizer = load(kind)
    ids = tokenizer.encode(TORTURE if kind != "no_decoder" else "word1 word22 word3 ?? word3 word12 word45 word1")
    if kind in ("demo", "byte_level"):
        smile = tokenizer.encode("😀")[-4:]
    elif "byte_fallback" in kind or kind == "metaspace":
        core = tiny_tokenizers.ALL[kind]()
        smile = [core.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    else:
        smile = []
    middle = len(ids) // 2
    return [*ids[:middle], *smile[:2], *ids[middle:], *smile, *smile[2:], *smile[:2]]


def decoded(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The certain text before each token and after the last one, and at the end."""
    detokenizer = tokenizer.detokenizer()
    texts = [""]
    for token_id in ids:
        texts.append(texts[-1] + detokenizer.push(token_id))
    return [*texts, texts[-1] + detokenizer.flush()]


def earliest(text: str, stop: tuple[str, ...], after: int = 0) -> str | None:
    """The part of `text` up to the end of the earliest match that ends after `after`, and the match."""
    found = [
        (start, len(string), string)
        for string in stop
        if (start := text.find(string, max(0, after + 1 - len(string)))) >= 0  # the first that ends after it
    ]
    return min(found, default=(0, 0, ""))[::2] if found else None  # type: ignore[return-value]


def held_length(text: str, stop: tuple[str, ...]) -> int:
    """The longest end of `text` that a stop string begins with, and goes on from."""
    lengths = (length for string in stop for length in range(len(string)) if text.endswith(string[:length]))
    return max(lengths, default=0)


def check(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], include: bool = False, min_tokens: int = 0) -> None:
    """The text after each token is what the plain way makes of the text so far, and so is the end."""
    texts = decoded(tokenizer, ids)
    ignored = len(texts[min_tokens]) if min_tokens < len(ids) else len(texts[-1])
    output = OutputText(tokenizer.detokenizer(), stop=stop, include_stop=include, min_tokens=min_tokens)
    seen = ""
    for text, token_id in zip(texts[1:], ids, strict=False):
        seen += output.push(token_id)
        match = earliest(text, stop, ignored)
        certain = len(text) - held_length(text, stop)
        if match is not None and match[0] <= certain:
            assert (seen, output.stopped) == (cut(text, match, include), match[1])
            assert (output.push(token_id), output.flush(), output.end_with(token_id, True)) == ("", "", "")
            return
        assert (seen, output.stopped) == (text[:certain], None)
    seen += output.flush()
    match = earliest(texts[-1], stop, ignored)
    expected = (texts[-1], None) if match is None else (cut(texts[-1], match, include), match[1])
    assert (seen, output.stopped) == expected


def cut(text: str, match: tuple[int, str], include: bool) -> str:
    start, string = match
    return text[: start + len(string) * include]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", slow_but([1, 3, 9], [1, 2, 3, 5, 9]))
def test_every_stop_string_over_every_token_border(kind: str, length: int) -> None:
    """Every string of this length that the text has, so each lies over each border in each way; then one that is not there."""
    tokenizer, ids = load(kind), tokens_of(kind)
    text = tokenizer.decode(ids)
    strings = {text[start : start + length] for start in range(len(text) - length + 1)}
    assert len(strings) > 5
    for string in sorted(strings):
        check(tokenizer, ids, (string,), include=len(string) % 2 == 0)
        check(tokenizer, ids, (string + "☃",))


def test_the_torture_text_has_stop_strings_that_lie_over_borders() -> None:
    """Else the test above would test nothing: most strings of three characters are finished by another token than they begin with."""
    tokenizer, ids = load("demo"), tokens_of("demo")
    texts = decoded(tokenizer, ids)
    lengths = [len(text) for text in texts[:-1]]
    over = sum(any(start < border < start + 3 for border in lengths) for start in range(len(texts[-1]) - 2))
    assert over > 0.8 * len(texts[-1])
    assert texts[-2] != texts[-1], "the end of the text is known at the end only"
    assert "\ufffd" in texts[-1][20:60]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("part", slow_but([0], range(3)))
@pytest.mark.parametrize("kind", KINDS)
def test_random_ids_and_stop_strings_cut_out_of_their_text(kind: str, part: int) -> None:
    tokenizer = load(kind)

    @st.composite
    def cases(draw: st.DrawFn) -> tuple[list[int], tuple[str, ...], bool, int]:
        ids = draw(sequences(kind))
        text = tokenizer.decode(ids)
        strings = set()
        for _ in range(draw(st.integers(1, 4))):
            start = draw(st.integers(0, len(text)))
            string = text[start : start + draw(st.integers(0, 12))] + draw(st.sampled_from(["", "", "", "x"]))
            strings.add(string or "truth")
        return ids, tuple(sorted(strings)), draw(st.booleans()), draw(st.sampled_from([0, 0, 1, len(ids) // 2, len(ids), len(ids) + 1]))

    @settings(max_examples=50, deadline=None)
    @given(cases())
    def run(case: tuple[list[int], tuple[str, ...], bool, int]) -> None:
        check(tokenizer, *case)

    run()


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab", max_size=24),
    st.sets(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 20),
)
def test_stop_strings_that_overlap(text: str, stop: set[str], include: bool, min_tokens: int) -> None:
    """Two letters only, a token each: stop strings begin, end and lie in each other and in themselves."""
    letters = _letters()
    check(load("demo"), [letters[character] for character in text], tuple(sorted(stop)), include, min_tokens)


@functools.cache
def _letters() -> dict[str, int]:
    ids = {letter: load("demo").encode(letter) for letter in "abcdefgh "}
    assert all(len(one) == 1 for one in ids.values())
    return {letter: one[0] for letter, one in ids.items()}


def pieces(text: str, stop: tuple[str, ...], **options: int) -> tuple[list[str], str | None]:
    """What comes of a token per character, and at the end."""
    output = OutputText(load("demo").detokenizer(), stop=stop, **options)  # type: ignore[arg-type]
    return [*(output.push(_letters()[character]) for character in text), output.flush()], output.stopped


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("abc", (), ["a", "b", "c", ""], None),
        ("abc", ("c",), ["a", "b", "", ""], "c"),
        ("abc", ("cd",), ["a", "b", "", "c"], None),
        ("abab", ("abc",), ["", "", "ab", "", "ab"], None),
        ("aab", ("ab",), ["", "a", "", ""], "ab"),
        ("abcd", ("cd", "bc"), ["a", "", "", "", ""], "bc"),
        ("abc", ("abc", "ab"), ["", "", "", ""], "ab"),
        ("abc", ("bc", "abc", "c"), ["", "", "", ""], "abc"),
        ("abcd", ("abcd", "bc"), ["", "", "", "", ""], "abcd"),
        ("abcea", ("abcd", "bc"), ["", "", "", "a", "", ""], "bc"),
        ("abc", ("abcd", "bc"), ["", "", "", "a"], "bc"),
        ("abcdf", ("abcde", "bcd", "c"), ["", "", "", "", "a", ""], "bcd"),
    ],
    ids=str,
)
def test_what_is_held_back_and_which_match_wins(text: str, stop: tuple[str, ...], expected: list[str], stopped: str | None) -> None:
    assert pieces(text, stop) == (expected, stopped)


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "expected", "stopped"),
    [
        ("abab", ("ab",), 1, ["", "", "", "", ""], "ab"),
        ("abab", ("ab",), 2, ["", "ab", "", "", ""], "ab"),
        ("ab", ("ab",), 2, ["", "ab", ""], None),
        ("aaa", ("aa",), 2, ["", "a", "", ""], "aa"),
        ("abcd", ("ab", "abcd"), 2, ["", "", "", "", ""], "abcd"),
        ("abce", ("ab", "abcd"), 2, ["", "", "", "abce", ""], None),
        ("aab", ("aab", "ab"), 2, ["", "", "", ""], "aab"),
    ],
    ids=str,
)
def test_min_tokens(text: str, stop: tuple[str, ...], min_tokens: int, expected: list[str], stopped: str | None) -> None:
    """A match begins where it likes, but the token that completes it is a later one than the first min_tokens."""
    assert pieces(text, stop, min_tokens=min_tokens) == (expected, stopped)


def test_text_of_the_first_min_tokens_that_is_known_only_at_the_end_is_no_match() -> None:
    tokenizer = load("byte_level")
    first = tokenizer.encode("😀")[1]
    for min_tokens, expected in ((0, ("", "\ufffd")), (1, ("\ufffd", None))):
        output = OutputText(tokenizer.detokenizer(), stop=("\ufffd",), min_tokens=min_tokens)
        assert output.push(first) == ""
        assert (output.flush(), output.stopped) == expected


def test_include_stop() -> None:
    assert pieces("abcd", ("bc",), include_stop=True) == (["a", "", "bc", "", ""], "bc")
    assert pieces("abcea", ("abcd", "bc"), include_stop=True) == (["", "", "", "abc", "", ""], "bc"), "what came later is cut off"


def test_a_stop_string_in_what_the_detokenizer_held_ends_the_sequence_at_the_end() -> None:
    tokenizer = load("unigram_byte_fallback")
    ids = tokenizer.encode("a truth漢字")
    output = OutputText(tokenizer.detokenizer(), stop=("漢",))
    assert "".join(output.push(token_id) for token_id in ids) == "a truth"
    assert output.stopped is None
    assert (output.flush(), output.stopped) == ("", "漢")


@pytest.mark.parametrize(
    ("stop", "expected", "stopped"),
    [
        ((), "ab", None),
        (("bcd",), "ab", None),
        (("bc",), "ab", None),
        (("c",), "ab", None),
        (("abcd", "b"), "a", "b"),
        (("abc", "b"), "a", "b"),
    ],
)
def test_the_text_of_a_stop_token(stop: tuple[str, ...], expected: str, stopped: str | None) -> None:
    """It is there if it is included, and never searched; what was held back comes out in any case."""
    for include in (False, True):
        output = OutputText(load("demo").detokenizer(), stop=stop)
        seen = output.push(_letters()["a"]) + output.push(_letters()["b"]) + output.end_with(_letters()["c"], include)
        assert (seen, output.stopped) == (expected + "c" * (include and stopped is None), stopped)


def test_the_text_of_a_stop_token_after_bytes_that_are_no_character() -> None:
    tokenizer = load("byte_level")
    first = tokenizer.encode("😀")[1]
    end = tokenizer.encode("b")[-1]
    for include in (False, True):
        for stop, expected in (("x", "\ufffd" + "b" * include), ("\ufffd", "")):
            output = OutputText(tokenizer.detokenizer(), stop=(stop,))
            assert output.push(first) + output.end_with(end, include) == expected
            assert output.stopped == (None if stop == "x" else stop)


@pytest.mark.parametrize(("skip", "expected"), [(True, ""), (False, "<|im_end|>")])
def test_an_included_end_of_sequence_id_has_text_if_special_tokens_do(skip: bool, expected: str) -> None:
    tokenizer = load("demo")
    output = OutputText(tokenizer.detokenizer(skip_special_tokens=skip))
    assert output.end_with(tokenizer.encode("<|im_end|>")[0], include=True) == expected


def test_a_special_token_as_stop_string() -> None:
    """Found where it is text; it does not part the text on its sides where it is not."""
    tokenizer = load("demo")
    ids = tokenizer.encode("a<|im_end|>b")
    for skip, stop, expected in ((False, "<|im_end|>", "a"), (True, "<|im_end|>", "ab"), (True, "ab", ""), (False, "ab", "a<|im_end|>b")):
        output = OutputText(tokenizer.detokenizer(skip_special_tokens=skip), stop=(stop,))
        assert "".join(output.push(token_id) for token_id in ids) + output.flush() == expected


def test_sequences_share_stop_strings() -> None:
    stop = StopStrings(("abc", "bd"))
    outputs = [OutputText(load("demo").detokenizer(), stop=stop) for _ in range(2)]
    seen = ["", ""]
    for characters in zip("abcd", "aabd", strict=True):
        for index, character in enumerate(characters):
            seen[index] += outputs[index].push(_letters()[character])
    assert seen == ["", "aa"]
    assert [output.stopped for output in outputs] == ["abc", "bd"]


class CountingStops(StopStrings):
    """Counts the states that it looks at."""

    __slots__ = ("looks",)

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.looks = 0
        super().__init__(strings)
        counting = self

        class Children(list[dict[str, int]]):
            def __getitem__(self, index: int) -> dict[str, int]:  # type: ignore[override]
                counting.looks += 1
                return super().__getitem__(index)

        self._children = Children(self._children)


@pytest.mark.parametrize("length", [1_000, 8_000])
def test_the_cost_of_a_character_does_not_grow(length: int) -> None:
    """Not with the output, nor with the number and the length of the stop strings."""
    stop = CountingStops(tuple("a" * size + "b" for size in range(1, 250)))
    text = "a" * length + "d"
    detokenizer = load("demo").detokenizer()
    output = OutputText(detokenizer, stop=stop)
    assert "".join(output.push(_letters()[character]) for character in text) == text
    assert stop.looks <= 2 * len(text)
