"""The files of the server's certificate, its key, and whom it trusts: read and checked, and again when they change.

Knows nothing of connections; a certificate that cannot be used is never given out.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from aengine.errors import ConfigError
from aengine.server.config.options import ServerConfig
from aengine.server.core.files import Fingerprint, fingerprint

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """Certificates that can be used."""

    content: Mapping[str, bytes]  # of the files, PEM, by the options that name them
    context: ssl.SSLContext  # of a server, with the certificate, and with the authorities that sign clients' if there are


class CertificateFiles:
    """The files that a configuration with TLS names."""

    def __init__(self, config: ServerConfig) -> None:
        names = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_client_ca")}
        self._paths = {name: Path(path) for name, path in names.items() if path is not None}
        self._seen: Fingerprint = None
        self.needs_client = "tls_client_ca" in self._paths  # whether a client must have a certificate

    def load(self) -> Loaded:
        """Raises `ConfigError` naming the option whose file is not usable. Blocks."""
        self._seen = fingerprint(*self._paths.values())
        content: dict[str, bytes] = {}
        for name, path in self._paths.items():
            try:
                content[name] = path.read_bytes()
            except OSError as error:
                raise ConfigError.of(name, f"cannot read {path}: {error.strerror}") from error
        context = self._context()
        if fingerprint(*self._paths.values()) != self._seen:
            raise ConfigError.of("tls_cert", f"{self._paths['tls_cert']} changes while it is read")
        return Loaded(content, context)

    def load_if_changed(self) -> Loaded | None:
        """None if nothing changed, and if what is there now cannot be used, which is logged. Blocks."""
        if fingerprint(*self._paths.values()) == self._seen:
            return None
        try:
            fresh = self.load()
        except ConfigError as error:
            logger.error("%s; the certificate in use stays", error)
            return None
        logger.info("read the certificate %s anew", self._paths["tls_cert"])
        return fresh

    def _context(self) -> ssl.SSLContext:
        """Raises `ConfigError` for files that OpenSSL cannot use."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        cert, key, client_ca = self._paths["tls_cert"], self._paths["tls_key"], self._paths.get("tls_client_ca")
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = f"{cert} and {key} are not a certificate and its private key, in PEM ({_reason(error)})"
            raise ConfigError.of("tls_cert", reason) from error
        if client_ca is not None:
            try:
                context.load_verify_locations(client_ca)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError.of("tls_client_ca", f"{client_ca} holds no certificate in PEM ({_reason(error)})") from error
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)).replace("_", " ").lower()
