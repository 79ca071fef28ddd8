"""A Ray cluster on this host, in a process of its own: nodes are processes that share the host's address.

Run with the path of a socket, where it takes one command after another; it ends with its stdin.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

SMALL = {"object_store_memory": 80 << 20}


class RayCluster:
    """The commands."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    @property
    def address(self) -> str:
        """host:port of the head."""
        return str(self._ask("address"))

    def add_node(self) -> str:
        """With one CPU, as all have. Returns its id."""
        return str(self._ask("add"))

    def remove_node(self, node: str) -> None:
        """Kill its raylet; its actors notice that and end within seconds. Never of the head: the cluster would end with it."""
        self._ask("remove", node)

    def nodes(self) -> dict[str, list[str]]:
        """Classes of the actors that run on each node, by its id. The head, which cannot be removed, is the first."""
        nodes = self._ask("actors")
        return {node: [name.removeprefix("ray::").partition(".")[0] for name in actors.values()] for node, actors in nodes.items()}

    def actors(self) -> dict[int, str]:
        """Classes of all actors, by their process ids."""
        return {pid: name for actors in self._ask("actors").values() for pid, name in actors.items()}

    def _ask(self, *command: Any) -> Any:
        with Client(self._socket) as connection:
            connection.send(command)
            return connection.recv()


@contextmanager
def running_cluster(socket: Path) -> Iterator[str]:
    """Yields the socket for `RayCluster`."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line == "ready\n":
                break
        else:
            raise RuntimeError("the cluster did not start:\n" + "".join(seen))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield str(socket)
    finally:
        process.stdin.close()
        process.wait(60)


def processes_of(parent: int) -> dict[int, str]:
    """What the processes call themselves that `parent` has started and that have not ended, by their ids."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, its_parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != "Z":
                found[int(stat.parent.name)] = (stat.parent / "cmdline").read_bytes().split(b"\0")[0].decode()
    return found


def main(socket: str) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **SMALL})
    nodes = {cluster.head_node.node_id: cluster.head_node}

    def answer(what: str, *arguments: Any) -> Any:
        match what:
            case "address":
                return cluster.address
            case "add":
                node = cluster.add_node(num_cpus=1, **SMALL)
                nodes[node.node_id] = node
                return node.node_id
            case "remove":
                cluster.remove_node(nodes.pop(arguments[0]), allow_graceful=False)
            case "actors":
                return {name: actors_of(node) for name, node in nodes.items()}

    def actors_of(node: Any) -> dict[int, str]:
        """By their process ids."""
        started = processes_of(node.all_processes["raylet"][0].process.pid)
        return {pid: name for pid, name in started.items() if name.startswith(("ray::ReplicaActor", "ray::FollowerActor"))}

    def end() -> None:
        sys.stdin.read()
        cluster.shutdown()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    with Listener(socket) as listener:
        print("ready", flush=True)
        while True:
            with listener.accept() as connection, suppress(EOFError):
                connection.send(answer(*connection.recv()))


if __name__ == "__main__":
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    main(sys.argv[1])
