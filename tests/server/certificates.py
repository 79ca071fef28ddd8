"""Certificates of an authority that exists for one test, as the files that a server is given."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass
class Files:
    """What `tls_cert`, `tls_key` and `tls_client_ca` name."""

    authority: trustme.CA
    directory: Path

    @property
    def cert(self) -> Path:
        return self.directory / "cert.pem"

    @property
    def key(self) -> Path:
        return self.directory / "key.pem"

    @property
    def client_ca(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def options(self) -> dict[str, str]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}

    def write(self, *, name: str = "localhost") -> None:
        """A new certificate of the server, whose key is not the one before. Each file is replaced at once, the key first."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1", common_name=name)
        replace(self.key, issued.private_key_pem.bytes())
        replace(self.cert, b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    def client(self, name: str | None = None, *, authority: trustme.CA | None = None) -> grpc.ChannelCredentials:
        """What a client shows who trusts the authority, and has a certificate of its own if it has a name."""
        root = self.authority.cert_pem.bytes()
        if name is None:
            return grpc.ssl_channel_credentials(root)
        issued = (authority or self.authority).issue_cert(f"{name}.example", common_name=name)
        return grpc.ssl_channel_credentials(root, issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())

    def client_of(self, *attributes: tuple[x509.ObjectIdentifier, str]) -> grpc.ChannelCredentials:
        """What a client shows whose certificate has this subject, which no authority should sign as it is."""
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.load_pem_x509_certificate(self.authority.cert_pem.bytes())
        signing = serialization.load_pem_private_key(self.authority.private_key_pem.bytes(), None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        builder = x509.CertificateBuilder(
            issuer_name=authority.subject,
            subject_name=x509.Name([x509.NameAttribute(kind, text, _validate=False) for kind, text in attributes]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=authority.not_valid_before_utc,
            not_valid_after=authority.not_valid_after_utc,
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
        certificate = builder.add_extension(issuer, critical=False).sign(signing, hashes.SHA256())
        form = serialization.Encoding.PEM
        private = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return grpc.ssl_channel_credentials(self.authority.cert_pem.bytes(), private, certificate.public_bytes(form))


def make_certificates(directory: Path) -> Files:
    files = Files(trustme.CA(), directory)
    files.write()
    files.client_ca.write_bytes(files.authority.cert_pem.bytes())
    return files


def replace(path: Path, content: bytes) -> None:
    """As deployments do: a reader sees the old file or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)
