"""Running code in a Python of its own, where nothing has been imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run_fresh(code: str) -> None:
    """Fails with what it wrote to stderr."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
