"""`dataclass`: that of the standard library, with less work at import. What most classes here are, frozen ones with slots, would each
compile six functions when they are defined, which is half of the time that the package takes to be imported.

Owns these functions for such classes: `__init__` is compiled when the first object is made, the others are shared by all classes.
Everything else is left to the standard library, for which they are dataclasses as any others.
"""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """Make a dataclass, with the options of `dataclasses.dataclass`."""
        if cls is None:
            return lambda cls: dataclass(cls, **options)
        if not options.get("frozen") or not options.get("slots") or options.keys() - {"frozen", "slots", "eq", "kw_only"}:
            return dataclasses.dataclass(**options)(cls)
        return _frozen(cls, eq=options.get("eq", True), kw_only=options.get("kw_only", False))


_SHARED = "__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__"


def _frozen(cls: type, *, eq: bool, kw_only: bool) -> type:
    own = {name for name in _SHARED if name in cls.__dict__}
    cls.__doc__ = cls.__doc__ or cls.__name__  # else a signature is written there
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
    fields = dataclasses.fields(made)
    methods: dict[str, Any] = {
        "__repr__": _repr,
        "__setattr__": _refuse_to_set,
        "__delattr__": _refuse_to_delete,
        "__getstate__": _state_of,
        "__setstate__": _set_state,
    }
    if "__init__" not in own:
        methods |= {"__init__": _first_init(made), "__signature__": _Signature()}
    compared = [field.name for field in fields if field.compare]
    if eq:
        values = attrgetter(*compared) if compared else lambda self: ()
        hashed = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
        of_hash = values if hashed == compared else attrgetter(*hashed)

        def equal(self: Any, other: object) -> bool:
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        def hash_of(self: Any) -> int:
            return hash(of_hash(self))

        methods["__eq__"] = equal
        if "__eq__" not in own or "__hash__" not in own:
            methods["__hash__"] = hash_of
    for name, method in methods.items():
        if name not in own:
            setattr(made, name, method)
    found: type = made
    return found


def _first_init(made: Any) -> Callable[..., None]:
    """An `__init__` that puts the compiled one in its place."""

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        if made.__init__ is __init__:
            made.__init__ = _compiled_init(made)
        made.__init__(self, *given, **named)

    return __init__


def _compiled_init(made: Any) -> Callable[..., None]:
    """Make what `dataclasses` makes for a frozen class, which sets with `object.__setattr__`; here each slot is set by its own descriptor,
    which takes half as long."""
    names: dict[str, Any] = {"_missing": dataclasses.MISSING}
    positional: list[str] = []
    named: list[str] = []
    body: list[str] = []
    for field in dataclasses.fields(made):
        name, value = field.name, field.name
        has_factory = field.default_factory is not dataclasses.MISSING
        names[f"_default_{name}"] = field.default_factory if has_factory else field.default
        if has_factory:
            value = f"_default_{name}() if {name} is _missing else {name}" if field.init else f"_default_{name}()"
        elif not field.init:
            if field.default is dataclasses.MISSING:
                continue  # what __post_init__ sets
            value = f"_default_{name}"
        if field.init:
            default = "=_missing" if has_factory else "" if field.default is dataclasses.MISSING else f"=_default_{name}"
            (named if field.kw_only else positional).append(f"{name}{default}")
        names[f"_set_{name}"] = getattr(made, name).__set__
        body.append(f"_set_{name}(self, {value})")
    if hasattr(made, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *named] if named else [])])
    lines = "\n".join(f"    {line}" for line in body or ["pass"])
    exec(f"def __init__({parameters}):\n{lines}\n", names)
    init: Callable[..., None] = names["__init__"]
    init.__qualname__, init.__module__ = f"{made.__qualname__}.__init__", made.__module__
    return init


class _Factory:
    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()  # in signatures


class _Signature:
    """The signature of a class, for those who ask before its first object is made."""

    def __get__(self, instance: object, made: Any) -> inspect.Signature:
        kinds = inspect.Parameter
        fields = sorted((field for field in dataclasses.fields(made) if field.init), key=lambda field: bool(field.kw_only))
        parameters = []
        for field in fields:
            has_factory = field.default_factory is not dataclasses.MISSING
            default = _FACTORY if has_factory else kinds.empty if field.default is dataclasses.MISSING else field.default
            kind = kinds.KEYWORD_ONLY if field.kw_only else kinds.POSITIONAL_OR_KEYWORD
            parameters.append(kinds(field.name, kind, default=default, annotation=field.type))
        return inspect.Signature(parameters, return_annotation=None)


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state_of(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
