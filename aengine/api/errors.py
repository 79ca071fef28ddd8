"""The error tree. Owns every exception that aengine raises on purpose.

Errors belong to requests: one `InvalidRequestError` never touches another stream. Only `EngineDeadError` is shared by all
streams of an engine, and it carries the original failure as its `__cause__`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aengine.api.dataclass import dataclass

FieldErrorT = TypeVar("FieldErrorT", bound="FieldError")


class AEngineError(Exception):
    """Base of every error raised by aengine."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that was refused: `field` is its name, `description` states the value and the accepted range."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class FieldError(AEngineError, ValueError):
    """Base of errors about named fields; the message lists every violation."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(str(violation) for violation in self.violations))

    @property
    def field(self) -> str:
        """The name of the first offending field."""
        return self.violations[0].field

    @classmethod
    def of(cls: type[FieldErrorT], field: str, description: str) -> FieldErrorT:
        return cls((FieldViolation(field, description),))

    def moved(self: FieldErrorT, name_of: Callable[[str], str]) -> FieldErrorT:
        """Return this error with the name of every field replaced by what `name_of` makes of it."""
        kind, (violations, *rest) = self.__reduce__()
        renamed = tuple(FieldViolation(name_of(violation.field), violation.description) for violation in violations)
        return kind(renamed, *rest)  # type: ignore[return-value]

    def __reduce__(self) -> tuple[type[FieldError], tuple[Any, ...]]:
        return type(self), (self.violations,)


class InvalidRequestError(FieldError):
    """A request was refused before it ran: a field is out of range, of the wrong type, or cannot fit. Nothing else is disturbed."""


class RequestIdInUseError(InvalidRequestError):
    """The given `request_id` belongs to a request that is still in flight."""


class AdapterNotFoundError(InvalidRequestError):
    """No adapter of that name is loaded, or it is being unloaded."""


class _CapacityError(InvalidRequestError):
    """More tokens than there can ever be: `got` of `limit`."""

    def __init__(self, violations: Sequence[FieldViolation], limit: int, got: int) -> None:
        self.limit = limit
        self.got = got
        super().__init__(violations)

    def __reduce__(self) -> tuple[type[FieldError], tuple[Any, ...]]:
        return type(self), (self.violations, self.limit, self.got)


class ContextLengthError(_CapacityError):
    """Prompt and output are longer than the model's context: `got` tokens, where `limit` is the most."""


class KVCapacityError(_CapacityError):
    """Prompt and output would fit the context, but never the KV cache of this engine: `got` tokens, where `limit` is the most."""


@dataclass(frozen=True, slots=True)
class CapacityViolation(FieldViolation):
    """One field that asks for more tokens than there can ever be: `got` of `limit`."""

    kind: type[_CapacityError]
    limit: int
    got: int


def refusal(violations: Sequence[FieldViolation]) -> InvalidRequestError:
    """The error that names all of them; about capacity only if nothing else is wrong."""
    first = violations[0]
    if isinstance(first, CapacityViolation) and all(isinstance(violation, CapacityViolation) for violation in violations):
        return first.kind(violations, first.limit, first.got)
    return InvalidRequestError(violations)


class NothingToChooseError(FieldError):
    """A sequence was given no next token, since its request rules all of them out; it ends its request alone.

    `field` is the parameter that leaves none, in the order in which they apply: structured_output, allowed_token_ids,
    banned_token_ids, bad_words, min_tokens, logits_processors. It is `model` where the model's own logits are no numbers.
    """


class RequestEndedError(AEngineError):
    """A request ended before there was what it is for, without an error: it was cancelled, or its timeout passed."""


class NoTokenizerError(AEngineError):
    """The model has no tokenizer: prompts and outputs are token ids, and neither text nor ids can be converted."""


class QueueFullError(AEngineError):
    """The request was refused because too many others wait; it may be accepted later."""


class ConfigError(FieldError):
    """A field of a configuration is out of range, of the wrong type, unknown, or not possible on this machine."""


