"""The libraries behind `Tokenizer`: `tokenizers`, and transformers for files that it cannot read. Owns how each is called, and how ids
become text one at a time (`ByteDetokenizer`, `Detokenizer`).

Knows nothing of files, chats or requests. A text may be anything that is Unicode; exceptions of a library are raised unchanged.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders

from aengine.api.outputs import TokenizedText

Literals = Sequence[tuple[int, int]]
"""As of `RenderedChat`."""
REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) UTF-8

_WINDOW = 16  # tokens in the window before it is cut
_CONTEXT = 4  # tokens that stay when it is cut; no UTF-8 character has more bytes
_EAGER = 16  # held tokens up to which every push is tried
_MASK = "\ue001"
_BEFORE_IDS = (-2, -3)  # which no token has
_HEX = "0123456789abcdefABCDEF"
_MANY_IDS = 1000  # decoding so many takes about as long as another thread should wait for the GIL
_BYTE_TOKENS = tuple(f"<0x{high}{low}>" for high, low in itertools.product(_HEX, _HEX))  # as SentencePiece writes raw bytes


class TokenizersCodec:
    """Encodes and decodes with the `tokenizers` library alone."""

    is_slow = False
    """Whether it runs in Python, and holds the GIL."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._prepare()

    def _prepare(self) -> None:
        """Looks at the added tokens."""
        self._special = frozenset(token_id for token_id, token in self.added().items() if token.special)
        self._without: tuple[frozenset[str], _PlainCodec] | None = None

    def split_special_tokens(self, split: bool) -> None:
        """Whether special tokens in a text are text. Before the first use."""
        if self._core.encode_special_tokens != split:
            self._core.encode_special_tokens = split
            self._prepare()

    def add_tokens(self, tokens: Sequence[AddedToken]) -> None:
        """Makes what is no token yet one, with the next id; and tokens what they are said to be. Before the first use."""
        self._core.add_tokens(list(tokens))
        self._prepare()

    def added(self) -> dict[int, AddedToken]:
        """By their ids."""
        return dict(self._core.get_added_tokens_decoder())

    def token_id(self, spelling: str) -> int | None:
        found: int | None = self._core.token_to_id(spelling)
        return found

    # Batch calls release the GIL while they work; those for one text hold it.

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        return self._core.encode_batch_fast([(first, second)])[0].ids

    def added_tokens(self) -> list[AddedToken]:
        return list(self.added().values())

    @property
    def normalizes(self) -> bool:
        return self._core.normalizer is not None

    def normalize(self, text: str) -> str:
        normalizer = self._core.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def encode_apart(self, text: str, literals: Literals, controls: Collection[str]) -> list[int]:
        """Encode without adding special tokens; no character of `literals` becomes a part of one of the tokens `controls`.

        Text between the control tokens that are found elsewhere is encoded as if none were in the vocabulary. Raises ValueError if that
        still gives one of them.
        """
        added = self.added()
        ids = {token_id for token_id, token in added.items() if token.content in controls}
        found = [place for place in self._places(_masked(text, literals)) if place[2] in ids]
        encoded: list[int] = []
        plain, begin, is_normalized = self._plain(frozenset(controls)), 0, None
        for start, end, token_id in (*found, (len(text), 0, None)):
            between = plain.encode(text[begin:start], is_normalized)
            if not ids.isdisjoint(between):
                cuts = [place + 1 - begin for place, _ in literals if begin <= place < start]
                between = plain.encode_cut(text[begin:start], cuts, is_normalized)
                if not ids.isdisjoint(between):
                    raise ValueError("its vocabulary makes a control token of text that spells one")
            encoded += between
            if token_id is not None:
                encoded.append(token_id)
                begin, is_normalized = end, added[token_id].normalized
        return encoded

    def _places(self, text: str) -> list[tuple[int, int, int]]:
        """Where tokens begin and end in `text`, and their ids."""
        encoding = self._core.encode_batch([text], add_special_tokens=False)[0]
        return [(*place, token_id) for place, token_id in zip(encoding.offsets, encoding.ids, strict=True)]

    def _plain(self, controls: frozenset[str]) -> _PlainCodec:
        if self._without is None or self._without[0] != controls:
            others = {token_id: token for token_id, token in self.added().items() if token.content not in controls}
            self._without = controls, _PlainCodec(others, self._encoder)
        return self._without[1]

    def _encoder(self, added: Mapping[int, AddedToken]) -> Callable[[str], list[int]]:
        """What encodes a text with other added tokens, by the ids that they are to have."""
        core = tokenizers.Tokenizer(self._core.model)  # which both share
        if self._core.normalizer is not None:
            core.normalizer = self._core.normalizer
        if self._core.pre_tokenizer is not None:
            core.pre_tokenizer = self._core.pre_tokenizer
        core.encode_special_tokens = self._core.encode_special_tokens
        core.add_tokens(list(added.values()))
        known = {core.token_to_id(token.content): token_id for token_id, token in added.items()}
        ids = {own: token_id for own, token_id in known.items() if own is not None and own != token_id}

        def encode(text: str) -> list[int]:
            found = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return [ids.get(token_id, token_id) for token_id in found] if ids else found

        return encode

    def longest_token(self) -> int:
        """Bytes of the vocabulary's longest spelling."""
        return max(len(piece.encode()) for piece in self.vocabulary())

    def located(self, text: str, add_special_tokens: bool) -> TokenizedText:
        encoding = self._core.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids = encoding.ids
        places = _byte_offsets(text)[np.asarray(encoding.offsets, dtype=np.int64).reshape(len(ids), 2)]  # the library counts characters
        added = np.asarray(encoding.special_tokens_mask, dtype=bool)
        reached = np.maximum.accumulate(np.where(added, 0, places[:, 1]))
        starts, ends = (np.where(added, reached, places[:, side]).tolist() for side in (0, 1))
        return TokenizedText(ids, encoding.tokens, starts, ends)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) < _MANY_IDS:
            return self._core.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._core.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def omits(self, token_id: int, skip_special_tokens: bool) -> bool:
        return (skip_special_tokens and token_id in self._special) or self._core.id_to_token(token_id) is None

    def piece(self, token_id: int) -> str | None:
        return self._core.id_to_token(token_id)

    def byte_ids(self) -> frozenset[int]:
        decoder = self._core.decoder
        if decoder is None or decoder.decode(["<0x41>"]) != "A":
            return frozenset()  # the decoder does not read such tokens as bytes
        return frozenset(token_id for token in _BYTE_TOKENS if (token_id := self.token_id(token)) is not None)

    def is_byte_level(self) -> bool:
        """Whether the letters of every token stand for bytes, and a text is what the bytes of its tokens are as UTF-8."""
        return isinstance(self._core.decoder, decoders.ByteLevel)

    def vocab_size(self) -> int:
        return self._core.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """The id of each spelling, added tokens included."""
        return self._core.get_vocab()


