"""Checks of a dataclass's fields that collect what they refuse, each with value and range. Knows no field by name."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from aengine.errors import FieldError, FieldViolation


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
        value = self._value(name, optional)
        if value is _ABSENT:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            self.refuse(name, f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]")

    def positive(self, name: str, *, optional: bool = False) -> None:
        value = self._value(name, optional)
        if value is not _ABSENT and not is_positive(value):
            self.refuse(name, "a finite number > 0")

    def not_negative(self, name: str) -> None:
        value = getattr(self._owner, name)
        if not is_positive(value) and (isinstance(value, bool) or value != 0):
            self.refuse(name, "a finite number >= 0")

    def flag(self, name: str) -> None:
        if not isinstance(getattr(self._owner, name), bool):
            self.refuse(name, "true or false")

    def choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self._owner, name) not in choices:
            self.refuse(name, "one of " + ", ".join(choices))

    def text(self, name: str, what: str = "a string", *, optional: bool = False) -> None:
        """A string that is not empty."""
        value = self._value(name, optional)
        if value is not _ABSENT and (not isinstance(value, str) or not value):
            self.refuse(name, what)

    def finish(self, error: type[FieldError]) -> None:
        """Raise an `error` of all violations, if there are any."""
        if self.violations:
            raise error(self.violations)

    def _value(self, name: str, optional: bool) -> Any:
        value = getattr(self._owner, name)
        return _ABSENT if optional and value is None else value


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


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
_ABSENT = object()
