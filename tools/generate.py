"""Writes aengine/v1/ from protos/aengine/v1/*.proto, and src/layout.h of the CPU kernels; with --check only compares and fails on a
difference.

Owns how the code is generated. Output depends on the .proto files and the pinned compilers alone, so that the check means
something: another version is refused rather than used.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from aengine.kernels.cpu.compiler import SOURCES
from aengine.kernels.cpu.library import layout_header

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = Path("aengine/v1")
# The oldest compiler whose code runs without a warning on the protobuf 7 runtime: users need not be newer than it.
COMPILERS = {"grpcio-tools": "1.82.1", "mypy-protobuf": "5.1.0"}
INIT = '"""Generated from protos/aengine/v1 by tools/generate.py; edit those files instead."""\n'


def generate(out: Path) -> None:
    """Fill `out`/aengine/v1 with modules and stubs; modules for services exist only where the file has a service."""
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    for plugin in ("mypy", "mypy_grpc"):  # stubs that carry the comments of the schema
        outputs += [f"--plugin=protoc-gen-{plugin}={Path(sys.executable).parent / f'protoc-gen-{plugin}'}", f"--{plugin}_out=quiet:{out}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *sources], check=True)
    for source in sources:
        if not any(line.startswith("service ") for line in (PROTOS / source).read_text().splitlines()):
            for suffix in (".py", ".pyi"):
                (out / source).with_name(f"{Path(source).stem}_pb2_grpc{suffix}").unlink()
    (out / PACKAGE / "__init__.py").write_text(INIT)


def differences(fresh: Path, committed: Path) -> list[str]:
    """Names of files that are missing, left over or different in `committed`."""
    names = {path.name for folder in (fresh, committed) if folder.is_dir() for path in folder.iterdir() if path.is_file()}
    _, mismatch, errors = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
    return sorted([*mismatch, *errors])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if aengine/v1 is not what would be written")
    check = parser.parse_args().check
    wrong = [f"{name}=={version(name)} (needs {pinned})" for name, pinned in COMPILERS.items() if version(name) != pinned]
    if wrong:
        print("not the pinned compilers: " + ", ".join(wrong), file=sys.stderr)
        return 1
    layout = SOURCES / "layout.h"
    if layout.read_text("utf-8") != layout_header():
        if check:
            print(f"{layout} is out of date, run tools/generate.py", file=sys.stderr)
            return 1
        layout.write_text(layout_header(), "utf-8")
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, committed = Path(folder) / PACKAGE, ROOT / PACKAGE
        changed = differences(fresh, committed)
        if check:
            if changed:
                print(f"{PACKAGE} is out of date, run tools/generate.py: " + ", ".join(changed), file=sys.stderr)
            return 1 if changed else 0
        committed.mkdir(exist_ok=True)
        for name in changed:
            if (fresh / name).exists():
                shutil.copyfile(fresh / name, committed / name)
            else:
                (committed / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
