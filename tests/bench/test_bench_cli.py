"""`aengine-bench` as it is called: what it prints, the JSON and the plot, on the demo model and on servers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_process import server_process

SMALL = ("--num-requests", "3", "--input-len", "4-8", "--output-len", "5", "--warmup", "1")
MEMORY = ("--kv-cache-memory", str(64 << 20))


def bench(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "aengine.bench.cli", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done


def test_offline_prints_a_table_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    done = bench(
        "offline", *MEMORY, *SMALL, "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "plot.html"), "--goodput", "ttft=60000"
    )
    for word in ("3 requests in", "output tok/s", "TTFT ms", "TPOT ms", "ITL ms", "E2EL ms", "goodput", "event loop lag", "cancel to free"):
        assert word in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["figures"]["summary"]["output_tokens"] == 15
    assert {"date", "command", "cpu", "python", "torch"} <= document.keys()
    assert (tmp_path / "plot.html").read_text().startswith("<!doctype html>")


def test_steps_are_set_beside_the_floor(tmp_path: Path) -> None:
    arguments = ("--decode", "1,2", "--context", "32", "--prefill", "16", "--seconds", "0.05", "--json", str(tmp_path / "out.json"))
    done = bench("step", *MEMORY, *arguments)
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == ["step", "decode 1 x 32", "decode 2 x 32", "prefill 1 x 16 @ 0"]
    (decode, _, prefill) = (entry["figures"] for entry in json.loads((tmp_path / "out.json").read_text())["figures"])
    assert decode["weight_bytes"] < prefill["weight_bytes"] + 1
    assert prefill["flops"] > 10 * decode["flops"]
    assert decode["fraction"] > 0


def test_startup_counts_from_the_start_of_a_process(tmp_path: Path) -> None:
    arguments = ("--runs", "1", "--prompt-tokens", "8", "--json", str(tmp_path / "out.json"))
    lines = bench("startup", *MEMORY, *arguments).stdout.splitlines()
    assert lines[0].split() == ["run", "ready", "s", "first", "token", "s", "exited", "s"]
    assert len(lines) == 2
    (figures,) = json.loads((tmp_path / "out.json").read_text())["figures"]  # the table rounds
    assert 0 < figures["ready"] < figures["first_token"] < figures["exited"]


def test_serve_drives_an_aengine_server() -> None:
    with server_process() as server:
        done = bench("serve", f"grpc://{server.address}", *SMALL, "--workload", "multi-turn", "--turns", "2", "--rate", "50")
    assert "6 requests in" in done.stdout
    assert "aengine (gRPC)" in done.stdout


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
        ("offline", "--model", "/nowhere"),
        ("offline", *MEMORY, "--workload", "trace"),
        ("step", "--max-num-seqs", "x"),
    ):
        done = bench(*arguments, code=1)
        assert done.stderr.startswith("aengine-bench: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr
