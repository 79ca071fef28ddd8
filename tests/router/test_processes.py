"""A router over child processes: what they have alike when one comes back, hangs, cached pages, and their end."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from children import end, pids_of_replicas
from hang_guard import HANG_SECONDS
from oracle_engine import until

from aengine import AdapterNotFoundError, ConfigError, ModelLoadError, Router, SamplingParams
from aengine.api.outputs import ReplicaState
from aengine.models.loading.hub import resolve_adapter, resolve_model

pytestmark = pytest.mark.anyio

PROMPT, GREEDY = "A lawyer is", SamplingParams(max_tokens=6, temperature=0.0)
MEMORY = 64 << 20


def serving(router: Router) -> int:
    return sum(replica.state is ReplicaState.SERVING for replica in router.replicas())


@pytest.mark.slow
async def test_what_all_have_alike_and_what_one_does(tmp_path: Path) -> None:
    adapter = shutil.copytree(resolve_adapter("demo-lora"), tmp_path / "adapter")
    weights = shutil.copytree(resolve_model("demo"), tmp_path / "weights")
    with anyio.fail_after(HANG_SECONDS):
        async with Router("demo", replicas=2, kv_cache_memory=MEMORY, hang_seconds=2.0) as router:
            assert serving(router) == 2
            plain = await router.generate(PROMPT, GREEDY)
            with pytest.raises(AdapterNotFoundError):
                await router.generate(PROMPT, GREEDY, adapter="dictionary")
            assert (await router.load_adapter("dictionary", str(adapter))).rank == 8
            assert [one.name for one in router.adapters] == ["dictionary"]
            adapted = await router.generate(PROMPT, GREEDY, adapter="dictionary")
            assert adapted.text.startswith(" a philosopher") != plain.text.startswith(" a philosopher")
            assert await router.update_weights(str(weights)) == 1

            # One is killed under a stream, and comes back with all of that.
            params = SamplingParams(seed=1, max_tokens=400, ignore_eos=True)
            known = await router.generate(PROMPT, params, adapter="dictionary")
            stream = router.stream(PROMPT, params, adapter="dictionary")
            tokens = [await stream.__anext__() for _ in range(3)]
            pids = pids_of_replicas()
            end(pids[0], signal.SIGKILL)
            await until(lambda: serving(router) == 1)
            await until(lambda: serving(router) == 2)
            tokens += [token async for token in stream]
            assert [token.token_id for token in tokens] == list(known.token_ids)
            assert {token.weights_version for token in tokens} == {1}

            # The one that comes back takes over from the other, which is stopped for longer than it may be silent.
            (other,) = set(pids) & set(pids_of_replicas())
            stream = router.stream(PROMPT, params, adapter="dictionary")
            tokens = [await stream.__anext__() for _ in range(3)]
            end(other, signal.SIGSTOP)
            await until(lambda: serving(router) == 1)
            tokens += [token async for token in stream]
            assert [token.token_id for token in tokens] == list(known.token_ids)
            assert {token.weights_version for token in tokens} == {1}
            end(other, signal.SIGCONT)
            await until(lambda: serving(router) == 2)

            # Who has begun a prompt gets it again.
            prompts = [[100 + index] * 200 for index in range(6)]
            for prompt in prompts:
                await router.generate(prompt, GREEDY)
            await until(lambda: sum(len(replica.load.prefixes) for replica in router._running().fleet.replicas.values()) >= 6 * 12)
            for prompt in prompts:
                assert (await router.generate(prompt, GREEDY)).usage.cached_prompt_tokens >= 192
            pids = pids_of_replicas()
        assert pids
        assert not pids_of_replicas()


async def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"replica \d ended with exit code 1 before it served; its last lines:(\n.*)*config.json"):
        await Router(str(tmp_path), replicas=1).start()
    assert not pids_of_replicas()


def test_bad_options_name_themselves() -> None:
    for fields, name in (
        ({}, "replicas"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 1, "page_size": 3}, "page_size"),
        ({"replicas": 1, "backends": ("a:1",)}, "backends"),
        ({"backends": ("a",)}, "backends"),
        ({"backends": ("dns:///a",)}, "backends"),
        ({"backends": ("a:1",), "page_size": 16}, "page_size"),
        ({"backends": ("a:1",), "routing_policy": "best"}, "routing_policy"),
        ({"backends": ("a:1",), "hang_seconds": 1.0}, "hang_seconds"),
        ({"backends": ("a:1",), "backend_ca": "x.pem"}, "backend_ca"),
    ):
        with pytest.raises(ConfigError) as caught:
            Router("demo", **fields)  # type: ignore[arg-type]
        assert caught.value.field == name, fields


@pytest.mark.slow
def test_children_end_with_a_parent_that_is_killed() -> None:
    program = """
        import asyncio, aengine
        async def main():
            async with aengine.Router("demo", replicas=1, kv_cache_memory=1 << 26):
                print("ready", flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = [int(pid) for task in Path(f"/proc/{parent.pid}/task").iterdir() for pid in (task / "children").read_text().split()]
        assert children
        parent.kill()
    for pid in children:
        with suppress(ProcessLookupError), suppress(OSError):
            select.select([os.pidfd_open(pid)], [], [], 10)
    assert not any(map(_runs, children))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
