"""Checks of a dataclass's fields that collect what they refuse, each with value and range. Knows no field by name."""

from __future__ import annotations

import math
from typing import Any

from aengine.errors import FieldViolation


class FieldChecks:
    """What is wrong with the fields of `owner` so far: `violations`."""

    def __init__(self, owner: object) -> None:
        self.violations: list[FieldViolation] = []
        self._owner = owner

    def refuse(self, name: str, accepted: str) -> None:
        self.violations.append(FieldViolation(name, f"{getattr(self._owner, name)!r} is not {accepted}"))

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

    def _value(self, name: str, optional: bool) -> Any:
        value = getattr(self._owner, name)
        return _ABSENT if optional and value is None else value


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_ABSENT = object()