class _PlainCodec:
    """A tokenizer without some of its added tokens, for text that goes on behind a token."""

    def __init__(self, added: Mapping[int, AddedToken], encoder: Callable[[Mapping[int, AddedToken]], Callable[[str], list[int]]]) -> None:
        # What a text goes on behind decides whether a space is put before it. Nobody can write these: they are random.
        self._before = {normalized: f"\ue000{secrets.token_hex(16)}\ue000" for normalized in (False, True)}
        before = [AddedToken(text, normalized=normalized) for normalized, text in self._before.items()]
        self._encode = encoder({**added, **dict(zip(_BEFORE_IDS, before, strict=True))})

    def encode(self, text: str, is_normalized: bool | None) -> list[int]:
        """The ids of the tokenizer. `is_normalized`: of the token that `text` is behind; None at the start."""
        if not text:
            return []
        before = "" if is_normalized is None else self._before[is_normalized]
        ids = self._encode(before + text)
        return ids[next(place for place, token_id in enumerate(ids) if token_id in _BEFORE_IDS) + 1 :] if before else ids

    def encode_cut(self, text: str, cuts: Sequence[int], is_normalized: bool | None) -> list[int]:
        """With no token across a cut."""
        places = [0, *cuts, len(text)]
        parts = [text[start:end] for start, end in itertools.pairwise(places)]
        return [token_id for index, part in enumerate(parts) for token_id in self.encode(part, False if index else is_normalized)]


