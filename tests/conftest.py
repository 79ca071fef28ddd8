"""One OpenMP thread for the whole run: the models here are tiny, and threads that spin for each other cost more than they bring."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, so before any test imports it
