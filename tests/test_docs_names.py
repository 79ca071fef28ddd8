"""What docs/architecture.md, docs/extending.md and docs/adding-a-model.md name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path
    for folder in ("aengine", "tests", "tools", "protos", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and not {"node_modules", "__pycache__"} & set(path.parts)
]
NAMES = {path.name for path in SOURCES}
CODE = [path for path in SOURCES if path.suffix in (".py", ".h", ".cpp", ".proto", ".sh")]
OTHERS = [ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt")]
WORDS = set(re.findall(r"[\w-]+", "\n".join(path.read_text(encoding="utf-8") for path in (*CODE, *OTHERS))))


def is_file(name: str) -> bool:
    """Whether a path of the repository, or below aengine/, or the bare name of a file in one of its folders."""
    inside = (ROOT, ROOT / "aengine", ROOT / "aengine" / "kernels" / "cpu")
    return any((folder / name).exists() for folder in inside) or name in NAMES


@pytest.mark.parametrize("document", ["architecture.md", "extending.md", "adding-a-model.md"])
def test_files_and_names_in_the_document_are_there(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    files = {name for name in quoted if re.fullmatch(r"[\w./-]+(\.(py|h|cpp|sh|json|toml|txt|md)|/)", name)}
    files |= set(re.findall(r"[\w/]+\.py\b", text))
    names = {
        word
        for name in set(quoted) - files
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", name)
        for word in name.partition("(")[0].split(".")
    }
    assert files
    assert names
    assert not [name for name in sorted(files) if not is_file(name)]
    assert not [name for name in sorted(names) if name not in WORDS]


def test_the_code_in_the_guide_is_that_of_the_repository() -> None:
    text = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    sources = [path.read_text(encoding="utf-8") for path in CODE if path.suffix == ".py"]
    assert len(blocks) >= 3
    for block in blocks:
        assert any(block in source for source in sources), block
