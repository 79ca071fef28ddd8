"""The folder in which FlashInfer travels to a machine without a network: wheels in `whl`, prebuilt modules in `aot`.

Owns how it is unpacked and what building further modules needs of the environment. Uses neither pip nor FlashInfer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(".fi")
ARCHITECTURE = "9.0a"
_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
_CUDA_LIBRARIES = ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/aarch64-linux-gnu")


def unpack(folder: Path, site: Path) -> list[str]:
    """Makes the packages importable from `site`, which is made anew. Returns the names of the prebuilt modules.

    Raises ValueError for a wheel that is not for this Python.
    """
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted((folder / "whl").glob("*.whl")):
        python, abi = wheel.stem.split("-")[-3:-1]
        if not (python.startswith("py3") or abi == "abi3" or python == _TAG):
            raise ValueError(f"{wheel.name} is not for Python {sys.version_info.major}.{sys.version_info.minor}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    prebuilt = prebuilt_folder(site)
    for module in sorted((folder / "aot").glob("*/*.so")):
        (prebuilt / module.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, prebuilt / module.parent.name / module.name)
    return [path.name for path in sorted(prebuilt.glob("*"))]


def prebuilt_folder(site: Path) -> Path:
    """Where FlashInfer looks for modules first."""
    return site / "flashinfer" / "data" / "aot"


def build_environment(scratch: Path, headers: Path | None = None) -> dict[str, str]:
    """What FlashInfer's builds need where the toolkit lacks headers of cuBLAS and cuRAND, which PyTorch's own packages have, or a
    libcuda to link against. `headers`: a folder that has them; by default that of PyTorch's packages."""
    environment: dict[str, str] = {}
    if headers is None:
        headers = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "include")
    home = os.environ.get("CUDA_HOME") or _toolkit()
    if home is not None:
        environment["CUDA_HOME"] = home
    if lacks_headers(environment) and headers.exists():
        environment |= dict.fromkeys(("FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_CFLAGS"), f"-isystem {headers}")
    link = _libcuda(scratch)
    # Modules of attention name instances that their templates do not make, and no step needs: bound at once they would not load.
    environment["FLASHINFER_EXTRA_LDFLAGS"] = " ".join([*([f"-L{link}"] if link else []), "-Wl,-z,lazy"])
    return environment


def lacks_headers(environment: Mapping[str, str]) -> bool:
    home = environment.get("CUDA_HOME")
    return home is not None and not Path(home, "include", "cublasLt.h").exists()


def _toolkit() -> str | None:
    """The folder of nvcc, which on some machines is a script that calls another one."""
    for home in (Path("/usr/local/cuda"), *((Path(found).resolve().parents[1],) if (found := shutil.which("nvcc")) else ())):
        if Path(home, "bin", "nvcc").exists() and Path(home, "include", "cuda_runtime.h").exists():
            return str(home.resolve())
    return None


def _libcuda(scratch: Path) -> Path | None:
    """A folder with a libcuda.so: the driver's, or one with nothing in it but the name, since modules only name it."""
    folder = scratch / "libcuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so"
    if library.exists():
        return folder
    for place in _CUDA_LIBRARIES:
        if (driver := Path(place, "libcuda.so.1")).exists():
            library.symlink_to(driver)
            return folder
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
    done = subprocess.run(command, input="int nothing;", text=True, capture_output=True, check=False)
    return folder if done.returncode == 0 else None


def environment_of(site: Path | None, root: Path, given: Mapping[str, str]) -> dict[str, str]:
    """`given` with the packages in `site` and this checkout before what else there is."""
    paths = [*([str(site)] if site is not None else []), str(root), *([given["PYTHONPATH"]] if given.get("PYTHONPATH") else [])]
    return {**given, "PYTHONPATH": os.pathsep.join(paths)}
