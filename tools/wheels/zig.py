"""zig's compilers for flags as GCC and clang have them: python zig.py c++ ..; zig takes no architecture of ARM in -march."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    arguments = [word.replace("-march=armv8.2-a+", "-mcpu=generic+v8_2a+") for word in sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "ziglang", *arguments])
