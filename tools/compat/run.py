"""Runs LangChain, LiteLLM, frameworks of agents, lm-eval and GuideLLM as they come, against `aengine-serve`: python -m tools.compat.run

Each has an environment of its own below build/compat/, with pinned versions, which sees the packages of the one that runs this. What they
print goes to docs/results/compat-*.txt, and how it ended into the table of docs/compatibility.md. Exits with 1 if anything failed.

lm-eval runs its tasks twice, with Transformers' model in float32 and with the server: likelihoods of ends of sentences and of whole texts,
and greedy outputs, are compared one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path("tools/compat")
MODEL = "aengine/models/demo_model"
TASKS = "ends,whole,go_on"
MAX_DIFFERENCE = 1e-3
"""Most that the log-likelihood of a text may differ from Transformers'."""
MARKERS = re.compile(r"(?<=<!-- clients -->\n\n)(.*?)(?=<!-- end of clients -->)", re.DOTALL)
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class Environment(NamedTuple):
    """Where the programs of a client are."""

    directory: Path

    def run(self, program: str, *arguments: str) -> str:
        """What it prints. Raises `subprocess.CalledProcessError`, which has the output, if its exit code is not 0."""
        command = [str(self.directory / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **OFFLINE}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        done.check_returncode()
        return done.stdout


class Client(NamedTuple):
    name: str  # the package
    requirements: str
    run: Callable[[Environment, str], tuple[str, str]]  # with the server's address -> what is said in the table, and the output


def checks_of(script: str) -> Callable[[Environment, str], tuple[str, str]]:
    """A module that runs checks, and prints each."""

    def run(environment: Environment, address: str) -> tuple[str, str]:
        output = environment.run("python", "-W", "ignore", "-m", script, address)
        lines = [line for line in output.splitlines() if line.startswith("ok ")]
        return "; ".join(line.removeprefix("ok ").strip().rpartition(": ")[0].split(": ")[0] for line in lines), output

    return run


def run_lm_eval(environment: Environment, address: str) -> tuple[str, str]:
    """Both models on the same tasks. Raises `AssertionError` if they differ."""
    models = {
        "Transformers in float32": ("hf", f"pretrained={MODEL},dtype=float32", "--device", "cpu"),
        "this server, tokenizing here": (
            "local-completions",
            f"model=demo,base_url={address}/v1/completions,tokenizer_backend=huggingface,tokenizer={MODEL}",
        ),
        "this server, which tokenizes too": ("local-completions", f"model=demo,base_url={address}/v1/completions", "--batch_size", "4"),
    }
    found, output = [], ""
    for title, (kind, arguments, *more) in models.items():
        with tempfile.TemporaryDirectory() as directory:
            flags = ["--tasks", TASKS, "--include_path", str(HERE / "tasks"), "--log_samples", "--output_path", directory]
            printed = environment.run("lm_eval", "run", "--model", kind, "--model_args", arguments, *flags, *more)
            output += f"{title}: lm_eval run --model {kind} --model_args {arguments} {' '.join(more)}\n\n"
            output += printed[printed.index("|Tasks|") :].strip() + "\n\n"
            found.append(_samples(Path(directory)))
    expected, *others = found
    largest = 0.0
    for other in others:
        assert other.keys() == expected.keys()
        for key, (value, is_greedy) in expected.items():
            if isinstance(value, str):
                assert other[key] == (value, is_greedy), f"{key}: {other[key][0]!r} is not {value!r}"
            else:
                assert other[key][1] == is_greedy, f"{key}: greedy or not"
                largest = max(largest, abs(float(other[key][0]) - value))
    assert largest <= MAX_DIFFERENCE, f"log-likelihoods differ by {largest}"
    texts = sum(isinstance(value, str) for value, _ in expected.values())
    said = f"{len(expected) - texts} log-likelihoods differ from Transformers' in float32 by {largest:.1g} at most"
    said += f", {texts} greedy outputs are equal"
    return f"local-completions: {said}; with the tokenizer of the model's files and with the server's", f"{output}{said}\n"


def _samples(directory: Path) -> dict[tuple[str, int, int], tuple[float | str, bool]]:
    """By task, document and choice: the log-likelihood and whether it is what greedy decoding gives, or the text that was generated."""
    found: dict[tuple[str, int, int], tuple[float | str, bool]] = {}
    for path in directory.glob("**/samples_*.jsonl"):
        task = path.name.removeprefix("samples_").rpartition("_")[0]
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            for choice, (response,) in enumerate(sample["resps"]):
                key = (task, sample["doc_id"], choice)
                if task == "ends":
                    found[key] = (float(response[0]), str(response[1]) == "True")
                else:
                    found[key] = (float(response) if task == "whole" else response, True)
    return found


def run_guidellm(environment: Environment, address: str) -> tuple[str, str]:
    """A short load of two kinds. Raises `AssertionError` if a request failed."""
    output, count = "", 32
    with tempfile.TemporaryDirectory() as directory:
        for profile in ("kind=concurrent,streams=4", "kind=constant,rate=8"):
            flags = {
                "--backend": f"kind=openai_http,target={address},model=demo",
                "--profile": profile,
                "--constraint": f"kind=max_requests,count={count}",
                "--tokenizer": f"kind=huggingface_auto,model={MODEL}",
                "--data": "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
            }
            results = f"{directory}/results.json"
            arguments = [part for pair in flags.items() for part in pair] + ["--disable-console-interactive"]
            output += f"guidellm run {' '.join(arguments)}\n\n"
            printed = environment.run("guidellm", "run", *arguments, "--output", "kind=console", "--output", f"kind=json,path={results}")
            output += printed[printed.index("Run Summary") - 2 : printed.index("Benchmarking complete") - 2].strip() + "\n\n"
            (benchmark,) = json.loads(Path(results).read_text())["benchmarks"]
            totals = benchmark["metrics"]["request_totals"]
            assert totals["successful"] == count, totals
    return f"chat/completions with 4 streams at a time and at 8 requests a second: {2 * count} of {2 * count} requests succeeded", output


CLIENTS = (
    Client("langchain-openai", "requirements-apps.txt", checks_of("tools.compat.langchain_checks")),
    Client("litellm", "requirements-apps.txt", checks_of("tools.compat.litellm_checks")),
    Client("openai-agents", "requirements-agents.txt", checks_of("tools.compat.agents_checks")),
    Client("lm_eval", "requirements-lm-eval.txt", run_lm_eval),
    Client("guidellm", "requirements-guidellm.txt", run_guidellm),
)


def make_environment(requirements: str, directory: Path) -> Environment:
    """With pinned packages, and those of this environment where they fit."""
    environment = Environment(directory / requirements.removesuffix(".txt"))
    if not environment.directory.is_dir():
        venv.create(environment.directory, with_pip=True)
        (library,) = environment.directory.glob("lib/python*/site-packages")
        (library / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(HERE / requirements))
    return environment


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server with the demo model in float32."""
    program = [sys.executable, "-c", "import sys; from aengine.server.cli import serve_http; sys.exit(serve_http())"]
    command = [*program, "--dtype", "float32", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process, tempfile.TemporaryFile("w") as log:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if match := re.search(r"listening on (?:http://)?(127\.0\.0\.1:\d+)", line):
                    break
                print(line, end="", file=sys.stderr)
            else:
                raise RuntimeError("the server did not start")
            reader = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)  # nobody waits for its log
            yield f"http://{match[1]}"
            process.terminate()
            reader.wait()
        finally:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", default=[client.name for client in CLIENTS], help="those to run; all by default")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "compat", help="where they are made, or are already")
    given = parser.parse_args()
    rows: dict[str, str] = {}
    failed = 0
    with serving() as address:
        for client in CLIENTS:
            if client.name not in given.clients:
                continue
            environment = make_environment(client.requirements, given.environments.resolve())
            version = environment.run(
                "python", "-c", f"import importlib.metadata; print(importlib.metadata.version({client.name!r}))"
            ).strip()
            try:
                said, output = client.run(environment, address)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                said, output = "**failed**", f"{error}\n{getattr(error, 'output', '') or ''}"
            file = f"compat-{client.name.replace('_', '-')}.txt"
            (ROOT / "docs" / "results" / file).write_text(_shown(f"{client.name} {version}\n\n{output}", environment, address))
            rows[client.name] = f"| {client.name} {version} | [{file}](results/{file}) | {said} |\n"
            print(rows[client.name], end="", flush=True)
    _write_table(rows)
    return failed != 0


def _shown(output: str, environment: Environment, address: str) -> str:
    """Without colours, and what is of this machine alone."""
    output = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output).replace(address, "http://127.0.0.1:8000")
    for path in (environment.directory, ROOT):
        output = output.replace(f"{path}/", "").replace(str(path), ".")
    return "\n".join(line.rstrip() for line in output.strip().splitlines()) + "\n"


def _write_table(rows: dict[str, str]) -> None:
    """Those of clients that did not run stay."""
    path = ROOT / "docs" / "compatibility.md"
    text = path.read_text()
    table = MARKERS.search(text)
    assert table is not None, f"{path} has no markers"
    old = {line.split()[1]: line + "\n" for line in table[0].splitlines()[2:] if line}
    every = {**old, **rows}
    written = "| client | output | what was run |\n|---|---|---|\n" + "".join(
        every[client.name] for client in CLIENTS if client.name in every
    )
    path.write_text(MARKERS.sub(lambda _: written + "\n", text, count=1))


if __name__ == "__main__":
    sys.exit(main())
