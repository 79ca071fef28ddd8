"""`PageTiers`: columns come back as they were, whatever happens to files and processes, or not at all."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from slow_cases import slow_but

from aengine.cache import Column, PageTiers

GROUPS, PAGE_BYTES = 2, 300
COLUMN_BYTES = GROUPS * PAGE_BYTES
STATE_BYTES = 5 * PAGE_BYTES
FILE_BYTES = COLUMN_BYTES + 100  # about


def column(number: int) -> Column:
    """One whose content follows from its number, as its name does."""
    rng = np.random.default_rng(number)
    return Column(rng.bytes(16), rng.bytes(64), rng.integers(0, 256, (GROUPS, PAGE_BYTES), np.uint8))


def open_tiers(folder: pathlib.Path | None, host: int = 0, size: int = 1 << 30, identity: str = "model") -> PageTiers:
    return PageTiers(identity, host, folder, size, [COLUMN_BYTES, STATE_BYTES])


def loaded(tiers: PageTiers, numbers: range | list[int]) -> int:
    """How many of the first columns are loaded, which are right."""
    there = threading.Event()
    found = tiers.load([column(number).name for number in numbers], there.set).result()
    assert there.wait(10)
    for number, one in zip(numbers, found, strict=False):
        expected = column(number)
        assert (one.name, one.tokens, one.pages.tobytes()) == (expected.name, expected.tokens, expected.pages.tobytes())
    return len(found)


def fill(folder: pathlib.Path, numbers: range) -> list[pathlib.Path]:
    tiers = open_tiers(folder)
    for number in numbers:
        tiers.put_column(column(number))
    tiers.close()
    return [folder / "model" / (digits := column(number).name.hex())[:2] / digits[2:] for number in numbers]


def test_files_outlive_the_process(tmp_path: pathlib.Path) -> None:
    paths = fill(tmp_path, range(8))
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in paths)
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in {path.parent for path in paths} | {tmp_path / "model"})
    tiers = open_tiers(tmp_path)
    assert tiers.find([column(number).name for number in range(9)]) == 8
    assert tiers.keeps(column(3).name)
    assert not tiers.keeps(column(9).name)
    assert loaded(tiers, range(9)) == 8
    assert loaded(tiers, [9, 0]) == 0
    assert tiers.counts().loaded_tokens == 8 * 16
    tiers.close()
    others = open_tiers(tmp_path, identity="another-model")
    assert others.find([column(0).name]) == 0
    others.close()


def test_host_memory_keeps_what_was_used_last() -> None:
    tiers = open_tiers(None, host=3 * COLUMN_BYTES)
    for number in range(3):
        tiers.put_column(column(number))
    assert tiers.keeps(column(0).name)  # it is used
    tiers.put_column(column(3))
    assert [tiers.find([column(number).name]) for number in range(4)] == [1, 0, 1, 1]
    assert loaded(tiers, [0, 2, 3]) == 3
    assert tiers.counts().host_bytes == 3 * COLUMN_BYTES
    tiers.close()


def test_what_waits_to_be_written_is_there(tmp_path: pathlib.Path) -> None:
    tiers = open_tiers(tmp_path)
    for number in range(300):
        tiers.put_column(column(number))
        assert tiers.find([column(number).name]) == 1
    assert loaded(tiers, range(299, -1, -1)) == 300
    tiers.close()


def test_broken_files_are_misses(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bits flipped anywhere, ends cut off anywhere, files of others, and what is no file."""
    count = 60
    paths, rng = fill(tmp_path, range(count)), random.Random(1)
    tiers = open_tiers(tmp_path)
    for number, path in enumerate(paths):
        data = bytearray(path.read_bytes())
        match number % 5:
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                data = data[: rng.randrange(len(data))]
            case 2:
                data += b"x"
            case 3:
                data = bytearray(paths[(number + 1) % count].read_bytes() or b"?")
            case 4:
                path.unlink()
                path.mkdir()
                continue
        path.write_bytes(data)
    caplog.clear()
    assert [loaded(tiers, [number]) for number in range(count)] == [0] * count
    assert tiers.counts().broken == count * 4 // 5
    assert len(caplog.records) == count
    for number, path in enumerate(paths):
        if path.is_dir():
            path.rmdir()
        tiers.put_column(column(number))
    tiers.close()
    tiers = open_tiers(tmp_path)
    assert loaded(tiers, range(count)) == count
    tiers.close()


