"""`ImageUrls`: images that clients name by URL, fetched for the hosts that the server was told of, and for no others.

Owns what may be asked of whom, so that no client makes the server ask its own network: `https` alone, one strict reading of a URL, an
address that is public, whatever names and redirects lead to. Every door goes through `resolved`.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import shown
from aengine.api.request import RemoteImage
from aengine.server.config.options import IMAGE_URL

CONNECT_SECONDS = 5.0
SECONDS = 15.0
"""Of a URL, with its redirects."""
MAX_BYTES = 20 << 20
_MAX_REDIRECTS = 3
_AT_ONCE = 8
_TRANSLATED = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))  # NAT64


class UrlRefused(Exception):
    """The argument goes on behind the name of an image."""


@dataclass(frozen=True, slots=True)
class _Place:
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> _Place:
        """Raises UrlRefused."""
        match = IMAGE_URL.fullmatch(url)
        if match is None or not 0 < int(match[2] or 443) < 65536:
            raise UrlRefused(f"has the URL {shown(url)}, which is not https://host/path in ASCII")
        return cls(match[1].lower(), int(match[2] or 443), match[3] or "/")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet, also where it stands for one of IPv4."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if any(ip in network for network in _TRANSLATED):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
    return ip.is_global and not ip.is_multicast


class ImageUrls:
    def __init__(
        self, allowed: Sequence[str] = (), context: ssl.SSLContext | None = None, is_public: Callable[[str], bool] = is_public
    ) -> None:
        """`allowed`: how URLs begin, each `https://host/` or with a port or more of a path. Raises ValueError for others. `context` and
        `is_public` are for tests."""
        try:
            self._allowed = [_Place.of(url) for url in allowed]
        except UrlRefused:
            raise ValueError("each is https://host/, or with a port or a path") from None
        self._context, self._is_public = context, is_public
        self._limiter: anyio.CapacityLimiter | None = None

    async def resolved(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages of a chat with each `RemoteImage` as the bytes that its URL has. Raises `InvalidRequestError` (prompt)."""
        found = [
            part["image"]
            for message in messages
            if isinstance(content := message.get("content"), list)
            for part in content
            if isinstance(part, Mapping) and isinstance(part.get("image"), RemoteImage)
        ]
        if not found:
            return messages
        files = dict(zip(found, await self.fetched(found), strict=True))

        def of(part: Any) -> Any:
            remote = part.get("image") if isinstance(part, Mapping) else None
            return {**part, "image": files[remote]} if isinstance(remote, RemoteImage) else part

        return [
            {**message, "content": [of(part) for part in content]} if isinstance(content := message.get("content"), list) else message
            for message in messages
        ]

    async def fetched(self, images: Sequence[Any]) -> list[Any]:
        """Images, each `RemoteImage` among them as the bytes that its URL has. Raises `InvalidRequestError` (prompt)."""
        results: list[Any] = list(images)
        refused: list[InvalidRequestError] = []

        async def fetch(number: int, remote: RemoteImage) -> None:
            try:
                results[number] = await self._fetch(remote.url)
            except UrlRefused as error:
                refused.append(InvalidRequestError.of("prompt", f"image {number} {error.args[0]}"))
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for number, image in enumerate(images):
                if isinstance(image, RemoteImage):
                    group.start_soon(fetch, number, image)
        if refused:
            raise refused[0]
        return results

    async def _fetch(self, url: str) -> bytes:
        if not self._allowed:
            raise UrlRefused("is a URL, and this server fetches none; send the image itself, or as a data: URL")
        self._limiter = self._limiter or anyio.CapacityLimiter(_AT_ONCE)
        end = time.monotonic() + SECONDS
        with anyio.move_on_after(SECONDS + 1.0):  # a name is looked up as long as that takes
            return await anyio.to_thread.run_sync(self._follow, url, end, abandon_on_cancel=True, limiter=self._limiter)
        raise UrlRefused(f"has a URL that does not answer within {SECONDS:g} seconds")

    def _follow(self, url: str, end: float) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            place = _Place.of(url)
            if not any((place.host, place.port) == (one.host, one.port) and place.path.startswith(one.path) for one in self._allowed):
                raise UrlRefused(f"has a URL of {place.host}, which is none of the hosts that images are fetched from")
            try:
                found = self._get(place, end)
            except UrlRefused:
                raise
            except TimeoutError:
                raise UrlRefused(f"has a URL that does not answer within {SECONDS:g} seconds") from None
            except (OSError, http.client.HTTPException, ValueError):
                raise UrlRefused(f"has a URL that cannot be fetched from {place.host}") from None
            if isinstance(found, bytes):
                return found
            url = found if "://" in found else f"https://{place.host}:{place.port}{found if found.startswith('/') else '/' + found}"
        raise UrlRefused(f"has a URL with more than {_MAX_REDIRECTS} redirects")

    def _get(self, place: _Place, end: float) -> bytes | str:
        """The content, or where it has moved to."""
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)}
        if not addresses or not all(map(self._is_public, addresses)):
            raise UrlRefused(f"has a URL of {place.host}, which is not on the internet")
        raw = socket.create_connection((min(addresses), place.port), timeout=min(CONNECT_SECONDS, _left(end)))
        with raw:
            context = self._context or ssl.create_default_context()
            with context.wrap_socket(raw, server_hostname=place.host) as secured:
                connection = http.client.HTTPConnection(place.host, place.port)
                connection.sock = secured
                secured.settimeout(_left(end))
                headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "aengine"}
                connection.request("GET", place.path, headers=headers)
                response = connection.getresponse()
                if response.status in (301, 302, 303, 307, 308):
                    return response.getheader("Location") or ""
                if response.status != 200:
                    raise UrlRefused(f"has a URL that {place.host} answers with status {response.status}")
                if response.getheader("Content-Encoding", "identity") != "identity":
                    raise UrlRefused(f"has a URL that {place.host} answers in an encoding that was not asked for")
                return _read(response, secured, end)


def _read(response: http.client.HTTPResponse, secured: ssl.SSLSocket, end: float) -> bytes:
    data = bytearray()
    while True:
        secured.settimeout(_left(end))
        part = response.read1(1 << 16)
        if not part:
            if response.length:
                raise http.client.IncompleteRead(bytes(data), response.length)
            return bytes(data)
        data += part
        if len(data) > MAX_BYTES:
            raise UrlRefused(f"has a URL with more than {MAX_BYTES} bytes")


def _left(end: float) -> float:
    """Seconds. Raises TimeoutError where there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
