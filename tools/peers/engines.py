"""How each engine is installed, and how its steps are timed. Figures are milliseconds by number of rows, and those of a prefill."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass

Figures = dict[str, float]
_STEPS = pathlib.Path(__file__).with_name("llama_steps.py")


@dataclass(frozen=True)
class Workload:
    rows: tuple[int, ...]  # of decode steps
    context: int  # tokens of each row before
    prefill: int
    threads: int
    repeats: int = 24


_PERPLEXITY = """
import sys, json, math, aengine
given = json.loads(sys.argv[1])
first, *others = given["ids"]
with aengine.LLM(given["model"], threads=given["threads"]) as llm:
    found = llm.score([first], [others])
print(math.exp(-sum(each.logprob for each in found[0].tokens) / len(others)))
"""


class Ours:
    name = "aengine"

    def steps(self, model: pathlib.Path, work: Workload) -> Figures:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            lists = ["--decode", ",".join(map(str, work.rows)), "--prefill", str(work.prefill), "--context", str(work.context)]
            options = ["--max-num-batched-tokens", str(work.prefill), "--threads", str(work.threads), "--seconds", "3", "--json", file.name]
            _run([sys.executable, "-m", "aengine", "bench", "step", "--model", str(model), *lists, *options])
            steps = [step["figures"] for step in json.load(file)["figures"][0]["steps"]]
        decodes = {str(each["case"]["rows"]): each["milliseconds"] for each in steps if each["case"]["length"] == 1}
        return {**decodes, "prefill": next(each["best_milliseconds"] for each in steps if each["case"]["length"] > 1)}

    def perplexity(self, model: pathlib.Path, ids: list[int], threads: int) -> float:
        given = json.dumps({"model": str(model), "ids": ids, "threads": threads})
        return float(_run([sys.executable, "-c", _PERPLEXITY, given]).splitlines()[-1])


class LlamaPackage:
    """llama.cpp as llama-cpp-python's source distribution has it, built for this machine."""

    def __init__(self, folder: pathlib.Path, version: str) -> None:
        self.name = f"llama.cpp (llama-cpp-python {version})"
        self._python = folder / f"llama-cpp-{version}" / "bin" / "python"
        if self._python.exists():
            return
        venv.create(self._python.parents[1], with_pip=True)
        source = ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}"]
        try:
            _run([str(self._python), "-m", "pip", "install", "--quiet", *source], CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF")
        except BaseException:
            self._python.unlink()  # so that the next call begins again
            raise

    def steps(self, model: pathlib.Path, work: Workload) -> Figures:
        found: Figures = self._ask({"model": str(model), **asdict(work)})
        return found

    def perplexity(self, model: pathlib.Path, ids: list[int], threads: int) -> float:
        return self._ask({"model": str(model), "threads": threads, "ids": ids})["perplexity"]

    def _ask(self, given: dict[str, object]) -> Figures:
        found: Figures = json.loads(_run([str(self._python), str(_STEPS), json.dumps(given)]).splitlines()[-1])
        return found


class LlamaSource:
    """A source tree of llama.cpp or of a fork such as ik_llama.cpp, built for this machine."""

    def __init__(self, folder: pathlib.Path, name: str, source: pathlib.Path) -> None:
        self.name = name
        build = folder / f"build-{name}"
        self._program = build / "bin" / "llama-batched-bench"
        if not self._program.exists():
            options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
            _run(["cmake", "-S", str(source), "-B", str(build), *options])
            _run(["cmake", "--build", str(build), "--target", "llama-batched-bench", "-j", str(os.cpu_count())])

    def steps(self, model: pathlib.Path, work: Workload) -> Figures:
        decodes = self._table(model, work, work.context, work.repeats, work.rows)
        (prefill,) = self._table(model, work, work.prefill, 1, (1,))
        return {**{str(rows): 1000 * generated / work.repeats for rows, _, generated in decodes}, "prefill": 1000 * prefill[1]}

    def _table(
        self, model: pathlib.Path, work: Workload, prompt: int, tokens: int, rows: tuple[int, ...]
    ) -> list[tuple[int, float, float]]:
        """Rows, seconds of prompts and of generated tokens."""
        size = max(rows) * (prompt + tokens) + 8
        lists = ["-npp", str(prompt), "-ntg", str(tokens), "-npl", ",".join(map(str, rows))]
        options = ["-t", str(work.threads), "-c", str(size), "-b", "2048", "-ub", "512"]
        lines = [line.strip("| ").split("|") for line in _run([str(self._program), "-m", str(model), *options, *lists]).splitlines()]
        cells = [[cell.strip() for cell in line] for line in lines if len(line) > 8 and line[0].strip().isdigit()]
        return [(int(line[2]), float(line[4]), float(line[6])) for line in cells]

    def perplexity(self, model: pathlib.Path, ids: list[int], threads: int) -> float:
        return float("nan")  # its programs read texts, not ids


Engine = Ours | LlamaPackage | LlamaSource


def _run(command: list[str], **variables: str) -> str:
    """Returns what it prints. Raises RuntimeError with the end of what it said for one that fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} .. exited with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout
