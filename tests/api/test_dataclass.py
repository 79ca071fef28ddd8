"""Frozen classes with slots are what the standard library would make of them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar

import pytest

from aengine.api import dataclass as module
from aengine.api.dataclass import dataclass

WAYS: list[Any] = [dataclass, dataclasses.dataclass]


def classes(make: Any) -> dict[str, type]:
    """The same classes by one of both ways."""

    @make(frozen=True, slots=True)
    class Point:
        """Two numbers."""

        x: int
        y: int = 2
        names: list[str] = field(default_factory=list, compare=False)
        KIND: ClassVar[str] = "point"

        @property
        def both(self) -> int:
            return self.x + self.y

    @make(frozen=True, slots=True)
    class Wide(Point):
        width: float = 1.5
        total: float = field(init=False, repr=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", self.x + self.width)

    @make(frozen=True, slots=True, kw_only=True)
    class Named:
        first: str
        second: dict[str, int] = field(default_factory=dict)

    @make(frozen=True, slots=True, eq=False)
    class Apart:
        x: int

    @make(frozen=True, slots=True)
    class Own:
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "own"

    @make(frozen=True, slots=True)
    class Nothing:
        pass

    return {made.__name__: made for made in (Point, Wide, Named, Apart, Own, Nothing)}


@dataclass(frozen=True, slots=True)
class Kept:
    """Where pickle finds it."""

    x: int
    more: tuple[Kept, ...] = ()


def objects(made: dict[str, Any]) -> list[Any]:
    return [
        made["Point"](1),
        made["Point"](1, names=["a"]),
        made["Point"](x=1, y=3),
        made["Wide"](1, 2, [], 2.5),
        made["Wide"](1, width=0.5),
        made["Named"](first="a"),
        made["Named"](first="a", second={"b": 1}),
        made["Own"](1),
        made["Own"](2),
        made["Nothing"](),
    ]


def told(one: Any, others: list[Any]) -> list[Any]:
    """All that can be asked of an object."""
    cls = one.__class__
    values = {each.name: getattr(one, each.name) for each in dataclasses.fields(one)}
    found = [values, repr(one).rpartition(".")[2], [one == other for other in others], cls.__match_args__, hasattr(one, "__dict__")]
    found += [
        dataclasses.asdict(one),
        str(inspect.signature(cls)),
        dataclasses.is_dataclass(one),
        (cls.__doc__ or "").startswith("Two numbers"),
    ]
    try:
        found.append(hash(one) == hash(copy.copy(one)))
    except TypeError as error:
        found.append(str(error))
    return found


def test_they_are_those_of_the_standard_library() -> None:
    ours, theirs = (objects(classes(make)) for make in WAYS)
    for one, other in zip(ours, theirs, strict=True):
        assert told(one, ours) == told(other, theirs)
    apart = classes(dataclass)["Apart"]
    assert apart(1) != apart(1)
    assert str(inspect.signature(classes(dataclass)["Wide"])) == str(inspect.signature(classes(dataclasses.dataclass)["Wide"]))


@pytest.mark.parametrize("make", WAYS)
def test_they_are_frozen(make: Any) -> None:
    point = classes(make)["Point"](1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    with pytest.raises((FrozenInstanceError, TypeError)):
        point.other = 2
    assert point.both == 3


@pytest.mark.parametrize("make", WAYS)
def test_wrong_arguments(make: Any) -> None:
    made = classes(make)
    for given, named, message in (
        ((), {}, "missing 1 required positional argument: 'x'"),
        ((1, 2, [], 4), {}, "takes from 2 to 4 positional arguments but 5 were given"),
        ((1,), {"z": 1}, "got an unexpected keyword argument 'z'"),
    ):
        with pytest.raises(TypeError, match=message):
            made["Point"](*given, **named)
        with pytest.raises(TypeError, match=message):  # again, by the compiled one
            made["Point"](*given, **named)
    with pytest.raises(TypeError, match="positional argument"):
        made["Named"]("a")


def test_copies() -> None:
    one = Kept(1, (Kept(2),))
    for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one), dataclasses.replace(one)):
        assert again == one
        assert hash(again) == hash(one)
    assert dataclasses.replace(one, x=3) == Kept(3, (Kept(2),))
    match one:
        case Kept(x, more):
            assert (x, more) == (1, (Kept(2),))


def test_factories_are_called_for_each() -> None:
    made = classes(dataclass)["Point"]
    assert made(1).names is not made(1).names


def test_other_dataclasses_are_left_to_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def make(**options: Any) -> Any:
        seen.append(options)
        return lambda cls: cls

    monkeypatch.setattr(module.dataclasses, "dataclass", make)
    for options in ({}, {"frozen": True}, {"slots": True}, {"frozen": True, "slots": True, "order": True}):
        dataclass(**options)(type("Some", (), {}))
        assert seen[-1] == options
