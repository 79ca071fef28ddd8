"""Which cases of a test are slow: those that add little for what they cost. `make test` leaves them out, `make test-slow` runs them, and CI
runs one case of each test that has no quick one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(quick: Callable[[Any], bool] | Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases` for `pytest.mark.parametrize`, all slow but the `quick` ones: these, or those for which it is true. A tuple is a case of
    several parameters."""
    among = quick if callable(quick) else (lambda case, some=list(quick): case in some)
    return [
        case if among(case) else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases
    ]


def one_is_quick(items: Iterable[pytest.Item], value: object) -> None:
    """Of the cases of a test that have `value` among their parameters all but the first are slow."""
    seen = set()
    for item in items:
        case = getattr(item, "callspec", None)
        if case is None or item.get_closest_marker("slow"):
            continue
        if any(type(one) is type(value) and one == value for one in case.params.values()):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)


def few_are_quick(items: Iterable[pytest.Item]) -> None:
    """Of the cases of a test with `pytest.mark.quick_cases(n)` all but the first n are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("quick_cases")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > mark.args[0]:
            item.add_marker(pytest.mark.slow)


def some_in_ci(items: Iterable[pytest.Item]) -> None:
    """In CI a slow case runs only if it is the first of a test of which no case is quick: all of them would take too long."""
    if "CI" not in os.environ:
        return
    tests = {id(item): item.nodeid.partition("[")[0] for item in items}
    seen = {tests[id(item)] for item in items if not item.get_closest_marker("slow")}
    for item in items:
        if item.get_closest_marker("slow"):
            if tests[id(item)] in seen:
                item.add_marker(pytest.mark.skip(reason="a slow case of a test that other cases run; run by `make test-slow`"))
            seen.add(tests[id(item)])


NOT_IN_CI = pytest.mark.skipif("CI" in os.environ, reason="takes long; run by `make test-slow`")
BY_HAND = (pytest.mark.slow, NOT_IN_CI)
"""Marks of cases that take half a minute and more beside others of the same kind, which CI does without."""
