"""Certificates that are read from files, and channels that are replaced when the files change."""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, partialmethod
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from attention_client.errors import InvalidArgumentError, invalid

log = logging.getLogger(__name__)
ChannelT = TypeVar("ChannelT")

# How often the files are looked at, at most, and only when a call begins.
CHECK_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of an encrypted connection. Renewed files are used without a new client.

    gRPC itself takes certificates only when a channel is created. So the client looks at the files when a
    call begins, every two seconds at most. If they have changed and can be used, it creates another channel
    for this call and all later ones; calls in progress end on the old one. Until then, a lost connection is
    made again with the old files.

    Args:
        ca: Authorities that may have signed the server's certificate; None means those that gRPC finds on
            this machine or has built in.
        certificate: The client's own certificate, for servers with mutual TLS, and after it those of the
            authorities between it and the root.
        key: Its private key, without a passphrase.

    Raises:
        InvalidArgumentError: Only one of `certificate` and `key` is given.
    """

    ca: str | PathLike[str] | None = None
    certificate: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            raise invalid(missing, "the files of certificate and key, or neither", None)


def tls_files(
    ca: Path | None, certificate: Path | None, key: Path | None, *, tls: bool = False
) -> TlsFiles | None:
    """The files that a command line names; None if it asks for no encryption."""
    if not tls and ca is certificate is key is None:
        return None
    return TlsFiles(ca=ca, certificate=certificate, key=key)


def _state(files: TlsFiles) -> list[tuple[int, int, int] | None]:
    """What changes with the content of files, also if they are renewed by a change of symbolic links."""
    found: list[tuple[int, int, int] | None] = []
    for path in (files.ca, files.certificate, files.key):
        try:
            stat = None if path is None else Path(path).stat()
        except OSError:
            stat = None
        found.append(stat and (stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found


def _load(files: TlsFiles) -> grpc.ChannelCredentials:
    ca, certificate, key = (
        None if path is None else _read(path) for path in (files.ca, files.certificate, files.key)
    )
    _check(files)
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _read(path: str | PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}", field="credentials") from error


def _check(files: TlsFiles) -> None:
    """Finds files that gRPC would report only when it connects, and without their names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca is not None:
        try:
            context.load_verify_locations(files.ca)
        except OSError as error:
            message = f"{files.ca}: does not contain certificates in PEM"
            raise InvalidArgumentError(message, field="credentials") from error
    if files.certificate is not None:
        try:
            # The password of an encrypted key: without one, the terminal would be asked.
            context.load_cert_chain(files.certificate, files.key, password="")
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"{files.certificate} and {files.key} are not a certificate in PEM and its key without a"
                f" passphrase: {error}",
                field="credentials",
            ) from error


class RenewingChannel(Generic[ChannelT]):
    """What stubs need of a channel. Calls use the current one; a replaced one closes after its last call."""

    def __init__(self, files: TlsFiles, open_channel: Callable[[grpc.ChannelCredentials], ChannelT]) -> None:
        """Opens the first channel.

        Args:
            files: Certificates, which may be renewed.
            open_channel: Opens a channel with credentials.

        Raises:
            InvalidArgumentError: The files cannot be used.
        """
        self._files, self._state = files, _state(files)
        self._looked_at = time.monotonic()
        self._open = open_channel
        self._lock = threading.Lock()
        self._is_closed = False
        self._current = open_channel(_load(files))
        # The methods of the current channel, made when they are first called.
        self._methods: dict[tuple[str, str], Any] = {}
        # The number of calls in progress on each open channel.
        self._calls = {self._current: 0}

    def _method(self, kind: str, path: str, **options: Any) -> Callable[..., Any]:
        return partial(self._call, kind, path, options)

    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_stream = partialmethod(_method, "stream_stream")

    def _call(self, kind: str, path: str, options: dict[str, Any], *arguments: Any, **given: Any) -> Any:
        with self._lock:
            if not self._is_closed and (renewed := self._renewed()):
                self._replace(renewed)
            channel = self._current
            if (kind, path) not in self._methods:
                self._methods[kind, path] = getattr(channel, kind)(path, **options)
            method = self._methods[kind, path]
            self._calls[channel] += 1
        release = partial(self._release, channel)
        try:
            call = method(*arguments, **given)
        except BaseException:
            release()
            raise
        self._when_ended(call, release)
        return call

    def _renewed(self) -> grpc.ChannelCredentials | None:
        """The credentials of files that have changed. Looks at them if the last look was some time ago."""
        now = time.monotonic()
        if now - self._looked_at < CHECK_SECONDS:
            return None
        self._looked_at = now
        state = _state(self._files)
        if state == self._state:
            return None
        try:
            found = _load(self._files)
        except InvalidArgumentError as error:  # perhaps half written: looked at again
            log.warning("renewed certificates are not used: %s", error)
            return None
        if _state(self._files) != state:
            return None
        self._state = state
        return found

    def _replace(self, credentials: grpc.ChannelCredentials) -> None:
        """Opens a channel with renewed credentials for later calls."""
        replaced, self._current = self._current, self._open(credentials)
        self._methods.clear()
        self._calls[self._current] = 0
        self._close_if_idle(replaced)

    def _release(self, channel: ChannelT) -> None:
        """Records the end of a call. For any thread."""
        with self._lock:
            self._calls[channel] -= 1
            if channel is not self._current and not self._is_closed:
                self._close_if_idle(channel)

    def _close_if_idle(self, channel: ChannelT) -> None:
        if not self._calls[channel]:
            del self._calls[channel]
            self._close_soon(channel)

    def _channels(self) -> list[ChannelT]:
        """Opens no more channels; returns those that are open, to be closed."""
        with self._lock:
            self._is_closed = True
            return list(self._calls)

    def _when_ended(self, call: Any, release: Callable[[], None]) -> None:
        raise NotImplementedError

    def _close_soon(self, channel: ChannelT) -> None:
        raise NotImplementedError
