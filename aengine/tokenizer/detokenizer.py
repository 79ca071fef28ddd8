"""`Detokenizer`: token ids in, whole text out, one token at a time. Owns the text that is held back while later tokens can change it.

Knows nothing of vocabularies: it sees a full decoder (`decode`), which ids that decoder leaves out, and which ids are raw
bytes. All text comes from the full decoder itself, so the pieces add up to exactly what it makes of the whole sequence:
nothing of a decoder's rules (joining, prefix spaces, clean-ups) is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Set

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) UTF-8

_WINDOW = 16  # tokens in the window before it is cut
_CONTEXT = 4  # tokens that stay when it is cut; no UTF-8 character has more bytes
_EAGER = 16  # held tokens up to which every push is tried


class Detokenizer:
    """The incremental decoding of one sequence. Not for use by two threads at once.

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
