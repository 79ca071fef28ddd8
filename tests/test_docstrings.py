"""Docstrings are sentences that stand alone: a reader of one knows what it speaks of without the name or the docstring above it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "aengine"
BEGINNINGS = ("Of ", "As ", "The same", "Those ")


def is_kernel(node: ast.AST) -> bool:
    """Whether a function is compiled by Triton, whose cache of compiled kernels is keyed by their source, docstrings included."""
    if not isinstance(node, ast.FunctionDef):
        return False
    decorators = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return any(ast.unparse(each) == "triton.jit" for each in decorators)


def docstrings(source: str) -> list[tuple[int, str]]:
    """The docstrings of a module, its classes and its functions, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            text = ast.get_docstring(node)
            if text is not None:
                found.append((node.body[0].lineno, text))
    return found


def test_docstrings_are_sentences_that_stand_alone() -> None:
    generated = PACKAGE / "v1"
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if generated not in path.parents
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if text.startswith(BEGINNINGS)
    ]
    assert not found, "these begin as if another sentence came before:\n" + "\n".join(found)
