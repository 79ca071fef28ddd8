"""`aengine-bench` as it is called: what it prints, the JSON and the plot, on the demo model and on servers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hang_guard import HANG_SECONDS
from server_process import server_process
from slow_cases import NOT_IN_CI

import aengine
from aengine.api.config import EngineConfig
from aengine.api.errors import InsufficientMemoryError
from aengine.bench import cli, steps
from aengine.bench.load_run import nano_vllm
from aengine.bench.step_cases import Case
from aengine.bench.steps import LeftOut, ModelSteps
from aengine.scheduler.drafters import Draft
from tools.lab.planted import PlantedDrafter
from tools.lab.speculation import HEADER

pytestmark = pytest.mark.slow

SMALL = ("--num-requests", "3", "--input-len", "4-8", "--output-len", "5", "--warmup", "1")
MEMORY = ("--kv-cache-memory", str(64 << 20))


@dataclass
class Printed:
    stdout: str
    stderr: str


def bench(*arguments: str, code: int = 0) -> Printed:
    """In this process, which has loaded torch."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            found: Any = cli.main(arguments)
        except SystemExit as ended:  # of the parser
            found = ended.code
    assert found == code, err.getvalue()
    return Printed(out.getvalue(), err.getvalue())


def test_offline_prints_a_table_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    """As a program."""
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "plot.html"))
    command = [sys.executable, "-m", "aengine.bench.cli", "offline", *MEMORY, *SMALL, *files, "--goodput", "ttft=60000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    for word in ("3 requests in", "output tok/s", "TTFT ms", "TPOT ms", "ITL ms", "E2EL ms", "goodput", "event loop lag", "cancel to free"):
        assert word in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["figures"]["summary"]["output_tokens"] == 15
    assert {"date", "command", "cpu", "python", "torch"} <= document.keys()
    assert (tmp_path / "plot.html").read_text().startswith("<!doctype html>")


def test_steps_are_set_beside_the_floor(tmp_path: Path) -> None:
    arguments = (
        "--decode",
        "1,2,300",
        "--context",
        "32",
        "--prefill",
        "16,4000",
        "--case",
        "2x1@16+1x1@90,top_p=0.9",
        "--kernels",
        "2",
        "--seconds",
        "0.05",
        "--json",
        str(tmp_path / "out.json"),
    )
    lines = bench("step", *MEMORY, *arguments).stdout.splitlines()
    assert lines[0] == "demo: bfloat16 on cpu"
    names = ["step", "decode 1 x 32", "decode 2 x 32", "prefill 1 x 16 @ 0", "decode 2 x 16 + decode 1 x 90, top_p 0.9"]
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")][1:6] == names
    assert "kernels of decode 2 x 32: the profiler sees none" in lines  # our own are not operators of torch
    assert lines[-2:] == [
        "not measured: decode 300 x 32: max_num_seqs is 256",
        "not measured: prefill 1 x 4000 @ 0: max_model_len is 2048",
    ]
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["aengine"] == aengine.__version__
    (demo,) = document["figures"]
    assert (demo["model"], demo["device"], demo["config"]["max_num_batched_tokens"]) == ("demo", "cpu", 4000)
    assert any("weights on cpu" in line for line in demo["start_up"])
    assert [entry["case"] for entry in demo["left_out"]] == ["decode 300 x 32", "prefill 1 x 4000 @ 0"]
    (decode, _, prefill, _) = (step["figures"] for step in demo["steps"])
    assert decode["weight_bytes"] < prefill["weight_bytes"] + 1
    assert prefill["flops"] > 10 * decode["flops"]
    assert decode["fraction"] > 0


def test_steps_that_exceed_a_given_budget_are_named() -> None:
    arguments = ("--decode", "8", "--context", "1000", "--prefill", "70", "--seconds", "0.05")
    budget = ("--max-num-batched-tokens", "64", "--max-num-seqs", "64", "--kv-cache-memory", str(4 << 20))
    lines = bench("step", *budget, *arguments, code=1).stdout.splitlines()
    assert lines[-2].startswith("not measured: decode 8 x 1000: it needs 504 KV pages of 16 tokens, and there are ")
    assert lines[-1] == "not measured: prefill 1 x 70 @ 0: max_num_batched_tokens is 64"


@NOT_IN_CI
def test_steps_of_several_shapes_are_measured_in_one_call(tmp_path: Path) -> None:
    arguments = ("--decode", "1", "--context", "16", "--prefill", "8", "--seconds", "0.01", "--json", str(tmp_path / "out.json"))
    done = bench("step", "--shape", "qwen3-60m", "--shape", "qwen3-60m", "--threads", "1", *MEMORY, *arguments)
    assert done.stdout.count("qwen3-60m: bfloat16 on cpu\n") == 2
    models = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert [(model["model"], model["config"]["model"], len(model["steps"])) for model in models] == [("qwen3-60m", "qwen3-60m", 2)] * 2
    assert models[0]["config"]["load_format"] == "dummy"


def test_a_shape_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(name: str, config: EngineConfig, cases: Sequence[Case], seconds: float, *others: object) -> ModelSteps:
        if name == "qwen3-8b":
            raise InsufficientMemoryError("too large")
        return ModelSteps(name, "cpu", "bfloat16", {}, [], left_out=[LeftOut("decode 1 x 2", "of no reason")])

    monkeypatch.setattr(steps, "measure_model", measure)
    path = tmp_path / "out.json"
    assert cli.main(["step", "--shape", "qwen3-8b", "--shape", "qwen3-0.6b", "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "qwen3-8b: InsufficientMemoryError: too large" in out
    assert "not measured: decode 1 x 2: of no reason" in out
    assert [entry["model"] for entry in json.loads(path.read_text())["figures"]] == ["qwen3-8b", "qwen3-0.6b"]
    assert cli.main(["step", "--shape", "qwen3-8b"]) == 1
    assert capsys.readouterr().err == "aengine-bench: too large\n"


def test_the_nano_workload_is_set_beside_its_floor(tmp_path: Path) -> None:
    arguments = ("--workload", "nano", "--num-requests", "2", "--json", str(tmp_path / "out.json"))
    done = bench("offline", *MEMORY, *arguments)
    assert "2 requests in" in done.stdout
    assert "% of it reached" in done.stdout
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    items = nano_vllm(2, 4096)
    assert figures["summary"]["output_tokens"] == sum(item.output_tokens for item in items)
    assert figures["floor"]["fraction"] == pytest.approx(figures["floor"]["seconds"] / figures["summary"]["duration"])
    assert figures["model"] == "demo"
    assert any("weights on cpu" in line for line in figures["start_up"])


def test_a_shape_needs_no_folder() -> None:
    shape = ("--shape", "qwen3-60m", "--threads", "1", *MEMORY)
    done = bench("latency", *shape, "--num-requests", "1", "--input-len", "4", "--output-len", "2", "--warmup", "1")
    assert "aengine (in process), qwen3-60m: 1 requests in" in done.stdout
    assert len(bench("startup", *shape, "--runs", "1", "--prompt-tokens", "8").stdout.splitlines()) == 2


def test_a_trace_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--output", str(tmp_path / "trace.json"), "--json", str(tmp_path / "out.json")]
    assert cli.main(["trace", "--model", "demo", *MEMORY, "--steps", "20", "--num-requests", "8", *files]) == 0
    shown = capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for part in ("take commands", "schedule", "launch", "compute", "commit", "report"):
        assert part in shown
        assert len([event for event in events if event["name"] == part]) >= 20
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"event loop", "step thread"}
    assert len(json.loads((tmp_path / "out.json").read_text())["figures"]["parts"]["commit"]) >= 20


def test_shapes_are_listed_and_exclude_a_model() -> None:
    text = bench("step", "--help").stdout
    assert "qwen3-0.6b (28 layers" in " ".join(text.split())
    assert "on CUDA 1,8,32,64,128,256" in " ".join(text.split())
    assert "not allowed with" in bench("step", "--shape", "qwen3-8b", "--model", "demo", code=2).stderr
    assert "invalid choice: 'gpt'" in bench("offline", "--shape", "gpt", code=2).stderr
    assert "--load-format: 'auto'" in bench("offline", "--shape", "qwen3-60m", "--load-format", "auto", code=1).stderr
    assert "1 to 256 requests, not 257" in bench("offline", *MEMORY, "--workload", "nano", "--num-requests", "257", code=1).stderr


def test_startup_counts_from_the_start_of_a_process(tmp_path: Path) -> None:
    arguments = ("--runs", "1", "--prompt-tokens", "8", "--json", str(tmp_path / "out.json"))
    lines = bench("startup", *MEMORY, *arguments).stdout.splitlines()
    parts = ("modules take s", "weights s", "tokenizer s")
    header = ("run", "interpreter s", "imports s", *parts, "ready s", "first token s", "exited s", "own MiB", "resident MiB", "torch")
    assert lines[0].split() == " ".join(header).split()
    assert len(lines) == 2
    (figures,) = json.loads((tmp_path / "out.json").read_text())["figures"]  # the table rounds
    assert 0 < figures["interpreter"] < figures["imported"] < figures["ready"] < figures["first_token"] < figures["exited"]
    assert 0 < figures["own_mib"] < figures["resident_mib"]
    loading = figures["ready"] - figures["imported"]
    assert all(0 < figures[part] < loading for part in ("modules", "weights", "tokenizer"))
    other = f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(0.1)'"
    lines = bench("startup", *MEMORY, "--runs", "2", "--prompt", "Hello world", "--beside", other).stdout.splitlines()
    assert (len(lines), lines[4]) == (8, other)
    assert lines[5].split() == ["run", "first", "output", "s", "exited", "s", "resident", "MiB"]
    first, exited, resident = map(float, lines[6].split()[1:])
    assert 0 < first <= exited - 0.1
    assert resident > 1
    failed = bench("startup", *MEMORY, "--runs", "1", "--beside", "false", code=1)
    assert "false wrote nothing" in failed.stderr


def test_serve_drives_an_aengine_server() -> None:
    with server_process() as server:
        done = bench("serve", f"grpc://{server.address}", *SMALL, "--workload", "multi-turn", "--turns", "2", "--rate", "50")
    assert "6 requests in" in done.stdout
    assert "aengine (gRPC)" in done.stdout


@pytest.mark.slow
def test_serve_drives_replicas_of_its_own(tmp_path: Path) -> None:
    load = ("--workload", "multi-turn", "--turns", "2", "--routing-policy", "round_robin")
    done = bench("serve", "--replicas", "2", *MEMORY, *SMALL, *load, "--json", str(tmp_path / "out.json"))
    assert "aengine, 2 replicas (round_robin), demo: 6 requests in" in done.stdout
    replicas = json.loads((tmp_path / "out.json").read_text())["figures"]["replicas"]
    assert sum(replica["completion"] for replica in replicas) == 6 * 5 + 1 * 4  # with the warm-up, whose tokens count, too
    assert all(replica["prompt"] for replica in replicas)
    assert "the busiest computed" in done.stdout


class _OpenAI(BaseHTTPRequestHandler):
    """The part of the completions API that is used: one event per token, with usage in each."""

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "some-model"}]}))

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (self.path, body["model"], body["stream"], body["ignore_eos"]) == ("/v1/completions", "some-model", True, True)
        events = [{"choices": [{"text": "x"}], "usage": {"completion_tokens": i + 1}} for i in range(body["max_tokens"])]
        self._send("text/event-stream", "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def openai_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _OpenAI) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_serve_drives_a_server_with_the_openai_api(openai_url: str) -> None:
    done = bench("serve", openai_url, *SMALL)
    assert "OpenAI API" in done.stdout
    assert "3 requests in" in done.stdout


def test_what_cannot_be_measured_is_one_line() -> None:
    for arguments in (
        ("serve", "http://127.0.0.1:1"),
        ("serve", "http://127.0.0.1:1", "--replicas", "2"),
        ("serve", "http://127.0.0.1:1", "--max-num-seqs", "2"),
        ("offline", "--model", "/nowhere"),
        ("offline", *MEMORY, "--workload", "trace"),
        ("step", "--max-num-seqs", "x"),
    ):
        done = bench(*arguments, code=1)
        assert done.stderr.startswith("aengine-bench: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_speculation_is_set_beside_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    proposed = []
    real = PlantedDrafter.propose

    def propose(self: PlantedDrafter, row: int, tokens: Any, most: int, *, by_model: bool = True) -> Draft:
        proposed.append(real(self, row, tokens, most))
        return proposed[-1]

    monkeypatch.setattr(PlantedDrafter, "propose", propose)
    path = tmp_path / "out.json"
    what = (
        "--workload",
        "planted,text,edit,json",
        "--users",
        "1",
        "--acceptance",
        "1",
        "--output-len",
        "12",
        "--rounds",
        "1",
        "--seconds",
        "0",
    )
    assert cli.main(["speculation", *MEMORY, *what, "--speculative", "ngram", "--json", str(path)]) == 0
    assert any(len(draft.token_ids) for draft in proposed), "the planted engine asks this drafter"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5].split() == " ".join(HEADER).split()
    results = json.loads(path.read_text())["figures"]["results"]
    assert [(result["case"], result["speculative"]) for result in results] == [
        (["planted", 1, 1.0], "planted"),
        (["text", 1, 0.0], "ngram"),
        (["edit", 1, 0.0], "planted"),
        (["json", 1, 0.0], "ngram"),
    ]
    for result in results:
        assert result["same"]
        assert len(result["ratios"]) == 1
        assert min(result["off"], result["on"], *result["ratios"]) > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--workload", "text,poetry"), "--workload: 'poetry' is not one of planted, random, text, edit, json"),
        (("--speculative", "guess"), "'guess' is not one of off, ngram, draft, eagle, mtp, auto"),
        (("--speculative", "draft"), "speculative 'draft' needs a draft model"),
    ],
)
def test_speculation_that_there_is_not(arguments: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["speculation", *arguments]) == 1
    assert told in capsys.readouterr().err
