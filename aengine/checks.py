"""Checks of a dataclass's fields that collect what they refuse, each with value and range. Knows no field by name."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from aengine.errors import ConfigError, FieldError, FieldViolation

MAX_UINT64 = 2**64 - 1


class FieldChecks:
    """What is wrong with the fields of `owner` so far: `violations`."""

    def __init__(self, owner: object) -> None:
        self.violations: list[FieldViolation] = []
        self._owner = owner

    def add(self, name: str, description: str) -> None:
        self.violations.append(FieldViolation(name, description))

    def refuse(self, name: str, accepted: str) -> None:
        """The value is not `accepted`."""
        self.violations.append(FieldViolation(name, f"{shown(getattr(self._owner, name))} is not {accepted}"))

    def integer(self, name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
        """From `low` to `high`; without `high` there is no upper end."""
        value = getattr(self._owner, name)
        if not (value is None and optional) and not is_integer(value, low, high):
            self.refuse(name, f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]")

    def number(self, name: str, kind: type, low: float, high: float, *, open_low: bool = False, optional: bool = True) -> None:
        """Of `kind` int or float, or a type of numpy's that is one, from `low` to `high`; it becomes a plain one. `open_low`: without
        `low`."""
        value = getattr(self._owner, name)
        if value is None and optional:
            return
        accepted = f"{'(' if open_low else '['}{_bound(low)}, {_bound(high)}]"
        try:
            number = to_float(value) if kind is float else to_int(value)
        except (TypeError, ValueError, OverflowError):
            self.refuse(name, f"{'a number' if kind is float else 'an integer'} in {accepted}")
            return
        if low <= number <= high and not (open_low and number == low):  # NaN is in no range
            self.set(name, number)
        else:
            self.add(name, f"{shown(number)} is not in {accepted}")

    def set(self, name: str, value: object) -> None:
        """Have the field, of a frozen owner too, be `value`."""
        object.__setattr__(self._owner, name, value)

    def positive(self, name: str, *, optional: bool = False, or_zero: bool = False) -> None:
        value = getattr(self._owner, name)
        if not ((value is None and optional) or is_positive(value) or (or_zero and value == 0 and not isinstance(value, bool))):
            self.refuse(name, f"a finite number {'>=' if or_zero else '>'} 0")

    def flag(self, name: str, *, optional: bool = False) -> None:
        value = getattr(self._owner, name)
        if not (value is None and optional) and not isinstance(value, bool):
            self.refuse(name, "true or false")

    def choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self._owner, name) not in choices:
            self.refuse(name, "one of " + ", ".join(choices))

    def text(self, name: str, what: str = "a string", *, optional: bool = False) -> None:
        """A string that is not empty."""
        value = getattr(self._owner, name)
        if not (value is None and optional) and not (isinstance(value, str) and value):
            self.refuse(name, what)

    def finish(self, error: type[FieldError]) -> None:
        """Raise an `error` of all violations, if there are any."""
        if self.violations:
            raise error(self.violations)


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