class ModelLoadError(AEngineError):
    """The model could not be found, read, or is of a kind that aengine does not run. The message is one plain sentence."""


class AdapterError(AEngineError):
    """An adapter could not be read, or does not fit the model. The message is one plain sentence."""


class InsufficientMemoryError(AEngineError):
    """Weights, KV cache or a step do not fit into memory, or into what the configuration allows of it."""


class EngineStateError(AEngineError, RuntimeError):
    """The engine was used before `start()`, after `aclose()`, or from another event loop than the one that started it; or a stream by a
    second reader while the first one waits."""


class EngineDeadError(AEngineError, RuntimeError):
    """The step thread died; every stream of the engine ends with this error. The original failure is its `__cause__`."""


class StepHangError(AEngineError):
    """A step took longer than `step_timeout`; the engine gave the step thread up. Cause of an `EngineDeadError`."""


class RankError(AEngineError):
    """Base of what befalls a rank: `rank` is its number, `pid` its process where it runs on the engine's host, and `log_lines` are the last
    lines that it logged. Cause of an `EngineDeadError`."""

    def __init__(self, message: str, rank: int, pid: int | None = None, log_lines: Sequence[str] = ()) -> None:
        self.rank = rank
        self.pid = pid
        self.log_lines = tuple(log_lines)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RankError], tuple[Any, ...]]:
        return type(self), (str(self), self.rank, self.pid, self.log_lines)


class RankDiedError(RankError):
    """The process of a rank has ended, or the connection to it broke. The message says how, with the last log lines."""


class RankHungError(RankError):
    """A rank did not answer within `step_timeout`."""


class ConnectionLostError(AEngineError, ConnectionError):
    """The server of an `AsyncClient` cannot be reached, or the connection broke during a call."""


class NoReplicaError(AEngineError):
    """A `Router` has no replica that takes the request, and waited for one as long as it may."""


class PoisonRequestError(AEngineError):
    """A `Router` gave a request up: the replicas that computed it died, again and again, before its next token."""


class ServerError(AEngineError):
    """The server of an `AsyncClient` failed a call for a reason that has no class of its own here.

    `code` is the status of gRPC by name, such as INTERNAL. `reason` is a word for programs, empty where the failure did not come from
    aengine. `incident_id` is found in the server's log, and None unless the failure is a bug there.
    """

    def __init__(self, message: str, code: str, reason: str = "", incident_id: str | None = None) -> None:
        self.code = code
        self.reason = reason
        self.incident_id = incident_id
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ServerError], tuple[Any, ...]]:
        return type(self), (str(self), self.code, self.reason, self.incident_id)


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return what an error of a library says, for a part of a message: at most `limit` characters, all printable; else its class."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return text if len(text) <= limit else f"{text[:limit]}..."


ERROR_REASONS: Mapping[type[AEngineError], str] = {
    RequestIdInUseError: "REQUEST_ID_IN_USE",
    AdapterNotFoundError: "ADAPTER_NOT_FOUND",
    AdapterError: "BAD_ADAPTER",
    ModelLoadError: "BAD_WEIGHTS",
    InsufficientMemoryError: "INSUFFICIENT_MEMORY",
    KVCapacityError: "KV_CAPACITY",
    ContextLengthError: "CONTEXT_LENGTH_EXCEEDED",
    InvalidRequestError: "INVALID_FIELD",
    NothingToChooseError: "NOTHING_TO_CHOOSE",
    RequestEndedError: "REQUEST_ENDED",
    NoTokenizerError: "NO_TOKENIZER",
    QueueFullError: "QUEUE_FULL",
    EngineStateError: "NOT_READY",
    EngineDeadError: "ENGINE_DEAD",
    NoReplicaError: "NO_REPLICA",
    PoisonRequestError: "POISON_REQUEST",
}
"""The reason by which programs tell errors apart that an error of the engine becomes; other errors have reasons of the server alone."""
