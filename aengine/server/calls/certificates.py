"""The name in a client's certificate, from what gRPC says of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from aengine.server.core.auth import CertificateName
from aengine.server.core.errors import ServiceError

_VALUE = rb"(?:[^\\,+]|\\[0-9A-Fa-f]{2}|\\[^0-9A-Fa-f])*"
_ATTRIBUTE = re.compile(rb"([^=,+\\]+)=(" + _VALUE + rb")(?:[,+]|\Z)")
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


def certificate_name(auth_context: Mapping[str, Iterable[bytes]]) -> CertificateName | None:
    """The name of the client's certificate, None without one. Raises `ServiceError` for one whose common name cannot be shown as it is.

    Core gives the common name as a C string, which ends at the first NUL of the name: `root\\0x` would be `root`. So the name is read from
    the whole subject, which core gives in the form of RFC 2253, with escapes.
    """
    for pem in auth_context.get("x509_pem_cert", ()):
        names = [name for subject in auth_context.get("x509_subject", ()) for name in _common_names(subject)]
        return CertificateName.of(names, pem)
    return None


def _common_names(subject: bytes) -> list[str]:
    names: list[str] = []
    end = 0
    while end < len(subject):
        attribute = _ATTRIBUTE.match(subject, end)
        if attribute is None:
            raise ServiceError("BAD_CREDENTIALS", "the subject of the client's certificate cannot be read")
        end = attribute.end()
        if attribute[1] == b"CN":
            names.append(_text(attribute[2]))
    return names


def _text(value: bytes) -> str:
    if value.startswith(b"#"):
        raise ServiceError("BAD_CREDENTIALS", "the common name of the client's certificate is not a text")
    raw = _ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()) if len(escape[1]) == 2 else escape[1], value)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ServiceError("BAD_CREDENTIALS", "the common name of the client's certificate is not UTF-8") from None
