"""python -m tools.gpu [FOLDER] [STAGE or PART...] [--dry-run]: parts one after another, each within its limit, and a summary.

Starts with the standard library alone. Every part is run, whatever became of the one before. Exits with 0 when all of them succeeded;
without a CUDA device it tells what each part would do, and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from tools.gpu import flashinfer_folder, outcomes
from tools.gpu.parts import KEPT_FOR_SUMMARY, STAGE_SECONDS, STAGES, Part, all_parts
from tools.gpu.running import run
from tools.gpu.summary import PartResult, summary

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "build" / "gpu"
PROBE_SECONDS = 150.0  # the first import of torch reads gigabytes
BUILD_JOBS = 6
WORKERS = 14  # of the tests: they compile more than they compute


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description="Check and measure on a CUDA device.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/results"), help="for the figures (default: docs/results)")
    known = [*STAGES, *(part.name for part in all_parts("", Path(), "", 0))]
    parser.add_argument("names", nargs="*", metavar="STAGE or PART", help=f"(default: all) {', '.join(known)}")
    parser.add_argument("--dry-run", action="store_true", help="tell what would be run, and with which limits")
    parser.add_argument("--seconds", type=float, help=f"for all of it (default: {STAGE_SECONDS:.0f} for each stage)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no {unknown[0]}; there are {', '.join(known)}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # a core would take longer than the run
    site, problem = (None, None) if options.dry_run else _unpacked()
    environment = _environment(site)
    facts = _facts(environment)
    gpu = str(facts["gpu"]).lower().replace(" ", "-") if "gpu" in facts else "gpu"
    folder: Path = options.folder.resolve()
    workers = WORKERS if find_spec("xdist") is not None else 0
    chosen = set(options.names) or set(STAGES)
    parts = [part for part in all_parts(sys.executable, folder, gpu, workers) if chosen & {part.name, part.stage}]
    seconds = options.seconds or STAGE_SECONDS * len({part.stage for part in parts})
    end = begin + seconds - KEPT_FOR_SUMMARY
    if "gpu" not in facts or options.dry_run:
        _tell(parts, problem, seconds)
        if "gpu" not in facts:
            print(f"FAILED: torch finds no CUDA device with {sys.executable}", file=sys.stderr)
        return 0 if "gpu" in facts else 1
    folder.mkdir(parents=True, exist_ok=True)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    results: list[PartResult] = []
    with (folder / f"{gpu}-log.txt").open("w") as log, _building(site, environment, log):
        for part in parts:
            results.append(_run_part(part, end, environment, log))
        problems = [text for text in (problem, facts.get("problem")) if text]
        screen = summary(facts, results, time.monotonic() - begin, problems)
        log.write(screen + "\n")
    print(screen)
    return 0 if all(result.succeeded for result in results) and not problems else 1


def _unpacked() -> tuple[Path | None, str | None]:
    """Where FlashInfer was unpacked to, if there is a folder for it; and why not, if that failed."""
    folder, site = ROOT / flashinfer_folder.FOLDER, SCRATCH / "site"
    if not folder.exists():
        return None, None
    try:
        modules = flashinfer_folder.unpack(folder, site)
    except (OSError, ValueError) as error:
        return None, f"FlashInfer in {folder}: {error}"
    print(f"FlashInfer from {folder} with {len(modules)} prebuilt modules")
    return site, None


def _environment(site: Path | None) -> dict[str, str]:
    """For all parts; what builds of FlashInfer's modules need is the same for all of them, too, since other flags mean another build."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {
        **flashinfer_folder.environment_of(site, ROOT, given),
        **flashinfer_folder.build_environment(SCRATCH),
        "AENGINE_REQUIRE_BACKENDS": "flashinfer,triton",
        "FLASHINFER_USE_CUDA_NORM": "1",
        "HF_HUB_OFFLINE": "1",
        "MAX_JOBS": str(BUILD_JOBS),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """As `tools.gpu.facts`; empty where there is no torch, or where it does not answer."""
    if find_spec("torch") is None:
        return {}
    probe = [sys.executable, "-m", "tools.gpu.facts"]
    try:
        done = subprocess.run(probe, env=environment, stdout=subprocess.PIPE, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired as error:
        print(error, file=sys.stderr)
        return {}
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}


