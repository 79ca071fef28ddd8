from __future__ import annotations

import asyncio
import gc

import pytest
from fresh_process import run_fresh
from hang_guard import HANG_SECONDS

from aengine.api.runtime import forget_tracebacks, paused_collection


def test_nothing_is_collected_meanwhile_and_what_is_alive_is_old() -> None:
    run_fresh("""
        import gc
        from aengine.api.runtime import paused_collection
        before = gc.get_stats()
        with paused_collection():
            assert not gc.isenabled()
            made = [[] for _ in range(110_000)]
            assert gc.get_stats() == before
            assert gc.get_count()[0] > 100_000
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        oldest = {id(thing) for thing in gc.get_objects(generation=2)}
        assert all(id(thing) in oldest for thing in made)
    """)


def test_who_collects_by_hand_goes_on_doing_so() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_frozen_stays_frozen() -> None:
    run_fresh("""
        import gc
        from aengine.api.runtime import paused_collection
        gc.freeze()
        frozen = gc.get_freeze_count()
        with paused_collection():
            pass
        assert gc.get_freeze_count() > frozen * 0.9 > 0
    """)


def test_collection_goes_on_after_an_error() -> None:
    with pytest.raises(KeyError), paused_collection():
        raise KeyError
    assert gc.isenabled()


async def _handle(error: BaseException, may_go_on: asyncio.Event, holder: list[object]) -> str:
    held = holder.pop()
    try:
        try:
            raise ValueError(held) from error
        except ValueError as second:
            raise error from second
    except RuntimeError:
        await may_go_on.wait()
        return "gone on"


def test_who_handles_an_error_goes_on_where_its_tracebacks_are_forgotten() -> None:
    async def run() -> str:
        error, may_go_on = RuntimeError("shared"), asyncio.Event()
        handling = asyncio.create_task(_handle(error, may_go_on, [object()]))
        await asyncio.sleep(0)
        forget_tracebacks(error)
        assert error.__traceback__ is None
        assert error.__cause__ is not None
        assert error.__cause__.__traceback__ is None
        may_go_on.set()
        return await handling

    assert asyncio.run(asyncio.wait_for(run(), HANG_SECONDS)) == "gone on"
