"""The forms of a prompt, and the reading of token ids. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aengine.errors import InvalidRequestError

MAX_CHAT_MESSAGES = 4096


def form_of(prompt: Any) -> Literal["text", "token_ids", "chat"]:
    """Raises `InvalidRequestError` (prompt) for something that is no prompt, or for more than MAX_CHAT_MESSAGES."""
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence | np.ndarray):
        raise InvalidRequestError.of("prompt", f"a {type(prompt).__name__} is not a string, a list of token ids or a list of chat messages")
    if not is_chat(prompt):
        return "token_ids"
    if len(prompt) > MAX_CHAT_MESSAGES:
        raise InvalidRequestError.of("prompt", f"{len(prompt)} messages are more than {MAX_CHAT_MESSAGES}")
    return "chat"


def is_chat(prompt: object) -> bool:
    """Whether it is chat messages rather than text or token ids."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def read_token_ids(ids: Sequence[int] | NDArray[np.integer], most: int) -> NDArray[np.integer]:
    """A prompt's ids, each in 0..`most`. Raises `InvalidRequestError` (prompt)."""
    if not len(ids):
        return np.empty(0, np.int64)
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of several lengths
        array = np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError.of("prompt", "token ids must be integers")
    outside = array[(array < 0) | (array > most)]
    if len(outside):
        raise InvalidRequestError.of("prompt", f"token id {int(outside[0])} is not in [0, {most}]")
    return array
