"""Where the keys of JSON Web Tokens come from: a file, or a URL that a thread of its own asks."""

import ipaddress
import logging
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from attention_serving.server import thread_names
from attention_serving.server.security.errors import SecurityFileError
from attention_serving.server.security.key_set import MAX_BYTES, KeySet, read_keys
from attention_serving.server.security.watched_file import SecurityObserver, WatchedFile

log = logging.getLogger(__name__)
KEYS = "jwks"
FETCH_SECONDS = 10.0
# How long after one fetch an unknown key, or a failure, may cause the next.
PAUSE_SECONDS = 10.0
REFRESH_SECONDS = 3600.0


class KeySource(Protocol):
    """The keys as they are now."""

    @property
    def keys(self) -> KeySet | None:
        """The keys; None as long as they could not be fetched. Another object after each change."""

    def want(self) -> None:
        """A token names a key that is not there: it may be new. Returns at once. For any thread."""

    def close(self) -> None:
        """Ends the thread of the source."""


class FileKeys:
    """Keys of a file, which is read again when it changes."""

    def __init__(self, path: Path, observer: SecurityObserver, **options: Any) -> None:
        """Reads the file.

        Raises:
            SecurityFileError: The file cannot be used.
        """
        self._file = WatchedFile(KEYS, path, _read_file, observer, **options)

    @property
    def keys(self) -> KeySet | None:
        """See `KeySource`."""
        return self._file.value

    def want(self) -> None:
        """See `KeySource`. The file is looked at all the time."""

    def close(self) -> None:
        """See `KeySource`."""
        self._file.close()


class UrlKeys:
    """Keys of a URL. A thread fetches them at the start, every so often, and when an unknown key is wanted.

    If a fetch fails, the keys of the last one stay in use.
    """

    def __init__(
        self,
        url: str,
        observer: SecurityObserver,
        *,
        refresh_seconds: float = REFRESH_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """Starts the thread.

        Args:
            url: Where the keys are; https, or http on this machine.
            observer: Receives a report of every fetch.
            refresh_seconds: How often the keys are fetched.
            pause_seconds: How long after a fetch an unknown key, or a failure, may cause the next.

        Raises:
            SecurityFileError: The URL may not be used.
        """
        check_url(url)
        self.keys: KeySet | None = None
        self._data = b""
        self._url = url
        self._observer = observer
        self._refresh_seconds, self._pause_seconds = refresh_seconds, pause_seconds
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._thread = threading.Thread(target=self._run, name="jwks", daemon=True)
        self._thread.start()

    def want(self) -> None:
        """See `KeySource`."""
        self._wanted.set()

    def close(self) -> None:
        """See `KeySource`. A fetch in progress is not waited for."""
        self._closed.set()
        self._wanted.set()

    def _run(self) -> None:
        thread_names.publish()
        while not self._closed.is_set():
            self._wanted.clear()
            started = time.monotonic()
            succeeded = self._fetch()
            if succeeded:
                self._wanted.wait(self._refresh_seconds)
            self._closed.wait(max(0.0, started + self._pause_seconds - time.monotonic()))

    def _fetch(self) -> bool:
        try:
            with self._opener.open(self._url, timeout=FETCH_SECONDS) as response:
                self._take(response.read(MAX_BYTES + 1))
        except (OSError, HTTPException, ValueError, SecurityFileError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            log.warning("keys not fetched", extra={"url": shown(self._url), "reason": str(error)})
            self._observer.reloaded(KEYS, success=False)
            return False
        self._observer.reloaded(KEYS, success=True)
        return True

    def _take(self, data: bytes) -> None:
        """Replaces the keys if they have changed: tokens that were verified with the same keys stay so."""
        if data != self._data:
            self.keys, self._data = read_keys(data), data


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirection could lead to another host, or away from https."""

    def redirect_request(self, *_arguments: Any) -> None:
        """Follows none."""


def is_url(text: str) -> bool:
    """Whether a setting is a URL rather than a file."""
    return "://" in text


def check_url(url: str) -> None:
    """Checks that keys may come from a URL: whoever can change them on their way can make any token.

    Raises:
        SecurityFileError: It is neither https, nor http on this machine.
    """
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and parts.hostname and _is_loopback(parts.hostname):
        return
    raise SecurityFileError(f"{shown(url)}: must begin with https://, or with http:// and a loopback address")


def shown(url: str) -> str:
    """A URL for the log, without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_file(path: Path) -> KeySet:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SecurityFileError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return read_keys(data)
    except SecurityFileError as error:
        raise SecurityFileError(f"{path}: {error}") from None
