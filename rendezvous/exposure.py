"""Who can reach the service, and with what proof? The rule for binds, and bearer tokens.

A bind on loopback may be open. Any other needs TLS, so that nobody reads along, and either a client CA or tokens, so
that not everybody may publish; or it must be told ``insecure``.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import threading
import time
from typing import TYPE_CHECKING

from reshard.rendezvous.errors import AuthenticationError, InvalidRequestError, RendezvousError

if TYPE_CHECKING:
    from reshard.rendezvous.service import ServeOptions

__all__ = [
    "TokenFile",
    "check_exposure",
    "check_tls_files",
    "is_loopback",
    "read_pem",
    "split_address",
    "without_secrets",
]

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 1.0
_MAX_FILE_BYTES = 1 << 20


def check_exposure(options: ServeOptions) -> None:
    """Refuse settings that contradict each other, and binds that are more open than allowed.

    Raises
    ------
    InvalidRequestError
        Naming the setting.
    """
    host, _ = split_address("listen", options.listen)
    if bool(options.tls_cert) != bool(options.tls_key):
        raise InvalidRequestError("tls_key", "--tls-cert and --tls-key go together")
    if options.client_ca and not options.tls_cert:
        raise InvalidRequestError("client_ca", "--client-ca needs --tls-cert and --tls-key")
    if options.metrics_listen:
        split_address("metrics_listen", options.metrics_listen)
    if is_loopback(host) or options.insecure:
        return
    lacking = []
    if not options.tls_cert:
        lacking.append("TLS (--tls-cert and --tls-key)")
    if not (options.client_ca or options.token_file):
        lacking.append("a client CA or a token (--client-ca or --token-file)")
    if lacking:
        raise InvalidRequestError(
            "listen",
            f"{options.listen} can be reached from other machines and lacks {' and '.join(lacking)}; "
            "give them, bind 127.0.0.1, or say --insecure",
        )


def split_address(field: str, address: str) -> tuple[str, int]:
    """Split ``host:port`` (IPv6 hosts in brackets)."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(field, f"{address!r} is no host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise InvalidRequestError(field, f"{address!r}: write an IPv6 host in brackets")
    return host, int(port)


def without_secrets(url: str) -> str:
    """Return the URL of a store as it may be shown: user, password and parameters left out.

    Examples
    --------
    >>> without_secrets("redis://bob:hunter2@db:6379/0?password=x")
    'redis://...@db:6379/0'
    >>> without_secrets("memory")
    'memory'
    """
    return re.sub(r"//.*@", "//...@", url.partition("?")[0])


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a bind to `host`. Names other than localhost are not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_pem(path: str) -> bytes:
    """Read a certificate or key."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise RendezvousError(f"cannot read {path}: {error.strerror}") from error
    if b"-----BEGIN" not in data:
        raise RendezvousError(f"{path} holds no PEM block")
    return data


def check_tls_files(*, ca: str | None, cert: str | None, key: str | None) -> None:
    """Refuse files that gRPC would take and then answer every handshake with "connection refused" for.

    Parameters
    ----------
    ca
        PEM file of roots.
    cert, key
        PEM files of a certificate chain and its key; both or neither.

    Raises
    ------
    RendezvousError
        A file that cannot be read, roots that are none, or a key that is not the certificate's.
    """
    import ssl

    for path in (ca, cert, key):
        if path:
            read_pem(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # how strong a key must be is for gRPC's library to say
    if ca:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise RendezvousError(f"{ca} holds no certificate of an authority: {error}") from error
    if cert and key:
        try:
            context.load_cert_chain(cert, key, password="")
        except ssl.SSLError as error:
            raise RendezvousError(f"{cert} and {key} are not a certificate and its key: {error}") from error


class TokenFile:
    """Bearer tokens, one a line of a file that is read again when it changes.

    Parameters
    ----------
    path
        The file. It must hold a token when the service starts; if it vanishes later or holds none, those read last
        stay valid: to shut everybody out, put one in that nobody has.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._refresh()
        if not self._tokens:
            raise RendezvousError(f"token file {path} cannot be read or holds no token")

    def check(self, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Raise AuthenticationError unless ``authorization: Bearer TOKEN`` carries one of the tokens."""
        given = next((value for key, value in metadata if key == "authorization"), None)
        if given is None:
            raise AuthenticationError("no bearer token was given; this service wants one")
        sent = given if isinstance(given, bytes) else given.encode()
        scheme, _, token = sent.partition(b" ")
        self._refresh()
        # every token is compared, so that the time taken says nothing about which one is near
        matches = [hmac.compare_digest(token, known) for known in self._tokens]
        if scheme.lower() != b"bearer" or not any(matches):
            raise AuthenticationError("the bearer token is not one that this service knows")

    def _refresh(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._stamp is not None and now - self._looked_s < _LOOK_EVERY_S:
                return
            self._looked_s = now
            try:
                stat = os.stat(self._path)
                stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if stamp == self._stamp:
                    return
                with open(self._path, "rb") as file:
                    lines = file.read(_MAX_FILE_BYTES).splitlines()
            except OSError:
                return
            tokens = tuple(line.strip() for line in lines if line.strip())
            if tokens or self._tokens:
                self._stamp = stamp
            if tokens:
                self._tokens = tokens
            elif self._tokens:  # perhaps it is being written
                _log.warning("token file %s holds no token any more: those read last stay valid", self._path)
