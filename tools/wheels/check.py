"""Tries a wheel where there is no compiler: python -m tools.wheels.check dist/aengine_llm-*_x86_64.whl

Makes a root directory of this interpreter, the shared libraries that every Linux with it has, and nothing else. Installs the wheel and what
it depends on there, without a network, and runs `aengine info` and the demo. Needs `unshare` and `mount` of util-linux, but not to be root.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

COMPILERS = r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|tcc|zig|as|ld)(-[\d.]+)?"
LIBRARIES = (  # of the system, of glibc and of GCC; OpenMP is what torch brings
    *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2"),
    *("libstdc++.so.6", "libgcc_s.so.1"),
)


def check(wheel: pathlib.Path, demo: pathlib.Path) -> None:
    """Raises RuntimeError where the wheel does not install or the demo does not run with prebuilt kernels."""
    with tempfile.TemporaryDirectory(prefix="bare-root-") as name:
        root = pathlib.Path(name)
        _fill(root)
        download = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(root / "wheels"))
        subprocess.run([*download, "--constraint", "constraints.txt", str(wheel)], check=True)
        python = str(pathlib.Path(sys.executable).resolve())
        _run(root, python, "-m", "venv", "/venv")
        _run(root, "/venv/bin/pip", "install", "--quiet", "--no-index", "--find-links=/wheels", f"/wheels/{wheel.name}")
        found = [
            str(path) for path in root.rglob("*") if re.fullmatch(COMPILERS, path.name) and os.access(path, os.X_OK) and path.is_file()
        ]
        if found:
            raise RuntimeError(f"there is a compiler: {', '.join(found)}")
        shutil.copy(demo, root / "demo.py")
        print(_run(root, "/venv/bin/aengine"))
        told = _run(root, "/venv/bin/aengine", "info")
        print(told)
        if not re.search(r"^CPU kernels +level \w+, prebuilt$", told, re.MULTILINE):
            raise RuntimeError("the kernels are not the prebuilt ones")
        print(_run(root, "/venv/bin/python", "/demo.py"))


def _fill(root: pathlib.Path) -> None:
    interpreter = pathlib.Path(sys.executable).resolve()
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    shutil.copytree(stdlib, _inside(root, stdlib), ignore=shutil.ignore_patterns("site-packages", "test", "__pycache__"), symlinks=True)
    modules = [str(path) for path in stdlib.glob("lib-dynload/*.so")]
    known = subprocess.run(["ldconfig", "-p"], check=True, stdout=subprocess.PIPE, text=True, env=_with_sbin()).stdout
    named = [found[1] for name in LIBRARIES if (found := re.search(rf"{re.escape(name)} .*=> (\S+)", known))]
    needed = subprocess.run(["ldd", str(interpreter), *modules], check=True, stdout=subprocess.PIPE, text=True).stdout
    for path in {str(interpreter), *named, *re.findall(r"(/\S+) \(0x", needed)}:
        target = _inside(root, pathlib.Path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name in ("proc", "dev", "tmp", "wheels"):
        (root / name).mkdir()


def _inside(root: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    return root / path.relative_to("/")


def _run(root: pathlib.Path, *command: str) -> str:
    """What a command prints whose root directory this is. It has a network of its own, without any other host."""
    script = 'mount --rbind /proc "$0/proc" && mount --rbind /dev "$0/dev" && exec env -i HOME=/tmp PATH=/venv/bin "$CHROOT" "$0" "$@"'
    environ = _with_sbin()
    environ["CHROOT"] = shutil.which("chroot", path=environ["PATH"]) or "chroot"
    unshare = ("unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", script, str(root))
    done = subprocess.run([*unshare, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def _with_sbin() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(pathlib.Path(name), pathlib.Path("examples/demo.py"))
