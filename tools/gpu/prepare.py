"""Prepares the folder that `make gpu` takes FlashInfer from: python -m tools.gpu.prepare [--folder .fi] [--archive FILE] [NAME...]

Needs a network, PyTorch (a CPU build will do), nvcc of CUDA 13, ninja and a C++ compiler; no GPU. Downloads the wheels for the Python of
the other machine and builds the modules NAME (see `modules.py`; default: all but attention-fa3, which takes long), one after another. What
is there already is kept, so that a call that was stopped goes on. An archive has the folder and the files of the checkout that git has:
all that a first run on a GPU machine needs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tools.gpu.flashinfer_folder import ARCHITECTURE, FOLDER, build_environment, environment_of, lacks_headers, prebuilt_folder

VERSIONS = ("flashinfer-python==0.6.18.post1", "apache-tvm-ffi==0.1.15.post2")
TO_IMPORT = ("nvidia-ml-py", "requests", "urllib3", "idna", "certifi", "charset-normalizer", "tqdm", "packaging", "filelock", "numpy")
HEADERS = ("nvidia-cublas", "nvidia-curand")  # of CUDA 13; norm.cu and sampling.cu include them
MODULES = ("silu", "norm", "attention", "attention-64", *(f"attention-{more}" for more in ("window", "fp8", "cap", "fp16", "256")))
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
MOST_BYTES = 60_000_000  # of an archive
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.prepare", description="Prepare FlashInfer for a machine without a network.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"(default: {FOLDER})")
    parser.add_argument("--python-version", default="3.12", help="of the other machine (default: 3.12)")
    parser.add_argument("--archive", type=Path, metavar="FILE.tar.gz", help="for the other machine: the checkout with the folder")
    parser.add_argument("names", nargs="*", default=MODULES, metavar="NAME", help=f"modules to build (default: {' '.join(MODULES)})")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    scratch = ROOT / "build" / "flashinfer"
    site, headers = scratch / "site", scratch / "headers" / "nvidia" / "cu13" / "include"
    target = ["--python-version", options.python_version, "--implementation", "cp", *(f"--platform={one}" for one in PLATFORMS)]
    _pip("download", "--only-binary=:all:", *target, "--dest", str(folder / "whl"), *VERSIONS)
    if not (site / "flashinfer").exists():
        _pip("install", "--target", str(site), *VERSIONS, *TO_IMPORT)
    environment = {
        **environment_of(site, ROOT, os.environ),
        **build_environment(scratch, headers),
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
        "FLASHINFER_USE_CUDA_NORM": "1",
        "MAX_JOBS": os.environ.get("MAX_JOBS", "1"),
    }
    if lacks_headers(environment) and not headers.exists():
        _pip("install", "--target", str(headers.parents[2]), *HEADERS)
        environment |= build_environment(scratch, headers)
    prebuilt_folder(site).mkdir(parents=True, exist_ok=True)
    failed = subprocess.run([sys.executable, "-m", "tools.gpu.modules", str(folder / "aot"), *options.names], env=environment).returncode
    if options.archive is not None and not failed:
        print(f"{options.archive}: {write_archive(options.archive, folder) / 1e6:.1f} MB", flush=True)
    return failed


def write_archive(archive: Path, folder: Path, root: Path = ROOT) -> int:
    """Writes what git has of the checkout `root`, as it stands there, and `folder` as `.fi`. Returns its bytes. Raises ValueError if it has
    more than MOST_BYTES, and removes it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    with tarfile.open(archive, "w:gz") as tar:
        for name in filter(None, listed):
            if (root / name).exists():
                tar.add(root / name, name)
        tar.add(folder, str(FOLDER))
    size = archive.stat().st_size
    if size > MOST_BYTES:
        archive.unlink()
        raise ValueError(f"{archive} would have {size / 1e6:.1f} MB, of at most {MOST_BYTES / 1e6:.0f}: build fewer modules into {folder}")
    return size


def _pip(command: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
