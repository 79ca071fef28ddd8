"""The rules of a dataclass's fields, which stand in their annotations, and checks that collect what is refused, each with value and range.

Knows no field by name.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from fractions import Fraction
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError, FieldError, FieldViolation, InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1


class Refusal(Exception):
    """Raised by the rule of a field; the message states the value and what is accepted."""


Rule = Callable[[Any], Any]
"""Takes the value of a field and returns what the field becomes. Raises `Refusal`."""


@dataclass(frozen=True, slots=True)
class Accepts:
    """The rule of values for which `test` is true; `words` say which these are. They stay as they are."""

    test: Callable[[Any], bool]
    words: str

    def __call__(self, value: Any) -> Any:
        if not self.test(value):
            raise Refusal(is_not(value, self.words))
        return value


@dataclass(frozen=True, slots=True)
class Range:
    """The rule of numbers from `low` to `high`, without `low` if it is `open_low`. A float or an integer, as `low` is, or a type of
    numpy's that is one; it becomes a plain one."""

    low: float
    high: float
    open_low: bool = False

    def __call__(self, value: Any) -> float:
        of_floats = isinstance(self.low, float)
        try:
            number = to_float(value) if of_floats else to_int(value)
        except (TypeError, ValueError, OverflowError):
            raise Refusal(is_not(value, f"{'a number' if of_floats else 'an integer'} in {self}")) from None
        if self.low <= number <= self.high and not (self.open_low and number == self.low):  # NaN is in no range
            return number
        raise Refusal(f"{shown(number)} is not in {self}")

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{_bound(self.low)}, {_bound(self.high)}]"


def integer(low: int, high: int | None = None) -> Accepts:
    """From `low` to `high`; without `high` there is no upper end."""
    words = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    return Accepts(lambda value: is_integer(value, low, high), words)


def one_of(*choices: str | int, words: str = "") -> Accepts:
    kind = type(choices[0])
    return Accepts(
        lambda value: isinstance(value, kind) and not isinstance(value, bool) and value in choices,
        words or "one of " + ", ".join(map(str, choices)),
    )


def text(words: str = "a string", pattern: str = r"(?s).+") -> Accepts:
    """A string that `pattern` matches as a whole; without it, one that is not empty."""
    matches = re.compile(pattern).fullmatch
    return Accepts(lambda value: isinstance(value, str) and matches(value) is not None, words)


@dataclass(frozen=True, slots=True)
class Size:
    """The rule of numbers of bytes from `low` to `high`; without `high` there is no upper end. A text that `read_size` reads becomes the
    number."""

    low: int
    high: int | None = None

    def __call__(self, value: Any) -> int:
        if isinstance(value, str):
            try:
                value = read_size(value)
            except ValueError:
                raise Refusal(is_not(value, SIZE_WORDS)) from None
        return int(integer(self.low, self.high)(value))


SIZE_WORDS = "a number of bytes such as 8GB (8 * 1000^3) or 512MiB (512 * 1024^2)"
_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) ?(?P<unit>[kmgt])(?P<binary>i?)b?", re.IGNORECASE)


def read_size(text: str) -> int:
    """The bytes that a text means: an integer, or a number with a unit. k, M, G and T, with or without a B, are powers of 1000; Ki, Mi, Gi
    and Ti, with or without a B, are powers of 1024. Case does not matter; a part of a byte is left out. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return int(text)
    base = 1024 if match["binary"] else 1000
    return int(Fraction(match["number"]) * base ** ("kmgt".index(match["unit"].lower()) + 1))


@dataclass(frozen=True, slots=True)
class Aliases:
    """The rule of values that have other names, too: `rule` is that of the values, and `names` says what the others mean."""

    rule: Rule
    names: Mapping[str, str]

    def __call__(self, value: Any) -> Any:
        return self.rule(self.names.get(value, value) if isinstance(value, str) else value)


def is_not(value: object, accepted: str) -> str:
    """What is said of a value that is not `accepted`."""
    return f"{shown(value)} is not {accepted}"


class FieldChecks:
    """What is wrong with the fields of something so far: `violations`."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def add_violation(self, name: str, description: str) -> None:
        self.violations.append(FieldViolation(name, description))

    def finish(self, error: type[FieldError]) -> None:
        """Raise an `error` of all violations, if there are any."""
        if self.violations:
            raise error(self.violations)


