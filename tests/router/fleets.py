"""Engines with known outputs, each behind a server and a proxy that can be cut, and a router over them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutting_proxy import CuttingProxy
from grpc_harness import Serving, serving
from oracle_engine import OracleEngine, idle, until

from aengine import Router
from aengine.api.outputs import ReplicaState


@dataclass
class Member:
    engine: OracleEngine
    serving: Serving
    proxy: CuttingProxy

    @property
    def name(self) -> str:
        return self.proxy.address

    def stop(self) -> None:
        """As if it were killed, for the router: connections break, and none is accepted."""
        self.proxy.stop()

    async def come_back(self) -> None:
        await self.proxy.start(int(self.proxy.address.rpartition(":")[2]))

    @property
    def busy(self) -> bool:
        return not idle(self.engine)


@dataclass
class TestFleet:
    __test__ = False
    members: list[Member]
    router: Router

    async def member_of(self, request_id: str) -> Member:
        """Where a request is; waits until it is somewhere."""
        await until(lambda: any(self._has(member, request_id) for member in self.members))
        return next(member for member in self.members if self._has(member, request_id))

    def others(self, member: Member) -> list[Member]:
        return [other for other in self.members if other is not member]

    def state(self, member: Member) -> ReplicaState:
        return {replica.name: replica.state for replica in self.router.replicas()}[member.name]

    def versions(self) -> dict[str, int]:
        return {replica.name: replica.report.stats.weights_version for replica in self.router.replicas()}

    async def all_serve(self) -> None:
        await until(lambda: all(self.state(member) is ReplicaState.SERVING for member in self.members))

    @staticmethod
    def _has(member: Member, request_id: str) -> bool:
        return member.engine.request_info(request_id) is not None


@asynccontextmanager
async def fleet(count: int, *, engine: dict[str, Any] | None = None, admin: Path | None = None, **config: Any) -> AsyncIterator[TestFleet]:
    """`admin`: a directory for a token with which the router administrates the servers."""
    options: dict[str, Any] = {}
    if admin is not None:
        (admin / "admin").write_text("admin secret")
        options = {"token_file": str(admin / "admin"), "admin_token_file": str(admin / "admin"), "weights_roots": ("/",)}
        config["backend_token_file"] = str(admin / "token")
        (admin / "token").write_text("secret")
    async with AsyncExitStack() as stack:
        members = []
        for _ in range(count):
            oracle = await stack.enter_async_context(OracleEngine(**(engine or {})))
            served = await stack.enter_async_context(serving(oracle, **options))
            proxy = CuttingProxy(served.server.address)
            await proxy.start()
            stack.callback(proxy.stop)
            members.append(Member(oracle, served, proxy))
        router = Router(backends=tuple(member.name for member in members), **config)
        await stack.enter_async_context(router)
        yield TestFleet(members, router)
