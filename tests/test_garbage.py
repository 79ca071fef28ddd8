from __future__ import annotations

import gc

import pytest
from fresh_process import run_fresh

from aengine.garbage import paused_collection


def test_nothing_is_collected_meanwhile_and_what_is_alive_is_old() -> None:
    run_fresh("""
        import gc
        from aengine.garbage import paused_collection
        before = gc.get_stats()
        with paused_collection():
            assert not gc.isenabled()
            made = [[] for _ in range(100_000)]
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
        from aengine.garbage import paused_collection
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
