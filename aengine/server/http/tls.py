"""TLS of the HTTP door: a context of Python's `ssl` whose certificate is another one as soon as its files are.

Connections keep the certificate that they began with.
"""

from __future__ import annotations

import ssl

from aengine.server.config.options import ServerConfig
from aengine.server.core.certificates import CertificateFiles


def server_context(config: ServerConfig) -> ssl.SSLContext:
    """Raises `ConfigError` naming the option whose file is not usable. Blocks."""
    files = CertificateFiles(config)

    def prepared(context: ssl.SSLContext) -> ssl.SSLContext:
        context.set_alpn_protocols(["http/1.1"])
        if files.needs_client:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    first = current = prepared(files.load().context)

    def on_handshake(handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called for each, whether or not the client names a server."""
        nonlocal current
        fresh = files.load_if_changed()
        if fresh is not None:
            current = prepared(fresh.context)
        if current is not first:
            handshake.context = current

    first.sni_callback = on_handshake
    return first