class DeclaredField(NamedTuple):
    """A field of a dataclass as it is declared: `name: Annotated[kind | None, rule, *notes] = default`."""

    name: str
    kind: Any  # the type, without None
    optional: bool  # whether it can be None
    rule: Rule
    default: Any  # MISSING where the field has to be given
    notes: tuple[Any, ...] = ()  # what else is declared of it


@cache
def declared_fields(cls: type) -> tuple[DeclaredField, ...]:
    """The fields of a dataclass, each with a rule: that of its annotation, or where it has none, that of its type, bool or str."""
    found = []
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        kind, *rules = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else (hints[field.name],)
        optional = NoneType in get_args(kind)
        kind = get_args(kind)[0] if optional else kind
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        rule = rules[0] if rules else _RULE_OF_TYPE[kind]
        found.append(DeclaredField(field.name, kind, optional, rule, default, tuple(rules[1:])))
    return tuple(found)


def check_fields(owner: Any, error: type[FieldError], path: str = "") -> None:
    """Apply the rules of all fields of a dataclass, which may be frozen. Raises an `error` of all that are refused, their names after
    `path`. A field that is left at its default is not looked at."""
    check = FieldChecks()
    for name, _, optional, rule, default, _ in declared_fields(owner.__class__):
        value = getattr(owner, name)
        if value is default or (value is None and optional):
            continue
        try:
            accepted = rule(value)
        except Refusal as refusal:
            check.add_violation(path + name, str(refusal))
        else:
            if accepted is not value:
                object.__setattr__(owner, name, accepted)
    check.finish(error)


def check_names(cls: type, names: Iterable[str]) -> None:
    """Raises `ConfigError` for the `names` that are no fields of the dataclass `cls`, and says which names there are."""
    known = [field.name for field in fields(cls)]
    unknown = [FieldViolation(name, f"unknown option; there are {', '.join(known)}") for name in names if name not in known]
    if unknown:
        raise ConfigError(unknown)


def is_integer(value: object, low: int, high: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


FLAG = Accepts(lambda value: isinstance(value, bool), "true or false")
POSITIVE = Accepts(is_positive, "a finite number > 0")
NOT_NEGATIVE = Accepts(lambda value: is_positive(value) or (not isinstance(value, bool) and value == 0), "a finite number >= 0")
_RULE_OF_TYPE: Mapping[Any, Rule] = {bool: FLAG, str: text()}


def to_int(value: Any) -> int:
    """`value` of an integer type, numpy's too; raises TypeError for others."""
    if type(value).__name__ in ("bool", "bool_"):  # numpy's too, which its older releases take for an integer
        raise TypeError
    return operator.index(value)


def to_float(value: Any) -> float:
    """`value` of a number's type, numpy's too; raises TypeError for others, OverflowError for an integer that no float holds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    return float(value)


def _bound(value: float) -> str:
    return "2^64-1" if value == MAX_UINT64 else f"{value:g}" if isinstance(value, float) else str(value)


def shown(value: object) -> str:
    """`value` as it is written in Python, in about a hundred characters at most: what is left out of a larger one is not looked at."""
    return _SHORT.repr(value)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxtuple = self.maxlist = self.maxarray = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = 4
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 2048:  # Python refuses to write the longest
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if len(x) > self.maxdict:  # which the base class would sort
            return f"a dict of {len(x)}"
        return super().repr_dict(x, level)

    def repr_set(self, x: set[Any], level: int) -> str:
        return f"a set of {len(x)}" if len(x) > self.maxset else super().repr_set(x, level)


_SHORT = _Short()


def read_token_ids(ids: Sequence[int] | NDArray[np.integer], most: int, field: str = "prompt") -> NDArray[np.integer]:
    """Ids, each in 0..`most`. Raises `InvalidRequestError` (`field`)."""
    import numpy as np  # not loaded by `import aengine`

    if not len(ids):
        return np.empty(0, np.int64)
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of several lengths
        array = np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError.of(field, "token ids must be integers")
    outside = array[(array < 0) | (array > most)]
    if len(outside):
        raise InvalidRequestError.of(field, f"token id {int(outside[0])} is not in [0, {most}]")
    return array