def test_files_give_way(tmp_path: pathlib.Path) -> None:
    limit = 20 * FILE_BYTES
    paths = fill(tmp_path, range(20))
    for number, path in enumerate(paths):
        os.utime(path, (number, number))
    tiers = open_tiers(tmp_path, size=limit)
    assert loaded(tiers, [0]) == 1  # which is now the one that was used last
    for number in range(20, 30):
        tiers.put_column(column(number))
    tiers.close()
    total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert total <= limit
    assert paths[0].exists()
    assert not paths[1].exists()


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was there is loaded; one line says that nothing is kept."""
    paths = fill(tmp_path, range(4))
    for path in paths[2:]:
        path.unlink()
        path.parent.rmdir()
        path.parent.write_bytes(b"")  # a file stands where a folder should
    tiers = open_tiers(tmp_path)
    tiers.put_column(column(2))
    tiers.close()
    assert len(caplog.records) == 1
    assert "KV is not kept in files for 30 s" in caplog.text
    tiers = open_tiers(tmp_path)
    assert loaded(tiers, range(3)) == 2
    tiers.close()


def test_a_folder_that_is_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is in use: what was there is a miss, and what comes later is kept in a new one."""
    monkeypatch.setattr("aengine.cache.tiers._RETRY_SECONDS", 0.0)
    fill(tmp_path / "kv", range(4))
    tiers = open_tiers(tmp_path / "kv")
    while not tiers.counts().disk_bytes:  # the thread looks at the folder
        pass
    shutil.rmtree(tmp_path / "kv")
    assert loaded(tiers, range(4)) == 0
    tiers.put_column(column(9))  # may fail, as long as nobody has looked
    while not (tmp_path / "kv").exists():
        pass
    tiers.put_column(column(5))
    tiers.close()
    tiers = open_tiers(tmp_path / "kv")
    assert loaded(tiers, [5]) == 1
    tiers.close()


def test_nobody_waits_for_a_thread_that_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, range(2))
    tiers = open_tiers(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("aengine.cache.tiers._parsed", lambda *given: 1 / 0)
        assert loaded(tiers, range(2)) == 0
    assert loaded(tiers, range(2)) == 2
    tiers.close()


def test_a_disk_that_is_full(tmp_path: pathlib.Path) -> None:
    """No file may become as large as a column."""
    code = f"""
import resource, sys, logging, pathlib
sys.path[:0] = {sys.path!r}
from test_tiers import column, open_tiers
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
tiers = open_tiers(pathlib.Path({str(tmp_path)!r}))
for number in range(3):
    tiers.put_column(column(number))
tiers.close()
print(tiers.find([column(0).name]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
    assert done.stderr.count("KV is not kept in files") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_processes_share_a_folder(tmp_path: pathlib.Path) -> None:
    first, second = open_tiers(tmp_path), open_tiers(tmp_path)
    first.put_column(column(1))
    first.close()
    assert second.find([column(1).name]) == 1
    assert second.find([column(2).name]) == 0
    assert loaded(second, [1]) == 1
    second.close()


@pytest.mark.parametrize("rounds", slow_but([6], [6, 60]))
def test_a_process_that_is_killed(rounds: int, tmp_path: pathlib.Path) -> None:
    """At any moment while it writes and reads. What is there afterwards is right, and nothing half is left for long."""
    code = f"""
import sys, pathlib
sys.path[:0] = {sys.path!r}
from test_tiers import column, loaded, open_tiers
tiers = open_tiers(pathlib.Path({str(tmp_path)!r}), size=100 * {FILE_BYTES})
print("begun", flush=True)
number = int(sys.argv[1])
while True:
    tiers.put_column(column(number))
    loaded(tiers, [max(number - 7, 0)])
    number += 1
    print(number, flush=True)
"""
    rng, number = random.Random(2), 0
    for _ in range(rounds):
        child = subprocess.Popen([sys.executable, "-c", code, str(number)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(rng.randrange(1, 60)):
            line = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        child.stdout.close()
        number = int((rest or [line.strip()])[-1].replace("begun", str(number)))
        tiers = open_tiers(tmp_path)
        known = [one for one in range(number + 1) if tiers.find([column(one).name])]
        assert all(loaded(tiers, [one]) for one in known)
        assert tiers.counts().broken == 0
        tiers.close()
    open_tiers(tmp_path).close()
    assert not list(tmp_path.rglob("tmp-*"))
    assert number > 0


def test_notes_count_as_what_they_say() -> None:
    """A new one of a name takes the place of the one before; memory for all of them is bounded like that for pages."""
    tiers = PageTiers("test", 10_000, None, 0, [64])
    for number in range(1000):
        tiers.put_column(Column(number.to_bytes(18, "big"), bytes(300), np.zeros(0, np.uint8)))
    assert 9_000 < tiers.counts().host_bytes <= 10_000
    for number in range(1000):
        tiers.put_column(Column(bytes([7] * 18), bytes(number), np.zeros(0, np.uint8)))
    assert tiers.counts().host_bytes <= 10_000
    (found,) = tiers.read([bytes([7] * 18)])
    assert len(found.tokens) == 999
    tiers.close()
