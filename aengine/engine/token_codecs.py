"""The libraries behind `Tokenizer`: `tokenizers`, and transformers for files that it cannot read. Owns how each is called.

Knows nothing of files, chats or requests. A text may be anything that is Unicode; exceptions of a library are raised unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from aengine.outputs import TokenizedText

_HEX = "0123456789abcdefABCDEF"
_MANY_IDS = 1000  # decoding so many takes about as long as another thread should wait for the GIL
_BYTE_TOKENS = tuple(f"<0x{high}{low}>" for high, low in itertools.product(_HEX, _HEX))  # as SentencePiece writes raw bytes


class TokenizersCodec:
    """The `tokenizers` library, alone."""

    is_slow = False
    """Whether it runs in Python, and holds the GIL."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._special = frozenset(token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special)

    # Batch calls release the GIL while they work; those for one text hold it.

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

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
        return frozenset(token_id for token in _BYTE_TOKENS if (token_id := self._core.token_to_id(token)) is not None)

    def vocab_size(self) -> int:
        return self._core.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """The id of each spelling, added tokens included."""
        return self._core.get_vocab()


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

    def byte_ids(self) -> frozenset[int]:
        vocab = self._auto.get_vocab()
        return frozenset(vocab[token] for token in _BYTE_TOKENS if token in vocab)

    def vocab_size(self) -> int:
        return len(self._auto)

    def vocabulary(self) -> dict[str, int]:
        return dict(self._auto.get_vocab())


Codec = TokenizersCodec | TransformersCodec


def _byte_offsets(text: str) -> NDArray[np.int64]:
    """Where each character of `text` begins in UTF-8, and where the last one ends."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    lengths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate(([0], np.cumsum(lengths)))
