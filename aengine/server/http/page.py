"""The chat page: one file without outside parts, and the policy under which its own script and style run and nothing else does."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from aengine.server.http.exchange import Exchange

FILE = Path(__file__).parent / "static" / "index.html"


class ChatPage:
    """Answers a request with the page. It holds nothing of the server, so it is for everyone; it asks its user for a token when the API
    does."""

    def __init__(self) -> None:
        self._page = FILE.read_bytes()
        self._etag = f'"{sha256(self._page).hexdigest()[:32]}"'
        policy = (
            f"default-src 'none'; script-src {_hashes(self._page, b'script')}; style-src {_hashes(self._page, b'style')}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._headers = (
            (b"content-security-policy", policy.encode()),
            (b"cache-control", b"no-cache"),  # a browser may keep it, and asks each time whether it is still the same
            (b"etag", self._etag.encode()),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
        )

    async def __call__(self, exchange: Exchange) -> None:
        known = self._etag in ", ".join(exchange.headers.get("if-none-match", ()))
        page, status = (b"", 304) if known else (self._page, 200)
        await exchange.respond(page, status=status, content_type=b"text/html; charset=utf-8", headers=self._headers)


def _hashes(page: bytes, tag: bytes) -> str:
    """The sources of a Content-Security-Policy for the elements `tag`: base64 of the SHA-256 of their texts (CSP Level 3, 2.3)."""
    texts: list[bytes] = re.findall(b"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(text).digest()).decode()}'" for text in texts)
