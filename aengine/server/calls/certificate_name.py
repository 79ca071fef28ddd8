"""Who a client's certificate is for, from what gRPC knows of it.

Core gives the common name as a C string, which ends at the first NUL of the name: `root\\0x` would be `root`. So the name is read from the
whole subject, which core gives in the form of RFC 2253, with escapes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aengine.server.calls.errors import StatusError

MAX_NAME_LENGTH = 256  # characters
_VALUE = rb"(?:[^\\,+]|\\[0-9A-Fa-f]{2}|\\[^0-9A-Fa-f])*"
_ATTRIBUTE = re.compile(rb"([^=,+\\]+)=(" + _VALUE + rb")(?:[,+]|\Z)")
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CertificateName:
    """What the holder of a certificate is called."""

    name: str
    is_common_name: bool  # or else made from the certificate, because it has none or several


def certificate_name(auth_context: Mapping[str, Iterable[bytes]]) -> CertificateName | None:
    """Of the client's certificate, None without one. Raises `StatusError` for one whose common name cannot be shown
    as it is."""
    for pem in auth_context.get("x509_pem_cert", ()):
        names = [name for subject in auth_context.get("x509_subject", ()) for name in _common_names(subject)]
        if len(names) == 1:
            return CertificateName(names[0], True)
        return CertificateName(f"certificate {hashlib.sha256(pem).hexdigest()[:32]}", False)
    return None


def _common_names(subject: bytes) -> list[str]:
    names: list[str] = []
    end = 0
    while end < len(subject):
        attribute = _ATTRIBUTE.match(subject, end)
        if attribute is None:
            raise StatusError("BAD_CREDENTIALS", "the subject of the client's certificate cannot be read")
        end = attribute.end()
        if attribute[1] == b"CN":
            names.append(_text(attribute[2]))
    return names


def _text(value: bytes) -> str:
    if value.startswith(b"#"):
        raise StatusError("BAD_CREDENTIALS", "the common name of the client's certificate is not a text")
    raw = _ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()) if len(escape[1]) == 2 else escape[1], value)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise StatusError("BAD_CREDENTIALS", "the common name of the client's certificate is not UTF-8") from None
    if not text or len(text) > MAX_NAME_LENGTH or not text.isprintable():
        rule = f"1 to {MAX_NAME_LENGTH} characters that can be printed"
        raise StatusError("BAD_CREDENTIALS", f"the common name of the client's certificate is not {rule}")
    return text
