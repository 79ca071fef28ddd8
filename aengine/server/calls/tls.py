"""The server's certificate, its key, and whom it trusts: read from files, and again when they change.

Owns TLS credentials; a certificate that cannot be used is never served. Connections keep the certificate that they began with.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from aengine.errors import ConfigError
from aengine.server.calls.files import Fingerprint, fingerprint
from aengine.server.config.options import ServerConfig

logger = logging.getLogger(__name__)


class Certificates:
    """The files that a configuration with TLS names."""

    def __init__(self, config: ServerConfig) -> None:
        names = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_client_ca")}
        self._paths = {name: Path(path) for name, path in names.items() if path is not None}
        self._seen: Fingerprint = None

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Raises `ConfigError` naming the option whose file is not usable. Blocks."""
        self._seen = fingerprint(*self._paths.values())
        content: dict[str, bytes] = {}
        for name, path in self._paths.items():
            try:
                content[name] = path.read_bytes()
            except OSError as error:
                raise ConfigError.of(name, f"cannot read {path}: {error.strerror}") from error
        self._check()
        if fingerprint(*self._paths.values()) != self._seen:
            raise ConfigError.of("tls_cert", f"{self._paths['tls_cert']} changes while it is read")
        pairs = [(content["tls_key"], content["tls_cert"])]
        return grpc.ssl_server_certificate_configuration(pairs, content.get("tls_client_ca"))

    def credentials(self) -> grpc.ServerCredentials:
        """Raises `ConfigError`. Blocks."""
        needs_client = "tls_client_ca" in self._paths
        return grpc.dynamic_ssl_server_credentials(self.load(), self._fetch, needs_client)  # type: ignore[arg-type]

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this for each handshake, in a thread of its own: a new configuration, None if nothing changed. Must not raise."""
        if fingerprint(*self._paths.values()) == self._seen:
            return None
        try:
            fresh = self.load()
        except ConfigError as error:
            logger.error("%s; the certificate in use stays", error)
            return None
        logger.info("read the certificate %s anew", self._paths["tls_cert"])
        return fresh

    def _check(self) -> None:
        """Whether OpenSSL can use the files."""
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


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)).replace("_", " ").lower()
