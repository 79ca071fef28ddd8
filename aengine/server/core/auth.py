"""Who may call what: bearer tokens from files, and names of clients' certificates; and the files of the server's own certificate, its key,
and whom it trusts.

Owns the decision; does not know what calls do, nor how a refusal is reported. Tokens are kept and compared as digests, all of them for
every call, so that the time it takes reveals nothing about them. Files are checked when they are read, and again when they change; a
certificate that cannot be used is never given out.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from aengine.api.errors import ConfigError
from aengine.server.config.options import ServerConfig
from aengine.server.core.calls_in_flight import Caller
from aengine.server.core.errors import ServiceError

Fingerprint = tuple[tuple[int, int, int], ...] | None


def fingerprint(*paths: Path) -> Fingerprint:
    """Time of modification in nanoseconds, size and inode of each; None where one cannot be read."""
    try:
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in [path.stat() for path in paths])
    except OSError:
        return None


RELOAD_SECONDS = 1.0
"""How often, at most, the files are looked at."""
MAX_NAME_LENGTH = 256  # characters, of a common name
_TOKEN = re.compile(r"[\x21-\x7e]+")  # what headers can carry

logger = logging.getLogger(__name__)


class CertificateName(NamedTuple):
    """The name of the holder of a client's certificate."""

    name: str
    is_common_name: bool  # or else made from the certificate, because it has none or several

    @classmethod
    def of(cls, common_names: Sequence[str], certificate: bytes) -> CertificateName:
        """The name in a `certificate`, PEM, that has these common names. Raises `ServiceError` (BAD_CREDENTIALS) for a name that cannot be
        shown."""
        if len(common_names) != 1:
            return cls(f"certificate {hashlib.sha256(certificate).hexdigest()[:32]}", False)
        name = common_names[0]
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            rule = f"1 to {MAX_NAME_LENGTH} characters that can be printed"
            raise ServiceError("BAD_CREDENTIALS", f"the common name of the client's certificate is not {rule}")
        return cls(name, True)


_VALUE = rb"(?:[^\\,+]|\\[0-9A-Fa-f]{2}|\\[^0-9A-Fa-f])*"
_ATTRIBUTE = re.compile(rb"([^=,+\\]+)=(" + _VALUE + rb")(?:[,+]|\Z)")
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


def certificate_name(auth_context: Mapping[str, Iterable[bytes]]) -> CertificateName | None:
    """The name of the client's certificate, from what gRPC says of it; None without one. Raises `ServiceError` for one whose common name
    cannot be shown as it is.

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


class TokenFile:
    """The tokens of one file. `field` is the option that names it."""

    def __init__(self, field: str, path: str) -> None:
        self._field = field
        self._path = Path(path)
        self._tokens: list[tuple[str, bytes]] = []  # name and digest
        self._seen: Fingerprint = None

    def load(self, *, may_be_empty: bool = False) -> None:
        """Raises `ConfigError` where the file cannot be read or is not what it should be; the tokens known so far then stay. Blocks."""
        self._seen = fingerprint(self._path)
        try:
            tokens = _parse(self._path.read_text("utf-8"))
            if not tokens and not may_be_empty:
                raise ValueError("it holds no token")
            self._tokens = tokens
        except OSError as error:
            raise ConfigError.of(self._field, f"cannot read {self._path}: {error.strerror}") from error
        except ValueError as error:  # UnicodeDecodeError is one, and shows bytes of the file
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise ConfigError.of(self._field, f"{self._path}: {reason}") from None

    def refresh(self) -> None:
        """Load again if the file is another one than before; whatever is wrong with it is logged once. One that is empty now has taken its
        tokens from everybody. Blocks."""
        if fingerprint(self._path) == self._seen:
            return
        try:
            self.load(may_be_empty=True)
        except ConfigError as error:
            logger.error("%s; the tokens known so far stay valid", error)
        else:
            logger.info("%s: read %d tokens from %s", self._field, len(self._tokens), self._path)

    def find(self, token: str) -> str | None:
        """The name of the token, None if it is not one of the file's."""
        digest = _digest(token)
        found = None
        for name, known in self._tokens:
            if hmac.compare_digest(known, digest):
                found = name
        return found


class Authenticator:
    """Applies a configuration. To be used from one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._tokens = None if config.token_file is None else TokenFile("token_file", config.token_file)
        self._admin_tokens = None if config.admin_token_file is None else TokenFile("admin_token_file", config.admin_token_file)
        self._files = [file for file in (self._tokens, self._admin_tokens) if file is not None]
        self._admin_names = frozenset(config.admin_client_names)
        self._distinguishes = bool(self._files) or config.tls_client_ca is not None  # or else all callers are one
        self._checked = 0.0

    def load(self) -> None:
        """Read the files. Raises `ConfigError`. Blocks."""
        for file in self._files:
            file.load()
        self._checked = time.monotonic()

    async def authorize(self, authorization: Sequence[str], certificate: CertificateName | None, *, administrates: bool = False) -> Caller:
        """Who calls. `authorization`: the values of that header; `certificate`: that of the client, if it has one; `administrates`:
        whether the call is for administrators alone. Raises `ServiceError`: NO_CREDENTIALS, BAD_CREDENTIALS, ADMIN_ONLY."""
        await self._refresh()
        name, is_admin = self._name_of(authorization)
        if authorization and name is None and (administrates or self._tokens is not None):
            raise ServiceError("BAD_CREDENTIALS", "the token in 'authorization' is not accepted")
        certified = None if certificate is None else certificate.name
        if is_admin or (certificate is not None and certificate.is_common_name and certified in self._admin_names):
            return Caller(name or certified, True)
        if administrates:
            if name is None and certificate is None and self._admin_tokens is not None:
                raise ServiceError("NO_CREDENTIALS", "the call needs an administrator's token: 'authorization: Bearer <token>'")
            has_any = self._admin_tokens is not None or bool(self._admin_names)
            raise ServiceError("ADMIN_ONLY", "the call is for administrators" if has_any else "this server has no administrators")
        if self._tokens is not None and name is None:
            raise ServiceError("NO_CREDENTIALS", "the call needs a token: 'authorization: Bearer <token>'")
        return Caller(name or certified, not self._distinguishes)

    def _name_of(self, authorization: Sequence[str]) -> tuple[str | None, bool]:
        """The name of the token, and whether it is an administrator's."""
        if len(authorization) != 1:
            return None, False
        scheme, _, token = authorization[0].partition(" ")
        if scheme.lower() != "bearer":
            return None, False
        admin = self._admin_tokens.find(token) if self._admin_tokens is not None else None
        user = self._tokens.find(token) if self._tokens is not None else None
        return admin or user, admin is not None

    async def _refresh(self) -> None:
        now = time.monotonic()
        if self._files and now - self._checked >= RELOAD_SECONDS:
            self._checked = now
            for file in self._files:
                await asyncio.to_thread(file.refresh)


def _parse(text: str) -> list[tuple[str, bytes]]:
    """Raises `ValueError`, which never quotes the file."""
    tokens: list[tuple[str, bytes]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise ValueError(f"line {number} is not `name token` or `token`")
        if not _TOKEN.fullmatch(words[-1]):
            raise ValueError(f"line {number}: a token consists of visible ASCII characters")
        tokens.append((words[0] if len(words) == 2 else f"line-{number}", _digest(words[-1])))
    return tokens


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "backslashreplace")).digest()


class Loaded(NamedTuple):
    """The certificate, its key and the trusted authorities, read from files and accepted by OpenSSL."""

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
