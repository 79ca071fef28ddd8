"""TLS credentials of gRPC. Connections keep the certificate that they began with."""

from __future__ import annotations

import grpc

from aengine.server.config.options import ServerConfig
from aengine.server.core.certificates import CertificateFiles, Loaded


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """Raises `ConfigError` naming the option whose file is not usable. Blocks."""
    files = CertificateFiles(config)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this for each handshake, in a thread of its own: a new configuration, None if nothing changed. Must not raise."""
        fresh = files.load_if_changed()
        return None if fresh is None else _configuration(fresh)

    first = _configuration(files.load())
    return grpc.dynamic_ssl_server_credentials(first, fetch, files.needs_client)  # type: ignore[arg-type]


def _configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    content = loaded.content
    return grpc.ssl_server_certificate_configuration([(content["tls_key"], content["tls_cert"])], content.get("tls_client_ca"))
