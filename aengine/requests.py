"""What is asked of an engine beside the parameters: the forms of a prompt, and the options of a request with their ranges.

Shared by the engine and by whoever stands for it elsewhere. Knows nothing of how a request is served.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from aengine.checks import is_positive, shown
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""

PRIORITIES = range(-100, 101)
MAX_LABEL_LENGTH = 128
MAX_CHAT_MESSAGES = 4096
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def check_params(params: SamplingParams | None) -> SamplingParams:
    """`params`, or those that leave everything unset. Raises `InvalidRequestError` if they are something else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError((FieldViolation("params", f"a {type(params).__name__} is not SamplingParams"),))
    return params


def option_violations(
    *, request_id: str | None, priority: int, tenant: str, timeout: float | None, cache_salt: str | None
) -> list[FieldViolation]:
    """Every argument that is out of range."""
    violations: list[FieldViolation] = []
    if request_id is not None and not (isinstance(request_id, str) and _REQUEST_ID.fullmatch(request_id)):
        violations.append(FieldViolation("request_id", f"{shown(request_id)} does not match {_REQUEST_ID.pattern}"))
    if not isinstance(priority, int) or isinstance(priority, bool) or priority not in PRIORITIES:
        violations.append(FieldViolation("priority", f"{shown(priority)} is not an integer in [{PRIORITIES[0]}, {PRIORITIES[-1]}]"))
    for name, value in (("tenant", tenant), ("cache_salt", "" if cache_salt is None else cache_salt)):
        if not isinstance(value, str) or len(value) > MAX_LABEL_LENGTH:
            violations.append(FieldViolation(name, f"{shown(value)} is not a string of at most {MAX_LABEL_LENGTH} characters"))
    if timeout is not None and not is_positive(timeout):
        violations.append(FieldViolation("timeout", f"{shown(timeout)} is not a number of seconds > 0"))
    return violations


def is_chat(prompt: object) -> bool:
    """Whether it is chat messages rather than text or token ids."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def draw_seed() -> int:
    return secrets.randbits(64)
