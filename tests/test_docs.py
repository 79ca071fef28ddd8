"""The documents are readable and not stale: lines have at most 120 characters, links lead somewhere, tables are those of the code."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from dataclasses import Field, fields
from functools import partial
from pathlib import Path

import pytest

import aengine
from aengine import AsyncEngine, SamplingParams, StructuredOutput
from aengine.api.fields import MAX_INT32, declared_fields
from aengine.api.params import MOST_ENTRIES
from aengine.bench.cli import build_parser
from aengine.models.families import FAMILIES
from aengine.server.cli import build_parser as server_parser
from aengine.server.config.settings import GRPC, HTTP
from tools import field_tables

ROOT = Path(__file__).resolve().parents[1]

DOCUMENTS = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
MOST_CHARACTERS = 120


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """`text` without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_lines_are_short(path: str) -> None:
    """Rows of tables cannot be broken, and neither can queries (indented code) and what has no space."""
    lines = [(number, line) for number, line in enumerate(read(path).splitlines(), 1) if len(line) > MOST_CHARACTERS]
    long = [number for number, line in lines if not line.startswith(("|", "    ")) and " " in line.strip()]
    assert not long, f"{path}: lines {long} have more than {MOST_CHARACTERS} characters"


def anchors(text: str) -> set[str]:
    """The names that headings can be linked by."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_somewhere(path: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", prose(read(path))):
        link = target[0] or target[1]
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        found = (ROOT / path).parent / file if file else ROOT / path
        assert found.exists(), link
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("path", field_tables.FILES)
def test_the_tables_of_fields_are_those_of_the_code(path: str) -> None:
    text = read(f"docs/{path}")
    assert field_tables.MARKERS.search(text)
    assert field_tables.filled(text) == text, f"run {sys.executable} tools/field_tables.py"


@pytest.mark.parametrize("cls", [SamplingParams, StructuredOutput])
def test_a_default_that_is_told_is_the_default(cls: type) -> None:
    docs = field_tables.field_docs(cls)
    values = SamplingParams().with_defaults_of(SamplingParams())
    for field in fields(cls):
        words = field_tables.split_default(docs[field.name])[1]
        value = getattr(values, field.name, None)
        if words is not None and isinstance(value, float | int) and not isinstance(value, bool):
            assert f"{value:g}" in words or str(value) in words, field.name


@pytest.mark.parametrize("field", fields(SamplingParams), ids=lambda field: field.name)
def test_a_docstring_tells_the_range_that_is_checked(field: Field[object]) -> None:
    """SamplingParams' table has no column of what is accepted: its docstrings tell it, as those of the schema do."""
    doc = field_tables.field_docs(SamplingParams)[field.name]
    accepted = field_tables.accepted(SamplingParams, field.name)
    if found := re.search(r"([\[(])(.*), (.*)\]", accepted):
        low, high = found[2], found[3]
        forms = [f"{found[1]}{low}, {high}]"] if found[1] == "(" else [f"[{low}, {high}]", f"{low}..{high}"]
        if high == str(MAX_INT32):
            forms += [f">= {low}", f"{low}..max_"]
        assert any(form in doc for form in forms) or "The same" in doc, accepted
    if field.name in MOST_ENTRIES:
        assert str(MOST_ENTRIES[field.name]) in doc


def test_the_sizes_of_structured_output_are_told() -> None:
    docs = field_tables.field_docs(StructuredOutput)
    limits = {one.name: one.rule.args[0] for one in declared_fields(StructuredOutput) if isinstance(one.rule, partial)}
    assert set(limits) == {"json_schema", "regex", "choice", "grammar"}
    for name, most in limits.items():
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        assert size in docs[name]


def test_the_methods_of_the_engine_are_shown_as_they_are() -> None:
    for name, shown in re.findall(r"^(?:await )?engine\.(\w+)\((.*)\)$", read("docs/engine.md"), re.MULTILINE):
        parameters = list(inspect.signature(getattr(AsyncEngine, name)).parameters.values())[1:]
        stars = {inspect.Parameter.VAR_KEYWORD: "**"}
        words = [
            f"{stars.get(one.kind, '')}{one.name}{'' if one.default is one.empty else '=' + json.dumps(one.default).replace('[]', '()')}"
            for one in parameters
        ]
        keywords = next((i for i, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY), None)
        if keywords is not None:
            words.insert(keywords, "*")
        assert shown == ", ".join(words).replace("null", "None").replace("false", "False").replace("true", "True"), name


def test_the_options_of_a_request_and_the_errors_are_those_of_the_code() -> None:
    tables = re.findall(r"^\| `(\w+)` \|", read("docs/engine.md"), re.MULTILINE)
    options = [one.name for one in fields(aengine.RequestOptions)]
    errors = [name for name in aengine.__all__ if name.endswith("Error") and name != "AEngineError"]
    assert sorted(tables) == sorted([*options, *errors])


def test_the_times_of_steps_are_those_of_the_results() -> None:
    rows = re.findall(r"^\| (decode \d+|prefill \d+) \| (.*) \|$", read("docs/performance.md"), re.MULTILINE)
    assert len(rows) == 6
    for at, dtype in ((0, "step"), (1, "step-int8")):
        models = json.loads(read(f"docs/results/amd-epyc-2cores-{dtype}.json"))["figures"]
        for column, model in enumerate(models):
            for (label, cells), step in zip(rows, model["steps"], strict=True):
                figures = step["figures"]
                case = figures["case"]
                assert label == (f"decode {case['rows']}" if case["length"] == 1 else f"prefill {case['length']}")
                shown, fraction = re.findall(r"[\d.]+", cells.split(" | ")[2 * column + at])
                assert float(shown) == pytest.approx(figures["milliseconds"], rel=0.005, abs=0.06)
                assert float(fraction) == pytest.approx(figures["fraction"], abs=0.06)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_commands_exist(path: str) -> None:
    """Modules, targets of make, and the arguments of aengine-bench; the README's commands are run (test_readme.py)."""
    text = read(path)
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`|\$ )make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for command in re.findall(r"^`?aengine[- ]bench (.*?)(?: #.*|`.*)?$", text, re.MULTILINE):
        build_parser().parse_args(shlex.split(command))


@pytest.mark.parametrize("path", ["README.md", "docs/configuration.md", "docs/grpc.md", "docs/http.md", "docs/metrics.md"])
def test_flags_of_the_servers_exist(path: str) -> None:
    known = {option for program in (GRPC, HTTP) for action in server_parser(program)._actions for option in action.option_strings}
    shown = re.findall(r"`(?:aengine[- ](?:grpc|serve) )?(--[a-z-]+)", prose(read(path)))
    assert set(shown) <= known


def test_all_native_families_are_listed() -> None:
    lines = read("docs/models.md").split("`model_type` in config.json")[1].split("\n\n")[0].splitlines()[2:]
    listed = [name for line in lines for name in re.findall(r"[a-z]\w+", re.sub(r"\(.*?\)", "", line.split("|")[2]))]
    assert sorted(listed) == sorted(FAMILIES)


def test_no_text_installs_a_stranger() -> None:
    """The registry's "aengine" is another project: texts name the checkout, a wheel, or a dependency by its own name."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    texts = [ROOT / name for name in tracked if name.endswith((".py", ".md", ".toml", ".txt", ".yaml", "file", "Makefile"))]
    advice = re.compile(r"""pip3? install[^\n`]*["' ]aengine(\[|["' `\n]|$)""", re.MULTILINE)
    assert [str(path) for path in texts if path.is_file() and advice.search(path.read_text("utf-8"))] == []
