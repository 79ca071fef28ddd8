"""Faults in the steps of the CPU kernels, which the token `TRIGGER` in a prompt sets off. Imported by other processes, too."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np

TRIGGER = 3999
VARIABLE = "PLANTED_FAULT"
released = threading.Event()
"""Ends what hangs."""


def plant(kind: str, patch: Any = setattr) -> None:
    """`kind`: raise, hang, or wrong, which computes with another token."""
    from aengine.runner.cpu.executor import CpuExecutor

    launch = CpuExecutor.launch

    def launch_with_fault(self: CpuExecutor, step: Any) -> Any:
        if TRIGGER in step.token_ids:
            if kind == "raise":
                raise RuntimeError("a planted fault")
            if kind == "hang":
                released.wait()
            step = replace(step, token_ids=np.where(step.token_ids == TRIGGER, 3998, step.token_ids).astype(np.int32))
        return launch(self, step)

    patch(CpuExecutor, "launch", launch_with_fault)


if __name__ == "__main__":
    plant(os.environ[VARIABLE])
    from aengine.terminal.replay import main

    sys.exit(main(sys.argv[1:]))