def _tell(parts: Sequence[Part], problem: str | None, seconds: float) -> None:
    folder = ROOT / flashinfer_folder.FOLDER
    wheels, modules = (len(list(folder.glob(pattern))) for pattern in ("whl/*.whl", "aot/*/*.so"))
    held = problem or f"{wheels} wheels and {modules} prebuilt modules in {folder}"
    print(f"FlashInfer: {held}; missing modules are built beside the parts")
    for part in parts:
        print(f"{part.stage}, {part.name}: at most {part.limit:.0f} s, writes {part.figures.name}")
        for command in part.commands:
            print(f"    {' '.join(command)}")
        if part.alternative:
            print(f"    without figures once more, with {' '.join(part.alternative)}")
    print(f"all parts together at most {seconds:.0f} s: the last one has what the others leave")


@contextmanager
def _building(site: Path | None, environment: Mapping[str, str], log: IO[str]) -> Iterator[None]:
    """Builds the modules of FlashInfer that are missing, at low priority, as long as inside."""
    if site is None and find_spec("flashinfer") is None:
        yield
        return
    folder = SCRATCH / "aot" if site is None else flashinfer_folder.prebuilt_folder(site)
    command = ["nice", "-n", "19", sys.executable, "-m", "tools.gpu.modules", str(folder)]
    printed = SCRATCH / "modules.txt"
    with printed.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.write(printed.read_text(errors="replace"))


def _run_part(part: Part, end: float, environment: Mapping[str, str], log: IO[str]) -> PartResult:
    """Within its limit and before `end`."""
    begin = time.monotonic()
    deadline = min(begin + part.limit, end)
    seen = SCRATCH / f"{part.name}-tests.jsonl"
    seen.unlink(missing_ok=True)
    part.figures.unlink(missing_ok=True)
    notes: list[str] = []
    succeeded = True

    def show(line: str) -> None:
        print(line, end="", flush=True)
        log.write(line)
        log.flush()

    for command in part.commands:
        show(f"== {part.name}, {deadline - time.monotonic():.0f} s left: {' '.join(command)}\n")
        done = run(command, deadline - time.monotonic(), {**environment, outcomes.FILE: str(seen)}, show)
        if done.timed_out:
            notes.append(f"stopped after {done.seconds:.0f} s")
        elif done.code:
            notes.append(f"exit code {done.code}")
        succeeded = succeeded and done.code == 0 and not done.timed_out
    if part.alternative and not _has_figures(part.figures) and deadline - time.monotonic() > 10:
        command = (*part.commands[-1], *part.alternative)
        show(f"== {part.name} again: {' '.join(command)}\n")
        done = run(command, deadline - time.monotonic(), environment, show)
        notes.append(f"again with {' '.join(part.alternative)}: " + ("stopped" if done.timed_out else f"exit code {done.code}"))
    if part.are_tests:
        found = outcomes.read(seen)
        part.figures.write_text(json.dumps(found, indent=0) + "\n")
        if all(one["outcome"] == "skipped" for one in found):  # the device was lost, maybe
            notes.append("no test ran")
            succeeded = False
    return PartResult(part, time.monotonic() - begin, succeeded, notes)


def _has_figures(path: Path) -> bool:
    """Of `aengine-bench`: a whole file, and for steps one that has any."""
    try:
        figures = json.loads(path.read_text())["figures"]
    except (OSError, ValueError):  # none, or killed while it wrote
        return False
    return not isinstance(figures, list) or any(model.get("steps") for model in figures)


if __name__ == "__main__":
    sys.exit(main())
