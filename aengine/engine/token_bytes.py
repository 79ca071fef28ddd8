"""`TokenBytes`: what each token stands for by itself."""

from __future__ import annotations

from functools import cached_property

from aengine.engine.tokenizer import Tokenizer
from aengine.engine.vocabulary import byte_level_alphabet

_ANCHOR = "a"


class TokenBytes:
    """The bytes that tokens stand for, each by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        piece = tokenizer.piece(token_id)
        if piece is None:  # special, or no token at all
            return tokenizer.decode([token_id], skip_special_tokens=False).encode()
        if token_id in tokenizer.byte_ids:
            return bytes.fromhex(piece[3:5])
        if self._is_byte_level:
            alphabet = byte_level_alphabet()
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
            return piece.encode()
        # What the decoder adds behind another token: by itself many of them drop a space.
        anchor, before = self._anchor
        return tokenizer.decode([*anchor, token_id]).removeprefix(before).encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the letters of the vocabulary each stand for a byte."""
        pieces = [self._tokenizer.piece(token_id) for token_id in self._tokenizer.encode("a a", add_special_tokens=False)]
        return "".join(piece or "" for piece in pieces) == "a\u0120a"

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self._tokenizer.encode(_ANCHOR, add_special_tokens=False)
        return ids, self._tokenizer.decode(ids)
