from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but
from tokenizers import decoders

from aengine.tokenizer.codecs import Detokenizer
from aengine.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "It is a truth universally acknowledged, that a single man",
    " leading space,  two  spaces ",
    "don't you think? I'm sure we've seen it . Yes !",
    "smile 😀😀 family 👨‍👩‍👧‍👦 flag 🇦🇹 accents e\u0301",
    "你好、世界。漢字かな交じり文 привет नमस्ते",
    "\ufffd literal replacement \ufffd\ufffd",
    "new\nlines\n\n\ttabs",
    "<think>inside</think> <bos> </s> [SEP]",
]
KINDS = ["demo", *tiny_tokenizers.ALL]


@functools.cache
def load(kind: str) -> Tokenizer:
    import tempfile

    import aengine

    if kind == "demo":
        return Tokenizer.load(Path(aengine.__file__).parent / "models" / "demo_model")
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizers.ALL[kind]().save(f"{folder}/tokenizer.json")
        return Tokenizer.load(Path(folder))


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@st.composite
def sequences(draw: st.DrawFn, kind: str) -> list[int]:
    """Chunks of encoded text, of random ids (special and unknown ones too) and of repetitions, cut at any place."""
    tokenizer = load(kind)
    ids: list[int] = []
    random_id = st.integers(0, tokenizer.vocab_size + 3)
    for _ in range(draw(st.integers(0, 4))):
        match draw(st.sampled_from(["text", "known text", "ids", "repeat"])):
            case "text":
                ids += tokenizer.encode(draw(st.text(max_size=20)))
            case "known text":
                encoded = tokenizer.encode(draw(st.sampled_from(TEXTS)))
                start = draw(st.integers(0, len(encoded)))
                ids += encoded[start : draw(st.integers(start, len(encoded)))]
            case "ids":
                ids += draw(st.lists(random_id, max_size=30))
            case "repeat":
                ids += draw(st.lists(random_id, min_size=1, max_size=3)) * draw(st.integers(1, 40))
    return ids


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("part", slow_but([0], range(3)))
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_add_up_to_the_full_decode_of_any_ids(kind: str, part: int) -> None:
    tokenizer = load(kind)

    @settings(max_examples=80, deadline=None)
    @given(sequences(kind), st.booleans())
    def check(ids: list[int], skip_special_tokens: bool) -> None:
        assert "".join(pieces(tokenizer, ids, skip_special_tokens)) == tokenizer.decode(ids, skip_special_tokens)

    check()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "byte_fallback" in kind or kind in ("demo", "byte_level", "metaspace")])
def test_pieces_add_up_over_bytes_alone(kind: str) -> None:
    """Runs of raw bytes, valid and not: the places where half characters could slip out."""
    tokenizer = load(kind)
    core = tiny_tokenizers.ALL[kind]() if kind != "demo" else None
    if kind in ("demo", "byte_level"):
        encoded = "".join(chr(code) for code in range(0x80, 0x800, 61)) + "漢😀👨‍👩‍👧"
        byte_ids = sorted(set(tokenizer.encode(encoded)))
    else:
        assert core is not None
        byte_ids = [core.token_to_id(token) for token in tiny_tokenizers.BYTES]
    letter = tokenizer.encode("truth")[-1]

    @settings(max_examples=250, deadline=None)
    @given(st.lists(st.sampled_from([*byte_ids, letter]), max_size=40))
    def check(ids: list[int]) -> None:
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("kind", ["demo", "byte_level"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_character_comes_with_its_last_byte_and_never_in_halves(kind: str, text: str) -> None:
    tokenizer = load(kind)
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    seen = ""
    for count, token_id in enumerate(ids, start=1):
        piece = detokenizer.push(token_id)
        seen += piece
        if "\ufffd" not in text:
            assert "\ufffd" not in piece
        whole = tokenizer.decode(ids[:count])
        assert whole.startswith(seen)
        assert len(seen) >= len(whole.rstrip("\ufffd")), "text that cannot change is held back"
    assert seen + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["demo", "byte_level"])
def test_bytes_that_can_be_no_character_come_at_once(kind: str) -> None:
    """Only the bytes of a character that may yet be finished are held back."""
    tokenizer = load(kind)
    smile = tokenizer.encode("😀")[-4:]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(token_id) for token_id in (smile[2], smile[0], smile[1], smile[0])] == ["\ufffd", "", "", "\ufffd"]
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "\ufffd")
    assert [detokenizer.push(token_id) for token_id in smile[1:]] == ["", "", "😀"], "flush changes nothing"


