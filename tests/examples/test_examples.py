"""The scripts in examples/ run as a newcomer runs them. (grpc_client.py needs a server: it runs with the README's commands.)"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hang_guard import HANG_SECONDS
from slow_cases import NOT_IN_CI

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLES / script), *arguments], capture_output=True, text=True, timeout=HANG_SECONDS)


def run_here(script: str, *arguments: str) -> None:
    """In this process, which has imported already what takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def test_stream(capfd: pytest.CaptureFixture[str]) -> None:
    run_here("stream.py")
    text, errors = capfd.readouterr()
    assert text  # drawn without a seed: it may end early
    assert errors == ""


@pytest.mark.slow
def test_router() -> None:
    done = run("router.py")
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr


def test_adapters(capfd: pytest.CaptureFixture[str]) -> None:
    run_here("adapters.py")
    text = capfd.readouterr().out
    assert text.startswith("without: A lawyer is not lawful")
    assert "with:    A lawyer is a philosopher." in text


def test_chat(capfd: pytest.CaptureFixture[str]) -> None:
    run_here("chat.py")
    text = capfd.readouterr().out
    assert text.startswith('weather {"town"')
    assert re.search(r"'arguments': {'town': '(Bath|London|Meryton)', 'days': \d}", text)


def test_logits_processor(capfd: pytest.CaptureFixture[str]) -> None:
    run_here("logits_processor.py", "e")
    text = capfd.readouterr().out
    assert len(text) > 40
    assert "e" not in text.lower()


def test_llm(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("It is\nMy dear\n")
    run_here("llm.py", "demo", str(tmp_path / "prompts"))
    assert [line.partition(":")[0] for line in capfd.readouterr().out.splitlines()[:2]] == ["'It is'", "'My dear'"]


def test_grpo(capsys: pytest.CaptureFixture[str]) -> None:
    """What is trained on is what was sampled, in every step; the whole of it is in docs/determinism.md."""
    train = runpy.run_path(str(EXAMPLES / "grpo.py"))["main"]
    rewards, largest = train(10)
    assert (len(rewards), largest) == (10, 0.0)
    assert "max |logp_train - logp_rollout| = 0.0" in capsys.readouterr().out


def test_grpo_by_trl() -> None:
    pytest.importorskip("trl", reason="needs `pip install trl`")
    rewards, largest = runpy.run_path(str(EXAMPLES / "trl_grpo.py"))["main"](3)
    assert len(rewards) == 3
    assert largest < 1e-4


@pytest.mark.slow
@NOT_IN_CI
def test_grpo_learns() -> None:
    rewards, largest = runpy.run_path(str(EXAMPLES / "grpo.py"))["main"](45)
    assert largest == 0.0
    assert sum(rewards[-10:]) > 1.2 * sum(rewards[:10])


@pytest.mark.slow
def test_ray_serve() -> None:
    pytest.importorskip("ray.serve", reason="needs ray[serve]")
    done = run("ray_serve.py")
    assert done.returncode == 0, done.stderr
    assert any(len(line) > 80 and not line.startswith(("(", "\x1b", "INFO")) for line in done.stdout.splitlines()), done.stdout


def test_demo_streams_text_and_tells_its_speed() -> None:
    done = run("demo.py", "The morning was so fine", "--max-tokens", "20")
    assert done.returncode == 0, done.stderr
    text, _, facts = done.stdout.rpartition("\n\n")
    assert text.startswith("The morning was so fine")
    assert len(text) > 40
    found = re.fullmatch(r"\[(\d+) tokens, \d+ tok/s after the first, first token (\d+\.\d\d) s after process start\]\n", facts)
    assert found is not None, facts
    assert int(found[1]) == 20
    assert 0.1 < float(found[2]) < 60, "counted from the start of the process: importing torch alone takes longer than 0.1 s"


@pytest.mark.slow
def test_demo_gives_the_same_text_every_time() -> None:
    first, second = (run("demo.py", "--max-tokens", "12").stdout.rpartition("\n\n")[0] for _ in range(2))
    assert first == second != ""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "/no/such/model"], "demo: model directory '/no/such/model' does not exist\n"),
        (["--max-tokens", "0"], "demo: max_tokens: 0 is not in [1, 2147483647]\n"),
    ],
)
def test_demo_says_what_is_wrong_in_one_line(arguments: list[str], sentence: str) -> None:
    done = run("demo.py", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


@pytest.mark.slow
def test_demo_grpc_starts_a_server_and_streams_from_it() -> None:
    done = run("demo_grpc.py", "The morning was so fine", "--max-tokens", "20")
    assert done.returncode == 0, done.stderr
    assert re.match(r"\[server at 127\.0\.0\.1:\d+ after \d+\.\d\d s\]\n\nThe morning was so fine.{20}", done.stdout, re.DOTALL), (
        done.stdout
    )
    assert re.search(r"\n\n\[\d+ tokens, \d+ tok/s after the first, first token \d+ ms after the request\]\n", done.stdout), done.stdout
    assert done.stdout.endswith("[server ended with exit code 0]\n")
