"""Replicas in a Ray cluster of this host. What the programs of `ray_scenarios` do is in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fresh_process import run_fresh
from hang_guard import HANG_SECONDS
from ray_cluster import RayCluster, processes_of, running_cluster
from slow_cases import BY_HAND

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.router.ray_placement import RayPlacement
from aengine.router.router_config import RayConfig

pytest.importorskip("ray", reason="needs ray")
SCENARIOS = Path(__file__).with_name("ray_scenarios.py")


@pytest.fixture(scope="module")
def cluster_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_cluster(tmp_path_factory.mktemp("ray") / "commands") as path:
        yield path


@pytest.fixture
def three_nodes(cluster_socket: str) -> RayCluster:
    cluster = RayCluster(cluster_socket)
    while len(cluster.nodes()) < 3:
        cluster.add_node()
    return cluster


def start(name: str, cluster_socket: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCENARIOS), name, cluster_socket]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(name: str, cluster_socket: str) -> None:
    """Fails with what the scenario wrote."""
    process = start(name, cluster_socket)
    try:
        output, _ = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert output.endswith("done\n"), output


@pytest.mark.slow
def test_a_replica_is_an_actor_and_ends_with_what_started_it(cluster_socket: str) -> None:
    run("one", cluster_socket)


@pytest.mark.parametrize("scenario", [pytest.param(name, marks=BY_HAND) for name in ("lost_node", "ranks_over_nodes", "scaling")])
def test_scenario(scenario: str, three_nodes: RayCluster, cluster_socket: str) -> None:
    run(scenario, cluster_socket)


@pytest.mark.slow
def test_nothing_is_left_of_a_program_that_is_killed(three_nodes: RayCluster, cluster_socket: str) -> None:
    program = start("forever", cluster_socket)
    assert program.stdout is not None
    output = []
    for line in program.stdout:
        output.append(line)
        if line.startswith("serves at "):
            break
    else:
        pytest.fail("".join(output))
    host, _, port = line.split()[-1].rpartition(":")
    children = [child for actor in three_nodes.actors() for child in processes_of(actor)]
    assert len(children) == 2, "a server and a rank"
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    deadline = time.monotonic() + 60
    while three_nodes.actors() or any(map(runs, children)) or answers(host, int(port)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answers(host: str, port: int) -> bool:
    """Whether anything listens there."""
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return False
    return True


def bundles(ranks_per_node: int | None = None, **fields: object) -> list[tuple[list[int], dict[str, int]]]:
    """Ranks that are placed together, and what they take."""
    placement = RayPlacement.of(EngineConfig.of("demo", **fields), RayConfig(ranks_per_node=ranks_per_node), ModuleType("ray"))
    return [(list(ranks), takes) for ranks, takes in zip(placement.bundles, placement.resources, strict=True)]


def test_ranks_of_a_stage_are_placed_together() -> None:
    assert bundles(device="cpu") == [([0], {"CPU": 1})]
    assert bundles(device="cpu", threads=6) == [([0], {"CPU": 6})]
    assert bundles(device="cpu", threads=2, tensor_parallel_size=4) == [([0, 1, 2, 3], {"CPU": 8})]
    assert bundles(device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2) == [
        ([0, 1], {"CPU": 2, "GPU": 2}),
        ([2, 3], {"CPU": 2, "GPU": 2}),
    ]
    assert bundles(2, device="cuda", tensor_parallel_size=4) == [([0, 1], {"CPU": 2, "GPU": 2}), ([2, 3], {"CPU": 2, "GPU": 2})]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cuda:1"}, "device: 'cuda:1' cannot be given with Ray, which divides the devices; 'cuda' can"),
        ({"tensor_parallel_size": 2, "local_ranks": 2}, "local_ranks: cannot be given with Ray, which places the ranks"),
        ({"ranks_per_node": 3, "tensor_parallel_size": 4}, "ranks_per_node: 3 does not divide tensor_parallel_size (4)"),
    ],
)
def test_what_ray_decides_cannot_be_given(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bundles(**{"device": "cpu", **fields})  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.slow
def test_ray_is_imported_when_it_is_needed_and_missed_in_one_sentence() -> None:
    run_fresh("""
        import asyncio, sys
        from aengine import ConfigError, EngineConfig
        from aengine.router.ray_replicas import ray_replicas
        from aengine.router.router_config import RayConfig
        assert "ray" not in sys.modules
        sys.modules["ray"] = None
        try:
            asyncio.run(anext(ray_replicas(EngineConfig(model="demo"), RayConfig(), "token")))
        except ConfigError as error:
            assert str(error) == "ray: it needs the package ray: pip install ray", error
        else:
            raise AssertionError
    """)