def test_tokens_that_all_end_inside_a_character() -> None:
    """Every token finishes a character and begins the next: text comes with each of them, however long it goes on."""
    core = tiny_tokenizers.byte_level()
    core.add_tokens(["\u00d0", "\u00b8\u00d0"])  # the bytes d0 and b8 d0 as ByteLevel writes them; "и" is d0 b8
    first, middle = core.token_to_id("\u00d0"), core.token_to_id("\u00b8\u00d0")
    assert core.decode([first, middle, middle]) == "ии\ufffd"
    detokenizer = Detokenizer(core.decode, lambda token_id: False)
    assert [detokenizer.push(token_id) for token_id in [first, *[middle] * 200]] == ["", *["и"] * 200]
    assert detokenizer.flush() == "\ufffd"


def test_emoji_of_four_byte_tokens_comes_as_one_piece() -> None:
    tokenizer = load("byte_level")
    ids = tokenizer.encode("😀")[1:]  # without BOS
    assert len(ids) == 4
    assert pieces(tokenizer, ids) == ["", "", "", "😀", ""]


def test_a_run_of_fallback_bytes_is_held_until_it_ends() -> None:
    """A run is all characters or all U+FFFD: 'é' may not be handed out before the byte that spoils it is ruled out."""
    tokenizer = load("unigram_byte_fallback")
    core = tiny_tokenizers.unigram_byte_fallback()
    good = [core.token_to_id(token) for token in ("<0xC3>", "<0xA9>")]
    bad, word, skipped = (core.token_to_id(token) for token in ("<0xFF>", "▁truth", "</s>"))
    assert pieces(tokenizer, [word, *good, word]) == ["truth", "", "", "é truth", ""]
    assert pieces(tokenizer, [word, *good, bad, word]) == ["truth", "", "", "", "\ufffd\ufffd\ufffd truth", ""]
    assert pieces(tokenizer, [word, *good]) == ["truth", "", "", "é"]
    assert pieces(tokenizer, [word, good[0], skipped, good[1], word]) == ["truth", "", "", "", "é truth", ""]


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        ("unigram_byte_fallback", ["▁truth", "▁truth", "</s>", "▁truth"], ["truth", " truth", "", " truth", ""]),
        ("unigram_byte_fallback", ["<s>", "▁truth"], ["", "truth", ""]),
        ("metaspace", ["▁", "▁truth"], ["", " truth", ""]),
        ("wordpiece", ["[CLS]", "t", "##h", "n't", ".", "[SEP]"], ["", "t", "h", "n't", ".", "", ""]),
        ("byte_level", ["<think>", "<eos>", "t"], ["<think>", "", "t", ""]),
    ],
)
def test_spaces_at_the_start_special_tokens_and_clean_ups(kind: str, tokens: list[str], expected: list[str]) -> None:
    core = tiny_tokenizers.ALL[kind]()
    ids = [core.token_to_id(token) for token in tokens]
    assert None not in ids
    assert pieces(load(kind), ids) == expected


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        ("unigram_byte_fallback", ["<s>", "▁truth", "</s>", "▁truth"], ["<s>", " truth", "</s>", " truth", ""]),
        ("unigram_byte_fallback", ["<0xC3>", "</s>", "<0xA9>"], ["", "\ufffd</s>", "", "\ufffd"]),
        ("metaspace", ["<s>", "▁truth"], ["<s>", " truth", ""]),
        ("wordpiece", ["[CLS]", "t", "##h", "[SEP]"], ["[CLS]", " t", "h", " [SEP]", ""]),
        ("byte_level", ["<bos>", "t", "<eos>"], ["<bos>", "t", "<eos>", ""]),
    ],
)
def test_special_tokens_that_are_not_skipped(kind: str, tokens: list[str], expected: list[str]) -> None:
    """They are text then: a run of bytes ends before them, and what follows them is not the start of the text."""
    core = tiny_tokenizers.ALL[kind]()
    ids = [core.token_to_id(token) for token in tokens]
    assert None not in ids
    assert pieces(load(kind), ids, skip_special_tokens=False) == expected


