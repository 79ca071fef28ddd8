from __future__ import annotations

import pkgutil

import pytest
from fresh_process import run_fresh

import aengine
import aengine.v1

GENERATED = sorted(module.name for module in pkgutil.iter_modules(aengine.v1.__path__, "aengine.v1."))


STATEMENTS = (
    "import aengine",
    "import aengine.v1, " + ", ".join(GENERATED),
    "import aengine; aengine.EngineConfig(model='demo'), aengine.SamplingParams(), aengine.Token, aengine.InvalidRequestError",
    "import aengine.scheduler.scheduler, aengine.cache",
    "import aengine.server.cli",
    "import aengine.chat",
    "import aengine; aengine.Router(backends=('localhost:1',))",
    "import aengine.server.app, aengine.server.grpc.door, aengine.server.process, aengine.server.http.door",
    "import aengine.client, aengine.client.cli, aengine.api.engine, aengine.wire.names; aengine.client.AsyncClient('localhost:1')",
    "import aengine.client.openai",
)


def test_light_imports_leave_torch_and_transformers_out() -> None:
    """One after the other: of what is loaded once nothing goes."""
    run_fresh(f"""
        import sys
        for statement in {STATEMENTS!r}:
            exec(statement)
            heavy = {{"torch", "transformers", "tokenizers"}} & set(sys.modules)
            assert not heavy, (statement, heavy)
    """)


def test_there_is_generated_code() -> None:
    assert {"aengine.v1.generation_pb2", "aengine.v1.generation_service_pb2_grpc"} <= set(GENERATED)


@pytest.mark.parametrize(("door", "left_out"), [("http.door", {"grpc"}), ("grpc.door", {"uvicorn", "starlette"})])
def test_a_door_of_the_server_leaves_out_what_the_other_needs(door: str, left_out: set[str]) -> None:
    run_fresh(f"""
        import sys
        import aengine.server.app, aengine.server.{door}
        assert not {left_out!r} & set(sys.modules)
    """)


def test_the_engine_resolves_at_first_use() -> None:
    run_fresh("""
        import sys
        import aengine
        assert "aengine.engine.async_engine" not in sys.modules
        assert "AsyncEngine" in dir(aengine)
        engine = aengine.AsyncEngine
        assert engine is sys.modules["aengine.engine.async_engine"].AsyncEngine
        assert aengine.AsyncEngine is engine
    """)


def test_importing_the_engine_leaves_torch_and_transformers_out() -> None:
    """The step thread imports torch, beside what warms the memory of the weights."""
    run_fresh("""
        import sys
        import aengine
        aengine.AsyncEngine("demo")
        assert not {"torch", "transformers"} & set(sys.modules)
    """)


@pytest.mark.parametrize("name", aengine.__all__)
def test_every_public_name_resolves(name: str) -> None:
    kept = {"EngineProtocol": "EngineBase", "StreamProtocol": "TokenStream"}  # names from before
    assert getattr(aengine, name).__name__ == kept.get(name, name)
    assert name in dir(aengine)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        aengine.Engine  # noqa: B018


@pytest.mark.slow
def test_requests_import_nothing() -> None:
    """In the step thread, where every stream would wait for it; but for grammars and the first chat, which have threads of their own."""
    run_fresh(
        """
        import asyncio, sys
        from aengine import AsyncEngine, SamplingParams

        async def main():
            async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
                assert "jinja2" not in sys.modules
                await engine.render_chat([{"role": "user", "content": "Call me"}])
                known = set(sys.modules)
                for fields in ({"temperature": 0}, {}, {"top_p": 0.9}, {"presence_penalty": 0.5}, {"logprobs": 2}, {"bad_words": ("the",)}):
                    await engine.generate([{"role": "user", "content": "Call me"}], SamplingParams(max_tokens=2, **fields))
                assert set(sys.modules) == known, set(sys.modules) - known

        asyncio.run(main())
        """
    )
