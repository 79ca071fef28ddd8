"""Files and tables of the comparison with other engines; the engines themselves are not built here."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from aengine import LLM, SamplingParams
from tools.peers import __main__ as peers
from tools.peers.engines import Installed, LlamaSource, Package, Workload
from tools.peers.files import SHAPES, TYPES, Models, Shape, write_demo, write_random

IDS = [list(range(20, 60))]


def test_the_bundled_model_in_a_file_is_itself(tmp_path: pathlib.Path) -> None:
    write_demo("BF16", tmp_path / "demo.gguf")
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
    with LLM(str(tmp_path / "demo.gguf")) as ours, LLM("demo") as expected:
        (found,), (told,) = ours.generate(IDS, params), expected.generate(IDS, params)
    assert found.token_ids == told.token_ids
    assert [one.logprob for one in found.logprobs] == [one.logprob for one in told.logprobs]


@pytest.mark.parametrize("kind", TYPES)
def test_random_files_have_finite_logprobs(kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", Shape(2, 256, 512, 4, 2, 64, 320))
    write_random("tiny", kind, tmp_path / "tiny.gguf")
    with LLM(str(tmp_path / "tiny.gguf"), max_model_len=64) as llm:
        (found,) = llm.generate(IDS, SamplingParams(max_tokens=4, temperature=0, logprobs=0, ignore_eos=True))
    assert np.isfinite([one.logprob for one in found.logprobs]).all()


def test_a_checkpoint_is_the_file_of_its_shape(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", Shape(2, 256, 512, 4, 2, 64, 9000))
    models = Models(tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)
    found = []
    for path in (models.file("tiny", "BF16"), models.checkpoint("tiny"), models.checkpoint("tiny")):
        with LLM(str(path), max_model_len=64) as llm:
            (answer,) = llm.generate(IDS, params)
        found.append([one.logprob for one in answer.logprobs])
    assert found[0] == found[1] == found[2]


BENCHED = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     24 |    1 |    152 |    0.250 |   512.00 |    0.480 |    50.00 |    0.730 |   208.22 |
|   128 |     24 |    8 |   1216 |    2.000 |   512.00 |    1.200 |   160.00 |    3.200 |   380.00 |
"""


def test_a_built_tree_is_asked_for_rows_and_for_a_prefill(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "build-fork" / "bin" / "llama-batched-bench"
    program.parent.mkdir(parents=True)
    prefill = BENCHED.splitlines()[:4]
    program.write_text(
        f"#!/bin/sh\ncase \"$*\" in *'-npl 1,8'*) cat <<'E'\n{BENCHED}\nE\n;; *) cat <<'E'\n" + "\n".join(prefill) + "\nE\n;; esac\n"
    )
    program.chmod(0o755)
    engine = LlamaSource(tmp_path, "fork", tmp_path)
    (tmp_path / "60m-Q8_0.gguf").touch()
    work = Workload((1, 8), 128, 256, 2)
    assert engine.steps(Models(tmp_path), "60m", "Q8_0", work) == {"1": 20.0, "8": 50.0, "prefill": 250.0}


def test_an_installed_engine_is_asked_in_its_environment(tmp_path: pathlib.Path) -> None:
    """For the types that it reads; of its output the last line counts."""
    python = tmp_path / "An-engine-1.0" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho starts\ncase "$2" in *ids*) echo \'{"perplexity": 7.5}\';; *F16.gguf*) echo \'{"1": 2.0}\';; esac\n')
    python.chmod(0o755)
    engine = Installed(tmp_path, Package("An engine 1.0", "steps.py", ["engine==1.0"], {"BF16": "F16"}))
    for name in ("60m", "demo"):
        (tmp_path / f"{name}-F16.gguf").touch()
    models, work = Models(tmp_path), Workload((1,), 128, 256, 2)
    assert engine.steps(models, "60m", "BF16", work) == {"1": 2.0}
    assert engine.steps(models, "60m", "Q8_0", work) is None
    assert engine.perplexity(models, "BF16", IDS[0], 2) == 7.5


def test_the_table_has_the_best_rounds_and_the_best_peer(tmp_path: pathlib.Path) -> None:
    class Told:
        def __init__(self, name: str, *figures: float) -> None:
            self.name, self._figures = name, list(figures)

        def steps(self, models: Models, name: str, kind: str, work: Workload) -> dict[str, float] | None:
            if not self._figures:
                raise RuntimeError("no such type")
            return {"1": self._figures.pop(0)}

    engines = [Told("ours", 3.0, 2.0), Told("one", 5.0, 8.0), Told("other", 4.0, 6.0), Told("failing")]
    found = peers._best(engines, Models(tmp_path), "60m", "BF16", Workload((1,), 1, 1, 1), rounds=2)  # type: ignore[arg-type]
    assert peers._row("60m, BF16", found, ["1"]) == "| 60m, BF16 | 2.0 | 5.0 | 4.0 |  | 2.00 |"