class CountingDecode:
    """The full decoder, with a count of the tokens that went through it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens = 0

    def __call__(self, ids: list[int]) -> str:
        self.tokens += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("length", [1_000, 8_000])
def test_tokens_decoded_per_push_do_not_grow_with_the_sequence(length: int) -> None:
    tokenizer = load("demo")
    cases = {
        "text": tokenizer.encode("It is a truth 😀 universally acknowledged 漢字. " * length)[:length],
        "never a character": [tokenizer.encode("😀")[-1]] * length,
        "no text at all": [tokenizer.encode("t")[0]] * length,
    }
    for name, ids in cases.items():
        decode = CountingDecode(tokenizer)
        nothing = name == "no text at all"
        detokenizer = Detokenizer((lambda ids, decode=decode: decode(ids)[:0]) if nothing else decode, lambda token_id: False)
        text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
        assert text == ("" if nothing else tokenizer.decode(ids))
        assert decode.tokens < 17 * length, name


def test_a_long_run_of_bytes_is_decoded_once() -> None:
    tokenizer = load("unigram_byte_fallback")
    core = tiny_tokenizers.unigram_byte_fallback()
    run = [core.token_to_id(f"<0x{byte:02X}>") for byte in "漢字".encode() * 500]
    decode = CountingDecode(tokenizer)
    detokenizer = Detokenizer(decode, lambda token_id: False, frozenset(run))
    assert "".join(detokenizer.push(token_id) for token_id in run) == ""
    assert decode.tokens == 0
    assert detokenizer.push(core.token_to_id("▁truth")) == "漢字" * 500 + " truth"
    assert decode.tokens <= len(run) + 17


def test_context_reaches_back_to_text_that_the_decoder_does_not_strip() -> None:
    """This decoder strips up to five spaces from the start of what it is given: that may only ever be the start of the sequence."""
    core = tiny_tokenizers.unigram_byte_fallback()
    strip = decoders.Strip(" ", 5, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    word, space = core.token_to_id("▁truth"), core.token_to_id("▁")
    ids = [word] * 14 + [space] * 8 + [word]
    detokenizer = Detokenizer(core.decode, lambda token_id: False)
    assert "".join(detokenizer.push(token_id) for token_id in ids) == core.decode(ids)


def test_a_run_of_bytes_is_not_cut_while_it_is_held() -> None:
    """Behind a long tail of U+FFFD a run of bytes, spoilt by its first one, is still held when the window is cut."""
    core = tiny_tokenizers.unigram_byte_fallback()
    core.add_tokens(["\ufffd"])
    byte_ids = frozenset(core.token_to_id(token) for token in tiny_tokenizers.BYTES)
    names = {"?": "\ufffd", "w": "▁truth", "F": "<0xFF>", "A": "<0x41>"}
    ids = [core.token_to_id(names[name]) for name in "?" * 27 + "FA?ww?FAFAAAA??Fw"]
    detokenizer = Detokenizer(core.decode, lambda token_id: False, byte_ids)
    assert "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush() == core.decode(ids)
