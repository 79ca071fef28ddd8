"""Names and sizes of the package: a public class name stands once, a method says what it adds or takes, rooms are few, files are neither
many nor long."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "aengine"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "v1" not in path.parents]
FIRST_LEVEL = 27
MOST_FILES = 330
MOST_LINES = 500


def test_a_public_class_name_stands_once() -> None:
    """So that whoever reads a name anywhere knows what it is."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_method_says_what_it_adds_or_takes() -> None:
    """`add_request` tells whoever reads the call in which room it ends; `add` does not."""
    bare = {"add", "take", "put", "end", "enter", "leave", "note", "keep"}
    found = [
        f"{path.relative_to(PACKAGE)}: {node.name}.{method.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and method.name in bare
        and not any(isinstance(one, ast.Name) and one.id == "property" for one in method.decorator_list)
    ]
    assert found == []


def test_rooms_are_few() -> None:
    """At the first level there are packages, and nothing else but what makes it a package and a program."""
    found = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert {name for name in found if not (PACKAGE / name).is_dir()} == {"__init__.py", "__main__.py", "py.typed"}
    assert len(found) <= FIRST_LEVEL


def test_files_are_neither_many_nor_long() -> None:
    assert len(FILES) <= MOST_FILES
    assert [str(path) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES] == []