class TransformersCodec:
    """A tokenizer that transformers runs in Python. Has the methods of `TokenizersCodec`."""

    is_slow = True

    def __init__(self, auto: Any) -> None:
        self._auto = auto
        self._special = frozenset(auto.all_special_ids)
        # Its own methods may raise anything for other ids. Two ids may be spelled alike, and there may be gaps between ids.
        self._known = frozenset(range(auto.vocab_size)).union(auto.get_vocab().values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._auto.encode(text, add_special_tokens=add_special_tokens))

    def encode_pair(self, first: str, second: str) -> list[int]:
        return list(self._auto.encode(first, second))

    def added_tokens(self) -> list[AddedToken]:
        return list(self._auto.added_tokens_decoder.values())

    normalizes = False

    def normalize(self, text: str) -> str:
        return text

    def encode_apart(self, text: str, literals: Literals, controls: Collection[str]) -> list[int]:
        """Encode as `TokenizersCodec.encode_apart` does, but so that no token at all goes over the end of a place in `literals`."""
        places = [0, *(end for _, end in literals), len(text)]
        return [token_id for start, end in itertools.pairwise(places) for token_id in self.encode(text[start:end], False)]

    def longest_token(self) -> int:
        return max(len(piece.encode()) for piece in self.vocabulary())

    def located(self, text: str, add_special_tokens: bool) -> None:
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in ids if token_id in self._known]
        # Cleaning up would take back spaces that were handed out already.
        return str(self._auto.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def omits(self, token_id: int, skip_special_tokens: bool) -> bool:
        return token_id not in self._known or (skip_special_tokens and token_id in self._special)

    def piece(self, token_id: int) -> str | None:
        return str(self._auto.convert_ids_to_tokens(token_id)) if token_id in self._known else None

    def is_byte_level(self) -> bool:
        return False

    def byte_ids(self) -> frozenset[int]:
        vocab = self._auto.get_vocab()
        return frozenset(vocab[token] for token in _BYTE_TOKENS if token in vocab)

    def vocab_size(self) -> int:
        return len(self._auto)

    def vocabulary(self) -> dict[str, int]:
        return dict(self._auto.get_vocab())


Codec = TokenizersCodec | TransformersCodec


def _masked(text: str, literals: Literals) -> str:
    """With a character that is in no token in place of those of `literals`."""
    parts, done = [], 0
    for start, end in literals:
        parts += [text[done:start], _MASK * (end - start)]
        done = end
    return "".join((*parts, text[done:]))


def byte_level_text(spelled: str) -> bytes:
    """The bytes that the letters of a token of a byte-level vocabulary stand for. A token that was added may have letters beyond the
    alphabet; decoders then take all of it as it is."""
    alphabet = byte_level_alphabet()
    text = [alphabet.get(character) for character in spelled]
    return spelled.encode() if None in text else bytes(byte for byte in text if byte is not None)


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """The bytes that the letters of byte-level vocabularies stand for. Printable bytes are the characters of their code, the rest in their
    order are those from 256 on (GPT-2's bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


def _byte_offsets(text: str) -> NDArray[np.int64]:
    """Where each character of `text` begins in UTF-8, and where the last one ends."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    lengths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate(([0], np.cumsum(lengths)))


class ByteTexts(dict[int, str | bytes]):
    """What each token of a byte-level vocabulary brings, for all sequences: a text, or bytes that are no whole characters. A token is read
    when it first comes."""

    def __init__(self, codec: Codec, skip_special_tokens: bool) -> None:
        super().__init__()
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> str | bytes:
        spelled = None if self._codec.omits(token_id, self._skip_special_tokens) else self._codec.piece(token_id)
        content = byte_level_text(spelled or "")
        try:
            found: str | bytes = content.decode()
        except UnicodeDecodeError:
            found = content
        self[token_id] = found
        return found


class ByteDetokenizer:
    """Incremental decoding of one sequence of a byte-level vocabulary: an incomplete character is held back, and bytes that can be none
    are U+FFFD. The pieces of `push` and the end of `flush` add up to what the decoder makes of the whole sequence."""

    __slots__ = ("_decoder", "_holds", "_texts")

    def __init__(self, texts: ByteTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False

    def push(self, token_id: int) -> str:
        """Adds an id (>= 0); returns the text that became whole, often empty inside a character."""
        found = self._texts[token_id]
        if not self._holds and isinstance(found, str):
            return found
        text = self._decoder.decode(found if isinstance(found, bytes) else found.encode())
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What was held back, as the full decoder writes it at the end of a sequence. Nothing changes by it."""
        return self._decoder.getstate()[0].decode(errors="replace")


class Detokenizer:
    """The incremental decoding of one sequence: whole text, as far as no later token can change it. Not for use by two threads at once.

    All text comes from the full decoder, so the pieces add up to what it makes of the whole sequence: nothing of a decoder's rules
    (joining, prefix spaces, clean-ups) is repeated here.

    The concatenation of all `push` results and the `flush` result equals `decode(all ids)`, for any ids, provided that
    appending a token to a sequence changes no text but (a) one trailing run of U+FFFD, (b) the run of byte ids it ends with.
    That is so for ByteLevel, ByteFallback, Metaspace, WordPiece and BPE decoders and their usual sequences.

    What is held back: an incomplete character of a byte-level decoder (the text ends with U+FFFD), and a whole run of byte
    ids, because ByteFallback turns every byte of a run, its good characters too, into U+FFFD when the run is not valid UTF-8.

    Cost: a push decodes a window of at most 17 tokens, whatever the length of the sequence. While something is held the window
    grows with it. A run of byte ids is decoded once, at its end. Tokens that go on adding no text, or text that ends with
    U+FFFD (bytes that never form a character), are tried one by one up to 16 and then each time they have grown by half: n held
    tokens cost O(n) in all, and what ends such a run may come up to n/2 tokens late, or with `flush`.
    """

    __slots__ = ("_byte_ids", "_decode", "_emitted", "_omits", "_settled", "_try_at", "_window")

    def __init__(self, decode: Callable[[list[int]], str], omits: Callable[[int], bool], byte_ids: Set[int] = frozenset()) -> None:
        """`decode`: ids to text. `omits`: whether decode leaves an id out (special, unknown). `byte_ids`: ids that are one raw byte."""
        self._decode = decode
        self._omits = omits
        self._byte_ids = byte_ids
        self._window: list[int] = []  # context, then what is held
        self._emitted = 0  # characters of decode(window) that were handed out
        self._settled = 0  # tokens of the window when text was last handed out
        self._try_at = 0  # held tokens before the next try

    def push(self, token_id: int) -> str:
        """Adds an id (>= 0); returns the text that became whole, often empty inside a character."""
        if self._omits(token_id):
            return ""  # also as context it would be nothing, and it does not end a run of bytes
        window = self._window
        window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        held = len(window) - self._settled
        if held < self._try_at:
            return ""
        text = self._decode(window)
        whole = len(text.rstrip(REPLACEMENT))
        if whole <= self._emitted:
            if held >= _EAGER:
                self._try_at = held + held // 2
            return ""
        piece = text[self._emitted : whole]
        self._emitted = whole
        if len(window) > _WINDOW and (whole == len(text) or not self._byte_ids):  # a run of byte ids must not be cut while it is held
            self._cut()
        self._settled = len(self._window)
        self._try_at = 0
        return piece

    def flush(self) -> str:
        """What was held back, as the full decoder writes it. Called once, at the end of the sequence."""
        return self._decode(self._window)[self._emitted :]

    def _cut(self) -> None:
        """Keeps the last few tokens as context: an unfinished character, and text before it, so that what decoders do to the start
        of a text happens in what was handed out."""
        keep = _CONTEXT
        while keep < len(self._window):
            context = self._window[-keep:]
            whole = len(self._decode(context).rstrip(REPLACEMENT))
            if whole:
                self._window = context
                self._emitted = whole
                return
            keep *= 2
