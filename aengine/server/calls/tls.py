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
        assert config.tls_cert is not None
        assert config.tls_key is not None
        self._cert = Path(config.tls_cert)
        self._key = Path(config.tls_key)
        self._client_ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
        self._seen: tuple[Fingerprint, ...] | None = None

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Raises `ConfigError` naming the option whose file is not usable. Blocks."""
        self._seen = self._fingerprints()
        cert = _read("tls_cert", self._cert)
        key = _read("tls_key", self._key)
        client_ca = None if self._client_ca is None else _read("tls_client_ca", self._client_ca)
        self._check()
        if self._fingerprints() != self._seen:
            raise ConfigError.of("tls_cert", f"{self._cert} changes while it is read")
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Raises `ConfigError`. Blocks."""
        return grpc.dynamic_ssl_server_credentials(self.load(), self._fetch, self._client_ca is not None)  # type: ignore[arg-type]

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """For each handshake, in a thread of gRPC's: what is new, None where nothing is. Must not raise."""
        try:
            if self._fingerprints() == self._seen:
                return None
            fresh = self.load()
        except ConfigError as error:
            logger.error("%s; the certificate in use stays", error)
            return None
        logger.info("read the certificate %s anew", self._cert)
        return fresh

    def _fingerprints(self) -> tuple[Fingerprint, ...] | None:
        """None where a file is missing."""
        paths = (self._cert, self._key) if self._client_ca is None else (self._cert, self._key, self._client_ca)
        try:
            return tuple(fingerprint(path) for path in paths)
        except OSError:
            return None

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigError.of(
                "tls_cert", f"{self._cert} and {self._key} are not a certificate and its private key, in PEM ({_reason(error)})"
            ) from error
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError.of("tls_client_ca", f"{self._client_ca} holds no certificate in PEM ({_reason(error)})") from error


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError.of(field, f"cannot read {path}: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)).replace("_", " ").lower()
