"""Writes what is asked of numbers for the grammar compiler. Owns which numbers the compiler reads exactly, and what stands for the others.

The compiler reads numbers of a schema as floats and computes with integers of 64 bits. Integers that are not exact there are written as
regular expressions, of any length; numbers that may have a fraction are narrowed to bounds that are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from aengine.structured.json_constraints import Number, Numbers
from aengine.structured.json_documents import SchemaError
from aengine.structured.json_lark import EXACT

MAX_NUMBER = 10**18
"""Numbers that may have a fraction are not beyond it, so that none is infinite to who reads it."""
_BLOCK = 8
"""Digits within one pair of parentheses, of which an expression can have some 200 within one another."""
MAX_MULTIPLES = 10_000
"""Most units of the last digit in all values of `multipleOf`: the compiler counts them one by one."""

_MOST = 2**53
"""Integers up to here are exact as floats."""
_LONGEST, _LONGEST_FLOAT = 2**63, 2**63 - 1024
"""Those of 64 bits, and the greatest of them that is a float."""


def number_schemas(constraint: Numbers, multiple: Fraction | None) -> Iterator[dict[str, Any]]:
    """Schemas, one of which each such number satisfies. `multiple`: what all are multiples of. Raises `SchemaError`."""
    if constraint.values is not None:
        yield from _listed([value for value in constraint.values if constraint.holds(value)])
        return
    cuts = sorted(one for one in constraint.excluded if Numbers(constraint.low, constraint.high).holds(one))
    whole = replace(constraint, multiples=(), excluded=frozenset())
    for low, high in itertools.pairwise([None, *cuts, None]):
        part = Numbers(low, high, low is not None, high is not None).and_(whole)
        if part is not None:
            yield from _integers(part, multiple) if part.integer else _numbers(part, multiple)


def common_multiple(multiples: Sequence[Number]) -> Fraction | None:
    """The least common one; None of none."""
    if not multiples:
        return None
    common = Fraction(multiples[0])
    for one in map(Fraction, multiples[1:]):
        common = Fraction(math.lcm(common.numerator, one.numerator), math.gcd(common.denominator, one.denominator))
    return common


def units_of(multiple: Fraction) -> int:
    """How many units of its last decimal it is; some 10^30 if it has no last decimal."""
    exponent = next((digits for digits in range(30) if (multiple * 10**digits).denominator == 1), 30)
    return int(multiple * 10**exponent)


def _listed(values: Sequence[Number]) -> Iterator[dict[str, Any]]:
    long = [int(value) for value in values if value == int(value) and not -_MOST <= value <= _MOST]
    others = [value for value in values if value != int(value) or -_MOST <= value <= _MOST]
    for value in others:
        if Decimal(repr(float(value))) != value:
            raise SchemaError(f"the number {value!s:.40} is not one that the compiler keeps exact")
    if others:
        yield {"enum": [_json(float(value)) for value in others]}
    if long:
        yield {EXACT: "|".join(map(str, long))}


def _multiples(multiple: Fraction | None) -> dict[str, Any]:
    return {} if multiple is None else {"multipleOf": _json(multiple.numerator / multiple.denominator)}


def _integers(part: Numbers, multiple: Fraction | None) -> Iterator[dict[str, Any]]:
    low = None if part.low is None else math.ceil(part.low) + (part.above and part.low == int(part.low))
    high = None if part.high is None else math.floor(part.high) - (part.below and part.high == int(part.high))
    if low is not None and high is not None and low > high:
        return
    is_short = all(bound is None or abs(bound) <= _MOST for bound in (low, high))
    if not is_short and (multiple is None or multiple.numerator == 1):
        yield {EXACT: integers_between(low, high)}
        return
    listed: list[int] = []
    if not is_short and multiple is not None:
        low, high, listed = _as_floats(low, high, multiple.numerator)
    bounds = {name: bound for name, bound in (("minimum", low), ("maximum", high)) if bound is not None}
    if low is None or high is None or low <= high:
        yield {"type": "integer", **bounds, **_multiples(multiple)}
    if listed:
        yield {EXACT: "|".join(map(str, listed))}


def _as_floats(low: int | None, high: int | None, step: int) -> tuple[int | None, int | None, list[int]]:
    """Bounds within the given ones that are exact as floats, and the multiples of `step` that lie between. Raises `SchemaError`."""
    if any(bound is not None and abs(bound) > _LONGEST for bound in (low, high)) or (high is None and low is not None and low > _MOST):
        raise SchemaError(f"'multipleOf' {step} cannot be enforced with a bound that is so long")
    inner_low, inner_high = low, high
    listed: list[int] = []
    if low is not None:
        inner_low = int(_inward(max(low, -_LONGEST_FLOAT), math.inf))
        listed += range(-(-low // step) * step, min(inner_low, inner_low if high is None else high + 1), step)
    if high is not None:
        inner_high = int(_inward(min(high, _LONGEST_FLOAT), -math.inf))
        first = inner_high + 1 if inner_low is None else max(inner_high + 1, inner_low)
        listed += range(-(-first // step) * step, high + 1, step)
    return inner_low, inner_high, listed


def _numbers(part: Numbers, multiple: Fraction | None) -> Iterator[dict[str, Any]]:
    inner = Numbers(-MAX_NUMBER, MAX_NUMBER).and_(part)
    if inner is None or inner.low is None or inner.high is None:  # integers alone are that long
        yield from _integers(part, multiple)
        return
    low, high = _inward(inner.low, math.inf), _inward(inner.high, -math.inf)
    if low < high or (low == high and not inner.above and not inner.below):
        bounds = {
            "exclusiveMinimum" if inner.above else "minimum": _json(low),
            "exclusiveMaximum" if inner.below else "maximum": _json(high),
        }
        yield {"type": "number", **bounds, **_multiples(multiple)}


def _inward(value: Number, step: float) -> float:
    """The nearest float which the compiler reads and writes as a number that is not beyond `value` against the direction of `step`."""
    number = float(value)
    while (_as_written(number) < value) if step > 0 else (_as_written(number) > value):
        number = math.nextafter(number, step)
    return number


def _as_written(number: float) -> Fraction:
    return Fraction(int(number)) if number.is_integer() else Fraction(Decimal(repr(number)))


def _json(number: float) -> int | float:
    return int(number) if number.is_integer() else number


# ---- as regular expressions ----------------------------------------------------------------------------------------------------


def integers_between(low: int | None, high: int | None) -> str:
    """A regular expression for the integers between two bounds, which are among them; None is no bound."""
    options = []
    if low is None or low < 0:
        options.append(f"-{_natural(1 if high is None else max(1, -high), None if low is None else -low)}")
    if high is None or high >= 0:
        options.append(_natural(max(0, low or 0), high))
    return f"({'|'.join(options)})"


def _natural(low: int, high: int | None) -> str:
    least, most = str(low), "" if high is None else str(high)
    if len(least) == len(most):
        return f"({'|'.join(_same_length(least, most))})"
    options = _same_length(least, "9" * len(least))
    if high is None:
        options.append(f"[1-9][0-9]{{{len(least)},}}")
    else:
        if len(most) - len(least) > 1:
            options.append(f"[1-9][0-9]{{{len(least)},{len(most) - 2}}}")
        options += _same_length("1" + "0" * (len(most) - 1), most)
    return f"({'|'.join(options)})"


def _same_length(low: str, high: str) -> list[str]:
    """Alternatives for the numbers of so many digits between two; a leading zero stands for itself."""
    shared = next((index for index, (one, other) in enumerate(zip(low, high, strict=True)) if one != other), len(low))
    if shared == len(low):
        return [low]
    num = len(low) - shared - 1  # of digits behind the first that differs
    first, last = int(low[shared]), int(high[shared])
    rest_low, rest_high = low[shared + 1 :], high[shared + 1 :]
    head = low[:shared]
    options = []
    if rest_low.strip("0"):
        options.append(f"{head}{first}{_beyond(rest_low, '0')}")
        first += 1
    if rest_high.strip("9"):
        options.append(f"{head}{last}{_beyond(rest_high, '9')}")
        last -= 1
    if first <= last:
        options.append(f"{head}[{first}-{last}]{_digits(num)}")
    return options


def _beyond(bound: str, end: str) -> str:
    """Return an expression for numbers of as many digits as `bound`: those that are not less than it if `end` is 0, not more if it is 9."""
    far = "9" if end == "0" else "0"
    kept = bound.rstrip(end)
    if not kept:
        return _digits(len(bound))
    options = []
    for index, digit in enumerate(kept[:_BLOCK]):
        if digit != far:
            free = f"[{int(digit) + 1}-9]" if end == "0" else f"[0-{int(digit) - 1}]"
            options.append(f"{kept[:index]}{free}{_digits(len(bound) - index - 1)}")
    options.append(f"{kept[:_BLOCK]}{_beyond(bound[len(kept[:_BLOCK]) :], end)}")
    return f"({'|'.join(options)})"


def _digits(num: int) -> str:
    return f"[0-9]{{{num}}}" if num else ""
