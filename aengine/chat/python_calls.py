"""Calls that are written as Python: `f(a=1)`, one, several or a list of them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Container

from aengine.chat.json_text import loads
from aengine.chat.source import Source

MAX_CODE = 1 << 16
_NAME = re.compile(r"[\w.-]+")


def start_calls(source: Source, code: str, names: Container[str] | None = None) -> bool:
    """The calls that a piece of Python consists of, of what is held. False, and none, if it has anything else, or calls of tools that are
    not among `names`."""
    calls = _calls_of(code)
    if not calls or (names is not None and any(name not in names for name, _ in calls)):
        return False
    for name, arguments in calls:
        source.start_call(name, stream=False)
        source.add_arguments(arguments)
        source.end_call(complete=True)
    return True


def _calls_of(code: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls that a piece of Python consists of; none if it has anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, which are the model's
            body = ast.parse(code.strip()).body
        found = []
        for statement in body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            for call in value.elts if isinstance(value, ast.List) else [value]:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and len(call.args) == 1:
                    call = call.args[0]
                if not isinstance(call, ast.Call) or call.args or not _NAME.fullmatch(name := ast.unparse(call.func)):
                    return []
                arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                if None in arguments or not isinstance(loads(text), dict):
                    return []
                found.append((name, text))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []
    return found
