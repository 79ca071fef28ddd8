"""What the scripts that run in environments of their own print: a line for every check, and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


def run_checks(checks: list[Callable[[], object]]) -> None:
    """Calls each, and prints its docstring and what it returned; an exception is a failure. Exits with 1 if there was any."""
    failed = 0
    for check in checks:
        try:
            print(f"ok    {check.__doc__}: {check()}", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {check.__doc__}\n{traceback.format_exc()}", flush=True)
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    sys.exit(failed != 0)
