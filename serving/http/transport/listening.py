"""The listening socket: a TCP port or a Unix socket, with TLS or without."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

from phasewise._files import read_input
from phasewise.serving.errors import ServingError
from phasewise.serving.http.transport.connections import MOST_TURNED_AWAY

BACKLOG = 2048
_UNIX_MODE = 0o660
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_MOST_UNIX_PATH_BYTES = 107  # sockaddr_un has 108, the last of them zero
_DESCRIPTORS_FOR_THE_REST = 128
"""File descriptors reserved for files, pipes and shared memory."""
_MOST_DESCRIPTORS = 1 << 20


MAX_TLS_BYTES = 1 << 20


class CannotListen(ServingError): ...


class Address(Protocol):
    """A place to listen at; leaving `with` closes it."""

    @property
    def url(self) -> str: ...

    def listen(self) -> socket.socket:
        """Start to listen. Raises CannotListen, for example if another process was faster."""
        ...

    def __enter__(self) -> Address: ...

    def __exit__(self, *_error: object) -> None: ...


class TcpAddress:
    """A bound TCP port (0: any free one). Raises CannotListen. Connections are accepted after `listen`."""

    def __init__(self, host: str, port: int, *, secure: bool = False) -> None:
        self._secure = secure
        self._listener = _bound(host, port)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._secure else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def listen(self) -> socket.socket:
        host, port = self._listener.getsockname()[:2]
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise CannotListen(_why(error, host, port)) from error
        return self._listener

    def __enter__(self) -> TcpAddress:
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()


@dataclass
class UnixAddress:
    """A Unix socket, mode 0660. A socket file that a killed server left is replaced; a socket in use, and any
    other file, is not. The socket file is removed at the end."""

    path: Path
    _listener: socket.socket | None = field(default=None, init=False)
    _inode: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Raise CannotListen if it is clear that `listen` would fail."""
        if len(os.fsencode(self.path)) > _MOST_UNIX_PATH_BYTES:
            self._refuse(f"is longer than the {_MOST_UNIX_PATH_BYTES} bytes that a socket's path may have")
        folder = self.path.parent
        if not folder.is_dir():
            self._refuse(f"cannot be made: {folder} is no directory")
        if not os.access(folder, os.W_OK | os.X_OK):
            self._refuse(f"cannot be made: {folder} is not writable")
        self._refuse_taken()

    @property
    def url(self) -> str:
        return f"unix:{self.path}"

    def listen(self) -> socket.socket:
        """Bind and listen; a socket bound earlier would look like one that a killed server left."""
        self._refuse_taken()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        umask = os.umask(0o777 & ~_UNIX_MODE)
        try:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            listener.bind(str(self.path))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            self._refuse(f"cannot be made: {error.strerror}")
        finally:
            os.umask(umask)
        self._listener, self._inode = listener, self.path.stat().st_ino
        return listener

    def __enter__(self) -> UnixAddress:
        return self

    def __exit__(self, *_error: object) -> None:
        """Remove the socket file, unless another server has replaced it."""
        if self._listener is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        self._listener.close()

    def _refuse_taken(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            self._refuse("is a file and no socket; choose another path, or remove it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                return
            except OSError as error:
                self._refuse(f"is a socket that cannot be tried: {error.strerror or error}")
        self._refuse("is in use; choose another path, or end what serves it")

    def _refuse(self, why: str) -> NoReturn:
        raise CannotListen(f"the Unix socket {self.path} {why}")


class TlsContext(ssl.SSLContext):
    """The TLS context of a server, whose certificate may be read again."""

    certificate: Path
    key: Path | None

    def read_again(self, report: Callable[[str], None]) -> None:
        """Use the files' present certificate and key for new handshakes, and report; an invalid pair changes
        nothing. May be called from any thread."""
        try:
            newer = tls_context(self.certificate, self.key)
        except (ServingError, OSError) as error:
            report(f"the TLS certificate stays as it was: {error}")
            return

        def take_newer(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            handshake.context = newer

        self.sni_callback = take_newer  # called for every handshake, also without a name
        report(f"TLS certificate read again from {self.certificate}")


def tls_context(certificate: Path, key: Path | None) -> TlsContext:
    """The TLS context for a certificate chain. Raises CannotListen, naming the file, if it cannot be used."""
    context = TlsContext(ssl.PROTOCOL_TLS_SERVER)
    context.certificate, context.key = certificate, key
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        raise CannotListen(f"the TLS key {key or certificate} has a password; give one without")

    try:
        with _in_memory(certificate) as chain, _in_memory(key) if key else nullcontext() as private:
            context.load_cert_chain(chain, private, no_password)
    except ssl.SSLError as error:
        raise CannotListen(_why_no_tls(error, certificate, key)) from error
    return context


def allowed_hosts(host: str | None, named: Sequence[str]) -> frozenset[str]:
    """Host names that a request may name on a server bound to `host` (None: a Unix socket); empty: any.
    `named`: the operator's list; `*` allows any. Without it, a server on loopback allows loopback names only,
    which protects it from web pages (DNS rebinding); the names of a server that others can reach are
    unknown."""
    if "*" in named:
        return frozenset()
    if named:
        return frozenset(named)
    return _LOOPBACK_NAMES | {host} if host is not None and is_loopback(host) else frozenset()


def is_loopback(host: str) -> bool:
    """True if a host name or address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def allow_many_connections() -> int:
    """Raise the soft limit on open files to the hard one; return the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the limit of the whole machine may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    n_open = len(os.listdir("/proc/self/fd"))
    limit = wanted if soft == resource.RLIM_INFINITY else soft
    return max(8, limit - n_open - _DESCRIPTORS_FOR_THE_REST - MOST_TURNED_AWAY)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"host {host!r} is no address of this machine: {error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise CannotListen(_why(error, host, port)) from error
    return listener


def _why(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use; choose another with --port, or end what uses it"
        case errno.EACCES:
            return f"port {port} needs privileges; choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"host {host!r} is no address of this machine; choose another with --host"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror}"


@contextmanager
def _in_memory(path: Path) -> Iterator[str]:
    """Path of a copy in memory, bounded because the file may be an endless device. Raises CannotListen."""
    try:
        content = read_input(path, MAX_TLS_BYTES)
    except OSError as error:
        raise CannotListen(f"the TLS file {path} cannot be read: {error.strerror}") from error
    with os.fdopen(os.memfd_create("phasewise-tls"), "wb") as copy:
        copy.write(content)
        copy.flush()
        yield f"/proc/self/fd/{copy.fileno()}"


def _why_no_tls(error: ssl.SSLError, certificate: Path, key: Path | None) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the TLS key {key or certificate} does not belong to the certificate {certificate}"
    where = str(certificate) if key is None else f"{certificate} or {key}"
    return f"TLS cannot be set up from {where}: one of them is not PEM, or lacks the certificate or its key"
