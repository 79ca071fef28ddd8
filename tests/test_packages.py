"""The arrows between files: packages import from rows above their own in docs/architecture.md, and no files import each other in a circle.

Imports for types alone do not count, since they are not run.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Packages")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| ((?:`[\w./]+` ?)+)\|", TABLE, re.MULTILINE)
ORDER = {name: number for number, row in enumerate(ROWS) for name in re.findall(r"`([^`]+)`", row)}


def modules() -> dict[str, Path]:
    """Every module of aengine but the generated ones, by name."""
    found = {}
    for path in (ROOT / "aengine").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if not name.startswith("aengine.v1")}


MODULES = modules()


@cache
def imports_of(path: Path) -> set[str]:
    """The modules of aengine that a file imports, also within functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types: set[ast.AST] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for_types.update(ast.walk(node))
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(name if (name := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.split(".")[0] == "aengine"}


def row_of(module: str) -> int:
    parts = module.split(".")[1:]
    for name in ("/".join(parts[:2]) + "/", "/".join(parts[:1]) + "/", f"{parts[0]}.py" if parts else "__init__.py"):
        if name in ORDER:
            return ORDER[name]
    raise AssertionError(f"{module} is not in the table of packages in docs/architecture.md")


def test_packages_import_from_rows_above_their_own() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in imports_of(path)
        if "aengine" not in (module, other) and row_of(other) > row_of(module)
    ]
    assert not wrong


def test_every_row_of_the_table_is_there() -> None:
    assert ORDER
    missing = [name for name in ORDER if not (ROOT / "aengine" / name).exists()]
    assert not missing


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: (imports_of(path) & MODULES.keys()) - {module, "aengine"} for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle
